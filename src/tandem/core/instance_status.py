"""Statistics of instances, and what a server reports about each instance and its store.

A statistic is declared once, as a field of ``Statistics``. The part of an instance that counts it
has a ``Statistics`` of its own, with zeros in all other fields. The instance sends the sum of its
parts, and a server reports the sum over its instances, both by ``sum_stats``. The metrics page and
its reference are generated from the declarations. So a new statistic is a field here and a line
that counts.
"""

from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_origin, get_type_hints

import msgspec

from tandem.core.wire import InstanceStage, StageChanged

__all__ = [
    "ExpertCounts",
    "InstanceRole",
    "InstanceStats",
    "InstanceStatus",
    "StatSpec",
    "StatUnit",
    "Statistics",
    "StepCosts",
    "StoreStatus",
    "list_stats",
    "sum_stats",
]

InstanceRole = Literal["unified", "prefill", "decode"]
StatUnit = Literal[
    "requests",
    "lookups",
    "blocks",
    "tokens",
    "bytes",
    "seconds",
    "states",
    "steps",
    "links",
    "experts",
    "latents",
]


class StatSpec(NamedTuple):
    """A declared statistic of instances. It is summed over instances, for each label if it has
    labels.
    """

    field: str
    """Name of the field in ``Statistics``, also used in ``/server_info``."""
    metric: str
    """Name on the metrics page, without the common prefix."""
    kind: Literal["counter", "gauge"]
    """A counter only grows; its sum includes what earlier runs of an instance have counted. A gauge
    is a present value, which is dropped when the instance ends."""
    unit: StatUnit
    label: str
    """Name of the label that distinguishes its values; empty: it has a single value."""
    help: str


class _Declared(NamedTuple):
    """The declaration of a field of ``Statistics``; a ``StatSpec`` without the field's
    name.
    """

    metric: str
    kind: Literal["counter", "gauge"]
    unit: StatUnit
    label: str
    help: str


def _counter(metric: str, unit: StatUnit, help: str, *, by: str = "") -> _Declared:
    return _Declared(metric, "counter", unit, by, help)


def _gauge(metric: str, unit: StatUnit, help: str, *, by: str = "") -> _Declared:
    return _Declared(metric, "gauge", unit, by, help)


class Statistics(msgspec.Struct, kw_only=True):
    """The statistics of an instance, or the part of them that one component counts."""

    num_running: Annotated[
        int, _gauge("num_requests_running", "requests", "Requests in the batch.")
    ] = 0
    num_waiting: Annotated[
        int, _gauge("num_requests_waiting", "requests", "Requests in the queue.")
    ] = 0
    num_loading: Annotated[
        int,
        _gauge(
            "num_requests_loading",
            "requests",
            "Requests that wait for KV from the store or another instance.",
        ),
    ] = 0
    num_held: Annotated[
        int,
        _gauge("num_requests_held", "requests", "Ended prefills whose blocks are held for a read."),
    ] = 0
    num_blocks: Annotated[int, _gauge("kv_cache_blocks", "blocks", "KV blocks that there are.")] = 0
    num_used_blocks: Annotated[
        int, _gauge("kv_cache_used_blocks", "blocks", "KV blocks that live requests own.")
    ] = 0
    num_cached_blocks: Annotated[
        int,
        _gauge("kv_cache_cached_blocks", "blocks", "KV blocks kept for reuse without an owner."),
    ] = 0
    num_window_blocks: Annotated[
        int,
        _gauge(
            "window_blocks", "blocks", "Blocks of layers with a window, in a pool of their own."
        ),
    ] = 0
    num_used_window_blocks: Annotated[
        int, _gauge("window_used_blocks", "blocks", "Window blocks that live requests own.")
    ] = 0
    num_cached_window_blocks: Annotated[
        int,
        _gauge("window_cached_blocks", "blocks", "Window blocks kept for reuse without an owner."),
    ] = 0
    num_evicted_window_blocks: Annotated[
        int, _counter("window_evictions_total", "blocks", "Kept window blocks given up for others.")
    ] = 0
    windowless_tokens: Annotated[
        int,
        _counter(
            "prefix_cache_windowless_tokens_total",
            "tokens",
            "Prompt tokens whose KV was found in layers that see all tokens and computed again, as "
            "layers with a window had given theirs up.",
        ),
    ] = 0
    num_state_slots: Annotated[
        int, _gauge("state_slots", "states", "Slots for states of sequences and for snapshots.")
    ] = 0
    num_used_state_slots: Annotated[
        int, _gauge("state_used_slots", "states", "Slots that live requests own.")
    ] = 0
    num_snapshots: Annotated[
        int, _gauge("state_snapshots", "states", "States kept for reuse without an owner.")
    ] = 0
    num_snapshots_taken: Annotated[
        int, _counter("state_snapshots_total", "states", "States that were kept for reuse.")
    ] = 0
    num_evicted_snapshots: Annotated[
        int, _counter("state_evictions_total", "states", "Kept states given up for others.")
    ] = 0
    stateless_tokens: Annotated[
        int,
        _counter(
            "prefix_cache_stateless_tokens_total",
            "tokens",
            "Prompt tokens whose KV was found and computed again, for want of a state.",
        ),
    ] = 0
    num_steps: Annotated[int, _counter("engine_steps_total", "steps", "Steps of the instance.")] = 0
    step_seconds: Annotated[
        float, _counter("engine_step_seconds_total", "seconds", "Time spent in steps.")
    ] = 0.0
    num_expert_hits: Annotated[
        int,
        _counter(
            "expert_cache_hits_total",
            "experts",
            "Routed experts, each once a layer and step, that the cache held: memory before a "
            "disk, or a GPU's before the host's.",
        ),
    ] = 0
    num_expert_misses: Annotated[
        int,
        _counter("expert_cache_misses_total", "experts", "Those that the cache did not hold."),
    ] = 0
    num_chosen_latents: Annotated[
        int,
        _counter(
            "latents_chosen_total",
            "latents",
            "Of latents in a file: those that steps attended to, each once a layer and step.",
        ),
    ] = 0
    num_latent_hits: Annotated[
        int, _counter("latent_hits_total", "latents", "Those of them that were in memory.")
    ] = 0
    latent_read_bytes: Annotated[
        int,
        _counter("latent_read_bytes_total", "bytes", "Bytes read for the others, whole pages."),
    ] = 0
    latent_written_bytes: Annotated[
        int, _counter("latent_written_bytes_total", "bytes", "Bytes of latents written.")
    ] = 0
    num_preemptions: Annotated[
        int,
        _counter("num_preemptions_total", "requests", "Requests put back for want of blocks."),
    ] = 0
    num_finished: Annotated[
        int,
        _counter(
            "engine_requests_finished_total",
            "requests",
            "Requests that ended on an instance; a prefill and its decode are two.",
        ),
    ] = 0
    prompt_tokens: Annotated[
        int, _counter("prompt_tokens_total", "tokens", "Prompt tokens taken in.")
    ] = 0
    generated_tokens: Annotated[
        int, _counter("generation_tokens_total", "tokens", "Tokens generated.")
    ] = 0
    num_prefix_queries: Annotated[
        int,
        _counter("prefix_cache_lookups_total", "lookups", "Prompts looked up in the prefix cache."),
    ] = 0
    """Number of prompts looked up, each counted by the instance that computes it and not by one
    that continues the request."""
    prefix_query_tokens: Annotated[
        int,
        _counter(
            "prefix_cache_queries_total", "tokens", "Prompt tokens looked up in the prefix cache."
        ),
    ] = 0
    prefix_hit_tokens: Annotated[
        int,
        _counter(
            "prefix_cache_hits_total",
            "tokens",
            "Prompt tokens found in the prefix cache; what a prefill instance hands over is not.",
        ),
    ] = 0
    """Number of prompt tokens found in any tier; minus ``store_hit_tokens``, those found on the
    device."""
    store_hit_tokens: Annotated[
        int,
        _counter(
            "external_prefix_cache_hits_total",
            "tokens",
            "Prompt tokens that came from the store in time.",
        ),
    ] = 0
    evicted_tokens: Annotated[
        int,
        _counter(
            "evicted_tokens_total", "tokens", "Tokens whose KV the device gave up for others."
        ),
    ] = 0
    """Number of tokens whose KV the device has evicted; the store may still have it."""
    num_loaded_blocks: Annotated[
        int,
        _counter(
            "kv_taken_blocks_total",
            "blocks",
            "KV blocks that loads from the store or an instance gave their content in time.",
        ),
    ] = 0
    num_failed_loads: Annotated[
        int,
        _counter(
            "kv_missed_blocks_total",
            "blocks",
            "KV blocks whose load from the store or an instance ended without, or too late.",
        ),
    ] = 0
    num_lookups: Annotated[
        int, _counter("kv_lookups_total", "lookups", "Lookups in the store.")
    ] = 0
    num_lookup_timeouts: Annotated[
        int,
        _counter(
            "kv_lookup_timeouts_total",
            "lookups",
            "Lookups that the store did not answer, or not in time.",
        ),
    ] = 0
    lookup_tokens: Annotated[
        int,
        _counter(
            "external_prefix_cache_queries_total",
            "tokens",
            "Prompt tokens that the store was asked about.",
        ),
    ] = 0
    found_tokens: Annotated[
        int,
        _counter(
            "external_prefix_cache_found_total",
            "tokens",
            "Prompt tokens that the store had when it was asked.",
        ),
    ] = 0
    loaded_blocks: Annotated[
        int, _counter("kv_load_blocks_total", "blocks", "KV blocks loaded from the store.")
    ] = 0
    loaded_tokens: Annotated[
        int,
        _counter("prefetched_tokens_total", "tokens", "Tokens whose KV was loaded from the store."),
    ] = 0
    loaded_bytes: Annotated[
        int, _counter("kv_load_bytes_total", "bytes", "Bytes loaded from the store.")
    ] = 0
    load_seconds: Annotated[
        float,
        _counter(
            "kv_load_seconds_total", "seconds", "Time of loads, summed over loads that overlap."
        ),
    ] = 0.0
    load_failures: Annotated[
        dict[str, int],
        _counter(
            "kv_load_failed_blocks_total",
            "blocks",
            "KV blocks that did not come from the store and were computed, by reason.",
            by="reason",
        ),
    ] = {}
    """Number of blocks by reason: an error's code, ``foreign`` for a block of another size,
    ``dropped``, ``after_gap`` or ``offline``."""
    stored_blocks: Annotated[
        int, _counter("kv_store_blocks_total", "blocks", "KV blocks stored.")
    ] = 0
    """Number of blocks that were stored, without those that the store already had."""
    stored_tokens: Annotated[
        int, _counter("backuped_tokens_total", "tokens", "Tokens whose KV was stored.")
    ] = 0
    stored_window_blocks: Annotated[
        int,
        _counter(
            "kv_stored_window_blocks_total",
            "blocks",
            "Blocks of layers with a window put into the store.",
        ),
    ] = 0
    loaded_window_blocks: Annotated[
        int,
        _counter(
            "kv_loaded_window_blocks_total",
            "blocks",
            "Blocks of layers with a window read from the store.",
        ),
    ] = 0
    stored_states: Annotated[
        int, _counter("kv_stored_states_total", "states", "Kept states put into the store.")
    ] = 0
    loaded_states: Annotated[
        int, _counter("kv_loaded_states_total", "states", "States read from the store.")
    ] = 0
    stored_bytes: Annotated[int, _counter("kv_store_bytes_total", "bytes", "Bytes stored.")] = 0
    store_seconds: Annotated[
        float, _counter("kv_store_seconds_total", "seconds", "Time of stores.")
    ] = 0.0
    store_existing_blocks: Annotated[
        int,
        _counter(
            "kv_store_existing_blocks_total",
            "blocks",
            "KV blocks not stored because the store had them.",
        ),
    ] = 0
    store_failures: Annotated[
        dict[str, int],
        _counter(
            "kv_store_failed_blocks_total",
            "blocks",
            "KV blocks that were not stored, by reason.",
            by="reason",
        ),
    ] = {}
    """Number of blocks by reason: an error's code, ``overwritten``, ``staging_full`` or
    ``queue_full``."""
    store_links: Annotated[
        dict[str, int],
        _gauge(
            "kv_store_links",
            "links",
            "Instances by the state of their session with the store.",
            by="state",
        ),
    ] = {}
    """Number of instances by the state of their connection to the store; those that are not
    ``connected`` try again. Empty without a store.
    """
    peer_read_blocks: Annotated[
        int,
        _counter("kv_peer_read_blocks_total", "blocks", "KV blocks taken from prefill instances."),
    ] = 0
    """Number of blocks that were read and verified."""
    peer_read_bytes: Annotated[
        int, _counter("kv_peer_read_bytes_total", "bytes", "Bytes read from prefill instances.")
    ] = 0
    """Number of bytes read, including blocks that were not accepted."""
    peer_read_hidden_seconds: Annotated[
        float,
        _counter(
            "kv_peer_read_hidden_seconds_total",
            "seconds",
            "Time of reads from prefill instances that began while the prefill ran.",
        ),
    ] = 0.0
    peer_read_exposed_seconds: Annotated[
        float,
        _counter(
            "kv_peer_read_exposed_seconds_total",
            "seconds",
            "Time of reads from prefill instances that began after the prefill.",
        ),
    ] = 0.0
    peer_read_failures: Annotated[
        dict[str, int],
        _counter(
            "kv_peer_read_failed_blocks_total",
            "blocks",
            "KV blocks that did not come from a prefill instance, by reason.",
            by="reason",
        ),
    ] = {}
    """Number of blocks by reason: an error's code, ``dropped`` or ``offline``."""
    rail_bytes: Annotated[
        dict[str, int],
        _counter(
            "kv_rail_bytes_total",
            "bytes",
            "Bytes read from instances over each rail, of the rails that there are now.",
            by="rail",
        ),
    ] = {}
    """Number of bytes read by rail, which is a transport together with the address of the other
    side."""
    rail_links: Annotated[
        dict[str, int],
        _gauge(
            "kv_rail_links", "links", "Connections of each rail that may carry data.", by="rail"
        ),
    ] = {}


class InstanceStats(Statistics, kw_only=True):
    """Statistics and stage of an instance, or of all instances of a server together."""

    stage: InstanceStage


@cache
def list_stats() -> tuple[StatSpec, ...]:
    """Return every declared statistic, in order of declaration."""
    specs: list[StatSpec] = []
    for name, hint in get_type_hints(Statistics, include_extras=True).items():
        declared = hint.__metadata__[0]
        assert isinstance(declared, _Declared), f"{name} is not declared"
        is_by_label = get_origin(hint.__origin__) is dict
        assert is_by_label == bool(declared.label), f"{name}: a dictionary, no other, has a label"
        specs.append(StatSpec(name, *declared))
    return tuple(specs)


def sum_stats(stage: InstanceStage, parts: Iterable[Statistics]) -> InstanceStats:
    """Return the sum of statistics; labelled ones are summed for each label."""
    total: dict[str, Any] = {}
    for part in parts:
        for spec in list_stats():
            value = getattr(part, spec.field)
            if spec.label:
                known: dict[str, int] = total.setdefault(spec.field, {})
                # Iterate over a copy: the thread that owns the statistics may add labels meanwhile.
                for label, amount in dict(value).items():
                    known[label] = known.get(label, 0) + amount
            else:
                total[spec.field] = total.get(spec.field, 0) + value
    return InstanceStats(stage=stage, **total)


class ExpertCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Number of times that tokens of prompts and outputs chose each expert since the start."""

    layers: list[int]
    """Indexes of the layers whose experts are counted; may be empty."""
    num_tokens: int
    """Number of tokens counted; each chose the same number of experts in every layer."""
    counts: list[list[int]]
    """Number of choices by layer and expert."""


class StoreStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of the store that a server runs for its instances."""

    stage: Literal["starting", "serving", "restarting"]
    detail: str = ""
    """Reason of the last or present restart; empty if there was none."""
    pid: int | None = None
    """Process id; None while no process runs."""
    num_restarts: int = 0
    capacity_bytes: int = 0
    """Size of the store's memory in bytes; 0 before its first report."""
    used_bytes: int = 0
    num_objects: int = 0
    """Number of objects in memory and on disk, each counted once."""
    disk_capacity_bytes: int = 0
    """Bytes that the store's SSD tier may use; 0: the store has none."""
    disk_used_bytes: int = 0


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Estimated cost of each feature of a step, in seconds, learned from an instance's steps."""

    step_s: float
    """Seconds of every step, whatever it computes."""
    prefill_token_s: float
    prefill_context_s: float
    """Seconds for each pair of a prefilled token and a token that it attends to."""
    decode_s: float
    """Seconds for each sequence that decodes."""
    decode_token_s: float
    """Seconds for each KV token that decodes read."""
    num_steps: int
    """Number of steps from which the costs were learned; 0: the costs are assumed."""


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of one instance in ``/server_info``."""

    name: str
    role: str
    """Role of the instance: ``unified``, ``prefill`` or ``decode``."""
    stage: StageChanged
    pid: int | None = None
    """Process id; None while no process runs."""
    num_restarts: int = 0
    step_error: float = 0.0
    """Mean relative error of the predicted durations of the instance's steps."""
    step_costs: StepCosts | None = None
    """Costs by which durations are predicted; None: they are not predicted."""
    is_draining: bool = False
    """True if the instance gets no new requests."""
    sources: list[str] = []
    """Names of the prefill instances whose blocks it can read."""
    refusals: dict[str, str] = {}
    """Reason by name for each prefill instance whose blocks it cannot read."""
    num_running: int = 0
    """Number of running requests. This and the following fields are from its last report; 0 while
    it is down."""
    num_waiting: int = 0
    num_loading: int = 0
    """Number of requests that wait for KV from the store or another instance."""
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0

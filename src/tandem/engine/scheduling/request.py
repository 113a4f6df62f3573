"""One generation as the engine sees it: its tokens, its progress, its blocks.

A ``Request`` is mutable. Whoever adds it sets the first group of fields; the scheduler's lifecycle
sets the second. Each further group is a record with one writer: ``QueueNotes`` (admission and
planning), ``PrefixNotes`` (``PrefixReuse``), ``StateNotes`` (``StateReuse``), ``WindowNotes``
(``WindowReuse``), ``LoadNotes`` (load planning and ``BlockLoads``) and ``ReportNotes`` (times and
counts, for outputs and ``tandem explain``). There are token ids only: the server handles text.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from tandem.core.state_layout import NO_SLOT
from tandem.core.timeline import PrefixMiss
from tandem.core.wire import FinishReason, KvSource, PrefillKv, SamplingParams, TierKv
from tandem.engine.stepping.messages import pack_block_ids

if TYPE_CHECKING:
    from tandem.engine.groups.snapshots import Snapshot
    from tandem.engine.scheduling.prefix_index import PrefixNode

__all__ = [
    "NO_WINDOW",
    "FinishReason",
    "PrefixNotes",
    "Request",
    "RequestState",
    "StateNotes",
    "WindowNotes",
    "WindowTable",
]


class RequestState(StrEnum):
    """The state of a request; only the scheduler moves it."""

    WAITING = "waiting"
    LOADING = "loading"
    """Waiting for KV from the store or another instance, until the load ends or its wait runs
    out."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Back in the waiting queue after it lost its blocks; it keeps the tokens it has generated."""
    FINISHED = "finished"


@dataclass(slots=True)
class QueueNotes:
    """Data about a request that admission and planning of steps write."""

    max_total_tokens: int = 0
    """Largest number of tokens that prompt and output may have together, by ``max_tokens`` and the
    context length.
    """
    num_deferrals: int = 0
    """Number of steps in which the request was not admitted because another request computes a
    prefix that both share.
    """
    num_overtaken: int = 0
    """Number of requests of the same client and priority that arrived later and were admitted
    earlier."""
    is_prefilling: bool = False
    """True from admission until the KV of all known tokens (the prompt, and output from before a
    preemption) has been computed.
    """
    is_cancelled: bool = False
    """True if the request was cancelled while a running step computes for it; it ends when that
    step completes.
    """
    num_preemptions: int = 0
    num_tokens_in_flight: int = 0
    """Number of the request's tokens that planned, uncompleted steps compute; these tokens follow
    the computed ones.
    """
    num_samples_in_flight: int = 0
    """Number of output tokens that planned, uncompleted steps will sample for the request."""
    awaits_mask: bool = False
    """True while the tokens that the request's grammar allows next are being computed: it is
    neither admitted nor decoded.
    """
    is_mask_slow: bool = False
    """True if it took long to compute the tokens that its grammar allowed last: no step is planned
    for it before the one in flight has ended.
    """


@dataclass(slots=True)
class PrefixNotes:
    """The number of a request's blocks that are in the prefix index, and their keys."""

    root_key: bytes = b""
    block_keys: list[bytes] = field(default_factory=list[bytes])
    """Keys of its leading full blocks, computed as far as they were needed."""
    node: "PrefixNode | None" = None
    """Node of the prefix index for the request's last indexed block, or the root; None while the
    request has no blocks.
    """
    num_indexed_blocks: int = 0
    """Number of the request's leading blocks that are in the prefix index."""


@dataclass(slots=True)
class StateNotes:
    """Data about a request's recurrent state, for a model that has layers with a state."""

    slot: int = NO_SLOT
    """State slot of the request while it runs."""
    points: list[int] = field(default_factory=list[int])
    """Positions in tokens at which the prefill must end a chunk, because a snapshot of the
    recurrent state is saved there; ascending.
    """
    last: "Snapshot | None" = None
    """The longest snapshot (saved recurrent state) of a prefix of the request's tokens, among the
    positions that its prefill has reached.
    """


class WindowTable(NamedTuple):
    """The blocks of the sliding-window layers that a request still attends to. Immutable."""

    first: int
    """Index in the sequence, in blocks, of the first block of the table."""
    blocks: tuple[int, ...]

    @property
    def end(self) -> int:
        """Index after the table's last block, counted in blocks from the start of the sequence."""
        return self.first + len(self.blocks)


NO_WINDOW = WindowTable(0, ())


@dataclass(slots=True)
class WindowNotes:
    """Data about a request's window blocks, for a model whose sliding-window layers have blocks of
    their own.
    """

    table: WindowTable = NO_WINDOW
    marks: tuple[int, ...] = ()
    """Positions in tokens, such as ends of messages, from which a later prompt may go on; the
    sliding-window blocks before them are evicted last.
    """


@dataclass(slots=True)
class LoadNotes:
    """Data about a request's load of KV from the store or another instance."""

    has_loaded: bool = False
    """True if a load of KV was started since the request joined the queue; no second one is started
    for it.
    """
    wait_until_s: float = 0.0
    """Time until which the request waits for KV from elsewhere and is not admitted; monotonic
    seconds."""
    loaded_blocks: range = range(0)
    """Indexes in the sequence of the KV blocks that the request's last load brought."""


@dataclass(slots=True)
class ReportNotes:
    """Times and counts of a request, for its outputs and its timeline."""

    num_cached_tokens: int = 0
    """Number of prompt tokens found in the prefix index at its first admission; reported as
    usage."""
    num_loaded_tokens: int = 0
    """Number of ``num_cached_tokens`` that a load had brought from the store or another
    instance."""
    miss: PrefixMiss | None = None
    """Position and reason at which the cached prefix ended at its first admission; for ``tandem
    explain``."""
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    """Time at which a step, or the planning of one, ended the request; None if it was cancelled
    between steps."""


@dataclass(slots=True, eq=False)
class Request:
    """The state of one generation.

    Args:
        request_id: unique among the live requests of an instance.
        prompt_ids: at least one token id; not modified.
        sampling: shared, not copied.
        arrival_s: monotonic seconds, on the clock that ``Scheduler.schedule`` is given.
        priority: a lower number is served first.
        deadline_s: time after which the request ends with ``FinishReason.DEADLINE``.
        client: name of the sender; waiting requests of different clients get shares by their
            weights.
        weight: weight of the client's share.
        cache_salt: requests with different salts never share blocks.
        adapter: digest of the LoRA adapter; requests with different adapters never share blocks.
        kv_source: the store or prefill instance that KV may be loaded from.
        prefill_lease_s: if given, the request only prefills, and its blocks are held for so many
            seconds afterwards. None: it decodes.
        awaits_continuation: if True, it computes nothing until ``Scheduler.continue_request``
            brings the tokens of another instance, or the lease of its source ends.
        output_ids: tokens that another instance has generated already.
        message_end: number of prompt tokens up to the end of its last message, from where a later
            prompt may go on differently; 0: unknown.
        num_stored_blocks: number of leading full blocks of the prompt that lower tiers or the
            device had when it arrived.
        expected_len: number of prompt tokens that the sender expects to be cached here.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    arrival_s: float
    priority: int = 0
    deadline_s: float | None = None
    client: str = ""
    weight: float = 1.0
    cache_salt: str = ""
    adapter: str = ""
    kv_source: KvSource = field(default_factory=TierKv)
    prefill_lease_s: float | None = None
    awaits_continuation: bool = False
    message_end: int = 0
    num_stored_blocks: int = 0
    expected_len: int = 0

    sequence_id: int = 0
    """Number of the request in the order of arrival at the instance, from 1; it identifies the
    request in a ``StepInput``.
    """
    output_ids: list[int] = field(default_factory=list[int])
    """Tokens sampled so far, including the one that ended the request."""
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0
    """Number of leading tokens whose KV is in the blocks."""
    block_table: tuple[int, ...] = ()
    """Block ids by position: token ``i`` is in ``block_table[i // block_size]``. The tuple is
    replaced when it changes, so that a plan may keep the old one. Written by ``set_blocks`` and
    ``add_blocks``."""
    packed_table: bytes = b""
    """``block_table`` in the form of a ``StepInput``. Kept, because packing a long table takes
    longer than planning a decode."""
    held_blocks: tuple[int, ...] = ()
    """Its block table at its end, if it ended with ``FinishReason.PREFILLED``."""
    held_window: WindowTable = NO_WINDOW
    """Its window blocks at its end, if it ended with ``FinishReason.PREFILLED``."""

    queue: QueueNotes = field(default_factory=QueueNotes)
    prefix: PrefixNotes = field(default_factory=PrefixNotes)
    state_notes: StateNotes = field(default_factory=StateNotes)
    window_notes: WindowNotes = field(default_factory=WindowNotes)
    load: LoadNotes = field(default_factory=LoadNotes)
    report: ReportNotes = field(default_factory=ReportNotes)

    def set_blocks(self, block_ids: tuple[int, ...]) -> None:
        """Replace the block table, the ids of the request's KV blocks in order."""
        self.block_table = block_ids
        self.packed_table = pack_block_ids(block_ids)

    def add_blocks(self, block_ids: tuple[int, ...]) -> None:
        """Append to the block table, the ids of the request's KV blocks in order."""
        self.block_table += block_ids
        self.packed_table += pack_block_ids(block_ids)

    @property
    def prompt_len(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Number of tokens known so far, prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_remaining_tokens(self) -> int:
        """Number of known tokens whose KV is still to be computed; 1 while decoding."""
        return len(self.prompt_ids) + len(self.output_ids) - self.num_computed_tokens

    @property
    def num_planned_tokens(self) -> int:
        """Number of leading tokens that are computed, or will be by the plans in flight (planned
        steps not recorded yet).
        """
        return self.num_computed_tokens + self.queue.num_tokens_in_flight

    @property
    def num_expected_tokens(self) -> int:
        """Number of tokens known once the plans in flight (planned steps not recorded yet) are
        completed, if these do not end the request.
        """
        return self.num_tokens + self.queue.num_samples_in_flight

    @property
    def num_unplanned_tokens(self) -> int:
        """Number of ``num_expected_tokens`` that no plan in flight computes; 1 while decoding."""
        # The sum is written out for speed: this property is read several times for each token.
        queue, num_known = self.queue, len(self.prompt_ids) + len(self.output_ids)
        num_to_come = queue.num_samples_in_flight - queue.num_tokens_in_flight
        return num_known - self.num_computed_tokens + num_to_come

    @property
    def is_scheduled(self) -> bool:
        """True if a plan in flight (a planned step not recorded yet) contains the request."""
        return self.queue.num_tokens_in_flight > 0

    @property
    def prefill_kv(self) -> PrefillKv | None:
        """The prefill instance to load KV from, if ``kv_source`` names one; else None."""
        return self.kv_source if isinstance(self.kv_source, PrefillKv) else None

    @property
    def is_finished(self) -> bool:
        """True if the request has left the scheduler."""
        return self.state is RequestState.FINISHED

    @property
    def can_reuse_prefix(self) -> bool:
        """False if every prompt token must be computed, for example because its log-probability is
        wanted.
        """
        return not self.sampling.needs_whole_prompt

    def get_tokens(self, start: int, end: int) -> list[int]:
        """Return the token ids at positions ``start`` to ``end`` of prompt and output, joined."""
        prompt_len = len(self.prompt_ids)
        if end <= prompt_len:
            return self.prompt_ids[start:end]
        if start >= prompt_len:
            return self.output_ids[start - prompt_len : end - prompt_len]
        return self.prompt_ids[start:] + self.output_ids[: end - prompt_len]

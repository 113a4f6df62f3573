"""From settings to a plan, and from a plan to a running engine.

``plan_engine`` decides every value and says why, from the configuration of the model and what the
machine offers, without reading a weight: `tandem serve --dry-run` prints it. ``build_engine``
loads the model and puts the parts together as planned.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from torch import Tensor

from tandem import _native
from tandem.core.clock import Clock
from tandem.core.errors import CapacityError, ConfigError
from tandem.core.kv_layout import WindowLayout, split_layout
from tandem.core.model.plan import ModelPlan
from tandem.core.spec import KvIdentity, KVLayout, ModelSpec
from tandem.core.wire import InstanceInfo
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.groups.reuse import StatePolicy
from tandem.engine.groups.windows import WindowPolicy
from tandem.engine.kv_memory import KvExtents, KvMemory
from tandem.engine.memory import (
    DEFAULT_FRACTION,
    KvPlan,
    StatePlan,
    check_context,
    plan_kv_cache,
    plan_states,
)
from tandem.engine.scheduling.blocks import BlockPool
from tandem.engine.scheduling.prefix_index import PrefixIndex
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.stepping.expert_log import ExpertLog
from tandem.engine.stepping.expert_trace import TraceHeader, TraceWriter
from tandem.engine.stepping.grammar import Grammars
from tandem.engine.stepping.torch_runner import TorchRunner
from tandem.engine.tiers.config import TierConfig
from tandem.engine.tiers.planner import CostTierPlanner
from tandem.engine.timelines import TimelineLog
from tandem.kernels.devices import open_device
from tandem.kernels.paged import PagedKvCache
from tandem.kernels.states import StateCache
from tandem.models.config import ModelConfig
from tandem.models.loading.expert_disk import list_expert_sizes, measure_reads, plan_tier
from tandem.models.loading.hub import resolve_folder
from tandem.models.loading.loader import CausalModel, count_mapped_bytes, load_model, make_kv_layout
from tandem.models.planning.places import list_placed_layers
from tandem.models.planning.planner import plan_model
from tandem.models.proof.require import require_proof
from tandem.models.tokenizing.grammars import TokenTable, make_token_table
from tandem.models.tokenizing.tokenizer import load_tokenizer

__all__ = ["RUNTIME_BYTES", "BuiltEngine", "EnginePlan", "build_engine", "plan_engine"]

logger = logging.getLogger(__name__)

MIB = 1 << 20
GIB = 1 << 30

DEVICE_FRACTION = 0.85
"""Of the memory that weights leave free on a GPU: a step's activations need the rest."""

TIER_KV_FRACTION = 0.2
"""The share for KV of the memory beside the dense weights, where experts lie on disk: there an
expert in memory saves more time than a block that nobody uses."""
RUNTIME_BYTES = 1 << 30
"""Bytes of an instance beside weights and KV: Python, torch, activations of a step. Measured:
0.6 GiB after loading, and tens of KiB a token of a step."""

MIN_SHARED_WEIGHTS = 2_000_000
"""Weights that a token reads in a layer, below which torch multiplies on one thread: its operations
are too short to share, however many tokens a step has. Measured with the demo model in float32
(0.5 M a layer) on two quiet cores: two threads took 1.8 times as long for 512 tokens, 1.3 for
2,048, and 2.1 for 64 decodes. The native pool wakes sooner: there two threads take 0.6 of the time
for 512 tokens, 0.8 for 16 decodes, and no longer for one."""


class EnginePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What will run: every value concrete, with its reason where it was decided here."""

    model: ModelPlan
    layout: KVLayout
    """Of the blocks, without the layers of ``windows``."""
    windows: WindowLayout | None = None
    """Of the blocks of layers with a window; None: they have none of their own."""
    config: EngineConfig
    """With ``max_model_len``, ``num_kv_blocks`` and ``threads`` filled in."""
    kv: KvPlan
    states: StatePlan | None
    """None: no layer has a state."""
    threads_reason: str
    deferral_reason: str
    torch_threads: int
    """Of torch, which computes what is not native."""
    torch_threads_reason: str

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (what, value, why) for a table."""
        model, spec, kv = self.model, self.model.spec, self.kv
        return [
            ("model", model.folder, spec.architecture),
            (
                "weights",
                f"{model.weight_bytes / MIB:.0f} MiB",
                f"{spec.num_parameters:,} parameters",
            ),
            *_tell_tier(model),
            ("dtype", spec.dtype, spec.dtype_reason),
            ("experts", model.experts.weight_format, model.experts.reason),
            (
                "expert parts",
                str(model.expert_parts),
                "copied to the NUMA nodes that compute them"
                if model.expert_parts > 1
                else "in place, mapped if cached",
            ),
            ("deferred experts", str(model.num_deferred_experts), self.deferral_reason),
            ("linear", model.linear.weight_format, model.linear.reason),
            ("context", f"{self.config.max_model_len} tokens", kv.max_model_len_reason),
            ("threads", str(self.config.threads), self.threads_reason),
            ("torch threads", str(self.torch_threads), self.torch_threads_reason),
            (
                "KV cache",
                f"{kv.num_blocks} blocks of {self.layout.block_size} tokens, "
                f"{kv.size_bytes / MIB:.0f} MiB when all are used",
                f"{kv.reason}; {self.layout.bytes_per_token} bytes a token",
            ),
            *self._list_windows(),
            *self._list_states(),
            ("KV sharing", self.config.kv_sharing, "engine.kv_sharing"),
            ("step", f"{self.config.max_batch_tokens} tokens", "engine.max_batch_tokens"),
            ("requests", f"{self.config.max_running} running", "engine.max_running"),
            ("queue", f"{self.config.max_queue} waiting", "engine.max_queue"),
            ("order", self.config.scheduling_order, "engine.scheduling_order"),
        ]

    def _list_windows(self) -> list[tuple[str, str, str]]:
        plan, windows = self.kv.windows, self.windows
        if plan is None or windows is None:
            return []
        # Without blocks of their own, these layers would be in every other block.
        saved = (self.kv.num_blocks - plan.num_blocks) * plan.block_bytes
        text = (
            f"{plan.num_blocks} blocks of {self.layout.block_size} tokens in "
            f"{windows.layout.num_layers} layers, {plan.size_bytes / MIB:.0f} MiB when all are used"
        )
        why = f"{plan.reason}; a window of {windows.window} tokens saves {saved / MIB:.0f} MiB"
        return [("windows", text, why)]

    def _list_states(self) -> list[tuple[str, str, str]]:
        states = self.states
        if states is None:
            return []
        text = (
            f"{states.num_slots} slots of {states.state_bytes / MIB:.1f} MiB, "
            f"{states.size_bytes / MIB:.0f} MiB when all are used"
        )
        every = self.config.state_every
        kept = "at ends of messages, prompts and answers and at branches"
        kept += f", and every {every} tokens" if every else ""
        return [("states", text, f"{states.reason}; kept {kept}")]


class BuiltEngine(NamedTuple):
    """An engine with its runner and model."""

    engine: Engine
    info: InstanceInfo
    model: CausalModel
    identity: KvIdentity
    """Decides which instances may share KV."""
    prefixes: PrefixIndex
    cache: PagedKvCache
    states: StateCache | None
    """None: the model has no state."""
    windows: WindowLayout | None
    """Of ``cache.windows``; None: there are no blocks of layers with a window alone."""
    planner: CostTierPlanner | None
    """Decides about loads; None without tiers."""
    experts: ExpertLog | None
    """Counts chosen experts; None where the model's layers do not tell them."""


def plan_engine(
    model_config: ModelConfig,
    engine_config: EngineConfig,
    *,
    num_siblings: int = 1,
    is_shared: bool = False,
) -> EnginePlan:
    """Decide what 0 and ``auto`` leave open.

    Args:
        model_config: what to load.
        engine_config: 0 where the value is to be decided here.
        num_siblings: instances that share the free memory, this one included.
        is_shared: blocks go to a store or to other instances.

    Raises: as ``plan_model``; ConfigError if settings do not fit the model or the memory.
    """
    folder = resolve_folder(model_config.path, revision=model_config.revision)
    topology = _native.read_topology()
    threads, threads_reason = _choose_threads(engine_config, topology)
    num_deferred, deferral_reason = _choose_deferral(model_config, engine_config)
    model = plan_model(
        folder,
        dtype=model_config.dtype,
        rules=Path(model_config.rules) if model_config.rules else None,
        device=model_config.device,
        expert_device=model_config.expert_device,
        expert_format=model_config.expert_format,
        linear_format=model_config.linear_format,
        packed_cache=model_config.packed_cache,
        expert_parts=model_config.expert_parts,
        num_nodes=min(len(topology.numa_nodes), threads),
        deferred_experts=num_deferred,
    )
    available, fraction = _count_available(topology) // num_siblings, DEFAULT_FRACTION
    if engine_config.memory_bytes:
        # What the interpreter and a step take comes out of it too.
        available = max(0, min(available, engine_config.memory_bytes - RUNTIME_BYTES))
    left = _share_memory(
        available * num_siblings, model.host_bytes, count_mapped_bytes(model), num_siblings
    )
    if model_config.expert_slots or (left < 0 and list_expert_sizes(model) is not None):
        model = _plan_tier(model, model_config, engine_config, available)
        left, fraction = available - (model.weight_bytes - model.expert_bytes), TIER_KV_FRACTION
    total = topology.memory_total_bytes
    device = open_device(model.device)
    if not device.is_host:
        # KV and states lie beside the weights on the device.
        total = device.count_free_bytes()
        left, fraction = total - (model.weight_bytes - model.host_bytes), DEVICE_FRACTION
        _check_device_weights(model, total, left)
    spec = model.spec
    own = spec.max_position_embeddings
    check_context(engine_config.max_model_len, own)
    torch_threads, torch_reason = _choose_torch_threads(threads, model)
    layout = make_kv_layout(spec, engine_config.block_size, engine_config.kv_dtype)
    context = engine_config.max_model_len or own
    # An object of the store has bytes, and so has a block that another instance reads.
    is_split = not is_shared or len(spec.window_layers) < layout.num_layers
    layout, windows = _split_windows(spec, layout, context) if is_split else (layout, None)
    states = None
    if spec.state_layout is not None:
        states = plan_states(
            engine_config,
            state_bytes=spec.state_layout.bytes_per_state,
            available_bytes=left,
            total_bytes=total,
            fraction=fraction,
        )
    kv = plan_kv_cache(
        engine_config,
        block_bytes=layout.bytes_per_block,
        own_context=own,
        available_bytes=left,
        total_bytes=total,
        taken_bytes=0 if states is None else states.size_bytes,
        fraction=fraction,
        windows=windows,
    )
    return EnginePlan(
        model=model,
        layout=layout,
        windows=windows,
        config=msgspec.structs.replace(
            engine_config,
            max_model_len=kv.max_model_len,
            num_kv_blocks=kv.num_blocks,
            num_state_slots=0 if states is None else states.num_slots,
            num_window_blocks=0 if kv.windows is None else kv.windows.num_blocks,
            threads=threads,
        ),
        kv=kv,
        states=states,
        threads_reason=threads_reason,
        deferral_reason=deferral_reason,
        torch_threads=torch_threads,
        torch_threads_reason=torch_reason,
    )


def _split_windows(
    spec: ModelSpec, layout: KVLayout, context: int
) -> tuple[KVLayout, WindowLayout | None]:
    """Return the layouts of the two groups of blocks; one where windows are part of the others."""
    if spec.state_layout is not None or spec.sliding_window >= context:
        return layout, None
    return split_layout(layout, spec.window_layers, spec.sliding_window)


def _check_device_weights(model: ModelPlan, free_bytes: int, left_bytes: int) -> None:
    """Refuse weights that a device has no room for, before any is loaded.

    Raises: ConfigError; the text says what to change.
    """
    if left_bytes > 0:
        return
    is_with_experts = model.spec.is_moe and model.expert_device != "cpu"
    remedy = "--model.expert-device cpu" if is_with_experts else "--model.device cpu"
    raise ConfigError(
        "engine.plan",
        f"{(free_bytes - left_bytes) / GIB:.1f} GiB of weights for {model.device}, which has "
        f"{free_bytes / GIB:.1f} GiB free: give {remedy}",
        field="model.device",
    )


def _plan_tier(
    model: ModelPlan, model_config: ModelConfig, engine_config: EngineConfig, available_bytes: int
) -> ModelPlan:
    """Return the plan with routed experts on disk, in the memory that KV leaves."""
    left = available_bytes - (model.weight_bytes - model.expert_bytes)
    layout = make_kv_layout(model.spec, engine_config.block_size, engine_config.kv_dtype)
    if engine_config.num_kv_blocks:
        kv_bytes = engine_config.num_kv_blocks * layout.bytes_per_block
    elif engine_config.kv_cache_gib:
        kv_bytes = int(engine_config.kv_cache_gib * GIB)
    else:
        kv_bytes = int(left * TIER_KV_FRACTION)
    sizes = list_expert_sizes(model)
    read_bytes = sizes.expert_bytes if sizes is not None else MIB
    return plan_tier(
        model,
        budget_bytes=max(0, left - kv_bytes),
        wanted_slots=model_config.expert_slots,
        policy=model_config.expert_policy,
        read_rate=measure_reads(Path(model.folder), read_bytes),
    )


def _tell_tier(model: ModelPlan) -> list[tuple[str, str, str]]:
    """Return the rows of experts that lie on disk."""
    tier = model.tier
    if tier is None:
        return []
    num_experts = max(m.shape[0] for m in model.matrices if m.role == "experts")
    share = tier.num_slots / num_experts
    speed = f"{tier.read_rate / 1e9:.2f} GB/s, {tier.depth} reads of {tier.part_bytes >> 10} KiB"
    if tier.read_rate and tier.missed_bytes:
        rate = f"{tier.read_rate / tier.missed_bytes:.2f} tokens/s"
        why = f"a token misses {tier.missed_bytes / MIB:.0f} MiB if choices are even: {rate}"
    elif tier.read_rate:
        why = "every expert has a slot: each is read once"
    else:
        why = "not measured"
    return [
        (
            "experts on disk",
            f"{tier.num_slots} of {num_experts} in each of {tier.num_layers} layers, "
            f"{tier.size_bytes / MIB:.0f} MiB with {tier.num_staged} places for others",
            f"{tier.reason}; {tier.policy} holds {share:.0%}",
        ),
        ("disk", speed if tier.read_rate else "unknown", why),
    ]


def _share_memory(
    available_bytes: int, weight_bytes: int, mapped_bytes: int, num_siblings: int
) -> int:
    """Return what one of several instances may use beside its weights; negative if they do not fit.

    Args:
        available_bytes: of the machine, before any of them has loaded.
        weight_bytes: of the model.
        mapped_bytes: of these, in a file that all instances map: they count once.
        num_siblings: instances.
    """
    return (available_bytes - mapped_bytes) // num_siblings - (weight_bytes - mapped_bytes)


def _choose_threads(config: EngineConfig, topology: _native.Topology) -> tuple[int, str]:
    advice = _native.recommend_threads(topology)
    if not config.threads:
        return advice.threads, advice.reason
    if config.threads > advice.threads:
        logger.warning(
            "event=many_threads threads=%d advised=%d why=%r",
            config.threads,
            advice.threads,
            f"{advice.reason}; more share cores and wait for each other",
        )
    return config.threads, "as asked for"


def _choose_deferral(model: ModelConfig, engine: EngineConfig) -> tuple[int, str]:
    wanted = model.deferred_experts
    if wanted == "auto":
        return 0, "no GPU to overlap with"
    if wanted and engine.kv_sharing == "strict":
        raise ConfigError(
            "engine.plan",
            f"{wanted} experts are to be deferred, which an answer's tokens do and a prompt's do "
            "not, so KV depends on which they were: give --engine.kv-sharing relaxed or defer none",
            field="model.deferred_experts",
        )
    return wanted, "as asked for" if wanted else "model.deferred_experts"


def _choose_torch_threads(threads: int, model: ModelPlan) -> tuple[int, str]:
    if model.is_native:
        return 1, "all matrices run on native kernels"
    per_layer = model.spec.num_active_parameters // model.spec.num_layers
    if per_layer < MIN_SHARED_WEIGHTS:
        return 1, f"a token reads {per_layer:,} weights a layer: too few to share among threads"
    return threads, "as many as the native kernels have"


def _count_available(topology: _native.Topology) -> int:
    """Bytes free now, as the machine and the control group see it."""
    left = topology.limits.memory_left_bytes
    if left is None:
        left = topology.limits.memory_limit_bytes
    available = topology.memory_available_bytes
    return available if left is None else min(available, left)


def build_engine(
    model_config: ModelConfig,
    engine_config: EngineConfig,
    clock: Clock,
    progress: Callable[[int, int, str], None] | None = None,
    *,
    tiers: TierConfig | None = None,
    allocate: Callable[[int], KvMemory] | None = None,
    allocate_states: Callable[[int], KvMemory] | None = None,
    allocate_windows: Callable[[int], KvMemory] | None = None,
    num_siblings: int = 1,
) -> BuiltEngine:
    """Load a model and make the engine that serves it.

    Args:
        model_config: what to load.
        engine_config: 0 where the value is to be decided here.
        clock: the engine's.
        progress: called with (bytes done, bytes in all, what) while weights load.
        tiers: how KV is loaded from the tiers below; None: there are none. The caller attaches
            what moves the blocks.
        allocate: makes the memory of all blocks, given its bytes; None: the device does.
        allocate_states: the same of the slots of states.
        allocate_windows: the same of the blocks of layers with a window.
        num_siblings: as of ``plan_engine``.

    Raises: as ``plan_engine`` and ``load_model``.
    """
    plan = plan_engine(
        model_config,
        engine_config,
        num_siblings=num_siblings,
        is_shared=tiers is not None or allocate is not None,
    )
    for what, value, why in plan.rows():
        logger.info("event=plan what=%r value=%r why=%r", what, value, why)
    threads = _native.ThreadPool(plan.config.threads)
    require_proof(plan.model.folder, model_config.proof)
    # Several instances map the file of the first, so it is there before the next one loads.
    model = load_model(plan.model, threads, progress, is_written_behind=num_siblings == 1)
    if not model.context.device.is_host and plan.model.expert_device == "cpu" and model.moe:
        # Memory of a step is not at fixed places yet, so nothing is captured.
        model.enable_hybrid(model.context.device, is_captured=False)
    spec = plan.model.spec
    pool, blocks = _make_pool(model, plan.kv, allocate)
    identity = model.kv_identity(plan.layout, plan.config.kv_sharing, plan.windows)
    index = PrefixIndex(pool, block_size=plan.layout.block_size, identity=identity.digest)
    planner = None
    if tiers is not None:
        planner = CostTierPlanner(
            tiers, block_size=plan.layout.block_size, block_bytes=plan.layout.bytes_per_block
        )
    window_cache, window_policy = None, None
    if plan.windows is not None:
        num_windows = plan.config.num_window_blocks
        own = None
        if allocate_windows is not None and plan.kv.windows is not None:
            own = allocate_windows(plan.kv.windows.size_bytes).array
        window_cache = model.context.make_kv_cache(plan.windows.layout, num_windows, own)
        window_policy = WindowPolicy(plan.windows.window, num_windows)
    cache = model.context.make_kv_cache(
        plan.layout,
        plan.kv.num_blocks,
        blocks,
        windows=window_cache,
        window_layers=() if plan.windows is None else plan.windows.layers,
    )
    policy, states = None, None
    if plan.states is not None:
        policy = StatePolicy(
            plan.states.num_slots, plan.config.state_every, at_blocks=tiers is not None
        )
        states = _make_states(model, plan.states, allocate_states)
    experts = _open_expert_log(model, plan.config.expert_trace)
    engine = Engine(
        Scheduler(plan.config, pool, index, planner, policy, window_policy),
        TorchRunner(
            model,
            cache,
            threads=plan.torch_threads,
            states=states,
            grammars=Grammars(partial(_make_token_table, plan.model)),
            is_overlapped=plan.config.overlap == "on",
            experts=experts,
        ),
        clock,
        vocab_size=spec.vocab_size,
        num_labels=spec.num_labels,
        eos_token_ids=spec.eos_token_ids,
        observer=planner,
        timelines=TimelineLog(
            plan.config.timelines,
            block_size=plan.layout.block_size,
            block_bytes=plan.layout.bytes_per_block,
        ),
        is_overlapped=plan.config.overlap == "on",
    )
    info = InstanceInfo(
        model=model_config.path,
        architecture=spec.architecture,
        dtype=spec.dtype,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        num_labels=spec.num_labels,
        max_model_len=plan.config.max_model_len,
        max_model_len_reason=plan.kv.max_model_len_reason,
        block_size=plan.layout.block_size,
        num_blocks=plan.kv.num_blocks,
        max_batch_tokens=plan.config.max_batch_tokens,
        kv_bytes_per_token=plan.layout.bytes_per_token,
        weight_bytes=model.weight_bytes,
        num_parameters=spec.num_parameters,
        eos_token_ids=list(spec.eos_token_ids),
        weight_version=model.weights_digest,
        system_fingerprint=identity.system_fingerprint,
        kv_identity=identity.digest.hex(),
        num_state_slots=0 if plan.states is None else plan.states.num_slots,
        state_bytes=0 if plan.states is None else plan.states.state_bytes,
        num_window_blocks=plan.config.num_window_blocks,
        window_block_bytes=0 if plan.kv.windows is None else plan.kv.windows.block_bytes,
        pid=0,
        plan=plan.rows(),
        placement=list_placed_layers(plan.model),
        load_seconds=0.0,
    )
    return BuiltEngine(
        engine, info, model, identity, index, cache, states, plan.windows, planner, experts
    )


def _make_pool(
    model: CausalModel, plan: KvPlan, allocate: Callable[[int], KvMemory] | None
) -> tuple[BlockPool, Tensor | npt.NDArray[np.uint8] | None]:
    """Return the pool of blocks, and their memory; None: they need none, as no layer is in them."""
    if not plan.block_bytes:
        return BlockPool(plan.num_blocks), None
    if allocate is None:
        memory = model.context.device.map_memory(plan.size_bytes)
        blocks = memory.tensor
    else:
        memory = allocate(plan.size_bytes)
        blocks = memory.array
    extents = KvExtents(memory, num_blocks=plan.num_blocks, block_bytes=plan.block_bytes)
    if extents.reserve_blocks(1) < 1:
        raise CapacityError(
            "engine.build", "the machine has no memory left for a block of KV: free some"
        )
    return BlockPool(plan.num_blocks, extents), blocks


def _make_states(
    model: CausalModel, plan: StatePlan, allocate: Callable[[int], KvMemory] | None
) -> StateCache | None:
    layout = model.spec.state_layout
    if allocate is None or layout is None:
        return model.allocate_states(plan.num_slots)
    memory = allocate(plan.size_bytes).array
    return model.context.make_state_cache(layout, plan.num_slots, memory)


def _open_expert_log(model: CausalModel, trace: str) -> ExpertLog | None:
    """Return what counts a model's choices of experts.

    Raises: ConfigError (a trace of a model that tells no choices, or no such file can be made).
    """
    moe = model.moe
    if moe is None:
        if trace:
            what = "the model's layers do not tell which experts tokens chose: leave it out"
            raise ConfigError("engine.trace_experts", what, field="engine.expert_trace")
        return None
    layers, writer = list(moe.places), None
    if trace:
        header = TraceHeader(
            model=model.spec.name, layers=layers, num_experts=moe.num_experts, top_k=moe.top_k
        )
        writer = TraceWriter(Path(trace).expanduser(), header)
    return ExpertLog(layers, moe.num_experts, writer)


def _make_token_table(plan: ModelPlan) -> TokenTable:
    """Load the vocabulary that grammars are written in; at the first request that has one."""
    tokenizer = load_tokenizer(Path(plan.folder))
    return make_token_table(tokenizer, plan.spec.vocab_size, plan.spec.eos_token_ids)

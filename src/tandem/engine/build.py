"""Making a running engine from its settings: ``build_engine`` loads the model and connects the
parts.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tandem import _native
from tandem.core.clock import Clock
from tandem.core.errors import CapacityError, ConfigError, UnsupportedError
from tandem.core.instance_status import Statistics
from tandem.core.kv_layout import MlaLayout, WindowLayout
from tandem.core.model.plan import ModelPlan
from tandem.core.spec import KvIdentity
from tandem.core.wire import InstanceInfo
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.groups.group import Group, GroupMemory
from tandem.engine.groups.reuse import StatePolicy
from tandem.engine.groups.windows import WindowPolicy, count_seen_blocks
from tandem.engine.kv_memory import KvExtents, KvMemory
from tandem.engine.lanes import LanePlan
from tandem.engine.memory import KvPlan, StatePlan
from tandem.engine.own import make_own_policy
from tandem.engine.planning import plan_engine
from tandem.engine.scheduling.blocks import BlockPool
from tandem.engine.scheduling.prefix_index import PrefixIndex
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.stepping.expert_log import ExpertLog
from tandem.engine.stepping.expert_trace import TraceHeader, TraceWriter
from tandem.engine.stepping.grammar import Grammars
from tandem.engine.stepping.torch_runner import TorchRunner
from tandem.engine.tiers.config import TierConfig
from tandem.engine.tiers.mirror import KvMirror
from tandem.engine.tiers.planner import CostTierPlanner
from tandem.engine.timelines import TimelineLog
from tandem.kernels.latents.tier import LatentTier
from tandem.kernels.paged import PagedKvCache
from tandem.kernels.states import StateCache
from tandem.models.config import ModelConfig
from tandem.models.loading.loader import CausalModel, load_model
from tandem.models.own.caches import CacheSlots
from tandem.models.own.model import OwnModel, load_own
from tandem.models.planning.places import list_placed_layers
from tandem.models.tokenizing.grammars import (
    TokenTable,
    list_vocabulary,
    make_token_table,
)
from tandem.models.tokenizing.tokenizer import load_tokenizer
from tandem.placement.experts.cache import EXPERT_POLICIES

__all__ = ["BuiltEngine", "build_engine"]

logger = logging.getLogger(__name__)


class BuiltEngine(NamedTuple):
    """A loaded model with the engine and the runner that serve it."""

    engine: Engine
    info: InstanceInfo
    model: CausalModel | OwnModel
    identity: KvIdentity
    """Identity of the KV, which decides if instances may share blocks."""
    prefixes: PrefixIndex
    cache: PagedKvCache
    states: StateCache | None
    """Memory of the recurrent states; None if the model has none that can be sent or stored."""
    windows: WindowLayout | None
    """Layout of the window blocks in ``cache.windows``; None: sliding-window layers have no blocks
    of their own."""
    mirror: KvMirror | None
    """Host memory that mirrors the KV and states of a device, for lower tiers; None: they use the
    KV cache's own memory."""
    planner: CostTierPlanner | None
    """Planner that decides about loads from lower tiers; None if there are none."""
    experts: ExpertLog | None
    """Counts of the experts that tokens chose; None if the model's layers do not report them."""

    def view_groups(self) -> dict[Group, GroupMemory]:
        """Return the host memory of each group, the full blocks first, for lower tiers."""
        mirrors = {} if self.mirror is None else self.mirror.groups
        layout = self.cache.layout
        full = mirrors.get(Group.FULL, self.cache)
        groups = {Group.FULL: GroupMemory(full.view_bytes(), layout.bytes_per_block)}
        if self.states is not None:
            states = mirrors.get(Group.STATE, self.states)
            size = self.states.layout.bytes_per_state
            groups[Group.STATE] = GroupMemory(states.view_bytes(), size, 1)
        if self.windows is not None and self.cache.windows is not None:
            windows = mirrors.get(Group.WINDOW, self.cache.windows)
            size = self.windows.layout.bytes_per_block
            num_seen = count_seen_blocks(self.windows.window, layout.block_size)
            groups[Group.WINDOW] = GroupMemory(windows.view_bytes(), size, num_seen)
        return groups

    def read_expert_hits(self) -> Statistics:
        """Return how many of the chosen experts were in the cache of experts in memory, and how
        many were not and had to be read.
        """
        if isinstance(self.model, OwnModel):
            return Statistics()
        hits, misses = self.model.count_expert_hits()
        return Statistics(num_expert_hits=hits, num_expert_misses=misses)

    def read_latents(self) -> Statistics:
        """Return how the latents (compressed KV of sparse attention) in a file were used; zeros if
        all are in memory.
        """
        latents = self.cache.latents
        if latents is None:
            return Statistics()
        return Statistics(
            num_chosen_latents=latents.counters.chosen,
            num_latent_hits=latents.counters.hits,
            latent_read_bytes=latents.file.read_bytes,
            latent_written_bytes=latents.file.written_bytes,
        )

    def take_operators(self) -> CausalModel:
        """Return the model, for callers that run it without the engine.

        Raises: UnsupportedError (the model runs by transformers' own modules).
        """
        if isinstance(self.model, OwnModel):
            what = "the model runs by transformers' own modules, which compute answers alone"
            raise UnsupportedError("engine.take_operators", what)
        return self.model


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
        model_config: settings of the model.
        engine_config: settings of the engine; a value of 0 is decided here.
        clock: clock of the engine.
        progress: called with (bytes loaded, bytes in all, name of the current part) while weights
            load.
        tiers: settings for loading KV from lower tiers (host memory, SSD); None: there are none.
            The caller attaches the object that moves the blocks.
        allocate: returns memory for all blocks, given its size in bytes; None: the device
            allocates.
        allocate_states: the same for all slots of recurrent states.
        allocate_windows: the same for the blocks of sliding-window layers.
        num_siblings: number of instances that share the machine's memory.

    Raises: errors of ``plan_engine`` and ``load_model``.
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
    if plan.model.own is None:
        # Several instances map the packed file of the first instance, so that file must be complete
        # before the next instance loads. Write it in the background only if there is one instance.
        model = load_model(plan.model, threads, progress, is_written_behind=num_siblings == 1)
        if model.moe and model.hosted:
            _enable_lanes(model, plan.lanes)
    else:
        model = load_own(plan.model, threads, progress)
        # The cache of a model that runs by transformers' own modules can be neither sent to another
        # instance nor stored in a lower tier.
        tiers = allocate = None
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
    latents = None
    if plan.latents is not None:
        assert isinstance(plan.layout, MlaLayout), "latents of a model without"
        latents = LatentTier(
            plan.layout,
            plan.kv.num_blocks,
            folder=Path(plan.latents.folder).expanduser(),
            memory_bytes=plan.latents.memory_bytes,
        )
    cache = model.context.make_kv_cache(
        plan.layout,
        plan.kv.num_blocks,
        blocks,
        windows=window_cache,
        window_layers=() if plan.windows is None else plan.windows.layers,
        latents=latents,
    )
    policy, states, slots = None, None, None
    if isinstance(model, OwnModel):
        assert plan.model.own is not None, "a plan of operators"
        policy = make_own_policy(plan.model.own, plan.config)
        slots = CacheSlots(policy.num_slots)
    elif plan.states is not None:
        policy = StatePolicy(
            plan.states.num_slots, plan.config.state_every, at_blocks=tiers is not None
        )
        states = _make_states(model, plan.states, allocate_states)
    group_depth = 0 if policy is None else 1
    if window_policy is not None:
        group_depth = count_seen_blocks(window_policy.window, plan.layout.block_size)
    experts = _open_expert_log(model, plan.config.expert_trace)
    mirror = None
    if tiers is not None and not model.context.device.is_host:
        mirror = KvMirror(cache, states)
    grammars = Grammars(partial(_make_token_table, plan.model))
    engine = Engine(
        Scheduler(plan.config, pool, index, planner, policy, window_policy),
        TorchRunner(
            model,
            cache,
            threads=plan.torch_threads,
            states=states if slots is None else slots,
            grammars=grammars,
            is_overlapped=plan.config.overlap == "on",
            experts=experts,
            mirror=mirror,
        ),
        clock,
        vocab_size=spec.vocab_size,
        num_labels=spec.num_labels,
        gives_vectors=plan.model.own is None,
        eos_token_ids=spec.eos_token_ids,
        observer=planner,
        masks=grammars,
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
        group_depth=group_depth,
        kv_bytes_per_token=plan.layout.bytes_per_token,
        weight_bytes=model.weight_bytes,
        memory_bytes=plan.memory_bytes,
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
        rejected=plan.rejected_rows(),
        placement=list_placed_layers(plan.model),
        packed_folders=[str(folder) for folder in model.packed_folders],
        load_seconds=0.0,
    )
    return BuiltEngine(
        engine, info, model, identity, index, cache, states, plan.windows, mirror, planner, experts
    )


def _enable_lanes(model: CausalModel, lanes: LanePlan | None) -> None:
    """Split the computation of the routed experts in host memory between the device and the CPU, as
    planned. Without a plan (None), the model's default division is used.
    """
    device = model.context.device
    if lanes is None or not all(experts.native.is_in_one_piece for experts in model.hosted):
        model.enable_hybrid(device)
        return
    if lanes.stream_tokens:
        model.enable_stream(lanes.stream_tokens)
    split, make_policy = lanes.make_split(), None
    if lanes.num_slots:
        make_policy = partial(EXPERT_POLICIES[lanes.policy], lanes.num_slots)
    model.enable_hybrid(
        device,
        split=split,
        max_uploads=lanes.max_uploads or 1,
        num_slots=lanes.num_slots,
        make_policy=make_policy,
    )


def _make_pool(
    model: CausalModel | OwnModel, plan: KvPlan, allocate: Callable[[int], KvMemory] | None
) -> tuple[BlockPool, Tensor | npt.NDArray[np.uint8] | None]:
    """Return the pool of KV blocks and the memory of all blocks; the memory is None if no layer of
    the model keeps KV in blocks.
    """
    if not plan.block_bytes or isinstance(model, OwnModel):
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


def _open_expert_log(model: CausalModel | OwnModel, trace: str) -> ExpertLog | None:
    """Return the log that counts which experts the router chose, or None if the model has no
    experts that report it.

    Raises: ConfigError (a trace is asked of a model that does not report its choices, or the trace
    file cannot be created).
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
    """Load the vocabulary for grammars; called when the first request with a grammar arrives."""
    tokenizer = load_tokenizer(Path(plan.folder))
    vocabulary = list_vocabulary(tokenizer, plan.spec.vocab_size, plan.spec.eos_token_ids)
    return make_token_table(vocabulary, tokenizer)

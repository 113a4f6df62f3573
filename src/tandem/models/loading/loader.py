"""Loading of a checkpoint into a model that runs paged batches."""

import logging
import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from tandem._native import ThreadPool, read_topology, recommend_threads
from tandem.core.errors import ConfigError, ConflictError, ShapeError, UnsupportedError
from tandem.core.model.layers import ExpertsSpec, GqaSpec, MlaSpec
from tandem.core.model.plan import NO_FORMAT, MatrixPlan, ModelPlan
from tandem.core.spec import (
    DTYPE_BYTES,
    KV_CODE_BYTES,
    GqaLayout,
    KvIdentity,
    KVLayout,
    KvSharing,
    MlaLayout,
    ModelSpec,
    WindowLayout,
)
from tandem.core.state_layout import NO_SLOT
from tandem.kernels.cpu.experts import NativeExperts
from tandem.kernels.cpu.hosted_experts import ExpertStaging, HostedExperts, ScaledExperts
from tandem.kernels.cpu.step import CpuStep
from tandem.kernels.cpu.tiered_experts import DiskExperts
from tandem.kernels.device import Device
from tandem.kernels.devices import DeviceContext, open_device
from tandem.kernels.hybrid import HostExperts, HybridDecoder, find_size
from tandem.kernels.interfaces import Angles, WeightReader
from tandem.kernels.lanes.loads import make_loads
from tandem.kernels.lanes.mirrors import KvArrivals
from tandem.kernels.lanes.slots import ExpertSlots, SlotPolicy
from tandem.kernels.lanes.streams import RANGE_BYTES, ExpertStream
from tandem.kernels.lanes.uploads import Split, UploadLane
from tandem.kernels.native import TORCH_DTYPES
from tandem.kernels.operators.decoder_layer import DecoderLayer
from tandem.kernels.operators.experts import read_experts
from tandem.kernels.operators.linear import Embedding
from tandem.kernels.operators.operator import Operator, freeze, running
from tandem.kernels.operators.rope import LayeredRope, Rope, Unrotated
from tandem.kernels.paged import PagedBatch, PagedKvCache
from tandem.kernels.routing import StepRouting
from tandem.kernels.states import StateCache
from tandem.kernels.torch.fixed import FixedDecode, count_width
from tandem.kernels.torch.step import TorchStep
from tandem.models.adapters import ModelAdapters
from tandem.models.families import Checkpoint, open_checkpoint
from tandem.models.families.names import IMAGE_PARTS, rename_reader
from tandem.models.identity import list_config_values, make_kv_identity
from tandem.models.loading.builders import Resources
from tandem.models.loading.expert_disk import follow_experts, open_tier
from tandem.models.loading.injection import apply_plan, require_no_meta
from tandem.models.loading.packed_cache import (
    MIN_CACHED_BYTES,
    PackedCaches,
    choose_root,
    has_manifest,
)
from tandem.models.loading.packed_writer import PackedWriter
from tandem.models.loading.skeleton import build_skeleton
from tandem.models.loading.weight_digest import DigestCache, WeightHasher, name_packed_source
from tandem.models.planning.deferral import find_moe_layers
from tandem.models.planning.roles import find_base_part
from tandem.models.sources.containers import open_source
from tandem.models.sources.source import Progress, WeightSource

__all__ = [
    "CausalModel",
    "count_mapped_bytes",
    "load_model",
    "load_weights",
    "make_kv_layout",
    "open_weights",
]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

NO_ADAPTERS = 0
"""Version of the memory for adapters that a captured step refers to, if no adapter is used in the
step.
"""
MAX_UPLOADS = 4
"""Most experts of a layer that a decode step uploads: the number of places on device and in
staging.
"""


def _without_gradients(method: Callable[P, T]) -> Callable[P, T]:
    """Run a method in torch's inference mode, which is entered (3 us) only if it is off."""

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode():
            return method(*args, **kwargs)

    return run


class CausalModel:
    """A decoder-only language model with weights, ready to run.

    Not thread-safe: one step at a time. Made by ``load_model``.

    Attributes:
        spec: description of the model; ``spec.dtype`` is the dtype it runs in.
        plan: the plan by which it was loaded.
        context: the device with its shared objects.
        weights_digest: SHA-256 over all bytes of the weights, hex.
        ignored_weights: tensors of the checkpoint that no module needs, with the reason.
        adapters: table of LoRA adapters; None until ``enable_adapters``.
    """

    def __init__(
        self,
        skeleton: Any,
        plan: ModelPlan,
        context: DeviceContext,
        weights_digest: str,
        ignored_weights: dict[str, str],
    ) -> None:
        spec, device = plan.spec, context.device.torch_device
        self.spec = spec
        self.plan = plan
        self.weights_digest = weights_digest
        self.ignored_weights = ignored_weights
        self.context = context
        self.device = device
        self.dtype = TORCH_DTYPES[spec.dtype]
        self._execution = context.choose_execution(self.dtype)
        self.skeleton = skeleton
        self.ropes = _find_ropes(find_base_part(skeleton, "rotary")[1], plan, device)
        """RoPEs of the model, by ``rope_idx`` of the layers."""
        base = skeleton.model
        self._embed, self._norm = (
            find_base_part(skeleton, part)[1] for part in ("embedding", "norm")
        )
        self._head = skeleton.lm_head
        layers = list(base.layers)
        self._layer_inputs = _find_layer_inputs(base)
        self._fused = layers if all(isinstance(x, DecoderLayer) for x in layers) else None
        self.moe = find_moe_layers(plan) if self.is_fused else None
        """Layers that have routed experts, by index; None if the choices of experts are not
        recorded (``choices`` is None).
        """
        self.choices: Tensor | None = None
        """Expert choices of the last step, int64 [layers with experts, tokens, top_k], overwritten
        by the next step. None if layers are not fused or have no experts.
        """
        self.adapters: ModelAdapters | None = None
        self._hybrid: HybridDecoder | None = None
        self._lane: UploadLane | None = None
        self._adapter_layout = NO_ADAPTERS
        """Version of the layout of the memory for adapters that captured steps use; a step captured
        with another version is not replayed.
        """
        self._fixed: dict[tuple[int, int], FixedDecode] | None = None
        """Fixed-address memory of captured decode steps, by their numbers of tokens and blocks;
        None: every step brings its own memory.
        """
        self.packed_writer: PackedWriter | None = None
        """Thread that writes packed weights in the background; None if there is nothing to
        write.
        """
        self.packed_folders: list[Path] = []
        """Folders from which packed weights are mapped, now or once they have been written."""

    def enable_hybrid(
        self,
        device: Device,
        *,
        is_captured: bool = True,
        split: Split | None = None,
        max_uploads: int = MAX_UPLOADS,
        num_slots: int = 0,
        make_policy: Callable[[], SlotPolicy] | None = None,
    ) -> HybridDecoder:
        """Run decode steps on a device with routed experts on the host; return their runner.

        Args:
            device: runs this model's operators.
            is_captured: see ``HybridDecoder``.
            split: decides how many of a step's experts are uploaded to the device and computed
                there; None: the host computes all.
            max_uploads: most experts that a step uploads of one layer, a power of two.
            num_slots: experts of each layer that stay in the device's memory; needs a split.
            make_policy: makes the policy that chooses a layer's experts for the slots; needed if
                there are slots.

        Raises: UnsupportedError (layers that are not one operator each, or have experts of no
            weight format).
        """
        layers = [] if self._fused is None else self._fused
        routed = [layer.routed for layer in layers]
        experts = [None if r is None else r[1] for r in routed]
        experts = [e.native if isinstance(e, HostedExperts) else e for e in experts]
        held = [e for e in experts if e is not None]
        if self._fused is None or not all(isinstance(e, NativeExperts) for e in held) or not held:
            what = (
                "only fused layers with routed experts in a weight format run in part on the host"
            )
            raise UnsupportedError("models.enable_hybrid", what)
        is_scaled = any(e.spec.scales_input for e in held)
        if is_scaled and split is not None:
            what = "experts whose inputs the router scales are not uploaded"
            raise UnsupportedError("models.enable_hybrid", what)
        top_k = max(r[0].top_k for r in routed if r is not None)
        lane = None
        if split is not None:
            pool = self.context.pool
            loads = [
                make_loads(e, pool, device) if isinstance(e, NativeExperts) else None
                for e in experts
            ]
            slots: list[ExpertSlots | None] = []
            if num_slots:
                assert make_policy is not None, "slots without a policy"
                slots = [
                    ExpertSlots(
                        device,
                        load.expert_bytes,
                        min(num_slots, load.num_experts),
                        max_uploads,
                        make_policy(),
                    )
                    if load is not None
                    else None
                    for load in loads
                ]
            lane = UploadLane(device, loads, split, max_uploads=max_uploads, slots=slots)
        self._lane = lane
        self._hybrid = HybridDecoder(
            device,
            list(self._fused),
            [_prepare_hosted(e) if isinstance(e, NativeExperts) else None for e in experts],
            (self.spec.hidden_size, top_k),
            self.dtype,
            has_shared=[layer.has_shared for layer in layers],
            num_deferred=self.plan.num_deferred_experts,
            is_captured=is_captured,
            lane=lane,
        )
        if is_captured and not self._execution.is_native:
            self._fixed = {}
        return self._hybrid

    def count_expert_hits(self) -> tuple[int, int]:
        """Return how many of the experts that all steps used were in their cache, and how many were
        not.

        The cache is the slots in the device's memory, or, for experts on disk, those in the host's.
        (0, 0) if there is none.
        """
        if self._lane is not None:
            return self._lane.counts
        on_disk = next((m for m in self.skeleton.modules() if isinstance(m, DiskExperts)), None)
        if on_disk is None:
            return 0, 0
        counters = on_disk.counters
        return counters.hits, counters.inserted + counters.passed

    @property
    def hosted(self) -> list[HostedExperts]:
        """The routed experts, one module a layer in order, that lie in the host's memory while the
        model is on another device; empty if there are none.
        """
        return [m for m in self.skeleton.modules() if isinstance(m, HostedExperts)]

    def enable_stream(
        self, min_tokens: int, *, range_bytes: int = RANGE_BYTES
    ) -> ExpertStream | None:
        """Stream routed experts to the model's device in steps of many tokens; return the stream.

        Args:
            min_tokens: fewest tokens of a step for which experts are streamed.
            range_bytes: bytes of experts that are copied together.

        Returns: None if experts do not lie in one piece of host memory.
        """
        hosted = self.hosted
        if not hosted or not all(experts.native.is_in_one_piece for experts in hosted):
            return None
        device, pool = self.context.device, self.context.pool
        loads = [make_loads(experts.native, pool, device) for experts in hosted]
        stream = ExpertStream(device, loads, range_bytes=range_bytes)
        for layer, experts in enumerate(hosted):
            experts.enable_stream(stream, layer, min_tokens)
        return stream

    def enable_adapters(self, max_adapters: int) -> ModelAdapters:
        """Make the model take LoRA adapters and return their table; call once, before the first
        step, but after ``enable_hybrid``.

        Args:
            max_adapters: most adapters that are loaded at a time.
        """
        assert self.adapters is None, "adapters are enabled already"
        self.adapters = ModelAdapters(
            self.skeleton,
            self.dtype,
            self.context,
            max_adapters,
            is_captured=self._fixed is not None,
        )
        return self.adapters

    @property
    def is_fused(self) -> bool:
        """True if every layer runs as one operator, so transformers' forward is not used."""
        return self._fused is not None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory; shared weights count once."""
        seen = {p.untyped_storage().data_ptr(): p for p in self.skeleton.parameters()}
        packed = [m.packed_bytes for m in self.skeleton.modules() if isinstance(m, Operator)]
        return sum(p.untyped_storage().nbytes() for p in seen.values()) + sum(packed)

    def kv_identity(
        self,
        layout: KVLayout,
        sharing: KvSharing = "relaxed",
        windows: WindowLayout | None = None,
    ) -> KvIdentity:
        """Return the identity that decides whether KV written by this model may be shared.

        Args:
            layout: layout of the blocks that hold the KV.
            sharing: policy for sharing blocks with instances that round differently.
            windows: blocks of the layers with a window; None: they are part of ``layout``.
        """
        return make_kv_identity(
            self.skeleton,
            weights=self.weights_digest,
            config=self.plan.config,
            spec=self.spec,
            layout=layout,
            windows=windows,
            sharing=sharing,
            num_deferred_experts=self.plan.num_deferred_experts,
            rope_factors=self.plan.rope_factors,
        )

    def kv_layout(self, block_size: int = 64, kv_dtype: str = "auto") -> KVLayout:
        """Return the layout of a KV block.

        Args:
            block_size: tokens per block.
            kv_dtype: dtype of stored keys and values; ``auto`` is the model's, ``int8`` and ``fp8``
                are codes with scales.

        Raises:
            ConfigError: an unknown dtype.
        """
        return make_kv_layout(self.spec, block_size, kv_dtype)

    def allocate_kv(
        self,
        num_blocks: int,
        *,
        block_size: int = 64,
        kv_dtype: str = "auto",
        num_window_blocks: int = 0,
    ) -> PagedKvCache:
        """Allocate a pool of KV blocks on the model's device.

        Args:
            num_blocks: number of blocks.
            block_size: tokens of a block.
            kv_dtype: as for ``kv_layout``.
            num_window_blocks: blocks for layers with a window, in a pool of their own; 0: those
                layers use the other blocks, or, if their KV has other sizes, paired blocks
                (``PagedKvCache.is_paired``).
        """
        layout = self.kv_layout(block_size, kv_dtype)
        is_uneven = self.spec.window_sizes is not None
        if not num_window_blocks and not is_uneven:
            return self.context.make_kv_cache(layout, num_blocks)
        rest, windows = self.spec.split_windows(layout)
        assert windows is not None, "all layers see the same tokens"
        own = self.context.make_kv_cache(windows.layout, num_window_blocks or num_blocks)
        cache = self.context.make_kv_cache(
            rest, num_blocks, windows=own, window_layers=windows.layers
        )
        cache.is_paired = not num_window_blocks
        return cache

    def allocate_states(self, num_slots: int) -> StateCache | None:
        """Allocate slots of recurrent states on the model's device; None if no layer has a
        state.
        """
        layout = self.spec.state_layout
        return None if layout is None else self.context.make_state_cache(layout, num_slots)

    @_without_gradients
    def forward(
        self,
        batch: PagedBatch,
        kv_cache: PagedKvCache,
        on_layer: Callable[[int], None] | None = None,
        states: StateCache | None = None,
    ) -> Tensor:
        """Run one step: write the KV of the batch's tokens and return the wanted logits.

        Arguments and errors as for ``compute_hidden``, whose rows the head projects.

        Returns: float32 [R, V], new; row r belongs to ``batch.logit_rows[r]``.
        """
        return self.project(self.compute_hidden(batch, kv_cache, on_layer, states))

    @_without_gradients
    def project(self, hidden_RD: Tensor) -> Tensor:
        """Return the logits of rows of ``compute_hidden``, over tokens or over a classifier's
        labels.

        Returns: float32 [R, V], new.
        """
        if not len(hidden_RD):
            return torch.empty(0, self.spec.num_logits, device=self.device)
        # A head that is transformers' own module gives logits in the model's dtype, hence the cast
        # to float32.
        return self._head(hidden_RD).float()

    @_without_gradients
    def compute_hidden(
        self,
        batch: PagedBatch,
        kv_cache: PagedKvCache,
        on_layer: Callable[[int], None] | None = None,
        states: StateCache | None = None,
        loads: KvArrivals | None = None,
    ) -> Tensor:
        """Run one step: write the KV of the batch's tokens and return the wanted hidden states.

        Args:
            batch: the tokens; token ids below the vocabulary size, blocks below the pool's.
            kv_cache: written at the batch's slots, read at its block tables.
            on_layer: called once a layer's KV of this step is stored, with the layer's index in the
                cache; not called for layers with a window whose blocks are separate.
            states: state slots of the batch's sequences, for a model with ``spec.state_layout``.
            loads: copies of KV to the device that layers wait for; None: all KV is there.

        Returns: [R, D] in the model's dtype, after the final norm; row r belongs to
            ``batch.logit_rows[r]``.

        Raises:
            ShapeError: batch and cache have different block sizes, or the cache another model's
                layout; or sequences have no slots of states where layers have one.
        """
        self._check_cache(batch, kv_cache)
        if batch.num_tokens == 0:
            return torch.empty(0, self.spec.hidden_size, dtype=self.dtype, device=self.device)
        if self.spec.state_layout is not None:
            states = self._check_states(batch, states)
            for slot in batch.fresh_slots:
                states.clear(slot)
        for block_id in batch.fresh_blocks:
            kv_cache.tensor[block_id].zero_()
        own = kv_cache.place_windows(batch)
        if own is not None and kv_cache.windows is not None:
            for block_id in own.fresh_blocks:
                kv_cache.windows.tensor[block_id].zero_()
        if self.adapters is None:
            assert not batch.adapter_rows, "adapters are not enabled"
            return self._compute(batch, kv_cache, on_layer, states, loads)
        self.adapters.begin_step(batch.num_tokens, batch.adapter_rows)
        try:
            return self._compute(batch, kv_cache, on_layer, states, loads)
        finally:
            self.adapters.end_step()

    def _check_cache(self, batch: PagedBatch, kv_cache: PagedKvCache) -> None:
        own, windows = self.kv_layout(batch.block_size, kv_cache.layout.dtype), None
        if kv_cache.windows is not None:
            own, windows = self.spec.split_windows(own)
        held = None if kv_cache.windows is None else kv_cache.windows.layout
        if kv_cache.layout != own or held != (None if windows is None else windows.layout):
            raise ShapeError(
                "models.forward",
                f"a batch of blocks of {batch.block_size} and a cache of {kv_cache.layout} with "
                f"windows of {held}: make both from this model's kv_layout",
            )
        if (batch.windows is None) != (held is None or kv_cache.is_paired):
            raise ShapeError(
                "models.forward",
                "blocks of layers with a window in the batch or in the cache alone: give both them",
            )

    def _check_states(self, batch: PagedBatch, states: StateCache | None) -> StateCache:
        layout, slots = self.spec.state_layout, batch.state_slots
        held = None if states is None else states.layout
        if states is None or held != layout or NO_SLOT in slots or len({*slots}) < len(slots):
            raise ShapeError(
                "models.forward",
                f"slots {slots} of states {held}, where the model has {layout}: give each sequence "
                "a slot of its own, of this model's allocate_states",
            )
        return states

    def _compute(
        self,
        batch: PagedBatch,
        kv_cache: PagedKvCache,
        on_layer: Callable[[int], None] | None,
        states: StateCache | None,
        loads: KvArrivals | None,
    ) -> Tensor:
        routing = None
        if self.moe is not None:
            routing = StepRouting(self.moe, batch, kv_cache, self.dtype)
            self.choices = routing.choices
        # A step that waits for copies of KV, or reports its layers, is not run as a captured graph:
        # a graph repeats the operations of its capture and cannot wait for what each step begins
        # anew.
        fixed = None
        if on_layer is None and loads is None:
            fixed = self._find_fixed(batch, kv_cache, states)
        if fixed is not None:
            return self._run_fixed(fixed, batch)
        step = self._execution.begin_step(
            batch, kv_cache, self.ropes, self.dtype, on_layer, states, routing
        )
        if loads is not None:
            assert isinstance(step, CpuStep | TorchStep), "a step of another execution"
            step.loads = loads
        if self._fused is None:
            with running(step):
                hidden = self.skeleton.model(
                    input_ids=batch.token_ids[None],
                    position_ids=batch.positions[None],
                    use_cache=False,
                ).last_hidden_state[0]
            hidden = hidden.index_select(0, batch.logit_rows)
        else:
            hidden = self._embed(batch.token_ids)
            if self._layer_inputs is not None:
                assert isinstance(step, CpuStep | TorchStep), "a step of another execution"
                step.layer_inputs = self._layer_inputs(batch.token_ids, hidden)
            if self._hybrid is not None and len(batch.query_start) - 1 == batch.num_tokens:
                assert isinstance(step, CpuStep | TorchStep), "a step of another execution"
                # Only native execution may capture the step in a graph, since its operators look up
                # the step's memory anew in each run; other operators would keep stale addresses.
                is_captured = None if self._execution.is_native and loads is None else False
                self._hybrid.run(step, routing, hidden, is_captured=is_captured)
            else:
                for layer in self._fused:
                    step.run_layer_(layer, hidden)
                step.complete_(hidden)
            if len(batch.logit_rows) != len(hidden):
                hidden = hidden.index_select(0, batch.logit_rows)
            hidden = self._norm(hidden)
        return hidden

    def _find_fixed(
        self, batch: PagedBatch, kv_cache: PagedKvCache, states: StateCache | None
    ) -> FixedDecode | None:
        """Return the fixed memory for capturing this step in a graph; None: run without a graph."""
        is_decode = batch.num_sequences == batch.num_tokens > 0
        if self._fixed is None or not is_decode:
            return None
        size = find_size(batch.num_tokens)
        width = count_width(batch, kv_cache, size)
        if width == 0:
            return None
        found = self._fixed.get((size, width))
        if found is None:
            found = self._fixed[size, width] = FixedDecode(
                size,
                width,
                kv_cache,
                hidden_size=self.spec.hidden_size,
                ropes=self.ropes,
                dtype=self.dtype,
                moe=self.moe,
                states=states,
            )
        return found

    def _run_fixed(self, fixed: FixedDecode, batch: PagedBatch) -> Tensor:
        assert self._hybrid is not None, "fixed memory without a device"
        num_live, width = batch.num_tokens, fixed.width
        embedded = self._embed(batch.token_ids)
        inputs = None
        if self._layer_inputs is not None:
            inputs = self._layer_inputs(batch.token_ids, embedded)
        fixed.fill_(batch, embedded, inputs)
        key = (width, NO_ADAPTERS)
        if batch.adapter_rows:
            assert self.adapters is not None, "adapters are not enabled"
            key = (width, self.adapters.fix_step(fixed.size))
            if key[1] != self._adapter_layout:
                self._adapter_layout = key[1]
                self._hybrid.discard(lambda held: held[1] not in (NO_ADAPTERS, key[1]))
        self._hybrid.run(fixed.step, fixed.routing, fixed.hidden, num_live=num_live, key=key)
        if fixed.routing is not None:
            self.choices = fixed.routing.choices[:, :num_live]
        hidden = fixed.hidden[:num_live]
        if len(batch.logit_rows) != num_live:
            hidden = hidden.index_select(0, batch.logit_rows)
        return self._norm(hidden)


def _prepare_hosted(experts: NativeExperts) -> HostExperts:
    return ScaledExperts(experts) if experts.spec.scales_input else experts


def load_model(
    plan: ModelPlan,
    pool: ThreadPool | None = None,
    progress: Progress | None = None,
    *,
    is_written_behind: bool = False,
) -> CausalModel:
    """Load a checkpoint as planned: skeleton, operators, weights, in that order.

    Args:
        plan: the plan made by ``plan_model``; all choices are taken from it.
        pool: runs the native kernels, kept; None = one of as many threads as the machine allows.
        progress: ``progress(done_bytes, total_bytes, what)`` after each tensor.
        is_written_behind: True to let the model's ``packed_writer``, which the caller starts and
            closes, write packed weights to the cache later. Otherwise they are on disk, and mapped
            from there, when this returns, as other instances need that map them too.

    Raises:
        NotFoundError: a file or tensor of the checkpoint is missing.
        ConfigError: a tensor belongs to no module.
        ConflictError: the configuration is not the one that the plan was made of.
        ShapeError: a tensor has another shape than the configuration says.
        CorruptionError: a file is damaged.
        UnsupportedError: the plan has a problem; the text says what and why.
    """
    checkpoint = open_checkpoint(plan.folder)
    if list_config_values(checkpoint.config) != plan.config:
        raise ConflictError(
            "models.load", f"the configuration in {plan.folder} changed: make the plan anew"
        )
    if pool is None:
        pool = ThreadPool(recommend_threads(read_topology()).threads)
    context = DeviceContext(open_device(plan.device), pool)
    model = build_skeleton(checkpoint.config)
    with ExitStack() as stack:
        # The packed cache is not written in the background if experts have parts on NUMA nodes,
        # whose copies would add to the memory to write from, nor if experts stay on disk, which
        # must be written before use.
        is_behind = is_written_behind and plan.expert_parts == 1 and plan.tier is None
        source, hasher, caches = open_weights(
            checkpoint, plan, context, progress, stack, is_behind=is_behind
        )
        share = None if plan.tier is None else open_tier(plan.tier)
        staging = None if context.device.is_host else ExpertStaging(context.device)
        resources = Resources(
            pool=pool, caches=caches, expert_parts=plan.expert_parts, share=share, staging=staging
        )
        apply_plan(model, plan, resources)
        ignored = load_weights(model, checkpoint, source)
        # The hash is nearly complete by now, so no second progress bar is shown for the rest.
        weights_digest = hasher.result()
        folders = [] if caches is None else caches.folders
        unwritten = [] if caches is None else caches.take_unwritten()
    require_no_meta(model)
    if any(isinstance(m, Operator) and m.is_misplaced for m in model.modules()):
        logger.warning(
            "event=memory_not_bound what=weights why=%r",
            "the kernel refused mbind: they lie where threads touched them first",
        )
    if plan.tier is not None:
        follow_experts(model)
    loaded = CausalModel(model, plan, context, weights_digest, ignored)
    loaded.packed_writer = PackedWriter(unwritten) if unwritten else None
    loaded.packed_folders = folders
    return loaded


def open_weights(
    checkpoint: Checkpoint,
    plan: ModelPlan,
    context: DeviceContext,
    progress: Progress | None,
    stack: ExitStack,
    *,
    is_behind: bool = False,
) -> tuple[WeightSource, WeightHasher, PackedCaches | None]:
    """Open the weights of a plan, begin to hash them, and open the caches of packed weights.

    Args:
        checkpoint: the opened checkpoint, with its quantization.
        plan: names the folder, the dtype and the cache.
        context: its threads hash, and its execution is given to operators.
        progress: as for ``load_model``.
        stack: closes all three results.
        is_behind: as for ``PackedCaches``.
    """
    folder, dtype = Path(plan.folder), TORCH_DTYPES[plan.spec.dtype]
    source = open_source(
        folder,
        dtype=dtype,
        device=context.device,
        execution=context.choose_execution(dtype),
        progress=progress,
        quantization=checkpoint.quantization,
    )
    stack.enter_context(source)
    cache = DigestCache.of_user(folder)
    hasher = WeightHasher(source.entries, num_threads=context.pool.num_threads, cache=cache)
    stack.enter_context(hasher)
    root = _choose_packed_root(plan)
    if root is None:
        return source, hasher, None
    read_dtype = "" if source.holds_exactly(dtype) else plan.spec.dtype

    def find_source() -> str:
        return name_packed_source(hasher.result(), plan.config, read_dtype)

    if not is_behind or has_manifest(root):
        # If a cache exists, wait for the digest now, with a progress bar, as the cache is checked
        # against it. If nothing is cached or written yet, hashing goes on while the weights load.
        hasher.result(progress)
    caches = PackedCaches(root, find_source=find_source, is_behind=is_behind)
    return source, hasher, stack.enter_context(caches)


def count_mapped_bytes(plan: ModelPlan) -> int:
    """Return the bytes of a plan's weights that are mapped from a file, once for all instances.

    These are cached packed experts; if experts have parts on NUMA nodes, each process has copies
    instead.
    """
    if plan.expert_parts > 1 or plan.tier is not None or _choose_packed_root(plan) is None:
        return 0
    return sum(matrix.size_bytes for matrix in _list_packed(plan))


def _list_packed(plan: ModelPlan) -> list[MatrixPlan]:
    # Ungated experts are omitted: they have matrices of another layout, which the packed cache does
    # not hold.
    gated = {m.module for m in plan.modules if isinstance(m.spec, ExpertsSpec) and m.spec.is_gated}
    held = (m for m in plan.matrices if m.role == "experts" and m.weight_format != NO_FORMAT)
    return [matrix for matrix in held if matrix.module in gated]


def _choose_packed_root(plan: ModelPlan) -> Path | None:
    if not _list_packed(plan):
        return None
    if plan.tier is not None and plan.packed_cache == "off":
        what = "experts that stay on disk need a place there: give a folder, or auto"
        raise ConfigError("models.load", what, field="model.packed_cache")
    # Experts that stay on disk need the cache whatever their size, so the smallest cacheable size
    # is given.
    size_bytes = plan.expert_bytes if plan.tier is None else MIN_CACHED_BYTES
    return choose_root(plan.packed_cache, Path(plan.folder), size_bytes)


def _find_layer_inputs(base: Any) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return a function that computes the layers' additional inputs; None: they have none.

    It takes tokens [T] and their embeddings [T, D] and returns [T, layers, items]: table rows by
    token plus a projection of the embeddings, added by transformers' module.
    """
    if getattr(base, "embed_tokens_per_layer", None) is None:
        return None

    def compute(token_ids: Tensor, embedded: Tensor) -> Tensor:
        rows = base.get_per_layer_inputs(token_ids[None])
        return base.project_per_layer_inputs(embedded[None], rows)[0]

    return compute


def _find_ropes(
    module: nn.Module | None, plan: ModelPlan, device: torch.device
) -> tuple[Angles, ...]:
    """Return the RoPEs of a model, by ``rope_idx`` of its layers.

    These are the operator's, or, if a rule keeps transformers' module, new ones with its angles,
    since replaced attention modules take angles from the step.

    Raises: UnsupportedError (no operator computes the angles of the rotary module).
    """
    if module is None:
        # The model has no rotary module, so its MLA layers get a rotation that changes nothing.
        latents = [layer.mixer for layer in plan.layers if isinstance(layer.mixer, MlaSpec)]
        return (Unrotated(latents[0].rope) if latents else Unrotated(),)
    if isinstance(module, Rope | LayeredRope):
        ropes = module.ropes
    else:
        _require_steady(module)
        specs = {
            layer.mixer.rope_idx: layer.rope
            for layer in plan.layers
            if isinstance(layer.mixer, GqaSpec | MlaSpec)
        }
        known = [specs[i] for i in sorted(specs)]
        ropes = tuple(Rope(spec) for spec in known if spec is not None)
        if len(ropes) < len(known):
            what = f"no operator has the angles of {type(module).__name__}"
            raise UnsupportedError("models.load", what)
    for rope in ropes:
        rope.inv_freq = rope.inv_freq.to(device)
    return ropes


def _require_steady(module: nn.Module) -> None:
    """Check that the angles of transformers' rotary module depend on positions alone.

    Raises: UnsupportedError (they change with the length of the sequence, so that cached keys and
        chunks of a prompt would be rotated by others).
    """
    kinds: Any = getattr(module, "rope_type", "")
    found = set(kinds.values() if isinstance(kinds, dict) else [kinds]) & {"dynamic", "longrope"}
    if found:
        what = f"a rule keeps {type(module).__name__}, whose {found.pop()} angles change with a "
        what += "sequence's length: leave it to the operator Rope"
        raise UnsupportedError("models.load", what)


def make_kv_layout(spec: ModelSpec, block_size: int, kv_dtype: str) -> KVLayout:
    """Return the layout of a model's KV block; ``auto`` is the dtype that the model runs in.

    Raises: ConfigError for an unknown dtype.
    """
    dtype = spec.dtype if kv_dtype == "auto" else kv_dtype
    if dtype not in DTYPE_BYTES and dtype not in KV_CODE_BYTES:
        known = ", ".join((*DTYPE_BYTES, *KV_CODE_BYTES))
        raise ConfigError(
            "models.kv_layout", f"kv_dtype {kv_dtype!r}: use auto, {known}", field="kv_dtype"
        )
    if spec.kv_lora_rank:
        return MlaLayout(
            num_layers=spec.num_kv_layers,
            kv_lora_rank=spec.kv_lora_rank,
            rope_dim=spec.rope_dim,
            index_dim=spec.index_dim,
            index_layers=spec.index_layers,
            block_size=block_size,
            dtype=dtype,
        )
    return GqaLayout(
        num_layers=spec.num_kv_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=block_size,
        dtype=dtype,
    )


def _list_harmless(checkpoint: Checkpoint, source: WeightSource) -> dict[str, str]:
    harmless: dict[str, str] = {}
    if checkpoint.config.tie_word_embeddings:
        harmless["lm_head.weight"] = "the model ties it to the embedding"
    num_extra = getattr(checkpoint.config, "num_nextn_predict_layers", None) or 0
    first = checkpoint.config.num_hidden_layers
    prefixes = tuple(f"model.layers.{first + i}." for i in range(num_extra))
    why = "of a layer that predicts tokens further ahead"
    harmless |= {
        name: why for name in source.entries if name.startswith((*prefixes, "mtp.", "model.mtp."))
    }
    why = "of a layer that shares the keys and values of another one"
    num_shared = getattr(checkpoint.config, "num_kv_shared_layers", None) or 0
    shared = "|".join(str(i) for i in range(first - num_shared, first))
    own = re.compile(rf"\.layers\.({shared})\.self_attn\.[kv]_(proj|norm)\.")
    harmless |= {name: why for name in source.entries if num_shared and own.search(name)}
    # The skeleton's names are listed too, for files whose own tensor names differ (GGUF).
    harmless |= {
        f"model.layers.{i}.self_attn.{part}.weight": why
        for i in range(first - num_shared, first)
        for part in ("k_proj", "v_proj", "k_norm")
    }
    why = "of the part that sees images, which text does not need"
    return harmless | {name: why for name in source.entries if name.startswith(IMAGE_PARTS)}


def load_weights(model: nn.Module, checkpoint: Checkpoint, source: WeightSource) -> dict[str, str]:
    """Load the weights of every module; return the unused tensors with reasons, {name: why}.

    Operators load themselves; transformers' own modules get frozen parameters.

    Raises: the errors of ``WeightReader.read_into``; ConfigError (a tensor belongs to no module).
    """
    _load_modules(
        model, checkpoint, rename_reader(source, source.entries, checkpoint.config.model_type)
    )
    return source.check_all_used(_list_harmless(checkpoint, source))


def _load_modules(model: nn.Module, checkpoint: Checkpoint, source: WeightReader) -> None:
    """Load the weights of all modules in the model's order, one operator at a time."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Operator):
            module.load(source, name)
        elif module._parameters:
            _load_plain(model, module, name, checkpoint, source)
        elif _list_stored_buffers(module):
            _read_buffers(module, name, source)
        elif module._buffers:
            _rebuild_buffers(model, module, name, checkpoint)


def _load_plain(
    model: nn.Module, module: nn.Module, name: str, checkpoint: Checkpoint, source: WeightReader
) -> None:
    """Load the weights of a module that the placement rules left as transformers' own."""
    if name == "lm_head" and checkpoint.config.tie_word_embeddings:
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        is_ours = isinstance(embedding, Embedding) and embedding.packed is not None
        module.weight = freeze(embedding.read_weight()) if is_ours else embedding.weight
        return
    parameters = {key: p for key, p in module._parameters.items() if p is not None}
    weights = {
        key: torch.empty(p.shape, dtype=source.dtype, device=source.device)
        for key, p in parameters.items()
    }
    if weights.keys() == {"gate_up_proj", "down_proj"}:
        read_experts(source, name, weights["gate_up_proj"], weights["down_proj"])
    else:
        for key, weight in weights.items():
            source.read_into(f"{name}.{key}", weight)
    for key, weight in weights.items():
        setattr(module, key, freeze(weight))
    _read_buffers(module, name, source)


def _list_stored_buffers(module: nn.Module) -> list[str]:
    return [key for key in module._buffers if key not in module._non_persistent_buffers_set]


def _read_buffers(module: nn.Module, name: str, source: WeightReader) -> None:
    """Read the buffers that checkpoints store, in the dtype of the skeleton's buffers."""
    for key in _list_stored_buffers(module):
        buffer = module._buffers[key]
        assert buffer is not None, key
        value = torch.empty(buffer.shape, dtype=buffer.dtype, device=source.device)
        source.read_into(f"{name}.{key}", value)
        module._buffers[key] = value


def _rebuild_buffers(
    model: nn.Module, module: nn.Module, name: str, checkpoint: Checkpoint
) -> None:
    """Build a module without weights again, off the meta device, so that it computes its
    buffers.
    """
    model.set_submodule(name, type(module)(checkpoint.config).eval())

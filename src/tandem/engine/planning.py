"""The plan of an engine: every setting with its actual value and the reason.

``plan_engine`` makes it from the model's configuration and the machine's resources, without reading
a weight. `tandem plan` and `tandem serve --dry-run` print it, ``build_engine`` carries it out, and
``/server_info`` shows it.
"""

import logging
import os
import shutil
from pathlib import Path

import msgspec

from tandem import _native
from tandem.core.config import choose_isa
from tandem.core.errors import ConfigError, UnsupportedError
from tandem.core.kv_layout import MlaLayout, WindowLayout
from tandem.core.model.layers import MlaSpec
from tandem.core.model.plan import ModelPlan
from tandem.core.spec import KVLayout, ModelSpec
from tandem.engine.config import EngineConfig
from tandem.engine.lanes import LanePlan, count_slot_bytes, plan_lanes
from tandem.engine.memory import (
    DEFAULT_FRACTION,
    DISK_FRACTION,
    KvPlan,
    LatentPlan,
    StatePlan,
    check_context,
    plan_kv_cache,
    plan_latents,
    plan_states,
)
from tandem.engine.own import list_own_rows, plan_own_memory
from tandem.kernels.calibration import Calibration, find_kept
from tandem.kernels.devices import open_device
from tandem.kernels.latents.file import open_unnamed
from tandem.models.adapter_plan import AdapterPlan, plan_adapters
from tandem.models.config import ModelConfig
from tandem.models.loading.expert_disk import list_expert_sizes, measure_reads, plan_tier
from tandem.models.loading.hub import resolve_folder
from tandem.models.loading.loader import count_mapped_bytes, make_kv_layout
from tandem.models.own.plan import plan_served
from tandem.models.planning.plan_report import list_formats
from tandem.placement.choosers import CHUNKS, Choice, choose_chunk
from tandem.placement.costs import Placement, StepTime, decode_time, prefill_time
from tandem.placement.experts.tier import predict_token_seconds
from tandem.placement.served import fit_formats, place_served, read_served
from tandem.placement.shape import FORMAT_BYTES, ModelShape

__all__ = ["RUNTIME_BYTES", "EnginePlan", "Forecast", "count_users", "plan_engine"]

logger = logging.getLogger(__name__)

MIB = 1 << 20
GIB = 1 << 30

DEVICE_FRACTION = 0.85
"""Share of a GPU's memory left by the weights that goes to KV; activations need the rest."""

TIER_KV_FRACTION = 0.2
"""Share for KV of the memory left by the dense weights, if experts lie on disk. It is small,
because an expert in memory saves more time than an unused block."""
RUNTIME_BYTES = 1 << 30
"""Bytes that an instance needs beside weights and KV: Python, torch, activations. Measured: 0.6 GiB
after loading, and tens of KiB per token of a step."""

MIN_SHARED_WEIGHTS = 2_000_000
"""Weights that a token reads in a layer, below which torch multiplies on one thread: its operations
are too short to share, however many tokens a step has. Measured with the demo model in float32
(0.5 M a layer) on two quiet cores: two threads took 1.8 times as long for 512 tokens, 1.3 for
2,048, and 2.1 for 64 decodes. The native pool wakes sooner: there two threads take 0.6 of the time
for 512 tokens, 0.8 for 16 decodes, and no longer for one."""


COARSER_FORMATS = ("int8", "int4")
"""Weight formats for which the plan tells the speed they would bring and why they were not
chosen."""
PROMPT_TOKENS = 4096
"""Prompt length in tokens for speed predictions; half the context if that is shorter."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted speeds for one user on this machine, from the cost model and the machine's measured
    speeds (calibration).
    """

    prompt_tokens: int
    prefill_rate: float
    """Prefill speed, tokens a second."""
    decode_rate: float
    """Decode speed after a prompt of ``prompt_tokens``, tokens a second."""
    chunk_rates: dict[int, float]
    """Prefill speed in tokens a second, by the token budget of a step."""
    format_rates: dict[str, float]
    """Decode speed in tokens a second, by the format of the routed experts; for a model without
    experts, by the format of all matrices."""
    source: str


class EnginePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of the engine that will run: every value concrete, with reasons of those decided
    here.
    """

    model: ModelPlan
    layout: KVLayout
    """Layout of the full blocks, without the layers of ``windows``."""
    windows: WindowLayout | None = None
    """Layout of the sliding-window layers' own blocks; None: these layers use the full blocks."""
    config: EngineConfig
    """Engine settings with every automatic value filled in."""
    kv: KvPlan
    states: StatePlan | None
    """Number of state slots; None: the model has no recurrent state."""
    latents: LatentPlan | None = None
    """Sizes for keeping latents of sparse attention in a file; None: the latents of all blocks, if
    the model has any, are in memory.
    """
    threads_reason: str
    deferral_reason: str
    torch_threads: int
    """Number of threads that torch uses for operations without a native kernel."""
    torch_threads_reason: str
    step_reason: str
    forecast: Forecast | None
    """Predicted speeds; None if this machine was not measured."""
    rejected: tuple[Choice, ...]
    adapters: AdapterPlan | None = None
    """Memory of the LoRA adapters; None: none can be loaded."""
    lanes: LanePlan | None = None
    """Division of the routed experts between host and device; None if they do not share them."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights in memory, adapters of the start, blocks, states and latents, in all
        memories together, without a step's buffers.
        """
        others = (self.kv, self.kv.windows, self.states, self.adapters)
        sizes = [each.size_bytes for each in others if each is not None]
        latents = 0 if self.latents is None else self.latents.memory_bytes
        return self.model.resident_bytes + sum(sizes) + latents

    @property
    def operator_threads(self) -> dict[str, int]:
        """Number of threads for each kind of computation, by its name."""
        names = ["attention", "matrices", *(["routed experts"] if self.model.spec.is_moe else [])]
        return {**dict.fromkeys(names, self.config.threads), "torch": self.torch_threads}

    def rejected_rows(self) -> list[tuple[str, str, str]]:
        """Return rows (item, value, reason against it) of settings that were considered and
        rejected, for the printed plan.
        """
        return [(choice.what, choice.value, choice.reason) for choice in self.rejected]

    def rows(self) -> list[tuple[str, str, str]]:
        """Return rows (item, value, reason) of the chosen settings, for the printed plan."""
        model, spec, kv = self.model, self.model.spec, self.kv
        begin = [
            ("model", model.folder, spec.architecture),
            (
                "weights",
                f"{model.weight_bytes / MIB:.0f} MiB",
                f"{spec.num_parameters:,} parameters",
            ),
            *_tell_tier(model),
            *([] if self.adapters is None else self.adapters.tell()),
            ("dtype", spec.dtype, spec.dtype_reason),
        ]
        context = ("context", f"{self.config.max_model_len} tokens", kv.max_model_len_reason)
        threads = ("torch threads", str(self.torch_threads), self.torch_threads_reason)
        end = [
            ("KV sharing", self.config.kv_sharing, "engine.kv_sharing"),
            ("step", f"{self.config.max_batch_tokens} tokens", self.step_reason),
            ("requests", f"{self.config.max_running} running", "engine.max_running"),
            ("queue", f"{self.config.max_queue} waiting", "engine.max_queue"),
            ("order", self.config.scheduling_order, "engine.scheduling_order"),
            self._tell_speed(),
        ]
        if model.own is not None:
            return [*begin, *list_own_rows(model.own, kv, self.config), context, threads, *end]
        return [
            *begin,
            *list_formats(model),
            ("kernels", *choose_isa(_native.cpu_features().cap, _native.kernel_isas())),
            *self._list_experts(),
            context,
            *self._list_ropes(),
            ("threads", self._tell_threads(), self.threads_reason),
            threads,
            (
                "KV cache",
                f"{kv.num_blocks} blocks of {self.layout.block_size} tokens, "
                f"{kv.size_bytes / MIB:.0f} MiB when all are used",
                f"{kv.reason}; {kv.block_bytes // self.layout.block_size} bytes a token",
            ),
            *self._list_latents(),
            *self._list_windows(),
            *self._list_states(),
            *end,
        ]

    def _list_experts(self) -> list[tuple[str, str, str]]:
        model = self.model
        if not model.spec.is_moe:
            return []
        why = "in place, mapped if cached"
        if model.expert_parts > 1:
            why = "copied to the NUMA nodes that compute them"
        return [
            ("expert parts", str(model.expert_parts), why),
            ("deferred experts", str(model.num_deferred_experts), self.deferral_reason),
            *([] if self.lanes is None else self.lanes.tell()),
        ]

    def _tell_threads(self) -> str:
        names = [name for name in self.operator_threads if name != "torch"]
        return f"{self.config.threads} for each of {', '.join(names)}"

    def _tell_speed(self) -> tuple[str, str, str]:
        told = self.forecast
        if told is None:
            why = "this machine was not measured: `tandem plan` does it"
            why = "latents are read from disk" if self.latents is not None else why
            tier = self.model.tier
            why = "the disk was not measured" if tier is not None and not tier.read_rate else why
            why = "GPUs are not measured" if self.model.device != "cpu" else why
            why = "transformers' own modules are not measured" if self.model.own else why
            return ("speed", "unknown", why)
        text = f"{told.prefill_rate:.0f} tokens/s of a prompt of {told.prompt_tokens}, "
        text += f"{told.decode_rate:.1f} tokens/s of an answer"
        return ("speed", text, f"predicted for one user, {told.source}")

    def _list_windows(self) -> list[tuple[str, str, str]]:
        plan, windows = self.kv.windows, self.windows
        if plan is None or windows is None:
            return []
        # Compare to one shared pool, where each block would also hold the window layers' KV.
        saved = (self.kv.num_blocks - plan.num_blocks) * plan.block_bytes
        text = (
            f"{plan.num_blocks} blocks of {self.layout.block_size} tokens in "
            f"{windows.layout.num_layers} layers, {plan.size_bytes / MIB:.0f} MiB when all are used"
        )
        why = f"{plan.reason}; a window of {windows.window} tokens saves {saved / MIB:.0f} MiB"
        return [("windows", text, why)]

    def _list_ropes(self) -> list[tuple[str, str, str]]:
        """Return a row for each LongRoPE with the factors that the context decided on."""
        ropes = {layer.rope for layer in self.model.layers if layer.rope is not None}
        rows: list[tuple[str, str, str]] = []
        for rope in sorted((r for r in ropes if r.rope_type == "longrope"), key=repr):
            original = rope.original_max_position_embeddings
            why = f"the context is within the original {original} tokens"
            if rope.is_long:
                why = f"at all positions, as the context is beyond the original {original} tokens; "
                why += f"--max-model-len {original} takes the short factors"
            rows.append(("RoPE", "long factors" if rope.is_long else "short factors", why))
        return rows

    def _list_latents(self) -> list[tuple[str, str, str]]:
        plan = self.latents
        if plan is None:
            return []
        size = self.kv.num_blocks * plan.block_bytes
        text = (
            f"{plan.num_rows} rows of {plan.row_bytes} bytes in memory, "
            f"{plan.memory_bytes / MIB:.0f} MiB; {size / MIB:.0f} MiB in {plan.folder}"
        )
        why = f"engine.latents_in_memory; a token attends to {plan.top} at most in a layer"
        return [("latents", text, why)]

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


def plan_engine(
    model_config: ModelConfig,
    engine_config: EngineConfig,
    *,
    num_siblings: int = 1,
    is_shared: bool = False,
) -> EnginePlan:
    """Decide the settings that are 0 or ``auto``.

    Args:
        model_config: settings of the model.
        engine_config: settings of the engine, 0 for a value to be decided here.
        num_siblings: number of instances that share the free memory, this one included.
        is_shared: True if blocks go to a store or to other instances.

    Raises: errors of ``plan_model``; ConfigError (settings do not fit the model or the memory).
    """
    folder = resolve_folder(model_config.path, revision=model_config.revision)
    topology = _native.read_topology()
    threads, threads_reason = _choose_threads(engine_config, topology)
    num_deferred, deferral_reason = _choose_deferral(model_config, engine_config)
    model = plan_served(
        folder,
        proof=model_config.proof,
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
        # The interpreter and a step's scratch memory count against ``engine.memory_bytes`` too.
        available = max(0, min(available, engine_config.memory_bytes - RUNTIME_BYTES))
    adapters = plan_adapters(model, model_config)
    adapter_bytes = 0 if adapters is None else adapters.size_bytes
    device = open_device(model.device)
    if device.is_host:
        available = max(0, available - adapter_bytes)
    left = _share_memory(
        available * num_siblings, model.host_bytes, count_mapped_bytes(model), num_siblings
    )
    if model_config.expert_slots or (left < 0 and list_expert_sizes(model) is not None):
        model = _plan_tier(model, model_config, engine_config, available)
        left, fraction = available - (model.weight_bytes - model.expert_bytes), TIER_KV_FRACTION
    total = topology.memory_total_bytes
    if not device.is_host:
        # On a device, KV and states lie beside the weights in device memory.
        total, host_left = device.count_free_bytes(), left
        left, fraction = total - (model.weight_bytes - model.host_bytes), DEVICE_FRACTION
        _check_device_weights(model, total, left)
        left -= adapter_bytes
        if adapter_bytes and left <= 0:
            what = f"adapters take {adapter_bytes / GIB:.1f} GiB of {model.device}, "
            what += f"{-left / GIB:.1f} more than its weights leave: serve fewer"
            raise ConfigError("engine.plan", what, field="model.adapter")
        if is_shared:
            # The host has a copy of each block, which the store moves.
            left, total = min(left, host_left), min(total, host_left)
    slot_bytes = count_slot_bytes(model_config, model, device)
    left -= slot_bytes
    if slot_bytes and left <= 0:
        what = f"{model_config.device_experts} experts of each layer take {slot_bytes / GIB:.1f} "
        what += f"GiB of {model.device}, {-left / GIB:.1f} more than its weights leave: keep fewer"
        raise ConfigError("engine.plan", what, field="model.device_experts")
    spec = model.spec
    own = spec.max_position_embeddings
    check_context(engine_config.max_model_len, own, model.context_reason)
    torch_threads, torch_reason = _choose_torch_threads(threads, model)
    if model.own is not None and engine_config.latents_in_memory_bytes:
        what = "transformers' own modules run the model, whose cache is in memory: leave it empty"
        raise UnsupportedError("engine.plan_latents", what, field="engine.latents_in_memory")
    if model.own is not None:
        memory = plan_own_memory(model, engine_config, available_bytes=left, total_bytes=total)
        step, step_reason = _choose_step(engine_config, None)
        return EnginePlan(
            model=model,
            layout=memory.layout,
            config=msgspec.structs.replace(
                memory.config,
                max_model_len=memory.kv.max_model_len,
                num_kv_blocks=memory.kv.num_blocks,
                num_state_slots=memory.states.num_slots,
                threads=threads,
                max_batch_tokens=step,
            ),
            kv=memory.kv,
            states=memory.states,
            threads_reason=threads_reason,
            deferral_reason=deferral_reason,
            torch_threads=torch_threads,
            torch_threads_reason=torch_reason,
            step_reason=step_reason,
            forecast=None,
            rejected=(),
        )
    layout = make_kv_layout(spec, engine_config.block_size, engine_config.kv_dtype)
    bytes_per_token = layout.bytes_per_token
    context = engine_config.max_model_len or own
    # Blocks that are stored or read by other instances must have bytes, so some layer must see all
    # tokens before the window layers are split off.
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
    block_bytes, most_blocks, latents = layout.bytes_per_block, None, None
    if engine_config.latents_in_memory_bytes:
        latents = _plan_latents(engine_config, model, layout, context=context, is_shared=is_shared)
        block_bytes = latents.index_bytes
        left = int((left - latents.memory_bytes) / (1 + latents.map_bytes / block_bytes))
        free_bytes = _count_free_disk(latents.folder) // num_siblings
        most_blocks = int(free_bytes * DISK_FRACTION) // latents.block_bytes
    kv = plan_kv_cache(
        engine_config,
        block_bytes=block_bytes,
        own_context=own,
        own_reason=model.context_reason,
        available_bytes=left,
        total_bytes=total,
        taken_bytes=0 if states is None else states.size_bytes,
        fraction=fraction,
        windows=windows,
        most_blocks=most_blocks,
    )
    model = model.serve(kv.max_model_len)
    shape = read_served(model, kv_bytes=bytes_per_token)
    prompt_tokens = min(PROMPT_TOKENS, kv.max_model_len // 2 or 1)
    calibration = find_kept() if latents is None else None
    forecast = _forecast(model, shape, calibration, prompt_tokens)
    step, step_reason = _choose_step(engine_config, forecast)
    config = msgspec.structs.replace(
        engine_config,
        max_model_len=kv.max_model_len,
        num_kv_blocks=kv.num_blocks,
        num_state_slots=0 if states is None else states.num_slots,
        num_window_blocks=0 if kv.windows is None else kv.windows.num_blocks,
        threads=threads,
        max_batch_tokens=step,
    )
    return EnginePlan(
        model=model,
        layout=layout,
        windows=windows,
        config=config,
        kv=kv,
        states=states,
        latents=latents,
        adapters=adapters,
        threads_reason=threads_reason,
        deferral_reason=deferral_reason,
        torch_threads=torch_threads,
        torch_threads_reason=torch_reason,
        step_reason=step_reason,
        forecast=forecast,
        lanes=plan_lanes(model_config, model, shape, slot_bytes=slot_bytes),
        rejected=(
            *_reject_formats(model, shape, forecast),
            *_reject_deferral(model),
            *_reject_threads(threads, topology),
            *_reject_memory(model, kv, layout),
            *_reject_steps(step, forecast),
        ),
    )


def _plan_latents(
    config: EngineConfig, model: ModelPlan, layout: KVLayout, *, context: int, is_shared: bool
) -> LatentPlan:
    where, field = "engine.plan_latents", "engine.latents_in_memory"
    if model.device != "cpu":
        what = f"latents of attention on {model.device}: only on the CPU are they fetched"
        raise UnsupportedError(where, what, field=field)
    tops = frozenset(m.spec.top for m in model.modules if isinstance(m.spec, MlaSpec))
    return plan_latents(config, layout, tops=tops, context=context, is_shared=is_shared)


def _count_free_disk(folder: str) -> int:
    """Return the free bytes of a folder's disk. Raises: ConfigError (no file can be made there)."""
    place = Path(folder).expanduser()
    os.close(open_unnamed(place))
    return shutil.disk_usage(place).free


def _split_windows(
    spec: ModelSpec, layout: KVLayout, context: int
) -> tuple[KVLayout, WindowLayout | None]:
    """Return the layouts of full blocks and of window blocks (KV of the sliding-window layers).

    The latter is None if sliding-window layers are to use the full blocks.
    """
    is_even = spec.window_sizes is None
    if is_even and (spec.state_layout is not None or spec.sliding_window >= context):
        return layout, None
    return spec.split_windows(layout)


def _check_device_weights(model: ModelPlan, free_bytes: int, left_bytes: int) -> None:
    """Check that the weights fit a device's memory, before any is loaded.

    Raises: ConfigError (they do not; the text says what to change).
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


def count_users(planned: EnginePlan, rate: float) -> int:
    """Return how many users at a time get at least ``rate`` tokens a second each; 0 if unknown.

    Args:
        planned: plan of the engine.
        rate: tokens a second for each user.
    """
    calibration, told = find_kept(), planned.forecast
    # Models that run by transformers' own modules have no forecast.
    if calibration is None or told is None:
        return 0
    if planned.model.tier is not None:
        return 0  # Users share a part of the experts read from disk, which no forecast counts.
    config = planned.config
    kv_bytes = make_kv_layout(planned.model.spec, config.block_size, config.kv_dtype)
    shape = read_served(planned.model, kv_bytes=kv_bytes.bytes_per_token)
    place = place_served(planned.model, chunk_tokens=planned.config.max_batch_tokens)
    eff = fit_formats(planned.model, calibration.efficiencies)
    spec, context = calibration.hardware, told.prompt_tokens
    fitting = planned.kv.num_blocks * planned.layout.block_size // context
    users = 0
    for count in range(1, min(planned.config.max_running, fitting) + 1):
        step = decode_time(spec, shape, place, eff, users=count, context=context)
        if 1 / step.seconds < rate:
            break
        users = count
    return users


def _plan_tier(
    model: ModelPlan, model_config: ModelConfig, engine_config: EngineConfig, available_bytes: int
) -> ModelPlan:
    """Return the model's plan with its routed experts on disk, where the memory that KV leaves
    caches some of them.
    """
    left = available_bytes - (model.weight_bytes - model.expert_bytes)
    left -= engine_config.latents_in_memory_bytes
    layout = make_kv_layout(model.spec, engine_config.block_size, engine_config.kv_dtype)
    if engine_config.num_kv_blocks:
        block_bytes = layout.bytes_per_block
        if engine_config.latents_in_memory_bytes and isinstance(layout, MlaLayout):
            block_bytes = layout.index_block_bytes
        kv_bytes = engine_config.num_kv_blocks * block_bytes
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
    """Return rows (item, value, reason) about routed experts that lie on disk, for the printed
    plan.
    """
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
    """Return the bytes that each of several instances may use beside its weights.

    Negative if the weights do not fit.

    Args:
        available_bytes: free memory of the machine before any instance has loaded.
        weight_bytes: bytes of the model's weights.
        mapped_bytes: the part of them in a file that all instances map, so that it counts once.
        num_siblings: number of instances.
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
        return 0, "no GPU to overlap with" if model.device == "cpu" else "GPUs are not measured"
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
    """Return the bytes of memory that are free now, in the machine and the control group."""
    left = topology.limits.memory_left_bytes
    if left is None:
        left = topology.limits.memory_limit_bytes
    available = topology.memory_available_bytes
    return available if left is None else min(available, left)


def _forecast(
    model: ModelPlan, shape: ModelShape, calibration: Calibration | None, prompt: int
) -> Forecast | None:
    """Predict speeds from the calibration of this machine; None without one.

    None also for models on a GPU, of which nothing is measured, and if experts lie on a disk whose
    rate is unknown.
    """
    tier = model.tier
    if calibration is None or model.device != "cpu" or (tier is not None and not tier.read_rate):
        return None
    spec, eff = calibration.hardware, fit_formats(model, calibration.efficiencies)
    item_bytes = place_served(model, chunk_tokens=1).expert_bytes

    def decode(place: Placement) -> float:
        step = decode_time(spec, shape, place, eff, users=1, context=prompt)
        return 1 / (step.seconds + wait_for_disk(step, place, 0))

    def prefill(chunk: int) -> float:
        place = place_served(model, chunk_tokens=chunk)
        step = prefill_time(spec, shape, place, eff, tokens=prompt)
        return prompt / (step.seconds + wait_for_disk(step, place, -(-prompt // chunk)))

    def wait_for_disk(step: StepTime, place: Placement, num_chunks: int) -> float:
        """Return the seconds that a decode (0 chunks) or a prefill waits for experts on disk."""
        sizes = list_expert_sizes(model)
        if tier is None or sizes is None:
            return 0.0
        # A coarser format makes experts smaller, so that more of them are cached.
        share = place.expert_bytes / item_bytes
        sizes = sizes._replace(expert_bytes=round(sizes.expert_bytes * share))
        num_slots = min(sizes.num_experts, int(tier.num_slots / share))
        computing = step.parts.cpu_experts
        if num_chunks:
            # A prefill's chunk takes nearly all experts, and reads those without a slot while it
            # computes the others.
            missing = sizes.num_layers * (sizes.num_experts - num_slots) * sizes.expert_bytes
            return max(0.0, num_chunks * missing / tier.read_rate - computing)
        return (
            predict_token_seconds(
                sizes, num_slots, compute_seconds=computing, read_rate=tier.read_rate
            )
            - computing
        )

    chunks = [chunk for chunk in CHUNKS if chunk == CHUNKS[0] or chunk < 2 * prompt]
    rates = {chunk: prefill(chunk) for chunk in chunks}
    chosen = place_served(model, chunk_tokens=choose_chunk(rates))
    return Forecast(
        prompt_tokens=prompt,
        prefill_rate=rates[chosen.chunk_tokens],
        decode_rate=decode(chosen),
        chunk_rates=rates,
        format_rates={
            name: decode(_with_format(chosen, name, has_experts=shape.expert_weights > 0))
            for name in COARSER_FORMATS
        },
        source=calibration.describe(),
    )


def _with_format(place: Placement, name: str, *, has_experts: bool) -> Placement:
    if has_experts:
        return msgspec.structs.replace(place, expert_format=name, expert_item_bytes=0.0)
    return msgspec.structs.replace(place, dense_format=name, dense_item_bytes=0.0)


def _choose_step(config: EngineConfig, forecast: Forecast | None) -> tuple[int, str]:
    if config.max_batch_tokens:
        return config.max_batch_tokens, "engine.max_batch_tokens"
    if forecast is None:
        return config.step_tokens, "as no speeds are known"
    fitting = {n: r for n, r in forecast.chunk_rates.items() if n >= config.max_running}
    if not fitting:
        return config.max_running, "a token for each running request"
    chosen = choose_chunk(fitting)
    why = "the fewest within 2 % of the fastest prefill"
    return chosen, f"{why}: {fitting[chosen]:.0f} tokens/s predicted"


def _reject_steps(chosen: int, forecast: Forecast | None) -> list[Choice]:
    rates = {} if forecast is None else forecast.chunk_rates
    return [
        Choice(what="step", value=f"{n} tokens", reason=f"{rate:.0f} tokens/s of a prompt")
        for n, rate in rates.items()
        if n != chosen
    ]


def _reject_formats(model: ModelPlan, shape: ModelShape, forecast: Forecast | None) -> list[Choice]:
    """Return rows of the coarser weight formats that were not chosen, with the speed that each
    would bring.
    """
    is_moe = shape.expert_weights > 0
    held = place_served(model, chunk_tokens=1)
    current = held.expert_bytes if is_moe else held.dense_bytes
    weights = shape.expert_weights if is_moe else shape.num_weights - shape.embedding_weights
    setting = "expert_format" if is_moe else "linear_format"
    choices: list[Choice] = []
    for name in COARSER_FORMATS:
        if FORMAT_BYTES[name] >= 0.95 * current:
            continue
        why = f"it rounds weights, which is to be asked for (model.{setting}): "
        why += f"{weights * FORMAT_BYTES[name] / MIB:.0f} MiB for {weights * current / MIB:.0f}"
        if forecast is not None:
            rate = forecast.format_rates[name]
            why += f", {rate:.1f} tokens/s of an answer for {forecast.decode_rate:.1f}"
        what = "experts" if is_moe else "linear"
        choices.append(Choice(what=what, value=name, reason=why))
    return choices


def _reject_deferral(model: ModelPlan) -> list[Choice]:
    if not model.spec.is_moe or model.num_deferred_experts or model.device != "cpu":
        return []
    why = "no GPU to overlap with: it would change values for nothing"
    return [Choice(what="deferred experts", value=f"1 to {model.spec.top_k}", reason=why)]


def _reject_threads(threads: int, topology: _native.Topology) -> list[Choice]:
    num_cpus = len(topology.allowed_cpus)
    if threads >= num_cpus:
        return []
    why = "siblings share the units of a core, and a quota is shared by all threads"
    return [Choice(what="threads", value=str(num_cpus), reason=why)]


def _reject_memory(model: ModelPlan, kv: KvPlan, layout: KVLayout) -> list[Choice]:
    choices: list[Choice] = []
    if model.tier is not None:
        why = f"{model.weight_bytes / MIB:.0f} MiB do not fit beside KV"
        if model.tier.reason.startswith("model."):
            why = f"{model.tier.reason} asks for fewer"
        choices.append(Choice(what="experts on disk", value="none", reason=why))
    elif list_expert_sizes(model) is not None:
        why = f"all {model.expert_bytes / MIB:.0f} MiB fit memory, which is faster"
        choices.append(Choice(what="experts on disk", value="some", reason=why))
    if layout.dtype not in ("int8", "fp8"):
        why = "half the memory, but it rounds, which is to be asked for (engine.kv_dtype); "
        why += f"{kv.size_bytes / MIB:.0f} MiB fit"
        choices.append(Choice(what="KV cache", value="int8", reason=why))
    return choices

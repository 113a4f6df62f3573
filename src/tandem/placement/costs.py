"""The cost model: how long a step takes, by a roofline per operator class.

The time of a class is the larger of its bytes over the bandwidth and its operations over the peak,
each peak times an efficiency (``fitting.py``): for plans those of our own kernels, for published
speeds five that are fitted to three rows chosen beforehand; the others are given, with their
sources. No published row has a parameter of its own.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem.placement.hardware import HardwareSpec, Isa
from tandem.placement.shape import FORMAT_BYTES, ModelShape, ShapeLayer

__all__ = ["DENSE", "EXPERTS", "Efficiencies", "FormatShares", "LayerTime", "Parts", "Placement",
           "StepTime", "chunk_time", "decode_time", "list_decode_layers",
           "prefill_time"]  # fmt: skip

Share = Annotated[float, Meta(gt=0, le=1)]
DENSE, EXPERTS = "dense codes", "expert codes"
"""Names of the mixtures of integer formats that a planned model's matrices have, as formats of a
placement; see ``served.fit_formats``."""
INT8_FORMATS = {"int8", "int4", "int4g32", "q4_k_m", DENSE, EXPERTS}
"""Weight formats whose products are of int8; other formats' products are of bf16."""
F32_SHARE: dict[Isa, float] = {"avx2": 1.0, "avx512": 0.5, "amx": 1 / 16, "neon": 1.0}
"""Speed of float32 products relative to bf16: AMX has no float32, AVX2 and NEON no bf16."""
AMX_ROWS = 4
"""Tokens of an expert above which AMX tiles pay off: KTransformers' own rule."""
ACTIVATION_BYTES = 2
ITEM_NORMS = 5
"""Time of the work between products, for each of their inputs and outputs, as a multiple of a
norm's: residuals, norms, rotations, activations and coding to int8. Of two files' prompts of 512
tokens, 640 and 560 ms, products and attention leave 0.8 to 1 ns for each; a norm takes 0.18."""
HOP_US = 10.0
"""Microseconds of one collective between GPUs, whatever its size."""


class FormatShares(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares of the CPU's peaks that products of one weight format reach."""

    bandwidth: Share
    """Share of the memory bandwidth that reading a few tokens' weights reaches."""
    compute: Share
    """Share of the peak multiply-adds that computing prompts reaches."""


class Efficiencies(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares of the hardware's peaks (bandwidth, arithmetic, links) that kernels and copies
    reach.
    """

    cpu_bandwidth: Share
    """Fitted: share of the memory bandwidth that reading a few tokens' experts reaches."""
    cpu_avx: Share
    """Fitted: share of the peak of AVX2 or AVX-512 that computing prompts reaches."""
    cpu_amx: Share
    """Fitted: share of AMX's peak that computing prompts reaches."""
    staging: Share
    """Fitted: share of the memory bandwidth at which weights for a GPU are copied to pinned
    memory.
    """
    formats: dict[str, FormatShares] = {}
    """Measured: shares by weight format, which replace ``cpu_bandwidth`` and ``cpu_avx``, and
    ``cpu_amx`` on a machine whose peaks are measured; a format that is missing uses those.
    """
    handover_us: Annotated[float, Meta(ge=0)]
    """Fitted: microseconds from GPU to CPU and back, once for each layer with experts on
    the CPU.
    """
    step_us: Annotated[float, Meta(ge=0)] = 0.0
    """Measured: microseconds of a step on the CPU before its layers; 0 for steps on GPUs."""
    layer_us: Annotated[float, Meta(ge=0)] = 0.0
    """Measured: microseconds of a layer's calls on the CPU, whatever their size, without those of
    routed experts; 0 for layers on GPUs.
    """
    experts_us: Annotated[float, Meta(ge=0)] = 0.0
    """Measured: microseconds of the call of a layer's routed experts on the CPU, whatever their
    size.
    """
    norm_ns: Annotated[float, Meta(ge=0)] = 0.0
    """Measured: nanoseconds of a norm on the CPU, for each item of a large batch; 0 for layers on
    GPUs.
    """
    gpu_bandwidth: Share = 0.8
    """Given: share of the GPU's bandwidth that published decode kernels of attention and matrices
    reach.
    """
    gpu_compute: Share = 0.5
    """Given: share of the GPU's peak that matrix products of prompts reach, all kernels of a layer
    together.
    """
    link: Share = 0.8
    """Given: share of a PCIe link's rate left for payload, without headers and flow control."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The devices that compute each class of operators of a model (attention, experts, ...), and in
    which weight format.
    """

    expert_format: str
    dense_format: str
    """Weight format of all matrices except routed experts."""
    expert_item_bytes: float = 0.0
    """Bytes per weight of routed experts, scales included; 0: from the format."""
    dense_item_bytes: float = 0.0
    """Bytes per weight of all other matrices, scales included; 0: from the format."""
    accelerators: int = 0
    """Number of GPUs used."""
    sockets: int = 1
    parallel: Literal["tensor", "expert", "pipeline"] = "tensor"
    """Division of work between several GPUs: within each layer, or by layers."""
    gpu_experts: int = 0
    """Routed experts of each layer on the GPUs; the others are on the CPU."""
    is_dense_on_gpu: bool = True
    """True if dense MLPs, shared experts and routers are on the GPU."""
    is_attention_on_gpu: bool = True
    prefill: Literal["cpu", "streamed"] = "cpu"
    """Device that computes a prompt's experts that have no place on the GPU."""
    isa: Isa | None = None
    deferred: int = 0
    """Experts of a token that may be added one layer late."""
    chunk_tokens: int = 8192

    @property
    def expert_bytes(self) -> float:
        """Bytes per weight of routed experts, scales included."""
        return self.expert_item_bytes or FORMAT_BYTES[self.expert_format]

    @property
    def dense_bytes(self) -> float:
        """Bytes per weight of all other matrices, scales included."""
        return self.dense_item_bytes or FORMAT_BYTES[self.dense_format]


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted seconds of one layer, by the resource that is busy: GPU, CPU, or the link between
    them.
    """

    gpu: float
    """GPU time of attention, dense matrices and collectives."""
    gpu_experts: float = 0.0
    cpu: float = 0.0
    """CPU time of attention and dense matrices that are on the CPU."""
    cpu_experts: float = 0.0
    stream: float = 0.0
    """Time in which weights are copied to the GPU."""
    handover: float = 0.0


class LayerTime(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted seconds of one layer of a step, before it is decided what overlaps."""

    parts: Parts
    shared_gpu: float
    """Part of ``parts.gpu`` spent in shared experts, in seconds; it overlaps with routed experts on
    the CPU.
    """
    top_k: int
    """Routed experts of a token; 0: the layer has none."""

    def find_late_share(self, deferred: int) -> float:
        """Return the share of a token's routed experts that are deferred: their outputs are added a
        layer later.
        """
        return min(deferred, self.top_k) / self.top_k if self.top_k else 0.0


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted seconds of a step, and the seconds of each resource, summed over the layers."""

    seconds: float
    parts: Parts
    after_layers: float
    """Seconds of ``seconds`` after the last layer: the head, and passing hidden states on between
    the GPUs of a pipeline.
    """


class _Machine:
    """The rates in bytes and operations per second that a machine reaches: its peaks times the
    efficiencies.
    """

    def __init__(self, spec: HardwareSpec, place: Placement, eff: Efficiencies) -> None:
        self._spec, self._place, self._eff = spec, place, eff
        self._sockets = place.sockets / spec.sockets
        gpu = spec.accelerator
        self.num = place.accelerators
        self.width = self.num if place.parallel != "pipeline" else 1
        """Number of GPUs that divide the work of one layer."""
        self.gpu_bandwidth = gpu.bandwidth_gbps * 1e9 * eff.gpu_bandwidth if gpu else 1.0
        self.peer_link = gpu.peer_link_gbps * 1e9 * eff.link if gpu else 1.0
        self.host_link = gpu.host_link_gbps * 1e9 * eff.link if gpu else 1.0
        self.dram = spec.cpu_bandwidth_gbps * 1e9 * self._sockets

    def gpu_time(self, size_bytes: float, ops: float, weight_format: str) -> float:
        gpu = self._spec.accelerator
        assert gpu is not None, "a GPU's time without a GPU"
        is_fp8 = weight_format == "fp8" and gpu.fp8_tflops > 0
        peak = (gpu.fp8_tflops if is_fp8 else gpu.bf16_tflops) * 1e12 * self._eff.gpu_compute
        return max(size_bytes / self.gpu_bandwidth, ops / peak)

    def cpu_time(self, size_bytes: float, ops: float, weight_format: str, rows: float) -> float:
        processor = self._spec.processor
        assert processor is not None, "a CPU's time without a CPU"
        isa: Isa = self._place.isa or processor.isa
        if isa == "amx" and rows <= AMX_ROWS:
            isa = "avx512"
        bandwidth = self._eff.cpu_bandwidth
        share = self._eff.cpu_amx if isa == "amx" else self._eff.cpu_avx
        measured = self._eff.formats.get(weight_format)
        if measured is not None:
            bandwidth = measured.bandwidth
            # Shares of formats are of AVX's peak, unless this machine's own AMX was measured.
            if isa != "amx" or processor.int8_tops:
                share = measured.compute
        peak = self._spec.cpu_tflops(is_int8=weight_format in INT8_FORMATS, isa=isa)
        peak *= F32_SHARE[isa] if weight_format == "f32" else 1.0
        reads = size_bytes / (self.dram * bandwidth)
        return max(reads, ops / (peak * 1e12 * self._sockets * share))

    def stream_time(self, size_bytes: float) -> float:
        """Return the seconds to copy weights to all GPUs that share the layer."""
        staged = size_bytes / (self.dram * self._eff.staging)
        return staged + size_bytes / (self.host_link * self.width)

    def collective_time(self, tokens: float, hidden: int) -> float:
        """Return the seconds of a layer's two all-reduces, or of its two all-to-alls."""
        if self.num <= 1:
            return 0.0
        payload = tokens * hidden * ACTIVATION_BYTES
        if self._place.parallel == "pipeline":
            return 0.0
        passes = 2 if self._place.parallel == "tensor" else 1
        moved = passes * (self.width - 1) / self.width * payload
        return 2 * (moved / self.peer_link + HOP_US * 1e-6)


def _seen(layer: ShapeLayer, context: float) -> float:
    """Return how many tokens of a context a layer's attention reads, as a window or an index may
    limit them.
    """
    for limit in (layer.window, layer.top_tokens):
        context = min(context, limit) if limit else context
    return context


def _distinct(experts: float, tokens: float, layer: ShapeLayer) -> float:
    """Return the expected number of distinct experts, of ``experts``, that ``tokens`` tokens
    choose.

    Choices are assumed to be uniform.
    """
    return experts * (1 - (1 - layer.top_k / layer.num_experts) ** tokens)


def _layer_parts(
    machine: _Machine,
    shape: ModelShape,
    layer: ShapeLayer,
    place: Placement,
    eff: Efficiencies,
    *,
    tokens: float,
    users: float,
    context: float,
    is_prefill: bool,
) -> Parts:
    """Return one layer's seconds for ``tokens`` of ``users``, each attending to ``context`` on
    average.
    """
    dense_bytes, expert_bytes = place.dense_bytes, place.expert_bytes
    ops_each = layer.prefill_ops if is_prefill else layer.decode_ops
    product_ops = 2 * tokens * layer.attention_weights
    score_ops = tokens * (ops_each * _seen(layer, context) + layer.index_ops * context)
    cache = users * (_seen(layer, context) * 2 * layer.kv_items + context * layer.index_bytes)
    cache += users * 2 * layer.state_bytes
    dense = layer.dense_weights + layer.shared_weights
    gpu = cpu = 0.0
    width = max(1, machine.width)
    if place.is_attention_on_gpu and machine.num:
        cache /= width if layer.kind != "mla" else 1
        attention_bytes = layer.attention_weights * dense_bytes / width
        ops = (product_ops + score_ops) / width
        gpu += machine.gpu_time(attention_bytes + cache, ops, place.dense_format)
    else:
        attention_bytes = layer.attention_weights * dense_bytes
        cpu += machine.cpu_time(attention_bytes, product_ops, place.dense_format, tokens)
        # Scores and values are products of floats, whatever the format of the weights.
        is_f32 = place.dense_format == "f32"
        cpu += machine.cpu_time(cache, score_ops, "f32" if is_f32 else "bf16", tokens)
    if place.is_dense_on_gpu and machine.num:
        ops = 2 * tokens * dense / width
        gpu += machine.gpu_time(dense * dense_bytes / width, ops, place.dense_format)
    else:
        cpu += machine.cpu_time(dense * dense_bytes, 2 * tokens * dense, place.dense_format, tokens)
    gpu += machine.collective_time(tokens, shape.hidden_size) if machine.num else 0.0
    if not layer.num_experts:
        return Parts(gpu=gpu, cpu=cpu)
    on_gpu = min(place.gpu_experts, layer.num_experts) if machine.num else 0
    on_cpu = layer.num_experts - on_gpu
    pairs = tokens * layer.top_k / layer.num_experts
    """Tokens that choose a given expert, on average."""
    weights = layer.expert_weights
    gpu_experts = cpu_experts = stream = handover = 0.0
    streams = is_prefill and place.prefill == "streamed" and machine.num > 0 and on_cpu > 0
    if streams:
        stream = machine.stream_time(on_cpu * weights * expert_bytes)
        on_gpu, on_cpu = layer.num_experts, 0
    if on_gpu:
        size = _distinct(on_gpu, tokens, layer) * weights * expert_bytes / width
        ops = 2 * pairs * on_gpu * weights / width
        gpu_experts = machine.gpu_time(size, ops, place.expert_format)
    if on_cpu:
        touched = _distinct(on_cpu, tokens, layer)
        ops = 2 * pairs * on_cpu * weights
        size = touched * weights * expert_bytes
        cpu_experts = machine.cpu_time(size, ops, place.expert_format, pairs * on_cpu / touched)
        handover = eff.handover_us * 1e-6 if machine.num else 0.0
    return Parts(
        gpu=gpu,
        gpu_experts=gpu_experts,
        cpu=cpu,
        cpu_experts=cpu_experts,
        stream=stream,
        handover=handover,
    )


def _layer_time(
    machine: _Machine,
    shape: ModelShape,
    layer: ShapeLayer,
    place: Placement,
    eff: Efficiencies,
    *,
    tokens: float,
    users: float,
    context: float,
    is_prefill: bool,
) -> LayerTime:
    """Return the predicted seconds of one layer; arguments as for ``_layer_parts``."""

    def count(layer: ShapeLayer) -> Parts:
        return _layer_parts(
            machine,
            shape,
            layer,
            place,
            eff,
            tokens=tokens,
            users=users,
            context=context,
            is_prefill=is_prefill,
        )

    parts, shared = count(layer), 0.0
    if layer.num_experts and layer.shared_weights:
        shared = parts.gpu - count(msgspec.structs.replace(layer, shared_weights=0)).gpu
    return LayerTime(parts=parts, shared_gpu=shared, top_k=layer.top_k if layer.num_experts else 0)


def _layer_seconds(time: LayerTime, deferred: int, *, is_unified: bool) -> float:
    """Return the seconds of a layer whose parts overlap, as ``kernels.hybrid`` orchestrates them.

    Routed experts on the CPU overlap with the shared experts and with routed ones on the GPU. The
    layer's deferred experts overlap with the next layer too, so in a sequence of such layers each
    takes the longer of the GPU's path, which waits for the immediate experts alone, and of all of
    its CPU work.

    Args:
        time: the layer's parts.
        deferred: experts of a token that are deferred.
        is_unified: True if GPU and CPU read from one memory, so that neither gains by the other's
            work beside its own.
    """
    parts, late = time.parts, time.find_late_share(deferred)
    if is_unified:
        return parts.gpu + parts.gpu_experts + parts.cpu + parts.cpu_experts + parts.handover
    before = parts.gpu - time.shared_gpu + parts.cpu
    immediate = parts.cpu_experts * (1 - late)
    beside = time.shared_gpu + parts.gpu_experts
    waiting = before + max(immediate, beside) + parts.handover
    return max(waiting, parts.cpu + parts.cpu_experts) + parts.stream


def _step(
    spec: HardwareSpec,
    shape: ModelShape,
    place: Placement,
    eff: Efficiencies,
    *,
    tokens: float,
    users: float,
    context: float,
    is_prefill: bool,
    heads: float,
) -> StepTime:
    machine = _Machine(spec, place, eff)
    sums = dict.fromkeys(Parts.__struct_fields__, 0.0)
    seconds = 0.0 if machine.num else eff.step_us * 1e-6
    groups: dict[tuple[ShapeLayer, int], int] = {}
    for i, layer in enumerate(shape.layers):
        # The last layer defers nothing, since no layer is left to add it.
        deferred = 0 if is_prefill or i == len(shape.layers) - 1 else place.deferred
        groups[layer, deferred] = groups.get((layer, deferred), 0) + 1
    for (layer, deferred), count in groups.items():
        time = _layer_time(
            machine,
            shape,
            layer,
            place,
            eff,
            tokens=tokens,
            users=users,
            context=context,
            is_prefill=is_prefill,
        )
        parts = time.parts
        seconds += count * _layer_seconds(time, deferred, is_unified=spec.is_unified)
        if not machine.num:
            calls_us = eff.layer_us + (eff.experts_us if layer.num_experts else 0.0)
            calls_us += tokens * layer.row_items * ITEM_NORMS * eff.norm_ns * 1e-3
            seconds += count * calls_us * 1e-6
        for name in sums:
            sums[name] += count * getattr(parts, name)
    head = shape.head_weights or shape.embedding_weights
    size, ops = head * place.dense_bytes, 2 * heads * head
    width = max(1, machine.width)
    if machine.num and place.is_dense_on_gpu:
        last = machine.gpu_time(size / width, ops / width, place.dense_format)
        sums["gpu"] += last
    else:
        last = machine.cpu_time(size, ops, place.dense_format, heads)
        sums["cpu"] += last
    if place.parallel == "pipeline" and machine.num > 1:
        payload = tokens * shape.hidden_size * ACTIVATION_BYTES
        passed = (machine.num - 1) * (payload / machine.peer_link + HOP_US * 1e-6)
        sums["gpu"] += passed
        last += passed
    return StepTime(seconds=seconds + last, parts=Parts(**sums), after_layers=last)


def decode_time(
    spec: HardwareSpec,
    shape: ModelShape,
    place: Placement,
    eff: Efficiencies,
    *,
    users: int,
    context: int,
) -> StepTime:
    """Return the time of one step that generates one token for each user.

    Args:
        spec: the machine; ``place`` tells how much of it is used.
        shape: the model.
        place: device and format of each class of operators.
        eff: shares of the peaks that are reached.
        users: number of sequences.
        context: tokens of each sequence.
    """
    return _step(
        spec,
        shape,
        place,
        eff,
        tokens=users,
        users=users,
        context=context,
        is_prefill=False,
        heads=users,
    )


def list_decode_layers(
    spec: HardwareSpec,
    shape: ModelShape,
    place: Placement,
    eff: Efficiencies,
    *,
    users: int,
    context: int,
) -> list[LayerTime]:
    """Return the time of each layer of the step of ``decode_time``, in order.

    Args: as for ``decode_time``.
    """
    machine = _Machine(spec, place, eff)
    return [
        _layer_time(
            machine,
            shape,
            layer,
            place,
            eff,
            tokens=users,
            users=users,
            context=context,
            is_prefill=False,
        )
        for layer in shape.layers
    ]


def chunk_time(
    spec: HardwareSpec,
    shape: ModelShape,
    place: Placement,
    eff: Efficiencies,
    *,
    tokens: int,
    context: float,
    heads: int = 1,
) -> StepTime:
    """Return the time of one step that computes a chunk of a prompt.

    Args:
        spec: the machine; ``place`` tells how much of it is used.
        shape: the model.
        place: device and format of each class of operators.
        eff: shares of the peaks that are reached.
        tokens: tokens of the chunk.
        context: tokens that each token attends to, on average.
        heads: tokens whose logits are computed.
    """
    return _step(
        spec,
        shape,
        place,
        eff,
        tokens=tokens,
        users=1,
        context=context,
        is_prefill=True,
        heads=heads,
    )


def prefill_time(
    spec: HardwareSpec,
    shape: ModelShape,
    place: Placement,
    eff: Efficiencies,
    *,
    tokens: int,
    users: int = 1,
) -> StepTime:
    """Return the time to compute the prompts of ``users`` users, in chunks.

    Args:
        spec: the machine; ``place`` tells how much of it is used.
        shape: the model.
        place: device and format of each class of operators, and the tokens of a chunk.
        eff: shares of the peaks that are reached.
        tokens: tokens of one prompt.
        users: number of prompts; several may share a chunk.
    """
    total = tokens * users
    chunk = min(place.chunk_tokens, total)
    num_chunks = total / chunk
    # On average a prompt's token attends to half of the prompt, whatever the chunk size.
    step = _step(
        spec,
        shape,
        place,
        eff,
        tokens=chunk,
        users=max(1.0, chunk / tokens),
        context=tokens / 2,
        is_prefill=True,
        heads=1,
    )
    fields = {name: getattr(step.parts, name) * num_chunks for name in Parts.__struct_fields__}
    return StepTime(
        seconds=step.seconds * num_chunks,
        parts=Parts(**fields),
        after_layers=step.after_layers * num_chunks,
    )

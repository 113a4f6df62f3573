"""A plan as text for people: placement with reasons, a picture of the layers, and memory use."""

from collections.abc import Iterator, Sequence

from tandem.placement.choosers import Choice
from tandem.placement.hardware import HardwareSpec
from tandem.placement.planner import DeviceMemory, Plan
from tandem.placement.shape import ModelShape, ShapeLayer

__all__ = ["align", "draw_layers", "render_plan"]

MIB, GIB = 1 << 20, 1 << 30
BAR = 24


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of words as lines of text, with the columns aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  ".join(
            [*(cell.ljust(n) for cell, n in zip(row[:-1], widths, strict=True)), row[-1]]
        ).rstrip()
        for row in rows
    ]


def render_plan(
    plan: Plan, spec: HardwareSpec, shape: ModelShape, *, with_rejected: bool = False
) -> str:
    """Return the plan as text.

    Args:
        plan: the plan.
        spec: the machine.
        shape: the model.
        with_rejected: True to list rejected alternatives too.
    """
    wishes = plan.wishes
    who = f"{wishes.users} user{'s' if wishes.users > 1 else ''}"
    lines = [f"{plan.model} on {spec.title}"]
    lines.append(f"{who} of {wishes.context} tokens, quality {wishes.quality}")
    if plan.unserved:
        lines.append(f"Planned only: serving refuses this model still, for its {plan.unserved}.")
    lines += ["", *_tell_speed(plan), "", *draw_layers(plan, spec, shape), ""]
    lines += align([("class", "device", "format", "GiB", "FLOP a byte held"), *_list_classes(plan)])
    lines += [""]
    for memory in plan.memory:
        lines += _draw_memory(memory)
    lines += ["", *_tell_choices(plan.choices)]
    if with_rejected and plan.rejected:
        lines += ["", "rejected:", *_tell_choices(plan.rejected)]
    return "\n".join(lines) + "\n"


def _tell_speed(plan: Plan) -> list[str]:
    rate = plan.wishes.rate
    lines = [
        f"prefill  {plan.prefill_rate:8.1f} tokens/s (a prompt of {plan.wishes.prompt_tokens})",
        f"decode   {plan.decode_rate:8.1f} tokens/s (all users together)",
    ]
    if rate:
        lines.append(f"users    {plan.users_at_rate:8} at {rate:g} tokens/s each")
    slots = f", {plan.state_slots} state slots" if plan.state_slots else ""
    lines.append(f"cache    {plan.kv_blocks:8} blocks of 64 tokens{slots}")
    if plan.window_bytes:
        saved = plan.window_saved_bytes / MIB
        lines.append(
            f"windows  {plan.window_bytes / MIB:8.1f} MiB a user at {plan.wishes.context} tokens, "
            f"{saved:.1f} MiB less than without windows"
        )
    return lines


def draw_layers(plan: Plan, spec: HardwareSpec, shape: ModelShape) -> list[str]:
    """Return a picture of the placement in text: groups of equal layers by device."""
    place = plan.placement
    gpu = ""
    if spec.accelerator is not None and place.accelerators:
        gpu = f"{place.accelerators} x {spec.accelerator.title}"
    cpu = "" if spec.processor is None else f"{spec.sockets} x {spec.processor.title}"
    rows = [("", gpu or "-", cpu or "-")]
    for first, last, layer in _group_layers(shape):
        name = f"layer {first}" if first == last else f"layers {first}-{last}"
        on_gpu: list[str] = []
        on_cpu: list[str] = []
        is_gpu = bool(place.accelerators)
        (on_gpu if is_gpu and place.is_attention_on_gpu else on_cpu).append(layer.kind.upper())
        dense = on_gpu if is_gpu and place.is_dense_on_gpu else on_cpu
        if layer.dense_weights:
            dense.append("dense MLP")
        if layer.num_experts:
            dense.append("router" if not _has_shared(layer, shape) else "shared experts")
            resident = min(place.gpu_experts, layer.num_experts) if is_gpu else 0
            if resident:
                on_gpu.append(f"{resident} experts")
            if resident < layer.num_experts:
                on_cpu.append(f"{layer.num_experts - resident} experts")
        rows.append((name, " + ".join(on_gpu) or "-", " + ".join(on_cpu) or "-"))
    is_head_on_gpu = place.accelerators and place.is_dense_on_gpu
    rows.append(("head", "logits" if is_head_on_gpu else "-", "-" if is_head_on_gpu else "logits"))
    lines = align([(a, "| " + b, "| " + c) for a, b, c in rows])
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def _has_shared(layer: ShapeLayer, shape: ModelShape) -> bool:
    return layer.shared_weights > shape.hidden_size * layer.num_experts


def _group_layers(shape: ModelShape) -> Iterator[tuple[int, int, ShapeLayer]]:
    """Yield runs of equal layers as (first, last, layer).

    A repeating pattern of layers is one run, with its first layer.
    """
    start = 0
    for index, layer in enumerate(shape.layers):
        is_last = index + 1 == len(shape.layers)
        if is_last or shape.layers[index + 1] != layer:
            yield start, index, layer
            start = index + 1


def _list_classes(plan: Plan) -> Iterator[tuple[str, ...]]:
    for row in plan.classes:
        size = f"{row.size_bytes / GIB:.1f}"
        yield row.name, row.device, row.weight_format, size, f"{row.ops_per_byte:.1f}"


def _draw_memory(memory: DeviceMemory) -> Iterator[str]:
    share = min(1.0, memory.used_bytes / memory.capacity_bytes) if memory.capacity_bytes else 1.0
    bar = "#" * round(BAR * share)
    used, have = memory.used_bytes / GIB, memory.capacity_bytes / GIB
    yield f"{memory.device:4} [{bar:.<{BAR}}] {used:.1f} of {have:.0f} GiB"
    for name, size in memory.parts.items():
        yield f"       {size / GIB:8.2f}  {name}"


def _tell_choices(choices: Sequence[Choice]) -> list[str]:
    return align([(f"  {choice.what}:", choice.value, choice.reason) for choice in choices])

"""A plan as a picture: each layer's parts on their devices, in one SVG file.

Each row is a layer, each lane a device, and a bar's length is the part's size. Pure: returns text.
The file loads nothing and contains no script.
"""

from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from tandem.placement.hardware import HardwareSpec
from tandem.placement.planner import DeviceMemory, Plan
from tandem.placement.shape import FORMAT_BYTES, ModelShape, ShapeLayer

__all__ = ["render_picture"]

COLORS = {
    "attention": "#3b6ea5",
    "shared experts and dense layers": "#5a9a68",
    "routed experts": "#d08a3e",
    "KV and states": "#8a6bb1",
    "head": "#7d7d7d",
    "embedding": "#a8a8a8",
    "workspace": "#c9c3b5",
}
LANE, MARGIN, LABEL, GAP = 420, 24, 60, 36
"""Sizes of the picture in pixels: width of a device's lane, border, width of the layer numbers, gap
between lanes.
"""
ROW, BAR = 11, 9
TOP = 92
LINE = 17
MIB = 1 << 20
GIB = 1 << 30


class _Bar(NamedTuple):
    """A bar in the picture of a plan: one part of a layer, on one device, with its bytes."""

    part: str
    device: str
    size_bytes: float


def render_picture(plan: Plan, spec: HardwareSpec, shape: ModelShape) -> str:
    """Return the SVG document of a plan.

    Args:
        plan: the plan to draw.
        spec: the machine that it is for.
        shape: the model whose layers are drawn.
    """
    rows = [list(_list_bars(plan, layer)) for layer in shape.layers]
    devices = ["GPU", "CPU"] if plan.placement.accelerators else ["CPU"]
    totals = [
        sum(bar.size_bytes for bar in row if bar.device == device)
        for row in rows
        for device in devices
    ]
    scale = LANE / max(1.0, *totals)
    height = TOP + len(rows) * ROW + LINE * (4 + len(plan.choices)) + MARGIN
    width = max(MARGIN * 2 + LABEL + len(devices) * (LANE + GAP), 900)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(MARGIN, 26, f"{plan.model} on {spec.title}", size=16),
        _text(
            MARGIN,
            44,
            f"decode {plan.decode_rate:.1f} tokens/s for {plan.wishes.users} users, prefill "
            f"{plan.prefill_rate:.0f} tokens/s, predicted",
        ),
    ]
    for lane, device in enumerate(devices):
        x = MARGIN + LABEL + lane * (LANE + GAP)
        out += _draw_lane(plan, device, x, rows, scale)
    for place in range(len(rows)):
        out.append(_text(MARGIN, TOP + place * ROW + BAR, f"layer {place}", size=9))
    out += _draw_legend(TOP + len(rows) * ROW + LINE)
    y = TOP + len(rows) * ROW + 3 * LINE
    for number, choice in enumerate(plan.choices):
        line = f"{choice.what}: {choice.value} ({choice.reason})"
        out.append(_text(MARGIN, y + number * LINE, line))
    return "\n".join((*out, "</svg>")) + "\n"


def _list_bars(plan: Plan, layer: ShapeLayer) -> Iterator[_Bar]:
    place = plan.placement
    dense, expert = FORMAT_BYTES[place.dense_format], FORMAT_BYTES[place.expert_format]
    has_gpu = place.accelerators > 0
    held = "GPU" if has_gpu and place.is_attention_on_gpu else "CPU"
    yield _Bar("attention", held, layer.attention_weights * dense)
    held = "GPU" if has_gpu and place.is_dense_on_gpu else "CPU"
    weights = layer.dense_weights + layer.shared_weights
    if weights:
        yield _Bar("shared experts and dense layers", held, weights * dense)
    if layer.num_experts:
        on_gpu = min(place.gpu_experts, layer.num_experts) if has_gpu else 0
        size = layer.expert_weights * expert
        if on_gpu:
            yield _Bar("routed experts", "GPU", on_gpu * size)
        if on_gpu < layer.num_experts:
            yield _Bar("routed experts", "CPU", (layer.num_experts - on_gpu) * size)


def _draw_lane(
    plan: Plan, device: str, x: float, rows: list[list[_Bar]], scale: float
) -> Iterator[str]:
    held = "DRAM" if device == "CPU" else device
    memory = next((each for each in plan.memory if each.device == held), None)
    yield _text(x, 62, device if memory is None else f"{device}: {_tell_memory(memory)}", size=12)
    if memory is not None:
        yield from _draw_memory(memory, x)
    for place, row in enumerate(rows):
        end = x
        for bar in row:
            if bar.device == device:
                length = bar.size_bytes * scale
                title = f"layer {place}, {bar.part}: {bar.size_bytes / MIB:.1f} MiB on the {device}"
                yield _bar(end, TOP + place * ROW, length, bar.part, title)
                end += length


def _tell_memory(memory: DeviceMemory) -> str:
    used, whole = memory.used_bytes / GIB, memory.capacity_bytes / GIB
    return f"{used:.1f} of {whole:.1f} GiB"


def _draw_memory(memory: DeviceMemory, x: float) -> Iterator[str]:
    """Draw the parts of a device's memory, as shares of its capacity."""
    yield f'<rect x="{x:.1f}" y="70" width="{LANE}" height="10" fill="#eeeeee"/>'
    end = x
    for part, size in memory.parts.items():
        length = LANE * size / max(1, memory.capacity_bytes, memory.used_bytes)
        yield _bar(end, 70, length, part, f"{part}: {size / GIB:.2f} GiB", height=10)
        end += length


def _draw_legend(y: float) -> Iterator[str]:
    x = MARGIN
    for part, color in COLORS.items():
        yield f'<rect x="{x}" y="{y}" width="10" height="10" fill="{color}"/>'
        yield _text(x + 14, y + 9, part)
        x += 24 + 6 * len(part)


def _bar(x: float, y: float, length: float, part: str, title: str, height: int = BAR) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{length:.2f}" height="{height}" '
        f'fill="{COLORS.get(part, "#999999")}"><title>{escape(title)}</title></rect>'
    )


def _text(x: float, y: float, text: str, size: int = 11) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}">{escape(text)}</text>'

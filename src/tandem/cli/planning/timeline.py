"""A picture of a decode step with experts on the CPU and the rest on a GPU: when each of them
works, by the planner's speeds.

The step runs the serving code (``kernels.hybrid``) on a device that only counts time. So the page
shows what the real orchestration makes of the speeds, beside the cost model's own figures.
"""

from html import escape
from typing import NamedTuple

import torch
from torch import nn

from tandem.core.errors import ConfigError
from tandem.kernels.fake.timeline import HOST_LANE, Span, TimelineDevice
from tandem.kernels.hybrid import HybridDecoder
from tandem.placement.costs import (
    Efficiencies,
    LayerTime,
    StepTime,
    decode_time,
    list_decode_layers,
)
from tandem.placement.hardware import HardwareSpec
from tandem.placement.planner import Plan
from tandem.placement.shape import ModelShape

__all__ = ["Lane", "render_timeline", "run_step"]

GPU_LANE = "stream 1"
LAUNCH_S = 10e-6
"""Assumed seconds to launch a CUDA graph; CUDA's documentation gives 5 to 15 us."""
WIDTH, HEIGHT, GAP = 1600, 46, 30
COLORS = {"layer": "#3b6ea5", "shared": "#5a9a68", "submit": "#d08a3e", "late": "#b05f3c"}
OTHER = "#9a9a9a"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; }
body { margin: 2rem auto; max-width: 1680px; padding: 0 1rem; }
svg { width: 100%; height: auto; border: 1px solid #ddd; }
table { border-collapse: collapse; margin: 1rem 0; }
td, th { padding: .2rem .9rem; text-align: right; border-bottom: 1px solid #ddd; }
td:first-child, th:first-child { text-align: left; }
"""


class Lane(NamedTuple):
    """A worker in a decode step (GPU, CPU or the link between them), with the share of time that it
    is busy.
    """

    name: str
    busy: float
    """Busy share of the step in the simulated run."""
    planned: float
    """Busy share of the step by the planner's sums."""


class _NoStep:
    """The argument for a step, or for experts, of calls to the simulated device: it adds their time
    to its clock and runs neither.
    """

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"{name} was called on a device that only keeps a clock")


def run_step(
    plan: Plan, layers: list[LayerTime], shape: ModelShape, after_layers: float
) -> TimelineDevice:
    """Run a decode step of a plan on a simulated device, and return the device.

    Args:
        plan: plan with routed experts on the CPU beside a GPU.
        layers: predicted seconds of its layers.
        shape: sizes of the model.
        after_layers: seconds of the GPU after the last layer.
    """
    users, place = plan.wishes.users, plan.placement
    top_k = max(layer.top_k for layer in shape.layers)

    def count(name: str) -> float:
        verb, _, number = name.partition(" ")
        if not number:
            return after_layers if verb == "end" else 0.0
        time = layers[int(number)]
        match verb:
            case "layer":
                return time.parts.gpu - time.shared_gpu
            case "shared":
                # Routed experts on the GPU run at the same time as the shared experts: while the
                # CPU computes its experts.
                return time.shared_gpu + time.parts.gpu_experts
            case "submit":
                return time.parts.cpu_experts
            case _:
                return 0.0

    def find_late_share(name: str) -> float:
        number = int(name.partition(" ")[2])
        is_last = number == len(layers) - 1
        return 0.0 if is_last else layers[number].find_late_share(place.deferred)

    handover = max(time.parts.handover for time in layers)
    device = TimelineDevice(
        count,
        # Copies between GPU and CPU take no time of their own on the simulated link: the time that
        # the planner predicts for the hand-over includes them.
        link_bytes_per_s=float("inf"),
        launch_s=LAUNCH_S,
        handover_s=handover / 2,
        late_share=find_late_share,
    )
    hosted = [time.parts.cpu_experts > 0 for time in layers]
    nothing = _NoStep()
    decoder = HybridDecoder(
        device,
        [nn.Identity() for _ in layers],
        [nothing if is_hosted else None for is_hosted in hosted],  # type: ignore[list-item]
        (shape.hidden_size, top_k),
        torch.bfloat16,
        has_shared=[t.shared_gpu + t.parts.gpu_experts > 0 for t in layers],
    )
    with torch.inference_mode():
        decoder.run(nothing, None, torch.empty(users, 0))  # type: ignore[arg-type]
    decoder.close()
    return device


def list_lanes(device: TimelineDevice, planned: StepTime) -> list[Lane]:
    """Return how busy each worker (GPU, CPU, link) is in a step, by the simulated run and by the
    planner.

    Args:
        device: device on which the step has run.
        planned: the same step by the cost model.
    """
    parts, whole = planned.parts, device.end_s
    gpu, cpu = parts.gpu + parts.gpu_experts, parts.cpu_experts
    return [
        Lane("GPU", device.count_busy_s(GPU_LANE) / whole, gpu / planned.seconds),
        Lane("CPU experts", device.count_busy_s(HOST_LANE) / whole, cpu / planned.seconds),
    ]


def render_timeline(plan: Plan, spec: HardwareSpec, shape: ModelShape, eff: Efficiencies) -> str:
    """Return the timeline of a decode step, simulated by this plan, as an HTML page without scripts
    and external resources.

    Args:
        plan: plan of the model on the machine.
        spec: the machine.
        shape: sizes of the model.
        eff: shares of the peaks with which the plan was made.

    Raises: ConfigError (everything runs on one device).
    """
    wishes = plan.wishes
    given = (spec, shape, plan.placement, eff)
    layers = list_decode_layers(*given, users=wishes.users, context=wishes.context)
    if not any(time.parts.handover for time in layers):
        what = "this plan has no experts on a CPU beside a GPU, so there is one lane: see its sums"
        raise ConfigError("cli.plan", what, field="--timeline")
    planned = decode_time(*given, users=wishes.users, context=wishes.context)
    device = run_step(plan, layers, shape, planned.after_layers)
    lanes = list_lanes(device, planned)
    rows = "".join(
        f"<tr><td>{lane.name}</td><td>{lane.busy:.0%}</td><td>{lane.planned:.0%}</td></tr>"
        for lane in lanes
    )
    on_cpu = planned.parts.cpu
    left_out = (
        ""
        if not on_cpu
        else (
            f" Left out of the lanes: {on_cpu * 1e3:.2f} ms of matrices that the plan has on the "
            "CPU, which no step that serves computes there."
        )
    )
    title = f"{plan.model} on {spec.title}"
    deferred = plan.placement.deferred
    facts = (
        f"One decode step of {wishes.users} sequences of {wishes.context:,} tokens, "
        f"{deferred} experts of a token deferred: {device.end_s * 1e3:.2f} ms as it is "
        f"orchestrated, {planned.seconds * 1e3:.2f} ms by the cost model."
        f"{left_out}"
    )
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style>\n<h1>{escape(title)}</h1>\n<p>{escape(facts)}</p>\n"
        "<table><tr><th>busy</th><th>timeline</th><th>planner</th></tr>"
        f"{rows}</table>\n{_draw(device)}\n{_draw_legend()}</html>\n"
    )


def _draw(device: TimelineDevice) -> str:
    names = {GPU_LANE: "GPU", HOST_LANE: "CPU experts"}
    height = 2 * (HEIGHT + GAP) + GAP
    out = [f'<svg viewBox="0 0 {WIDTH} {height}" xmlns="http://www.w3.org/2000/svg">']
    for row, (lane, name) in enumerate(names.items()):
        y = GAP + row * (HEIGHT + GAP)
        out.append(f'<text x="4" y="{y - 8}" font-size="15">{name}</text>')
        spans = [span for span in device.spans if span.lane == lane and span.end_s > span.begin_s]
        out += [_draw_span(span, y, device.end_s) for span in spans]
    return "\n".join([*out, "</svg>"])


def _draw_span(span: Span, y: int, end_s: float) -> str:
    x, length = span.begin_s / end_s * WIDTH, (span.end_s - span.begin_s) / end_s * WIDTH
    color = COLORS.get(span.name.partition(" ")[0], OTHER)
    seconds = f"{span.begin_s * 1e3:.3f} to {span.end_s * 1e3:.3f} ms"
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{max(length, 0.2):.2f}" height="{HEIGHT}" '
        f'fill="{color}"><title>{escape(span.name)}: {seconds}</title></rect>'
    )


def _draw_legend() -> str:
    words = {
        "layer": "attention, dense layers, routers",
        "shared": "experts on the GPU, shared ones included",
        "submit": "experts on the CPU",
        "late": "deferred experts",
    }
    boxes = (f'<b style="color:{COLORS[k]}">&#9632;</b> {text}' for k, text in words.items())
    return f"<p>{' &nbsp; '.join(boxes)}</p>"

"""Goal: on a virtual clock, the hybrid step overlaps the host's experts with the device's work.

Method: layers that do nothing, with modelled times; the orchestration is the one that serves.
Lengths are compared with sums and maxima of those times.
"""

import itertools

import pytest
import torch
from torch import nn

from tandem.core.errors import InternalError
from tandem.kernels.fake.timeline import HOST_LANE, TimelineDevice
from tandem.kernels.hybrid import HybridDecoder

LAYERS = 4
ATTENTION_S, SHARED_S, EXPERTS_S, OTHERS_S = 0.003, 0.004, 0.010, 0.0
HIDDEN, TOP_K = 8, 2


class Nothing:
    """A step and experts whose work is not called."""


def run(*, has_shared, is_captured=True, launch_s=0.0, steps=1, late_share=0.0):
    costs = {"layer": ATTENTION_S, "shared": SHARED_S, "submit": EXPERTS_S}
    device = TimelineDevice(
        lambda name: costs.get(name.partition(" ")[0], OTHERS_S),
        link_bytes_per_s=1e15,
        launch_s=launch_s,
        late_share=lambda _: late_share,
    )
    decoder = HybridDecoder(
        device,
        [nn.Identity() for _ in range(LAYERS)],
        [Nothing() for _ in range(LAYERS)],
        (HIDDEN, TOP_K),
        torch.float32,
        has_shared=[has_shared] * LAYERS,
        is_captured=is_captured,
    )
    for _ in range(steps):
        decoder.run(Nothing(), None, torch.zeros(1, HIDDEN))
    decoder.close()
    return device


def test_shared_experts_hide_behind_those_of_the_host():
    without, beside = run(has_shared=False), run(has_shared=True)
    assert without.end_s == pytest.approx(LAYERS * (ATTENTION_S + EXPERTS_S))
    assert beside.end_s == pytest.approx(without.end_s)
    assert beside.count_busy_s(HOST_LANE) == pytest.approx(LAYERS * EXPERTS_S)
    assert beside.count_busy_s("stream 1") == pytest.approx(
        LAYERS * (ATTENTION_S + SHARED_S), rel=1e-6
    )


def test_a_graph_is_launched_once():
    graph = run(has_shared=True, launch_s=0.001, steps=3)
    eager = run(has_shared=True, launch_s=0.001, steps=3, is_captured=False)
    whole = 3 * LAYERS * (ATTENTION_S + EXPERTS_S)
    assert graph.end_s == pytest.approx(whole + 3 * 0.001)
    assert eager.end_s > graph.end_s + 3 * LAYERS * 0.001


def test_deferred_experts_run_beside_the_next_layer():
    """The host never rests between layers once what is late is longer than the device's part."""
    late = run(has_shared=False, late_share=0.4)
    assert late.end_s == pytest.approx(ATTENTION_S + LAYERS * EXPERTS_S)
    some = run(has_shared=False, late_share=0.1)
    assert late.end_s < some.end_s < run(has_shared=False).end_s


def test_lanes_do_one_thing_at_a_time():
    device = run(has_shared=True, steps=2)
    for lane in ("stream 1", HOST_LANE):
        spans = [span for span in device.spans if span.lane == lane]
        assert all(a.end_s <= b.begin_s for a, b in itertools.pairwise(spans))


def test_a_host_function_without_a_model_is_refused():
    device = TimelineDevice(lambda _: 0.0, link_bytes_per_s=1.0)
    with pytest.raises(InternalError, match="not modelled"):
        device.call_host(device.make_stream(), lambda: None, "other")

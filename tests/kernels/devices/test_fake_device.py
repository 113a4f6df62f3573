"""Goal: the fake device is as strict as a real one: order by streams and events, closed memory."""

import threading

import pytest
import torch

from each import each
from tandem.core.errors import InternalError
from tandem.kernels.fake.device import FakeDevice

WAIT_S = 60.0


@pytest.fixture
def device():
    with FakeDevice() as made:
        yield made


def allocate(device, *values):
    """Floats on the device."""
    tensor = device.allocate(4 * len(values)).view(torch.float32)
    device.copy(torch.tensor(values, dtype=torch.float32), tensor)
    return tensor


def fetch(device, tensor):
    staging = device.allocate_staging(tensor.nbytes).view(tensor.dtype)
    device.copy(tensor, staging)
    return staging.tolist()


@each(
    "look",
    [
        lambda t: t.tolist(),
        lambda t: t[0].item(),
        lambda t: t + 1,
        lambda t: t.fill_(0),
        lambda t: t.numpy(),
        lambda t: bool(t[0] > 0),
        lambda t: t.cpu(),
        lambda t: t.copy_(torch.zeros(2)),
        lambda t: torch.zeros(2).copy_(t),
        lambda t: torch.stack([t, t]),
        lambda t: torch.from_dlpack(t),
    ],
)
def test_the_host_cannot_use_values_of_the_device(device, look):
    tensor = allocate(device, 1.0, 2.0)
    with pytest.raises(InternalError, match="memory of the device"):
        look(tensor)
    with pytest.raises(InternalError, match="memory of the device"):
        look(tensor.view(2)[:])
    assert tensor.shape == (2,)
    assert fetch(device, tensor) == [1.0, 2.0]


def test_operators_run_on_a_stream_and_later(device):
    tensor, stream, gate = allocate(device, 1.0), device.make_stream(), threading.Event()
    event = device.make_event()
    assert event.is_done()
    device.call_host(stream, lambda: gate.wait(WAIT_S))
    device.run(stream, lambda: tensor.add_(1.0))
    event.record(stream)
    assert not event.is_done()
    assert fetch(device, tensor) == [1.0]
    gate.set()
    event.synchronize()
    assert fetch(device, tensor) == [2.0]


def test_a_stream_waits_for_the_event_of_another(device):
    first, second, gate, seen = device.make_stream(), device.make_stream(), threading.Event(), []
    event = device.make_event()
    device.call_host(first, lambda: gate.wait(WAIT_S))
    device.call_host(first, lambda: seen.append("first"))
    event.record(first)
    second.wait(event)
    device.call_host(second, lambda: seen.append("second"))
    free = device.make_stream()
    device.call_host(free, lambda: seen.append("beside"))
    free.synchronize()
    assert seen == ["beside"]
    gate.set()
    second.synchronize()
    assert seen == ["beside", "first", "second"]


def test_a_graph_repeats_its_work_on_memory_as_it_is(device):
    source, target = torch.zeros(1), allocate(device, 0.0)
    stream, seen = device.make_stream(), []

    def work():
        device.copy(source, target, stream)
        device.run(stream, lambda: target.mul_(2.0))
        device.call_host(stream, lambda: seen.append(1))

    graph = device.capture(stream, work)
    stream.synchronize()
    assert seen == []
    for value in (1.0, 3.0):
        source.fill_(value)
        device.launch(graph, stream)
        stream.synchronize()
        assert fetch(device, target) == [2 * value]
    assert seen == [1, 1]


def test_what_a_capture_cannot_hold_is_refused(device):
    stream = device.make_stream()
    with pytest.raises(InternalError, match="captured already"):
        device.capture(stream, lambda: device.capture(stream, lambda: None))
    with pytest.raises(InternalError, match="while it is captured"):
        device.capture(stream, stream.synchronize)
    with pytest.raises(InternalError, match="captured stream"):
        device.capture(stream, lambda: device.make_event().record(stream))
    stream.synchronize()


def test_a_failure_is_raised_once_and_later_work_is_left_out(device):
    stream, seen = device.make_stream(), []

    def fail():
        raise ValueError("broken")

    device.call_host(stream, fail)
    device.call_host(stream, lambda: seen.append("after"))
    with pytest.raises(ValueError, match="broken"):
        stream.synchronize()
    device.call_host(stream, lambda: seen.append("again"))
    stream.synchronize()
    assert seen == ["again"]

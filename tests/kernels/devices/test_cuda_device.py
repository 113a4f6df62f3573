"""Goal: a GPU keeps the contract of ``Device``: order, graphs with host functions, failures.

Protects: what the stand-ins of the other tests take for granted about CUDA. Needs a CUDA device.
"""

import gc
import threading

import pytest
import torch

from tandem.core.errors import CapacityError, InternalError
from tandem.kernels.devices import DeviceContext, open_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
ROUNDS = 200


@pytest.fixture
def device():
    return open_device("cuda:0")


def test_work_of_a_stream_is_done_in_order(device):
    stream, event, seen = device.make_stream(), device.make_event(), []
    source, target = (device.allocate_staging(4096).view(torch.float32) for _ in range(2))
    there = device.allocate(4096).view(torch.float32)
    for i in range(ROUNDS):
        device.call_host(stream, lambda i=i: source.fill_(i))
        device.copy(source, there, stream)
        device.run(stream, lambda: there.add_(1.0))
        device.copy(there, target, stream)
        device.call_host(stream, lambda: seen.append((float(target[0]), threading.get_ident())))
    event.record(stream)
    event.synchronize()
    assert event.is_done()
    stream.synchronize()
    assert [value for value, _ in seen] == [i + 1.0 for i in range(ROUNDS)]
    assert threading.get_ident() not in {thread for _, thread in seen}


def test_a_stream_waits_for_the_event_of_another(device):
    first, second, event = device.make_stream(), device.make_stream(), device.make_event()
    gate, seen = threading.Event(), []
    device.call_host(first, lambda: seen.append(("first", gate.wait(60))))
    event.record(first)
    second.wait(event)
    device.call_host(second, lambda: seen.append(("second", True)))
    assert not event.is_done()
    gate.set()
    second.synchronize()
    first.synchronize()
    assert seen == [("first", True), ("second", True)]


def test_a_graph_reads_memory_as_it_is_when_it_is_launched(device):
    stream, seen = device.make_stream(), []
    source, target = (device.allocate_staging(64).view(torch.float32) for _ in range(2))
    there = device.allocate(64).view(torch.float32)

    def work():
        device.copy(source, there, stream)
        device.run(stream, lambda: there.mul_(2.0))
        device.copy(there, target, stream)
        device.call_host(stream, lambda: seen.append(float(target[0])))

    graph = device.capture(stream, work)
    gc.collect()
    assert seen == []
    for i in range(ROUNDS):
        source.fill_(i)
        device.launch(graph, stream)
        stream.synchronize()
    assert seen == [2.0 * i for i in range(ROUNDS)]


def test_graphs_in_cycles_are_freed_while_others_run(device):
    """Their freeing calls CUDA, which neither a host function nor a capture bears."""
    stream, seen = device.make_stream(), []
    there = device.allocate(64)

    def work():
        device.run(stream, lambda: there.add_(1))
        device.call_host(stream, lambda: seen.append([{} for _ in range(1000)]))

    for _ in range(ROUNDS):
        own = {"graph": device.capture(stream, work)}
        own["own"] = own
        device.launch(own["graph"], stream)
        stream.synchronize()
    assert len(seen) == ROUNDS


def test_what_a_host_function_raises_ends_the_streams_functions_and_is_raised_once(device):
    stream, seen = device.make_stream(), []

    def fail():
        raise ValueError("broken")

    device.call_host(stream, fail)
    device.call_host(stream, lambda: seen.append("after"))
    with pytest.raises(ValueError, match="broken"):
        stream.synchronize()
    stream.synchronize()
    assert seen == []
    graph = device.capture(stream, lambda: device.call_host(stream, fail))
    for _ in range(2):
        device.launch(graph, stream)
        with pytest.raises(ValueError, match="broken"):
            stream.synchronize()


def test_a_look_at_a_value_ends_the_capture_and_the_device_goes_on(device):
    stream, there = device.make_stream(), device.allocate(64)
    with pytest.raises(RuntimeError):
        device.capture(stream, lambda: device.run(stream, lambda: there[0].item()))
    with pytest.raises(InternalError, match="captured already"):
        device.capture(stream, lambda: device.capture(stream, lambda: None))
    stream = device.make_stream()
    graph = device.capture(stream, lambda: device.run(stream, lambda: there.add_(1)))
    device.launch(graph, stream)
    stream.synchronize()
    assert there.cpu().tolist() == [1] * 64


def test_memory_that_is_not_there_is_an_error_of_capacity(device):
    free_bytes = device.count_free_bytes()
    assert free_bytes > 0
    with pytest.raises(CapacityError, match="on cuda:0"):
        device.allocate(free_bytes + (1 << 40))
    memory = device.map_memory(1 << 20)
    memory.reserve(1 << 20)
    assert not memory.tensor.any()
    assert not DeviceContext(device, None).choose_execution(torch.float32).is_native

"""Goal: the CPU keeps the contract of ``Device`` that orchestration is written against.

Protects: order of work, what capture defers and launch repeats, and failures of host functions.
"""

import pytest
import torch

from tandem._native import ThreadPool
from tandem.core.errors import InternalError, UnsupportedError
from tandem.core.kv_layout import GqaLayout
from tandem.kernels.cpu.device import CPU, MIN_HUGE_BYTES, CpuDevice
from tandem.kernels.devices import DeviceContext, has_native_kernels, open_device


def test_memory_is_zero_and_aligned_small_or_large():
    for size in (64, MIN_HUGE_BYTES + 64):
        memory = CPU.allocate(size)
        assert (memory.dtype, memory.shape) == (torch.uint8, (size,))
        assert memory.data_ptr() % 64 == 0
        assert not memory[:64].any()
        assert not memory[-64:].any()


def test_work_of_a_stream_is_done_in_order():
    stream, event = CPU.make_stream(), CPU.make_event()
    seen: list[str] = []
    source, target = torch.ones(3), torch.zeros(3)
    CPU.call_host(stream, lambda: seen.append("first"))
    CPU.copy(source, target, stream)
    event.record(stream)
    CPU.call_host(stream, lambda: seen.append(f"then {target.sum():.0f}"))
    stream.synchronize()
    assert event.is_done()
    assert seen == ["first", "then 3"]


def test_captured_work_waits_for_each_launch_and_reads_memory_as_it_is_then():
    stream = CPU.make_stream()
    source, target = torch.zeros(1), torch.zeros(1)
    seen: list[float] = []

    def work():
        CPU.copy(source, target, stream)
        CPU.call_host(stream, lambda: seen.append(target.item()))

    graph = CPU.capture(stream, work)
    assert seen == []
    for value in (1.0, 2.0):
        source.fill_(value)
        CPU.launch(graph, stream)
    stream.synchronize()
    assert seen == [1.0, 2.0]


def test_what_a_host_function_raises_ends_the_streams_work_and_is_raised_once():
    stream, seen = CPU.make_stream(), []

    def fail():
        raise ValueError("broken")

    CPU.call_host(stream, fail)
    CPU.call_host(stream, lambda: seen.append("after"))
    with pytest.raises(ValueError, match="broken"):
        stream.synchronize()
    stream.synchronize()
    assert seen == []
    CPU.call_host(stream, lambda: seen.append("again"))
    assert seen == ["again"]


def test_a_capture_within_a_capture_is_refused_and_leaves_the_stream_usable():
    stream, seen = CPU.make_stream(), []
    with pytest.raises(InternalError, match="captured already"):
        CPU.capture(stream, lambda: CPU.capture(stream, lambda: None))
    CPU.call_host(stream, lambda: seen.append("now"))
    assert seen == ["now"]


def test_devices_by_name():
    assert open_device("cpu") is CPU
    assert has_native_kernels("cpu")
    assert not has_native_kernels("cuda:0")
    with pytest.raises(UnsupportedError, match="'xpu:1': use one of cpu, cuda"):
        open_device("xpu:1")


def test_a_context_makes_each_part_once_and_its_cache_lies_on_the_device():
    context = DeviceContext(CPU, ThreadPool(1))
    native = context.choose_execution(torch.float32)
    assert native.is_native
    assert context.choose_execution(torch.float32) is native
    assert not context.choose_execution(torch.float16).is_native
    layout = GqaLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
    cache = context.make_kv_cache(layout, 2)
    assert cache.device is CPU
    assert context.fetch(cache.tensor) is cache.tensor


def test_a_cache_lies_in_mapped_memory_that_is_reserved_in_parts():
    layout = GqaLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
    memory = CPU.map_memory(64 << 20)
    before = memory.reserved_bytes
    cache = DeviceContext(CPU, ThreadPool(1)).make_kv_cache(layout, 4, memory.tensor)
    assert cache.tensor.data_ptr() == memory.tensor.data_ptr()
    assert memory.reserved_bytes == before
    memory.reserve(layout.bytes_per_block * 4)
    cache.tensor[3].fill_(2.0)
    assert memory.array[: layout.bytes_per_block * 4].view("float32").max() == 2.0
    assert memory.reserved_bytes >= layout.bytes_per_block * 4


class FarDevice(CpuDevice):
    """A device whose memory the host is not to read."""

    is_host = False

    def __init__(self) -> None:
        self.staged: list[int] = []

    def allocate_staging(self, size_bytes: int) -> torch.Tensor:
        self.staged.append(size_bytes)
        return super().allocate_staging(size_bytes)


def test_values_are_fetched_through_staging_memory_that_is_made_once_and_grows():
    device = FarDevice()
    context = DeviceContext(device, ThreadPool(1))
    for rows in (2, 1, 0, 3):
        logits = torch.arange(rows * 5, dtype=torch.float32).view(rows, 5)
        fetched = context.fetch(logits)
        assert fetched.equal(logits)
        assert not rows or fetched.data_ptr() != logits.data_ptr()
    assert device.staged == [40, 60]

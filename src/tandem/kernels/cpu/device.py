"""The CPU as a ``Device``: memory is host memory and work runs when it is queued.

Streams have no queue: an operation is complete when the call that queues it returns. Events are
therefore always complete, and a graph is the list of the captured functions.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem._native import AlignedBuffer, read_topology
from tandem.core.errors import InternalError
from tandem.kernels.device import Event, Graph, Stream

__all__ = ["CPU", "MIN_HUGE_BYTES", "CpuDevice", "CpuMemory"]

MIN_HUGE_BYTES = 16 << 20
"""Smallest allocation, in bytes, that uses huge pages. A long context needs more small pages than a
core's TLB holds: with huge pages attention over 32k tokens took 0.88 of the time, over 128k 0.74.
"""


class CpuStream:
    """A stream that runs each operation in the caller's thread as soon as it is queued."""

    def __init__(self) -> None:
        self.captured: list[Callable[[], None]] | None = None
        """Copies and host functions queued during a capture, in order; None outside of a capture.
        """
        self.failure: BaseException | None = None

    def wait(self, event: Event) -> None:
        """Do nothing: recorded work is already complete on the CPU."""

    def synchronize(self) -> None:
        """Raise the error of the first operation that failed, if any; all work is complete."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def run(self, function: Callable[[], None]) -> None:
        """Run a function, or append it to the graph during a capture; skip it after a failure."""
        if self.captured is not None:
            self.captured.append(function)
        elif self.failure is None:
            try:
                function()
            except BaseException as error:  # noqa: BLE001 - raised by synchronize.
                self.failure = error


class CpuEvent:
    """An event that is always complete, since CPU operations complete when they are queued."""

    def record(self, stream: Stream) -> None:
        """Do nothing: work before the event is already complete."""

    def is_done(self) -> bool:
        """Return True: work before the event is always complete."""
        return True

    def synchronize(self) -> None:
        """Do nothing: the work before the event is already complete."""


class CpuGraph:
    """A captured graph: a list of functions.

    Args:
        work: functions to run in this order at each launch.
    """

    def __init__(self, work: list[Callable[[], None]]) -> None:
        self.work = work


class CpuMemory:
    """Host memory of this process, on huge pages if it is large.

    Args:
        size_bytes: at least 1.

    Raises: CapacityError (the machine has less memory).
    """

    def __init__(self, size_bytes: int) -> None:
        self._buffer = AlignedBuffer(size_bytes, hugepages=size_bytes >= MIN_HUGE_BYTES)
        self.array: NDArray[np.uint8] = self._buffer.array()
        """The memory as a NumPy array of the bytes of ``tensor``."""
        self.tensor = torch.from_numpy(self.array)

    @property
    def reserved_bytes(self) -> int:
        """Bytes that have physical memory; preallocated huge pages all have it from the start."""
        return self._buffer.reserved_bytes

    def reserve(self, end_bytes: int) -> None:
        """Back the first ``end_bytes`` of the memory with physical pages."""
        self._buffer.reserve(end_bytes)


class CpuDevice:
    """The CPU as a ``Device``."""

    torch_device = torch.device("cpu")
    is_host = True
    has_native_kernels = True

    def name_arithmetic(self) -> str:
        """Return the instruction set that torch's libraries use."""
        return torch.backends.cpu.get_cpu_capability()

    def count_free_bytes(self) -> int:
        """Return the machine's available memory in bytes; limits of a control group are ignored."""
        return read_topology().memory_available_bytes

    def allocate(self, size_bytes: int) -> Tensor:
        """Return zeroed memory; its pages are backed on first use."""
        if size_bytes < MIN_HUGE_BYTES:
            return torch.zeros(size_bytes, dtype=torch.uint8)
        # The tensor keeps a reference to the array, and the array to the mapped buffer.
        return CpuMemory(size_bytes).tensor

    def map_memory(self, size_bytes: int) -> CpuMemory:
        """Map memory whose pages can be reserved in steps."""
        return CpuMemory(size_bytes)

    def allocate_staging(self, size_bytes: int) -> Tensor:
        """Return ordinary host memory: the CPU needs no pinned memory for copies."""
        return self.allocate(size_bytes)

    def copy(self, source: Tensor, target: Tensor, stream: Stream | None = None) -> None:
        """Copy a tensor, at once or as an operation of a stream."""
        if stream is None:
            target.copy_(source)
        else:
            _as_own(stream).run(partial(_copy, source, target))

    def make_stream(self) -> CpuStream:
        """Return a new stream."""
        return CpuStream()

    def follow(self, stream: Stream) -> None:
        """Do nothing: torch's CPU operators are complete when they return."""

    def wait(self, event: Event) -> None:
        """Do nothing: work before the event is already complete."""

    def make_event(self) -> CpuEvent:
        """Return a new event."""
        return CpuEvent()

    def run(self, stream: Stream, work: Callable[[], None], name: str = "") -> None:
        """Run work in the caller's thread, or record it if the stream is being captured."""
        del name
        _as_own(stream).run(work)

    def call_host(self, stream: Stream, function: Callable[[], None], name: str = "") -> None:
        """Run a host function in the caller's thread, or record it if the stream is being
        captured.
        """
        del name
        _as_own(stream).run(function)

    def capture(self, stream: Stream, work: Callable[[], None]) -> CpuGraph:
        """Capture the operations that ``work`` queues on a stream, as a graph.

        Torch operators that are called outside of ``run`` execute at once and are not captured, as
        the CPU has no queue.

        Raises: InternalError (the stream is being captured already).
        """
        own = _as_own(stream)
        if own.captured is not None:
            raise InternalError("kernels.capture", "the stream is being captured already")
        own.captured = captured = []
        try:
            work()
        finally:
            own.captured = None
        return CpuGraph(captured)

    def launch(self, graph: Graph, stream: Stream) -> None:
        """Run the functions of a captured graph in order."""
        assert isinstance(graph, CpuGraph), "a graph of another device"
        for function in graph.work:
            _as_own(stream).run(function)


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def _as_own(stream: Stream) -> CpuStream:
    assert isinstance(stream, CpuStream), "a stream of another device"
    return stream


CPU = CpuDevice()
"""The shared CPU device; it has no state."""

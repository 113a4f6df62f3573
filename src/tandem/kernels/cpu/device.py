"""The CPU as a ``Device``: all memory is the host's, and work is done where it is queued.

A stream has nothing that waits: an operation is done when the call that queues it returns. An event
has happened when it is recorded, and a graph is the function that was captured.
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
"""From here on memory lies on huge pages: a long context is more small pages than the core has
translations for. Attention over 32k tokens took 0.88 of the time, over 128k 0.74."""


class CpuStream:
    """See ``Stream``."""

    def __init__(self) -> None:
        self.captured: list[Callable[[], None]] | None = None
        """Copies and host functions that were queued while work is captured."""
        self.failure: BaseException | None = None

    def wait(self, event: Event) -> None:
        """See ``Stream``; work that was recorded is done."""

    def synchronize(self) -> None:
        """See ``Stream``."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def run(self, function: Callable[[], None]) -> None:
        """Do a piece of work, or keep it for the graph; after one that failed do none."""
        if self.captured is not None:
            self.captured.append(function)
        elif self.failure is None:
            try:
                function()
            except BaseException as error:  # noqa: BLE001 - raised by synchronize.
                self.failure = error


class CpuEvent:
    """See ``Event``."""

    def record(self, stream: Stream) -> None:
        """See ``Event``; the work before it is done."""

    def is_done(self) -> bool:
        """See ``Event``."""
        return True

    def synchronize(self) -> None:
        """See ``Event``."""


class CpuGraph:
    """See ``Graph``.

    Args:
        work: in order; run at each launch.
    """

    def __init__(self, work: list[Callable[[], None]]) -> None:
        self.work = work


class CpuMemory:
    """See ``DeviceMemory``: memory of this process alone.

    Args:
        size_bytes: at least 1.

    Raises: CapacityError (more than the machine has).
    """

    def __init__(self, size_bytes: int) -> None:
        self._buffer = AlignedBuffer(size_bytes, hugepages=size_bytes >= MIN_HUGE_BYTES)
        self.array: NDArray[np.uint8] = self._buffer.array()
        """The same bytes as ``tensor``."""
        self.tensor = torch.from_numpy(self.array)

    @property
    def reserved_bytes(self) -> int:
        """See ``Reservation``; preallocated huge pages are all there from the start."""
        return self._buffer.reserved_bytes

    def reserve(self, end_bytes: int) -> None:
        """See ``Reservation``."""
        self._buffer.reserve(end_bytes)


class CpuDevice:
    """See ``Device``."""

    torch_device = torch.device("cpu")
    is_host = True
    has_native_kernels = True

    def name_arithmetic(self) -> str:
        """See ``Device``: the instruction set that torch's libraries use."""
        return torch.backends.cpu.get_cpu_capability()

    def count_free_bytes(self) -> int:
        """See ``Device``: of the machine, whatever a control group allows."""
        return read_topology().memory_available_bytes

    def allocate(self, size_bytes: int) -> Tensor:
        """See ``Device``; pages are touched on first use."""
        if size_bytes < MIN_HUGE_BYTES:
            return torch.zeros(size_bytes, dtype=torch.uint8)
        # The tensor keeps a reference to the array, and the array to the mapped buffer.
        return CpuMemory(size_bytes).tensor

    def map_memory(self, size_bytes: int) -> CpuMemory:
        """See ``Device``."""
        return CpuMemory(size_bytes)

    def allocate_staging(self, size_bytes: int) -> Tensor:
        """See ``Device``; any memory is host memory."""
        return self.allocate(size_bytes)

    def copy(self, source: Tensor, target: Tensor, stream: Stream | None = None) -> None:
        """See ``Device``."""
        if stream is None:
            target.copy_(source)
        else:
            _as_own(stream).run(partial(_copy, source, target))

    def make_stream(self) -> CpuStream:
        """See ``Device``."""
        return CpuStream()

    def follow(self, stream: Stream) -> None:
        """See ``Device``: such operators are done when they return."""

    def make_event(self) -> CpuEvent:
        """See ``Device``."""
        return CpuEvent()

    def run(self, stream: Stream, work: Callable[[], None], name: str = "") -> None:
        """See ``Device``; the caller runs it."""
        del name
        _as_own(stream).run(work)

    def call_host(self, stream: Stream, function: Callable[[], None], name: str = "") -> None:
        """See ``Device``; the caller runs it."""
        del name
        _as_own(stream).run(function)

    def capture(self, stream: Stream, work: Callable[[], None]) -> CpuGraph:
        """See ``Device``.

        Operators outside of ``run`` are done at once, as the CPU has no queue that they could be
        taken from.
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
        """See ``Device``."""
        assert isinstance(graph, CpuGraph), "a graph of another device"
        for function in graph.work:
            _as_own(stream).run(function)


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def _as_own(stream: Stream) -> CpuStream:
    assert isinstance(stream, CpuStream), "a stream of another device"
    return stream


CPU = CpuDevice()
"""The one that all share: it has no state."""

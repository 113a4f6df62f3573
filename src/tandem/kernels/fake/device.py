"""A simulated device whose streams are threads, for tests of the order of work.

Each stream is a thread that does its work in order, later than it was queued and in parallel with
other streams and the host, as a GPU would. Operators are the CPU's. Time is not modelled: ``delay``
lets a test hold work back, which must not change results.
"""

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tandem.core.errors import DeadlineError, InternalError
from tandem.kernels.cpu.device import CPU, CpuMemory
from tandem.kernels.device import Event, Graph, Stream
from tandem.kernels.fake.memory import hide, on_device

if TYPE_CHECKING:
    from typing import Self

__all__ = ["FakeDevice"]

WAIT_S = 60.0
"""Longest time in seconds that the host waits for the device, far above the length of a step."""

Work = Callable[[], None]


class FakeStream:
    """A stream whose work runs in order on a thread of its own.

    Args:
        delay: called with the name of each piece of work before it runs.
    """

    def __init__(self, delay: Callable[[str], None]) -> None:
        self.captured: list[tuple[str, Work]] | None = None
        self._delay = delay
        self._ready = threading.Condition()
        self._queue: deque[tuple[str, Work]] = deque()
        self._num_queued = 0
        self._num_done = 0
        self._failure: BaseException | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, daemon=True, name="fake-stream")
        self._thread.start()

    def put(self, name: str, work: Work) -> None:
        """Queue a piece of work, or record it during a capture."""
        if self.captured is not None:
            self.captured.append((name, work))
            return
        with self._ready:
            if self._is_closed:
                raise InternalError("kernels.fake_device", "the stream's device is closed")
            self._queue.append((name, work))
            self._num_queued += 1
            self._ready.notify_all()

    def wait(self, event: Event) -> None:
        """Let later work of this stream wait for an event."""
        own = _as_event(event)
        self.put("wait", partial(own.place.wait_done, own.number))

    def synchronize(self) -> None:
        """Wait until all queued work is done; raise the first error of it.

        Raises: InternalError (the stream is being captured).
        """
        if self.captured is not None:
            raise InternalError("kernels.capture", "waiting for a stream while it is captured")
        with self._ready:
            number = self._num_queued
        self.wait_done(number)
        with self._ready:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    @property
    def num_queued(self) -> int:
        """Number of pieces of work that were ever queued on the stream."""
        with self._ready:
            return self._num_queued

    def is_done(self, number: int) -> bool:
        """Return True if the first ``number`` pieces of work are done."""
        with self._ready:
            return self._num_done >= number

    def wait_done(self, number: int) -> None:
        """Wait until the first ``number`` pieces of work are done.

        Raises: DeadlineError (``WAIT_S`` have passed).
        """
        with self._ready:
            if not self._ready.wait_for(lambda: self._num_done >= number, WAIT_S):
                raise DeadlineError("kernels.fake_device", f"a stream stood still for {WAIT_S} s")

    def close(self) -> None:
        """End the thread after the work that is still queued."""
        with self._ready:
            self._is_closed = True
            self._ready.notify_all()
        self._thread.join(WAIT_S)

    def _work(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._queue or self._is_closed)
                if not self._queue:
                    return
                name, work = self._queue.popleft()
                is_skipped = self._failure is not None
            try:
                if not is_skipped:
                    self._delay(name)
                    work()
            except BaseException as error:  # noqa: BLE001 - raised by synchronize.
                with self._ready:
                    self._failure = error
            finally:
                with self._ready:
                    self._num_done += 1
                    self._ready.notify_all()


class FakeEvent:
    """An event of the simulated device: a stream, and how many of its pieces of work come before
    the event.
    """

    def __init__(self, place: FakeStream) -> None:
        self.place = place
        self.number = 0

    def record(self, stream: Stream) -> None:
        """Record the event after the work that the stream has queued."""
        self.place = _as_own(stream)
        if self.place.captured is not None:
            raise InternalError("kernels.capture", "an event of a captured stream is not kept")
        self.number = self.place.num_queued

    def is_done(self) -> bool:
        """Return True if the work before the event is done."""
        return self.place.is_done(self.number)

    def synchronize(self) -> None:
        """Wait until the work before the event is done."""
        self.place.wait_done(self.number)


class FakeGraph:
    """A captured graph: a list of named pieces of work.

    Args:
        work: (name, function), run in this order at each launch.
    """

    def __init__(self, work: list[tuple[str, Work]]) -> None:
        self.work = work


class FakeDevice:
    """A simulated device with a thread per stream; close it, or use it as a context manager.

    Args:
        delay: called on a stream's thread with the name of each piece of work before it runs.
    """

    torch_device = torch.device("cpu")
    is_host = False
    has_native_kernels = True

    def __init__(self, delay: Callable[[str], None] = lambda _: None) -> None:
        self._delay = delay
        self._streams: list[FakeStream] = []

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads of all streams; idempotent."""
        for stream in self._streams:
            stream.close()
        self._streams = []

    def name_arithmetic(self) -> str:
        """Return the instruction set that torch's CPU operators use."""
        return CPU.name_arithmetic()

    def count_free_bytes(self) -> int:
        """Return the host's available memory in bytes."""
        return CPU.count_free_bytes()

    def allocate(self, size_bytes: int) -> Tensor:
        """Return zeroed memory that the host may not read or write directly."""
        return hide(CPU.allocate(size_bytes))

    def map_memory(self, size_bytes: int) -> CpuMemory:
        """Return host memory, for operators that run outside of a stream."""
        return CPU.map_memory(size_bytes)

    def allocate_staging(self, size_bytes: int) -> Tensor:
        """Return ordinary host memory."""
        return CPU.allocate(size_bytes)

    def copy(self, source: Tensor, target: Tensor, stream: Stream | None = None) -> None:
        """Copy a tensor, at once or as an operation of a stream."""
        if stream is None:
            _copy(source, target)
        else:
            _as_own(stream).put("copy", partial(_copy, source, target))

    def make_stream(self) -> FakeStream:
        """Return a new stream, with a thread of its own that does its work."""
        self._streams.append(FakeStream(self._delay))
        return self._streams[-1]

    def follow(self, stream: Stream) -> None:
        """Do nothing: CPU operators are complete when they return."""

    def wait(self, event: Event) -> None:
        """Wait on the host until the event is done, as operators run in the thread that calls
        them.
        """
        event.synchronize()

    def make_event(self) -> FakeEvent:
        """Return a new event."""
        if not self._streams:
            self.make_stream()
        return FakeEvent(self._streams[0])

    def run(self, stream: Stream, work: Callable[[], None], name: str = "") -> None:
        """Queue work on a stream; its thread runs the work later, with access to device memory."""
        _as_own(stream).put(name or "run", partial(_run, work))

    def call_host(self, stream: Stream, function: Callable[[], None], name: str = "") -> None:
        """Queue a host function; the stream's thread runs it as the host, without device memory."""
        _as_own(stream).put(name or "host", function)

    def capture(self, stream: Stream, work: Callable[[], None]) -> FakeGraph:
        """Capture the work that ``work`` queues on a stream, as a graph.

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
        return FakeGraph(captured)

    def launch(self, graph: Graph, stream: Stream) -> None:
        """Queue the work of a captured graph on a stream."""
        assert isinstance(graph, FakeGraph), "a graph of another device"
        for name, work in graph.work:
            _as_own(stream).put(name, work)


def _run(work: Work) -> None:
    with on_device(), torch.inference_mode():
        work()


def _copy(source: Tensor, target: Tensor) -> None:
    with on_device(), torch.inference_mode():
        target.copy_(source)


def _as_own(stream: Stream) -> FakeStream:
    assert isinstance(stream, FakeStream), "a stream of another device"
    return stream


def _as_event(event: Event) -> FakeEvent:
    assert isinstance(event, FakeEvent), "an event of another device"
    return event

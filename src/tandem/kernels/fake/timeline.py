"""A simulated device on a virtual clock: when each stream would work, from modelled speeds.

Nothing is computed. Each stream is a lane of a timeline, and so are the host's experts; a piece of
work takes the time that ``costs`` gives for its name, a copy takes its bytes over the link's speed.
So the code that schedules work for a GPU produces a timeline, in which a change of scheduling shows
as idle time.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.core.errors import InternalError
from tandem.kernels.cpu.device import CPU, CpuMemory
from tandem.kernels.device import Event, Graph, Stream

__all__ = ["HOST_LANE", "Span", "TimelineDevice"]

HOST_LANE = "host"


class Span(NamedTuple):
    """A piece of work on the timeline: its lane (stream, or host) and its begin and end in virtual
    time.
    """

    lane: str
    name: str
    begin_s: float
    end_s: float


class TimelineStream:
    """A stream as a lane of the timeline (work one after the other), busy until ``now_s``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.now_s = 0.0
        self.captured: list[Callable[[], None]] | None = None

    def put(self, work: Callable[[], None]) -> None:
        """Run a piece of work in virtual time, or record it during a capture."""
        if self.captured is None:
            work()
        else:
            self.captured.append(work)

    def wait(self, event: Event) -> None:
        """Let the stream go on no earlier than the event's virtual time."""
        assert isinstance(event, TimelineEvent), "an event of another device"
        self.now_s = max(self.now_s, event.at_s)

    def synchronize(self) -> None:
        """Do nothing: the host has no clock in this simulation, so it never waits."""


class TimelineEvent:
    """An event of the timeline: the virtual time at which its stream reaches it."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def record(self, stream: Stream) -> None:
        """Set the event's virtual time to that at which the stream has done its work so far."""
        self.at_s = _as_own(stream).now_s

    def is_done(self) -> bool:
        """Return True: the host has no clock in this simulation, so it sees all work done."""
        return True

    def synchronize(self) -> None:
        """Do nothing: the host has no clock in this simulation, so it never waits."""


class TimelineGraph:
    """A captured graph: a list of pieces of work.

    Args:
        work: run in this order at each launch.
    """

    def __init__(self, work: list[Callable[[], None]]) -> None:
        self.work = work


class TimelineDevice:
    """A simulated device that computes no tensors, only when work would run (a timeline).

    Args:
        costs: gives the seconds of device work by its name; for host functions, of the job that
            they submit to the host's lane (0: they submit none).
        link_bytes_per_s: speed of copies between host and device.
        launch_s: seconds that the stream needs to launch work outside of a graph.
        handover_s: seconds between stream and host: from the stream to a job that it submits, and
            from the end of the job that it waits for back to the stream.
        late_share: gives the share of a host job, by its name, for which its layer does not wait
            (deferred experts); None: every layer waits for all.
    """

    torch_device = torch.device("cpu")
    is_host = False
    has_native_kernels = True

    def __init__(
        self,
        costs: Callable[[str], float],
        *,
        link_bytes_per_s: float,
        launch_s: float = 0.0,
        handover_s: float = 0.0,
        late_share: Callable[[str], float] | None = None,
    ) -> None:
        self._costs = costs
        self._link = link_bytes_per_s
        self._launch_s, self._handover_s = launch_s, handover_s
        self._late_share = late_share
        self._num_streams = 0
        self._host_s = 0.0
        self._is_replay = False
        self._due: list[float] = []
        """End times of host jobs that no stream has waited for yet, oldest first."""
        self.spans: list[Span] = []

    def name_arithmetic(self) -> str:
        """Return the name of the CPU's arithmetic, although nothing is computed."""
        return CPU.name_arithmetic()

    def count_free_bytes(self) -> int:
        """Return the host's available memory in bytes."""
        return CPU.count_free_bytes()

    def allocate(self, size_bytes: int) -> Tensor:
        """Return host memory: this simulated device has none of its own."""
        return CPU.allocate(size_bytes)

    def map_memory(self, size_bytes: int) -> CpuMemory:
        """Return host memory: this simulated device has none of its own."""
        return CPU.map_memory(size_bytes)

    def allocate_staging(self, size_bytes: int) -> Tensor:
        """Return host memory: this simulated device needs no other for its copies."""
        return CPU.allocate(size_bytes)

    def make_stream(self) -> TimelineStream:
        """Return a new stream, which is a lane (a row of work in order) of the timeline."""
        self._num_streams += 1
        return TimelineStream(f"stream {self._num_streams}")

    def follow(self, stream: Stream) -> None:
        """Do nothing: such operators are complete when they return."""

    def wait(self, event: Event) -> None:
        """Do nothing: in this simulation operators outside of streams take no time."""

    def make_event(self) -> TimelineEvent:
        """Return a new event."""
        return TimelineEvent()

    def copy(self, source: Tensor, target: Tensor, stream: Stream | None = None) -> None:
        """Add a copy to the stream's lane; it takes its bytes divided by the speed of the link
        between host and device.
        """
        assert stream is not None, "a copy that no stream does"
        own = _as_own(stream)
        own.put(partial(self._spend, own, "copy", target.nbytes / self._link))

    def run(self, stream: Stream, work: Callable[[], None], name: str = "") -> None:
        """Add work to the stream's lane, for as long as ``costs`` says of its name; the work is not
        called.
        """
        del work
        own = _as_own(stream)
        own.put(partial(self._spend, own, name, self._costs(name)))

    def call_host(self, stream: Stream, function: Callable[[], None], name: str = "") -> None:
        """Model a host function: ``submit ...`` begins a job in the host's lane, ``wait ...`` waits
        for its end.
        """
        del function
        own = _as_own(stream)
        verb = name.partition(" ")[0]
        if verb not in ("submit", "wait"):
            raise InternalError("kernels.timeline", f"a host function that is not modelled: {name}")
        own.put(partial(self._submit if verb == "submit" else self._wait, own, name))

    def capture(self, stream: Stream, work: Callable[[], None]) -> TimelineGraph:
        """Capture the work that ``work`` queues on a stream, as a graph."""
        own = _as_own(stream)
        own.captured = captured = []
        try:
            work()
        finally:
            own.captured = None
        return TimelineGraph(captured)

    def launch(self, graph: Graph, stream: Stream) -> None:
        """Run a captured graph in virtual time; it costs one launch, whatever it contains."""
        assert isinstance(graph, TimelineGraph), "a graph of another device"
        _as_own(stream).now_s += self._launch_s
        self._is_replay = True
        try:
            for work in graph.work:
                work()
        finally:
            self._is_replay = False

    def count_busy_s(self, lane: str) -> float:
        """Return the virtual seconds for which a lane (a stream, or the host) was busy."""
        return sum(span.end_s - span.begin_s for span in self.spans if span.lane == lane)

    @property
    def end_s(self) -> float:
        """Virtual time in seconds at which the last piece of work ends."""
        return max((span.end_s for span in self.spans), default=0.0)

    def _spend(self, stream: TimelineStream, name: str, seconds: float) -> None:
        begin_s = stream.now_s + (0.0 if self._is_replay else self._launch_s)
        stream.now_s = begin_s + seconds
        self.spans.append(Span(stream.name, name, begin_s, stream.now_s))

    def _submit(self, stream: TimelineStream, name: str) -> None:
        stream.now_s += self._handover_s
        begin_s, cost = max(self._host_s, stream.now_s), self._costs(name)
        late = 0.0 if self._late_share is None else self._late_share(name)
        due_s = begin_s + cost * (1 - late)
        self._host_s = begin_s + cost
        self._due.append(due_s)
        self.spans.append(Span(HOST_LANE, name, begin_s, due_s))
        if late:
            self.spans.append(Span(HOST_LANE, f"late {name}", due_s, self._host_s))

    def _wait(self, stream: TimelineStream, name: str) -> None:
        del name
        due_s = self._due.pop(0) if self._due else 0.0
        stream.now_s = max(stream.now_s, due_s) + self._handover_s


def _as_own(stream: Stream) -> TimelineStream:
    assert isinstance(stream, TimelineStream), "a stream of another device"
    return stream

"""A device that is none, on a virtual clock: when which lane would work, by modelled speeds.

Nothing is computed. Each stream and the host's experts are lanes; work takes what ``costs`` says of
its name, copies their bytes over the link. So the orchestration that runs on a GPU draws its
timeline, and a change of it shows as idle time.
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
    """A piece of work of a lane."""

    lane: str
    name: str
    begin_s: float
    end_s: float


class TimelineStream:
    """See ``Stream``: a lane, busy until ``now_s``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.now_s = 0.0
        self.captured: list[Callable[[], None]] | None = None

    def put(self, work: Callable[[], None]) -> None:
        """Do a piece of work in virtual time, or keep it for the graph."""
        if self.captured is None:
            work()
        else:
            self.captured.append(work)

    def wait(self, event: Event) -> None:
        """See ``Stream``."""
        assert isinstance(event, TimelineEvent), "an event of another device"
        self.now_s = max(self.now_s, event.at_s)

    def synchronize(self) -> None:
        """See ``Stream``; the host reads no clock, so it waits for nothing."""


class TimelineEvent:
    """See ``Event``."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def record(self, stream: Stream) -> None:
        """See ``Event``."""
        self.at_s = _as_own(stream).now_s

    def is_done(self) -> bool:
        """See ``Event``."""
        return True

    def synchronize(self) -> None:
        """See ``Event``."""


class TimelineGraph:
    """See ``Graph``.

    Args:
        work: in order.
    """

    def __init__(self, work: list[Callable[[], None]]) -> None:
        self.work = work


class TimelineDevice:
    """See ``Device``.

    Args:
        costs: seconds of device work by name; of host functions, of what they submit to the host's
            lane (0: they submit nothing).
        link_bytes_per_s: between host and device.
        launch_s: of each piece of work that is no part of a graph, on the stream.
        handover_s: of each host function.
        late_share: of what a host function submits, the part that nobody waits for in its layer.
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
        late_share: float = 0.0,
    ) -> None:
        self._costs = costs
        self._link = link_bytes_per_s
        self._launch_s, self._handover_s = launch_s, handover_s
        self._late_share = late_share
        self._num_streams = 0
        self._host_s = 0.0
        self._is_replay = False
        self._due: list[float] = []
        """Ends of jobs of the host's lane that nobody has waited for, oldest first."""
        self.spans: list[Span] = []

    def name_arithmetic(self) -> str:
        """See ``Device``; nothing is computed."""
        return CPU.name_arithmetic()

    def count_free_bytes(self) -> int:
        """See ``Device``: memory is the host's."""
        return CPU.count_free_bytes()

    def allocate(self, size_bytes: int) -> Tensor:
        """See ``Device``."""
        return CPU.allocate(size_bytes)

    def map_memory(self, size_bytes: int) -> CpuMemory:
        """See ``Device``."""
        return CPU.map_memory(size_bytes)

    def allocate_staging(self, size_bytes: int) -> Tensor:
        """See ``Device``."""
        return CPU.allocate(size_bytes)

    def make_stream(self) -> TimelineStream:
        """See ``Device``."""
        self._num_streams += 1
        return TimelineStream(f"stream {self._num_streams}")

    def follow(self, stream: Stream) -> None:
        """See ``Device``: such operators are done when they return."""

    def make_event(self) -> TimelineEvent:
        """See ``Device``."""
        return TimelineEvent()

    def copy(self, source: Tensor, target: Tensor, stream: Stream | None = None) -> None:
        """See ``Device``."""
        assert stream is not None, "a copy that no stream does"
        own = _as_own(stream)
        own.put(partial(self._spend, own, "copy", target.nbytes / self._link))

    def run(self, stream: Stream, work: Callable[[], None], name: str = "") -> None:
        """See ``Device``; the work is not called."""
        del work
        own = _as_own(stream)
        own.put(partial(self._spend, own, name, self._costs(name)))

    def call_host(self, stream: Stream, function: Callable[[], None], name: str = "") -> None:
        """See ``Device``; ``submit ...`` begins a job of the host's lane, ``wait ...`` ends it."""
        del function
        own = _as_own(stream)
        verb = name.partition(" ")[0]
        if verb not in ("submit", "wait"):
            raise InternalError("kernels.timeline", f"a host function that is not modelled: {name}")
        own.put(partial(self._submit if verb == "submit" else self._wait, own, name))

    def capture(self, stream: Stream, work: Callable[[], None]) -> TimelineGraph:
        """See ``Device``."""
        own = _as_own(stream)
        own.captured = captured = []
        try:
            work()
        finally:
            own.captured = None
        return TimelineGraph(captured)

    def launch(self, graph: Graph, stream: Stream) -> None:
        """See ``Device``: launched once, whatever is in it."""
        assert isinstance(graph, TimelineGraph), "a graph of another device"
        _as_own(stream).now_s += self._launch_s
        self._is_replay = True
        try:
            for work in graph.work:
                work()
        finally:
            self._is_replay = False

    def count_busy_s(self, lane: str) -> float:
        """Return the seconds that a lane worked."""
        return sum(span.end_s - span.begin_s for span in self.spans if span.lane == lane)

    @property
    def end_s(self) -> float:
        """End of the last piece of work."""
        return max((span.end_s for span in self.spans), default=0.0)

    def _spend(self, stream: TimelineStream, name: str, seconds: float) -> None:
        begin_s = stream.now_s + (0.0 if self._is_replay else self._launch_s)
        stream.now_s = begin_s + seconds
        self.spans.append(Span(stream.name, name, begin_s, stream.now_s))

    def _submit(self, stream: TimelineStream, name: str) -> None:
        stream.now_s += self._handover_s
        begin_s, cost = max(self._host_s, stream.now_s), self._costs(name)
        due_s = begin_s + cost * (1 - self._late_share)
        self._host_s = begin_s + cost
        self._due.append(due_s)
        self.spans.append(Span(HOST_LANE, name, begin_s, due_s))
        if self._late_share:
            self.spans.append(Span(HOST_LANE, f"late {name}", due_s, self._host_s))

    def _wait(self, stream: TimelineStream, name: str) -> None:
        del name
        due_s = self._due.pop(0) if self._due else 0.0
        stream.now_s = max(stream.now_s + self._handover_s, due_s)


def _as_own(stream: Stream) -> TimelineStream:
    assert isinstance(stream, TimelineStream), "a stream of another device"
    return stream

"""The statistics of one instance over its restarts, so that counters only grow. Pure."""

import msgspec

from tandem.core.instance_status import InstanceStats, Statistics, list_stats, sum_stats
from tandem.core.wire import InstanceStage

__all__ = ["StatsHistory"]


class StatsHistory:
    """The stats of one instance over its restarts, as far as they were asked for.

    A process begins to count at zero. In a sum over instances that would look as if all of them
    had restarted, so what an earlier run had counted when it was last asked is added.
    """

    def __init__(self) -> None:
        self._ended = Statistics()
        self._last = Statistics()
        self._incarnation = 0

    @property
    def last(self) -> Statistics:
        """The last report of the present run; zeros before it has told anything."""
        return self._last

    def note(self, incarnation: int, stats: InstanceStats) -> InstanceStats:
        """Add a report of a run; return it plus the counters of earlier runs."""
        if incarnation != self._incarnation:
            self._ended = self.recall()
            self._incarnation = incarnation
        self._last = stats
        return sum_stats(stats.stage, (self._ended, stats))

    def recall(self) -> InstanceStats:
        """Return the last known counters, without gauges, while the instance does not answer."""
        zero = Statistics()
        gone = {s.field: getattr(zero, s.field) for s in list_stats() if s.kind == "gauge"}
        counted = msgspec.structs.replace(self._last, **gone)
        return sum_stats(InstanceStage.STARTING, (self._ended, counted))

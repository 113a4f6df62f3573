"""Statistics of one instance summed over its restarts, so that counters never decrease. Pure."""

import msgspec

from tandem.core.instance_status import InstanceStats, Statistics, list_stats, sum_stats
from tandem.core.wire import InstanceStage

__all__ = ["StatsHistory"]


class StatsHistory:
    """Statistics of one instance over its restarts.

    A new process begins to count at zero, which would make sums over instances decrease. The last
    counts reported by earlier runs are therefore added to those of the current run.
    """

    def __init__(self) -> None:
        self._ended = Statistics()
        self._last = Statistics()
        self._incarnation = 0

    @property
    def last(self) -> Statistics:
        """The last report of the instance's current run; zeros before its first report."""
        return self._last

    def note(self, incarnation: int, stats: InstanceStats) -> InstanceStats:
        """Record a report of the run (process) numbered ``incarnation``; return it with the
        counters of earlier runs added.
        """
        if incarnation != self._incarnation:
            self._ended = self.recall()
            self._incarnation = incarnation
        self._last = stats
        return sum_stats(stats.stage, (self._ended, stats))

    def recall(self) -> InstanceStats:
        """Return the last known counters, with gauges at zero, for an instance that does not
        answer.
        """
        zero = Statistics()
        gone = {s.field: getattr(zero, s.field) for s in list_stats() if s.kind == "gauge"}
        counted = msgspec.structs.replace(self._last, **gone)
        return sum_stats(InstanceStage.STARTING, (self._ended, counted))

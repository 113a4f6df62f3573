"""Counters of several instances, summed so that they only grow. Pure."""

from collections.abc import Iterable
from typing import Any

from tandem.core.wire import InstanceStage, InstanceStats

__all__ = ["GAUGES", "StatsHistory", "sum_stats"]

GAUGES = frozenset(
    {
        "num_running",
        "num_waiting",
        "num_loading",
        "num_held",
        "num_blocks",
        "num_used_blocks",
        "num_cached_blocks",
        "store_links",
    }
)
"""Fields of ``InstanceStats`` that fall; all others but ``stage`` are counters."""


def sum_stats(stage: InstanceStage, parts: Iterable[InstanceStats]) -> InstanceStats:
    """Add up the stats of instances; counters by reason are added reason by reason."""
    total: dict[str, Any] = {}
    for part in parts:
        for name in InstanceStats.__struct_fields__:
            if name == "stage":
                continue
            value: float | dict[str, int] = getattr(part, name)
            if isinstance(value, dict):
                known: dict[str, int] = total.setdefault(name, {})
                for reason, amount in value.items():
                    known[reason] = known.get(reason, 0) + amount
            else:
                total[name] = total.get(name, 0) + value
    return InstanceStats(stage=stage, **total)


class StatsHistory:
    """The stats of one instance over its restarts, as far as they were asked for.

    A process begins to count at zero. In a sum over instances that would look as if all of them
    had restarted, so what an earlier run had counted when it was last asked is added.
    """

    def __init__(self) -> None:
        self._ended = InstanceStats(stage=InstanceStage.STARTING)
        self._last = InstanceStats(stage=InstanceStage.STARTING)
        self._incarnation = 0

    def note(self, incarnation: int, stats: InstanceStats) -> InstanceStats:
        """Take in the stats of a run; return them with what earlier runs had counted."""
        if incarnation != self._incarnation:
            self._ended = sum_stats(stats.stage, (self._ended, _drop_gauges(self._last)))
            self._incarnation = incarnation
        self._last = stats
        return sum_stats(stats.stage, (self._ended, stats))

    def recall(self) -> InstanceStats:
        """Return what is known while the instance does not answer."""
        return sum_stats(InstanceStage.STARTING, (self._ended, _drop_gauges(self._last)))


def _drop_gauges(stats: InstanceStats) -> InstanceStats:
    kept = {
        name: getattr(stats, name)
        for name in InstanceStats.__struct_fields__
        if name != "stage" and name not in GAUGES
    }
    return InstanceStats(stage=stats.stage, **kept)

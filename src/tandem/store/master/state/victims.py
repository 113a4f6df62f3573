"""The choice of objects to evict, by passes over the directory's columns. Pure."""

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["ALIVE", "VictimColumns", "Victims", "view"]

ALIVE = 1
"""Value of a row's flags if the row is in use and has no hard pin."""
BATCH = 16_384
"""Number of candidates that one pass collects."""


class VictimColumns(NamedTuple):
    """The directory's columns that the choice reads; borrowed."""

    size: "array[int]"
    flags: "array[int]"
    used_tick: "array[int]"
    lease_until_ms: "array[int]"
    soft_until_ms: Mapping[int, int]
    """Time at which each soft pin ends, by row."""


class Victims:
    """Eviction candidates that a pass found and that are not evicted yet.

    Args:
        columns: the directory's columns.
        rows_on_host: returns the rows with a copy in a host's memory.
        is_on: returns True if a row has a copy in a host's memory.
    """

    def __init__(
        self,
        columns: VictimColumns,
        rows_on_host: Callable[[int], npt.NDArray[np.int64]],
        is_on: Callable[[int, int], bool],
    ) -> None:
        self._columns = columns
        self._rows_on_host = rows_on_host
        self._is_on = is_on
        self._queues: dict[int | None, deque[tuple[int, int]]] = {}
        """Candidate rows with their times of last use, by host; None for any host."""

    def pick(self, now_ms: int, min_bytes: int, host: int | None, mean_bytes: int) -> list[int]:
        """Return the rows to evict, as ``Directory.pick_victims`` describes. ``mean_bytes`` is the
        mean size of all values.
        """
        chosen: list[int] = []
        missing = min_bytes
        for soft in (False, True):
            taken = set(chosen)
            for refilled in (False, True):
                if missing <= 0:
                    return chosen
                if refilled:
                    self._queues[host] = self._find(
                        now_ms, host, soft, 2 * (missing // mean_bytes) + BATCH, taken
                    )
                for row in self._iterate(now_ms, host, soft, taken):
                    chosen.append(row)
                    taken.add(row)
                    missing -= max(self._columns.size[row], 1)
                    if missing <= 0:
                        break
        return chosen

    def _iterate(self, now_ms: int, host: int | None, soft: bool, taken: set[int]) -> Iterator[int]:
        columns, queue = self._columns, self._queues.get(host)
        while queue:
            row, tick = queue.popleft()
            is_current = columns.flags[row] == ALIVE and columns.used_tick[row] == tick
            if not is_current or row in taken or columns.lease_until_ms[row] > now_ms:
                continue
            if columns.soft_until_ms.get(row, 0) > now_ms and not soft:
                continue
            if host is None or self._is_on(row, host):
                yield row

    def _find(
        self, now_ms: int, host: int | None, soft: bool, count: int, taken: set[int]
    ) -> deque[tuple[int, int]]:
        columns = self._columns
        able = (view(columns.flags) == ALIVE) & (view(columns.lease_until_ms) <= now_ms)
        if host is not None:
            there = np.zeros(len(able), dtype=bool)
            there[self._rows_on_host(host)] = True
            able &= there
        if taken:
            able[list(taken)] = False
        pinned = [row for row, until_ms in columns.soft_until_ms.items() if until_ms > now_ms]
        if pinned and not soft:
            able[pinned] = False
        rows = np.flatnonzero(able)
        ticks = view(columns.used_tick)[rows]
        # Keep more candidates than this call needs, because a pass over a million rows takes
        # milliseconds.
        if count < len(rows):
            nearest = np.argpartition(ticks, count)[:count]
            rows, ticks = rows[nearest], ticks[nearest]
        order = np.argsort(ticks)
        return deque(zip(rows[order].tolist(), ticks[order].tolist(), strict=True))


def view(column: "array[int]") -> npt.NDArray[Any]:
    """Return a column as a numpy array. Use it briefly: an array that is viewed cannot grow."""
    return np.frombuffer(column, dtype=column.typecode) if column else np.empty(0, column.typecode)

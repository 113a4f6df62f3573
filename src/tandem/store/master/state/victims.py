"""The choice of objects and copies to evict, by passes over the directory's columns. Pure."""

from collections import deque
from collections.abc import Iterator

import numpy as np

from tandem.store.master.state.columns import ALIVE, Columns, view
from tandem.store.master.state.copies import Copies

__all__ = ["Victims"]

BATCH = 16_384
"""Number of candidates that one pass collects."""


class Victims:
    """Eviction candidates that a pass found and that are not evicted yet.

    Args:
        columns: the directory's columns; borrowed.
        copies: the objects' copies; borrowed.
    """

    def __init__(self, columns: Columns, copies: Copies) -> None:
        self._columns = columns
        self._copies = copies
        self._queues: dict[int | None, deque[tuple[int, int]]] = {}
        """Candidate rows with their times of last use, by host; None for any host."""

    def pick_surplus(self, host: int, now_ms: int, min_bytes: int) -> list[int]:
        """Return the rows of objects with a surplus copy in the memory of ``host``: they have more
        replicas than their puts asked for.

        Least recently used first, until their values have ``min_bytes``; leased rows are skipped.
        Pins do not matter, since as many replicas as wanted stay on connected hosts.
        """
        if host in self._copies.lost_hosts:
            return []
        columns, rows = self._columns, self._copies.rows_with(host)
        memory, wanted = view(columns.num_in_memory)[rows], view(columns.wanted)[rows]
        rows = rows[(memory > wanted) & (view(columns.lease_until_ms)[rows] <= now_ms)]
        rows = rows[np.argsort(view(columns.used_tick)[rows])]
        ends = np.cumsum(np.maximum(view(columns.size)[rows], 1))
        return rows[: int(np.searchsorted(ends, min_bytes)) + 1].tolist()

    def pick(self, now_ms: int, min_bytes: int, host: int | None = None) -> list[int]:
        """Return rows to evict that free ``min_bytes`` of values, least recently used first.

        Leased and hard-pinned rows are skipped; soft-pinned ones are returned only if the others do
        not suffice. If the rows have fewer bytes than asked, nothing more can be evicted.

        Args:
            now_ms: leases and soft pins that end later count.
            min_bytes: bytes of values to free; only the last row may exceed it.
            host: only objects with a replica there; None for any.
        """
        chosen: list[int] = []
        missing, mean_bytes = min_bytes, self._columns.mean_bytes
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
            if host is None or self._copies.has(row, host):
                yield row

    def _find(
        self, now_ms: int, host: int | None, soft: bool, count: int, taken: set[int]
    ) -> deque[tuple[int, int]]:
        columns = self._columns
        able = (view(columns.flags) == ALIVE) & (view(columns.lease_until_ms) <= now_ms)
        if host is not None:
            there = np.zeros(len(able), dtype=bool)
            there[self._copies.rows_with(host)] = True
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

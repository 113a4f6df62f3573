"""The copies of all objects, chained by row of the directory, and the counts of those that can be
reached. Pure; not thread-safe.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.store.master.state.columns import Columns, Fill, take_rows, view

__all__ = ["DISK", "Copies", "Replica"]

FREE_HOST = 0xFFFF
DISK = 0x8000
"""Bit in the host column that marks a copy on the host's disk."""


class Replica(NamedTuple):
    """The place of one copy of an object in a host's memory."""

    host: int
    offset: int


class Copies:
    """The copies of all objects. A *tag* is a host's number, with ``DISK`` added for its disk.

    Args:
        rows: the directory's columns, of which the counts of copies are kept here; borrowed.
    """

    def __init__(self, rows: Columns) -> None:
        self._rows = rows
        self.host = array("H")
        """Tag of each copy: its host's number, with ``DISK`` added for a copy on disk."""
        self.offset = array("q")
        self.next = array("i")
        self.row = array("i")
        self.num_unreadable = 0
        """Number of objects whose copies are all on lost hosts."""
        self.lost_hosts: set[int] = set()
        self._spare = array("i")

    # The methods below handle the copies of one object.

    def _iterate(self, row: int) -> Iterator[tuple[int, int]]:
        """Yield the tag (number of the host, marked if it is its disk) and the offset of each copy
        of an object.
        """
        at = self._rows.first_copy[row]
        while at >= 0:
            yield self.host[at], self.offset[at]
            at = self.next[at]

    def replicas(self, row: int) -> list[Replica]:
        """Return all replicas of the row's object in memory, those on lost hosts included."""
        return [Replica(tag, offset) for tag, offset in self._iterate(row) if tag < DISK]

    def disks(self, row: int) -> list[int]:
        """Return the hosts that have the object on disk, lost hosts included."""
        if not self._rows.num_disks[row]:
            return []
        return [tag - DISK for tag, _ in self._iterate(row) if tag >= DISK]

    def has(self, row: int, tag: int) -> bool:
        """Return True if the object has a copy with this tag (a host's memory or disk)."""
        at = self._rows.first_copy[row]
        while at >= 0 and self.host[at] != tag:
            at = self.next[at]
        return at >= 0

    def has_any(self, row: int) -> bool:
        """Return True if the object has a copy, which may be on a lost host."""
        return self._rows.first_copy[row] >= 0

    def add_replica(self, row: int, replica: Replica) -> None:
        """Add a copy in memory. REQUIRES: the object has none in that host's memory."""
        self._add(row, replica.host, replica.offset)

    def add_disk(self, row: int, host: int) -> None:
        """Add a copy on a disk. REQUIRES: the object has none on that host's disk."""
        self._add(row, host | DISK, 0)
        self._rows.num_disks[row] += 1

    def _add(self, row: int, tag: int, offset: int) -> None:
        assert not self.has(row, tag), tag
        rows = self._rows
        (at,) = self.take(1)
        self.host[at] = tag
        self.offset[at] = offset
        self.row[at] = row
        self.next[at] = rows.first_copy[row]
        rows.first_copy[row] = at
        if tag & ~DISK in self.lost_hosts:
            return
        if tag < DISK:
            rows.num_in_memory[row] += 1
        if not self._is_on_other_tier(row, tag):
            if rows.num_live[row] == 0:
                self.num_unreadable -= 1
            rows.num_live[row] += 1

    def _is_on_other_tier(self, row: int, tag: int) -> bool:
        """Return True if the host of this copy, which ``tag`` names, also has one on its other
        tier: on disk besides memory, or the reverse.
        """
        return (tag >= DISK or self._rows.num_disks[row] > 0) and self.has(row, tag ^ DISK)

    def drop_replica(self, row: int, host: int) -> Replica | None:
        """Remove the copy in the memory of ``host`` and return it; None without one.

        An object without copies stays in the directory, unreadable, until it is removed.
        """
        offset = self._drop(row, host)
        return None if offset is None else Replica(host, offset)

    def drop_disk(self, row: int, host: int) -> bool:
        """Remove the copy on the disk of ``host``. Return False if there was none."""
        if not self._rows.num_disks[row] or self._drop(row, host | DISK) is None:
            return False
        self._rows.num_disks[row] -= 1
        return True

    def _drop(self, row: int, tag: int) -> int | None:
        rows, before, at = self._rows, -1, self._rows.first_copy[row]
        while at >= 0 and self.host[at] != tag:
            before, at = at, self.next[at]
        if at < 0:
            return None
        if before < 0:
            rows.first_copy[row] = self.next[at]
        else:
            self.next[before] = self.next[at]
        self.host[at] = FREE_HOST
        self._spare.append(at)
        if tag & ~DISK not in self.lost_hosts:
            if tag < DISK:
                rows.num_in_memory[row] -= 1
            if not self._is_on_other_tier(row, tag):
                rows.num_live[row] -= 1
                if rows.num_live[row] == 0:
                    self.num_unreadable += 1
        return self.offset[at]

    # The methods below handle many rows at a time, in numpy columns.

    def rows_with(self, tag: int) -> npt.NDArray[np.int64]:
        """Return the rows of the objects that have a copy with this tag (a host's memory or
        disk).
        """
        return view(self.row)[np.flatnonzero(view(self.host) == tag)].astype(np.int64)

    def places_with(self, tag: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """Return the rows of the objects that have a copy with this tag (a host's memory or disk),
        and the offsets of these copies.
        """
        at = np.flatnonzero(view(self.host) == tag)
        return view(self.row)[at].astype(np.int64), view(self.offset)[at].astype(np.uint64)

    def rows_on_host(self, host: int) -> list[int]:
        """Return the rows of the objects that have a replica in the memory of ``host``."""
        return self.rows_with(host).tolist()

    def rows_on_disk(self, host: int) -> list[int]:
        """Return the rows of the objects that have a copy on the disk of ``host``."""
        return self.rows_with(host | DISK).tolist()

    def lose_host(self, host: int) -> None:
        """Count the copies on ``host`` as unreadable, without removing them."""
        if host in self.lost_hosts:
            return
        self.lost_hosts.add(host)
        in_memory, rows = self._rows_of_host(host)
        live = view(self._rows.num_live)
        view(self._rows.num_in_memory)[in_memory] -= 1
        live[rows] -= 1
        self.num_unreadable += int(np.count_nonzero(live[rows] == 0))

    def find_host(self, host: int) -> None:
        """Count the copies on ``host``, which was lost, as readable again."""
        if host not in self.lost_hosts:
            return
        self.lost_hosts.remove(host)
        in_memory, rows = self._rows_of_host(host)
        live = view(self._rows.num_live)
        self.num_unreadable -= int(np.count_nonzero(live[rows] == 0))
        view(self._rows.num_in_memory)[in_memory] += 1
        live[rows] += 1

    def _rows_of_host(self, host: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the rows of the objects in the host's memory, and those of the objects in its
        memory or on its disk.
        """
        in_memory, on_disk = map(self.rows_with, (host, host | DISK))
        return in_memory, np.union1d(in_memory, on_disk) if len(on_disk) else in_memory

    def are_on(self, rows: npt.NDArray[np.int64], is_good: bytes) -> npt.NDArray[np.bool_]:
        """Return, for each row, True if all copies of its object are in the memory of good hosts.

        Args:
            rows: rows of objects without copies on disks.
            is_good: a byte for each host, 1 if it is good.
        """
        hosts_good = np.frombuffer(is_good, np.uint8).astype(bool)
        good = np.ones(len(rows), bool)
        at = view(self._rows.first_copy)[rows].astype(np.int64)
        while (live := np.flatnonzero(good & (at >= 0))).size:
            good[live] &= hosts_good[view(self.host)[at[live]]]
            at[live] = view(self.next)[at[live]]
        return good

    def drop_all(self, rows: npt.NDArray[np.int64]) -> dict[int, tuple[list[int], list[int]]]:
        """Remove all copies of objects, all of them readable. Return, by tag (a host's memory or
        disk), the rows that had a copy and the copies' offsets.
        """
        places: dict[int, tuple[list[int], list[int]]] = {}
        at, owners = view(self._rows.first_copy)[rows].astype(np.int64), rows
        while at.size:
            tags = view(self.host)[at]
            for tag in np.unique(tags).tolist():
                here = tags == tag
                row_list, offset_list = places.setdefault(tag, ([], []))
                row_list += owners[here].tolist()
                offset_list += view(self.offset)[at[here]].tolist()
            view(self.host)[at] = FREE_HOST
            self._spare.frombytes(at.astype(np.int32).tobytes())
            after = view(self.next)[at].astype(np.int64)
            at, owners = after[after >= 0], owners[after >= 0]
        view(self._rows.num_live)[rows] = view(self._rows.num_in_memory)[rows] = 0
        return places

    def take(self, count: int) -> list[int]:
        """Allocate ``count`` entries of the table of copies. The caller sets their cells at once:
        new ones are zero, which is a valid host number.
        """
        return take_rows(self._spare, (self.host, self.offset, self.next, self.row), count)

    def give_back(self, places: Sequence[int], fill: Fill) -> None:
        """Free entries of the table that ``take`` allocated; ``fill`` clears their cells."""
        fill(places, [(self.host, FREE_HOST)])
        self._spare.extend(places)

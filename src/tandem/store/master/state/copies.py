"""The table of object copies: columns, chained by row of the directory. Pure; not thread-safe."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.store.master.state.victims import view

__all__ = ["DISK", "FREE_HOST", "Copies", "Fill", "Replica", "take_rows"]

FREE_HOST = 0xFFFF
DISK = 0x8000
"""Bit in the host column that marks a copy on the host's disk."""

Fill = Callable[[Sequence[int], Sequence[tuple[object, int | Sequence[int]]]], None]
"""A function that sets cells of columns at many rows; see ``tandem._native.fill_rows``."""


class Replica(NamedTuple):
    """The place of one copy of an object in a host's memory."""

    host: int
    offset: int


class Copies:
    """The copies of all objects. A *tag* is a host's number, with ``DISK`` added for its disk.

    Args:
        first: the directory's column with each row's first copy; borrowed.
    """

    def __init__(self, first: "array[int]") -> None:
        self.first = first
        self.host = array("H")
        """Tag of each copy: its host's number, with ``DISK`` added for a copy on disk."""
        self.offset = array("q")
        self.next = array("i")
        self.row = array("i")
        self._spare = array("i")

    # The methods below handle the copies of one object.

    def iterate(self, row: int) -> Iterator[tuple[int, int]]:
        """Yield the tag (number of the host, marked if it is its disk) and the offset of each copy
        of an object.
        """
        at = self.first[row]
        while at >= 0:
            yield self.host[at], self.offset[at]
            at = self.next[at]

    def has(self, row: int, tag: int) -> bool:
        """Return True if the object has a copy with this tag (a host's memory or disk)."""
        at = self.first[row]
        while at >= 0 and self.host[at] != tag:
            at = self.next[at]
        return at >= 0

    def add(self, row: int, tag: int, offset: int) -> None:
        """Add a copy to the object in ``row``. REQUIRES: it has no copy with this tag (in the same
        memory or on the same disk).
        """
        assert not self.has(row, tag), tag
        (at,) = self.take(1)
        self.host[at] = tag
        self.offset[at] = offset
        self.row[at] = row
        self.next[at] = self.first[row]
        self.first[row] = at

    def drop(self, row: int, tag: int) -> int | None:
        """Remove an object's copy with this tag (a host's memory or disk). Return its offset; None
        without such a copy.
        """
        before, at = -1, self.first[row]
        while at >= 0 and self.host[at] != tag:
            before, at = at, self.next[at]
        if at < 0:
            return None
        if before < 0:
            self.first[row] = self.next[at]
        else:
            self.next[before] = self.next[at]
        self.host[at] = FREE_HOST
        self._spare.append(at)
        return self.offset[at]

    # The methods below handle many rows at a time, in numpy columns.

    def rows_with(self, tag: int) -> npt.NDArray[np.int64]:
        """Return the rows of the objects that have a copy with this tag (a host's memory or
        disk).
        """
        at = np.flatnonzero(view(self.host) == tag)
        return view(self.row)[at].astype(np.int64)

    def places_with(self, tag: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """Return the rows of the objects that have a copy with this tag (a host's memory or disk),
        and the offsets of these copies.
        """
        at = np.flatnonzero(view(self.host) == tag)
        return view(self.row)[at].astype(np.int64), view(self.offset)[at].astype(np.uint64)

    def are_on(self, rows: npt.NDArray[np.int64], is_good: bytes) -> npt.NDArray[np.bool_]:
        """Return, for each row, True if all copies of its object are in the memory of good hosts.

        Args:
            rows: rows of objects without copies on disks.
            is_good: a byte for each host, 1 if it is good.
        """
        hosts_good = np.frombuffer(is_good, np.uint8).astype(bool)
        good = np.ones(len(rows), bool)
        at = view(self.first)[rows].astype(np.int64)
        while (live := np.flatnonzero(good & (at >= 0))).size:
            good[live] &= hosts_good[view(self.host)[at[live]]]
            at[live] = view(self.next)[at[live]]
        return good

    def drop_all(self, rows: npt.NDArray[np.int64]) -> dict[int, tuple[list[int], list[int]]]:
        """Remove all copies of objects. Return, by tag (a host's memory or disk), the rows that had
        a copy and the copies' offsets.
        """
        places: dict[int, tuple[list[int], list[int]]] = {}
        at, owners = view(self.first)[rows].astype(np.int64), rows
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


def take_rows(spare: "array[int]", columns: "Sequence[array[int]]", count: int) -> list[int]:
    """Allocate rows of a table that is stored as ``columns``, and return their numbers: the spare
    ones first, then new ones at the end of each column.
    """
    reused = min(count, len(spare))
    taken = spare[len(spare) - reused :].tolist()
    del spare[len(spare) - reused :]
    missing = count - reused
    if missing:
        first = len(columns[0])
        for column in columns:
            column.frombytes(bytes(column.itemsize * missing))
        taken += range(first, first + missing)
    return taken

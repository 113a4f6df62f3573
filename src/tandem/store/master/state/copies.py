"""Copies of objects: a table of columns, chained by row of the directory. Pure; not thread-safe."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.store.master.state.victims import view

__all__ = ["DISK", "FREE_HOST", "Copies", "Fill", "Replica", "take_rows"]

FREE_HOST = 0xFFFF
DISK = 0x8000
"""Marks, in the column of hosts, a copy on the host's disk."""

Fill = Callable[[Sequence[int], Sequence[tuple[object, int | Sequence[int]]]], None]
"""See ``tandem._native.fill_rows``."""


class Replica(NamedTuple):
    """The place of one copy of an object in the memory of a host."""

    host: int
    offset: int


class Copies:
    """The copies of all objects. A *tag* is the number of a host, with ``DISK`` for its disk.

    Args:
        first: the directory's column of chains; borrowed.
    """

    def __init__(self, first: "array[int]") -> None:
        self.first = first
        self.host = array("H")
        """Tags."""
        self.offset = array("q")
        self.next = array("i")
        self.row = array("i")
        self._spare = array("i")

    # One object.

    def iterate(self, row: int) -> Iterator[tuple[int, int]]:
        """Yield the tag and the offset of each copy."""
        at = self.first[row]
        while at >= 0:
            yield self.host[at], self.offset[at]
            at = self.next[at]

    def has(self, row: int, tag: int) -> bool:
        """Return True if the object has such a copy."""
        at = self.first[row]
        while at >= 0 and self.host[at] != tag:
            at = self.next[at]
        return at >= 0

    def add(self, row: int, tag: int, offset: int) -> None:
        """Add a copy, as the first one. REQUIRES: there is none of this tag."""
        assert not self.has(row, tag), tag
        (at,) = self.take(1)
        self.host[at] = tag
        self.offset[at] = offset
        self.row[at] = row
        self.next[at] = self.first[row]
        self.first[row] = at

    def drop(self, row: int, tag: int) -> int | None:
        """Forget a copy; return its offset, None if there is none."""
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

    # Many at a time.

    def rows_with(self, tag: int) -> npt.NDArray[np.int64]:
        """Return the rows that have such a copy."""
        at = np.flatnonzero(view(self.host) == tag)
        return view(self.row)[at].astype(np.int64)

    def places_with(self, tag: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """Return the rows that have such a copy, and its offset."""
        at = np.flatnonzero(view(self.host) == tag)
        return view(self.row)[at].astype(np.int64), view(self.offset)[at].astype(np.uint64)

    def are_on(self, rows: npt.NDArray[np.int64], is_good: bytes) -> npt.NDArray[np.bool_]:
        """Return, for each row, whether all its copies are in memory of hosts that are good.

        Args:
            rows: rows of objects without copies on disks.
            is_good: a byte for each host.
        """
        hosts_good = np.frombuffer(is_good, np.uint8).astype(bool)
        good = np.ones(len(rows), bool)
        at = view(self.first)[rows].astype(np.int64)
        while (live := np.flatnonzero(good & (at >= 0))).size:
            good[live] &= hosts_good[view(self.host)[at[live]]]
            at[live] = view(self.next)[at[live]]
        return good

    def drop_all(self, rows: npt.NDArray[np.int64]) -> dict[int, tuple[list[int], list[int]]]:
        """Forget all copies of objects; return the rows that had one and its offset, by tag."""
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
        """Take places in the table. They are zeros if new, and zero is the number of a host."""
        return take_rows(self._spare, (self.host, self.offset, self.next, self.row), count)

    def give_back(self, places: Sequence[int], fill: Fill) -> None:
        """Give places back that were taken."""
        fill(places, [(self.host, FREE_HOST)])
        self._spare.extend(places)


def take_rows(spare: "array[int]", columns: "Sequence[array[int]]", count: int) -> list[int]:
    """Take rows of a table out of the spare ones; the rest of them is added to its columns."""
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

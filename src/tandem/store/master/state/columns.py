"""The fields of a directory's objects, as columns: arrays with one item for each row. Pure; not
thread-safe.

Arrays of numbers, and of the keys, are not scanned by Python's garbage collector, and numpy and
native code can pass over many rows at a time.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ALIVE", "HARD", "Columns", "Fill", "take_rows", "view"]

ALIVE = 1
"""Value of a row's flags if the row is in use and has no hard pin."""
HARD = 2
"""Bit of a row's flags for an object with a hard pin, which is never evicted."""

Fill = Callable[[Sequence[int], Sequence[tuple[object, int | Sequence[int]]]], None]
"""A function that sets cells of columns at many rows; see ``tandem._native.fill_rows``."""


class Columns:
    """The rows of a directory. Read a field as ``columns.size[row]``; only the directory and its
    parts set fields.
    """

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        # The keys are in an array of dtype object, because the garbage collector scans lists but
        # not numpy arrays.
        self.key: npt.NDArray[Any] = np.empty(16, dtype=object)
        self.size = array("q")
        """Bytes of the value."""
        self.version = array("q")
        """Version of the object. A newer object has a higher one, over all keys."""
        self.checksum = array("I")
        self.wanted = array("B")
        """Number of replicas that the put asked for."""
        self.lease_until_ms = array("q")
        """Time until which readers may rely on the object's bytes."""
        self.used_tick = array("q")
        """Number of the object's last use among all uses."""
        self.flags = array("B")
        self.soft_until_ms: dict[int, int] = {}
        """Time at which each soft pin ends, by row."""
        self.num_live = array("B")
        """Number of connected hosts that have the object, in memory or on disk."""
        self.num_in_memory = array("B")
        """Number of replicas in memory of connected hosts."""
        self.num_disks = array("B")
        """Number of copies on disks, lost hosts included."""
        self.first_copy = array("i")
        """Place of the object's first copy in the table of copies; -1 without a copy."""
        self.total_bytes: int = 0
        """Bytes of all values, each object counted once."""
        self._spare = array("i")

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def mean_bytes(self) -> int:
        """Mean size of all values, at least 1."""
        return max(1, self.total_bytes // max(1, len(self._rows)))

    def is_hard_pinned(self, row: int) -> bool:
        """Return True if the object in ``row`` has a hard pin, so that it is never evicted."""
        return bool(self.flags[row] & HARD)

    def soft_pinned_until_ms(self, row: int) -> int:
        """Return the time when the object's soft pin ends; 0 without a soft pin."""
        return self.soft_until_ms.get(row, 0)

    def _take(self, count: int) -> list[int]:
        """Allocate rows. The caller sets all their cells."""
        columns = (
            self.size, self.version, self.checksum, self.lease_until_ms, self.used_tick, self.flags,
            self.wanted, self.num_live, self.num_in_memory, self.num_disks, self.first_copy,
        )  # fmt: skip
        rows = take_rows(self._spare, columns, count)
        if len(self.size) > len(self.key):
            before = len(self.key)
            grown = np.empty(len(self.size) + max(16, before // 4), dtype=object)
            grown[:before] = self.key
            self.key = grown
        return rows


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


def view(column: "array[int]") -> npt.NDArray[Any]:
    """Return a column as a numpy array. Use it briefly: an array that is viewed cannot grow."""
    return np.frombuffer(column, dtype=column.typecode) if column else np.empty(0, column.typecode)

"""The directory of a store: which objects exist, and where. Pure: time is an argument.

A row is a number: its fields are in arrays (``columns``), and its copies in a second table
(``copies``). The key map holds only strings and numbers, so that Python's garbage collector does
not scan it either. All objects are complete; unfinished puts are kept elsewhere. Not thread-safe.
"""

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.store.master.state.columns import ALIVE, HARD, Columns, Fill, view
from tandem.store.master.state.copies import Copies, Replica
from tandem.store.master.state.victims import Victims

__all__ = ["NO_ROW", "Directory", "Passes", "Replica"]

NO_ROW = -1
MAX_REPLICAS = 255

LocatedRows = tuple[bytes, bytes, list[int], list[tuple[int, int, int]]]


class Passes(NamedTuple):
    """Functions that process many rows of the directory's columns at once. They are native and
    passed in, so that this module stays pure.
    """

    fill: Fill
    """Sets cells of columns at many rows, like ``tandem._native.fill_rows``."""
    locate: Callable[..., LocatedRows]
    """Locates and leases many rows, like ``tandem._native.locate_rows``."""


Rows = npt.NDArray[np.int64]
Versions = npt.NDArray[np.int64]


class Directory(Columns):
    """The directory's rows, found by key. A row number stands for its object until that is removed,
    and is reused afterwards. ``copies`` has the objects' copies, ``victims`` chooses objects to
    evict.
    """

    def __init__(self, passes: Passes) -> None:
        super().__init__()
        self._passes = passes
        self.copies = Copies(self)
        self.victims = Victims(self, self.copies)
        self._tick = 0

    # The methods below read the directory.

    def find(self, key: str) -> int:
        """Return the row (number) of the object with this key; ``NO_ROW`` without one."""
        return self._rows.get(key, NO_ROW)

    def has_any(self, keys: Sequence[str]) -> bool:
        """Return True if one of the keys has an object, readable or not."""
        return not self._rows.keys().isdisjoint(keys)

    def exists_many(self, keys: Sequence[str]) -> bytes:
        """Return a byte for each key: 1 if it has a readable replica. Changes no lease and no LRU
        order.
        """
        if not self.has_any(keys):  # The fast path of puts: no key exists.
            return bytes(len(keys))
        if not self.copies.num_unreadable:
            return bytes(map(self._rows.__contains__, keys))
        find, live = self._rows.get, self.num_live
        return bytes((row := find(key)) is not None and live[row] > 0 for key in keys)

    def locate_many(
        self,
        keys: Sequence[str],
        is_here: bytes,
        until_ms: int,
        *,
        hidden: Collection[str] = (),
    ) -> "tuple[list[int], LocatedRows]":
        """Lease objects and mark them as used, many at a time.

        Args:
            keys: the objects' keys; missing ones are allowed.
            is_here: a byte for each host: 1 if it can be read from.
            until_ms: end of the leases.
            hidden: keys that are treated as missing.

        Returns: the rows (``NO_ROW`` for a missing key), and the result of ``Passes.locate``.
        """
        rows = list(map(self._rows.get, keys, itertools.repeat(NO_ROW)))
        if hidden:
            rows = [NO_ROW if key in hidden else row for key, row in zip(keys, rows, strict=True)]
        found = self._passes.locate(
            rows,
            is_here,
            until_ms,
            self._tick,
            self.size,
            self.version,
            self.checksum,
            self.lease_until_ms,
            self.used_tick,
            self.num_disks,
            self.first_copy,
            self.copies.host,
            self.copies.offset,
            self.copies.next,
        )
        self._tick += len(rows)
        return rows, found

    def find_versions(self, keys: Sequence[str]) -> tuple[Rows, Versions]:
        """Return the row of each key (``NO_ROW`` if missing), and its version."""
        found = map(self._rows.get, keys, itertools.repeat(NO_ROW))
        rows = np.fromiter(found, np.int64, len(keys))
        versions = np.full(len(keys), -1, np.int64)
        is_there = rows != NO_ROW
        versions[is_there] = view(self.version)[rows[is_there]]
        return rows, versions

    def list_keys(self) -> list[str]:
        """Return a copy of all keys, in order of insertion."""
        return list(self._rows)

    def list_under_replicated(self, limit: int) -> list[int]:
        """Return the rows of up to ``limit`` objects that fewer hosts have than their puts asked
        for, and that have a copy in memory, from which more can be made.
        """
        memory, live, wanted = view(self.num_in_memory), view(self.num_live), view(self.wanted)
        return np.flatnonzero((memory > 0) & (live < wanted))[:limit].tolist()

    def count_under_replicated(self) -> int:
        """Return the number of readable objects that fewer connected hosts have than wanted, in
        memory or on disk.
        """
        live, wanted = view(self.num_live), view(self.wanted)
        return int(np.count_nonzero((live > 0) & (live < wanted)))

    # The methods below change the directory.

    def insert(
        self,
        key: str,
        *,
        size: int,
        checksum: int,
        version: int,
        replicas: Sequence[Replica],
        wanted: int = 1,
        disks: Sequence[int] = (),
    ) -> int:
        """Add an object and mark it as used.

        Returns: its row.
        REQUIRES: the key is absent; there is a replica or a disk; no host has two replicas.
        """
        assert key not in self._rows, key
        assert replicas or disks, key
        row = self._spare.pop() if self._spare else self._take(1)[0]
        self._rows[key] = row
        self.key[row] = key
        self.size[row] = size
        self.version[row] = version
        self.checksum[row] = checksum
        self.lease_until_ms[row] = 0
        self.flags[row] = ALIVE
        self.wanted[row] = min(wanted, MAX_REPLICAS)
        self.num_live[row] = self.num_in_memory[row] = self.num_disks[row] = 0
        self.first_copy[row] = -1
        self.copies.num_unreadable += 1
        self.total_bytes += size
        for replica in reversed(replicas):
            self.copies.add_replica(row, replica)
        for host in disks:
            self.copies.add_disk(row, host)
        self.touch(row)
        return row

    def insert_many(
        self,
        keys: Sequence[str],
        *,
        sizes: Sequence[int],
        checksums: Sequence[int],
        versions: Sequence[int],
        wanted: int | Sequence[int],
        host: int,
        offsets: Sequence[int],
        lease_until_ms: int = 0,
    ) -> list[int]:
        """Add many objects to the directory, with one replica each, all on one host.

        Returns: their rows, in order.
        REQUIRES: the keys are absent and differ; the host is connected.
        """
        count, copies, fill = len(keys), self.copies, self._passes.fill
        assert host not in copies.lost_hosts, host
        if isinstance(wanted, int):
            wanted = min(wanted, MAX_REPLICAS)
        else:
            wanted = [min(n, MAX_REPLICAS) for n in wanted]
        rows, at = self._take(count), copies.take(count)
        try:
            # ``fill`` refuses a value that does not fit its column before it changes any column.
            fill(
                at,
                [
                    (copies.offset, offsets),
                    (copies.next, -1),
                    (copies.row, rows),
                    (copies.host, host),
                ],
            )
            fill(
                rows,
                [
                    (self.size, sizes),
                    (self.version, versions),
                    (self.checksum, checksums),
                    (self.used_tick, range(self._tick + 1, self._tick + 1 + count)),
                    (self.first_copy, at),
                    (self.wanted, wanted),
                    (self.num_disks, 0),
                    (self.lease_until_ms, lease_until_ms),
                    (self.num_live, 1),
                    (self.num_in_memory, 1),
                    (self.flags, ALIVE),
                ],
            )
        except BaseException:
            copies.give_back(at, fill)
            self._spare.extend(rows)
            raise
        self.key[rows] = keys
        num_before = len(self._rows)
        self._rows.update(zip(keys, rows, strict=True))
        assert len(self._rows) == num_before + count, "a key was there"
        self._tick += count
        self.total_bytes += sum(sizes)
        return rows

    def remove(self, row: int) -> list[Replica]:
        """Remove an object and return its replicas. The caller frees their space."""
        replicas = self.copies.replicas(row)
        for replica in replicas:
            self.copies.drop_replica(row, replica.host)
        for host in self.copies.disks(row):
            self.copies.drop_disk(row, host)
        self.copies.num_unreadable -= 1
        del self._rows[self.key[row]]
        self.key[row] = None
        self.total_bytes -= self.size[row]
        self.flags[row] = 0
        self.wanted[row] = 0
        self.soft_until_ms.pop(row, None)
        self._spare.append(row)
        return replicas

    def split_plain(
        self, rows: Sequence[int], is_plain: bytes, now_ms: int
    ) -> tuple[list[int], list[int]]:
        """Divide rows into those whose objects ``remove_many`` can remove (only unleased copies in
        memory of plain hosts), and the others.

        Args:
            rows: rows to divide.
            is_plain: a byte for each host: 1 if it is connected and has no disk.
            now_ms: leases that end by this time do not count.
        """
        chosen = np.asarray(rows, dtype=np.int64)
        good = (view(self.num_disks)[chosen] == 0) & (view(self.num_live)[chosen] > 0)
        good &= view(self.lease_until_ms)[chosen] <= now_ms
        good[good] = self.copies.are_on(chosen[good], is_plain)
        return chosen[good].tolist(), chosen[~good].tolist()

    def remove_many(self, rows: Sequence[int]) -> dict[int, tuple[list[int], list[int]]]:
        """Remove many objects. REQUIRES: ``split_plain`` chose the rows.

        Returns: by host, the rows that had a replica there, and the replicas' offsets.
        """
        chosen = np.asarray(rows, dtype=np.int64)
        keys, key_rows, soft = self.key[chosen].tolist(), self._rows, self.soft_until_ms
        places = self.copies.drop_all(chosen)
        self.total_bytes -= int(view(self.size)[chosen].sum())
        for column in (self.flags, self.wanted):
            view(column)[chosen] = 0
        self.key[chosen] = None
        for key in keys:
            del key_rows[key]
        if soft:
            for row in rows:
                soft.pop(row, None)
        self._spare.extend(rows)
        return places

    def touch(self, row: int) -> None:
        """Mark an object as used, for LRU eviction."""
        self._tick += 1
        self.used_tick[row] = self._tick

    def extend_lease(self, row: int, until_ms: int) -> None:
        """Extend an object's lease at least to ``until_ms``. Never shortens it."""
        if until_ms > self.lease_until_ms[row]:
            self.lease_until_ms[row] = until_ms

    def set_pins(self, row: int, *, hard: bool, soft_until_ms: int) -> None:
        """Replace an object's hard and soft pin. ``soft_until_ms`` of 0 means no soft pin."""
        self.flags[row] = ALIVE | (HARD if hard else 0)
        if soft_until_ms > 0:
            self.soft_until_ms[row] = soft_until_ms
        else:
            self.soft_until_ms.pop(row, None)

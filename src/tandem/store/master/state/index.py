"""The directory of a store: which objects exist, and where. Pure: time is an argument.

A row is a number: its fields are in arrays, and its copies in a second table (``copies``). Arrays
and the key map, which holds only strings and numbers, are not scanned by Python's garbage
collector. All objects are complete; unfinished puts are kept elsewhere. Not thread-safe.
"""

import itertools
from array import array
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.store.master.state.copies import DISK, Copies, Fill, Replica, take_rows
from tandem.store.master.state.victims import ALIVE, VictimColumns, Victims, view

__all__ = ["NO_ROW", "Directory", "Passes", "Replica"]

NO_ROW = -1
MAX_REPLICAS = 255
_ALIVE, _HARD = ALIVE, 2


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


class Directory:
    """The directory's rows, found by key. A row number stands for its object until that is removed,
    and is reused afterwards.
    """

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._rows: dict[str, int] = {}
        # The keys are in an array of dtype object, because the garbage collector scans lists but
        # not numpy arrays.
        self._keys: npt.NDArray[Any] = np.empty(16, dtype=object)
        self._size = array("q")
        self._version = array("q")
        self._checksum = array("I")
        self._lease_until_ms = array("q")
        self._used_tick = array("q")
        self._flags = array("B")
        self._wanted = array("B")
        self._live = array("B")
        self._memory = array("B")
        """Number of replicas in memory of connected hosts. ``_live`` counts connected hosts with a
        copy on any tier.
        """
        self._num_disks = array("B")
        self._first = array("i")
        self._spare_rows = array("i")
        self._copies = Copies(self._first)
        self._soft_until_ms: dict[int, int] = {}
        self._lost_hosts: set[int] = set()
        self._victims = Victims(
            VictimColumns(
                self._size,
                self._flags,
                self._used_tick,
                self._lease_until_ms,
                self._soft_until_ms,
            ),
            self._copies.rows_with,
            self._copies.has,
        )
        self._num_unreadable = 0
        self._tick = 0
        self.total_bytes = 0
        """Bytes of all values, each object counted once."""

    def __len__(self) -> int:
        return len(self._rows)

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
        if not self._num_unreadable:
            return bytes(map(self._rows.__contains__, keys))
        find, live = self._rows.get, self._live
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
            self._size,
            self._version,
            self._checksum,
            self._lease_until_ms,
            self._used_tick,
            self._num_disks,
            self._first,
            self._copies.host,
            self._copies.offset,
            self._copies.next,
        )
        self._tick += len(rows)
        return rows, found

    def find_versions(self, keys: Sequence[str]) -> tuple[Rows, Versions]:
        """Return the row of each key (``NO_ROW`` if missing), and its version."""
        found = map(self._rows.get, keys, itertools.repeat(NO_ROW))
        rows = np.fromiter(found, np.int64, len(keys))
        versions = np.full(len(keys), -1, np.int64)
        is_there = rows != NO_ROW
        versions[is_there] = view(self._version)[rows[is_there]]
        return rows, versions

    def key(self, row: int) -> str:
        """Return the key of the object in a row."""
        return self._keys[row]

    def size(self, row: int) -> int:
        """Return the size of a row's value in bytes."""
        return self._size[row]

    def sizes(self, rows: Sequence[int]) -> list[int]:
        """Return the sizes of several rows' values in bytes."""
        return view(self._size)[np.asarray(rows, dtype=np.int64)].tolist()

    def version(self, row: int) -> int:
        """Return the version of a row. A newer object has a higher version, over all keys."""
        return self._version[row]

    def checksum(self, row: int) -> int:
        """Return the checksum of a row's object."""
        return self._checksum[row]

    def lease_until_ms(self, row: int) -> int:
        """Return the time until which readers may rely on the object's bytes."""
        return self._lease_until_ms[row]

    def wanted(self, row: int) -> int:
        """Return the number of replicas that the put of the row's object asked for."""
        return self._wanted[row]

    def num_live(self, row: int) -> int:
        """Return the number of connected hosts that have the object, in memory or on disk."""
        return self._live[row]

    def num_in_memory(self, row: int) -> int:
        """Return the number of replicas of the row's object in memory of connected hosts."""
        return self._memory[row]

    def is_hard_pinned(self, row: int) -> bool:
        """Return True if the object in ``row`` has a hard pin, so that it is never evicted."""
        return bool(self._flags[row] & _HARD)

    def soft_pinned_until_ms(self, row: int) -> int:
        """Return the time when the object's soft pin ends; 0 without a soft pin."""
        return self._soft_until_ms.get(row, 0)

    def replicas(self, row: int) -> list[Replica]:
        """Return all replicas of the row's object in memory, those on lost hosts included."""
        copies = self._copies.iterate(row)
        return [Replica(tag, offset) for tag, offset in copies if tag < DISK]

    def disks(self, row: int) -> list[int]:
        """Return the hosts that have the object on disk, lost hosts included."""
        if not self._num_disks[row]:
            return []
        return [tag - DISK for tag, _ in self._copies.iterate(row) if tag >= DISK]

    def list_keys(self) -> list[str]:
        """Return a copy of all keys, in order of insertion."""
        return list(self._rows)

    def rows_on_host(self, host: int) -> list[int]:
        """Return the rows of the objects that have a replica in the memory of ``host``."""
        return self._copies.rows_with(host).tolist()

    def places_on_host(self, host: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """Return the rows of the objects that have a replica in the memory of ``host``, and the
        replicas' offsets.
        """
        return self._copies.places_with(host)

    def rows_on_disk(self, host: int) -> list[int]:
        """Return the rows of the objects that have a copy on the disk of ``host``."""
        return self._copies.rows_with(host | DISK).tolist()

    def list_under_replicated(self, limit: int) -> list[int]:
        """Return the rows of up to ``limit`` objects that fewer hosts have than their puts asked
        for, and that have a copy in memory, from which more can be made.
        """
        memory, live, wanted = view(self._memory), view(self._live), view(self._wanted)
        return np.flatnonzero((memory > 0) & (live < wanted))[:limit].tolist()

    def count_under_replicated(self) -> int:
        """Return the number of readable objects that fewer connected hosts have than wanted, in
        memory or on disk.
        """
        live, wanted = view(self._live), view(self._wanted)
        return int(np.count_nonzero((live > 0) & (live < wanted)))

    @property
    def num_unreadable(self) -> int:
        """Number of objects whose copies are all on lost hosts."""
        return self._num_unreadable

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
        row = self._take_row()
        self._rows[key] = row
        self._keys[row] = key
        self._size[row] = size
        self._version[row] = version
        self._checksum[row] = checksum
        self._lease_until_ms[row] = 0
        self._flags[row] = _ALIVE
        self._wanted[row] = min(wanted, MAX_REPLICAS)
        self._live[row] = self._memory[row] = self._num_disks[row] = 0
        self._first[row] = -1
        self._num_unreadable += 1
        self.total_bytes += size
        for replica in reversed(replicas):
            self.add_replica(row, replica)
        for host in disks:
            self.add_disk(row, host)
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
        count, copies, fill = len(keys), self._copies, self._passes.fill
        assert host not in self._lost_hosts, host
        if isinstance(wanted, int):
            wanted = min(wanted, MAX_REPLICAS)
        else:
            wanted = [min(n, MAX_REPLICAS) for n in wanted]
        rows, at = self._take_rows(count), copies.take(count)
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
                    (self._size, sizes),
                    (self._version, versions),
                    (self._checksum, checksums),
                    (self._used_tick, range(self._tick + 1, self._tick + 1 + count)),
                    (self._first, at),
                    (self._wanted, wanted),
                    (self._num_disks, 0),
                    (self._lease_until_ms, lease_until_ms),
                    (self._live, 1),
                    (self._memory, 1),
                    (self._flags, _ALIVE),
                ],
            )
        except BaseException:
            copies.give_back(at, fill)
            self._spare_rows.extend(rows)
            raise
        self._keys[rows] = keys
        num_before = len(self._rows)
        self._rows.update(zip(keys, rows, strict=True))
        assert len(self._rows) == num_before + count, "a key was there"
        self._tick += count
        self.total_bytes += sum(sizes)
        return rows

    def remove(self, row: int) -> list[Replica]:
        """Remove an object and return its replicas. The caller frees their space."""
        replicas = self.replicas(row)
        for replica in replicas:
            self.drop_replica(row, replica.host)
        for host in self.disks(row):
            self.drop_disk(row, host)
        self._num_unreadable -= 1
        del self._rows[self._keys[row]]
        self._keys[row] = None
        self.total_bytes -= self._size[row]
        self._flags[row] = 0
        self._wanted[row] = 0
        self._soft_until_ms.pop(row, None)
        self._spare_rows.append(row)
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
        good = (view(self._num_disks)[chosen] == 0) & (view(self._live)[chosen] > 0)
        good &= view(self._lease_until_ms)[chosen] <= now_ms
        good[good] = self._copies.are_on(chosen[good], is_plain)
        return chosen[good].tolist(), chosen[~good].tolist()

    def remove_many(self, rows: Sequence[int]) -> dict[int, tuple[list[int], list[int]]]:
        """Remove many objects. REQUIRES: ``split_plain`` chose the rows.

        Returns: by host, the rows that had a replica there, and the replicas' offsets.
        """
        chosen = np.asarray(rows, dtype=np.int64)
        keys, key_rows, soft = self._keys[chosen].tolist(), self._rows, self._soft_until_ms
        places = self._copies.drop_all(chosen)
        self.total_bytes -= int(view(self._size)[chosen].sum())
        for column in (self._flags, self._wanted, self._live, self._memory):
            view(column)[chosen] = 0
        self._keys[chosen] = None
        for key in keys:
            del key_rows[key]
        if soft:
            for row in rows:
                soft.pop(row, None)
        self._spare_rows.extend(rows)
        return places

    def add_replica(self, row: int, replica: Replica) -> None:
        """Add a copy in memory. REQUIRES: the object has none in that host's memory."""
        self._add(row, replica.host, replica.offset)

    def add_disk(self, row: int, host: int) -> None:
        """Add a copy on a disk. REQUIRES: the object has none on that host's disk."""
        self._add(row, host | DISK, 0)
        self._num_disks[row] += 1

    def _add(self, row: int, tag: int, offset: int) -> None:
        self._copies.add(row, tag, offset)
        if tag & ~DISK in self._lost_hosts:
            return
        if tag < DISK:
            self._memory[row] += 1
        if self._is_on_other_tier(row, tag):
            return
        if self._live[row] == 0:
            self._num_unreadable -= 1
        self._live[row] += 1

    def _is_on_other_tier(self, row: int, tag: int) -> bool:
        """Return True if the host of this copy, which ``tag`` names, also has one on its other
        tier: on disk besides memory, or the reverse.
        """
        return (tag >= DISK or self._num_disks[row] > 0) and self._copies.has(row, tag ^ DISK)

    def drop_replica(self, row: int, host: int) -> Replica | None:
        """Remove the copy in the memory of ``host`` and return it; None without one.

        An object without copies stays in the directory, unreadable, until ``remove``.
        """
        offset = self._drop(row, host)
        return None if offset is None else Replica(host, offset)

    def drop_disk(self, row: int, host: int) -> bool:
        """Remove the copy on the disk of ``host``. Return False if there was none."""
        if not self._num_disks[row] or self._drop(row, host | DISK) is None:
            return False
        self._num_disks[row] -= 1
        return True

    def _drop(self, row: int, tag: int) -> int | None:
        offset = self._copies.drop(row, tag)
        if offset is None or tag & ~DISK in self._lost_hosts:
            return offset
        if tag < DISK:
            self._memory[row] -= 1
        if not self._is_on_other_tier(row, tag):
            self._live[row] -= 1
            if self._live[row] == 0:
                self._num_unreadable += 1
        return offset

    def lose_host(self, host: int) -> None:
        """Count the copies on ``host`` as unreadable, without removing them."""
        if host in self._lost_hosts:
            return
        self._lost_hosts.add(host)
        in_memory, rows = self._rows_of_host(host)
        live = view(self._live)
        view(self._memory)[in_memory] -= 1
        live[rows] -= 1
        self._num_unreadable += int(np.count_nonzero(live[rows] == 0))

    def find_host(self, host: int) -> None:
        """Count the copies on ``host``, which was lost, as readable again."""
        if host not in self._lost_hosts:
            return
        self._lost_hosts.remove(host)
        in_memory, rows = self._rows_of_host(host)
        live = view(self._live)
        self._num_unreadable -= int(np.count_nonzero(live[rows] == 0))
        view(self._memory)[in_memory] += 1
        live[rows] += 1

    def _rows_of_host(self, host: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the rows of the objects in the host's memory, and those of the objects in its
        memory or on its disk.
        """
        in_memory, on_disk = map(self._copies.rows_with, (host, host | DISK))
        return in_memory, np.union1d(in_memory, on_disk) if len(on_disk) else in_memory

    def touch(self, row: int) -> None:
        """Mark an object as used, for LRU eviction."""
        self._tick += 1
        self._used_tick[row] = self._tick

    def extend_lease(self, row: int, until_ms: int) -> None:
        """Extend an object's lease at least to ``until_ms``. Never shortens it."""
        if until_ms > self._lease_until_ms[row]:
            self._lease_until_ms[row] = until_ms

    def set_pins(self, row: int, *, hard: bool, soft_until_ms: int) -> None:
        """Replace an object's hard and soft pin. ``soft_until_ms`` of 0 means no soft pin."""
        self._flags[row] = _ALIVE | (_HARD if hard else 0)
        if soft_until_ms > 0:
            self._soft_until_ms[row] = soft_until_ms
        else:
            self._soft_until_ms.pop(row, None)

    # The methods below choose objects and copies to evict.

    def pick_surplus(self, host: int, now_ms: int, min_bytes: int) -> list[int]:
        """Return the rows of objects with a surplus copy in the memory of ``host``: they have more
        replicas than their puts asked for.

        Least recently used first, until their values have ``min_bytes``; leased rows are skipped.
        Pins do not matter, since as many replicas as wanted stay on connected hosts.
        """
        if host in self._lost_hosts:
            return []
        rows = self._copies.rows_with(host)
        memory, wanted = view(self._memory)[rows], view(self._wanted)[rows]
        rows = rows[(memory > wanted) & (view(self._lease_until_ms)[rows] <= now_ms)]
        rows = rows[np.argsort(view(self._used_tick)[rows])]
        ends = np.cumsum(np.maximum(view(self._size)[rows], 1))
        return rows[: int(np.searchsorted(ends, min_bytes)) + 1].tolist()

    def pick_victims(self, now_ms: int, min_bytes: int, host: int | None = None) -> list[int]:
        """Return rows to evict that free ``min_bytes`` of values, least recently used first.

        Leased and hard-pinned rows are skipped; soft-pinned ones are returned only if the others do
        not suffice. If the rows have fewer bytes than asked, nothing more can be evicted.

        Args:
            now_ms: leases and soft pins that end later count.
            min_bytes: bytes of values to free; only the last row may exceed it.
            host: only objects with a replica there; None for any.
        """
        mean_bytes = max(1, self.total_bytes // max(1, len(self._rows)))
        return self._victims.pick(now_ms, min_bytes, host, mean_bytes)

    def _take_row(self) -> int:
        return self._spare_rows.pop() if self._spare_rows else self._take_rows(1)[0]

    def _take_rows(self, count: int) -> list[int]:
        columns = (
            self._size, self._version, self._checksum, self._lease_until_ms, self._used_tick,
            self._flags, self._wanted, self._live, self._memory, self._num_disks, self._first,
        )  # fmt: skip
        rows = take_rows(self._spare_rows, columns, count)
        if len(self._size) > len(self._keys):
            before = len(self._keys)
            grown = np.empty(len(self._size) + max(16, before // 4), dtype=object)
            grown[:before] = self._keys
            self._keys = grown
        return rows

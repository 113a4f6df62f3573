"""Questions to a master: where an object is, whether it is, and which there are."""

import asyncio
import struct
from collections.abc import Sequence

from tandem.store.master.departures import Departures
from tandem.store.master.policies import rank_replicas
from tandem.store.master.state.index import NO_ROW, Replica
from tandem.store.master.state.state import StoreState
from tandem.store.master.upkeep import Upkeep
from tandem.store.messages import (
    FindObjects,
    FoundObjects,
    KeyBytes,
    KeyList,
    KeyPage,
    ListKeys,
    Located,
    LocateObjects,
    StageObjects,
)
from tandem.store.sessions import Caller, check_present

__all__ = ["SCAN_KEYS", "Lookups"]

LOCATED_ONE = struct.Struct("<qqqq")
"""Columns of ``Located`` for one key."""
NUMBER = struct.Struct("<q")
"""One cell of them."""
STAGE_SHARE = 4
"""So small a part of a lease ``stage`` waits at most."""
SCAN_KEYS = 5_000
"""Keys looked at in one go by a command that looks at all."""


class Lookups:
    """What one master answers without changing more than leases and loads."""

    def __init__(self, state: StoreState, departures: Departures, upkeep: Upkeep) -> None:
        self._state = state
        self._departures = departures
        self._upkeep = upkeep

    def find(self, _: Caller, request: FindObjects) -> FoundObjects:
        """Say where objects are, and lease them if asked to."""
        directory, lease_ms = self._state.directory, self._state.config.lease_ms
        leaving = self._departures.leaving
        if leaving and any(key in leaving for key in request.keys):
            return FoundObjects(
                sizes=[],
                versions=[],
                checksums=[],
                places=[],
                endpoints=[],
                lease_ms=lease_ms,
                is_recovering=True,
            )
        until_ms = self._state.now_ms() + lease_ms
        found = FoundObjects(
            sizes=[], versions=[], checksums=[], places=[], endpoints=[], lease_ms=lease_ms
        )
        used: set[int] = set()
        on_disk = bytearray(len(request.keys))
        num_missing = 0
        for i, key in enumerate(request.keys):
            row = directory.find(key)
            if row == NO_ROW:
                num_missing += 1
                found.sizes.append(-1)
                found.versions.append(0)
                found.checksums.append(0)
                found.places.append([])
                continue
            size = directory.size(row)
            found.sizes.append(size)
            found.versions.append(directory.version(row))
            found.checksums.append(directory.checksum(row))
            places: list[tuple[int, int]] = []
            if request.lease:
                directory.touch(row)
                directory.extend_lease(row, until_ms)
                places = self._rank(directory.replicas(row), request.machine)
                used.update(host for host, _ in places)
                if places:
                    self._state.hosts[places[0][0]].note_read(size)
                elif size and directory.num_live(row):
                    on_disk[i] = self._upkeep.load(row) is not None
            found.places.append(places)
        self._state.counters.hits += len(request.keys) - num_missing
        self._state.counters.misses += num_missing
        return FoundObjects(
            sizes=found.sizes,
            versions=found.versions,
            checksums=found.checksums,
            places=found.places,
            endpoints=[self._state.hosts[host].endpoint() for host in sorted(used)],
            lease_ms=lease_ms,
            is_recovering=num_missing > 0 and self._state.awaited.is_learning,
            on_disk=bytes(on_disk) if any(on_disk) else b"",
        )

    def locate(self, _: Caller, request: LocateObjects) -> Located:
        """Say where the best replica of each is, and lease them; what is not simple is left out."""
        if len(request.keys) == 1:
            return self._locate_one(request.keys[0], request.machine)
        directory, hosts, lease_ms = (
            self._state.directory,
            self._state.hosts,
            self._state.config.lease_ms,
        )
        # Hosts are numbered in the order in which they came.
        is_here = bytes(host.caller is not None for host in hosts.values())
        until_ms = self._state.now_ms() + lease_ms
        rows, (columns, versions, undecided, reads) = directory.locate_many(
            request.keys,
            is_here,
            until_ms,
            hidden=self._departures.leaving,
        )
        if undecided:
            columns = self._decide(rows, columns, undecided, reads, request.machine)
        for number, num_bytes, count in reads:
            hosts[number].note_read(num_bytes)
            # What is left out is asked for again, and counted then.
            self._state.counters.hits += count
        endpoints = [hosts[number].endpoint() for number in dict.fromkeys(n for n, *_ in reads)]
        return Located(columns, endpoints, lease_ms, versions)

    def _decide(
        self,
        rows: list[int],
        columns: bytes,
        undecided: list[int],
        reads: list[tuple[int, int, int]],
        machine: str,
    ) -> bytes:
        """Choose a host for each row that has several; returns the columns with them."""
        decided, count = bytearray(columns), len(rows)
        for i in undecided:
            ranked = self._rank(self._state.directory.replicas(rows[i]), machine)
            if ranked:
                host, offset = ranked[0]
                NUMBER.pack_into(decided, 8 * (2 * count + i), host)
                NUMBER.pack_into(decided, 8 * (3 * count + i), offset)
                reads.append((host, self._state.directory.size(rows[i]), 1))
        return bytes(decided)

    def _locate_one(self, key: str, machine: str) -> Located:
        """As ``locate``: columns of one cost more than they save."""
        directory, lease_ms = self._state.directory, self._state.config.lease_ms
        row = directory.find(key)
        if row == NO_ROW or key in self._departures.leaving:
            return Located(LOCATED_ONE.pack(-1, -1, -1, -1), [], lease_ms)
        directory.touch(row)
        directory.extend_lease(row, self._state.now_ms() + lease_ms)
        size, checksum = directory.size(row), directory.checksum(row)
        ranked = self._rank(directory.replicas(row), machine) if size else []
        if not ranked:
            return Located(LOCATED_ONE.pack(size, checksum, -1, -1), [], lease_ms)
        host = self._state.hosts[ranked[0][0]]
        host.note_read(size)
        self._state.counters.hits += 1
        return Located(
            LOCATED_ONE.pack(size, checksum, *ranked[0]),
            [host.endpoint()],
            lease_ms,
            NUMBER.pack(directory.version(row)),
        )

    async def stage(self, caller: Caller, request: StageObjects) -> FoundObjects:
        """As ``find``, after waiting for objects that are read from disks, not for long."""
        check_present(caller)
        directory, clock = self._state.directory, self._state.clock
        # What is read by then is leased anew, and most of that lease is left to the reader.
        most_ms = min(request.wait_ms, self._state.config.lease_ms // STAGE_SHARE)
        end_s = clock.now_s() + most_ms / 1e3
        while (left_s := end_s - clock.now_s()) > 0:
            rows = [directory.find(key) for key in dict.fromkeys(request.keys)]
            loads = [
                load
                for row in rows
                if row != NO_ROW
                and not directory.num_in_memory(row)
                and directory.size(row)
                and (load := self._upkeep.load(row)) is not None
            ]
            if not loads:
                break
            await asyncio.wait(loads, timeout=left_s)
        return self.find(caller, FindObjects(keys=request.keys, machine=request.machine))

    def _rank(self, replicas: Sequence[Replica], machine: str) -> list[tuple[int, int]]:
        here = [
            replica for replica in replicas if self._state.hosts[replica.host].caller is not None
        ]
        if len(here) <= 1:
            return [(host, offset) for host, offset in here]
        offsets = {replica.host: replica.offset for replica in here}
        ranked = rank_replicas([self._state.hosts[host].view() for host in offsets], machine)
        return [(host, offsets[host]) for host in ranked]

    def exists(self, _: Caller, request: KeyList) -> KeyBytes:
        """Say which objects are there and readable."""
        flags = self._state.directory.exists_many(request.keys)
        if 0 not in flags:
            return KeyBytes(flags)
        # What is not there may yet be seen by somebody.
        leaving = self._departures.leaving
        missing = [key for key, flag in zip(request.keys, flags, strict=True) if not flag]
        is_unsure = self._state.is_unsure(missing) or any(
            key in leaving for key in missing if leaving
        )
        return KeyBytes(flags, is_unsure)

    async def list_keys(self, _: Caller, request: ListKeys) -> KeyPage:
        """Return a page of keys."""
        matches = await self.match_prefix(request.prefix)
        matches = sorted(key for key in matches if key > request.after or not request.after)
        limit = max(1, min(request.limit, self._state.config.max_batch))
        page = KeyPage([], [], [], is_last=len(matches) <= limit)
        for key in matches[:limit]:
            row = self._state.directory.find(key)
            if row != NO_ROW:
                page.keys.append(key)
                page.sizes.append(self._state.directory.size(row))
                page.num_replicas.append(self._state.directory.num_live(row))
        return page

    async def match_prefix(self, prefix: str) -> list[str]:
        """Return the keys that begin so, in slices that let others be answered."""
        await self._state.awaited.recover()
        keys = self._state.directory.list_keys()
        matches: list[str] = []
        for begin in range(0, len(keys), SCAN_KEYS):
            matches += [key for key in keys[begin : begin + SCAN_KEYS] if key.startswith(prefix)]
            await asyncio.sleep(0)
        return matches

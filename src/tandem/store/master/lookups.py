"""A master's answers to lookups: where objects are, whether they exist, and which keys there
are.
"""

import asyncio
import struct
from collections.abc import Sequence

from tandem.store.master.maintenance import Maintenance
from tandem.store.master.policies import rank_replicas
from tandem.store.master.state.index import NO_ROW
from tandem.store.master.state.state import StoreState
from tandem.store.messages import (
    ON_DISK,
    UNREADABLE,
    KeyBytes,
    KeyList,
    KeyPage,
    ListKeys,
    Located,
    LocateObjects,
)
from tandem.store.sessions import Caller, check_present

__all__ = ["SCAN_KEYS", "Lookups"]

NUMBER = struct.Struct("<q")
"""Packing of one cell in the columns of ``Located``."""
NO_HOST = -1
STAGE_SHARE = 4
"""``stage`` waits at most the lease divided by this."""
SCAN_KEYS = 5_000
"""Number of keys that a scan over all keys examines before it lets other calls run."""


class Lookups:
    """The master's lookups. They change nothing but leases and the hosts' load estimates."""

    def __init__(self, state: StoreState, maintenance: Maintenance) -> None:
        self._state = state
        self._maintenance = maintenance

    def locate(self, _: Caller, request: LocateObjects) -> Located:
        """Return the places of objects, and lease their bytes if asked."""
        state, keys, hidden = self._state, request.keys, self._state.wipes.hidden
        directory, hosts, lease_ms = state.directory, state.hosts, state.config.lease_ms
        if not request.lease:
            return self._measure(keys)
        # Hosts are numbered in the order in which they were first seen, so the position in
        # ``is_here`` is the host's number.
        is_here = bytes(host.caller is not None for host in hosts.values())
        until_ms = state.now_ms() + lease_ms
        rows, (columns, versions, undecided, reads) = directory.locate_many(
            keys, is_here, until_ms, hidden=hidden
        )
        others: dict[int, list[tuple[int, int]]] = {}
        if undecided:
            columns = self._decide(rows, columns, undecided, reads, others, request.machine)
        for number, num_bytes, _count in reads:
            hosts[number].note_read(num_bytes)
        num_missing = rows.count(NO_ROW)
        is_recovering = num_missing > 0 and self._can_come(keys)
        state.counters.hits += len(rows) - num_missing
        state.counters.misses += num_missing
        used = dict.fromkeys(number for number, *_ in reads)
        for further in others.values():
            used.update(dict.fromkeys(number for number, _ in further))
        endpoints = [hosts[number].endpoint() for number in used]
        return Located(columns, endpoints, lease_ms, versions, others, is_recovering)

    def _can_come(self, missing: Sequence[str]) -> bool:
        """Return True if a missing key may have an object: hosts have yet to report their objects,
        or an older object of the key is being removed.
        """
        hidden = self._state.wipes.hidden
        return self._state.awaited.is_learning or any(key in hidden for key in missing if hidden)

    def _measure(self, keys: Sequence[str]) -> Located:
        """Return the answer to a lookup of sizes only: no places of the objects, and no leases on
        them.
        """
        state, directory, hidden = self._state, self._state.directory, self._state.wipes.hidden
        rows = [NO_ROW if key in hidden else directory.find(key) for key in keys]
        live = directory.num_live
        sizes = [
            -1 if row == NO_ROW else directory.size[row] if live[row] else UNREADABLE
            for row in rows
        ]
        missing = [key for key, size in zip(keys, sizes, strict=True) if size < 0]
        state.counters.hits += len(rows) - len(missing)
        state.counters.misses += len(missing)
        columns = struct.pack(f"<{len(sizes)}q", *sizes)
        is_unsure = bool(missing) and (self._can_come(missing) or state.is_unsure(missing))
        return Located(columns, [], 0, is_recovering=is_unsure)

    def _decide(
        self,
        rows: list[int],
        columns: bytes,
        undecided: list[int],
        reads: list[tuple[int, int, int]],
        others: dict[int, list[tuple[int, int]]],
        machine: str,
    ) -> bytes:
        """Choose the host to read from for each object (row) with several copies or with copies on
        disks only. Return the answer's columns with the choices.
        """
        directory = self._state.directory
        decided, count = bytearray(columns), len(rows)
        for i in undecided:
            row = rows[i]
            host, offset = NO_HOST, -1
            ranked = self._rank(row, machine)
            if ranked:
                (host, offset), *further = ranked
                reads.append((host, directory.size[row], 1))
                if further:
                    others[i] = further
            elif directory.num_live[row] and self._maintenance.load(row) is not None:
                host = ON_DISK
            NUMBER.pack_into(decided, 8 * (2 * count + i), host)
            NUMBER.pack_into(decided, 8 * (3 * count + i), offset)
        return bytes(decided)

    async def stage(self, caller: Caller, request: LocateObjects) -> Located:
        """Wait, up to ``wait_ms``, for objects to be loaded from disks; then answer like
        ``locate``.
        """
        check_present(caller)
        directory, clock = self._state.directory, self._state.clock
        # A reader counts its lease from the moment of its request. Wait a small part of a lease at
        # most, so that most of the lease remains.
        most_ms = min(request.wait_ms, self._state.config.lease_ms // STAGE_SHARE)
        end_s = clock.now_s() + most_ms / 1e3
        while (left_s := end_s - clock.now_s()) > 0:
            rows = [directory.find(key) for key in dict.fromkeys(request.keys)]
            loads = [
                load
                for row in rows
                if row != NO_ROW
                and not directory.num_in_memory[row]
                and directory.size[row]
                and (load := self._maintenance.load(row)) is not None
            ]
            if not loads:
                break
            await asyncio.wait(loads, timeout=left_s)
        return self.locate(caller, request)

    def _rank(self, row: int, machine: str) -> list[tuple[int, int]]:
        offsets = dict(self._state.readable_copies(row))
        if len(offsets) <= 1:
            return list(offsets.items())
        ranked = rank_replicas([self._state.hosts[host].view() for host in offsets], machine)
        return [(host, offsets[host]) for host in ranked]

    def exists(self, _: Caller, request: KeyList) -> KeyBytes:
        """Return which objects exist and are readable, as a byte for each key."""
        flags = self._state.directory.exists_many(request.keys)
        if 0 not in flags:
            return KeyBytes(flags)
        # A removed object is answered as unsure (neither yes nor no: the client asks again) while
        # clients may still read it by their location caches.
        hidden = self._state.wipes.hidden
        missing = [key for key, flag in zip(request.keys, flags, strict=True) if not flag]
        is_unsure = self._state.is_unsure(missing) or any(
            key in hidden for key in missing if hidden
        )
        return KeyBytes(flags, is_unsure)

    async def list_keys(self, _: Caller, request: ListKeys) -> KeyPage:
        """Return one sorted page of the keys with a prefix."""
        matches = await self.match_prefix(request.prefix)
        matches = sorted(key for key in matches if key > request.after or not request.after)
        limit = max(1, min(request.limit, self._state.config.max_batch))
        page = KeyPage([], [], [], is_last=len(matches) <= limit)
        for key in matches[:limit]:
            row = self._state.directory.find(key)
            if row != NO_ROW:
                page.keys.append(key)
                page.sizes.append(self._state.directory.size[row])
                page.num_replicas.append(self._state.directory.num_live[row])
        return page

    async def match_prefix(self, prefix: str) -> list[str]:
        """Return the keys with a prefix. Other calls run between slices of the scan."""
        await self._state.awaited.recover()
        keys = self._state.directory.list_keys()
        matches: list[str] = []
        for begin in range(0, len(keys), SCAN_KEYS):
            matches += [key for key in keys[begin : begin + SCAN_KEYS] if key.startswith(prefix)]
            await asyncio.sleep(0)
        return matches

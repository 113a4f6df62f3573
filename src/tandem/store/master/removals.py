"""Removals that clients ask for: answered when no restart can bring the objects back."""

import asyncio
from collections.abc import Sequence
from typing import Any

from tandem.rpc import Kept
from tandem.store.election import Tombstone
from tandem.store.master.burials import Burials
from tandem.store.master.departures import Departures
from tandem.store.master.lookups import SCAN_KEYS, Lookups
from tandem.store.master.state.index import NO_ROW
from tandem.store.master.state.results import Results
from tandem.store.master.state.state import StoreState
from tandem.store.messages import KeyBytes, PrefixRemoval, RemoveObjects, RemovePrefix
from tandem.store.sessions import Caller

__all__ = ["Removals"]


class Removals:
    """The removals of one master."""

    def __init__(
        self,
        state: StoreState,
        departures: Departures,
        results: Results,
        *,
        lookups: Lookups,
        burials: Burials,
    ) -> None:
        self._state = state
        self._departures = departures
        self._results = results
        self._lookups = lookups
        self._burials = burials

    def remove(self, caller: Caller, request: RemoveObjects) -> Kept:
        """Remove objects; answers when their headers are gone."""
        return Kept(self._remove(caller, request))

    async def _remove(self, caller: Caller, request: RemoveObjects) -> KeyBytes:
        return KeyBytes(
            await self._results.change(
                caller, request, lambda: self._remove_keys(request.keys, self._begin())
            )
        )

    def _begin(self) -> int:
        """Return the version that separates objects there now from those put while a removal waits.

        Its caller may have given up, and put anew: that is not to go.
        """
        return self._state.versions.newest

    async def _remove_keys(self, keys: Sequence[str], begin: int) -> bytes:
        # Whether they are found or not: a host that has not told yet may have a copy.
        await self._state.awaited.recover()
        await self._wait_room(len(keys))
        num_lost = self._burials.num_lost
        flags, versions = bytearray(), list[int]()
        for at in range(0, len(keys), SCAN_KEYS):
            some = keys[at : at + SCAN_KEYS]
            some_flags, some_versions = await self._drop_keys(some, begin, marked_below=-1)
            flags += some_flags
            versions += some_versions
        await self._bury(list(map(Tombstone, keys, versions)), num_lost)
        return bytes(flags)

    async def _wait_room(self, count: int) -> None:
        """Wait for room for tombstones, before anything is removed. Raises: CapacityError."""
        if not self._burials.is_whole:
            await self._burials.wait_room(count, self._state.config.put_wait_ms / 1e3)

    async def _bury(self, tombstones: Sequence[Tombstone], num_lost: int) -> None:
        """Make removals final that began when ``num_lost`` hosts had been lost."""
        if num_lost != self._burials.num_lost or not self._burials.is_whole:
            await self._burials.bury(tombstones)
        # Else all hosts have told what they have, and have wiped it.

    async def _drop_keys(
        self, keys: Sequence[str], begin: int, *, marked_below: int
    ) -> tuple[bytes, list[int]]:
        """Remove what there is on hosts that are there; return when it is wiped.

        Args:
            keys: of the objects.
            begin: see ``_begin``.
            marked_below: what a tombstone of their prefix says already.

        Returns: a byte for each: 1 for what was found; and the version up to which it is dead.
        """
        flags = bytearray(len(keys))
        pending: list[asyncio.Future[Any]] = []
        directory, has_given = self._state.directory, self._state.versions.has_given
        versions = [begin] * len(keys)
        taken: dict[int, None] = {}
        find_going = self._departures.find_going
        for i, key in enumerate(keys):
            row = directory.find(key)
            is_there = row != NO_ROW and row not in taken
            if is_there and not has_given(directory.version(row), since=begin):
                versions[i] = max(begin, directory.version(row))
                taken[row] = None
                flags[i] = 1
            # It may have been removed, or evicted, but not yet for good.
            going = find_going(key)
            if going is not None:
                pending.append(going)
        self._state.counters.objects_removed += len(taken)
        pending += self._departures.drop_rows(list(taken))
        if not self._burials.is_whole:
            pairs = zip(keys, versions, strict=True)
            self._burials.mark([Tombstone(*pair) for pair in pairs if pair[1] > marked_below])
        # Only then could no restart bring them back.
        for gone in pending:
            await asyncio.shield(gone)
        return bytes(flags), versions

    def remove_prefix(self, caller: Caller, request: RemovePrefix) -> Kept:
        """Remove all objects whose keys have a prefix."""
        return Kept(self._remove_prefix(caller, request))

    async def _remove_prefix(self, caller: Caller, request: RemovePrefix) -> PrefixRemoval:
        return PrefixRemoval(
            await self._results.change(
                caller, request, lambda: self._remove_matches(request.prefix, self._begin())
            )
        )

    async def _remove_matches(self, prefix: str, begin: int) -> int:
        matches = await self._lookups.match_prefix(prefix)
        await self._wait_room(1)
        burials = self._burials
        num_lost, tombstone = burials.num_lost, Tombstone(prefix, begin, is_prefix=True)
        # Also for objects that this master has never heard of.
        burials.mark([tombstone])
        count, newer = 0, list[Tombstone]()
        for at in range(0, len(matches), SCAN_KEYS):
            keys = matches[at : at + SCAN_KEYS]
            flags, versions = await self._drop_keys(keys, begin, marked_below=begin)
            count += sum(flags)
            newer += [
                Tombstone(*pair) for pair in zip(keys, versions, strict=True) if pair[1] > begin
            ]
        # Objects that other callers are removing are not gone before their headers are.
        for gone in self._departures.find_going_below(prefix):
            await asyncio.shield(gone)
        await self._bury([tombstone, *newer], num_lost)
        return count

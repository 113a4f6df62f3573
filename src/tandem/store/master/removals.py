"""Removals that clients ask for: answered when no restart can bring the objects back."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem.rpc import Kept
from tandem.store.election import Tombstone
from tandem.store.master.burials import Burials
from tandem.store.master.departures import Departures
from tandem.store.master.lookups import Lookups
from tandem.store.master.state.index import NO_ROW
from tandem.store.master.state.results import Results
from tandem.store.master.state.state import StoreState
from tandem.store.messages import KeyBytes, PrefixRemoval, RemoveObjects, RemovePrefix
from tandem.store.sessions import Caller

__all__ = ["Removals"]

PIECE_KEYS = 1_000
"""Removed before others are answered: four milliseconds of a core."""
MAX_IN_FLIGHT = 8
"""Pieces that hosts are wiping while another one is looked for."""


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
        return Kept(self._results.change(caller, request, lambda: self._remove_keys(request.keys)))

    def _begin(self) -> int:
        """Return the version that separates objects there now from those put while a removal waits.

        Its caller may have given up, and put anew: that is not to go.
        """
        return self._state.versions.newest

    async def _remove_keys(self, keys: Sequence[str]) -> KeyBytes:
        begin = self._begin()
        # Whether they are found or not: a host that has not told yet may have a copy.
        await self._state.awaited.recover()
        await self._wait_room(len(keys))
        num_lost = self._burials.num_lost
        flags, versions = await self._drop_keys(keys, begin, marked_below=-1)
        await self._bury(list(map(Tombstone, keys, versions)), num_lost)
        return KeyBytes(flags)

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

        It is done in pieces, between which others are answered; hosts wipe some while the next are
        looked for.

        Args:
            keys: of the objects.
            begin: see ``_begin``.
            marked_below: what a tombstone of their prefix says already.

        Returns: a byte for each: 1 for what was found; and the version up to which it is dead.
        """
        flags, versions = bytearray(), list[int]()
        in_flight: deque[list[asyncio.Future[Any]]] = deque()
        for at in range(0, len(keys), PIECE_KEYS):
            some = keys[at : at + PIECE_KEYS]
            some_flags, some_versions, going = self._drop_piece(some, begin, marked_below)
            flags += some_flags
            versions += some_versions
            in_flight.append(going)
            await (asyncio.sleep(0) if len(in_flight) <= MAX_IN_FLIGHT else _wait(in_flight))
        while in_flight:
            await _wait(in_flight)
        return bytes(flags), versions

    def _drop_piece(
        self, keys: Sequence[str], begin: int, marked_below: int
    ) -> tuple[bytes, list[int], list[asyncio.Future[Any]]]:
        """Do as ``_drop_keys``, with futures that are done when all is wiped."""
        directory, has_given = self._state.directory, self._state.versions.has_given
        rows, found = directory.find_versions(keys)
        is_gone = rows != NO_ROW
        for i in np.flatnonzero(is_gone & (found > begin)).tolist():
            is_gone[i] = not has_given(int(found[i]), since=begin)
        if len(set(keys)) < len(keys):
            is_first = np.zeros(len(keys), bool)
            is_first[np.unique(rows, return_index=True)[1]] = True
            is_gone &= is_first
        versions: list[int] = np.where(is_gone, np.maximum(found, begin), begin).tolist()
        # It may have been removed, or evicted, but not yet for good.
        going = self._departures.find_going_of(keys)
        taken: list[int] = rows[is_gone].tolist()
        self._state.counters.objects_removed += len(taken)
        going += self._departures.drop_rows(taken)
        if not self._burials.is_whole:
            pairs = zip(keys, versions, strict=True)
            self._burials.mark([Tombstone(*pair) for pair in pairs if pair[1] > marked_below])
        return is_gone.astype(np.uint8).tobytes(), versions, going

    def remove_prefix(self, caller: Caller, request: RemovePrefix) -> Kept:
        """Remove all objects whose keys have a prefix."""
        return Kept(
            self._results.change(caller, request, lambda: self._remove_matches(request.prefix))
        )

    async def _remove_matches(self, prefix: str) -> PrefixRemoval:
        begin = self._begin()
        matches = await self._lookups.match_prefix(prefix)
        await self._wait_room(1)
        burials = self._burials
        num_lost, tombstone = burials.num_lost, Tombstone(prefix, begin, is_prefix=True)
        # Also for objects that this master has never heard of.
        burials.mark([tombstone])
        flags, versions = await self._drop_keys(matches, begin, marked_below=begin)
        newer = [
            Tombstone(*pair) for pair in zip(matches, versions, strict=True) if pair[1] > begin
        ]
        # Objects that other callers are removing are not gone before their headers are.
        for gone in self._departures.find_going_below(prefix):
            await asyncio.shield(gone)
        await self._bury([tombstone, *newer], num_lost)
        return PrefixRemoval(sum(flags))


async def _wait(in_flight: "deque[list[asyncio.Future[Any]]]") -> None:
    """Return when the oldest piece is wiped: only then could no restart bring it back."""
    for gone in in_flight.popleft():
        await asyncio.shield(gone)

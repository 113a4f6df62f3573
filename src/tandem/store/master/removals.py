"""Removals that clients request. Each is answered when no restart can bring the objects back."""

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
"""Number of keys removed before other calls run; some 4 ms of a core."""
MAX_IN_FLIGHT = 8
"""Number of pieces that hosts may be wiping while the next one is removed."""


class Removals:
    """The handlers of one master for clients' removal requests."""

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
        """Remove objects. The answer comes when their headers are wiped on the hosts, so that no
        restart finds them.
        """
        return Kept(self._results.change(caller, request, lambda: self._remove_keys(request.keys)))

    def _begin(self) -> int:
        """Return the highest version that the removal covers: objects of later versions stay.

        They were put while the removal waited: its caller may have given up and put the key again.
        """
        return self._state.versions.newest

    async def _remove_keys(self, keys: Sequence[str]) -> KeyBytes:
        begin = self._begin()
        # Wait for all hosts, also for keys that are found: a host that has not reported yet may
        # have another copy.
        await self._state.awaited.recover()
        await self._wait_room(len(keys))
        num_lost = self._burials.num_lost
        flags, versions = await self._drop_keys(keys, begin, marked_below=-1)
        await self._bury(list(map(Tombstone, keys, versions)), num_lost)
        return KeyBytes(flags)

    async def _wait_room(self, count: int) -> None:
        """Wait until ``count`` more tombstones (durable notes of removals) fit below the limit,
        before anything is removed.

        Raises: CapacityError (they do not in time).
        """
        if not self._burials.is_whole:
            await self._burials.wait_room(count, self._state.config.put_wait_ms / 1e3)

    async def _bury(self, tombstones: Sequence[Tombstone], num_lost: int) -> None:
        """Make tombstones (notes of removals) durable, unless all hosts are connected and none was
        lost since their count of losses was ``num_lost``.
        """
        if num_lost != self._burials.num_lost or not self._burials.is_whole:
            await self._burials.bury(tombstones)

    # No tombstone is needed if all hosts have reported their objects and wiped the removed ones.

    async def _drop_keys(
        self, keys: Sequence[str], begin: int, *, marked_below: int
    ) -> tuple[bytes, list[int]]:
        """Remove the objects of keys, and return when connected hosts have wiped them.

        The keys are processed in pieces, between which other calls run. Hosts wipe one piece while
        the next is removed.

        Args:
            keys: the objects' keys.
            begin: the newest version to remove; see ``_begin``.
            marked_below: version up to which the tombstone of a prefix covers the keys already.

        Returns: a byte for each key, 1 if it was found; and the version up to which each key is
            dead.
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
        """Remove one piece of the keys for ``_drop_keys``. Return a byte for each key, the version
        up to which each is dead, and futures that are done when all is wiped.
        """
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
        # Earlier objects of the keys may be removed or evicted, with headers that are not wiped
        # yet.
        going = self._state.wipes.find_of(keys)
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
        # The tombstone (note of the removal) covers objects with the prefix that this master does
        # not know of.
        burials.mark([tombstone])
        flags, versions = await self._drop_keys(matches, begin, marked_below=begin)
        newer = [
            Tombstone(*pair) for pair in zip(matches, versions, strict=True) if pair[1] > begin
        ]
        # Objects that other callers remove count as gone only when their headers are wiped.
        for gone in self._state.wipes.find_below(prefix):
            await asyncio.shield(gone)
        await self._bury([tombstone, *newer], num_lost)
        return PrefixRemoval(sum(flags))


async def _wait(in_flight: "deque[list[asyncio.Future[Any]]]") -> None:
    """Take the oldest piece of the removed keys (the futures of its wipes) off the queue and wait
    until its objects are wiped, so that no restart can bring them back.
    """
    for gone in in_flight.popleft():
        await asyncio.shield(gone)

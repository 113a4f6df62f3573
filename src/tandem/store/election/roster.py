"""The membership of a store, which outlives its masters: hosts, retired storage, tombstones.

A master keeps its directory in memory only. Two things must be stored outside of it, so that a new
master can tell that an object is absent: which hosts there are, and which objects were removed
while a host was away. This module has the records, their form in memory, and the writer that makes
changes durable in groups. A ``RosterStore`` keeps them: in a folder, in etcd, or in memory.
"""

import asyncio
import copy
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from tandem.core.errors import TandemError

__all__ = [
    "Member",
    "MemoryRosterStore",
    "Roster",
    "RosterStore",
    "RosterWriter",
    "SavedRoster",
    "Tombstone",
    "Tombstones",
]

logger = logging.getLogger(__name__)

RETRY_S = 0.25
COMPACT_TOMBSTONES = 10_000
"""Number of superseded tombstones in the store, beyond twice the valid ones, above which all are
rewritten.
"""
MAX_RETIRED = 1_000
"""Limit of retired storage ids. The oldest is forgotten first."""


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A host that may hold objects, as the roster (the durable list of hosts) has it."""

    segment_id: str
    disk_id: str = ""
    """Id of the host's SSD tier; empty without one."""
    is_lost: bool = False
    """True if the host's lease has ended, so that nothing waits for it. Its objects are valid again
    when it returns.
    """

    @property
    def storage(self) -> tuple[str, str]:
        """The ids of the host's segment and disk."""
        return self.segment_id, self.disk_id


class Roster(msgspec.Struct, kw_only=True):
    """The durable list of a store's hosts, and of retired storage (segments and disks whose objects
    are dead).
    """

    members: dict[str, Member] = msgspec.field(default_factory=dict[str, Member])
    """Members by host name."""
    retired: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Versions by segment or disk id, oldest entry first: objects in this storage up to the version
    are dead.
    """
    is_complete: bool = True
    """True if every host that may have an object is a member. False once a roster was lost."""
    has_waited: bool = True
    """False while the store is new or its roster was lost, and its masters have not yet waited, for
    a limited time, for hosts that the roster does not name.
    """
    floor: int = -1
    """Version up to which objects of hosts that are not members are dead; -1 for none."""

    def retire(self, storage_id: str, version: int) -> None:
        """Declare dead the objects of a segment or disk up to a version, in case it returns."""
        if storage_id:
            self.retired.pop(storage_id, None)
            self.retired[storage_id] = version
        while len(self.retired) > MAX_RETIRED:
            storage_id = next(iter(self.retired))
            del self.retired[storage_id]
            logger.warning("event=retired_storage_forgotten id=%s", storage_id)


class Tombstone(msgspec.Struct, frozen=True, array_like=True):
    """A removal: objects of this key up to this version are dead, on whatever host they are
    found.
    """

    key: str
    version: int
    is_prefix: bool = False
    """True if the removal covers all keys that begin with ``key``."""


Batch = tuple[int, Sequence[Tombstone]]
"""Tombstones that were made durable together, with the number of their round."""


class SavedRoster(NamedTuple):
    """The content of a ``RosterStore``: the list of hosts, and the removals that absent hosts must
    learn.
    """

    roster: Roster | None
    """The roster; None if there is none or it cannot be read."""
    tombstones: Sequence[Batch]
    is_new: bool = False
    """True if there is no roster because the store is new, as far as can be told."""


class RosterStore(Protocol):
    """The durable storage of one store's roster (its list of hosts) and tombstones (removals). Only
    the leading master may write.

    Each call raises PeerLostError, DeadlineError or InternalError if it may not have taken effect.
    A call may be repeated.
    """

    async def load(self) -> SavedRoster:
        """Return the roster (the list of hosts) and all tombstones (removals of objects)."""
        ...

    async def save(self, roster: Roster) -> None:
        """Replace the roster (the list of hosts); returns when it is durable."""
        ...

    async def add(self, batch: Batch) -> None:
        """Add the tombstones (removals of objects) of a batch with its round's number; returns when
        they are durable.
        """
        ...

    async def drop(self, below: int) -> None:
        """Remove the tombstones (removals of objects) of rounds (numbered groups of changes) below
        ``below``.
        """
        ...


class MemoryRosterStore:
    """A ``RosterStore`` (storage of a store's hosts and removals) in memory, which ends with this
    object.
    """

    def __init__(self) -> None:
        self._roster: Roster | None = None
        self._batches: dict[int, Sequence[Tombstone]] = {}
        self._is_new = True

    async def load(self) -> SavedRoster:
        """Return copies of the roster (the list of hosts) and all tombstones (removals of
        objects).
        """
        batches = list(self._batches.items())
        return SavedRoster(copy.deepcopy(self._roster), batches, self._is_new)

    async def save(self, roster: Roster) -> None:
        """Keep a copy of the roster (the list of hosts), in place of the one before."""
        self._roster, self._is_new = copy.deepcopy(roster), False

    async def add(self, batch: Batch) -> None:
        """Keep a copy of the tombstones (removals of objects) of a round (a numbered group of
        changes).
        """
        self._batches[batch[0]] = list(batch[1])

    async def drop(self, below: int) -> None:
        """Remove the tombstones (removals of objects) of rounds (numbered groups of changes) below
        ``below``.
        """
        self._batches = {number: b for number, b in self._batches.items() if number >= below}


class Tombstones:
    """All tombstones (removals of objects) of a store in memory: only the newest of each key and of
    each removed prefix of keys.
    """

    def __init__(self) -> None:
        self._keys: dict[str, tuple[int, int]] = {}
        """Version and round of each key's newest tombstone."""
        self._prefixes: dict[str, tuple[int, int]] = {}
        self._lengths: list[int] = []
        """Distinct lengths of the prefixes: a lookup tries each length instead of each prefix."""
        self._oldest_number = 0
        self.newest_number = 0
        """The highest number of a round; 0 without tombstones."""

    def __len__(self) -> int:
        return len(self._keys) + len(self._prefixes)

    def add(self, number: int, tombstones: Iterable[Tombstone]) -> None:
        """Add the tombstones (removals of objects) of round ``number``, a group of changes that is
        made durable at once.
        """
        if not len(self):
            self._oldest_number = number
        self._oldest_number = min(number, self._oldest_number)
        self.newest_number = max(number, self.newest_number)
        for key, version, is_prefix in map(msgspec.structs.astuple, tombstones):
            entries = self._prefixes if is_prefix else self._keys
            earlier = entries.get(key)
            if earlier is None:
                entries[key] = version, number
            else:
                entries[key] = max(version, earlier[0]), max(number, earlier[1])
        self._note_prefixes()

    def _note_prefixes(self) -> None:
        self._lengths = sorted(set(map(len, self._prefixes)))

    def find(self, key: str) -> int:
        """Return the version up to which objects of ``key`` were removed; -1 if none was."""
        found = self._keys[key][0] if key in self._keys else -1
        for length in self._lengths:
            entry = self._prefixes.get(key[:length])
            if entry is not None:
                found = max(found, entry[0])
        return found

    def release(self, below: int) -> bool:
        """Forget the tombstones of rounds (numbered groups of changes) below ``below``. Return True
        if there were any.
        """
        if not len(self) or self._oldest_number >= below:
            return False
        before = len(self)
        self._keys = {k: entry for k, entry in self._keys.items() if entry[1] >= below}
        self._prefixes = {k: entry for k, entry in self._prefixes.items() if entry[1] >= below}
        self._oldest_number = below
        self._note_prefixes()
        return len(self) < before

    def move(self, number: int) -> list[Tombstone]:
        """Assign all tombstones to round ``number`` (a group of changes made durable at once), and
        return them, to be written anew in that round.
        """
        self._oldest_number = number
        self.newest_number = max(number, self.newest_number)
        moved: list[Tombstone] = []
        for entries, is_prefix in ((self._keys, False), (self._prefixes, True)):
            for key, (version, _) in entries.items():
                moved.append(Tombstone(key, version, is_prefix))
                entries[key] = version, number
        return moved


class RosterWriter:
    """Makes changes of the roster (the list of hosts) and new tombstones (removals) durable in
    rounds: changes during a write go into the next round.

    Args:
        store: the storage to write to; borrowed.
        roster: the roster, which ``save`` writes as it is at that moment.
        tombstones: all tombstones, including those added here.
        schedule: runs a coroutine in the background while the master lives.
    """

    def __init__(
        self,
        store: RosterStore,
        roster: Roster,
        tombstones: Tombstones,
        schedule: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._store = store
        self._roster = roster
        self._schedule = schedule
        self.number = 1
        """Number of the next round."""
        self._is_changed = False
        self._all = tombstones
        self._tombstones: list[Tombstone] = []
        self._num_written = 0
        """Number of tombstones in the store, including superseded ones."""
        self._drop_below = 0
        self._round: asyncio.Future[None] | None = None
        """A future that is done when the next round is durable; None without one."""
        self._last: asyncio.Future[None] | None = None
        """A future that is done when the latest round is durable, whether or not it has begun."""
        self._is_running = False

    async def save(self) -> None:
        """Make the roster (the list of hosts) durable in its current state; returns when it is."""
        self._is_changed = True
        await asyncio.shield(self._join_round())

    async def settle(self) -> None:
        """Wait until all changes of hosts and removals that were requested so far are durable."""
        if self._last is not None:
            await asyncio.shield(self._last)

    async def add(self, tombstones: Sequence[Tombstone]) -> None:
        """Make these tombstones (removals of objects) durable, in the round (group of changes) that
        the field ``number`` names at the call; returns when they are.
        """
        self._tombstones += tombstones
        await asyncio.shield(self._join_round())

    def note_change(self) -> None:
        """Have the roster (the list of hosts), which has changed, written soon, without waiting."""
        self._is_changed = True
        self._join_round()

    def drop(self, below: int) -> None:
        """Have the tombstones (removals) of rounds (numbered groups of changes) below ``below``
        removed soon, without waiting.
        """
        self._drop_below = max(self._drop_below, below)
        self._join_round()

    def _join_round(self) -> "asyncio.Future[None]":
        if self._round is None:
            self._round = self._last = asyncio.get_running_loop().create_future()
        if not self._is_running:
            self._is_running = True
            self._schedule(self._run())
        return self._round

    async def _run(self) -> None:
        while self._round is not None:
            done, self._round = self._round, None
            roster = copy.deepcopy(self._roster) if self._is_changed else None
            batch = (self.number, self._tombstones)
            below, self._drop_below = self._drop_below, 0
            self._num_written += len(self._tombstones)
            if self._num_written > 2 * len(self._all) + COMPACT_TOMBSTONES:
                # Write all tombstones (removals) anew with this round of changes, because many of
                # those in the store are superseded by newer ones of their keys.
                batch, below = (self.number, self._all.move(self.number)), self.number
            if below:
                self._num_written = min(self._num_written, len(self._all))
            self._is_changed, self._tombstones = False, []
            self.number += 1
            while not await self._write(roster, batch, below):
                await asyncio.sleep(RETRY_S)
            done.set_result(None)
        self._is_running = False

    async def _write(self, roster: Roster | None, batch: Batch, below: int) -> bool:
        try:
            if roster is not None:
                await self._store.save(roster)
            if batch[1]:
                await self._store.add(batch)
            if below:
                await self._store.drop(below)
        except TandemError as error:
            logger.warning("event=roster_unwritten reason=%s", error)
            return False
        return True

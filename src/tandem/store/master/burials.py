"""Tombstones of a master: when one is needed, how many there may be, and when they go.

A tombstone is a key, or a prefix, and the version up to which its objects are dead. It is durable
before the caller of a removal, or of a put that replaces, has its answer, if a host that is away
may have a copy. It goes when every host that may have one has told what it has, and wiped that.
"""

import asyncio
from collections.abc import Sequence

from tandem.core.errors import CapacityError
from tandem.store.election import Roster, RosterStore, RosterWriter, Tombstone, Tombstones
from tandem.store.master.state.space import HostSpace
from tandem.store.master.state.state import StoreState

__all__ = ["ALL_CONFIRMED", "Burials"]

MAX_TOMBSTONES = 200_000
"""Beyond, removals wait: 100 bytes each here, and as many in the roster's store."""
ALL_CONFIRMED = 2**63
"""The value of ``HostSpace.unconfirmed_from`` of a host that has nothing that a tombstone is
for."""
NAMED_HOSTS = 5
"""Hosts that a refusal names."""
LOOK_S = 0.05


class Burials:
    """The tombstones of one master, and the roster beside which they are kept.

    Args:
        state: of the master.
        store: keeps both; borrowed.
    """

    def __init__(self, state: StoreState, store: RosterStore) -> None:
        self.roster = Roster()
        self.tombstones = Tombstones()
        self.writer = RosterWriter(store, self.roster, self.tombstones, state.tasks.spawn)
        self.num_lost = 0
        """Counts losses of hosts: unchanged, none was lost in between."""
        self._state = state

    @property
    def is_complete(self) -> bool:
        """True if the roster names every host that may have an object."""
        return self.roster.is_complete

    @property
    def is_whole(self) -> bool:
        """True if all hosts are there and have told what they have."""
        hosts = self._state.hosts.values()
        return self.is_complete and all(host.is_settled or host.is_retired for host in hosts)

    @property
    def is_blind(self) -> bool:
        """True if a host may have copies of which this master has never heard."""
        if not self.is_complete or self._state.awaited.is_learning:
            return True
        hosts = self._state.hosts.values()
        return any(not (host.is_all_known or host.is_retired) for host in hosts)

    def mark(self, tombstones: Sequence[Tombstone]) -> None:
        """Keep hosts that have not sent their inventory from bringing back removed objects."""
        if not self.is_whole:
            self.tombstones.add(self.writer.number, tombstones)

    async def bury(self, tombstones: Sequence[Tombstone]) -> None:
        """Return when no host that was away, and no later master, can bring back these objects."""
        self.tombstones.add(self.writer.number, tombstones)
        await self.writer.add(tombstones)

    async def wait_room(self, count: int, timeout_s: float) -> None:
        """Return when so many more tombstones may be kept.

        Raises: CapacityError, which says whose return they wait for, if that takes too long.
        """
        deadline_s = self._state.clock.now_s() + timeout_s
        while len(self.tombstones) + count > MAX_TOMBSTONES:
            if self.is_whole and not len(self.tombstones):
                return  # More than that at once; nothing waits for a tombstone.
            if self._state.clock.now_s() >= deadline_s:
                raise self._describe_full(count)
            await asyncio.sleep(LOOK_S)

    def _describe_full(self, count: int) -> CapacityError:
        names = [host.name for host in self._state.hosts.values() if _holds_up(host)]
        who = ", ".join(names[:NAMED_HOSTS]) + (" ..." if len(names) > NAMED_HOSTS else "")
        help_ = f"start {who}, or give up what is gone for good (`tandem store retire`)"
        if not self.is_complete:
            who = ", ".join(filter(None, [who, "hosts that a damaged roster does not name"]))
            help_ = "start all hosts, then let the others go (`tandem store set-floor`)"
        return CapacityError(
            "store.remove",
            f"{len(self.tombstones)} removals are kept for {who}, and {count} more would be above "
            f"{MAX_TOMBSTONES}: {help_}",
        )

    def note_confirmed(self, host: HostSpace) -> None:
        """All that was dead on a host is wiped, so nothing on it needs a tombstone."""
        host.unconfirmed_from = ALL_CONFIRMED
        for storage_id in (host.segment_id, host.disk_id):
            if self.roster.retired.pop(storage_id, None) is not None:
                self.writer.note_change()
        host.dead_below = host.disk_dead_below = -1

    def note_lost(self, host: HostSpace) -> None:
        """Note that a host is away: it has what dies from now on."""
        self.num_lost += 1
        if host.unconfirmed_from == ALL_CONFIRMED:
            host.unconfirmed_from = self.writer.number

    def release(self) -> None:
        """Let tombstones go that every host has confirmed."""
        unlisted = self._state.unlisted
        if self._state.awaited.is_learning or not (self.tombstones or unlisted):
            return  # Hosts may come that are no members yet.
        if not self.is_complete:
            return
        hosts = [host for host in self._state.hosts.values() if not host.is_retired]
        below = min((host.unconfirmed_from for host in hosts), default=ALL_CONFIRMED)
        if below == ALL_CONFIRMED:
            unlisted.clear()
        below = min(below, self.writer.number)
        if self.tombstones.release(below):
            self.writer.drop(below)

    # Hosts that no roster names.

    async def set_floor(self) -> int:
        """Let what unknown hosts have of before now be dead; returns the version up to which."""
        self.roster.floor = self._state.versions.newest
        self.roster.is_complete = True
        await self.writer.save()
        return self.roster.floor

    def find_floor(self, name: str, segment_id: str, disk_id: str) -> tuple[int, int]:
        """Return the versions up to which objects of a host's segment, and disk, are dead."""
        retired, member = self.roster.retired, self.roster.members.get(name)
        known = () if member is None else member.storage

        def find(storage_id: str) -> int:
            floor = -1 if storage_id in known else self.roster.floor
            return max(floor, retired.get(storage_id, -1))

        return find(segment_id), find(disk_id) if disk_id else -1


def _holds_up(host: HostSpace) -> bool:
    return not host.is_retired and host.unconfirmed_from != ALL_CONFIRMED

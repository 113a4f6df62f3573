"""Tombstones of a master: when one is needed, how many there may be, and when they are released.

A tombstone is a key or a prefix, with the version up to which its objects are dead. If an absent
host may have a copy, the tombstone is durable before the caller of the removal, or of the replacing
put, has its answer. It is released when every host that may have a copy has reported and wiped it.
"""

import asyncio
from collections.abc import Sequence

from tandem.core.errors import CapacityError
from tandem.store.election import Roster, RosterStore, RosterWriter, Tombstone, Tombstones
from tandem.store.master.state.space import HostSpace
from tandem.store.master.state.state import StoreState

__all__ = ["ALL_CONFIRMED", "Burials"]

MAX_TOMBSTONES = 200_000
"""Limit of tombstones; above it removals wait. Each takes some 100 bytes in memory and in the
roster's store.
"""
ALL_CONFIRMED = 2**63
"""Value of ``HostSpace.unconfirmed_from`` that means: the host needs no tombstone any more."""
NAMED_HOSTS = 5
"""Number of hosts that an error message names."""
LOOK_S = 0.05


class Burials:
    """The tombstones (removals of objects) of one master, and the roster (the list of hosts) that
    is stored with them.

    Args:
        state: the master's state.
        store: stores both durably; borrowed.
    """

    def __init__(self, state: StoreState, store: RosterStore) -> None:
        self.roster = Roster()
        self.tombstones = Tombstones()
        self.store = store
        self.writer = RosterWriter(store, self.roster, self.tombstones, state.tasks.spawn)
        self.num_lost = 0
        """Number of host losses so far. If it is unchanged, no host was lost in between."""
        self._state = state

    @property
    def is_complete(self) -> bool:
        """True if the roster (the durable list of hosts) names every host that may have objects."""
        return self.roster.is_complete

    @property
    def is_whole(self) -> bool:
        """True if all hosts are connected and have sent their inventories (lists of objects)."""
        hosts = self._state.hosts.values()
        return self.is_complete and all(host.is_settled or host.is_retired for host in hosts)

    @property
    def is_blind(self) -> bool:
        """True if a host may have copies that this master does not know of, since it is absent or
        has not sent its inventory (list of objects).
        """
        if not self.is_complete or self._state.awaited.is_learning:
            return True
        hosts = self._state.hosts.values()
        return any(not (host.is_all_known or host.is_retired) for host in hosts)

    def mark(self, tombstones: Sequence[Tombstone]) -> None:
        """Add tombstones (removals of objects) in memory, so that hosts that have yet to send their
        inventories (lists of objects) do not bring back removed objects.
        """
        if not self.is_whole:
            self.tombstones.add(self.writer.number, tombstones)

    async def bury(self, tombstones: Sequence[Tombstone]) -> None:
        """Add tombstones (removals of objects) durably. On return neither an absent host nor a
        later master can bring back the objects.
        """
        self.tombstones.add(self.writer.number, tombstones)
        await self.writer.add(tombstones)

    async def wait_room(self, count: int, timeout_s: float) -> None:
        """Wait until ``count`` more tombstones (removals of objects) may be added: their number is
        limited, and they are released when absent hosts return.

        Raises: CapacityError after the time limit; it names the hosts whose return is awaited.
        """
        deadline_s = self._state.clock.now_s() + timeout_s
        while len(self.tombstones) + count > MAX_TOMBSTONES:
            if self.is_whole and not len(self.tombstones):
                return  # All tombstones are released, and one request may exceed the limit.
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
        """Note that a host has wiped all its dead objects, so that no tombstone (durable note of a
        removal) is needed because of it.
        """
        host.unconfirmed_from = ALL_CONFIRMED
        for storage_id in (host.segment_id, host.disk_id):
            if self.roster.retired.pop(storage_id, None) is not None:
                self.writer.note_change()
        host.dead_below = host.disk_dead_below = -1

    def note_lost(self, host: HostSpace) -> None:
        """Note that a host is lost: it may keep copies of objects that are removed from now on."""
        self.num_lost += 1
        if host.unconfirmed_from == ALL_CONFIRMED:
            host.unconfirmed_from = self.writer.number

    def release(self) -> None:
        """Release the tombstones (notes of removals) whose objects every host has wiped."""
        unlisted = self._state.unlisted
        if self._state.awaited.is_learning or not (self.tombstones or unlisted):
            return  # Hosts that are not members yet may join.
        if not self.is_complete:
            return
        hosts = [host for host in self._state.hosts.values() if not host.is_retired]
        below = min((host.unconfirmed_from for host in hosts), default=ALL_CONFIRMED)
        if below == ALL_CONFIRMED:
            unlisted.clear()
        below = min(below, self.writer.number)
        if self.tombstones.release(below):
            self.writer.drop(below)

    # The methods below handle hosts that the roster (the durable list of hosts) does not name.

    async def set_floor(self) -> int:
        """Declare dead all current objects of hosts that the roster (the durable list of hosts)
        does not name. Return the version up to which they are dead.
        """
        self.roster.floor = self._state.versions.newest
        self.roster.is_complete = True
        await self.writer.save()
        return self.roster.floor

    def find_floor(self, name: str, segment_id: str, disk_id: str) -> tuple[int, int]:
        """Return the versions up to which objects of a joining host's segment, and of its disk, are
        dead.
        """
        retired, member = self.roster.retired, self.roster.members.get(name)
        known = () if member is None else member.storage

        def find(storage_id: str) -> int:
            floor = -1 if storage_id in known else self.roster.floor
            return max(floor, retired.get(storage_id, -1))

        return find(segment_id), find(disk_id) if disk_id else -1


def _holds_up(host: HostSpace) -> bool:
    return not host.is_retired and host.unconfirmed_from != ALL_CONFIRMED

"""Membership of hosts: which there are, which are lost, drained or retired. ``joining`` has their
sessions.

The list of hosts is stored outside of the master (``roster``), so that a new master knows which
hosts to wait for. A host is *awaited* from its loss, or from this master's start, until it has sent
its inventory or is declared lost: see ``state/awaited.py``.
"""

import asyncio
import logging

from tandem.core.errors import (
    CapacityError,
    ConflictError,
    NotFoundError,
    TandemError,
)
from tandem.store.election import Member
from tandem.store.master.burials import ALL_CONFIRMED, Burials
from tandem.store.master.departures import Departures
from tandem.store.master.puts import Puts
from tandem.store.master.state.space import HostSpace
from tandem.store.master.state.state import StoreState
from tandem.store.messages import (
    Ack,
    DrainHost,
    FloorSet,
    HostStage,
    RetireHost,
    SetFloor,
)
from tandem.store.sessions import Caller

__all__ = ["Membership"]

logger = logging.getLogger(__name__)

LOAD_RETRY_S = 0.25
MAX_MEMBERS = 4_096
"""Limit of hosts in the roster. A further host takes the place of a lost one."""


class Membership:
    """The hosts of one master, over all their sessions.

    Args:
        state: the master's state.
        departures: removes the objects of retired hosts.
        puts: is told which hosts are lost.
        burials: the tombstones, and the roster.
    """

    def __init__(
        self,
        state: StoreState,
        departures: Departures,
        puts: Puts,
        burials: Burials,
    ) -> None:
        self._state = state
        self._departures = departures
        self._puts = puts
        self._awaited = state.awaited
        self._burials = burials
        self._roster = burials.roster
        self._writer = burials.writer
        self.hosts: dict[str, HostSpace] = {}
        """All hosts by name."""
        self._declaring: set[int] = set()

    # The methods below load the roster and change the hosts that it names.

    async def load(self) -> None:
        """Read the roster (the list of hosts) and the tombstones (removals of objects). No host
        joins before this is done.
        """
        while True:
            try:
                saved = await self._burials.store.load()
                break
            except TandemError as error:
                logger.warning("event=roster_unread reason=%s", error)
                await asyncio.sleep(LOAD_RETRY_S)
        config, now_ms, roster = self._state.config, self._state.now_ms(), self._roster
        if saved.roster is None:
            # No roster (list of hosts) was found. Unknown hosts may come during the recovery window
            # (the first seconds of this master) if the store is new, else at any time.
            roster.is_complete, roster.has_waited = saved.is_new, False
            self._writer.note_change()
        else:
            roster.members.update(saved.roster.members)
            roster.retired.update(saved.roster.retired)
            roster.is_complete, roster.floor = saved.roster.is_complete, saved.roster.floor
            roster.has_waited = saved.roster.has_waited
        if not roster.has_waited:
            window_ms = config.recovery_ms if roster.is_complete else config.member_lease_ms
            self._awaited.open_window(now_ms + window_ms)
        tombstones = self._burials.tombstones
        for number, batch in saved.tombstones:
            tombstones.add(number, batch)
        self._writer.number = tombstones.newest_number + 1
        for name, member in self._roster.members.items():
            host = self.make_host(name)
            host.segment_id, host.disk_id = member.segment_id, member.disk_id
            if not member.is_lost:
                self._awaited.until_ms[host.number] = now_ms + config.member_lease_ms
        self._awaited.is_loaded.set()

    def step(self, now_ms: int) -> None:
        """Declare hosts lost whose member lease has ended, and note hosts that have wiped all their
        dead objects.
        """
        # Declare no host lost while none is connected, since the master itself may be cut off.
        can_tell = any(host.is_settled for host in self._state.hosts.values())
        for number, until_ms in list(self._awaited.until_ms.items()):
            if can_tell and until_ms <= now_ms and number not in self._declaring:
                self._declaring.add(number)
                self._state.tasks.spawn(self._declare_lost(self._state.hosts[number]))
        for host in self._state.hosts.values():
            if host.is_settled and host.unconfirmed_from != ALL_CONFIRMED:
                host.purging = [future for future in host.purging if not future.done()]
                if not host.purging:
                    self._burials.note_confirmed(host)
        if not self._roster.has_waited and not self._awaited.is_window_open:
            self._roster.has_waited = True
            self._writer.note_change()
        self._burials.release()

    async def _declare_lost(self, host: HostSpace) -> None:
        """Declare a host lost. The declaration is durable before any caller sees its
        consequences.
        """
        member = self._roster.members.get(host.name)
        try:
            if member is not None and not member.is_lost:
                lost = Member(member.segment_id, member.disk_id, is_lost=True)
                self._roster.members[host.name] = lost
                await self._writer.save()
                if self._roster.members.get(host.name) is not lost:
                    return  # The host has returned or was retired meanwhile.
            if self._awaited.until_ms.pop(host.number, None) is not None:
                logger.warning("event=host_declared_lost host=%s", host.name)
        finally:
            self._declaring.discard(host.number)

    async def enroll(self, host: HostSpace) -> None:
        """Record a joining host durably in the roster (the list of hosts that may hold objects),
        before it gets any.
        """
        wanted = Member(host.segment_id, host.disk_id)
        member = self._roster.members.get(host.name)
        if member != wanted:
            if member is None:
                self._make_room()
            else:
                # The host joins with another segment or disk: from now on its name stands for the
                # new one, and objects in the old one are dead.
                for old, new in zip(member.storage, wanted.storage, strict=True):
                    if old != new:
                        self._roster.retire(old, self._state.versions.newest)
            self._roster.members[host.name] = wanted
            await self._writer.save()
        else:
            await self._writer.settle()  # The save of an earlier join may still be running.

    def _make_room(self) -> None:
        members = self._roster.members
        if len(members) < MAX_MEMBERS:
            return
        lost = next((name for name, member in members.items() if member.is_lost), None)
        if lost is None:
            raise CapacityError("store.join", f"{len(members)} hosts, the limit")
        self.retire_host(self.hosts[lost])

    async def retire(self, _: Caller, request: RetireHost) -> Ack:
        """Retire an absent host.

        Raises: NotFoundError if there is no host of this name, or it was retired before;
            ConflictError if it is connected.
        """
        await self._awaited.is_loaded.wait()
        host = self.hosts.get(request.name)
        if host is None or host.is_retired:
            raise NotFoundError("store.retire", f"no host {request.name!r}", field="name")
        if host.caller is not None:
            raise ConflictError(
                "store.retire", f"{request.name} is connected: drain and stop it", field="name"
            )
        self.retire_host(host)
        await self._writer.save()
        return Ack()

    def retire_host(self, host: HostSpace) -> None:
        """Take a host off the roster (the list of hosts), and remove its objects."""
        member = self._roster.members.pop(host.name, None)
        if member is not None:
            for storage_id in member.storage:
                self._roster.retire(storage_id, self._state.versions.newest)
        self._awaited.until_ms.pop(host.number, None)
        host.is_retired = True
        logger.warning("event=host_retired host=%s", host.name)
        self.forget_segment(host)
        for row in self._state.directory.copies.rows_on_disk(host.number):
            self._departures.lose_disk(row, host.number)
        host.is_disk_known = False

    async def set_floor(self, _: Caller, request: SetFloor) -> FloorSet:
        """Declare dead the current objects of hosts that the roster (the durable list of hosts)
        does not name. Raises: ConflictError while absent hosts are awaited.

        A dry run only reports the effect.
        """
        await self._awaited.is_loaded.wait()
        if not request.dry_run and self._awaited.is_learning:
            raise ConflictError(
                "store.set_floor",
                "hosts are still waited for (`tandem store stat` says recovering): start all that "
                "are to keep their objects, wait for the end of member_lease_ms, then repeat",
            )
        num_tombstones = len(self._burials.tombstones)
        hosts = list(self._roster.members)
        version = self._state.versions.newest
        if not request.dry_run:
            version = await self._burials.set_floor()
            logger.warning("event=floor_set version=%d", version)
        return FloorSet(version, self._burials.is_complete, num_tombstones, hosts)

    # The methods below begin and end the sessions of hosts, and take their reports.

    async def drain(self, _: Caller, request: DrainHost) -> Ack:
        """Start to move all objects off a host.

        Raises: NotFoundError (no host of this name is connected).
        """
        host = self.hosts.get(request.name)
        if host is None or host.caller is None:
            raise NotFoundError("store.drain", f"no host {request.name!r}", field="name")
        host.is_leaving = True
        if host.stage is HostStage.ACTIVE:
            host.stage = HostStage.DRAINING
        return Ack()

    def make_host(self, name: str) -> HostSpace:
        """Add a host that this master does not know yet, without a session."""
        state = self._state
        host = HostSpace(
            len(state.hosts),
            name,
            state.clock,
            state.versions.order_epoch,
            state.space_freed.set,
            state.config.lease_ms,
        )
        state.hosts[host.number] = self.hosts[name] = host
        return host

    def await_host(self, host: HostSpace) -> None:
        """Wait for a host's return and inventory (list of objects) for a full member lease."""
        self._awaited.until_ms[host.number] = (
            self._state.now_ms() + self._state.config.member_lease_ms
        )

    def forget_segment(self, host: HostSpace) -> None:
        """Remove the objects in a host's memory, which is gone."""
        for row in self._state.directory.copies.rows_on_host(host.number):
            self._departures.drop_replica(row, host.number)
        host.is_known = False

    def lose_host(self, host: HostSpace) -> None:
        """Note that a host's session has ended. Its objects stay in the directory, unreadable, and
        may return with it.
        """
        logger.warning("event=host_lost host=%s", host.name)
        self._burials.note_lost(host)
        for key in self._state.wipes.list_keys():
            self._state.note_unlisted(key)  # The host may keep the copies that are being wiped.
        if host.is_settled:
            self.await_host(host)
        self._puts.forget_host(host.number)
        self._state.sessions.pop(host.session, None)
        host.end_session()
        self._state.directory.copies.lose_host(host.number)
        self._state.counters.hosts_lost += 1

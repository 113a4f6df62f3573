"""Membership of hosts: they join, send their inventory, leave and are lost.

The list of hosts is stored outside of the master (``roster``), so that a new master knows which
hosts to wait for. A host is *awaited* from its loss, or from this master's start, until it has sent
its inventory or is declared lost: see ``state/awaited.py``.
"""

import asyncio
import itertools
import logging
from collections.abc import Mapping

import numpy as np

from tandem.core.errors import (
    CapacityError,
    ConflictError,
    NotFoundError,
    PeerLostError,
    TandemError,
)
from tandem.store.election import Member, RosterStore
from tandem.store.formats import layout
from tandem.store.master.adoption import Adoption
from tandem.store.master.burials import ALL_CONFIRMED, Burials
from tandem.store.master.departures import Departures
from tandem.store.master.eviction import Eviction
from tandem.store.master.puts import Puts
from tandem.store.master.state.index import NO_ROW
from tandem.store.master.state.space import HostSpace
from tandem.store.master.state.state import StoreState
from tandem.store.messages import (
    Ack,
    DiskReport,
    DrainHost,
    FloorSet,
    HostStage,
    InventoryDone,
    InventoryPage,
    Joined,
    JoinHost,
    KeyBytes,
    LeaveStore,
    RetireHost,
    SegmentGrown,
    SetFloor,
)
from tandem.store.sessions import Caller, check_present

__all__ = ["Membership"]

logger = logging.getLogger(__name__)

LOAD_RETRY_S = 0.25
MAX_MEMBERS = 4_096
"""Limit of hosts in the roster. A further host takes the place of a lost one."""


class Membership:
    """The hosts of one master, over all their sessions.

    Args:
        state: the master's state.
        departures: removes objects that hosts no longer have or must not have.
        eviction: is told when there may be surplus copies.
        puts: is told which hosts are lost.
        burials: the tombstones, and the roster.
        store: stores the membership durably; borrowed.
    """

    def __init__(
        self,
        state: StoreState,
        departures: Departures,
        eviction: Eviction,
        puts: Puts,
        burials: Burials,
        *,
        store: RosterStore,
    ) -> None:
        self._state = state
        self._departures = departures
        self._eviction = eviction
        self._puts = puts
        self._store = store
        self._awaited = state.awaited
        self._burials = burials
        self._roster = burials.roster
        self._writer = burials.writer
        self._adoption = Adoption(state, departures, burials.tombstones)
        self._names: dict[str, HostSpace] = {}
        self._by_session: dict[int, HostSpace] = {}
        self._num_sessions = 0
        self._declaring: set[int] = set()

    # The methods below load the roster and change the hosts that it names.

    async def load(self) -> None:
        """Read the roster (the list of hosts) and the tombstones (removals of objects). No host
        joins before this is done.
        """
        while True:
            try:
                saved = await self._store.load()
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
            host = self._make_host(name)
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

    async def _enroll(self, host: HostSpace) -> None:
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
        self._retire(self._names[lost])

    async def retire(self, _: Caller, request: RetireHost) -> Ack:
        """Retire an absent host. Raises: NotFoundError; ConflictError if it is connected."""
        await self._awaited.is_loaded.wait()
        host = self._names.get(request.name)
        if host is None or host.is_retired:
            raise NotFoundError("store.retire", f"no host {request.name!r}", field="name")
        if host.caller is not None:
            raise ConflictError(
                "store.retire", f"{request.name} is connected: drain and stop it", field="name"
            )
        self._retire(host)
        await self._writer.save()
        return Ack()

    async def leave(self, caller: Caller, request: LeaveStore) -> Ack:
        """Note that a host ends and its data is removed. The answer comes when no later master will
        wait for the host.
        """
        host = self._joining(caller, request.session)
        self.lose_host(host)
        self._retire(host)
        await self._writer.save()
        return Ack()

    def _retire(self, host: HostSpace) -> None:
        member = self._roster.members.pop(host.name, None)
        if member is not None:
            for storage_id in member.storage:
                self._roster.retire(storage_id, self._state.versions.newest)
        self._awaited.until_ms.pop(host.number, None)
        host.is_retired = True
        logger.warning("event=host_retired host=%s", host.name)
        self._forget_segment(host)
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
        """Start to move all objects off a host. Raises: NotFoundError."""
        host = self._names.get(request.name)
        if host is None or host.caller is None:
            raise NotFoundError("store.drain", f"no host {request.name!r}", field="name")
        host.is_leaving = True
        if host.stage is HostStage.ACTIVE:
            host.stage = HostStage.DRAINING
        return Ack()

    async def join(self, caller: Caller, request: JoinHost) -> Joined:
        """Begin a session with a host. Raises: CapacityError while another host has its name."""
        await self._awaited.is_loaded.wait()
        check_present(caller)
        host = self._names.get(request.name)
        if host is not None and host.caller is caller and request.attempt <= host.attempt:
            # The request to join is a late or repeated copy: answer with the session that the first
            # copy began.
            return Joined(self._state.versions.epoch, host.number, host.session)
        if host is not None and host.caller is not None:
            if host.segment_id != request.segment_id:
                # The caller may be the same host, restarted without its memory. The earlier session
                # under this name ends with its lease.
                what = f"a host {request.name!r} is there already: wait for the end of its lease"
                raise CapacityError("store.join", what, field="name")
            self.lose_host(host)  # The same host over a new connection.
        if request.epoch_seen > self._state.versions.epoch:
            self._state.versions.outbid(request.epoch_seen)
        if host is None:
            host = self._make_host(request.name)
        elif host.segment_id != request.segment_id:
            self._forget_segment(host)
        self._num_sessions += 1
        self._by_session[self._num_sessions] = host
        self._begin_session(host, caller, request)
        logger.info("event=host_joining host=%s session=%d", host.name, host.session)
        return Joined(self._state.versions.epoch, host.number, host.session)

    def _make_host(self, name: str) -> HostSpace:
        state = self._state
        host = HostSpace(
            len(state.hosts),
            name,
            state.clock,
            state.versions.order_epoch,
            state.space_freed.set,
            state.config.lease_ms,
        )
        state.hosts[host.number] = self._names[name] = host
        return host

    def _begin_session(self, host: HostSpace, caller: Caller, request: JoinHost) -> None:
        host.is_retired = False
        host.begin_session(caller, self._num_sessions, request)
        host.dead_below, host.disk_dead_below = self._burials.find_floor(
            request.name, request.segment_id, request.disk_id
        )
        if self._awaited.is_window_open and host.name not in self._roster.members:
            self._await_host(host)  # The host may be a former member that the roster lost.
        self._state.directory.copies.find_host(host.number)

    def _await_host(self, host: HostSpace) -> None:
        self._awaited.until_ms[host.number] = (
            self._state.now_ms() + self._state.config.member_lease_ms
        )

    def _forget_segment(self, host: HostSpace) -> None:
        for row in self._state.directory.copies.rows_on_host(host.number):
            self._departures.drop_replica(row, host.number)
        host.is_known = False

    def _joining(self, caller: Caller, session: int) -> HostSpace:
        host = self._by_session.get(session)
        if host is None or host.session != session or host.caller is not caller:
            raise PeerLostError("store.join", f"session {session} is over: join again")
        return host

    async def inventory(self, caller: Caller, page: InventoryPage) -> Ack:
        """Take one page of a joining host's inventory, the list of objects that it has.

        Raises: ConflictError (the page is not the next one).
        """
        host = self._joining(caller, page.session)
        if page.page < host.num_pages:
            return Ack()  # A repeated copy of the page.
        if page.page > host.num_pages:
            raise ConflictError("store.join", f"page {page.page} before page {host.num_pages}")
        newest = max(page.records.versions, default=0)
        if newest > self._state.versions.newest:
            # The host has a version above all of this master: a master of the same epoch gave it,
            # and its record of the epoch was lost with its machine, while the host kept its data.
            # Raise the epoch, so that no version is given twice.
            try:
                self._state.versions.outbid(newest >> layout.VERSION_BITS)
            except ConflictError:
                # Stop waiting for the rest of the host's inventory, unless the host is a member of
                # the roster.
                self.lose_host(host)
                if host.name not in self._roster.members:
                    self._awaited.until_ms.pop(host.number, None)
                raise
        host.num_pages += 1
        if host.number in self._awaited:
            self._await_host(host)
        self._adoption.take_page(host, page.records, is_disk=page.is_disk)
        return Ack()

    async def disk_report(self, caller: Caller, report: DiskReport) -> KeyBytes:
        """Apply a report of changes on a host's disk. The answer tells the host which of the
        objects that it has written to the disk to keep there.

        Raises: ConflictError (the inventory is not complete, or a later report has come).
        """
        # Wait for running commits of the reported keys: a host may write an object to its disk
        # before this master has its answer to the seal order, when the directory does not list the
        # object yet.
        while busy := self._find_commit(report.stored):
            await asyncio.shield(busy)
        host = self._joining(caller, report.session)
        directory = self._state.directory
        if host.stage is HostStage.JOINING or report.number < host.disk_number:
            raise ConflictError("store.disk", f"report {report.number} comes early, or late")
        if report.number > host.disk_number:
            host.disk_number, host.disk = report.number, report.status
            for key, version in report.dropped.items():
                row = directory.find(key)
                is_same = row != NO_ROW and directory.version[row] == version
                if is_same and host.number in directory.copies.disks(row):
                    self._departures.lose_disk(row, host.number)
        flags = bytearray(len(report.stored))
        for i, (key, version) in enumerate(report.stored.items()):
            row = directory.find(key)
            if row == NO_ROW or directory.version[row] != version or host.is_leaving:
                continue
            if host.drops.is_forgetting(key, version):
                # The object was evicted while the host's report was on its way, so that the host is
                # about to forget its copy on the disk.
                continue
            if host.number not in directory.copies.disks(row):
                directory.copies.add_disk(row, host.number)
            flags[i] = 1
        return KeyBytes(bytes(flags))

    def _find_commit(self, stored: Mapping[str, int]) -> "asyncio.Future[None] | None":
        """Return a future that is done when the commit (the end of the put) of one of these stored
        objects has ended; None if none is being committed. ``stored`` has versions by key.
        """
        directory = self._state.directory
        for key, version in stored.items():
            busy = self._state.committing.get(key)
            if busy is not None:
                row = directory.find(key)
                if row == NO_ROW or directory.version[row] < version:
                    return busy
        return None

    async def inventory_done(self, caller: Caller, request: InventoryDone) -> Ack:
        """Note that a host's inventory (list of objects) is complete, and whether no client can
        write there any more by a right from an earlier session.

        Raises: ConflictError (pages are missing).
        """
        host = self._joining(caller, request.session)
        if request.num_pages != host.num_pages:
            raise ConflictError(
                "store.join", f"{host.num_pages} pages of {request.num_pages} have come"
            )
        host.damaged = request.damaged
        if host.stage is HostStage.JOINING:
            await self._enroll(host)
            host = self._joining(caller, request.session)
        if host.stage is HostStage.JOINING:
            self._settle(host)
        if request.can_write and host.stage is HostStage.READ_ONLY:
            host.stage = HostStage.DRAINING if host.is_leaving else HostStage.ACTIVE
            self._state.space_freed.set()
        return Ack()

    def _settle(self, host: HostSpace) -> None:
        """Apply the complete inventory (list of objects) of a host: copies that it does not list
        are removed from the directory, and all space without a listed object is free.
        """
        rows, offsets = self._state.directory.copies.places_with(host.number)
        # Use numpy columns: a host may have a million objects, and a loop over them would delay
        # other calls.
        confirmed = map(host.confirmed.get, rows.tolist(), itertools.repeat(0))
        lengths = np.fromiter(confirmed, np.uint64, len(rows))
        for row in rows[lengths == 0].tolist():
            self._forget_replica(row, host.number)
        offsets, lengths = offsets[lengths > 0], lengths[lengths > 0]
        for row in self._state.directory.copies.rows_on_disk(host.number):
            if host.confirmed_disk.get(row) != self._state.directory.version[row]:
                self._departures.lose_disk(row, host.number)
        host.is_disk_known = host.disk is not None
        host.confirmed_disk.clear()
        host.rebuild(offsets, lengths)
        if not any(other.is_settled for other in self._state.hosts.values()):
            # Await the other absent hosts for a full member lease from now on: while no host was
            # connected, the master itself may have been cut off, and other hosts may be returning
            # as well.
            for number in self._awaited.until_ms:
                self._await_host(self._state.hosts[number])
        host.is_known = True
        host.confirmed.clear()
        host.stage = HostStage.READ_ONLY
        self._awaited.until_ms.pop(host.number, None)
        self._eviction.note_surplus()
        logger.info("event=host_joined host=%s objects=%d", host.name, len(offsets))

    def _forget_replica(self, row: int, host: int) -> None:
        """Remove a copy that the host does not have from the directory; there is nothing to
        wipe.
        """
        directory = self._state.directory
        directory.copies.drop_replica(row, host)
        if not directory.copies.has_any(row):
            directory.remove(row)

    async def grown(self, caller: Caller, request: SegmentGrown) -> Ack:
        """Note that more of a host's segment is usable, or that it grows no more."""
        host = self._joining(caller, request.session)
        host.grow(request.capacity_bytes, request.final_bytes)
        return Ack()

    def lose_host(self, host: HostSpace) -> None:
        """Note that a host's session has ended. Its objects stay in the directory, unreadable, and
        may return with it.
        """
        logger.warning("event=host_lost host=%s", host.name)
        self._burials.note_lost(host)
        self._departures.note_lost()
        if host.is_settled:
            self._await_host(host)
        self._puts.forget_host(host.number)
        self._by_session.pop(host.session, None)
        host.end_session()
        self._state.directory.copies.lose_host(host.number)
        self._state.counters.hosts_lost += 1

"""Sessions of hosts: a host joins, sends its inventory, and reports changes."""

import asyncio
import itertools
import logging
from collections.abc import Mapping

import numpy as np

from tandem.core.errors import CapacityError, ConflictError, PeerLostError
from tandem.store.formats import layout
from tandem.store.master.adoption import Adoption
from tandem.store.master.burials import Burials
from tandem.store.master.departures import Departures
from tandem.store.master.eviction import Eviction
from tandem.store.master.membership import Membership
from tandem.store.master.state.index import NO_ROW
from tandem.store.master.state.space import HostSpace
from tandem.store.master.state.state import StoreState
from tandem.store.messages import (
    Ack,
    DiskReport,
    HostStage,
    InventoryDone,
    InventoryPage,
    Joined,
    JoinHost,
    KeyBytes,
    LeaveStore,
    SegmentGrown,
)
from tandem.store.sessions import Caller, check_present

__all__ = ["Joining"]

logger = logging.getLogger(__name__)


class Joining:
    """The handlers of one master for hosts that join, report and leave.

    Args:
        state: the master's state.
        departures: removes objects that hosts no longer have or must not have.
        eviction: is told when there may be surplus copies.
        burials: the tombstones, and the roster.
        membership: the hosts over all their sessions.
    """

    def __init__(
        self,
        state: StoreState,
        departures: Departures,
        eviction: Eviction,
        burials: Burials,
        membership: Membership,
    ) -> None:
        self._state = state
        self._departures = departures
        self._eviction = eviction
        self._burials = burials
        self._membership = membership
        self._adoption = Adoption(state, departures, burials.tombstones)
        self._num_sessions = 0

    async def join(self, caller: Caller, request: JoinHost) -> Joined:
        """Begin a session with a host. Raises: CapacityError while another host has its name."""
        await self._state.awaited.is_loaded.wait()
        check_present(caller)
        host = self._membership.hosts.get(request.name)
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
            self._membership.lose_host(host)  # The same host over a new connection.
        if request.epoch_seen > self._state.versions.epoch:
            self._state.versions.outbid(request.epoch_seen)
        if host is None:
            host = self._membership.make_host(request.name)
        elif host.segment_id != request.segment_id:
            self._membership.forget_segment(host)
        self._num_sessions += 1
        self._state.sessions[self._num_sessions] = host
        self._begin_session(host, caller, request)
        logger.info("event=host_joining host=%s session=%d", host.name, host.session)
        return Joined(self._state.versions.epoch, host.number, host.session)

    def _begin_session(self, host: HostSpace, caller: Caller, request: JoinHost) -> None:
        host.is_retired = False
        host.begin_session(caller, self._num_sessions, request)
        host.dead_below, host.disk_dead_below = self._burials.find_floor(
            request.name, request.segment_id, request.disk_id
        )
        if self._state.awaited.is_window_open and host.name not in self._burials.roster.members:
            # The host may be a former member that the roster lost.
            self._membership.await_host(host)
        self._state.directory.copies.find_host(host.number)

    def _find_host(self, caller: Caller, session: int) -> HostSpace:
        host = self._state.sessions.get(session)
        if host is None or host.session != session or host.caller is not caller:
            raise PeerLostError("store.join", f"session {session} is over: join again")
        return host

    async def inventory(self, caller: Caller, page: InventoryPage) -> Ack:
        """Take one page of a joining host's inventory, the list of objects that it has.

        Raises: ConflictError (the page is not the next one).
        """
        host = self._find_host(caller, page.session)
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
                self._membership.lose_host(host)
                if host.name not in self._burials.roster.members:
                    self._state.awaited.until_ms.pop(host.number, None)
                raise
        host.num_pages += 1
        if host.number in self._state.awaited:
            self._membership.await_host(host)
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
        host = self._find_host(caller, report.session)
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
        host = self._find_host(caller, request.session)
        if request.num_pages != host.num_pages:
            raise ConflictError(
                "store.join", f"{host.num_pages} pages of {request.num_pages} have come"
            )
        host.damaged = request.damaged
        if host.stage is HostStage.JOINING:
            await self._membership.enroll(host)
            host = self._find_host(caller, request.session)
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
            for number in self._state.awaited.until_ms:
                self._membership.await_host(self._state.hosts[number])
        host.is_known = True
        host.confirmed.clear()
        host.stage = HostStage.READ_ONLY
        self._state.awaited.until_ms.pop(host.number, None)
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
        host = self._find_host(caller, request.session)
        host.grow(request.capacity_bytes, request.final_bytes)
        return Ack()

    async def leave(self, caller: Caller, request: LeaveStore) -> Ack:
        """Note that a host ends and its data is removed. The answer comes when no later master will
        wait for the host.
        """
        host = self._find_host(caller, request.session)
        self._membership.lose_host(host)
        self._membership.retire_host(host)
        await self._burials.writer.save()
        return Ack()

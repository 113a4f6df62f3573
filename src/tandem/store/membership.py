"""Hosts of a master: they join, tell what they hold, leave and are lost."""

import logging
from typing import TYPE_CHECKING

from tandem.core.errors import ConflictError, NotFoundError, PeerLostError, TandemError
from tandem.store import layout
from tandem.store.headers import ExtentHeader
from tandem.store.index import NO_ROW, Replica
from tandem.store.messages import (
    Ack,
    DiskReport,
    DrainHost,
    HostStage,
    InventoryDone,
    InventoryPage,
    Joined,
    JoinHost,
    KeyBytes,
    SegmentGrown,
)
from tandem.store.orders import OrderLine
from tandem.store.segment import iterate_records
from tandem.store.sessions import Caller, check_present
from tandem.store.space import Extent, HostSpace

if TYPE_CHECKING:
    from tandem.store.master import OpenWay, StoreMaster

__all__ = ["Membership"]

logger = logging.getLogger(__name__)


class Membership:
    """The hosts of one master, over all their sessions."""

    def __init__(self, master: "StoreMaster") -> None:
        self._master = master
        self._names: dict[str, HostSpace] = {}
        self._by_session: dict[int, HostSpace] = {}
        self._num_sessions = 0

    async def drain(self, _: Caller, request: DrainHost) -> Ack:
        """Have a host emptied. Raises: NotFoundError."""
        host = self._names.get(request.name)
        if host is None or host.caller is None:
            raise NotFoundError("store.drain", f"no host {request.name!r}", field="name")
        host.is_leaving = True
        if host.stage is HostStage.ACTIVE:
            host.stage = HostStage.DRAINING
        return Ack()

    async def join(self, caller: Caller, request: JoinHost) -> Joined:
        """Begin a session with a host. Raises: ConflictError if its name is taken."""
        check_present(caller)
        host = self._names.get(request.name)
        if host is not None and host.caller is caller and request.attempt <= host.attempt:
            return Joined(self._master.epoch, host.number, host.session)  # It came late, or twice.
        if host is not None and host.caller is not None:
            if host.segment_id != request.segment_id:
                raise ConflictError(
                    "store.join", f"a host {request.name!r} is there already", field="name"
                )
            self.lose_host(host)  # The same one, by a new connection.
        if request.epoch_seen > self._master.epoch:
            self._master.outbid(request.epoch_seen)
        if host is None:
            number = len(self._master.hosts)
            host = HostSpace(
                number,
                request.name,
                self._master.clock,
                self._master.order_epoch,
                self._master.space_freed.set,
                self._master.config.lease_ms,
            )
            self._master.hosts[number] = self._names[request.name] = host
        elif host.segment_id != request.segment_id:
            self._forget_segment(host)
        self._num_sessions += 1
        self._by_session[self._num_sessions] = host
        host.begin_session(caller, self._num_sessions, request)
        self._master.directory.find_host(host.number)
        logger.info("event=host_joining host=%s session=%d", host.name, host.session)
        if request.call_token and self._master.open_way is not None and host.line is not None:
            host.spawn(self._open_way(host.line, self._master.open_way, request))
        return Joined(self._master.epoch, host.number, host.session)

    async def _open_way(self, line: OrderLine, open_way: "OpenWay", request: JoinHost) -> None:
        """Let orders of this session go a faster way as soon as there is one."""
        try:
            line.use(await open_way(request))
        except TandemError as error:
            logger.info("event=fast_orders_off reason=%s", error)

    def _forget_segment(self, host: HostSpace) -> None:
        for row in self._master.directory.rows_on_host(host.number):
            self._master.drop_replica(row, host.number)
        host.is_known = False

    def _joining(self, caller: Caller, session: int) -> HostSpace:
        host = self._by_session.get(session)
        if host is None or host.session != session or host.caller is not caller:
            raise PeerLostError("store.join", f"session {session} is over: join again")
        return host

    async def inventory(self, caller: Caller, page: InventoryPage) -> Ack:
        """Take one page of what a joining host holds."""
        host = self._joining(caller, page.session)
        if page.page < host.num_pages:
            return Ack()  # It came twice.
        if page.page > host.num_pages:
            raise ConflictError("store.join", f"page {page.page} before page {host.num_pages}")
        newest = max(page.records.versions, default=0)
        if newest > self._master.newest_version:
            # By a master of our number that we know nothing of: its note of it was lost with the
            # machine, the disk was not. No version must be given twice.
            try:
                self._master.outbid(newest >> layout.VERSION_BITS)
            except ConflictError:
                self.lose_host(host)  # Or all would wait for the rest of its inventory.
                raise
        host.num_pages += 1
        listed = iterate_records(page.records)
        if page.is_disk:
            for _, header in listed:
                self._adopt_disk(host, header)
        else:
            for offset, header in self._adopt_new(host, listed):
                self._adopt(host, offset, header)
        return Ack()

    def _adopt_new(
        self, host: HostSpace, listed: list[tuple[int, ExtentHeader]]
    ) -> list[tuple[int, ExtentHeader]]:
        """Take at once what nothing is known of, nearly all after a restart; return the rest."""
        if host.is_known:
            return listed
        find, dropped = self._master.directory.find, self._master.dropped_versions
        new: dict[str, tuple[int, ExtentHeader]] = {}
        rest: list[tuple[int, ExtentHeader]] = []
        for item in listed:
            offset, header = item
            key = header.key
            is_plain = not header.hard_pin and not header.soft_pin_ms
            is_new = find(key) == NO_ROW and key not in new and key not in dropped
            if is_new and is_plain and not host.is_dropping(offset):
                new[key] = item
            else:
                rest.append(item)
        headers = [header for _, header in new.values()]
        lengths = [layout.extent_bytes(len(h.key.encode()), h.size) for h in headers]
        offsets = [offset for offset, _ in new.values()]
        rows = self._master.directory.insert_many(
            list(new),
            sizes=[header.size for header in headers],
            checksums=[header.checksum for header in headers],
            versions=[header.version for header in headers],
            wanted=[header.wanted for header in headers],
            host=host.number,
            offsets=offsets,
            # A reader that an earlier master sent there may still be reading.
            lease_until_ms=self._master.now_ms() + self._master.config.lease_ms,
        )
        host.confirmed.update(zip(rows, map(Extent, offsets, lengths), strict=True))
        return rest

    def _adopt(self, host: HostSpace, offset: int, header: ExtentHeader) -> None:
        """Fit an object that a host reports into the directory, or have it wiped."""
        directory = self._master.directory
        row = directory.find(header.key)
        listed = None
        if row != NO_ROW:
            listed = next((r for r in directory.replicas(row) if r.host == host.number), None)
        is_same = row != NO_ROW and directory.version(row) == header.version
        length = layout.extent_bytes(len(header.key.encode()), header.size)
        if is_same and listed is not None and listed.offset == offset:
            host.confirmed[row] = Extent(offset, length)
            return
        if host.is_dropping(offset):
            return  # Removed since its inventory began.
        newest = self._master.dropped_versions.get(header.key, -1)
        is_newer = header.version > (newest if row == NO_ROW else directory.version(row))
        if (is_newer and not host.is_known) or (is_same and listed is None):
            replica = Replica(host.number, offset)
            if is_same:
                directory.add_replica(row, replica)
            else:
                if row != NO_ROW:
                    self._master.drop_row(row)
                row = directory.insert(
                    header.key,
                    size=header.size,
                    checksum=header.checksum,
                    version=header.version,
                    replicas=[replica],
                    wanted=header.wanted,
                )
                self._set_pins(row, header)
            # A reader that an earlier master sent there may still be reading.
            directory.extend_lease(row, self._master.now_ms() + self._master.config.lease_ms)
            host.confirmed[row] = Extent(offset, length)
            return
        free_at_ms = self._master.now_ms() + self._master.config.lease_ms
        self._master.wipe_copy(header.key, host, Extent(offset, length), free_at_ms)

    def _set_pins(self, row: int, header: ExtentHeader) -> None:
        if header.hard_pin or header.soft_pin_ms:
            soft = self._master.now_ms() + header.soft_pin_ms if header.soft_pin_ms else 0
            self._master.directory.set_pins(row, hard=header.hard_pin, soft_until_ms=soft)

    def _adopt_disk(self, host: HostSpace, header: ExtentHeader) -> None:
        """Fit an object that a host has on its disk into the directory, or have it forgotten."""
        directory = self._master.directory
        row = directory.find(header.key)
        newest = self._master.dropped_versions.get(header.key, -1)
        if row != NO_ROW:
            newest = directory.version(row)
        is_same = row != NO_ROW and newest == header.version
        if is_same and directory.checksum(row) == header.checksum:
            if host.number not in directory.disks(row):
                directory.add_disk(row, host.number)
        elif header.version > newest and not host.is_disk_known:
            if row != NO_ROW:
                self._master.drop_row(row)
            row = directory.insert(
                header.key,
                size=header.size,
                checksum=header.checksum,
                version=header.version,
                replicas=[],
                wanted=header.wanted,
                disks=[host.number],
            )
            self._set_pins(row, header)
        else:
            forgotten = host.forget(header.key, header.version)
            self._master.removals.note_going(header.key, [forgotten])
            return
        host.confirmed_disk[row] = header.version

    async def disk_report(self, caller: Caller, report: DiskReport) -> KeyBytes:
        """Take news of a host's disk; answers which of the objects stored there it should keep."""
        host = self._joining(caller, report.session)
        directory = self._master.directory
        if host.stage is HostStage.JOINING or report.number < host.disk_number:
            raise ConflictError("store.disk", f"report {report.number} comes early, or late")
        if report.number > host.disk_number:
            host.disk_number, host.disk = report.number, report.status
            for key, version in report.dropped.items():
                row = directory.find(key)
                is_same = row != NO_ROW and directory.version(row) == version
                if is_same and host.number in directory.disks(row):
                    self._master.lose_disk(row, host.number)
        flags = bytearray(len(report.stored))
        for i, (key, version) in enumerate(report.stored.items()):
            row = directory.find(key)
            if row == NO_ROW or directory.version(row) != version or host.is_leaving:
                continue
            if host.number not in directory.disks(row):
                directory.add_disk(row, host.number)
            flags[i] = 1
        return KeyBytes(bytes(flags))

    async def inventory_done(self, caller: Caller, request: InventoryDone) -> Ack:
        """All pages have come; and whether all writers of before are gone."""
        host = self._joining(caller, request.session)
        if request.num_pages != host.num_pages:
            raise ConflictError(
                "store.join", f"{host.num_pages} pages of {request.num_pages} have come"
            )
        host.damaged = request.damaged
        if host.stage is HostStage.JOINING:
            self._settle(host)
        if request.can_write and host.stage is HostStage.READ_ONLY:
            host.stage = HostStage.DRAINING if host.is_leaving else HostStage.ACTIVE
            self._master.space_freed.set()
        return Ack()

    def _settle(self, host: HostSpace) -> None:
        """The inventory is complete: what it does not have is not there; the rest is free."""
        extents: list[Extent] = []
        for row in self._master.directory.rows_on_host(host.number):
            extent = host.confirmed.get(row)
            if extent is None:
                self._forget_replica(row, host.number)
            else:
                extents.append(extent)
        for row in self._master.directory.rows_on_disk(host.number):
            if host.confirmed_disk.get(row) != self._master.directory.version(row):
                self._master.lose_disk(row, host.number)
        host.is_disk_known = host.disk is not None
        host.confirmed_disk.clear()
        host.rebuild(extents)
        host.is_known = True
        host.confirmed.clear()
        host.stage = HostStage.READ_ONLY
        logger.info("event=host_joined host=%s objects=%d", host.name, len(extents))

    def _forget_replica(self, row: int, host: int) -> None:
        """The copy is not there; nothing to wipe."""
        self._master.directory.drop_replica(row, host)
        if not self._master.directory.replicas(row) and not self._master.directory.disks(row):
            self._master.directory.remove(row)

    async def grown(self, caller: Caller, request: SegmentGrown) -> Ack:
        """More of a host's segment is usable."""
        host = self._joining(caller, request.session)
        host.grow(request.capacity_bytes, request.final_bytes)
        return Ack()

    def lose_host(self, host: HostSpace) -> None:
        """Its session has ended; its objects may come back with it."""
        logger.warning("event=host_lost host=%s", host.name)
        self._master.puts.forget_host(host.number)
        self._by_session.pop(host.session, None)
        host.end_session()
        self._master.directory.lose_host(host.number)
        self._master.counters.hosts_lost += 1

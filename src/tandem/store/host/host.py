"""A host's side of the store: joins masters with what its segment and its disk have, and executes
the orders of one of them, see ``orders``.

Logic only: effects go through ``HostPort`` (the data path) and the ``Peer`` of the control channel,
so that the simulator runs this same class.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

from tandem.core.errors import (
    ConflictError,
    PeerLostError,
    TandemError,
)
from tandem.store.formats import layout
from tandem.store.formats.headers import MAX_EPOCH, ExtentHeader
from tandem.store.formats.records import append_record
from tandem.store.host.disk import DiskTier
from tandem.store.host.orders import HostOrders, HostPort
from tandem.store.host.segment import HostSegment
from tandem.store.messages import (
    Ack,
    DiskReport,
    ExtentRecords,
    InventoryDone,
    InventoryPage,
    Joined,
    JoinHost,
    KeyBytes,
    LeaveStore,
    SegmentGrown,
)
from tandem.store.sessions import Caller
from tandem.store.tasks import Tasks

__all__ = ["StoreHost"]

logger = logging.getLogger(__name__)

PAGE_OBJECTS = 4_000
"""Objects in one page of the inventory: some 800 KB, and some 40 ms of work on either side."""
CALL_TIMEOUT_S = 10.0
LEAVE_TIMEOUT_S = 2.0
RETRY_S = 0.25
REPORT_GAP_S = 0.02
"""Seconds between two reports about the disk. Changes in between are sent as one report."""
REPORT_PERIOD_S = 2.0


class StoreHost:
    """A store host that serves one segment. All calls come from one event loop.

    Args:
        name: unique in the store.
        machine: hosts and clients with the same value are near each other.
        segment: owned by the caller, who closes it last.
        port: the data path to that segment.
        disk: the SSD tier, opened and started by the caller, who closes it after this.
    """

    def __init__(
        self,
        name: str,
        machine: str,
        segment: HostSegment,
        port: HostPort,
        disk: DiskTier | None = None,
    ) -> None:
        self.name = name
        self.machine = machine
        self.segment = segment
        self.port = port
        self.disk = disk
        self.orders = HostOrders(name, segment, port, disk)
        self._reporting: asyncio.Task[None] | None = None
        self._disk_changed = asyncio.Event()
        if disk is not None:
            disk.on_change = self._disk_changed.set
        self._tasks = Tasks()
        """Background tasks: reports of the segment's growth, and removals of disk records that the
        master does not want.
        """
        self._joining: asyncio.Task[None] | None = None
        self.master: Caller | None = None
        """The session with the master whose orders are executed."""
        self._num_attempts = 0
        self.is_joined = asyncio.Event()

    def on_master(self, master: Caller) -> None:
        """Note that a session with a master has begun, and begin to join the store in it. A join
        that still runs for an earlier session is cancelled.
        """
        self.on_master_lost()
        self.master = master
        self._joining = asyncio.get_running_loop().create_task(self._join(master))

    def on_master_lost(self) -> None:
        """Note that the session with the master has ended. Its orders are refused from now on."""
        self.orders.session = -1
        self.master = None
        self.is_joined.clear()
        if self._joining is not None:
            self._joining.cancel()
            self._joining = None
        self._stop_reporting()

    def _stop_reporting(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
            self._reporting = None

    def on_grown(self) -> None:
        """Report to the master that more of the segment (the host's memory) is usable, or that it
        grows no more. To be called on the event loop.
        """
        if self.master is None or not self.is_joined.is_set():
            return  # The join reports the size.
        message = self._describe_growth()
        self._tasks.spawn(self._tell_grown(message))

    def _describe_growth(self) -> SegmentGrown:
        return SegmentGrown(
            self.orders.session, self.segment.usable_bytes, self.segment.final_bytes
        )

    async def leave(self) -> None:
        """Tell the master that this host ends and that its segment is removed."""
        if self.master is None or not self.is_joined.is_set():
            return
        try:
            leaving = LeaveStore(self.orders.session)
            await self.master.call("leave", leaving, Ack, timeout_s=LEAVE_TIMEOUT_S)
        except TandemError as error:
            logger.info("event=leave_untold host=%s reason=%s", self.name, error)

    async def aclose(self) -> None:
        """Stop joining a master's store, copying objects from other hosts, and reporting."""
        behind = (*self.orders.pulls.values(), *self._tasks.list_running())
        running = (self._joining, self._reporting, *behind)
        tasks = [task for task in running if task is not None]
        self.on_master_lost()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # The methods below join the store in a session: they send the inventory, and close old writers.

    async def _join(self, master: Caller) -> None:
        reason = ""
        while True:
            try:
                await self._join_once(master)
            except ConflictError:
                logger.exception("event=join_refused host=%s", self.name)
                return
            except TandemError as error:
                if str(error) != reason:
                    reason = str(error)
                    logger.warning("event=join_failed host=%s reason=%s", self.name, reason)
            else:
                return
            await asyncio.sleep(RETRY_S)

    async def _join_once(self, master: Caller) -> None:
        # A new master does not know what its predecessor granted, so no writer and no order of the
        # earlier session may be left when it hands out free space. An earlier attempt whose answer
        # was lost may have joined the same master, which sends orders until the next session
        # begins: a pull (copy from another host) among them would write into space that the
        # inventory reports as free.
        self.is_joined.clear()
        self._stop_reporting()
        await self.orders.end()
        told = self.segment.usable_bytes, self.segment.final_bytes
        self._num_attempts += 1
        joined = await master.call(
            "join",
            JoinHost(
                name=self.name,
                machine=self.machine,
                segment_id=self.segment.segment_id,
                capacity_bytes=told[0],
                address=self.port.address,
                read_base=self.port.read_base,
                epoch_seen=self._epoch_seen(),
                attempt=self._num_attempts,
                disk_id="" if self.disk is None else self.disk.disk_id,
                disk=None if self.disk is None else self.disk.status(),
                final_bytes=told[1],
            ),
            Joined,
            timeout_s=CALL_TIMEOUT_S,
        )
        if not self.segment.epoch <= joined.epoch <= MAX_EPOCH:
            raise ConflictError(
                "store.join", f"master of epoch {joined.epoch}, {self.segment.epoch} was obeyed"
            )
        self.segment.epoch = joined.epoch
        # Close only the writers (addresses at which clients may write) that were opened before this
        # session. New ones are opened by orders of this session.
        old_writers = set(self.orders.writers)
        self.orders.begin(joined.session)
        num_pages = 0
        telling: asyncio.Task[Ack] | None = None
        try:
            async with contextlib.aclosing(self._list_inventory()) as inventory:
                async for records, is_disk in inventory:
                    # The master processes one page while this host reads the next.
                    if telling is not None:
                        await telling
                    page = InventoryPage(joined.session, num_pages, records, is_disk)
                    call = master.call("inventory", page, Ack, timeout_s=CALL_TIMEOUT_S)
                    telling = asyncio.get_running_loop().create_task(call)
                    await asyncio.sleep(0)  # Let the call be sent.
                    num_pages += 1
            if telling is not None:
                await telling
        finally:
            if telling is not None:
                telling.cancel()
        can_write = await self.orders.close_writers(old_writers)
        while True:
            done = InventoryDone(
                joined.session, num_pages, can_write, list(self.segment.corruption.names)
            )
            await master.call("inventory_done", done, Ack, timeout_s=CALL_TIMEOUT_S)
            self.is_joined.set()
            if self.disk is not None and self._reporting is None:
                reporting = self._report_disk(self.disk, master, joined.session)
                self._reporting = asyncio.get_running_loop().create_task(reporting)
            if can_write:
                break
            await asyncio.sleep(RETRY_S)
            can_write = await self.orders.close_writers(old_writers)
        if (self.segment.usable_bytes, self.segment.final_bytes) != told:
            await self._tell_grown(self._describe_growth())

    def _epoch_seen(self) -> int:
        """Return the highest epoch (number of a master) that this host has seen. The disk may be
        older than the segment, so its versions count too.
        """
        if self.disk is None:
            return self.segment.epoch
        newest = max((r.header.version for r in self.disk.index.list_records()), default=0)
        return max(self.segment.epoch, newest >> layout.VERSION_BITS)

    async def _list_inventory(self) -> AsyncGenerator[tuple[ExtentRecords, bool], None]:
        on_disk: list[ExtentHeader] = []
        if self.disk is not None:
            # Take the disk's changes now, so that only later ones are reported after the inventory.
            on_disk = [record.header for record in self.disk.list_records()]
            self.disk.take_changes()
        records = ExtentRecords()
        for offset, header in self.segment.scan():
            append_record(records, offset, header)
            if len(records.keys) == PAGE_OBJECTS:
                yield records, False
                records = ExtentRecords()
        if records.keys:
            yield records, False
        for begin in range(0, len(on_disk), PAGE_OBJECTS):
            records = ExtentRecords()
            for header in on_disk[begin : begin + PAGE_OBJECTS]:
                append_record(records, 0, header)
            yield records, True

    # The methods below report changes of the disk to the master.

    async def _report_disk(self, disk: DiskTier, master: Caller, session: int) -> None:
        """Report changes on the disk to the master until the session ends."""
        number = 0
        while True:
            with contextlib.suppress(TimeoutError):  # After the period, report the status alone.
                # Use ``asyncio.timeout``, since ``wait_for`` of Python 3.11 can swallow a
                # cancellation.
                async with asyncio.timeout(REPORT_PERIOD_S):
                    await self._disk_changed.wait()
            self._disk_changed.clear()
            stored, dropped = disk.take_changes()
            report = DiskReport(
                session=session,
                number=number,
                dropped=dropped,
                stored=stored,
                status=disk.status(),
            )
            number += 1
            if not await self._tell_disk(disk, master, report):
                return
            await asyncio.sleep(REPORT_GAP_S)

    async def _tell_disk(self, disk: DiskTier, master: Caller, report: DiskReport) -> bool:
        """Send one report, and retry until it arrives. Return False if the session has ended."""
        while True:
            try:
                answer = await master.call(
                    "disk_report", report, KeyBytes, timeout_s=CALL_TIMEOUT_S
                )
            except (ConflictError, PeerLostError) as error:
                logger.debug("event=disk_report_refused host=%s reason=%s", self.name, error)
                return False
            except TandemError as error:
                logger.debug("event=disk_report_failed host=%s reason=%s", self.name, error)
                await asyncio.sleep(RETRY_S)
                continue
            unwanted = {
                key: version
                for (key, version), flag in zip(report.stored.items(), answer.flags, strict=True)
                if not flag
            }
            if unwanted:  # Removed or evicted in memory while they were written.
                self._tasks.spawn(disk.forget(list(unwanted), list(unwanted.values())))
            return True

    async def _tell_grown(self, message: SegmentGrown) -> None:
        if self.master is None:
            return
        try:
            await self.master.call("grown", message, Ack, timeout_s=CALL_TIMEOUT_S)
        except TandemError as error:
            logger.warning("event=growth_untold host=%s reason=%s", self.name, error)

"""The master of a store: who holds what. Soft state; every host can tell its part again.

The logic alone: sessions come as ``Caller``, time as a ``Clock``, chance as ``draw``, so that the
simulator runs this very class. Everything runs on one event loop; what must not be left half done
when a caller goes away runs as a task of the master's own.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from tandem._native import fill_rows, locate_rows
from tandem.core.clock import Clock
from tandem.core.errors import ConflictError, PeerLostError, TandemError
from tandem.store.config import StoreConfig
from tandem.store.election import MemoryRosterStore, RosterStore, Term
from tandem.store.formats import layout
from tandem.store.formats.headers import MAX_EPOCH, ExtentHeader
from tandem.store.formats.records import append_record
from tandem.store.master.commits import Commits
from tandem.store.master.eviction import Eviction
from tandem.store.master.inline_puts import InlinePuts
from tandem.store.master.lookups import Lookups
from tandem.store.master.membership import Membership
from tandem.store.master.policies import Strategy, order_hosts
from tandem.store.master.puts import Puts, check_pin
from tandem.store.master.removals import Removals
from tandem.store.master.requests import Requests
from tandem.store.master.state.index import NO_ROW, Directory, Passes
from tandem.store.master.state.orders import OrderWay
from tandem.store.master.state.space import ORDER_TIMEOUT_S, Extent, HostSpace
from tandem.store.master.upkeep import Upkeep
from tandem.store.messages import (
    Ack,
    CommitPut,
    DiskReport,
    DrainHost,
    ExtentRecords,
    FindObjects,
    FoundObjects,
    HostStatus,
    InventoryDone,
    InventoryPage,
    Joined,
    JoinHost,
    KeyBytes,
    KeyList,
    KeyPage,
    LeaveStore,
    ListKeys,
    Located,
    LocateObjects,
    PinObjects,
    PrefixRemoval,
    PutInline,
    RemoveObjects,
    RemovePrefix,
    RepinExtents,
    ReportBadReplica,
    RetireHost,
    SegmentGrown,
    StageObjects,
    StartedPut,
    StartPut,
    StoreStatus,
    VerifyExtent,
)
from tandem.store.metrics import StoreCounters
from tandem.store.sessions import Caller

__all__ = ["OpenWay", "StoreMaster"]

logger = logging.getLogger(__name__)
T = TypeVar("T")


OpenWay = Callable[[JoinHost], Awaitable[OrderWay]]
RECOVERY_LOOK_S = 0.01
RECOVERY_LOOK_MAX_S = 0.25
"""Between two looks whether all hosts have told what they have."""
TICK_S = 0.05
MAX_EPOCH_JUMP = 2**16
"""Above ours. Each start of a master and each term takes one: so many while our note of them was
lost are past belief, and 128 such jumps are possible before versions run out."""


class StoreMaster:
    """Keeps the directory, decides on space, orders hosts.

    Args:
        config: the limits and intervals of a store.
        clock: of leases, pins and expiry.
        epoch: above that of every earlier master of this store; raised further if a host has
            seen a higher one, unless there are elections.
        draw: ``draw(n)`` is a random number in ``[0, n)``.
        term: the elected one; None for a single master, which always leads.
        open_way: opens a fast way for orders to a host that takes them; None for none.
        roster: keeps the membership beyond the life of this master; None: nothing does.
        counters: of all masters of this process; None: of this one alone.
        damaged: names files of the master itself that did not hold together; it may grow.
    """

    def __init__(
        self,
        config: StoreConfig,
        *,
        clock: Clock,
        epoch: int,
        draw: Callable[[int], int],
        term: "Term | None" = None,
        open_way: "OpenWay | None" = None,
        roster: RosterStore | None = None,
        counters: StoreCounters | None = None,
        damaged: Sequence[str] = (),
    ) -> None:
        self.config = config
        self.epoch = epoch
        self.directory = Directory(Passes(fill_rows, locate_rows))
        self.hosts: dict[int, HostSpace] = {}
        self.counters = StoreCounters() if counters is None else counters
        self.clock = clock
        self._term = term
        self._draw = draw
        self.open_way = open_way
        self._counter = 0
        self._damaged = damaged
        self._outbid: list[tuple[int, int]] = []
        """What this master gave in earlier epochs: above the first version, up to the second."""
        self.space_freed = asyncio.Event()
        self.dropped_versions: dict[str, int] = {}
        """While inventories are coming in: what they must not bring back."""
        self._tasks: set[asyncio.Future[Any]] = set()
        self._recovering: asyncio.Task[None] | None = None
        """Ends when ``is_learning`` does, for all who wait for that."""
        self.requests = Requests(self.spawn)
        self.puts = Puts(self)
        self.commits = Commits(self)
        self.inline_puts = InlinePuts(self)
        self.lookups = Lookups(self)
        self.removals = Removals(self)
        self.eviction = Eviction(self)
        self.membership = Membership(self, MemoryRosterStore() if roster is None else roster)
        self.upkeep = Upkeep(self)
        self._running: asyncio.Task[None] | None = None

    def methods(self) -> list[tuple[str, Callable[..., Any], type, type]]:
        """Return what hosts and clients may call: name, handler, request and response type."""
        return [
            ("start_put", self.puts.start, StartPut, StartedPut),
            ("put_inline", self.inline_puts.put, PutInline, KeyBytes),
            ("commit_put", self.commits.commit, CommitPut, KeyBytes),
            ("find", self.lookups.find, FindObjects, FoundObjects),
            ("locate", self.lookups.locate, LocateObjects, Located),
            ("stage", self.lookups.stage, StageObjects, FoundObjects),
            ("exists", self.lookups.exists, KeyList, KeyBytes),
            ("remove", self.removals.remove, RemoveObjects, KeyBytes),
            ("remove_prefix", self.removals.remove_prefix, RemovePrefix, PrefixRemoval),
            ("list", self.lookups.list_keys, ListKeys, KeyPage),
            ("pin", self._pin, PinObjects, KeyBytes),
            ("report_bad", self._report_bad, ReportBadReplica, Ack),
            ("drain", self.membership.drain, DrainHost, Ack),
            ("retire", self.membership.retire, RetireHost, Ack),
            ("status", self._status, type(None), StoreStatus),
            ("join", self.membership.join, JoinHost, Joined),
            ("inventory", self.membership.inventory, InventoryPage, Ack),
            ("inventory_done", self.membership.inventory_done, InventoryDone, Ack),
            ("leave", self.membership.leave, LeaveStore, Ack),
            ("grown", self.membership.grown, SegmentGrown, Ack),
            ("disk_report", self.membership.disk_report, DiskReport, KeyBytes),
        ]

    def start(self) -> None:
        """Begin the work behind: expiry, eviction, repair."""
        self._running = asyncio.get_running_loop().create_task(self._run())

    async def aclose(self) -> None:
        """End all of the master's tasks; hosts keep what they hold."""
        tasks = [*self._tasks, *([self._running] if self._running is not None else [])]
        for host in self.hosts.values():
            host.end_session()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def on_caller_lost(self, caller: Caller) -> None:
        """A session has ended: of a host, of a client, or of a process that is both."""
        for host in self.hosts.values():
            if host.caller is caller:
                self.membership.lose_host(host)
        self.puts.end_client(caller.instance_id)

    # For the parts.

    def now_ms(self) -> int:
        """Return the time, milliseconds."""
        return int(self.clock.now_s() * 1e3)

    def writable_hosts(self) -> list[HostSpace]:
        """Return the hosts that take new objects."""
        return [host for host in self.hosts.values() if host.is_writable]

    def answering_hosts(self) -> list[HostSpace]:
        """Return the hosts that take new objects and answer; if none does, all that take them."""
        hosts = self.writable_hosts()
        answering = [host for host in hosts if not host.is_silent]
        return answering or hosts

    def patience_s(self, host: HostSpace, num_objects: int = 0) -> float:
        """Return how long a put waits for a host: not long where another could take its place."""
        has_others = any(other is not host for other in self.answering_hosts())
        return host.patience_s(num_objects) if has_others else ORDER_TIMEOUT_S

    def next_version(self) -> int:
        """Return a number above all that this master gave before, in this epoch and earlier."""
        return self.take_versions(1)

    def order_epoch(self) -> int:
        """Return the epoch that orders bear. Raises: PeerLostError after the end of the term."""
        if self._term is not None and not self._term.holds():
            raise PeerLostError("store.order", f"the term of epoch {self.epoch} has ended")
        return self.epoch

    def take_versions(self, count: int) -> int:
        """Return the first of so many consecutive versions; see ``next_version``."""
        self._counter += count
        return self.epoch << layout.VERSION_BITS | self._counter - count + 1

    @property
    def newest_version(self) -> int:
        """The highest that this master gave, or could have found given."""
        return self.epoch << layout.VERSION_BITS | self._counter

    def has_given(self, version: int, *, since: int) -> bool:
        """Whether this master gave a version after ``newest_version`` was ``since``."""
        in_epoch = version > self.epoch << layout.VERSION_BITS
        return version > since and (in_epoch or any(a < version <= b for a, b in self._outbid))

    def outbid(self, epoch: int) -> None:
        """A host has obeyed a master of ``epoch``: go above it.

        Raises: ConflictError if it is too far above ours to be that of a master;
            PeerLostError if that takes another election; epochs are not ours to choose then.
        """
        if epoch - self.epoch > MAX_EPOCH_JUMP or epoch >= MAX_EPOCH:
            raise ConflictError(
                "store.join",
                f"epoch {epoch} was seen, ours is {self.epoch}: more than {MAX_EPOCH_JUMP} apart, "
                "which no number of starts explains; remove the files of that host",
                field="epoch",
            )
        if self._term is not None:
            self._term.resign(min_epoch=epoch)
            raise PeerLostError("store.join", f"{epoch} was obeyed: elected anew above it")
        self._outbid.append((self.epoch << layout.VERSION_BITS, self.newest_version))
        self.epoch = epoch + 1
        self._counter = 0
        logger.info("event=epoch_raised epoch=%d", self.epoch)

    def choose_hosts(self, *, preferred: Sequence[str] = (), machine: str = "") -> list[int]:
        """Return hosts that take new objects and answer, in the order in which to try them."""
        hosts = self.answering_hosts()
        if len(hosts) == 1:
            return [hosts[0].number]
        return order_hosts(
            [host.view() for host in hosts],
            strategy=Strategy(self.config.strategy),
            draw=self._draw,
            preferred=preferred,
            machine=machine,
        )

    def extent_of(self, row: int, offset: int) -> Extent:
        """Return the range that a replica of ``row`` takes."""
        key_bytes = len(self.directory.key(row).encode())
        return Extent(offset, layout.extent_bytes(key_bytes, self.directory.size(row)))

    def drop_row(self, row: int, *, wait: bool = False) -> "list[asyncio.Future[None]]":
        """Remove an object; its space is free once it is wiped and unleased.

        Args:
            row: of the object.
            wait: note what is to be done before it is gone: see ``Removals.note_going``.

        Returns: if ``wait``, what is done when all headers are gone.
        """
        directory = self.directory
        key, version = directory.key(row), directory.version(row)
        length = self.extent_of(row, 0).length
        free_at_ms = directory.lease_until_ms(row)
        if self.membership.is_adopting:
            self.dropped_versions[key] = version
        # Clients may remember where it was, and take it for present while there is a header.
        is_known = free_at_ms > self.now_ms()
        wait = wait or is_known
        pending = self.upkeep.abandon(key, version, wait=wait)
        on_disk = set(directory.disks(row))
        wiped: dict[int, asyncio.Future[None]] = {}
        for replica in directory.remove(row):
            host = self.hosts[replica.host]
            done = host.drop(Extent(replica.offset, length), free_at_ms, wait=wait)
            if done is not None:
                wiped[replica.host] = done
                pending.append(done)
                if host.disk is not None:
                    on_disk.add(replica.host)  # Or it is on its way there.
        for number in sorted(on_disk):
            forgotten = self.hosts[number].forget(key, version, after=wiped.get(number))
            if wait:
                pending.append(forgotten)
        if is_known:
            earlier = self.removals.find_going(key)  # Other copies, given up a moment ago.
            headers: list[asyncio.Future[Any]] = [] if earlier is None else [earlier]
            self.removals.note_leaving(key, [*headers, *wiped.values()])
        if pending:
            self.removals.note_going(key, pending)
        return pending

    def evict_row(self, row: int) -> bool:
        """Take an object out of memory; returns whether a disk keeps it, or else it is gone."""
        if not any(self.hosts[number].caller is not None for number in self.directory.disks(row)):
            # Its headers are still there, and it may be on its way to a disk: a removal that comes
            # now must not be over before it could not come back.
            self.drop_row(row, wait=True)
            return False
        for replica in self.directory.replicas(row):
            self._drop_copy(row, replica.host)
        return True

    def drop_replica(self, row: int, host: int) -> None:
        """Give up one copy in memory, and the object if that was the last of any kind.

        A host without a copy changes nothing.
        """
        replicas = self.directory.replicas(row)
        if all(replica.host != host for replica in replicas):
            return
        if len(replicas) == 1 and not self.directory.disks(row):
            # A removal that comes now must not be over before it could not come back.
            self.drop_row(row, wait=True)
            return
        self._drop_copy(row, host)

    def _drop_copy(self, row: int, host: int) -> None:
        """Forget a copy in memory and have its header wiped; a removal waits for that as well."""
        replica = self.directory.drop_replica(row, host)
        if replica is not None:
            extent, free_at_ms = (
                self.extent_of(row, replica.offset),
                self.directory.lease_until_ms(row),
            )
            self.wipe_copy(self.directory.key(row), self.hosts[host], extent, free_at_ms)

    def wipe_copy(
        self,
        key: str,
        host: HostSpace,
        extent: Extent,
        free_at_ms: int = 0,
        *,
        version: int | None = None,
        was_shown: bool = True,
    ) -> "list[asyncio.Future[None]]":
        """Have a copy wiped that the directory does not know (any more).

        A removal of its key is not over before: a new master would find the header.

        Args:
            key: of the object.
            host: where it is, or may be.
            extent: there.
            free_at_ms: as ``HostSpace.drop``.
            version: if given, it may be on its way to the disk of the host, which is to forget it.
            was_shown: see ``Removals.note_going``.

        Returns: done when that is so, or the host is lost.
        """
        done = host.drop(extent, free_at_ms, wait=True)
        assert done is not None
        going = [done]
        if version is not None and host.disk is not None:
            going.append(host.forget(key, version, after=done))
        self.removals.note_going(key, going, was_shown=was_shown)
        return going

    def lose_disk(self, row: int, host: int) -> None:
        """The copy on a disk is gone already, and the object if that was the last."""
        self.directory.drop_disk(row, host)
        if not self.directory.replicas(row) and not self.directory.disks(row):
            self.drop_row(row)
            self.counters.objects_evicted += 1

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run a coroutine that its caller's going does not end."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def record_of(self, row: int, offset: int) -> ExtentRecords:
        """Return the header that a copy of ``row`` at ``offset`` should have."""
        soft_ms = self.directory.soft_pinned_until_ms(row) - self.now_ms()
        header = ExtentHeader(
            self.directory.key(row),
            self.directory.size(row),
            self.directory.version(row),
            self.directory.checksum(row),
            self.directory.wanted(row),
            self.directory.is_hard_pinned(row),
            max(0, soft_ms),
        )
        records = ExtentRecords()
        append_record(records, offset, header)
        return records

    @property
    def is_learning(self) -> bool:
        """Whether a miss may only mean that its host has not told yet."""
        return self.membership.is_learning

    async def recover(self) -> None:
        """Wait until all members have told what they have, or are declared lost."""
        while self.is_learning:
            await asyncio.shield(self._begin_recovery())

    async def wait_learnt(self, timeout_s: float) -> None:
        """As ``recover``, but no longer than so."""
        if self.is_learning:
            await asyncio.wait([self._begin_recovery()], timeout=timeout_s)

    def _begin_recovery(self) -> "asyncio.Task[None]":
        # It may be over before it has begun: time passes between two looks.
        if self._recovering is None or self._recovering.done():
            self._recovering = self.spawn(self._look_until_learnt())
        return self._recovering

    async def _look_until_learnt(self) -> None:
        # A lost member may keep this waiting for minutes: look ever more rarely, so that whoever
        # waits learns of the end at most a tenth later than it came.
        delay_s = RECOVERY_LOOK_S
        try:
            while self.is_learning:
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 1.1, RECOVERY_LOOK_MAX_S)
        finally:
            self._recovering = None

    async def _run(self) -> None:
        await self.membership.load()
        while True:
            await asyncio.sleep(TICK_S)
            now_ms = self.now_ms()
            self.membership.step(now_ms)
            self.puts.expire(now_ms)
            for host in self.hosts.values():
                host.free_leased(now_ms)
            self.eviction.evict_over_watermark(now_ms)
            if self.puts.num_waiting:
                self.space_freed.set()  # A lease or a pin may have ended: they try again.
            self.upkeep.begin_loads(now_ms)
            self.upkeep.step(now_ms)
            if self.dropped_versions and not self.membership.is_adopting:
                self.dropped_versions.clear()

    # Pins and replicas.

    async def _pin(self, caller: Caller, request: PinObjects) -> KeyBytes:
        return await self.requests.change(caller, request, lambda: self._pin_objects(request))

    async def _pin_objects(self, request: PinObjects) -> KeyBytes:
        check_pin(request.soft_ms)
        await self.recover()  # Or a copy would come that does not know of the pin.
        flags = bytearray(len(request.keys))
        until_ms = self.now_ms() + request.soft_ms if request.soft_ms > 0 else 0
        orders: dict[int, list[int]] = {}
        for i, key in enumerate(request.keys):
            row = self.directory.find(key)
            if row == NO_ROW:
                continue
            flags[i] = 1
            self.directory.set_pins(row, hard=request.hard, soft_until_ms=until_ms)
            for host, offset in self.directory.replicas(row):
                if self.hosts[host].caller is not None:
                    orders.setdefault(host, []).append(offset)
        for host, offsets in sorted(orders.items()):
            try:
                await self.hosts[host].order(
                    "repin",
                    RepinExtents,
                    Ack,
                    offsets=offsets,
                    hard=request.hard,
                    soft_pin_ms=max(0, request.soft_ms),
                )
            except TandemError as error:
                # Pinned all the same; only a restart of the master would not know of it.
                logger.warning("event=pin_unwritten host=%s reason=%s", host, error)
        return KeyBytes(bytes(flags))

    async def _report_bad(self, _: Caller, request: ReportBadReplica) -> Ack:
        return Ack(await self.verify_replica(request.key, request.version, request.host))

    async def verify_replica(self, key: str, version: int, number: int) -> bool:
        """Have a host look at its copy, and give that up if it is bad.

        Returns: whether it is good, or not there.
        Raises: PeerLostError, DeadlineError.
        """
        row = self.directory.find(key)
        host = self.hosts.get(number)
        if row == NO_ROW or self.directory.version(row) != version or host is None:
            return True
        offset = self._find_copy(row, number)
        if offset < 0:
            return True
        # The host looks for itself: a reader's own memory may be what is bad.
        verdict = await host.order("verify", VerifyExtent, Ack, offset=offset, version=version)
        is_same = self.directory.find(key) == row and self.directory.version(row) == version
        # Of two who report a copy, the second may find a new one in its place, or none.
        if not verdict.ok and is_same and self._find_copy(row, number) == offset:
            logger.error("event=replica_corrupt host=%s key=%s", host.name, key)
            self.counters.replicas_corrupt += 1
            self.drop_replica(row, number)
        return verdict.ok

    def _find_copy(self, row: int, number: int) -> int:
        """Return where the copy in the memory of a host lies there; -1 if it has none."""
        return next((r.offset for r in self.directory.replicas(row) if r.host == number), -1)

    # Telling.

    def status(self) -> StoreStatus:
        """Return what the store looks like from here."""
        return StoreStatus(
            epoch=self.epoch,
            num_objects=len(self.directory),
            total_bytes=self.directory.total_bytes,
            num_unreadable=self.directory.num_unreadable,
            num_under_replicated=self.directory.count_under_replicated(),
            num_unfinished=self.puts.num_unfinished,
            hosts=[
                HostStatus(
                    name=host.name,
                    machine=host.machine,
                    stage=host.stage,
                    capacity_bytes=host.capacity_bytes,
                    used_bytes=host.used_bytes,
                    num_objects=len(self.directory.rows_on_host(host.number)),
                    quarantined_bytes=host.quarantined_bytes,
                    disk=host.disk,
                    damaged=[*host.damaged, *([] if host.disk is None else host.disk.damaged)],
                )
                for host in self.hosts.values()
                if not host.is_retired
            ],
            is_recovering=self.is_learning,
            damaged=list(self._damaged),
        )

    def _status(self, _: Caller, __: None) -> StoreStatus:
        return self.status()

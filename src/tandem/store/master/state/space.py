"""One host as its master sees it: its orders, its space, and what must be done to free that.

What space is used for is the ledger's (``ledger.py``); here are the orders that change it, and the
futures of their waiters.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tandem._native import SegmentAllocator
from tandem.core.clock import Clock
from tandem.core.errors import CorruptionError, DeadlineError, PeerLostError, TandemError
from tandem.store.formats import layout
from tandem.store.master.policies import HostView
from tandem.store.master.state.answering import Answering
from tandem.store.master.state.ledger import Event, Extent, Space, SpaceLedger
from tandem.store.master.state.orders import OrderLine
from tandem.store.master.state.writers import Writers
from tandem.store.messages import (
    Ack,
    DiskStatus,
    Endpoint,
    ForgetObjects,
    HostStage,
    JoinHost,
    Order,
    WipeExtents,
)
from tandem.store.sessions import Caller

__all__ = ["ORDER_TIMEOUT_S", "Extent", "HostSpace"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

ORDER_TIMEOUT_S = 5.0
RETRY_S = 0.25
WIPE_BATCH = 2_000
LOAD_HALF_LIFE_S = 1.0
QUICK_ORDERS = frozenset({"seal", "wipe", "repin", "open_writer"})
"""Those that wait for nothing but the host's own thread."""


class _Going:
    """Dropped objects that somebody waits for: ``done`` ends when none of them is left."""

    __slots__ = ("count", "done")

    def __init__(self, count: int) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.count = count

    def end(self, count: int = 1) -> None:
        """So many are gone."""
        self.count -= count
        if self.count <= 0:
            _settle(self.done)


@dataclass(slots=True)
class _Drop:
    extent: Extent
    free_at_ms: int
    going: _Going | None
    is_wiped: bool = False


@dataclass(slots=True, eq=False)
class _Forget:
    key: str
    version: int
    done: asyncio.Future[None]


class HostSpace:
    """A host, over all its sessions with this master. Used from one event loop.

    Args:
        number: names the host in messages; never that of another one.
        clock: of leases.
        epoch: of the master, read at each order.
        on_space: called whenever space has become free.
        lease_ms: of readers.
    """

    def __init__(
        self,
        number: int,
        name: str,
        clock: Clock,
        epoch: Callable[[], int],
        on_space: Callable[[], None],
        lease_ms: int,
    ) -> None:
        self.number = number
        self.name = name
        self.machine = ""
        self.segment_id = ""
        self.address = ""
        self.read_base = 0
        self.capacity_bytes = 0
        self.final_bytes = 0
        """Its size once the segment has grown, if that succeeds."""
        self.stage = HostStage.LOST
        self.is_leaving = False
        """To be drained, now or when it has joined again."""
        self.is_known = False
        """This master has seen its whole inventory once, so objects it does not know are stale."""
        self.is_retired = False
        """Its operator has given it up: it is no member until it joins again."""
        self.dead_below = self.disk_dead_below = -1
        """Objects of its segment, or disk, up to these versions are dead: it was retired."""
        self.unconfirmed_from = 0
        """The first round of tombstones whose objects it may have."""
        self.purging: list[asyncio.Future[Any]] = []
        """Done when the dead objects of its inventory are wiped."""
        self.caller: Caller | None = None
        self.line: OrderLine | None = None
        """Its orders; None without a session."""
        self.session = -1
        self.attempt = -1
        self.num_pages = 0
        self.disk: DiskStatus | None = None
        """Disk of its SSD tier, as it told last; None without one."""
        self.disk_id: str = ""
        self.disk_number = -1
        """Number of its last report in this session."""
        self.damaged: list[str] = []
        """Damage of its segment, as it told when it joined."""
        self.is_disk_known = False
        """The same as ``is_known``, of its disk."""
        self.confirmed_disk: dict[int, int] = {}
        """Versions by row: objects on the disk according to the current inventory."""
        self.confirmed: dict[int, int] = {}
        """By row: lengths of the extents that the current inventory has."""
        self.ledger = SpaceLedger()
        self.guarded: set[int] = set()
        """Offsets that another host copies from: not free before that has ended."""
        self._clock = clock
        self._epoch = epoch
        self._on_space = on_space
        self.writers = Writers(name, self.ledger, self.order, self.spawn, on_space)
        self._lease_ms = lease_ms
        self._read_until_ms = 0
        """While it is away: when the last lease on its objects ends."""
        self._unwiped: list[tuple[int, _Going]] = []
        """Ranges that could not be wiped, and the moment at which they are as good as wiped."""
        self._drops: dict[int, _Drop] = {}
        """By offset: dropped objects whose space is not free yet."""
        self._to_wipe: list[_Drop] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_wiping = False
        self._to_forget: list[_Forget] = []
        self._is_forgetting = False
        self._load_bytes = 0.0
        self._load_at_s = 0.0
        self._answering = Answering(ORDER_TIMEOUT_S)

    # Views.

    @property
    def is_writable(self) -> bool:
        """True if new objects may go there."""
        return self.stage is HostStage.ACTIVE and self.ledger.allocator is not None

    @property
    def is_settled(self) -> bool:
        """True if it is there and has sent its inventory."""
        return self.caller is not None and self.stage is not HostStage.JOINING

    @property
    def is_all_known(self) -> bool:
        """True if what it has, and this master does not know of, is stale on each of its tiers."""
        return self.is_known and (self.disk is None or self.is_disk_known)

    @property
    def used_bytes(self) -> int:
        """Bytes that are not free, in any state."""
        allocator = self.ledger.allocator
        return self.capacity_bytes if allocator is None else allocator.used_bytes

    @property
    def held_bytes(self) -> int:
        """Those of them that are being written or copied."""
        return self.ledger.count_bytes(Space.HELD)

    @property
    def dropped_bytes(self) -> int:
        """Bytes of dropped objects that will be free, some only when their readers' leases end."""
        return self.ledger.count_bytes(Space.WIPING) + self.leased_bytes

    @property
    def leased_bytes(self) -> int:
        """Those of them that are wiped and wait for readers' leases."""
        return self.ledger.count_bytes(Space.LEASED)

    @property
    def quarantined_bytes(self) -> int:
        """Bytes that are held until their writers are proven gone."""
        return self.ledger.count_bytes(Space.QUARANTINED)

    def view(self) -> HostView:
        """Return what the policies see."""
        return HostView(
            host=self.number,
            name=self.name,
            machine=self.machine,
            free_bytes=self.capacity_bytes - self.used_bytes,
            capacity_bytes=self.capacity_bytes,
            load_bytes=self._decay_load(),
            is_silent=self.is_silent,
        )

    def endpoint(self, write_base: int = -1) -> Endpoint:
        """Return what a client needs to reach its bytes."""
        return Endpoint(
            self.number, self.name, self.machine, self.address, self.read_base, write_base
        )

    def note_read(self, size_bytes: int) -> None:
        """Count bytes that a reader was sent for."""
        self._load_bytes = self._decay_load() + size_bytes

    def _decay_load(self) -> float:
        now_s = self._clock.now_s()
        self._load_bytes *= 0.5 ** ((now_s - self._load_at_s) / LOAD_HALF_LIFE_S)
        self._load_at_s = now_s
        return self._load_bytes

    # Sessions.

    def begin_session(self, caller: Caller, session: int, join: JoinHost) -> None:
        """Note that the host has come; its inventory follows."""
        self.caller, self.session = caller, session
        self.line = OrderLine(caller, session, self._epoch)
        self.attempt = join.attempt
        self.machine, self.segment_id = join.machine, join.segment_id
        self.address, self.read_base = join.address, join.read_base
        self.capacity_bytes = join.capacity_bytes
        self.final_bytes = max(join.final_bytes, join.capacity_bytes)
        self.stage = HostStage.JOINING
        self.num_pages = 0
        self.confirmed.clear()
        self.purging.clear()
        self.disk, self.disk_number = join.disk, -1
        if join.disk_id != self.disk_id:
            self.disk_id, self.is_disk_known = join.disk_id, False
        self.confirmed_disk.clear()

    def end_session(self) -> None:
        """Note that the host is gone, or has gone and come back: its operations in progress are
        over.
        """
        self.caller, self.session = None, -1
        self._read_until_ms = self._now_ms() + self._lease_ms
        if self.line is not None:
            self.line.end()
            self.line = None
        self.stage = HostStage.LOST
        for task in list(self._tasks):
            task.cancel()
        self._answering.reset()
        self.purging.clear()
        self._is_wiping = False
        self.writers.end()
        self._to_wipe.clear()
        self._is_forgetting = False
        for forget in self._to_forget:
            _settle(forget.done)
        self._to_forget.clear()
        # A reader's lease outlives the session; objects not wiped are in the next inventory.
        self.ledger.close()
        for offset, dropped in list(self._drops.items()):
            if not dropped.is_wiped:
                del self._drops[offset]
                self._finish_unwiped(dropped)

    def rebuild(self, offsets: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64]) -> None:
        """Make the allocator, with these extents taken, and what readers may still rely on.

        Raises: CorruptionError if they overlap.
        """
        dropped = self.ledger.list_extents(Space.WIPING, Space.LEASED)
        if dropped:
            known = set(offsets.tolist())
            dropped = [extent for extent in dropped if extent.offset not in known]
        carried = dropped
        columns = np.array(dropped, np.uint64).reshape(-1, 2)
        allocator = SegmentAllocator(self.capacity_bytes, granule_bytes=layout.GRANULE_BYTES)
        try:
            _fill(
                allocator,
                np.concatenate([offsets, columns[:, 0]]),
                np.concatenate([lengths, columns[:, 1]]),
            )
        except CorruptionError:
            _fill(allocator, offsets, lengths)
            carried = []
        kept = {extent.offset for extent in carried}
        self._drops = {offset: drop for offset, drop in self._drops.items() if offset in kept}
        self.ledger.open(allocator, carried)
        self._on_space()

    def grow(self, capacity_bytes: int, final_bytes: int) -> None:
        """More of the segment is usable, or it is known how much ever will be (0: it is not)."""
        self.final_bytes = final_bytes or max(self.final_bytes, capacity_bytes)
        if capacity_bytes > self.capacity_bytes:
            self.ledger.grow(capacity_bytes)
            self.capacity_bytes = capacity_bytes
        self._on_space()  # Also wakes waiters for space that will not come.

    async def order(
        self,
        method: str,
        kind: type[Order],
        response: type[T],
        *,
        timeout_s: float = ORDER_TIMEOUT_S,
        **fields: Any,
    ) -> T:
        """Have the host do something. Raises: PeerLostError if it is gone; see ``OrderLine``."""
        return await self.begin_order(method, kind, response, timeout_s=timeout_s, **fields)

    def begin_order(
        self,
        method: str,
        kind: type[Order],
        response: type[T],
        *,
        timeout_s: float = ORDER_TIMEOUT_S,
        **fields: Any,
    ) -> Awaitable[T]:
        """Do as ``order``, but the host has been told when this returns."""
        if self.line is None:
            raise PeerLostError("store.order", f"host {self.name} is not connected")
        sent_s = self._clock.now_s()
        answer = self.line.send(method, kind, response, timeout_s=timeout_s, **fields)
        return self._watch(answer, sent_s) if method in QUICK_ORDERS else answer

    async def _watch(self, answering: Awaitable[T], sent_s: float) -> T:
        """Wait for the answer to an order that does not take long by itself."""
        number, session = object(), self.session
        self._answering.note_sent(number, sent_s)
        try:
            answer = await answering
        except DeadlineError:
            if session == self.session:
                self.doubt()
            raise
        finally:
            self._answering.note_ended(number)
        if self._answering.note_answer(sent_s, self._clock.now_s()):
            logger.info("event=host_answers host=%s", self.name)
            self._on_space()
        return answer

    # Whether it answers.

    @property
    def is_silent(self) -> bool:
        """True if it keeps others waiting for much longer than usual: better ask another."""
        return self._answering.is_silent(self._clock.now_s())

    def patience_s(self, num_objects: int = 0) -> float:
        """Return how long to wait for a quick order about so many objects, if others can do it."""
        return self._answering.patience_s(num_objects)

    def doubt(self) -> None:
        """Note that it did not answer, or bytes did not arrive there: it is silent until it answers
        anew.
        """
        if self.caller is None:
            return
        if self._answering.doubt(self._clock.now_s()):
            logger.warning("event=host_silent host=%s", self.name)
            self.spawn(self._probe())

    async def _probe(self) -> None:
        while self._answering.is_doubted:
            try:
                await self.order("wipe", WipeExtents, Ack, offsets=[])
            except TandemError as error:
                logger.debug("event=probe_failed host=%s reason=%s", self.name, error)
                await asyncio.sleep(RETRY_S)

    def spawn(self, work: Any) -> None:
        """Run a coroutine that ends with this session."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Taking space.

    def allocate(self, length: int, *, is_load: bool = False) -> Extent | None:
        """Take a range, if there is one; on a host that is drained only to load from its disk."""
        if self.stage is not HostStage.ACTIVE and not (
            is_load and self.stage is HostStage.DRAINING
        ):
            return None
        offsets = self.ledger.take([length])
        return None if offsets is None else Extent(offsets[0], length)

    def allocate_many(self, lengths: Sequence[int]) -> list[int] | None:
        """Take ranges for new objects, all or none; returns their offsets."""
        return self.ledger.take(lengths) if self.stage is HostStage.ACTIVE else None

    def seal(self, offsets: Sequence[int]) -> None:
        """Note that the objects written to ranges are in the directory from now on."""
        self.ledger.move(Event.SEAL, offsets)

    def release(self, offsets: Sequence[int]) -> None:
        """Free ranges without writers and readers."""
        if offsets:
            self.untake(offsets)
            self._on_space()

    def untake(self, offsets: Sequence[int]) -> None:
        """Free ranges that were just allocated. Waiters are not woken: they were free before."""
        self.ledger.move(Event.GIVE_BACK, offsets)

    # Objects that go.

    def drop(
        self, extent: Extent, free_at_ms: int, *, wait: bool = False
    ) -> asyncio.Future[None] | None:
        """Wipe an object's header; its space is free after that and not before ``free_at_ms``.

        Returns: if ``wait``, a future that is done once no reader takes the object for present:
            its header is gone; or the host is, and so are the leases of those who may reach it.
        """
        going = _Going(1) if wait else None
        done = None if going is None else going.done
        dropped = _Drop(extent, free_at_ms, going)
        if self.caller is None:
            self._finish_unwiped(dropped)
            return done
        self.ledger.drop(extent)
        self._drops[extent.offset] = dropped
        self._to_wipe.append(dropped)
        self._begin_wipes()
        return done

    def drop_many(
        self, offsets: Sequence[int], lengths: Sequence[int], free_at_ms: int
    ) -> asyncio.Future[None]:
        """Do as ``drop``, of sealed objects, with one future for all. REQUIRES: it is connected."""
        going = _Going(len(offsets))
        self.ledger.drop_many(offsets, lengths)
        extents = map(Extent._make, zip(offsets, lengths, strict=True))
        dropped = [_Drop(extent, free_at_ms, going) for extent in extents]
        self._drops.update(zip(offsets, dropped, strict=True))
        self._to_wipe += dropped
        self._begin_wipes()
        return going.done

    def _begin_wipes(self) -> None:
        if not self._is_wiping:
            self._is_wiping = True
            self.spawn(self._wipe())

    def forget(
        self, key: str, version: int, *, after: "asyncio.Future[None] | None" = None
    ) -> asyncio.Future[None]:
        """Have the host forget what its disk has of a key, up to a version.

        Args:
            key: of the object.
            version: and all below.
            after: not before this is done: a copy in memory could be written to the disk anew.

        Returns: done when no restart shows it any more, or the host is gone.
        """
        forget = _Forget(key, version, asyncio.get_running_loop().create_future())
        if after is None or after.done():
            self._queue_forget(forget, self.session)
        else:
            session = self.session
            after.add_done_callback(lambda _: self._queue_forget(forget, session))
        return forget.done

    def _queue_forget(self, forget: _Forget, session: int) -> None:
        if self.caller is None or session != self.session or self.disk is None:
            _settle(forget.done)
            return
        self._to_forget.append(forget)
        if not self._is_forgetting:
            self._is_forgetting = True
            self.spawn(self._send_forgets())

    async def _send_forgets(self) -> None:
        while self._to_forget:
            batch = self._to_forget[:WIPE_BATCH]
            keys = [forget.key for forget in batch]
            versions = [forget.version for forget in batch]
            try:
                await self.order("forget", ForgetObjects, Ack, keys=keys, versions=versions)
            except TandemError as error:
                logger.debug("event=forget_failed host=%s reason=%s", self.name, error)
                await asyncio.sleep(RETRY_S)
                continue
            del self._to_forget[: len(batch)]
            for forget in batch:
                _settle(forget.done)
        self._is_forgetting = False

    @property
    def has_dropped(self) -> bool:
        """True if the space of any dropped object is not free yet."""
        return bool(self._drops)

    def is_dropping(self, offset: int) -> bool:
        """Return True if the object there has been dropped, and its space is not free yet."""
        return offset in self._drops

    def watch_wipe(self, offset: int) -> "asyncio.Future[None] | None":
        """Return a future, done when the object dropped there is wiped; None if it is.

        It is also done when the host is lost: then it may not be.
        """
        dropped = self._drops[offset]
        if dropped.is_wiped:
            return None
        if dropped.going is None:
            dropped.going = _Going(1)
        return dropped.going.done

    def free_leased(self, now_ms: int) -> None:
        """Free the space whose last lease has ended; data of lost hosts cannot be read any more."""
        if self._unwiped:
            for _, going in [item for item in self._unwiped if item[0] <= now_ms]:
                going.end()
            self._unwiped = [item for item in self._unwiped if item[0] > now_ms]
        freed = self.ledger.end_leases(now_ms, self.guarded)
        for offset in freed:
            del self._drops[offset]
        if freed:
            self._on_space()

    async def _wipe(self) -> None:
        while self._to_wipe:
            batch, self._to_wipe = self._to_wipe[:WIPE_BATCH], self._to_wipe[WIPE_BATCH:]
            try:
                await self.order(
                    "wipe", WipeExtents, Ack, offsets=[dropped.extent.offset for dropped in batch]
                )
            except TandemError as error:
                logger.debug("event=wipe_failed host=%s reason=%s", self.name, error)
                self._to_wipe[:0] = batch
                await asyncio.sleep(RETRY_S)
                continue
            now_ms = self._now_ms()
            for dropped in self._free_wiped(batch, now_ms):
                dropped.is_wiped = True
                offset = dropped.extent.offset
                if self._drops.get(offset) is dropped and self.ledger.wipe(
                    offset,
                    until_ms=dropped.free_at_ms,
                    now_ms=now_ms,
                    is_guarded=offset in self.guarded,
                ):
                    del self._drops[offset]
                    self._on_space()
                self._finish(dropped)
        self._is_wiping = False

    def _free_wiped(self, batch: "list[_Drop]", now_ms: int) -> "list[_Drop]":
        """Free at once the space of those that nobody reads; return the others."""
        drops, guarded = self._drops, self.guarded
        free: list[_Drop] = []
        rest: list[_Drop] = []
        for dropped in batch:
            offset = dropped.extent.offset
            is_free = dropped.free_at_ms <= now_ms and offset not in guarded
            (free if is_free and drops.get(offset) is dropped else rest).append(dropped)
        if free:
            offsets = [dropped.extent.offset for dropped in free]
            self.ledger.move(Event.WIPE, offsets)
            for dropped, offset in zip(free, offsets, strict=True):
                dropped.is_wiped = True
                del drops[offset]
            for going, count in Counter(dropped.going for dropped in free).items():
                if going is not None:
                    going.end(count)
            self._on_space()
        return rest

    def _finish_unwiped(self, dropped: _Drop) -> None:
        """Note that the host is away: a client that reaches it all the same may still find the
        header.
        """
        until_ms = min(dropped.free_at_ms, self._read_until_ms)
        if dropped.going is None or until_ms <= self._now_ms():
            self._finish(dropped)
        else:
            self._unwiped.append((until_ms, dropped.going))

    def _now_ms(self) -> int:
        return int(self._clock.now_s() * 1e3)

    def _finish(self, dropped: _Drop) -> None:
        if dropped.going is not None:
            dropped.going.end()


def _fill(
    allocator: SegmentAllocator,
    offsets: npt.NDArray[np.uint64],
    lengths: npt.NDArray[np.uint64],
) -> None:
    order = np.argsort(offsets, kind="stable")
    allocator.rebuild(offsets[order], lengths[order])


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)

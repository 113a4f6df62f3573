"""One host as its master sees it: its orders, its free space, and what must happen before space is
free again.

Space has one of these states: free; held by an unfinished put; holding a sealed object; being wiped
(an object was dropped, its header must go first); leased (wiped, but a reader may still rely on the
bytes); quarantined (an unfinished put ended, its writer is not yet proven gone). Only the allocator
knows free from taken; this module decides when something is handed back to it.
"""

import asyncio
import heapq
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tandem._native import SegmentAllocator
from tandem.core.clock import Clock
from tandem.core.errors import CorruptionError, DeadlineError, PeerLostError, TandemError
from tandem.store.formats import layout
from tandem.store.master.policies import HostView
from tandem.store.master.state.orders import OrderLine
from tandem.store.messages import (
    Ack,
    CloseWriter,
    DiskStatus,
    Endpoint,
    ForgetObjects,
    HostStage,
    JoinHost,
    Opened,
    OpenWriter,
    Order,
    WipeExtents,
)
from tandem.store.patience import UsualTime
from tandem.store.sessions import Caller

__all__ = ["ORDER_TIMEOUT_S", "Extent", "HostSpace", "Writer"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

ORDER_TIMEOUT_S = 5.0
RETRY_S = 0.25
WIPE_BATCH = 5_000
GUARD_MS = 100
"""How soon a guarded extent is looked at again."""
LOAD_HALF_LIFE_S = 1.0
QUICK_ORDERS = frozenset({"seal", "wipe", "repin", "open_writer"})
"""Those that wait for nothing but the host's own thread."""
PATIENCE_FACTOR = 4.0
"""So many times what a host usually takes are waited for it, where another would do as well."""
MIN_PATIENCE_S = 0.25
"""A process that has to share its core may be away for a tenth of a second."""
OBJECT_PATIENCE_S = 50e-6
"""For each object of an order; sealing one takes some 2 us."""


class Extent(NamedTuple):
    """A range of a segment."""

    offset: int
    length: int


@dataclass(slots=True, eq=False)
class Writer:
    """A client's right to write to a host: asked for, or given (``base``)."""

    base: asyncio.Future[int]
    held: dict[int, tuple[Sequence[int], Sequence[int]]] = field(default_factory=dict)
    """By grant, of its unfinished puts: offsets and lengths of the extents."""


@dataclass(slots=True)
class _Drop:
    extent: Extent
    free_at_ms: int
    done: asyncio.Future[None] | None
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
        """What it will hold once its segment has grown, if that succeeds."""
        self.stage = HostStage.LOST
        self.is_leaving = False
        """To be drained, now or when it has joined again."""
        self.is_known = False
        """This master has seen its whole inventory once, so what it does not know is stale."""
        self.is_retired = False
        """Its operator has given it up: it is no member until it joins again."""
        self.dead_below = self.disk_dead_below = -1
        """What its segment, or disk, brings up to these versions is dead: it was retired."""
        self.unconfirmed_from = 0
        """The first round of tombstones of which it may have what they are for."""
        self.purging: list[asyncio.Future[Any]] = []
        """Done when what its inventory brought in vain is wiped."""
        self.caller: Caller | None = None
        self.line: OrderLine | None = None
        """Its orders; None without a session."""
        self.session = -1
        self.attempt = -1
        self.num_pages = 0
        self.disk: DiskStatus | None = None
        """Of its SSD tier, as it told last; None without one."""
        self.disk_id = ""
        self.disk_number = -1
        """Of its last report in this session."""
        self.damaged: list[str] = []
        """Of its segment, as it told when it joined."""
        self.is_disk_known = False
        """As ``is_known``, of its disk."""
        self.confirmed_disk: dict[int, int] = {}
        """Versions by row: what the inventory under way has shown to be on the disk."""
        self.confirmed: dict[int, Extent] = {}
        """By row: what the inventory under way has shown to be there."""
        self.allocator: SegmentAllocator | None = None
        self.quarantined_bytes = 0
        self.writers: dict[str, Writer] = {}
        self.guarded: set[int] = set()
        """Offsets that another host copies from: not free before that has ended."""
        self._clock = clock
        self._epoch = epoch
        self._on_space = on_space
        self._lease_ms = lease_ms
        self._read_until_ms = 0
        """While it is away: when the leases end of those who may still read what it has."""
        self._unwiped: list[tuple[int, asyncio.Future[None]]] = []
        """What could not be wiped, and when it is as good as wiped."""
        self._drops: dict[int, _Drop] = {}
        """By offset: dropped objects whose space is not free yet."""
        self._dropped_bytes = 0
        self._leased_bytes = 0
        self._to_wipe: list[_Drop] = []
        self._leased: list[tuple[int, int]] = []
        """Heap of (free_at_ms, offset): wiped, waiting for readers."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_wiping = False
        self._to_forget: list[_Forget] = []
        self._is_forgetting = False
        self._load_bytes = 0.0
        self._load_at_s = 0.0
        self._usual = UsualTime()
        """Of its quick orders."""
        self._unanswered: dict[object, float] = {}
        """Quick orders under way: when each was sent, oldest first."""
        self._doubted_s: float | None = None
        """When it let somebody down; None once it has answered an order sent since."""

    # Views.

    @property
    def is_writable(self) -> bool:
        """Whether new objects may go there."""
        return self.stage is HostStage.ACTIVE and self.allocator is not None

    @property
    def is_settled(self) -> bool:
        """Whether it is there and has told what it has."""
        return self.caller is not None and self.stage is not HostStage.JOINING

    @property
    def is_all_known(self) -> bool:
        """Whether what it has, and this master does not know of, is stale on each of its tiers."""
        return self.is_known and (self.disk is None or self.is_disk_known)

    @property
    def used_bytes(self) -> int:
        """Bytes that are not free, whatever they are."""
        return self.capacity_bytes if self.allocator is None else self.allocator.used_bytes

    @property
    def dropped_bytes(self) -> int:
        """Bytes of dropped objects that will be free, some only when their readers' leases end."""
        return self._dropped_bytes

    @property
    def leased_bytes(self) -> int:
        """Of these, what is wiped and waits for readers."""
        return self._leased_bytes

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
        """The host has come; its inventory follows."""
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
        """The host is gone, or has gone and come back: what was under way there is over."""
        self.caller, self.session = None, -1
        self._read_until_ms = self._now_ms() + self._lease_ms
        if self.line is not None:
            self.line.end()
            self.line = None
        self.stage = HostStage.LOST
        self.allocator = None
        self.quarantined_bytes = 0
        for task in list(self._tasks):
            task.cancel()
        self._unanswered.clear()
        self._doubted_s = None
        self.purging.clear()
        self._is_wiping = False
        for writer in self.writers.values():
            writer.base.cancel()
        self.writers.clear()
        self._to_wipe.clear()
        self._is_forgetting = False
        for forget in self._to_forget:
            _settle(forget.done)
        self._to_forget.clear()
        # A reader's lease outlives the session; what was not wiped is found by the next inventory.
        leased = {offset for _, offset in self._leased}
        for offset in [offset for offset in self._drops if offset not in leased]:
            self._finish_unwiped(self._forget(offset))

    def rebuild(self, extents: Iterable[Extent]) -> None:
        """Make the allocator, with these taken, and what readers may still rely on.

        Raises: CorruptionError if they overlap.
        """
        taken = sorted(extents)
        held = sorted(drop.extent for drop in self._drops.values())
        known = {extent.offset for extent in taken}
        merged = sorted([*taken, *(extent for extent in held if extent.offset not in known)])
        allocator = SegmentAllocator(self.capacity_bytes, granule_bytes=layout.GRANULE_BYTES)
        try:
            _fill(allocator, merged)
        except CorruptionError:
            _fill(allocator, taken)
            self._leased.clear()
            self._drops.clear()
            self._dropped_bytes = self._leased_bytes = 0
        self.allocator = allocator
        self._on_space()

    def grow(self, capacity_bytes: int, final_bytes: int) -> None:
        """More of the segment is usable, or it is known how much ever will be (0: it is not)."""
        self.final_bytes = final_bytes or max(self.final_bytes, capacity_bytes)
        if capacity_bytes > self.capacity_bytes:
            if self.allocator is not None:
                self.allocator.grow(capacity_bytes)
            self.capacity_bytes = capacity_bytes
        self._on_space()  # Also for who waits for what will not come.

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
        if self.line is None:
            raise PeerLostError("store.order", f"host {self.name} is not connected")
        if method not in QUICK_ORDERS:
            return await self.line.send(method, kind, response, timeout_s=timeout_s, **fields)
        sent_s, number, session = self._clock.now_s(), object(), self.session
        self._unanswered[number] = sent_s
        try:
            answer = await self.line.send(method, kind, response, timeout_s=timeout_s, **fields)
        except DeadlineError:
            if session == self.session:
                self.doubt()
            raise
        finally:
            self._unanswered.pop(number, None)
        self._note_answer(sent_s)
        return answer

    # Whether it answers.

    @property
    def is_silent(self) -> bool:
        """Whether it keeps others waiting for much longer than usual: better ask another."""
        if self._doubted_s is not None:
            return True
        oldest_s = next(iter(self._unanswered.values()), None)
        return oldest_s is not None and self._clock.now_s() - oldest_s > self.patience_s()

    def patience_s(self, num_objects: int = 0) -> float:
        """Return how long to wait for a quick order about so many objects, if others can do it."""
        usual_s = self._usual.multiply(
            PATIENCE_FACTOR, least_s=MIN_PATIENCE_S, most_s=ORDER_TIMEOUT_S
        )
        return min(usual_s + num_objects * OBJECT_PATIENCE_S, ORDER_TIMEOUT_S)

    def doubt(self) -> None:
        """It did not answer, or bytes did not arrive there: it is silent until it answers anew."""
        if self.caller is None:
            return
        is_new = self._doubted_s is None
        self._doubted_s = self._clock.now_s()
        if is_new:
            logger.warning("event=host_silent host=%s", self.name)
            self.spawn(self._probe())

    async def _probe(self) -> None:
        while self._doubted_s is not None:
            try:
                await self.order("wipe", WipeExtents, Ack, offsets=[])
            except TandemError as error:
                logger.debug("event=probe_failed host=%s reason=%s", self.name, error)
                await asyncio.sleep(RETRY_S)

    def _note_answer(self, sent_s: float) -> None:
        self._usual.note(self._clock.now_s() - sent_s)
        if self._doubted_s is not None and sent_s >= self._doubted_s:
            logger.info("event=host_answers host=%s", self.name)
            self._doubted_s = None
            self._on_space()

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
        if self.allocator is None:
            return None
        offsets = self.allocator.allocate([length])
        return None if offsets is None else Extent(offsets[0], length)

    def allocate_many(self, lengths: Sequence[int]) -> list[int] | None:
        """Take ranges for new objects, all or none; returns their offsets."""
        if self.stage is not HostStage.ACTIVE or self.allocator is None:
            return None
        return self.allocator.allocate(lengths)

    def release(self, offsets: Sequence[int], lengths: Sequence[int]) -> None:
        """Hand back ranges that nobody writes or reads."""
        if self.allocator is not None and offsets:
            self.untake(offsets, lengths)
            self._on_space()

    def untake(self, offsets: Sequence[int], lengths: Sequence[int]) -> None:
        """Hand back what was just allocated. No news to those who wait: it was free before."""
        assert self.allocator is not None
        self.allocator.release_many(offsets, lengths)

    # Objects that go.

    def drop(
        self, extent: Extent, free_at_ms: int, *, wait: bool = False
    ) -> asyncio.Future[None] | None:
        """Wipe an object's header; its space is free after that and not before ``free_at_ms``.

        Returns: if ``wait``, a future that is done once no reader takes the object for present:
            its header is gone; or the host is, and so are the leases of those who may reach it.
        """
        done = asyncio.get_running_loop().create_future() if wait else None
        dropped = _Drop(extent, free_at_ms, done)
        if self.caller is None:
            self._finish_unwiped(dropped)
            return done
        assert extent.offset not in self._drops, extent
        self._drops[extent.offset] = dropped
        self._dropped_bytes += extent.length
        self._to_wipe.append(dropped)
        if not self._is_wiping:
            self._is_wiping = True
            self.spawn(self._wipe())
        return done

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

    def is_dropping(self, offset: int) -> bool:
        """Whether the object there has been dropped, and its space is not free yet."""
        return offset in self._drops

    def watch_wipe(self, offset: int) -> "asyncio.Future[None] | None":
        """Return what is done when the object dropped there is wiped; None if it is.

        It is also done when the host is lost: then it may not be.
        """
        dropped = self._drops[offset]
        if dropped.is_wiped:
            return None
        if dropped.done is None:
            dropped.done = asyncio.get_running_loop().create_future()
        return dropped.done

    def free_leased(self, now_ms: int) -> None:
        """Free the space whose last lease has ended; what lost hosts hold can be read no more."""
        if self._unwiped:
            for _, done in [item for item in self._unwiped if item[0] <= now_ms]:
                _settle(done)
            self._unwiped = [item for item in self._unwiped if item[0] > now_ms]
        while self._leased and self._leased[0][0] <= now_ms:
            _, offset = heapq.heappop(self._leased)
            if offset in self.guarded:
                heapq.heappush(self._leased, (now_ms + GUARD_MS, offset))
                continue
            dropped = self._forget(offset)
            self._leased_bytes -= dropped.extent.length
            self._release_one(dropped.extent)

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
            for dropped in batch:
                dropped.is_wiped = True
                if dropped.free_at_ms > now_ms or dropped.extent.offset in self.guarded:
                    heapq.heappush(self._leased, (dropped.free_at_ms, dropped.extent.offset))
                    self._leased_bytes += dropped.extent.length
                else:
                    self._forget(dropped.extent.offset)
                    self._release_one(dropped.extent)
                self._finish(dropped)
        self._is_wiping = False

    def _release_one(self, extent: Extent) -> None:
        self.release([extent.offset], [extent.length])

    def _forget(self, offset: int) -> _Drop:
        dropped = self._drops.pop(offset)
        self._dropped_bytes -= dropped.extent.length
        return dropped

    def _finish_unwiped(self, dropped: _Drop) -> None:
        """The host is away: a client that reaches it all the same may still find the header."""
        until_ms = min(dropped.free_at_ms, self._read_until_ms)
        if dropped.done is None or until_ms <= self._now_ms():
            self._finish(dropped)
        else:
            self._unwiped.append((until_ms, dropped.done))

    def _now_ms(self) -> int:
        return int(self._clock.now_s() * 1e3)

    def _finish(self, dropped: _Drop) -> None:
        if dropped.done is not None:
            _settle(dropped.done)

    # Writers.

    async def open_writer(self, client: str) -> int:
        """Return where the segment begins for that client's writes, asking the host once.

        Raises: PeerLostError, DeadlineError.
        """
        writer = self._writer(client)
        try:
            return await asyncio.shield(writer.base)
        except asyncio.CancelledError:
            if writer.base.cancelled():  # Not we: the session ended, or the client was fenced.
                raise PeerLostError(
                    "store.write", f"host {self.name} was lost, or the client was shut out"
                ) from None
            raise

    def find_writer(self, client: str) -> int:
        """Return what ``open_writer`` would, if that is known already; else -1."""
        writer = self.writers.get(client)
        if writer is None or not writer.base.done() or writer.base.cancelled():
            return -1
        return -1 if writer.base.exception() is not None else writer.base.result()

    def hold(self, client: str, grant: int, offsets: Sequence[int], lengths: Sequence[int]) -> None:
        """Note that an unfinished put of ``client`` may write there."""
        self._writer(client).held[grant] = (offsets, lengths)

    def unhold(self, client: str, grant: int) -> bool:
        """The client says that it writes there no more. False: it was shut out before."""
        writer = self.writers.get(client)
        return writer is not None and writer.held.pop(grant, None) is not None

    def fence(self, client: str) -> None:
        """Shut a client out; what it held is free once it is proven to write no more."""
        writer = self.writers.pop(client, None)
        if writer is None:
            return
        self.quarantined_bytes += sum(sum(lengths) for _, lengths in writer.held.values())
        self.spawn(self._prove_gone(client, writer))

    def _writer(self, client: str) -> Writer:
        writer = self.writers.get(client)
        if writer is None:
            writer = Writer(asyncio.get_running_loop().create_future())
            writer.base.add_done_callback(_retrieve)
            self.writers[client] = writer
            self.spawn(self._ask_writer(client, writer))
        return writer

    async def _ask_writer(self, client: str, writer: Writer) -> None:
        # Not given up on a time-out: the host may have opened one, and only its base can close it.
        while not writer.base.done():
            try:
                opened = await self.order("open_writer", OpenWriter, Opened, client=client)
            except PeerLostError as error:
                if not writer.base.done():
                    writer.base.set_exception(error)
                return
            except TandemError as error:
                logger.debug("event=open_writer_failed host=%s reason=%s", self.name, error)
                await asyncio.sleep(RETRY_S)
                continue
            if not writer.base.done():
                writer.base.set_result(opened.write_base)

    async def _prove_gone(self, client: str, writer: Writer) -> None:
        try:
            base = await asyncio.shield(writer.base)
        except (TandemError, asyncio.CancelledError):
            return  # The session is over; the next inventory begins with closing all writers.
        while True:
            try:
                closed = await self.order("close_writer", CloseWriter, Ack, write_base=base)
            except TandemError as error:
                logger.debug("event=close_writer_failed host=%s reason=%s", self.name, error)
            else:
                if closed.ok:
                    break
                logger.warning("event=writer_lingers host=%s client=%s", self.name, client)
            await asyncio.sleep(RETRY_S)
        for offsets, lengths in writer.held.values():
            self.quarantined_bytes -= sum(lengths)
            self.release(offsets, lengths)


def _fill(allocator: SegmentAllocator, extents: Sequence[Extent]) -> None:
    offsets = np.array([extent.offset for extent in extents], dtype=np.uint64)
    lengths = np.array([extent.length for extent in extents], dtype=np.uint64)
    allocator.rebuild(offsets, lengths)


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def _retrieve(future: "asyncio.Future[int]") -> None:
    if not future.cancelled():
        future.exception()  # Whoever waits sees it; nobody may.

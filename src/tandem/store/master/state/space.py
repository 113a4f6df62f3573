"""One host as its master sees it: its session, the orders sent to it, and its space.

``ledger.py`` has the use of the space, ``writers`` the clients that may write, ``drops`` the
removed objects.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tandem._native import SegmentAllocator
from tandem.core.clock import Clock
from tandem.core.errors import CorruptionError, DeadlineError, PeerLostError, TandemError
from tandem.store.formats import layout
from tandem.store.master.policies import HostView
from tandem.store.master.state.answering import Answering
from tandem.store.master.state.drops import Drops
from tandem.store.master.state.ledger import Extent, ExtentEvent, Space, SpaceLedger
from tandem.store.master.state.orders import OrderLine
from tandem.store.master.state.writers import Writers
from tandem.store.messages import (
    Ack,
    DiskStatus,
    Endpoint,
    HostStage,
    JoinHost,
    Order,
    WipeExtents,
)
from tandem.store.sessions import Caller
from tandem.store.tasks import Tasks

__all__ = ["ORDER_TIMEOUT_S", "Extent", "HostSpace"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

ORDER_TIMEOUT_S = 5.0
RETRY_S = 0.25
LOAD_HALF_LIFE_S = 1.0
QUICK_ORDERS = frozenset({"seal", "wipe", "repin", "open_writer"})
"""Orders that wait for nothing but the host's own thread."""


class HostSpace:
    """A host, over all its sessions with this master. Used from one event loop.

    Args:
        number: the host's number in messages; never reused.
        name: the host's name.
        clock: times leases.
        epoch: returns the master's epoch, read at each order.
        on_space: called whenever space has become free.
        lease_ms: length of readers' leases.
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
        """Bytes of the segment once it has grown, if the growth succeeds."""
        self.stage = HostStage.LOST
        self.is_leaving = False
        """True if the host is to be drained, now or after its next join."""
        self.is_known = False
        """True if this master has seen the host's whole inventory once, so that objects unknown to
        the master are stale.
        """
        self.is_retired = False
        """True if the operator has retired the host: it is no member until it joins again."""
        self.dead_below = self.disk_dead_below = -1
        """Versions up to which objects in the host's segment, and on its disk, are dead: it was
        retired, or was missing when an administrator set the roster's floor.
        """
        self.unconfirmed_from = 0
        """Lowest round of tombstones whose dead objects the host may still have; ``ALL_CONFIRMED``
        if none.
        """
        self.purging: list[asyncio.Future[Any]] = []
        """Futures that are done when the dead objects of the host's inventory are wiped."""
        self.caller: Caller | None = None
        self.line: OrderLine | None = None
        """The orders of the session; None without a session."""
        self.session = -1
        self.attempt = -1
        self.num_pages = 0
        self.disk: DiskStatus | None = None
        """Status of the host's SSD tier as last reported; None without one."""
        self.disk_id: str = ""
        self.disk_number = -1
        """Number of the host's last disk report in this session."""
        self.damaged: list[str] = []
        """Parts of the host's segment that were corrupt, as reported when it joined."""
        self.is_disk_known = False
        """True if this master has seen the disk's whole inventory once."""
        self.confirmed_disk: dict[int, int] = {}
        """Versions by row of the objects on the disk, from the inventory that is arriving."""
        self.confirmed: dict[int, int] = {}
        """Lengths of extents by row, from the inventory that is arriving."""
        self.ledger = SpaceLedger()
        self._clock = clock
        self._epoch = epoch
        self._on_space = on_space
        self._tasks = Tasks()
        ways = self.ledger, self.order, self.spawn, on_space
        self.writers = Writers(name, *ways)
        self.drops = Drops(name, *ways, clock=clock, lease_ms=lease_ms)
        self._load_bytes = 0.0
        self._load_at_s = 0.0
        self._answering = Answering(ORDER_TIMEOUT_S)

    # The properties and methods below describe the host and the use of its space.

    @property
    def is_writable(self) -> bool:
        """True if new objects may be placed on the host."""
        return self.stage is HostStage.ACTIVE and self.ledger.allocator is not None

    @property
    def is_settled(self) -> bool:
        """True if the host is connected and has sent its inventory (list of objects) in this
        session.
        """
        return self.caller is not None and self.stage is not HostStage.JOINING

    @property
    def is_all_known(self) -> bool:
        """True if this master has seen all objects in the host's memory and on its disk, so that
        others that turn up there are stale.
        """
        return self.is_known and (self.disk is None or self.is_disk_known)

    @property
    def used_bytes(self) -> int:
        """Bytes of the segment that are not free, for any use."""
        allocator = self.ledger.allocator
        return self.capacity_bytes if allocator is None else allocator.used_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the ranges that are reserved for objects being written or copied."""
        return self.ledger.count_bytes(Space.HELD)

    @property
    def dropped_bytes(self) -> int:
        """Bytes of dropped objects: freed once wiped and without readers' leases."""
        return self.ledger.count_bytes(Space.WIPING) + self.leased_bytes

    @property
    def leased_bytes(self) -> int:
        """Bytes of the ranges of removed objects whose headers are wiped, and which readers' leases
        still keep from reuse.
        """
        return self.ledger.count_bytes(Space.LEASED)

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of ranges that are kept until the failed clients that were writing there are proven
        unable to write.
        """
        return self.ledger.count_bytes(Space.QUARANTINED)

    def view(self) -> HostView:
        """Return the facts about this host for the policies."""
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
        """Return the addresses that a client needs to reach the host's bytes."""
        return Endpoint(
            self.number, self.name, self.machine, self.address, self.read_base, write_base
        )

    def note_read(self, size_bytes: int) -> None:
        """Add bytes that a reader was sent to this host for to the load estimate."""
        self._load_bytes = self._decay_load() + size_bytes

    def _decay_load(self) -> float:
        now_s = self._clock.now_s()
        self._load_bytes *= 0.5 ** ((now_s - self._load_at_s) / LOAD_HALF_LIFE_S)
        self._load_at_s = now_s
        return self._load_bytes

    # The methods below begin and end sessions, and send orders to the host.

    def begin_session(self, caller: Caller, session: int, join: JoinHost) -> None:
        """Note that the host has joined with a new session. Its inventory (list of objects)
        follows.
        """
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
        self.drops.begin_session(has_disk=join.disk is not None)
        if join.disk_id != self.disk_id:
            self.disk_id, self.is_disk_known = join.disk_id, False
        self.confirmed_disk.clear()

    def end_session(self) -> None:
        """Note that the host's session has ended, also if the host has reconnected. All its running
        operations are over.
        """
        self.caller, self.session = None, -1
        if self.line is not None:
            self.line.end()
            self.line = None
        self.stage = HostStage.LOST
        self._tasks.cancel()
        self._answering.reset()
        self.purging.clear()
        self.writers.end()
        self.drops.end_session()

    def rebuild(self, offsets: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64]) -> None:
        """Make the allocator of the host's memory anew: taken are these extents of its inventory,
        and those of the earlier session that readers may still rely on.

        Raises: CorruptionError if the extents overlap.
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
        self.drops.keep({extent.offset for extent in carried})
        self.ledger.open(allocator, carried)
        self._on_space()

    def grow(self, capacity_bytes: int, final_bytes: int) -> None:
        """Note that more of the segment is usable, and its final size, 0 if that is unknown."""
        self.final_bytes = final_bytes or max(self.final_bytes, capacity_bytes)
        if capacity_bytes > self.capacity_bytes:
            self.ledger.grow(capacity_bytes)
            self.capacity_bytes = capacity_bytes
        self._on_space()  # This also wakes waiters for space that will never exist.

    async def order(
        self,
        method: str,
        kind: type[Order],
        response: type[T],
        *,
        timeout_s: float = ORDER_TIMEOUT_S,
        **fields: Any,
    ) -> T:
        """Send an order and wait for the answer. Raises: PeerLostError if the host is lost; see
        ``OrderLine.send``.
        """
        if self.line is None:
            raise PeerLostError("store.order", f"host {self.name} is not connected")
        sent_s = self._clock.now_s()
        answer = self.line.send(method, kind, response, timeout_s=timeout_s, **fields)
        return await (self._watch(answer, sent_s) if method in QUICK_ORDERS else answer)

    async def _watch(self, answering: Awaitable[T], sent_s: float) -> T:
        """Wait for the answer to an order that the host usually answers at once, and record how
        long it took.
        """
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

    # The methods below judge whether the host answers in time.

    @property
    def is_silent(self) -> bool:
        """True if the host has been silent for much longer than usual, so that another host is the
        better choice.
        """
        return self._answering.is_silent(self._clock.now_s())

    def answer_timeout_s(self, num_objects: int = 0) -> float:
        """Return how long to wait for a quick order about ``num_objects`` objects if other hosts
        could do it, seconds.
        """
        return self._answering.answer_timeout_s(num_objects)

    def doubt(self) -> None:
        """Note that the host did not answer, or that bytes did not reach it. It counts as silent
        until it answers a later order.
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
        """Run a coroutine in the background that is cancelled when the host's session ends."""
        self._tasks.spawn(work)

    # The methods below reserve and free space on the host.

    def allocate(self, length: int, *, is_load: bool = False) -> Extent | None:
        """Reserve a range; None without space. A draining host gives space only to loads from its
        own disk.
        """
        if self.stage is not HostStage.ACTIVE and not (
            is_load and self.stage is HostStage.DRAINING
        ):
            return None
        offsets = self.ledger.take([length])
        return None if offsets is None else Extent(offsets[0], length)

    def allocate_many(self, lengths: Sequence[int]) -> list[int] | None:
        """Reserve ranges for new objects, all or none. Return their offsets."""
        return self.ledger.take(lengths) if self.stage is HostStage.ACTIVE else None

    def seal(self, offsets: Sequence[int]) -> None:
        """Note that the objects written to these ranges are in the directory from now on."""
        self.ledger.move(ExtentEvent.SEAL, offsets)

    def release(self, offsets: Sequence[int]) -> None:
        """Free ranges that, as the caller ensures, have neither writers nor readers, and wake the
        puts that wait for space.
        """
        if offsets:
            self.untake(offsets)
            self._on_space()

    def untake(self, offsets: Sequence[int]) -> None:
        """Give back ranges that were just reserved, without waking the puts that wait for space:
        what is free now was free before.
        """
        self.ledger.move(ExtentEvent.GIVE_BACK, offsets)


def _fill(
    allocator: SegmentAllocator,
    offsets: npt.NDArray[np.uint64],
    lengths: npt.NDArray[np.uint64],
) -> None:
    order = np.argsort(offsets, kind="stable")
    allocator.rebuild(offsets[order], lengths[order])

"""Dropped objects of one host: wiped on the host, forgotten by its disk, and freed when no reader
has a lease.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tandem.core.clock import Clock
from tandem.core.errors import TandemError
from tandem.store.master.state.ledger import ExtentEvent, SpaceLedger
from tandem.store.master.state.orders import RETRY_S, OrderLine
from tandem.store.messages import Ack, ForgetObjects, WipeExtents

__all__ = ["Drops"]

logger = logging.getLogger(__name__)

WIPE_BATCH = 2_000


class _Going:
    """A group of dropped objects that a caller waits for. ``done`` is set when all of them are
    wiped.
    """

    __slots__ = ("count", "done")

    def __init__(self, count: int) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.count = count

    def end(self, count: int = 1) -> None:
        """Count ``count`` more objects of the group as wiped. The last one ends the caller's
        wait.
        """
        self.count -= count
        if self.count <= 0:
            _settle(self.done)


@dataclass(slots=True, eq=False)
class _Drop:
    offset: int
    free_at_ms: int
    going: _Going
    is_wiped: bool = False


@dataclass(slots=True, eq=False)
class _Forget:
    key: str
    version: int
    done: asyncio.Future[None]


class Drops:
    """The objects that a master has dropped (removed or evicted) from one host's memory, over all
    sessions with the host.

    Args:
        line: sends orders to the host; borrowed.
        ledger: the uses of the host's space; borrowed.
        on_space: called when space has become free.
        clock: times the leases.
        lease_ms: length of readers' leases.
    """

    def __init__(
        self,
        line: OrderLine,
        ledger: SpaceLedger,
        on_space: Callable[[], None],
        *,
        clock: Clock,
        lease_ms: int,
    ) -> None:
        self.guarded: set[int] = set()
        """Offsets that another host is copying from. They are not freed before the copy has
        ended.
        """
        self._line = line
        self._ledger = ledger
        self._on_space = on_space
        self._clock = clock
        self._lease_ms = lease_ms
        self._session: object | None = None
        """An object that identifies the session; None without a session."""
        self._has_disk = False
        self._read_until_ms = 0
        """Time when the last lease on the host's objects ends, while the host is absent."""
        self._unwiped: list[tuple[int, _Going]] = []
        """Objects of an absent host that cannot be wiped, with the time from which no client can
        read them.
        """
        self._drops: dict[int, _Drop] = {}
        """Dropped objects whose space is not free yet, by offset."""
        self._to_wipe: list[_Drop] = []
        self._to_forget: list[_Forget] = []
        self._forgetting: dict[str, _Forget] = {}
        """Running removals of disk records by key: the one of the highest version for each."""
        self._is_wiping = False
        self._is_forgetting = False

    def __bool__(self) -> bool:
        return bool(self._drops)

    def __contains__(self, offset: int) -> bool:
        """Return True if the object at ``offset`` was dropped and its space is not free yet."""
        return offset in self._drops

    # The methods below begin and end sessions with the host.

    def begin_session(self, *, has_disk: bool) -> None:
        """Note that the host has joined, and whether it has a disk, which must forget removed
        objects.
        """
        self._session, self._has_disk = object(), has_disk

    def end_session(self) -> None:
        """Note that the host's session has ended, and with it the tasks that have objects wiped."""
        self._session = None
        self._read_until_ms = self._now_ms() + self._lease_ms
        self._is_wiping = self._is_forgetting = False
        self._to_wipe.clear()
        for forget in self._to_forget:
            _settle(forget.done)
        self._to_forget.clear()
        # Keep leased extents, since readers' leases outlive the session. Objects that are not wiped
        # appear in the host's next inventory.
        self._ledger.close()
        for offset, dropped in list(self._drops.items()):
            if not dropped.is_wiped:
                del self._drops[offset]
                self._finish_unwiped(dropped)

    def keep(self, offsets: Collection[int]) -> None:
        """Forget all dropped objects except those at the given offsets, which a new session carries
        over from the last.
        """
        self._drops = {offset: drop for offset, drop in self._drops.items() if offset in offsets}

    # The methods below wipe objects in the host's memory, and free their space.

    def drop(
        self, offsets: Sequence[int], lengths: Sequence[int], free_at_ms: int
    ) -> "asyncio.Future[None]":
        """Have the host wipe objects' headers. Their space is free after that, and not before
        ``free_at_ms``.

        Returns: a future that is done when no reader can take an object for present: its header is
            wiped, or the host is lost and all leases on it have ended.
        """
        going = _Going(len(offsets))
        dropped = [_Drop(offset, free_at_ms, going) for offset in offsets]
        if self._session is None:
            for drop in dropped:
                self._finish_unwiped(drop)
            return going.done
        self._ledger.drop(offsets, lengths)
        self._drops.update(zip(offsets, dropped, strict=True))
        self._to_wipe += dropped
        if not self._is_wiping:
            self._is_wiping = True
            self._line.spawn(self._wipe())
        return going.done

    def watch_wipe(self, offset: int) -> "asyncio.Future[None] | None":
        """Return a future that is done when the object dropped at ``offset`` is wiped; None if it
        is wiped already. The caller ensures that one was dropped there.

        The future is also done when the host is lost, with the object possibly not wiped.
        """
        dropped = self._drops[offset]
        return None if dropped.is_wiped else dropped.going.done

    def free_leased(self, now_ms: int) -> None:
        """Free the ranges of wiped objects whose last lease has ended. For objects that a lost host
        did not wipe, end the callers' waits once no lease on the host is left.
        """
        if self._unwiped:
            for _, going in [item for item in self._unwiped if item[0] <= now_ms]:
                going.end()
            self._unwiped = [item for item in self._unwiped if item[0] > now_ms]
        freed = self._ledger.end_leases(now_ms, self.guarded)
        for offset in freed:
            del self._drops[offset]
        if freed:
            self._on_space()

    async def _wipe(self) -> None:
        while self._to_wipe:
            batch, self._to_wipe = self._to_wipe[:WIPE_BATCH], self._to_wipe[WIPE_BATCH:]
            try:
                await self._line.order(
                    "wipe", WipeExtents, Ack, offsets=[dropped.offset for dropped in batch]
                )
            except TandemError as error:
                logger.debug("event=wipe_failed host=%s reason=%s", self._line.host, error)
                self._to_wipe[:0] = batch
                await asyncio.sleep(RETRY_S)
            else:
                self._note_wiped(batch)
        self._is_wiping = False

    def _note_wiped(self, batch: Sequence[_Drop]) -> None:
        now_ms, free = self._now_ms(), list[int]()
        for dropped in batch:
            dropped.is_wiped = True
            offset = dropped.offset
            if self._drops.get(offset) is not dropped:
                continue
            if dropped.free_at_ms <= now_ms and offset not in self.guarded:
                free.append(offset)
            else:
                self._ledger.lease(offset, dropped.free_at_ms)
        if free:
            self._ledger.move(ExtentEvent.WIPE, free)
            for offset in free:
                del self._drops[offset]
            self._on_space()
        for going, count in Counter(dropped.going for dropped in batch).items():
            going.end(count)

    def _finish_unwiped(self, dropped: _Drop) -> None:
        """End the wait for the wipe of an object whose host is absent, or prolong it: a client that
        still reaches the host may find the header until its lease ends.
        """
        until_ms = min(dropped.free_at_ms, self._read_until_ms)
        if until_ms <= self._now_ms():
            self._finish(dropped)
        else:
            self._unwiped.append((until_ms, dropped.going))

    def _finish(self, dropped: _Drop) -> None:
        dropped.going.end()

    def _now_ms(self) -> int:
        return int(self._clock.now_s() * 1e3)

    # The methods below have the host's disk forget objects.

    def forget(
        self, key: str, version: int, *, after: "asyncio.Future[None] | None" = None
    ) -> "asyncio.Future[None]":
        """Have the host's disk forget a key up to a version.

        Args:
            key: the object's key.
            version: the record of this version and all older ones are forgotten.
            after: a future to wait for first, since a copy in memory could be written to the disk
                again.

        Returns: a future that is done when no restart would find the record, or the host is lost.
        """
        forget = _Forget(key, version, asyncio.get_running_loop().create_future())
        if not self.is_forgetting(key, version):
            self._forgetting[key] = forget
        forget.done.add_done_callback(lambda _: self._end_forget(forget))
        session = self._session
        if after is None or after.done():
            self._queue_forget(forget, session)
        else:
            after.add_done_callback(lambda _: self._queue_forget(forget, session))
        return forget.done

    def is_forgetting(self, key: str, version: int) -> bool:
        """Return True if the host's disk has been told to forget this version of the key."""
        forget = self._forgetting.get(key)
        return forget is not None and version <= forget.version

    def _end_forget(self, forget: _Forget) -> None:
        if self._forgetting.get(forget.key) is forget:
            del self._forgetting[forget.key]

    def _queue_forget(self, forget: _Forget, session: object | None) -> None:
        if session is None or session is not self._session or not self._has_disk:
            _settle(forget.done)
            return
        self._to_forget.append(forget)
        if not self._is_forgetting:
            self._is_forgetting = True
            self._line.spawn(self._send_forgets())

    async def _send_forgets(self) -> None:
        while self._to_forget:
            batch = self._to_forget[:WIPE_BATCH]
            keys = [forget.key for forget in batch]
            versions = [forget.version for forget in batch]
            try:
                await self._line.order("forget", ForgetObjects, Ack, keys=keys, versions=versions)
            except TandemError as error:
                logger.debug("event=forget_failed host=%s reason=%s", self._line.host, error)
                await asyncio.sleep(RETRY_S)
                continue
            del self._to_forget[: len(batch)]
            for forget in batch:
                _settle(forget.done)
        self._is_forgetting = False


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)

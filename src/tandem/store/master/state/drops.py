"""Dropped objects of one host: wiped and forgotten there, then free when nobody reads them."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.core.clock import Clock
from tandem.core.errors import TandemError
from tandem.store.master.state.ledger import ExtentEvent, SpaceLedger
from tandem.store.messages import Ack, ForgetObjects, WipeExtents

__all__ = ["Drops"]

logger = logging.getLogger(__name__)

RETRY_S = 0.25
WIPE_BATCH = 2_000


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
    """The dropped objects of one host, over all its sessions.

    Args:
        host: its name.
        ledger: of its space; borrowed.
        order: has the host do something, as ``HostSpace.order``.
        spawn: runs a coroutine that ends with the session.
        on_space: called when space has become free.
        clock: of leases.
        lease_ms: of readers.
    """

    def __init__(
        self,
        host: str,
        ledger: SpaceLedger,
        order: Callable[..., Awaitable[Any]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        on_space: Callable[[], None],
        *,
        clock: Clock,
        lease_ms: int,
    ) -> None:
        self.guarded: set[int] = set()
        """Offsets that another host copies from: not free before that has ended."""
        self._host = host
        self._ledger = ledger
        self._order = order
        self._spawn = spawn
        self._on_space = on_space
        self._clock = clock
        self._lease_ms = lease_ms
        self._session: object | None = None
        """Names the session; None without one."""
        self._has_disk = False
        self._read_until_ms = 0
        """While the host is away: when the last lease on its objects ends."""
        self._unwiped: list[tuple[int, _Going]] = []
        """Objects that could not be wiped, and when they are as good as wiped."""
        self._drops: dict[int, _Drop] = {}
        """By offset: dropped objects whose space is not free yet."""
        self._to_wipe: list[_Drop] = []
        self._to_forget: list[_Forget] = []
        self._forgetting: dict[str, _Forget] = {}
        """By key: of those that are not done, the one of the highest version."""
        self._is_wiping = False
        self._is_forgetting = False

    def __bool__(self) -> bool:
        return bool(self._drops)

    def __contains__(self, offset: int) -> bool:
        """Return True if the object there has been dropped, and its space is not free yet."""
        return offset in self._drops

    # Sessions.

    def begin_session(self, *, has_disk: bool) -> None:
        """Note that the host has come, perhaps with a disk that is to forget objects."""
        self._session, self._has_disk = object(), has_disk

    def end_session(self) -> None:
        """Note that the host has gone, and with it the tasks of its session."""
        self._session = None
        self._read_until_ms = self._now_ms() + self._lease_ms
        self._is_wiping = self._is_forgetting = False
        self._to_wipe.clear()
        for forget in self._to_forget:
            _settle(forget.done)
        self._to_forget.clear()
        # A reader's lease outlives the session; objects not wiped are in the next inventory.
        self._ledger.close()
        for offset, dropped in list(self._drops.items()):
            if not dropped.is_wiped:
                del self._drops[offset]
                self._finish_unwiped(dropped)

    def keep(self, offsets: Collection[int]) -> None:
        """Forget all drops but those at some offsets."""
        self._drops = {offset: drop for offset, drop in self._drops.items() if offset in offsets}

    # Objects in memory.

    def drop(
        self, offsets: Sequence[int], lengths: Sequence[int], free_at_ms: int
    ) -> "asyncio.Future[None]":
        """Wipe the headers of objects; their space is free then, and not before ``free_at_ms``.

        Returns: a future that is done once no reader takes one of them for present: the headers are
            gone; or the host is, and so are the leases of those who may reach it.
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
            self._spawn(self._wipe())
        return going.done

    def watch_wipe(self, offset: int) -> "asyncio.Future[None] | None":
        """Return a future, done when the object dropped there is wiped; None if it is.

        It is also done when the host is lost: then it may not be.
        """
        dropped = self._drops[offset]
        return None if dropped.is_wiped else dropped.going.done

    def free_leased(self, now_ms: int) -> None:
        """Free the space whose last lease has ended; data of lost hosts cannot be read any more."""
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
                await self._order(
                    "wipe", WipeExtents, Ack, offsets=[dropped.offset for dropped in batch]
                )
            except TandemError as error:
                logger.debug("event=wipe_failed host=%s reason=%s", self._host, error)
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
        """Note that the host is away: a client that reaches it all the same may still find the
        header.
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

    # Objects on the disk.

    def forget(
        self, key: str, version: int, *, after: "asyncio.Future[None] | None" = None
    ) -> "asyncio.Future[None]":
        """Have the host forget what its disk has of a key, up to a version.

        Args:
            key: of the object.
            version: and all below.
            after: not before this is done: a copy in memory could be written to the disk anew.

        Returns: done when no restart shows it any more, or the host is gone.
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
        """Return True if the disk of the host is about to forget an object."""
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
            self._spawn(self._send_forgets())

    async def _send_forgets(self) -> None:
        while self._to_forget:
            batch = self._to_forget[:WIPE_BATCH]
            keys = [forget.key for forget in batch]
            versions = [forget.version for forget in batch]
            try:
                await self._order("forget", ForgetObjects, Ack, keys=keys, versions=versions)
            except TandemError as error:
                logger.debug("event=forget_failed host=%s reason=%s", self._host, error)
                await asyncio.sleep(RETRY_S)
                continue
            del self._to_forget[: len(batch)]
            for forget in batch:
                _settle(forget.done)
        self._is_forgetting = False


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)

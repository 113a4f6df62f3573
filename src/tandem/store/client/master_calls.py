"""Calls of a client to its master, over all the master's lives."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from tandem.core.clock import Clock
from tandem.core.errors import DeadlineError, PeerLostError, TandemError, UnsentError
from tandem.store.config import StoreConfig
from tandem.store.interfaces import MasterChannel
from tandem.store.messages import Change, KeyBytes, Located
from tandem.store.tasks import Tasks

__all__ = ["MasterCalls", "RequestIds"]

logger = logging.getLogger(__name__)
T = TypeVar("T")
Answer = TypeVar("Answer", Located, KeyBytes)

CALL_TIMEOUT_S = 5.0
RETRY_S = 0.02
MIN_TIMEOUT_S = 1e-3
"""Least seconds of a transfer that begins when hardly anything is left of its deadline."""
FIRST_RETRY_S = 0.0005
"""Seconds of a key that was just changed: its old value is being wiped, which takes about this
long."""


class RequestIds:
    """Numbers of the requests of a client that change something, over all its threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 1
        self._asked: set[int] = set()

    def ask(self, count: int) -> tuple[int, int]:
        """Return the first of so many new ones, and the lowest that is not settled yet."""
        with self._lock:
            first = self._next
            self._next += count
            self._asked.add(first)
            return first, min(self._asked)

    def settle(self, first: int) -> None:
        """Note that the request with this first id has its answer, or its caller has given up."""
        with self._lock:
            self._asked.discard(first)


class MasterCalls:
    """Calls the master, again where that is harmless. Used from one event loop.

    Args:
        channel: the channel to the leading master.
        clock: of deadlines.
        config: limits and intervals.
        machine: told to the master, so that near replicas come first.
    """

    def __init__(
        self, channel: MasterChannel, *, clock: Clock, config: StoreConfig, machine: str
    ) -> None:
        self.channel = channel
        self.clock = clock
        self.config = config
        self.machine = machine
        self.ids = RequestIds()
        self._tasks = Tasks()

    def deadline_s(self) -> float:
        """Return when a call that begins now must be done."""
        return self.clock.now_s() + self.config.deadline_ms / 1e3

    # How to wait. A client that blocks its caller's thread replaces these steps.

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)

    async def pause(self, seconds: float, deadline_s: float) -> None:
        """Wait before something is tried again, up to a deadline."""
        await self.sleep(max(0.0, min(seconds, deadline_s - self.clock.now_s())))

    async def gather(self, *work: Coroutine[Any, Any, T]) -> "list[T | BaseException]":
        """Carry all of it out; what one raises is its result."""
        if len(work) == 1:
            try:
                return [await work[0]]
            except Exception as error:  # noqa: BLE001 - as asyncio.gather
                return [error]
        return await asyncio.gather(*work, return_exceptions=True)

    async def compute(self, function: Callable[[], T]) -> T:
        """Run what takes long without the GIL, so that others are served meanwhile."""
        return await asyncio.to_thread(function)

    async def ask(
        self, method: str, request: object, response: type[Answer], deadline_s: float
    ) -> Answer:
        """Ask about objects until the master knows what there is."""
        pause_s = FIRST_RETRY_S
        while True:
            answer = await self.call(method, request, response, deadline_s)
            if not answer.is_recovering:
                return answer
            await self.pause(pause_s, deadline_s)
            pause_s = min(2 * pause_s, RETRY_S)

    async def simple(self, method: str, request: object, response: type[T]) -> T:
        """Call within the configured deadline."""
        return await self.call(method, request, response, self.deadline_s())

    async def change(self, method: str, request: Change, response: type[T]) -> T:
        """Do as ``simple``, for what must not be done again by a copy that comes late."""
        number, settled_below = self.ids.ask(1)
        numbered = msgspec.structs.replace(request, number=number, settled_below=settled_below)
        try:
            return await self.simple(method, numbered, response)
        finally:
            self.ids.settle(number)

    async def tell(self, method: str, request: object, response: type[Any]) -> None:
        """Call once; whether it comes does not matter."""
        try:
            await self.channel.call(method, request, response, timeout_s=CALL_TIMEOUT_S)
        except TandemError as error:
            logger.debug("event=untold method=%s reason=%s", method, error)

    async def call(
        self,
        method: str,
        request: object,
        response: type[T],
        deadline_s: float,
        *,
        extra_s: float = 0.0,
    ) -> T:
        """Call the master, again while it is away; every request is harmless when it comes twice.

        Raises: DeadlineError; what the master says.
        """
        while True:
            left_s = self.left_s(deadline_s)
            try:
                return await self.channel.call(
                    method, request, response, timeout_s=min(left_s, CALL_TIMEOUT_S + extra_s)
                )
            except (PeerLostError, DeadlineError) as error:
                logger.debug("event=call_again method=%s reason=%s", method, error)
                if self.clock.now_s() + RETRY_S >= deadline_s:
                    raise
            except UnsentError as error:
                logger.debug("event=call_again method=%s reason=%s", method, error)
            await self.pause(RETRY_S, deadline_s)
            await self.channel.wait_connected(self.left_s(deadline_s))

    def begin(
        self,
        method: str,
        request: object,
        response: type[T],
        deadline_s: float,
        *,
        extra_s: float = 0.0,
    ) -> Awaitable[T]:
        """Do as ``call``, but return what waits for the answer; it is to be awaited once."""
        return asyncio.ensure_future(
            self.call(method, request, response, deadline_s, extra_s=extra_s)
        )

    def left_s(self, deadline_s: float) -> float:
        """Return the time left, seconds. Raises: DeadlineError."""
        left_s = deadline_s - self.clock.now_s()
        if left_s <= 0:
            raise DeadlineError(
                "store.call", f"not done within {self.config.deadline_ms} ms (store.deadline_ms)"
            )
        return left_s

    def spawn(self, work: Any) -> None:
        """Run a coroutine behind."""
        self._tasks.spawn(work)

    async def aclose(self) -> None:
        """End what runs behind."""
        await self._tasks.aclose()

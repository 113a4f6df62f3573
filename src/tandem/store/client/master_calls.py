"""Calls of a client to its master, repeated over restarts of the master."""

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
"""Shortest timeout in seconds of a transfer that begins when its deadline is nearly over."""
FIRST_RETRY_S = 0.0005
"""First pause in seconds before a key that was just changed is asked for again. Wiping its old
object takes about this long.
"""


class RequestIds:
    """Numbers of a client's requests that change something, shared by all its threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 1
        self._asked: set[int] = set()

    def ask(self, count: int) -> tuple[int, int]:
        """Return the first of ``count`` new numbers, and the lowest number that is not settled."""
        with self._lock:
            first = self._next
            self._next += count
            self._asked.add(first)
            return first, min(self._asked)

    def settle(self, first: int) -> None:
        """Note that the request with this first number has its answer, or that its caller has given
        up.
        """
        with self._lock:
            self._asked.discard(first)


class MasterCalls:
    """Calls of the master, repeated if that is harmless. Used from one event loop.

    Args:
        channel: the channel to the leading master.
        clock: times deadlines.
        config: limits and intervals.
        machine: sent to the master, so that replicas near the client come first.
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
        """Return the deadline of a call that begins now, on the client's clock."""
        return self.clock.now_s() + self.config.deadline_ms / 1e3

    # The methods below wait in asyncio. A client that blocks its caller's thread overrides them.

    async def sleep(self, seconds: float) -> None:
        """Wait for ``seconds``."""
        await asyncio.sleep(seconds)

    async def pause(self, seconds: float, deadline_s: float) -> None:
        """Wait before a retry, no longer than up to the deadline."""
        await self.sleep(max(0.0, min(seconds, deadline_s - self.clock.now_s())))

    async def gather(self, *work: Coroutine[Any, Any, T]) -> "list[T | BaseException]":
        """Run all coroutines, and return their results or errors."""
        if len(work) == 1:
            try:
                return [await work[0]]
            except Exception as error:  # noqa: BLE001 - as asyncio.gather
                return [error]
        return await asyncio.gather(*work, return_exceptions=True)

    async def compute(self, function: Callable[[], T]) -> T:
        """Run a long computation that releases the GIL in a thread, so that the event loop stays
        free.
        """
        return await asyncio.to_thread(function)

    async def ask(
        self, method: str, request: object, response: type[Answer], deadline_s: float
    ) -> Answer:
        """Ask the master about objects, and repeat until it knows the answer for all of them."""
        pause_s = FIRST_RETRY_S
        while True:
            answer = await self.call(method, request, response, deadline_s)
            if not answer.is_recovering:
                return answer
            await self.pause(pause_s, deadline_s)
            pause_s = min(2 * pause_s, RETRY_S)

    async def simple(self, method: str, request: object, response: type[T]) -> T:
        """Call a method of the master within the configured deadline, and return the answer."""
        return await self.call(method, request, response, self.deadline_s())

    async def change(self, method: str, request: Change, response: type[T]) -> T:
        """Call a method that changes something, with a number that lets the master refuse late
        copies.
        """
        number, settled_below = self.ids.ask(1)
        numbered = msgspec.structs.replace(request, number=number, settled_below=settled_below)
        try:
            return await self.simple(method, numbered, response)
        finally:
            self.ids.settle(number)

    async def tell(self, method: str, request: object, response: type[Any]) -> None:
        """Call a method of the master once, without retries, and ignore failures and the answer."""
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
        """Call the master, and repeat while it is away. Every request is harmless when it arrives
        twice.

        Raises: DeadlineError (no answer by the deadline); the master's errors.
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
        """Begin a call like ``call``, and return an awaitable of the answer, to be awaited once."""
        return asyncio.ensure_future(
            self.call(method, request, response, deadline_s, extra_s=extra_s)
        )

    def left_s(self, deadline_s: float) -> float:
        """Return the seconds left until a deadline. Raises: DeadlineError (none is left)."""
        left_s = deadline_s - self.clock.now_s()
        if left_s <= 0:
            raise DeadlineError(
                "store.call", f"not done within {self.config.deadline_ms} ms (store.deadline_ms)"
            )
        return left_s

    def spawn(self, work: Any) -> None:
        """Run a coroutine in the background."""
        self._tasks.spawn(work)

    async def aclose(self) -> None:
        """Cancel all background tasks."""
        await self._tasks.aclose()

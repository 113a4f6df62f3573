"""Blocking calls of a client: they run on the caller's thread, without waking an event loop.

The calls are the coroutines of ``AsyncStoreClient``. Here all that they wait for blocks the thread
instead of suspending the coroutine, so that each runs to its end without an event loop. The parts
that cannot block so are run by the client's event loop in another thread.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from tandem.core.errors import (
    DeadlineError,
    InternalError,
    PeerLostError,
    UnsentError,
)
from tandem.rpc import BegunCall, run_threadsafe
from tandem.store.client.client import AsyncStoreClient
from tandem.store.client.master_calls import MasterCalls
from tandem.store.interfaces import ClientPort, ThreadChannel

__all__ = ["drive", "make_blocking_client"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

LOST_ERRORS = (PeerLostError, DeadlineError, UnsentError)
"""Errors after which the event loop repeats a call, if time is left."""


def drive(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of a blocking client to its end on this thread, and return its result.

    The coroutine must not suspend.

    Raises: InternalError (the coroutine suspends); the errors of the coroutine.
    """
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    raise InternalError("store.call", "a blocking client tried to wait for its loop")


def make_blocking_client(
    client: AsyncStoreClient,
    channel: ThreadChannel,
    port: ClientPort,
    loop: asyncio.AbstractEventLoop,
) -> AsyncStoreClient:
    """Return a client whose coroutines block the thread and never suspend, so that ``drive`` can
    run them on any thread but the event loop's.

    Args:
        client: the client whose session with the master is used; it belongs to ``loop``.
        channel: the channel to the master, for calls from other threads.
        port: the data path, whose calls block the thread and never suspend.
        loop: runs the parts that cannot block.
    """
    return client.make_twin(_BlockingCalls(client.calls, channel, loop), port)


class _BlockingCalls(MasterCalls):
    def __init__(
        self, calls: MasterCalls, channel: ThreadChannel, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(channel, clock=calls.clock, config=calls.config, machine=calls.machine)
        self.ids = calls.ids
        self._loop_calls = calls
        self._channel = channel
        self._loop = loop

    async def sleep(self, seconds: float) -> None:
        # Return at once for zero seconds: ``time.sleep(0)`` would take as long as the timer's
        # slack, and a begun call is sent already.
        if seconds > 0:
            time.sleep(seconds)

    async def gather(self, *work: Coroutine[Any, Any, T]) -> "list[T | BaseException]":
        results: list[T | BaseException] = []
        try:
            for each in work:
                try:
                    results.append(await each)
                except Exception as error:  # noqa: BLE001 - as asyncio.gather
                    results.append(error)
        finally:
            for each in work[len(results) :]:  # An interrupt leaves these.
                each.close()
        return results

    async def compute(self, function: Callable[[], T]) -> T:
        return function()

    async def call(
        self,
        method: str,
        request: object,
        response: type[T],
        deadline_s: float,
        *,
        extra_s: float = 0.0,
    ) -> T:
        return await self.begin(method, request, response, deadline_s, extra_s=extra_s)

    def begin(
        self,
        method: str,
        request: object,
        response: type[T],
        deadline_s: float,
        *,
        extra_s: float = 0.0,
    ) -> Awaitable[T]:
        timeout_s = self.left_s(deadline_s)
        begun: BegunCall[T] | None = None
        with contextlib.suppress(*LOST_ERRORS):
            begun = self._channel.begin_threadsafe(method, request, response, timeout_s=timeout_s)

        return _Answer(self, begun, (method, request, response), deadline_s, extra_s)

    def wait(
        self,
        begun: "BegunCall[T] | None",
        call: tuple[str, object, type[T]],
        deadline_s: float,
        extra_s: float,
    ) -> T:
        """Wait for the answer to a call, and make it by the event loop if it did not begin here or
        its outcome is unknown.
        """
        if begun is not None:
            try:
                return begun.wait(self.left_s(deadline_s))
            except LOST_ERRORS as error:
                # A request that arrives twice is harmless.
                logger.debug("event=call_again method=%s reason=%s", call[0], error)
        left_s = self.left_s(deadline_s)  # Its error must not leave a coroutine behind.
        again = self._loop_calls.call(*call, deadline_s, extra_s=extra_s)
        return run_threadsafe(again, self._loop, left_s)

    async def tell(self, method: str, request: object, response: type[Any]) -> None:
        # Have the event loop send the message, and do not wait for that, since the caller's
        # deadline may be over.
        with contextlib.suppress(RuntimeError):  # The loop has ended.
            self._loop.call_soon_threadsafe(
                lambda: self._loop_calls.spawn(self._loop_calls.tell(method, request, response))
            )

    def spawn(self, work: Any) -> None:
        # Run the coroutine on this thread: a blocking client's coroutines never suspend, so that it
        # ends within this call.
        drive(work)

    async def aclose(self) -> None:
        """Do nothing, since this client has no background tasks."""


class _Answer(Generic[T]):
    """The answer to a call that has begun, to be awaited on the thread that began it. Unlike a
    coroutine it may be dropped, as an interrupt between both does.
    """

    def __init__(
        self,
        calls: _BlockingCalls,
        begun: "BegunCall[T] | None",
        call: tuple[str, object, type[T]],
        deadline_s: float,
        extra_s: float,
    ) -> None:
        self._arguments = begun, call, deadline_s, extra_s
        self._calls = calls

    def __await__(self) -> Generator[None, None, T]:
        yield from ()
        return self._calls.wait(*self._arguments)

"""Runs a client's steps on the caller's thread: no event loop is woken.

The steps are those of ``AsyncStoreClient``, whose coroutines never suspend when everything that
they wait for blocks instead. What cannot be done so is done by the client's loop.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tandem.core.errors import (
    DeadlineError,
    InternalError,
    PeerLostError,
    TandemError,
    UnsentError,
)
from tandem.rpc import BegunCall
from tandem.store.client.client import AsyncStoreClient
from tandem.store.client.master_calls import MasterCalls
from tandem.store.interfaces import Piece, ThreadChannel
from tandem.store.messages import Endpoint
from tandem.transfer import Buffer, Op, Segment, TransferEngine

__all__ = ["drive", "make_blocking_client"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

OPEN_TIMEOUT_S = 3.0
LOST_ERRORS = (PeerLostError, DeadlineError, UnsentError)
"""Errors of a call that the loop makes again, if time is left."""
LOOP_GRACE_S = 1.0
"""By how much the loop may be late with the end of a call that it makes for a thread."""


def drive(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of a blocking client to its end, on this thread."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    raise InternalError("store.call", "a blocking client tried to wait for its loop")


def make_blocking_client(
    client: AsyncStoreClient,
    channel: ThreadChannel,
    engine: TransferEngine,
    loop: asyncio.AbstractEventLoop,
) -> AsyncStoreClient:
    """Return a twin of ``client``, which belongs to ``loop``, for ``drive`` on any other thread."""
    return client.make_twin(_BlockingCalls(client.calls, channel, loop), _BlockingPort(engine))


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
        # A begun call has left already, and a sleep of nothing takes as long as the timer's slack.
        if seconds > 0:
            time.sleep(seconds)

    async def gather(self, *work: Coroutine[Any, Any, T]) -> "list[T | BaseException]":
        results: list[T | BaseException] = []
        for each in work:
            try:
                results.append(await each)
            except Exception as error:  # noqa: BLE001 - as asyncio.gather
                results.append(error)
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

        async def wait() -> T:
            if begun is not None:
                try:
                    return begun.wait(self.left_s(deadline_s))
                except LOST_ERRORS as error:
                    # Whatever became of it: requests may come twice.
                    logger.debug("event=call_again method=%s reason=%s", method, error)
            again = self._loop_calls.call(method, request, response, deadline_s, extra_s=extra_s)
            return self._wait(again, deadline_s)

        return wait()

    async def tell(self, method: str, request: object, response: type[Any]) -> None:
        # Not awaited here: the caller's deadline may be over.
        with contextlib.suppress(RuntimeError):  # The loop has ended.
            self._loop.call_soon_threadsafe(
                lambda: self._loop_calls.spawn(self._loop_calls.tell(method, request, response))
            )

    def spawn(self, work: Any) -> None:
        # Made for our steps, which block: they are over at once.
        drive(work)

    async def aclose(self) -> None:
        """Nothing of its own runs behind."""

    def _wait(self, work: Coroutine[Any, Any, T], deadline_s: float) -> T:
        """Have the loop do it. It keeps the deadline itself; a loop that hangs holds up nobody."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(self.left_s(deadline_s) + LOOP_GRACE_S)
        except TandemError:
            raise
        except TimeoutError:
            raise DeadlineError("store.call", "the client's loop does not answer") from None
        finally:
            future.cancel()
            # Its error's traceback has this frame: a cycle, which would keep the begun call.
            del future


class _BlockingPort:
    """The data path, blocking; opens peers for itself."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._opened: dict[str, Segment] = {}

    def register(self, memory: npt.NDArray[np.uint8]) -> Buffer:
        return self._engine.register(memory, remote=False)

    def unregister(self, handle: Buffer) -> None:
        self._engine.unregister(handle)

    async def write(self, endpoint: Endpoint, pieces: Sequence[Piece], timeout_s: float) -> None:
        self._move(Op.WRITE, endpoint, pieces, timeout_s)

    async def read(self, endpoint: Endpoint, pieces: Sequence[Piece], timeout_s: float) -> None:
        self._move(Op.READ, endpoint, pieces, timeout_s)

    def _move(self, op: Op, endpoint: Endpoint, pieces: Sequence[Piece], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        segment = self._open(endpoint.address, min(timeout_s, OPEN_TIMEOUT_S))
        left_s = max(0.001, deadline_s - time.monotonic())
        try:
            self._engine.submit_ranges(op, segment, pieces, deadline_s=left_s).wait()
        except PeerLostError:
            self._drop(endpoint.address)
            raise

    def _open(self, address: str, timeout_s: float) -> Segment:
        segment = self._opened.get(address)
        if segment is not None:
            return segment
        opened = self._engine.open(address, deadline_s=timeout_s)
        with self._lock:
            segment = self._opened.setdefault(address, opened)
        if segment is not opened:
            opened.close()
        return segment

    def _drop(self, address: str) -> None:
        with self._lock:
            segment = self._opened.pop(address, None)
        if segment is not None:
            try:
                segment.close()
            except TandemError:
                return  # Gone already.

"""Calls: small requests that a peer's handler answers, when the round-trip time dominates.

The Python side of both ends: the thread or event loop that passes calls to the handler in batches,
and the futures of awaited calls. Queues, deadlines and the wire are native. A call with an answer
was executed exactly once; a failed one was executed once or not at all.
"""

import asyncio
import itertools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tandem._native import (
    CallInbox,
    CallSource,
    CoreCall,
    CoreIncomingCall,
    TransferCore,
    answer_calls,
)
from tandem.core.errors import ConfigError, DeadlineError, TandemError
from tandem.transfer.polling_loop import PollingLoop

__all__ = [
    "MAX_CALL_BYTES",
    "AwaitedCall",
    "Call",
    "CallHandler",
    "PendingCall",
    "begin_awaited",
    "serve_on_loop",
    "start_serving",
]

MAX_CALL_BYTES = 1 << 20
"""Limit in bytes of a request, and of an answer. Larger data is moved by transfers."""

LOOK_GAP_S = 0.01
"""Seconds between two searches for awaited calls whose deadline has passed."""

logger = logging.getLogger(__name__)


class Call:
    """A peer's call, as its handler receives it.

    If it is dropped without an answer, it is refused with InternalError, so that its caller does
    not wait. ``peer`` is the name that the caller gave itself: any holder of the secret may use any
    name.
    """

    __slots__ = ("_core", "payload", "peer")

    def __init__(self, core: CoreIncomingCall) -> None:
        self._core = core
        self.peer = core.peer
        self.payload = core.payload

    def reply(self, payload: bytes) -> bool:
        """Answer the call, from any thread. Return False if it was answered before or its caller is
        gone.

        Raises: ConfigError (more than MAX_CALL_BYTES).
        """
        if len(payload) > MAX_CALL_BYTES:
            raise ConfigError(
                "transfer.reply",
                f"{len(payload)} bytes, at most {MAX_CALL_BYTES}: bulk bytes are transfers",
                field="payload",
            )
        return self._core.answer(payload)

    def fail(self, error: TandemError) -> bool:
        """Answer the call with an error, from any thread. Return False as ``reply`` does."""
        return self._core.answer(_describe(error))


CallHandler = Callable[[list[Call]], Sequence[bytes | TandemError | None]]
"""A handler: takes the calls that have arrived, in order for each peer, and returns an answer for
each: bytes, an error, or None for a call that it answers later. An exception is the error of all
callers.
"""


def start_serving(core: TransferCore, handler: CallHandler) -> threading.Thread:
    """Pass calls to the handler on a new thread, until the engine is closed.

    Raises: ConflictError (there is a handler already, or the engine is closed).
    """
    core.serve_calls()
    # Make it a daemon thread, since a handler that hangs must not keep the process from ending.
    thread = threading.Thread(target=_serve, args=(core, handler), name="tandem-calls", daemon=True)
    thread.start()
    return thread


def _serve(core: TransferCore, handler: CallHandler) -> None:
    while (taken := core.wait_calls()) is not None:
        answers = _handle(handler, [Call(core_call) for core_call in taken])
        # Drop the references to the calls now: a call that the handler neither answered nor kept is
        # refused when it is freed, and this should not wait until the next calls arrive.
        del taken
        answer_calls(answers)
        del answers


def serve_on_loop(
    core: TransferCore, handler: CallHandler, loop: asyncio.AbstractEventLoop
) -> None:
    """Pass calls to the handler on an event loop, until the engine is closed.

    Args:
        core: the engine's native core.
        handler: see ``CallHandler``.
        loop: the event loop of the calling thread.

    Raises: as ``start_serving``.
    """
    server = _LoopServer(core.serve_calls_on_fd(), handler, loop)
    server.start()


class _LoopServer:
    """Passes the calls of peers to the handler on an event loop, which holds the only reference to
    this object.
    """

    def __init__(
        self, source: CallSource, handler: CallHandler, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._source = source
        self._handler = handler
        self._loop = loop

    def start(self) -> None:
        """Begin to pass arriving calls to the handler on the event loop."""
        self._loop.add_reader(self._source.fileno(), self._serve)
        if isinstance(self._loop, PollingLoop):
            self._loop.add_source(self._source)

    def _serve(self) -> None:
        taken = self._source.take()
        if taken is None:  # The engine is closed.
            self._loop.remove_reader(self._source.fileno())
            if isinstance(self._loop, PollingLoop):
                self._loop.remove_source(self._source)
            return
        answers = _handle(self._handler, [Call(core_call) for core_call in taken])
        del taken
        answer_calls(answers)
        _expect_calls(self._loop)


def _expect_calls(loop: asyncio.AbstractEventLoop) -> None:
    if isinstance(loop, PollingLoop):
        loop.expect_calls()


def _handle(
    handler: CallHandler, calls: list[Call]
) -> list[tuple[CoreIncomingCall, bytes | tuple[str, str, str]]]:
    try:
        answers = handler(calls)
        if len(answers) != len(calls):
            raise RuntimeError(f"{len(answers)} answers to {len(calls)} calls")  # noqa: TRY301
        return [
            (call._core, answer if isinstance(answer, bytes) else _describe(answer))
            for call, answer in zip(calls, answers, strict=True)
            if answer is not None
        ]
    except TandemError as error:
        described = _describe(error)
    except Exception as error:
        logger.exception("the handler of calls raised")
        described = ("internal", "transfer.serve_calls", f"the handler raised {error!r:.200}")
    return [(call._core, described) for call in calls]


def _describe(error: TandemError) -> tuple[str, str, str]:
    return error.code, error.where, error.what


class _LoopCalls:
    """The calls that one event loop awaits. Holds no reference to the loop, which is its key in a
    weak dictionary.
    """

    def __init__(self) -> None:
        self.inbox = CallInbox()
        self.waiting: dict[int, _Waiting] = {}
        self._tags = itertools.count(1)
        self._looks_at_s = math.inf
        """Time at which the event loop next checks for calls whose deadline has passed; infinity
        without calls.
        """
        self._timer: weakref.ref[asyncio.TimerHandle] | None = None

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the event loop wake the calls that end, from now on."""
        loop.add_reader(self.inbox.fileno(), self.wake)

    def wake(self) -> None:
        """Resume the coroutines whose calls have ended, as the native core reports."""
        for tag in self.inbox.take():
            waiting = self.waiting.get(tag)
            if waiting is not None and not waiting.ended.done():
                waiting.ended.set_result(None)

    def wait(self, loop: asyncio.AbstractEventLoop, deadline_s: float) -> "tuple[int, _Waiting]":
        """Return the tag of a new call (the number by which the native core reports its end), and
        its future, which ends with the call or after ``deadline_s``.
        """
        tag, until_s = next(self._tags), loop.time() + deadline_s
        waiting = self.waiting[tag] = _Waiting(loop.create_future(), until_s)
        # One timer serves all calls, since one for each would cost more than the rest of this
        # function.
        if until_s < self._looks_at_s:
            self._look_at(until_s, loop)
        return tag, waiting

    def _look_at(self, when_s: float, loop: asyncio.AbstractEventLoop) -> None:
        timer = None if self._timer is None else self._timer()
        if timer is not None:
            timer.cancel()
        self._looks_at_s = when_s
        self._timer = weakref.ref(loop.call_at(when_s, self._expire, loop))

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the calls whose deadline has passed, and set the timer for the next deadline."""
        now_s = loop.time()
        late = [waiting.ended for waiting in self.waiting.values() if waiting.until_s <= now_s]
        next_s = min((w.until_s for w in self.waiting.values() if w.until_s > now_s), default=None)
        self._looks_at_s, self._timer = math.inf, None
        if next_s is not None:
            # Wait at least ``LOOK_GAP_S``, so that many hanging peers do not cause a pass over all
            # calls for each of them.
            self._look_at(max(next_s, now_s + LOOK_GAP_S), loop)
        for ended in late:
            if not ended.done():
                ended.set_exception(
                    DeadlineError("transfer.call", "no answer in time: executed once or not at all")
                )


class _Waiting(NamedTuple):
    """A call that a coroutine awaits: its future and its deadline."""

    ended: asyncio.Future[None]
    until_s: float


_loops: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopCalls]" = (
    weakref.WeakKeyDictionary()
)


class PendingCall:
    """A call that was begun and whose answer a thread may wait for; made by
    ``TransferEngine.begin_call``.
    """

    __slots__ = ("_core",)

    def __init__(self, core: CoreCall) -> None:
        self._core = core

    def wait(self, deadline_s: float) -> bytes:
        """Wait for the answer without the GIL, for ``deadline_s`` at most.

        Raises: as ``TransferEngine.call``; ConflictError if it has returned or raised before.
        """
        return self._core.wait(deadline_s)


class AwaitedCall:
    """A call to a peer that was begun on an event loop, to be awaited there; made by
    ``begin_awaited``.
    """

    __slots__ = ("_calls", "_core", "_tag", "_waiting")

    def __init__(self, core: CoreCall, calls: _LoopCalls, tag: int, waiting: _Waiting) -> None:
        self._core = core
        self._calls = calls
        self._tag = tag
        self._waiting = waiting

    async def wait(self) -> bytes:
        """Wait for the answer, once. Cancelling the wait abandons the call.

        Raises: as ``TransferEngine.call``.
        """
        try:
            try:
                await self._waiting.ended
            except BaseException:
                self._core.abandon()
                raise
            return self._core.take_answer()
        finally:
            del self._calls.waiting[self._tag]


def begin_awaited(
    core: TransferCore, segment_id: int, payload: bytes, deadline_s: float
) -> AwaitedCall:
    """Send a call from the running event loop, without blocking it.

    Raises: as ``TransferEngine.begin_call``.
    """
    loop = asyncio.get_running_loop()
    calls = _loops.get(loop)
    if calls is None:
        calls = _loops[loop] = _LoopCalls()
        calls.watch(loop)
    tag, waiting = calls.wait(loop, deadline_s)
    try:
        pending = core.begin_call(segment_id, payload, calls.inbox, tag)
    except BaseException:
        del calls.waiting[tag]
        raise
    _expect_calls(loop)
    return AwaitedCall(pending, calls, tag, waiting)

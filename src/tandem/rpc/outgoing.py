"""Calls that this side makes, by the socket or by a lane, until they have their answers.

The table belongs to one session. Calls are numbered in one order, whichever channel they take.
Every call leaves the table exactly once: by its answer, its deadline, its cancellation, or the loss
of the peer. Both sides watch the deadline, so that neither waits or works for a side that has gone.
A call that is given up here is cancelled on the other side.

Threads: all on the endpoint's event loop, except ``begin_threadsafe`` and its result.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from tandem.core.errors import (
    CapacityError,
    ConfigError,
    CorruptionError,
    DeadlineError,
    PeerLostError,
    TandemError,
    make_error,
)
from tandem.rpc.config import MAX_TIMEOUT_MS
from tandem.rpc.lane import Lane, LaneAnswer
from tandem.rpc.wire.frames import (
    Call,
    Cancel,
    Fault,
    Frame,
    LaneOffer,
    Reply,
    as_body,
    decode_body,
    decode_frame,
)

__all__ = ["BegunCall", "OutgoingCalls", "Wire"]

logger = logging.getLogger(__name__)
T = TypeVar("T")
Answered = TypeVar("Answered", covariant=True)
Waiting = TypeVar("Waiting")
"""The lane's side of a call: a ``LaneAnswer`` for a thread, an awaitable for the event loop."""
Answer = asyncio.Future[Reply | Fault]
"""The future of an answer by the socket: the answer of a call by the socket, or one too long for
the lane.
"""
LOOP_GRACE_S = 1.0
"""Seconds that the event loop may be late with the end of a call made for a thread."""


class BegunCall(Protocol[Answered]):
    """A call that a thread other than the event loop's has begun, and may wait for or drop; see
    ``Peer.begin_threadsafe``.
    """

    def wait(self, timeout_s: float) -> Answered:
        """Wait for the answer, for ``timeout_s`` at most. Raises: as ``Peer.call``."""
        ...


@dataclass(frozen=True, slots=True)
class Wire:
    """The functions of a session that its calls use, such as encoding and sending a frame."""

    peer_name: str
    encode: Callable[[Frame], bytes]
    """Encodes a frame. Raises: CapacityError, ConfigError."""
    send: Callable[[Frame], None]
    """Sends a frame by the socket. Raises: a TandemError."""
    end_lane: Callable[[], None]
    """Tells the other side that this side's lane is lost. Callable from any thread."""
    get_loss: Callable[[], TandemError | None]
    """Returns the error that ended the session; None while it lasts."""


class OutgoingCalls:
    """The unanswered calls of this side to one peer.

    Args:
        wire: sends frames in the session.
        max_calls: limit of unanswered calls.
    """

    def __init__(self, wire: Wire, max_calls: int) -> None:
        self._wire = wire
        self._max_calls = max_calls
        self._loop = asyncio.get_running_loop()
        self._order = threading.RLock()
        """Held while a call is numbered and sent, so that calls are sent in the order of their
        numbers.
        """
        self._next_id = 1  # 0 marks the fault of a one-way message
        self._lane: Lane | None = None
        self._token = b""
        self._open: dict[int, Answer] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def has_lane(self) -> bool:
        """True if calls that are short enough go by a lane (a faster channel beside the socket)."""
        return self._lane is not None

    def use_lane(self, lane: Lane, offer: LaneOffer) -> None:
        """Send calls that are short enough by ``lane`` from now on, a channel beside the socket
        that was opened to the address in ``offer``. This object closes it.
        """
        self._token = offer.token
        self._lane = lane

    def lose_lane(self, lane: Lane | None, reason: TandemError) -> None:
        """Close the lane (the channel beside the socket) if it is still in use. Calls go by the
        socket from now on.
        """
        with self._order:
            if lane is None or self._lane is not lane:
                return
            self._lane = None
        logger.info("event=lane_lost peer=%s reason=%s", self._wire.peer_name, reason)
        lane.close()
        self._wire.end_lane()

    def fail_all(self, make: Callable[[], TandemError]) -> None:
        """End every unanswered call, each with its own error from ``make``, since a shared error
        object would mix tracebacks.
        """
        with self._order:
            lane, self._lane = self._lane, None
        for call_id in list(self._open):
            answer = self._open.pop(call_id, None)
            if answer is not None and not answer.done():
                answer.set_exception(make())
                # Mark the exception as retrieved, because a caller that waits for the lane's answer
                # never reads it from this future.
                answer.exception()
        if lane is not None:
            lane.close()

    # The methods below number and send calls.

    def begin(
        self, method: str, request: object, response_type: type[T], timeout_s: float
    ) -> Coroutine[Any, Any, T]:
        """Send a call, and return a coroutine that waits for the answer. See ``Peer.begin``."""
        make = self._prepare(method, request, timeout_s)
        sent = self._send_by_lane(make, lambda lane, data: lane.begin_async(data, timeout_s))
        if sent is None:
            sent = self._send_by_socket(make)
        return self._wait(sent, method, response_type, timeout_s)

    def begin_threadsafe(
        self, method: str, request: object, response_type: type[T], timeout_s: float
    ) -> BegunCall[T]:
        """Send a call from any thread but the event loop's; see ``Peer.begin_threadsafe``."""
        make = self._prepare(method, request, timeout_s)
        sent = self._send_by_lane(make, lambda lane, data: lane.begin(data))
        if sent is not None:
            return _LaneCall(self, sent, method, response_type)
        # Without a lane (a channel beside the socket) the call must go by the socket, which only
        # the event loop may use.
        return self.run_on_loop(self._call(method, request, response_type, timeout_s), method)

    async def _call(
        self, method: str, request: object, response_type: type[T], timeout_s: float
    ) -> T:
        return await self.begin(method, request, response_type, timeout_s)

    def _prepare(self, method: str, request: object, timeout_s: float) -> Callable[[int], Call]:
        """Return a function that makes the call's frame from its number, which is also its id."""
        timeout_ms = _check_timeout(method, timeout_s)
        if len(self._open) >= self._max_calls:
            raise CapacityError(
                "rpc.call",
                f"{len(self._open)} calls to {self._wire.peer_name} are open, "
                f"limit {self._max_calls}",
            )
        return lambda number: Call(number, method, timeout_ms, as_body(request), number)

    def _send_by_lane(
        self, make: Callable[[int], Call], begin: Callable[[Lane, bytes], Waiting]
    ) -> "_Sent[Waiting] | None":
        """Send a call by the lane (the channel beside the socket). Return None, with nothing sent,
        if there is no lane, it is full or lost, or the call is too long for it.
        """
        with self._order:
            lane, call_id = self._lane, self._next_id
            if lane is None:
                return None
            data = self._token + self._wire.encode(make(call_id))
            if len(data) > lane.max_bytes:
                return None
            answer: Answer = self._loop.create_future()
            self._open[call_id] = answer  # An answer by the socket may come at once.
            self._next_id += 1
            try:
                return _Sent(call_id, answer, lane, begin(lane, data))
            except CapacityError:
                self._next_id = call_id
            except TandemError as error:
                self.lose_lane(lane, error)
            del self._open[call_id]
            return None

    def _send_by_socket(self, make: Callable[[int], Call]) -> "_Sent[Any]":
        with self._order:
            call_id = self._next_id
            self._wire.send(make(call_id))
            self._next_id += 1
        answer = self._open[call_id] = self._loop.create_future()
        return _Sent(call_id, answer, None, None)

    # The methods below wait for answers, and end calls.

    async def _wait(
        self,
        sent: "_Sent[Awaitable[bytes]]",
        method: str,
        response_type: type[T],
        timeout_s: float,
    ) -> T:
        until_s = self._loop.time() + timeout_s
        data, frame = b"", None
        try:
            if sent.waiting is not None:
                data = await sent.waiting
            if not data:
                frame = await self._wait_socket(sent, until_s)
        except TimeoutError:  # Also the lane's DeadlineError.
            raise self.describe_late(method, timeout_s) from None
        except TandemError as error:
            self.lose_lane(sent.lane, error)
            raise self.describe_lost(method) from None
        finally:
            self.end(sent.call_id, is_answered=bool(data or frame))
        return read_answer(frame or data, method, response_type)

    async def _wait_socket(self, sent: "_Sent[Any]", until_s: float) -> Reply | Fault:
        timer = self._loop.call_at(until_s, self._expire, sent.answer)
        try:
            return await sent.answer
        finally:
            timer.cancel()

    def _expire(self, answer: Answer) -> None:
        if not answer.done():
            answer.set_exception(TimeoutError())

    def run_on_loop(self, work: Coroutine[Any, Any, T], method: str) -> "_LoopCall[T]":
        """Run a coroutine on the event loop, for a thread that waits for its result."""
        try:
            return _LoopCall(asyncio.run_coroutine_threadsafe(work, self._loop), method)
        except RuntimeError:
            work.close()
            raise self.describe_lost(method) from None

    def wait_long(
        self, sent: "_Sent[Any]", method: str, response_type: type[T], timeout_s: float
    ) -> T:
        """Wait in a thread for an answer that comes by the socket, because it is too long for the
        lane of the call.
        """
        by_socket: _Sent[Awaitable[bytes]] = _Sent(sent.call_id, sent.answer, None, None)
        work = self._wait(by_socket, method, response_type, timeout_s)
        return self.run_on_loop(work, method).wait(timeout_s + LOOP_GRACE_S)

    def take_answer(self, frame: Reply | Fault) -> None:
        """Pass an answer that came by the socket to its caller, if that still waits."""
        answer = self._open.pop(frame.call_id, None)
        if answer is not None and not answer.done():
            answer.set_result(frame)

    def end(self, call_id: int, *, is_answered: bool) -> None:
        """Note that nobody waits for a call any more. If it has no answer, cancel it on the other
        side.

        Called on the event loop. A call by the lane may not have arrived: the cancellation keeps
        the other side, which begins calls in the order of their numbers, from waiting for it.
        """
        if self._open.pop(call_id, None) is not None and not is_answered:
            self._cancel_there(call_id)

    def end_threadsafe(self, call_id: int, *, is_answered: bool) -> None:
        """End a call like ``end``, from any thread and within any lock, since it takes no lock.

        The garbage collector may end a call at any moment, even in a thread that is sending
        another.
        """
        if self._open.pop(call_id, None) is not None and not is_answered:
            with contextlib.suppress(RuntimeError):  # The loop has ended.
                self._loop.call_soon_threadsafe(self._cancel_there, call_id)

    def _cancel_there(self, call_id: int) -> None:
        try:
            self._wire.send(Cancel(call_id))
        except TandemError as error:
            # The cancel cannot be sent because the peer is being lost, or reads nothing. The peer's
            # own timer ends the call.
            logger.debug("event=cancel_unsent peer=%s reason=%s", self._wire.peer_name, error)

    def describe_late(self, method: str, timeout_s: float) -> DeadlineError:
        """Return the error of a call whose deadline has passed."""
        return DeadlineError(
            "rpc.call",
            f"{method!r} had no answer from {self._wire.peer_name} within {timeout_s:g} s",
        )

    def describe_lost(self, method: str) -> TandemError:
        """Return the error of a call whose answer is lost with the session, or with the lane (the
        channel beside the socket).
        """
        loss = self._wire.get_loss()
        if loss is not None:
            return loss
        return DeadlineError(
            "rpc.call",
            f"the answer of {self._wire.peer_name} to {method!r} was lost: executed once or not "
            "at all",
        )


@dataclass(frozen=True, slots=True)
class _Sent(Generic[Waiting]):
    """A call that was sent by a lane (the channel beside the socket) or by the socket."""

    call_id: int
    answer: Answer
    lane: Lane | None
    waiting: Waiting | None
    """The wait for the answer by the lane. An empty answer means that the answer comes by the
    socket, being too long.
    """


class _LaneCall(Generic[T]):
    """A call by a lane (the channel beside the socket) that a thread has begun and may wait for.
    Dropping the object cancels the call.
    """

    def __init__(
        self,
        calls: OutgoingCalls,
        sent: "_Sent[LaneAnswer]",
        method: str,
        response_type: type[T],
    ) -> None:
        self._calls = calls
        self._sent = sent
        self._method = method
        self._response_type = response_type
        self._is_answered = False

    def wait(self, timeout_s: float) -> T:
        assert self._sent.waiting is not None, "it went by the lane"
        until_s = time.monotonic() + timeout_s
        try:
            data = self._sent.waiting.wait(timeout_s)
        except DeadlineError:
            raise self._calls.describe_late(self._method, timeout_s) from None
        except TandemError as error:
            self._calls.lose_lane(self._sent.lane, error)
            raise self._calls.describe_lost(self._method) from None
        if not data:
            left_s = max(0.0, until_s - time.monotonic())
            return self._calls.wait_long(self._sent, self._method, self._response_type, left_s)
        self._is_answered = True
        self._calls.end_threadsafe(self._sent.call_id, is_answered=True)
        return read_answer(data, self._method, self._response_type)

    def __del__(self) -> None:
        if not self._is_answered:
            self._calls.end_threadsafe(self._sent.call_id, is_answered=False)


class _LoopCall(Generic[T]):
    """A call by the socket, which the event loop makes for another thread that may wait for it."""

    def __init__(self, calling: "concurrent.futures.Future[T]", method: str) -> None:
        self._calling = calling
        self._method = method

    def wait(self, timeout_s: float) -> T:
        try:
            return self._calling.result(timeout_s)
        except concurrent.futures.CancelledError:
            raise PeerLostError("rpc.call", f"{self._method!r}: the loop has ended") from None
        except TandemError:
            raise
        except TimeoutError:
            self._calling.cancel()
            raise DeadlineError(
                "rpc.call", f"{self._method!r} had no answer within {timeout_s:g} s"
            ) from None


def read_answer(answer: Reply | Fault | bytes, method: str, response_type: type[T]) -> T:
    """Return the decoded answer. Raises: the error in the answer; CorruptionError."""
    frame = decode_frame(answer) if isinstance(answer, bytes) else answer
    if isinstance(frame, Fault):
        raise make_error(frame.code, frame.where, frame.what, frame.field)
    if not isinstance(frame, Reply):
        raise CorruptionError("rpc.call", f"a {type(frame).__name__} is no answer")
    try:
        return decode_body(_find_decoder(response_type), frame.body)
    except msgspec.MsgspecError as error:
        raise CorruptionError(
            "rpc.call", f"answer of {method!r} is not a {response_type}: {error}"
        ) from None


def _check_timeout(method: str, timeout_s: float) -> int:
    timeout_ms = timeout_s * 1e3
    if not 0 < timeout_ms <= MAX_TIMEOUT_MS:
        raise ConfigError(
            "rpc.call",
            f"timeout of {method!r} is {timeout_s} s: give one over 0 and up to "
            f"{MAX_TIMEOUT_MS // 1000} s",
            field="timeout_s",
        )
    return max(1, round(timeout_ms))


@functools.lru_cache(maxsize=256)
def _find_decoder(response_type: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(response_type)

"""Calls that this side makes, until they have their answers.

The table belongs to one session. Calls are numbered in one order, whether they go by the socket or
by a lane. Every call leaves the table exactly once: by its answer, its deadline, its cancellation,
or the loss of the peer. Both sides watch the deadline, so that neither waits or works for a side
that has gone. A call that is given up here is cancelled on the other side.

Threads: all on the endpoint's event loop, except ``begin_threadsafe`` and its result.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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
from tandem.rpc.transport import Transport
from tandem.rpc.wire.frames import Call, Cancel, Fault, Reply, as_body, decode_body, decode_frame

__all__ = ["BegunCall", "OutgoingCalls", "run_threadsafe"]

T = TypeVar("T")
Waiting = TypeVar("Waiting")
"""The lane's side of a call: a ``LaneAnswer`` for a thread, an awaitable for the event loop."""
LOOP_GRACE_S = 1.0
"""Seconds that the event loop may be late with the end of work that a thread waits for."""


@dataclass(frozen=True, slots=True)
class _Sent(Generic[T, Waiting]):
    """A call that was sent by a lane (the channel beside the socket) or by the socket."""

    call_id: int
    method: str
    response_type: type[T]
    by_socket: asyncio.Future[Reply | Fault]
    """The answer, if it comes by the socket: that of a call by the socket, or one too long for the
    lane.
    """
    lane: Lane | None
    by_lane: Waiting | None
    """The wait for the answer by the lane. An empty answer means that the answer comes by the
    socket.
    """

    def read(self, answer: Reply | Fault | bytes) -> T:
        """Return the decoded answer.

        Raises: the error in the answer; CorruptionError if it is no answer, or not of the method's
            type.
        """
        frame = decode_frame(answer) if isinstance(answer, bytes) else answer
        if isinstance(frame, Fault):
            raise make_error(frame.code, frame.where, frame.what, frame.field)
        if not isinstance(frame, Reply):
            raise CorruptionError("rpc.call", f"a {type(frame).__name__} is no answer")
        try:
            return decode_body(_find_decoder(self.response_type), frame.body)
        except msgspec.MsgspecError as error:
            what = f"answer of {self.method!r} is not a {self.response_type}: {error}"
            raise CorruptionError("rpc.call", what) from None


class OutgoingCalls:
    """The unanswered calls of this side to one peer.

    Args:
        transport: sends the calls.
        max_calls: limit of unanswered calls.
    """

    def __init__(self, transport: Transport, max_calls: int) -> None:
        self._transport = transport
        self._max_calls = max_calls
        self._loop = asyncio.get_running_loop()
        self._order = threading.RLock()
        """Held while a call is numbered and sent, so that calls are sent in the order of their
        numbers.
        """
        self._next_id = 1  # 0 marks the fault of a one-way message
        self._open: dict[int, asyncio.Future[Reply | Fault]] = {}

    def __len__(self) -> int:
        return len(self._open)

    # The methods below number and send calls.

    def begin(
        self, method: str, request: object, response_type: type[T], timeout_s: float
    ) -> Coroutine[Any, Any, T]:
        """Send a call, and return a coroutine that waits for the answer. See ``Peer.begin``."""
        sent = self._send(
            method,
            request,
            response_type,
            timeout_s,
            by_lane=lambda lane, data: lane.begin_async(data, timeout_s),
            by_socket=self._transport.send,
        )
        return self._wait(sent, sent.by_lane, timeout_s)

    def begin_threadsafe(
        self, method: str, request: object, response_type: type[T], timeout_s: float
    ) -> "BegunCall[T]":
        """Send a call from any thread but the event loop's; see ``Peer.begin_threadsafe``."""
        sent = self._send(
            method,
            request,
            response_type,
            timeout_s,
            by_lane=lambda lane, data: lane.begin(data),
            by_socket=self._transport.send_threadsafe,
        )
        return BegunCall(self, sent)

    def _send(
        self,
        method: str,
        request: object,
        response_type: type[T],
        timeout_s: float,
        *,
        by_lane: Callable[[Lane, bytes], Waiting],
        by_socket: Callable[[bytes], None],
    ) -> _Sent[T, Waiting]:
        """Send a call by the lane (the channel beside the socket) if there is one and the call is
        short enough for it, else by the socket. A call that cannot be sent takes no number.
        """
        timeout_ms = _check_timeout(method, timeout_s)
        if len(self._open) >= self._max_calls:
            raise CapacityError(
                "rpc.call",
                f"{len(self._open)} calls to {self._transport.name} are open, "
                f"limit {self._max_calls}",
            )
        with self._order:
            call_id = self._next_id
            frame = Call(call_id, method, timeout_ms, as_body(request), call_id)
            data = self._transport.encode(frame)
            answer = self._loop.create_future()
            self._open[call_id] = answer  # An answer by the socket may come at once.
            try:
                lane, waiting = self._transport.begin_by_lane(data, by_lane)
                if lane is None:
                    by_socket(data)
            except BaseException:
                self._open.pop(call_id, None)  # The loss of the session may have ended it.
                raise
            self._next_id += 1
        return _Sent(call_id, method, response_type, answer, lane, waiting)

    # The methods below wait for answers, and end calls.

    async def _wait(
        self, sent: _Sent[T, Any], by_lane: Awaitable[bytes] | None, timeout_s: float
    ) -> T:
        until_s = self._loop.time() + timeout_s
        answer: Reply | Fault | bytes = b""
        timer: asyncio.TimerHandle | None = None
        try:
            if by_lane is not None:
                answer = await by_lane
            if not answer:
                timer = self._loop.call_at(until_s, self._expire, sent.by_socket)
                answer = await sent.by_socket
        except (TimeoutError, TandemError) as error:
            raise self.describe(error, sent, timeout_s) from None
        finally:
            if timer is not None:
                timer.cancel()
            if self.forget(sent.call_id) and not answer:
                self._cancel_there(sent.call_id)
        return sent.read(answer)

    def wait_by_socket(self, sent: _Sent[T, LaneAnswer], timeout_s: float) -> T:
        """Wait in a thread for an answer that comes by the socket, which the event loop reads."""
        return run_threadsafe(self._wait(sent, None, timeout_s), self._loop, timeout_s)

    def _expire(self, answer: asyncio.Future[Reply | Fault]) -> None:
        if not answer.done():
            answer.set_exception(TimeoutError())

    def take_answer(self, frame: Reply | Fault) -> None:
        """Pass an answer that came by the socket to its caller, if that still waits."""
        answer = self._open.pop(frame.call_id, None)
        if answer is not None and not answer.done():
            answer.set_result(frame)

    def fail_all(self) -> None:
        """End every unanswered call, because the session has ended."""
        for call_id in list(self._open):
            answer = self._open.pop(call_id, None)
            if answer is not None and not answer.done():
                answer.set_exception(self._transport.make_loss())
                # Mark the exception as retrieved, because a caller that waits for the lane's answer
                # never reads it from this future.
                answer.exception()

    def forget(self, call_id: int) -> bool:
        """Note that nobody waits for a call any more, from any thread. Return False if the call has
        ended before.
        """
        return self._open.pop(call_id, None) is not None

    def drop(self, call_id: int) -> None:
        """Cancel a call unless it has ended, from any thread and within any lock, since this takes
        no lock.

        The garbage collector may drop a call at any moment, even in a thread that is sending
        another.
        """
        if self.forget(call_id):
            with contextlib.suppress(RuntimeError):  # The loop has ended.
                self._loop.call_soon_threadsafe(self._cancel_there, call_id)

    def _cancel_there(self, call_id: int) -> None:
        # A call by the lane may not have arrived: the cancellation keeps the other side, which
        # begins calls in the order of their numbers, from waiting for it.
        self._transport.send_quietly(Cancel(call_id))

    def describe(
        self, error: TimeoutError | TandemError, sent: _Sent[Any, Any], timeout_s: float
    ) -> TandemError:
        """Return the error of a call that failed with ``error`` before its answer was there: its
        deadline has passed, or the answer is lost with the session or with the lane.
        """
        name, method = self._transport.name, sent.method
        if isinstance(error, TimeoutError):  # Also the lane's DeadlineError.
            what = f"{method!r} had no answer from {name} within {timeout_s:g} s"
            return DeadlineError("rpc.call", what)
        self._transport.lose_lane(sent.lane, error)
        if self._transport.loss is not None:
            return self._transport.make_loss()
        what = f"the answer of {name} to {method!r} was lost: executed once or not at all"
        return DeadlineError("rpc.call", what)


class BegunCall(Generic[T]):
    """A call that a thread other than the event loop's has begun, and may wait for; see
    ``Peer.begin_threadsafe``. Dropping the object cancels the call.
    """

    def __init__(self, calls: OutgoingCalls, sent: _Sent[T, LaneAnswer]) -> None:
        self._calls = calls
        self._sent = sent

    def wait(self, timeout_s: float) -> T:
        """Wait for the answer, for ``timeout_s`` at most. Raises: as ``Peer.call``."""
        calls, sent, until_s = self._calls, self._sent, time.monotonic() + timeout_s
        data = b""
        if sent.by_lane is not None:
            try:
                data = sent.by_lane.wait(timeout_s)
            except TandemError as error:
                raise calls.describe(error, sent, timeout_s) from None
        if not data:
            return calls.wait_by_socket(sent, max(0.0, until_s - time.monotonic()))
        calls.forget(sent.call_id)
        return sent.read(data)

    def __del__(self) -> None:
        self._calls.drop(self._sent.call_id)


def run_threadsafe(
    work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop, timeout_s: float
) -> T:
    """Run a coroutine on the event loop of another thread, and wait for its result. The wait ends
    soon after ``timeout_s`` even if the loop hangs.

    Raises: DeadlineError (the loop does not answer); PeerLostError (the loop has ended); the errors
        of the coroutine.
    """
    try:
        future = asyncio.run_coroutine_threadsafe(work, loop)
    except RuntimeError as error:
        work.close()
        raise PeerLostError("rpc.call", str(error)) from None
    try:
        return future.result(timeout_s + LOOP_GRACE_S)
    except concurrent.futures.CancelledError:
        raise PeerLostError("rpc.call", "the event loop has ended") from None
    except TandemError:
        raise
    except TimeoutError:
        raise DeadlineError("rpc.call", "the event loop does not answer") from None
    finally:
        future.cancel()
        # Delete the future: its error's traceback refers to this frame, and this reference cycle
        # would keep alive what the callers' frames hold, such as a begun call.
        del future


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

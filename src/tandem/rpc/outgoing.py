"""Calls that this side makes: they go by the socket or by a lane, and wait for their answer.

The table belongs to one session and dies with it. Every call leaves it exactly once: by its answer,
by its deadline, by cancellation, or by the loss of the peer. The deadline is watched on both sides,
so that neither waits for, nor works for, a side that has gone.

Threads: all on the endpoint's loop, except ``begin_threadsafe`` and what it returns.
"""

import asyncio
import collections
import concurrent.futures
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


class BegunCall(Protocol[Answered]):
    """A call that a thread has begun; see ``Peer.begin_threadsafe``."""

    def wait(self, timeout_s: float) -> Answered:
        """Wait for the answer, at most so long from now. Raises: as ``Peer.call``."""
        ...


@dataclass(frozen=True, slots=True)
class Wire:
    """The part of a session that calls need."""

    peer_name: str
    encode: Callable[[Frame], bytes]
    """Raises: CapacityError, ConfigError."""
    send: Callable[[Frame], None]
    """By the socket. Raises: a TandemError."""
    end_lane: Callable[[], None]
    """Tells the other side that our lane broke; from any thread."""
    get_loss: Callable[[], TandemError | None]
    """Why the session has ended; None: it has not."""


@dataclass(slots=True)
class _LaneCall:
    """One that went by the lane."""

    number: int
    frame: Reply | Fault | None = None
    """An answer too long for the lane, which came by the socket before anybody knew."""
    waiter: "asyncio.Future[None] | concurrent.futures.Future[None] | None" = None
    """Waiter of whoever knows, and waits for it."""


class OutgoingCalls:
    """Calls made to the peer.

    Args:
        wire: of the session.
        max_calls: how many may be open at a time.
    """

    def __init__(self, wire: Wire, max_calls: int) -> None:
        self._wire = wire
        self._max_calls = max_calls
        self._loop = asyncio.get_running_loop()
        self._order = threading.Lock()
        """Calls get their numbers and leave in the same order."""
        self._next_id = 1  # 0 marks the fault of a one-way message
        self._num_by_socket = 0
        self._num_by_lane = 0
        self._lane: Lane | None = None
        self._token = b""
        self._open: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._by_lane: dict[int, _LaneCall] = {}
        self._dropped: collections.deque[int] = collections.deque()
        """Calls by the lane that a thread has given up, and that ``_by_lane`` still has. The
        garbage collector may drop one in any thread at any moment, also in one that holds
        ``_order``: so that takes no lock."""
        self._num_sure = 0
        """Calls by the lane up to this number have come there, or will unless it breaks."""
        self._num_answered = 0
        """The highest number of one that was answered."""

    def __len__(self) -> int:
        return len(self._open) + len(self._by_lane) - len(self._dropped)

    @property
    def has_lane(self) -> bool:
        """True if calls go by a lane where they can."""
        return self._lane is not None

    def use_lane(self, lane: Lane, offer: LaneOffer) -> None:
        """Let calls go by ``lane`` from now on, which is ours to close."""
        self._token = offer.token
        self._lane = lane

    def leave_lane(self) -> None:
        """Close the lane, if there is one; calls in progress on it fail."""
        with self._order:
            lane, self._lane = self._lane, None
            self._num_sure = 0
        if lane is not None:
            lane.close()

    def begin(
        self, method: str, request: object, response_type: type[T], timeout_s: float
    ) -> Coroutine[Any, Any, T]:
        """Send a call; what it returns waits for the answer. See ``Peer.begin``."""
        timeout_ms = _check_timeout(method, timeout_s)
        self._check_room()
        lane = self._lane
        if lane is not None:
            begun = self._send_by_lane(
                method, request, timeout_ms, lambda data: lane.begin_async(data, timeout_s)
            )
            if begun is not None:
                return self._wait_lane(lane, begun, method, response_type, timeout_s)
        answer: asyncio.Future[msgspec.Raw] = self._loop.create_future()
        call_id = self._send_by_socket(method, request, timeout_ms)
        self._open[call_id] = answer
        return self._wait_socket(call_id, answer, method, response_type, timeout_s)

    async def _wait_socket(
        self,
        call_id: int,
        answer: "asyncio.Future[msgspec.Raw]",
        method: str,
        response_type: type[T],
        timeout_s: float,
    ) -> T:
        timer = self._loop.call_later(timeout_s, self._expire, call_id, method, timeout_s)
        try:
            body = await answer
        except asyncio.CancelledError:
            if call_id in self._open:
                self._cancel_there(call_id)
            raise
        finally:
            timer.cancel()
            self._open.pop(call_id, None)
        return _decode_answer(method, body, response_type)

    def begin_threadsafe(
        self, method: str, request: object, response_type: type[T], timeout_s: float
    ) -> BegunCall[T]:
        """Send a call from any thread but the loop's; see ``Peer.begin_threadsafe``."""
        timeout_ms = _check_timeout(method, timeout_s)
        self._check_room()
        lane = self._lane
        if lane is not None:
            begun = self._send_by_lane(method, request, timeout_ms, lane.begin)
            if begun is not None:
                return _ThreadCall(self, lane, begun, method, response_type)
        # The socket is the loop's.
        calling = self._call(method, request, response_type, timeout_s)
        try:
            return _LoopCall(asyncio.run_coroutine_threadsafe(calling, self._loop), method)
        except RuntimeError:
            calling.close()
            raise self.describe_lost(method) from None

    async def _call(
        self, method: str, request: object, response_type: type[T], timeout_s: float
    ) -> T:
        return await self.begin(method, request, response_type, timeout_s)

    def _check_room(self) -> None:
        if len(self) >= self._max_calls:
            raise CapacityError(
                "rpc.call",
                f"{len(self)} calls to {self._wire.peer_name} are open, limit {self._max_calls}",
            )

    def _send_by_socket(self, method: str, request: object, timeout_ms: int) -> int:
        with self._order:
            self._forget_dropped()
            number, call_id = self._num_by_socket + 1, self._next_id
            body, after = as_body(request), self._num_sure
            self._next_id += 1
            self._wire.send(Call(call_id, method, timeout_ms, body, number, after))
            self._num_by_socket = number
        return call_id

    def _send_by_lane(
        self, method: str, request: object, timeout_ms: int, begin: Callable[[bytes], T]
    ) -> tuple[int, T] | None:
        """Send by the lane; None if this call cannot."""
        with self._order:
            self._forget_dropped()
            lane = self._lane
            if lane is None:
                return None
            number, call_id = self._num_by_lane + 1, self._next_id
            call = Call(call_id, method, timeout_ms, as_body(request), number, self._num_by_socket)
            data = self._token + self._wire.encode(call)
            if len(data) > lane.max_bytes:
                return None
            try:
                begun = begin(data)
            except CapacityError:
                return None
            except TandemError as error:
                reason = error
            else:
                self._next_id += 1
                self._num_by_lane = self._num_sure = number
                self._by_lane[call_id] = _LaneCall(number)
                return call_id, begun
        self.lose_lane(lane, reason)
        return None

    def lose_lane(self, lane: Lane, reason: TandemError) -> None:
        """Note that it broke: calls go by the socket from now on."""
        if self._lane is lane:
            logger.info("event=lane_lost peer=%s reason=%s", self._wire.peer_name, reason)
            self.leave_lane()
            self._wire.end_lane()

    # Answers by the lane.

    async def _wait_lane(
        self,
        lane: Lane,
        begun: tuple[int, Awaitable[bytes]],
        method: str,
        response_type: type[T],
        timeout_s: float,
    ) -> T:
        call_id, answering = begun
        deadline_s = self._loop.time() + timeout_s
        is_answered = False
        try:
            data = await answering
            is_answered = True
            if not data:
                await self._wait_long(call_id, deadline_s)
                body = self.take_long(call_id, method)
                return _decode_answer(method, body, response_type)
        except asyncio.CancelledError:
            self._cancel_there(call_id)
            raise
        except TimeoutError:  # Also a DeadlineError: the handler is stopped by its own timer.
            raise self.describe_late(method, timeout_s) from None
        except TandemError as error:
            if is_answered:
                raise
            self.lose_lane(lane, error)
            raise self.describe_lost(method) from None
        finally:
            self.forget(call_id, is_answered=is_answered)
        return _decode_answer(method, open_answer(data), response_type)

    async def _wait_long(self, call_id: int, deadline_s: float) -> None:
        waiter: asyncio.Future[None] = self._loop.create_future()
        if not self.is_long_here(call_id, waiter):
            async with asyncio.timeout_at(deadline_s):
                await waiter

    def is_long_here(
        self, call_id: int, waiter: "asyncio.Future[None] | concurrent.futures.Future[None]"
    ) -> bool:
        """Return True if the answer, too long for the lane, has come; else ``waiter`` ends when it
        has.
        """
        with self._order:
            call = self._by_lane[call_id]
            if call.frame is None:
                call.waiter = waiter
                if self._wire.get_loss() is not None:
                    waiter.set_result(None)
            return call.frame is not None

    def take_long(self, call_id: int, method: str) -> msgspec.Raw:
        """Return what that answer says. Raises: what it says; what the loss of the peer was."""
        frame = self._by_lane[call_id].frame
        if frame is None:
            raise self.describe_lost(method)
        return _open_frame(frame)

    def forget(self, call_id: int, *, is_answered: bool) -> None:
        """Nobody waits for it any more."""
        with self._order:
            self._forget(call_id, is_answered=is_answered)

    def drop(self, call_id: int) -> None:
        """Do as ``forget`` of a call without an answer; takes effect before the next call
        leaves.
        """
        self._dropped.append(call_id)

    def _forget_dropped(self) -> None:
        """Forget what was dropped. REQUIRES: ``_order`` is held."""
        while self._dropped:
            self._forget(self._dropped.popleft(), is_answered=False)

    def _forget(self, call_id: int, *, is_answered: bool) -> None:
        call = self._by_lane.pop(call_id, None)
        if call is None:
            return
        if is_answered:
            self._num_answered = max(self._num_answered, call.number)
        elif self._num_sure == call.number:
            # One that is given up may never be sent: nothing may wait for it.
            newest = next(reversed(self._by_lane.values()), None)
            in_flight = 0 if newest is None else newest.number
            self._num_sure = max(self._num_answered, in_flight)

    # Answers by the socket.

    def take_reply(self, reply: Reply) -> None:
        """Give the waiting caller its result; one who has left gets nothing."""
        answer = self._open.pop(reply.call_id, None)
        if answer is not None and not answer.done():
            answer.set_result(reply.body)
        elif answer is None:
            self._note_long(reply)

    def take_fault(self, fault: Fault) -> None:
        """Give the waiting caller its error."""
        if fault.call_id in self._open:
            self._fail(fault.call_id, _make_error(fault))
        else:
            self._note_long(fault)

    def _note_long(self, frame: Reply | Fault) -> None:
        with self._order:
            call = self._by_lane.get(frame.call_id)
            if call is None:
                return
            call.frame, waiter = frame, call.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail_all(self, make: Callable[[], TandemError]) -> None:
        """End every open call, each with an error of its own (tracebacks are not shared)."""
        for call_id in list(self._open):
            self._fail(call_id, make())
        self.leave_lane()
        with self._order:
            waiters = [call.waiter for call in self._by_lane.values()]
        for waiter in waiters:
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    def _expire(self, call_id: int, method: str, timeout_s: float) -> None:
        if call_id in self._open:
            self._cancel_there(call_id)
            self._fail(call_id, self.describe_late(method, timeout_s))

    def describe_late(self, method: str, timeout_s: float) -> DeadlineError:
        """Return the error of a call whose deadline has passed."""
        return DeadlineError(
            "rpc.call",
            f"{method!r} had no answer from {self._wire.peer_name} within {timeout_s:g} s",
        )

    def describe_lost(self, method: str) -> TandemError:
        """Return the error of a call whose answer is lost."""
        loss = self._wire.get_loss()
        if loss is not None:
            return loss
        return DeadlineError(
            "rpc.call",
            f"the answer of {self._wire.peer_name} to {method!r} was lost: executed once or not "
            "at all",
        )

    def _cancel_there(self, call_id: int) -> None:
        try:
            self._wire.send(Cancel(call_id))
        except TandemError as error:
            # The peer is going or reads nothing: it cannot be told, and its own timer ends it.
            logger.debug("event=cancel_unsent peer=%s reason=%s", self._wire.peer_name, error)

    def _fail(self, call_id: int, error: TandemError) -> None:
        answer = self._open.pop(call_id, None)
        if answer is not None and not answer.done():
            answer.set_exception(error)


class _ThreadCall(Generic[T]):
    """By a lane, for a thread; whoever drops it has given it up."""

    def __init__(
        self,
        calls: OutgoingCalls,
        lane: Lane,
        begun: tuple[int, LaneAnswer],
        method: str,
        response_type: type[T],
    ) -> None:
        self._calls = calls
        self._lane = lane
        self._call_id, self._answer = begun
        self._method = method
        self._response_type = response_type
        self._is_answered = False

    def wait(self, timeout_s: float) -> T:
        deadline_s = time.monotonic() + timeout_s
        try:
            data = self._answer.wait(timeout_s)
        except DeadlineError:
            raise self._calls.describe_late(self._method, timeout_s) from None
        except TandemError as error:
            self._calls.lose_lane(self._lane, error)
            raise self._calls.describe_lost(self._method) from None
        body = open_answer(data) if data else self._wait_long(deadline_s, timeout_s)
        self._is_answered = True
        self._calls.forget(self._call_id, is_answered=True)
        return _decode_answer(self._method, body, self._response_type)

    def _wait_long(self, deadline_s: float, timeout_s: float) -> msgspec.Raw:
        waiter: concurrent.futures.Future[None] = concurrent.futures.Future()
        if not self._calls.is_long_here(self._call_id, waiter):
            try:
                waiter.result(max(0.0, deadline_s - time.monotonic()))
            except TimeoutError:
                raise self._calls.describe_late(self._method, timeout_s) from None
        return self._calls.take_long(self._call_id, self._method)

    def __del__(self) -> None:
        if not self._is_answered:
            self._calls.drop(self._call_id)


class _LoopCall(Generic[T]):
    """By the socket, for a thread."""

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


def open_answer(data: bytes) -> msgspec.Raw:
    """Return what an answer by the lane says. Raises: what it says; CorruptionError."""
    frame = decode_frame(data)
    if not isinstance(frame, Reply | Fault):
        raise CorruptionError("rpc.call", f"a {type(frame).__name__} is no answer")
    return _open_frame(frame)


def _open_frame(frame: Reply | Fault) -> msgspec.Raw:
    if isinstance(frame, Fault):
        raise _make_error(frame)
    return frame.body


def _make_error(fault: Fault) -> TandemError:
    return make_error(fault.code, fault.where, fault.what, fault.field)


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


def _decode_answer(method: str, body: msgspec.Raw, response_type: type[T]) -> T:
    try:
        return decode_body(_find_decoder(response_type), body)
    except msgspec.MsgspecError as error:
        raise CorruptionError(
            "rpc.call", f"answer of {method!r} is not a {response_type}: {error}"
        ) from None

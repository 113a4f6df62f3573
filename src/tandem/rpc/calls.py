"""The two halves of calling: calls we made and wait for, and calls of the peer that we run.

Both tables belong to one session and die with it; both live on the endpoint's loop. Every call
leaves its table exactly once: by its answer, by its deadline, by cancellation, or by the loss of
the peer. The deadline is watched on both sides, so that neither waits for, nor works for, a side
that has gone.
"""

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from tandem.core.errors import (
    CancelledError,
    CapacityError,
    ConfigError,
    ConflictError,
    CorruptionError,
    DeadlineError,
    InternalError,
    TandemError,
    UnsupportedError,
    make_error,
)
from tandem.rpc.config import MAX_TIMEOUT_MS
from tandem.rpc.counters import RpcCounters
from tandem.rpc.frames import (
    Call,
    Cancel,
    Fault,
    Frame,
    Reply,
    as_body,
    decode_body,
    make_fault,
)
from tandem.rpc.methods import Method, MethodTable

if TYPE_CHECKING:
    from tandem.rpc.peer import Peer

__all__ = ["IncomingCalls", "OutgoingCalls"]

logger = logging.getLogger(__name__)
T = TypeVar("T")
Send = Callable[[Frame], None]


class OutgoingCalls:
    """Calls made to the peer.

    Args:
        peer_name: for error texts.
        send: sends a frame or raises a ``TandemError``.
        max_calls: how many may be open at a time.
    """

    def __init__(self, peer_name: str, send: Send, max_calls: int) -> None:
        self._peer_name = peer_name
        self._send = send
        self._max_calls = max_calls
        self._next_id = 1  # 0 marks the fault of a one-way message
        self._open: dict[int, asyncio.Future[msgspec.Raw]] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def call(
        self, method: str, request: object, response_type: type[T], timeout_s: float
    ) -> T:
        """Send a call and wait for its answer; see ``Peer.call``."""
        timeout_ms = _check_timeout(method, timeout_s)
        if len(self._open) >= self._max_calls:
            raise CapacityError(
                "rpc.call",
                f"{len(self._open)} calls to {self._peer_name} are open, limit {self._max_calls}",
            )
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[msgspec.Raw] = loop.create_future()
        call_id = self._next_id
        self._next_id += 1
        self._send(Call(call_id, method, timeout_ms, as_body(request)))
        self._open[call_id] = answer
        timer = loop.call_later(timeout_s, self._expire, call_id, method, timeout_s)
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

    def take_reply(self, reply: Reply) -> None:
        """Give the waiting caller its result; one who has left gets nothing."""
        answer = self._open.pop(reply.call_id, None)
        if answer is not None and not answer.done():
            answer.set_result(reply.body)

    def take_fault(self, fault: Fault) -> None:
        """Give the waiting caller its error."""
        self._fail(fault.call_id, make_error(fault.code, fault.where, fault.what, fault.field))

    def fail_all(self, make: Callable[[], TandemError]) -> None:
        """End every open call, each with an error of its own (tracebacks are not shared)."""
        for call_id in list(self._open):
            self._fail(call_id, make())

    def _expire(self, call_id: int, method: str, timeout_s: float) -> None:
        if call_id in self._open:
            self._cancel_there(call_id)
            self._fail(
                call_id,
                DeadlineError(
                    "rpc.call",
                    f"{method!r} had no answer from {self._peer_name} within {timeout_s:g} s",
                ),
            )

    def _cancel_there(self, call_id: int) -> None:
        try:
            self._send(Cancel(call_id))
        except TandemError as error:
            # The peer is going or reads nothing: it cannot be told, and its own timer ends it.
            logger.debug("event=cancel_unsent peer=%s reason=%s", self._peer_name, error)

    def _fail(self, call_id: int, error: TandemError) -> None:
        answer = self._open.pop(call_id, None)
        if answer is not None and not answer.done():
            answer.set_exception(error)


class IncomingCalls:
    """Calls of the peer.

    Args:
        peer: passed to the handlers.
        methods: what can be called.
        send: sends a frame or raises a ``TandemError``.
        max_calls: how many handlers may be alive; more are refused. A handler that ignores its
            cancellation stays alive, and counts.
    """

    def __init__(
        self,
        peer: "Peer",
        methods: MethodTable,
        send: Send,
        max_calls: int,
        counters: RpcCounters,
    ) -> None:
        self._peer = peer
        self._methods = methods
        self._send = send
        self._max_calls = max_calls
        self._counters = counters
        self._open: dict[int, tuple[asyncio.Task[None], asyncio.TimerHandle]] = {}
        self._alive: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._alive)

    def start(self, call: Call) -> None:
        """Run the handler of ``call``, or answer at once why not."""
        try:
            method, request = self._resolve(call)
        except TandemError as error:
            self._refuse(call.call_id, error)
            return
        self._counters.calls_started += 1
        if not method.is_async:
            self._run_plain(call.call_id, method, request)
            return
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._run(call.call_id, method, request))
        timer = loop.call_later(
            call.timeout_ms / 1e3, self._expire, call.call_id, method.name, call.timeout_ms
        )
        self._open[call.call_id] = (task, timer)
        self._alive.add(task)
        task.add_done_callback(self._alive.discard)

    def cancel(self, call_id: int) -> None:
        """Stop a handler whose caller has given up; an unknown id has been answered already."""
        if self._stop(call_id):
            self._counters.calls_cancelled += 1

    def cancel_all(self) -> None:
        """Stop every handler, without answers: the caller is gone."""
        for call_id in list(self._open):
            self.cancel(call_id)

    def _resolve(self, call: Call) -> tuple[Method, Any]:
        method = self._methods.find(call.method)
        if method is None:
            self._counters.unknown_methods += 1
            known = ", ".join(self._methods.list_names())
            raise UnsupportedError(
                "rpc.call",
                f"unknown method {call.method!r}: this side serves {known or 'none'}",
                field="method",
            )
        if call.call_id == 0 or call.call_id in self._open:
            raise ConflictError("rpc.call", f"call id {call.call_id} is 0 or still in use")
        if len(self._alive) >= self._max_calls:
            raise CapacityError(
                "rpc.call", f"{len(self._alive)} calls are running, limit {self._max_calls}"
            )
        try:
            return method, decode_body(method.decoder, call.body)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                "rpc.call", f"request of {call.method!r} is malformed: {error}", field="request"
            ) from None

    def _run_plain(self, call_id: int, method: Method, request: Any) -> None:
        try:
            response = method.handler(self._peer, request)
        except Exception as error:  # noqa: BLE001 - the edge of the process: logged and answered
            self._answer_error(call_id, method.name, error)
        else:
            self._answer(call_id, method.name, response)

    async def _run(self, call_id: int, method: Method, request: Any) -> None:
        try:
            response = await method.handler(self._peer, request)
        except asyncio.CancelledError:
            # Ours was answered by whoever stopped it. One that the handler let through from
            # something of its own must not leave the caller without an answer.
            if self._close(call_id):
                self._refuse(
                    call_id, CancelledError("rpc.call", f"{method.name!r} was cancelled there")
                )
        except Exception as error:  # noqa: BLE001 - the edge of the process: logged and answered
            if self._close(call_id):
                self._answer_error(call_id, method.name, error)
        else:
            if self._close(call_id):
                self._answer(call_id, method.name, response)

    def _expire(self, call_id: int, method: str, timeout_ms: int) -> None:
        # Answered from here, not from the task: a handler may take long over its cancellation.
        if self._stop(call_id):
            self._counters.calls_expired += 1
            self._refuse(
                call_id,
                DeadlineError("rpc.call", f"{method!r} did not end within {timeout_ms} ms"),
            )

    def _stop(self, call_id: int) -> bool:
        entry = self._open.get(call_id)
        if entry is None:
            return False
        self._close(call_id)
        entry[0].cancel()
        return True

    def _close(self, call_id: int) -> bool:
        """Take the call out of the table; False if it has been answered before."""
        entry = self._open.pop(call_id, None)
        if entry is None:
            return False
        entry[1].cancel()
        return True

    def _answer(self, call_id: int, method: str, response: Any) -> None:
        try:
            self._send(Reply(call_id, as_body(response)))
        except ConfigError as error:
            # The response has no wire form: the handler's bug, not the caller's.
            self._answer_error(call_id, method, error)
        except TandemError as error:
            self._refuse(call_id, error)

    def _answer_error(self, call_id: int, method: str, error: Exception) -> None:
        if not isinstance(error, TandemError):
            logger.error(
                "event=handler_failed method=%s peer=%s", method, self._peer.name, exc_info=error
            )
            error = InternalError(
                "rpc.call",
                f"{method!r} failed with {type(error).__name__}: the log of the serving side has "
                "the trace",
            )
        self._refuse(call_id, error)

    def _refuse(self, call_id: int, error: TandemError) -> None:
        self._counters.calls_failed += 1
        try:
            self._send(make_fault(call_id, error))
        except TandemError as unsent:
            # The peer is lost or about to be; its own side ends the call.
            logger.debug("event=fault_unsent peer=%s reason=%s", self._peer.name, unsent)


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

"""Calls of the peer that we run, in the order in which it made them.

They come by the socket and by the peer's lane. Each channel keeps its own order, and a call says
which was the last that was sent by the other one before it. The table belongs to one session and
dies with it. Every call leaves it exactly once: by its answer, by its deadline, by cancellation, or
by the loss of the peer.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from tandem.core.errors import (
    CancelledError,
    CapacityError,
    ConfigError,
    ConflictError,
    DeadlineError,
    InternalError,
    PeerLostError,
    TandemError,
    UnsupportedError,
)
from tandem.rpc.counters import RpcCounters
from tandem.rpc.lane import LaneRequest
from tandem.rpc.methods import Kept, Method, MethodTable
from tandem.rpc.outgoing import Wire
from tandem.rpc.wire.frames import Call, Fault, Reply, as_body, decode_body, make_fault

__all__ = ["IncomingCalls"]

logger = logging.getLogger(__name__)

ENDED = 2**63
"""More than any call can say that there were."""


_Held = tuple[Call, LaneRequest | None]


@dataclass(slots=True)
class _Way:
    """The calls that came by one of the two channels."""

    num_begun: int = 0
    """The number of the last."""
    held: "deque[_Held]" = field(default_factory=lambda: deque[_Held]())
    """Those that wait for calls by the other way, and all after them."""


@dataclass(slots=True)
class _Running:
    """A call whose handler is a task."""

    task: "asyncio.Task[None]"
    timer: asyncio.TimerHandle
    request: LaneRequest | None
    work: "Coroutine[Any, Any, Any] | None"
    is_kept: bool
    """True if the task goes on when its caller is gone."""


class Caller(Protocol):
    """Whoever calls: a ``Peer``."""

    @property
    def name(self) -> str:
        """Name that it gave itself."""
        ...


class IncomingCalls:
    """Calls of the peer.

    Args:
        peer: passed to the handlers.
        methods: what can be called.
        wire: of the session.
        max_calls: how many handlers may be alive; more are refused. A handler that ignores its
            cancellation stays alive, and counts.
        max_lane_bytes: of an answer by the lane.
        counters: of the endpoint.
    """

    def __init__(
        self,
        peer: Caller,
        methods: MethodTable,
        wire: Wire,
        *,
        max_calls: int,
        max_lane_bytes: int,
        counters: RpcCounters,
    ) -> None:
        self._peer = peer
        self._methods = methods
        self._wire = wire
        self._max_calls = max_calls
        self._max_lane_bytes = max_lane_bytes
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, _Running] = {}
        self._alive: set[asyncio.Task[None]] = set()
        self._unbegun: set[int] = set()
        """Calls whose task the loop has not run yet: no plain function may overtake them."""
        self._socket, self._lane = _Way(), _Way()

    def __len__(self) -> int:
        return len(self._alive)

    # Order.

    def take(self, call: Call, request: LaneRequest | None = None) -> None:
        """Begin a call, or keep it until those before it have come by the other channel.

        Args:
            call: as it came.
            request: what it came with by the lane; None: it came by the socket.
        """
        way, other = self._socket, self._lane
        if request is not None:
            way, other = other, way
        if way.held or call.after > other.num_begun:
            if len(way.held) < self._max_calls:
                way.held.append((call, request))
                return
            self._counters.calls_failed += 1
            self._refuse(call.call_id, request, CapacityError("rpc.call", "too many calls wait"))
            return
        way.num_begun = max(way.num_begun, call.number)
        self._start(call, request)
        if other.held:
            self._begin_held()

    def end_lane(self) -> None:
        """Note that the lane of the other side broke: nothing waits for what has not come by it."""
        self._lane.num_begun = ENDED
        held, self._lane.held = self._lane.held, deque()
        for _, request in held:
            _refuse_ended(request)
        self._begin_held()

    def _begin_held(self) -> None:
        ways = self._socket, self._lane
        while True:
            for way, other in (ways, ways[::-1]):
                if way.held and way.held[0][0].after <= other.num_begun:
                    call, request = way.held.popleft()
                    way.num_begun = max(way.num_begun, call.number)
                    self._start(call, request)
                    break
            else:
                return

    # Running.

    def _start(self, call: Call, request: LaneRequest | None) -> None:
        """Run the handler of ``call``, or answer at once why not."""
        if request is not None and self._lane.num_begun == ENDED:
            _refuse_ended(request)
            return
        try:
            method, argument = self._resolve(call)
        except TandemError as error:
            self._refuse(call.call_id, request, error)
            return
        self._counters.calls_started += 1
        work: Coroutine[Any, Any, Any] | None = None
        is_kept = False
        if not method.is_async and not self._unbegun:
            try:
                response: Any = method.handler(self._peer, argument)
            except Exception as error:  # noqa: BLE001 - the edge of the process: answered
                self._answer_error(call.call_id, request, method.name, error)
                return
            if isinstance(response, Kept):
                work, is_kept = response.work, True
            elif asyncio.iscoroutine(response):
                work = response
            else:
                self._answer(call.call_id, request, method.name, response)
                return
        elif method.is_async:
            work = method.handler(self._peer, argument)
        self._run_task(call, request, method, argument, work, is_kept=is_kept)

    def _run_task(
        self,
        call: Call,
        request: LaneRequest | None,
        method: Method,
        argument: Any,
        work: "Coroutine[Any, Any, Any] | None",
        *,
        is_kept: bool,
    ) -> None:
        call_id = call.call_id
        self._unbegun.add(call_id)
        task = self._loop.create_task(self._run(call_id, request, method, argument, work))
        timer = self._loop.call_later(
            call.timeout_ms / 1e3, self._expire, call_id, method.name, call.timeout_ms
        )
        self._open[call_id] = _Running(task, timer, request, work, is_kept)
        self._alive.add(task)
        task.add_done_callback(self._alive.discard)

    def cancel(self, call_id: int) -> None:
        """Stop a handler whose caller has given up; an unknown id has been answered already."""
        if self._stop(call_id) is not None:
            self._counters.calls_cancelled += 1

    def cancel_all(self) -> None:
        """Stop every handler, without answers: the caller is gone."""
        self._socket.held.clear()
        self.end_lane()
        for call_id, running in list(self._open.items()):
            if running.request is not None:
                _refuse_ended(running.request)
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

    async def _run(
        self,
        call_id: int,
        request: LaneRequest | None,
        method: Method,
        argument: Any,
        work: "Coroutine[Any, Any, Any] | None",
    ) -> None:
        self._unbegun.discard(call_id)
        try:
            if work is None:
                response = method.handler(self._peer, argument)
                if isinstance(response, Kept):
                    self._open[call_id].is_kept = True
                    response = await response.work
                elif asyncio.iscoroutine(response):
                    response = await response
            else:
                response = await work
        except asyncio.CancelledError:
            # Ours was answered by whoever stopped it. One that the handler let through from
            # something of its own must not leave the caller without an answer.
            if self._close(call_id):
                self._refuse(
                    call_id,
                    request,
                    CancelledError("rpc.call", f"{method.name!r} was cancelled there"),
                )
        except Exception as error:  # noqa: BLE001 - the edge of the process: logged and answered
            if self._close(call_id):
                self._answer_error(call_id, request, method.name, error)
        else:
            if self._close(call_id):
                self._answer(call_id, request, method.name, response)

    def _expire(self, call_id: int, method: str, timeout_ms: int) -> None:
        # Answered from here, not from the task: a handler may take long over its cancellation.
        running = self._stop(call_id)
        if running is not None:
            self._counters.calls_expired += 1
            self._refuse(
                call_id,
                running.request,
                DeadlineError("rpc.call", f"{method!r} did not end within {timeout_ms} ms"),
            )

    def _stop(self, call_id: int) -> "_Running | None":
        running = self._close(call_id)
        if running is not None:
            if call_id in self._unbegun:
                # Its task ends without a step.
                self._unbegun.discard(call_id)
                running.task.cancel()
                if running.work is not None:
                    running.work.close()
            elif not running.is_kept:
                running.task.cancel()
        return running

    def _close(self, call_id: int) -> "_Running | None":
        """Take the call out of the table; None if it has been answered before."""
        running = self._open.pop(call_id, None)
        if running is not None:
            running.timer.cancel()
        return running

    # Answers.

    def _answer(
        self, call_id: int, request: LaneRequest | None, method: str, response: Any
    ) -> None:
        try:
            self._send(Reply(call_id, as_body(response)), request)
        except ConfigError as error:
            # The response has no wire form: the handler's bug, not the caller's.
            failure = InternalError(
                "rpc.call", f"the answer of {method!r} cannot be sent: {error.what}"
            )
            self._answer_error(call_id, request, method, failure)
        except TandemError as error:
            self._refuse(call_id, request, error)

    def _answer_error(
        self, call_id: int, request: LaneRequest | None, method: str, error: Exception
    ) -> None:
        if not isinstance(error, TandemError):
            logger.error(
                "event=handler_failed method=%s peer=%s", method, self._peer.name, exc_info=error
            )
            error = InternalError(
                "rpc.call",
                f"{method!r} failed with {type(error).__name__}: the log of the serving side has "
                "the trace",
            )
        self._refuse(call_id, request, error)

    def _refuse(self, call_id: int, request: LaneRequest | None, error: TandemError) -> None:
        self._counters.calls_failed += 1
        try:
            self._send(make_fault(call_id, error), request)
        except TandemError as unsent:
            # The peer is lost or about to be; its own side ends the call.
            logger.debug("event=fault_unsent peer=%s reason=%s", self._peer.name, unsent)

    def _send(self, frame: Reply | Fault, request: LaneRequest | None) -> None:
        """Send an answer by its call's channel; one too long for the lane by the socket."""
        if request is None:
            self._wire.send(frame)
            return
        data = self._wire.encode(frame)
        if len(data) > self._max_lane_bytes:
            self._wire.send(frame)
            data = b""
        request.reply(data)


def _refuse_ended(request: LaneRequest | None) -> None:
    if request is not None:
        request.fail(PeerLostError("rpc.lane", "the session of this call, or its lane, is over"))

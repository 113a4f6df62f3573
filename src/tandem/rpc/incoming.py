"""Calls of the peer, whose handlers run here in the order in which the peer made the calls.

Calls come by the socket and by the peer's lane, and begin in the order of their numbers. A call
whose number is not the next is held back until those before it have come; a call that its caller
gave up, or that was lost with the lane, is not waited for. The table belongs to one session. Every
call leaves it exactly once: by its answer, its deadline, its cancellation, or the loss of the peer.
"""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

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
from tandem.rpc.lane import LaneRequest
from tandem.rpc.methods import Kept, Method
from tandem.rpc.transport import PeerContext, Transport
from tandem.rpc.wire.frames import Call, Reply, as_body, decode_body, make_fault

__all__ = ["IncomingCalls"]

logger = logging.getLogger(__name__)

Arrival = tuple[Call, LaneRequest | None]
"""A call with its lane request; None instead of the request if it came by the socket."""


@dataclass(slots=True)
class _Running:
    """A call of the peer whose handler runs in a task and has not answered."""

    call: Call
    request: LaneRequest | None
    work: "Coroutine[Any, Any, Any] | None"
    is_kept: bool
    """True if the task continues when its caller is gone."""
    task: "asyncio.Task[None]"
    timer: asyncio.TimerHandle


class IncomingCalls:
    """The running and held-back calls of one peer.

    Args:
        peer: passed to the handlers.
        context: the methods that can be called, and the endpoint's counters.
        transport: sends the answers.
        max_calls: limit of live handlers; more calls are refused. A handler that ignores its
            cancellation is still live.
    """

    def __init__(
        self, peer: object, context: PeerContext, transport: Transport, max_calls: int
    ) -> None:
        self._peer = peer
        self._methods = context.methods
        self._counters = context.counters
        self._transport = transport
        self._max_calls = max_calls
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, _Running] = {}
        self._alive: set[asyncio.Task[None]] = set()
        self._unbegun: set[int] = set()
        """Ids of calls whose task has not started. A plain function must not overtake them."""
        self._last_number = 0
        """Number of the last call that has begun or will never begin."""
        self._held: dict[int, Arrival | None] = {}
        """Calls held back until those before them have come, by number; None for a call that will
        not come.
        """
        self._is_lane_over = False

    def __len__(self) -> int:
        return len(self._alive)

    # The methods below begin calls in the order of their numbers.

    def take(self, call: Call, request: LaneRequest | None = None) -> None:
        """Begin a call, or hold it back until the calls before it have come.

        Args:
            call: the call's frame.
            request: the request by which the call came over the peer's lane (a faster channel
                beside the socket); None if it came by the socket.
        """
        number = call.number
        if request is not None and (self._is_lane_over or 0 < number <= self._last_number):
            _refuse_ended(request)
        elif number > self._last_number + 1 and not self._is_lane_over:
            if len(self._held) < self._max_calls:
                self._held[number] = (call, request)
                return
            self._held[number] = None
            self._refuse(call, request, CapacityError("rpc.call", "too many calls wait"))
        else:
            self._last_number = max(self._last_number, number)
            self._start(call, request)
            if self._held:
                self._begin_held()

    def end_lane(self) -> None:
        """Note that the other side's lane (its faster channel beside the socket) is lost: calls
        that it has not delivered are not waited for.

        From now on calls come by the socket only, which keeps their order.
        """
        self._is_lane_over = True
        while self._held:
            number = min(self._held)
            self._begin(number, self._held.pop(number))

    def _begin_held(self) -> None:
        """Begin the calls that were held back, in the order of their numbers, up to the first
        number that may still come.
        """
        while (number := self._last_number + 1) in self._held:
            self._begin(number, self._held.pop(number))

    def _begin(self, number: int, arrival: Arrival | None) -> None:
        self._last_number = number
        if arrival is not None:
            call, request = arrival
            if request is not None and self._is_lane_over:
                _refuse_ended(request)
            else:
                self._start(call, request)

    # The methods below run and stop the handlers of calls.

    def _start(self, call: Call, request: LaneRequest | None) -> None:
        """Run the handler of ``call``, or answer with the error that prevents it."""
        try:
            method, argument = self._resolve(call)
        except TandemError as error:
            self._refuse(call, request, error)
            return
        self._counters.calls_started += 1
        work: Coroutine[Any, Any, Any] | None = None
        is_kept = False
        if method.is_async or not self._unbegun:
            try:
                response: Any = method.handler(self._peer, argument)
            except Exception as error:  # noqa: BLE001 - the edge of the process: answered
                self._refuse(call, request, error)
                return
            if isinstance(response, Kept):
                work, is_kept = response.work, True
            elif method.is_async or asyncio.iscoroutine(response):
                work = response
            else:
                self._answer(call, request, response)
                return
        call_id = call.call_id
        self._unbegun.add(call_id)
        task = self._loop.create_task(self._run(call, request, method, argument, work))
        timer = self._loop.call_later(call.timeout_ms / 1e3, self._expire, call_id)
        self._open[call_id] = _Running(call, request, work, is_kept, task, timer)
        self._alive.add(task)
        task.add_done_callback(self._alive.discard)

    def cancel(self, call_id: int) -> None:
        """Stop the handler of a call that its caller gave up, or prevent it from beginning.

        The id of an answered call is ignored.
        """
        if self._stop(call_id) is not None:
            self._counters.calls_cancelled += 1
        elif call_id > self._last_number and len(self._held) < self._max_calls:
            self._held[call_id] = None
            self._begin_held()

    def cancel_all(self) -> None:
        """Stop every handler without answers, because the peer is lost."""
        self._is_lane_over = True
        held, self._held = self._held, {}
        for arrival in held.values():
            if arrival is not None:
                _refuse_ended(arrival[1])
        for call_id, running in list(self._open.items()):
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
        call: Call,
        request: LaneRequest | None,
        method: Method,
        argument: Any,
        work: "Coroutine[Any, Any, Any] | None",
    ) -> None:
        call_id = call.call_id
        self._unbegun.discard(call_id)
        try:
            response = method.handler(self._peer, argument) if work is None else await work
            if isinstance(response, Kept):
                self._open[call_id].is_kept = True
                response = await response.work
            elif work is None and asyncio.iscoroutine(response):
                response = await response
        except asyncio.CancelledError:
            # If ``_stop`` cancelled the task, the call is answered already. A CancelledError from
            # the handler's own work still needs an answer.
            if self._close(call_id):
                error = CancelledError("rpc.call", f"{method.name!r} was cancelled there")
                self._refuse(call, request, error)
        except Exception as error:  # noqa: BLE001 - the edge of the process: logged and answered
            if self._close(call_id):
                self._refuse(call, request, error)
        else:
            if self._close(call_id):
                self._answer(call, request, response)

    def _expire(self, call_id: int) -> None:
        # Answer the expired call here instead of in its task, since a handler may be slow to end
        # after its cancellation.
        running = self._stop(call_id)
        if running is not None:
            self._counters.calls_expired += 1
            call = running.call
            late = f"{call.method!r} did not end within {call.timeout_ms} ms"
            self._refuse(call, running.request, DeadlineError("rpc.call", late))

    def _stop(self, call_id: int) -> "_Running | None":
        running = self._close(call_id)
        if running is not None:
            if call_id in self._unbegun:
                # The call's task has not started, so that its cancellation ends it without running
                # the handler.
                self._unbegun.discard(call_id)
                running.task.cancel()
                if running.work is not None:
                    running.work.close()
            elif not running.is_kept:
                running.task.cancel()
        return running

    def _close(self, call_id: int) -> "_Running | None":
        """Remove a call from the table of running calls and return it; None if it was answered
        before.
        """
        running = self._open.pop(call_id, None)
        if running is not None:
            running.timer.cancel()
        return running

    # The methods below send the answers of calls.

    def _answer(self, call: Call, request: LaneRequest | None, response: Any) -> None:
        try:
            self._transport.answer(Reply(call.call_id, as_body(response)), request)
        except ConfigError as error:
            # The response cannot be encoded: an error of the handler and not of the caller.
            what = f"the answer of {call.method!r} cannot be sent: {error.what}"
            self._refuse(call, request, InternalError("rpc.call", what))
        except TandemError as error:
            self._refuse(call, request, error)

    def _refuse(self, call: Call, request: LaneRequest | None, error: Exception) -> None:
        if not isinstance(error, TandemError):
            method, peer = call.method, self._transport.name
            logger.error("event=handler_failed method=%s peer=%s", method, peer, exc_info=error)
            error = InternalError(
                "rpc.call",
                f"{method!r} failed with {type(error).__name__}: the log of the serving side has "
                "the trace",
            )
        self._counters.calls_failed += 1
        try:
            self._transport.answer(make_fault(call.call_id, error), request)
        except TandemError as unsent:
            # The error cannot be sent as an answer because the peer is lost or about to be; its own
            # side ends the call.
            logger.debug("event=fault_unsent peer=%s reason=%s", self._transport.name, unsent)


def _refuse_ended(request: LaneRequest | None) -> None:
    if request is not None:
        request.fail(PeerLostError("rpc.lane", "the session of this call, or its lane, is over"))

"""One session with one peer, alike on both sides.

A ``Peer`` stands for exactly one session. When the session ends, the object is lost for good, and
all that waits on it fails with ``PeerLostError``. A new session is a new object with another epoch,
so that no message to an old session can reach a new one.

Threads: all on the endpoint's event loop, except ``push_threadsafe``, ``begin_threadsafe`` and the
read-only properties.
"""

import logging
from collections.abc import Callable, Coroutine
from typing import TypeVar

import msgspec

from tandem.core.errors import PeerLostError, TandemError, UnsupportedError
from tandem.rpc.incoming import IncomingCalls
from tandem.rpc.outgoing import BegunCall, OutgoingCalls
from tandem.rpc.transport import Connection, PeerContext, Transport
from tandem.rpc.wire.frames import (
    Bye,
    Call,
    Cancel,
    Event,
    Fault,
    Hello,
    LaneEnd,
    Reply,
    Welcome,
    as_body,
    decode_body,
    make_fault,
)

__all__ = ["Peer"]

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Peer:
    """The other side of one session (the time from a handshake to its end or loss).

    Args:
        greeting: the peer's first message: its identity, and the limits to respect.
        connection: the session's part of the socket; closed with the session.
        context: shared parts of the endpoint.
        on_lost: called once with the reason when the session has ended.
    """

    def __init__(
        self,
        greeting: Hello | Welcome,
        connection: Connection,
        context: PeerContext,
        on_lost: "Callable[[Peer, TandemError], None]",
    ) -> None:
        self.identity = greeting.identity
        self.epoch = greeting.epoch
        """Number of this session in the client's life, from 1."""
        self.transport = Transport(connection, greeting, context)
        """Carries the messages; for this package."""
        self._context = context
        self._on_lost = on_lost
        max_calls = context.config.max_pending_per_peer
        self._outgoing = OutgoingCalls(self.transport, max_calls)
        self._incoming = IncomingCalls(self, context, self.transport, max_calls)
        self.transport.start(
            {
                Call: self._incoming.take,
                Reply: self._outgoing.take_answer,
                Fault: self._take_fault,
                Cancel: lambda cancel: self._incoming.cancel(cancel.call_id),
                Event: self._take_event,
                LaneEnd: lambda _: self._incoming.end_lane(),
                Bye: self._take_bye,
            },
            self._incoming.take,
            self._end,
        )

    @property
    def name(self) -> str:
        """The name that the peer gives itself."""
        return self.identity.name

    @property
    def instance_id(self) -> str:
        """Random id of the peer's process, new for each start."""
        return self.identity.instance_id

    @property
    def is_lost(self) -> bool:
        """True if this session has ended."""
        return self.transport.loss is not None

    @property
    def has_lane(self) -> bool:
        """True if calls to the peer that are short enough go by a lane (a faster channel beside the
        socket); for tests and logs.
        """
        return self.transport.lane is not None

    @property
    def pending_messages(self) -> int:
        """Number of messages that the peer has not acknowledged as read."""
        return self.transport.window.unread_messages

    @property
    def running_calls(self) -> int:
        """Number of the peer's calls whose handlers are live here."""
        return len(self._incoming)

    def __repr__(self) -> str:
        state = "lost" if self.is_lost else "live"
        return f"Peer({self.name!r}, id={self.instance_id}, epoch={self.epoch}, {state})"

    async def call(
        self,
        method: str,
        request: object,
        response_type: type[T],
        *,
        timeout_s: float | None = None,
    ) -> T:
        """Call ``method`` on the other side and wait for its answer.

        Cancelling the waiting task cancels the handler on the other side. Calls begin there in the
        order in which they are made here, whether they go by the socket or by a lane.

        Args:
            method: name under which the other side registered it.
            request: anything that decodes to the registered request type.
            response_type: the type that the answer must decode to.
            timeout_s: deadline; None takes ``default_timeout_ms``. It is sent along.

        Returns: the decoded answer.
        Raises: DeadlineError when the deadline passes on either side, or the answer is lost with
            its lane: executed once or not at all; PeerLostError when the session ends first (an
            unanswered call may or may not have been executed); UnsupportedError for an unknown
            method; CapacityError when too many calls are open or the request is too large;
            ConfigError if the request does not fit its type; CorruptionError if the answer does
            not; else the handler's error, if it was a ``TandemError``, or InternalError.
        """
        return await self.begin(method, request, response_type, timeout_s=timeout_s)

    def begin(
        self,
        method: str,
        request: object,
        response_type: type[T],
        *,
        timeout_s: float | None = None,
    ) -> Coroutine[None, None, T]:
        """Send a call before returning, and return a coroutine that waits for the answer, as
        ``call`` does.

        Raises: as ``call``, the errors that are known before the answer.
        """
        if timeout_s is None:
            timeout_s = self._context.config.default_timeout_ms / 1e3
        return self._outgoing.begin(method, request, response_type, timeout_s)

    def begin_threadsafe(
        self, method: str, request: object, response_type: type[T], *, timeout_s: float
    ) -> BegunCall[T]:
        """Begin a call from any thread but the event loop's, which waiting for the answer would
        block.

        The thread may wait for the answer, or drop the call. A call over a lane (a connection of
        the transfer engine beside the socket) does not wake this process's event loop. Without a
        lane the event loop sends the call. Raises: as ``call``.
        """
        return self._outgoing.begin_threadsafe(method, request, response_type, timeout_s)

    def push(self, event: msgspec.Struct) -> None:
        """Send a one-way event. Events of one thread arrive in order.

        Args:
            event: a tagged struct of the union that the other side listens for.

        Raises: PeerLostError if the session has ended; CapacityError if the peer has left too
            much unread: the peer is then dropped, since a gap in its events would go unnoticed;
            also for an event over the size limit, which ends no session.
        """
        self.transport.send(self.transport.encode(Event(as_body(event))), or_end=True)

    def push_threadsafe(self, event: msgspec.Struct) -> None:
        """Send a one-way event from any thread, encoded in that thread; otherwise like ``push``.

        Wakes the event loop once for all events pushed until the loop runs. Raises as ``push``. If
        the peer is lost before the event is sent, the event is lost, as on any wire.
        """
        self.transport.send_threadsafe(self.transport.encode(Event(as_body(event))), or_end=True)

    def close(self) -> None:
        """End the session and tell the peer so, which sees a ``PeerLostError``. May be repeated."""
        what = f"session with {self.name} was closed by this side"
        self.transport.lose(PeerLostError("rpc.close", what), tell=True)

    def _end(self, error: TandemError) -> None:
        self._outgoing.fail_all()
        self._incoming.cancel_all()
        self._on_lost(self, error)

    # The methods below take the peer's frames that are no calls and no answers.

    def _take_fault(self, fault: Fault) -> None:
        if fault.call_id != 0:
            self._outgoing.take_answer(fault)
            return
        self._context.counters.notices_received += 1
        logger.warning(
            "event=message_refused_by_peer peer=%s code=%s reason=%s",
            self.name,
            fault.code,
            fault.what,
        )

    def _take_event(self, frame: Event) -> None:
        methods, counters = self._context.methods, self._context.counters
        if methods.event_decoder is None or methods.event_callback is None:
            self._refuse_event("nobody listens for events here")
            return
        try:
            event = decode_body(methods.event_decoder, frame.body)
        except msgspec.MsgspecError as error:
            self._refuse_event(f"unknown or malformed event: {error}")
            return
        counters.events_received += 1
        try:
            methods.event_callback(self, event)
        except Exception:
            counters.callback_errors += 1
            logger.exception("event=event_callback_failed peer=%s", self.name)

    def _refuse_event(self, what: str) -> None:
        self._context.counters.unknown_events += 1
        logger.warning("event=event_refused peer=%s reason=%s", self.name, what)
        notice = make_fault(0, UnsupportedError("rpc.event", what, field="event"))
        self.transport.send_quietly(notice, or_end=True)

    def _take_bye(self, bye: Bye) -> None:
        reason = f": {bye.what}" if bye.what else ""
        what = f"{self.name} closed the session{reason}"
        self.transport.lose(PeerLostError("rpc.session", what), tell=False)

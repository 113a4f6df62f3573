"""One session with one peer, alike on both sides.

A ``Peer`` stands for exactly one session. When the session ends, the object is lost for good, and
all that waits on it fails with ``PeerLostError``. A new session is a new object with another epoch,
so that no message to an old session can reach a new one.

Threads: all on the endpoint's event loop, except ``push_threadsafe``, ``begin_threadsafe`` and the
read-only properties.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from tandem.core.clock import Clock
from tandem.core.errors import (
    CapacityError,
    ConfigError,
    CorruptionError,
    PeerLostError,
    TandemError,
    UnsentError,
    UnsupportedError,
)
from tandem.rpc.config import RpcConfig
from tandem.rpc.counters import RpcCounters
from tandem.rpc.incoming import IncomingCalls
from tandem.rpc.lane import LaneRequest, LaneRouter
from tandem.rpc.lease import Lease
from tandem.rpc.methods import MethodTable
from tandem.rpc.outgoing import BegunCall, OutgoingCalls, Wire
from tandem.rpc.window import ReadLedger, SendWindow, count_window
from tandem.rpc.wire.frames import (
    Beat,
    Bye,
    Call,
    Cancel,
    Event,
    Fault,
    Frame,
    Hello,
    LaneEnd,
    LaneOffer,
    Reply,
    Welcome,
    as_body,
    decode_body,
    decode_frame,
    encode_frame,
    make_fault,
)
from tandem.rpc.wire.sockets import Connection

__all__ = ["Peer", "PeerContext"]

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PeerContext:
    """The parts of an endpoint (a server or client) that all its sessions share."""

    config: RpcConfig
    methods: MethodTable
    counters: RpcCounters
    clock: Clock
    lanes: LaneRouter | None = None
    """Lanes of the process; None to send all by the socket."""


class Peer:
    """The other side of one session (the time from a handshake to its end or loss).

    Args:
        greeting: the peer's first message: its identity, and the limits to respect.
        transport: borrowed; the endpoint owns it.
        context: shared parts of the endpoint.
        our_lane: the lane offer sent to the peer; withdrawn when the session ends.
        on_lost: called once with the reason when the session has ended.
    """

    def __init__(
        self,
        greeting: Hello | Welcome,
        transport: Connection,
        context: PeerContext,
        *,
        our_lane: LaneOffer | None,
        on_lost: "Callable[[Peer, TandemError], None]",
    ) -> None:
        config, limits = context.config, greeting.limits
        self.identity = greeting.identity
        self.epoch = greeting.epoch
        """Number of this session in the client's life, from 1."""
        self._transport = transport
        self._context = context
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._lost: TandemError | None = None
        self._max_message_bytes = min(config.max_message_bytes, limits.max_message_bytes)
        self._window = SendWindow(count_window(config), config.max_pending_bytes)
        self._ledger = ReadLedger(limits.window_messages, limits.window_bytes)
        # Send heartbeats at a third of the peer's lease, so that two may be late before the peer
        # counts this side as lost.
        beat_ms = min(config.heartbeat_interval_ms, limits.lease_ms / 3)
        self._lease = Lease(config.lease_ms / 1e3, beat_ms / 1e3, context.clock.now_s())
        wire = Wire(
            peer_name=self.name,
            encode=self._encode,
            send=self._send,
            end_lane=self._tell_lane_end,
            get_loss=self._copy_loss,
        )
        self._outgoing = OutgoingCalls(wire, config.max_pending_per_peer)
        self._incoming = IncomingCalls(
            self,
            context.methods,
            wire,
            max_calls=config.max_pending_per_peer,
            max_lane_bytes=0 if context.lanes is None else context.lanes.max_bytes,
            counters=context.counters,
        )
        self._outbox: list[bytes] = []
        self._outbox_lock = threading.Lock()
        self._take: dict[type[Any], Callable[[Any], None]] = {
            Call: self._incoming.take,
            Reply: self._outgoing.take_answer,
            Fault: self._take_fault,
            Cancel: lambda cancel: self._incoming.cancel(cancel.call_id),
            Event: self._take_event,
            LaneEnd: lambda _: self._incoming.end_lane(),
            Bye: self._take_bye,
        }
        self._timer = self._loop.call_later(self._lease.check_interval_s, self._check_lease)
        self._our_lane = our_lane
        self._opening: asyncio.Task[None] | None = None
        if context.lanes is not None:
            if our_lane is not None:
                context.lanes.begin(our_lane, self._receive_by_lane)
            if greeting.lane is not None:
                opening = self._open_lane(context.lanes, greeting.lane)
                self._opening = self._loop.create_task(opening)

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
        return self._lost is not None

    @property
    def has_lane(self) -> bool:
        """True if calls to the peer that are short enough go by a lane (a faster channel beside the
        socket); for tests and logs.
        """
        return self._outgoing.has_lane

    @property
    def pending_messages(self) -> int:
        """Number of messages that the peer has not acknowledged as read."""
        return self._window.unread_messages

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
    ) -> Coroutine[Any, Any, T]:
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
        self._raise_if_lost()
        return self._outgoing.begin_threadsafe(method, request, response_type, timeout_s)

    def push(self, event: msgspec.Struct) -> None:
        """Send a one-way event. Events of one thread arrive in order.

        Args:
            event: a tagged struct of the union that the other side listens for.

        Raises: PeerLostError if the session has ended; CapacityError if the peer has left too
            much unread: the peer is then dropped, since a gap in its events would go unnoticed;
            also for an event over the size limit, which ends no session.
        """
        self._raise_if_lost()
        data = self._encode(Event(as_body(event)))
        self._admit_event(data)
        if self._outbox:
            self._flush_outbox()
        self._transmit(data)

    def push_threadsafe(self, event: msgspec.Struct) -> None:
        """Send a one-way event from any thread, encoded in that thread; otherwise like ``push``.

        Wakes the event loop once for all events pushed until the loop runs. Raises as ``push``. If
        the peer is lost before the event is sent, the event is lost, as on any wire.
        """
        self._raise_if_lost()
        data = self._encode(Event(as_body(event)))
        self._admit_event(data)
        with self._outbox_lock:
            self._outbox.append(data)
            is_first = len(self._outbox) == 1
        if is_first:
            self._call_soon_threadsafe(self._flush_outbox)

    def close(self) -> None:
        """End the session and tell the peer so, which sees a ``PeerLostError``. May be repeated."""
        what = f"session with {self.name} was closed by this side"
        self.lose(PeerLostError("rpc.close", what), tell=True)

    def receive(self, data: bytes) -> None:
        """Process one frame (wire message) of the peer; called by the endpoint that owns the
        socket.
        """
        self._lease.note_heard(self._context.clock.now_s())
        frame, is_counted = None, True
        try:
            frame = self._decode(data)
            is_counted = not isinstance(frame, Beat | LaneEnd)
            if isinstance(frame, Beat):
                self._window.acknowledge(frame.messages_read, frame.bytes_read)
            elif isinstance(frame, Hello | Welcome):
                what = f"second {type(frame).__name__} in a session"
                raise CorruptionError("rpc.receive", what)
        except TandemError as error:
            self._note_refused(error)
            self._send_quietly(make_fault(0, error))
            frame = None
        if is_counted and self._ledger.note_read(len(data)):
            self._send_beat()
        take = self._take.get(type(frame))
        if take is not None:
            take(frame)

    def _decode(self, data: bytes) -> Frame:
        limit = self._context.config.max_message_bytes
        if len(data) > limit:
            self._context.counters.oversized_frames += 1
            what = f"message of {len(data)} bytes, limit {limit}: send bulk by tandem.transfer"
            raise CapacityError("rpc.receive", what)
        return decode_frame(data)

    def _note_refused(self, error: TandemError) -> None:
        if isinstance(error, CorruptionError):
            self._context.counters.malformed_frames += 1
        logger.warning("event=frame_refused peer=%s reason=%s", self.name, error)

    def lose(self, error: TandemError, *, tell: bool) -> None:
        """End the session because of ``error``, and fail all that waits on it. ``tell`` sends the
        reason to the peer.

        May be repeated.
        """
        if self._lost is not None:
            return
        if tell:
            self._transport.say_bye(error)
        self._lost = error
        self._transport.close()
        self._timer.cancel()
        if self._opening is not None:
            self._opening.cancel()
        if self._context.lanes is not None:
            self._context.lanes.withdraw(self._our_lane)
        self._outgoing.fail_all(lambda: PeerLostError(error.where, error.what))
        self._incoming.cancel_all()
        with self._outbox_lock:
            self._outbox.clear()
        self._on_lost(self, error)

    # The methods below encode and send frames.

    def _send(self, frame: Frame) -> None:
        """Encode and send a frame that counts in the window (the limit of what the peer has not
        read yet). If it is an answer, failure to send it ends the session.
        """
        self._raise_if_lost()
        data = self._encode(frame)
        if not self._window.admit(len(data)):
            error = self._describe_overflow()
            if isinstance(frame, Reply | Fault):
                # No caller on this side waits for this error, while the peer waits for the answer.
                # End the session, so that the peer's call fails.
                self._overflow(error)
            raise error
        self._transmit(data)

    def _send_quietly(self, frame: Frame) -> None:
        try:
            self._send(frame)
        except TandemError as error:
            logger.debug("event=notice_unsent peer=%s reason=%s", self.name, error)

    def _encode(self, frame: Frame) -> bytes:
        try:
            data = encode_frame(frame)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ConfigError("rpc.send", f"message has no msgpack form: {error}") from None
        if len(data) > self._max_message_bytes:
            raise CapacityError(
                "rpc.send",
                f"message of {len(data)} bytes, limit {self._max_message_bytes}: "
                "send bulk by tandem.transfer",
            )
        return data

    def _transmit(self, data: bytes) -> None:
        self._raise_if_lost()  # Encoding or flushing may have found the peer lost.
        self._transport.transmit(data)
        self._lease.note_said(self._context.clock.now_s())

    def _admit_event(self, data: bytes) -> None:
        if not self._window.admit(len(data)):
            error = self._describe_overflow()
            self._call_soon_threadsafe(self._overflow, error)
            raise error

    def _describe_overflow(self) -> UnsentError:
        return UnsentError(
            "rpc.send",
            f"{self.name} has left {self._window.unread_messages} messages, "
            f"{self._window.unread_bytes} bytes unread, limits {self._window.max_messages} and "
            f"{self._window.max_bytes}",
        )

    def _overflow(self, error: TandemError) -> None:
        if not self.is_lost:
            self._context.counters.peers_overflowed += 1
            what = f"slow peer dropped: {error.what}"
            self.lose(PeerLostError("rpc.send", what), tell=True)

    def _call_soon_threadsafe(self, callback: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            raise PeerLostError("rpc.push", "the event loop of this endpoint is closed") from None

    def _flush_outbox(self) -> None:
        with self._outbox_lock:
            batch, self._outbox = self._outbox, []
        # The threads that pushed these events were told that they are sent; a loss is reported by
        # ``on_peer_lost``.
        self._transmit_all(batch)

    def _send_uncounted(self, frame: Beat | LaneEnd) -> bool:
        """Send a frame that is not held back by the window (the limit of what the peer has not read
        yet), since the peer's progress depends on it. Return True if it was sent.
        """
        return self._transmit_all([encode_frame(frame)])

    def _transmit_all(self, batch: Sequence[bytes]) -> bool:
        """Send frames that no caller waits for. A full socket ends the session. Return True if all
        were sent.
        """
        try:
            for data in batch:
                self._transmit(data)
        except CapacityError as error:
            self._overflow(error)
        except PeerLostError as error:
            logger.debug("event=unsent peer=%s reason=%s", self.name, error)
        else:
            return True
        return False

    def _raise_if_lost(self) -> None:
        loss = self._copy_loss()
        if loss is not None:
            raise loss

    def _copy_loss(self) -> PeerLostError | None:
        lost = self._lost
        return None if lost is None else PeerLostError(lost.where, lost.what)

    # The methods below open the lane (a channel beside the socket), and take calls that come by the
    # peer's.

    async def _open_lane(self, lanes: LaneRouter, offer: LaneOffer) -> None:
        try:
            lane = await lanes.open(offer)
        except TandemError as error:
            logger.info("event=lane_not_opened peer=%s reason=%s", self.name, error)
            return
        if self.is_lost:
            lane.close()
        else:
            self._outgoing.use_lane(lane, offer)

    def _receive_by_lane(self, data: bytes, request: LaneRequest) -> None:
        try:
            call = decode_frame(data)
            if not isinstance(call, Call):
                raise CorruptionError("rpc.lane", f"a {type(call).__name__} by a lane")
        except TandemError as error:
            self._note_refused(error)
            request.reply(encode_frame(make_fault(0, error)))
            return
        self._incoming.take(call, request)

    def _tell_lane_end(self) -> None:
        with contextlib.suppress(PeerLostError):
            self._call_soon_threadsafe(self._send_uncounted, LaneEnd())

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
        self._send_quietly(make_fault(0, UnsupportedError("rpc.event", what, field="event")))

    def _take_bye(self, bye: Bye) -> None:
        reason = f": {bye.what}" if bye.what else ""
        what = f"{self.name} closed the session{reason}"
        self.lose(PeerLostError("rpc.session", what), tell=False)

    # The methods below watch the peer's lease, and send heartbeats.

    @property
    def silence_s(self) -> float:
        """Seconds since the last message of the peer was read. The peer is lost after ``lease_ms``
        of silence.
        """
        return self._lease.silence_s(self._context.clock.now_s())

    def _check_lease(self) -> None:
        # Read what has arrived before judging the silence, however long this process was not
        # scheduled: a process that was stopped for longer than the lease must not count its peers
        # as lost. ``note_look`` also excuses peers that may have been stopped with it.
        if self._lease.is_expired(self._context.clock.now_s()):
            self._transport.drain()
        if self.is_lost:
            return
        now_s = self._context.clock.now_s()
        self._lease.note_look(now_s)
        if self._lease.is_expired(now_s):
            what = (
                f"{self.name} was silent for {self._lease.silence_s(now_s):.3f} s, lease "
                f"{self._lease.lease_s:g} s"
            )
            self.lose(PeerLostError("rpc.lease", what), tell=True)
            return
        if self._lease.is_beat_due(now_s):
            self._send_beat()
        self._timer = self._loop.call_later(self._lease.check_interval_s, self._check_lease)

    def _send_beat(self) -> None:
        if self._send_uncounted(Beat(self._ledger.messages, self._ledger.bytes)):
            self._ledger.note_told()

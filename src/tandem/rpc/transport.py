"""The ways of one session to its peer: a part of a ZeroMQ socket, and a lane for calls beside it.

A ``Connection`` carries the handshake. With the handshake a ``Transport`` begins, which keeps the
limits that the peer has announced: the size of messages, how much may be unread, and how long this
side may be silent. It also notices when the peer is silent, and ends the session once and for good.

Threads: all on the endpoint's event loop, except the methods whose text says "from any thread".
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq

from tandem.core.clock import Clock
from tandem.core.errors import (
    CapacityError,
    ConfigError,
    CorruptionError,
    PeerLostError,
    TandemError,
    UnsentError,
)
from tandem.rpc.config import RpcConfig
from tandem.rpc.counters import RpcCounters
from tandem.rpc.handshake import make_limits
from tandem.rpc.lane import Lane, LaneRequest, LaneRouter
from tandem.rpc.lease import Lease
from tandem.rpc.methods import MethodTable
from tandem.rpc.window import ReadLedger, SendWindow, count_window
from tandem.rpc.wire.frames import (
    MIN_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Beat,
    Call,
    Fault,
    Frame,
    Greeting,
    Hello,
    Identity,
    LaneEnd,
    LaneOffer,
    Reply,
    Welcome,
    decode_frame,
    encode_frame,
    make_bye,
    make_fault,
)
from tandem.rpc.wire.pump import SocketPump
from tandem.rpc.wire.sockets import NOBLOCK

__all__ = ["Connection", "PeerContext", "Transport"]

logger = logging.getLogger(__name__)
Waiting = TypeVar("Waiting")

MORE = int(zmq.SNDMORE) | NOBLOCK


@dataclass(frozen=True, slots=True)
class PeerContext:
    """The parts of an endpoint (a server or client) that all its sessions share."""

    config: RpcConfig
    methods: MethodTable
    counters: RpcCounters
    clock: Clock
    lanes: LaneRouter | None = None
    """Lanes of the process; None to send all by the socket."""


class Connection:
    """The connection below one session: a whole socket, or one peer's part of it.

    Args:
        socket: borrowed.
        pump: reads the socket; borrowed.
        name: the peer's name, for errors.
        address: the peer's address on the socket; empty if the socket has one peer.
        on_close: called by ``close``.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        pump: SocketPump,
        name: str,
        *,
        address: bytes = b"",
        on_close: Callable[[], None],
    ) -> None:
        self._socket = socket
        self._pump = pump
        self._name = name
        self._address = address
        self._on_close = on_close
        self._lanes: LaneRouter | None = None
        self.offer: LaneOffer | None = None
        """The address of this process's lanes and the token of this session, if the peer was told
        of them.
        """
        self.drain = pump.drain
        """Receives all messages that have arrived."""

    def greet(
        self, kind: type[Hello | Welcome], epoch: int, identity: Identity, context: PeerContext
    ) -> None:
        """Send this side's first message of a session: a ``Hello`` of a client, a ``Welcome`` of a
        server, as ``kind`` says. Raises: as ``transmit``.
        """
        self._lanes = context.lanes
        self.offer = None if self._lanes is None else self._lanes.offer()
        limits = make_limits(context.config)
        versions = PROTOCOL_VERSION, MIN_PROTOCOL_VERSION
        self.transmit(encode_frame(kind(*versions, epoch, identity, limits, lane=self.offer)))

    def transmit(self, data: bytes) -> None:
        """Queue one frame on the socket without blocking.

        Raises: CapacityError if the socket's queue is full; PeerLostError if the connection is
            gone.
        """
        try:
            if self._address:
                self._socket.send(self._address, MORE)
            self._socket.send(data, NOBLOCK)
        except zmq.Again:
            what = f"the socket queue to {self._name} is full"
            raise UnsentError("rpc.send", what) from None
        except zmq.ZMQError as error:
            what = f"{self._name} is not connected: {error}"
            raise PeerLostError("rpc.send", what) from None
        self._pump.note_sent()

    def say_bye(self, error: TandemError) -> None:
        """Try to tell the peer why the session ends. Errors are ignored, since the peer may be
        gone.
        """
        with contextlib.suppress(CapacityError, PeerLostError):
            self.transmit(encode_frame(make_bye(error)))

    def close(self) -> None:
        """Release the session's part of the socket and withdraw the offer of a lane. May be
        repeated.
        """
        if self._lanes is not None:
            self._lanes.withdraw(self.offer)
        self._on_close()


class Transport:
    """The messages of one session. Calls that are short enough go by a lane (a faster channel
    beside the socket) if there is one, all others by the socket.

    Args:
        connection: the session's part of the socket; closed with the session.
        greeting: the peer's first message: the limits to respect, and the offer of a lane.
        context: shared parts of the endpoint.
    """

    def __init__(
        self, connection: Connection, greeting: Hello | Welcome, context: PeerContext
    ) -> None:
        config, limits = context.config, greeting.limits
        self.name = greeting.identity.name
        self.lane: Lane | None = None
        """The lane to the peer; None while all goes by the socket."""
        self.loss: TandemError | None = None
        """The error that ended the session; None while it lasts."""
        self.window = SendWindow(count_window(config), config.max_pending_bytes)
        self._connection = connection
        self._greeting = greeting
        self._context = context
        self._counters = context.counters
        self._loop = asyncio.get_running_loop()
        self._max_message_bytes = min(config.max_message_bytes, limits.max_message_bytes)
        self._ledger = ReadLedger(limits.window_messages, limits.window_bytes)
        # Send heartbeats at a third of the peer's lease, so that two may be late before the peer
        # counts this side as lost.
        beat_ms = min(config.heartbeat_interval_ms, limits.lease_ms / 3)
        self._lease = Lease(config.lease_ms / 1e3, beat_ms / 1e3, context.clock.now_s())
        self._outbox: list[bytes] = []
        self._lock = threading.Lock()
        """Held to change ``_outbox`` or ``lane``."""
        self._opening: asyncio.Task[None] | None = None

    def start(
        self,
        take: Mapping[type[Any], Callable[[Any], None]],
        take_by_lane: Callable[[Call, LaneRequest], None],
        on_lost: Callable[[TandemError], None],
    ) -> None:
        """Begin to deliver messages.

        Args:
            take: what to call with the frames of each type that come by the socket.
            take_by_lane: called with each call that comes by a lane, and its request.
            on_lost: called once with the reason when the session has ended.
        """
        self._take = take
        self._take_by_lane = take_by_lane
        self._on_lost = on_lost
        self._timer = self._loop.call_later(self._lease.check_interval_s, self.check_lease)
        lanes, theirs = self._context.lanes, self._greeting.lane
        if lanes is not None:
            if self._connection.offer is not None:
                lanes.begin(self._connection.offer, self._receive_by_lane)
            if theirs is not None:
                self._opening = self._loop.create_task(self._open_lane(lanes, theirs))

    def lose(self, error: TandemError, *, tell: bool) -> None:
        """End the session because of ``error``. ``tell`` sends the reason to the peer.

        May be repeated.
        """
        if self.loss is not None:
            return
        if tell:
            self._connection.say_bye(error)
        self.loss = error
        self._connection.close()
        self._timer.cancel()
        if self._opening is not None:
            self._opening.cancel()
        with self._lock:
            lane, self.lane = self.lane, None
        if lane is not None:
            lane.close()
        self._on_lost(error)

    def make_loss(self) -> PeerLostError:
        """Return a new error that says why the session has ended, since a shared error object would
        mix tracebacks.
        """
        assert self.loss is not None, "the session has ended"
        return PeerLostError(self.loss.where, self.loss.what)

    # The methods below encode and send frames.

    def encode(self, frame: Frame) -> bytes:
        """Return the encoded bytes of ``frame``, from any thread.

        Raises: ConfigError if it has no msgpack form; CapacityError if it is too long.
        """
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

    def send(self, data: bytes, *, or_end: bool = False) -> None:
        """Send an encoded frame by the socket.

        Args:
            data: a frame that counts in the window (the limit of what the peer has not read yet).
            or_end: True to end the session if the window is full, because nobody on this side
                learns of the error.

        Raises: PeerLostError if the connection is gone; UnsentError if the window or the socket's
            queue is full.
        """
        self._admit(data, or_end=or_end)
        if self._outbox:
            self._flush_outbox()
        self._transmit(data)

    def send_threadsafe(self, data: bytes, *, or_end: bool = False) -> None:
        """Send an encoded frame from any thread, as ``send`` does.

        Wakes the event loop once for all that is sent until the loop runs. If the socket turns out
        to be full then, the session ends.
        """
        self._admit(data, or_end=or_end)
        with self._lock:
            self._outbox.append(data)
            is_first = len(self._outbox) == 1
        if is_first:
            self._call_soon_threadsafe(self._flush_outbox)

    def send_quietly(self, frame: Frame, *, or_end: bool = False) -> None:
        """Send a frame like ``send``, without an error: if it cannot be sent, the peer is being
        lost or reads nothing, and its own timers end what waits for the frame.
        """
        try:
            self.send(self.encode(frame), or_end=or_end)
        except TandemError as error:
            logger.debug("event=unsent peer=%s reason=%s", self.name, error)

    def answer(self, frame: Reply | Fault, request: LaneRequest | None) -> None:
        """Send an answer by the way of its call: the lane if there is a ``request``, else the
        socket. An answer too long for the lane goes by the socket, and the lane's is then empty.

        Raises: as ``encode`` and ``send``. An answer that does not fit in the window ends the
            session, so that the peer's call fails.
        """
        data = self.encode(frame)
        lanes = self._context.lanes
        if request is None or lanes is None:
            self.send(data, or_end=True)
        elif len(data) <= lanes.max_bytes:
            request.reply(data)
        else:
            self.send(data, or_end=True)
            request.reply(b"")

    def _admit(self, data: bytes, *, or_end: bool) -> None:
        if self.loss is not None:
            raise self.make_loss()
        window = self.window
        if not window.admit(len(data)):
            error = UnsentError(
                "rpc.send",
                f"{self.name} has left {window.unread_messages} messages, {window.unread_bytes} "
                f"bytes unread, limits {window.max_messages} and {window.max_bytes}",
            )
            if or_end:
                self._call_soon_threadsafe(self._overflow, error)
            raise error

    def _overflow(self, error: TandemError) -> None:
        if self.loss is None:
            self._counters.peers_overflowed += 1
            what = f"slow peer dropped: {error.what}"
            self.lose(PeerLostError("rpc.send", what), tell=True)

    def _transmit(self, data: bytes) -> None:
        if self.loss is not None:  # Flushing the outbox may have found the peer lost.
            raise self.make_loss()
        self._connection.transmit(data)
        self._lease.note_said(self._context.clock.now_s())

    def _flush_outbox(self) -> None:
        with self._lock:
            batch, self._outbox = self._outbox, []
        self._transmit_all(batch)

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

    def _call_soon_threadsafe(self, callback: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            raise PeerLostError("rpc.push", "the event loop of this endpoint is closed") from None

    # The methods below send calls by the lane, and open and leave it.

    def begin_by_lane(
        self, data: bytes, begin: Callable[[Lane, bytes], Waiting]
    ) -> tuple[Lane | None, Waiting | None]:
        """Send an encoded call by the lane, from any thread.

        Returns: the lane and what ``begin`` returns; None twice, with nothing sent, if there is no
            lane, it is full or lost, or the call is too long for it.
        """
        lane, theirs = self.lane, self._greeting.lane
        if lane is None or theirs is None or len(theirs.token) + len(data) > lane.max_bytes:
            return None, None
        try:
            return lane, begin(lane, theirs.token + data)
        except CapacityError:
            return None, None
        except TandemError as error:
            self.lose_lane(lane, error)
            return None, None

    def lose_lane(self, lane: Lane | None, reason: TandemError) -> None:
        """Close the lane if it is still in use, and tell the peer that nothing more comes by it,
        from any thread. Calls go by the socket from now on.
        """
        with self._lock:
            if lane is None or self.lane is not lane:
                return
            self.lane = None
        logger.info("event=lane_lost peer=%s reason=%s", self.name, reason)
        lane.close()
        with contextlib.suppress(PeerLostError):
            self._call_soon_threadsafe(self._transmit_all, [encode_frame(LaneEnd())])

    async def _open_lane(self, lanes: LaneRouter, theirs: LaneOffer) -> None:
        try:
            lane = await lanes.open(theirs)
        except TandemError as error:
            logger.info("event=lane_not_opened peer=%s reason=%s", self.name, error)
            return
        if self.loss is None:
            self.lane = lane
        else:
            lane.close()

    # The methods below receive frames.

    def receive(self, data: bytes) -> None:
        """Process one message of the peer that came by the socket."""
        self._lease.note_heard(self._context.clock.now_s())
        frame: Frame | None = None
        limit = self._context.config.max_message_bytes
        try:
            if len(data) > limit:
                self._counters.oversized_frames += 1
                what = f"message of {len(data)} bytes, limit {limit}: send bulk by tandem.transfer"
                raise CapacityError("rpc.receive", what)
            frame = decode_frame(data)
            if isinstance(frame, Beat):
                self.window.acknowledge(frame.messages_read, frame.bytes_read)
            elif isinstance(frame, Greeting):
                what = f"second {type(frame).__name__} in a session"
                raise CorruptionError("rpc.receive", what)
        except TandemError as error:
            self.send_quietly(self._refuse(error), or_end=True)
        if not isinstance(frame, Beat | LaneEnd) and self._ledger.note_read(len(data)):
            self.send_beat()
        take = self._take.get(type(frame))
        if take is not None:
            take(frame)

    def _receive_by_lane(self, data: bytes, request: LaneRequest) -> None:
        try:
            call = decode_frame(data)
            if not isinstance(call, Call):
                raise CorruptionError("rpc.lane", f"a {type(call).__name__} by a lane")
        except TandemError as error:
            request.reply(encode_frame(self._refuse(error)))
            return
        self._take_by_lane(call, request)

    def _refuse(self, error: TandemError) -> Fault:
        """Note that a message of the peer was refused, and return the notice for the peer."""
        if isinstance(error, CorruptionError):
            self._counters.malformed_frames += 1
        logger.warning("event=frame_refused peer=%s reason=%s", self.name, error)
        return make_fault(0, error)

    # The methods below watch the peer's lease, and send heartbeats.

    @property
    def silence_s(self) -> float:
        """Seconds since the last message of the peer was read. The peer is lost after ``lease_ms``
        of silence.
        """
        return self._lease.silence_s(self._context.clock.now_s())

    def check_lease(self) -> None:
        """End the session if the peer was silent for too long, and send a heartbeat if one is due.
        Plans the next check.
        """
        # Read what has arrived before judging the silence, however long this process was not
        # scheduled: a process that was stopped for longer than the lease must not count its peers
        # as lost. ``note_look`` also excuses peers that may have been stopped with it.
        if self._lease.is_expired(self._context.clock.now_s()):
            self._connection.drain()
        if self.loss is not None:
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
            self.send_beat()
        self._timer = self._loop.call_later(self._lease.check_interval_s, self.check_lease)

    def send_beat(self) -> None:
        """Send a heartbeat. The window does not hold it back, since the peer's progress depends on
        it.
        """
        if self._transmit_all([encode_frame(Beat(self._ledger.messages, self._ledger.bytes))]):
            self._ledger.note_told()

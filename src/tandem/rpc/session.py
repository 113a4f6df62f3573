"""One attempt of a client to open a session, and the session if it succeeds."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

import zmq

from tandem.core.errors import (
    CapacityError,
    CorruptionError,
    DeadlineError,
    PeerLostError,
    PermissionDeniedError,
    TandemError,
    make_error,
)
from tandem.rpc.handshake import CompatCheck, make_greeting, run_compat_check
from tandem.rpc.peer import Peer, PeerContext
from tandem.rpc.trust.auth import Auth
from tandem.rpc.wire.frames import (
    Bye,
    Hello,
    Identity,
    LaneOffer,
    Welcome,
    decode_greeting,
    encode_frame,
    make_bye,
)
from tandem.rpc.wire.pump import SocketPump
from tandem.rpc.wire.sockets import SocketMonitor, open_socket, transmit

__all__ = ["ClientSession", "HandshakeDroppedError"]

logger = logging.getLogger(__name__)
LossCallback = Callable[[Peer, TandemError], None]


class HandshakeDroppedError(PermissionDeniedError):
    """The server closed in mid-handshake: a wrong secret, or a server that died just then."""


class ClientSession:
    """The client's end of one connection: one socket, one handshake, at most one peer.

    Args:
        context: borrowed.
        url: of the server.
        auth: what we prove.
        identity: names this process.
        epoch: number of this session, from 1.
        check_compat: accepts or refuses the server by its handshake.
        peer_context: shared with the client's other sessions.
        on_open: called once when the session begins, before anything else of it is delivered.
        on_lost: called once if the session had begun and has ended.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        url: str,
        *,
        auth: Auth,
        identity: Identity,
        epoch: int,
        check_compat: CompatCheck,
        peer_context: PeerContext,
        on_open: Callable[["ClientSession", Peer], None],
        on_lost: LossCallback,
    ) -> None:
        self._url = url
        self._auth = auth
        self._identity = identity
        self._epoch = epoch
        self._check_compat = check_compat
        self._peer_context = peer_context
        self._on_open = on_open
        self._on_lost = on_lost
        self._peer: Peer | None = None
        self._our_lane: LaneOffer | None = None
        self._closed = False
        self._greeted: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()
        self._socket = open_socket(context, zmq.DEALER, peer_context.config)
        auth.secure_client(self._socket)
        self._monitor = SocketMonitor(self._socket, self._note_connection, int(zmq.EVENT_ALL))
        self._pump = SocketPump(self._socket, self._receive)

    async def open(self, timeout_s: float) -> Peer:
        """Connect and shake hands; closes the session if that fails.

        Raises: PeerLostError if there is no server; PermissionDeniedError if we are not trusted;
            UnsupportedError, ConflictError or another refusal by either side;
            DeadlineError if there is no answer in time.
        """
        try:
            self._say_hello()
            await asyncio.wait((self._greeted,), timeout=timeout_s)
            self._check_greeted(timeout_s)
            return self._greeted.result()
        except BaseException:
            if self._peer is None:
                self.close()
            raise

    def _say_hello(self) -> None:
        try:
            self._socket.connect(self._url)
        except zmq.ZMQError as error:
            raise PeerLostError("rpc.connect", f"no way to {self._url}: {error}") from None
        context = self._peer_context
        self._our_lane = None if context.lanes is None else context.lanes.offer()
        hello = make_greeting(Hello, self._epoch, self._identity, context.config, self._our_lane)
        self.transmit(encode_frame(hello))

    def _check_greeted(self, timeout_s: float) -> None:
        if not self._greeted.done():
            raise DeadlineError(
                "rpc.connect", f"{self._url} did not shake hands within {timeout_s:g} s"
            )

    def transmit(self, data: bytes) -> None:
        """Send one frame; see ``Transport``."""
        if self._closed:
            raise PeerLostError("rpc.send", f"session with {self._url} has ended")
        transmit(self._socket, self._url, data)
        self._pump.note_sent()

    def drain(self) -> None:
        """Receive all that has arrived; see ``Transport``."""
        if not self._closed:
            self._pump.drain()

    def drop(self, error: TandemError, *, tell: bool) -> None:
        """End the session because of ``error``; see ``Transport``."""
        if self._closed:
            return
        if tell:
            with contextlib.suppress(CapacityError, PeerLostError):  # Best effort: it is lost.
                transmit(self._socket, self._url, encode_frame(make_bye(error)))
        if self._peer is None:
            self._fail(error)
            self.close()
            return
        self.close()
        self._peer.lose(error)
        self._on_lost(self._peer, error)

    def close(self) -> None:
        """Give the socket back. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._peer_context.lanes is not None:
                self._peer_context.lanes.withdraw(self._our_lane)
            if not self._greeted.done():
                self._greeted.cancel()
            self._pump.close()
            self._monitor.close()
            self._socket.close()

    def _receive(self) -> None:
        data = self._socket.recv(zmq.NOBLOCK)
        if self._socket.getsockopt(zmq.RCVMORE):
            while self._socket.getsockopt(zmq.RCVMORE):
                self._socket.recv(zmq.NOBLOCK)
            self._peer_context.counters.malformed_frames += 1
            return
        if self._peer is not None:
            self._peer.receive(data)
            return
        try:
            self._peer = self._shake_hands(data)
        except TandemError as error:
            self._peer_context.counters.handshakes_refused += 1
            self.drop(error, tell=True)
        else:
            if not self._greeted.done():
                self._greeted.set_result(self._peer)
            self._on_open(self, self._peer)

    def _shake_hands(self, data: bytes) -> Peer:
        greeting = decode_greeting(data)
        if isinstance(greeting, Bye):
            raise make_error(greeting.code, greeting.where, greeting.what, greeting.field)
        if not isinstance(greeting, Welcome) or greeting.epoch != self._epoch:
            raise CorruptionError(
                "rpc.handshake", f"{self._url} answered hello with {type(greeting).__name__}"
            )
        run_compat_check(self._check_compat, greeting.identity, self._identity)
        return Peer(
            greeting.identity,
            self._epoch,
            greeting.limits,
            self,
            self._peer_context,
            our_lane=self._our_lane,
            their_lane=greeting.lane,
        )

    def _note_connection(self, event: int, value: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._end(self._describe_denial(f"refused our key (ZAP {value})"))
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._end(self._describe_denial(f"speaks another mechanism (ZMTP {value:#x})"))
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and self._auth.uses_curve:
            self._end(
                HandshakeDroppedError(
                    "rpc.connect",
                    f"{self._url} closed during the key exchange: its secret is not ours "
                    f"({self._auth.kind.value})",
                )
            )
        elif event == zmq.EVENT_CLOSED:
            self._end(PeerLostError("rpc.connect", f"nobody serves {self._url}"))
        elif event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
            self._end(PeerLostError("rpc.session", f"connection to {self._url} is gone"))

    def _describe_denial(self, what: str) -> PermissionDeniedError:
        return PermissionDeniedError(
            "rpc.connect", f"{self._url} {what}: check the {self._auth.kind.value} secret"
        )

    def _end(self, error: TandemError) -> None:
        self.drain()  # What the server said before it went still counts.
        self.drop(error, tell=False)

    def _fail(self, error: TandemError) -> None:
        if not self._greeted.done():
            self._greeted.set_exception(error)
            self._greeted.exception()  # The waiter may be gone: nothing to log.

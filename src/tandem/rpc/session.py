"""One attempt of a client to open a session, and the session if it succeeds."""

import asyncio

import zmq

from tandem.core.errors import (
    CorruptionError,
    DeadlineError,
    PeerLostError,
    PermissionDeniedError,
    TandemError,
    make_error,
)
from tandem.rpc.handshake import run_compat_check
from tandem.rpc.peer import Peer
from tandem.rpc.side import RpcSide
from tandem.rpc.transport import Connection
from tandem.rpc.wire.frames import Bye, Hello, Welcome, decode_greeting
from tandem.rpc.wire.pump import SocketPump
from tandem.rpc.wire.sockets import NOBLOCK, SocketMonitor, drop_rest, open_socket

__all__ = ["ClientSession", "HandshakeDroppedError"]


class HandshakeDroppedError(PermissionDeniedError):
    """The server closed the connection during the handshake: because of a wrong secret, or because
    it died.
    """


class ClientSession:
    """The client's end of one connection: one socket, one handshake, at most one peer.

    Args:
        side: the client, which is told of the session when it begins, before any of its messages is
            delivered, and when it has ended.
        context: ZeroMQ's context; borrowed.
        epoch: number of this session, from 1.
    """

    def __init__(self, side: RpcSide, context: zmq.Context[zmq.Socket[bytes]], epoch: int) -> None:
        self._side = side
        self._url = side.address.url
        self._epoch = epoch
        self._peer: Peer | None = None
        self._greeted: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()
        self._socket = open_socket(context, zmq.DEALER, side.peer_context.config)
        side.auth.secure_client(self._socket)
        self._monitor = SocketMonitor(self._socket, self._note_connection, int(zmq.EVENT_ALL))
        self._pump = SocketPump(self._socket, self._receive)
        self._connection = Connection(self._socket, self._pump, self._url, on_close=self._release)

    async def open(self, timeout_s: float) -> Peer:
        """Connect and shake hands. Closes the session if that fails.

        Raises: PeerLostError if there is no server; PermissionDeniedError if this client is not
            trusted; UnsupportedError, ConflictError or another refusal by either side;
            DeadlineError if there is no answer in time.
        """
        try:
            self._say_hello()
            await asyncio.wait((self._greeted,), timeout=timeout_s)
            if not self._greeted.done():
                what = f"{self._url} did not shake hands within {timeout_s:g} s"
                raise DeadlineError("rpc.connect", what)  # noqa: TRY301
            return self._greeted.result()
        except BaseException:
            if self._peer is None:
                self._connection.close()
            raise

    def _say_hello(self) -> None:
        try:
            self._socket.connect(self._url)
        except zmq.ZMQError as error:
            raise PeerLostError("rpc.connect", f"no way to {self._url}: {error}") from None
        side = self._side
        self._connection.greet(Hello, self._epoch, side.identity, side.peer_context)

    def end(self, error: TandemError, *, tell: bool) -> None:
        """End the session or the attempt because of ``error``. ``tell`` sends the reason to the
        server.

        May be repeated.
        """
        if self._peer is not None:
            self._peer.transport.lose(error, tell=tell)
        elif not self._socket.closed:
            if tell:
                self._connection.say_bye(error)
            if not self._greeted.done():
                self._greeted.set_exception(error)
                self._greeted.exception()  # Mark it as retrieved: the waiter may be gone.
            self._connection.close()

    def _release(self) -> None:
        if not self._socket.closed:
            self._greeted.cancel()
            self._pump.close()
            self._monitor.close()
            self._socket.close()

    def _receive(self) -> None:
        data = self._socket.recv(NOBLOCK)
        if drop_rest(self._socket):
            self._side.counters.malformed_frames += 1
        elif self._peer is not None:
            self._peer.transport.receive(data)
        else:
            try:
                self._peer = self._shake_hands(data)
            except TandemError as error:
                self._side.counters.handshakes_refused += 1
                self.end(error, tell=True)
                return
            if not self._greeted.done():
                self._greeted.set_result(self._peer)
            self._side.note_joined(self._peer)

    def _shake_hands(self, data: bytes) -> Peer:
        greeting = decode_greeting(data)
        if isinstance(greeting, Bye):
            raise make_error(greeting.code, greeting.where, greeting.what, greeting.field)
        if not isinstance(greeting, Welcome) or greeting.epoch != self._epoch:
            raise CorruptionError(
                "rpc.handshake", f"{self._url} answered hello with {type(greeting).__name__}"
            )
        side = self._side
        run_compat_check(side.check_compat, greeting.identity, side.identity)
        return Peer(greeting, self._connection, side.peer_context, side.note_lost)

    def _note_connection(self, event: int, value: int) -> None:
        error = self._describe(event, value)
        if error is not None:
            self._pump.drain()  # Messages sent before the connection ended still count.
            self.end(error, tell=False)

    def _describe(self, event: int, value: int) -> TandemError | None:
        """Return the error that an event of ZeroMQ's socket monitor stands for; None unless the
        event is the connection's end.
        """
        url = self._url
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            what = f"{url} refused our key (ZAP {value}): check the secret"
            return PermissionDeniedError("rpc.connect", what)
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            what = f"{url} speaks another mechanism (ZMTP {value:#x}): check the secret"
            return PermissionDeniedError("rpc.connect", what)
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and self._side.auth.uses_curve:
            what = f"{url} closed during the key exchange: its secret is not ours"
            return HandshakeDroppedError("rpc.connect", what)
        if event == zmq.EVENT_CLOSED:
            return PeerLostError("rpc.connect", f"nobody serves {url}")
        if event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
            return PeerLostError("rpc.session", f"connection to {url} is gone")
        return None

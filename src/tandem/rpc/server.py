"""The binding side of a control channel: admits clients, and keeps one ``Peer`` for each."""

import contextlib
import logging
from collections.abc import Callable
from typing import Self, TypeVar, Unpack

import zmq

from tandem.core.descriptors import is_scarce, shut
from tandem.core.errors import (
    CapacityError,
    ConfigError,
    ConflictError,
    CorruptionError,
    PeerLostError,
    TandemError,
)
from tandem.rpc.handshake import run_compat_check
from tandem.rpc.methods import Handler
from tandem.rpc.peer import Peer
from tandem.rpc.side import RpcSide, SideOptions
from tandem.rpc.transport import Connection
from tandem.rpc.trust.gate import CurveGate
from tandem.rpc.trust.runtime_dir import check_socket_free, secure_socket_file
from tandem.rpc.wire.frames import Bye, Hello, Welcome, decode_greeting
from tandem.rpc.wire.pump import SocketPump
from tandem.rpc.wire.sockets import NOBLOCK, SocketMonitor, drop_rest, end_context, open_socket

__all__ = ["RpcServer"]

logger = logging.getLogger(__name__)
Req = TypeVar("Req")
Res = TypeVar("Res")

NO_DESCRIPTOR = -1


class RpcServer(RpcSide):
    """A server of methods and events on one endpoint. An async context manager.

    Register methods and callbacks before entering. Handlers and callbacks run on the event loop
    that entered the server.

    Args:
        endpoint: ``ipc:///absolute/path`` or ``tcp://host:port`` (port 0: any free one).
        options: see ``SideOptions``; the table of methods may also be filled by ``register``.
    """

    def __init__(self, endpoint: str, **options: Unpack[SideOptions]) -> None:
        super().__init__(endpoint, **options)
        self._peers: dict[bytes, Peer] = {}
        self._by_descriptor: dict[int, bytes] = {}
        self._opened: contextlib.ExitStack | None = None
        """Closes the sockets; None while the server is not open."""
        self._bound_url = ""

    def method(
        self, name: str, request_type: type[Req], response_type: type[Res]
    ) -> Callable[[Handler[Req, Res]], Handler[Req, Res]]:
        """Return a decorator that registers its function as the handler of a method."""

        def decorate(handler: Handler[Req, Res]) -> Handler[Req, Res]:
            self.register(name, handler, request_type, response_type)
            return handler

        return decorate

    # The methods below open and close the server.

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def endpoint(self) -> str:
        """The bound address, with the chosen port; before ``start`` the address as given."""
        return self._bound_url or self.address.url

    @property
    def peers(self) -> list[Peer]:
        """The clients connected now, in order of arrival."""
        return list(self._peers.values())

    def start(self) -> None:
        """Bind the address and serve.

        Raises: PermissionDeniedError or ConfigError if ``auth`` does not fit the endpoint;
            ConflictError if the address is served already.
        """
        if self._opened is not None:
            raise ConflictError("rpc.bind", f"{self.endpoint} is open already")
        self.auth.check_bind(self.address)
        if self.address.path is not None:
            check_socket_free(self.address.path)
        self._context = zmq.Context[zmq.Socket[bytes]](io_threads=1)
        try:
            with contextlib.ExitStack() as opening:
                self._open_sockets(opening)
                self._opened = opening.pop_all()
        except BaseException:
            self._context.term()
            raise
        logger.info("event=rpc_bound endpoint=%s auth=%r", self.endpoint, self.auth)

    async def aclose(self) -> None:
        """End all sessions and free the address, within ``linger_ms``. May be repeated."""
        opened, self._opened = self._opened, None
        if opened is None:
            return
        self.end_sessions(PeerLostError("rpc.close", f"{self.identity.name} is stopping"))
        opened.close()
        if self.address.path is not None:
            self.address.path.unlink(missing_ok=True)
        await end_context(self._context)
        logger.info("event=rpc_closed endpoint=%s", self.endpoint)

    def end_sessions(self, reason: TandemError) -> None:
        """End all sessions and tell the clients why. New sessions are still admitted."""
        for peer in self.peers:
            peer.transport.lose(reason, tell=True)

    def _open_sockets(self, opening: contextlib.ExitStack) -> None:
        if self.auth.uses_curve:
            opening.callback(CurveGate(self._context, self.auth).close)
        self._socket = open_socket(self._context, zmq.ROUTER, self._config)
        opening.callback(self._socket.close)
        self.auth.secure_server(self._socket)
        events = int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._monitor = SocketMonitor(self._socket, self._note_connection, events)
        opening.callback(self._monitor.close)
        self._bind()
        self._pump = SocketPump(self._socket, self._receive)
        opening.callback(self._pump.close)

    def _bind(self) -> None:
        url, host = self.address.url, self.address.host
        if not self.address.is_local_socket:
            if ":" in host:
                # Set the option only for an IPv6 address: with it an IPv4 address would be bound
                # and reported as an IPv4-mapped one.
                self._socket.setsockopt(zmq.IPV6, 1)
                host = f"[{host}]"
            url = f"tcp://{host}:{self.address.port or '*'}"
        try:
            self._socket.bind(url)
        except zmq.ZMQError as error:
            kind = ConflictError if error.errno == zmq.EADDRINUSE else ConfigError
            raise kind("rpc.bind", f"cannot bind {url}: {error}", field="endpoint") from None
        self._bound_url = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        if self.address.path is not None:
            secure_socket_file(self.address.path)

    # The methods below receive messages, and admit or refuse new clients.

    def _receive(self) -> None:
        routing_id = self._socket.recv(NOBLOCK)
        peer = self._peers.get(routing_id)
        if peer is not None:
            data, descriptor = self._socket.recv(NOBLOCK), NO_DESCRIPTOR
        else:
            # Read a hello (a client's first message) as a frame object, which alone has the
            # connection's descriptor.
            frame = self._socket.recv(NOBLOCK, copy=False)
            data, descriptor = frame.bytes, _find_descriptor(frame)
        if drop_rest(self._socket):
            self.counters.malformed_frames += 1
            logger.warning("event=frame_refused reason=message of several parts")
        elif peer is not None:
            peer.transport.receive(data)
        else:
            self._greet(routing_id, data, descriptor)

    def _greet(self, routing_id: bytes, data: bytes, descriptor: int) -> None:
        # Process the monitor's pending events, which concern earlier connections with the same
        # descriptor.
        self._monitor.drain()
        try:
            greeting = decode_greeting(data)
            if isinstance(greeting, Bye):
                # A bye (a message that ends a session) without a session needs no answer: it comes
                # from a client that found this server incompatible, or from a dropped session.
                return
            if not isinstance(greeting, Hello):
                self.counters.frames_without_session += 1
                raise PeerLostError("rpc.session", "no session on this connection: connect again")
            self._check_admission(greeting)
        except TandemError as error:
            self._refuse(routing_id, error)
            return
        self._admit(routing_id, greeting, descriptor)

    def _check_admission(self, hello: Hello) -> None:
        """Refuse a client that is incompatible or one too many. A newer session of a client
        replaces its older one.
        """
        for peer in self.peers:
            if peer.instance_id != hello.identity.instance_id:
                continue
            if hello.epoch <= peer.epoch:
                raise ConflictError(
                    "rpc.handshake",
                    f"epoch {hello.epoch} of {peer.name} is stale, live is {peer.epoch}",
                    field="epoch",
                )
            error = PeerLostError("rpc.session", f"{peer.name} has connected anew")
            peer.transport.lose(error, tell=True)
        if len(self._peers) >= self._config.max_peers:
            raise CapacityError(
                "rpc.handshake", f"{len(self._peers)} clients are connected, the limit"
            )
        run_compat_check(self.check_compat, hello.identity, self.identity)

    def _refuse(self, routing_id: bytes, error: TandemError) -> None:
        if isinstance(error, CorruptionError):
            self.counters.malformed_frames += 1
        elif not isinstance(error, PeerLostError):
            self.counters.handshakes_refused += 1
        logger.warning("event=client_refused reason=%s", error)
        self._open_connection(routing_id, "client", NO_DESCRIPTOR).say_bye(error)

    def _admit(self, routing_id: bytes, hello: Hello, descriptor: int) -> None:
        connection = self._open_connection(routing_id, hello.identity.name, descriptor)
        try:
            connection.greet(Welcome, hello.epoch, self.identity, self.peer_context)
        except TandemError as error:
            logger.debug("event=client_gone peer=%s reason=%s", hello.identity.name, error)
            connection.close()
            return
        peer = Peer(hello, connection, self.peer_context, self.note_lost)
        self._peers[routing_id] = peer
        if descriptor != NO_DESCRIPTOR:
            self._by_descriptor[descriptor] = routing_id
        self.note_joined(peer)

    def _open_connection(self, routing_id: bytes, name: str, descriptor: int) -> Connection:
        def close() -> None:
            self._peers.pop(routing_id, None)
            if self._by_descriptor.get(descriptor) == routing_id:
                del self._by_descriptor[descriptor]

        return Connection(self._socket, self._pump, name, address=routing_id, on_close=close)

    # The methods below note the loss of connections.

    def _note_connection(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED and is_scarce(value):
            self._shed(value)
        if event != zmq.EVENT_DISCONNECTED:
            return
        routing_id = self._by_descriptor.pop(value, None)
        if routing_id is None or routing_id not in self._peers:
            return
        self._pump.drain()  # Frames sent before the connection ended still count.
        peer = self._peers.get(routing_id)
        if peer is not None:
            error = PeerLostError("rpc.session", f"connection to {peer.name} is gone")
            peer.transport.lose(error, tell=False)

    def _shed(self, descriptor: int) -> None:
        """Close a connection that takes one of the last file descriptors. Its client retries."""
        shut(descriptor)
        self.counters.connections_shed += 1
        # Log only at powers of two, so that any number of closed connections makes few lines.
        if self.counters.connections_shed.bit_count() == 1:
            logger.warning(
                "event=connections_shed count=%d reason=few descriptors left, raise RLIMIT_NOFILE",
                self.counters.connections_shed,
            )


def _find_descriptor(frame: zmq.Frame) -> int:
    """Return the descriptor of the connection that a frame came by, as the monitor names it.

    If ZeroMQ lacks the option, which it calls deprecated, a dead peer is noticed only by its lease.
    """
    try:
        return int(frame.get(zmq.MessageOption.SRCFD))
    except zmq.ZMQError:
        return NO_DESCRIPTOR

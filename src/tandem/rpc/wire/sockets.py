"""The two kinds of ZeroMQ socket we open, with the options that bound them, and their monitor."""

import asyncio
import contextlib
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from tandem.core.errors import CapacityError, PeerLostError, TandemError, UnsentError
from tandem.rpc.config import RpcConfig
from tandem.rpc.window import count_window
from tandem.rpc.wire.frames import encode_frame, make_bye
from tandem.rpc.wire.pump import SocketPump

__all__ = ["Connection", "SocketMonitor", "end_context", "open_socket", "receive_frame"]

# Plain numbers: an ``|`` of zmq's enum members is built anew on every use.
MORE = int(zmq.SNDMORE | zmq.NOBLOCK)
LAST = int(zmq.NOBLOCK)

FRAME_SLACK_BYTES = 4096
"""ZeroMQ cuts the connection of a longer frame without a word. Up to this much over the limit we
read it, and refuse it by name."""

HWM_FACTOR = 2
"""Our own window is the bound; ZeroMQ's counts also beats and parts, and must not bite first."""


async def end_context(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Close a context, which waits until farewells are delivered or ``linger_ms`` has passed.

    It ends even if the caller is cancelled meanwhile, since nobody else knows it any more.
    """
    await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, context.term))


def open_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, config: RpcConfig
) -> zmq.Socket[bytes]:
    """Open a ROUTER or DEALER socket with bounded queues and sizes, not yet bound or connected."""
    socket = context.socket(kind)
    high_water_mark = HWM_FACTOR * count_window(config)
    socket.setsockopt(zmq.SNDHWM, high_water_mark)
    socket.setsockopt(zmq.RCVHWM, high_water_mark)
    socket.setsockopt(zmq.MAXMSGSIZE, config.max_message_bytes + FRAME_SLACK_BYTES)
    socket.setsockopt(zmq.LINGER, config.linger_ms)
    # Our own beats prove that the peer's *loop* lives. These prove the connection, so that the
    # queue of a host that vanished is given back too.
    socket.setsockopt(zmq.HEARTBEAT_IVL, config.heartbeat_interval_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, config.lease_ms)
    socket.setsockopt(zmq.HANDSHAKE_IVL, min(config.connect_timeout_ms, config.lease_ms))
    if kind == zmq.ROUTER:
        # Without it, what cannot be delivered vanishes in silence.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    else:
        # One socket is one connection is one session: what a lost session had queued must not
        # reach the next one. Connecting again is ours to do, with a new socket.
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.IPV6, 1)  # Names may resolve to either.
    return socket


def receive_frame(socket: zmq.Socket[bytes]) -> bytes | None:
    """Take one message off the socket, without blocking; None for one of several parts."""
    data = socket.recv(LAST)
    is_single = True
    while socket.getsockopt(zmq.RCVMORE):
        is_single = False
        socket.recv(LAST)
    return data if is_single else None


class Connection:
    """The transport below one session: a socket, or the part of one that belongs to one peer.

    Args:
        socket: borrowed.
        pump: of the socket; borrowed.
        name: of the peer, for errors.
        address: of the peer on the socket; empty if the socket has one peer.
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
        self.drain = pump.drain
        """Receives all that has arrived."""
        self.close = on_close
        """Gives up what belongs to the session. Idempotent."""

    def transmit(self, data: bytes) -> None:
        """Hand one frame to the socket without blocking.

        Raises: CapacityError if its queue is full; PeerLostError if the connection is gone.
        """
        try:
            if self._address:
                self._socket.send(self._address, MORE)
            self._socket.send(data, LAST)
        except zmq.Again:
            what = f"the socket queue to {self._name} is full"
            raise UnsentError("rpc.send", what) from None
        except zmq.ZMQError as error:
            what = f"{self._name} is not connected: {error}"
            raise PeerLostError("rpc.send", what) from None
        self._pump.note_sent()

    def say_bye(self, error: TandemError) -> None:
        """Tell the peer why there is no session; best effort, since it may be gone."""
        with contextlib.suppress(CapacityError, PeerLostError):
            self.transmit(encode_frame(make_bye(error)))


class SocketMonitor:
    """Reports the events of a socket's connections.

    Args:
        socket: to watch; borrowed.
        callback: called with each event and its value (a descriptor or an error number).
        events: those to be told of. ZeroMQ's thread waits for who is behind with them, and there
            is no end to some: ``EVENT_ACCEPT_FAILED`` while there are no descriptors.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], callback: Callable[[int, int], None], events: int
    ) -> None:
        self._watched = socket
        self._callback = callback
        self._socket = socket.get_monitor_socket(events)
        self._pump = SocketPump(self._socket, self._receive)

    def drain(self) -> None:
        """Deliver the events up to now."""
        self._pump.drain()

    def close(self) -> None:
        """Stop. Idempotent; before the watched socket is closed."""
        self._pump.close()
        if not self._socket.closed:
            self._watched.disable_monitor()
            self._socket.close(linger=0)

    def _receive(self) -> None:
        message = recv_monitor_message(self._socket, zmq.NOBLOCK)
        self._callback(int(message["event"]), int(message["value"]))

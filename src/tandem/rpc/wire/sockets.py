"""ZeroMQ sockets of the control channel, with the options that limit them, and their monitor."""

import asyncio
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from tandem.rpc.config import RpcConfig
from tandem.rpc.window import count_window
from tandem.rpc.wire.pump import SocketPump

__all__ = ["NOBLOCK", "SocketMonitor", "drop_rest", "end_context", "open_socket"]

# zmq's flags as plain integers, which cost less to pass than the members of its enums.
NOBLOCK = int(zmq.NOBLOCK)
RCVMORE = int(zmq.RCVMORE)

FRAME_SLACK_BYTES = 4096
"""Bytes over the message limit that are still read, so that the message is refused with an error.
ZeroMQ closes the connection of a longer frame without one.
"""

HWM_FACTOR = 2
"""ZeroMQ's queue limit, relative to the channel's own window. It also counts heartbeats and message
parts, and must not be reached first.
"""


async def end_context(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Close a context, after farewells are delivered or ``linger_ms`` has passed.

    The context is closed even if the caller is cancelled, since nobody else refers to it.
    """
    await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, context.term))


def open_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, config: RpcConfig
) -> zmq.Socket[bytes]:
    """Open a ROUTER or DEALER socket with limited queues and sizes, not yet bound or connected."""
    socket = context.socket(kind)
    high_water_mark = HWM_FACTOR * count_window(config)
    socket.setsockopt(zmq.SNDHWM, high_water_mark)
    socket.setsockopt(zmq.RCVHWM, high_water_mark)
    socket.setsockopt(zmq.MAXMSGSIZE, config.max_message_bytes + FRAME_SLACK_BYTES)
    socket.setsockopt(zmq.LINGER, config.linger_ms)
    # Heartbeat frames of the channel prove that the peer's *event loop* runs. ZeroMQ's own
    # heartbeats, set here, prove the connection, so that the queue of a vanished host is freed as
    # well.
    socket.setsockopt(zmq.HEARTBEAT_IVL, config.heartbeat_interval_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, config.lease_ms)
    socket.setsockopt(zmq.HANDSHAKE_IVL, min(config.connect_timeout_ms, config.lease_ms))
    if kind == zmq.ROUTER:
        # Without ROUTER_MANDATORY, ZeroMQ silently drops messages that it cannot deliver.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    else:
        # One socket is one connection and one session: queued messages of a lost session must not
        # reach the next. The client reconnects with a new socket.
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.IPV6, 1)  # Names may resolve to IPv4 or IPv6.
    return socket


def drop_rest(socket: zmq.Socket[bytes]) -> bool:
    """Take further parts of a message off the socket. Return True if there were any, which no peer
    of ours sends.
    """
    found = False
    while socket.getsockopt(RCVMORE):
        found = True
        socket.recv(NOBLOCK)
    return found


class SocketMonitor:
    """Reports the events of a socket's connections.

    Args:
        socket: the socket to watch; borrowed.
        callback: called with each event and its value (a descriptor or an error number).
        events: the events to report. ZeroMQ's thread waits for a slow reader, and some events
            repeat endlessly, such as ``EVENT_ACCEPT_FAILED`` while descriptors are exhausted.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], callback: Callable[[int, int], None], events: int
    ) -> None:
        self._watched = socket
        self._callback = callback
        self._socket = socket.get_monitor_socket(events)
        self._pump = SocketPump(self._socket, self._receive)

    def drain(self) -> None:
        """Report the events that have occurred up to now."""
        self._pump.drain()

    def close(self) -> None:
        """Stop watching, before the watched socket is closed. May be repeated."""
        self._pump.close()
        if not self._socket.closed:
            self._watched.disable_monitor()
            self._socket.close(linger=0)

    def _receive(self) -> None:
        message = recv_monitor_message(self._socket, zmq.NOBLOCK)
        self._callback(int(message["event"]), int(message["value"]))

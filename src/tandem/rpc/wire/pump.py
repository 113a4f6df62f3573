"""Feeds a ZeroMQ socket to an asyncio loop.

``zmq.asyncio`` makes a future for every receive and every send; here the loop watches the
socket's descriptor and one callback empties the socket, at about 60 % of the round trip. The
descriptor is edge-triggered: it tells that *something* changed, and any operation on the socket
may swallow the change. Hence ``note_sent``, to be called after each send.
"""

import asyncio
import logging
from collections.abc import Callable

import zmq

__all__ = ["SocketPump"]

logger = logging.getLogger(__name__)

MESSAGES_PER_PASS = 64
"""After this many messages other callbacks of the loop get their turn."""

# Plain numbers: an ``&`` of zmq's enum members costs more than asking the socket.
EVENTS = int(zmq.EVENTS)
POLLIN = int(zmq.POLLIN)


class SocketPump:
    """Calls ``receive`` as long as the socket is readable. Lives on one loop.

    Args:
        socket: borrowed; the owner closes it after ``close``.
        receive: takes exactly one message off the socket, without blocking. What it raises is
            logged, since the next message must be served all the same.
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
        """Look again soon if sending has swallowed the sign of an arrival."""
        if not self._is_planned and self._is_readable():
            self._plan()

    def drain(self) -> None:
        """Receive all that has arrived, now."""
        while self._is_readable():
            self._receive_one()

    def close(self) -> None:
        """Stop watching. Idempotent."""
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

"""The connecting side of a control channel: one session at a time with one server."""

import asyncio
import logging
import secrets
from typing import Self, TypeVar, Unpack

import msgspec
import zmq

from tandem.core.errors import (
    CapacityError,
    ConflictError,
    DeadlineError,
    NotFoundError,
    PeerLostError,
    PermissionDeniedError,
    TandemError,
)
from tandem.rpc.outgoing import BegunCall
from tandem.rpc.peer import Peer
from tandem.rpc.session import ClientSession, HandshakeDroppedError
from tandem.rpc.side import RpcSide, SideOptions
from tandem.rpc.wire.sockets import end_context

__all__ = ["RpcClient"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_DROPPED_HANDSHAKES = 3
"""Number of consecutive key exchanges cut off by the server that count as a wrong secret. One or
two may come from a server that died.
"""

RETRYABLE = (PeerLostError, CapacityError, DeadlineError, NotFoundError)
"""Errors that a retry may cure: the server is not running, full, or slow, or its folder does not
exist yet.
"""


class RpcClient(RpcSide):
    """A client of one RPC server. An async context manager.

    Entering it connects, and searches for the server for up to ``connect_timeout_ms``. When the
    session ends, all that waits in it fails with ``PeerLostError``, and so does every later call.
    After ``aclose`` the client may ``connect`` again, with the next epoch.

    Args:
        endpoint: address of the server.
        options: see ``SideOptions``; ``methods`` are those that the server may call here.
    """

    def __init__(self, endpoint: str, **options: Unpack[SideOptions]) -> None:
        super().__init__(endpoint, **options)
        self._epoch = 0
        self._peer: Peer | None = None
        self._failure: TandemError = PeerLostError("rpc.call", "the client is not connected yet")
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    # The methods below open and close the client.

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def endpoint(self) -> str:
        """Address of the server."""
        return self.address.url

    @property
    def epoch(self) -> int:
        """Number of sessions attempted so far; while connected, that of the current session."""
        return self._epoch

    @property
    def is_connected(self) -> bool:
        """True if there is a session now."""
        return self._peer is not None

    @property
    def silence_s(self) -> float:
        """Seconds since the last message of the server was read; 0 without a session."""
        return 0.0 if self._peer is None else self._peer.transport.silence_s

    @property
    def peer(self) -> Peer:
        """The server, in the current session.

        Raises: the error that ended the session; PeerLostError before the first and after
            ``aclose``.
        """
        peer, failure = self._peer, self._failure
        if peer is None:
            raise type(failure)(failure.where, failure.what, field=failure.field)
        return peer

    async def connect(self) -> Peer:
        """Open a session, with retries within ``connect_timeout_ms`` while no server answers.

        Raises: PermissionDeniedError, UnsupportedError, ConflictError at once when refused;
            PeerLostError or DeadlineError if no server was found in time.
        """
        if self._context is not None:
            raise ConflictError("rpc.connect", f"{self.endpoint} is open already")
        self._context = zmq.Context[zmq.Socket[bytes]](io_threads=1)
        try:
            return await self._open_session()
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """End the session, within ``linger_ms``. May be repeated."""
        context, self._context = self._context, None
        if context is None:
            return
        self._failure = PeerLostError("rpc.call", f"the client of {self.endpoint} is closed")
        if self._peer is not None:
            what = f"{self.identity.name} has closed"
            self._peer.transport.lose(PeerLostError("rpc.close", what), tell=True)
        await end_context(context)

    # The methods below call and notify the server; ``Peer`` documents them.

    async def call(
        self,
        method: str,
        request: object,
        response_type: type[T],
        *,
        timeout_s: float | None = None,
    ) -> T:
        """Call a method of the server in the current session; see ``Peer.call``."""
        return await self.peer.call(method, request, response_type, timeout_s=timeout_s)

    def begin_threadsafe(
        self, method: str, request: object, response_type: type[T], *, timeout_s: float
    ) -> BegunCall[T]:
        """Begin a call to the server from a thread other than the event loop's, which may wait for
        the answer; see ``Peer.begin_threadsafe``.
        """
        return self.peer.begin_threadsafe(method, request, response_type, timeout_s=timeout_s)

    def push(self, event: msgspec.Struct) -> None:
        """Send a one-way event to the server; see ``Peer.push``."""
        self.peer.push(event)

    # The methods below open sessions.

    async def _open_session(self) -> Peer:
        """Repeat attempts to connect until a session is open, ``connect_timeout_ms`` have passed,
        or the server refuses.
        """
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._config.connect_timeout_ms / 1e3
        pause_s = self._config.reconnect_initial_ms / 1e3
        dropped = 0
        refusal: TandemError | None = None
        while True:
            try:
                return await self._try_once(max(0.001, give_up_s - loop.time()))
            except HandshakeDroppedError as error:
                dropped += 1
                if dropped >= MAX_DROPPED_HANDSHAKES:
                    raise PermissionDeniedError(error.where, error.what) from None
                reason: TandemError = error
            except RETRYABLE as error:
                dropped = 0
                reason = error
            if not isinstance(reason, DeadlineError):
                refusal = reason
            elif refusal is not None:
                # Report the earlier refusal, since the last attempt had too little time left to get
                # an answer.
                reason = refusal
            # Add up to half of the pause at random, so that the clients of a restarted server do
            # not reconnect all at once.
            wait_s = pause_s * (1 + secrets.randbelow(500) / 1000)
            if loop.time() + wait_s >= give_up_s:
                raise reason
            logger.debug("event=connect_failed endpoint=%s reason=%s", self.endpoint, reason)
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, self._config.reconnect_max_ms / 1e3)

    async def _try_once(self, timeout_s: float) -> Peer:
        self.auth.check_connect(self.address)
        assert self._context is not None, "a session is opened after connect() and before aclose()"
        self._epoch += 1
        return await ClientSession(self, self._context, self._epoch).open(timeout_s)

    def note_joined(self, peer: Peer) -> None:
        """Take up a session that has begun."""
        self._peer = peer
        super().note_joined(peer)

    def note_lost(self, peer: Peer, error: TandemError) -> None:
        """Drop the session, which has ended because of ``error``."""
        self._peer = None
        if self._context is not None:
            self._failure = error
        super().note_lost(peer, error)

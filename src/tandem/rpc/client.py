"""The connecting side of a control channel: one session at a time with one server, renewed on
request.
"""

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

    Entering it connects, and searches for the server for up to ``connect_timeout_ms``. When a
    session ends, all that waits in it fails with ``PeerLostError``; a call between two sessions
    fails at once.

    Args:
        endpoint: address of the server.
        reconnect: True to open a new session, with the next epoch, whenever one is lost.
        options: see ``SideOptions``; ``methods`` are those that the server may call here.
    """

    def __init__(
        self, endpoint: str, *, reconnect: bool = False, **options: Unpack[SideOptions]
    ) -> None:
        super().__init__(endpoint, **options)
        self._reconnect = reconnect
        self._epoch = 0
        self._peer: Peer | None = None
        self._failure: TandemError = PeerLostError("rpc.call", "the client is not connected yet")
        self._settled = asyncio.Event()
        """Set except while a lost session is being replaced."""
        self._settled.set()
        self._renewal: asyncio.Task[None] | None = None
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
        return 0.0 if self._peer is None else self._peer.silence_s

    @property
    def peer(self) -> Peer:
        """The server, in the current session.

        Raises: PeerLostError if there is no session, or the error that ended all attempts.
        """
        peer = self._peer
        if peer is None:
            raise self._copy_failure()
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
            return await self._open_session(self._config.connect_timeout_ms / 1e3)
        except BaseException:
            await self.aclose()
            raise

    async def wait_connected(self, timeout_s: float) -> Peer:
        """Wait for the next session while reconnecting; return at once if there is a session.

        Raises: DeadlineError; the server's error, if it has refused this client, which then does
            not reconnect.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self._settled.is_set():
                    await self._settled.wait()
        except TimeoutError:
            raise DeadlineError(
                "rpc.connect", f"no session with {self.endpoint} within {timeout_s:g} s"
            ) from None
        return self.peer

    async def aclose(self) -> None:
        """End the session and stop reconnecting, within ``linger_ms``. May be repeated."""
        context, self._context = self._context, None
        if context is None:
            return
        self._failure = PeerLostError("rpc.call", f"the client of {self.endpoint} is closed")
        self._settled.set()
        try:
            if self._renewal is not None:
                self._renewal.cancel()
                await asyncio.gather(self._renewal, return_exceptions=True)
        finally:
            if self._peer is not None:
                what = f"{self.identity.name} has closed"
                self._peer.lose(PeerLostError("rpc.close", what), tell=True)
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

    def push_threadsafe(self, event: msgspec.Struct) -> None:
        """Send a one-way event from any thread; see ``Peer.push_threadsafe``."""
        self.peer.push_threadsafe(event)

    # The methods below open, retry and replace sessions.

    async def _open_session(self, budget_s: float | None) -> Peer:
        """Repeat attempts to connect until a session is open, ``budget_s`` seconds have passed
        (None: no limit), or the server refuses.
        """
        loop = asyncio.get_running_loop()
        give_up_s = None if budget_s is None else loop.time() + budget_s
        pause_s = self._config.reconnect_initial_ms / 1e3
        dropped = 0
        refusal: TandemError | None = None
        while True:
            attempt_s = self._config.connect_timeout_ms / 1e3
            if give_up_s is not None:
                attempt_s = max(0.001, give_up_s - loop.time())
            try:
                return await self._try_once(attempt_s)
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
            if give_up_s is not None and loop.time() + wait_s >= give_up_s:
                raise reason
            logger.debug("event=connect_failed endpoint=%s reason=%s", self.endpoint, reason)
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, self._config.reconnect_max_ms / 1e3)

    async def _try_once(self, timeout_s: float) -> Peer:
        self.auth.check_connect(self.address)
        assert self._context is not None, "a session is opened after connect() and before aclose()"
        self._epoch += 1
        session = ClientSession(
            self, self._context, self._epoch, on_open=self._adopt, on_lost=self._lose
        )
        return await session.open(timeout_s)

    def _adopt(self, peer: Peer) -> None:
        self._peer = peer
        self._settled.set()
        self._note_joined(peer)

    def _lose(self, peer: Peer, error: TandemError) -> None:
        self._peer = None
        if self._context is not None:
            self._failure = error
            if self._reconnect:
                self._settled.clear()
                self._renewal = asyncio.get_running_loop().create_task(self._renew())
        self._note_lost(peer, error)

    async def _renew(self) -> None:
        try:
            await self._open_session(None)
        except TandemError as error:
            # The server has refused this client with an error, and would refuse another attempt as
            # well.
            self._failure = error
            self._settled.set()
            logger.exception("event=reconnect_given_up endpoint=%s", self.endpoint)

    def _copy_failure(self) -> TandemError:
        failure = self._failure
        return type(failure)(failure.where, failure.what, field=failure.field)

"""Lanes: a faster channel for the calls of a session, beside its socket.

A lane goes from one process to another, carries requests and brings an answer to each. Its
transport belongs to a higher floor (``tandem.transfer``), and is passed in where an endpoint is
opened. The socket's session still decides who the caller is and when a process is lost. In its
greeting each side tells the other the address of its lanes, and a random token that names the
session there. A ``Peer`` chooses the channel of each call, and the other side begins calls in the
order in which they were made. See docs/design/transfer/rpc.md.
"""

import secrets
from collections.abc import Awaitable, Callable
from typing import Protocol

from tandem.core.errors import PeerLostError, TandemError
from tandem.rpc.wire.frames import LaneOffer

__all__ = ["OPEN_TIMEOUT_S", "Lane", "LaneAnswer", "LaneRequest", "LaneRouter", "Lanes"]

OPEN_TIMEOUT_S = 3.0
TOKEN_BYTES = 16
MAX_EARLY = 64
"""Limit of requests that are kept for a session that has begun only on the other side."""


class LaneAnswer(Protocol):
    """The answer to a request by a lane (a channel beside a session's socket), for a thread that
    waits.
    """

    def wait(self, deadline_s: float) -> bytes:
        """Wait for the answer, for ``deadline_s`` at most.

        Raises: DeadlineError if it does not come in time; any other TandemError if the lane (a
            channel beside a session's socket) is lost.
        """
        ...


class Lane(Protocol):
    """A channel to one process for calls, beside the socket of their session. Requests arrive in
    the order in which they were begun.

    After any error the request was executed once or not at all; after a CapacityError it was not
    sent.
    """

    @property
    def max_bytes(self) -> int:
        """Limit in bytes of a request by this lane, and of its answer."""
        ...

    def begin(self, request: bytes) -> LaneAnswer:
        """Send a request, from any thread.

        Raises: CapacityError if nothing was sent; any other TandemError if the lane (this channel
            beside the socket) is lost.
        """
        ...

    def begin_async(self, request: bytes, timeout_s: float) -> Awaitable[bytes]:
        """Send a request from the event loop, and return an awaitable of the answer.

        Raises: as ``begin``, at once; the awaitable as ``LaneAnswer.wait``.
        """
        ...

    def close(self) -> None:
        """Close the lane (this channel beside the socket). Its unanswered requests fail."""
        ...


class LaneRequest(Protocol):
    """A request that arrived by a lane (a channel beside a session's socket). If the object is
    dropped without an answer, it is refused.
    """

    payload: bytes

    def reply(self, payload: bytes) -> bool:
        """Answer the request, once. Return False if nobody waits for the answer any more."""
        ...

    def fail(self, error: TandemError) -> bool:
        """Refuse the request with an error that makes its sender close the lane and use the
        socket.
        """
        ...


class Lanes(Protocol):
    """The lanes of one process: its channels to other processes for calls beside the sockets."""

    @property
    def address(self) -> str:
        """The address at which other processes open a lane (a channel for calls beside the socket)
        to this one.
        """
        ...

    @property
    def max_bytes(self) -> int:
        """Limit in bytes of a request by a lane, and of its answer."""
        ...

    def serve(self, handler: Callable[[list[LaneRequest]], None]) -> None:
        """Pass the requests that arrive by lanes (channels beside the sockets) to ``handler``, in
        order for each lane, on the running event loop.
        """
        ...

    def open(self, address: str, timeout_s: float) -> Awaitable[Lane]:
        """Open a lane (a channel for calls beside the socket) to the process at an address.

        Raises: a TandemError if it cannot be opened, or not in time.
        """
        ...


Take = Callable[[bytes, LaneRequest], None]
"""The handler of a session for frames that came by a lane, with the request to answer."""


class LaneRouter:
    """Distributes the requests that arrive by lanes (channels beside the sockets) to the sessions
    that their tokens name. Shared by the endpoints of one event loop.

    Args:
        lanes: the process's lanes; borrowed.
        accepts: False if this process only opens lanes and accepts none.
    """

    def __init__(self, lanes: Lanes, *, accepts: bool = True) -> None:
        self._lanes = lanes
        self._accepts = accepts
        self._sessions: dict[bytes, Take] = {}
        self._early: dict[bytes, list[LaneRequest]] = {}
        """Requests for offered sessions that have not begun here, by token."""
        if accepts:
            lanes.serve(self._route)

    @property
    def max_bytes(self) -> int:
        """Limit in bytes of an answer by a lane."""
        return self._lanes.max_bytes

    def offer(self) -> LaneOffer | None:
        """Return the address for lanes to this process and a new token, which names a session and
        is sent in its greeting; None if no lanes are accepted.

        Call ``withdraw`` when the session ends or fails.
        """
        if not self._accepts:
            return None
        token = secrets.token_bytes(TOKEN_BYTES)
        self._early[token] = []
        return LaneOffer(self._lanes.address, token)

    def begin(self, offer: LaneOffer, take: Take) -> None:
        """Note that the session of ``offer`` has begun: ``take`` gets the requests with its
        token.
        """
        self._sessions[offer.token] = take
        for request in self._early.pop(offer.token, ()):
            take(request.payload[TOKEN_BYTES:], request)

    def withdraw(self, offer: LaneOffer | None) -> None:
        """Note that the session of ``offer`` has ended or failed: requests with its token are
        refused.
        """
        if offer is not None:
            self._sessions.pop(offer.token, None)
            for request in self._early.pop(offer.token, ()):
                _refuse(request)

    async def open(self, offer: LaneOffer) -> Lane:
        """Open a lane (a channel for calls beside the socket) to the address that the other side
        offered.

        Raises: a TandemError if it cannot be opened, or not in time.
        """
        return await self._lanes.open(offer.address, OPEN_TIMEOUT_S)

    def _route(self, requests: list[LaneRequest]) -> None:
        for request in requests:
            token = request.payload[:TOKEN_BYTES]
            take = self._sessions.get(token)
            if take is not None:
                take(request.payload[TOKEN_BYTES:], request)
                continue
            early = self._early.get(token)
            if early is None or len(early) >= MAX_EARLY:
                _refuse(request)
            else:
                early.append(request)


def _refuse(request: LaneRequest) -> None:
    request.fail(PeerLostError("rpc.lane", "no session of this name here"))

"""Lanes: a faster channel for the calls of a session, beside its socket.

A lane goes from one process to another, takes requests and brings an answer to each. What carries
it belongs to a floor above (``tandem.transfer``); whoever opens an endpoint hands it in. The
session stays that of the socket: it says who calls, and when a process is lost. Each side tells the
other in its greeting where its lanes begin, and a random token that names the session there. A
``Peer`` chooses the channel of each call; the other side begins them in the order in which
they were made. See docs/design/transfer/rpc.md.
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
"""Requests that are kept for a session that has begun for the other side alone."""


class LaneAnswer(Protocol):
    """The answer to a request, for whoever waits on a thread of its own."""

    def wait(self, deadline_s: float) -> bytes:
        """Wait at most so long from now. Raises: as ``Lane.begin``, and DeadlineError."""
        ...


class Lane(Protocol):
    """A channel to one process. Requests arrive in the order in which they were begun.

    Every error says that this request was executed once or not at all; but CapacityError, of a
    request that was not sent.
    """

    @property
    def max_bytes(self) -> int:
        """Most bytes of a request, and of its answer."""
        ...

    def begin(self, request: bytes) -> LaneAnswer:
        """Send, from any thread. Raises: PeerLostError (the lane is over); CapacityError."""
        ...

    def begin_async(self, request: bytes, timeout_s: float) -> Awaitable[bytes]:
        """Send, on the loop, before it returns; what it returns waits for the answer.

        Raises: as ``begin``, at once; when it is awaited PeerLostError and DeadlineError.
        """
        ...

    def close(self) -> None:
        """Close it; calls in progress fail."""
        ...


class LaneRequest(Protocol):
    """A request that has come; one that is dropped without an answer is refused."""

    payload: bytes

    def reply(self, payload: bytes) -> bool:
        """Answer, once; False if nobody waits for it any more."""
        ...

    def fail(self, error: TandemError) -> bool:
        """Refuse it: the lane is of no use to its sender."""
        ...


class Lanes(Protocol):
    """The lanes of one process."""

    @property
    def address(self) -> str:
        """The address at which others open their lane to this process."""
        ...

    @property
    def max_bytes(self) -> int:
        """Most bytes of a request, and of its answer."""
        ...

    def serve(self, handler: Callable[[list[LaneRequest]], None]) -> None:
        """Give what comes to ``handler``, in order per lane, on the running loop."""
        ...

    def open(self, address: str, timeout_s: float) -> Awaitable[Lane]:
        """Open one. Raises: a TandemError."""
        ...


Take = Callable[[bytes, LaneRequest], None]
"""The session's handling of a frame that came by a lane, and the request that it answers."""


class LaneRouter:
    """Gives what comes by lanes to the sessions that it names. Shared by endpoints of one loop.

    Args:
        lanes: of this process; borrowed.
        accepts: whether others may open lanes to it; else it only opens some itself.
    """

    def __init__(self, lanes: Lanes, *, accepts: bool = True) -> None:
        self._lanes = lanes
        self._accepts = accepts
        self._sessions: dict[bytes, Take] = {}
        self._early: dict[bytes, list[LaneRequest]] = {}
        """By token: of sessions that are offered, and have not begun here."""
        if accepts:
            lanes.serve(self._route)

    @property
    def max_bytes(self) -> int:
        """Most bytes of an answer."""
        return self._lanes.max_bytes

    def offer(self) -> LaneOffer | None:
        """Return what tells the other side of a new session where to open lanes; None: nowhere.

        To be taken back by ``withdraw``, whatever becomes of the session.
        """
        if not self._accepts:
            return None
        token = secrets.token_bytes(TOKEN_BYTES)
        self._early[token] = []
        return LaneOffer(self._lanes.address, token)

    def begin(self, offer: LaneOffer, take: Take) -> None:
        """Note that the session has begun: ``take`` gets what comes for it."""
        self._sessions[offer.token] = take
        for request in self._early.pop(offer.token, ()):
            take(request.payload[TOKEN_BYTES:], request)

    def withdraw(self, offer: LaneOffer | None) -> None:
        """Note that the session is over, or was none: what comes for it is refused."""
        if offer is not None:
            self._sessions.pop(offer.token, None)
            for request in self._early.pop(offer.token, ()):
                _refuse(request)

    async def open(self, offer: LaneOffer) -> Lane:
        """Open a lane to the other side. Raises: a TandemError."""
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

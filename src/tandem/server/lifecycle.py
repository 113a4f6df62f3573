"""HTTP requests in progress: admission, draining, and running generations.

Everything runs on the event loop. ``AdmissionGate`` is around the whole application: it counts each
HTTP request, refuses new ones while the server drains or is full, and labels answers for the
metrics.
"""

import asyncio
import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.engine.scheduling.shares import ClientShares
from tandem.server.clients import current_client
from tandem.server.edge.http_errors import RETRY_LATER_S, RETRY_SOON_S, HttpError, error_response
from tandem.server.generation import GenerationGroup
from tandem.server.telemetry.metrics import ServerMetrics

__all__ = ["OPEN_PATHS", "WATCHED_PATHS", "AdmissionGate", "Lifecycle"]

_logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ping", "/live", "/ready"})
"""Paths of probes, which are answered without a key, while draining, and when the server is
full."""
WATCHED_PATHS = OPEN_PATHS | {"/metrics"}
"""Paths that report the server's state, and so are not refused because of it."""


class Lifecycle:
    """The requests in progress and the state of draining of the application."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self.metrics = metrics
        self.is_draining = False
        self._in_flight = ClientShares()
        self._idle = asyncio.Event()
        self._idle.set()
        self._groups: dict[str, set[GenerationGroup]] = {}

    @property
    def num_in_flight(self) -> int:
        """Number of HTTP requests being handled, without probes."""
        return len(self._in_flight)

    def has_room(self, client: str, limit: int) -> bool:
        """Return True if one more request of this client address may enter; see
        ``ClientShares``.
        """
        return self._in_flight.has_room(client, limit)

    def enter(self, client: str) -> None:
        """Count one more HTTP request of a client address."""
        self._in_flight.add(client)
        self.metrics.num_in_flight = len(self._in_flight)
        self._idle.clear()

    def leave(self, client: str) -> None:
        """Count one HTTP request less of a client address."""
        self._in_flight.remove(client)
        self.metrics.num_in_flight = len(self._in_flight)
        if not self._in_flight:
            self._idle.set()

    def add(self, name: str, group: GenerationGroup) -> None:
        """Record a running request's group of generations under the client's name for it; names
        need not be unique.
        """
        self._groups.setdefault(name, set()).add(group)

    def remove(self, name: str, group: GenerationGroup) -> None:
        """Remove a request's group of generations; unknown ones are ignored."""
        groups = self._groups.get(name)
        if groups is not None:
            groups.discard(group)
            if not groups:
                del self._groups[name]

    async def abort(self, name: str | None, owner: bytes | None = None) -> int:
        """End the running requests (groups of generations) with a name, or all; return their
        number.

        Args:
            name: the client's name of the request; None: any.
            owner: only groups of this owner, as in ``Origin``; None: any owner.
        """
        names = list(self._groups) if name is None else [name]
        groups = [
            group
            for key in names
            for group in self._groups.get(key, ())
            if owner is None or group.owner == owner
        ]
        for group in groups:
            await group.abort()
        return len(groups)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait for running ones; cancel those left after ``timeout_s``."""
        self.is_draining = True
        _logger.info("event=draining in_flight=%d timeout_s=%g", self.num_in_flight, timeout_s)
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            num_aborted = await self.abort(None)
            _logger.warning("event=drain_timeout aborted=%d", num_aborted)


class AdmissionGate:
    """ASGI middleware around the whole application that counts, admits and refuses requests."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle, max_in_flight: int) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._max_in_flight = max_in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count one request, admit or refuse it, and label its answer for the metrics."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        is_probe = scope["path"] in WATCHED_PATHS
        client = current_client.get()
        refusal = None if is_probe else self._refuse(client)
        if not is_probe:
            self._lifecycle.enter(client)
        try:
            handler = self._app if refusal is None else error_response(refusal)
            await handler(scope, receive, send_noting)
        finally:
            if not is_probe:
                self._lifecycle.leave(client)
            self._lifecycle.metrics.count_http(_route_of(scope), status)

    def _refuse(self, client: str) -> HttpError | None:
        if self._lifecycle.is_draining:
            return HttpError(
                503,
                "the server is shutting down: ask another, or again in a moment",
                code="draining",
                headers={"Retry-After": str(RETRY_LATER_S), "Connection": "close"},
            )
        if not self._lifecycle.has_room(client, self._max_in_flight):
            return HttpError(
                503,
                f"the server handles {self._max_in_flight} requests already",
                code="capacity",
                headers={"Retry-After": str(RETRY_SOON_S)},
            )
        return None


def _route_of(scope: Scope) -> str:
    """Return the pattern of the HTTP route that a request matched, as a label for the metrics; all
    unknown paths have one common label.
    """
    route = scope.get("route")
    return getattr(route, "path", "other")

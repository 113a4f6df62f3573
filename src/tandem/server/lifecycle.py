"""Requests in flight: admission, draining, and running generations.

Everything lives on the event loop. The gate is the outermost part of the application: it counts
each HTTP request, refuses new ones while draining or full, and labels the answer for the metrics.
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
"""Probes: answered without a key, while draining, and however full the server is."""
WATCHED_PATHS = OPEN_PATHS | {"/metrics"}
"""Paths that report the server's state: never refused for it."""


class Lifecycle:
    """State of the application between start and stop."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self.metrics = metrics
        self.is_draining = False
        self._in_flight = ClientShares()
        self._idle = asyncio.Event()
        self._idle.set()
        self._groups: dict[str, set[GenerationGroup]] = {}

    @property
    def num_in_flight(self) -> int:
        """HTTP requests being handled, probes left out."""
        return len(self._in_flight)

    def has_room(self, client: str, limit: int) -> bool:
        """Say whether one more request of an address may come; see ``ClientShares``."""
        return self._in_flight.has_room(client, limit)

    def enter(self, client: str) -> None:
        """Count a request of an address in."""
        self._in_flight.add(client)
        self.metrics.num_in_flight = len(self._in_flight)
        self._idle.clear()

    def leave(self, client: str) -> None:
        """Count a request out."""
        self._in_flight.remove(client)
        self.metrics.num_in_flight = len(self._in_flight)
        if not self._in_flight:
            self._idle.set()

    def add(self, name: str, group: GenerationGroup) -> None:
        """Remember a group under the client's name for it; names need not be unique."""
        self._groups.setdefault(name, set()).add(group)

    def remove(self, name: str, group: GenerationGroup) -> None:
        """Forget a group; unknown ones are ignored."""
        groups = self._groups.get(name)
        if groups is not None:
            groups.discard(group)
            if not groups:
                del self._groups[name]

    async def abort(self, name: str | None, owner: bytes | None = None) -> int:
        """End the groups of a name, or all; returns how many.

        Args:
            name: None: of every name.
            owner: of the groups, as in ``Origin``; None: whoever it is.
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
        """Refuse new requests and wait for the running ones; cancel those left at the time-out."""
        self.is_draining = True
        _logger.info("event=draining in_flight=%d timeout_s=%g", self.num_in_flight, timeout_s)
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            num_aborted = await self.abort(None)
            _logger.warning("event=drain_timeout aborted=%d", num_aborted)


class AdmissionGate:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle, max_in_flight: int) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._max_in_flight = max_in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count, admit or refuse, and label one request."""
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
    """Return the pattern that matched; anything else is one label, as paths are endless."""
    route = scope.get("route")
    return getattr(route, "path", "other")

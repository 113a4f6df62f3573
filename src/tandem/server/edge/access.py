"""Request ids, and the access log: one line for each HTTP request, at INFO.

The outermost middleware, so that refused requests have an id and a line too. An id in the header
``x-request-id`` is used, returned and logged, and is part of the ids of the request's generations;
a request without one gets a new id.
"""

import logging
import re
import uuid
from collections.abc import Sequence
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.core.clock import Clock
from tandem.core.logs import current_request_id
from tandem.server.clients import current_client
from tandem.server.config import ACCESS_LOGGER
from tandem.server.lifecycle import WATCHED_PATHS

__all__ = ["CLIENT_CLOSED", "AccessLog"]

_logger = logging.getLogger(ACCESS_LOGGER)

CLIENT_CLOSED = 499
"""Status logged if the client left, as nginx does; never sent."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,200}")
"""Pattern of ids that are safe in a header and a log line; others are replaced."""
_LONGEST_PATH = 200


class AccessLog:
    """ASGI middleware around the whole application that assigns ids and writes the access log."""

    def __init__(self, app: ASGIApp, clock: Clock) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Give the request its id, pass it on, and log how it ended."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _find_request_id(scope["headers"])
        status, is_complete = 500, False

        async def send_named(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            else:
                is_complete = not message.get("more_body", False)
            await send(message)

        began_s = self._clock.now_s()
        token = current_request_id.set(request_id)
        client = scope.get("client")
        current_client.set("" if client is None else client[0])
        try:
            await self._app(scope, receive, send_named)
        finally:
            # Monitoring asks for these paths every few seconds: at INFO their lines would fill the
            # log.
            level = logging.DEBUG if scope["path"] in WATCHED_PATHS else logging.INFO
            _logger.log(
                level,
                "event=request method=%s path=%s status=%d duration_s=%.3f client=%s",
                scope["method"],
                quote(scope["path"])[:_LONGEST_PATH],
                # An answer that began but did not end was cut off by its client: it is logged as
                # 499.
                status if is_complete or status == 500 else CLIENT_CLOSED,
                self._clock.now_s() - began_s,
                _name_client(scope),
            )
            current_request_id.reset(token)


def _find_request_id(headers: Sequence[tuple[bytes, bytes]]) -> str:
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value.decode("ascii")
    return uuid.uuid4().hex


def _name_client(scope: Scope) -> str:
    client = scope.get("client")
    return "unknown" if client is None else f"{client[0]}:{client[1]}"

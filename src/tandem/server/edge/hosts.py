"""The check of the Host header, which keeps web pages from using a server on the visitor's machine.

A page on the internet can make its own name resolve to 127.0.0.1 (DNS rebinding), and then use a
local server as if it were its own. Its requests still carry its name in the Host header, so unknown
names are refused; an IP address there cannot come from rebinding. Simple cross-origin posts carry
an Origin header. It must be the server's own origin (any of its names, with its port) or one that
CORS allows, because another program on this machine may serve pages too.
"""

import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.server.edge.http_errors import HttpError, error_response
from tandem.server.lifecycle import OPEN_PATHS

__all__ = ["HostGate"]


class HostGate:
    """ASGI middleware that refuses unknown Host and Origin headers.

    Args:
        allowed: names, ``*.domain`` or ``*``, beside loopback and this machine's name and
            addresses.
        origins: origins of pages that may read answers, ``scheme://host:port`` or ``*``.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str], origins: Sequence[str] = ()) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._is_off = "*" in allowed
        own = ("localhost", "127.0.0.1", "::1", socket.gethostname())
        self._names = {name.lower() for name in (*own, *allowed)}
        # "*.example.org" allows every name below example.org; it is compared as the suffix
        # ".example.org".
        self._suffixes = tuple(name[1:] for name in self._names if name.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 400 (Host) or 403 (Origin)."""
        handler = self._app
        if scope["type"] == "http" and not self._is_off and scope["path"] not in OPEN_PATHS:
            refusal = self._refuse(scope["headers"])
            if refusal is not None:
                handler = error_response(refusal)
        await handler(scope, receive, send)

    def _refuse(self, headers: Sequence[tuple[bytes, bytes]]) -> HttpError | None:
        found = {name: value for name, value in headers if name in (b"host", b"origin")}
        authority = found.get(b"host", b"").decode("latin-1")
        host = _host_of(f"//{authority}")
        if host is None or not (self._is_allowed(host) or _is_address(host)):
            what = f"Host {authority[:200]!r} is not served here: add it to server.allowed_hosts"
            return HttpError(400, what, param="Host", code="host_not_allowed")
        origin = found.get(b"origin")
        if origin is not None and not self._origins & {"*", origin.decode("latin-1")}:
            source = _authority_of(origin.decode("latin-1"))
            is_own = source is not None and source == authority
            name = _host_of(f"//{source}") if source is not None else None
            has_port = source is not None and _port_of(source) == _port_of(authority)
            if not is_own and (name is None or not has_port or not self._is_allowed(name)):
                what = "requests from pages of other sites are not served"
                return HttpError(403, what, param="Origin", code="origin_not_allowed")
        return None

    def _is_allowed(self, host: str) -> bool:
        return host in self._names or host.endswith((*self._suffixes, ".localhost"))


def _authority_of(url: str) -> str | None:
    """Return the authority of a URL, None if it has none."""
    try:
        return urlsplit(url).netloc or None
    except ValueError:
        return None


def _host_of(url: str) -> str | None:
    """Return the lower-case host of ``//host:port``, without the port; None if it is malformed."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # Reading ``port`` raises ValueError if the port is not a number.
    except ValueError:
        return None
    if parts.username is not None or parts.path:
        return None
    return parts.hostname


def _port_of(authority: str) -> str:
    """Return the port of a valid authority, as text; empty if it has none."""
    return authority.rpartition("]")[2].rpartition(":")[2] if ":" in authority else ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True

"""The checks of the Host and Origin headers, which keep web pages from using a server on the
visitor's machine.

A page on the internet can make its own name resolve to 127.0.0.1 (DNS rebinding), and then use a
local server as if it were its own. Its requests still carry its name in the Host header, so unknown
names are refused; an IP address there cannot come from rebinding. Cross-origin requests carry an
Origin header. It must be the server's own origin (any of its names, with its port) or one that the
settings allow.

A local page is one that this machine or an installed program serves: its origin is a loopback
address at any port, or has a scheme of ``APP_SCHEMES``. No site on the internet can have such an
origin. On a server that has no key and listens on loopback alone, local pages may do what
``LOCAL_CALLS`` lists: generate, embed, and list models. They may not read what others did, nor
change anything, because whatever serves a page here need not be trusted with that.
"""

import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.server.config import is_loopback
from tandem.server.edge.http_errors import HttpError, error_response
from tandem.server.lifecycle import OPEN_PATHS

__all__ = ["LOCAL_CALLS", "CrossOrigin", "HostGate"]

APP_SCHEMES = ("app", "tauri", "vscode-webview")
"""Schemes of the origins of programs that show pages of their own: Electron, Tauri, VS Code."""
LOCAL_CALLS = frozenset(
    {
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/embeddings"),
        ("GET", "/v1/models"),
        ("POST", "/api/chat"),
        ("POST", "/api/generate"),
        ("POST", "/api/embed"),
        ("POST", "/api/embeddings"),
        ("GET", "/api/tags"),
        ("POST", "/api/show"),
    }
)
"""Methods and paths that local pages may use without a key; below /v1/models/ they may GET too."""
MODEL_PATH = "/v1/models/"
_CORS_MAX_AGE_S = 600
"""Seconds for which a browser may cache the answer to a preflight."""


class CrossOrigin:
    """ASGI middleware that tells browsers which pages of other origins may read answers (CORS).

    It answers preflights, which carry no key, and adds headers to answers. ``HostGate`` refuses
    requests; this class alone refuses none.

    Args:
        origins: origins of the settings, ``scheme://host:port`` or ``*``; they may read all.
        allows_local: True if local pages may make ``LOCAL_CALLS``.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str], *, allows_local: bool) -> None:
        self._app = app
        self._allows_local = allows_local
        self._settings = _add_cors(app, origins) if origins else app
        # It is used after `_is_local_call` has checked the origin.
        self._local = _add_cors(app, (), pattern=".*")
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, with CORS headers in its answer if a page may read it; answer
        preflights.
        """
        handler = self._settings
        if self._allows_local and scope["type"] == "http":
            origin = _find_headers(scope).get(b"origin", b"").decode("latin-1")
            if not self._origins & {"*", origin} and _is_local_call(scope):
                handler = self._local
        await handler(scope, receive, send)


def _add_cors(app: ASGIApp, origins: Sequence[str], pattern: str | None = None) -> ASGIApp:
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_origin_regex=pattern,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=("x-request-id", "retry-after"),
        max_age=_CORS_MAX_AGE_S,
    )


class HostGate:
    """ASGI middleware that refuses unknown Host and Origin headers.

    Args:
        allowed: names, ``*.domain`` or ``*``, beside loopback and this machine's name and
            addresses.
        origins: origins of pages that may read answers, ``scheme://host:port`` or ``*``.
        allows_local: True if local pages may make ``LOCAL_CALLS``.
    """

    def __init__(
        self,
        app: ASGIApp,
        allowed: Sequence[str],
        origins: Sequence[str] = (),
        *,
        allows_local: bool = False,
    ) -> None:
        self._app = app
        self._allows_local = allows_local
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
            refusal = self._refuse(scope)
            if refusal is not None:
                handler = error_response(refusal)
        await handler(scope, receive, send)

    def _refuse(self, scope: Scope) -> HttpError | None:
        found = _find_headers(scope)
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
            is_own = is_own or (name is not None and has_port and self._is_allowed(name))
            if not is_own and not (self._allows_local and _is_local_call(scope)):
                what = (
                    f"requests from pages of {origin.decode('latin-1')[:200]!r} are not served "
                    "here: add it to server.cors_origins"
                )
                return HttpError(403, what, param="Origin", code="origin_not_allowed")
        return None

    def _is_allowed(self, host: str) -> bool:
        return host in self._names or host.endswith((*self._suffixes, ".localhost"))


def _find_headers(scope: Scope) -> dict[bytes, bytes]:
    """Return the Host and Origin headers of a request, by name."""
    return {name: value for name, value in scope["headers"] if name in (b"host", b"origin")}


def _is_local_call(scope: Scope) -> bool:
    """Return True for a request of a local page, or a preflight, that ``LOCAL_CALLS`` lists. Its
    Host must be a loopback name too: any other comes through a proxy, for users elsewhere.
    """
    found = _find_headers(scope)
    host = _host_of(f"//{found.get(b'host', b'').decode('latin-1')}")
    if host is None or not _is_loopback(host):
        return False
    origin = found.get(b"origin", b"").decode("latin-1")
    scheme, separator, authority = origin.partition("://")
    if not separator:
        return False
    if scheme in ("http", "https"):
        name = _host_of(f"//{authority}")
        if name is None or not _is_loopback(name):
            return False
    elif scheme not in APP_SCHEMES:
        return False
    method, path = scope["method"], scope["path"]
    if method == "OPTIONS":
        asked = dict(scope["headers"]).get(b"access-control-request-method", b"")
        method = asked.decode("latin-1")
    return (method, path) in LOCAL_CALLS or (method == "GET" and path.startswith(MODEL_PATH))


def _is_loopback(host: str) -> bool:
    return host.endswith(".localhost") or is_loopback(host)


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

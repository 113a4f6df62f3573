"""The static files of the web page, each served at a path of its own.

The page is data of the package: it needs no build step and no other host. The paths that are served
are keys of a dictionary made at the start, so no URL becomes a path of a file system. The page
holds no secret and needs no key: the visitor enters the key, which the page keeps in memory and
sends to the same endpoints as any client (``PAGE_ENDPOINTS``).
"""

import gzip
import hashlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

__all__ = ["PAGE_ENDPOINTS", "PAGE_HEADERS", "list_page_routes"]

PAGE_ENDPOINTS = (
    "/metrics",
    "/ready",
    "/requests/{id:path}/timeline",
    "/server_info",
    "/v1/chat/completions",
    "/v1/models",
)
"""Endpoints that the page reads, by the patterns of ``list_endpoints``."""

_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    # The page makes markup from text in one place only, through DOMPurify; with trusted types the
    # browser refuses any other.
    "require-trusted-types-for": "'script'",
    "trusted-types": "dompurify",
}
PAGE_HEADERS = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    # With "no-cache" the browser asks each time whether the page has changed, since an updated
    # server has a new page; it is answered 304 if not.
    "cache-control": "no-cache",
    "vary": "accept-encoding",
}
"""HTTP headers of each file of the page."""

_PREFIX = "/page/"
_MEDIA_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "mjs": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "LICENSE": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class _PageFile:
    body: bytes
    packed: bytes
    """Content compressed by gzip."""
    media_type: str
    etag: str


def list_page_routes() -> list[Route]:
    """Read the files of the web page and return the routes that serve them."""
    return [
        Route(path, _serve(found), methods=["GET"], include_in_schema=False)
        for path, found in _read_files().items()
    ]


def _read_files() -> dict[str, _PageFile]:
    """Return all files of the web page by the path at which they are served; ``index.html`` is at
    ``/``.
    """
    root = files("tandem.server.page") / "static"
    return {
        "/" if name == "index.html" else _PREFIX + name: _read_file(entry)
        for name, entry in sorted(_walk(root, ""))
    }


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        elif entry.name.rpartition(".")[2] in _MEDIA_TYPES:
            yield prefix + entry.name, entry


def _read_file(entry: Traversable) -> _PageFile:
    body = entry.read_bytes()
    return _PageFile(
        body=body,
        packed=gzip.compress(body, compresslevel=6, mtime=0),
        media_type=_MEDIA_TYPES[entry.name.rpartition(".")[2]],
        etag=f'"{hashlib.sha256(body).hexdigest()[:32]}"',
    )


def _serve(found: _PageFile) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        headers = {**PAGE_HEADERS, "etag": found.etag}
        if request.headers.get("if-none-match") == found.etag:
            return Response(status_code=304, headers=headers)
        body = found.body
        if "gzip" in request.headers.get("accept-encoding", ""):
            body = found.packed
            headers["content-encoding"] = "gzip"
        return Response(body, headers=headers, media_type=found.media_type)

    return answer

"""API keys: access to the server.

Keys are compared in constant time, all of them for each request, as digests of equal length, so
that neither the position nor the length of a match shows in the time it takes.
"""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.server.clients import current_client
from tandem.server.edge.http_errors import HttpError, error_response
from tandem.server.lifecycle import OPEN_PATHS

__all__ = ["ADMIN_PATHS", "ApiKeyGate", "identify_owner"]

ADMIN_PATHS = frozenset(
    f"{prefix}/{verb}_lora_adapter" for prefix in ("", "/v1") for verb in ("load", "unload")
)
"""What only a holder of an admin key may do: it reads files."""


class ApiKeyGate:
    """ASGI middleware that lets in requests with a known key.

    Args:
        keys: none means that no key is needed, but for ``ADMIN_PATHS``.
        admin_keys: for these, and for all else; none refuses these to every client.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], admin_keys: Sequence[str] = ()) -> None:
        self._app = app
        self._admin_digests = [_digest(key.encode()) for key in admin_keys]
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        handler = self._app
        is_admin = scope["type"] == "http" and scope["path"] in ADMIN_PATHS
        needs_key = scope["type"] == "http" and bool(self._digests)
        if is_admin and not self._admin_digests:
            what = "nobody may do this: set server.admin_api_key"
            handler = error_response(HttpError(403, what, code="permission_denied"))
        elif is_admin or (needs_key and scope["path"] not in OPEN_PATHS):
            presented = _bearer_token(scope["headers"])
            own = [] if is_admin else self._digests
            if presented is None or not _is_known(presented, [*own, *self._admin_digests]):
                what = "no API key was given" if presented is None else "the API key is not known"
                if is_admin:
                    what += " as one of an admin"
                handler = error_response(
                    HttpError(
                        401,
                        f"{what}: send 'Authorization: Bearer KEY'",
                        code="invalid_api_key",
                        headers={"WWW-Authenticate": "Bearer"},
                    )
                )
            else:
                current_client.set(_digest(presented).hex())
        await handler(scope, receive, send)


def _is_known(presented: bytes, digests: Sequence[bytes]) -> bool:
    digest = _digest(presented)
    is_known = False
    for known in digests:
        # No early exit.
        is_known |= hmac.compare_digest(digest, known)
    return is_known


def identify_owner(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return a digest of the key that a request presents, checked by the gate before."""
    return _digest(_bearer_token(headers) or b"")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _bearer_token(headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            return token.strip() if scheme.lower() == b"bearer" else None
    return None

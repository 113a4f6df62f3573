"""API keys: which requests are let in.

All keys are compared in constant time for each request, as digests of equal length, so that the
time does not depend on the position or length of a match.
"""

import hashlib
import hmac
from collections.abc import Iterable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.server.clients import current_client
from tandem.server.edge.http_errors import HttpError, error_response
from tandem.server.lifecycle import OPEN_PATHS

__all__ = ["ADMIN_PATHS", "ApiKeyGate", "identify_owner", "is_admin"]

ADMIN_PATHS = frozenset(
    f"{prefix}/{verb}_lora_adapter" for prefix in ("", "/v1") for verb in ("load", "unload")
) | {"/instances", "/models"}
"""Paths whose POST needs an admin key, because they read files or start processes."""


_IS_ADMIN = "tandem.is_admin"
"""Key in the ASGI scope that is True for requests with admin rights."""


class ApiKeyGate:
    """ASGI middleware that lets in requests with a known API key.

    Args:
        keys: API keys; empty: no key is needed, except for ``ADMIN_PATHS``.
        admin_keys: keys that are valid for everything; empty: ``ADMIN_PATHS`` refuse everybody.
        keyless_paths: paths, beside ``OPEN_PATHS``, that need no key: the files of the page.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        admin_keys: Sequence[str] = (),
        keyless_paths: Iterable[str] = (),
    ) -> None:
        self._app = app
        self._keyless_paths = OPEN_PATHS.union(keyless_paths)
        self._admin_digests = [_digest(key.encode()) for key in admin_keys]
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        handler = self._app
        presented = _bearer_token(scope["headers"])
        scope[_IS_ADMIN] = self._is_admin(presented)
        # Only POST needs the administrator's key here: any other method is answered 405 by the
        # router.
        needs_admin = scope["path"] in ADMIN_PATHS and scope["method"] == "POST"
        needs_key = bool(self._digests)
        if needs_admin and not self._admin_digests:
            what = "nobody may do this: set server.admin_api_key"
            handler = error_response(HttpError(403, what, code="permission_denied"))
        elif needs_admin or (needs_key and scope["path"] not in self._keyless_paths):
            own = [] if needs_admin else self._digests
            if presented is None or not _is_known(presented, [*own, *self._admin_digests]):
                what = "no API key was given" if presented is None else "the API key is not known"
                if needs_admin:
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

    def _is_admin(self, presented: bytes | None) -> bool:
        if self._admin_digests:
            return presented is not None and _is_known(presented, self._admin_digests)
        # Without administrator's keys, and with at most one API key, all clients have the same
        # rights: every request acts as an administrator.
        return len(self._digests) <= 1


def is_admin(scope: Scope) -> bool:
    """Return True if a request that was let in may act on other clients' requests.

    These are requests with an admin key; without admin keys, all requests, unless there are several
    API keys.
    """
    return bool(scope.get(_IS_ADMIN, False))


def _is_known(presented: bytes, digests: Sequence[bytes]) -> bool:
    digest = _digest(presented)
    is_known = False
    for known in digests:
        # All digests are compared, without an early exit: the time taken does not tell which key
        # matched.
        is_known |= hmac.compare_digest(digest, known)
    return is_known


def identify_owner(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return a digest of the API key of a request, which was let in; it stands for the client."""
    return _digest(_bearer_token(headers) or b"")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _bearer_token(headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
    """Return the API key in OpenAI's or Anthropic's header; None if there is none."""
    given = dict(headers)
    if b"authorization" in given:
        scheme, _, token = given[b"authorization"].partition(b" ")
        return token.strip() if scheme.lower() == b"bearer" else None
    return given.get(b"x-api-key")

"""Conversion of errors to HTTP answers in the form of the OpenAI API.

Owns the table from error codes to HTTP statuses. ``HttpError`` is for errors that only HTTP has (a
body too large, a wrong method); all others are classes of ``tandem.core.errors``.
"""

from collections.abc import Callable, Mapping

import msgspec
from starlette.responses import Response

from tandem.core.errors import OverloadError, TandemError

__all__ = [
    "ErrorBody",
    "ErrorReply",
    "HttpError",
    "WriteError",
    "describe_error",
    "encode_error",
    "error_response",
]

RETRY_SOON_S = 1
"""Seconds of Retry-After if the queue is full: room appears within about one generation."""
RETRY_LATER_S = 5
"""Seconds of Retry-After if the instance is lost, loading or draining: a process must start
first."""

_STATUS = {
    "config": 400,
    "unsupported": 400,
    "not_found": 404,
    "permission_denied": 403,
    "conflict": 409,
    "capacity": 503,
    "overload": 429,
    "peer_lost": 503,
    "deadline": 504,
}
_RETRY_AFTER_S = {"capacity": RETRY_SOON_S, "peer_lost": RETRY_LATER_S}


class ErrorBody(msgspec.Struct, kw_only=True):
    """The object under ``error`` that OpenAI clients parse."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct):
    """The document of every answer that is an error."""

    error: ErrorBody


class HttpError(Exception):
    """An error with an HTTP status, raised by HTTP code and converted to an answer in one place."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.body = ErrorBody(message=message, type=_type_of(status), param=param, code=code)
        self.headers = dict(headers) if headers is not None else {}
        super().__init__(message)


def _type_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def describe_error(error: TandemError) -> HttpError:
    """Return the HTTP error for a ``TandemError``; an unknown code gives status 500."""
    status = _STATUS.get(error.code, 500)
    headers: dict[str, str] = {}
    if isinstance(error, OverloadError):
        headers["Retry-After"] = str(error.retry_after_s)
    elif error.code in _RETRY_AFTER_S:
        headers["Retry-After"] = str(_RETRY_AFTER_S[error.code])
    elif status >= 500:
        # OpenAI's and Anthropic's clients repeat a request on any 5xx unless this header forbids
        # it; repeating a slow request would only run it again and again.
        headers["x-should-retry"] = "false"
    return HttpError(status, error.what, param=error.field, code=error.code, headers=headers)


WriteError = Callable[[ErrorBody, int], bytes]
"""Function that encodes an error, with its status, in the form of an API."""


def encode_error(body: ErrorBody, status: int = 500) -> bytes:
    """Encode an error as JSON in OpenAI's form."""
    return msgspec.json.encode(ErrorReply(body))


def error_response(error: HttpError, write: WriteError = encode_error) -> Response:
    """Return the response for an error, encoded by ``write`` in the form of its API."""
    return Response(
        write(error.body, error.status),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )

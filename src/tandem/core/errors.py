"""The error classes of the project.

Every error that leaves a public function is one of these classes. Each has a stable ``code``, which
is part of the wire format and never changes; a ``retryable`` flag, which says if the same call may
succeed later; and a message of the form ``[where] what, with values: what to do``. Each is also a
subclass of the builtin that fits, so that callers who know nothing of Tandem can catch it.
"""

from typing import ClassVar

__all__ = [
    "ERROR_CODES",
    "CancelledError",
    "CapacityError",
    "ConfigError",
    "ConflictError",
    "CorruptionError",
    "DeadlineError",
    "InternalError",
    "NotFoundError",
    "OverloadError",
    "PeerLostError",
    "PermissionDeniedError",
    "ShapeError",
    "TandemError",
    "UnsentError",
    "UnsupportedError",
    "make_error",
]


class TandemError(Exception):
    """Base class of all errors that Tandem raises.

    Args:
        where: the operation that found the error, as ``subsystem.verb``.
        what: description of the error, with values, and what to do about it.
        field: dotted path of the request or config field that is wrong, if there is one.
    """

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(self, where: str, what: str, *, field: str | None = None) -> None:
        self.where = where
        self.what = what
        self.field = field
        super().__init__(f"[{where}] {what}")

    def __str__(self) -> str:
        # KeyError would print the repr of its argument; all classes print the plain message.
        return f"[{self.where}] {self.what}"


class ConfigError(TandemError, ValueError):
    """A setting, request field or rule file is wrong; ``field`` is the dotted path."""

    code = "config"


class ShapeError(TandemError, ValueError):
    """A tensor or buffer has the wrong shape, dtype, device or layout; the text has found and
    expected.
    """

    code = "shape"


class UnsupportedError(TandemError):
    """The call is valid, but this build, machine or version cannot do it."""

    code = "unsupported"


class NotFoundError(TandemError, KeyError):
    """The named thing does not exist."""

    code = "not_found"


class ConflictError(TandemError):
    """The named thing exists already, or is in a state that forbids the call."""

    code = "conflict"


class CapacityError(TandemError):
    """A bounded resource (queue, blocks, memory) is full now; may succeed later."""

    code = "capacity"
    retryable = True


class OverloadError(TandemError):
    """The request's latency objectives cannot be kept at present; nothing was begun.

    Args:
        retry_after_s: whole seconds after which they may be kept.
    """

    code = "overload"
    retryable = True

    def __init__(
        self, where: str, what: str, *, field: str | None = None, retry_after_s: int = 1
    ) -> None:
        super().__init__(where, what, field=field)
        self.retry_after_s = retry_after_s


class UnsentError(CapacityError):
    """Nothing was sent, because the peer has too much unread data; a later call may succeed.

    If it crosses a wire it becomes a ``CapacityError``, because for the receiver it would seem to
    concern the receiver's own peer.
    """


class PeerLostError(TandemError, ConnectionError):
    """The other process died, restarted or left; calls that it had not acknowledged may not be
    done.
    """

    code = "peer_lost"
    retryable = True


class DeadlineError(TandemError, TimeoutError):
    """The deadline of the call passed."""

    code = "deadline"
    retryable = True


class CorruptionError(TandemError):
    """Data on disk or on the wire differs from the bytes that were written."""

    code = "corruption"


class CancelledError(TandemError):
    """The caller, or the owner of the request, cancelled it."""

    code = "cancelled"


class PermissionDeniedError(TandemError, PermissionError):
    """The caller is not authenticated, or not allowed to do this."""

    code = "permission_denied"


class InternalError(TandemError, RuntimeError):
    """A bug of ours, or an error of a library that no other class describes."""

    code = "internal"


ERROR_CODES: dict[str, type[TandemError]] = {
    cls.code: cls
    for cls in (
        ConfigError,
        ShapeError,
        UnsupportedError,
        NotFoundError,
        ConflictError,
        CapacityError,
        OverloadError,
        PeerLostError,
        DeadlineError,
        CorruptionError,
        CancelledError,
        PermissionDeniedError,
        InternalError,
    )
}
"""Error classes by code, for errors that arrive over a wire."""


def make_error(code: str, where: str, what: str, field: str | None = None) -> TandemError:
    """Return an error that arrived over a wire; an unknown code gives ``InternalError``."""
    return ERROR_CODES.get(code, InternalError)(where, what, field=field)

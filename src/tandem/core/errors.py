"""The one error tree of the project.

Every error that leaves a public function is one of these classes. Each has a stable ``code``
(part of the wire format and of the documentation, never renumbered), a ``retryable`` flag that
says whether the same call may succeed later, and a message of the form
``[where] what, with values: what to do``. Each is also the builtin that fits, so that callers
who know nothing of Tandem can still catch it.
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
    """Root of all errors that Tandem raises.

    Args:
        where: the operation that decided the error, ``subsystem.verb``.
        what: what went wrong, with the values, and what to do about it.
        field: the request or config field at fault, as a dotted path, if one is.
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
    """A setting, request field or rule file is wrong; ``field`` names the place."""

    code = "config"


class ShapeError(TandemError, ValueError):
    """A tensor or buffer has the wrong shape, dtype, device or layout; the text has both."""

    code = "shape"


class UnsupportedError(TandemError):
    """Well-formed, but not something this build, machine or version can do."""

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
    """The request's objectives cannot be kept now; nothing was begun.

    Args:
        retry_after_s: whole seconds after which they may be.
    """

    code = "overload"
    retryable = True

    def __init__(
        self, where: str, what: str, *, field: str | None = None, retry_after_s: int = 1
    ) -> None:
        super().__init__(where, what, field=field)
        self.retry_after_s = retry_after_s


class UnsentError(CapacityError):
    """This side sent nothing, since the peer has left too much unread; may succeed in a moment.

    Over a wire it is a ``CapacityError``: there it would say nothing of the receiver's own peer.
    """


class PeerLostError(TandemError, ConnectionError):
    """The other process died, restarted or left; what it had not acknowledged is not done."""

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
"""Code to class, for errors that arrive over a wire."""


def make_error(code: str, where: str, what: str, field: str | None = None) -> TandemError:
    """Rebuild an error that crossed a wire; an unknown code becomes ``InternalError``."""
    return ERROR_CODES.get(code, InternalError)(where, what, field=field)

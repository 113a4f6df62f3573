"""The handshake of a session: both sides exchange identities and limits, and check
compatibility.
"""

import secrets
from collections.abc import Callable

from tandem.core.errors import ConflictError, InternalError, TandemError
from tandem.rpc.config import RpcConfig
from tandem.rpc.window import count_window
from tandem.rpc.wire.frames import Identity, Limits

__all__ = [
    "CompatCheck",
    "check_compat_equal",
    "make_identity",
    "make_limits",
    "run_compat_check",
]

CompatCheck = Callable[[Identity, Identity], None]
"""``check(theirs, ours)`` raises a ``TandemError`` to refuse a peer. Both sides run it."""


def make_identity(name: str, role: str = "", compat: dict[str, str] | None = None) -> Identity:
    """Return the identity that a process introduces itself with, with a new random ``instance_id``.
    Make one for each start of a process.

    Args:
        name: for people and logs.
        role: kind of the process, such as ``server`` or ``instance``.
        compat: facts that the other side compares with its own.
    """
    return Identity(
        name=name,
        role=role,
        instance_id=secrets.token_hex(8),
        compat={} if compat is None else dict(compat),
    )


def check_compat_equal(theirs: Identity, ours: Identity) -> None:
    """Check that the facts in both identities' ``compat`` (text by name, such as a version) are
    equal. A fact that only one side states passes.

    Raises: ConflictError naming the fact and both values.
    """
    for key in sorted(theirs.compat.keys() & ours.compat.keys()):
        if theirs.compat[key] != ours.compat[key]:
            raise ConflictError(
                "rpc.handshake",
                f"{key} differs: {theirs.name} has {theirs.compat[key]!r}, {ours.name} has "
                f"{ours.compat[key]!r}: start both with the same",
                field=f"compat.{key}",
            )


def make_limits(config: RpcConfig) -> Limits:
    """Return the limits of this side's configuration that the other side must respect."""
    return Limits(
        max_message_bytes=config.max_message_bytes,
        lease_ms=config.lease_ms,
        window_messages=count_window(config),
        window_bytes=config.max_pending_bytes,
    )


def run_compat_check(check: CompatCheck, theirs: Identity, ours: Identity) -> None:
    """Run the check function of this endpoint's user on the identities of both sides. Any exception
    that it raises refuses the peer.

    Raises: the check's own TandemError; InternalError for any other exception of the check.
    """
    try:
        check(theirs, ours)
    except TandemError:
        raise
    except Exception as error:
        raise InternalError(
            "rpc.handshake", f"the compatibility check failed with {type(error).__name__}: {error}"
        ) from error

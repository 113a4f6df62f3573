"""Agreement of both sides before the first call: identities, limits, and compatibility."""

import secrets
from collections.abc import Callable
from typing import TypeVar

from tandem.core.errors import ConflictError, InternalError, TandemError
from tandem.rpc.config import RpcConfig
from tandem.rpc.window import count_window
from tandem.rpc.wire.frames import (
    MIN_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Hello,
    Identity,
    LaneOffer,
    Limits,
    Welcome,
)

__all__ = [
    "CompatCheck",
    "check_compat_equal",
    "make_greeting",
    "make_identity",
    "make_limits",
    "run_compat_check",
]

G = TypeVar("G", Hello, Welcome)
CompatCheck = Callable[[Identity, Identity], None]
"""``check(theirs, ours)`` raises a ``TandemError`` to refuse the peer; runs on both sides."""


def make_identity(name: str, role: str = "", compat: dict[str, str] | None = None) -> Identity:
    """Return an identity with a new random ``instance_id``; make one for each start of a process.

    Args:
        name: for people and logs.
        role: what kind of process, e.g. ``server`` or ``instance``.
        compat: facts that the other side compares with its own.
    """
    return Identity(
        name=name,
        role=role,
        instance_id=secrets.token_hex(8),
        compat={} if compat is None else dict(compat),
    )


def check_compat_equal(theirs: Identity, ours: Identity) -> None:
    """Demand that every fact which both sides state is equal; facts of one side alone pass.

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
    """Return what the other side must know of our configuration."""
    return Limits(
        max_message_bytes=config.max_message_bytes,
        lease_ms=config.lease_ms,
        window_messages=count_window(config),
        window_bytes=config.max_pending_bytes,
    )


def make_greeting(
    kind: type[G], epoch: int, identity: Identity, config: RpcConfig, lane: LaneOffer | None
) -> G:
    """Return our first message of a session."""
    limits = make_limits(config)
    return kind(PROTOCOL_VERSION, MIN_PROTOCOL_VERSION, epoch, identity, limits, lane=lane)


def run_compat_check(check: CompatCheck, theirs: Identity, ours: Identity) -> None:
    """Run a user's check; any exception refuses, not a ``TandemError`` alone.

    Raises: TandemError.
    """
    try:
        check(theirs, ours)
    except TandemError:
        raise
    except Exception as error:
        raise InternalError(
            "rpc.handshake", f"the compatibility check failed with {type(error).__name__}: {error}"
        ) from error

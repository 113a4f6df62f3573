"""Settings of the control channel. Both sides announce the ones the other must respect."""

from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.core.config import check_bounds
from tandem.core.errors import ConfigError

__all__ = ["MAX_TIMEOUT_MS", "RpcConfig"]

MAX_TIMEOUT_MS = 7 * 24 * 3600 * 1000
"""Longest deadline of a call in milliseconds, so that even an abandoned call ends."""


class RpcConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits and intervals of ``tandem.rpc``."""

    default_timeout_ms: Annotated[
        int, Meta(ge=1, le=MAX_TIMEOUT_MS, description="Deadline of a call that names none.")
    ] = 30_000
    connect_timeout_ms: Annotated[
        int, Meta(ge=1, le=3_600_000, description="How long to look for a server before giving up.")
    ] = 10_000
    heartbeat_interval_ms: Annotated[
        int, Meta(ge=10, le=60_000, description="Longest silence towards a connected peer.")
    ] = 1_000
    lease_ms: Annotated[
        int, Meta(ge=20, le=600_000, description="A peer silent for this long is lost.")
    ] = 10_000
    max_message_bytes: Annotated[
        int, Meta(ge=1024, le=2**31 - 1, description="Largest message accepted, in bytes.")
    ] = 64 * 2**20
    max_pending_per_peer: Annotated[
        int,
        Meta(
            ge=4,
            le=1_000_000,
            description="Calls one peer may have running; twice as many messages may be unread.",
        ),
    ] = 4096
    max_pending_bytes: Annotated[
        int, Meta(ge=4096, le=2**34, description="Bytes that one peer may leave unread.")
    ] = 128 * 2**20
    max_peers: Annotated[
        int, Meta(ge=1, le=65_536, description="Clients that one server admits at a time.")
    ] = 1024
    reconnect_initial_ms: Annotated[
        int, Meta(ge=1, le=60_000, description="First pause before connecting again.")
    ] = 50
    reconnect_max_ms: Annotated[
        int, Meta(ge=1, le=600_000, description="Longest pause before connecting again.")
    ] = 2_000
    linger_ms: Annotated[
        int, Meta(ge=0, le=60_000, description="Time to deliver the last messages when closing.")
    ] = 200

    def __post_init__(self) -> None:
        """Check bounds, and conditions that bounds cannot express.

        Raises: ConfigError if a bound is crossed, or two settings contradict each other.
        """
        check_bounds(self, "rpc")
        if self.lease_ms < 2 * self.heartbeat_interval_ms:
            raise ConfigError(
                "rpc.configure",
                f"lease_ms {self.lease_ms} is under twice heartbeat_interval_ms "
                f"{self.heartbeat_interval_ms}: one late heartbeat would lose the peer",
                field="rpc.lease_ms",
            )
        if self.max_pending_bytes < self.max_message_bytes:
            raise ConfigError(
                "rpc.configure",
                f"max_pending_bytes {self.max_pending_bytes} is under max_message_bytes "
                f"{self.max_message_bytes}: the largest message could never be sent",
                field="rpc.max_pending_bytes",
            )
        if self.reconnect_max_ms < self.reconnect_initial_ms:
            raise ConfigError(
                "rpc.configure",
                f"reconnect_max_ms {self.reconnect_max_ms} is under reconnect_initial_ms "
                f"{self.reconnect_initial_ms}",
                field="rpc.reconnect_max_ms",
            )

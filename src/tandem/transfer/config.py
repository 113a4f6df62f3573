"""Settings of the transfer engine."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem.core.config import check_bounds, check_text
from tandem.core.errors import ConfigError

__all__ = ["MIN_SECRET_BYTES", "PeerTransportName", "TransferConfig", "TransportName"]

MIN_SECRET_BYTES = 16
"""Least length of a secret in bytes: an observed proof can be attacked offline, so the secret must
not be guessable.
"""

PeerTransportName = Literal["local", "shm", "cma", "tcp"]
"""The transports between processes, best first."""
TransportName = Literal["local", "shm", "cma", "tcp", "file"]


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the transfer engine: how a process offers its memory, and reaches that of
    others.
    """

    name: Annotated[
        str, Meta(max_length=200, description="Name told to peers; empty = host and process id.")
    ] = ""
    secret: Annotated[
        str | None,
        Meta(
            description="Secret of the cluster, proved by both sides of every connection; without "
            "one the engine is reachable by nobody.",
            extra_json_schema={"secret": True},
        ),
    ] = None
    listen: Annotated[
        tuple[str, ...],
        Meta(
            description="Addresses to accept peers on, host:port or [v6]:port; port 0 = any, "
            "7000-7100 = the first that is free."
        ),
    ] = ("127.0.0.1:0",)
    advertise: Annotated[
        tuple[str, ...],
        Meta(description="Addresses told to peers, one rail each; empty = those listened on."),
    ] = ()
    local_addresses: Annotated[
        tuple[str, ...],
        Meta(description="Local addresses to connect from, one rail each; empty = the kernel's."),
    ] = ()
    rail_gbps: Annotated[
        tuple[Annotated[float, Meta(gt=0)], ...],
        Meta(description="Nominal speed of each rail, Gbit/s; empty = the NIC's; then learnt."),
    ] = ()
    topology_file: Annotated[
        str, Meta(description="JSON of Topology.to_json, used instead of looking; empty = look.")
    ] = ""
    nic_weight: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="Share the NICs of local_addresses with other processes of this user that "
            "set a weight, by weight; unset = take what TCP gives."
        ),
    ] = None
    lanes: Annotated[int, Meta(ge=1, le=64, description="TCP connections per rail.")] = 1
    transports: Annotated[
        tuple[PeerTransportName, ...],
        Meta(description="Transports that may be used, best first; a later one takes over."),
    ] = ("local", "shm", "cma", "tcp")
    io_threads: Annotated[int, Meta(ge=1, le=64, description="Threads that serve sockets.")] = 1
    copy_threads: Annotated[
        int, Meta(ge=1, le=64, description="Threads that copy for local, shm and cma.")
    ] = 1
    polling_us: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="Longest polling for an answer, and after the last operation; three times "
            "as long where that would just have paid. 0 = none.",
        ),
    ] = 200
    deadline_ms: Annotated[
        int, Meta(ge=1, le=86_400_000, description="Deadline of a call that names none.")
    ] = 30_000
    lease_ms: Annotated[
        int,
        Meta(ge=50, le=600_000, description="A peer that owes an answer this long is lost."),
    ] = 3_000
    handshake_timeout_ms: Annotated[
        int, Meta(ge=10, le=60_000, description="Time to prove the secret on a new connection.")
    ] = 1_000
    stall_ms: Annotated[
        int,
        Meta(
            ge=10,
            le=60_000,
            description="A rail of unknown speed with work and without progress is left then; a "
            "known one after three times its prediction.",
        ),
    ] = 200
    min_slice_bytes: Annotated[
        int, Meta(ge=4096, le=64 * 2**20, description="Shortest slice that a transfer is cut to.")
    ] = 64 * 2**10
    max_slice_bytes: Annotated[int, Meta(ge=4096, le=256 * 2**20, description="Longest slice.")] = (
        4 * 2**20
    )
    max_connections: Annotated[
        int, Meta(ge=1, le=65_536, description="Connections accepted at a time.")
    ] = 4096
    max_notifications: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Notifications kept unread.")
    ] = 4096
    socket_buffer_bytes: Annotated[
        int, Meta(ge=0, le=2**28, description="Socket buffers; 0 = tuned by the kernel.")
    ] = 0
    file_backend: Annotated[
        Literal["auto", "io_uring", "threads"],
        Meta(description="How files are read and written; auto = io_uring where it is allowed."),
    ] = "auto"
    checksum: Annotated[
        bool, Meta(description="CRC-32C of every slice on tcp; a damaged one is sent again.")
    ] = False
    tags: Annotated[
        Literal["auto", "always", "hmac", "never"],
        Meta(
            description="Keyed tags on tcp, which make what is sent authentic; auto = on "
            "connections that leave the host; hmac = always, and by HMAC-SHA256 where GMAC would "
            "do; never = only where the peer asks."
        ),
    ] = "auto"

    def __repr__(self) -> str:
        """Show the settings without the secret, since configurations appear in logs."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        shown["secret"] = None if self.secret is None else "***"
        return f"TransferConfig({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    def __post_init__(self) -> None:
        """Check bounds, and conditions that bounds cannot express.

        Raises: ConfigError (one does not hold; ``field`` names the setting).
        """
        check_bounds(self, "transfer")
        check_text(self.secret, "transfer.secret")
        if self.secret is not None and len(self.secret.encode()) < MIN_SECRET_BYTES:
            raise ConfigError(
                "transfer.configure",
                f"secret of {len(self.secret.encode())} bytes, need {MIN_SECRET_BYTES}: take one "
                "from secrets.token_urlsafe(32)",
                field="transfer.secret",
            )
        if self.min_slice_bytes > self.max_slice_bytes:
            raise ConfigError(
                "transfer.configure",
                f"min_slice_bytes {self.min_slice_bytes} > max_slice_bytes {self.max_slice_bytes}",
                field="transfer.min_slice_bytes",
            )

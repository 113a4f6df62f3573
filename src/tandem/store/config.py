"""Settings of the store."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem.core.config import SIZE_PATTERN, check_bounds, check_text, parse_size
from tandem.core.errors import ConfigError

__all__ = ["StoreConfig", "StoreElectionConfig"]


PAGE_BYTES = 4096
MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES = 2**16, 2**39


class StoreElectionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the election of a leader among several masters."""

    backend: Annotated[
        Literal["none", "etcd"], Meta(description="Who elects the leader; none: a single master.")
    ] = "none"
    endpoints: Annotated[
        tuple[str, ...], Meta(description="Client URLs of etcd; its JSON gateway is used.")
    ] = ("http://127.0.0.1:2379",)
    prefix: Annotated[
        str,
        Meta(min_length=1, max_length=200, description="Of the keys in etcd; one for each store."),
    ] = "/tandem/store"
    ttl_s: Annotated[
        int, Meta(ge=2, le=600, description="A leader not heard of for so long may be replaced.")
    ] = 3
    timeout_ms: Annotated[
        int, Meta(ge=10, le=60_000, description="Deadline of one question to etcd.")
    ] = 1_000
    address: Annotated[
        str,
        Meta(description="Where others reach this master; empty: where it listens."),
    ] = ""
    user: Annotated[str, Meta(description="Name for etcd with authentication; empty: none.")] = ""
    password: Annotated[
        str | None,
        Meta(description="Password for etcd.", extra_json_schema={"secret": True}),
    ] = None
    ca_file: Annotated[
        str, Meta(description="Certificates that etcd's is checked with; empty: the system's.")
    ] = ""
    cert_file: Annotated[str, Meta(description="Our certificate for etcd; empty: none.")] = ""
    key_file: Annotated[
        str, Meta(description="Key of that certificate; empty: in the same file.")
    ] = ""

    def __repr__(self) -> str:
        """Show the settings without the password."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        shown["password"] = None if self.password is None else "***"
        return f"StoreElectionConfig({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    def __post_init__(self) -> None:
        """Check bounds, and conditions that bounds cannot express.

        Raises: ConfigError (a setting breaks one; the message names it).
        """
        check_bounds(self, "store.election")
        bad = [url for url in self.endpoints if not url.startswith(("http://", "https://"))]
        if bad or not self.endpoints:
            raise ConfigError(
                "store.configure",
                f"etcd endpoints {self.endpoints}: give http://host:port or https://host:port",
                field="store.election.endpoints",
            )


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a store, shared by master, hosts and clients. Each process reads those that
    concern it.
    """

    master: Annotated[
        str,
        Meta(description="Address of the master, host:port or ipc:///path; several: a,b,c."),
    ] = ""
    secret: Annotated[
        str | None,
        Meta(
            description="Secret of the cluster; needed by tcp and by the transfer of bytes.",
            extra_json_schema={"secret": True},
        ),
    ] = None
    name: Annotated[
        str, Meta(max_length=200, description="Name of a host; empty = machine and process id.")
    ] = ""
    machine: Annotated[
        str, Meta(max_length=200, description="Which hosts are near; empty = the host name.")
    ] = ""
    listen: Annotated[
        tuple[str, ...],
        Meta(
            description="Addresses of a master or host for the bytes, host:port; port 0 = any; "
            "empty = any port of the interface that the master is reached at."
        ),
    ] = ()
    transports: Annotated[
        tuple[Literal["local", "shm", "cma", "tcp"], ...],
        Meta(description="Ways for the bytes; the fastest that reaches is taken."),
    ] = ("local", "shm", "cma", "tcp")
    memory: Annotated[
        str,
        Meta(
            pattern=SIZE_PATTERN,
            description="Memory of the store that `tandem serve` starts for itself, such as 8GiB; "
            "empty = none.",
        ),
    ] = ""
    segment_bytes: Annotated[
        int,
        Meta(ge=MIN_SEGMENT_BYTES, le=MAX_SEGMENT_BYTES, description="Memory that a host offers."),
    ] = 2**30
    segment_dir: Annotated[
        str,
        Meta(
            description="Folder of the segment files, on tmpfs or hugetlbfs; 0700. {uid} stands "
            "for the user's number."
        ),
    ] = "/dev/shm/tandem-{uid}"  # noqa: S108 - made 0700 and checked before use
    ssd_dir: Annotated[
        str, Meta(description="Folder of a host's SSD tier, its own alone (0700); empty = none.")
    ] = ""
    ssd_bytes: Annotated[
        int, Meta(ge=2**22, le=2**50, description="Files that the SSD tier may fill.")
    ] = 2**36
    strategy: Annotated[
        Literal["random", "most_free"], Meta(description="How hosts are chosen for new objects.")
    ] = "random"
    max_key_bytes: Annotated[
        int, Meta(ge=1, le=60_000, description="Longest key, in UTF-8 bytes.")
    ] = 1024
    max_value_bytes: Annotated[
        int, Meta(ge=1, le=2**39, description="Largest value, in bytes.")
    ] = 2**36
    inline_bytes: Annotated[
        int,
        Meta(ge=0, le=65_536, description="Values up to this are put by way of the master."),
    ] = 8_192
    result_pool_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=2**40,
            description="Memory of large values got as bytes that a client fills again once they "
            "are dropped.",
        ),
    ] = 2**27
    location_cache: Annotated[
        int,
        Meta(
            ge=0,
            le=2**24,
            description="Objects that a client gets again without asking its master where they "
            "are, while their leases hold; 0 = it asks each time.",
        ),
    ] = 65_536
    max_batch: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Objects in one batch call to the master.")
    ] = 100_000
    lease_ms: Annotated[
        int, Meta(ge=10, le=3_600_000, description="How long a read may rely on its bytes.")
    ] = 5_000
    put_timeout_ms: Annotated[
        int, Meta(ge=10, le=3_600_000, description="A write unfinished for this long is ended.")
    ] = 30_000
    put_wait_ms: Annotated[
        int, Meta(ge=0, le=3_600_000, description="How long a put waits for space.")
    ] = 10_000
    deadline_ms: Annotated[
        int, Meta(ge=10, le=3_600_000, description="Deadline of a client's call that names none.")
    ] = 30_000
    high_watermark: Annotated[
        float, Meta(gt=0, le=1, description="Share of a segment in use that starts eviction.")
    ] = 0.95
    eviction_step: Annotated[
        float, Meta(gt=0, le=1, description="Share of a segment that a step of eviction frees.")
    ] = 0.05
    max_waiting_puts: Annotated[
        int, Meta(ge=0, le=1_000_000, description="Puts that may wait for space at a time.")
    ] = 10_000
    max_repairs: Annotated[
        int, Meta(ge=0, le=1024, description="Replicas being copied at a time; 0 = no repair.")
    ] = 4
    recovery_ms: Annotated[
        int,
        Meta(ge=0, le=600_000, description="The master of a new store waits this long for hosts."),
    ] = 1_000
    member_lease_ms: Annotated[
        int,
        Meta(
            ge=10,
            le=3_600_000,
            description="A host not heard of for so long is declared lost: until it is back, what "
            "only it has reads as absent where the master never knew of it.",
        ),
    ] = 10_000
    metrics_port: Annotated[
        int, Meta(ge=0, le=65_535, description="Port of GET /metrics on loopback; 0 = none.")
    ] = 0
    election: StoreElectionConfig = msgspec.field(default_factory=StoreElectionConfig)

    @property
    def memory_bytes(self) -> int:
        """``memory`` in bytes, rounded down to whole pages; 0 if it is empty."""
        return parse_size(self.memory) // PAGE_BYTES * PAGE_BYTES

    def __repr__(self) -> str:
        """Show the settings without the secret."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        shown["secret"] = None if self.secret is None else "***"
        return f"StoreConfig({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    def __post_init__(self) -> None:
        """Check bounds, and conditions that bounds cannot express.

        Raises: ConfigError (a setting breaks one; the message names it).
        """
        check_bounds(self, "store")
        check_text(self.secret, "store.secret")
        is_none = not self.memory.strip("0.BKMGTi ")
        if not (is_none or MIN_SEGMENT_BYTES <= self.memory_bytes <= MAX_SEGMENT_BYTES):
            raise ConfigError(
                "store.configure",
                f"memory {self.memory!r} is not from {MIN_SEGMENT_BYTES >> 10} KiB to "
                f"{MAX_SEGMENT_BYTES >> 30} GiB: give one such as 1GiB",
                field="store.memory",
            )
        if not Path(self.segment_dir).is_absolute():
            raise ConfigError(
                "store.configure",
                f"segment_dir {self.segment_dir!r} is not an absolute path: begin it with /",
                field="store.segment_dir",
            )
        if self.ssd_dir and not Path(self.ssd_dir).is_absolute():
            raise ConfigError(
                "store.configure",
                f"ssd_dir {self.ssd_dir!r} is not an absolute path: begin it with /",
                field="store.ssd_dir",
            )
        if self.secret is not None and len(self.secret.encode()) < 16:
            raise ConfigError(
                "store.configure",
                f"secret of {len(self.secret.encode())} bytes, need 16: take one from "
                "secrets.token_urlsafe(32)",
                field="store.secret",
            )

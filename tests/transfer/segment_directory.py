"""Names of segments: who is where, for those who do not know an address beforehand.

``MetadataStore`` is the interface; ``MemoryMetadata`` keeps records in this process,
``segment_directory_http`` offers them to a cluster. The interface is what etcd (leases,
transactions on a key) and Redis (SET with NX and PX, a script to compare) give. ``Directory`` binds
an engine to a store. Records are hints: the handshake decides who a peer is.
"""

import contextlib
import threading
from typing import Protocol, Self

import msgspec

from tandem.core.clock import Clock, MonotonicClock
from tandem.core.errors import (
    ConfigError,
    ConflictError,
    DeadlineError,
    NotFoundError,
    PeerLostError,
    TandemError,
)
from tandem.transfer.engine import TransferEngine
from tandem.transfer.segment import Segment

__all__ = ["Directory", "MemoryMetadata", "MetadataStore", "SegmentRecord"]

MAX_NAME_CHARS = 200
MAX_ADDRESSES = 256
MAX_LEASE_S = 3600.0


class SegmentRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a segment is reached, and which run of it."""

    name: str
    addresses: tuple[str, ...]
    epoch: int


class MetadataStore(Protocol):
    """Records by name, each held by a lease. Calls may come from any thread."""

    def put(self, record: SegmentRecord, lease_s: float) -> None:
        """Write a record, or renew it; it vanishes ``lease_s`` after the last call.

        Raises: ConflictError if another epoch holds the name by a lease that still runs;
            ConfigError (malformed); PeerLostError (the store does not answer).
        """
        ...

    def get(self, name: str) -> SegmentRecord:
        """Return a record. Raises: NotFoundError; PeerLostError."""
        ...

    def remove(self, name: str, epoch: int) -> None:
        """Give a name up; nothing happens if another epoch holds it, or none.

        Raises: PeerLostError.
        """
        ...

    def names(self, prefix: str = "") -> list[str]:
        """Return the names that begin so, sorted. Raises: PeerLostError."""
        ...


def check_record(record: SegmentRecord, lease_s: float) -> None:
    """Check what every store demands.

    Raises: ConfigError.
    """
    is_name = 0 < len(record.name) <= MAX_NAME_CHARS and record.name.isprintable()
    if not is_name or len(record.addresses) > MAX_ADDRESSES or not 0 < record.epoch < 2**64:
        raise ConfigError("metadata.put", f"malformed record {record!r}", field="record")
    if not 0 < lease_s <= MAX_LEASE_S:
        raise ConfigError(
            "metadata.put", f"a lease of {lease_s} s: give up to {MAX_LEASE_S}", field="lease_s"
        )


class MemoryMetadata:
    """Records in this process; what the HTTP server keeps.

    Args:
        clock: by which leases run.
        max_records: names held at a time.
    """

    def __init__(self, clock: Clock | None = None, max_records: int = 100_000) -> None:
        self._clock = MonotonicClock() if clock is None else clock
        self._max_records = max_records
        self._lock = threading.Lock()
        self._records: dict[str, tuple[SegmentRecord, float]] = {}

    def put(self, record: SegmentRecord, lease_s: float) -> None:
        """See ``MetadataStore.put``; ConflictError also where there are too many names."""
        check_record(record, lease_s)
        with self._lock:
            now_s = self._clock.now_s()
            held = self._records.get(record.name)
            if held is not None and held[1] > now_s and held[0].epoch != record.epoch:
                raise ConflictError(
                    "metadata.put", f"{record.name!r} is held by another run: wait for its lease"
                )
            if held is None and len(self._records) >= self._max_records:
                self._records = {n: r for n, r in self._records.items() if r[1] > now_s}
                if len(self._records) >= self._max_records:
                    raise ConflictError("metadata.put", f"{self._max_records} names are held")
            self._records[record.name] = (record, now_s + lease_s)

    def get(self, name: str) -> SegmentRecord:
        """See ``MetadataStore.get``."""
        with self._lock:
            held = self._records.get(name)
            if held is None or held[1] <= self._clock.now_s():
                raise NotFoundError("metadata.get", f"no segment named {name!r}", field="name")
            return held[0]

    def remove(self, name: str, epoch: int) -> None:
        """See ``MetadataStore.remove``."""
        with self._lock:
            held = self._records.get(name)
            if held is not None and held[0].epoch == epoch:
                del self._records[name]

    def names(self, prefix: str = "") -> list[str]:
        """See ``MetadataStore.names``."""
        with self._lock:
            now_s = self._clock.now_s()
            return sorted(
                name
                for name, (_, end_s) in self._records.items()
                if end_s > now_s and name.startswith(prefix)
            )


class Directory:
    """An engine's place in a store: its own name, and the way to others by theirs.

    A context manager; leaving it gives the name up. While it is published a thread renews the lease
    three times within each; a store that does not answer is asked again.
    """

    def __init__(
        self, engine: TransferEngine, store: MetadataStore, *, lease_s: float = 10.0
    ) -> None:
        self._engine = engine
        self._store = store
        self._lease_s = lease_s
        self._record: SegmentRecord | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.last_error: TandemError | None = None
        """Why the last renewal failed; None if it did not."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def publish(self) -> None:
        """Offer the engine under its name.

        Raises: ConflictError (the name is held by another run, or this is published already);
            PeerLostError; NotFoundError (the engine listens nowhere).
        """
        if self._thread is not None:
            raise ConflictError("metadata.publish", f"{self._engine.name!r} is published already")
        assert self._engine.address, "raises where there is none"
        record = SegmentRecord(
            name=self._engine.name,
            addresses=tuple(self._engine.config.advertise or self._engine.addresses),
            epoch=self._engine.epoch,
        )
        self._store.put(record, self._lease_s)
        self._record = record
        self._thread = threading.Thread(
            target=self._renew, args=(record,), name="tandem-lease", daemon=True
        )
        self._thread.start()

    def open(self, name: str, *, deadline_s: float | None = None) -> Segment:
        """Open the segment of this name at the first of its addresses that answers.

        Raises: NotFoundError; PeerLostError (none answers, or another run does); as
            ``TransferEngine.open``.
        """
        record = self._store.get(name)
        failure: TandemError = PeerLostError("metadata.open", f"{name!r} has no address")
        for address in record.addresses:
            try:
                segment = self._engine.open(address, deadline_s=deadline_s)
            except (PeerLostError, DeadlineError) as error:
                failure = error
                continue
            epoch = self._engine.core.segment_epoch(segment.id)
            if epoch == record.epoch:
                return segment
            segment.close()
            failure = PeerLostError(
                "metadata.open", f"{address} is another run than {name!r}: ask again"
            )
        raise failure

    def close(self) -> None:
        """Give the name up. May be repeated."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._record is not None:
            # The lease ends by itself where the store is gone.
            with contextlib.suppress(PeerLostError):
                self._store.remove(self._record.name, self._record.epoch)
            self._record = None

    def _renew(self, record: SegmentRecord) -> None:
        while not self._stop.wait(self._lease_s / 3):
            try:
                self._store.put(record, self._lease_s)
                self.last_error = None
            except TandemError as error:
                self.last_error = error

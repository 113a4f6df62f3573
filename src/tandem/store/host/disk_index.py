"""The index of a host's disk: records by key, bytes by bucket, and the bucket to evict. Pure."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from tandem.store.formats.bucket import ALIGNMENT, Record
from tandem.store.formats.headers import HEAD_BYTES, ExtentHeader, RecordTombstone

__all__ = ["Bucket", "DiskIndex", "choose_bucket_bytes"]

MIN_BUCKET_BYTES = 2**20
MAX_BUCKET_BYTES = 256 * 2**20
BUCKETS_OF_CAPACITY = 32
"""A bucket is the grain of eviction: so small a share of the disk, within the bounds above."""


def choose_bucket_bytes(capacity_bytes: int) -> int:
    """Return how large the buckets of a disk are."""
    wanted = capacity_bytes // BUCKETS_OF_CAPACITY // ALIGNMENT * ALIGNMENT
    return max(MIN_BUCKET_BYTES, min(MAX_BUCKET_BYTES, wanted))


SPARSE_SHARE = 0.25
"""A bucket with less of it alive goes before older ones: little is lost for its space."""


@dataclass(slots=True, eq=False)
class Bucket:
    """One bucket file."""

    number: int
    file_bytes: int
    """Bytes that it takes of the disk."""
    used_bytes: int = HEAD_BYTES
    """Head and records, the dead ones included."""
    live_bytes: int = 0
    used_tick: int = 0
    records: list[Record] = field(default_factory=list[Record])
    """All that were added, in order of position."""


class DiskIndex:
    """Records and buckets. Not thread-safe."""

    def __init__(self) -> None:
        self.buckets: dict[int, Bucket] = {}
        self._records: dict[str, Record] = {}
        self._tick = 0
        self.file_bytes = 0
        """Bytes of all buckets."""
        self.live_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def find(self, key: str) -> Record | None:
        """Return the live record of a key."""
        return self._records.get(key)

    def list_records(self) -> list[Record]:
        """Return a copy of all live records."""
        return list(self._records.values())

    def add_bucket(self, number: int, file_bytes: int) -> Bucket:
        """Add an empty bucket."""
        assert number not in self.buckets, number
        bucket = Bucket(number, file_bytes)
        self.buckets[number] = bucket
        self.file_bytes += file_bytes
        self.touch(number)
        return bucket

    def resize_bucket(self, number: int, file_bytes: int) -> None:
        """Note that the file has become shorter."""
        bucket = self.buckets[number]
        self.file_bytes += file_bytes - bucket.file_bytes
        bucket.file_bytes = file_bytes

    def add(self, record: Record) -> Record | None:
        """Add a live record, in place of an older one of its key.

        Returns: the record of that key which is dead now: the older, also if that is the new one.
        """
        bucket = self.buckets[record.bucket]
        bucket.records.append(record)
        bucket.used_bytes = max(bucket.used_bytes, record.position + record.length)
        earlier = self._records.get(record.header.key)
        if earlier is not None and earlier.header.version >= record.header.version:
            return record
        self._records[record.header.key] = record
        bucket.live_bytes += record.length
        self.live_bytes += record.length
        if earlier is not None:
            self._bury(earlier)
        return earlier

    def remove(self, key: str, version: int) -> Record | None:
        """Forget the record of a key if its version is not above; returns it."""
        record = self._records.get(key)
        if record is None or record.header.version > version:
            return None
        del self._records[key]
        self._bury(record)
        return record

    def _bury(self, record: Record) -> None:
        self.buckets[record.bucket].live_bytes -= record.length
        self.live_bytes -= record.length

    def is_live(self, record: Record) -> bool:
        """Return True if this is the record of its key."""
        return self._records.get(record.header.key) is record

    def drop_bucket(self, number: int) -> list[Record]:
        """Forget a bucket; returns its records that were alive."""
        bucket = self.buckets.pop(number)
        self.file_bytes -= bucket.file_bytes
        lost = [record for record in bucket.records if self.is_live(record)]
        for record in lost:
            del self._records[record.header.key]
        self.live_bytes -= bucket.live_bytes
        return lost

    def touch(self, number: int) -> None:
        """Note a use of a bucket, for LRU."""
        self._tick += 1
        self.buckets[number].used_tick = self._tick

    def pick_dead(self, kept: int) -> list[int]:
        """Return the buckets of which nothing is alive, but for ``kept``."""
        return [n for n, bucket in self.buckets.items() if not bucket.live_bytes and n != kept]

    def pick_victim(self, kept: int) -> int | None:
        """Return the bucket to give up next, never ``kept``: the least used, sparse ones first."""
        able = [bucket for bucket in self.buckets.values() if bucket.number != kept]
        sparse = [b for b in able if b.live_bytes < SPARSE_SHARE * b.file_bytes]
        if sparse:
            return min(sparse, key=lambda bucket: bucket.live_bytes).number
        return min(able, key=lambda bucket: bucket.used_tick).number if able else None

    def find_same(self, header: ExtentHeader) -> Record | None:
        """Return the record of this very object: of its size, version and checksum."""
        record = self.find(header.key)
        return record if record is not None and record.header[1:4] == header[1:4] else None

    def keep_tombstones(
        self, tombstones: Iterable[RecordTombstone], going: Collection[int] = ()
    ) -> list[RecordTombstone]:
        """Return the tombstones of buckets that are there: the others have nothing to hold down.

        Args:
            tombstones: to choose from.
            going: buckets that are dropped here, but whose files may be there.
        """
        return [
            tombstone
            for tombstone in tombstones
            if tombstone.bucket in self.buckets or tombstone.bucket in going
        ]

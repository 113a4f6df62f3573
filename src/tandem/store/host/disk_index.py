"""The index of a host's disk: live records by key, bytes by bucket, and the choice of the bucket to
evict. Pure.
"""

from dataclasses import dataclass, field

from tandem.store.formats.bucket import ALIGNMENT, Record
from tandem.store.formats.headers import HEAD_BYTES, ExtentHeader

__all__ = ["Bucket", "DiskIndex", "choose_bucket_bytes"]

MIN_BUCKET_BYTES = 2**20
MAX_BUCKET_BYTES = 256 * 2**20
BUCKETS_OF_CAPACITY = 32
"""The capacity divided by this is the size of a bucket, within the bounds above. A bucket is the
unit of eviction.
"""


def choose_bucket_bytes(capacity_bytes: int) -> int:
    """Return the size of each bucket (file of many objects), from the capacity of the disk."""
    wanted = capacity_bytes // BUCKETS_OF_CAPACITY // ALIGNMENT * ALIGNMENT
    return max(MIN_BUCKET_BYTES, min(MAX_BUCKET_BYTES, wanted))


SPARSE_SHARE = 0.25
"""A bucket whose live share is below this is evicted before older ones: few records are lost for
its space.
"""


@dataclass(slots=True, eq=False)
class Bucket:
    """One bucket (a file of many objects): its sizes, its last use, and its records (objects)."""

    number: int
    file_bytes: int
    """Bytes of the file on the disk."""
    used_bytes: int = HEAD_BYTES
    """Bytes of the head and all records, dead ones included."""
    live_bytes: int = 0
    used_tick: int = 0
    records: list[Record] = field(default_factory=list[Record])
    """All records that were added, dead ones included, in order of position."""


class DiskIndex:
    """The live records (newest copies of objects) and the buckets (files of records) of one disk.
    Not thread-safe.
    """

    def __init__(self) -> None:
        self.buckets: dict[int, Bucket] = {}
        self._records: dict[str, Record] = {}
        self._tick = 0
        self.file_bytes = 0
        """Bytes of all bucket files."""
        self.live_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def find(self, key: str) -> Record | None:
        """Return the live record of a key (the newest copy of its object on the disk); None without
        one.
        """
        return self._records.get(key)

    def list_records(self) -> list[Record]:
        """Return all live records (the newest copy of each object on the disk), as a new list."""
        return list(self._records.values())

    def add_bucket(self, number: int, file_bytes: int) -> Bucket:
        """Add an empty bucket (a file for many objects) to the index, and return it."""
        assert number not in self.buckets, number
        bucket = Bucket(number, file_bytes)
        self.buckets[number] = bucket
        self.file_bytes += file_bytes
        self.touch(number)
        return bucket

    def resize_bucket(self, number: int, file_bytes: int) -> None:
        """Set the bytes of a bucket file that was truncated."""
        bucket = self.buckets[number]
        self.file_bytes += file_bytes - bucket.file_bytes
        bucket.file_bytes = file_bytes

    def add(self, record: Record) -> Record | None:
        """Add a record (a copy of an object on the disk), and make it the live one of its key
        unless the live one is newer.

        Returns: the record that is dead now: the older of the two; None if the key had none.
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
        """Forget the live record (copy on the disk) of a key if its version is at most ``version``,
        and return it; else return None.
        """
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
        """Return True if this record is the live one of its key: no newer copy was added and it was
        not removed.
        """
        return self._records.get(record.header.key) is record

    def drop_bucket(self, number: int) -> list[Record]:
        """Forget a bucket (a file of many objects), and return those of its records that were
        live.
        """
        bucket = self.buckets.pop(number)
        self.file_bytes -= bucket.file_bytes
        lost = [record for record in bucket.records if self.is_live(record)]
        for record in lost:
            del self._records[record.header.key]
        self.live_bytes -= bucket.live_bytes
        return lost

    def touch(self, number: int) -> None:
        """Mark a bucket (a file of many objects) as used most recently, for LRU eviction."""
        self._tick += 1
        self.buckets[number].used_tick = self._tick

    def pick_dead(self, kept: Bucket | None = None) -> list[int]:
        """Return the numbers of the buckets (files of many objects) without live records, except
        ``kept``.
        """
        buckets = self.buckets.values()
        return [b.number for b in buckets if not b.live_bytes and b is not kept]

    def pick_victim(self) -> int | None:
        """Return the number of the bucket (file of objects) to evict next: first those with few
        live bytes, then the least recently used; None without any.
        """
        able = list(self.buckets.values())
        sparse = [b for b in able if b.live_bytes < SPARSE_SHARE * b.file_bytes]
        if sparse:
            return min(sparse, key=lambda bucket: bucket.live_bytes).number
        return min(able, key=lambda bucket: bucket.used_tick).number if able else None

    def find_same(self, header: ExtentHeader) -> Record | None:
        """Return the live record (copy on the disk) of the header's key if its size, version and
        checksum are those of the header; else None.
        """
        record = self.find(header.key)
        return record if record is not None and record.header[1:4] == header[1:4] else None

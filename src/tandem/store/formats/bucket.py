"""The format of the SSD tier's files, as functions of bytes.

A record is an extent of a segment, header included, at a multiple of 4 KiB. The object's own
checksum covers table and value, so records add none. Pure: opens no file. The page is
docs/design/store/store_formats.md.
"""

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from tandem.core.errors import CorruptionError
from tandem.store.formats import layout
from tandem.store.formats.headers import (
    HEAD_BYTES,
    ExtentHeader,
    checksum_bytes,
    pack_head,
    pack_object,
    parse_head,
    parse_object,
)

__all__ = [
    "ALIGNMENT",
    "FOLDER_MAGIC",
    "HEAD_BYTES",
    "ID_BYTES",
    "Record",
    "pack_bucket_head",
    "pack_index",
    "pack_record",
    "parse_bucket_head",
    "parse_folder_id",
    "parse_index",
    "parse_record",
    "record_bytes",
]

ALIGNMENT = 4096
"""Alignment of records in bytes, as O_DIRECT requires."""
FOLDER_MAGIC = b"TANDSSD\0"
ID_BYTES = 16
"""Bytes of a folder's id, which is the only field in the folder's head."""
BUCKET_MAGIC = b"TANDBKT\0"
BUCKET = struct.Struct("<IQQ16s")  # alignment, file bytes, number, folder id
INDEX_MAGIC = b"TANDIDX\0"
INDEX = struct.Struct("<QQI")  # number, records, CRC-32C of them
POSITION = struct.Struct("<Q")


class Record(NamedTuple):
    """One object on a disk: its place in a bucket (a file of many objects), and the fields of its
    header.
    """

    bucket: int
    position: int
    header: ExtentHeader

    @property
    def length(self) -> int:
        """Bytes that the record takes in the bucket, padding included."""
        return record_bytes(len(self.header.key.encode()), self.header.size)


def record_bytes(key_bytes: int, value_bytes: int) -> int:
    """Return the length of a record (an object with header and key, as it is stored on a disk), a
    multiple of ``ALIGNMENT``.
    """
    whole = layout.value_offset(key_bytes, value_bytes) + value_bytes
    return whole + ALIGNMENT - 1 & -ALIGNMENT


def pack_bucket_head(number: int, file_bytes: int, folder_id: bytes) -> bytes:
    """Return the first ``HEAD_BYTES`` of a bucket (a file of an SSD tier with many objects)."""
    return pack_head(BUCKET_MAGIC, BUCKET.pack(ALIGNMENT, file_bytes, number, folder_id))


def parse_bucket_head(data: bytes, number: int, folder_id: bytes) -> bool:
    """Check the first bytes of a bucket (a file of an SSD tier with many objects). Return True if
    one of the two copies of its head is corrupt.

    Raises: CorruptionError if they are none, or another bucket's; UnsupportedError (version).
    """
    head = parse_head(data, BUCKET_MAGIC, BUCKET.size, f"bucket {number}")
    alignment, _, stored_number, stored_id = BUCKET.unpack(head.copies[0])
    if (alignment, stored_number, stored_id) != (ALIGNMENT, number, folder_id):
        raise CorruptionError("store.disk", f"the head of bucket {number} is not its own")
    return head.is_damaged


def parse_folder_id(data: bytes) -> bytes:
    """Return the id of the folder that a bucket (a file of many objects) belongs to, from its first
    bytes.

    Raises: CorruptionError if they are no bucket's; UnsupportedError (version).
    """
    return BUCKET.unpack(parse_head(data, BUCKET_MAGIC, BUCKET.size, "a bucket").copies[0])[3]


def pack_record(record: Record) -> bytes:
    """Return the part of a record (an object as it is stored on a disk) before the checksum table:
    header and key, padded.
    """
    text = pack_object(record.header, record.bucket, record.position)
    return text.ljust(layout.table_offset(len(text) - layout.HEADER_BYTES), b"\0")


def parse_record(data: Any, bucket: int, position: int) -> Record:
    """Read the header and key of the record (an object in a bucket file) at the beginning of
    ``data``.

    Raises: CorruptionError if they are corrupt, or were written for another place.
    """
    header = parse_object(data, 0, bucket, position)
    if header is None:
        raise CorruptionError("store.disk", f"no record at {position} of bucket {bucket}")
    return Record(bucket, position, header)


def pack_index(number: int, records: Sequence[Record]) -> bytes:
    """Return the content of the index file of a full bucket (a file of many objects): the position,
    header and key of each object.
    """
    body = b"".join(POSITION.pack(r.position) + pack_record(r) for r in records)
    return pack_head(INDEX_MAGIC, INDEX.pack(number, len(records), checksum_bytes(body))) + body


def parse_index(data: bytes, number: int) -> list[Record]:
    """Read the index file of a bucket: the place and header of each object in it.

    Raises: CorruptionError if it is damaged or another bucket's; the bucket itself can be read
        instead. UnsupportedError (version).
    """
    head = parse_head(data, INDEX_MAGIC, INDEX.size, f"the index of bucket {number}")
    if head.is_damaged:  # The caller reads the bucket itself, and writes a whole index.
        raise CorruptionError("store.disk", f"the head of the index of bucket {number} is damaged")
    stored_number, count, crc = INDEX.unpack(head.copies[0])
    body = data[HEAD_BYTES:]
    if stored_number != number or crc != checksum_bytes(body):
        raise CorruptionError("store.disk", f"the index of bucket {number} is damaged")
    records: list[Record] = []
    view, at = memoryview(body), 0
    for _ in range(count):
        if at + POSITION.size > len(view):
            raise CorruptionError("store.disk", f"the index of bucket {number} is too short")
        (position,) = POSITION.unpack_from(view, at)
        at += POSITION.size
        record = parse_record(view[at:], number, position)
        records.append(record)
        at += layout.table_offset(len(record.header.key.encode()))
    return records

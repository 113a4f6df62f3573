"""How objects lie on a disk: the formats of docs/design/store_ssd.md, as functions of bytes.

A record is an extent of a segment with another header, at a multiple of 4 KiB, so that table and
value need no second checksum: the object's own covers them. Pure; knows no file.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tandem._native import crc32c
from tandem.core.errors import CorruptionError, UnsupportedError
from tandem.store import layout
from tandem.store.segment import ExtentHeader

__all__ = [
    "ALIGNMENT",
    "HEAD_BYTES",
    "Grave",
    "Record",
    "pack_graves",
    "pack_head",
    "pack_index",
    "pack_record",
    "parse_graves",
    "parse_head",
    "parse_index",
    "parse_record",
    "record_bytes",
]

ALIGNMENT = 4096
"""Of records, for O_DIRECT."""
HEAD_BYTES = ALIGNMENT
FORMAT_VERSION = 1
HEAD = struct.Struct("<8sIIQQ16s")  # magic, version, alignment, file bytes, number, folder id
HEAD_MAGIC = b"TANDBKT\0"
RECORD = struct.Struct("<IHBBQQIIQQ")  # as an object's, then: bucket, position
RECORD_MAGIC = 0x4345_5254  # "TREC"
HARD_PIN = 1
INDEX = struct.Struct("<8sIIQ")  # magic, version, records, number
INDEX_MAGIC = b"TANDIDX\0"
GRAVE = struct.Struct("<QQ")  # version, bucket
CRC = struct.Struct("<I")


class Record(NamedTuple):
    """Where an object lies on the disk, and what its header says."""

    bucket: int
    position: int
    header: ExtentHeader

    @property
    def length(self) -> int:
        """Bytes in the bucket, padding included."""
        return record_bytes(len(self.header.key.encode()), self.header.size)


class Grave(NamedTuple):
    """Says that the record of this version, in this bucket, is dead."""

    version: int
    bucket: int


def _checksum(*parts: bytes) -> int:
    crc = 0
    for part in parts:
        if part:
            crc = crc32c(np.frombuffer(part, dtype=np.uint8), crc)
    return crc


def record_bytes(key_bytes: int, value_bytes: int) -> int:
    """Return the length of a record, a multiple of ``ALIGNMENT``."""
    whole = layout.value_offset(key_bytes, value_bytes) + value_bytes
    return whole + ALIGNMENT - 1 & -ALIGNMENT


def pack_head(number: int, file_bytes: int, folder_id: bytes) -> bytes:
    """Return the first ``HEAD_BYTES`` of a bucket file."""
    fields = HEAD.pack(HEAD_MAGIC, FORMAT_VERSION, ALIGNMENT, file_bytes, number, folder_id)
    return (fields + CRC.pack(_checksum(fields))).ljust(HEAD_BYTES, b"\0")


def parse_head(data: bytes, number: int, folder_id: bytes) -> None:
    """Check the first bytes of a bucket file.

    Raises: CorruptionError if they are none, or another bucket's; UnsupportedError (version).
    """
    fields = data[: HEAD.size]
    if len(data) < HEAD.size + CRC.size or fields[:8] != HEAD_MAGIC:
        raise CorruptionError("store.disk", f"bucket {number} has no head")
    _, version, alignment, _, stored_number, stored_id = HEAD.unpack(fields)
    (crc,) = CRC.unpack_from(data, HEAD.size)
    # First of all, in this format and later ones: a flipped bit is no later format.
    is_whole = crc == _checksum(fields)
    if is_whole and version > FORMAT_VERSION:
        raise UnsupportedError(
            "store.disk", f"bucket {number} has format {version}, this build knows {FORMAT_VERSION}"
        )
    expected = (ALIGNMENT, number, folder_id)
    if not is_whole or (alignment, stored_number, stored_id) != expected:
        raise CorruptionError("store.disk", f"the head of bucket {number} is not its own")


def pack_record(record: Record) -> bytes:
    """Return what stands before the table: header and key, padded."""
    header, key = record.header, record.header.key.encode()
    fields = RECORD.pack(
        RECORD_MAGIC,
        len(key),
        header.wanted,
        HARD_PIN if header.hard_pin else 0,
        header.size,
        header.version,
        header.checksum,
        header.soft_pin_ms,
        record.bucket,
        record.position,
    )
    text = (fields + CRC.pack(_checksum(fields, key))).ljust(layout.HEADER_BYTES, b"\0") + key
    return text.ljust(layout.table_offset(len(key)), b"\0")


def parse_record(data: bytes | memoryview, bucket: int, position: int) -> Record:
    """Read the header and key that ``data`` begins with.

    Raises: CorruptionError if there are none that hold together, or another place's.
    """
    if len(data) >= layout.HEADER_BYTES:
        fields = bytes(data[: RECORD.size])
        magic, key_bytes, wanted, flags, size, version, checksum, soft_ms, *place = RECORD.unpack(
            fields
        )
        key = bytes(data[layout.HEADER_BYTES : layout.HEADER_BYTES + key_bytes])
        (crc,) = CRC.unpack_from(data, RECORD.size)
        is_whole = magic == RECORD_MAGIC and len(key) == key_bytes
        if is_whole and place == [bucket, position] and crc == _checksum(fields, key):
            header = ExtentHeader(
                key.decode(), size, version, checksum, wanted, bool(flags & HARD_PIN), soft_ms
            )
            return Record(bucket, position, header)
    raise CorruptionError("store.disk", f"no record at {position} of bucket {bucket}")


def pack_index(number: int, records: Sequence[Record]) -> bytes:
    """Return the file that says what a full bucket holds."""
    body = INDEX.pack(INDEX_MAGIC, FORMAT_VERSION, len(records), number)
    body += b"".join(map(pack_record, records))
    return body + CRC.pack(_checksum(body))


def parse_index(data: bytes, number: int) -> list[Record]:
    """Read the index of a bucket.

    Raises: CorruptionError; the bucket itself can be read instead.
    """
    bad = CorruptionError("store.disk", f"the index of bucket {number} is damaged")
    if len(data) < INDEX.size + CRC.size or CRC.unpack(data[-4:])[0] != _checksum(data[:-4]):
        raise bad
    magic, version, count, stored_number = INDEX.unpack_from(data)
    if magic != INDEX_MAGIC or version > FORMAT_VERSION or stored_number != number:
        raise bad
    records: list[Record] = []
    view, at = memoryview(data)[:-4], INDEX.size
    for _ in range(count):
        if at + RECORD.size > len(view):
            raise bad
        position = RECORD.unpack_from(view, at)[-1]
        record = parse_record(view[at:], number, position)
        records.append(record)
        at += layout.table_offset(len(record.header.key.encode()))
    return records


def pack_graves(graves: Sequence[Grave]) -> bytes:
    """Return entries for the list of removals."""
    entries = [GRAVE.pack(*grave) for grave in graves]
    return b"".join(entry + CRC.pack(_checksum(entry)) for entry in entries)


def parse_graves(data: bytes) -> list[Grave]:
    """Read the list of removals; what is torn is left out."""
    graves: list[Grave] = []
    step = GRAVE.size + CRC.size
    for at in range(0, len(data) - step + 1, step):
        entry = data[at : at + GRAVE.size]
        if CRC.unpack_from(data, at + GRAVE.size)[0] == _checksum(entry):
            graves.append(Grave(*GRAVE.unpack(entry)))
    return graves

"""The codec of everything that a store reads back from files: file heads, object headers,
tombstones, roster lines.

``FORMAT`` is the version of docs/design/store/store_formats.md. All is covered by a CRC-32C that
is checked before any field is read, so that a flipped bit is never taken for a size, an epoch or a
later version. Pure: opens no file.
"""

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tandem._native import crc32c, pack_header, parse_header
from tandem.core.errors import CorruptionError, UnsupportedError
from tandem.store.formats.layout import VERSION_BITS

__all__ = [
    "COPIES_AT",
    "FORMAT",
    "HEAD_BYTES",
    "MAX_EPOCH",
    "ExtentHeader",
    "Head",
    "RecordTombstone",
    "checksum_bytes",
    "pack_head",
    "pack_line",
    "pack_object",
    "pack_tombstones",
    "parse_head",
    "parse_lines",
    "parse_object",
    "parse_tombstones",
]

FORMAT = 2
HEAD_BYTES = 4096
"""Bytes of a file's head, both copies and padding included."""
COPIES_AT = (0, 2048)
"""Offsets of the two copies of a file's head. A process that dies while writing one copy leaves the
other whole.
"""
HEAD = struct.Struct("<8sII")  # magic, format, bytes of the fields
TOMBSTONE = struct.Struct("<QQ")  # version, bucket
TOMBSTONE_COPIES = 2
LINE_COPIES = 2
CRC = struct.Struct("<I")
MAX_EPOCH = 2 ** (63 - VERSION_BITS) - 1
"""The largest epoch that fits in an object's version."""


def checksum_bytes(*parts: bytes) -> int:
    """Return the CRC-32C of the concatenated parts."""
    crc = 0
    for part in parts:
        if part:
            crc = crc32c(np.frombuffer(part, dtype=np.uint8), crc)
    return crc


# The functions below read and write the heads of files.


class Head(NamedTuple):
    """The head of a file, as parsed from its two copies."""

    copies: list[bytes]
    """The fields of each copy whose checksum is right, at least one. Two copies differ if a process
    died between writing them.
    """
    is_damaged: bool
    """True if the other copy was written and its checksum is wrong."""


def pack_head(magic: bytes, fields: bytes) -> bytes:
    """Return the first ``HEAD_BYTES`` of a file: two copies of the head."""
    begin = HEAD.pack(magic, FORMAT, len(fields)) + fields
    copy = begin + CRC.pack(checksum_bytes(begin))
    first, second = COPIES_AT
    return (copy.ljust(second - first, b"\0") + copy).ljust(HEAD_BYTES, b"\0")


def parse_head(data: bytes, magic: bytes, num_bytes: int, what: str) -> Head:
    """Read the head of a file.

    Args:
        data: the file, or its beginning.
        magic: first bytes of files of this kind.
        num_bytes: length of the head's fields.
        what: name of the file, for errors.

    Raises: CorruptionError if both copies are corrupt, or the file is of another kind;
        UnsupportedError (a later version).
    """
    copies: list[bytes] = []
    num_unwritten = 0
    for at in COPIES_AT:
        begin = data[at : at + HEAD.size]
        if not begin.strip(b"\0"):
            num_unwritten += 1
            continue
        fields = _parse_copy(data, at, magic, num_bytes, what)
        if fields is not None:
            copies.append(fields)
    if not copies:
        raise CorruptionError("store.head", f"the head of {what} is damaged, or not its own")
    return Head(copies, len(copies) + num_unwritten < len(COPIES_AT))


def _parse_copy(data: bytes, at: int, magic: bytes, num_bytes: int, what: str) -> bytes | None:
    if len(data) < at + HEAD.size + CRC.size:
        return None
    found, version, length = HEAD.unpack_from(data, at)
    end = at + HEAD.size + length
    if end + CRC.size > min(len(data), at + COPIES_AT[1]):
        return None
    # Check the CRC before the version, in this format and all later ones: else a flipped bit in the
    # version would pass for a later format.
    if CRC.unpack_from(data, end)[0] != checksum_bytes(data[at:end]) or found != magic:
        return None
    if version > FORMAT:
        raise _describe_later(version, what)
    return data[at + HEAD.size : end] if (version, length) == (FORMAT, num_bytes) else None


# The functions below read and write the headers of objects.


class ExtentHeader(NamedTuple):
    """The fields of the header that is stored in front of an object in memory and on disks."""

    key: str
    size: int
    version: int
    checksum: int
    wanted: int
    hard_pin: bool
    soft_pin_ms: int


def pack_object(header: ExtentHeader, home: int, position: int) -> bytes:
    """Return an object's header and key as they are stored.

    Args:
        header: the fields of the header.
        home: number of the bucket, or of the segment, that the bytes are written to.
        position: offset in that bucket or segment, bytes.
    """
    return pack_header(*header, home, position)


def parse_object(memory: Any, at: int, home: int, position: int) -> ExtentHeader | None:
    """Read the object header at ``at`` in ``memory``; None if it is corrupt or belongs elsewhere.

    ``home`` and ``position`` are those given to ``pack_object``.
    """
    fields = parse_header(memory, at, home, position)
    return None if fields is None else ExtentHeader(*fields)


# The functions below read and write the tombstone file of a disk.


class RecordTombstone(NamedTuple):
    """A durable note that the record of this version (an object on a disk) in this bucket (file) is
    dead.
    """

    version: int
    bucket: int


def pack_tombstones(tombstones: Sequence[RecordTombstone]) -> bytes:
    """Return the bytes to append to a disk's file of tombstones (notes of dead objects), each entry
    twice, so that one corrupt copy loses none.
    """
    entries = [TOMBSTONE.pack(*tombstone) for tombstone in tombstones]
    return b"".join(
        (entry + CRC.pack(checksum_bytes(entry))) * TOMBSTONE_COPIES for entry in entries
    )


def parse_tombstones(data: bytes) -> tuple[list[RecordTombstone], int]:
    """Read a disk's file of tombstones (notes of dead objects). Return them and the number of
    corrupt copies.

    An incomplete entry at the end is ignored: the removal was never acknowledged.
    """
    tombstones: dict[RecordTombstone, None] = {}
    num_damaged = 0
    step = TOMBSTONE.size + CRC.size
    for at in range(0, len(data) - step + 1, step):
        entry = data[at : at + TOMBSTONE.size]
        if CRC.unpack_from(data, at + TOMBSTONE.size)[0] == checksum_bytes(entry):
            tombstones[RecordTombstone(*TOMBSTONE.unpack(entry))] = None
        else:
            num_damaged += 1
    return list(tombstones), num_damaged


# The functions below read and write the lines of roster files.


def pack_line(body: bytes) -> bytes:
    """Return a JSON body, which contains no line breaks, as two identical lines, as the files of
    the roster (the list of hosts) have them.
    """
    text = b"%d %s" % (FORMAT, body)
    return b"\n%08x %s\n" % (checksum_bytes(text), text) * LINE_COPIES


def parse_lines(data: bytes, what: str) -> tuple[list[bytes], int]:
    """Read a file of lines. Return each distinct body once, and the number of corrupt copies.

    An incomplete last line is ignored: its writing was never acknowledged.

    Raises: UnsupportedError (a later version); ``what`` names the file.
    """
    bodies: dict[bytes, None] = {}
    num_damaged = 0
    *lines, torn = data.split(b"\n")
    for line in [*filter(None, lines), *([torn] if torn else [])]:
        body = _parse_line(line, what)
        if body is not None:
            bodies[body] = None
        elif line is not torn:
            num_damaged += 1
    return list(bodies), num_damaged


def _parse_line(line: bytes, what: str) -> bytes | None:
    crc, _, text = line.partition(b" ")
    if crc != b"%08x" % checksum_bytes(text):
        return None
    version, _, body = text.partition(b" ")
    if not version.isdigit() or int(version) < FORMAT:
        return None
    if int(version) > FORMAT:
        raise _describe_later(int(version), what)
    return body


def _describe_later(version: int, what: str) -> UnsupportedError:
    return UnsupportedError("store.head", f"{what} has format {version}, this build knows {FORMAT}")

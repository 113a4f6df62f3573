"""Reading of disk records into the host's memory, with verification, and reading of all buckets at
a start.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tandem._native import crc32c
from tandem.core.errors import CorruptionError
from tandem.store.corruption_log import CorruptionLog
from tandem.store.formats import bucket as form
from tandem.store.formats import layout
from tandem.store.formats.bucket import Record
from tandem.store.formats.headers import ExtentHeader
from tandem.store.host.disk_io import (
    OFF_LOOP_BYTES,
    PIECE_BYTES,
    DiskBuffer,
    DiskIo,
    DiskPort,
    copy_bytes,
)
from tandem.store.host.segment import HostSegment

__all__ = ["check_value", "index_name", "read_buckets", "read_record"]


async def read_record(io: DiskIo, record: Record, segment: HostSegment, offset: int) -> None:
    """Read a record (an object on the disk) into the extent at ``offset`` in the host's memory.

    Raises: CorruptionError if another record lies there.
    """
    key_bytes = len(record.header.key.encode())
    table_at = layout.table_offset(key_bytes)
    end = layout.value_offset(key_bytes, record.header.size) + record.header.size
    buffer = await io.take_buffer()
    try:
        for at in range(0, record.length, PIECE_BYTES):
            nbytes = min(PIECE_BYTES, record.length - at)
            reading = io.port.read(record.bucket, record.position + at, buffer, nbytes)
            await io.bounded(reading, buffer)
            if at == 0:
                head = bytes(buffer.array[:table_at])
                if form.parse_record(head, record.bucket, record.position) != record:
                    raise CorruptionError("store.load", "another record lies there")
            first, last = max(at, table_at), min(at + nbytes, end)
            if first < last:
                target = segment.data[offset + first : offset + last]
                await copy_bytes(target, buffer.array[first - at : last - at])
    finally:
        io.give_buffer(buffer)


async def check_value(segment: HostSegment, offset: int, header: ExtentHeader) -> bool:
    """Return True if the checksum table and the value in the segment match the header's
    checksum.
    """
    if header.size > OFF_LOOP_BYTES:
        return await asyncio.to_thread(segment.is_intact, offset, header)
    return segment.is_intact(offset, header)


# The functions below read the bucket files when a tier starts.


def index_name(number: int) -> str:
    """Return the name of the small file that lists the objects of a bucket file."""
    return f"{number:016x}.index"


class _Window:
    """A sliding window over a bucket file: one piece of it is in memory, and another is read when
    the position leaves it.
    """

    def __init__(self, port: DiskPort, number: int, nbytes: int, buffer: DiskBuffer) -> None:
        self.number, self.nbytes = number, nbytes
        self._port, self._buffer = port, buffer
        self._begin = self._end = 0

    async def view(self, at: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return a view of bytes of the bucket, fewer than ``PIECE_BYTES``."""
        if at < self._begin or at + nbytes > self._end:
            self._begin = at // form.ALIGNMENT * form.ALIGNMENT
            length = min(PIECE_BYTES, self.nbytes - self._begin)
            self._end = self._begin  # In case the read fails.
            await self._port.read(self.number, self._begin, self._buffer, length)
            self._end = self._begin + length
        return self._buffer.array[at - self._begin : at - self._begin + nbytes]

    async def copy(self, at: int, target: npt.NDArray[np.uint8]) -> None:
        """Copy bytes of the bucket to ``target``."""
        step = PIECE_BYTES // 2
        for begin in range(0, target.size, step):
            part = target[begin : begin + step]
            part[:] = await self.view(at + begin, part.size)


class ReadBucket(NamedTuple):
    """The result of reading a bucket file: the records (objects) that were found in it."""

    records: list[Record]
    end: int
    """Offset behind the last record."""
    has_index: bool
    """True if the bucket's index file is intact and need not be written."""


async def _read_bucket(
    io: DiskIo, number: int, nbytes: int, corruption: CorruptionLog
) -> ReadBucket | None:
    """Return the records (objects) of the bucket file with this number and length. Corrupt parts
    are added to ``corruption``.

    Returns: None if nothing was ever written to the bucket.

    Raises: CorruptionError if the bucket has no valid head; UnsupportedError (version).
    """
    buffer = await io.take_buffer()
    try:
        if nbytes < form.HEAD_BYTES:
            raise CorruptionError("store.disk", f"bucket {number} has {nbytes} bytes")
        await io.port.read(number, 0, buffer, form.HEAD_BYTES)
        head = bytes(buffer.array[: form.HEAD_BYTES])
        if not head.strip(b"\0"):
            return None
        if form.parse_bucket_head(head, number, io.port.folder_id):
            corruption.note(f"head of bucket {number}", "a copy of it; the other holds together")
        data = await io.port.read_note(index_name(number))
        if data:
            try:
                records = form.parse_index(data, number)
            except CorruptionError as error:
                corruption.note(f"index of bucket {number}", f"{error}: the bucket is read instead")
            else:
                ends = [record.position + record.length for record in records]
                end = max(ends, default=form.HEAD_BYTES)
                if end <= nbytes:
                    return ReadBucket(records, end, has_index=True)
        return await _scan_bucket(_Window(io.port, number, nbytes, buffer), corruption)
    finally:
        io.give_buffer(buffer)


async def _scan_bucket(window: _Window, corruption: CorruptionLog) -> ReadBucket:
    """Read a bucket file from front to end, without its index file, and verify each value. A
    corrupt header ends the scan; a record with a corrupt value is skipped.
    """
    records: list[Record] = []
    position = form.HEAD_BYTES
    number, nbytes = window.number, window.nbytes
    while position + form.ALIGNMENT <= nbytes:
        head = await window.view(position, min(2**16 + 2**12, nbytes - position))
        try:
            record = form.parse_record(bytes(head), number, position)
            if position + record.length > nbytes:
                break
            if await _is_whole(record, window):
                records.append(record)
            else:
                corruption.note(f"record at {position} of bucket {number}", "its value")
        except CorruptionError as error:
            if head[: layout.HEADER_BYTES].any():  # Else nothing has been written there.
                corruption.note(f"record at {position} of bucket {number}", error)
            break
        position += record.length
    return ReadBucket(records, position, has_index=False)


async def _is_whole(record: Record, window: _Window) -> bool:
    header = record.header
    key_bytes = len(header.key.encode())
    table_at = record.position + layout.table_offset(key_bytes)
    num_chunks = layout.count_chunks(header.size)
    table = np.empty(4 * num_chunks, np.uint8)
    await window.copy(table_at, table)
    if num_chunks and crc32c(table) != header.checksum:
        return False
    value_at = record.position + layout.value_offset(key_bytes, header.size)
    expected = table.view("<u4")
    for i in range(num_chunks):
        at = i * layout.CHUNK_BYTES
        chunk = np.empty(min(layout.CHUNK_BYTES, header.size - at), np.uint8)
        await window.copy(value_at + at, chunk)
        if crc32c(chunk) != int(expected[i]):
            return False
    return True


async def read_buckets(
    io: DiskIo, corruption: CorruptionLog
) -> AsyncIterator[tuple[int, int, ReadBucket | None]]:
    """Yield number, bytes and contents of each bucket file, by number.

    The contents are None for a corrupt bucket, which is quarantined, and for an empty one, which is
    removed.
    """
    for number, nbytes in sorted(await io.port.list_buckets()):
        try:
            found = await _read_bucket(io, number, nbytes, corruption)
        except CorruptionError as error:
            corruption.note(f"bucket {number}", error)
            # Remove the index file before the corrupt bucket (file of objects) is moved away, in
            # the order in which ``DiskTier`` removes both.
            await io.port.drop_note(index_name(number))
            await io.port.quarantine_bucket(number)
            found = None
        else:
            if found is None:  # Its writer died at that point.
                await io.port.drop_note(index_name(number))
                await io.port.drop_bucket(number)
        yield number, nbytes, found

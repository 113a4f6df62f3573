"""Reading of disk records into the host's memory, with verification, and reading of all buckets at
a start.
"""

import asyncio
from collections.abc import AsyncIterator

from tandem.core.errors import CorruptionError
from tandem.store.corruption_log import CorruptionLog
from tandem.store.formats import bucket as form
from tandem.store.formats import layout
from tandem.store.formats.bucket import Record
from tandem.store.formats.headers import ExtentHeader
from tandem.store.host.disk_io import OFF_LOOP_BYTES, PIECE_BYTES, DiskIo, copy_bytes
from tandem.store.host.disk_scan import ReadBucket, index_name, read_bucket
from tandem.store.host.segment import HostSegment

__all__ = ["RecordReader", "read_buckets"]


class RecordReader:
    """A reader of records (objects on a disk) from one disk into one segment (the host's memory),
    both borrowed.
    """

    def __init__(self, io: DiskIo, segment: HostSegment) -> None:
        self._io = io
        self._segment = segment

    async def read(self, record: Record, offset: int) -> None:
        """Read a record (an object on the disk) into the extent at ``offset`` in the host's memory.
        Raises: CorruptionError if another record lies there.
        """
        key_bytes = len(record.header.key.encode())
        table_at = layout.table_offset(key_bytes)
        end = layout.value_offset(key_bytes, record.header.size) + record.header.size
        buffer = await self._io.take_buffer()
        try:
            for at in range(0, record.length, PIECE_BYTES):
                nbytes = min(PIECE_BYTES, record.length - at)
                reading = self._io.port.read(record.bucket, record.position + at, buffer, nbytes)
                await self._io.bounded(reading, buffer)
                if at == 0:
                    head = bytes(buffer.array[:table_at])
                    if form.parse_record(head, record.bucket, record.position) != record:
                        raise CorruptionError("store.load", "another record lies there")
                first, last = max(at, table_at), min(at + nbytes, end)
                if first < last:
                    target = self._segment.data[offset + first : offset + last]
                    await copy_bytes(target, buffer.array[first - at : last - at])
        finally:
            self._io.give_buffer(buffer)

    async def check(self, offset: int, header: ExtentHeader) -> bool:
        """Return True if the checksum table and the value in the segment match the header's
        checksum.
        """
        if header.size > OFF_LOOP_BYTES:
            return await asyncio.to_thread(self._segment.is_intact, offset, header)
        return self._segment.is_intact(offset, header)


async def read_buckets(
    io: DiskIo, corruption: CorruptionLog
) -> AsyncIterator[tuple[int, int, ReadBucket | None]]:
    """Yield number, bytes and contents of each bucket file, by number.

    The contents are None for a corrupt bucket, which is quarantined, and for an empty one, which is
    removed.
    """
    for number, nbytes in sorted(await io.port.list_buckets()):
        try:
            found = await read_bucket(io, number, nbytes, corruption)
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

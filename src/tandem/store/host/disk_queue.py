"""The queue of objects that wait to be written from a host's memory to its disk, and the scan that
fills it.
"""

import asyncio
from collections import OrderedDict

from tandem.core.clock import Clock
from tandem.core.errors import CorruptionError
from tandem.store.formats.headers import ExtentHeader
from tandem.store.host.disk_index import DiskIndex
from tandem.store.host.segment import HostSegment

__all__ = ["WriteQueue"]

MAX_QUEUED = 200_000
"""Limit of queued objects, some 40 bytes each. A scan finds further objects later."""
SCAN_PERIOD_S = 10.0
SCAN_SLICE = 500


class WriteQueue:
    """The queue of objects to write to the disk.

    Args:
        segment: the host's memory; borrowed.
        clock: times the pauses between scans.
    """

    def __init__(self, segment: HostSegment, clock: Clock) -> None:
        self.versions: OrderedDict[int, int] = OrderedDict()
        """Versions of queued objects by offset in the segment, oldest first."""
        self.is_behind = True
        """True if memory may have objects that are neither queued nor on the disk."""
        self.has_work = asyncio.Event()
        self._segment = segment
        self._clock = clock
        self._scanned_s = -SCAN_PERIOD_S

    def __len__(self) -> int:
        return len(self.versions)

    def add(self, offset: int, version: int) -> None:
        """Queue an object to be written. If the queue is full, a later scan finds the object."""
        if len(self.versions) >= MAX_QUEUED:
            self.is_behind = True
            return
        self.versions[offset] = version
        self.has_work.set()

    def put_back(self, offset: int, version: int) -> None:
        """Queue an object again that was taken from the queue and could not be written to the
        disk.
        """
        self.versions.setdefault(offset, version)

    async def wait(self) -> None:
        """Wait until there may be objects to write, or a scan of memory for unwritten objects is
        due.
        """
        if self.versions:
            return
        left_s = self._scanned_s + SCAN_PERIOD_S - self._clock.now_s()
        if not self.is_behind:
            await self.has_work.wait()
        elif left_s > 0:
            try:
                # Wait at least 10 ms: a shorter wait may be below the clock's resolution, and would
                # return before the scan is due.
                async with asyncio.timeout(max(left_s, 0.01)):
                    await self.has_work.wait()
            except TimeoutError:
                return

    async def scan(self, index: DiskIndex, offsets: dict[str, int]) -> None:
        """Queue the objects in memory that are not on the disk, at most once in ``SCAN_PERIOD_S``.

        Args:
            index: the disk's index.
            offsets: is given the offset in memory, by key, of the objects that are also on the
                disk.
        """
        # Compute the time left by the same sum as ``wait`` does: another formula may round
        # differently, and the loop would never end.
        if self._scanned_s + SCAN_PERIOD_S - self._clock.now_s() > 0:
            return
        self._scanned_s = self._clock.now_s()
        self.is_behind = False
        # ``HostSegment.scan`` is not used, since it repairs marks, while this loop runs between
        # seals and wipes.
        for count, offset in enumerate(self._segment.list_offsets()):
            if count % SCAN_SLICE == 0:
                await asyncio.sleep(0)
            header = self._read(offset)
            if header is None:
                continue
            record = index.find(header.key)
            if record is None or record.header.version < header.version:
                self.add(offset, header.version)
            elif record.header.version == header.version:
                offsets[header.key] = offset

    def find(self, offset: int, version: int, index: DiskIndex) -> ExtentHeader | None:
        """Return the header at ``offset`` if it has this version and the disk does not have
        it yet.
        """
        header = self._read(offset)
        if header is None or header.version != version:
            return None
        record = index.find(header.key)
        return None if record is not None and record.header.version >= version else header

    def _read(self, offset: int) -> ExtentHeader | None:
        if not self._segment.has_object(offset):
            return None
        try:
            return self._segment.read_header(offset)
        except CorruptionError:
            return None

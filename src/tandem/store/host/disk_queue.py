"""Objects in a host's memory that wait to be written to its disk, and the scan that finds them."""

import asyncio
from collections import OrderedDict

from tandem.core.clock import Clock
from tandem.core.errors import CorruptionError
from tandem.store.formats.headers import ExtentHeader
from tandem.store.host.disk_index import DiskIndex
from tandem.store.host.segment import HostSegment

__all__ = ["WriteQueue"]

MAX_QUEUED = 200_000
"""Objects waiting to be written, some 40 bytes each; beyond it a scan finds them later."""
SCAN_PERIOD_S = 10.0
SCAN_SLICE = 500


class WriteQueue:
    """The queue of objects to write to the disk.

    Args:
        segment: the host's memory; borrowed.
        clock: of the pauses between scans.
    """

    def __init__(self, segment: HostSegment, clock: Clock) -> None:
        self.versions: OrderedDict[int, int] = OrderedDict()
        """By offset, oldest first: sealed, to be written."""
        self.is_behind = True
        """There may be objects in memory that are neither queued nor written."""
        self.has_work = asyncio.Event()
        self._segment = segment
        self._clock = clock
        self._scanned_s = -SCAN_PERIOD_S

    def __len__(self) -> int:
        return len(self.versions)

    def add(self, offset: int, version: int) -> None:
        """Queue an object to be written; if too many are, a scan will find it."""
        if len(self.versions) >= MAX_QUEUED:
            self.is_behind = True
            return
        self.versions[offset] = version
        self.has_work.set()

    def put_back(self, offset: int, version: int) -> None:
        """Note that it was taken and not written."""
        self.versions.setdefault(offset, version)

    async def wait(self) -> None:
        """Wait until there may be something to do."""
        if self.versions:
            return
        left_s = self._scanned_s + SCAN_PERIOD_S - self._clock.now_s()
        if not self.is_behind:
            await self.has_work.wait()
        elif left_s > 0:
            try:
                # Not less than a clock can tell apart, or this would be asked again at once.
                async with asyncio.timeout(max(left_s, 0.01)):
                    await self.has_work.wait()
            except TimeoutError:
                return

    async def scan(self, index: DiskIndex, offsets: dict[str, int]) -> None:
        """Queue what is in memory and not on the disk, unless a scan was made not long ago.

        Args:
            index: of the disk.
            offsets: gets where objects that are on the disk lie in memory, by key.
        """
        # The very sum that was waited for: another one may round the other way, and never end.
        if self._scanned_s + SCAN_PERIOD_S - self._clock.now_s() > 0:
            return
        self._scanned_s = self._clock.now_s()
        self.is_behind = False
        # Not ``scan`` of the segment: that repairs, while this runs beside seals and wipes.
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
        """Return the header at ``offset`` if it is that of this version and is to be written."""
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

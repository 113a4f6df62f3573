"""Removal of records and of whole buckets from a host's disk, so that no restart finds them."""

import asyncio
import logging
from collections.abc import Collection, Coroutine, Iterable, Sequence
from typing import Any

from tandem.core.errors import TandemError
from tandem.store.formats.bucket import Record
from tandem.store.formats.headers import RecordTombstone, pack_tombstones, parse_tombstones
from tandem.store.host.disk_reading import index_name
from tandem.store.host.disk_state import TierState
from tandem.store.tasks import Tasks

__all__ = ["Removal"]

logger = logging.getLogger(__name__)

REMOVE_ATTEMPTS = 5
REMOVE_PAUSE_S = 0.2
COMPACT_TOMBSTONES = 100_000
TOMBSTONES = "removed"


class TombstoneList:
    """The tombstones of one disk: durable notes that a record (an object's copy there) is dead.

    Args:
        tier: the tier on that disk.
        going: buckets that the index has dropped, but whose files may still exist; borrowed.
    """

    def __init__(self, tier: TierState, going: Collection[int]) -> None:
        self.entries: list[RecordTombstone] = []
        self._tier = tier
        self._going = going
        self._lock = asyncio.Lock()
        self._num_listed = 0
        """Number of entries in the file, including those of removed buckets."""

    async def read(self) -> int:
        """Read the file of tombstones (notes of dead objects) into this list. Return the number of
        corrupt copies of entries.
        """
        self.entries, num_damaged = parse_tombstones(await self._tier.io.port.read_note(TOMBSTONES))
        return num_damaged

    async def append(self, tombstones: Sequence[RecordTombstone]) -> None:
        """Append tombstones (notes that records are dead) durably. If the disk fails, they are kept
        in memory and the error is raised.
        """
        self.entries += tombstones
        async with self._lock:
            packed = pack_tombstones(tombstones)
            await self._tier.io.bounded(self._tier.io.port.append_note(TOMBSTONES, packed))
            self._num_listed += len(tombstones)
            if self._num_listed > 2 * len(self.entries) + COMPACT_TOMBSTONES:
                await self._shorten()

    async def _shorten(self) -> None:
        """Compact the file of tombstones, which an append has made too long. The appended ones hold
        even if this fails.
        """
        try:
            await self._tier.io.bounded(self.compact())
        except TandemError as error:
            logger.warning("event=tombstones_not_compacted reason=%s", error)
            if not self._tier.is_failed:
                self._tier.counts["errors"] += 1

    async def compact(self) -> None:
        """Rewrite the file without the tombstones (notes of dead objects) whose buckets (files) no
        longer exist, and which have no effect any more.
        """
        buckets = self._tier.index.buckets
        self.entries = [e for e in self.entries if e.bucket in buckets or e.bucket in self._going]
        await self._tier.io.port.write_note(TOMBSTONES, pack_tombstones(self.entries))
        self._num_listed = len(self.entries)

    def forget_bucket(self, number: int) -> None:
        """Forget the tombstones (notes of dead records) of a bucket whose file was removed."""
        self.entries = [entry for entry in self.entries if entry.bucket != number]


class Removal:
    """The removals of records (objects on a disk) and of buckets (files of records) of one tier.

    The index no longer has what is being removed, while a restart would still find it. An order to
    forget keys therefore waits for all running removals.
    """

    def __init__(self, tier: TierState) -> None:
        self.running = Tasks()
        """Running removals of buckets and writes of tombstones."""
        self.leaving: dict[str, Record] = {}
        """Records of buckets that are being evicted. The index no longer has them, but a restart
        would find them.
        """
        self._tier = tier
        self._going: dict[int, asyncio.Event] = {}
        """An event for each bucket that is being removed while its files may exist; set when the
        removal has ended.
        """
        self.tombstones = TombstoneList(tier, self._going)

    async def bury(self, records: Iterable[Record]) -> None:
        """Write tombstones for dead records (copies of objects on the disk), so that no restart
        finds them. If the disk cannot write them, remove the buckets (files) with these records
        instead.
        """
        tombstones = [RecordTombstone(record.header.version, record.bucket) for record in records]
        if not tombstones or self._tier.is_failed:
            return
        await self._end(self._write_tombstones(tombstones))

    async def _end(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work``, a removal of records (copies of objects on the disk), to its end, even if
        its caller is cancelled.
        """
        await asyncio.shield(self.running.spawn(work))

    async def _write_tombstones(self, tombstones: Sequence[RecordTombstone]) -> None:
        try:
            await self.tombstones.append(tombstones)
        except TandemError as error:
            if self._tier.is_failed:
                return
            self._tier.counts["errors"] += 1
            logger.warning("event=tombstones_unwritten reason=%s", error)
            # The tombstones (notes of dead objects) were not written. Remove the buckets (files)
            # with these objects instead, because removing a file needs no space.
            for number in sorted({tombstone.bucket for tombstone in tombstones}):
                await self._give_up_bucket(number)
        finally:
            self._tier.queue.has_work.set()  # The bucket may have no live record left.

    async def evict(self, number: int) -> None:
        """Evict a bucket (a file of many objects). Those of its objects that are also in memory are
        in use: they are written again to another bucket if the disk is much larger than memory.
        """
        await self._end(self._evict_records(number))

    async def _evict_records(self, number: int) -> None:
        tier = self._tier
        lost = tier.index.drop_bucket(number)
        self.leaving |= {record.header.key: record for record in lost}
        ended = self._going[number] = asyncio.Event()
        # Evicted objects that are in memory are written again only if the disk is much larger than
        # memory: else the disk would do nothing but rewrite memory.
        forwards = tier.room_bytes >= 2 * tier.segment.capacity_bytes
        for record in lost:
            offset = tier.offsets.pop(record.header.key, -1)
            tier.stored.pop(record.header.key, None)
            if offset >= 0 and forwards:
                tier.queue.add(offset, record.header.version)
        tier.counts["evicted"] += len(lost)
        try:
            await self._remove_surely(number)
        except TandemError:
            self._end_eviction(lost)  # A restart ignores a disk that was given up.
            raise
        else:
            self._end_eviction(lost)
        finally:
            del self._going[number]
            ended.set()

    def _end_eviction(self, lost: Sequence[Record]) -> None:
        for record in lost:
            if self.leaving.get(record.header.key) is record:
                del self.leaving[record.header.key]
            self._tier.note_gone(record)

    async def remove_bucket(self, number: int) -> None:
        """Remove a bucket (file) that has no live record, which the caller ensures. Its bytes count
        as used until its files are gone.
        """
        await self._remove_surely(number)
        if number in self._tier.index.buckets:  # False if the bucket was given up meanwhile.
            assert not self._tier.index.drop_bucket(number), number

    async def _remove_surely(self, number: int) -> None:
        """Remove a bucket's files, or give the disk up if that fails: a restart would find records
        (objects) there that the index no longer has.
        """
        for attempt in range(1, REMOVE_ATTEMPTS + 1):
            try:
                await self._remove_files(number)
                break
            except TandemError:
                if self._tier.is_failed:
                    raise
                self._tier.counts["errors"] += 1
                if attempt == REMOVE_ATTEMPTS:
                    self._tier.fail()
                    raise
                await asyncio.sleep(REMOVE_PAUSE_S)

    async def _remove_files(self, number: int) -> None:
        # Remove the index before the bucket: a later start may reuse the bucket's number, and would
        # take a remaining index for that of the new bucket.
        await self._tier.io.bounded(self._tier.io.port.drop_note(index_name(number)))
        await self._tier.io.bounded(self._tier.io.port.drop_bucket(number))
        self._tier.forget_doubtful(number)
        self.tombstones.forget_bucket(number)

    async def _give_up_bucket(self, number: int) -> None:
        tier = self._tier
        if number in self._going:  # Another task removes it: if that fails, the disk is given up.
            await self._going[number].wait()
            return
        if number not in tier.index.buckets:
            return
        if tier.open_bucket is not None and tier.open_bucket.number == number:
            tier.open_bucket = None
        try:
            await self.evict(number)
        except TandemError:
            tier.fail()

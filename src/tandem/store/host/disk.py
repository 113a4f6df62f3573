"""A host's SSD tier: objects are written behind puts, read back into memory, and evicted by whole
buckets.

All effects go through ``DiskPort``, so that the simulator runs this same class. All calls come from
one event loop. Only the tier's own tasks wait for the disk: a disk that fails, fills up or hangs
loses copies on the disk and never fails a put. See docs/design/store/store_ssd.md.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from tandem.core.clock import Clock
from tandem.core.errors import (
    CapacityError,
    CorruptionError,
    DeadlineError,
    InternalError,
    NotFoundError,
    TandemError,
)
from tandem.store.corruption_log import CorruptionLog
from tandem.store.formats import bucket as form
from tandem.store.formats.bucket import Record
from tandem.store.formats.headers import (
    ExtentHeader,
    RecordTombstone,
)
from tandem.store.host.disk_index import Bucket, DiskIndex, choose_bucket_bytes
from tandem.store.host.disk_io import (
    DiskIo,
    DiskPort,
    RecordWriter,
)
from tandem.store.host.disk_queue import WriteQueue
from tandem.store.host.disk_reading import RecordReader, read_buckets
from tandem.store.host.disk_scan import index_name
from tandem.store.host.disk_tombstones import TombstoneList
from tandem.store.host.segment import HostSegment
from tandem.store.messages import DiskState, DiskStatus
from tandem.store.metrics import LatencyHistogram
from tandem.store.tasks import Tasks

__all__ = ["DiskTier"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

ROUND_BYTES = 32 * 2**20
"""Bytes that are written between two syncs. A record counts as a copy only after the sync."""
FULL_PAUSE_S = 2.0
ROOM_LOOK_S = 30.0
"""Seconds for which the size of a full file system is remembered before the tier tries to grow
again.
"""
MAX_PAUSE_S = 60.0
REMOVE_ATTEMPTS = 5
REMOVE_PAUSE_S = 0.2
COUNTS = (
    "written", "written_bytes", "loaded", "loaded_bytes", "skipped", "evicted", "corrupt", "errors",
)  # fmt: skip


class DiskTier:
    """The objects of a host on its disk.

    Args:
        port: the disk's files; the caller closes it last.
        segment: the host's memory.
        capacity_bytes: limit for all bucket files together.
        clock: measures pauses and latencies.
        on_change: called when there are changes to report to the master.
        corruption: the log of corrupt files to extend; None for a new log.
    """

    def __init__(
        self,
        port: DiskPort,
        segment: HostSegment,
        *,
        capacity_bytes: int,
        clock: Clock,
        on_change: Callable[[], None] = lambda: None,
        corruption: CorruptionLog | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.state = DiskState.ACTIVE
        self.on_change = on_change
        self.index = DiskIndex()
        self.stored: dict[str, int] = {}
        """Version by key of the records written since the last report to the master."""
        self.dropped: dict[str, int] = {}
        """Version by key of the records removed since the last report to the master."""
        self.counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
        self.corruption = CorruptionLog() if corruption is None else corruption
        """Files and records that were found corrupt since the folder was opened."""
        self.write_latency = LatencyHistogram()
        self.load_latency = LatencyHistogram()
        self._bucket_bytes = choose_bucket_bytes(capacity_bytes)
        self._room_bytes = capacity_bytes
        """Bytes that the file system had room for when it last refused a bucket."""
        self._room_known_s = 0.0
        self._io = DiskIo(port, self._fail)
        self._segment = segment
        self._clock = clock
        self._tombstones = TombstoneList(
            self._io,
            lambda tombstones: self.index.keep_tombstones(tombstones, self._going),
            self._note_uncompacted,
        )
        self._ending = Tasks()
        """Running removals of buckets and writes of tombstones. An order to forget waits for
        them.
        """
        self._going: dict[int, asyncio.Event] = {}
        """An event for each bucket that is being removed while its files may exist; set when the
        removal has ended.
        """
        self._leaving: dict[str, Record] = {}
        """Records of buckets that are being evicted. The index no longer has them, but a restart
        would find them.
        """
        self._next_number = 1
        self._open: Bucket | None = None
        self._queue = WriteQueue(segment, clock)
        self._reader = RecordReader(self._io, segment)
        self._offsets: dict[str, int] = {}
        """Offset in memory, by key, of the objects that are also on the disk."""
        self._flight: dict[str, Record] = {}
        """Records of the current write round, by key: being written, or written and not yet in the
        index.
        """
        self._doubtful: dict[str, Record] = {}
        """Records of failed write rounds, by key. They may be on the disk, where the next start
        would find them.
        """
        self._round_ended = asyncio.Event()
        self._round_ended.set()
        self._pause_s = 0.0
        self._running: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Read the bucket files, each of which has many records (copies of objects). Records whose
        writing was cut short are skipped, corrupt buckets moved aside.

        Raises: UnsupportedError if a later version of the software wrote the folder; InternalError
            if the folder cannot be read.
        """
        num_damaged = await self._tombstones.read()
        if num_damaged:
            self.corruption.note("list of removals", f"{num_damaged} copies of entries")
        dead = set(self._tombstones.entries)
        async for number, nbytes, found in read_buckets(self._io, self.corruption):
            self._next_number = max(self._next_number, number + 1)
            if found is None:
                continue
            self.index.add_bucket(number, nbytes)
            for record in found.records:
                if RecordTombstone(record.header.version, number) not in dead:
                    older = self.index.add(record)
                    if older is not None:
                        tombstone = RecordTombstone(older.header.version, older.bucket)
                        self._tombstones.entries.append(tombstone)
            if not found.has_index or found.end < nbytes:
                await self._seal(self.index.buckets[number], found.end)
        for number in self.index.pick_dead(-1):
            await self._remove_bucket(number)
        await self._tombstones.compact()
        while self.index.file_bytes > self.capacity_bytes:
            victim = self.index.pick_victim(-1)
            assert victim is not None
            await self._evict(victim)
        self.stored.clear()
        self.dropped.clear()
        num_buckets, nbytes = len(self.index.buckets), self.index.file_bytes
        logger.info("event=disk_opened buckets=%d file_bytes=%d", num_buckets, nbytes)

    def start(self) -> None:
        """Start the task that writes new objects to the disk."""
        self._running = asyncio.get_running_loop().create_task(self._run())

    async def aclose(self) -> None:
        """Stop the writing task. Objects that are not written yet stay in memory only."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._io.aclose()
        await self._ending.aclose()  # After the disk operations, since these tasks wait for them.

    def status(self) -> DiskStatus:
        """Return the status of this SSD tier, for the host's report to the master."""
        return DiskStatus(
            state=self.state,
            capacity_bytes=self.capacity_bytes,
            used_bytes=self.index.file_bytes,
            live_bytes=self.index.live_bytes,
            num_objects=len(self.index),
            num_queued=len(self._queue) + max(len(self._flight), not self._round_ended.is_set()),
            counts=dict(self.counts),
            damaged=list(self.corruption.names),
            write_counts=list(self.write_latency.counts),
            write_sum_s=self.write_latency.sum_s,
            load_counts=list(self.load_latency.counts),
            load_sum_s=self.load_latency.sum_s,
        )

    @property
    def disk_id(self) -> str:
        """Id of the disk's folder, unchanged by restarts, hexadecimal."""
        return self._io.port.folder_id.hex()

    @property
    def is_failed(self) -> bool:
        """True if the disk has been given up until the host restarts."""
        return self.state is DiskState.FAILED

    # The host calls the methods below when an object is sealed, loaded, wiped or forgotten.

    def on_sealed(self, offset: int, header: ExtentHeader) -> None:
        """Queue an object that has become complete in memory, to be written to the disk."""
        if not self.is_failed:
            self._queue.add(offset, header.version)

    def on_loaded(self, offset: int, header: ExtentHeader) -> None:
        """Note that an object was loaded from the disk into memory, so that it need not be written
        again.
        """
        record = self.index.find(header.key)
        if record is not None and record.header.version == header.version:
            self._offsets[header.key] = offset

    def on_wiped(self, offset: int, key: str) -> None:
        """Note that the object of ``key`` at ``offset`` was wiped (removed) from memory. Its copy
        on the disk stays.
        """
        self._queue.versions.pop(offset, None)
        if self._offsets.get(key) == offset:
            del self._offsets[key]

    def take_changes(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the objects that were written to the disk, and those that were lost from it, since
        the last call: for both, version by key.
        """
        changes = self.stored, self.dropped
        self.stored, self.dropped = {}, {}
        return changes

    def list_records(self) -> list[Record]:
        """Return the records (copies of objects on the disk) that a restart would find, without
        those that the master had forgotten.
        """
        leaving = [r for key, r in self._leaving.items() if self.index.find(key) is None]
        return [*self.index.list_records(), *leaving]

    async def load(self, header: ExtentHeader, offset: int) -> None:
        """Read an object from the disk into its extent in the segment, and verify its checksum.

        Raises: NotFoundError if the disk does not have this version; CorruptionError if the record
            is corrupt or unreadable, after which the tier forgets it.
        """
        record = self.index.find_same(header)
        if record is None and (ending := self._ending.list_running()):
            # The object may be in a bucket (a file of many objects) that is being removed. Wait for
            # the end of that before reporting the object as lost: until then a restart would find
            # it.
            await asyncio.wait(ending)
            record = self.index.find_same(header)
        if record is None or self.is_failed:
            raise NotFoundError("store.load", f"{header.key!r} is not on this disk")
        begin_s = self._clock.now_s()
        self.index.touch(record.bucket)
        try:
            await self._reader.read(record, offset)
            is_good = await self._reader.check(offset, record.header)
        except (DeadlineError, NotFoundError):
            raise  # The disk hangs, or the bucket was evicted meanwhile.
        except TandemError as error:
            self.counts["errors"] += 1
            logger.warning("event=record_unreadable key=%s reason=%s", header.key, error)
            is_good = False
        if not is_good:
            self.counts["corrupt"] += 1
            self.corruption.note(
                f"record at {record.position} of bucket {record.bucket}", f"key {header.key!r}"
            )
            await self._forget_record(record)
            raise CorruptionError("store.load", f"{header.key!r} is damaged on the disk")
        self.load_latency.observe(self._clock.now_s() - begin_s)
        self.counts["loaded"] += 1
        self.counts["loaded_bytes"] += header.size

    async def _forget_record(self, record: Record) -> None:
        if self.index.is_live(record):
            self.index.remove(record.header.key, record.header.version)
            await self._bury([record])
            self._note_gone(record)

    async def forget(self, keys: Sequence[str], versions: Sequence[int]) -> None:
        """Forget the disk's copies of objects, of each key up to its version. On return no restart
        finds them again.
        """
        if self.is_failed:
            return
        for key, version in zip(keys, versions, strict=True):
            flying = self._flight.get(key)
            if flying is not None and flying.header.version <= version:
                await self._round_ended.wait()
        gone: list[Record] = []
        for key, version in zip(keys, versions, strict=True):
            record = self.index.remove(key, version)
            if record is not None:
                gone.append(record)
                self._offsets.pop(key, None)
                self.stored.pop(key, None)
            record = self._doubtful.get(key)
            if record is not None and record.header.version <= version:
                gone.append(self._doubtful.pop(key))
        # A key that is not found may be part of a removal that still runs, such as an earlier order
        # whose answer came too late. Wait for these removals as well.
        earlier = self._ending.list_running()
        await self._bury(gone)
        if earlier:
            await asyncio.wait(earlier)

    async def _bury(self, records: Iterable[Record]) -> None:
        """Write tombstones for dead records (copies of objects on the disk), so that no restart
        finds them. If the disk cannot write them, remove the buckets (files) with these records
        instead.
        """
        tombstones = [RecordTombstone(record.header.version, record.bucket) for record in records]
        if not tombstones or self.is_failed:
            return
        await self._end(self._write_tombstones(tombstones))

    async def _end(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work``, a removal of records (copies of objects on the disk), to its end, even if
        its caller is cancelled.

        The index no longer has the records, while a restart would still find them. An order to
        forget keys therefore waits for all such work.
        """
        await asyncio.shield(self._ending.spawn(work))

    async def _write_tombstones(self, tombstones: Sequence[RecordTombstone]) -> None:
        try:
            await self._tombstones.append(tombstones)
        except TandemError as error:
            if self.is_failed:
                return
            self.counts["errors"] += 1
            logger.warning("event=tombstones_unwritten reason=%s", error)
            # The tombstones (notes of dead objects) were not written. Remove the buckets (files)
            # with these objects instead, because removing a file needs no space.
            for number in sorted({tombstone.bucket for tombstone in tombstones}):
                await self._give_up_bucket(number)
        finally:
            self._queue.has_work.set()  # The bucket may have no live record left.

    def _note_uncompacted(self) -> None:
        if not self.is_failed:
            self.counts["errors"] += 1

    def _note_gone(self, record: Record) -> None:
        """Report a record (an object's copy on the disk) to the master as lost, unless a newer copy
        has been written.
        """
        if self.index.find(record.header.key) is None:
            self.stored.pop(record.header.key, None)
            self._offsets.pop(record.header.key, None)
            self.dropped[record.header.key] = record.header.version
            self.on_change()

    # The methods below write objects from memory to the disk in the background.

    async def _run(self) -> None:
        while not self.is_failed:
            await self._queue.wait()
            if self.is_failed:
                return
            self._queue.has_work.clear()
            try:
                for number in self.index.pick_dead(-1 if self._open is None else self._open.number):
                    await self._remove_bucket(number)
                if self._queue.is_behind and not self._queue:
                    await self._queue.scan(self.index, self._offsets)
                if self._queue:
                    await self._write_round()
                    has_room = self._room_bytes >= self.capacity_bytes
                    self._set_state(DiskState.ACTIVE if has_room else DiskState.FULL)
                self._pause_s = 0.0
            except CapacityError as error:
                self._set_state(DiskState.FULL, error)
                self._pause_s = FULL_PAUSE_S
            except TandemError as error:
                if self.is_failed:
                    return
                self.counts["errors"] += 1
                self._set_state(DiskState.FAILING, error)
                self._pause_s = min(max(1.0, 2 * self._pause_s), MAX_PAUSE_S)
            if self._pause_s:
                self._queue.is_behind = True  # A scan finds the objects of the failed round again.
                await asyncio.sleep(self._pause_s)
                self._queue.has_work.set()

    def _set_state(self, state: DiskState, error: TandemError | None = None) -> None:
        if state is not self.state:
            self.state = state
            level = logging.INFO if error is None else logging.WARNING
            logger.log(level, "event=disk_state state=%s reason=%s", state.value, error)
            self.on_change()

    async def _write_round(self) -> None:
        """Write queued objects, ``ROUND_BYTES`` at most, to the disk, then sync. They count as
        copies only after the sync.
        """
        self._round_ended.clear()
        begin_s = self._clock.now_s()
        writer = self._write_to(self._open)
        taken: tuple[int, int] | None = None
        try:
            while self._queue and writer.num_bytes < ROUND_BYTES:
                taken = offset, version = self._queue.versions.popitem(last=False)
                header = self._queue.find(offset, version, self.index)
                if header is None:
                    continue
                length = form.record_bytes(len(header.key.encode()), header.size)
                if form.HEAD_BYTES + length > self.capacity_bytes:
                    self.counts["skipped"] += 1
                    continue
                if not await self._reader.check(offset, header):
                    continue  # Corrupt, or wiped meanwhile: do not write it to the disk.
                if writer.bucket is None or writer.at + length > writer.bucket.file_bytes:
                    await self._count(writer)
                    opened = await self._begin_bucket(form.HEAD_BYTES + length)
                    writer = self._write_to(opened)
                assert writer.bucket is not None
                record = Record(writer.bucket.number, writer.at, header)
                self._flight[header.key] = record
                await writer.add(record, offset)
                if self._queue.find(offset, version, self.index) is None:
                    writer.torn.append(record)  # Wiped while it was copied.
            await self._count(writer)
        except BaseException:
            # The records (objects) of a failed round of writes may be on the disk. Remember them,
            # so that ``forget`` also writes tombstones (notes that they are dead) for them.
            self._doubtful |= self._flight
            for record, place in writer.placed:
                self._queue.put_back(place, record.header.version)
            if taken is not None:
                self._queue.put_back(*taken)
            await writer.abandon()
            await self._abandon_bucket()
            raise
        finally:
            self._flight.clear()
            self._round_ended.set()
            self.write_latency.observe(self._clock.now_s() - begin_s)

    def _write_to(self, bucket: Bucket | None) -> RecordWriter:
        return RecordWriter(self._io, self._segment.data, bucket)

    async def _count(self, writer: RecordWriter) -> None:
        """Sync the records (objects) that ``writer`` has written, and add them to the index. From
        now on they count as copies.
        """
        await writer.finish()
        bucket = writer.bucket
        if not writer.placed or bucket is None:
            return
        await self._io.bounded(self._io.port.sync(bucket.number))
        if bucket.number not in self.index.buckets:
            raise InternalError("store.disk", f"bucket {bucket.number} was given up meanwhile")
        dead: list[Record] = list(writer.torn)
        for record, offset in writer.placed:
            if record in writer.torn:
                continue
            older = self.index.add(record)
            if older is not None:
                dead.append(older)
            if older is record:
                continue
            self.stored[record.header.key] = record.header.version
            self._offsets[record.header.key] = offset
            self.counts["written"] += 1
            self.counts["written_bytes"] += record.header.size
        bucket.used_bytes = max(bucket.used_bytes, writer.at)
        if dead:
            await self._bury(dead)
        # Take these records (objects) out of the round in flight only after the tombstones (notes
        # that older records are dead) are on the disk: an order to forget a key waits for its
        # record in flight, and so for the tombstones of older records of that key.
        for record, _ in writer.placed:
            self._flight.pop(record.header.key, None)
        writer.placed.clear()
        writer.torn.clear()
        self.on_change()

    async def _begin_bucket(self, least_bytes: int) -> Bucket:
        """Seal the open bucket (the file that objects are appended to) and make another, with room
        for ``least_bytes``. Evict buckets until there is space.

        Raises: CapacityError (there is no room for a bucket, even after evictions).
        """
        if self._open is not None:
            sealing, self._open = self._open, None
            await self._seal(sealing, sealing.used_bytes)
        most_bytes = self.capacity_bytes // form.ALIGNMENT * form.ALIGNMENT
        nbytes = max(min(self._bucket_bytes, most_bytes), least_bytes)
        is_stale = self._clock.now_s() - self._room_known_s > ROOM_LOOK_S
        if is_stale or not self.index.file_bytes:
            # Assume the full capacity again: other programs may have freed space, and an empty tier
            # loses nothing by trying.
            self._room_bytes = self.capacity_bytes
        while self.index.file_bytes + nbytes > self._room_bytes:
            victim = self.index.pick_victim(-1)
            if victim is None:
                raise CapacityError("store.disk", f"a bucket of {nbytes} bytes does not fit")
            await self._evict(victim)
        number = self._next_number
        self._next_number += 1
        try:
            await self._io.bounded(self._io.port.make_bucket(number, nbytes))
        except CapacityError:
            # The file system is smaller than the capacity, or other programs fill it. Continue
            # within the current size, and evict one bucket (file of objects) at most: evicting more
            # would lose copies without gaining space.
            self._room_bytes = self.index.file_bytes
            self._room_known_s = self._clock.now_s()
            victim = self.index.pick_victim(-1)
            if victim is None or self.state is DiskState.FULL:
                raise
            await self._evict(victim)
            await self._io.bounded(self._io.port.make_bucket(number, nbytes))
        opened = self._open = self.index.add_bucket(number, nbytes)
        try:
            head = form.pack_bucket_head(number, nbytes, self._io.port.folder_id)
            await self._io.write_bytes(number, head)
        except BaseException:
            await self._abandon_bucket()
            raise
        return opened

    async def _seal(self, bucket: Bucket, used_bytes: int) -> None:
        """Write the index file of a bucket (a file of objects) that is full or abandoned, and
        truncate the bucket's file to the used bytes.
        """
        listed = [record for record in bucket.records if self.index.is_live(record)]
        data = form.pack_index(bucket.number, listed)
        await self._io.bounded(self._io.port.write_note(index_name(bucket.number), data))
        await self._io.bounded(self._io.port.cut_bucket(bucket.number, used_bytes))
        self.index.resize_bucket(bucket.number, used_bytes)
        for key in [k for k, r in self._doubtful.items() if r.bucket == bucket.number]:
            del self._doubtful[key]  # A start trusts the index, which lacks this record.

    async def _abandon_bucket(self) -> None:
        """Seal the open bucket (the file that objects are appended to) after a failure. Nothing
        more is written to it.
        """
        bucket, self._open = self._open, None
        if bucket is None or self.is_failed or bucket.number not in self.index.buckets:
            return
        try:
            await self._seal(bucket, bucket.used_bytes)
        except TandemError as error:
            logger.warning("event=bucket_unsealed bucket=%d reason=%s", bucket.number, error)

    async def _evict(self, number: int) -> None:
        """Evict a bucket (a file of many objects). Those of its objects that are also in memory are
        in use: they are written again to another bucket if the disk is much larger than memory.
        """
        await self._end(self._evict_records(number))

    async def _evict_records(self, number: int) -> None:
        lost = self.index.drop_bucket(number)
        self._leaving |= {record.header.key: record for record in lost}
        ended = self._going[number] = asyncio.Event()
        # Evicted objects that are in memory are written again only if the disk is much larger than
        # memory: else the disk would do nothing but rewrite memory.
        forwards = self._room_bytes >= 2 * self._segment.capacity_bytes
        for record in lost:
            offset = self._offsets.pop(record.header.key, -1)
            self.stored.pop(record.header.key, None)
            if offset >= 0 and forwards:
                self.on_sealed(offset, record.header)
        self.counts["evicted"] += len(lost)
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
            if self._leaving.get(record.header.key) is record:
                del self._leaving[record.header.key]
            self._note_gone(record)

    async def _remove_bucket(self, number: int) -> None:
        """Remove a bucket (file) that has no live record, which the caller ensures. Its bytes count
        as used until its files are gone.
        """
        await self._remove_surely(number)
        if number in self.index.buckets:  # False if the bucket was given up meanwhile.
            assert not self.index.drop_bucket(number), number

    async def _remove_surely(self, number: int) -> None:
        """Remove a bucket's files, or give the disk up if that fails: a restart would find records
        (objects) there that the index no longer has.
        """
        for attempt in range(1, REMOVE_ATTEMPTS + 1):
            try:
                await self._remove_files(number)
                break
            except TandemError:
                if self.is_failed:
                    raise
                self.counts["errors"] += 1
                if attempt == REMOVE_ATTEMPTS:
                    self._fail()
                    raise
                await asyncio.sleep(REMOVE_PAUSE_S)

    async def _remove_files(self, number: int) -> None:
        # Remove the index before the bucket: a later start may reuse the bucket's number, and would
        # take a remaining index for that of the new bucket.
        await self._io.bounded(self._io.port.drop_note(index_name(number)))
        await self._io.bounded(self._io.port.drop_bucket(number))
        for key in [k for k, r in self._doubtful.items() if r.bucket == number]:
            del self._doubtful[key]
        self._tombstones.forget_bucket(number)

    async def _give_up_bucket(self, number: int) -> None:
        if number in self._going:  # Another task removes it: if that fails, the disk is given up.
            await self._going[number].wait()
            return
        if number not in self.index.buckets:
            return
        if self._open is not None and self._open.number == number:
            self._open = None
        try:
            await self._evict(number)
        except TandemError:
            self._fail()

    def _fail(self) -> None:
        """Give the disk up. Its content is ignored from now on, also after a restart."""
        if self.is_failed:
            return
        try:
            self._io.port.condemn()
        except OSError:
            logger.exception("event=disk_not_condemned")
        for record in self.index.list_records():
            self.dropped[record.header.key] = record.header.version
        self.stored.clear()
        self.index = DiskIndex()
        self._queue.versions.clear()
        self._offsets.clear()
        self._round_ended.set()
        self._set_state(DiskState.FAILED, InternalError("store.disk", "the disk hangs"))
        self._queue.has_work.set()

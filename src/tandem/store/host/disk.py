"""A host's SSD tier: objects are written behind puts, read back into memory, and evicted by whole
buckets.

All effects go through ``DiskPort``, so that the simulator runs this same class. All calls come from
one event loop. Only the tier's own tasks wait for the disk: a disk that fails, fills up or hangs
loses copies on the disk and never fails a put. ``disk_state`` has what the parts share,
``disk_writing`` writes, ``disk_removal`` removes. See docs/design/store/store_ssd.md.
"""

import asyncio
import logging
from collections.abc import Sequence

from tandem.core.clock import Clock
from tandem.core.errors import CorruptionError, DeadlineError, NotFoundError, TandemError
from tandem.store.corruption_log import CorruptionLog
from tandem.store.formats.bucket import Record
from tandem.store.formats.headers import ExtentHeader, RecordTombstone
from tandem.store.host.disk_io import DiskPort
from tandem.store.host.disk_reading import check_value, read_buckets, read_record
from tandem.store.host.disk_removal import Removal
from tandem.store.host.disk_state import TierState
from tandem.store.host.disk_writing import WriteBehind
from tandem.store.host.segment import HostSegment
from tandem.store.messages import DiskStatus
from tandem.store.metrics import LatencyHistogram

__all__ = ["DiskTier"]

logger = logging.getLogger(__name__)


class DiskTier(TierState):
    """The objects of a host on its disk.

    Args:
        port: the disk's files; the caller closes it last.
        segment: the host's memory.
        capacity_bytes: limit for all bucket files together.
        clock: measures pauses and latencies.
        corruption: the log of corrupt files to extend; None for a new log.
    """

    def __init__(
        self,
        port: DiskPort,
        segment: HostSegment,
        *,
        capacity_bytes: int,
        clock: Clock,
        corruption: CorruptionLog | None = None,
    ) -> None:
        log = CorruptionLog() if corruption is None else corruption
        super().__init__(port, segment, capacity_bytes, clock, log)
        self.load_latency = LatencyHistogram()
        self.removal = Removal(self)
        self.writing = WriteBehind(self, self.removal)
        self._running: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Read the bucket files, each of which has many records (copies of objects). Records whose
        writing was cut short are skipped, corrupt buckets moved aside.

        Raises: UnsupportedError if a later version of the software wrote the folder; InternalError
            if the folder cannot be read.
        """
        num_damaged = await self.removal.tombstones.read()
        if num_damaged:
            self.corruption.note("list of removals", f"{num_damaged} copies of entries")
        dead = set(self.removal.tombstones.entries)
        async for number, nbytes, found in read_buckets(self.io, self.corruption):
            self.writing.next_number = max(self.writing.next_number, number + 1)
            if found is None:
                continue
            self.index.add_bucket(number, nbytes)
            for record in found.records:
                if RecordTombstone(record.header.version, number) not in dead:
                    older = self.index.add(record)
                    if older is not None:
                        tombstone = RecordTombstone(older.header.version, older.bucket)
                        self.removal.tombstones.entries.append(tombstone)
            if not found.has_index or found.end < nbytes:
                await self.writing.seal(self.index.buckets[number], found.end)
        for number in self.index.pick_dead():
            await self.removal.remove_bucket(number)
        await self.removal.tombstones.compact()
        while self.index.file_bytes > self.capacity_bytes:
            victim = self.index.pick_victim()
            assert victim is not None
            await self.removal.evict(victim)
        self.stored.clear()
        self.dropped.clear()
        num_buckets, nbytes = len(self.index.buckets), self.index.file_bytes
        logger.info("event=disk_opened buckets=%d file_bytes=%d", num_buckets, nbytes)

    def start(self) -> None:
        """Start the task that writes new objects to the disk."""
        self._running = asyncio.get_running_loop().create_task(self.writing.run())

    async def aclose(self) -> None:
        """Stop the writing task. Objects that are not written yet stay in memory only."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self.io.aclose()
        await self.removal.running.aclose()  # Last, since removals wait for disk operations.

    def status(self) -> DiskStatus:
        """Return the status of this SSD tier, for the host's report to the master."""
        return DiskStatus(
            state=self.state,
            capacity_bytes=self.capacity_bytes,
            used_bytes=self.index.file_bytes,
            live_bytes=self.index.live_bytes,
            num_objects=len(self.index),
            num_queued=len(self.queue) + max(len(self.flight), not self.round_ended.is_set()),
            counts=dict(self.counts),
            damaged=list(self.corruption.names),
            write_counts=list(self.writing.latency.counts),
            write_sum_s=self.writing.latency.sum_s,
            load_counts=list(self.load_latency.counts),
            load_sum_s=self.load_latency.sum_s,
        )

    @property
    def disk_id(self) -> str:
        """Id of the disk's folder, unchanged by restarts, hexadecimal."""
        return self.io.port.folder_id.hex()

    # The host calls the methods below when an object is sealed, loaded, wiped or forgotten.

    def on_sealed(self, offset: int, header: ExtentHeader) -> None:
        """Queue an object that has become complete in memory, to be written to the disk."""
        if not self.is_failed:
            self.queue.add(offset, header.version)

    def on_loaded(self, offset: int, header: ExtentHeader) -> None:
        """Note that an object was loaded from the disk into memory, so that it need not be written
        again.
        """
        record = self.index.find(header.key)
        if record is not None and record.header.version == header.version:
            self.offsets[header.key] = offset

    def on_wiped(self, offset: int, key: str) -> None:
        """Note that the object of ``key`` at ``offset`` was wiped (removed) from memory. Its copy
        on the disk stays.
        """
        self.queue.versions.pop(offset, None)
        if self.offsets.get(key) == offset:
            del self.offsets[key]

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
        leaving = [r for key, r in self.removal.leaving.items() if self.index.find(key) is None]
        return [*self.index.list_records(), *leaving]

    async def load(self, header: ExtentHeader, offset: int) -> None:
        """Read an object from the disk into its extent in the segment, and verify its checksum.

        Raises: NotFoundError if the disk does not have this version; CorruptionError if the record
            is corrupt or unreadable, after which the tier forgets it.
        """
        record = self.index.find_same(header)
        if record is None and (ending := self.removal.running.list_running()):
            # The object may be in a bucket (a file of many objects) that is being removed. Wait for
            # the end of that before reporting the object as lost: until then a restart would find
            # it.
            await asyncio.wait(ending)
            record = self.index.find_same(header)
        if record is None or self.is_failed:
            raise NotFoundError("store.load", f"{header.key!r} is not on this disk")
        begin_s = self.clock.now_s()
        self.index.touch(record.bucket)
        try:
            await read_record(self.io, record, self.segment, offset)
            is_good = await check_value(self.segment, offset, record.header)
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
        self.load_latency.observe(self.clock.now_s() - begin_s)
        self.counts["loaded"] += 1
        self.counts["loaded_bytes"] += header.size

    async def _forget_record(self, record: Record) -> None:
        if self.index.is_live(record):
            self.index.remove(record.header.key, record.header.version)
            await self.removal.bury([record])
            self.note_gone(record)

    async def forget(self, keys: Sequence[str], versions: Sequence[int]) -> None:
        """Forget the disk's copies of objects, of each key up to its version. On return no restart
        finds them again.
        """
        if self.is_failed:
            return
        for key, version in zip(keys, versions, strict=True):
            flying = self.flight.get(key)
            if flying is not None and flying.header.version <= version:
                await self.round_ended.wait()
        gone: list[Record] = []
        for key, version in zip(keys, versions, strict=True):
            record = self.index.remove(key, version)
            if record is not None:
                gone.append(record)
                self.offsets.pop(key, None)
                self.stored.pop(key, None)
            record = self.doubtful.get(key)
            if record is not None and record.header.version <= version:
                gone.append(self.doubtful.pop(key))
        # A key that is not found may be part of a removal that still runs, such as an earlier order
        # whose answer came too late. Wait for these removals as well.
        earlier = self.removal.running.list_running()
        await self.removal.bury(gone)
        if earlier:
            await asyncio.wait(earlier)

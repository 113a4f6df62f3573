"""The writing of objects from a host's memory to its disk, behind the puts."""

import asyncio
import logging

from tandem.core.errors import CapacityError, InternalError, TandemError
from tandem.store.formats import bucket as form
from tandem.store.formats.bucket import Record
from tandem.store.host.disk_index import Bucket, choose_bucket_bytes
from tandem.store.host.disk_io import RecordWriter
from tandem.store.host.disk_reading import check_value, index_name
from tandem.store.host.disk_removal import Removal
from tandem.store.host.disk_state import TierState
from tandem.store.messages import DiskState
from tandem.store.metrics import LatencyHistogram

__all__ = ["WriteBehind"]

logger = logging.getLogger(__name__)

ROUND_BYTES = 32 * 2**20
"""Bytes that are written between two syncs. A record counts as a copy only after the sync."""
FULL_PAUSE_S = 2.0
ROOM_LOOK_S = 30.0
"""Seconds for which the size of a full file system is remembered before the tier tries to grow
again.
"""
MAX_PAUSE_S = 60.0


class WriteBehind:
    """Writes the queued objects of one tier in rounds, and opens and seals the buckets (files) that
    they are appended to.
    """

    def __init__(self, tier: TierState, removal: Removal) -> None:
        self.latency = LatencyHistogram()
        """Durations of the write rounds."""
        self.next_number = 1
        """Number of the next bucket."""
        self._tier = tier
        self._removal = removal
        self._bucket_bytes = choose_bucket_bytes(tier.capacity_bytes)
        self._room_known_s = 0.0

    async def run(self) -> None:
        """Write queued objects, and remove buckets without live records, until the disk fails."""
        tier, queue, pause_s = self._tier, self._tier.queue, 0.0
        while not tier.is_failed:
            await queue.wait()
            if tier.is_failed:
                return
            queue.has_work.clear()
            try:
                for number in tier.index.pick_dead(tier.open_bucket):
                    await self._removal.remove_bucket(number)
                if queue.is_behind and not queue:
                    await queue.scan(tier.index, tier.offsets)
                if queue:
                    await self._write_round()
                    has_room = tier.room_bytes >= tier.capacity_bytes
                    tier.set_state(DiskState.ACTIVE if has_room else DiskState.FULL)
                pause_s = 0.0
            except CapacityError as error:
                tier.set_state(DiskState.FULL, error)
                pause_s = FULL_PAUSE_S
            except TandemError as error:
                if tier.is_failed:
                    return
                tier.counts["errors"] += 1
                tier.set_state(DiskState.FAILING, error)
                pause_s = min(max(1.0, 2 * pause_s), MAX_PAUSE_S)
            if pause_s:
                queue.is_behind = True  # A scan finds the objects of the failed round again.
                await asyncio.sleep(pause_s)
                queue.has_work.set()

    async def _write_round(self) -> None:
        """Write queued objects, ``ROUND_BYTES`` at most, to the disk, then sync. They count as
        copies only after the sync.
        """
        tier = self._tier
        tier.round_ended.clear()
        begin_s = tier.clock.now_s()
        writer = RecordWriter(tier.io, tier.segment.data, tier.open_bucket)
        taken: tuple[int, int] | None = None
        try:
            while tier.queue and writer.num_bytes < ROUND_BYTES:
                taken = offset, version = tier.queue.versions.popitem(last=False)
                header = tier.queue.find(offset, version, tier.index)
                if header is None:
                    continue
                length = form.record_bytes(len(header.key.encode()), header.size)
                if form.HEAD_BYTES + length > tier.capacity_bytes:
                    tier.counts["skipped"] += 1
                    continue
                if not await check_value(tier.segment, offset, header):
                    continue  # Corrupt, or wiped meanwhile: do not write it to the disk.
                if writer.bucket is None or writer.at + length > writer.bucket.file_bytes:
                    await self._count(writer)
                    opened = await self._begin_bucket(form.HEAD_BYTES + length)
                    writer = RecordWriter(tier.io, tier.segment.data, opened)
                assert writer.bucket is not None
                record = Record(writer.bucket.number, writer.at, header)
                tier.flight[header.key] = record
                await writer.add(record, offset)
                if tier.queue.find(offset, version, tier.index) is None:
                    writer.torn.append(record)  # Wiped while it was copied.
            await self._count(writer)
        except BaseException:
            # The records (objects) of a failed round of writes may be on the disk. Remember them,
            # so that ``forget`` also writes tombstones (notes that they are dead) for them.
            tier.doubtful |= tier.flight
            for record, place in writer.placed:
                tier.queue.put_back(place, record.header.version)
            if taken is not None:
                tier.queue.put_back(*taken)
            await writer.abandon()
            await self._abandon_bucket()
            raise
        finally:
            tier.flight.clear()
            tier.round_ended.set()
            self.latency.observe(tier.clock.now_s() - begin_s)

    async def _count(self, writer: RecordWriter) -> None:
        """Sync the records (objects) that ``writer`` has written, and add them to the index. From
        now on they count as copies.
        """
        tier = self._tier
        await writer.finish()
        bucket = writer.bucket
        if not writer.placed or bucket is None:
            return
        await tier.io.bounded(tier.io.port.sync(bucket.number))
        if bucket.number not in tier.index.buckets:
            raise InternalError("store.disk", f"bucket {bucket.number} was given up meanwhile")
        dead: list[Record] = list(writer.torn)
        for record, offset in writer.placed:
            if record in writer.torn:
                continue
            older = tier.index.add(record)
            if older is not None:
                dead.append(older)
            if older is record:
                continue
            tier.stored[record.header.key] = record.header.version
            tier.offsets[record.header.key] = offset
            tier.counts["written"] += 1
            tier.counts["written_bytes"] += record.header.size
        bucket.used_bytes = max(bucket.used_bytes, writer.at)
        if dead:
            await self._removal.bury(dead)
        # Take these records (objects) out of the round in flight only after the tombstones (notes
        # that older records are dead) are on the disk: an order to forget a key waits for its
        # record in flight, and so for the tombstones of older records of that key.
        for record, _ in writer.placed:
            tier.flight.pop(record.header.key, None)
        writer.placed.clear()
        writer.torn.clear()
        tier.on_change()

    async def _begin_bucket(self, least_bytes: int) -> Bucket:
        """Seal the open bucket (the file that objects are appended to) and make another, with room
        for ``least_bytes``. Evict buckets until there is space.

        Raises: CapacityError (there is no room for a bucket, even after evictions).
        """
        tier = self._tier
        if tier.open_bucket is not None:
            sealing, tier.open_bucket = tier.open_bucket, None
            await self.seal(sealing, sealing.used_bytes)
        most_bytes = tier.capacity_bytes // form.ALIGNMENT * form.ALIGNMENT
        nbytes = max(min(self._bucket_bytes, most_bytes), least_bytes)
        is_stale = tier.clock.now_s() - self._room_known_s > ROOM_LOOK_S
        if is_stale or not tier.index.file_bytes:
            # Assume the full capacity again: other programs may have freed space, and an empty tier
            # loses nothing by trying.
            tier.room_bytes = tier.capacity_bytes
        while tier.index.file_bytes + nbytes > tier.room_bytes:
            victim = tier.index.pick_victim()
            if victim is None:
                raise CapacityError("store.disk", f"a bucket of {nbytes} bytes does not fit")
            await self._removal.evict(victim)
        number = self.next_number
        self.next_number += 1
        try:
            await tier.io.bounded(tier.io.port.make_bucket(number, nbytes))
        except CapacityError:
            # The file system is smaller than the capacity, or other programs fill it. Continue
            # within the current size, and evict one bucket (file of objects) at most: evicting more
            # would lose copies without gaining space.
            tier.room_bytes = tier.index.file_bytes
            self._room_known_s = tier.clock.now_s()
            victim = tier.index.pick_victim()
            if victim is None or tier.state is DiskState.FULL:
                raise
            await self._removal.evict(victim)
            await tier.io.bounded(tier.io.port.make_bucket(number, nbytes))
        opened = tier.open_bucket = tier.index.add_bucket(number, nbytes)
        try:
            head = form.pack_bucket_head(number, nbytes, tier.io.port.folder_id)
            await tier.io.write_bytes(number, head)
        except BaseException:
            await self._abandon_bucket()
            raise
        return opened

    async def seal(self, bucket: Bucket, used_bytes: int) -> None:
        """Write the index file of a bucket (a file of objects) that is full or abandoned, and
        truncate the bucket's file to the used bytes.
        """
        tier = self._tier
        listed = [record for record in bucket.records if tier.index.is_live(record)]
        data = form.pack_index(bucket.number, listed)
        await tier.io.bounded(tier.io.port.write_note(index_name(bucket.number), data))
        await tier.io.bounded(tier.io.port.cut_bucket(bucket.number, used_bytes))
        tier.index.resize_bucket(bucket.number, used_bytes)
        # A start trusts the index, which lacks the records of failed rounds.
        tier.forget_doubtful(bucket.number)

    async def _abandon_bucket(self) -> None:
        """Seal the open bucket (the file that objects are appended to) after a failure. Nothing
        more is written to it.
        """
        tier = self._tier
        bucket, tier.open_bucket = tier.open_bucket, None
        if bucket is None or tier.is_failed or bucket.number not in tier.index.buckets:
            return
        try:
            await self.seal(bucket, bucket.used_bytes)
        except TandemError as error:
            logger.warning("event=bucket_unsealed bucket=%d reason=%s", bucket.number, error)

"""Objects that are written become visible: hosts seal them, then the directory shows them."""

import asyncio
import itertools
import logging
import os
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

from tandem.core.errors import CapacityError, TandemError
from tandem.store.election import Tombstone
from tandem.store.master.allocation import Allocation, PutBatch
from tandem.store.master.burials import Burials
from tandem.store.master.departures import Departures
from tandem.store.master.state.index import NO_ROW, Replica, Staged
from tandem.store.master.state.space import Extent
from tandem.store.master.state.state import StoreState
from tandem.store.messages import Ack, CommitStatus, ExtentRecords, SealExtents

__all__ = ["Blob", "Sealing"]

logger = logging.getLogger(__name__)

UNSURE_LOOK_S = 0.01
"""Between two looks whether a host that may have an object has come back."""
LONG_BATCH = 8
"""Batches from this size on take longer to stage here than their host takes to begin."""


class Blob:
    """Bytes of a batch's objects, one after the other: values, or tables."""

    def __init__(self, data: bytes, sizes: Sequence[int], *, is_values: bool) -> None:
        self.is_values = is_values
        self._data = data
        self._sizes = sizes

    def take(self, objects: Sequence[int]) -> bytes:
        """Return those of some objects, in their order."""
        if len(objects) == len(self._sizes):
            return self._data
        data, sizes = memoryview(self._data), self._sizes
        ends = list(itertools.accumulate(sizes))
        return b"".join(data[ends[i] - sizes[i] : ends[i]] for i in objects)

    def pick(self, objects: Sequence[int]) -> "Blob":
        """Return the same of some objects alone."""
        return Blob(self.take(objects), [self._sizes[i] for i in objects], is_values=self.is_values)


class Sealing:
    """Seals and shows the batches of one master."""

    def __init__(
        self,
        state: StoreState,
        departures: Departures,
        allocation: Allocation,
        burials: Burials,
    ) -> None:
        self._state = state
        self._departures = departures
        self._allocation = allocation
        self._burials = burials

    async def seal(self, batch: PutBatch, checksums: Sequence[int], blob: Blob) -> bytes:
        """Seal and publish; each host gets its part of the blob."""
        deadline_s = self._state.clock.now_s() + self._state.config.put_timeout_ms / 1e3
        try:
            await self._wait_room(batch)
        except CapacityError:
            self._allocation.forget_lost(batch)
            self._allocation.release(batch)
            raise
        while True:
            # Meanwhile others may put the same keys; upserts do.
            left_s = deadline_s - self._state.clock.now_s()
            if left_s > 0 and self._is_unsure(batch):
                await self._state.awaited.wait_learnt(left_s)
                await asyncio.sleep(UNSURE_LOOK_S)
                continue
            async with _KeysHeld(self._state.committing, batch.keys):
                if self._is_unsure(batch) and self._state.clock.now_s() < deadline_s:
                    continue
                return await self._seal_held(batch, checksums, blob)

    async def _wait_room(self, batch: PutBatch) -> None:
        """Wait for room for the tombstones that showing a batch may take.

        Raises: CapacityError.
        """
        if not self._burials.is_whole:
            count = len(self._find_replaced(batch.keys, is_upsert=batch.request.upsert))
            if count:
                await self._burials.wait_room(count, self._state.config.put_wait_ms / 1e3)

    def _find_replaced(self, keys: Sequence[str], *, is_upsert: bool) -> Sequence[str]:
        """Return the keys of which there is, or may be, an older copy anywhere."""
        if is_upsert and self._burials.is_blind:
            return keys
        directory, departures = self._state.directory, self._departures
        if not directory.has_any(keys) and not departures.may_have_older(keys):
            return ()
        return [
            key
            for key in keys
            if directory.find(key) != NO_ROW
            or departures.find_replaced(key) is not None
            or key in self._state.unlisted
        ]

    def _is_unsure(self, batch: PutBatch) -> bool:
        """Return True if a host that is waited for may have what the batch is not to replace."""
        if batch.request.upsert or not self._state.can_be_unsure:
            return False
        taken = self._state.directory.exists_many(batch.keys)
        if all(taken):
            return False
        missing = [key for key, is_taken in zip(batch.keys, taken, strict=True) if not is_taken]
        return self._state.is_unsure(missing)

    async def _seal_held(self, batch: PutBatch, checksums: Sequence[int], blob: Blob) -> bytes:
        """Seal and show. REQUIRES: the keys are held."""
        allocation = self._allocation
        allocation.forget_lost(batch)
        statuses = bytearray([CommitStatus.EXPIRED]) * len(batch.keys)
        if self._is_unsure(batch):
            allocation.release(batch)  # It could not be found out in time: to be put again.
            return bytes(statuses)
        if not batch.request.upsert:
            taken = self._state.directory.exists_many(batch.keys)
            if any(taken):
                came_late = [i for i, is_taken in enumerate(taken) if is_taken]
                allocation.release(batch, came_late)
                for i in came_late:
                    statuses[i] = CommitStatus.EXISTS
        first_version = self._state.versions.take(len(batch.keys))
        records = {
            number: self._make_records(batch, number, checksums, first_version)
            for number, places in batch.places.items()
            if places
        }
        blobs = {number: blob.take([*batch.places[number]]) for number in records}
        # The orders leave now, and what can be done meanwhile is.
        orders = self._order_seals(records, blobs, blob.is_values)
        staged = None
        if len(batch.keys) >= LONG_BATCH and _can_stage(batch, checksums):
            # With fewer cores than processes, the host may be waiting for ours.
            os.sched_yield()
            staged = self._stage(batch, checksums, first_version)
        try:
            sealed = await self._wait_sealed(orders)
        except Exception:
            if staged is not None:
                self._state.directory.unstage_many(staged)
            allocation.forget_lost(batch)
            for number in batch.places:
                self._wipe(batch, number, first_version)
            raise
        for number in allocation.forget_lost(batch):
            # It may have sealed them before it went.
            for key in records[number].keys if number in records else ():
                self._departures.note_unlisted(key)
        for number in [number for number in batch.places if number not in sealed]:
            self._wipe(batch, number, first_version)
            del batch.places[number]
        is_blind = batch.request.upsert and self._burials.is_blind
        replaced = self._find_replaced(batch.keys, is_upsert=batch.request.upsert)
        for key in replaced:
            self._departures.hide(key)
        try:
            gone = self._insert(batch, checksums, first_version, statuses, staged)
            if replaced:
                await self._end_older(batch, first_version, replaced, gone, is_blind=is_blind)
        finally:
            for key in replaced:
                self._departures.show(key)
        return bytes(statuses)

    async def _end_older(
        self,
        batch: PutBatch,
        first_version: int,
        replaced: Sequence[str],
        gone: "Sequence[asyncio.Future[Any]]",
        *,
        is_blind: bool,
    ) -> None:
        """Return when no crash, and no host that was away, brings older versions back.

        Until then nobody is told of the new ones: it could be followed by an older one.
        """
        for wiped in gone:
            await asyncio.shield(wiped)
        unlisted = self._state.unlisted
        dead = set(replaced) if is_blind else unlisted.intersection(replaced)
        if dead:
            await self._burials.bury(
                [
                    Tombstone(key, first_version + i - 1)
                    for i, key in enumerate(batch.keys)
                    if key in dead
                ]
            )

    def _wipe(self, batch: PutBatch, number: int, first_version: int) -> None:
        """Have a host wipe objects that it may have sealed: its answer was lost or negative."""
        host = self._state.hosts[number]
        for i, offset in batch.places[number].items():
            extent = Extent(offset, batch.lengths[i])
            self._departures.wipe_copy(
                batch.keys[i], host, extent, version=first_version + i, was_shown=False
            )

    def _make_records(
        self, batch: PutBatch, number: int, checksums: Sequence[int], first_version: int
    ) -> ExtentRecords:
        places, request = batch.places[number], batch.request
        count = len(places)
        is_whole = count == len(batch.keys)
        objects: Sequence[int] = range(count) if is_whole else list(places)
        return ExtentRecords(
            keys=batch.keys if is_whole else [batch.keys[i] for i in objects],
            sizes=batch.sizes if is_whole else [batch.sizes[i] for i in objects],
            versions=[first_version + i for i in objects],
            checksums=list(checksums) if is_whole else [checksums[i] for i in objects],
            offsets=list(places.values()),
            wanted=[request.replicas] * count,
            hard_pins=[request.hard_pin] * count,
            soft_pin_ms=[request.soft_pin_ms] * count,
        )

    def _order_seals(
        self, records: dict[int, ExtentRecords], blobs: dict[int, bytes], is_values: bool
    ) -> dict[int, Awaitable[Ack] | TandemError]:
        """Tell the hosts; returns their answers, to be awaited, or why one was not told."""
        orders: dict[int, Awaitable[Ack] | TandemError] = {}
        for number in sorted(records):
            host = self._state.hosts[number]
            try:
                orders[number] = host.begin_order(
                    "seal",
                    SealExtents,
                    Ack,
                    timeout_s=self._state.patience_s(host, len(records[number].keys)),
                    records=records[number],
                    has_values=is_values,
                    blob=blobs[number] if is_values else b"",
                    tables=b"" if is_values else blobs[number],
                )
            except TandemError as error:
                orders[number] = error
        return orders

    async def _wait_sealed(self, orders: dict[int, Awaitable[Ack] | TandemError]) -> set[int]:
        """Return the hosts that have done it."""
        told = {n: order for n, order in orders.items() if not isinstance(order, TandemError)}
        answers = dict(zip(told, await _gather(list(told.values())), strict=True))
        sealed: set[int] = set()
        for number, order in orders.items():
            answer = answers.get(number, order)
            if isinstance(answer, Ack):
                sealed.add(number)
            elif isinstance(answer, TandemError):
                logger.warning(
                    "event=seal_failed host=%s reason=%s", self._state.hosts[number].name, answer
                )
            elif isinstance(answer, BaseException):
                raise answer
        return sealed

    def _stage(self, batch: PutBatch, checksums: Sequence[int], first_version: int) -> Staged:
        """Prepare what the directory will have. REQUIRES: ``_can_stage``."""
        (places,) = filter(None, batch.places.values())
        return self._state.directory.stage_many(
            batch.keys,
            sizes=batch.sizes,
            checksums=checksums,
            versions=range(first_version, first_version + len(batch.keys)),
            offsets=list(places.values()),
            wanted=batch.request.replicas,
        )

    def _insert(
        self,
        batch: PutBatch,
        checksums: Sequence[int],
        first_version: int,
        statuses: bytearray,
        staged: Staged | None,
    ) -> "list[asyncio.Future[Any]]":
        """Publish objects sealed on any host; returns futures, done when old versions are gone."""
        directory, request = self._state.directory, batch.request
        replaced: list[asyncio.Future[Any]] = []
        # An upsert does not wait for hosts that may have had an object.
        is_unsure = request.upsert and self._state.awaited.is_learning
        created = CommitStatus.REPLACED if is_unsure else CommitStatus.CREATED
        placed = [number for number, places in batch.places.items() if places]
        for number in placed:
            self._state.hosts[number].seal(batch.list_offsets(number))
        shown: Sequence[int] = range(len(batch.keys))
        keys = batch.keys
        if not any(len(batch.places[number]) == len(shown) for number in placed):
            shown = sorted({i for number in placed for i in batch.places[number]})
            keys = [keys[i] for i in shown]
            for i in shown:
                statuses[i] = created
        else:
            statuses[:] = bytes([created]) * len(statuses)
        departures = self._departures
        if departures.may_have_older(()) or directory.has_any(keys):
            for i, key in zip(shown, keys, strict=True):
                going = departures.find_replaced(key)
                if going is not None:  # Evicted a moment ago, and maybe still read.
                    replaced.append(going)
                row = directory.find(key)
                if row != NO_ROW:
                    statuses[i] = CommitStatus.REPLACED
                    replaced += self._departures.drop_row(row)
        if staged is not None and keys is not batch.keys:
            directory.unstage_many(staged)
            staged = None
        if staged is not None:
            directory.show_many(staged, placed[0])
            rows = staged.rows
        elif len(placed) == 1:
            rows = directory.insert_many(
                keys,
                sizes=[batch.sizes[i] for i in shown],
                checksums=[checksums[i] for i in shown],
                versions=[first_version + i for i in shown],
                wanted=request.replicas,
                host=placed[0],
                offsets=[batch.places[placed[0]][i] for i in shown],
            )
        else:
            rows = [
                directory.insert(
                    batch.keys[i],
                    size=batch.sizes[i],
                    checksum=checksums[i],
                    version=first_version + i,
                    replicas=[
                        Replica(number, offset)
                        for number in placed
                        if (offset := batch.places[number].get(i, -1)) >= 0
                    ],
                    wanted=request.replicas,
                )
                for i in shown
            ]
        if request.hard_pin or request.soft_pin_ms:
            soft_until_ms = self._state.now_ms() + request.soft_pin_ms if request.soft_pin_ms else 0
            for row in rows:
                directory.set_pins(row, hard=request.hard_pin, soft_until_ms=soft_until_ms)
        self._state.counters.objects_created += len(rows)
        return replaced


async def _gather(work: Sequence[Awaitable[Ack]]) -> "list[Ack | BaseException]":
    """Do as ``asyncio.gather`` with exceptions as results; for one, without a task of its own."""
    if len(work) != 1:
        return await asyncio.gather(*work, return_exceptions=True)
    try:
        return [await work[0]]
    except Exception as error:  # noqa: BLE001 - as asyncio.gather
        return [error]


def _can_stage(batch: PutBatch, checksums: Sequence[int]) -> bool:
    """Return True if all objects are on one host. What no checksum is, no host seals."""
    count = len(batch.keys)
    return (
        [len(places) for places in batch.places.values() if places] == [count]
        and min(checksums) >= 0
        and max(checksums) < 2**32
    )


class _KeysHeld:
    """Holds keys against other commits: all of them or, meanwhile, none."""

    def __init__(self, held: "dict[str, asyncio.Future[None]]", keys: Iterable[str]) -> None:
        self._held = held
        self._keys = dict.fromkeys(keys)
        self._released: asyncio.Future[None] | None = None

    async def __aenter__(self) -> None:
        held = self._held
        while held and (busy := [held[key] for key in self._keys if key in held]):
            await asyncio.shield(busy[0])
        self._released = asyncio.get_running_loop().create_future()
        held.update(dict.fromkeys(self._keys, self._released))

    async def __aexit__(self, *_: object) -> None:
        for key in self._keys:
            del self._held[key]
        assert self._released is not None
        self._released.set_result(None)

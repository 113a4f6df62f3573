"""The third tier of KV (L3): full KV blocks, their window blocks, and recurrent states at their
ends, as objects of the store.

Each block is one object. Its key is the block's key in the prefix chain, which begins with the
``KvIdentity`` and the salt, so no request finds a block that it may not share. The KV of the same
tokens in sliding-window layers is a second object under the same key; a stored prefix is usable
only if its last window is stored too. A state is a third object, under the key of the block that it
follows; it is stored after the blocks before it and usable only with all of them.

- Write: the engine's thread reports blocks that became full or are being evicted. A full block is
  copied to a staging slot beside the steps, and stored only if the block was not reused before the
  copy ended. An evicted block is copied before the step goes on, because its memory is reused then.
- Read: one transfer from the store's memory into the engine's block, verified by the store's
  checksum before the engine is told.

Every failure is counted, and the block is computed again or not stored. Nothing here raises into
the engine.

Threads: everything runs on one event loop, except ``begin``, which the engine's thread calls.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tandem.core.clock import Clock
from tandem.core.errors import CorruptionError, NotFoundError, ShapeError, TandemError
from tandem.core.instance_status import Statistics
from tandem.core.wire import KvSource, TierKv
from tandem.engine.groups.group import Group, GroupBlock, GroupMemory
from tandem.engine.scheduling.blocks import (
    KeyedBlock,
)
from tandem.engine.scheduling.plan import BlockLoad, StepPlan
from tandem.engine.scheduling.request import Request
from tandem.engine.tiers.config import TierConfig
from tandem.engine.tiers.pins import PinLedger
from tandem.engine.tiers.staging import StagingSlots
from tandem.engine.transfers import LoadSink
from tandem.store import AsyncStoreClient, Part, PutOptions, StoreBuffer

__all__ = ["SOURCES", "StoreTier", "make_object_key"]

logger = logging.getLogger(__name__)

SOURCES: frozenset[type[KvSource]] = frozenset({TierKv})
"""The kinds of ``KvSource`` that this tier can load from."""

STAGED_STATES = 2
"""Number of recurrent states that can wait to be stored; each waits in a staging buffer of its own.
"""
STORE_BATCH = 16
"""Number of blocks stored by one call: enough to hide its round trips."""
LOAD_BATCH = 16
"""Number of blocks read by one call. A load that was dropped stops after the current call."""
PROBE_BLOCKS = 4
"""Number of blocks written and read back at the start, as a test and to estimate the load rate."""


def make_object_key(identity: str, key: bytes, group: Group = Group.FULL) -> str:
    """Return the store's key of a block, of its window block, or of the state at its end.

    Args:
        identity: digest of the ``KvIdentity``; it is the prefix of the object's key, so that all
            blocks with that identity can be removed together.
        key: key of the block in its prefix chain, salt included.
        group: group of the block.
    """
    return f"kv/{identity}/{group}{'/' if group else ''}{key.hex()}"


class _Area:
    """A group's memory, and a staging buffer for those of its blocks that are to be stored.

    Args:
        client: store client with which the memory is registered.
        memory: the group's memory.
        num_staged: number of staging slots.
    """

    def __init__(self, client: AsyncStoreClient, memory: GroupMemory, num_staged: int) -> None:
        self._client = client
        self._memory, self.block_bytes, self.num_needed = memory
        self.staging = StagingSlots(num_staged, self.block_bytes)
        self._buffer: StoreBuffer = client.register(self._memory)
        self._staging_buffer: StoreBuffer = client.register(self.staging.memory)

    def copy_aside(self, index: int) -> int | None:
        """Copy an item (a block or a state) to a staging slot, where it waits to be stored; return
        the slot, or None if none is free.
        """
        slot = self.staging.take()
        if slot is not None:
            size = self.block_bytes
            np.copyto(self.staging.view(slot), self._memory[index * size : (index + 1) * size])
        return slot

    def part(self, index: int) -> Part:
        """Return the memory range of an item (a block or a state), for the store's client."""
        return Part(self._buffer, index * self.block_bytes, self.block_bytes)

    def staged_part(self, slot: int) -> Part:
        """Return the memory range of a staging slot, for the store's client."""
        return Part(self._staging_buffer, slot * self.block_bytes, self.block_bytes)

    def close(self) -> None:
        """Unregister the memory from the store's client."""
        self._client.unregister(self._buffer)
        self._client.unregister(self._staging_buffer)


class _Staged(NamedTuple):
    key: bytes
    slot: int
    group: Group


class StoreTier:
    """The transfer of blocks between an engine and the store; a ``BlockTransfers``.

    Args:
        client: client of the store, used on ``loop`` alone; not owned.
        groups: memory of each group of the model, the full blocks first; it must outlive the tier.
        block_size: tokens per block.
        identity: digest of the ``KvIdentity``.
        config: policy and limits.
        clock: used to measure rates.
        on_load: called with bytes and seconds of each successful read.
        counters: statistics to add to; None: new ones.
        loop: event loop of the client; None: the caller's.
    """

    def __init__(
        self,
        client: AsyncStoreClient,
        groups: Mapping[Group, GroupMemory],
        *,
        block_size: int,
        identity: str,
        config: TierConfig,
        clock: Clock,
        on_load: Callable[[int, float], None],
        counters: Statistics | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.counters = Statistics() if counters is None else counters
        self._client = client
        self._block_size = block_size
        self._identity = identity
        self._config = config
        self._clock = clock
        self._on_load = on_load
        self._loop = asyncio.get_running_loop() if loop is None else loop
        self._sink: LoadSink | None = None
        self._areas: dict[Group, _Area] = {}
        for group, memory in groups.items():
            staged = STAGED_STATES if group is Group.STATE else config.staging_blocks
            self._areas[group] = _Area(client, memory, staged)
        self._blocks = self._areas[Group.FULL]
        self._full: deque[KeyedBlock] = deque()
        self._staged: deque[_Staged] = deque()
        self._storing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._pins = PinLedger(int(config.pin_gib * 2**30) // self._blocks.block_bytes)
        self._loading: set[tuple[str, GroupBlock]] = set()
        """Loads whose end was not reported yet, as (request id, block)."""
        self._dropped: set[tuple[str, GroupBlock]] = set()
        """Loads in ``_loading`` that no request waits for any more."""
        self._is_closing = False
        self._generation = 0
        """Number of flushes; a block staged before a flush is not stored after it."""

    def attach(self, sink: LoadSink) -> None:
        """Set the receiver of loads' results; call it before the first ``begin``."""
        self._sink = sink

    # The methods below are called for a request that arrives, on the event loop.

    async def count_stored(self, keys: Sequence[bytes]) -> int | None:
        """Return how many leading blocks of a chain (a prompt's blocks in order) the store has;
        None if it does not answer.

        For a model with states, counts up to the last block that has a state stored at its end. For
        a model with windows, counts up to the last block whose window is stored, as far as the
        window lies in these blocks; the device has the rest. The answer may be out of date when the
        blocks are read.
        """
        if not keys:
            return 0
        self.counters.num_lookups += 1
        self.counters.lookup_tokens += len(keys) * self._block_size
        names = [make_object_key(self._identity, key, g) for g in self._areas for key in keys]
        try:
            async with asyncio.timeout(self._config.lookup_timeout_ms / 1e3):
                found = await self._client.exists_many(names)
        except TimeoutError:
            self.counters.num_lookup_timeouts += 1
            return None
        except TandemError as error:
            logger.debug("event=kv_lookup_failed error=%s", error)
            self.counters.num_lookup_timeouts += 1
            return None
        parts = [found[i : i + len(keys)] for i in range(0, len(found), len(keys))]
        by_group = dict(zip(self._areas, parts, strict=True))
        num_found = (*by_group[Group.FULL], False).index(False)
        while num_found and not all(
            all(has[:num_found][-self._areas[group].num_needed :])
            for group, has in by_group.items()
        ):
            num_found -= 1
        self.counters.found_tokens += num_found * self._block_size
        return num_found

    def pin(self, client: str, keys: Sequence[bytes], pin_s: float) -> None:
        """Ask the store to evict blocks later than others; blocks not stored yet are pinned when
        they are.

        Does not wait.

        Args:
            client: name of the client that asks; its pins beyond ``TierConfig.pin_gib`` are left
                out.
            keys: keys of a prefix's blocks, from the first on.
            pin_s: seconds for which the pins last.
        """
        pinned = self._pins.take(client, keys, pin_s, self._clock.now_s())
        if pinned and not self._is_closing:
            self._spawn(self._pin_stored(pinned, pin_s))

    async def _pin_stored(self, keys: Sequence[bytes], pin_s: float) -> None:
        """Ask the store to evict later, for ``pin_s`` seconds, those of the blocks with these keys
        that it has.
        """
        names = [make_object_key(self._identity, key, g) for key in keys for g in self._areas]
        try:
            await self._client.pin_many(names, soft_s=pin_s)
        except TandemError as error:
            logger.debug("event=kv_pin_failed error=%s", error)

    # The members below are for the engine's thread.

    @property
    def sources(self) -> frozenset[type[KvSource]]:
        """The kinds of ``KvSource`` that this tier can load from: the store."""
        return SOURCES

    def begin(self, plan: StepPlan) -> None:
        """Copy the plan's evicted blocks, and queue its loads and stores on the event loop.

        Called by the engine's thread, before the step.
        """
        evicted: list[_Staged] = []
        if self._config.write == "on_evict":
            for block in plan.evicted:
                staged = self._copy_aside(block)
                if staged is not None:
                    evicted.append(staged)
        full = plan.filled
        if self._config.write == "on_evict":
            # Queue states and window blocks for storing as soon as they are full, as KV blocks are;
            # otherwise a stored prefix could lack them.
            full = [item for item in full if item.block.group is not Group.FULL]
        if evicted or full or plan.loads or plan.dropped:
            try:
                self._loop.call_soon_threadsafe(
                    self._take, evicted, full, plan.dropped, plan.loads, self._generation
                )
            except RuntimeError:  # The event loop was closed together with the store client.
                self._fail_loads(plan.loads, "offline")

    def _copy_aside(self, block: KeyedBlock) -> _Staged | None:
        group, index = block.block
        slot = self._areas[group].copy_aside(index)
        if slot is None:
            _count(self.counters.store_failures, "staging_full")
            return None
        return _Staged(block.key, slot, group)

    def _give_back(self, staged: _Staged) -> None:
        self._areas[staged.group].staging.give_back(staged.slot)

    # The methods below run on the event loop, and load and store blocks there.

    def _take(
        self,
        evicted: Sequence[_Staged],
        full: Sequence[KeyedBlock],
        dropped: Sequence[BlockLoad],
        loads: Sequence[BlockLoad],
        generation: int,
    ) -> None:
        if self._is_closing:
            for staged in evicted:
                self._give_back(staged)
            self._fail_loads(loads, "offline")
            return
        # Mark only loads that still run as dropped (given up by the scheduler): nothing would
        # remove the mark of a load that has ended.
        self._dropped.update(self._loading.intersection(map(_name_load, dropped)))
        by_request: dict[Request, list[BlockLoad]] = {}
        for load in loads:
            by_request.setdefault(load.request, []).append(load)
        self._loading.update(map(_name_load, loads))
        for request, its_loads in by_request.items():
            self._spawn(self._load(request, its_loads))
        if generation == self._generation:
            self._staged.extend(evicted)
            self._full.extend(full)
        else:
            for staged in evicted:
                self._give_back(staged)
        while len(self._full) > self._config.max_queued_stores:
            self._full.popleft()
            _count(self.counters.store_failures, "queue_full")
        if (self._staged or self._full) and self._storing is None:
            self._storing = self._spawn(self._store_queued())

    def _spawn(self, work: Any) -> "asyncio.Task[None]":
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # The methods below load blocks from the store.

    async def _load(self, request: Request, loads: Sequence[BlockLoad]) -> None:
        """Read the blocks of one request, in order, and report the end of each."""
        for start in range(0, len(loads), LOAD_BATCH):
            batch = loads[start : start + LOAD_BATCH]
            if self._is_dropped(batch[0]):
                self._fail_loads(loads[start:], "dropped")
                break
            if not await self._load_batch(request, batch):
                # A block after a missing one cannot be used, since a prefix must be contiguous; do
                # not load it.
                self._fail_loads(loads[start + LOAD_BATCH :], "after_gap")
                break
        self._loading.difference_update(map(_name_load, loads))
        self._dropped.difference_update(map(_name_load, loads))

    def _is_dropped(self, load: BlockLoad) -> bool:
        return _name_load(load) in self._dropped

    async def _load_batch(self, request: Request, loads: Sequence[BlockLoad]) -> bool:
        """Read blocks and report each; return False if any of them failed."""
        places = [load.block for load in loads]
        names = [
            make_object_key(self._identity, load.key, group)
            for load, (group, _) in zip(loads, places, strict=True)
        ]
        parts = [self._areas[group].part(index) for group, index in places]
        begin_s = self._clock.now_s()
        try:
            # The client's own deadline ends this call; after it returns, nothing writes to our
            # blocks any more.
            results: Sequence[int | TandemError] = await self._client.get_into_many(names, parts)
        except TandemError as error:
            results = [error] * len(loads)
        seconds = self._clock.now_s() - begin_s
        sizes = [self._areas[group].block_bytes for group, _ in places]
        good = [
            load.block
            for load, result, size in zip(loads, results, sizes, strict=True)
            if result == size
        ]
        if good:
            groups = [block.group for block in good]
            num_blocks = groups.count(Group.FULL)
            num_bytes = sum(self._areas[group].block_bytes for group in groups)
            self.counters.loaded_blocks += num_blocks
            self.counters.loaded_states += groups.count(Group.STATE)
            self.counters.loaded_window_blocks += groups.count(Group.WINDOW)
            self.counters.loaded_tokens += num_blocks * self._block_size
            self.counters.loaded_bytes += num_bytes
            self.counters.load_seconds += seconds
            self._on_load(num_bytes, seconds)
            self._get_sink().load_done(request, good)
        bad = [
            (load, result)
            for load, result, size in zip(loads, results, sizes, strict=True)
            if result != size
        ]
        for load, result in bad:
            self._get_sink().load_failed(request, [load.block], self._note_bad_block(load, result))
        return not bad

    def _note_bad_block(self, load: BlockLoad, result: int | TandemError) -> str:
        """Count a block that failed to load, and remove a corrupt one; return the reason."""
        is_foreign = not isinstance(result, TandemError) or isinstance(result, ShapeError)
        reason = result.code if isinstance(result, TandemError) and not is_foreign else "foreign"
        _count(self.counters.load_failures, reason)
        if is_foreign or isinstance(result, CorruptionError):
            # Remove the corrupt object, since each later lookup would find it and fail again. Once
            # the block is recomputed, it is stored anew.
            logger.warning("event=kv_block_bad reason=%s key=%s", reason, load.key.hex())
            name = make_object_key(self._identity, load.key, load.block.group)
            self._spawn(self._remove(name))
        elif not isinstance(result, NotFoundError):
            logger.info("event=kv_load_failed error=%s", result)
        return reason

    async def _remove(self, name: str) -> None:
        try:
            await self._client.remove(name)
        except TandemError as error:
            logger.info("event=kv_block_not_removed error=%s", error)

    def _fail_loads(self, loads: Sequence[BlockLoad], reason: str) -> None:
        for load in loads:
            _count(self.counters.load_failures, reason)
            self._get_sink().load_failed(load.request, [load.block], reason)

    def _get_sink(self) -> LoadSink:
        assert self._sink is not None, "attach() comes before the first load"
        return self._sink

    # The methods below store blocks.

    async def _store_queued(self) -> None:
        """Store the queued blocks, evicted ones first, because their copies occupy staging
        slots.
        """
        try:
            while (self._staged or self._full) and not self._is_closing:
                batch: list[_Staged] = []
                while self._staged and len(batch) < STORE_BATCH:
                    batch.append(self._staged.popleft())
                while self._full and len(batch) < STORE_BATCH:
                    group = self._full[0].block.group
                    if not self._areas[group].staging.num_free:
                        break
                    block = self._full.popleft()
                    staged = self._copy_unchanged(block)
                    if staged is not None:
                        batch.append(staged)
                by_pin: dict[float, list[_Staged]] = {}
                now_s = self._clock.now_s()
                for staged in batch:
                    left_s = float(math.ceil(self._pins.find_left(staged.key, now_s)))
                    by_pin.setdefault(left_s, []).append(staged)
                for pin_s, alike in by_pin.items():
                    await self._store_batch(alike, pin_s)
                if batch:
                    continue
                # The remaining blocks of the batch were skipped; yield to the loads on this event
                # loop.
                await asyncio.sleep(0)
        finally:
            self._storing = None

    def _copy_unchanged(self, block: KeyedBlock) -> _Staged | None:
        """Copy a full block to a staging slot, where it waits to be stored; None if no slot is
        free, or if the block was given to other tokens before the copy ended.
        """
        assert self._sink is not None, "attach() comes before the first store"
        staged = self._copy_aside(block) if self._sink.is_unchanged(block) else None
        if staged is not None and self._sink.is_unchanged(block):
            return staged
        if staged is not None:
            self._give_back(staged)
        _count(self.counters.store_failures, "overwritten")
        return None

    async def _store_batch(self, batch: Sequence[_Staged], pin_s: float) -> None:
        areas = [self._areas[staged.group] for staged in batch]
        begin_s = self._clock.now_s()
        try:
            results: Sequence[Any] = await self._client.put_from_many(
                [make_object_key(self._identity, staged.key, staged.group) for staged in batch],
                [area.staged_part(s.slot) for s, area in zip(batch, areas, strict=True)],
                PutOptions(same_machine=True, soft_pin_s=pin_s),
            )
        except TandemError as error:
            results = [error] * len(batch)
        finally:
            for staged in batch:
                self._give_back(staged)
        self.counters.store_seconds += self._clock.now_s() - begin_s
        for staged, area, result in zip(batch, areas, results, strict=True):
            if isinstance(result, TandemError):
                _count(self.counters.store_failures, result.code)
                logger.debug("event=kv_store_failed error=%s", result)
            elif result.value == "exists":
                self.counters.store_existing_blocks += not staged.group
            else:
                self.counters.stored_bytes += area.block_bytes
                self.counters.stored_states += staged.group is Group.STATE
                self.counters.stored_window_blocks += staged.group is Group.WINDOW
                self.counters.stored_blocks += not staged.group
                self.counters.stored_tokens += 0 if staged.group else self._block_size
        there = [
            staged.key
            for staged, result in zip(batch, results, strict=True)
            if pin_s and not isinstance(result, TandemError) and result.value == "exists"
        ]
        if there:
            # Another instance has stored the block without a pin in the meantime, so pin it now.
            await self._pin_stored(there, pin_s)

    # The methods below concern the whole tier: its flush, its test and its end.

    async def flush(self) -> int:
        """Remove all blocks with this tier's KV identity from the store; return their number.

        Raises: TandemError (the store cannot be reached, so the blocks are still there).
        """
        self._generation += 1
        self._full.clear()
        while self._staged:
            self._give_back(self._staged.popleft())
        if self._storing is not None:
            # Wait for puts in progress: a block put after the removal would survive the flush.
            await asyncio.wait((self._storing,), timeout=self._config.load_deadline_ms / 1e3)
        return await self._client.remove_prefix(make_object_key(self._identity, b""))

    async def probe(self) -> None:
        """Write some blocks and read them back, to test the path and to measure a first load rate.

        Raises: CorruptionError (other bytes came back); TandemError (writing or reading failed).
        """
        size, staging = self._blocks.block_bytes, self._blocks.staging
        slots = [slot for _ in range(2 * PROBE_BLOCKS) if (slot := staging.take()) is not None]
        half = len(slots) // 2
        keys = [make_object_key(self._identity, b"probe%d" % i) for i in range(half)]
        try:
            for number, slot in enumerate(slots[:half]):
                staging.view(slot)[:] = number + 1
            sources = [self._blocks.staged_part(slot) for slot in slots[:half]]
            targets = [self._blocks.staged_part(slot) for slot in slots[half:]]
            options = PutOptions(same_machine=True, upsert=True)
            for result in await self._client.put_from_many(keys, sources, options):
                if isinstance(result, TandemError):
                    raise result
            begin_s = self._clock.now_s()
            results = await self._client.get_into_many(keys, targets[:half])
            seconds = self._clock.now_s() - begin_s
            for number, (slot, result) in enumerate(zip(slots[half:], results, strict=False)):
                if isinstance(result, TandemError):
                    raise result
                if not (staging.view(slot) == number + 1).all():
                    raise CorruptionError("kv_tier.probe", "the store gave back other bytes")
            self._on_load(half * size, seconds)
        finally:
            for slot in slots:
                staging.give_back(slot)
            await self._client.remove_many(keys)

    async def aclose(self) -> None:
        """Stop all work; loads in progress are reported as failed, and queued blocks are lost."""
        self._is_closing = True
        self._full.clear()
        while self._staged:
            self._give_back(self._staged.popleft())
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._config.load_deadline_ms / 1e3)
        for area in self._areas.values():
            area.close()


def _count(counts: dict[str, int], reason: str) -> None:
    counts[reason] = counts.get(reason, 0) + 1


def _name_load(load: BlockLoad) -> tuple[str, GroupBlock]:
    return load.request.request_id, load.block

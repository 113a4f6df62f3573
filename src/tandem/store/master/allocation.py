"""Space for puts: checks requests, reserves extents on hosts, and frees them.

If space is missing, objects are evicted and the put waits in a queue.
"""

import asyncio
import contextlib
from collections.abc import Sequence

from tandem._native import measure_extents
from tandem.core.errors import CapacityError, ConfigError
from tandem.store.arguments import MAX_SOFT_PIN_MS, check_replicas
from tandem.store.config import StoreConfig
from tandem.store.master.eviction import Eviction
from tandem.store.master.put_batch import PutBatch
from tandem.store.master.state.ledger import ExtentEvent, Space
from tandem.store.master.state.space import HostSpace
from tandem.store.master.state.state import StoreState
from tandem.store.messages import StartPut

__all__ = ["Allocation", "check_pin"]

MIN_WAIT_S = 1e-3


class Allocation:
    """Reserves space in hosts' memory for the puts of one master's clients."""

    def __init__(self, state: StoreState, eviction: Eviction) -> None:
        self._state = state
        self._eviction = eviction
        self.num_waiting = 0
        """Number of requests that wait for space."""

    def check_batch(self, request: StartPut) -> list[int]:
        """Return the bytes that each object of a put request takes on a host. Raises: ConfigError
        if the request exceeds a limit.
        """
        keys, sizes, config = request.keys, request.sizes, self._state.config
        if len(keys) != len(sizes) or len(keys) > config.max_batch:
            raise ConfigError(
                "store.put", f"{len(keys)} keys, {len(sizes)} sizes: as many, up to max_batch"
            )
        if len(set(keys)) != len(keys):
            raise ConfigError("store.put", "a key is twice in the batch", field="keys")
        check_replicas(request.replicas)
        check_pin(request.soft_pin_ms)
        lengths = [*map(len, keys)] or [1]
        if not (min(lengths) > 0 and max(lengths) <= config.max_key_bytes) or not all(
            map(str.isascii, keys)
        ):
            for key in keys:
                _check_key(key, config)
        if keys and not (min(sizes) >= 0 and max(sizes) <= config.max_value_bytes):
            wrong = next(i for i, n in enumerate(sizes) if not 0 <= n <= config.max_value_bytes)
            raise ConfigError(
                "store.put",
                f"value of {sizes[wrong]} bytes under {keys[wrong]!r}, limit "
                f"{config.max_value_bytes} (store.max_value_bytes)",
                field="size",
            )
        return measure_extents(keys, sizes)

    def find_taken(self, request: StartPut) -> bytes:
        """Return a ``StartStatus`` byte for each object: GRANTED if its key is free or is to be
        replaced, else EXISTS.
        """
        if request.upsert:
            return bytes(len(request.keys))
        return self._state.directory.exists_many(request.keys)

    def take_space(self, batch: PutBatch) -> bool:
        """Reserve space on hosts for all objects of a batch (one put request), without waiting.
        Return False if there is too little.

        Raises: CapacityError if there never will be enough.
        """
        return self._has_hosts() and self._allocate(batch, is_last=False)

    async def wait_space(self, batch: PutBatch) -> None:
        """Wait until there is space for a batch (one put request) for which ``take_space`` returned
        False, and reserve it. A waiting batch holds no space.

        Raises: CapacityError when the batch's wait is over.
        """
        wait_ms = min(batch.request.wait_ms, self._state.config.put_wait_ms)
        deadline_s = self._state.clock.now_s() + wait_ms / 1e3
        is_last, is_tried = False, self._has_hosts()
        if not is_tried:
            # No host is connected, so wait before the first attempt.
            await self._wait_in_line(max(0.0, deadline_s - self._state.clock.now_s()))
        while is_tried or not self._allocate(batch, is_last=is_last):
            is_tried = False
            left_s = deadline_s - self._state.clock.now_s()
            if is_last:
                raise self._describe_full(batch)
            if left_s > 0:
                await self._wait_in_line(left_s)
            is_last = deadline_s - self._state.clock.now_s() <= 0

    def _has_hosts(self) -> bool:
        return any(host.caller is not None for host in self._state.hosts.values())

    async def _wait_in_line(self, timeout_s: float) -> None:
        """Wait behind earlier puts until space is freed. Raises: CapacityError if too many puts
        wait already.
        """
        if self.num_waiting >= self._state.config.max_waiting_puts:
            raise CapacityError("store.put", f"{self.num_waiting} puts wait for space, the limit")
        self._state.counters.puts_waited += 1
        self.num_waiting += 1
        try:
            await self._wait_freed(timeout_s)
        finally:
            self.num_waiting -= 1

    async def _wait_freed(self, timeout_s: float) -> None:
        self._state.space_freed.clear()
        # Wait at least ``MIN_WAIT_S``: the event loop's timer and the master's clock differ, and a
        # shorter wait could end before the clock moves, again and again.
        timeout_s = max(timeout_s, MIN_WAIT_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._state.space_freed.wait()

    def _allocate(self, batch: PutBatch, *, is_last: bool) -> bool:
        """Reserve space for all objects or none. The last attempt accepts one copy of each object.

        If a host is full, objects are evicted there, and their space is free a moment later.

        Raises: CapacityError if the batch would never fit. Nothing is evicted then, nor if the
            batch fits only with hosts that are still joining.
        """
        hosts = self._state.answering_hosts()
        if len(hosts) == 1:
            placed = self._allocate_on(hosts[0], batch)
            full = None if placed else (hosts, sum(batch.lengths))
        else:
            full = self._allocate_each(batch, is_last=is_last)
        if full is None:
            batch.note_taken()
            return True
        for number in batch.places:
            # What is free now was free before, so that no waiting put is woken.
            offsets = batch.list_offsets(number)
            self._state.hosts[number].ledger.move(ExtentEvent.GIVE_BACK, offsets)
        batch.places.clear()
        if self._is_possible(batch):
            for host in full[0]:
                self._eviction.evict_for(host, full[1])
        return False

    def _allocate_on(self, host: HostSpace, batch: PutBatch) -> bool:
        offsets = host.allocate_many(batch.lengths)
        if offsets is None:
            return False
        batch.places[host.number] = dict(enumerate(offsets))
        return True

    def _allocate_each(
        self, batch: PutBatch, *, is_last: bool
    ) -> "tuple[list[HostSpace], int] | None":
        """Reserve space for each object by itself, on up to as many hosts as it wants replicas.

        Returns: None on success; else the full hosts and the length of the extent that did not fit.
        """
        request = batch.request
        for i, length in enumerate(batch.lengths):
            order = self._state.choose_hosts(preferred=request.preferred, machine=request.machine)
            goal, count = min(request.replicas, len(order)), 0
            for number in order:
                extent = self._state.hosts[number].allocate(length)
                if extent is not None:
                    batch.places.setdefault(number, {})[i] = extent.offset
                    count += 1
                    if count == goal:
                        break
            if count == 0 or (count < goal and not is_last):
                return [self._state.hosts[number] for number in order], length
        return None

    def _is_possible(self, batch: PutBatch) -> bool:
        """Return True if the active hosts could hold all objects of the batch (one put request) if
        they were empty.

        Raises: CapacityError if the batch would not fit even with all hosts that may become active
            soon.
        """
        hosts = self._state.writable_hosts()
        if not hosts or _can_fit([host.capacity_bytes for host in hosts], batch.lengths):
            return True
        able = [host.final_bytes for host in self._state.hosts.values() if not host.is_leaving]
        if not self._state.awaited.is_learning and not _can_fit(able, batch.lengths):
            raise self._describe_full(batch)
        return False

    def _describe_full(self, batch: PutBatch) -> CapacityError:
        hosts = self._state.writable_hosts()
        need = sum(batch.sizes)
        if not hosts:
            return CapacityError(
                "store.put",
                f"no host takes {need} bytes: {len(self._state.hosts)} known, none active: "
                "start one (`tandem store host`)",
            )
        free = sum(host.view().free_bytes for host in hosts)
        unfinished, leased, quarantined = (
            sum(host.ledger.count_bytes(space) for host in hosts)
            for space in (Space.HELD, Space.LEASED, Space.QUARANTINED)
        )
        return CapacityError(
            "store.put",
            f"no space for {len(batch.keys)} objects of {need} bytes on {len(hosts)} hosts within "
            f"{min(batch.request.wait_ms, self._state.config.put_wait_ms)} ms: {free} bytes free "
            f"(scattered), {unfinished} in unfinished puts, {leased} dropped but leased, "
            f"{quarantined} held until their writer is gone, the rest leased or pinned: unpin "
            "objects, put smaller batches, wait longer, or add a host",
        )


def _can_fit(capacities: Sequence[int], lengths: Sequence[int]) -> bool:
    """Return False if the extents could not fit even on empty hosts with these capacities."""
    return max(lengths) <= max(capacities, default=0) and sum(lengths) <= sum(capacities)


def check_pin(soft_pin_ms: int) -> None:
    """Check that a soft pin, in milliseconds, fits in an object's header.

    Raises: ConfigError (it does not).
    """
    if not 0 <= soft_pin_ms <= MAX_SOFT_PIN_MS:
        raise ConfigError(
            "store.pin", f"a soft pin of {soft_pin_ms} ms: give 0 to 2^32 - 1", field="soft_s"
        )


def _check_key(key: str, config: StoreConfig) -> None:
    """Check that a key is not empty, not too long, and valid text.

    Raises: ConfigError (it is not).
    """
    try:
        size_bytes = len(key.encode())
    except UnicodeEncodeError:
        raise ConfigError("store.key", f"{key!r} is not valid text", field="key") from None
    if not 0 < size_bytes <= config.max_key_bytes:
        raise ConfigError(
            "store.key",
            f"key of {size_bytes} bytes, limit {config.max_key_bytes} (store.max_key_bytes), "
            "at least 1",
            field="key",
        )

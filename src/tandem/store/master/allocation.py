"""Space for puts: requests are checked, space is taken on hosts, and given back.

Where there is none, objects are evicted and the put waits in line.
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
from tandem.store.master.state.space import HostSpace
from tandem.store.master.state.state import StoreState
from tandem.store.messages import StartPut

__all__ = ["Allocation", "check_pin"]

MIN_WAIT_S = 1e-3


class Allocation:
    """Takes space for one master's puts."""

    def __init__(self, state: StoreState, eviction: Eviction) -> None:
        self._state = state
        self._eviction = eviction
        self.num_waiting = 0
        """Requests that wait for space."""

    def check_batch(self, request: StartPut) -> list[int]:
        """Return the lengths of the extents. Raises: ConfigError if it is beyond a limit."""
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
        """Return a ``StartStatus`` for each object: it is new, or there already and stays."""
        if request.upsert:
            return bytes(len(request.keys))
        return self._state.directory.exists_many(request.keys)

    def take_space(self, batch: PutBatch) -> bool:
        """Take space for all objects at once, if there is some; else it comes by ``wait_space``.

        Raises: CapacityError if there never will be enough.
        """
        return self._has_hosts() and self._allocate(batch, is_last=False)

    async def wait_space(self, batch: PutBatch) -> None:
        """Take space for what ``take_space`` found none for; what waits holds nothing meanwhile.

        Raises: CapacityError.
        """
        wait_ms = min(batch.request.wait_ms, self._state.config.put_wait_ms)
        deadline_s = self._state.clock.now_s() + wait_ms / 1e3
        is_last, is_tried = False, self._has_hosts()
        if not is_tried:
            # Nothing to wait for but a host.
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
        """Wait for space, if not too many do. Raises: CapacityError."""
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
        # The loop's timer and the master's clock may differ: the time left may be too short for
        # the one to go on by, and be something to the other for ever.
        timeout_s = max(timeout_s, MIN_WAIT_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._state.space_freed.wait()

    def _allocate(self, batch: PutBatch, *, is_last: bool) -> bool:
        """Take space for all objects, or none; the last attempt is content with one copy of each.

        Where a host is full, objects are evicted there, and their space is there a moment later.

        Raises: CapacityError if it would never be enough. Nothing is evicted then, nor while only
            a host that may come would be.
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
            self._state.hosts[number].untake(batch.list_offsets(number))
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
        """Take space on as many hosts as wanted and there are, for each object by itself.

        Returns: None, or the hosts that are full and how much one of the objects needs there.
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
        """Return True if the hosts that are active now could hold it, were they empty.

        Raises: CapacityError if not even those could that may be soon.
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
        quarantined = sum(host.quarantined_bytes for host in hosts)
        leased = sum(host.leased_bytes for host in hosts)
        unfinished = sum(host.held_bytes for host in hosts)
        return CapacityError(
            "store.put",
            f"no space for {len(batch.keys)} objects of {need} bytes on {len(hosts)} hosts within "
            f"{min(batch.request.wait_ms, self._state.config.put_wait_ms)} ms: {free} bytes free "
            f"(scattered), {unfinished} in unfinished puts, {leased} dropped but leased, "
            f"{quarantined} held until their writer is gone, the rest leased or pinned: unpin "
            "objects, put smaller batches, wait longer, or add a host",
        )


def _can_fit(capacities: Sequence[int], lengths: Sequence[int]) -> bool:
    """Return True if empty hosts could have room for extents; no means that they never will."""
    return max(lengths) <= max(capacities, default=0) and sum(lengths) <= sum(capacities)


def check_pin(soft_pin_ms: int) -> None:
    """Refuse a soft pin that no header can hold.

    Raises: ConfigError.
    """
    if not 0 <= soft_pin_ms <= MAX_SOFT_PIN_MS:
        raise ConfigError(
            "store.pin", f"a soft pin of {soft_pin_ms} ms: give 0 to 2^32 - 1", field="soft_s"
        )


def _check_key(key: str, config: StoreConfig) -> None:
    """Refuse a key that no store takes.

    Raises: ConfigError.
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

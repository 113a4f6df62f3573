"""The asyncio client of a store: the whole API. ``tandem.store.sync_client`` is its blocking twin.

Logic only: the master is a ``MasterChannel`` and bytes move through a ``ClientPort``, so that the
simulator runs this same class. ``put_batch`` has the steps of a put, ``reading`` those of a get.
"""

import copy
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

from tandem.core.clock import Clock
from tandem.core.errors import ConfigError, NotFoundError, PermissionDeniedError, TandemError
from tandem.store.arguments import MAX_SOFT_PIN_MS, check_keys, check_ranges, to_ms
from tandem.store.client.buffers import (
    Part,
    ResultPool,
    Staging,
    StoreBuffer,
    as_bytes,
    as_views,
    list_parts,
    measure_parts,
)
from tandem.store.client.destinations import (
    Destination,
    NewBytes,
    OneBuffer,
    Ranges,
    SeveralParts,
)
from tandem.store.client.location_cache import LocationCache
from tandem.store.client.master_calls import MasterCalls
from tandem.store.client.options import DEFAULT_OPTIONS, PutOptions, PutResult, take_only
from tandem.store.client.put_batch import Items, PutBatch, is_inline
from tandem.store.client.reading import ObjectReader, hosts_lost, not_found
from tandem.store.config import StoreConfig
from tandem.store.interfaces import ClientPort, MasterChannel
from tandem.store.messages import (
    UNREADABLE,
    Ack,
    DrainHost,
    FloorSet,
    KeyBytes,
    KeyList,
    KeyPage,
    ListKeys,
    Located,
    LocateObjects,
    PinObjects,
    PrefixRemoval,
    RemoveObjects,
    RemovePrefix,
    RetireHost,
    SetFloor,
    StoreStatus,
)
from tandem.store.usual_time import UsualTime

__all__ = ["AsyncStoreClient"]

T = TypeVar("T")

ITEMS_AT_ONCE = 1_000
"""Number of a batch's objects that are prepared between two checks of the deadline."""


class AsyncStoreClient:
    """A client of one store. All calls come from one event loop; any number may run at a time.

    Args:
        channel: the channel to the master.
        port: the data path.
        clock: times leases and deadlines.
        config: limits and intervals.
        machine: hosts of this machine are read first.
    """

    def __init__(
        self,
        channel: MasterChannel,
        port: ClientPort,
        *,
        clock: Clock,
        config: StoreConfig,
        machine: str = "",
    ) -> None:
        self.config = config
        self._port = port
        self._calls = MasterCalls(channel, clock=clock, config=config, machine=machine)
        self._usual_writes: dict[str, UsualTime] = {}
        self._places = LocationCache(config.location_cache)
        self._reader = ObjectReader(self._calls, port, self._places)
        self._results = ResultPool(port, config.result_pool_bytes)
        self._owner = object()
        """An object that marks buffers as registered with this client, or with its twin."""

    @property
    def calls(self) -> MasterCalls:
        """The object that makes this client's calls to the master; needed to make a twin (a client
        of the same session that blocks threads).
        """
        return self._calls

    def make_twin(self, calls: MasterCalls, port: ClientPort) -> "AsyncStoreClient":
        """Return a client of the same session that waits by other means, those of ``calls`` and
        ``port``; see ``blocking``.
        """
        twin = copy.copy(self)
        twin._port, twin._calls = port, calls
        twin._reader = ObjectReader(calls, port, self._places)
        twin._results = ResultPool(port, self.config.result_pool_bytes)
        return twin

    def on_master(self) -> None:
        """Forget all cached locations of objects, because a session with a master has begun or
        ended.

        Called by the owner of the sessions.
        """
        self._places.clear()

    # The methods below register and unregister memory of the caller for transfers.

    def register(self, memory: Any) -> StoreBuffer:
        """Register memory, so that transfers read and write it without a copy.

        Args:
            memory: contiguous; an array, bytearray, memoryview, or an object with DLPack (a CPU
                tensor of any type). Kept alive until it is unregistered. Read-only memory can be
                the source of puts, not the destination of gets.

        Raises: ShapeError if it is not contiguous.
        """
        array = as_bytes(memory)
        return StoreBuffer(self._port.register(array), array, self._owner)

    def unregister(self, buffer: StoreBuffer) -> None:
        """End the registration of memory. No transfer touches it after the return.

        Raises: NotFoundError if it is not registered with this client; DeadlineError if transfers
            still run: the memory takes no new ones, and the call may be repeated.
        """
        if buffer.owner is not self._owner:
            raise NotFoundError("store.memory", "the buffer is not registered here (any more)")
        self._port.unregister(buffer.handle)
        buffer.owner = None

    def _check_parts(self, parts: Iterable[Part], *, is_read: bool = False) -> None:
        """Check that transfers may touch the parts' memory.

        Raises: ConfigError (not registered), PermissionDeniedError (read-only).
        """
        for buffer in {part.buffer for part in parts}:
            if buffer.owner is not self._owner:
                raise ConfigError(
                    "store.part",
                    f"a buffer of {buffer.nbytes} bytes is not registered with this client (any "
                    "more): call register() first",
                    field="parts",
                )
            if is_read and not buffer.array.flags.writeable:
                raise PermissionDeniedError(
                    "store.get", f"a buffer of {buffer.nbytes} bytes is read-only", field="parts"
                )

    # The methods below put objects.

    async def put(self, key: str, value: Any, options: PutOptions = DEFAULT_OPTIONS) -> PutResult:
        """Store an object. Readers see all of it or nothing.

        Args:
            key: up to ``max_key_bytes`` of UTF-8.
            value: bytes, array ...; a list or tuple of such is stored as one, in order.
            options: replicas, pins and placement.

        Returns: CREATED; EXISTS if the key has a readable object already, which stays; REPLACED
            with upsert.
        Raises: CapacityError when there is no space in time, with advice; ConfigError beyond a
            limit; PeerLostError or DeadlineError when master or hosts do not answer.
        """
        return take_only(await self.put_many([key], [value], options))

    async def put_many(
        self, keys: Sequence[str], values: Sequence[Any], options: PutOptions = DEFAULT_OPTIONS
    ) -> "list[PutResult | TandemError]":
        """Store objects. Return one result for each key, which may be an error. Space is reserved
        for all or none.

        Raises: errors of the whole batch: ConfigError (not as many values as keys, a bad key, or
            beyond a limit); CapacityError (no space in time); PeerLostError or DeadlineError (the
            master or hosts do not answer).
        """
        if len(keys) != len(values):
            raise ConfigError("store.put", f"{len(keys)} keys, {len(values)} values")
        check_keys(keys)
        deadline_s = self._calls.deadline_s()
        views_of = [as_views(value) for value in self._within(values, deadline_s)]
        sizes = [sum([view.size for view in views]) for views in views_of]
        if is_inline(sizes, self.config):
            return await self._put(Items.inline(keys, sizes, views_of), options, deadline_s)
        lent: list[StoreBuffer] = []
        try:
            staging = Staging(self._port, lent)
            parts = [staging.add(views) for views in self._within(views_of, deadline_s)]
            for _ in self._within(staging.copy(), deadline_s):
                pass
            return await self._put(Items.of(keys, sizes, parts), options, deadline_s)
        finally:
            for buffer in lent:
                self._port.unregister(buffer.handle)

    def _within(self, items: "Iterable[T]", deadline_s: float) -> "Iterator[T]":
        """Yield the items of a batch, and check after each slice of them that the deadline has not
        passed. Raises: DeadlineError (it has).
        """
        for i, item in enumerate(items):
            if i % ITEMS_AT_ONCE == 0:
                self._calls.left_s(deadline_s)
            yield item

    async def put_from(
        self, key: str, parts: Part | Sequence[Part], options: PutOptions = DEFAULT_OPTIONS
    ) -> PutResult:
        """Store an object from registered buffers, without a copy; otherwise like ``put``."""
        return take_only(await self.put_from_many([key], [parts], options))

    async def put_from_many(
        self,
        keys: Sequence[str],
        parts: Sequence[Part | Sequence[Part]],
        options: PutOptions = DEFAULT_OPTIONS,
    ) -> "list[PutResult | TandemError]":
        """Store objects from registered buffers, without a copy; otherwise like ``put_many``.

        Raises: ConfigError (keys and parts differ in number); the errors of ``put_many``.
        """
        if len(keys) != len(parts):
            raise ConfigError("store.put", f"{len(keys)} keys, {len(parts)} values")
        check_keys(keys)
        deadline_s = self._calls.deadline_s()
        if set(map(type, parts)) == {Part}:
            singles = list(cast("Sequence[Part]", parts))  # A copy, which the caller cannot change.
            self._check_parts(singles)
            items = Items(keys, measure_parts(singles), singles)
        else:
            parts_of = [list_parts(given) for given in parts]
            self._check_parts(part for given in parts_of for part in given)
            items = Items.of(keys, [sum(measure_parts(given)) for given in parts_of], parts_of)
        if is_inline(items.sizes, self.config):
            views_of = [[part.view for part in items.list_parts(i)] for i in range(len(keys))]
            items = Items.inline(keys, items.sizes, views_of)
        return await self._put(items, options, deadline_s)

    async def _put(
        self, items: Items, options: PutOptions, deadline_s: float
    ) -> "list[PutResult | TandemError]":
        usual = self._usual_writes
        return await PutBatch(self._calls, self._port, usual, items, options, deadline_s).put()

    # The methods below get values of objects.

    async def get(self, key: str) -> bytes:
        """Return the value of a key.

        Raises: NotFoundError if it has no object; CorruptionError if every replica is corrupt;
            PeerLostError or DeadlineError if none can be reached.
        """
        return take_only(await self.get_many([key]))

    async def get_many(self, keys: Sequence[str]) -> "list[bytes | TandemError]":
        """Return the values: one result for each key, which may be a NotFoundError or another
        error.
        """
        check_keys(keys)
        return await self._read(NewBytes(keys, self._results))

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Return bytes ``[offset, offset + length)`` of a value, verified like a whole value.

        Raises: as ``get``; ConfigError if the range leaves the value.
        """
        return take_only(await self.get_range_many([key], [(offset, length)]))

    async def get_range_many(
        self, keys: Sequence[str], ranges: Sequence[tuple[int, int]]
    ) -> "list[bytes | TandemError]":
        """Return a range (offset, length) of each value. Results are like those of ``get_many``.

        Raises: ConfigError (keys and ranges differ in number).
        """
        if len(keys) != len(ranges):
            raise ConfigError("store.get", f"{len(keys)} keys, {len(ranges)} ranges")
        check_keys(keys)
        check_ranges(ranges)
        return await self._read(Ranges(keys, ranges))

    async def get_into(self, key: str, parts: Part | Sequence[Part]) -> int:
        """Read a value into registered buffers, without a copy.

        Returns: the value's bytes. The parts must hold as many. Bytes of the parts behind the value
            stay as they are, except if the value was replaced by a shorter one, or removed, a
            moment ago: the old value may have been read there before this was noticed.
        Raises: as ``get``; ShapeError if the parts are too small.
        """
        return take_only(await self.get_into_many([key], [parts]))

    async def get_into_many(
        self, keys: Sequence[str], parts: Sequence[Part | Sequence[Part]]
    ) -> "list[int | TandemError]":
        """Read values into registered buffers, without a copy. Results are like those of
        ``get_many``, with the number of bytes.

        Raises: ConfigError (keys and parts differ in number).
        """
        if len(keys) != len(parts):
            raise ConfigError("store.get", f"{len(keys)} keys, {len(parts)} destinations")
        check_keys(keys)
        targets = [list_parts(given) for given in parts]
        self._check_parts((part for target in targets for part in target), is_read=True)
        buffer = targets[0][0].buffer if targets and targets[0] else None
        if buffer is None or any(len(t) != 1 or t[0].buffer is not buffer for t in targets):
            return await self._read(SeveralParts(keys, targets))
        return await self._read(OneBuffer(keys, buffer, [target[0] for target in targets]))

    async def _read(self, into: Destination) -> list[Any]:
        await self._reader.read(into, self._calls.deadline_s())
        return into.results

    # The methods below look up, remove and pin objects, and manage hosts.

    async def exists(self, key: str) -> bool:
        """Return True if the object exists and is readable. Changes no lease and no LRU order."""
        return (await self.exists_many([key]))[0]

    async def exists_many(self, keys: Sequence[str]) -> list[bool]:
        """Return, for each key, True if the object exists and is readable; see ``exists``."""
        check_keys(keys)
        deadline_s = self._calls.deadline_s()
        found = await self._calls.ask("exists", KeyList(list(keys)), KeyBytes, deadline_s)
        return list(map(bool, found.flags))

    async def size(self, key: str) -> int:
        """Return the size of a value in bytes.

        Raises: NotFoundError (the key has no object); PeerLostError (all hosts of it are lost).
        """
        return take_only(await self.size_many([key]))

    async def size_many(self, keys: Sequence[str]) -> "list[int | TandemError]":
        """Return the size of each value in bytes. Results are like those of ``get_many``."""
        check_keys(keys)
        deadline_s = self._calls.deadline_s()
        request = LocateObjects(list(keys), lease=False)
        located = await self._calls.ask("locate", request, Located, deadline_s)
        sizes = struct.unpack_from(f"<{len(keys)}q", located.columns)
        sized = zip(keys, sizes, strict=True)
        return [
            size if size >= 0 else hosts_lost(key) if size == UNREADABLE else not_found(key)
            for key, size in self._within(sized, deadline_s)
        ]

    async def remove(self, key: str) -> bool:
        """Remove an object. Running reads of it complete.

        Returns: True if the key had an object. False also if a first attempt removed it and its
            answer was lost with its master. After the return nothing brings the object back: no
            restart, and no host that was away.
        """
        return (await self.remove_many([key]))[0]

    async def remove_many(self, keys: Sequence[str]) -> list[bool]:
        """Remove objects as ``remove`` does; return its result for each key."""
        check_keys(keys)
        self._places.cache.forget(keys)
        answer = await self._calls.change("remove", RemoveObjects(keys=list(keys)), KeyBytes)
        return list(map(bool, answer.flags))

    async def remove_prefix(self, prefix: str) -> int:
        """Remove all objects whose keys begin with a prefix, and return their number. An empty
        prefix removes all objects.
        """
        check_keys([prefix], field="prefix")
        self._places.clear()
        return (
            await self._calls.change("remove_prefix", RemovePrefix(prefix=prefix), PrefixRemoval)
        ).count

    async def pin(self, key: str, *, soft_s: float = 0.0, hard: bool = False) -> bool:
        """Replace the pins of an object, which protect it from eviction. Return False if there is
        no such object. See ``PutOptions``.
        """
        return (await self.pin_many([key], soft_s=soft_s, hard=hard))[0]

    async def pin_many(
        self, keys: Sequence[str], *, soft_s: float = 0.0, hard: bool = False
    ) -> list[bool]:
        """Replace the pins of objects as ``pin`` does; return its result for each key.

        Raises: ConfigError (neither pin is given).
        """
        if not hard and soft_s <= 0:
            raise ConfigError("store.pin", "give soft_s > 0 or hard=True; or call unpin")
        check_keys(keys)
        soft_ms = to_ms(soft_s, "soft_s", most_ms=MAX_SOFT_PIN_MS)
        request = PinObjects(keys=list(keys), hard=hard, soft_ms=soft_ms)
        return list(map(bool, (await self._calls.change("pin", request, KeyBytes)).flags))

    async def unpin(self, key: str) -> bool:
        """Remove both pins of an object. Return False if there is no such object."""
        return (await self.unpin_many([key]))[0]

    async def unpin_many(self, keys: Sequence[str]) -> list[bool]:
        """Remove both pins of objects as ``unpin`` does; return its result for each key."""
        check_keys(keys)
        answer = await self._calls.change("pin", PinObjects(keys=list(keys)), KeyBytes)
        return list(map(bool, answer.flags))

    async def list_keys(self, prefix: str = "", *, after: str = "", limit: int = 1000) -> KeyPage:
        """Return one page of the keys with a prefix, sorted, beginning after the key ``after``."""
        check_keys([prefix, after], field="prefix")
        most = min(limit, self.config.max_batch)
        return await self._calls.simple("list", ListKeys(prefix, after, most), KeyPage)

    async def status(self) -> StoreStatus:
        """Return the status of the store, as its master sees it."""
        return await self._calls.simple("status", None, StoreStatus)

    async def drain(self, host: str) -> None:
        """Start to move all objects off a host. ``status`` shows the end.

        Raises: NotFoundError (no host of this name is connected).
        """
        check_keys([host], field="host")
        await self._calls.simple("drain", DrainHost(host), Ack)

    async def retire(self, host: str) -> None:
        """Retire a host that is gone for good, so that nothing waits for it.

        Its objects are dropped if it returns nevertheless.

        Raises: NotFoundError if the store has no host of this name, or it was retired before;
            ConflictError if it is connected.
        """
        await self._calls.simple("retire", RetireHost(host), Ack)

    async def set_floor(self, *, dry_run: bool = False) -> FloorSet:
        """Drop the objects of hosts that the roster (the durable list of the store's hosts) does
        not name, when such hosts join.

        For a store whose roster was lost: until this call, each removal leaves a permanent
        tombstone (a durable note of the removal).

        Args:
            dry_run: True to return the effect without applying it.

        Raises: ConflictError while hosts are still awaited.
        """
        return await self._calls.simple("set_floor", SetFloor(dry_run), FloorSet)

    async def aclose(self) -> None:
        """Stop background tasks and free memory. The caller closes the channel and the port."""
        await self._calls.aclose()
        self._reader.close()
        self._results.close()

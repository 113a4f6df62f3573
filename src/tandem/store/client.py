"""A client of a store, asyncio: the whole API. ``tandem.store.sync_client`` is its blocking twin.

The logic alone: the master is a ``MasterChannel``, bytes move through a ``ClientPort``; the
simulator runs this very class.
"""

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from tandem.core.clock import Clock
from tandem.core.errors import (
    CapacityError,
    ConfigError,
    CorruptionError,
    DeadlineError,
    NotFoundError,
    PeerLostError,
    ShapeError,
    TandemError,
)
from tandem.store import layout
from tandem.store.checksum import check_value, checksum_table, make_table
from tandem.store.config import StoreConfig
from tandem.store.messages import (
    Ack,
    CommitPut,
    CommitStatus,
    DrainHost,
    Endpoint,
    FindObjects,
    FoundObjects,
    KeyBytes,
    KeyList,
    KeyPage,
    ListKeys,
    PinObjects,
    PrefixRemoval,
    RemovePrefix,
    ReportBadReplica,
    StartedPut,
    StartPut,
    StartStatus,
    StoreStatus,
)

__all__ = [
    "AsyncStoreClient",
    "ClientPort",
    "MasterChannel",
    "Part",
    "Piece",
    "PutOptions",
    "PutResult",
    "StoreBuffer",
]

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_ATTEMPTS = 4
"""Times that a put or get begins anew after what can only be transient."""
CALL_TIMEOUT_S = 5.0
RETRY_S = 0.02
STAGED_BYTES = 256 * 1024
"""Smaller values are copied behind their table, which saves a transfer; larger ones are not."""
LEASE_SHARE = 0.9
"""Of a lease that a reader uses: clocks of two machines differ in rate, by far less than this."""
OFF_LOOP_BYTES = 2**20
"""More than this is checksummed in a thread, so that the loop lives on."""


class PutResult(Enum):
    """What a put did."""

    CREATED = "created"
    EXISTS = "exists"
    """There was an object under the key; it stays as it is. Not with ``upsert``."""
    REPLACED = "replaced"
    """A new version took the place of an old one."""


class Piece(NamedTuple):
    """One contiguous range to move."""

    memory: Any
    """A handle that ``ClientPort.register`` returned."""
    local_offset: int
    offset: int
    """In the address space of the host."""
    length: int


class ClientPort(Protocol):
    """The data path of a client."""

    def register(self, memory: npt.NDArray[np.uint8]) -> Any:
        """Let transfers touch ``memory``; returns the handle for ``Piece``."""
        ...

    def unregister(self, handle: Any) -> None:
        """Take memory back. No transfer touches it once this has returned."""
        ...

    async def write(self, endpoint: Endpoint, pieces: Sequence[Piece], timeout_s: float) -> None:
        """Write into a host's segment; returns when the host has all bytes."""
        ...

    async def read(self, endpoint: Endpoint, pieces: Sequence[Piece], timeout_s: float) -> None:
        """Read from a host's segment."""
        ...


class MasterChannel(Protocol):
    """The way to the master, over all its lives: the part of ``rpc.RpcClient`` used here."""

    async def call(
        self,
        method: str,
        request: object,
        response_type: type[T],
        *,
        timeout_s: float | None = None,
    ) -> T:
        """Call the present master; PeerLostError if there is none."""
        ...

    async def wait_connected(self, timeout_s: float) -> object:
        """Wait for a session. Raises: DeadlineError."""
        ...


class StoreBuffer:
    """Registered memory of a client: gets and puts move bytes between it and the store in place."""

    def __init__(self, handle: Any, array: npt.NDArray[np.uint8]) -> None:
        self.handle = handle
        self.array = array
        """The bytes; a view of what was registered."""

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.array.size


class Part(NamedTuple):
    """A range of a registered buffer; an object may be made of several."""

    buffer: StoreBuffer
    offset: int = 0
    length: int = -1
    """-1: to the end."""

    @property
    def view(self) -> npt.NDArray[np.uint8]:
        """The bytes.

        Raises: ShapeError if the range leaves the buffer.
        """
        length = self.buffer.nbytes - self.offset if self.length < 0 else self.length
        if not 0 <= self.offset <= self.offset + length <= self.buffer.nbytes:
            raise ShapeError(
                "store.part",
                f"range [{self.offset}, {self.offset + length}) of a buffer of "
                f"{self.buffer.nbytes} bytes",
            )
        return self.buffer.array[self.offset : self.offset + length]


@dataclass(frozen=True, kw_only=True, slots=True)
class PutOptions:
    """How objects are kept."""

    replicas: int = 1
    """Copies, each on another host; fewer if there are not so many, and then repaired later."""
    preferred: Sequence[str] = ()
    """Names of hosts to try first."""
    same_machine: bool = False
    """Try hosts of our machine first."""
    upsert: bool = False
    """Replace an object of the same key; readers of the old version are not disturbed."""
    soft_pin_s: float = 0.0
    """Evicted only after what is not pinned, for so long."""
    hard_pin: bool = False
    """Never evicted."""
    wait_s: float | None = None
    """How long to wait for space; None = as configured, which is also the most."""


DEFAULT_OPTIONS = PutOptions()


class _Item(NamedTuple):
    key: str
    parts: Sequence[Part]
    size: int


class _Source(NamedTuple):
    """An object as it will be written: checksum, and pieces relative to its table."""

    checksum: int
    pieces: list[tuple[Any, int, int]]
    """(handle, local offset, length), one after the other in the extent."""


class AsyncStoreClient:
    """Speaks to one store. All calls from one event loop; any number at a time.

    Args:
        channel: the way to the master.
        port: the data path.
        clock: of leases and deadlines.
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
        self._channel = channel
        self._port = port
        self._clock = clock
        self._machine = machine
        self._put_ids = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    # Memory.

    def register(self, memory: Any) -> StoreBuffer:
        """Let transfers touch memory of the caller in place.

        Args:
            memory: contiguous; an array, bytearray, memoryview, or what gives DLPack. Kept alive
                until it is unregistered. Read-only memory can be put, not got into.

        Raises: ShapeError if it is not contiguous.
        """
        array = as_bytes(memory)
        return StoreBuffer(self._port.register(array), array)

    def unregister(self, buffer: StoreBuffer) -> None:
        """Take memory back; no transfer touches it any more."""
        self._port.unregister(buffer.handle)

    # Writing.

    async def put(self, key: str, value: Any, options: PutOptions = DEFAULT_OPTIONS) -> PutResult:
        """Store an object; it is visible whole, or not at all.

        Args:
            key: up to ``max_key_bytes`` of UTF-8.
            value: bytes, array ...; a list or tuple of such is stored as one, in order.
            options: how it is kept.

        Returns: CREATED; EXISTS if there was one already (which stays); REPLACED with upsert.
        Raises: CapacityError when there is no space in time, with what would help; ConfigError
            beyond a limit; PeerLostError or DeadlineError when master or hosts stay away.
        """
        return _only(await self.put_many([key], [value], options))

    async def put_many(
        self, keys: Sequence[str], values: Sequence[Any], options: PutOptions = DEFAULT_OPTIONS
    ) -> "list[PutResult | TandemError]":
        """Store objects: one result a key, an error being one. Space is for all or for none.

        Raises: what concerns the batch as a whole: ConfigError, CapacityError, PeerLostError ...
        """
        if len(keys) != len(values):
            raise ConfigError("store.put", f"{len(keys)} keys, {len(values)} values")
        lent: list[StoreBuffer] = []
        try:
            items: list[_Item] = []
            staging = _Staging(self._port, lent)
            for key, value in zip(keys, values, strict=True):
                views = _as_views(value)
                items.append(_Item(key, staging.add(views), sum(view.size for view in views)))
            staging.close()
            return await self._put_items(items, options)
        finally:
            for buffer in lent:
                self._port.unregister(buffer.handle)

    async def put_from(
        self, key: str, parts: Part | Sequence[Part], options: PutOptions = DEFAULT_OPTIONS
    ) -> PutResult:
        """Store an object out of registered buffers, without a copy. As ``put``."""
        return _only(await self.put_from_many([key], [parts], options))

    async def put_from_many(
        self,
        keys: Sequence[str],
        parts: Sequence[Part | Sequence[Part]],
        options: PutOptions = DEFAULT_OPTIONS,
    ) -> "list[PutResult | TandemError]":
        """Store objects out of registered buffers. As ``put_many``."""
        if len(keys) != len(parts):
            raise ConfigError("store.put", f"{len(keys)} keys, {len(parts)} values")
        items: list[_Item] = []
        for key, given in zip(keys, parts, strict=True):
            listed = _list_parts(given)
            items.append(_Item(key, listed, sum(part.view.size for part in listed)))
        return await self._put_items(items, options)

    async def _put_items(
        self, items: Sequence[_Item], options: PutOptions
    ) -> "list[PutResult | TandemError]":
        deadline_s = self._clock.now_s() + self.config.deadline_ms / 1e3
        results: list[PutResult | TandemError | None] = [None] * len(items)
        tables: list[StoreBuffer] = []
        try:
            sources = await self._prepare(items, tables)
            for _ in range(MAX_ATTEMPTS):
                left = [i for i, result in enumerate(results) if result is None]
                if not left:
                    break
                await self._put_once(items, sources, left, options, results, deadline_s)
        finally:
            for buffer in tables:
                self._port.unregister(buffer.handle)
        lost = PeerLostError(
            "store.put", f"no host took the bytes in {MAX_ATTEMPTS} attempts: see its log"
        )
        return [lost if result is None else result for result in results]

    async def _prepare(self, items: Sequence[_Item], lent: list[StoreBuffer]) -> list[_Source]:
        """Compute the tables; they are registered as one buffer."""
        views = [[part.view for part in item.parts] for item in items]
        if sum(item.size for item in items) > OFF_LOOP_BYTES:
            tables = await asyncio.to_thread(lambda: [make_table(parts) for parts in views])
        else:
            tables = [make_table(parts) for parts in views]
        sources: list[_Source] = []
        staged = bytearray()
        for item, table in zip(items, tables, strict=True):
            pieces: list[tuple[Any, int, int]] = []
            if table:
                padded = table.ljust(layout.table_bytes(item.size), b"\0")
                first = item.parts[0]
                if isinstance(first, _StagedPart):
                    # Staged: the room before the value is the table's.
                    at = first.offset - len(padded)
                    first.buffer.array[at : first.offset] = np.frombuffer(padded, np.uint8)
                    pieces.append((first.buffer, at, len(padded) + item.size))
                    sources.append(_Source(checksum_table(table), pieces))
                    continue
                pieces.append((None, len(staged), len(padded)))
                staged += padded
            pieces += [(part.buffer, part.offset, part.view.size) for part in item.parts]
            sources.append(_Source(checksum_table(table), pieces))
        if staged:
            array = np.frombuffer(staged, dtype=np.uint8)
            buffer = StoreBuffer(self._port.register(array), array)
            lent.append(buffer)
            for source in sources:
                source.pieces[:] = [(b or buffer, at, length) for b, at, length in source.pieces]
        return sources

    async def _put_once(
        self,
        items: Sequence[_Item],
        sources: Sequence[_Source],
        left: Sequence[int],
        options: PutOptions,
        results: "list[PutResult | TandemError | None]",
        deadline_s: float,
    ) -> None:
        """Try the objects ``left``; those without a result may be tried again."""
        first_id = next(self._put_ids)
        for _ in range(len(left) - 1):
            next(self._put_ids)
        config = self.config
        wait_ms = config.put_wait_ms if options.wait_s is None else int(options.wait_s * 1e3)
        started = await self._call(
            "start_put",
            StartPut(
                first_put_id=first_id,
                keys=[items[i].key for i in left],
                sizes=[items[i].size for i in left],
                replicas=options.replicas,
                preferred=list(options.preferred),
                machine=self._machine if options.same_machine else "",
                upsert=options.upsert,
                hard_pin=options.hard_pin,
                soft_pin_ms=int(options.soft_pin_s * 1e3),
                wait_ms=wait_ms,
            ),
            StartedPut,
            deadline_s,
            extra_s=min(wait_ms, config.put_wait_ms) / 1e3,
        )
        granted: list[int] = []
        for position, i in enumerate(left):
            if started.statuses[position] == StartStatus.EXISTS:
                results[i] = PutResult.EXISTS
            elif started.statuses[position] == StartStatus.GRANTED:
                granted.append(position)
        commit = CommitPut(
            put_ids=[first_id + position for position in granted],
            grants=[started.grants[position] for position in granted],
            checksums=[sources[left[position]].checksum for position in granted],
            failed_hosts=[[] for _ in granted],
        )
        if not granted:
            return
        try:
            failed = await self._write(items, sources, left, granted, started, deadline_s)
        except BaseException:
            # Cancelled: whatever was under way has ended here, but bytes may yet arrive there.
            hosts = [endpoint.host for endpoint in started.endpoints]
            self._spawn(self._give_up(commit, hosts))
            raise
        for position, row in zip(granted, commit.failed_hosts, strict=True):
            row += [host for host, _ in started.places[position] if host in failed]
        answer = await self._call("commit_put", commit, KeyBytes, deadline_s)
        outcomes = {
            CommitStatus.CREATED: PutResult.CREATED,
            CommitStatus.EXISTS: PutResult.EXISTS,
            CommitStatus.REPLACED: PutResult.REPLACED,
        }
        for position, flag in zip(granted, answer.flags, strict=True):
            results[left[position]] = outcomes.get(CommitStatus(flag))

    async def _write(
        self,
        items: Sequence[_Item],
        sources: Sequence[_Source],
        left: Sequence[int],
        granted: Sequence[int],
        started: StartedPut,
        deadline_s: float,
    ) -> set[int]:
        """Write all objects to all their hosts; returns the hosts where it did not succeed."""
        endpoints = {endpoint.host: endpoint for endpoint in started.endpoints}
        pieces: dict[int, list[Piece]] = {host: [] for host in endpoints}
        for position in granted:
            item, source = items[left[position]], sources[left[position]]
            table_at = layout.table_offset(len(item.key.encode()))
            for host, extent_at in started.places[position]:
                at = endpoints[host].write_base + extent_at + table_at
                for buffer, local_offset, length in source.pieces:
                    if length:
                        pieces[host].append(Piece(buffer.handle, local_offset, at, length))
                        at += length
        # A write may take as long as the master lets a put be unfinished, and no longer.
        timeout_s = min(self.config.put_timeout_ms / 1e3, self._left_s(deadline_s))
        hosts = [host for host in endpoints if pieces[host]]
        outcomes = await asyncio.gather(
            *(self._port.write(endpoints[host], pieces[host], timeout_s) for host in hosts),
            return_exceptions=True,
        )
        failed: set[int] = set()
        for host, outcome in zip(hosts, outcomes, strict=True):
            if isinstance(outcome, TandemError):
                logger.info("event=write_failed host=%s reason=%s", endpoints[host].name, outcome)
                failed.add(host)
            elif outcome is not None:
                raise outcome
        return failed

    async def _give_up(self, commit: CommitPut, hosts: list[int]) -> None:
        request = CommitPut(
            put_ids=commit.put_ids,
            grants=commit.grants,
            checksums=[-1] * len(commit.put_ids),
            failed_hosts=[hosts for _ in commit.put_ids],
        )
        try:
            await self._channel.call("commit_put", request, KeyBytes, timeout_s=CALL_TIMEOUT_S)
        except TandemError as error:
            logger.debug("event=give_up_untold reason=%s", error)  # The put expires by itself.

    # Reading.

    async def get(self, key: str) -> bytes:
        """Return the value.

        Raises: NotFoundError; CorruptionError if every replica is damaged; PeerLostError or
            DeadlineError if none can be reached.
        """
        return _only(await self.get_many([key]))

    async def get_many(self, keys: Sequence[str]) -> "list[bytes | TandemError]":
        """Return the values: one result a key, NotFoundError and other errors being results."""
        return await self._get_many(keys, [(0, -1)] * len(keys))

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Return bytes ``[offset, offset + length)`` of a value, checked like a whole one.

        Raises: as ``get``; ConfigError if the range leaves the value.
        """
        return _only(await self.get_range_many([key], [(offset, length)]))

    async def get_range_many(
        self, keys: Sequence[str], ranges: Sequence[tuple[int, int]]
    ) -> "list[bytes | TandemError]":
        """Return a range (offset, length) of each value; results as ``get_many``."""
        if len(keys) != len(ranges) or any(offset < 0 or length < 0 for offset, length in ranges):
            raise ConfigError("store.get", "a range (offset, length) of numbers >= 0 for each key")
        return await self._get_many(keys, ranges)

    async def get_into(self, key: str, parts: Part | Sequence[Part]) -> int:
        """Read a value into registered buffers, without a copy.

        Returns: its bytes; the parts must hold as many, what lies behind is left alone.
        Raises: as ``get``; ShapeError if the parts are too small.
        """
        return _only(await self.get_into_many([key], [parts]))

    async def get_into_many(
        self, keys: Sequence[str], parts: Sequence[Part | Sequence[Part]]
    ) -> "list[int | TandemError]":
        """Read values into registered buffers; results as ``get_many``, bytes each."""
        if len(keys) != len(parts):
            raise ConfigError("store.get", f"{len(keys)} keys, {len(parts)} destinations")
        targets = [_list_parts(given) for given in parts]
        reads = [
            _Read(key, 0, -1, views=[part.view for part in listed], parts=listed)
            for key, listed in zip(keys, targets, strict=True)
        ]
        await self._read_all(reads)
        return [read.size if read.error is None else read.error for read in reads]

    async def _get_many(
        self, keys: Sequence[str], ranges: Sequence[tuple[int, int]]
    ) -> "list[bytes | TandemError]":
        reads = [
            _Read(key, offset, length) for key, (offset, length) in zip(keys, ranges, strict=True)
        ]
        await self._read_all(reads)
        return [read.take() if read.error is None else read.error for read in reads]

    async def _read_all(self, reads: "Sequence[_Read]") -> None:
        deadline_s = self._clock.now_s() + self.config.deadline_ms / 1e3
        for attempt in range(MAX_ATTEMPTS):
            left = [read for read in reads if not read.is_settled]
            if not left:
                return
            await asyncio.sleep(RETRY_S * attempt)  # Hosts and masters come back.
            sent_s = self._clock.now_s()
            found = await self._find([read.key for read in left], deadline_s)
            lease_end_s = sent_s + LEASE_SHARE * found.lease_ms / 1e3
            endpoints = {endpoint.host: endpoint for endpoint in found.endpoints}
            for i, read in enumerate(left):
                read.locate(found, i)
            await self._read_replicas(left, endpoints, lease_end_s, deadline_s)
        for read in reads:
            if not read.is_settled:
                read.error = read.last_error or PeerLostError(
                    "store.get", f"all hosts of {read.key!r} are lost"
                )

    async def _read_replicas(
        self,
        reads: "Sequence[_Read]",
        endpoints: dict[int, Endpoint],
        lease_end_s: float,
        deadline_s: float,
    ) -> None:
        """Read from the best replica of each, and from the next one where that fails."""
        lent: list[Any] = []
        try:
            while True:
                by_host: dict[int, list[_Read]] = {}
                for read in reads:
                    if not read.is_settled and read.places:
                        by_host.setdefault(read.places[0][0], []).append(read)
                if not by_host:
                    return
                scratch = _prepare_scratch([r for group in by_host.values() for r in group])
                handle = self._port.register(scratch) if scratch.size else None
                if handle is not None:
                    lent.append(handle)
                timeout_s = max(0.001, min(lease_end_s, deadline_s) - self._clock.now_s())
                await asyncio.gather(
                    *(
                        self._read_from(endpoints[host], group, handle, timeout_s)
                        for host, group in by_host.items()
                    )
                )
                is_leased = self._clock.now_s() <= lease_end_s
                for read in [read for group in by_host.values() for read in group]:
                    place = read.places.pop(0)
                    if not is_leased:
                        # The space may have become another object's while we read.
                        read.places.clear()
                        read.last_error = DeadlineError(
                            "store.get", f"reading {read.key!r} outlasted its lease"
                        )
                    elif read.failure is None and not await self._finish(read):
                        self._spawn(self._report(read, place[0]))
        finally:
            for handle in lent:
                self._port.unregister(handle)

    async def _read_from(
        self, endpoint: Endpoint, reads: "Sequence[_Read]", scratch: Any, timeout_s: float
    ) -> None:
        pieces: list[Piece] = []
        for read in reads:
            read.failure = None
            pieces += read.list_pieces(endpoint.read_base + read.places[0][1], scratch)
        try:
            if pieces:
                await self._port.read(endpoint, pieces, timeout_s)
        except TandemError as error:
            logger.info("event=read_failed host=%s reason=%s", endpoint.name, error)
            for read in reads:
                read.failure = read.last_error = error

    async def _finish(self, read: "_Read") -> bool:
        """Check what was read; False if it is not what was written."""
        if read.num_bytes > OFF_LOOP_BYTES:
            is_good = await asyncio.to_thread(read.check)
        else:
            is_good = read.check()
        if is_good:
            read.is_settled = True
        else:
            read.last_error = CorruptionError(
                "store.get", f"{read.key!r} has a wrong checksum on every replica that was read"
            )
        return is_good

    async def _report(self, read: "_Read", host: int) -> None:
        request = ReportBadReplica(read.key, read.version, host)
        try:
            await self._channel.call("report_bad", request, Ack, timeout_s=CALL_TIMEOUT_S)
        except TandemError as error:
            logger.debug("event=report_untold reason=%s", error)

    async def _find(
        self, keys: Sequence[str], deadline_s: float, *, lease: bool = True
    ) -> FoundObjects:
        request = FindObjects(keys=list(keys), machine=self._machine, lease=lease)
        while True:
            found = await self._call("find", request, FoundObjects, deadline_s)
            if not found.is_recovering:
                return found
            await asyncio.sleep(RETRY_S)

    # Looking, removing, pinning.

    async def exists(self, key: str) -> bool:
        """Whether the object is there and readable. Renews no lease, is no use for LRU."""
        return (await self.exists_many([key]))[0]

    async def exists_many(self, keys: Sequence[str]) -> list[bool]:
        """As ``exists``, for each key."""
        deadline_s = self._clock.now_s() + self.config.deadline_ms / 1e3
        request = KeyList(list(keys))
        while True:
            found = await self._call("exists", request, KeyBytes, deadline_s)
            if not found.is_recovering:
                return list(map(bool, found.flags))
            await asyncio.sleep(RETRY_S)

    async def size(self, key: str) -> int:
        """Return the bytes of a value. Raises: NotFoundError."""
        return _only(await self.size_many([key]))

    async def size_many(self, keys: Sequence[str]) -> "list[int | TandemError]":
        """Return the bytes of each value; results as ``get_many``."""
        deadline_s = self._clock.now_s() + self.config.deadline_ms / 1e3
        found = await self._find(keys, deadline_s, lease=False)
        return [
            size if size >= 0 else _not_found(key)
            for key, size in zip(keys, found.sizes, strict=True)
        ]

    async def remove(self, key: str) -> bool:
        """Remove an object; readers that have begun are not disturbed.

        Returns: whether there was one. When this returns no restart brings it back, unless a host
            that holds it was away.
        """
        return (await self.remove_many([key]))[0]

    async def remove_many(self, keys: Sequence[str]) -> list[bool]:
        """As ``remove``, for each key."""
        answer = await self._simple("remove", KeyList(list(keys)), KeyBytes)
        return list(map(bool, answer.flags))

    async def remove_prefix(self, prefix: str) -> int:
        """Remove all objects whose key begins so; returns how many. An empty prefix is all."""
        return (await self._simple("remove_prefix", RemovePrefix(prefix), PrefixRemoval)).count

    async def pin(self, key: str, *, soft_s: float = 0.0, hard: bool = False) -> bool:
        """Replace the pins of an object; returns whether there is one. See ``PutOptions``."""
        return (await self.pin_many([key], soft_s=soft_s, hard=hard))[0]

    async def pin_many(
        self, keys: Sequence[str], *, soft_s: float = 0.0, hard: bool = False
    ) -> list[bool]:
        """As ``pin``, for each key."""
        if not hard and soft_s <= 0:
            raise ConfigError("store.pin", "give soft_s > 0 or hard=True; or call unpin")
        request = PinObjects(list(keys), hard, int(soft_s * 1e3))
        return list(map(bool, (await self._simple("pin", request, KeyBytes)).flags))

    async def unpin(self, key: str) -> bool:
        """Take both pins off; returns whether there is such an object."""
        return (await self.unpin_many([key]))[0]

    async def unpin_many(self, keys: Sequence[str]) -> list[bool]:
        """As ``unpin``, for each key."""
        answer = await self._simple("pin", PinObjects(list(keys)), KeyBytes)
        return list(map(bool, answer.flags))

    async def list_keys(self, prefix: str = "", *, after: str = "", limit: int = 1000) -> KeyPage:
        """Return keys with a prefix, sorted, from behind ``after`` on."""
        return await self._simple("list", ListKeys(prefix, after, limit), KeyPage)

    async def status(self) -> StoreStatus:
        """Return the store as its master sees it."""
        return await self._simple("status", None, StoreStatus)

    async def drain(self, host: str) -> None:
        """Have a host emptied; ``status`` tells when it is. Raises: NotFoundError."""
        await self._simple("drain", DrainHost(host), Ack)

    async def aclose(self) -> None:
        """End what runs behind. The channel and the port are the caller's to close."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _simple(self, method: str, request: object, response: type[T]) -> T:
        deadline_s = self._clock.now_s() + self.config.deadline_ms / 1e3
        return await self._call(method, request, response, deadline_s)

    async def _call(
        self,
        method: str,
        request: object,
        response: type[T],
        deadline_s: float,
        *,
        extra_s: float = 0.0,
    ) -> T:
        """Call the master, again while it is away; every request is harmless when it comes twice.

        Raises: DeadlineError; what the master says.
        """
        while True:
            left_s = self._left_s(deadline_s)
            try:
                return await self._channel.call(
                    method, request, response, timeout_s=min(left_s, CALL_TIMEOUT_S + extra_s)
                )
            except (PeerLostError, DeadlineError) as error:
                logger.debug("event=call_again method=%s reason=%s", method, error)
                if self._clock.now_s() + RETRY_S >= deadline_s:
                    raise
            except CapacityError as error:
                if error.where != "rpc.send":
                    raise
            await asyncio.sleep(RETRY_S)
            await self._channel.wait_connected(self._left_s(deadline_s))

    def _left_s(self, deadline_s: float) -> float:
        left_s = deadline_s - self._clock.now_s()
        if left_s <= 0:
            raise DeadlineError(
                "store.call", f"not done within {self.config.deadline_ms} ms (store.deadline_ms)"
            )
        return left_s

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Read:
    """One value, or a range of one, on its way."""

    def __init__(
        self,
        key: str,
        offset: int,
        length: int,
        *,
        views: "list[npt.NDArray[np.uint8]] | None" = None,
        parts: Sequence[Part] = (),
    ) -> None:
        self.key = key
        self.size = 0
        self.version = 0
        self.checksum = 0
        self.places: list[tuple[int, int]] = []
        self.is_settled = False
        self.error: TandemError | None = None
        self.last_error: TandemError | None = None
        self.failure: TandemError | None = None
        """Of the attempt under way."""
        self.num_bytes = 0
        """Bytes of the chunks that are read."""
        self._offset = offset
        self._length = length
        self._views = views
        self._parts = parts
        self._begin = 0
        self._scratch = np.empty(0, np.uint8)
        self._scratch_at = 0

    def locate(self, found: FoundObjects, i: int) -> None:
        """Take the master's answer."""
        self.size, self.version = found.sizes[i], found.versions[i]
        self.checksum, self.places = found.checksums[i], list(found.places[i])
        length = self.size - self._offset if self._length < 0 else self._length
        if self.size < 0:
            self._settle(_not_found(self.key))
        elif self._offset + length > self.size or length < 0:
            self._settle(
                ConfigError(
                    "store.get",
                    f"range [{self._offset}, {self._offset + length}) of {self.key!r}, which has "
                    f"{self.size} bytes",
                    field="length",
                )
            )
        elif self._views is not None and sum(view.size for view in self._views) < self.size:
            self._settle(
                ShapeError(
                    "store.get",
                    f"{self.key!r} has {self.size} bytes, the parts hold "
                    f"{sum(view.size for view in self._views)}",
                )
            )
        elif length == 0 or self.size == 0:
            # Nothing to read; that it exists is all there is to know.
            self._begin = self._offset
            self._scratch = np.empty(0, np.uint8)
            self.is_settled = self.size == 0 or self._views is None
        self._begin = self._offset // layout.CHUNK_BYTES * layout.CHUNK_BYTES
        end = (self._offset + max(length, 0) + layout.CHUNK_BYTES - 1) // layout.CHUNK_BYTES
        self.num_bytes = max(0, min(end * layout.CHUNK_BYTES, self.size) - self._begin)
        self._wanted = (self._offset, max(length, 0))

    def _settle(self, error: TandemError) -> None:
        self.is_settled, self.error = True, error

    @property
    def table_length(self) -> int:
        """Bytes of the table that are read: all of it, or nothing of it is proven."""
        return layout.table_bytes(self.size)

    @property
    def scratch_bytes(self) -> int:
        """Bytes needed beside the caller's buffers."""
        return self.table_length + (0 if self._views is not None else self.num_bytes)

    def lend(self, scratch: npt.NDArray[np.uint8], at: int) -> None:
        """Take room for the table, and for the value where the caller brought none."""
        self._scratch, self._scratch_at = scratch[at : at + self.scratch_bytes], at

    def list_pieces(self, extent_at: int, scratch: Any) -> list[Piece]:
        """Return what to read of the extent at this address."""
        key_bytes = len(self.key.encode())
        table_at = extent_at + layout.table_offset(key_bytes)
        value_at = extent_at + layout.value_offset(key_bytes, self.size) + self._begin
        if self._views is None and self._begin == 0:
            # Table and value lie side by side there and here.
            return [Piece(scratch, self._scratch_at, table_at, self.scratch_bytes)]
        pieces = [Piece(scratch, self._scratch_at, table_at, self.table_length)]
        if self._views is None:
            local = self._scratch_at + self.table_length
            return [*pieces, Piece(scratch, local, value_at, self.num_bytes)]
        left = self.size
        for part, view in zip(self._parts, self._views, strict=True):
            length = min(left, view.size)
            if length:
                pieces.append(Piece(part.buffer.handle, part.offset, value_at, length))
            value_at += length
            left -= length
        return pieces

    def check(self) -> bool:
        """Whether what was read is what was written."""
        table = self._scratch[: 4 * layout.count_chunks(self.size)].tobytes()
        if self._views is not None:
            views, left = [], self.size
            for view in self._views:
                views.append(view[: min(left, view.size)])
                left -= views[-1].size
            return check_value(views, table, self.checksum)
        first = self._begin // layout.CHUNK_BYTES
        chunks = table[4 * first : 4 * (first + layout.count_chunks(self.num_bytes))]
        value = self._scratch[self.table_length :]
        return checksum_table(table) == self.checksum and make_table([value]) == chunks

    def take(self) -> bytes:
        """Return the range asked for."""
        offset, length = self._wanted
        if length == 0:
            return b""
        at = self.table_length + offset - self._begin
        return self._scratch[at : at + length].tobytes()


def _prepare_scratch(reads: Sequence[_Read]) -> npt.NDArray[np.uint8]:
    scratch = np.empty(sum(read.scratch_bytes for read in reads), dtype=np.uint8)
    at = 0
    for read in reads:
        read.lend(scratch, at)
        at += read.scratch_bytes
    return scratch


class _Staging:
    """Puts small values side by side, each behind room for its table; larger ones stay in place."""

    def __init__(self, port: ClientPort, lent: list[StoreBuffer]) -> None:
        self._port = port
        self._lent = lent
        self._staged: list[tuple[list[Part], list[npt.NDArray[np.uint8]], int, int]] = []
        self._length = 0

    def add(self, views: "list[npt.NDArray[np.uint8]]") -> list[Part]:
        """Return the parts of a value; complete after ``close``."""
        size = sum(view.size for view in views)
        parts: list[Part] = []
        if size > STAGED_BYTES:
            for view in views:
                if view.size:
                    buffer = StoreBuffer(self._port.register(view), view)
                    self._lent.append(buffer)
                    parts.append(Part(buffer))
        elif size:
            at = self._length + layout.table_bytes(size)
            self._staged.append((parts, views, at, size))
            self._length = at + size
        return parts

    def close(self) -> None:
        """Copy and register what was gathered."""
        if not self._staged:
            return
        array = np.empty(self._length, dtype=np.uint8)
        buffer = StoreBuffer(self._port.register(array), array)
        self._lent.append(buffer)
        for parts, views, at, size in self._staged:
            np.concatenate(views, out=array[at : at + size])
            parts.append(_StagedPart(buffer, at, size))


class _StagedPart(Part):
    """A value with room for its table before it."""


def as_bytes(memory: Any) -> npt.NDArray[np.uint8]:
    """View contiguous memory as bytes, without a copy.

    Raises: ShapeError if it is not contiguous, or gives neither a buffer nor DLPack.
    """
    try:
        if isinstance(memory, np.ndarray):
            if not memory.flags.c_contiguous:
                raise ShapeError("store.memory", "a strided array: pass a contiguous one")
            return memory.reshape(-1).view(np.uint8)
        try:
            return np.frombuffer(memory, dtype=np.uint8)
        except TypeError:
            return as_bytes(np.from_dlpack(memory))
    except (TypeError, ValueError, AttributeError, BufferError) as error:
        raise ShapeError(
            "store.memory", f"{type(memory).__name__} gives no contiguous host memory: {error}"
        ) from None


def _as_views(value: Any) -> "list[npt.NDArray[np.uint8]]":
    if isinstance(value, list | tuple):
        return [as_bytes(part) for part in value]
    return [as_bytes(value)]


def _list_parts(parts: Part | Sequence[Part]) -> list[Part]:
    return [parts] if isinstance(parts, Part) else list(parts)


def _only(results: "Sequence[T | TandemError]") -> T:
    (result,) = results
    if isinstance(result, TandemError):
        raise result
    return result


def _not_found(key: str) -> NotFoundError:
    return NotFoundError("store.get", f"no object {key!r}", field="key")

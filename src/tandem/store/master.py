"""The master of a store: who holds what. Soft state; every host can tell its part again.

The logic alone: sessions come as ``Caller``, time as a ``Clock``, chance as ``draw``, so that the
simulator runs this very class. Everything runs on one event loop; what must not be left half done
when a caller goes away runs as a task of the master's own.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tandem.core.clock import Clock
from tandem.core.errors import (
    CapacityError,
    ConfigError,
    ConflictError,
    NotFoundError,
    PeerLostError,
    TandemError,
)
from tandem.store import layout
from tandem.store.config import StoreConfig
from tandem.store.host import Caller, append_record, iterate_records
from tandem.store.index import NO_ROW, Directory, Replica
from tandem.store.messages import (
    Ack,
    CommitPut,
    CommitStatus,
    DrainHost,
    ExtentRecords,
    FindObjects,
    FoundObjects,
    HostStage,
    HostStatus,
    InventoryDone,
    InventoryPage,
    Joined,
    JoinHost,
    KeyBytes,
    KeyList,
    KeyPage,
    ListKeys,
    PinObjects,
    PrefixRemoval,
    RemovePrefix,
    RepinExtents,
    ReportBadReplica,
    SealExtents,
    SegmentGrown,
    StartedPut,
    StartPut,
    StartStatus,
    StoreStatus,
    VerifyExtent,
)
from tandem.store.metrics import StoreCounters
from tandem.store.policies import Strategy, count_bytes_to_evict, order_hosts, rank_replicas
from tandem.store.segment import ExtentHeader
from tandem.store.space import Extent, HostSpace
from tandem.store.upkeep import Upkeep

__all__ = ["StoreMaster"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

TICK_S = 0.05
EVICTED_AT_ONCE = 1_000
"""Objects of usual size that one go of eviction drops: some 10 ms in which nobody is answered."""
SCAN_KEYS = 5_000
"""Keys looked at in one go by a command that looks at all."""
MAX_REMEMBERED = 16_384
"""Results of commits kept for requests that come twice."""
VERSION_BITS = 40
"""Of a version, for counting within an epoch; the epoch stands above."""


@dataclass(slots=True, eq=False)
class _Put:
    client: str
    put_id: int
    grant: int
    key: str
    size: int
    length: int
    wanted: int
    upsert: bool
    hard_pin: bool
    soft_pin_ms: int
    expires_ms: int
    extents: dict[int, Extent] = field(default_factory=dict)
    sessions: dict[int, int] = field(default_factory=dict)
    """Of the hosts, when the space was taken: in a later one it means nothing."""


class StoreMaster:
    """Keeps the directory, decides on space, orders hosts.

    Args:
        config: the limits and intervals of a store.
        clock: of leases, pins and expiry.
        epoch: above that of every earlier master of this store; raised further if a host has
            seen a higher one.
        draw: ``draw(n)`` is a random number in ``[0, n)``.
    """

    def __init__(
        self, config: StoreConfig, *, clock: Clock, epoch: int, draw: Callable[[int], int]
    ) -> None:
        self.config = config
        self.epoch = epoch
        self.directory = Directory()
        self.hosts: dict[int, HostSpace] = {}
        self.counters = StoreCounters()
        self._clock = clock
        self._draw = draw
        self._names: dict[str, HostSpace] = {}
        self._by_session: dict[int, HostSpace] = {}
        self._num_sessions = 0
        self._counter = 0
        self._puts: OrderedDict[tuple[str, int], _Put] = OrderedDict()
        self._results: OrderedDict[tuple[str, int], CommitStatus] = OrderedDict()
        self._committing: dict[tuple[str, int], asyncio.Future[None]] = {}
        self._sealing: dict[str, asyncio.Future[None]] = {}
        self._removing: dict[str, asyncio.Future[Any]] = {}
        """Keys whose headers are not all gone yet: a request that comes again waits for them."""
        self._space_freed = asyncio.Event()
        self._num_waiting = 0
        self._barren_until_ms: dict[int, int] = {}
        """Hosts where nothing could be evicted a moment ago: looking costs a pass over all rows."""
        self._started_ms = self._now_ms()
        self._dropped_versions: dict[str, int] = {}
        """While inventories are coming in: what they must not bring back."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._upkeep = Upkeep(self)
        self._running: asyncio.Task[None] | None = None

    def methods(self) -> list[tuple[str, Callable[..., Any], type, type]]:
        """Return what hosts and clients may call: name, handler, request and response type."""
        return [
            ("start_put", self._start_put, StartPut, StartedPut),
            ("commit_put", self._commit_put, CommitPut, KeyBytes),
            ("find", self._find, FindObjects, FoundObjects),
            ("exists", self._exists, KeyList, KeyBytes),
            ("remove", self._remove, KeyList, KeyBytes),
            ("remove_prefix", self._remove_prefix, RemovePrefix, PrefixRemoval),
            ("list", self._list, ListKeys, KeyPage),
            ("pin", self._pin, PinObjects, KeyBytes),
            ("report_bad", self._report_bad, ReportBadReplica, Ack),
            ("drain", self._drain, DrainHost, Ack),
            ("status", self._status, type(None), StoreStatus),
            ("join", self._join, JoinHost, Joined),
            ("inventory", self._inventory, InventoryPage, Ack),
            ("inventory_done", self._inventory_done, InventoryDone, Ack),
            ("grown", self._grown, SegmentGrown, Ack),
        ]

    def start(self) -> None:
        """Begin the work behind: expiry, eviction, repair."""
        self._running = asyncio.get_running_loop().create_task(self._run())

    async def aclose(self) -> None:
        """End all of the master's tasks; hosts keep what they hold."""
        tasks = [*self._tasks, *([self._running] if self._running is not None else [])]
        for host in self.hosts.values():
            host.end_session()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def on_caller_lost(self, caller: Caller) -> None:
        """A session has ended: of a host, of a client, or of a process that is both."""
        for host in self.hosts.values():
            if host.caller is caller:
                self._lose_host(host)
        self._end_client(caller.instance_id)

    # Shared with upkeep.

    def now_ms(self) -> int:
        """Return the time, milliseconds."""
        return self._now_ms()

    def writable_hosts(self) -> list[HostSpace]:
        """Return the hosts that take new objects."""
        return [host for host in self.hosts.values() if host.is_writable]

    def choose_hosts(self, *, preferred: Sequence[str] = (), machine: str = "") -> list[int]:
        """Return writable hosts in the order in which to try them."""
        return order_hosts(
            [host.view() for host in self.writable_hosts()],
            strategy=Strategy(self.config.strategy),
            draw=self._draw,
            preferred=preferred,
            machine=machine,
        )

    def extent_of(self, row: int, offset: int) -> Extent:
        """Return the range that a replica of ``row`` takes."""
        key_bytes = len(self.directory.key(row).encode())
        return Extent(offset, layout.extent_bytes(key_bytes, self.directory.size(row)))

    def drop_row(self, row: int, *, wait: bool = False) -> "list[asyncio.Future[None]]":
        """Remove an object; its space is free once it is wiped and unleased.

        Returns: if ``wait``, what is done when all headers are gone.
        """
        length = self.extent_of(row, 0).length
        free_at_ms = self.directory.lease_until_ms(row)
        if self._is_recovering:
            self._dropped_versions[self.directory.key(row)] = self.directory.version(row)
        pending: list[asyncio.Future[None]] = []
        copied = self._upkeep.abandon(self.directory.key(row), wait=wait)
        if copied is not None:
            pending.append(copied)
        for replica in self.directory.remove(row):
            done = self.hosts[replica.host].drop(
                Extent(replica.offset, length), free_at_ms, wait=wait
            )
            if done is not None:
                pending.append(done)
        return pending

    def drop_replica(self, row: int, host: int) -> None:
        """Give up one copy of an object, and the object if that was the last."""
        if len(self.directory.replicas(row)) <= 1:
            self.drop_row(row)
            return
        free_at_ms = self.directory.lease_until_ms(row)
        replica = self.directory.drop_replica(row, host)
        if replica is not None:
            self.hosts[host].drop(self.extent_of(row, replica.offset), free_at_ms)

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run a coroutine that its caller's going does not end."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def record_of(self, row: int, offset: int) -> ExtentRecords:
        """Return the header that a copy of ``row`` at ``offset`` should have."""
        soft_ms = self.directory.soft_pinned_until_ms(row) - self._now_ms()
        header = ExtentHeader(
            self.directory.key(row),
            self.directory.size(row),
            self.directory.version(row),
            self.directory.checksum(row),
            self.directory.wanted(row),
            self.directory.is_hard_pinned(row),
            max(0, soft_ms),
        )
        records = ExtentRecords()
        append_record(records, offset, header)
        return records

    def _now_ms(self) -> int:
        return int(self._clock.now_s() * 1e3)

    @property
    def _is_recovering(self) -> bool:
        if any(host.stage is HostStage.JOINING for host in self.hosts.values()):
            return True
        return self._now_ms() - self._started_ms < self.config.recovery_ms

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_ms = self._now_ms()
            self._expire_puts(now_ms)
            for host in self.hosts.values():
                host.free_leased(now_ms)
            self._evict_over_watermark(now_ms)
            if self._num_waiting:
                self._space_freed.set()  # A lease or a pin may have ended: they try again.
            self._upkeep.step(now_ms)
            if self._dropped_versions and not self._is_recovering:
                self._dropped_versions.clear()

    # Writing objects.

    async def _start_put(self, caller: Caller, request: StartPut) -> StartedPut:
        self._check_present(caller)
        self._check_batch(request)
        deadline_s = self._clock.now_s() + min(request.wait_ms, self.config.put_wait_ms) / 1e3
        client = caller.instance_id
        statuses = [self._start_status(client, request, i) for i in range(len(request.keys))]
        granted = [i for i, status in enumerate(statuses) if status is StartStatus.GRANTED]
        await self._wait_for_space(client, request, granted, deadline_s)
        puts = {i: self._puts.get((client, request.first_put_id + i)) for i in granted}
        bases = await self._open_writers(client, [put for put in puts.values() if put is not None])
        places: list[list[tuple[int, int]]] = [[] for _ in statuses]
        for i, put in puts.items():
            if put is None:
                continue
            # What the client is not told of it cannot write, and must not be taken for written.
            for number in [number for number in put.extents if number not in bases]:
                self._fence(self.hosts[number], client)
            places[i] = [(host, extent.offset) for host, extent in put.extents.items()]
        used = sorted({host for place in places for host, _ in place})
        return StartedPut(
            statuses=[int(status) for status in statuses],
            grants=[0 if (put := puts.get(i)) is None else put.grant for i in range(len(statuses))],
            places=places,
            endpoints=[self.hosts[host].endpoint(bases[host]) for host in used],
        )

    def _check_present(self, caller: Caller) -> None:
        """Do nothing for a caller that has gone: nobody would end it."""
        if caller.is_lost:
            raise PeerLostError("store.call", f"the session of {caller.name} is over")

    def _check_batch(self, request: StartPut) -> None:
        keys, sizes, config = request.keys, request.sizes, self.config
        if len(keys) != len(sizes) or len(keys) > config.max_batch:
            raise ConfigError(
                "store.put", f"{len(keys)} keys, {len(sizes)} sizes: as many, up to max_batch"
            )
        if len(set(keys)) != len(keys):
            raise ConfigError("store.put", "a key is twice in the batch", field="keys")
        for key, size in zip(keys, sizes, strict=True):
            check_key(key, config)
            if not 0 <= size <= config.max_value_bytes:
                raise ConfigError(
                    "store.put",
                    f"value of {size} bytes under {key!r}, limit {config.max_value_bytes} "
                    "(store.max_value_bytes)",
                    field="size",
                )
        if request.replicas < 1 or request.replicas > 255:
            raise ConfigError(
                "store.put", f"{request.replicas} replicas: give 1 to 255", field="replicas"
            )

    def _start_status(self, client: str, request: StartPut, i: int) -> StartStatus:
        if (client, request.first_put_id + i) in self._results:
            return StartStatus.DONE
        row = self.directory.find(request.keys[i])
        is_taken = row != NO_ROW and self.directory.num_live(row) > 0 and not request.upsert
        return StartStatus.EXISTS if is_taken else StartStatus.GRANTED

    async def _wait_for_space(
        self, client: str, request: StartPut, granted: Sequence[int], deadline_s: float
    ) -> None:
        """Allocate for all of them or raise; what waits holds nothing meanwhile."""
        if not self.hosts and granted:
            # Nothing to wait for but a host.
            await self._wait_freed(max(0.0, deadline_s - self._clock.now_s()))
        is_last = False
        while not self._allocate_all(client, request, granted, is_last=is_last):
            left_s = deadline_s - self._clock.now_s()
            if is_last:
                raise self._describe_full(request, granted)
            if left_s > 0:
                self._check_possible(request, granted)
                if self._num_waiting >= self.config.max_waiting_puts:
                    raise CapacityError(
                        "store.put", f"{self._num_waiting} puts wait for space, the limit"
                    )
                self.counters.puts_waited += 1
                self._num_waiting += 1
                try:
                    await self._wait_freed(left_s)
                finally:
                    self._num_waiting -= 1
            is_last = deadline_s - self._clock.now_s() <= 0

    async def _wait_freed(self, timeout_s: float) -> None:
        self._space_freed.clear()
        try:
            await asyncio.wait_for(self._space_freed.wait(), timeout_s)
        except TimeoutError:
            return

    def _allocate_all(
        self, client: str, request: StartPut, granted: Sequence[int], *, is_last: bool
    ) -> bool:
        made: list[_Put] = []
        expires_ms = self._now_ms() + self.config.put_timeout_ms
        for i in granted:
            name = (client, request.first_put_id + i)
            if name in self._puts:
                continue  # The request came twice.
            size = request.sizes[i]
            put = _Put(
                client=client,
                put_id=name[1],
                grant=self._next_version(),
                key=request.keys[i],
                size=size,
                length=layout.extent_bytes(len(request.keys[i].encode()), size),
                wanted=request.replicas,
                upsert=request.upsert,
                hard_pin=request.hard_pin,
                soft_pin_ms=request.soft_pin_ms,
                expires_ms=expires_ms,
            )
            if not self._allocate(put, request, is_last=is_last):
                for other in made:
                    del self._puts[other.client, other.put_id]
                    for host, extent in other.extents.items():
                        self.hosts[host].unhold(client, extent)
                        self.hosts[host].untake(extent)
                return False
            self._puts[name] = put
            made.append(put)
        return True

    def _allocate(self, put: _Put, request: StartPut, *, is_last: bool) -> bool:
        """Take space on as many hosts as wanted and there are; the last attempt is content with 1.

        Where a host is full, objects are evicted there, and their space is there a moment later.
        """
        order = self.choose_hosts(preferred=request.preferred, machine=request.machine)
        goal = min(put.wanted, len(order))
        for number in order:
            extent = self.hosts[number].allocate(put.length)
            if extent is not None:
                put.extents[number] = extent
                put.sessions[number] = self.hosts[number].session
                if len(put.extents) == goal:
                    break
        if put.extents and (len(put.extents) == goal or is_last):
            for number, extent in put.extents.items():
                self.hosts[number].hold(put.client, extent)
            return True
        for number, extent in put.extents.items():
            self.hosts[number].untake(extent)
        put.extents.clear()
        for number in order:
            self._evict_for(self.hosts[number], put.length)
        return False

    def _check_possible(self, request: StartPut, granted: Sequence[int]) -> None:
        hosts = self.writable_hosts()
        largest = max((host.capacity_bytes for host in hosts), default=0)
        total = sum(host.capacity_bytes for host in hosts)
        sizes = [request.sizes[i] for i in granted]
        if hosts and (max(sizes) > largest or sum(sizes) > total):
            raise self._describe_full(request, granted)

    def _describe_full(self, request: StartPut, granted: Sequence[int]) -> CapacityError:
        hosts = self.writable_hosts()
        need = sum(request.sizes[i] for i in granted)
        if not hosts:
            return CapacityError(
                "store.put",
                f"no host takes {need} bytes: {len(self.hosts)} known, none active: start one "
                "(`tandem store host`)",
            )
        free = sum(host.view().free_bytes for host in hosts)
        quarantined = sum(host.quarantined_bytes for host in hosts)
        leased = sum(host.leased_bytes for host in hosts)
        unfinished = sum(e.length for put in self._puts.values() for e in put.extents.values())
        return CapacityError(
            "store.put",
            f"no space for {len(granted)} objects of {need} bytes on {len(hosts)} hosts within "
            f"{min(request.wait_ms, self.config.put_wait_ms)} ms: {free} bytes free (scattered), "
            f"{unfinished} in unfinished puts, {leased} dropped but leased, {quarantined} held "
            "until their writer is gone, the rest leased or pinned: unpin objects, put smaller "
            "batches, wait longer, or add a host",
        )

    async def _open_writers(self, client: str, puts: Sequence[_Put]) -> dict[int, int]:
        numbers = sorted({host for put in puts for host in put.extents})
        asked = [self.hosts[number].open_writer(client) for number in numbers]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        bases: dict[int, int] = {}
        for number, answer in zip(numbers, answers, strict=True):
            if isinstance(answer, int):
                bases[number] = answer
            elif not isinstance(answer, TandemError):
                raise answer
        return bases

    async def _commit_put(self, caller: Caller, request: CommitPut) -> KeyBytes:
        columns = (request.put_ids, request.grants, request.checksums, request.failed_hosts)
        if len(set(map(len, columns))) != 1:
            raise ConfigError("store.commit", "columns of different lengths")
        # A caller that leaves must not leave objects half sealed.
        work = self.spawn(self._commit(caller.instance_id, request))
        return KeyBytes(bytes(await asyncio.shield(work)))

    async def _commit(self, client: str, request: CommitPut) -> list[CommitStatus]:
        names = [(client, put_id) for put_id in request.put_ids]
        for name in names:
            if name in self._committing:  # The request came twice.
                await asyncio.shield(self._committing[name])
        ended = asyncio.get_running_loop().create_future()
        self._committing |= dict.fromkeys(names, ended)
        try:
            return await self._commit_once(client, request)
        finally:
            for name in names:
                self._committing.pop(name, None)
            ended.set_result(None)

    async def _commit_once(self, client: str, request: CommitPut) -> list[CommitStatus]:
        statuses = [CommitStatus.EXPIRED] * len(request.put_ids)
        ready: dict[int, _Put] = {}
        fenced: set[int] = set()
        for i, put_id in enumerate(request.put_ids):
            put = self._puts.get((client, put_id))
            if put is None or put.grant != request.grants[i]:
                # With another grant, a late copy of the request took space that nobody has written.
                statuses[i] = self._results.get((client, put_id), CommitStatus.EXPIRED)
                continue
            del self._puts[client, put_id]
            # A host to which the write failed may still get late bytes: what was held there stays
            # the writer's until that is shut out.
            failed = set(request.failed_hosts[i]) & set(put.extents)
            fenced |= failed
            for number in failed:
                del put.extents[number]
            for number, extent in put.extents.items():
                was_held = self.hosts[number].unhold(client, extent)
                assert was_held, "a fence takes extents from puts"
            if request.checksums[i] < 0:
                self._release(put)
            elif put.extents:
                ready[i] = put
        for number in sorted(fenced):
            self._fence(self.hosts[number], client)
        async with _KeysHeld(self._sealing, [put.key for put in ready.values()]):
            for put in ready.values():
                self._forget_lost(put)
            await self._seal(ready, request.checksums, statuses)
        for i, put in ready.items():
            self._remember((client, put.put_id), statuses[i])
        return statuses

    async def _seal(
        self, ready: dict[int, _Put], checksums: Sequence[int], statuses: list[CommitStatus]
    ) -> None:
        records: dict[int, ExtentRecords] = {}
        versions: dict[int, int] = {}
        for i, put in ready.items():
            row = self.directory.find(put.key)
            if row != NO_ROW and self.directory.num_live(row) and not put.upsert:
                statuses[i] = CommitStatus.EXISTS
                self._release(put)
                continue
            versions[i] = self._next_version()
            for number, extent in put.extents.items():
                header = ExtentHeader(
                    put.key, put.size, versions[i], checksums[i], put.wanted, put.hard_pin,
                    put.soft_pin_ms,
                )  # fmt: skip
                append_record(records.setdefault(number, ExtentRecords()), extent.offset, header)
        sealed = await self._seal_on_hosts(records)
        replaced: list[asyncio.Future[None]] = []
        for i, version in versions.items():
            put = ready[i]
            self._forget_lost(put)
            for number in [number for number in put.extents if number not in sealed]:
                self.hosts[number].drop(put.extents.pop(number), 0)
            if put.extents:
                statuses[i] = self._insert(put, checksums[i], version, replaced)
        # Until the old versions are gone, a crash could bring them back.
        await asyncio.gather(*replaced)

    async def _seal_on_hosts(self, records: dict[int, ExtentRecords]) -> set[int]:
        """Return the hosts that have done it."""
        numbers = sorted(records)
        answers = await asyncio.gather(
            *(
                self.hosts[number].order("seal", SealExtents, Ack, records=records[number])
                for number in numbers
            ),
            return_exceptions=True,
        )
        sealed: set[int] = set()
        for number, answer in zip(numbers, answers, strict=True):
            if isinstance(answer, Ack):
                sealed.add(number)
            elif isinstance(answer, TandemError):
                logger.warning(
                    "event=seal_failed host=%s reason=%s", self.hosts[number].name, answer
                )
            else:
                raise answer
        return sealed

    def _insert(
        self, put: _Put, checksum: int, version: int, replaced: "list[asyncio.Future[None]]"
    ) -> CommitStatus:
        status = CommitStatus.CREATED
        row = self.directory.find(put.key)
        if row != NO_ROW:
            status = CommitStatus.REPLACED
            replaced += self.drop_row(row, wait=True)
        row = self.directory.insert(
            put.key,
            size=put.size,
            checksum=checksum,
            version=version,
            replicas=[Replica(number, extent.offset) for number, extent in put.extents.items()],
            wanted=put.wanted,
        )
        soft_until_ms = self._now_ms() + put.soft_pin_ms if put.soft_pin_ms else 0
        self.directory.set_pins(row, hard=put.hard_pin, soft_until_ms=soft_until_ms)
        self.counters.objects_created += 1
        return status

    def _next_version(self) -> int:
        self._counter += 1
        return self.epoch << VERSION_BITS | self._counter

    def _remember(self, name: tuple[str, int], status: CommitStatus) -> None:
        if status is CommitStatus.EXPIRED:
            return
        self._results[name] = status
        if len(self._results) > MAX_REMEMBERED:
            self._results.popitem(last=False)

    def _forget_lost(self, put: _Put) -> None:
        """Forget space on hosts that have gone, or come back: the inventory has settled it."""
        for number in list(put.extents):
            if self.hosts[number].session != put.sessions[number]:
                del put.extents[number]

    def _release(self, put: _Put) -> None:
        """Free the space of a put that nobody writes any more and that was not sealed."""
        for number, extent in put.extents.items():
            self.hosts[number].release(extent)
        put.extents.clear()

    def _fence(self, host: HostSpace, client: str) -> None:
        """Shut ``client`` out of ``host``: all its unfinished puts lose their space there."""
        for put in self._puts.values():
            if put.client == client:
                put.extents.pop(host.number, None)
        self.counters.fences += 1
        host.fence(client)

    def _end_client(self, client: str) -> None:
        for host in self.hosts.values():
            if client in host.writers:
                self._fence(host, client)
        for name in [name for name in self._puts if name[0] == client]:
            del self._puts[name]

    def _expire_puts(self, now_ms: int) -> None:
        while self._puts:
            name, put = next(iter(self._puts.items()))
            if put.expires_ms > now_ms:
                return
            logger.warning("event=put_expired client=%s key=%s", put.client, put.key)
            self.counters.puts_expired += 1
            for number in list(put.extents):
                self._fence(self.hosts[number], put.client)
            del self._puts[name]

    # Reading.

    def _find(self, _: Caller, request: FindObjects) -> FoundObjects:
        directory, lease_ms = self.directory, self.config.lease_ms
        until_ms = self._now_ms() + lease_ms
        found = FoundObjects(
            sizes=[], versions=[], checksums=[], places=[], endpoints=[], lease_ms=lease_ms
        )
        used: set[int] = set()
        num_missing = 0
        for key in request.keys:
            row = directory.find(key)
            if row == NO_ROW:
                num_missing += 1
                found.sizes.append(-1)
                found.versions.append(0)
                found.checksums.append(0)
                found.places.append([])
                continue
            size = directory.size(row)
            found.sizes.append(size)
            found.versions.append(directory.version(row))
            found.checksums.append(directory.checksum(row))
            places: list[tuple[int, int]] = []
            if request.lease:
                directory.touch(row)
                directory.extend_lease(row, until_ms)
                places = self._rank(directory.replicas(row), request.machine)
                used.update(host for host, _ in places)
                if places:
                    self.hosts[places[0][0]].note_read(size)
            found.places.append(places)
        self.counters.hits += len(request.keys) - num_missing
        self.counters.misses += num_missing
        return FoundObjects(
            sizes=found.sizes,
            versions=found.versions,
            checksums=found.checksums,
            places=found.places,
            endpoints=[self.hosts[host].endpoint() for host in sorted(used)],
            lease_ms=lease_ms,
            is_recovering=num_missing > 0 and self._is_recovering,
        )

    def _rank(self, replicas: Sequence[Replica], machine: str) -> list[tuple[int, int]]:
        here = [replica for replica in replicas if self.hosts[replica.host].caller is not None]
        if len(here) <= 1:
            return [(host, offset) for host, offset in here]
        offsets = {replica.host: replica.offset for replica in here}
        ranked = rank_replicas([self.hosts[host].view() for host in offsets], machine)
        return [(host, offsets[host]) for host in ranked]

    def _exists(self, _: Caller, request: KeyList) -> KeyBytes:
        flags = self.directory.exists_many(request.keys)
        return KeyBytes(flags, 0 in flags and self._is_recovering)

    async def _list(self, _: Caller, request: ListKeys) -> KeyPage:
        matches = await self._match_prefix(request.prefix)
        matches = sorted(key for key in matches if key > request.after or not request.after)
        limit = max(1, min(request.limit, self.config.max_batch))
        page = KeyPage([], [], [], is_last=len(matches) <= limit)
        for key in matches[:limit]:
            row = self.directory.find(key)
            if row != NO_ROW:
                page.keys.append(key)
                page.sizes.append(self.directory.size(row))
                page.num_replicas.append(self.directory.num_live(row))
        return page

    async def _match_prefix(self, prefix: str) -> list[str]:
        keys = self.directory.list_keys()
        matches: list[str] = []
        for begin in range(0, len(keys), SCAN_KEYS):
            matches += [key for key in keys[begin : begin + SCAN_KEYS] if key.startswith(prefix)]
            await asyncio.sleep(0)
        return matches

    # Removing and pinning.

    async def _remove(self, _: Caller, request: KeyList) -> KeyBytes:
        return KeyBytes(await asyncio.shield(self.spawn(self._remove_keys(request.keys))))

    async def _remove_keys(self, keys: Sequence[str]) -> bytes:
        flags = bytearray(len(keys))
        pending: list[asyncio.Future[Any]] = []
        for i, key in enumerate(keys):
            row = self.directory.find(key)
            if row != NO_ROW:
                going = self.drop_row(row, wait=True)
                earlier = self._removing.get(key)
                gone = asyncio.gather(*going, *([] if earlier is None else [earlier]))
                self._removing[key] = gone
                gone.add_done_callback(lambda gone, key=key: self._forget_removal(key, gone))
                pending.append(gone)
                self.counters.objects_removed += 1
                flags[i] = 1
            elif key in self._removing:
                pending.append(self._removing[key])
                flags[i] = 1
        # Only then could no restart bring them back.
        for gone in pending:
            await asyncio.shield(gone)
        return bytes(flags)

    def _forget_removal(self, key: str, gone: "asyncio.Future[Any]") -> None:
        if self._removing.get(key) is gone:
            del self._removing[key]

    async def _remove_prefix(self, _: Caller, request: RemovePrefix) -> PrefixRemoval:
        return PrefixRemoval(await asyncio.shield(self.spawn(self._remove_matches(request.prefix))))

    async def _remove_matches(self, prefix: str) -> int:
        matches = await self._match_prefix(prefix)
        count = 0
        for begin in range(0, len(matches), SCAN_KEYS):
            count += sum(await self._remove_keys(matches[begin : begin + SCAN_KEYS]))
        return count

    async def _pin(self, _: Caller, request: PinObjects) -> KeyBytes:
        flags = bytearray(len(request.keys))
        until_ms = self._now_ms() + request.soft_ms if request.soft_ms > 0 else 0
        orders: dict[int, list[int]] = {}
        for i, key in enumerate(request.keys):
            row = self.directory.find(key)
            if row == NO_ROW:
                continue
            flags[i] = 1
            self.directory.set_pins(row, hard=request.hard, soft_until_ms=until_ms)
            for host, offset in self.directory.replicas(row):
                if self.hosts[host].caller is not None:
                    orders.setdefault(host, []).append(offset)
        for host, offsets in sorted(orders.items()):
            try:
                await self.hosts[host].order(
                    "repin",
                    RepinExtents,
                    Ack,
                    offsets=offsets,
                    hard=request.hard,
                    soft_pin_ms=max(0, request.soft_ms),
                )
            except TandemError as error:
                # Pinned all the same; only a restart of the master would not know of it.
                logger.warning("event=pin_unwritten host=%s reason=%s", host, error)
        return KeyBytes(bytes(flags))

    # Eviction.

    def _evict_over_watermark(self, now_ms: int) -> None:
        for host in self.writable_hosts():
            num_bytes = count_bytes_to_evict(
                host.used_bytes - host.dropped_bytes,
                host.capacity_bytes,
                high_watermark=self.config.high_watermark,
                step=self.config.eviction_step,
            )
            if num_bytes > 0:
                self._evict(host, num_bytes, now_ms)

    def _evict_for(self, host: HostSpace, length: int) -> None:
        """Make room for one object on a full host; what is on its way out already counts."""
        if host.dropped_bytes - host.leased_bytes < length:
            step = int(host.capacity_bytes * self.config.eviction_step)
            self.counters.forced_evictions += 1
            self._evict(host, max(length, step), self._now_ms())

    def _evict(self, host: HostSpace, num_bytes: int, now_ms: int) -> None:
        if self._barren_until_ms.get(host.number, 0) > now_ms:
            return
        mean_bytes = self.directory.total_bytes // max(1, len(self.directory)) + 1
        num_bytes = min(num_bytes, EVICTED_AT_ONCE * mean_bytes)
        victims = self.directory.pick_victims(now_ms, num_bytes, host.number)
        if not victims:
            self._barren_until_ms[host.number] = now_ms + int(TICK_S * 1e3)
        for row in victims:
            self.drop_row(row)
        self.counters.objects_evicted += len(victims)

    # Replicas.

    async def _report_bad(self, _: Caller, request: ReportBadReplica) -> Ack:
        return Ack(await self.verify_replica(request.key, request.version, request.host))

    async def verify_replica(self, key: str, version: int, number: int) -> bool:
        """Have a host look at its copy, and give that up if it is bad.

        Returns: whether it is good, or not there.
        Raises: PeerLostError, DeadlineError.
        """
        row = self.directory.find(key)
        host = self.hosts.get(number)
        if row == NO_ROW or self.directory.version(row) != version or host is None:
            return True
        offset = next((r.offset for r in self.directory.replicas(row) if r.host == number), -1)
        if offset < 0:
            return True
        # The host looks for itself: a reader's own memory may be what is bad.
        verdict = await host.order("verify", VerifyExtent, Ack, offset=offset, version=version)
        is_same = self.directory.find(key) == row and self.directory.version(row) == version
        if not verdict.ok and is_same:
            logger.error("event=replica_corrupt host=%s key=%s", host.name, key)
            self.counters.replicas_corrupt += 1
            self.drop_replica(row, number)
        return verdict.ok

    async def _drain(self, _: Caller, request: DrainHost) -> Ack:
        host = self._names.get(request.name)
        if host is None or host.caller is None:
            raise NotFoundError("store.drain", f"no host {request.name!r}", field="name")
        host.is_leaving = True
        if host.stage is HostStage.ACTIVE:
            host.stage = HostStage.DRAINING
        return Ack()

    # Hosts.

    async def _join(self, caller: Caller, request: JoinHost) -> Joined:
        self._check_present(caller)
        host = self._names.get(request.name)
        if host is not None and host.caller is caller and request.attempt <= host.attempt:
            return Joined(self.epoch, host.number, host.session)  # It came late, or twice.
        if host is not None and host.caller is not None:
            if host.segment_id != request.segment_id:
                raise ConflictError(
                    "store.join", f"a host {request.name!r} is there already", field="name"
                )
            self._lose_host(host)  # The same one, by a new connection.
        if request.epoch_seen > self.epoch:
            self.epoch = request.epoch_seen + 1
            self._counter = 0
            logger.info("event=epoch_raised epoch=%d host=%s", self.epoch, request.name)
        if host is None:
            number = len(self.hosts)
            host = HostSpace(
                number, request.name, self._clock, lambda: self.epoch, self._space_freed.set
            )
            self.hosts[number] = self._names[request.name] = host
        elif host.segment_id != request.segment_id:
            self._forget_segment(host)
        self._num_sessions += 1
        self._by_session[self._num_sessions] = host
        host.begin_session(caller, self._num_sessions, request)
        self.directory.find_host(host.number)
        logger.info("event=host_joining host=%s session=%d", host.name, host.session)
        return Joined(self.epoch, host.number, host.session)

    def _forget_segment(self, host: HostSpace) -> None:
        for row in self.directory.rows_on_host(host.number):
            self.drop_replica(row, host.number)
        host.is_known = False

    def _joining(self, caller: Caller, session: int) -> HostSpace:
        host = self._by_session.get(session)
        if host is None or host.session != session or host.caller is not caller:
            raise PeerLostError("store.join", f"session {session} is over: join again")
        return host

    async def _inventory(self, caller: Caller, page: InventoryPage) -> Ack:
        host = self._joining(caller, page.session)
        if page.page < host.num_pages:
            return Ack()  # It came twice.
        if page.page > host.num_pages:
            raise ConflictError("store.join", f"page {page.page} before page {host.num_pages}")
        host.num_pages += 1
        for offset, header in iterate_records(page.records):
            self._adopt(host, offset, header)
        return Ack()

    def _adopt(self, host: HostSpace, offset: int, header: ExtentHeader) -> None:
        """Fit an object that a host reports into the directory, or have it wiped."""
        directory = self.directory
        row = directory.find(header.key)
        listed = None
        if row != NO_ROW:
            listed = next((r for r in directory.replicas(row) if r.host == host.number), None)
        is_same = row != NO_ROW and directory.version(row) == header.version
        length = layout.extent_bytes(len(header.key.encode()), header.size)
        if is_same and listed is not None and listed.offset == offset:
            host.confirmed[row] = Extent(offset, length)
            return
        if host.is_dropping(offset):
            return  # Removed since its inventory began.
        newest = self._dropped_versions.get(header.key, -1)
        is_newer = header.version > (newest if row == NO_ROW else directory.version(row))
        if (is_newer and not host.is_known) or (is_same and listed is None):
            replica = Replica(host.number, offset)
            if is_same:
                directory.add_replica(row, replica)
            else:
                if row != NO_ROW:
                    self.drop_row(row)
                row = directory.insert(
                    header.key,
                    size=header.size,
                    checksum=header.checksum,
                    version=header.version,
                    replicas=[replica],
                    wanted=header.wanted,
                )
                if header.hard_pin or header.soft_pin_ms:
                    soft = self._now_ms() + header.soft_pin_ms if header.soft_pin_ms else 0
                    directory.set_pins(row, hard=header.hard_pin, soft_until_ms=soft)
            # A reader that an earlier master sent there may still be reading.
            directory.extend_lease(row, self._now_ms() + self.config.lease_ms)
            host.confirmed[row] = Extent(offset, length)
            return
        host.drop(Extent(offset, length), self._now_ms() + self.config.lease_ms)

    async def _inventory_done(self, caller: Caller, request: InventoryDone) -> Ack:
        host = self._joining(caller, request.session)
        if request.num_pages != host.num_pages:
            raise ConflictError(
                "store.join", f"{host.num_pages} pages of {request.num_pages} have come"
            )
        if host.stage is HostStage.JOINING:
            self._settle(host)
        if request.can_write and host.stage is HostStage.READ_ONLY:
            host.stage = HostStage.DRAINING if host.is_leaving else HostStage.ACTIVE
            self._space_freed.set()
        return Ack()

    def _settle(self, host: HostSpace) -> None:
        """The inventory is complete: what it does not have is not there; the rest is free."""
        extents: list[Extent] = []
        for row in self.directory.rows_on_host(host.number):
            extent = host.confirmed.get(row)
            if extent is None:
                self._forget_replica(row, host.number)
            else:
                extents.append(extent)
        host.rebuild(extents)
        host.is_known = True
        host.confirmed.clear()
        host.stage = HostStage.READ_ONLY
        logger.info("event=host_joined host=%s objects=%d", host.name, len(extents))

    def _forget_replica(self, row: int, host: int) -> None:
        """The copy is not there; nothing to wipe."""
        self.directory.drop_replica(row, host)
        if not self.directory.replicas(row):
            self.directory.remove(row)

    async def _grown(self, caller: Caller, request: SegmentGrown) -> Ack:
        self._joining(caller, request.session).grow(request.capacity_bytes)
        return Ack()

    def _lose_host(self, host: HostSpace) -> None:
        logger.warning("event=host_lost host=%s", host.name)
        for put in self._puts.values():
            put.extents.pop(host.number, None)
        self._by_session.pop(host.session, None)
        host.end_session()
        self.directory.lose_host(host.number)
        self.counters.hosts_lost += 1

    # Telling.

    def status(self) -> StoreStatus:
        """Return what the store looks like from here."""
        return StoreStatus(
            epoch=self.epoch,
            num_objects=len(self.directory),
            total_bytes=self.directory.total_bytes,
            num_unreadable=self.directory.num_unreadable,
            num_under_replicated=self.directory.count_under_replicated(),
            num_unfinished=len(self._puts),
            hosts=[
                HostStatus(
                    name=host.name,
                    machine=host.machine,
                    stage=host.stage,
                    capacity_bytes=host.capacity_bytes,
                    used_bytes=host.used_bytes,
                    num_objects=len(self.directory.rows_on_host(host.number)),
                    quarantined_bytes=host.quarantined_bytes,
                )
                for host in self.hosts.values()
            ],
        )

    def _status(self, _: Caller, __: None) -> StoreStatus:
        return self.status()


class _KeysHeld:
    """Holds keys against other commits: all of them or, meanwhile, none."""

    def __init__(self, held: "dict[str, asyncio.Future[None]]", keys: Sequence[str]) -> None:
        self._held = held
        self._keys = dict.fromkeys(keys)
        self._released: asyncio.Future[None] | None = None

    async def __aenter__(self) -> None:
        while busy := [self._held[key] for key in self._keys if key in self._held]:
            await asyncio.shield(busy[0])
        self._released = asyncio.get_running_loop().create_future()
        for key in self._keys:
            self._held[key] = self._released

    async def __aexit__(self, *_: object) -> None:
        for key in self._keys:
            del self._held[key]
        assert self._released is not None
        self._released.set_result(None)


def check_key(key: str, config: StoreConfig) -> None:
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

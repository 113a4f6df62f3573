"""Copies that a master orders: for objects with too few replicas, for hosts that are drained, and
loads from disks into memory.
"""

import asyncio
import itertools
import logging
from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass

from tandem.core.errors import CorruptionError, NotFoundError, TandemError
from tandem.store.master.departures import Departures
from tandem.store.master.eviction import Eviction
from tandem.store.master.policies import rank_replicas
from tandem.store.master.state.index import Replica
from tandem.store.master.state.ledger import ExtentEvent, Space
from tandem.store.master.state.space import HostSpace
from tandem.store.master.state.state import CopyUnderWay, StoreState
from tandem.store.messages import Ack, HostStage, LoadObject, PullObject

__all__ = ["Maintenance"]

logger = logging.getLogger(__name__)

REPAIR_PERIOD_MS = 250
PULL_TIMEOUT_MS = 10_000
RETRY_AFTER_MS = 1_000
QUEUE_LENGTH = 1_000
"""Number of objects to copy or drop that one scan queues."""
MAX_LOADS = 32
"""Number of objects that one host reads from its disk concurrently; enough to keep a disk busy."""
MAX_WAITING_LOADS = 100_000
LOADS_AT_ONCE = 256
"""Number of waiting loads that one pass examines."""
LOAD_WAIT_MS = 10_000
"""Milliseconds after which a load without space in memory is given up."""
LOAD_TIMEOUT_S = 30.0


@dataclass(slots=True, eq=False)
class _Load:
    row: int
    until_ms: int
    done: asyncio.Future[None]


class Maintenance:
    """Repairs, drains and loads of one master, with at most ``max_repairs`` concurrent copies
    between hosts.
    """

    def __init__(self, state: StoreState, departures: Departures, eviction: Eviction) -> None:
        self._state = state
        self._departures = departures
        self._eviction = eviction
        self._queue: deque[tuple[str, int]] = deque()
        """Keys of objects to copy, with their rows when they were found. The next scan fills the
        queue anew.
        """
        self._copying = state.copies
        self._not_before_ms: dict[str, int] = {}
        self._next_ms = 0
        self._loads: OrderedDict[str, _Load] = OrderedDict()
        """Loads from disk into memory by key, running or waiting, oldest first."""

    def load(self, row: int) -> "asyncio.Future[None] | None":
        """Have a host read the object in ``row`` from its disk into its memory. Repeated calls
        share one load.

        Returns: a future that is done when the load has ended, successfully or not; None if no
            connected host has the object on disk, or too many loads wait.
        """
        state = self._state
        if not state.hosts_with_disk_copy(row):
            return None
        key = state.directory.key[row]
        load = self._loads.get(key)
        if load is None:
            if len(self._loads) >= MAX_WAITING_LOADS:
                return None
            until_ms = state.now_ms() + LOAD_WAIT_MS
            load = _Load(row, until_ms, asyncio.get_running_loop().create_future())
            self._loads[key] = load
            self._try_load(key, load)
        return load.done

    def begin_loads(self, now_ms: int) -> None:
        """Start the waiting loads that there is space for. Give up those that have waited too
        long.
        """
        for key, load in list(itertools.islice(self._loads.items(), LOADS_AT_ONCE)):
            if key in self._copying:
                continue
            if load.until_ms <= now_ms:
                self._end_load(key)
            else:
                self._try_load(key, load)

    def _try_load(self, key: str, load: _Load) -> None:
        state, directory = self._state, self._state.directory
        if directory.find(key) != load.row or directory.num_in_memory[load.row]:
            self._end_load(key)  # The object is removed, or in memory already.
            return
        if key in self._copying or key in self._not_before_ms:
            return
        able = state.hosts_with_disk_copy(load.row)
        if not able:
            self._end_load(key)
            return
        length = state.extent_of(load.row, 0).length
        for number in rank_replicas([host.view() for host in able], ""):
            target = state.hosts[number]
            if self._count_loads(target) >= MAX_LOADS:
                continue
            extent = target.allocate(length, is_load=True)
            if extent is not None:
                copy = CopyUnderWay(target, target.session, extent, is_load=True)
                self._copying[key] = copy
                state.tasks.spawn(self._copy(load.row, key, copy))
                return
            if target.is_writable:
                self._eviction.evict_for(target, length)

    def _count_loads(self, target: HostSpace) -> int:
        return sum(copy.is_load and copy.target is target for copy in self._copying.values())

    def _end_load(self, key: str) -> None:
        load = self._loads.pop(key, None)
        if load is not None and not load.done.done():
            load.done.set_result(None)

    def step(self, now_ms: int) -> None:
        """Look for objects that have too few copies or lie on a drained host, start to copy them,
        and drop copies on drained hosts; returns without waiting.
        """
        if now_ms < self._next_ms:
            return
        self._next_ms = now_ms + REPAIR_PERIOD_MS
        self._not_before_ms = {k: at for k, at in self._not_before_ms.items() if at > now_ms}
        self._queue.clear()
        for host in list(self._state.hosts.values()):
            if host.stage is HostStage.DRAINING:
                self._drain(host)
        if len(self._state.writable_hosts()) > 1:
            limit = QUEUE_LENGTH + len(self._copying) + len(self._not_before_ms)
            for row in self._state.directory.list_under_replicated(limit):
                self._queue.append((self._state.directory.key[row], row))
        self._begin_copies()

    def _begin_copies(self) -> None:
        num_pulls = sum(not copy.is_load for copy in self._copying.values())
        while self._queue and num_pulls < self._state.config.max_repairs:
            num_pulls += 1
            key, row = self._queue.popleft()
            if self._state.directory.find(key) == row:
                self._begin_copy(row)

    def _drain(self, host: HostSpace) -> None:
        directory = self._state.directory
        rows = directory.copies.rows_on_host(host.number)
        on_disk = directory.copies.rows_on_disk(host.number)
        going = (Space.WIPING, Space.LEASED, Space.QUARANTINED)
        if not rows and not on_disk and not host.ledger.count_bytes(*going):
            host.stage = HostStage.DRAINED
            logger.info("event=host_drained host=%s", host.name)
            return
        for row in rows[:QUEUE_LENGTH]:
            if self._is_on_enough(row, {host for host, _ in directory.copies.replicas(row)}):
                self._departures.drop_replica(row, host.number)
            else:
                self._queue.append((directory.key[row], row))
        self._drain_disk(host, on_disk)

    def _drain_disk(self, host: HostSpace, rows: list[int]) -> None:
        """Drop the copies on a draining host's disk (all its objects are moved off) of objects that
        enough other hosts have. Load the others into its memory, to be copied from there.
        """
        directory = self._state.directory
        for row in rows[:QUEUE_LENGTH]:
            in_memory = {host for host, _ in directory.copies.replicas(row)}
            if self._is_on_enough(row, in_memory.union(directory.copies.disks(row))):
                directory.copies.drop_disk(row, host.number)
                host.drops.forget(directory.key[row], directory.version[row])
            elif directory.num_in_memory[row]:
                self._queue.append((directory.key[row], row))
            elif self._state.writable_hosts():
                self.load(row)

    def _is_on_enough(self, row: int, holders: Collection[int]) -> bool:
        """Return True if, of the hosts that have the object in ``row``, as many stay as its put
        asked for, or as many as there are hosts that stay.
        """
        num_staying = sum(self._state.hosts[number].is_writable for number in holders)
        most = len(self._state.writable_hosts())
        return num_staying > 0 and num_staying >= min(self._state.directory.wanted[row], most)

    def _begin_copy(self, row: int) -> None:
        state, key = self._state, self._state.directory.key[row]
        if key in self._copying or key in self._not_before_ms:
            return
        holders = {replica.host for replica in state.directory.copies.replicas(row)}
        length = state.extent_of(row, 0).length
        for number in state.choose_hosts():
            if number in holders:
                continue
            extent = state.hosts[number].allocate(length)
            if extent is not None:
                target = state.hosts[number]
                copy = CopyUnderWay(target, target.session, extent)
                self._copying[key] = copy
                state.tasks.spawn(self._copy(row, key, copy))
                return
        self._not_before_ms[key] = state.now_ms() + RETRY_AFTER_MS  # No host has room.

    async def _copy(self, row: int, key: str, copy: CopyUnderWay) -> None:
        """Have the target host bring a copy of the object into the extent reserved there, and
        record the outcome.
        """
        directory, target = self._state.directory, copy.target
        is_same = directory.find(key) == row and not copy.is_abandoned
        if is_same and copy.is_load:
            has_source = target.number in directory.copies.disks(row)
        else:
            has_source = is_same and directory.num_in_memory[row] > 0
        if not has_source or target.session != copy.session:
            self._end_copy(key)
            if target.session == copy.session and not copy.is_abandoned:
                target.release([copy.extent.offset])
            return
        version = directory.version[row]
        try:
            is_done = await (self._load(row, copy) if copy.is_load else self._pull(row, key, copy))
        except BaseException:
            del self._copying[key]
            raise
        if not is_done:
            self._not_before_ms[key] = self._state.now_ms() + RETRY_AFTER_MS
        is_same = self._state.is_version(row, key, version)
        if target.session != copy.session:
            # The session with the host has changed, so it is unknown whether the copy exists. The
            # host's next inventory (list of its objects) tells.
            self._state.note_unlisted(key)
        elif copy.is_abandoned:
            pass  # ``drop_row`` or ``_load`` has it wiped.
        elif is_done and is_same and self._state.find_copy(row, target.number) < 0:
            target.ledger.move(ExtentEvent.SEAL, [copy.extent.offset])
            directory.copies.add_replica(row, Replica(target.number, copy.extent.offset))
            if directory.num_in_memory[row] > directory.wanted[row]:
                self._eviction.note_surplus()
            if copy.is_load:
                self._state.counters.objects_promoted += 1
            else:
                self._state.counters.replicas_copied += 1
        else:
            # Wipe the extent, whether or not the copy is complete; this also cancels a running copy
            # from another host. The record on disk of an object that was loaded from there stays.
            on_way = None if copy.is_load else version
            self._departures.wipe_copy(key, target, copy.extent, version=on_way)
        self._end_copy(key)

    def _end_copy(self, key: str) -> None:
        copy = self._copying.pop(key)
        self._end_load(key)
        if copy.is_load:
            self.begin_loads(self._state.now_ms())
        else:
            self._begin_copies()

    async def _load(self, row: int, copy: CopyUnderWay) -> bool:
        """Have the target host load the object from its disk. Return False on failure; a copy that
        is missing or corrupt on the disk is removed from the directory.
        """
        state, directory = self._state, self._state.directory
        key, version = directory.key[row], directory.version[row]
        records = state.record_of(row, copy.extent.offset)
        try:
            await copy.target.line.order(
                "load", LoadObject, Ack, timeout_s=LOAD_TIMEOUT_S, records=records
            )
        except (NotFoundError, CorruptionError) as error:
            logger.warning(
                "event=disk_copy_lost key=%s host=%s reason=%s", key, copy.target.name, error
            )
            is_same = state.is_version(row, key, version)
            if is_same and not copy.is_abandoned and copy.target.session == copy.session:
                if isinstance(error, CorruptionError):
                    state.counters.replicas_corrupt += 1
                copy.is_abandoned = True
                copy.target.drops.drop([copy.extent.offset], [copy.extent.length], 0)
                self._departures.lose_disk(row, copy.target.number)
        except TandemError as error:
            logger.warning(
                "event=load_failed key=%s host=%s reason=%s", key, copy.target.name, error
            )
        else:
            return True
        return False

    async def _pull(self, row: int, key: str, copy: CopyUnderWay) -> bool:
        """Have the target host copy the object from another host's memory. Return False on
        failure.
        """
        state, target = self._state, copy.target
        version = state.directory.version[row]
        source_number, source_offset = state.readable_copies(row)[0]
        source = state.hosts[source_number]
        source.drops.guarded.add(source_offset)
        try:
            await target.line.order(
                "pull",
                PullObject,
                Ack,
                timeout_s=1.5 * PULL_TIMEOUT_MS / 1e3,
                source=source.endpoint(),
                source_offset=source_offset,
                records=state.record_of(row, copy.extent.offset),
                timeout_ms=PULL_TIMEOUT_MS,
            )
        except CorruptionError:
            # The copied bytes do not match their checksums. Each host with a copy verifies its own.
            await self._verify_all(row, key, version)
        except TandemError as error:
            logger.warning("event=copy_failed key=%s host=%s reason=%s", key, target.name, error)
        else:
            return True
        finally:
            source.drops.guarded.discard(source_offset)
        return False

    async def _verify_all(self, row: int, key: str, version: int) -> None:
        for replica in self._state.directory.copies.replicas(row):
            try:
                await self._departures.verify_replica(key, version, replica.host)
            except TandemError as error:
                logger.warning("event=verify_failed key=%s reason=%s", key, error)

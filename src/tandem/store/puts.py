"""Unfinished puts of a master: space taken for them, and given back when they end badly."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tandem.core.errors import CapacityError, ConfigError, TandemError
from tandem.store import layout
from tandem.store.config import StoreConfig
from tandem.store.index import NO_ROW
from tandem.store.messages import CommitStatus, StartedPut, StartPut, StartStatus
from tandem.store.sessions import Caller, check_present
from tandem.store.space import Extent, HostSpace

if TYPE_CHECKING:
    from tandem.store.master import StoreMaster

__all__ = ["Put", "Puts", "check_key"]

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 16_384
"""Results of commits kept for requests that come twice."""
MIN_WAIT_S = 1e-3


@dataclass(slots=True, eq=False)
class Put:
    """One unfinished put: what is asked for, and the space that its client may write to."""

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


class Puts:
    """The unfinished puts of one master, and the results of those that ended."""

    def __init__(self, master: "StoreMaster") -> None:
        self._master = master
        self.unfinished: OrderedDict[tuple[str, int], Put] = OrderedDict()
        """By client and its number, oldest first."""
        self.results: OrderedDict[tuple[str, int], CommitStatus] = OrderedDict()
        self.num_waiting = 0
        """Requests that wait for space."""

    # Beginning.

    async def start(self, caller: Caller, request: StartPut) -> StartedPut:
        """Take space for a batch, all or nothing, and say where to write."""
        check_present(caller)
        self.check_batch(request)
        client = caller.instance_id
        statuses = [self._start_status(client, request, i) for i in range(len(request.keys))]
        granted = [i for i, status in enumerate(statuses) if status is StartStatus.GRANTED]
        for i, put in (await self.take_space(client, request, granted)).items():
            self.unfinished[client, request.first_put_id + i] = put
            for number, extent in put.extents.items():
                self._master.hosts[number].hold(client, extent)
        puts = {i: self.unfinished.get((client, request.first_put_id + i)) for i in granted}
        bases = await self._open_writers(client, [put for put in puts.values() if put is not None])
        places: list[list[tuple[int, int]]] = [[] for _ in statuses]
        for i, put in puts.items():
            if put is None:
                continue
            # What the client is not told of it cannot write, and must not be taken for written.
            for number in [number for number in put.extents if number not in bases]:
                self.fence(self._master.hosts[number], client)
            places[i] = [(host, extent.offset) for host, extent in put.extents.items()]
        used = sorted({host for place in places for host, _ in place})
        return StartedPut(
            statuses=[int(status) for status in statuses],
            grants=[0 if (put := puts.get(i)) is None else put.grant for i in range(len(statuses))],
            places=places,
            endpoints=[self._master.hosts[host].endpoint(bases[host]) for host in used],
        )

    def check_batch(self, request: StartPut) -> None:
        """Raises: ConfigError if it is beyond a limit."""
        keys, sizes, config = request.keys, request.sizes, self._master.config
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
        if (client, request.first_put_id + i) in self.results:
            return StartStatus.DONE
        row = self._master.directory.find(request.keys[i])
        is_taken = row != NO_ROW and self._master.directory.num_live(row) > 0 and not request.upsert
        return StartStatus.EXISTS if is_taken else StartStatus.GRANTED

    async def take_space(
        self, client: str, request: StartPut, granted: Sequence[int]
    ) -> dict[int, Put]:
        """Allocate for all of them or raise; what waits holds nothing meanwhile.

        Returns: by index what is new, as yet nobody's. Raises: CapacityError.
        """
        wait_ms = min(request.wait_ms, self._master.config.put_wait_ms)
        deadline_s = self._master.clock.now_s() + wait_ms / 1e3
        if not self._master.hosts and granted:
            # Nothing to wait for but a host.
            await self._wait_freed(max(0.0, deadline_s - self._master.clock.now_s()))
        is_last = False
        while (made := self._allocate_all(client, request, granted, is_last=is_last)) is None:
            left_s = deadline_s - self._master.clock.now_s()
            if is_last:
                raise self._describe_full(request, granted)
            if left_s > 0:
                self._check_possible(request, granted)
                if self.num_waiting >= self._master.config.max_waiting_puts:
                    raise CapacityError(
                        "store.put", f"{self.num_waiting} puts wait for space, the limit"
                    )
                self._master.counters.puts_waited += 1
                self.num_waiting += 1
                try:
                    await self._wait_freed(left_s)
                finally:
                    self.num_waiting -= 1
            is_last = deadline_s - self._master.clock.now_s() <= 0
        return made

    async def _wait_freed(self, timeout_s: float) -> None:
        self._master.space_freed.clear()
        # The loop's timer and the master's clock need not agree: what is left may be too little for
        # the one to go on by, and be something to the other for ever.
        timeout_s = max(timeout_s, MIN_WAIT_S)
        try:
            await asyncio.wait_for(self._master.space_freed.wait(), timeout_s)
        except TimeoutError:
            return

    def _allocate_all(
        self, client: str, request: StartPut, granted: Sequence[int], *, is_last: bool
    ) -> dict[int, Put] | None:
        made: dict[int, Put] = {}
        expires_ms = self._master.now_ms() + self._master.config.put_timeout_ms
        for i in granted:
            name = (client, request.first_put_id + i)
            if name in self.unfinished:
                continue  # The request came twice.
            size = request.sizes[i]
            put = Put(
                client=client,
                put_id=name[1],
                grant=self._master.next_version(),
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
                for other in made.values():
                    for host, extent in other.extents.items():
                        self._master.hosts[host].untake(extent)
                return None
            made[i] = put
        return made

    def _allocate(self, put: Put, request: StartPut, *, is_last: bool) -> bool:
        """Take space on as many hosts as wanted and there are; the last attempt is content with 1.

        Where a host is full, objects are evicted there, and their space is there a moment later.
        """
        order = self._master.choose_hosts(preferred=request.preferred, machine=request.machine)
        goal = min(put.wanted, len(order))
        for number in order:
            extent = self._master.hosts[number].allocate(put.length)
            if extent is not None:
                put.extents[number] = extent
                put.sessions[number] = self._master.hosts[number].session
                if len(put.extents) == goal:
                    break
        if put.extents and (len(put.extents) == goal or is_last):
            return True
        for number, extent in put.extents.items():
            self._master.hosts[number].untake(extent)
        put.extents.clear()
        for number in order:
            self._master.eviction.evict_for(self._master.hosts[number], put.length)
        return False

    def _check_possible(self, request: StartPut, granted: Sequence[int]) -> None:
        hosts = self._master.writable_hosts()
        largest = max((host.capacity_bytes for host in hosts), default=0)
        total = sum(host.capacity_bytes for host in hosts)
        sizes = [request.sizes[i] for i in granted]
        if hosts and (max(sizes) > largest or sum(sizes) > total):
            raise self._describe_full(request, granted)

    def _describe_full(self, request: StartPut, granted: Sequence[int]) -> CapacityError:
        hosts = self._master.writable_hosts()
        need = sum(request.sizes[i] for i in granted)
        if not hosts:
            return CapacityError(
                "store.put",
                f"no host takes {need} bytes: {len(self._master.hosts)} known, none active: "
                "start one (`tandem store host`)",
            )
        free = sum(host.view().free_bytes for host in hosts)
        quarantined = sum(host.quarantined_bytes for host in hosts)
        leased = sum(host.leased_bytes for host in hosts)
        unfinished = sum(e.length for put in self.unfinished.values() for e in put.extents.values())
        return CapacityError(
            "store.put",
            f"no space for {len(granted)} objects of {need} bytes on {len(hosts)} hosts within "
            f"{min(request.wait_ms, self._master.config.put_wait_ms)} ms: {free} bytes free "
            f"(scattered), {unfinished} in unfinished puts, {leased} dropped but leased, "
            f"{quarantined} held until their writer is gone, the rest leased or pinned: unpin "
            "objects, put smaller batches, wait longer, or add a host",
        )

    async def _open_writers(self, client: str, puts: Sequence[Put]) -> dict[int, int]:
        numbers = sorted({host for put in puts for host in put.extents})
        asked = [self._master.hosts[number].open_writer(client) for number in numbers]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        bases: dict[int, int] = {}
        for number, answer in zip(numbers, answers, strict=True):
            if isinstance(answer, int):
                bases[number] = answer
            elif not isinstance(answer, TandemError):
                raise answer
        return bases

    # Ending.

    def remember(self, name: tuple[str, int], status: CommitStatus) -> None:
        """Keep a result for a request that comes twice."""
        if status is CommitStatus.EXPIRED:
            return
        self.results[name] = status
        if len(self.results) > MAX_REMEMBERED:
            self.results.popitem(last=False)

    def forget_lost(self, put: Put) -> None:
        """Forget space on hosts that have gone, or come back: the inventory has settled it."""
        for number in list(put.extents):
            if self._master.hosts[number].session != put.sessions[number]:
                del put.extents[number]

    def release(self, put: Put) -> None:
        """Free the space of a put that nobody writes any more and that was not sealed."""
        for number, extent in put.extents.items():
            self._master.hosts[number].release(extent)
        put.extents.clear()

    def fence(self, host: HostSpace, client: str) -> None:
        """Shut ``client`` out of ``host``: all its unfinished puts lose their space there."""
        for put in self.unfinished.values():
            if put.client == client:
                put.extents.pop(host.number, None)
        self._master.counters.fences += 1
        host.fence(client)

    def end_client(self, client: str) -> None:
        """Its session has ended: shut it out everywhere."""
        for host in self._master.hosts.values():
            if client in host.writers:
                self.fence(host, client)
        for name in [name for name in self.unfinished if name[0] == client]:
            del self.unfinished[name]

    def expire(self, now_ms: int) -> None:
        """End the puts that have been unfinished for too long."""
        while self.unfinished:
            name, put = next(iter(self.unfinished.items()))
            if put.expires_ms > now_ms:
                return
            logger.warning("event=put_expired client=%s key=%s", put.client, put.key)
            self._master.counters.puts_expired += 1
            for number in list(put.extents):
                self.fence(self._master.hosts[number], put.client)
            del self.unfinished[name]


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

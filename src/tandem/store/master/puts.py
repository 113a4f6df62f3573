"""Puts of a master: a client gets space, writes, and commits; small values come with the request.

However they come, values are put by the same steps: space is taken, hosts seal what is there, and
the directory shows it. The client's own writes are what takes more: it is let in on each host, and
shut out where it fails, where it goes away, or where it takes too long.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from typing import Any

from tandem.core.errors import ConfigError, DeadlineError, TandemError
from tandem.rpc import Kept
from tandem.store.formats import layout
from tandem.store.master.allocation import Allocation, PutBatch
from tandem.store.master.sealing import Blob, Sealing
from tandem.store.master.state.results import Results
from tandem.store.master.state.space import HostSpace
from tandem.store.master.state.state import StoreState
from tandem.store.messages import (
    CommitPut,
    CommitStatus,
    HostExtents,
    KeyBytes,
    PutInline,
    StartedPut,
    StartPut,
    StartStatus,
)
from tandem.store.sessions import Caller, check_present

__all__ = ["Puts"]

logger = logging.getLogger(__name__)


class Puts:
    """The puts of one master."""

    def __init__(
        self, state: StoreState, allocation: Allocation, sealing: Sealing, results: Results
    ) -> None:
        self._state = state
        self._allocation = allocation
        self._sealing = sealing
        self._results = results
        self.unfinished: OrderedDict[tuple[str, int], PutBatch] = OrderedDict()
        """The batches that clients may write now, by client and the first id of the request, oldest
        first."""

    @property
    def num_unfinished(self) -> int:
        """Objects whose put has begun and not ended."""
        return sum(len(batch.keys) for batch in self.unfinished.values())

    # Values that come with the request: no client writes to a segment, so there is no
    # grant, nothing to fence and nothing to expire.

    def put_inline(self, caller: Caller, request: PutInline) -> Kept:
        """Put a batch; one ``CommitStatus`` each. Raises: CapacityError, ConfigError."""
        check_present(caller)
        return Kept(self._put_inline(caller, request))

    async def _put_inline(self, caller: Caller, request: PutInline) -> KeyBytes:
        lengths = self._allocation.check_batch(request)
        if len(request.checksums) != len(request.keys) or sum(request.sizes) != len(request.blob):
            raise ConfigError("store.put", "checksums or values do not fit the keys")
        client = caller.instance_id
        answer = await self._results.run(
            caller,
            request.first_put_id,
            request.settled_below,
            lambda: self._put_values(client, request, lengths),
        )
        return KeyBytes(answer)

    async def _put_values(self, client: str, request: PutInline, lengths: list[int]) -> bytes:
        statuses = bytearray([CommitStatus.EXISTS]) * len(request.keys)
        taken = self._allocation.find_taken(request)
        wanted = [i for i, is_taken in enumerate(taken) if not is_taken]
        if wanted:
            batch, is_taken = self._allocation.take_space(client, request, wanted, lengths)
            if not is_taken:
                await self._allocation.wait_space(batch)
            values = Blob(request.blob, request.sizes, is_values=True).pick(wanted)
            checksums = [request.checksums[i] for i in wanted]
            sealed = await self._sealing.seal(batch, checksums, values)
            for i, status in zip(wanted, sealed, strict=True):
                statuses[i] = status
        return bytes(statuses)

    # Values that the client writes.

    def start(
        self, caller: Caller, request: StartPut
    ) -> StartedPut | Coroutine[Any, Any, StartedPut]:
        """Take space for a batch, all or nothing, and say where to write."""
        check_present(caller)
        lengths = self._allocation.check_batch(request)
        client, count = caller.instance_id, len(request.keys)
        name = (client, request.first_put_id)
        batch = self.unfinished.get(name)
        if batch is None and not self._results.has(*name):
            taken = self._allocation.find_taken(request)
            if all(taken):
                return StartedPut(statuses=taken, grant=0, places=[], endpoints=[])
            wanted = [i for i in range(count) if not taken[i]] if any(taken) else range(count)
            batch, is_taken = self._allocation.take_space(client, request, wanted, lengths)
            if not is_taken:
                return self._start_later(caller, request, batch)
        return self._answer_start(name, batch, count)

    async def _start_later(
        self, caller: Caller, request: StartPut, batch: PutBatch | None
    ) -> StartedPut:
        assert batch is not None, "it waits for its space"
        await self._allocation.wait_space(batch)
        if caller.is_lost:
            self._allocation.release(batch)
            check_present(caller)
        name = (caller.instance_id, request.first_put_id)
        # It came twice, and both waited.
        if name in self.unfinished or self._results.has(*name):
            self._allocation.release(batch)
            batch = self.unfinished.get(name)
        answer = self._answer_start(name, batch, len(request.keys))
        return answer if isinstance(answer, StartedPut) else await answer

    def _answer_start(
        self, name: tuple[str, int], batch: PutBatch | None, count: int
    ) -> StartedPut | Coroutine[Any, Any, StartedPut]:
        if batch is None:
            done = bytes([StartStatus.DONE]) * count
            return StartedPut(statuses=done, grant=0, places=[], endpoints=[])
        client = name[0]
        if name not in self.unfinished:
            self.unfinished[name] = batch
            for number in batch.places:
                self._state.hosts[number].writers.hold(
                    client, batch.grant, batch.list_offsets(number)
                )
        hosts = [self._state.hosts[number] for number in sorted(batch.places)]
        bases = {host.number: base for host in hosts if (base := host.writers.find(client)) >= 0}
        asked = [host for host in hosts if host.number not in bases]
        if asked:
            return self._open_writers(client, batch, count, bases, asked)
        return self._describe(client, batch, count, bases)

    def _describe(
        self, client: str, batch: PutBatch, count: int, bases: dict[int, int]
    ) -> StartedPut:
        # What the client is not told of it cannot write, and must not be taken for written.
        for number in [number for number in batch.places if number not in bases]:
            self.fence(self._state.hosts[number], client)
        positions = batch.positions
        is_whole = len(positions) == count
        statuses = bytearray([StartStatus.GRANTED if is_whole else StartStatus.EXISTS]) * count
        if not is_whole:
            for position in positions:
                statuses[position] = StartStatus.GRANTED
        places = [
            HostExtents(
                number,
                list(offsets) if is_whole else [positions[i] for i in offsets],
                list(offsets.values()),
            )
            for number, offsets in sorted(batch.places.items())
            if number in bases
        ]
        return StartedPut(
            statuses=bytes(statuses),
            grant=batch.grant,
            places=places,
            endpoints=[self._state.hosts[p.host].endpoint(bases[p.host]) for p in places],
        )

    async def _open_writers(
        self,
        client: str,
        batch: PutBatch,
        count: int,
        bases: dict[int, int],
        asked: Sequence[HostSpace],
    ) -> StartedPut:
        """Have hosts let the client write that do not yet."""
        answers = await asyncio.gather(
            *(self._open_writer(host, client) for host in asked), return_exceptions=True
        )
        for host, answer in zip(asked, answers, strict=True):
            if isinstance(answer, int):
                bases[host.number] = answer
            elif not isinstance(answer, TandemError):
                raise answer
        return self._describe(client, batch, count, bases)

    async def _open_writer(self, host: HostSpace, client: str) -> int:
        # The host is asked until it answers; it is only this put that goes on without it.
        try:
            async with asyncio.timeout(self._state.patience_s(host)):
                return await host.writers.open(client)
        except TimeoutError:
            host.doubt()
            raise DeadlineError("store.write", f"host {host.name} does not answer") from None

    def commit(self, caller: Caller, request: CommitPut) -> Kept:
        """Seal and show what a client has written; one ``CommitStatus`` for each granted object.

        A caller that leaves does not leave objects half sealed.
        """
        return Kept(self._commit_named(caller, request))

    async def _commit_named(self, caller: Caller, request: CommitPut) -> KeyBytes:
        client = caller.instance_id
        answer = await self._results.run(
            caller,
            request.first_put_id,
            request.settled_below,
            lambda: self._commit(client, request),
            can_be_late=False,  # What was granted tells.
        )
        return KeyBytes(answer)

    async def _commit(self, client: str, request: CommitPut) -> bytes:
        name = (client, request.first_put_id)
        batch = self.unfinished.get(name)
        if batch is None or batch.grant != request.grant:
            # With another grant: a late copy of the request took space that was never written.
            return bytes([CommitStatus.EXPIRED]) * len(request.checksums)
        if request.checksums and len(request.checksums) != len(batch.keys):
            raise ConfigError("store.commit", "as many checksums as objects, or none")
        del self.unfinished[name]
        return await self._commit_once(batch, request)

    async def _commit_once(self, batch: PutBatch, request: CommitPut) -> bytes:
        hosts = self._state.hosts
        # A host to which the write failed may still get late bytes: the space held there stays
        # the writer's until that is shut out.
        failed = sorted(set(request.failed_hosts) & set(batch.places))
        for number in failed:
            del batch.places[number]
        for number in batch.places:
            was_held = hosts[number].writers.unhold(batch.client, batch.grant)
            assert was_held, "a fence takes space from puts"
        for number in failed:
            hosts[number].doubt()
            self.fence(hosts[number], batch.client)
        if not request.checksums:
            self._allocation.release(batch)
            return bytes([CommitStatus.EXPIRED]) * len(batch.keys)
        table_sizes = [4 * count for count in layout.count_chunks_each(batch.sizes)]
        if sum(table_sizes) != len(request.tables):
            self._allocation.release(batch)
            raise ConfigError("store.commit", "tables that do not fit the values")
        blob = Blob(request.tables, table_sizes, is_values=False)
        return await self._sealing.seal(batch, request.checksums, blob)

    # Clients that fail.

    def forget_host(self, number: int) -> None:
        """Note that it is gone: no put has space there."""
        for batch in self.unfinished.values():
            batch.places.pop(number, None)

    def fence(self, host: HostSpace, client: str) -> None:
        """Shut ``client`` out of ``host``: all its unfinished puts lose their space there."""
        for batch in self.unfinished.values():
            if batch.client == client:
                batch.places.pop(host.number, None)
        self._state.counters.fences += 1
        host.writers.fence(client)

    def end_client(self, client: str) -> None:
        """Its session has ended: shut it out everywhere."""
        for host in self._state.hosts.values():
            if client in host.writers:
                self.fence(host, client)
        for name in [name for name in self.unfinished if name[0] == client]:
            del self.unfinished[name]

    def expire(self, now_ms: int) -> None:
        """End the puts that have been unfinished for too long."""
        while self.unfinished:
            name, batch = next(iter(self.unfinished.items()))
            if batch.expires_ms > now_ms:
                return
            logger.warning(
                "event=put_expired client=%s keys=%d first=%s",
                batch.client,
                len(batch.keys),
                batch.keys[0],
            )
            self._state.counters.puts_expired += len(batch.keys)
            for number in list(batch.places):
                self.fence(self._state.hosts[number], batch.client)
            del self.unfinished[name]

"""Puts of a master: a client gets space, writes, and commits; small values come with the request.

How a put goes is in ``put_batch``; here are the requests of clients, and what becomes of batches
whose clients fail: a client is shut out of a host where it fails, where it goes away, or where it
takes too long.
"""

import logging
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any

from tandem.core.errors import ConfigError
from tandem.rpc import Kept
from tandem.store.master.allocation import Allocation
from tandem.store.master.put_batch import Blob, PutBatch, PutParts
from tandem.store.master.state.results import Results
from tandem.store.master.state.space import HostSpace
from tandem.store.messages import (
    CommitPut,
    CommitStatus,
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

    def __init__(self, parts: PutParts, allocation: Allocation, results: Results) -> None:
        self._parts = parts
        self._state = parts.state
        self._allocation = allocation
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
        client, lengths = caller.instance_id, self._allocation.check_batch(request)
        if len(request.checksums) != len(request.keys) or sum(request.sizes) != len(request.blob):
            raise ConfigError("store.put", "checksums or values do not fit the keys")
        answering = self._results.run(
            caller,
            request.first_put_id,
            request.settled_below,
            lambda: self._put(client, request, lengths),
        )
        return Kept(answering)

    async def _put(self, client: str, request: PutInline, lengths: list[int]) -> KeyBytes:
        statuses = bytearray([CommitStatus.EXISTS]) * len(request.keys)
        taken = self._allocation.find_taken(request)
        wanted = [i for i, is_taken in enumerate(taken) if not is_taken]
        if wanted:
            batch = PutBatch(self._parts, client, request, wanted, lengths)
            if not self._allocation.take_space(batch):
                await self._allocation.wait_space(batch)
            values = Blob(request.blob, request.sizes, is_values=True).pick(wanted)
            sealed = await batch.seal([request.checksums[i] for i in wanted], values)
            for i, status in zip(wanted, sealed, strict=True):
                statuses[i] = status
        return KeyBytes(bytes(statuses))

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
            batch = PutBatch(self._parts, client, request, wanted, lengths)
            if not self._allocation.take_space(batch):
                return self._start_later(caller, batch)
        return self._answer_start(name, batch, count)

    async def _start_later(self, caller: Caller, waited: PutBatch) -> StartedPut:
        await self._allocation.wait_space(waited)
        name, batch = (caller.instance_id, waited.request.first_put_id), waited
        # It came twice, and both waited.
        is_twice = name in self.unfinished or self._results.has(*name)
        if caller.is_lost or is_twice:
            waited.release()
            check_present(caller)
            batch = self.unfinished.get(name)
        answer = self._answer_start(name, batch, len(waited.request.keys))
        return answer if isinstance(answer, StartedPut) else await answer

    def _answer_start(
        self, name: tuple[str, int], batch: PutBatch | None, count: int
    ) -> StartedPut | Coroutine[Any, Any, StartedPut]:
        if batch is None:
            done = bytes([StartStatus.DONE]) * count
            return StartedPut(statuses=done, grant=0, places=[], endpoints=[])
        self.unfinished.setdefault(name, batch)
        bases = batch.begin_writing()
        if len(bases) == len(batch.places):
            return batch.describe(bases)
        return self._open_writers(batch, bases)

    async def _open_writers(self, batch: PutBatch, bases: dict[int, int]) -> StartedPut:
        await batch.open_writers(bases)
        # What the client is not told of it cannot write, and must not be taken for written.
        for number in [number for number in batch.places if number not in bases]:
            self.fence(self._state.hosts[number], batch.client)
        return batch.describe(bases)

    def commit(self, caller: Caller, request: CommitPut) -> Kept:
        """Seal and show what a client has written; one ``CommitStatus`` for each granted object.

        A caller that leaves does not leave objects half sealed.
        """
        client = caller.instance_id
        answering = self._results.run(
            caller,
            request.first_put_id,
            request.settled_below,
            lambda: self._commit(client, request),
            can_be_late=False,  # What was granted tells.
        )
        return Kept(answering)

    async def _commit(self, client: str, request: CommitPut) -> KeyBytes:
        batch = self.unfinished.get((client, request.first_put_id))
        if batch is None or batch.grant != request.grant:
            # With another grant: a late copy of the request took space that was never written.
            return KeyBytes(bytes([CommitStatus.EXPIRED]) * len(request.checksums))
        if request.checksums and len(request.checksums) != len(batch.keys):
            raise ConfigError("store.commit", "as many checksums as objects, or none")
        del self.unfinished[client, request.first_put_id]
        for number in batch.end_writing(request.failed_hosts):
            self._state.hosts[number].doubt()
            self.fence(self._state.hosts[number], client)
        if not request.checksums:
            batch.release()
            return KeyBytes(bytes([CommitStatus.EXPIRED]) * len(batch.keys))
        return KeyBytes(await batch.seal(request.checksums, batch.cut_tables(request.tables)))

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

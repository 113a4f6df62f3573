"""The put requests of clients: reserve space, write, commit; or small values within the request.

``put_batch`` has the steps of a put. This module has the requests, and the handling of failed
clients: a client is fenced off a host if its write fails there, if it disconnects, or if it takes
    too long.
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
    """The handlers of one master for clients' put requests."""

    def __init__(self, parts: PutParts, allocation: Allocation, results: Results) -> None:
        self._parts = parts
        self._state = parts.state
        self._allocation = allocation
        self._results = results
        self.unfinished: OrderedDict[tuple[str, int], PutBatch] = OrderedDict()
        """The batches that clients may write now, oldest first, by client and first put id."""

    @property
    def num_unfinished(self) -> int:
        """Number of objects whose space is granted to a client, and which are not committed yet."""
        return sum(len(batch.keys) for batch in self.unfinished.values())

    # The methods below handle puts whose values come with the request. No client writes to a host's
    # memory, so there is no right to write that is granted, revoked or expires.

    def put_inline(self, caller: Caller, request: PutInline) -> Kept:
        """Put a batch whose values come with the request. The answer has a ``CommitStatus`` byte
        for each object.

        Raises: CapacityError (no space in time); ConfigError (the request exceeds a limit, or its
            checksums or values do not fit its keys).
        """
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

    # The methods below handle puts whose values the client writes to the hosts.

    def start(
        self, caller: Caller, request: StartPut
    ) -> StartedPut | Coroutine[Any, Any, StartedPut]:
        """Reserve space for all objects of a batch or none, and return where the client may
        write.
        """
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
        # The request to start the put may have come twice, with both copies waiting for space.
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
        # Revoke the client's right to write on hosts that are missing in the answer: it cannot
        # write there, and the extents must not pass for written.
        for number in [number for number in batch.places if number not in bases]:
            self.fence(self._state.hosts[number], batch.client)
        return batch.describe(bases)

    def commit(self, caller: Caller, request: CommitPut) -> Kept:
        """End a put: seal what a client has written (have the headers written), and publish it. The
        answer has a ``CommitStatus`` byte for each object that got space.

        The work completes even if the client disconnects, so that no object stays half sealed.
        """
        client = caller.instance_id
        answering = self._results.run(
            caller,
            request.first_put_id,
            request.settled_below,
            lambda: self._commit(client, request),
            can_be_late=False,  # The grant identifies late copies.
        )
        return Kept(answering)

    async def _commit(self, client: str, request: CommitPut) -> KeyBytes:
        batch = self.unfinished.get((client, request.first_put_id))
        if batch is None or batch.grant != request.grant:
            # If the grant (the number of the reservation) differs, a late copy of the start request
            # reserved space that was never written.
            return KeyBytes(bytes([CommitStatus.EXPIRED]) * len(request.checksums))
        if request.checksums and len(request.checksums) != len(batch.keys):
            raise ConfigError("store.commit", "as many checksums as objects, or none")
        del self.unfinished[client, request.first_put_id]
        for number in batch.end_writing(request.failed_hosts):
            self._state.hosts[number].line.doubt()
            self.fence(self._state.hosts[number], client)
        if not request.checksums:
            batch.release()
            return KeyBytes(bytes([CommitStatus.EXPIRED]) * len(batch.keys))
        return KeyBytes(await batch.seal(request.checksums, batch.cut_tables(request.tables)))

    # The methods below end the puts of clients that fail, disconnect or take too long.

    def forget_host(self, number: int) -> None:
        """Note that a host is lost: all unfinished puts forget the space that was reserved for them
        there.
        """
        for batch in self.unfinished.values():
            batch.places.pop(number, None)

    def fence(self, host: HostSpace, client: str) -> None:
        """Revoke a client's right to write on a host: all its unfinished puts lose the space that
        was reserved for them there.
        """
        for batch in self.unfinished.values():
            if batch.client == client:
                batch.places.pop(host.number, None)
        self._state.counters.fences += 1
        host.writers.fence(client)

    def end_client(self, client: str) -> None:
        """Note that a client's session has ended: revoke the client's right to write on all hosts,
        and end its puts.
        """
        for host in self._state.hosts.values():
            if client in host.writers:
                self.fence(host, client)
        for name in [name for name in self.unfinished if name[0] == client]:
            del self.unfinished[name]

    def expire(self, now_ms: int) -> None:
        """End the puts that have been unfinished for longer than the time limit."""
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

"""Gets of whole values, many at once: no object for each of them, and no question for those that
lie where they lay a moment ago.

Takes what is simple: the object is there, its best replica answers, its checksum is right. The rest
(a miss, a lost host, wrong bytes, an empty value) is left to ``reading``, which tries again and
tells why. Both keep the same rules: nothing is used that outlasted its lease or that differs from
its checksum. What was read from a remembered place must have its header as well; see
``location_cache``. Where it has not, the master is asked within the same call.
"""

import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tandem._native import BatchRead
from tandem.core.errors import NotFoundError, PeerLostError, TandemError
from tandem.store.client.buffers import Part, Result, ResultPool, ScratchPool, StoreBuffer
from tandem.store.client.location_cache import LocationCache
from tandem.store.client.master_calls import MIN_TIMEOUT_S, MasterCalls
from tandem.store.client.reading import LEASE_SHARE, OFF_LOOP_BYTES
from tandem.store.edges import ClientPort, Piece
from tandem.store.formats.checksum import checksum_table, make_table
from tandem.store.messages import Located, LocateObjects

__all__ = ["BulkReader"]

logger = logging.getLogger(__name__)

DIRECT_BYTES = 32 * 1024
"""Larger values are read to where they shall be; smaller ones side by side, and copied."""
RESULT_BYTES = 256 * 1024
"""Values of this size or more are received where they are given out, without a copy."""
NO_RESULTS: "contextlib.nullcontext[list[Result]]" = contextlib.nullcontext([])


class BulkReader:
    """The simple gets of one client."""

    def __init__(self, calls: MasterCalls, port: ClientPort, places: LocationCache) -> None:
        self._calls = calls
        self._port = port
        self._places = places
        self._scratch = ScratchPool(port)
        self._results = ResultPool(port, calls.config.result_pool_bytes)

    async def get_many(self, keys: Sequence[str], deadline_s: float) -> "list[bytes | None]":
        """Return the values; None for each that is not simple."""
        values: list[bytes | None] = [None] * len(keys)
        batch = BatchRead(keys, RESULT_BYTES)
        await self._read_all(
            keys,
            batch,
            lambda number: self._read_values(batch, values, number, deadline_s),
            deadline_s,
        )
        return values

    async def get_into_many(
        self, keys: Sequence[str], targets: Sequence[Sequence[Part]], deadline_s: float
    ) -> list[int]:
        """Read values into registered memory; returns the bytes of each, -1 where not simple.

        Only for values of which each has one part, all of the same buffer.
        """
        sizes = [-1] * len(keys)
        buffer = targets[0][0].buffer if targets and targets[0] else None
        if buffer is None or any(len(t) != 1 or t[0].buffer is not buffer for t in targets):
            return sizes
        batch = BatchRead(keys, DIRECT_BYTES + 1)
        batch.aim(
            [target[0].offset for target in targets],
            [target[0].nbytes for target in targets],
            buffer.nbytes,
        )
        await self._read_all(
            keys,
            batch,
            lambda number: self._read_into(batch, targets, sizes, number, deadline_s),
            deadline_s,
        )
        return sizes

    async def _read_all(
        self,
        keys: Sequence[str],
        batch: BatchRead,
        read: Callable[[int], Coroutine[Any, Any, None]],
        deadline_s: float,
    ) -> None:
        """Place and read all; ``read(endpoint)`` is one step of that."""
        places = self._places
        num_known = batch.place_known(places.cache, self._calls.clock.now_s() + places.margin_s)
        unplaced = batch.list_unplaced() if num_known else list(range(len(keys)))
        while True:
            if unplaced:
                await self._place(keys, batch, unplaced, deadline_s)
            for number in batch.list_endpoints():
                await read(number)
            # What was remembered and is not there any more. What the master itself has said is not
            # asked for again.
            if not num_known or not (unplaced := batch.list_unplaced()):
                return

    async def _place(
        self, keys: Sequence[str], batch: BatchRead, unplaced: list[int], deadline_s: float
    ) -> None:
        """Ask the master where these are."""
        places = self._places
        asked = list(keys) if len(unplaced) == len(keys) else [keys[i] for i in unplaced]
        generation = places.cache.generation
        sent_s = self._calls.clock.now_s()
        request = LocateObjects(asked, self._calls.machine)
        located = await self._calls.call("locate", request, Located, deadline_s)
        lease_end_s = sent_s + LEASE_SHARE * located.lease_ms / 1e3
        places.note_lease(located.lease_ms / 1e3)
        hosts = [(e.host, places.number(e), e.read_base) for e in located.endpoints]
        batch.place(
            unplaced,
            located.columns,
            located.versions,
            hosts,
            lease_end_s,
            places.cache,
            generation,
        )

    async def _read_values(
        self, batch: BatchRead, values: "list[bytes | None]", number: int, deadline_s: float
    ) -> None:
        cache = self._places.cache
        scratch_bytes, lease_end_s, rows, direct = batch.plan(number)
        lengths = [length for _, _, length in direct]
        with (
            self._scratch.lend(scratch_bytes) as scratch,
            self._results.lend(lengths) if direct else NO_RESULTS as results,
        ):
            pieces = [(scratch.handle, *row) for row in rows]
            pieces += [
                (result.buffer.handle, 0, at, length)
                for result, (_, at, length) in zip(results, direct, strict=True)
            ]
            if not await self._read(number, pieces, min(lease_end_s, deadline_s)):
                batch.fail(cache)
                return
            self._check_headers(batch, scratch)
            await self._check_values(batch, scratch, None, scratch_bytes)
            made: dict[int, bytes] = {}
            for result, (index, _, length) in zip(results, direct, strict=True):
                await self._check_result(batch, index, result.buffer, length)
                made[index] = result.value
            for index in batch.finish(values, scratch.array, self._calls.clock.now_s(), cache):
                values[index] = made[index]

    async def _read_into(
        self,
        batch: BatchRead,
        targets: Sequence[Sequence[Part]],
        sizes: list[int],
        number: int,
        deadline_s: float,
    ) -> None:
        cache, buffer = self._places.cache, targets[0][0].buffer
        scratch_bytes, lease_end_s, rows, direct = batch.plan(number)
        with self._scratch.lend(scratch_bytes) as scratch:
            pieces = [(scratch.handle, *row) for row in rows]
            pieces += [
                (buffer.handle, targets[index][0].offset, at, length)
                for index, at, length in direct
            ]
            if not await self._read(number, pieces, min(lease_end_s, deadline_s)):
                batch.fail(cache)
                return
            self._check_headers(batch, scratch)
            num_bytes = scratch_bytes + sum(length for _, _, length in direct)
            await self._check_values(batch, scratch, buffer, num_bytes)
            now_s = self._calls.clock.now_s()
            batch.finish_into(sizes, scratch.array, buffer.array, now_s, cache)

    async def _read(self, number: int, pieces: list[Piece], until_s: float) -> bool:
        endpoint = self._places.endpoint(number)
        if endpoint is None:
            return False
        timeout_s = max(MIN_TIMEOUT_S, until_s - self._calls.clock.now_s())
        try:
            await self._port.read(endpoint, pieces, timeout_s)
        except TandemError as error:
            logger.info("event=read_failed host=%s reason=%s", endpoint.name, error)
            if isinstance(error, PeerLostError | NotFoundError):
                self._places.cache.forget_endpoint(number)
            return False
        return True

    def _check_headers(self, batch: BatchRead, scratch: StoreBuffer) -> None:
        batch.check_headers(scratch.array)

    async def _check_values(
        self, batch: BatchRead, scratch: StoreBuffer, buffer: StoreBuffer | None, num_bytes: int
    ) -> None:
        memory = None if buffer is None else buffer.array
        if num_bytes > OFF_LOOP_BYTES:
            await self._calls.compute(lambda: batch.check_values(scratch.array, memory))
        else:
            batch.check_values(scratch.array, memory)

    async def _check_result(
        self, batch: BatchRead, index: int, buffer: StoreBuffer, length: int
    ) -> None:
        """Look at a value that lies where it is given out."""

        def compute() -> int:
            return checksum_table(make_table([buffer.array]))

        checksum = await self._calls.compute(compute) if length > OFF_LOOP_BYTES else compute()
        batch.check_direct(index, checksum)

    def close(self) -> None:
        """Give back the memory kept for scratch."""
        self._scratch.close()
        self._results.close()

"""Gets of many whole values at once, as arithmetic on columns: no object for each of them.

Takes what is simple: the object is there, its best replica answers, its checksum is right. The rest
(a miss, a lost host, wrong bytes, an empty value) is left to ``reading``, which tries again and
tells why. Both keep the same rules: nothing is used that outlasted its lease or that differs from
its checksum.
"""

import logging
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tandem._native import checksum_values
from tandem.core.errors import TandemError
from tandem.store import layout
from tandem.store.buffers import Part, ResultPool, ScratchPool
from tandem.store.checksum import checksum_table, make_table
from tandem.store.client_edges import ClientPort, Piece
from tandem.store.master_calls import MasterCalls
from tandem.store.messages import Endpoint, Located, LocateObjects
from tandem.store.reading import LEASE_SHARE, OFF_LOOP_BYTES

__all__ = ["BulkReader"]

logger = logging.getLogger(__name__)
Numbers = npt.NDArray[np.int64]

MAX_GAP_BYTES = 2048
"""Values that lie no further apart are read in one piece: the headers between them cost less than
a piece does."""
DIRECT_BYTES = 32 * 1024
"""Larger values are read to where they shall be; smaller ones side by side, and copied."""
RESULT_BYTES = 256 * 1024
"""Values of this size or more are received where they are given out, without a copy."""

ONE = struct.Struct("<qqqq")


class BulkReader:
    """The simple gets of one client."""

    def __init__(self, calls: MasterCalls, port: ClientPort) -> None:
        self._calls = calls
        self._port = port
        self._scratch = ScratchPool(port)
        self._results = ResultPool(port, calls.config.result_pool_bytes)

    async def get_many(self, keys: Sequence[str]) -> "list[bytes | None]":
        """Return the values; None for each that is not simple."""
        if len(keys) == 1:
            return [await self._get_one(keys[0])]
        values: list[bytes | None] = [None] * len(keys)
        found = await self._locate(keys)
        is_large = found.sizes >= RESULT_BYTES
        for host in found.hosts:
            is_here = found.places == host
            large = np.flatnonzero(is_here & is_large)
            plan = _Plan(found, np.flatnonzero(is_here & ~is_large))
            with (
                self._scratch.lend(plan.scratch_bytes) as buffer,
                self._results.lend(found.sizes[large].tolist()) as results,
            ):
                endpoint = found.endpoints[host]
                places = (endpoint.read_base + found.value_at[large]).tolist()
                pieces = plan.pieces(buffer.handle)
                pieces += [
                    Piece(result.buffer.handle, 0, at, result.buffer.nbytes)
                    for result, at in zip(results, places, strict=True)
                ]
                if not await self._read(endpoint, pieces, found.lease_end_s):
                    continue
                good = await self._check(buffer.array, plan.scratch_at, plan.sizes, plan.checksums)
                sums = await self._checksum([result.buffer.array for result in results])
                if self._calls.clock.now_s() > found.lease_end_s:
                    continue
                for i, result, checksum in zip(large.tolist(), results, sums, strict=True):
                    if checksum == found.checksums[i]:
                        values[i] = result.value
                memory = buffer.array.data
                ends = plan.scratch_at + plan.sizes
                for i, begin, end in zip(
                    plan.indexes[good].tolist(),
                    plan.scratch_at[good].tolist(),
                    ends[good].tolist(),
                    strict=True,
                ):
                    values[i] = memory[begin:end].tobytes()
        return values

    async def _get_one(self, key: str) -> bytes | None:
        """As ``get_many``; columns of one cost more than they save."""
        found = _One(key, *await self._ask([key]))
        if found.is_missing:
            return None
        if found.size >= RESULT_BYTES:
            with self._results.lend([found.size]) as (result,):
                is_good = await self._read_one(found, Part(result.buffer, 0, found.size))
                return result.value if is_good else None
        with self._scratch.lend(found.size) as buffer:
            is_good = await self._read_one(found, Part(buffer, 0, found.size))
            return buffer.array[: found.size].tobytes() if is_good else None

    async def _get_one_into(self, key: str, part: Part) -> int:
        """As ``get_into_many``."""
        found = _One(key, *await self._ask([key]))
        if found.is_missing or found.size > part.nbytes:
            return -1
        is_good = await self._read_one(found, Part(part.buffer, part.offset, found.size))
        return found.size if is_good else -1

    async def _read_one(self, found: "_One", part: Part) -> bool:
        piece = Piece(part.buffer.handle, part.offset, found.at, found.size)
        if not await self._read(found.endpoint, [piece], found.lease_end_s):
            return False

        (checksum,) = await self._checksum([part.view])
        return checksum == found.checksum and self._calls.clock.now_s() <= found.lease_end_s

    async def get_into_many(
        self, keys: Sequence[str], targets: Sequence[Sequence[Part]]
    ) -> list[int]:
        """Read values into registered memory; returns the bytes of each, -1 where not simple.

        Only for values of which each has one part, all of the same buffer.
        """
        sizes = [-1] * len(keys)
        buffer = targets[0][0].buffer if targets and targets[0] else None
        if len(keys) == 1 and len(targets[0]) == 1:
            return [await self._get_one_into(keys[0], targets[0][0])]
        if buffer is None or any(len(t) != 1 or t[0].buffer is not buffer for t in targets):
            return sizes
        into = np.array([target[0].offset for target in targets], dtype=np.int64)
        room = np.array([target[0].nbytes for target in targets], dtype=np.int64)
        found = await self._locate(keys)
        found.places[found.sizes > room] = -1
        is_direct = found.sizes > DIRECT_BYTES
        for host in found.hosts:
            direct = np.flatnonzero((found.places == host) & is_direct)
            staged = _Plan(found, np.flatnonzero((found.places == host) & ~is_direct))
            with self._scratch.lend(staged.scratch_bytes) as scratch:
                base = found.endpoints[host].read_base
                pieces = staged.pieces(scratch.handle)
                columns = (into[direct], base + found.value_at[direct], found.sizes[direct])
                rows = zip(*(column.tolist() for column in columns), strict=True)
                pieces += [Piece(buffer.handle, *row) for row in rows]
                if not await self._read(found.endpoints[host], pieces, found.lease_end_s):
                    continue
                good = direct[
                    await self._check(
                        buffer.array,
                        into[direct],
                        found.sizes[direct],
                        found.checksums[direct],
                    )
                ]
                is_good = await self._check(
                    scratch.array, staged.scratch_at, staged.sizes, staged.checksums
                )
                if self._calls.clock.now_s() > found.lease_end_s:
                    continue
                chosen = staged.indexes[is_good]
                columns = (into[chosen], staged.scratch_at[is_good], staged.sizes[is_good])
                for at, begin, size in zip(*(c.tolist() for c in columns), strict=True):
                    buffer.array[at : at + size] = scratch.array[begin : begin + size]
                for done in (good, chosen):
                    for i, size in zip(done.tolist(), found.sizes[done].tolist(), strict=True):
                        sizes[i] = size
        return sizes

    async def _locate(self, keys: Sequence[str]) -> "_Found":
        return _Found(keys, *await self._ask(keys))

    async def _ask(self, keys: Sequence[str]) -> tuple[Located, float]:
        """Return the master's answer, and until when it may be relied on."""
        deadline_s = self._calls.deadline_s()
        sent_s = self._calls.clock.now_s()
        request = LocateObjects(list(keys), self._calls.machine)
        located = await self._calls.call("locate", request, Located, deadline_s)
        lease_end_s = sent_s + LEASE_SHARE * located.lease_ms / 1e3
        return located, min(lease_end_s, deadline_s)

    async def _read(self, endpoint: Endpoint, pieces: list[Piece], until_s: float) -> bool:
        if not pieces:
            return True
        timeout_s = max(0.001, until_s - self._calls.clock.now_s())
        try:
            await self._port.read(endpoint, pieces, timeout_s)
        except TandemError as error:
            logger.info("event=read_failed host=%s reason=%s", endpoint.name, error)
            return False
        return True

    async def _checksum(self, values: "Sequence[npt.NDArray[np.uint8]]") -> list[int]:
        """Return the checksum of each of some values, wherever they lie."""

        def compute() -> list[int]:
            return [checksum_table(make_table([value])) for value in values]

        is_long = sum(value.size for value in values) > OFF_LOOP_BYTES
        return await self._calls.compute(compute) if is_long else compute()

    async def _check(
        self, memory: npt.NDArray[np.uint8], places: Numbers, sizes: Numbers, checksums: Numbers
    ) -> npt.NDArray[np.bool_]:
        """Return which values are what was written."""
        if not len(sizes):
            return np.zeros(0, dtype=bool)
        columns = (places.astype(np.uint64), sizes.astype(np.uint64))

        def compute() -> tuple[list[int], bytes]:
            return checksum_values(memory, *columns, layout.CHUNK_BYTES)

        is_long = int(sizes.sum()) > OFF_LOOP_BYTES
        found, _ = await self._calls.compute(compute) if is_long else compute()
        return np.array(found, dtype=np.int64) == checksums

    def close(self) -> None:
        """Give back the memory kept for scratch."""
        self._scratch.close()
        self._results.close()


class _One:
    """The master's answer for one key."""

    def __init__(self, key: str, located: Located, lease_end_s: float) -> None:
        self.size, self.checksum, host, offset = ONE.unpack(located.columns)
        self.is_missing = host < 0 or self.size <= 0
        self.lease_end_s = lease_end_s
        if not self.is_missing:
            self.endpoint = located.endpoints[0]
            value_at = layout.value_offset(len(key.encode()), self.size)
            self.at = self.endpoint.read_base + offset + value_at


class _Found:
    """The master's answer as columns, and where the values lie in their segments."""

    def __init__(self, keys: Sequence[str], located: Located, lease_end_s: float) -> None:
        columns = np.frombuffer(located.columns, dtype="<i8").reshape(4, len(keys)).copy()
        self.sizes, self.checksums, self.places, offsets = columns
        self.places[self.sizes <= 0] = -1  # An empty value has no bytes to find.
        self.endpoints: dict[int, Endpoint] = {e.host: e for e in located.endpoints}
        self.lease_end_s = lease_end_s
        key_bytes = np.fromiter((len(key.encode()) for key in keys), np.int64, len(keys))
        # The formulas of ``layout`` are arithmetic, of columns as of numbers.
        self.value_at: Numbers = offsets + layout.value_offset(key_bytes, self.sizes)  # type: ignore[arg-type]

    @property
    def hosts(self) -> list[int]:
        """Hosts with something to read."""
        return sorted(set(self.places.tolist()) - {-1})


class _Plan:
    """Values of one host that are read side by side into scratch memory."""

    def __init__(self, found: _Found, indexes: Numbers) -> None:
        if not len(indexes):
            self.indexes = self.sizes = self.checksums = self.scratch_at = indexes
            self.scratch_bytes = 0
            self._columns = ()
            return
        at = found.value_at[indexes]
        order = np.argsort(at)
        self.indexes = indexes[order]
        self.sizes = found.sizes[self.indexes]
        self.checksums = found.checksums[self.indexes]
        begins = at[order]
        ends = begins + self.sizes
        base = found.endpoints[int(found.places[indexes[0]])].read_base
        limit = np.minimum(MAX_GAP_BYTES, self.sizes[1:] // 4)
        is_first = np.ones(len(begins), dtype=bool)
        # The same object twice, too, begins a piece of its own.
        gap = begins[1:] - ends[:-1]
        is_first[1:] = (gap > limit) | (gap < 0)
        firsts = np.flatnonzero(is_first)
        lasts = np.append(firsts[1:], len(begins))[: len(firsts)] - 1
        lengths = ends[lasts] - begins[firsts]
        places = np.cumsum(lengths) - lengths
        piece_of = np.cumsum(is_first) - 1
        self.scratch_at = places[piece_of] + begins - begins[firsts][piece_of]
        self.scratch_bytes = int(lengths.sum())
        self._columns: tuple[Numbers, ...] = (places, base + begins[firsts], lengths)

    def pieces(self, scratch: object) -> list[Piece]:
        """Return what to read into scratch memory."""
        rows = zip(*(column.tolist() for column in self._columns), strict=True)
        return [Piece(scratch, *row) for row in rows]

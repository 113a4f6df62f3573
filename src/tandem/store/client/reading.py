"""Gets of a client: the best replica first, every chunk checked, then the next replica."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.core.errors import (
    ConfigError,
    CorruptionError,
    DeadlineError,
    NotFoundError,
    PeerLostError,
    ShapeError,
    TandemError,
)
from tandem.store.client.buffers import Part
from tandem.store.client.master_calls import MIN_TIMEOUT_S, RETRY_S, MasterCalls
from tandem.store.edges import ClientPort, Piece
from tandem.store.formats import layout
from tandem.store.formats.checksum import check_value, checksum_table, make_table
from tandem.store.messages import Ack, Endpoint, FoundObjects, ReportBadReplica

__all__ = ["ObjectRead", "ObjectReader", "not_found"]

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
"""Times that a get begins anew after what can only be transient."""
LEASE_SHARE = 0.9
"""Of a lease that a reader uses: clocks of two machines differ in rate, by far less than this."""
OFF_LOOP_BYTES = 2**24
"""More than this is checksummed in a thread, so that the loop lives on."""


class ObjectRead:
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
            self._settle(not_found(self.key))
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
            return [(scratch, self._scratch_at, table_at, self.scratch_bytes)]
        pieces = [(scratch, self._scratch_at, table_at, self.table_length)]
        if self._views is None:
            local = self._scratch_at + self.table_length
            return [*pieces, (scratch, local, value_at, self.num_bytes)]
        left = self.size
        for part, view in zip(self._parts, self._views, strict=True):
            length = min(left, view.size)
            if length:
                pieces.append((part.buffer.handle, part.offset, value_at, length))
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


def _prepare_scratch(reads: Sequence[ObjectRead]) -> npt.NDArray[np.uint8]:
    scratch = np.empty(sum(read.scratch_bytes for read in reads), dtype=np.uint8)
    at = 0
    for read in reads:
        read.lend(scratch, at)
        at += read.scratch_bytes
    return scratch


def _list_on_disk(reads: Sequence[ObjectRead], found: FoundObjects) -> list[ObjectRead]:
    return [
        read
        for read, flag in zip(reads, found.on_disk or bytes(len(reads)), strict=True)
        if flag and not read.is_settled
    ]


class ObjectReader:
    """The gets of one client."""

    def __init__(self, calls: MasterCalls, port: ClientPort) -> None:
        self._calls = calls
        self._port = port

    async def read_all(self, reads: Sequence[ObjectRead], deadline_s: float) -> None:
        """Carry all of them out; each tells what became of it."""
        for attempt in range(MAX_ATTEMPTS):
            left = [read for read in reads if not read.is_settled]
            if not left:
                return
            pause_s = RETRY_S * attempt
            if attempt and self._calls.clock.now_s() + pause_s >= deadline_s:
                break
            if attempt:
                await self._calls.sleep(pause_s)  # Hosts and masters come back.
            sent_s = self._calls.clock.now_s()
            found = await self._calls.find([read.key for read in left], deadline_s)
            lease_end_s = sent_s + LEASE_SHARE * found.lease_ms / 1e3
            endpoints = {endpoint.host: endpoint for endpoint in found.endpoints}
            for i, read in enumerate(left):
                read.locate(found, i)
            on_disk = _list_on_disk(left, found)
            outcomes = await self._calls.gather(
                self._read_replicas(
                    [read for read in left if read.places], endpoints, lease_end_s, deadline_s
                ),
                self._read_staged(on_disk, deadline_s),
            )
            for outcome in outcomes:
                if outcome is not None:
                    raise outcome
        for read in reads:
            if not read.is_settled:
                read.error = read.last_error or PeerLostError(
                    "store.get", f"all hosts of {read.key!r} are lost"
                )

    async def _read_staged(self, reads: Sequence[ObjectRead], deadline_s: float) -> None:
        """Read what lies on disks, as it comes into memory."""
        while reads:
            sent_s = self._calls.clock.now_s()
            try:
                found = await self._calls.stage([read.key for read in reads], deadline_s)
            except DeadlineError:
                for read in reads:
                    read.last_error = DeadlineError(
                        "store.get",
                        f"{read.key!r} is on a disk and was not read within "
                        f"{self._calls.config.deadline_ms} ms: the memory of its host may be full "
                        "of leased or pinned objects, or the disk slow (`tandem store stat`)",
                    )
                return
            lease_end_s = sent_s + LEASE_SHARE * found.lease_ms / 1e3
            endpoints = {endpoint.host: endpoint for endpoint in found.endpoints}
            for i, read in enumerate(reads):
                read.locate(found, i)
            left = _list_on_disk(reads, found)
            await self._read_replicas(
                [read for read in reads if read.places], endpoints, lease_end_s, deadline_s
            )
            if len(left) == len(reads):
                await self._calls.pause(RETRY_S, deadline_s)
            reads = left

    async def _read_replicas(
        self,
        reads: Sequence[ObjectRead],
        endpoints: dict[int, Endpoint],
        lease_end_s: float,
        deadline_s: float,
    ) -> None:
        """Read from the best replica of each, and from the next one where that fails."""
        lent: list[Any] = []
        try:
            while True:
                by_host: dict[int, list[ObjectRead]] = {}
                for read in reads:
                    if not read.is_settled and read.places:
                        by_host.setdefault(read.places[0][0], []).append(read)
                if not by_host:
                    return
                scratch = _prepare_scratch([r for group in by_host.values() for r in group])
                handle = self._port.register(scratch) if scratch.size else None
                if handle is not None:
                    lent.append(handle)
                until_s = min(lease_end_s, deadline_s)
                outcomes = await self._calls.gather(
                    *(
                        self._read_from(endpoints[host], group, handle, until_s)
                        for host, group in by_host.items()
                    )
                )
                for outcome in outcomes:
                    if outcome is not None:
                        raise outcome
                is_leased = self._calls.clock.now_s() <= lease_end_s
                for read in [read for group in by_host.values() for read in group]:
                    place = read.places.pop(0)
                    if not is_leased:
                        # The space may have become another object's while we read.
                        read.places.clear()
                        read.last_error = DeadlineError(
                            "store.get", f"reading {read.key!r} outlasted its lease"
                        )
                    elif read.failure is None and not await self._finish(read):
                        self._calls.spawn(self._report(read, place[0]))
        finally:
            for handle in lent:
                self._port.unregister(handle)

    async def _read_from(
        self, endpoint: Endpoint, reads: Sequence[ObjectRead], scratch: Any, until_s: float
    ) -> None:
        # Taken here: a client that blocks reads from one host after the other.
        timeout_s = max(MIN_TIMEOUT_S, until_s - self._calls.clock.now_s())
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

    async def _finish(self, read: ObjectRead) -> bool:
        """Check what was read; False if it is not what was written."""
        if read.num_bytes > OFF_LOOP_BYTES:
            is_good = await self._calls.compute(read.check)
        else:
            is_good = read.check()
        if is_good:
            read.is_settled = True
        else:
            read.last_error = CorruptionError(
                "store.get", f"{read.key!r} has a wrong checksum on every replica that was read"
            )
        return is_good

    async def _report(self, read: ObjectRead, host: int) -> None:
        request = ReportBadReplica(read.key, read.version, host)
        await self._calls.tell("report_bad", request, Ack)


def not_found(key: str) -> NotFoundError:
    """Return the error of a key without an object."""
    return NotFoundError("store.get", f"no object {key!r}", field="key")

"""A put of a client: reserve space, write, seal; repeated if an error may be transient.

Checksums are computed while the master looks for space. Bytes go to all replicas at once. The
objects are visible when the master has had their headers written. Small values travel with the
request, and the master does the rest.
"""

import logging
from collections.abc import Awaitable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from tandem._native import checksum_blob, checksum_values, locate_values
from tandem.core.errors import (
    ConfigError,
    DeadlineError,
    InternalError,
    PeerLostError,
    ShapeError,
    TandemError,
)
from tandem.store.arguments import MAX_SOFT_PIN_MS, check_keys, check_replicas, to_ms
from tandem.store.client.buffers import Part
from tandem.store.client.master_calls import MasterCalls
from tandem.store.client.options import PutOptions, PutResult
from tandem.store.config import StoreConfig
from tandem.store.formats import layout
from tandem.store.formats.checksum import checksum_table, make_table
from tandem.store.formats.records import join_pieces
from tandem.store.interfaces import ClientPort, Piece
from tandem.store.messages import (
    CommitPut,
    CommitStatus,
    Endpoint,
    HostExtents,
    KeyBytes,
    PutInline,
    StartedPut,
    StartPut,
    StartStatus,
)
from tandem.store.usual_time import UsualTime

__all__ = ["Items", "PutBatch", "is_inline"]

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
"""Number of attempts of a put. A new attempt follows an error that can only be transient."""
MAX_INLINE_BATCH_BYTES = 2**15
"""Limit of the bytes of values in one request, which the master forwards to hosts."""
CALLER_ERRORS = (ConfigError, ShapeError)
USUAL_FACTOR = 8.0
"""A write to a host is waited for this many times its usual duration; then the put tries other
hosts.
"""
MIN_WRITE_S = 1.0
WORK_BYTES = 2**22
"""Bytes to which the usual duration of a write refers. A write of twice the bytes may take twice as
long.
"""
OFF_LOOP_BYTES = 2**24
"""Bytes above which checksums are computed in a thread, so that the event loop stays free."""

_OUTCOMES = {
    CommitStatus.CREATED: PutResult.CREATED,
    CommitStatus.EXISTS: PutResult.EXISTS,
    CommitStatus.REPLACED: PutResult.REPLACED,
}
OUTCOMES = [_OUTCOMES.get(status) for status in CommitStatus]
"""The result for each commit status; None to try again."""
Views = Sequence[npt.NDArray[np.uint8]]


class Items(NamedTuple):
    """The objects of a put, as columns: lists with one item for each object."""

    keys: Sequence[str]
    sizes: Sequence[int]
    singles: Sequence[Part] = ()
    """The part of each object if every object has exactly one; else empty."""
    several: Sequence[Sequence[Part]] = ()
    """The parts of each object, if ``singles`` is empty."""
    blob: bytes | None = None
    """The concatenated values of objects that travel with the request; else None."""

    @classmethod
    def of(
        cls, keys: Sequence[str], sizes: Sequence[int], parts: Sequence[Sequence[Part]]
    ) -> "Items":
        """Return the columns of objects whose values lie in any number of parts (ranges of
        registered memory) each.
        """
        if set(map(len, parts)) == {1}:
            return cls(keys, sizes, [part for (part,) in parts])
        return cls(keys, sizes, several=parts)

    @classmethod
    def inline(cls, keys: Sequence[str], sizes: Sequence[int], views_of: Sequence[Views]) -> Self:
        """Return objects whose values travel with the request; see ``is_inline``."""
        return cls(keys, sizes, blob=b"".join([view.data for views in views_of for view in views]))

    def list_parts(self, i: int) -> Sequence[Part]:
        """Return the parts (ranges of registered memory) of the value of object ``i``."""
        return [self.singles[i]] if self.singles else self.several[i]

    def compute_checksums(self) -> tuple[list[int], bytes]:
        """Return the checksum of each object, and the concatenated checksum tables."""
        if self.blob is not None:  # The master has the tables of inline values computed.
            return checksum_blob(self.blob, list(self.sizes), layout.CHUNK_BYTES), b""
        buffers = {part.buffer for part in self.singles}
        if len(buffers) != 1:
            views_of = ([p.view for p in self.list_parts(i)] for i in range(len(self.keys)))
            tables = [make_table(views) for views in views_of]
            return [checksum_table(table) for table in tables], b"".join(tables)
        places = np.array([part.offset for part in self.singles], dtype=np.uint64)
        sizes = np.array(self.sizes, dtype=np.uint64)
        return checksum_values(buffers.pop().array, places, sizes, layout.CHUNK_BYTES)


def is_inline(sizes: Sequence[int], config: StoreConfig) -> bool:
    """Return True if values are small enough to travel with the request."""
    return max(sizes, default=0) <= config.inline_bytes and sum(sizes) <= MAX_INLINE_BATCH_BYTES


class PutBatch:
    """The objects of one put. Used once.

    Args:
        calls: calls to the master.
        port: the data path.
        usual: usual duration of a write of ``WORK_BYTES`` by host address; updated.
        items: the objects.
        options: replicas, placement, pins.
        deadline_s: time at which all must be done.
    """

    def __init__(
        self,
        calls: MasterCalls,
        port: ClientPort,
        usual: dict[str, UsualTime],
        items: Items,
        options: PutOptions,
        deadline_s: float,
    ) -> None:
        self._calls = calls
        self._port = port
        self._usual = usual
        self._items = items
        self._options = options
        self._deadline_s = deadline_s
        self._checksums: list[int] = []
        self._tables = b""
        self._value_at: list[int] = []
        """Offset of each value in its extent."""
        self._results: list[PutResult | TandemError | None] = [None] * len(items.keys)
        self._attempt = 0
        self._left: Sequence[int] = range(len(items.keys))
        """Indexes of the objects of this attempt: those without a result."""
        self._granted: Sequence[int] = ()
        """Indexes of the objects that space was granted for in this attempt."""
        self._first_id = 0
        self._settled_below = 0

    async def put(self) -> "list[PutResult | TandemError]":
        """Put all objects. Return one result for each, which may be an error."""
        while self._left and self._attempt < MAX_ATTEMPTS:
            self._first_id, self._settled_below = self._calls.ids.ask(len(self._left))
            try:
                if self._items.blob is not None:
                    await self._send(self._items.blob)
                else:
                    started = await self._start()
                    if self._granted:
                        await self._seal(started, await self._write(started))
            finally:
                self._calls.ids.settle(self._first_id)
            self._left = [i for i, result in enumerate(self._results) if result is None]
            self._attempt += 1
        lost = f"no host took the bytes in {MAX_ATTEMPTS} attempts: see its log"
        return [r if r is not None else PeerLostError("store.put", lost) for r in self._results]

    def _describe(self) -> dict[str, Any]:
        """Return the fields of a ``StartPut`` for this attempt: objects and options."""
        options, most_ms = self._options, self._calls.config.put_wait_ms
        check_replicas(options.replicas)
        check_keys(options.preferred, field="preferred")
        return {
            "first_put_id": self._first_id,
            "keys": [self._items.keys[i] for i in self._left],
            "sizes": [self._items.sizes[i] for i in self._left],
            "wait_ms": most_ms
            if options.wait_s is None
            else to_ms(options.wait_s, "wait_s", most_ms=most_ms),
            "replicas": options.replicas,
            "preferred": list(options.preferred),
            "machine": self._calls.machine if options.same_machine else "",
            "upsert": options.upsert,
            "hard_pin": options.hard_pin,
            "soft_pin_ms": to_ms(options.soft_pin_s, "soft_pin_s", most_ms=MAX_SOFT_PIN_MS),
        }

    async def _send(self, blob: bytes) -> None:
        """Send the values within the request for space. The master has the hosts store them, and
        answers with the results of the put.
        """
        fields = self._describe()
        if not self._checksums:
            self._checksums, _ = self._items.compute_checksums()
        request = PutInline(
            checksums=[self._checksums[i] for i in self._left],
            blob=join_pieces(blob, self._items.sizes, self._left),
            settled_below=self._settled_below,
            **fields,
        )
        extra_s = request.wait_ms / 1e3
        self._take_outcomes(
            self._left,
            await self._calls.call(
                "put_inline", request, KeyBytes, self._deadline_s, extra_s=extra_s
            ),
        )

    def _take_outcomes(self, objects: Sequence[int], answer: KeyBytes) -> None:
        for i, flag in zip(objects, answer.flags, strict=True):
            self._results[i] = OUTCOMES[flag]

    # The first step of a put: the methods below ask the master to reserve space.

    async def _start(self) -> StartedPut:
        """Ask the master for space, and compute checksums meanwhile."""
        request = StartPut(**self._describe())
        asking = self._calls.begin(
            "start_put", request, StartedPut, self._deadline_s, extra_s=request.wait_ms / 1e3
        )
        try:
            # Let the event loop send the request before the checksums are computed.
            await self._calls.sleep(0)
            await self._prepare()
        except BaseException:
            self._calls.spawn(self._give_back(asking))
            raise
        started = await asking
        if len(started.statuses) != len(self._left):
            raise InternalError("store.put", "an answer for another number of objects")
        self._granted = self._left
        if any(started.statuses):
            statuses = list(zip(self._left, started.statuses, strict=True))
            self._granted = [i for i, status in statuses if status == StartStatus.GRANTED]
            for i, status in statuses:
                if status == StartStatus.EXISTS:
                    self._results[i] = PutResult.EXISTS
        return started

    async def _prepare(self) -> None:
        """Compute checksums and value offsets, unless an earlier attempt has."""
        if self._checksums:
            return
        items = self._items
        is_long = sum(items.sizes) > OFF_LOOP_BYTES
        compute = items.compute_checksums
        made = await self._calls.compute(compute) if is_long else compute()
        self._checksums, self._tables = made
        self._value_at = locate_values(items.keys, items.sizes)

    async def _give_back(self, asking: Awaitable[StartedPut]) -> None:
        """Wait for the answer to a request for space, although the put has failed meanwhile, and
        give the space back. Space that is not given back expires at the master.
        """
        try:
            self._give_up(await asking, [])
        except TandemError as error:
            logger.debug("event=space_not_granted reason=%s", error)

    def _give_up(self, started: StartedPut, failed_hosts: list[int]) -> None:
        """Tell the master that no object of this attempt will be sealed (given its header and made
        visible), and on which hosts bytes may still arrive.
        """
        if not started.grant:
            return
        commit = CommitPut(
            first_put_id=self._first_id, grant=started.grant, failed_hosts=failed_hosts
        )
        # If this message to the master is lost, the unfinished put expires there by itself.
        self._calls.spawn(self._calls.tell("commit_put", commit, KeyBytes))

    # The second step of a put: the methods below write the values to all hosts.

    async def _write(self, started: StartedPut) -> list[int]:
        """Write all objects to all their hosts. Return the hosts where that failed."""
        # A write may take as long as the master keeps an unfinished put, and no longer.
        put_s = self._calls.clock.now_s() + self._calls.config.put_timeout_ms / 1e3
        until_s = min(put_s, self._deadline_s)
        endpoints = {endpoint.host: endpoint for endpoint in started.endpoints}
        try:
            outcomes = await self._calls.gather(
                *(self._write_to(p, endpoints[p.host], until_s) for p in started.places)
            )
        except BaseException:
            # The put was cancelled: this process's transfers have ended, but their bytes may still
            # arrive at the hosts.
            self._give_up(started, list(endpoints))
            raise
        failed: list[int] = []
        for place, outcome in zip(started.places, outcomes, strict=True):
            # Raise errors of the caller's memory, since a write to another host would fail as well.
            if isinstance(outcome, TandemError) and not isinstance(outcome, CALLER_ERRORS):
                name = endpoints[place.host].name
                logger.info("event=write_failed host=%s reason=%s", name, outcome)
                failed.append(place.host)
            elif outcome is not None:
                self._give_up(started, list(endpoints))
                raise outcome
        return failed

    def _list_pieces(self, place: HostExtents, base: int) -> list[Piece]:
        """Return the pieces to write to one host: local ranges with their addresses there. The
        host's segment begins at ``base``.
        """
        items, left, value_at = self._items, self._left, self._value_at
        extents = [(left[n], at) for n, at in zip(place.objects, place.offsets, strict=True)]
        if items.singles:
            parts, sizes = items.singles, items.sizes
            return [
                (parts[i].buffer.handle, parts[i].offset, base + at + value_at[i], sizes[i])
                for i, at in extents
                if sizes[i]
            ]
        pieces: list[Piece] = []
        for i, extent_at in extents:
            at = base + extent_at + value_at[i]
            for part in items.several[i]:
                if length := part.nbytes:
                    pieces.append((part.buffer.handle, part.offset, at, length))
                    at += length
        return pieces

    async def _write_to(self, place: HostExtents, endpoint: Endpoint, until_s: float) -> None:
        """Write to one host. Attempts before the last wait a multiple of the usual time, the last
        one until the deadline.

        Raises: DeadlineError (no time is left); the errors of the transfer.
        """
        pieces = self._list_pieces(place, endpoint.write_base)
        if not pieces:
            return
        # Compute the timeout in this method, and not before it, because a blocking client writes to
        # one host after the other.
        begin_s = self._calls.clock.now_s()
        work = 1 + sum(length for *_, length in pieces) / WORK_BYTES
        usual = self._usual.setdefault(endpoint.address, UsualTime())
        timeout_s = until_s - begin_s
        if self._attempt < MAX_ATTEMPTS - 1:
            usual_s = usual.multiply(USUAL_FACTOR, least_s=MIN_WRITE_S, most_s=timeout_s)
            timeout_s = min(timeout_s, usual_s * work * 2**self._attempt)
        if timeout_s <= 0:
            raise DeadlineError("store.put", f"no time is left to write to {endpoint.name}")
        await self._port.write(endpoint, pieces, timeout_s)
        usual.note((self._calls.clock.now_s() - begin_s) / work)

    # The last step of a put: the method below has the master make the objects visible.

    async def _seal(self, started: StartedPut, failed_hosts: list[int]) -> None:
        """Have the master seal the written objects (have their headers written) and publish
        them.
        """
        checksums, tables = self._checksums, self._tables
        if len(self._granted) != len(checksums):
            sizes = [4 * count for count in layout.count_chunks_each(self._items.sizes)]
            tables = join_pieces(tables, sizes, self._granted)
            checksums = [checksums[i] for i in self._granted]
        commit = CommitPut(
            first_put_id=self._first_id,
            grant=started.grant,
            checksums=checksums,
            tables=tables,
            failed_hosts=failed_hosts,
            settled_below=self._settled_below,
        )
        answer = await self._calls.call("commit_put", commit, KeyBytes, self._deadline_s)
        self._take_outcomes(self._granted, answer)

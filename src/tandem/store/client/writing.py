"""Puts of a client: checksums, bytes to all replicas, commit; again where that may help."""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from tandem.store.edges import ClientPort, Piece
from tandem.store.formats import layout
from tandem.store.formats.checksum import checksum_table, make_table
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
from tandem.store.patience import UsualTime

__all__ = ["Items", "ObjectWriter", "is_inline"]

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
"""Attempts of a put; a new one follows an error that can only be transient."""
MAX_INLINE_BATCH_BYTES = 2**15
"""Most bytes of values in one request; the master passes them on."""
CALLER_ERRORS = (ConfigError, ShapeError)
PATIENCE_FACTOR = 8.0
"""So many times what a write to a host usually takes are waited for it; then another is asked."""
MIN_PATIENCE_S = 1.0
WORK_BYTES = 2**22
"""The unit by which a write is measured; twice the bytes may take twice the time."""
OFF_LOOP_BYTES = 2**24
"""More than this is checksummed in a thread, so that the loop lives on."""


_OUTCOMES = {
    CommitStatus.CREATED: PutResult.CREATED,
    CommitStatus.EXISTS: PutResult.EXISTS,
    CommitStatus.REPLACED: PutResult.REPLACED,
}
OUTCOMES = [_OUTCOMES.get(status) for status in CommitStatus]
"""By status; None: to be tried again."""
Views = Sequence[npt.NDArray[np.uint8]]


class Items(NamedTuple):
    """Objects to put: columns."""

    keys: Sequence[str]
    sizes: Sequence[int]
    singles: Sequence[Part] = ()
    """The only part of each; empty if some have several, or none."""
    several: Sequence[Sequence[Part]] = ()
    """The parts of each, unless they are ``singles``."""
    blob: bytes | None = None
    """The values themselves, one after the other, of objects that travel with the request."""

    @classmethod
    def of(
        cls, keys: Sequence[str], sizes: Sequence[int], parts: Sequence[Sequence[Part]]
    ) -> "Items":
        """Return objects of any number of parts."""
        if set(map(len, parts)) == {1}:
            return cls(keys, sizes, [part for (part,) in parts])
        return cls(keys, sizes, several=parts)

    @classmethod
    def inline(cls, keys: Sequence[str], sizes: Sequence[int], views_of: Sequence[Views]) -> Self:
        """Return objects that travel with the request; see ``is_inline``."""
        return cls(keys, sizes, blob=b"".join([view.data for views in views_of for view in views]))

    def list_parts(self, i: int) -> Sequence[Part]:
        """Return those of one object."""
        return [self.singles[i]] if self.singles else self.several[i]


@dataclass(slots=True)
class Sources:
    """Columns computed for objects before they are written."""

    checksums: list[int] = field(default_factory=list[int])
    tables: bytes = b""
    """Tables of all, one after the other."""
    value_at: list[int] = field(default_factory=list[int])
    """The place at which the value begins in its extent."""
    handles: list[Any] = field(default_factory=list[Any])
    """Handles of the memory that a value is in, if each is in one piece; else empty."""
    local_at: list[int] = field(default_factory=list[int])
    """Places in that memory."""

    def take(self, sizes: Sequence[int], chosen: Sequence[int]) -> tuple[list[int], bytes]:
        """Return checksums and tables of some; ``sizes`` of all."""
        if len(chosen) == len(self.checksums):
            return self.checksums, self.tables
        ends = list(itertools.accumulate(4 * n for n in layout.count_chunks_each(sizes)))
        begins = [0, *ends]
        tables = b"".join(self.tables[begins[i] : ends[i]] for i in chosen)
        return [self.checksums[i] for i in chosen], tables


class _Attempt(NamedTuple):
    """One of several to put the same objects."""

    number: int
    left: Sequence[int]
    """Objects without a result."""
    results: "list[PutResult | TandemError | None]"
    """Results of all objects; what has none afterwards may be tried again."""
    deadline_s: float
    first_id: int
    """Id of the request."""
    settled_below: int


def is_inline(sizes: Sequence[int], config: StoreConfig) -> bool:
    """Return True if values are small enough to travel with the request."""
    return max(sizes, default=0) <= config.inline_bytes and sum(sizes) <= MAX_INLINE_BATCH_BYTES


def _lost() -> PeerLostError:
    return PeerLostError(
        "store.put", f"no host took the bytes in {MAX_ATTEMPTS} attempts: see its log"
    )


class ObjectWriter:
    """The puts of one client."""

    def __init__(self, calls: MasterCalls, port: ClientPort) -> None:
        self._calls = calls
        self._port = port
        self._usual: dict[str, UsualTime] = {}
        """By address of a host: how long writes of ``WORK_BYTES`` take."""

    async def put(
        self, items: Items, options: PutOptions, deadline_s: float
    ) -> "list[PutResult | TandemError]":
        """Put all of them; one result each, an error being one."""
        sources = Sources()  # Made while the master is asked for the first time.
        results: list[PutResult | TandemError | None] = [None] * len(items.keys)
        left: Sequence[int] = range(len(items.keys))
        for number in range(MAX_ATTEMPTS):
            if not left:
                break
            first_id, settled_below = self._calls.ids.ask(len(left))
            attempt = _Attempt(number, left, results, deadline_s, first_id, settled_below)
            try:
                if items.blob is None:
                    await self._put_once(items, sources, options, attempt)
                else:
                    await self._put_inline_once(items, items.blob, sources, options, attempt)
            finally:
                self._calls.ids.settle(first_id)
            left = [i for i, result in enumerate(results) if result is None]
        return [_lost() if result is None else result for result in results]

    def _describe(self, items: Items, options: PutOptions, attempt: _Attempt) -> dict[str, Any]:
        """Return what a ``StartPut`` says: which objects, and how they are kept."""
        check_replicas(options.replicas)
        check_keys(options.preferred, field="preferred")
        return {
            "first_put_id": attempt.first_id,
            "keys": [items.keys[i] for i in attempt.left],
            "sizes": [items.sizes[i] for i in attempt.left],
            "wait_ms": self._wait_ms(options),
            "replicas": options.replicas,
            "preferred": list(options.preferred),
            "machine": self._calls.machine if options.same_machine else "",
            "upsert": options.upsert,
            "hard_pin": options.hard_pin,
            "soft_pin_ms": to_ms(options.soft_pin_s, "soft_pin_s", most_ms=MAX_SOFT_PIN_MS),
        }

    def _wait_ms(self, options: PutOptions) -> int:
        most_ms = self._calls.config.put_wait_ms
        return (
            most_ms if options.wait_s is None else to_ms(options.wait_s, "wait_s", most_ms=most_ms)
        )

    async def _prepare(self, items: Items, sources: Sources) -> None:
        """Compute the columns of the objects, unless that is done."""
        if sources.checksums:
            return
        if items.blob is not None:
            sources.checksums = checksum_blob(items.blob, list(items.sizes), layout.CHUNK_BYTES)
            return
        keys, sizes, singles, *_ = items
        places = [part.offset for part in singles]
        buffers = {part.buffer for part in singles}

        def compute() -> tuple[list[int], bytes]:
            if len(buffers) != 1:
                views_of = ([part.view for part in items.list_parts(i)] for i in range(len(keys)))
                tables = [make_table(views) for views in views_of]
                return [checksum_table(table) for table in tables], b"".join(tables)
            (buffer,) = buffers
            offsets, lengths = (np.array(column, dtype=np.uint64) for column in (places, sizes))
            return checksum_values(buffer.array, offsets, lengths, layout.CHUNK_BYTES)

        made = await self._calls.compute(compute) if sum(sizes) > OFF_LOOP_BYTES else compute()
        sources.checksums, sources.tables = made
        sources.value_at = locate_values(keys, sizes)
        if singles and all(sizes):
            sources.handles = [part.buffer.handle for part in singles]
            sources.local_at = places

    async def _put_inline_once(
        self,
        items: Items,
        blob: bytes,
        sources: Sources,
        options: PutOptions,
        attempt: _Attempt,
    ) -> None:
        """Send the values with the request: the master does what is left."""
        left, sizes = attempt.left, items.sizes
        await self._prepare(items, sources)
        if len(left) != len(sizes):
            ends = list(itertools.accumulate(sizes))
            blob = b"".join(blob[ends[i] - sizes[i] : ends[i]] for i in left)
        fields = self._describe(items, options, attempt)
        request = PutInline(
            checksums=[sources.checksums[i] for i in left],
            blob=blob,
            settled_below=attempt.settled_below,
            **fields,
        )
        extra_s = fields["wait_ms"] / 1e3
        answer = await self._calls.call(
            "put_inline", request, KeyBytes, attempt.deadline_s, extra_s=extra_s
        )
        for i, flag in zip(left, answer.flags, strict=True):
            attempt.results[i] = OUTCOMES[flag]

    async def _put_once(
        self, items: Items, sources: Sources, options: PutOptions, attempt: "_Attempt"
    ) -> None:
        """Get space, write and commit."""
        _, left, results, deadline_s, first_id, settled_below = attempt
        fields = self._describe(items, options, attempt)
        started, _ = await self._calls.call_while(
            self._prepare(items, sources),
            "start_put",
            StartPut(**fields),
            StartedPut,
            deadline_s,
            give_back=lambda started: self._give_up(first_id, started, []),
            extra_s=fields["wait_ms"] / 1e3,
        )
        if len(started.statuses) != len(left):
            raise InternalError("store.put", "an answer for another number of objects")
        granted = left
        if any(started.statuses):
            granted = [i for i, status in zip(left, started.statuses, strict=True) if not status]
            for i, status in zip(left, started.statuses, strict=True):
                if status == StartStatus.EXISTS:
                    results[i] = PutResult.EXISTS
        if not granted:
            return
        checksums, tables = sources.take(items.sizes, granted)
        commit = CommitPut(
            first_put_id=first_id,
            grant=started.grant,
            checksums=checksums,
            tables=tables,
            settled_below=settled_below,
        )
        try:
            failed = await self._write(items, sources, left, started, deadline_s, attempt.number)
        except BaseException:
            # Cancelled: our transfers have ended, but bytes may still arrive at the host.
            self._give_up(first_id, started, [endpoint.host for endpoint in started.endpoints])
            raise
        commit.failed_hosts.extend(failed)
        answer = await self._calls.call("commit_put", commit, KeyBytes, deadline_s)
        for i, flag in zip(granted, answer.flags, strict=True):
            results[i] = OUTCOMES[flag]

    def _give_up(self, first_id: int, started: StartedPut, failed_hosts: list[int]) -> None:
        """Say that nothing will be sealed; bytes may yet arrive at the hosts that are named."""
        if not started.grant:
            return
        commit = CommitPut(first_put_id=first_id, grant=started.grant, failed_hosts=failed_hosts)
        # If it does not come, the put expires by itself.
        self._calls.spawn(self._calls.tell("commit_put", commit, KeyBytes))

    async def _write(
        self,
        items: Items,
        sources: Sources,
        left: Sequence[int],
        started: StartedPut,
        deadline_s: float,
        attempt: int,
    ) -> set[int]:
        """Write all objects to all their hosts; returns the hosts where it did not succeed."""
        endpoints = {endpoint.host: endpoint for endpoint in started.endpoints}
        pieces = {
            place.host: _list_pieces(items, sources, left, place, endpoints[place.host].write_base)
            for place in started.places
        }
        # A write may take as long as the master lets a put be unfinished, and no longer.
        put_s = self._calls.clock.now_s() + self._calls.config.put_timeout_ms / 1e3
        until_s = min(put_s, deadline_s)
        hosts = [host for host in endpoints if pieces.get(host)]
        outcomes = await self._calls.gather(
            *(self._write_to(endpoints[host], pieces[host], until_s, attempt) for host in hosts)
        )
        failed: set[int] = set()
        for host, outcome in zip(hosts, outcomes, strict=True):
            # Of the caller's memory: no other host would take it either.
            if isinstance(outcome, TandemError) and not isinstance(outcome, CALLER_ERRORS):
                logger.info("event=write_failed host=%s reason=%s", endpoints[host].name, outcome)
                failed.add(host)
            elif outcome is not None:
                raise outcome
        return failed

    async def _write_to(
        self, endpoint: Endpoint, pieces: list[Piece], until_s: float, attempt: int
    ) -> None:
        """Write to one host; the last attempt waits for it as long as it may, others do not."""
        # Taken here: a client that blocks writes to one host after the other.
        begin_s = self._calls.clock.now_s()
        work = 1 + sum(length for *_, length in pieces) / WORK_BYTES
        usual = self._usual.setdefault(endpoint.address, UsualTime())
        timeout_s = until_s - begin_s
        if attempt < MAX_ATTEMPTS - 1:
            patience_s = usual.multiply(PATIENCE_FACTOR, least_s=MIN_PATIENCE_S, most_s=timeout_s)
            timeout_s = min(timeout_s, patience_s * work * 2**attempt)
        if timeout_s <= 0:
            raise DeadlineError("store.put", f"no time is left to write to {endpoint.name}")
        await self._port.write(endpoint, pieces, timeout_s)
        usual.note((self._calls.clock.now_s() - begin_s) / work)


def _list_pieces(
    items: Items,
    sources: Sources,
    left: Sequence[int],
    place: HostExtents,
    base: int,
) -> list[Piece]:
    """Return what is to be written to one host."""
    if sources.handles and place.objects == list(range(len(items.keys))):
        at = [base + n + m for n, m in zip(place.offsets, sources.value_at, strict=True)]
        return list(zip(sources.handles, sources.local_at, at, items.sizes, strict=True))
    pieces: list[Piece] = []
    for position, extent_at in zip(place.objects, place.offsets, strict=True):
        i = left[position]
        at = base + extent_at + sources.value_at[i]
        for part in items.list_parts(i):
            length = part.nbytes
            if length:
                pieces.append((part.buffer.handle, part.offset, at, length))
                at += length
    return pieces

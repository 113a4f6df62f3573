"""Puts of a client: checksums, bytes to all replicas, commit; again where that may help."""

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from tandem.core.errors import PeerLostError, TandemError
from tandem.store import layout
from tandem.store.buffers import Part, StagedPart, StoreBuffer
from tandem.store.checksum import checksum_table, make_table
from tandem.store.client_edges import ClientPort, Piece
from tandem.store.master_calls import MasterCalls
from tandem.store.messages import (
    CommitPut,
    CommitStatus,
    KeyBytes,
    StartedPut,
    StartPut,
    StartStatus,
)

__all__ = ["DEFAULT_OPTIONS", "Item", "ObjectWriter", "PutOptions", "PutResult"]

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
"""Times that a put begins anew after what can only be transient."""
OFF_LOOP_BYTES = 2**20
"""More than this is checksummed in a thread, so that the loop lives on."""


class PutResult(Enum):
    """What a put did."""

    CREATED = "created"
    EXISTS = "exists"
    """There was an object under the key; it stays as it is. Not with ``upsert``."""
    REPLACED = "replaced"
    """A new version took the place of an old one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PutOptions:
    """How objects are kept."""

    replicas: int = 1
    """Copies, each on another host; fewer if there are not so many, and then repaired later."""
    preferred: Sequence[str] = ()
    """Names of hosts to try first."""
    same_machine: bool = False
    """Try hosts of our machine first."""
    upsert: bool = False
    """Replace an object of the same key; readers of the old version are not disturbed."""
    soft_pin_s: float = 0.0
    """Evicted only after what is not pinned, for so long."""
    hard_pin: bool = False
    """Never evicted."""
    wait_s: float | None = None
    """How long to wait for space; None = as configured, which is also the most."""


DEFAULT_OPTIONS = PutOptions()


class Item(NamedTuple):
    """An object to put."""

    key: str
    parts: Sequence[Part]
    size: int


class Source(NamedTuple):
    """An object as it will be written: checksum, and pieces relative to its table."""

    checksum: int
    pieces: list[tuple[Any, int, int]]
    """(handle, local offset, length), one after the other in the extent."""


class ObjectWriter:
    """The puts of one client."""

    def __init__(self, calls: MasterCalls, port: ClientPort) -> None:
        self._calls = calls
        self._port = port
        self._put_ids = itertools.count(1)

    async def put_items(
        self, items: Sequence[Item], options: PutOptions
    ) -> "list[PutResult | TandemError]":
        """Put all of them; one result each, an error being one."""
        deadline_s = self._calls.deadline_s()
        results: list[PutResult | TandemError | None] = [None] * len(items)
        tables: list[StoreBuffer] = []
        try:
            sources = await self._prepare(items, tables)
            for _ in range(MAX_ATTEMPTS):
                left = [i for i, result in enumerate(results) if result is None]
                if not left:
                    break
                await self._put_once(items, sources, left, options, results, deadline_s)
        finally:
            for buffer in tables:
                self._port.unregister(buffer.handle)
        lost = PeerLostError(
            "store.put", f"no host took the bytes in {MAX_ATTEMPTS} attempts: see its log"
        )
        return [lost if result is None else result for result in results]

    async def _prepare(self, items: Sequence[Item], lent: list[StoreBuffer]) -> list[Source]:
        """Compute the tables; they are registered as one buffer."""
        views = [[part.view for part in item.parts] for item in items]
        if sum(item.size for item in items) > OFF_LOOP_BYTES:
            tables = await asyncio.to_thread(lambda: [make_table(parts) for parts in views])
        else:
            tables = [make_table(parts) for parts in views]
        sources: list[Source] = []
        staged = bytearray()
        for item, table in zip(items, tables, strict=True):
            pieces: list[tuple[Any, int, int]] = []
            if table:
                padded = table.ljust(layout.table_bytes(item.size), b"\0")
                first = item.parts[0]
                if isinstance(first, StagedPart):
                    # Staged: the room before the value is the table's.
                    at = first.offset - len(padded)
                    first.buffer.array[at : first.offset] = np.frombuffer(padded, np.uint8)
                    pieces.append((first.buffer, at, len(padded) + item.size))
                    sources.append(Source(checksum_table(table), pieces))
                    continue
                pieces.append((None, len(staged), len(padded)))
                staged += padded
            pieces += [(part.buffer, part.offset, part.view.size) for part in item.parts]
            sources.append(Source(checksum_table(table), pieces))
        if staged:
            array = np.frombuffer(staged, dtype=np.uint8)
            buffer = StoreBuffer(self._port.register(array), array)
            lent.append(buffer)
            for source in sources:
                source.pieces[:] = [(b or buffer, at, length) for b, at, length in source.pieces]
        return sources

    async def _put_once(
        self,
        items: Sequence[Item],
        sources: Sequence[Source],
        left: Sequence[int],
        options: PutOptions,
        results: "list[PutResult | TandemError | None]",
        deadline_s: float,
    ) -> None:
        """Try the objects ``left``; those without a result may be tried again."""
        first_id = next(self._put_ids)
        for _ in range(len(left) - 1):
            next(self._put_ids)
        config = self._calls.config
        wait_ms = config.put_wait_ms if options.wait_s is None else int(options.wait_s * 1e3)
        started = await self._calls.call(
            "start_put",
            StartPut(
                first_put_id=first_id,
                keys=[items[i].key for i in left],
                sizes=[items[i].size for i in left],
                replicas=options.replicas,
                preferred=list(options.preferred),
                machine=self._calls.machine if options.same_machine else "",
                upsert=options.upsert,
                hard_pin=options.hard_pin,
                soft_pin_ms=int(options.soft_pin_s * 1e3),
                wait_ms=wait_ms,
            ),
            StartedPut,
            deadline_s,
            extra_s=min(wait_ms, config.put_wait_ms) / 1e3,
        )
        granted: list[int] = []
        for position, i in enumerate(left):
            if started.statuses[position] == StartStatus.EXISTS:
                results[i] = PutResult.EXISTS
            elif started.statuses[position] == StartStatus.GRANTED:
                granted.append(position)
        commit = CommitPut(
            put_ids=[first_id + position for position in granted],
            grants=[started.grants[position] for position in granted],
            checksums=[sources[left[position]].checksum for position in granted],
            failed_hosts=[[] for _ in granted],
        )
        if not granted:
            return
        try:
            failed = await self._write(items, sources, left, granted, started, deadline_s)
        except BaseException:
            # Cancelled: whatever was under way has ended here, but bytes may yet arrive there.
            hosts = [endpoint.host for endpoint in started.endpoints]
            self._calls.spawn(self._give_up(commit, hosts))
            raise
        for position, row in zip(granted, commit.failed_hosts, strict=True):
            row += [host for host, _ in started.places[position] if host in failed]
        answer = await self._calls.call("commit_put", commit, KeyBytes, deadline_s)
        outcomes = {
            CommitStatus.CREATED: PutResult.CREATED,
            CommitStatus.EXISTS: PutResult.EXISTS,
            CommitStatus.REPLACED: PutResult.REPLACED,
        }
        for position, flag in zip(granted, answer.flags, strict=True):
            results[left[position]] = outcomes.get(CommitStatus(flag))

    async def _write(
        self,
        items: Sequence[Item],
        sources: Sequence[Source],
        left: Sequence[int],
        granted: Sequence[int],
        started: StartedPut,
        deadline_s: float,
    ) -> set[int]:
        """Write all objects to all their hosts; returns the hosts where it did not succeed."""
        endpoints = {endpoint.host: endpoint for endpoint in started.endpoints}
        pieces: dict[int, list[Piece]] = {host: [] for host in endpoints}
        for position in granted:
            item, source = items[left[position]], sources[left[position]]
            table_at = layout.table_offset(len(item.key.encode()))
            for host, extent_at in started.places[position]:
                at = endpoints[host].write_base + extent_at + table_at
                for buffer, local_offset, length in source.pieces:
                    if length:
                        pieces[host].append(Piece(buffer.handle, local_offset, at, length))
                        at += length
        # A write may take as long as the master lets a put be unfinished, and no longer.
        timeout_s = min(self._calls.config.put_timeout_ms / 1e3, self._calls.left_s(deadline_s))
        hosts = [host for host in endpoints if pieces[host]]
        outcomes = await asyncio.gather(
            *(self._port.write(endpoints[host], pieces[host], timeout_s) for host in hosts),
            return_exceptions=True,
        )
        failed: set[int] = set()
        for host, outcome in zip(hosts, outcomes, strict=True):
            if isinstance(outcome, TandemError):
                logger.info("event=write_failed host=%s reason=%s", endpoints[host].name, outcome)
                failed.add(host)
            elif outcome is not None:
                raise outcome
        return failed

    async def _give_up(self, commit: CommitPut, hosts: list[int]) -> None:
        request = CommitPut(
            put_ids=commit.put_ids,
            grants=commit.grants,
            checksums=[-1] * len(commit.put_ids),
            failed_hosts=[hosts for _ in commit.put_ids],
        )
        await self._calls.tell("commit_put", request, KeyBytes)  # Else the put expires by itself.

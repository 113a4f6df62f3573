"""Commits of a master: what clients have written is sealed on its hosts and becomes visible."""

import asyncio
import itertools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tandem.core.errors import ConfigError, TandemError
from tandem.store.index import NO_ROW, Replica
from tandem.store.messages import (
    Ack,
    CommitPut,
    CommitStatus,
    ExtentRecords,
    KeyBytes,
    PutInline,
    SealExtents,
)
from tandem.store.puts import Put
from tandem.store.segment import ExtentHeader, append_record
from tandem.store.sessions import Caller

if TYPE_CHECKING:
    from tandem.store.master import StoreMaster

__all__ = ["Commits"]

logger = logging.getLogger(__name__)


class Commits:
    """The commits of one master."""

    def __init__(self, master: "StoreMaster") -> None:
        self._master = master
        self._committing: dict[tuple[str, int], asyncio.Future[None]] = {}
        self._sealing: dict[str, asyncio.Future[None]] = {}

    async def commit(self, caller: Caller, request: CommitPut) -> KeyBytes:
        """Seal and show what a client has written; one ``CommitStatus`` each."""
        columns = (request.put_ids, request.grants, request.checksums, request.failed_hosts)
        if request.tables:
            columns = (*columns, request.tables)
        if len(set(map(len, columns))) != 1:
            raise ConfigError("store.commit", "columns of different lengths")
        # A caller that leaves must not leave objects half sealed.
        work = self._master.spawn(self._commit(caller.instance_id, request))
        return KeyBytes(bytes(await asyncio.shield(work)))

    async def _commit(self, client: str, request: CommitPut) -> list[CommitStatus]:
        names = [(client, put_id) for put_id in request.put_ids]
        for name in names:
            if name in self._committing:  # The request came twice.
                await asyncio.shield(self._committing[name])
        ended = asyncio.get_running_loop().create_future()
        self._committing |= dict.fromkeys(names, ended)
        try:
            return await self._commit_once(client, request)
        finally:
            for name in names:
                self._committing.pop(name, None)
            ended.set_result(None)

    async def _commit_once(self, client: str, request: CommitPut) -> list[CommitStatus]:
        statuses = [CommitStatus.EXPIRED] * len(request.put_ids)
        ready: dict[int, Put] = {}
        fenced: set[int] = set()
        for i, put_id in enumerate(request.put_ids):
            put = self._master.puts.unfinished.get((client, put_id))
            if put is None or put.grant != request.grants[i]:
                # With another grant, a late copy of the request took space that nobody has written.
                statuses[i] = self._master.puts.results.get((client, put_id), CommitStatus.EXPIRED)
                continue
            del self._master.puts.unfinished[client, put_id]
            # A host to which the write failed may still get late bytes: what was held there stays
            # the writer's until that is shut out.
            failed = set(request.failed_hosts[i]) & set(put.extents)
            fenced |= failed
            for number in failed:
                del put.extents[number]
            for number, extent in put.extents.items():
                was_held = self._master.hosts[number].unhold(client, extent)
                assert was_held, "a fence takes extents from puts"
            if request.checksums[i] < 0:
                self._master.puts.release(put)
            elif put.extents:
                ready[i] = put
        for number in sorted(fenced):
            self._master.puts.fence(self._master.hosts[number], client)
        async with _KeysHeld(self._sealing, [put.key for put in ready.values()]):
            for put in ready.values():
                self._master.puts.forget_lost(put)
            await self._seal(ready, request.checksums, statuses, tables=request.tables)
        for i, put in ready.items():
            self._master.puts.remember((client, put.put_id), statuses[i])
        return statuses

    async def seal_values(
        self, puts: dict[int, Put], request: PutInline, statuses: list[CommitStatus]
    ) -> None:
        """Have hosts write the values of these puts, and seal and show them."""
        async with _KeysHeld(self._sealing, [put.key for put in puts.values()]):
            for put in puts.values():
                self._master.puts.forget_lost(put)
            ready = {i: put for i, put in puts.items() if put.extents}
            ends = list(itertools.accumulate(request.sizes))
            blob = memoryview(request.blob)
            values = {i: blob[ends[i] - put.size : ends[i]] for i, put in ready.items()}
            await self._seal(ready, request.checksums, statuses, values=values)

    async def _seal(
        self,
        ready: dict[int, Put],
        checksums: Sequence[int],
        statuses: list[CommitStatus],
        *,
        values: "dict[int, memoryview] | None" = None,
        tables: Sequence[bytes] = (),
    ) -> None:
        """Seal and show; hosts are sent the values, or what of the tables is theirs."""
        records: dict[int, ExtentRecords] = {}
        blobs: dict[int, list[Any]] = {}
        versions: dict[int, int] = {}
        for i, put in ready.items():
            row = self._master.directory.find(put.key)
            if row != NO_ROW and self._master.directory.num_live(row) and not put.upsert:
                statuses[i] = CommitStatus.EXISTS
                self._master.puts.release(put)
                continue
            versions[i] = self._master.next_version()
            for number, extent in put.extents.items():
                header = ExtentHeader(
                    put.key, put.size, versions[i], checksums[i], put.wanted, put.hard_pin,
                    put.soft_pin_ms,
                )  # fmt: skip
                append_record(records.setdefault(number, ExtentRecords()), extent.offset, header)
                if values is not None:
                    blobs.setdefault(number, []).append(values[i])
                elif tables:
                    blobs.setdefault(number, []).append(tables[i])
        sealed = await self._seal_on_hosts(
            records, {n: b"".join(b) for n, b in blobs.items()}, has_values=values is not None
        )
        replaced: list[asyncio.Future[None]] = []
        for i, version in versions.items():
            put = ready[i]
            self._master.puts.forget_lost(put)
            for number in [number for number in put.extents if number not in sealed]:
                self._master.hosts[number].drop(put.extents.pop(number), 0)
            if put.extents:
                statuses[i] = self._insert(put, checksums[i], version, replaced)
        # Until the old versions are gone, a crash could bring them back.
        await asyncio.gather(*replaced)

    async def _seal_on_hosts(
        self, records: dict[int, ExtentRecords], blobs: dict[int, bytes], *, has_values: bool
    ) -> set[int]:
        """Return the hosts that have done it."""
        numbers = sorted(records)
        answers = await asyncio.gather(
            *(
                self._master.hosts[number].order(
                    "seal",
                    SealExtents,
                    Ack,
                    records=records[number],
                    has_values=has_values,
                    blob=blobs.get(number, b"") if has_values else b"",
                    tables=b"" if has_values else blobs.get(number, b""),
                )
                for number in numbers
            ),
            return_exceptions=True,
        )
        sealed: set[int] = set()
        for number, answer in zip(numbers, answers, strict=True):
            if isinstance(answer, Ack):
                sealed.add(number)
            elif isinstance(answer, TandemError):
                logger.warning(
                    "event=seal_failed host=%s reason=%s", self._master.hosts[number].name, answer
                )
            else:
                raise answer
        return sealed

    def _insert(
        self, put: Put, checksum: int, version: int, replaced: "list[asyncio.Future[None]]"
    ) -> CommitStatus:
        status = CommitStatus.CREATED
        row = self._master.directory.find(put.key)
        if row != NO_ROW:
            status = CommitStatus.REPLACED
            replaced += self._master.drop_row(row, wait=True)
        row = self._master.directory.insert(
            put.key,
            size=put.size,
            checksum=checksum,
            version=version,
            replicas=[Replica(number, extent.offset) for number, extent in put.extents.items()],
            wanted=put.wanted,
        )
        soft_until_ms = self._master.now_ms() + put.soft_pin_ms if put.soft_pin_ms else 0
        self._master.directory.set_pins(row, hard=put.hard_pin, soft_until_ms=soft_until_ms)
        self._master.counters.objects_created += 1
        return status


class _KeysHeld:
    """Holds keys against other commits: all of them or, meanwhile, none."""

    def __init__(self, held: "dict[str, asyncio.Future[None]]", keys: Sequence[str]) -> None:
        self._held = held
        self._keys = dict.fromkeys(keys)
        self._released: asyncio.Future[None] | None = None

    async def __aenter__(self) -> None:
        while busy := [self._held[key] for key in self._keys if key in self._held]:
            await asyncio.shield(busy[0])
        self._released = asyncio.get_running_loop().create_future()
        for key in self._keys:
            self._held[key] = self._released

    async def __aexit__(self, *_: object) -> None:
        for key in self._keys:
            del self._held[key]
        assert self._released is not None
        self._released.set_result(None)

"""Commits of a master: what clients have written is sealed on its hosts and becomes visible."""

import asyncio
import itertools
import logging
from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tandem.core.errors import ConfigError, NotFoundError, TandemError, UnsupportedError
from tandem.store import layout
from tandem.store.index import NO_ROW, Replica
from tandem.store.messages import (
    Ack,
    CommitPut,
    CommitStatus,
    ExtentRecords,
    KeyBytes,
    PreparePut,
    PrepareSeal,
    PutInline,
    SealExtents,
    SealPrepared,
)
from tandem.store.puts import PutBatch
from tandem.store.sessions import Caller
from tandem.store.space import Extent, HostSpace

if TYPE_CHECKING:
    from tandem.store.master import StoreMaster

__all__ = ["Commits"]

logger = logging.getLogger(__name__)

MANY = 8
"""From so many objects on, columns cost less than rows."""


class _Blob:
    """Bytes of a batch's objects, one after the other: values, or tables."""

    def __init__(self, data: bytes, sizes: Sequence[int], *, is_values: bool) -> None:
        self.is_values = is_values
        self._data = memoryview(data)
        self._ends = list(itertools.accumulate(sizes))
        self._sizes = sizes

    def take(self, objects: Sequence[int]) -> bytes:
        """Return those of some objects, in their order."""
        if len(objects) == len(self._sizes):
            return bytes(self._data)
        ends, sizes = self._ends, self._sizes
        return b"".join(self._data[ends[i] - sizes[i] : ends[i]] for i in objects)


def _make_table_blob(batch: PutBatch, tables: bytes) -> _Blob:
    """Raises: ConfigError if the tables do not fit the objects."""
    sizes = [4 * layout.count_chunks(size) for size in batch.sizes]
    if sum(sizes) != len(tables):
        raise ConfigError("store.commit", "tables that do not fit the values")
    return _Blob(tables, sizes, is_values=False)


class Commits:
    """The commits of one master."""

    def __init__(self, master: "StoreMaster") -> None:
        self._master = master
        self._committing: dict[tuple[str, int], asyncio.Future[None]] = {}
        self._sealing: dict[str, asyncio.Future[None]] = {}

    async def commit(self, caller: Caller, request: CommitPut) -> KeyBytes:
        """Seal and show what a client has written.

        Returns: one ``CommitStatus`` for each granted object; none if the batch is not known.
        """
        # A caller that leaves must not leave objects half sealed.
        work = self._master.spawn(self._commit(caller.instance_id, request))
        return KeyBytes(await asyncio.shield(work))

    async def _commit(self, client: str, request: CommitPut) -> bytes:
        name = (client, request.first_put_id)
        while name in self._committing:  # The request came twice.
            await asyncio.shield(self._committing[name])
        batch = self._master.puts.unfinished.get(name)
        if batch is None or batch.grant != request.grant:
            # With another grant, a late copy of the request took space that nobody has written.
            unknown = bytes([CommitStatus.EXPIRED]) * len(request.checksums)
            return self._master.puts.results.get(name, unknown)
        if request.checksums and len(request.checksums) != len(batch.keys):
            raise ConfigError("store.commit", "as many checksums as objects, or none")
        ended = self._committing[name] = asyncio.get_running_loop().create_future()
        try:
            del self._master.puts.unfinished[name]
            answer = await self._commit_once(batch, request)
            self._master.puts.remember(name, answer)
        finally:
            del self._committing[name]
            ended.set_result(None)
        return answer

    async def _commit_once(self, batch: PutBatch, request: CommitPut) -> bytes:
        hosts = self._master.hosts
        # A host to which the write failed may still get late bytes: what was held there stays
        # the writer's until that is shut out.
        failed = sorted(set(request.failed_hosts) & set(batch.places))
        for number in failed:
            del batch.places[number]
        for number in batch.places:
            was_held = hosts[number].unhold(batch.client, batch.grant)
            assert was_held, "a fence takes space from puts"
        for number in failed:
            self._master.puts.fence(hosts[number], batch.client)
        told = batch.prepared if request.is_prepared else request
        if told is None or not told.checksums:
            self._master.puts.release(batch)
            return bytes([CommitStatus.EXPIRED]) * len(batch.keys)
        try:
            blob = _make_table_blob(batch, told.tables)
        except ConfigError:
            self._master.puts.release(batch)
            raise
        return await self._seal(batch, told.checksums, blob)

    async def prepare(self, caller: Caller, request: PreparePut) -> Ack:
        """Pass on what will be sealed, while it is written. Ok: it was not too late for that."""
        batch = self._master.puts.unfinished.get((caller.instance_id, request.first_put_id))
        if batch is None or batch.grant != request.grant or batch.prepared is not None:
            return Ack(ok=False)
        if len(request.checksums) != len(batch.keys):
            raise ConfigError("store.prepare", "as many checksums as objects")
        blob = _make_table_blob(batch, request.tables)
        batch.prepared = request
        for number, places in batch.places.items():
            host = self._master.hosts[number]
            if places and host.line is not None:
                batch.prepared_hosts[number] = len(places)
                self._master.spawn(self._prepare_on(host, batch, request, blob.take([*places])))
        return Ack()

    async def _prepare_on(
        self, host: HostSpace, batch: PutBatch, request: PreparePut, tables: bytes
    ) -> None:
        records = self._make_records(batch, host.number, request.checksums, 0)
        try:
            await host.order(
                "prepare_seal",
                PrepareSeal,
                Ack,
                grant=batch.grant,
                records=records,
                tables=tables,
            )
        except TandemError as error:  # It will be told again with the order to seal.
            logger.debug("event=prepare_failed host=%s reason=%s", host.name, error)

    async def seal_values(self, batch: PutBatch, request: PutInline) -> bytes:
        """Have hosts write the values of a batch, and seal and show them; as ``commit``."""
        ends = list(itertools.accumulate(request.sizes))
        data = request.blob
        if len(batch.keys) != len(request.keys):
            values = memoryview(data)
            data = b"".join(values[ends[i] - request.sizes[i] : ends[i]] for i in batch.positions)
        checksums = [request.checksums[i] for i in batch.positions]
        return await self._seal(batch, checksums, _Blob(data, batch.sizes, is_values=True))

    async def _seal(self, batch: PutBatch, checksums: Sequence[int], blob: _Blob) -> bytes:
        """Seal and show; hosts are sent of the blob what is theirs."""
        async with _KeysHeld(self._sealing, batch.keys):
            puts = self._master.puts
            puts.forget_lost(batch)
            statuses = bytearray([CommitStatus.EXPIRED]) * len(batch.keys)
            if not batch.request.upsert:
                taken = self._master.directory.exists_many(batch.keys)
                if any(taken):
                    came_late = [i for i, is_taken in enumerate(taken) if is_taken]
                    puts.release(batch, came_late)
                    for i in came_late:
                        statuses[i] = CommitStatus.EXISTS
            first_version = self._master.take_versions(len(batch.keys))
            try:
                sealed = await self._seal_on_hosts(batch, checksums, first_version, blob)
            except Exception:
                puts.forget_lost(batch)
                for number in batch.places:
                    self._wipe(batch, number, first_version)
                raise
            puts.forget_lost(batch)
            for number in [number for number in batch.places if number not in sealed]:
                self._wipe(batch, number, first_version)
                del batch.places[number]
            replaced = self._insert(batch, checksums, first_version, statuses)
            # Until the old versions are gone, a crash could bring them back.
            for gone in replaced:
                await asyncio.shield(gone)
        return bytes(statuses)

    def _wipe(self, batch: PutBatch, number: int, first_version: int) -> None:
        """Have a host wipe what it may have sealed: its answer was lost, or was no."""
        host = self._master.hosts[number]
        for i, offset in batch.places[number].items():
            extent = Extent(offset, batch.lengths[i])
            self._master.wipe_copy(batch.keys[i], host, extent, version=first_version + i)

    def _make_records(
        self, batch: PutBatch, number: int, checksums: Sequence[int], first_version: int
    ) -> ExtentRecords:
        places, request = batch.places[number], batch.request
        count = len(places)
        is_whole = count == len(batch.keys)
        objects: Sequence[int] = range(count) if is_whole else list(places)
        return ExtentRecords(
            keys=batch.keys if is_whole else [batch.keys[i] for i in objects],
            sizes=batch.sizes if is_whole else [batch.sizes[i] for i in objects],
            versions=[first_version + i for i in objects],
            checksums=list(checksums) if is_whole else [checksums[i] for i in objects],
            offsets=list(places.values()),
            wanted=[request.replicas] * count,
            hard_pins=[request.hard_pin] * count,
            soft_pin_ms=[request.soft_pin_ms] * count,
        )

    async def _seal_on_hosts(
        self, batch: PutBatch, checksums: Sequence[int], first_version: int, blob: _Blob
    ) -> set[int]:
        """Return the hosts that have done it."""
        orders = {
            number: self._seal_on(number, batch, checksums, first_version, blob)
            for number in sorted(number for number, places in batch.places.items() if places)
        }
        sealed: set[int] = set()
        for number, answer in zip(orders, await _gather(list(orders.values())), strict=True):
            if isinstance(answer, Ack):
                sealed.add(number)
            elif isinstance(answer, TandemError):
                logger.warning(
                    "event=seal_failed host=%s reason=%s", self._master.hosts[number].name, answer
                )
            else:
                raise answer
        return sealed

    async def _seal_on(
        self,
        number: int,
        batch: PutBatch,
        checksums: Sequence[int],
        first_version: int,
        blob: _Blob,
    ) -> Ack:
        host, places = self._master.hosts[number], batch.places[number]
        # What was prepared is of all objects, so that their versions follow each other.
        if batch.prepared_hosts.get(number) == len(places) == len(batch.keys):
            try:
                return await host.order(
                    "seal_prepared",
                    SealPrepared,
                    Ack,
                    grant=batch.grant,
                    first_version=first_version,
                )
            except (NotFoundError, UnsupportedError):
                logger.debug("event=seal_unprepared host=%s grant=%d", host.name, batch.grant)
        data = blob.take([*places])
        return await host.order(
            "seal",
            SealExtents,
            Ack,
            records=self._make_records(batch, number, checksums, first_version),
            has_values=blob.is_values,
            blob=data if blob.is_values else b"",
            tables=b"" if blob.is_values else data,
        )

    def _insert(
        self,
        batch: PutBatch,
        checksums: Sequence[int],
        first_version: int,
        statuses: bytearray,
    ) -> "list[asyncio.Future[Any]]":
        """Show what is sealed somewhere; returns what is done when old versions are gone."""
        directory, request = self._master.directory, batch.request
        replaced: list[asyncio.Future[Any]] = []
        placed = [number for number, places in batch.places.items() if places]
        shown = sorted({i for number in placed for i in batch.places[number]})
        keys = batch.keys if len(shown) == len(batch.keys) else [batch.keys[i] for i in shown]
        for i in shown:
            statuses[i] = CommitStatus.CREATED
        if request.upsert or directory.has_any(keys):
            for i, key in zip(shown, keys, strict=True):
                going = self._master.removals.find_going(key) if request.upsert else None
                if going is not None:  # Evicted a moment ago.
                    replaced.append(going)
                row = directory.find(key)
                if row != NO_ROW:
                    statuses[i] = CommitStatus.REPLACED
                    replaced += self._master.drop_row(row, wait=True)
        if len(placed) == 1 and len(shown) >= MANY:
            is_whole = keys is batch.keys
            rows = directory.insert_many(
                keys,
                sizes=batch.sizes if is_whole else [batch.sizes[i] for i in shown],
                checksums=checksums if is_whole else [checksums[i] for i in shown],
                versions=[first_version + i for i in shown],
                wanted=request.replicas,
                host=placed[0],
                offsets=[batch.places[placed[0]][i] for i in shown],
            )
        else:
            rows = [
                directory.insert(
                    batch.keys[i],
                    size=batch.sizes[i],
                    checksum=checksums[i],
                    version=first_version + i,
                    replicas=[
                        Replica(number, offset)
                        for number in placed
                        if (offset := batch.places[number].get(i, -1)) >= 0
                    ],
                    wanted=request.replicas,
                )
                for i in shown
            ]
        if request.hard_pin or request.soft_pin_ms:
            soft_until_ms = (
                self._master.now_ms() + request.soft_pin_ms if request.soft_pin_ms else 0
            )
            for row in rows:
                directory.set_pins(row, hard=request.hard_pin, soft_until_ms=soft_until_ms)
        self._master.counters.objects_created += len(rows)
        return replaced


async def _gather(work: Sequence[Coroutine[Any, Any, Ack]]) -> "list[Ack | BaseException]":
    """As ``asyncio.gather`` with exceptions as results; for one, without a task of its own."""
    if len(work) != 1:
        return await asyncio.gather(*work, return_exceptions=True)
    try:
        return [await work[0]]
    except Exception as error:  # noqa: BLE001 - as asyncio.gather
        return [error]


class _KeysHeld:
    """Holds keys against other commits: all of them or, meanwhile, none."""

    def __init__(self, held: "dict[str, asyncio.Future[None]]", keys: Iterable[str]) -> None:
        self._held = held
        self._keys = dict.fromkeys(keys)
        self._released: asyncio.Future[None] | None = None

    async def __aenter__(self) -> None:
        held = self._held
        while held and (busy := [held[key] for key in self._keys if key in held]):
            await asyncio.shield(busy[0])
        self._released = asyncio.get_running_loop().create_future()
        held.update(dict.fromkeys(self._keys, self._released))

    async def __aexit__(self, *_: object) -> None:
        for key in self._keys:
            del self._held[key]
        assert self._released is not None
        self._released.set_result(None)

"""Commits of a master: what clients have written is sealed on its hosts and becomes visible."""

import asyncio
import itertools
import logging
from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tandem.core.errors import ConfigError, NotFoundError, TandemError, UnsupportedError
from tandem.store import layout
from tandem.store.eager import start_eagerly
from tandem.store.index import NO_ROW, Replica, Staged
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
from tandem.store.puts import PutBatch, ValueBytes
from tandem.store.sessions import Caller
from tandem.store.space import Extent, HostSpace

if TYPE_CHECKING:
    from tandem.store.master import StoreMaster

__all__ = ["Commits"]

logger = logging.getLogger(__name__)

MANY = 8
"""From so many objects on, columns cost less than rows."""


def _read_seal(
    batch: PutBatch, request: CommitPut | PreparePut
) -> tuple[Sequence[int], ValueBytes]:
    """Return checksums and tables that a client has told of; no checksums: it gives the put up.

    Raises: ConfigError if they do not fit the objects.
    """
    if isinstance(request, CommitPut) and request.is_prepared:
        return batch.prepared or ((), ValueBytes(b"", (), is_values=False))
    sizes = [4 * layout.count_chunks(size) for size in batch.sizes]
    if request.checksums and sum(sizes) != len(request.tables):
        raise ConfigError("store.commit", "tables that do not fit the values")
    return request.checksums, ValueBytes(request.tables, sizes, is_values=False)


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
        try:
            checksums, blob = _read_seal(batch, request)
        except ConfigError:
            self._master.puts.release(batch)
            raise
        if not checksums:
            self._master.puts.release(batch)
            return bytes([CommitStatus.EXPIRED]) * len(batch.keys)
        return await self._seal(batch, checksums, blob)

    async def prepare(self, caller: Caller, request: PreparePut) -> Ack:
        """Pass on what will be sealed, while it is written. Ok: it was not too late for that."""
        batch = self._master.puts.unfinished.get((caller.instance_id, request.first_put_id))
        if batch is None or batch.grant != request.grant or batch.prepared is not None:
            return Ack(ok=False)
        if len(request.checksums) != len(batch.keys):
            raise ConfigError("store.prepare", "as many checksums as objects")
        checksums, blob = batch.prepared = _read_seal(batch, request)
        for number, places in batch.places.items():
            host = self._master.hosts[number]
            if places and host.line is not None:
                batch.prepared_hosts[number] = len(places)
                self._master.spawn(self._prepare_on(host, batch, checksums, blob.take([*places])))
        return Ack()

    async def _prepare_on(
        self, host: HostSpace, batch: PutBatch, checksums: Sequence[int], tables: bytes
    ) -> None:
        records = self._make_records(batch, host.number, checksums, 0)
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
        return await self._seal(batch, checksums, ValueBytes(data, batch.sizes, is_values=True))

    async def _seal(self, batch: PutBatch, checksums: Sequence[int], blob: ValueBytes) -> bytes:
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
            sealing = start_eagerly(self._seal_on_hosts(batch, checksums, first_version, blob))
            # The orders are on their way; what can be done meanwhile is.
            staged = self._stage(batch, checksums, first_version)
            try:
                sealed = await sealing
            except Exception:
                if staged is not None:
                    self._master.directory.unstage_many(staged)
                puts.forget_lost(batch)
                for number in batch.places:
                    self._wipe(batch, number, first_version)
                raise
            puts.forget_lost(batch)
            for number in [number for number in batch.places if number not in sealed]:
                self._wipe(batch, number, first_version)
                del batch.places[number]
            replaced = self._insert(batch, checksums, first_version, statuses, staged)
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
        self, batch: PutBatch, checksums: Sequence[int], first_version: int, blob: ValueBytes
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
        blob: ValueBytes,
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

    def _stage(
        self, batch: PutBatch, checksums: Sequence[int], first_version: int
    ) -> Staged | None:
        """Prepare what the directory will have, if it is many objects on one host."""
        placed = [places for places in batch.places.values() if places]
        count = len(batch.keys)
        if len(placed) != 1 or len(placed[0]) != count or count < MANY:
            return None
        if min(checksums) < 0 or max(checksums) >= 2**32:
            return None  # What no checksum is, no host seals.
        return self._master.directory.stage_many(
            sizes=batch.sizes,
            checksums=checksums,
            versions=range(first_version, first_version + count),
            offsets=list(placed[0].values()),
            wanted=batch.request.replicas,
        )

    def _insert(
        self,
        batch: PutBatch,
        checksums: Sequence[int],
        first_version: int,
        statuses: bytearray,
        staged: Staged | None,
    ) -> "list[asyncio.Future[Any]]":
        """Show what is sealed somewhere; returns what is done when old versions are gone."""
        directory, request = self._master.directory, batch.request
        replaced: list[asyncio.Future[Any]] = []
        placed = [number for number, places in batch.places.items() if places]
        shown: Sequence[int] = range(len(batch.keys))
        keys = batch.keys
        if not any(len(batch.places[number]) == len(shown) for number in placed):
            shown = sorted({i for number in placed for i in batch.places[number]})
            keys = [keys[i] for i in shown]
        for i in shown:
            statuses[i] = CommitStatus.CREATED
        removals = self._master.removals
        if removals.has_going or directory.has_any(keys):
            for i, key in zip(shown, keys, strict=True):
                going = removals.find_going(key)
                if going is not None:  # Evicted a moment ago, and maybe still read.
                    replaced.append(going)
                row = directory.find(key)
                if row != NO_ROW:
                    statuses[i] = CommitStatus.REPLACED
                    replaced += self._master.drop_row(row, wait=True)
        if staged is not None and keys is not batch.keys:
            directory.unstage_many(staged)
            staged = None
        if staged is not None:
            directory.show_many(keys, staged, host=placed[0])
            rows = staged.rows
        elif len(placed) == 1 and len(shown) >= MANY:
            rows = directory.insert_many(
                keys,
                sizes=[batch.sizes[i] for i in shown],
                checksums=[checksums[i] for i in shown],
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

"""A put on the master: reserve space, let the client write, have the hosts seal, publish.

The client gets the right to write on each host. On commit the keys are locked, the hosts write
checksum tables and headers, and the objects enter the directory. If the values come with the
request, the hosts write the values too, and the client needs no right to write.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, NamedTuple

from tandem.core.errors import CapacityError, ConfigError, DeadlineError, TandemError
from tandem.store.election import Tombstone
from tandem.store.formats import layout
from tandem.store.formats.records import join_pieces
from tandem.store.master.burials import Burials
from tandem.store.master.departures import Departures
from tandem.store.master.state.index import NO_ROW, Replica
from tandem.store.master.state.ledger import ExtentEvent
from tandem.store.master.state.space import Extent, HostSpace
from tandem.store.master.state.state import StoreState
from tandem.store.messages import (
    Ack,
    CommitStatus,
    ExtentRecords,
    HostExtents,
    SealExtents,
    StartedPut,
    StartPut,
    StartStatus,
)

__all__ = ["Blob", "PutBatch", "PutParts"]

logger = logging.getLogger(__name__)

UNSURE_LOOK_S = 0.01
"""Seconds between two checks whether a host that may have the object has returned."""


class PutParts(NamedTuple):
    """The parts of a master that its puts use: state, removal of copies, tombstones."""

    state: StoreState
    departures: Departures
    burials: Burials


class Blob:
    """The concatenated values, or the concatenated checksum tables, of a batch's objects."""

    def __init__(self, data: bytes, sizes: Sequence[int], *, is_values: bool) -> None:
        self.is_values = is_values
        self._data = data
        self._sizes = sizes

    def take(self, objects: Sequence[int]) -> bytes:
        """Return the bytes of the objects with these numbers, which ascend, concatenated."""
        return join_pieces(self._data, self._sizes, objects)

    def pick(self, objects: Sequence[int]) -> "Blob":
        """Return a ``Blob`` of the given objects only, in the given order."""
        return Blob(self.take(objects), [self._sizes[i] for i in objects], is_values=self.is_values)


class PutBatch:
    """The new objects of one put request. An object's number is its index in ``keys``.

    Args:
        parts: the master's parts.
        client: instance id of the client that puts them.
        request: the client's request.
        wanted: positions of the objects in the request, at least one.
        lengths: bytes of the extents of all objects of the request.
    """

    def __init__(
        self,
        parts: PutParts,
        client: str,
        request: StartPut,
        wanted: Sequence[int],
        lengths: list[int],
    ) -> None:
        is_whole = len(wanted) == len(request.keys)
        self.client = client
        self.request = request
        self.positions = wanted
        self.keys = request.keys if is_whole else [request.keys[i] for i in wanted]
        self.sizes = request.sizes if is_whole else [request.sizes[i] for i in wanted]
        self.lengths = lengths if is_whole else [lengths[i] for i in wanted]
        self.places: dict[int, dict[int, int]] = {}
        """Offsets of the reserved extents: by host, then by object."""
        self.grant = 0
        self.expires_ms = 0
        self._sessions: dict[int, int] = {}
        """Session of each host when the space was reserved. The reservation is void in a later
        session.
        """
        self._first_version = 0
        self._state, self._departures, self._burials = parts

    # The methods below account for the extents that are reserved for the batch.

    def list_offsets(self, host: int) -> list[int]:
        """Return the offsets of the batch's extents (reserved ranges of memory) on a host."""
        return list(self.places[host].values())

    def note_taken(self) -> None:
        """Note that the extents in the field ``places`` (ranges of the hosts' memory) are reserved
        for this batch, until it expires.
        """
        state = self._state
        self._sessions = {number: state.hosts[number].session for number in self.places}
        self.grant = state.versions.take()
        self.expires_ms = state.now_ms() + state.config.put_timeout_ms

    def release(self, objects: Iterable[int] | None = None) -> None:
        """Free the extents (reserved ranges) of these objects; of all objects if None. The caller
        ensures that they are not sealed and that no client can write there.
        """
        chosen = None if objects is None else set(objects)
        for number, places in self.places.items():
            gone = [i for i in places if chosen is None or i in chosen]
            self._state.hosts[number].release([places.pop(i) for i in gone])

    def _forget_lost(self) -> list[int]:
        """Forget extents (reserved ranges) on hosts that were lost or have joined anew since: the
        inventory of such a host decides about them.

        Returns: the objects that had extents there.
        """
        hosts = self._state.hosts
        lost = [n for n in self.places if hosts[n].session != self._sessions[n]]
        return [i for number in lost for i in self.places.pop(number)]

    # The first step of a put: the methods below give the client the right to write on the hosts.

    def begin_writing(self) -> dict[int, int]:
        """Mark the extents as being written by the client. Return the write address of each host,
        by its number, that has opened one for the client.
        """
        bases: dict[int, int] = {}
        for number in self.places:
            writers = self._state.hosts[number].writers
            writers.begin_writing(self.client, self.grant, self.list_offsets(number))
            if (base := writers.find(self.client)) >= 0:
                bases[number] = base
        return bases

    async def open_writers(self, bases: dict[int, int]) -> None:
        """Have the remaining hosts open a write address for the client, and add the addresses to
        ``bases``.
        """
        asked = [self._state.hosts[n] for n in sorted(self.places) if n not in bases]
        answers = await asyncio.gather(*map(self._open_writer, asked), return_exceptions=True)
        for host, answer in zip(asked, answers, strict=True):
            if isinstance(answer, int):
                bases[host.number] = answer
            elif not isinstance(answer, TandemError):
                raise answer

    async def _open_writer(self, host: HostSpace) -> int:
        # The master asks the host for a write address until it answers; only this put stops
        # waiting.
        try:
            async with asyncio.timeout(self._state.answer_timeout_s(host)):
                return await host.writers.open(self.client)
        except TimeoutError:
            host.line.doubt()
            raise DeadlineError("store.write", f"host {host.name} does not answer") from None

    def describe(self, bases: dict[int, int]) -> StartedPut:
        """Return the answer to the client: the space reserved on those hosts that have opened an
        address for its writes. ``bases`` has these addresses by host.
        """
        positions, count = self.positions, len(self.request.keys)
        is_whole = len(positions) == count
        statuses = bytearray([StartStatus.GRANTED if is_whole else StartStatus.EXISTS]) * count
        for position in () if is_whole else positions:
            statuses[position] = StartStatus.GRANTED
        places = [
            HostExtents(
                number,
                list(offsets) if is_whole else [positions[i] for i in offsets],
                list(offsets.values()),
            )
            for number, offsets in sorted(self.places.items())
            if number in bases
        ]
        return StartedPut(
            statuses=bytes(statuses),
            grant=self.grant,
            places=places,
            endpoints=[self._state.hosts[p.host].endpoint(bases[p.host]) for p in places],
        )

    # The second step of a put, the write, is done by the client; the methods below handle its end.

    def end_writing(self, failed_hosts: Iterable[int]) -> list[int]:
        """Note that the client has stopped writing, except that late bytes may reach hosts where
        its writes failed.

        Returns: the failed hosts. Extents there stay reserved until the client is fenced off.
        """
        failed = sorted(set(failed_hosts) & set(self.places))
        for number in failed:
            del self.places[number]
        for number in self.places:
            was_writing = self._state.hosts[number].writers.end_writing(self.client, self.grant)
            assert was_writing, "a fence takes space from puts"
        return failed

    def cut_tables(self, tables: bytes) -> Blob:
        """Return the objects' checksum tables. Raises: ConfigError if their length does not match
        the values.
        """
        sizes = [4 * count for count in layout.count_chunks_each(self.sizes)]
        if sum(sizes) != len(tables):
            self.release()
            raise ConfigError("store.commit", "tables that do not fit the values")
        return Blob(tables, sizes, is_values=False)

    # The last step of a put: the methods below have the hosts write headers, and add the objects to
    # the directory.

    async def seal(self, checksums: Sequence[int], blob: Blob) -> bytes:
        """Have the hosts seal the objects (write their headers), and publish them. Return a
        ``CommitStatus`` byte for each object.

        Raises: CapacityError if there is no room for the tombstones of replaced objects.
        """
        await self._wait_room()
        async with self._lock_keys():
            self._forget_lost()
            statuses = bytearray([CommitStatus.EXPIRED]) * len(self.keys)
            if self._is_unsure():
                # A host that may have the key, and whose list of objects is awaited, did not report
                # in time. Free the extents; the client puts again.
                self.release()
                return bytes(statuses)
            if not self.request.upsert:
                taken = self._state.directory.exists_many(self.keys)
                came_late = [i for i, is_taken in enumerate(taken) if is_taken]
                self.release(came_late)
                for i in came_late:
                    statuses[i] = CommitStatus.EXISTS
            self._first_version = self._state.versions.take(len(self.keys))
            try:
                sealed = await self._seal_all(checksums, blob)
            except Exception:
                self._forget_lost()
                self._wipe_all(self.places)
                raise
            for i in self._forget_lost():
                # A host that was lost while the headers were written may have written the object's
                # before.
                self._state.note_unlisted(self.keys[i])
            self._wipe_all([number for number in self.places if number not in sealed])
            await self._show(checksums, statuses)
            return bytes(statuses)

    @contextlib.asynccontextmanager
    async def _lock_keys(self) -> AsyncGenerator[None]:
        """Lock the keys against other commits, all at once, after waiting a limited time while a
        host that has yet to return may have an object of one of them. Locked while the context
        lasts.
        """
        state = self._state
        deadline_s = state.clock.now_s() + state.config.put_timeout_ms / 1e3
        held = state.committing
        while True:
            left_s = deadline_s - state.clock.now_s()
            if left_s > 0 and self._is_unsure():
                await state.awaited.wait_learnt(left_s)
                await asyncio.sleep(UNSURE_LOOK_S)
            elif held and (busy := [held[key] for key in self.keys if key in held]):
                await asyncio.shield(busy[0])
            else:
                break
        released: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        held.update(dict.fromkeys(self.keys, released))
        try:
            yield
        finally:
            for key in self.keys:
                del held[key]
            released.set_result(None)

    def _is_unsure(self) -> bool:
        """Return True if an awaited host (one that has yet to return and list its objects) may have
        an object that this batch must not replace.
        """
        if self.request.upsert or not self._state.can_be_unsure:
            return False
        taken = self._state.directory.exists_many(self.keys)
        missing = [key for key, is_taken in zip(self.keys, taken, strict=True) if not is_taken]
        return bool(missing) and self._state.is_unsure(missing)

    async def _seal_all(self, checksums: Sequence[int], blob: Blob) -> set[int]:
        """Have all hosts seal the batch's objects (write their headers). Return the hosts that
        succeeded.
        """
        numbers = sorted(number for number, places in self.places.items() if places)
        work = [self._seal_on(number, checksums, blob) for number in numbers]
        if len(work) == 1:  # One host needs no extra task.
            answers: list[bool | BaseException] = [await work[0]]
        else:
            answers = await asyncio.gather(*work, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return {number for number, answer in zip(numbers, answers, strict=True) if answer}

    async def _seal_on(self, number: int, checksums: Sequence[int], blob: Blob) -> bool:
        """Have one host seal the batch's objects (write their headers). Return True if it
        succeeded.
        """
        host, objects = self._state.hosts[number], list(self.places[number])
        part = blob.take(objects)
        try:
            await host.line.order(
                "seal",
                SealExtents,
                Ack,
                timeout_s=self._state.answer_timeout_s(host, len(objects)),
                records=self._make_records(number, objects, checksums),
                has_values=blob.is_values,
                blob=part if blob.is_values else b"",
                tables=b"" if blob.is_values else part,
            )
        except TandemError as error:
            logger.warning("event=seal_failed host=%s reason=%s", host.name, error)
            return False
        return True

    def _make_records(
        self, number: int, objects: Sequence[int], checksums: Sequence[int]
    ) -> ExtentRecords:
        request, count = self.request, len(objects)
        return ExtentRecords(
            keys=[self.keys[i] for i in objects],
            sizes=[self.sizes[i] for i in objects],
            versions=[self._first_version + i for i in objects],
            checksums=[checksums[i] for i in objects],
            offsets=self.list_offsets(number),
            wanted=[request.replicas] * count,
            hard_pins=[request.hard_pin] * count,
            soft_pin_ms=[request.soft_pin_ms] * count,
        )

    def _wipe_all(self, numbers: Iterable[int]) -> None:
        """Have these hosts wipe the headers of this batch's objects, which they may have written:
        their answer was lost, or was an error.
        """
        for number in list(numbers):
            for i, offset in self.places.pop(number).items():
                self._departures.wipe_copy(
                    self.keys[i],
                    self._state.hosts[number],
                    Extent(offset, self.lengths[i]),
                    version=self._first_version + i,
                    was_shown=False,
                )

    async def _show(self, checksums: Sequence[int], statuses: bytearray) -> None:
        """Publish the objects whose headers at least one host has written. Return when no older
        object of their keys can come back.

        Until then the keys are hidden from clients: after a crash, or from an absent host, the
        older object could reappear.
        """
        wipes, unlisted = self._state.wipes, self._state.unlisted
        is_blind = self.request.upsert and self._burials.is_blind
        replaced = self._find_replaced()
        if replaced:
            # An object whose header no host has written replaces nothing: the older one stays and
            # gets no tombstone (note that it is dead).
            sealed = {self.keys[i] for places in self.places.values() for i in places}
            replaced = [key for key in replaced if key in sealed]
        for key in replaced:
            wipes.hide(key)
        try:
            gone = self._insert(checksums, statuses)
            if not replaced:
                return
            for wiped in gone:
                await asyncio.shield(wiped)
            dead = set(replaced) if is_blind else unlisted.intersection(replaced)
            if dead:
                versions = enumerate(self.keys, self._first_version - 1)
                await self._burials.bury([Tombstone(k, n) for n, k in versions if k in dead])
        finally:
            for key in replaced:
                wipes.show(key)

    def _insert(self, checksums: Sequence[int], statuses: bytearray) -> "list[asyncio.Future[Any]]":
        """Add the objects to the directory. Return futures that are done when the replaced objects
        are wiped.
        """
        state, directory, request = self._state, self._state.directory, self.request
        for number in self.places:
            state.hosts[number].ledger.move(ExtentEvent.SEAL, self.list_offsets(number))
        # An upsert does not wait for hosts that have yet to list their objects, so that it may
        # replace an object that this master does not know.
        is_unsure = request.upsert and state.awaited.is_learning
        shown = sorted({i for places in self.places.values() for i in places})
        for i in shown:
            statuses[i] = CommitStatus.REPLACED if is_unsure else CommitStatus.CREATED
        replaced: list[asyncio.Future[Any]] = []
        if self._state.may_have_older(()) or directory.has_any(self.keys):
            for i in shown:
                going = self._state.wipes.find_replaced(self.keys[i])
                if going is not None:  # Evicted a moment ago; clients may still read it.
                    replaced.append(going)
                row = directory.find(self.keys[i])
                if row != NO_ROW:
                    if directory.num_live[row]:
                        statuses[i] = CommitStatus.REPLACED
                    replaced += self._departures.drop_row(row)
        rows: dict[int, int] = {}
        # Insert in reverse order, since ``add_replica`` puts a copy in front: the first host of
        # ``places`` then has the row's first replica.
        for number, places in reversed(self.places.items()):
            new = [i for i in places if i not in rows]
            for i in places.keys() & rows.keys():
                directory.copies.add_replica(rows[i], Replica(number, places[i]))
            inserted = directory.insert_many(
                [self.keys[i] for i in new],
                sizes=[self.sizes[i] for i in new],
                checksums=[checksums[i] for i in new],
                versions=[self._first_version + i for i in new],
                wanted=request.replicas,
                host=number,
                offsets=[places[i] for i in new],
            )
            rows.update(zip(new, inserted, strict=True))
        if request.hard_pin or request.soft_pin_ms:
            soft_until_ms = state.now_ms() + request.soft_pin_ms if request.soft_pin_ms else 0
            for row in rows.values():
                directory.set_pins(row, hard=request.hard_pin, soft_until_ms=soft_until_ms)
        state.counters.objects_created += len(rows)
        return replaced

    # The methods below find the older objects that the batch replaces.

    async def _wait_room(self) -> None:
        """Wait until the tombstones (durable notes that replaced objects are dead) that this batch
        may need fit below the limit.

        Raises: CapacityError (they do not in time).
        """
        if self._burials.is_whole or not (count := len(self._find_replaced())):
            return
        try:
            await self._burials.wait_room(count, self._state.config.put_wait_ms / 1e3)
        except CapacityError:
            self._forget_lost()
            self.release()
            raise

    def _find_replaced(self) -> Sequence[str]:
        """Return the keys of which an older copy exists, or may exist on an absent host."""
        keys, state = self.keys, self._state
        if self.request.upsert and self._burials.is_blind:
            return keys
        directory = state.directory
        if not directory.has_any(keys) and not state.may_have_older(keys):
            return ()
        return [
            key
            for key in keys
            if directory.find(key) != NO_ROW
            or state.wipes.find_replaced(key) is not None
            or key in state.unlisted
        ]

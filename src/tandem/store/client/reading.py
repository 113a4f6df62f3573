"""Gets of a client, one object or many: look up, read, verify, and retry transient failures.

A cached location replaces the lookup; bytes read from it must include the object's header, see
``location_cache``. Bytes are used only if their lease still holds and their checksum is right. The
native ``BatchRead`` decides which ranges to read and which values are good. This module handles
those that it gives up: another replica, another lookup, or an error. A ``Destination`` is where
values go.
"""

import logging
import struct
from collections.abc import Sequence

from tandem.core.errors import (
    CorruptionError,
    DeadlineError,
    NotFoundError,
    PeerLostError,
    TandemError,
)
from tandem.store.client.buffers import ScratchPool, StoreBuffer
from tandem.store.client.destinations import Destination
from tandem.store.client.location_cache import LocationCache
from tandem.store.client.master_calls import FIRST_RETRY_S, MIN_TIMEOUT_S, RETRY_S, MasterCalls
from tandem.store.interfaces import ClientPort, Piece
from tandem.store.messages import ON_DISK, Ack, Located, LocateObjects, ReportBadReplica

__all__ = ["ObjectReader", "hosts_lost", "not_found"]

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 5
"""Number of attempts to look up and read an object whose failures may be transient."""
LEASE_SHARE = 0.9
"""Share of a lease that a reader uses. Clocks of two machines differ in rate, by far less than the
rest.
"""
OFF_LOOP_BYTES = 2**24
"""Bytes above which checksums are verified in a thread, so that the event loop stays free."""
CELL = struct.Struct("<q")
"""Packing of one cell in the columns of ``Located``."""
PLACE = struct.Struct("<qqqq")
"""Packing of the four columns of one object in ``Located``."""


class _Lookup:
    """The master's last answer to the question where the objects of one get are."""

    def __init__(
        self,
        asked: Sequence[int],
        located: Located,
        hosts: list[tuple[int, int, int]],
        lease_end_s: float,
        generation: int,
    ) -> None:
        self.located = located
        self.hosts = hosts
        self.lease_end_s = lease_end_s
        self.generation = generation
        self._count = len(asked)
        self._asked = asked
        self._positions: dict[int, int] = {}
        self._moved: dict[int, int] = {}

    def _position(self, index: int) -> int:
        if not self._positions:
            self._positions = {asked: i for i, asked in enumerate(self._asked)}
        return self._positions[index]

    def _cell(self, column: int, index: int) -> int:
        at = 8 * (column * self._count + self._position(index))
        return CELL.unpack_from(self.located.columns, at)[0]

    def size(self, index: int) -> int:
        return self._cell(0, index)

    def version(self, index: int) -> int:
        return CELL.unpack_from(self.located.versions, 8 * self._position(index))[0]

    def host(self, index: int) -> int:
        """Return the number of the host that the object is read from."""
        return self._moved.get(index, self._cell(2, index))

    def move_on(self, index: int) -> bytes:
        """Switch to the object's next replica, and return its size, checksum, host and offset in
        packed form; empty if there is no other replica.
        """
        others = self.located.others.get(self._position(index))
        if not others:
            return b""
        host, offset = others.pop(0)
        self._moved[index] = host
        return PLACE.pack(self.size(index), self._cell(1, index), host, offset)


class _Read:
    """One running read: the objects that could not be read yet, and the reasons."""

    def __init__(self, into: Destination, deadline_s: float) -> None:
        self.into = into
        self.keys = into.keys
        self.batch = into.batch
        self.deadline_s = deadline_s
        self.lookup: _Lookup | None = None
        self.attempt = 0
        self.again: list[int] = []
        """Indexes of objects whose read failed, perhaps transiently."""
        self.staged: list[int] = []
        """Indexes of objects that are on disks and being read into memory."""
        self.has_staged = False
        """True if the last lookup asked the master to wait for loads from disks."""
        self.unsure: list[int] = []
        """Indexes of objects that the master cannot tell to exist or not, yet."""
        self.unsure_pause_s = FIRST_RETRY_S
        self.causes: dict[int, TandemError] = {}
        """The error of each object's last attempt, by index."""
        self.failed_endpoints: set[int] = set()
        """Numbers of endpoints whose reads failed. They are read last, since they may use up the
        time.
        """


class ObjectReader:
    """Executes the gets of one client: looks objects up, reads them from hosts, verifies and
    retries.
    """

    def __init__(self, calls: MasterCalls, port: ClientPort, places: LocationCache) -> None:
        self._calls = calls
        self._port = port
        self._places = places
        self._scratch = ScratchPool(port)

    async def read(self, into: Destination, deadline_s: float) -> None:
        """Read all objects of a destination, and set a result or an error for each."""
        places, batch = self._places, into.batch
        read = _Read(into, deadline_s)
        num_known = 0
        if into.takes_remembered:
            num_known = batch.place_known(places.cache, self._calls.clock.now_s() + places.margin_s)
        unplaced = batch.list_unplaced() if num_known else list(range(len(into.keys)))
        method = "locate"
        while True:
            if unplaced:
                await self._look_up(read, method, unplaced)
            while numbers := batch.list_endpoints():
                if read.failed_endpoints:
                    numbers.sort(key=read.failed_endpoints.__contains__)
                for number in numbers:
                    await self._read_from(read, number)
            # Objects whose cached places failed are looked up at the master. Objects that could not
            # be read at the places in the master's own answer are handled by ``_wait`` below.
            unplaced = batch.list_unplaced() if num_known else []
            num_known, method = 0, "locate"
            if read.again or read.staged or read.unsure:
                method = "stage" if read.staged else "locate"
                # Sort the indexes, since ``_look_up`` and the native batch need them in the order
                # of the keys.
                unplaced = sorted([*unplaced, *await self._wait(read)])
            if not unplaced:
                return

    async def _look_up(self, read: _Read, method: str, unplaced: list[int]) -> None:
        """Ask the master for the places of the objects with the indexes ``unplaced``, which
        ascend.
        """
        places, calls = self._places, self._calls
        keys, deadline_s = read.keys, read.deadline_s
        asked = list(keys) if len(unplaced) == len(keys) else [keys[i] for i in unplaced]
        generation = places.cache.generation
        sent_s = calls.clock.now_s()
        wait_ms = max(0, int((deadline_s - sent_s) * 1e3)) if method == "stage" else 0
        request = LocateObjects(asked, calls.machine, wait_ms=wait_ms)
        try:
            located = await calls.call(method, request, Located, deadline_s)
        except DeadlineError:
            if any(i not in read.causes for i in unplaced):
                raise  # For these objects there is no other error to report.
            for i in unplaced:
                read.into.results[i] = read.causes[i]
            return
        lease_end_s = sent_s + LEASE_SHARE * located.lease_ms / 1e3
        places.note_lease(located.lease_ms / 1e3)
        hosts = [(e.host, places.number(e), e.read_base) for e in located.endpoints]
        read.lookup = _Lookup(unplaced, located, hosts, lease_end_s, generation)
        read.batch.place(
            unplaced,
            located.columns,
            located.versions,
            hosts,
            lease_end_s,
            places.cache,
            generation,
        )
        if given_up := read.batch.take_given_up():
            self._sort_out(read, read.lookup, given_up)

    def _sort_out(self, read: _Read, lookup: _Lookup, indexes: list[int]) -> None:
        """Handle the objects of a lookup that cannot be read at once: absent, unknown to the
        master, of unfitting size, empty, on disk, or on lost hosts. Each gets a result, an error,
        or another lookup.
        """
        into = read.into
        for i in indexes:
            key, size = read.keys[i], lookup.size(i)
            if size < 0:
                if lookup.located.is_recovering:
                    read.unsure.append(i)
                else:
                    into.results[i] = not_found(key)
            elif (error := into.refuse(i, size)) is not None:
                into.results[i] = error
            elif size == 0 or into.is_unread(i):
                into.results[i] = into.empty
            elif lookup.host(i) == ON_DISK:
                read.staged.append(i)
                read.causes[i] = DeadlineError(
                    "store.get",
                    f"{key!r} is on a disk and was not read within "
                    f"{self._calls.config.deadline_ms} ms: the memory of its host may be full "
                    "of leased or pinned objects, or the disk slow (`tandem store stat`)",
                )
            else:
                read.again.append(i)
                read.causes[i] = hosts_lost(key)

    async def _wait(self, read: _Read) -> list[int]:
        """Wait before the failed objects are looked up again, and return their indexes."""
        calls, deadline_s = self._calls, read.deadline_s
        again, staged, unsure = read.again, read.staged, read.unsure
        read.again, read.staged, read.unsure = [], [], []
        if again:
            # Pause before the retry: hosts and masters may come back.
            pause_s = RETRY_S * read.attempt
            read.attempt += 1
            is_over = read.attempt > 1 and calls.clock.now_s() + pause_s >= deadline_s
            if read.attempt == MAX_ATTEMPTS or is_over:
                for i in again:
                    read.into.results[i] = read.causes[i]
                again = []
            elif pause_s:
                await calls.sleep(pause_s)
        elif unsure:
            await calls.pause(read.unsure_pause_s, deadline_s)
            read.unsure_pause_s = min(2 * read.unsure_pause_s, RETRY_S)
        elif staged and read.has_staged:
            await calls.pause(RETRY_S, deadline_s)
        read.has_staged = bool(staged)
        return [*again, *unsure, *staged]

    async def _read_from(self, read: _Read, number: int) -> None:
        """Read all objects that are placed at one endpoint (a host's addresses), given by its
        number in the location cache. Failed objects go to another replica, or to the next lookup.
        """
        into, batch, cache = read.into, read.batch, self._places.cache
        scratch_bytes, lease_end_s, rows, direct = batch.plan(number)
        with (
            self._scratch.lend(scratch_bytes) as scratch,
            into.receive(direct, self._scratch) as received,
        ):
            pieces = [(scratch.handle, *row) for row in rows]
            pieces += received
            error = await self._move(read, number, pieces, min(lease_end_s, read.deadline_s))
            if error is None:
                self._check_headers(into, scratch)
                num_bytes = scratch_bytes + sum([length for _, _, length in direct])
                await self._check_values(into, scratch, num_bytes)
                into.finish(scratch, self._calls.clock.now_s(), cache)
            else:
                batch.fail(cache)
        if given_up := batch.take_given_up():
            self._move_on(read, given_up, error)

    async def _move(
        self, read: _Read, number: int, pieces: list[Piece], until_s: float
    ) -> TandemError | None:
        endpoint = self._places.endpoint(number)
        if endpoint is None:
            return PeerLostError("store.get", "the session with the master is over")
        if not pieces:
            return None
        timeout_s = max(MIN_TIMEOUT_S, until_s - self._calls.clock.now_s())
        try:
            await self._port.read(endpoint, pieces, timeout_s)
        except TandemError as error:
            logger.info("event=read_failed host=%s reason=%s", endpoint.name, error)
            read.failed_endpoints.add(number)
            if isinstance(error, PeerLostError | NotFoundError):
                self._places.cache.forget_endpoint(number)
            return error
        return None

    def _check_headers(self, into: Destination, scratch: StoreBuffer) -> None:
        into.batch.check_headers(scratch.array)

    async def _check_values(self, into: Destination, scratch: StoreBuffer, num_bytes: int) -> None:
        """Drop the values in ``scratch`` and at their destination whose checksums are wrong; in a
        thread if ``num_bytes`` are many.
        """
        if num_bytes > OFF_LOOP_BYTES:
            await self._calls.compute(lambda: into.check(scratch))
        else:
            into.check(scratch)

    def _move_on(self, read: _Read, indexes: list[int], error: TandemError | None) -> None:
        """Continue with the next replica of the last lookup for each failed object, or with another
        lookup.
        """
        lookup = read.lookup
        assert lookup is not None, "what was remembered is not given up"
        is_leased = self._calls.clock.now_s() <= lookup.lease_end_s
        for i in indexes:
            key = read.keys[i]
            if not is_leased:
                # The lease has ended, so the object's space may have been reused for another object
                # during the read.
                read.causes[i] = DeadlineError("store.get", f"reading {key!r} outlasted its lease")
                read.again.append(i)
                continue
            if error is not None:
                read.causes[i] = error
            else:
                read.causes[i] = CorruptionError(
                    "store.get", f"{key!r} has a wrong checksum on every replica that was read"
                )
                report = ReportBadReplica(key, lookup.version(i), lookup.host(i))
                self._calls.spawn(self._calls.tell("report_bad", report, Ack))
            columns = lookup.move_on(i)
            if columns:
                read.batch.place(
                    [i],
                    columns,
                    b"",
                    lookup.hosts,
                    lookup.lease_end_s,
                    self._places.cache,
                    lookup.generation,
                )
            else:
                read.again.append(i)

    def close(self) -> None:
        """Free the scratch memory."""
        self._scratch.close()


def not_found(key: str) -> NotFoundError:
    """Return the error for a key without an object."""
    return NotFoundError("store.get", f"no object {key!r}", field="key")


def hosts_lost(key: str) -> PeerLostError:
    """Return the error for an object that no present host has."""
    return PeerLostError("store.get", f"all hosts of {key!r} are lost")

"""A host's side of a master's orders: seal, wipe, pull, load and the others."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from tandem.core.errors import (
    CancelledError,
    ConflictError,
    CorruptionError,
    DeadlineError,
    NotFoundError,
    PeerLostError,
    UnsupportedError,
)
from tandem.store.formats.headers import MAX_EPOCH, ExtentHeader
from tandem.store.formats.records import iterate_records
from tandem.store.host.disk import DiskTier
from tandem.store.host.segment import HostSegment
from tandem.store.messages import (
    Ack,
    CloseWriter,
    Endpoint,
    ForgetObjects,
    LoadObject,
    Opened,
    OpenWriter,
    Order,
    PullObject,
    RepinExtents,
    SealExtents,
    VerifyExtent,
    WipeExtents,
)
from tandem.store.sessions import Caller

__all__ = ["HostOrders", "HostPort"]


class HostPort(Protocol):
    """The data path of a host: access to its segment, and copies into it."""

    @property
    def address(self) -> str:
        """The address at which peers reach the host's transfer engine."""
        ...

    @property
    def read_base(self) -> int:
        """The address at which the host's segment (its memory for objects) begins for readers."""
        ...

    def former_writers(self) -> set[int]:
        """Return the addresses for writing to this host's segment (memory) that an earlier process
        of the same segment may have handed out to clients.
        """
        ...

    def open_writer(self) -> int:
        """Return a new address at which the segment begins for the writes of one client. No address
        is given twice.
        """
        ...

    async def close_writer(self, base: int) -> bool:
        """Withdraw a write address. Return True if no byte can arrive by it any more. May be
        repeated.
        """
        ...

    async def fetch(
        self, source: Endpoint, source_offset: int, offset: int, length: int, timeout_s: float
    ) -> None:
        """Copy a range from another host's segment into this one.

        The segment is not touched after this has returned or raised.
        """
        ...


class HostOrders:
    """Executes the orders of one master on a host's segment and disk.

    Args:
        name: the host's name.
        segment: the host's memory; borrowed.
        port: the data path to that segment; borrowed.
        disk: the SSD tier; borrowed.
    """

    def __init__(
        self, name: str, segment: HostSegment, port: HostPort, disk: DiskTier | None
    ) -> None:
        self.name = name
        self.segment = segment
        self.port = port
        self.disk = disk
        self.session = -1
        """The session whose orders are executed; -1 for none."""
        self.last_number = -1
        """Number of the last order of the session."""
        self.writers: set[int] = port.former_writers()
        """Addresses at which clients may write, or might by a right from an earlier process."""
        self.pulls: dict[int, asyncio.Task[None]] = {}
        """Running copies of objects into the segment, by the offset of the extent."""

    def methods(self) -> list[tuple[str, Callable[..., Any], type, type]]:
        """Return the methods that a master may call: (name, handler, request type, response
        type).
        """
        return [
            ("seal", self._seal, SealExtents, Ack),
            ("wipe", self._wipe, WipeExtents, Ack),
            ("repin", self._repin, RepinExtents, Ack),
            ("open_writer", self._open_writer, OpenWriter, Opened),
            ("close_writer", self._close_writer, CloseWriter, Ack),
            ("pull", self._pull, PullObject, Ack),
            ("verify", self._verify, VerifyExtent, Ack),
            ("forget", self._forget, ForgetObjects, Ack),
            ("load", self._load, LoadObject, Ack),
        ]

    def begin(self, session: int) -> None:
        """Begin to obey the master of a session; orders of other sessions are refused."""
        self.session, self.last_number = session, -1

    async def end(self) -> None:
        """Obey no master, and stop copying objects into the segment."""
        self.session = -1
        for pull in list(self.pulls.values()):
            pull.cancel()
        await asyncio.gather(*self.pulls.values(), return_exceptions=True)

    async def close_writers(self, bases: set[int]) -> bool:
        """Withdraw the write addresses ``bases``, and take those from the set that nobody can
        write by any more. Return True if none is left.
        """
        ended = [base for base in sorted(bases) if await self.port.close_writer(base)]
        bases.difference_update(ended)
        self.writers.difference_update(ended)
        return not bases

    # The methods below execute orders, in the order of arrival. Those that wait for nothing are
    # plain functions, which need no task.

    def _obey(self, order: Order) -> None:
        """Check an order of a master: refuse it if a newer master was seen, or if it is late or
        repeated.

        Raises: ConflictError (it is refused).
        """
        if not self.segment.epoch <= order.epoch <= MAX_EPOCH or order.session != self.session:
            raise ConflictError(
                "store.host",
                f"order of epoch {order.epoch} session {order.session}; {self.name} obeys "
                f"{self.segment.epoch} session {self.session}",
                field="epoch",
            )
        if order.number <= self.last_number:
            raise ConflictError(
                "store.host",
                f"order {order.number} comes after {self.last_number}: late or doubled",
                field="number",
            )
        self.last_number = order.number
        if order.epoch > self.segment.epoch:
            self.segment.epoch = order.epoch

    def _seal(self, _: Caller, order: SealExtents) -> Ack:
        self._obey(order)
        self.segment.seal_many(
            order.records,
            tables=order.tables or None,
            values=order.blob if order.has_values else None,
        )
        if self.disk is not None:
            for offset, header in iterate_records(order.records):
                self.disk.on_sealed(offset, header)
        return Ack()

    def _wipe(self, _: Caller, order: WipeExtents) -> Ack | Coroutine[Any, Any, Ack]:
        self._obey(order)
        for offset in order.offsets:
            self._wipe_object(offset)
        # Wait for pulls (copies from other hosts), which would write into space that is free after
        # this order. Cancel all of them before waiting for any: one that completed meanwhile would
        # leave its object there.
        pulls = [self.pulls[offset] for offset in order.offsets if offset in self.pulls]
        for pull in pulls:
            pull.cancel()
        return self._end_pulls(pulls) if pulls else Ack()

    async def _end_pulls(self, pulls: Sequence[asyncio.Task[None]]) -> Ack:
        await asyncio.gather(*pulls, return_exceptions=True)
        return Ack()

    def _wipe_object(self, offset: int) -> None:
        if not self.segment.has_object(offset):
            self.segment.wipe(offset)  # Checks the offset.
            return
        if self.disk is not None:
            try:
                self.disk.on_wiped(offset, self.segment.read_header(offset).key)
            except CorruptionError as error:
                self.segment.corruption.note(f"object at {offset} of {self.name}", error)
        self.segment.wipe(offset)

    def _repin(self, _: Caller, order: RepinExtents) -> Ack:
        self._obey(order)
        for offset in order.offsets:
            self.segment.repin(offset, hard=order.hard, soft_pin_ms=order.soft_pin_ms)
        return Ack()

    def _open_writer(self, _: Caller, order: OpenWriter) -> Opened:
        self._obey(order)
        base = self.port.open_writer()
        self.writers.add(base)
        return Opened(base)

    async def _close_writer(self, _: Caller, order: CloseWriter) -> Ack:
        self._obey(order)
        is_closed = await self.port.close_writer(order.write_base)
        if is_closed:
            self.writers.discard(order.write_base)
        return Ack(is_closed)

    async def _pull(self, _: Caller, order: PullObject) -> Ack:
        self._obey(order)
        ((offset, header),) = iterate_records(order.records)
        return await self._fill(offset, header, self._pull_object(order, offset, header))

    async def _load(self, _: Caller, order: LoadObject) -> Ack:
        self._obey(order)
        ((offset, header),) = iterate_records(order.records)
        return await self._fill(offset, header, self._load_object(offset, header))

    async def _fill(
        self, offset: int, header: ExtentHeader, work: Coroutine[Any, Any, None]
    ) -> Ack:
        """Run ``work``, which brings an object into the extent (range of memory) at ``offset``.
        Cancel it if the extent is wiped or the call is cancelled.

        Raises: ConflictError if another such work runs for the extent; CancelledError if this one
            was cancelled; the errors of ``work``.
        """
        if offset in self.pulls:
            work.close()
            raise ConflictError("store.pull", f"a pull to offset {offset} is under way")
        task = asyncio.get_running_loop().create_task(work)
        self.pulls[offset] = task
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            # Either the pull (the copy from another host) was cancelled, by a wipe of its extent,
            # or this call was. Both end the pull.
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise CancelledError("store.pull", f"pull of {header.key!r} was ended") from None
        finally:
            if self.pulls.get(offset) is task:
                del self.pulls[offset]
        return Ack()

    async def _load_object(self, offset: int, header: ExtentHeader) -> None:
        if self.disk is None:
            raise NotFoundError("store.load", f"{self.name} has no disk")
        await self.disk.load(header, offset)
        self.segment.seal(offset, header)
        self.disk.on_loaded(offset, header)

    async def _forget(self, _: Caller, order: ForgetObjects) -> Ack:
        self._obey(order)
        if self.disk is not None:
            await self.disk.forget(order.keys, order.versions)
        return Ack()

    async def _pull_object(self, order: PullObject, offset: int, header: ExtentHeader) -> None:
        table_at, end = self.segment.span(header)
        try:
            await self.port.fetch(
                order.source,
                order.source_offset + table_at,
                offset + table_at,
                end - table_at,
                order.timeout_ms / 1e3,
            )
        except (PeerLostError, NotFoundError, UnsupportedError) as error:
            # The error concerns the source host. Raise another type, or the master would take it
            # for the loss of this host.
            raise DeadlineError(
                "store.pull", f"{order.source.name} cannot be reached: {error.what}"
            ) from None
        if not self.segment.is_intact(offset, header):
            raise CorruptionError(
                "store.pull", f"{header.key!r} on {order.source.name} has a wrong checksum"
            )
        self.segment.seal(offset, header)
        if self.disk is not None:
            self.disk.on_sealed(offset, header)

    def _verify(self, _: Caller, order: VerifyExtent) -> Ack:
        self._obey(order)
        if not self.segment.has_object(order.offset):
            raise NotFoundError("store.verify", f"no object at offset {order.offset}")
        try:
            header = self.segment.read_header(order.offset)
        except CorruptionError:
            return Ack(ok=False)
        return Ack(header.version == order.version and self.segment.is_intact(order.offset, header))

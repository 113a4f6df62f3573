"""The interface of a disk, the buffers between disk and segment, and time limits for disk
operations.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from tandem.core.errors import DeadlineError
from tandem.store.formats import bucket as form
from tandem.store.formats import layout
from tandem.store.formats.bucket import Record
from tandem.store.host.disk_index import Bucket

__all__ = ["PIECE_BYTES", "DiskBuffer", "DiskIo", "DiskPort", "RecordWriter", "copy_bytes"]

T = TypeVar("T")

PIECE_BYTES = 4 * 2**20
"""Bytes of one read or write, large enough for a disk's full bandwidth with ``NUM_PIECES`` in
flight.
"""
NUM_PIECES = 12
"""Number of buffers of ``PIECE_BYTES``, allocated on first use."""
HANG_S = 20.0
"""Seconds after which a disk that has not finished one piece is given up until the process
restarts.
"""
CLOSE_S = 2.0
OFF_LOOP_BYTES = 2**21
"""Bytes above which a copy runs in a thread. Copying this much takes 0.4 ms, about as long as the
switch to a thread and back.
"""


class DiskBuffer(Protocol):
    """Aligned memory for reads and writes of a disk."""

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes of the buffer."""
        ...


class DiskPort(Protocol):
    """The files of one folder, which no other process uses: buckets (large files of many objects)
    by number, notes (small files) by name.

    Each method raises CapacityError if space is missing, and another TandemError for other
    failures.
    """

    @property
    def folder_id(self) -> bytes:
        """The folder's id, 16 random bytes."""
        ...

    def make_buffer(self, nbytes: int) -> DiskBuffer:
        """Allocate memory that ``read`` and ``write`` accept."""
        ...

    async def list_buckets(self) -> list[tuple[int, int]]:
        """Return (number, bytes) of each bucket file."""
        ...

    async def make_bucket(self, number: int, nbytes: int) -> None:
        """Create a bucket (a large file) of ``nbytes`` and reserve its space."""
        ...

    async def write(self, number: int, at: int, buffer: DiskBuffer, nbytes: int) -> None:
        """Write the first ``nbytes`` of ``buffer`` to a bucket (a large file) at offset ``at``.
        They are durable after ``sync``.
        """
        ...

    async def read(self, number: int, at: int, buffer: DiskBuffer, nbytes: int) -> None:
        """Read ``nbytes`` of a bucket (a large file) from offset ``at`` on into ``buffer``."""
        ...

    async def sync(self, number: int) -> None:
        """Make all bytes written to a bucket durable, so that they survive a crash of the
        machine.
        """
        ...

    async def cut_bucket(self, number: int, nbytes: int) -> None:
        """Truncate a bucket file to ``nbytes``."""
        ...

    async def drop_bucket(self, number: int) -> None:
        """Remove a bucket file. Running reads still complete."""
        ...

    async def quarantine_bucket(self, number: int) -> None:
        """Move a corrupt bucket file aside, so that it is not read again; it replaces the one that
        was moved aside before.
        """
        ...

    async def read_note(self, name: str) -> bytes:
        """Return the content of a small file; empty if it is missing."""
        ...

    async def write_note(self, name: str, data: bytes) -> None:
        """Replace a small file atomically. It is durable on return."""
        ...

    async def append_note(self, name: str, data: bytes) -> None:
        """Append to a small file. The bytes are durable on return."""
        ...

    async def drop_note(self, name: str) -> None:
        """Remove a small file if it exists."""
        ...

    def condemn(self) -> None:
        """Record, outside of this disk, that its content must not be used after a restart."""
        ...


class DiskIo:
    """A disk with its buffers and its running operations.

    Args:
        port: the disk's files.
        on_hang: called when an operation takes longer than ``HANG_S``.
    """

    def __init__(self, port: DiskPort, on_hang: Callable[[], None]) -> None:
        self.port = port
        self.tasks: set[asyncio.Task[Any]] = set()
        """Running operations of the disk."""
        self._on_hang = on_hang
        self._free: list[DiskBuffer] = []
        self._buffers = asyncio.Semaphore(NUM_PIECES)
        self._busy: dict[int, asyncio.Task[Any]] = {}
        """The running disk operation of each lent buffer, by the buffer's identity. It may outlast
        the caller's wait.
        """

    async def aclose(self) -> None:
        """Wait for running operations, ``CLOSE_S`` at most, then cancel them."""
        if self.tasks:
            await asyncio.wait(list(self.tasks), timeout=CLOSE_S)
        for task in list(self.tasks):
            task.cancel()

    async def take_buffer(self) -> DiskBuffer:
        """Take a buffer of ``PIECE_BYTES``; waits until one is free."""
        await self._buffers.acquire()
        return self._free.pop() if self._free else self.port.make_buffer(PIECE_BYTES)

    async def write_bytes(self, number: int, data: bytes) -> None:
        """Write data that fits in one buffer to the beginning of a bucket (a large file)."""
        buffer = await self.take_buffer()
        try:
            buffer.array[: len(data)] = np.frombuffer(data, np.uint8)
            await self.bounded(self.port.write(number, 0, buffer, len(data)), buffer)
        finally:
            self.give_buffer(buffer)

    def give_buffer(self, buffer: DiskBuffer) -> None:
        """Give a buffer back to the pool, once the disk operation that still uses it has ended."""
        task = self._busy.pop(id(buffer), None)
        if task is not None and not task.done():
            task.add_done_callback(lambda _: self.give_buffer(buffer))
            return
        self._free.append(buffer)
        self._buffers.release()

    async def bounded(self, work: Coroutine[Any, Any, T], buffer: DiskBuffer | None = None) -> T:
        """Wait for a disk operation, at most ``HANG_S``.

        A running operation is not cancelled, since cancelling would also wait for the disk.

        Raises: DeadlineError when the disk has been given up; the errors of the operation.
        """
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._note_end)
        if buffer is not None:
            self._busy[id(buffer)] = task
        done, _ = await asyncio.wait([task], timeout=HANG_S)
        if not done:
            self._on_hang()
            raise DeadlineError("store.disk", f"the disk has not answered for {HANG_S} s")
        return task.result()

    def _note_end(self, task: "asyncio.Task[Any]") -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            task.exception()  # The exception is stored in the future, which may have no waiter.


class RecordWriter:
    """A writer that packs records (objects with headers) one behind the other and writes them to a
    disk in pieces: one piece is filled while others are written.

    Args:
        io: the disk.
        data: the segment that objects are copied from.
        bucket: the bucket (file) to append to; None to place nothing.
    """

    def __init__(self, io: DiskIo, data: npt.NDArray[np.uint8], bucket: Bucket | None) -> None:
        self._io = io
        self._data = data
        self.bucket = bucket
        self.at = 0 if bucket is None else bucket.used_bytes
        """Offset in the bucket of the next record."""
        self._begin = self.at
        """Offset in the bucket of the next piece."""
        self.num_bytes = 0
        self.placed: list[tuple[Record, int]] = []
        self.torn: list[Record] = []
        self._buffer: DiskBuffer | None = None
        self._fill = 0
        self._writes: list[asyncio.Task[None]] = []

    async def add(self, record: Record, offset: int) -> None:
        """Copy the object at ``offset`` in the segment into the pieces that are written to the
        disk, behind the object before.
        """
        self.placed.append((record, offset))
        head = np.frombuffer(form.pack_record(record), np.uint8)
        key_bytes = len(record.header.key.encode())
        end = layout.value_offset(key_bytes, record.header.size) + record.header.size
        data = self._data
        at = 0
        while at < record.length:
            if self._fill == PIECE_BYTES:
                await self._push()
            if self._buffer is None:
                self._buffer = await self._io.take_buffer()
            nbytes = min(PIECE_BYTES - self._fill, record.length - at)
            room = self._buffer.array[self._fill : self._fill + nbytes]
            copied = max(0, min(nbytes, end - at))
            await copy_bytes(room[:copied], data[offset + at : offset + at + copied])
            room[copied:] = 0
            if at < len(head):
                part = head[at : at + nbytes]
                room[: len(part)] = part
            self._fill += nbytes
            at += nbytes
        self.at += record.length
        self.num_bytes += record.length

    async def _push(self) -> None:
        buffer, nbytes = self._buffer, self._fill
        if buffer is None:
            return
        self._buffer, self._fill = None, 0
        assert self.bucket is not None
        writing = self._write(self.bucket.number, self._begin, buffer, nbytes)
        self._begin += nbytes
        self._writes.append(asyncio.get_running_loop().create_task(writing))
        if len(self._writes) > NUM_PIECES // 3:
            await asyncio.gather(*self._writes)

    async def _write(self, number: int, at: int, buffer: DiskBuffer, nbytes: int) -> None:
        try:
            writing = self._io.port.write(number, at, buffer, nbytes)
            await self._io.bounded(writing, buffer)
        finally:
            self._io.give_buffer(buffer)

    async def finish(self) -> None:
        """Write the last, incomplete piece and wait for all writes."""
        await self._push()
        await asyncio.gather(*self._writes)

    async def abandon(self) -> None:
        """Give up what is not being written yet, wait for the running writes, and ignore their
        errors.
        """
        if self._buffer is not None:
            self._io.give_buffer(self._buffer)
            self._buffer = None
        await asyncio.gather(*self._writes, return_exceptions=True)


async def copy_bytes(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
    """Copy memory, in a thread if it is much. After the return or a cancellation nothing is written
    any more.
    """
    if target.size <= OFF_LOOP_BYTES:
        np.copyto(target, source)
        return
    # Wait for the thread even if this task is cancelled, since the thread writes into memory that
    # is reused. The cancellation can come twice: from the end of the load and from the next
    # session.
    task = asyncio.ensure_future(asyncio.to_thread(np.copyto, target, source))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()

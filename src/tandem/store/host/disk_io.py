"""The disk as the SSD tier sees it: buffers between it and the segment, and bounded waits."""

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
"""Bytes of one read or write; large enough for the bandwidth of any disk at the depth below."""
NUM_PIECES = 12
"""Buffers of that size, made when they are needed."""
HANG_S = 20.0
"""A disk that takes longer for one piece is given up until the process starts again."""
CLOSE_S = 2.0
OFF_LOOP_BYTES = 2**21
"""Copies of more go to a thread: so much takes 0.4 ms, the way there and back not much less."""


class DiskBuffer(Protocol):
    """Aligned memory that a disk reads and writes."""

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """Its bytes."""
        ...


class DiskPort(Protocol):
    """The files of one folder, which no other process uses. Buckets have numbers, notes names.

    Each raises CapacityError for want of space, other errors of tandem for what fails otherwise.
    """

    @property
    def folder_id(self) -> bytes:
        """16 random bytes, those of the folder."""
        ...

    def make_buffer(self, nbytes: int) -> DiskBuffer:
        """Make memory that ``read`` and ``write`` take."""
        ...

    async def list_buckets(self) -> list[tuple[int, int]]:
        """Return (number, bytes) of each bucket file."""
        ...

    async def make_bucket(self, number: int, nbytes: int) -> None:
        """Make a bucket file whose space is reserved."""
        ...

    async def write(self, number: int, at: int, buffer: DiskBuffer, nbytes: int) -> None:
        """Write the first bytes of ``buffer``; they are durable after ``sync``."""
        ...

    async def read(self, number: int, at: int, buffer: DiskBuffer, nbytes: int) -> None:
        """Read into ``buffer``."""
        ...

    async def sync(self, number: int) -> None:
        """Return when the bytes written to a bucket survive a crash of the machine."""
        ...

    async def cut_bucket(self, number: int, nbytes: int) -> None:
        """Shorten the file."""
        ...

    async def drop_bucket(self, number: int) -> None:
        """Remove the file; reads that have begun go on."""
        ...

    async def quarantine_bucket(self, number: int) -> None:
        """Move the file aside, in the place of one that was before: it is a bucket no more."""
        ...

    async def read_note(self, name: str) -> bytes:
        """Return a small file; empty if it is not there."""
        ...

    async def write_note(self, name: str, data: bytes) -> None:
        """Replace a small file, whole or not at all; durable on return."""
        ...

    async def append_note(self, name: str, data: bytes) -> None:
        """Append to a small file; durable on return."""
        ...

    async def drop_note(self, name: str) -> None:
        """Remove a small file if it is there."""
        ...

    def condemn(self) -> None:
        """Remember, elsewhere than on this disk, that its content is not to be believed again."""
        ...


class DiskIo:
    """A disk, the buffers between it and the segment, and what is under way.

    Args:
        port: the files.
        on_hang: called when the disk does not answer.
    """

    def __init__(self, port: DiskPort, on_hang: Callable[[], None]) -> None:
        self.port = port
        self.tasks: set[asyncio.Task[Any]] = set()
        """The disk's running operations."""
        self._on_hang = on_hang
        self._free: list[DiskBuffer] = []
        self._buffers = asyncio.Semaphore(NUM_PIECES)
        self._busy: dict[int, asyncio.Task[Any]] = {}
        """By identity of a buffer: what the disk does with it, whoever waits for that."""

    async def aclose(self) -> None:
        """Wait for what is under way, not for long."""
        if self.tasks:
            await asyncio.wait(list(self.tasks), timeout=CLOSE_S)
        for task in list(self.tasks):
            task.cancel()

    async def take_buffer(self) -> DiskBuffer:
        """Borrow a buffer of ``PIECE_BYTES``; waits until there is one."""
        await self._buffers.acquire()
        return self._free.pop() if self._free else self.port.make_buffer(PIECE_BYTES)

    async def write_bytes(self, number: int, data: bytes) -> None:
        """Write to the beginning of a bucket what fits a buffer."""
        buffer = await self.take_buffer()
        try:
            buffer.array[: len(data)] = np.frombuffer(data, np.uint8)
            await self.bounded(self.port.write(number, 0, buffer, len(data)), buffer)
        finally:
            self.give_buffer(buffer)

    def give_buffer(self, buffer: DiskBuffer) -> None:
        """Give one back; it is lent again when the disk has done with it."""
        task = self._busy.pop(id(buffer), None)
        if task is not None and not task.done():
            task.add_done_callback(lambda _: self.give_buffer(buffer))
            return
        self._free.append(buffer)
        self._buffers.release()

    async def bounded(self, work: Coroutine[Any, Any, T], buffer: DiskBuffer | None = None) -> T:
        """Wait for a disk, but not for one that hangs: the kernel gives nothing back of that.

        What is under way is never cancelled, since that would wait for the disk as well.

        Raises: DeadlineError when the disk has been given up; what the work raises.
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
    """Packs records side by side and writes them in pieces, one being filled meanwhile.

    Args:
        io: the disk.
        data: the segment that objects are copied from.
        bucket: where they go, behind what it has; None to place nothing.
    """

    def __init__(self, io: DiskIo, data: npt.NDArray[np.uint8], bucket: Bucket | None) -> None:
        self._io = io
        self._data = data
        self.bucket = bucket
        self.at = 0 if bucket is None else bucket.used_bytes
        """The offset of the next record."""
        self._begin = self.at
        """The offset of the next piece."""
        self.num_bytes = 0
        self.placed: list[tuple[Record, int]] = []
        self.torn: list[Record] = []
        self._buffer: DiskBuffer | None = None
        self._fill = 0
        self._writes: list[asyncio.Task[None]] = []

    async def add(self, record: Record, offset: int) -> None:
        """Copy an object behind the last."""
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
        """Write what is left, and wait for all of it."""
        await self._push()
        await asyncio.gather(*self._writes)

    async def abandon(self) -> None:
        """Wait for what is under way; nothing is raised."""
        if self._buffer is not None:
            self._io.give_buffer(self._buffer)
            self._buffer = None
        await asyncio.gather(*self._writes, return_exceptions=True)


async def copy_bytes(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
    """Copy memory, much of it in a thread; once this has ended, nothing is written any more."""
    if target.size <= OFF_LOOP_BYTES:
        np.copyto(target, source)
        return
    # A cancelled caller still waits for the thread, which writes into memory that is reused. More
    # than one may cancel it: whoever ends a load, and the next session.
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

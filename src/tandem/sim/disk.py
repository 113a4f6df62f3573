"""A disk with faults: unsynced writes may be lost or torn, and it can fill up or fail.

``MemoryDisk`` is an in-memory ``DiskPort`` for the store's SSD tier. It survives the processes that
use it, each through its own ``MemoryPort``; every operation is a step at which a process may crash.
"""

import asyncio
import inspect
import itertools
import random
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.core.errors import CapacityError, InternalError, NotFoundError

__all__ = ["SECTOR", "MemoryBuffer", "MemoryDisk", "MemoryPort"]

SECTOR = 4096
"""Bytes that a disk writes atomically."""
FAST_S = 0.0005
"""Mean seconds of an operation on a healthy disk."""
MUCH_ROOM_BYTES = 2**40


class MemoryBuffer:
    """A buffer that a disk reads into and writes from."""

    def __init__(self, nbytes: int) -> None:
        self.array: npt.NDArray[np.uint8] = np.zeros(nbytes, np.uint8)


class _File:
    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)
        self.durable = bytearray(nbytes)
        self.unsynced: list[tuple[int, bytes]] = []


class MemoryPort:
    """The ``DiskPort`` (access to a disk) of one life of a process; operations of a dead process
    have no effect.
    """

    def __init__(self, disk: "MemoryDisk") -> None:
        self._disk, self.life = disk, disk.life

    @property
    def folder_id(self) -> bytes:
        """16 random bytes that identify the disk's folder."""
        return self._disk.folder_id

    def condemn(self) -> None:
        """Mark the content as untrusted, unless this life of the process has ended."""
        if self.life == self._disk.life:
            self._disk.is_condemned = True

    def __getattr__(self, name: str) -> Any:
        method: Callable[..., Awaitable[Any]] = getattr(self._disk, name)
        if not inspect.iscoroutinefunction(method):
            return method

        async def call(*arguments: Any) -> Any:
            while self.life != self._disk.life:
                await asyncio.sleep(3600)
            return await method(*arguments)

        return call


class MemoryDisk:
    """The disk, which survives the processes that use it, each through its own ``MemoryPort``.

    Args:
       seed: decides which sectors are lost or torn, which bits flip, and the times of operations.
       room_bytes: capacity for all files; ``make_bucket`` raises CapacityError beyond it.
    """

    def __init__(self, seed: int, *, room_bytes: int = MUCH_ROOM_BYTES) -> None:
        self.random = random.Random(seed)
        self.folder_id = bytes(self.random.randbytes(16))
        self.room_bytes = room_bytes
        self.fail_rate = 0.0
        """Probability that an operation raises InternalError."""
        self.slow_s = FAST_S
        """Mean seconds of an operation."""
        self.is_hung = False
        self.is_condemned = False
        self.steps = 0
        self.crash_at = -1
        """Number of the disk step at which the simulated processes crash: no operation returns from
        then on; -1: never.
        """
        self.files: dict[int, _File] = {}
        self.notes: dict[str, bytes] = {}
        self.quarantined: dict[int, _File] = {}
        """The bucket file that was last quarantined (set aside as damaged), by its number."""
        self.on_step: Callable[[], None] = lambda: None
        self._flying: dict[int, tuple[_File, int, bytes]] = {}
        self._ids = itertools.count()
        self.life = 0

    # The methods from here to `heal` inject faults and end them: power loss, the end of the
    # process, flipped bits.

    def lose_power(self) -> None:
        """Lose power: keep everything synced, and a random half of the unsynced sectors."""
        self.life += 1
        for file in self.files.values():
            for at, data in file.unsynced:
                for begin in range(0, len(data), SECTOR):
                    if self.random.random() < 0.5:
                        part = data[begin : begin + SECTOR]
                        end = min(at + begin + len(part), len(file.durable))
                        file.durable[at + begin : end] = part[: max(0, end - at - begin)]
            file.unsynced.clear()
            file.data = bytearray(file.durable)
        self._flying.clear()
        self.is_hung = False

    def lose_process(self) -> None:
        """End the process: keep all writes, and of unfinished ones a random number of
        first bytes.
        """
        self.life += 1
        for file, at, data in self._flying.values():
            self._put(file, at, data[: self.random.randrange(len(data) + 1)])
        self._flying.clear()
        self.is_hung = False

    def rot(self) -> None:
        """Flip one bit of a random file."""
        files = [file for _, file in sorted(self.files.items()) if file.data]
        if files:
            file = self.random.choice(files)
            at = self.random.randrange(len(file.data))
            bit = 1 << self.random.randrange(8)
            file.data[at] ^= bit
            file.durable[at] ^= bit if at < len(file.durable) else 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all files."""
        return sum(len(file.data) for file in self.files.values())

    def heal(self) -> None:
        """End all faults; lost data stays lost."""
        self.fail_rate, self.slow_s, self.is_hung = 0.0, FAST_S, False
        self.room_bytes = MUCH_ROOM_BYTES

    async def _step(self) -> None:
        self.steps += 1
        self.on_step()
        if self.steps == self.crash_at:
            self.is_hung = True  # The calling process is dead from now on.
        life = self.life
        await asyncio.sleep(self.random.expovariate(1 / self.slow_s))
        while self.is_hung or life != self.life:
            await asyncio.sleep(1.0)  # A dead process waits here for ever.
        if self.random.random() < self.fail_rate:
            raise InternalError("world.disk", "input/output error")

    def _put(self, file: _File, at: int, data: bytes) -> None:
        file.data[at : at + len(data)] = data
        file.unsynced.append((at, data))

    def _file(self, number: int) -> _File:
        if number not in self.files:
            raise NotFoundError("world.disk", f"no bucket {number}")
        return self.files[number]

    # The methods below implement ``store.disk_io.DiskPort``.

    def make_buffer(self, nbytes: int) -> MemoryBuffer:
        """Allocate a buffer for ``read`` and ``write``."""
        return MemoryBuffer(nbytes)

    async def list_buckets(self) -> list[tuple[int, int]]:
        """Return (number, bytes) of each bucket (a large file of the store's SSD tier)."""
        await self._step()
        return [(number, len(file.data)) for number, file in self.files.items()]

    async def make_bucket(self, number: int, nbytes: int) -> None:
        """Create a bucket (a large file of the store's SSD tier) and reserve its space.

        Raises: CapacityError (the disk has too little free space).
        """
        await self._step()
        assert number not in self.files
        if self.used_bytes + nbytes > self.room_bytes:
            raise CapacityError("world.disk", "no space left on device")
        self.files[number] = _File(nbytes)

    async def write(self, number: int, at: int, buffer: MemoryBuffer, nbytes: int) -> None:
        """Write the first ``nbytes`` of ``buffer``, which must not change meanwhile."""
        file = self._file(number)
        assert at % SECTOR == 0
        assert nbytes % SECTOR == 0
        assert at + nbytes <= len(file.data)
        data = bytes(buffer.array[:nbytes])
        name = next(self._ids)
        self._flying[name] = (file, at, data)
        life = self.life
        await self._step()
        if life == self.life:
            del self._flying[name]
            assert bytes(buffer.array[:nbytes]) == data, "a buffer was used while it was written"
            self._put(file, at, data)

    async def read(self, number: int, at: int, buffer: MemoryBuffer, nbytes: int) -> None:
        """Read ``nbytes`` of a bucket, from offset ``at`` on, into ``buffer``.

        Raises: InternalError (the file is shorter).
        """
        file = self._file(number)
        await self._step()
        if at + nbytes > len(file.data):
            raise InternalError("world.disk", "the file has become shorter")
        buffer.array[:nbytes] = np.frombuffer(bytes(file.data[at : at + nbytes]), np.uint8)

    async def sync(self, number: int) -> None:
        """Make everything written to a bucket (a large file) durable: a loss of power no longer
        loses it.
        """
        file = self._file(number)
        await self._step()
        for at, data in file.unsynced:
            file.durable[at : at + len(data)] = data
        file.unsynced.clear()

    async def cut_bucket(self, number: int, nbytes: int) -> None:
        """Truncate a bucket (a large file) to ``nbytes``."""
        file = self._file(number)
        await self._step()
        del file.data[nbytes:]
        del file.durable[nbytes:]

    async def drop_bucket(self, number: int) -> None:
        """Remove a bucket (a large file) if it is there."""
        await self._step()
        self.files.pop(number, None)

    async def quarantine_bucket(self, number: int) -> None:
        """Move a bucket's file aside, replacing the one that was moved before."""
        await self._step()
        self.quarantined = {number: self.files.pop(number)}

    async def read_note(self, name: str) -> bytes:
        """Return a small file; empty if it is not there."""
        await self._step()
        return self.notes.get(name, b"")

    async def write_note(self, name: str, data: bytes) -> None:
        """Replace a small file atomically."""
        await self._step()
        self.notes[name] = bytes(data)

    async def append_note(self, name: str, data: bytes) -> None:
        """Append to a small file; a crash may leave only the first bytes."""
        before = self.notes.get(name, b"")
        self.notes[name] = before + bytes(data[: self.random.randrange(len(data) + 1)])
        await self._step()
        self.notes[name] = before + bytes(data)

    async def drop_note(self, name: str) -> None:
        """Remove a small file if it is there."""
        await self._step()
        self.notes.pop(name, None)

    def condemn(self) -> None:
        """Mark the content of the disk as untrusted for good, so that no later host uses it."""
        self.is_condemned = True

    def empty(self) -> None:
        """Delete all content if it is marked as untrusted, as the start of a host does."""
        if self.is_condemned:
            self.files.clear()
            self.notes.clear()
            self.is_condemned = False

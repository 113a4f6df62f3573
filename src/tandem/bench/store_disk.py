"""`tandem bench store-disk`: the SSD tier of a host, against the same disk with O_DIRECT.

Cases: ``op=write|read size=BYTES``, MB/s of values written behind (sync included) or read into
memory and verified, 32 at a time; ``op=load size=BYTES``, microseconds for one object. The ceiling
moves as many bytes between memory and a file in the same folder with O_DIRECT, in pieces of 1 MiB
by four threads; for ``load`` by one thread. Values are compared before a time counts. Files are
written to the folder for temporary files (TMPDIR).
"""

import asyncio
import itertools
import mmap
import os
import shutil
import tempfile
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tandem.bench.harness import BenchCase, time_call
from tandem.core.clock import MonotonicClock
from tandem.store.formats import layout
from tandem.store.formats.checksum import checksum_table, make_table
from tandem.store.formats.headers import ExtentHeader
from tandem.store.host.disk import DiskTier
from tandem.store.host.disk_files import DiskFolder
from tandem.store.host.segment import HostSegment
from tandem.transfer import TransferConfig, TransferEngine

__all__ = ["make_cases"]

SIZES = (65_536, 2**20, 4_500_000)
QUICK_SIZES = (65_536, 2**20)
TOTAL_BYTES = 128 * 2**20
QUICK_TOTAL_BYTES = 16 * 2**20
CAPACITY_BYTES = 2**33
"""Bytes of the tier: enough for buckets of full size; rewriting an object frees its old record."""
PIECE_BYTES = 2**20
NUM_THREADS = 4
NUM_LOADS = 32
WAIT_S = 120.0
MB = 1e6


class _Disk:
    """A host's SSD tier on a real folder, with a segment full of objects of one size."""

    def __init__(self, size: int, total_bytes: int) -> None:
        self.size = size
        self.count = max(1, total_bytes // size)
        self.length = layout.extent_bytes(len(_key(0)), size)
        self.path = Path(tempfile.mkdtemp(prefix="tandem-bench-"))
        self.runner = asyncio.Runner()
        self.engine = TransferEngine(TransferConfig())
        self.segment = HostSegment.make_anonymous((self.count + 1) * self.length + mmap.PAGESIZE)
        self._versions = itertools.count(1)
        self.headers: list[ExtentHeader] = []
        self._fill()
        self.run(self._open(CAPACITY_BYTES))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the event loop of the tier."""
        return self.runner.run(work)

    def _fill(self) -> None:
        value = np.random.default_rng(1).integers(0, 256, self.size, np.uint8)
        table = np.frombuffer(make_table([value]), np.uint8)
        self.checksum = checksum_table(table.tobytes())
        self.value = value
        for i in range(self.count):
            at = i * self.length + layout.table_offset(len(_key(i)))
            self.segment.data[at : at + len(table)] = table
            at = i * self.length + layout.value_offset(len(_key(i)), self.size)
            self.segment.data[at : at + self.size] = value

    async def _open(self, capacity_bytes: int) -> None:
        self.folder = DiskFolder.open(self.path / "ssd", self.engine, marks=self.path)
        self.tier = DiskTier(
            self.folder, self.segment, capacity_bytes=capacity_bytes, clock=MonotonicClock()
        )
        await self.tier.open()
        self.tier.start()

    async def _write(self) -> None:
        """Give every object a new version, and wait until all are on the disk."""
        goal = self.tier.counts["written"] + self.count
        version = next(self._versions)
        self.headers = [
            ExtentHeader(_key(i), self.size, version, self.checksum, 1, False, 0)
            for i in range(self.count)
        ]
        for i, header in enumerate(self.headers):
            offset = i * self.length
            self.segment.wipe(offset)
            self.tier.on_wiped(offset, header.key)
            self.segment.seal(offset, header)
            self.tier.on_sealed(offset, header)
        async with asyncio.timeout(WAIT_S):
            while self.tier.counts["written"] < goal:
                await asyncio.sleep(0.001)

    async def _read(self) -> None:
        waiting = iter(enumerate(self.headers))

        async def load_some() -> None:
            for i, header in waiting:
                await self.tier.load(header, i * self.length)

        await asyncio.gather(*(load_some() for _ in range(NUM_LOADS)))

    def write(self) -> float:
        """Write all objects to the disk, and return the MB/s."""
        return self.count * self.size / MB / time_call(lambda: self.run(self._write()))

    def read(self) -> float:
        """Read all objects from the disk into memory, and return the MB/s."""
        return self.count * self.size / MB / time_call(lambda: self.run(self._read()))

    def load_one(self) -> float:
        """Return the microseconds to load one object from the disk into memory."""
        return 1e6 * time_call(lambda: self.run(self.tier.load(self.headers[0], 0)))

    def check(self) -> str:
        """Write all objects, clear the memory, read them back and compare."""
        self._fill()
        self.run(self._write())
        self.segment.data[:] = 0
        self.run(self._read())
        at = layout.value_offset(len(_key(0)), self.size)
        for i in range(self.count):
            begin = i * self.length + at
            if not np.array_equal(self.segment.data[begin : begin + self.size], self.value):
                return f"object {i} came back with other bytes"
        return "ok"

    def close(self) -> None:
        """End the tier and remove its files."""
        self.run(self.tier.aclose())
        self.folder.close()
        self.engine.close()
        self.runner.close()
        shutil.rmtree(self.path, ignore_errors=True)


class _Raw:
    """The same number of bytes moved between memory and a file by system calls alone."""

    def __init__(self, folder: Path, nbytes: int, num_threads: int) -> None:
        self.nbytes = -(-nbytes // PIECE_BYTES) * PIECE_BYTES
        self._path = folder / "raw"
        self._memory = mmap.mmap(-1, self.nbytes)
        self._memory.write(b"\xa5" * self.nbytes)
        self._threads = ThreadPoolExecutor(num_threads)
        self.piece_bytes = min(PIECE_BYTES, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)

    def _move(self, descriptor: int, *, is_write: bool) -> None:
        view = memoryview(self._memory)

        def move(at: int) -> None:
            part = view[at : at + self.piece_bytes]
            moved = (
                os.pwrite(descriptor, part, at) if is_write else os.preadv(descriptor, [part], at)
            )
            assert moved == len(part), moved

        list(self._threads.map(move, range(0, self.nbytes, self.piece_bytes)))

    def write(self) -> float:
        """Return the MB/s of writing a new file, space reserved before and synced after."""
        self._path.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT
        descriptor = os.open(self._path, flags, 0o600)

        def move() -> None:
            os.posix_fallocate(descriptor, 0, self.nbytes)
            self._move(descriptor, is_write=True)
            os.fdatasync(descriptor)

        try:
            return self.nbytes / MB / time_call(move)
        finally:
            os.close(descriptor)

    def read(self) -> float:
        """Return the MB/s of reading that file."""
        if not self._path.exists():
            self.write()
        descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECT)
        try:
            return self.nbytes / MB / time_call(lambda: self._move(descriptor, is_write=False))
        finally:
            os.close(descriptor)

    def read_one(self, nbytes: int) -> float:
        """Return the microseconds to read ``nbytes``, rounded up to pages, in one call."""
        if not self._path.exists():
            self.write()
        whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECT)
        view = memoryview(self._memory)[:whole]
        try:
            return 1e6 * time_call(lambda: os.preadv(descriptor, [view], 0))
        finally:
            os.close(descriptor)


def _key(number: int) -> str:
    return f"bench/{number:020}"


def make_cases(*, quick: bool) -> Iterator[BenchCase]:
    """Yield the cases; each folder exists as long as its cases run."""
    total_bytes = QUICK_TOTAL_BYTES if quick else TOTAL_BYTES
    for size in QUICK_SIZES if quick else SIZES:
        disk = _Disk(size, total_bytes)
        try:
            raw = _Raw(disk.path, disk.count * disk.size, NUM_THREADS)
            yield BenchCase(
                name=f"op=write size={size}",
                unit="MB/s",
                ours=disk.write,
                check=disk.check,
                ceiling=raw.write,
                higher_is_better=True,
            )
            yield BenchCase(
                name=f"op=read size={size}",
                unit="MB/s",
                ours=disk.read,
                check=disk.check,
                ceiling=raw.read,
                higher_is_better=True,
            )
            yield BenchCase(
                name=f"op=load size={size}",
                unit="us",
                ours=disk.load_one,
                check=disk.check,
                ceiling=lambda raw=raw, size=size: raw.read_one(size),
            )
        finally:
            disk.close()

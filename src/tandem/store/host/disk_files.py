"""The folder of an SSD tier: bucket files by the transfer engine's file transport, and notes.

The folder belongs to one host (0700, locked); its files are 0600 and are opened without following
links. Buckets bypass the page cache if the file system supports O_DIRECT. Notes are small files,
written in a thread. Format: docs/design/store/store_ssd.md.
"""

import asyncio
import logging
import os
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tandem.core.errors import (
    CapacityError,
)
from tandem.store.corruption_log import CorruptionLog
from tandem.store.host.disk_io import DiskBuffer
from tandem.store.host.disk_marks import LOCK_NAME, SUFFIX, explained, lock_folder, open_own_file
from tandem.store.host.segment_file import check_folder
from tandem.store.tasks import in_thread
from tandem.transfer import Buffer, FileSegment, Op, Transfer, TransferEngine

__all__ = ["DiskFolder"]

logger = logging.getLogger(__name__)

QUARANTINED = "bucket.quarantined"
"""Name of the quarantined bucket. There is one at most: the next corrupt bucket replaces it, so
that a failing disk is not filled by quarantined files.
"""
BELIEVED = ".ssd-believed"
MAX_OPEN = 64
"""Limit of open bucket files, two descriptors each."""
IO_TIMEOUT_S = 600.0
"""Seconds, longer than the tier waits for any operation. A transfer that is ended early would wait
for the disk anyway.
"""
PAGE = 4096


class _FileBuffer:
    """Page-aligned memory that is registered with the transfer engine."""

    def __init__(self, engine: TransferEngine, nbytes: int) -> None:
        whole = np.empty(nbytes + PAGE, np.uint8)
        begin = -whole.ctypes.data % PAGE
        self.array: npt.NDArray[np.uint8] = whole[begin : begin + nbytes]
        self.handle: Buffer = engine.register(self.array, remote=False)


class _OpenBucket:
    def __init__(self, segment: FileSegment) -> None:
        self.segment = segment
        self.users = 0
        self.is_stale = False


class _OpenBuckets:
    """The bucket files that are open, a limited number, by the transfer engine's file transport.

    Args:
        engine: opens the files; borrowed.
        find_path: returns the path of a bucket by its number.
    """

    def __init__(self, engine: TransferEngine, find_path: Callable[[int], Path]) -> None:
        self._engine = engine
        self._find_path = find_path
        self._opened: OrderedDict[int, _OpenBucket] = OrderedDict()
        self._is_direct_told = False

    @asynccontextmanager
    async def use(self, number: int) -> AsyncGenerator[FileSegment]:
        """Provide a bucket, which stays open while the context lasts."""
        opened = self._opened.get(number)
        if opened is None:
            segment = await asyncio.to_thread(self._open, number)
            opened = self._opened.get(number)
            if opened is None:
                opened = self._opened[number] = _OpenBucket(segment)
            else:
                segment.close()  # Another task has opened it meanwhile.
        self._opened.move_to_end(number)
        opened.users += 1
        if len(self._opened) > MAX_OPEN:
            idle = next((n for n, other in self._opened.items() if not other.users), None)
            if idle is not None:
                self.forget(idle)
        try:
            yield opened.segment
        finally:
            opened.users -= 1
            self._close_unused(opened)

    def forget(self, number: int) -> None:
        """Close a bucket, after the last running operation."""
        opened = self._opened.pop(number, None)
        if opened is not None:
            opened.is_stale = True
            self._close_unused(opened)

    def close(self) -> None:
        """Close all buckets."""
        for number in list(self._opened):
            self.forget(number)

    def _close_unused(self, opened: _OpenBucket) -> None:
        if opened.is_stale and not opened.users and not self._engine.is_closed:
            opened.segment.close()

    def _open(self, number: int) -> FileSegment:
        path = self._find_path(number)
        with explained(path):
            descriptor = open_own_file(path, os.O_RDWR)
        try:
            # Open the bucket by its descriptor, so that the engine opens the same file that
            # ``open_own_file`` checked.
            own = f"/proc/self/fd/{descriptor}"
            segment = self._engine.open_file(own, writable=True, direct=True)
        finally:
            os.close(descriptor)
        if not self._is_direct_told:
            self._is_direct_told = True
            logger.info(
                "event=disk_io direct=%s refusals=%s", segment.is_direct, segment.refusals or "none"
            )
        return segment


class DiskFolder:
    """The ``DiskPort`` of a real disk. Made by ``open``. The engine is borrowed."""

    def __init__(
        self, path: Path, descriptor: int, folder_id: bytes, engine: TransferEngine, mark: Path
    ) -> None:
        self.path = path
        self.folder_id = folder_id
        self._descriptor = descriptor
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._engine = engine
        self.corruption = CorruptionLog()
        """Corruption found in the folder's own note."""
        self._mark = mark
        self._buckets = _OpenBuckets(engine, self._bucket)

    @classmethod
    def open(cls, path: Path, engine: TransferEngine, *, marks: Path) -> "DiskFolder":
        """Lock a folder for this host, and create it if it is missing. Blocks.

        Args:
            path: absolute path of the folder.
            engine: moves the bytes.
            marks: a folder on another disk. A file there that is named by the folder's id condemns
                the content: the buckets are removed before the folder is used.

        Raises: ConflictError (a live host has it; it is no such folder); PermissionDeniedError
            (folder or file open to others, or a link); UnsupportedError (a later version).
        """
        check_folder(path)
        descriptor = open_own_file(path / LOCK_NAME, os.O_RDWR | os.O_CREAT)
        try:
            corruption = CorruptionLog()
            folder_id = lock_folder(path, descriptor, corruption)
            mark = marks / f"{folder_id.hex()}.ssd-condemned"
            # ``condemn`` renames this file to the mark that makes the folder's content invalid,
            # because a rename needs neither a free descriptor nor space.
            with suppress(OSError):  # ``condemn`` tries again.
                mark.with_suffix(BELIEVED).touch(mode=0o600)
            folder = cls(path, descriptor, folder_id, engine, mark)
            folder.corruption = corruption
        except BaseException:
            os.close(descriptor)
            raise
        if mark.exists():
            logger.warning("event=disk_emptied path=%s", path)
            for file in [*path.glob(f"*{SUFFIX}"), *path.glob("*.index")]:
                file.unlink()
            mark.unlink()
        for draft in path.glob("*.draft"):
            draft.unlink()
        return folder

    def close(self) -> None:
        """Close all files and unlock the folder. No operation may be running."""
        self._buckets.close()
        if self._descriptor >= 0:
            self._mark.with_suffix(BELIEVED).unlink(missing_ok=True)
            os.close(self._folder)
            os.close(self._descriptor)
            self._descriptor = -1

    # The methods below create, read, write and remove bucket files.

    def make_buffer(self, nbytes: int) -> DiskBuffer:
        """Make page-aligned memory and register it with the engine."""
        return _FileBuffer(self._engine, nbytes)

    @in_thread
    def list_buckets(self) -> list[tuple[int, int]]:
        """Return (number, bytes) of each bucket file. Files of other names are ignored."""
        found: list[tuple[int, int]] = []
        for file in self.path.glob(f"*{SUFFIX}"):
            try:
                number = int(file.stem, 16)
            except ValueError:
                continue
            found.append((number, file.lstat().st_size))
        return found

    @in_thread
    def make_bucket(self, number: int, nbytes: int) -> None:
        """Create a bucket (a file for many objects) of ``nbytes``, reserve its space, and sync the
        folder.
        """
        path = self._bucket(number)
        with explained(path):
            descriptor = open_own_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                self._reserve(descriptor, nbytes)
                os.fsync(self._folder)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)

    def _reserve(self, descriptor: int, nbytes: int) -> None:
        os.posix_fallocate(descriptor, 0, nbytes)

    async def write(self, number: int, at: int, buffer: DiskBuffer, nbytes: int) -> None:
        """Write the first ``nbytes`` of ``buffer`` to a bucket (a file of many objects) at offset
        ``at``, by the transfer engine.
        """
        await self._move(Op.WRITE, number, at, buffer, nbytes)

    async def read(self, number: int, at: int, buffer: DiskBuffer, nbytes: int) -> None:
        """Read ``nbytes`` of a bucket (a file of many objects) from offset ``at`` on into
        ``buffer``, by the transfer engine.
        """
        await self._move(Op.READ, number, at, buffer, nbytes)

    async def _move(self, op: Op, number: int, at: int, buffer: DiskBuffer, nbytes: int) -> None:
        assert isinstance(buffer, _FileBuffer)
        async with self._buckets.use(number) as segment:
            transfer = Transfer(op, buffer.handle, segment, at, nbytes)
            await self._engine.submit([transfer], deadline_s=IO_TIMEOUT_S)

    async def sync(self, number: int) -> None:
        """Sync a bucket file to the disk, in a thread."""
        async with self._buckets.use(number) as segment:
            await asyncio.to_thread(segment.sync)

    async def cut_bucket(self, number: int, nbytes: int) -> None:
        """Truncate a bucket file, and close it, since the transfer engine knows an open file by its
        old length.
        """
        await asyncio.to_thread(self._cut_bucket, number, nbytes)
        self._buckets.forget(number)  # An open segment has the old length.

    def _cut_bucket(self, number: int, nbytes: int) -> None:
        path = self._bucket(number)
        with explained(path):
            descriptor = open_own_file(path, os.O_RDWR)
            try:
                os.ftruncate(descriptor, nbytes)
            finally:
                os.close(descriptor)

    async def drop_bucket(self, number: int) -> None:
        """Remove a bucket file. It is closed after the last running operation."""
        self._buckets.forget(number)
        await asyncio.to_thread(self._unlink, self._bucket(number))

    async def quarantine_bucket(self, number: int) -> None:
        """Rename a corrupt bucket file to ``QUARANTINED``, in place of an earlier one, so that it
        is not read again.
        """
        self._buckets.forget(number)
        path = self._bucket(number)
        with explained(path):
            await asyncio.to_thread(path.rename, self.path / QUARANTINED)

    def _bucket(self, number: int) -> Path:
        return self.path / f"{number:016x}{SUFFIX}"

    # The methods below read and write notes, which are small files.

    @in_thread
    def read_note(self, name: str) -> bytes:
        """Read a small file; empty if it is missing."""
        path = self.path / name
        with explained(path):
            try:
                descriptor = open_own_file(path, os.O_RDONLY)
            except FileNotFoundError:
                return b""
            with os.fdopen(descriptor, "rb") as file:
                return file.read()

    @in_thread
    def write_note(self, name: str, data: bytes) -> None:
        """Replace a small file atomically: write a draft, sync it, rename it, sync the folder."""
        path, draft = self.path / name, self.path / f"{name}.draft"
        with explained(path):
            descriptor = open_own_file(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
            os.fsync(self._folder)

    @in_thread
    def append_note(self, name: str, data: bytes) -> None:
        """Append to a small file and sync it. A partial append is undone."""
        path = self.path / name
        with explained(path):
            is_new = not path.exists()
            descriptor = open_own_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                before = os.fstat(descriptor).st_size
                if os.write(descriptor, data) != len(data):
                    os.ftruncate(descriptor, before)
                    raise CapacityError("store.disk", f"{path}: no room for {len(data)} bytes")
                os.fdatasync(descriptor)
                if is_new:
                    os.fsync(self._folder)
            finally:
                os.close(descriptor)

    @in_thread
    def drop_note(self, name: str) -> None:
        """Remove a small file if it exists."""
        self._unlink(self.path / name)

    def _unlink(self, path: Path) -> None:
        with explained(path):
            path.unlink(missing_ok=True)

    def condemn(self) -> None:
        """Leave a file on another disk that says that this folder's content must not be used after
        a restart.
        """
        try:
            self._mark.with_suffix(BELIEVED).rename(self._mark)
        except FileNotFoundError:  # The mark was removed or renamed already.
            self._mark.touch(mode=0o600)

"""A file of rows of equal size, written through the page cache and read past it.

The file has no name in its folder from the beginning, so that it ends with the process, however
that ends. Its length is reserved on the disk at once, so that a full disk is found at the start.
What was written is not kept in the page cache for long. No row crosses a page of the disk, unless
the padding for that would be too much of the file: a single row is read with one page.
"""

import contextlib
import errno
import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tandem._native import DirectReader
from tandem.core.errors import CapacityError, ConfigError, DeadlineError, InternalError, TandemError
from tandem.kernels.latents.pages import PAGE_BYTES, count_file_bytes, count_page_rows

__all__ = ["STAGING_BYTES", "RowFile", "open_unnamed"]

STAGING_BYTES = 8 << 20
"""Size in bytes of the memory that whole pages of the disk are read into, before the wanted rows
are copied out.
"""
READ_TIMEOUT_MS = 30_000
"""Timeout of a read in milliseconds, longer than a disk takes to retry a bad sector."""
DEPTH = 64
"""Number of reads that are given to the disk at a time: they are small and scattered."""
DROP_BYTES = 64 << 20
"""Bytes written between two requests to the system to drop the file's pages from memory."""
FIELD = "engine.latents_folder"


class RowFile:
    """Rows of equal size in a file without a name, in a folder of the disk."""

    def __init__(self, folder: Path, num_rows: int, row_bytes: int) -> None:
        self._folder = folder
        self._row_bytes = row_bytes
        self._page_rows = count_page_rows(row_bytes)
        self._staging_bytes = max(STAGING_BYTES, DirectReader.count_span(PAGE_BYTES - 1, row_bytes))
        self._reader = DirectReader(self._staging_bytes, depth=DEPTH)
        staging = self._reader.array()
        shape = (len(staging) - row_bytes + 1, row_bytes)
        self._windows = np.lib.stride_tricks.as_strided(staging, shape, (1, 1), writeable=False)
        """View of the staging memory in which row i is the ``row_bytes`` bytes that begin at byte
        i.
        """
        size_bytes = count_file_bytes(num_rows, row_bytes)
        self._descriptor, self._file = _create(folder, size_bytes, self._reader)
        weakref.finalize(self, os.close, self._descriptor)
        self._pending: list[int] = []
        """Reads that were given up and may still write to the staging memory."""
        self._num_undropped = 0
        self.failure: TandemError | None = None
        """Error of the last ``read``, if it could not read some row."""
        self.written_bytes = 0
        """Bytes of all rows written."""
        self.read_bytes = 0
        """Bytes that reads brought from the disk, whole pages."""

    def write(self, rows: NDArray[np.int64], data: NDArray[np.uint8]) -> None:
        """Write rows, uint8 [n, row_bytes], to their numbers, which ascend.

        Raises: InternalError (the disk fails).
        """
        begins = self._find_bytes(rows)
        for first, end in _split_runs(rows[1:] != rows[:-1] + 1, len(rows)):
            left, at = self._join_rows(begins[first:end], data[first:end]), int(begins[first])
            while left:
                try:
                    count = os.pwrite(self._descriptor, left, at)
                except OSError as error:
                    what = f"{len(left)} bytes of latents to {self._folder}: {error.strerror}"
                    raise InternalError("kernels.write_latents", what) from error
                left, at = left[count:], at + count
        self.written_bytes += data.nbytes
        self._num_undropped += data.nbytes
        if self._num_undropped >= DROP_BYTES:
            self._num_undropped = 0
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Read rows, whose numbers ascend, into uint8 [n, row_bytes].

        Returns: indices of rows that could not be read, with the error in ``failure``; what ``out``
            has there is unspecified.

        Raises: DeadlineError (an earlier read is still pending).
        """
        self._end_pending()
        self.failure = None
        begins = self._find_bytes(rows)
        pages, last_pages = begins // PAGE_BYTES, (begins + self._row_bytes - 1) // PAGE_BYTES
        runs = _split_runs(pages[1:] > last_pages[:-1] + 1, len(rows))
        failed: list[NDArray[np.int64]] = []
        batch: list[tuple[int, int, int]] = []
        """Parts of runs that fit the staging memory together: first row, end, place."""
        used = 0
        for first, end in runs:
            while first < end:
                # Take as many rows of the run as there is room for.
                room = int(pages[first]) + (self._staging_bytes - used) // PAGE_BYTES
                stop = first + int(np.searchsorted(last_pages[first:end], room))
                if stop == first:
                    failed += self._read_batch(batch, begins, out)
                    batch, used = [], 0
                    continue
                batch.append((first, stop, used))
                used += (int(last_pages[stop - 1]) + 1 - int(pages[first])) * PAGE_BYTES
                first = stop
        failed += self._read_batch(batch, begins, out)
        return np.concatenate(failed) if failed else np.empty(0, np.int64)

    def _read_batch(
        self,
        batch: Sequence[tuple[int, int, int]],
        begins: NDArray[np.int64],
        out: NDArray[np.uint8],
    ) -> list[NDArray[np.int64]]:
        """Read the disk's pages that hold a batch of rows, and copy the rows out; return the rows
        of those reads that failed.
        """
        if not batch:
            return []
        if self._pending:
            # A read of an earlier batch was given up, and may still write to the staging memory:
            # read nothing into it, and return all rows of this batch as failed.
            return [np.arange(batch[0][0], batch[-1][1])]
        reader, size = self._reader, self._row_bytes
        reads: list[int | None] = []
        for first, end, at in batch:
            offset = int(begins[first])
            try:
                length = int(begins[end - 1]) + size - offset
                reads.append(reader.begin(self._file, offset, length, at))
            except TandemError as error:
                self.failure = self._explain(error)
                reads.append(None)
        failed: list[NDArray[np.int64]] = []
        addresses: list[NDArray[np.int64]] = []
        for (first, end, at), read in zip(batch, reads, strict=True):
            addresses.append(begins[first:end] - int(begins[first]) // PAGE_BYTES * PAGE_BYTES + at)
            if read is None or not self._finish(read):
                failed.append(np.arange(first, end))
        # The reader's count of bytes is copied here: other threads ask for it, and asking the
        # reader would make them wait while a read is in progress.
        self.read_bytes = reader.bytes_read
        first, last = batch[0][0], batch[-1][1]
        out[first:last] = self._windows[np.concatenate(addresses)]
        return failed

    def _finish(self, read: int) -> bool:
        """Wait for a read to end; return False if it failed."""
        try:
            self._reader.finish(read, 0 if self._pending else READ_TIMEOUT_MS)
        except DeadlineError as error:
            self._pending.append(read)
            self.failure = self._explain(error)
            return False
        except TandemError as error:
            self.failure = self._explain(error)
            return False
        return True

    def _explain(self, error: TandemError) -> TandemError:
        """Return an error of the reader, whose file has no name, with the folder in its place."""
        what = f"latents in {self._folder}: {error.what}"
        return type(error)("kernels.read_latents", what)

    def _end_pending(self) -> None:
        """Check that all reads that were given up have ended, without waiting. Raises:
        DeadlineError (one has not).
        """
        while self._pending:
            if not self._reader.is_done(self._pending[-1]):
                what = "reads that were given up have not ended: the disk does not answer"
                raise DeadlineError("kernels.read_latents", what)
            with contextlib.suppress(TandemError):
                self._reader.finish(self._pending[-1], 0)
            self._pending.pop()

    def _find_bytes(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the bytes of the file at which rows begin."""
        if not self._page_rows:
            return rows * self._row_bytes
        pages, places = np.divmod(rows, self._page_rows)
        return pages * PAGE_BYTES + places * self._row_bytes

    def _join_rows(self, begins: NDArray[np.int64], data: NDArray[np.uint8]) -> memoryview:
        """Return rows that follow each other as the bytes of the file, with the padding between.

        The padding behind a page's last row is added, because the system first reads a page of
        which only a part is written.
        """
        if not self._page_rows:
            return data.data.cast("B")
        size, begin = self._row_bytes, int(begins[0])
        end = int(begins[-1]) + size
        if end % PAGE_BYTES == self._page_rows * size % PAGE_BYTES:
            end = -(-end // PAGE_BYTES) * PAGE_BYTES
        joined = np.zeros(end - begin, np.uint8)
        shape = (end - begin - size + 1, size)
        np.lib.stride_tricks.as_strided(joined, shape, (1, 1))[begins - begin] = data
        return joined.data


def open_unnamed(folder: Path) -> int:
    """Open a new file that has no name in its folder; return its descriptor.

    Raises: ConfigError (no such folder, or none that may be written).
    """
    try:
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
                raise
        # A file system without such files, such as NFS.
        descriptor, path = tempfile.mkstemp(prefix="tandem-latents-", dir=folder)
        os.unlink(path)
    except OSError as error:
        what = f"no file can be made in the folder {folder}: {error.strerror}"
        raise ConfigError("kernels.create_latents", what, field=FIELD) from error
    return descriptor


def _create(folder: Path, size_bytes: int, reader: DirectReader) -> tuple[int, int]:
    """Create a file that only its descriptor and the reader hold; return both of its numbers."""
    descriptor = open_unnamed(folder)
    try:
        _reserve(descriptor, folder, size_bytes)
        return descriptor, reader.add_file(f"/proc/self/fd/{descriptor}", may_change=True)
    except TandemError:
        os.close(descriptor)
        raise


def _reserve(descriptor: int, folder: Path, size_bytes: int) -> None:
    """Give a file its length, on the disk too. Raises: CapacityError."""
    disk = os.fstatvfs(descriptor)
    free_bytes = disk.f_bavail * disk.f_frsize
    reason = f"{free_bytes >> 20} MiB are free"
    if free_bytes >= size_bytes:
        # Ask only for what is there: until the call fails, it takes what other programs need.
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
        else:
            return
    what = f"{size_bytes >> 20} MiB of latents in {folder}: {reason}: lower engine.num_kv_blocks"
    raise CapacityError("kernels.create_latents", what, field=FIELD)


def _split_runs(is_gap: NDArray[np.bool_], count: int) -> list[tuple[int, int]]:
    """Return (first, end) of the runs of ``count`` items, given where one does not continue."""
    if not count:
        return []
    ends = [*(np.flatnonzero(is_gap) + 1).tolist(), count]
    return list(zip([0, *ends[:-1]], ends, strict=True))

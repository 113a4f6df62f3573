"""Files and batches on disk: of limited size, each readable by its own key only, kept over
restarts.

The folder has ``files/ID`` with a file's content, and ``files/ID.json`` and ``batches/ID.json``
with records, which are replaced atomically. All of it counts in the limit, in whole blocks as on a
disk, as do uploads that have not ended; what has ended long ago is deleted. The output of a batch
is a file that grows by a line for each request, so that after a restart it goes on after the last
complete line. If the disk is full, nothing changes, and what was begun is undone. All methods but
``reserve`` and those of ``Upload`` block; calls may come from any thread.
"""

import errno
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Self

import msgspec

from tandem.core.errors import CapacityError, ConflictError, NotFoundError
from tandem.server.protocol.batches import Batch, FileObject

__all__ = ["BatchStore", "KeptBatch", "KeptFile", "Upload"]

_COPY_BYTES = 1 << 20
_BLOCK_BYTES = 4096
"""Size in which files take room on a disk, the smallest as well."""
_GROWTH_BYTES = 2048
"""Bytes that a new record counts beside its content, for what a batch's end adds: times, counts,
ids and one error."""
MAX_FILES = MAX_BATCHES = 10_000
"""Numbers of files and of batches that are kept."""


class KeptFile(msgspec.Struct):
    """A file's record, with the digest of the key that owns it, hex."""

    owner: str
    file: FileObject


class KeptBatch(msgspec.Struct):
    """A batch's record, with the digest of the key that owns it, hex."""

    owner: str
    batch: Batch

    @property
    def is_over(self) -> bool:
        """True once the batch does not change any more."""
        return self.batch.status in ("completed", "failed", "expired", "cancelled")

    @property
    def ended_at(self) -> int:
        """Time at which the batch ended, in seconds since 1970."""
        batch = self.batch
        ends = (batch.completed_at, batch.failed_at, batch.expired_at, batch.cancelled_at)
        return max((each for each in ends if each is not None), default=batch.created_at)

    @property
    def file_ids(self) -> set[str | None]:
        """Ids of the batch's files."""
        return {self.batch.input_file_id, self.batch.output_file_id, self.batch.error_file_id}

    def needs(self, file_id: str) -> bool:
        """Return True if the batch has not ended and has this file."""
        return not self.is_over and file_id in self.file_ids


class Upload:
    """Room for a file that is arriving. A context manager that gives back what was not used. No
    method blocks.
    """

    def __init__(self, store: "BatchStore") -> None:
        self._store = store
        self._num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.reserve(-self._num_bytes)

    def add(self, num_bytes: int) -> None:
        """Reserve room for bytes that have come. Raises: CapacityError (there is none)."""
        self._store.reserve(num_bytes)
        self._num_bytes += num_bytes

    def take(self, num_bytes: int) -> None:
        """Hand over reserved room to the file that the bytes are copied to."""
        given = min(num_bytes, self._num_bytes)
        self._num_bytes -= given
        self._store.reserve(num_bytes - given)


class BatchStore:
    """The files and batches in a folder.

    Args:
        folder: folder to use; created if it does not exist.
        max_bytes: limit of the bytes of all files and records together.

    Raises:
        OSError: the folder cannot be used.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._files_folder, self._batches_folder = folder / "files", folder / "batches"
        for each in (self._files_folder, self._batches_folder):
            each.mkdir(parents=True, exist_ok=True)
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        self._count_lock = threading.Lock()  # Never held while the disk is asked.
        self._record_bytes: dict[str, int] = {}
        """Bytes that the record of a file or batch counts, by id."""
        self._files: dict[str, KeptFile] = {}
        self._batches: dict[str, KeptBatch] = {}
        for draft in (*self._files_folder.glob("*.new"), *self._batches_folder.glob("*.new")):
            draft.unlink()
        for path in self._files_folder.iterdir():
            if path.suffix != ".json" and not path.with_suffix(".json").exists():
                # A content file without its .json is an upload that a crash interrupted: no client
                # was told its id.
                path.unlink()
        for path in self._files_folder.glob("*.json"):
            kept = msgspec.json.decode(path.read_bytes(), type=KeptFile)
            content = self._files_folder / kept.file.id
            if content.exists():
                kept.file.bytes = content.stat().st_size
                self._files[kept.file.id] = kept
                self._record_bytes[kept.file.id] = _measure(kept)
        for path in self._batches_folder.glob("*.json"):
            kept_batch = msgspec.json.decode(path.read_bytes(), type=KeptBatch)
            self._batches[kept_batch.batch.id] = kept_batch
            self._record_bytes[kept_batch.batch.id] = _measure(kept_batch)
        self._num_bytes = sum(_round_up(kept.file.bytes) for kept in self._files.values())
        self._num_bytes += sum(self._record_bytes.values())

    # The methods from here to ``put_batch`` manage uploaded files and result files.

    def add_file(
        self,
        owner: str,
        name: str,
        purpose: str,
        content: BinaryIO | None,
        created_at: int,
        upload: Upload | None = None,
    ) -> FileObject:
        """Store a file; without content, it is empty and grows by ``append``.

        Args:
            owner: digest of the key that owns it, hex.
            name: name that the client gave it.
            purpose: purpose that the client gave it.
            content: its bytes.
            created_at: time in seconds since 1970.
            upload: room that the content has already; None: none.

        Raises:
            CapacityError: there is no room for it.
        """
        if len(self._files) >= MAX_FILES:
            raise _no_room(f"{MAX_FILES} files are kept")
        file = FileObject(
            id=f"file-{uuid.uuid4().hex}",
            bytes=0,
            created_at=created_at,
            filename=name,
            purpose=purpose,
        )
        path = self._files_folder / file.id
        kept = KeptFile(owner, file)
        num_reserved = 0
        try:
            with _name_full_disk(), path.open("wb") as out:
                while content is not None and (part := content.read(_COPY_BYTES)):
                    if upload is None:
                        self.reserve(len(part))
                    else:
                        upload.take(len(part))
                    num_reserved += len(part)
                    out.write(part)
            file.bytes = num_reserved
            record_bytes = _measure(kept)
            more = _round_up(file.bytes) - file.bytes + record_bytes
            self.reserve(more)
            num_reserved += more
            _replace(path.with_suffix(".json"), kept)
        except BaseException:
            path.unlink(missing_ok=True)
            self.reserve(-num_reserved)
            raise
        with self._lock:
            self._files[file.id] = kept
            self._record_bytes[file.id] = record_bytes
        return file

    def reserve(self, num_bytes: int) -> None:
        """Count bytes that are stored, or with a negative number are no more. Does not block.

        Raises: CapacityError (there is no room for them).
        """
        with self._count_lock:
            if num_bytes > 0 and self._num_bytes + num_bytes > self._max_bytes:
                raise _no_room(f"the files here may have {self._max_bytes} bytes")
            self._num_bytes += num_bytes

    def find_file(self, owner: str, file_id: str) -> FileObject:
        """Return the record of a file that belongs to a key.

        Raises: NotFoundError (the key has no such file).
        """
        with self._lock:
            kept = self._files.get(file_id)
            if kept is None or kept.owner != owner:
                what = f"there is no file {file_id[:100]!r}"
                raise NotFoundError("server.files", what, field="file_id")
            return kept.file

    def list_files(self, owner: str) -> list[FileObject]:
        """Return the records of the files that belong to a key, newest first."""
        with self._lock:
            found = [kept.file for kept in self._files.values() if kept.owner == owner]
        return sorted(found, key=lambda file: (-file.created_at, file.id))

    def delete_file(self, owner: str, file_id: str) -> None:
        """Delete a file that belongs to a key.

        Raises: NotFoundError (the key has no such file); ConflictError (a batch needs it).
        """
        with self._lock:
            file = self.find_file(owner, file_id)
            for kept in self._batches.values():
                if kept.needs(file_id):
                    what = f"batch {kept.batch.id} needs the file: cancel it first"
                    raise ConflictError("server.files", what, field="file_id")
            self._drop_file(file)

    def _drop_file(self, file: FileObject) -> None:
        del self._files[file.id]
        self.reserve(-_round_up(file.bytes) - self._record_bytes.pop(file.id))
        path = self._files_folder / file.id
        path.with_suffix(".json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    def find_path(self, file_id: str) -> Path:
        """Return the path of the content of a stored file."""
        return self._files_folder / file_id

    def read_lines(self, file_id: str, max_line_bytes: int | None = None) -> Iterator[bytes]:
        """Yield the lines of a file, without empty ones; one of more than ``max_line_bytes`` is cut
        one byte later.
        """
        size = -1 if max_line_bytes is None else max_line_bytes + 1
        with self.find_path(file_id).open("rb") as content:
            while line := content.readline(size):
                if line.strip():
                    yield line

    def append(self, file_id: str, line: bytes) -> None:
        """Append a line to a file.

        Raises:
            CapacityError: the limit of all files or the disk leaves no room; the file is unchanged.
        """
        path = self.find_path(file_id)
        with self._lock:
            file = self._files[file_id].file
            more = _round_up(file.bytes + len(line)) - _round_up(file.bytes)
            self.reserve(more)
            try:
                with _name_full_disk(), path.open("ab") as out:
                    out.write(line)
            except BaseException:
                # The failed write may have appended part of the line. Truncate the file, or the
                # next line would be appended to that part.
                with suppress(OSError):
                    os.truncate(path, file.bytes)
                self.reserve(-more)
                raise
            file.bytes += len(line)

    def repair(self, file_id: str) -> None:
        """Truncate a file after its last complete line."""
        with self._lock, self.find_path(file_id).open("rb+") as content:
            end = content.seek(0, os.SEEK_END)
            while end:
                begin = max(end - _COPY_BYTES, 0)
                content.seek(begin)
                found = content.read(end - begin).rfind(b"\n")
                if found >= 0:
                    end = begin + found + 1
                    break
                end = begin
            content.truncate(end)
            file = self._files[file_id].file
            self.reserve(_round_up(end) - _round_up(file.bytes))
            file.bytes = end

    # The methods below manage the records of batches.

    def put_batch(self, kept: KeptBatch) -> None:
        """Store the present state of a batch.

        Raises:
            CapacityError: the disk is full, or there is no room for another batch, or for more of a
                known one than the end of every batch adds. A batch that is known already has its
                new state in memory; after a restart it has the state that was last written.
        """
        with self._lock:
            batch_id = kept.batch.id
            if batch_id in self._batches:
                old_bytes = self._record_bytes[batch_id]
                record_bytes = max(old_bytes, _measure(kept, 0))
            else:
                if len(self._batches) >= MAX_BATCHES:
                    raise _no_room(f"{MAX_BATCHES} batches are kept")
                old_bytes, record_bytes = 0, _measure(kept)
            self.reserve(record_bytes - old_bytes)
            try:
                _replace(self._batches_folder / f"{batch_id}.json", kept)
            except BaseException:
                self.reserve(old_bytes - record_bytes)
                raise
            self._record_bytes[batch_id] = record_bytes
            self._batches[batch_id] = kept

    def delete_batch(self, owner: str, batch_id: str) -> None:
        """Forget a batch that belongs to a key; its files stay.

        Raises: NotFoundError (the key has no such batch); ConflictError (it has not ended).
        """
        with self._lock:
            kept = self.find_batch(owner, batch_id)
            if not kept.is_over:
                what = f"batch {batch_id} is {kept.batch.status}: cancel it first"
                raise ConflictError("server.batches", what, field="batch_id")
            self._drop_batch(batch_id)

    def _drop_batch(self, batch_id: str) -> None:
        del self._batches[batch_id]
        self.reserve(-self._record_bytes.pop(batch_id))
        (self._batches_folder / f"{batch_id}.json").unlink(missing_ok=True)

    def delete_old(self, before: int) -> None:
        """Forget the batches that ended before a time in seconds since 1970, and the files that
        were made before it and that no batch needs.
        """
        with self._lock:
            for batch_id, kept in list(self._batches.items()):
                if kept.is_over and kept.ended_at < before:
                    self._drop_batch(batch_id)
            needed = {each for kept in self._batches.values() for each in kept.file_ids}
            for file_id, kept in list(self._files.items()):
                if kept.file.created_at < before and file_id not in needed:
                    self._drop_file(kept.file)

    def find_batch(self, owner: str, batch_id: str) -> KeptBatch:
        """Return a batch that belongs to a key.

        Raises: NotFoundError (the key has no such batch).
        """
        with self._lock:
            kept = self._batches.get(batch_id)
            if kept is None or kept.owner != owner:
                what = f"there is no batch {batch_id[:100]!r}"
                raise NotFoundError("server.batches", what, field="batch_id")
            return kept

    def list_batches(self, owner: str | None = None) -> list[KeptBatch]:
        """Return the batches that belong to a key, or to all keys; newest first."""
        with self._lock:
            found = [k for k in self._batches.values() if owner is None or k.owner == owner]
        return sorted(found, key=lambda kept: (-kept.batch.created_at, kept.batch.id))


def _measure(record: msgspec.Struct, growth_bytes: int = _GROWTH_BYTES) -> int:
    return _round_up(len(msgspec.json.encode(record)) + growth_bytes)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


def _no_room(what: str) -> CapacityError:
    return CapacityError(
        "server.files", f"{what} (server.batch_bytes): delete some that are not needed"
    )


def _replace(path: Path, document: msgspec.Struct) -> None:
    """Write a file atomically: after a crash it is either the old one or the new one.

    Raises:
        CapacityError: the disk is full; the old file is unchanged.
    """
    draft = path.with_suffix(".new")
    try:
        with _name_full_disk(), draft.open("wb") as out:
            out.write(msgspec.json.encode(document))
            out.flush()
            # Without fsync a crash could leave the new file's name on disk without its content.
            os.fsync(out.fileno())
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    draft.replace(path)


@contextmanager
def _name_full_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        what = "the disk is full (server.batch_folder): delete files that are not needed"
        raise CapacityError("server.files", what) from error

"""Files and batches on disk: of limited size, each readable by its own key only, kept over
restarts.

The folder has ``files/ID`` with a file's content, and ``files/ID.json`` and ``batches/ID.json``
with records, which are replaced atomically. The output of a batch is a file that grows by a line
for each request, so that after a restart it goes on after the last complete line. If the disk is
full, nothing changes, and what was begun is undone. All methods block; calls may come from any
thread.
"""

import errno
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from tandem.core.errors import CapacityError, NotFoundError
from tandem.server.protocol.batches import Batch, FileObject

__all__ = ["BatchStore", "KeptBatch", "KeptFile"]

_COPY_BYTES = 1 << 20


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


class BatchStore:
    """The files and batches in a folder.

    Args:
        folder: folder to use; created if it does not exist.
        max_bytes: limit of the bytes of all files together.

    Raises:
        OSError: the folder cannot be used.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._files_folder, self._batches_folder = folder / "files", folder / "batches"
        for each in (self._files_folder, self._batches_folder):
            each.mkdir(parents=True, exist_ok=True)
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
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
        for path in self._batches_folder.glob("*.json"):
            kept_batch = msgspec.json.decode(path.read_bytes(), type=KeptBatch)
            self._batches[kept_batch.batch.id] = kept_batch
        self._num_bytes = sum(kept.file.bytes for kept in self._files.values())

    # The methods from here to ``put_batch`` manage uploaded files and result files.

    def add_file(
        self, owner: str, name: str, purpose: str, content: BinaryIO | None, created_at: int
    ) -> FileObject:
        """Store a file; without content, it is empty and grows by ``append``.

        Raises:
            CapacityError: there is no room for it.
        """
        file = FileObject(
            id=f"file-{uuid.uuid4().hex}",
            bytes=0,
            created_at=created_at,
            filename=name,
            purpose=purpose,
        )
        path = self._files_folder / file.id
        kept = KeptFile(owner, file)
        try:
            with _name_full_disk(), path.open("wb") as out:
                while content is not None and (part := content.read(_COPY_BYTES)):
                    self._reserve(len(part))
                    file.bytes += len(part)
                    out.write(part)
            _replace(path.with_suffix(".json"), kept)
        except BaseException:
            path.unlink(missing_ok=True)
            self._reserve(-file.bytes)
            raise
        with self._lock:
            self._files[file.id] = kept
        return file

    def _reserve(self, num_bytes: int) -> None:
        with self._lock:
            if num_bytes > 0 and self._num_bytes + num_bytes > self._max_bytes:
                what = (
                    f"the files here may have {self._max_bytes} bytes (server.batch_bytes): delete "
                    "some that are not needed"
                )
                raise CapacityError("server.files", what)
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
        """Delete a file that belongs to a key. Raises: NotFoundError (the key has no such file)."""
        with self._lock:
            file = self.find_file(owner, file_id)
            del self._files[file_id]
            self._num_bytes -= file.bytes
            path = self._files_folder / file_id
            path.with_suffix(".json").unlink(missing_ok=True)
            path.unlink(missing_ok=True)

    def find_path(self, file_id: str) -> Path:
        """Return the path of the content of a stored file."""
        return self._files_folder / file_id

    def read_lines(self, file_id: str, max_line_bytes: int) -> Iterator[bytes]:
        """Yield the lines of a file, without empty ones; a longer line is cut after
        ``max_line_bytes``.
        """
        with self.find_path(file_id).open("rb") as content:
            while line := content.readline(max_line_bytes + 1):
                if line.strip():
                    yield line

    def append(self, file_id: str, line: bytes) -> None:
        """Append a line to a file.

        Raises:
            CapacityError: the limit of all files or the disk leaves no room; the file is unchanged.
        """
        self._reserve(len(line))
        path = self.find_path(file_id)
        with self._lock:
            file = self._files[file_id].file
            try:
                with _name_full_disk(), path.open("ab") as out:
                    out.write(line)
            except BaseException:
                # The failed write may have appended part of the line. Truncate the file, or the
                # next line would be appended to that part.
                with suppress(OSError):
                    os.truncate(path, file.bytes)
                self._reserve(-len(line))
                raise
            file.bytes += len(line)

    def repair(self, file_id: str) -> list[bytes]:
        """Truncate a file after its last complete line; return its lines."""
        with self._lock, self.find_path(file_id).open("rb+") as content:
            whole = content.read()
            end = whole.rfind(b"\n") + 1
            content.truncate(end)
            self._files[file_id].file.bytes = end
            self._num_bytes -= len(whole) - end
        return whole[:end].splitlines()

    # The methods below manage the records of batches.

    def put_batch(self, kept: KeptBatch) -> None:
        """Store the present state of a batch.

        Raises:
            CapacityError: the disk is full. A batch that is known already has its new state in
                memory; after a restart it has the state that was last written.
        """
        with self._lock:
            _replace(self._batches_folder / f"{kept.batch.id}.json", kept)
            self._batches[kept.batch.id] = kept

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

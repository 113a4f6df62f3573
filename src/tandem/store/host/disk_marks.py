"""Ownership of an SSD tier's folder: its lock, its id, and checks of the files that are opened."""

import collections
import fcntl
import os
import secrets
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tandem.core.errors import (
    CapacityError,
    ConflictError,
    CorruptionError,
    InternalError,
    NotFoundError,
    PermissionDeniedError,
    TandemError,
)
from tandem.store.corruption_log import CorruptionLog
from tandem.store.formats.bucket import FOLDER_MAGIC, ID_BYTES, parse_folder_id
from tandem.store.formats.headers import HEAD_BYTES, pack_head, parse_head

__all__ = ["LOCK_NAME", "SUFFIX", "explained", "lock_folder", "open_own_file"]

LOCK_NAME = "folder"
SUFFIX = ".bucket"


def open_own_file(path: Path, flags: int) -> int:
    """Open a file, and check that it is a regular file, not a link, owned by this user and closed
    to others. Return its descriptor.

    Raises: PermissionDeniedError if it is not such a file; OSError if it cannot be opened.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    status = os.fstat(descriptor)
    is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    if not is_ours or stat.S_IMODE(status.st_mode) & 0o077 or status.st_nlink > 1:
        os.close(descriptor)
        raise PermissionDeniedError(
            "store.disk", f"{path} must be a file of ours that nobody else can open (0600)"
        )
    return descriptor


def lock_folder(path: Path, descriptor: int, corruption: CorruptionLog) -> bytes:
    """Lock an SSD folder and return its id. A new folder gets a random id.

    Raises: ConflictError (another host has the folder, or it is not a folder of an SSD tier).
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConflictError(
            "store.disk", f"{path} belongs to a live host: give this one another store.ssd_dir"
        ) from None
    data = os.pread(descriptor, HEAD_BYTES + 1, 0)
    folder_id = None
    if data.strip(b"\0"):
        try:
            head = parse_head(data, FOLDER_MAGIC, ID_BYTES, f"{path}/{LOCK_NAME}")
        except CorruptionError as error:
            # A file of the right length is our own and corrupt, instead of another program's. The
            # heads of the buckets have the folder's id too.
            if len(data) != HEAD_BYTES:
                raise ConflictError(
                    "store.disk", f"{path}/{LOCK_NAME} is none of ours: move the folder away"
                ) from None
            corruption.note(f"note {LOCK_NAME} of the disk", error)
            _keep_copy(path / f"{LOCK_NAME}.quarantined", data)
            folder_id = _ask_buckets(path)
        else:
            folder_id = head.copies[0]
            if not head.is_damaged:
                return folder_id
            corruption.note(
                f"note {LOCK_NAME} of the disk", "a copy of it, made anew from the other"
            )
    elif any(path.glob(f"*{SUFFIX}")):
        raise ConflictError("store.disk", f"{path}/{LOCK_NAME} is empty: move the folder away")
    folder_id = secrets.token_bytes(ID_BYTES) if folder_id is None else folder_id
    os.pwrite(descriptor, pack_head(FOLDER_MAGIC, folder_id), 0)
    os.fsync(descriptor)
    return folder_id


def _ask_buckets(path: Path) -> bytes | None:
    """Return the folder id that most buckets (files of objects) in the folder name in their heads;
    None without readable buckets.
    """
    ids: collections.Counter[bytes] = collections.Counter()
    for file in path.glob(f"*{SUFFIX}"):
        descriptor = open_own_file(file, os.O_RDONLY)
        try:
            ids[parse_folder_id(os.pread(descriptor, HEAD_BYTES, 0))] += 1
        except CorruptionError:
            continue
        finally:
            os.close(descriptor)
    return ids.most_common(1)[0][0] if ids else None


def _keep_copy(path: Path, data: bytes) -> None:
    descriptor = open_own_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


@contextmanager
def explained(path: Path) -> Generator[None]:
    """Turn an OSError raised inside the context into the TandemError that fits, naming ``path``."""
    try:
        yield
    except TandemError:
        raise
    except FileNotFoundError:
        raise NotFoundError("store.disk", f"{path} is not there") from None
    except OSError as error:
        import errno

        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        kind = CapacityError if is_full else InternalError
        if isinstance(error, PermissionError):
            kind = PermissionDeniedError
        raise kind("store.disk", f"{path}: {error.strerror}") from None

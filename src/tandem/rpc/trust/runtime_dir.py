"""The folder that protects Unix sockets: mode 0700, owned by this user, no symbolic link.

A Unix socket has no password: access to its folder is the permission. So the server checks the
folder before it binds, and the client before it connects (another user's folder could hold a fake
socket).

A folder with a random name is locked by the process that made it, while that process lives. A
folder whose lock is free was left by a killed process, and is removed when the next folder is made.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path

from tandem.core.errors import (
    ConfigError,
    ConflictError,
    NotFoundError,
    PermissionDeniedError,
)
from tandem.rpc.wire.endpoint import MAX_SOCKET_PATH_BYTES

__all__ = ["check_runtime_dir", "check_socket_free", "make_runtime_dir", "secure_socket_file"]

SOCKET_NAME_BYTES = 32
"""Bytes that a runtime folder's path must leave for ``/`` and the name of a socket."""

FALLBACK_PARENT = Path("/tmp")  # noqa: S108 - the shortest writable path; the folder is checked
PROBE_TIMEOUT_S = 1.0

PREFIX = "tandem-run-"
"""Name prefix of folders with a random name, which their owners keep locked."""
PREFIX_UNLOCKED = "tandem-new-"

_locks: dict[Path, int] = {}
"""Descriptors that hold the locks of this process's folders."""


def make_runtime_dir(path: Path | None = None) -> Path:
    """Return a folder for sockets that only this user can enter, and create it if it is missing.

    Args:
        path: the folder; None makes a new one with a random name, which the caller removes in the
            end. A path too long for sockets is replaced by a short one under ``/tmp`` that depends
            only on ``path`` and the user, so that it is found again.

    Raises: PermissionDeniedError if others can enter an existing folder; ConfigError if no
        temporary folder can be written.
    """
    if path is None:
        return _make_own_dir()
    path = Path(os.path.abspath(path))  # resolve() would follow a link, which must be refused.
    if not _is_short(path):
        digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
        path = FALLBACK_PARENT / f"tandem-{os.geteuid()}-{digest}"
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    check_runtime_dir(path)
    return path


def _make_own_dir() -> Path:
    try:
        parent = Path(tempfile.gettempdir())
        if not _is_short(parent / PREFIX_UNLOCKED / "12345678"):
            parent = FALLBACK_PARENT
        _sweep(parent)
        made = Path(tempfile.mkdtemp(prefix=PREFIX_UNLOCKED, dir=parent))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            "rpc.runtime_dir",
            f"no folder for sockets can be made: {reason}: set TMPDIR to one that can be written",
        ) from error
    for owned in [owned for owned in _locks if not owned.exists()]:
        os.close(_locks.pop(owned))
    lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Rename the folder only now that it is locked: an unlocked folder with the final prefix counts
    # as left behind.
    path = made.with_name(PREFIX + made.name.removeprefix(PREFIX_UNLOCKED))
    made.rename(path)
    _locks[path] = lock
    return path


def _sweep(parent: Path) -> None:
    """Remove folders of this user whose owners have ended without removing them."""
    with os.scandir(parent) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(PREFIX)]
    for name in names:
        path = parent / name
        with contextlib.suppress(OSError):  # Another process was first, or it is somebody else's.
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def check_runtime_dir(path: Path) -> None:
    """Refuse a folder that others can enter or write, or that another user made.

    Raises: NotFoundError if it does not exist; PermissionDeniedError naming owner or mode.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise NotFoundError(
            "rpc.runtime_dir", f"{path} does not exist: call make_runtime_dir() first"
        ) from None
    except PermissionError as error:
        raise PermissionDeniedError(
            "rpc.runtime_dir", f"{path} belongs to another user: {error.strerror}"
        ) from None
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionDeniedError(
            "rpc.runtime_dir", f"{path} is not a folder (a link counts not)"
        )
    if status.st_uid != os.geteuid():
        raise PermissionDeniedError(
            "rpc.runtime_dir",
            f"{path} belongs to uid {status.st_uid}, we are {os.geteuid()}: sockets need a folder "
            "of our own",
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise PermissionDeniedError(
            "rpc.runtime_dir", f"{path} has mode {mode:04o}: others may enter, chmod it to 0700"
        )


def check_socket_free(path: Path) -> None:
    """Refuse a path that a live server uses or that is not a socket. A stale socket or a missing
    file is accepted.

    ZeroMQ unlinks the path before it binds: a second server would silently take over, and a file
    would be lost.

    Raises: ConflictError (the path is refused).
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConflictError("rpc.bind", f"{path} exists and is not a socket: move it away")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return  # Stale: no process listens.
        except OSError as error:
            raise ConflictError(
                "rpc.bind", f"{path} is a socket in use: {error.strerror}"
            ) from None
    raise ConflictError("rpc.bind", f"{path} is served by another process: stop it first")


def secure_socket_file(path: Path) -> None:
    """Remove the socket's permissions for group and others, as a second protection behind the
    folder's.
    """
    path.chmod(0o600)


def _is_short(path: Path) -> bool:
    return len(os.fsencode(path)) + SOCKET_NAME_BYTES <= MAX_SOCKET_PATH_BYTES

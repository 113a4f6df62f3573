"""The folder that protects Unix sockets: mode 0700, ours, nothing a link could redirect.

A Unix socket has no password; access to its folder is the permission. So the folder is checked by
the server before it binds and by the client before it connects (a folder of somebody else's
could hold a socket that only looks like ours).

A folder with a random name is locked by the process that made it, as long as that lives. One whose
lock is free was left by a process that was killed, and goes when the next folder is made.
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
"""Room that a runtime folder must leave for ``/`` and the name of a socket."""

FALLBACK_PARENT = Path("/tmp")  # noqa: S108 - the shortest writable path; the folder is checked
PROBE_TIMEOUT_S = 1.0

PREFIX = "tandem-run-"
"""Prefix of folders with a random name, all locked by their owners."""
PREFIX_UNLOCKED = "tandem-new-"

_locks: dict[Path, int] = {}
"""Descriptors that hold the locks of our folders."""


def make_runtime_dir(path: Path | None = None) -> Path:
    """Return a folder for sockets that only this user can enter, made if need be.

    Args:
        path: the folder wanted; None makes a new one with a random name, which the caller
            removes in the end. A path too long for sockets is replaced by a short one under
            ``/tmp`` that depends on ``path`` and the user alone, so that it is found again.

    Raises: PermissionDeniedError if the folder exists and is not ours alone; ConfigError if no
        temporary folder can be written.
    """
    if path is None:
        return _make_own_dir()
    path = Path(os.path.abspath(path))  # resolve() would follow a link that we must refuse
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
    # Only now may others look at it: unlocked, it would count as left behind.
    path = made.with_name(PREFIX + made.name.removeprefix(PREFIX_UNLOCKED))
    made.rename(path)
    _locks[path] = lock
    return path


def _sweep(parent: Path) -> None:
    """Remove the folders of our user whose owners have ended without doing so."""
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
    """Refuse a folder that others can enter, write, or have made.

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
    """Refuse a path that has a live server or is no socket; a stale socket or no file is free.

    ZeroMQ unlinks whatever it finds before it binds: a second server would take over in silence,
    and a file would be gone.

    Raises: ConflictError.
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
    """Take the socket from group and others, a second lock behind that of the folder."""
    path.chmod(0o600)


def _is_short(path: Path) -> bool:
    return len(os.fsencode(path)) + SOCKET_NAME_BYTES <= MAX_SOCKET_PATH_BYTES

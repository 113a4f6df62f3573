"""The memory of a host's segment: a file on tmpfs that outlives its process, its head, and its
growth.

The file is 0600, in a 0700 folder of this user, locked by its owner. Its pages are reserved before
they are touched, so that a full file system raises an error instead of SIGBUS. Format:
docs/design/store/store_formats.md. Not thread-safe, except ``reserve_rest``.
"""

import contextlib
import fcntl
import logging
import mmap
import operator
import os
import secrets
import stat
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from tandem._native import populate_pages
from tandem.core.errors import (
    CapacityError,
    ConfigError,
    ConflictError,
    CorruptionError,
    PermissionDeniedError,
)
from tandem.store.corruption_log import CorruptionLog
from tandem.store.formats import layout
from tandem.store.formats.headers import HEAD_BYTES, MAX_EPOCH, pack_head, parse_head, parse_object

__all__ = ["SegmentFile", "check_folder"]

logger = logging.getLogger(__name__)

MAGIC = b"TANDSEG\0"
FIELDS = struct.Struct("<IQ16sQ")  # granule, capacity, id, epoch
QUARANTINED = ".quarantined"
FIRST_RESERVE_BYTES = 2**30
"""Bytes that are reserved before the first put; a thread reserves the rest. tmpfs zeroes some 3
GB/s.
"""
RESERVE_STEP_BYTES = 256 * 2**20
POPULATE_STEP_BYTES = 32 * 2**20
POPULATE_NICENESS = 10


class SegmentFile:
    """Memory of a host, with a head that has the segment's id and epoch. Made by ``open_file`` or
    ``make_anonymous``.
    """

    def __init__(self, memory: mmap.mmap, capacity_bytes: int, segment_id: bytes) -> None:
        self._map = memory
        self.capacity_bytes = capacity_bytes
        """Bytes for extents when the whole segment is reserved."""
        self.usable_bytes = capacity_bytes
        """Bytes for extents that are backed by memory now."""
        self.final_bytes = capacity_bytes
        """Bytes for extents that will be usable, as far as is known."""
        self.segment_id = segment_id.hex()
        self.path: Path | None = None
        self.corruption = CorruptionLog()
        """Corruption found in the file since it was opened."""
        self._home = int.from_bytes(segment_id[:8], "little")
        self._epoch = 0
        self._descriptor = -1
        self._reserving: threading.Thread | None = None
        self._stop = threading.Event()
        whole = np.frombuffer(memory, dtype=np.uint8)
        begin, self._data_at = HEAD_BYTES, _data_offset(capacity_bytes)
        self._starts: npt.NDArray[np.uint8] = whole[
            begin : begin + capacity_bytes // layout.GRANULE_BYTES
        ]
        self.data: npt.NDArray[np.uint8] = whole[self._data_at : self._data_at + capacity_bytes]
        """The bytes of all extents. Those beyond ``usable_bytes`` must not be touched."""

    # The methods below create, open, grow and close a segment.

    @classmethod
    def make_anonymous(cls, capacity_bytes: int) -> Self:
        """Make a segment that ends with the process, for ``StoreClient.local`` and tests."""
        capacity_bytes = _check_capacity(capacity_bytes)
        memory = mmap.mmap(-1, _data_offset(capacity_bytes) + capacity_bytes)
        segment = cls(memory, capacity_bytes, secrets.token_bytes(16))
        segment._write_file_head(0)
        return segment

    @classmethod
    def open_file(cls, path: Path, capacity_bytes: int) -> Self:
        """Attach to the segment file at ``path``, or create it.

        A segment of another capacity is replaced by an empty one, since a store is a cache. A file
        with a corrupt head is moved aside and named in ``corruption``.

        Raises: ConflictError (a live process owns it; its length is that of no segment);
            UnsupportedError (a later version wrote it); CapacityError (the file system cannot hold
            it); PermissionDeniedError (folder or file open to others).
        """
        capacity_bytes = _check_capacity(capacity_bytes)
        check_folder(path.parent)
        corruption = CorruptionLog()
        descriptor, head = _open(path, capacity_bytes, corruption)
        try:
            segment = cls._attach(path, descriptor, capacity_bytes, head)
        except BaseException:
            if not os.fstat(descriptor).st_size:
                path.unlink(missing_ok=True)  # This call created the empty file.
            os.close(descriptor)
            raise
        segment.corruption = corruption
        segment.path = path
        segment._descriptor = descriptor
        return segment

    @classmethod
    def _attach(
        cls, path: Path, descriptor: int, capacity_bytes: int, head: "_FileHead | None"
    ) -> Self:
        data_at = _data_offset(capacity_bytes)
        # Round the file's length up to whole pages, which are huge on hugetlbfs.
        page_bytes = os.fstatvfs(descriptor).f_bsize
        file_bytes = (data_at + capacity_bytes + page_bytes - 1) // page_bytes * page_bytes
        _check_room(path, descriptor, file_bytes)
        first = min(capacity_bytes, FIRST_RESERVE_BYTES)
        os.ftruncate(descriptor, file_bytes)
        _reserve(path, descriptor, 0, data_at + first)
        memory = mmap.mmap(descriptor, file_bytes)
        segment_id = secrets.token_bytes(16) if head is None else head.segment_id
        segment = cls(memory, capacity_bytes, segment_id)
        segment.usable_bytes = first
        # Write both copies of the head, since one of them may be corrupt or older.
        segment._write_file_head(0 if head is None else head.epoch)
        if head is not None:
            segment._reserve_used(path, descriptor)
        logger.info(
            "event=segment_opened path=%s capacity_bytes=%d new=%s",
            path,
            capacity_bytes,
            head is None,
        )
        return segment

    def _reserve_used(self, path: Path, descriptor: int) -> None:
        """Reserve the file's pages up to the last object, since pages between objects may be holes
        that a full file system could not fill.
        """
        marked = np.flatnonzero(self._starts)
        if not len(marked):
            return
        last = int(marked[-1]) * layout.GRANULE_BYTES
        end = min(last + RESERVE_STEP_BYTES, self.capacity_bytes)
        header = parse_object(self.data, last, self._home, last)
        if header is not None and header.size <= self.capacity_bytes:
            extent = layout.extent_bytes(len(header.key.encode()), header.size)
            end = min(max(end, last + extent), self.capacity_bytes)
        if end > self.usable_bytes:
            _reserve(path, descriptor, self._data_at, end)
            self.usable_bytes = end

    def reserve_rest(self, on_grown: Callable[[int], None]) -> None:
        """Reserve the rest of the segment in a thread, which calls ``on_grown(usable_bytes)`` after
        each step.

        If the file system fills up, the segment keeps its size, ``final_bytes`` is set to that, and
        ``on_grown`` is called once more. The reserved pages are then mapped as well: the first
        touch of a page costs a microsecond, which is most of the time to seal a small object.
        """
        if self._descriptor < 0:
            return
        self._reserving = threading.Thread(
            target=self._reserve_steps, args=(on_grown,), name="store-reserve", daemon=True
        )
        self._reserving.start()

    def _reserve_steps(self, on_grown: Callable[[int], None]) -> None:
        self._reserve_all(on_grown)
        # Lower this thread's scheduling priority below that of the threads that answer calls.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), POPULATE_NICENESS)
        for begin in range(0, self.usable_bytes, POPULATE_STEP_BYTES):
            end = min(begin + POPULATE_STEP_BYTES, self.usable_bytes)
            if self._stop.is_set() or not populate_pages(self.data[begin:end]):
                return

    def _reserve_all(self, on_grown: Callable[[int], None]) -> None:
        assert self.path is not None
        while self.usable_bytes < self.capacity_bytes and not self._stop.is_set():
            until = min(self.usable_bytes + RESERVE_STEP_BYTES, self.capacity_bytes)
            try:
                _reserve(self.path, self._descriptor, self._data_at, until)
            except CapacityError as error:
                logger.warning(
                    "event=segment_short usable_bytes=%d reason=%s", self.usable_bytes, error
                )
                self.final_bytes = self.usable_bytes
                on_grown(self.usable_bytes)
                return
            self.usable_bytes = until
            on_grown(until)

    def close(self, *, remove: bool = False) -> None:
        """Close the file, and remove it if asked; else the next owner finds it. May be repeated.

        The mapping ends with the last view of ``data``.
        """
        self._stop.set()
        if self._reserving is not None:
            self._reserving.join(30)
        if self._descriptor >= 0:
            if remove and self.path is not None:
                self.path.unlink(missing_ok=True)
            # Unlock explicitly: the mapping holds a copy of the descriptor, which would keep the
            # lock.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def epoch(self) -> int:
        """The highest epoch (number of a master) that this host has seen, kept in the file's head.

        Raises: ConfigError if it is set to an epoch that no version has room for.
        """
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._write_file_head(epoch)

    def _write_file_head(self, epoch: int) -> None:
        if not 0 <= epoch <= MAX_EPOCH:
            raise ConfigError("store.segment", f"epoch {epoch}: 0 to {MAX_EPOCH} are possible")
        segment_id = bytes.fromhex(self.segment_id)
        fields = FIELDS.pack(layout.GRANULE_BYTES, self.capacity_bytes, segment_id, epoch)
        head = pack_head(MAGIC, fields)
        # Write one copy after the other, so that one of them is whole whenever the process dies.
        self._map[: HEAD_BYTES // 2] = head[: HEAD_BYTES // 2]
        self._map[HEAD_BYTES // 2 : HEAD_BYTES] = head[HEAD_BYTES // 2 :]
        self._epoch = epoch

    # The members below let other processes map the file, and prove that none of them can write to
    # it.

    @property
    def descriptor(self) -> int:
        """File descriptor of the file that is this memory; -1 without a file."""
        return self._descriptor

    @property
    def data_offset(self) -> int:
        """Offset in the file at which ``data`` begins, bytes."""
        return self._data_at

    def has_no_writers(self) -> bool:
        """Return True if no other process can write to the file. Processes that map it for writing
        hold a lock on it.

        The answer True stays true until this process gives another one the right to write. Mappings
        for readers do not count.
        """
        if self._descriptor < 0:
            return True
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_WRLCK))
        except (BlockingIOError, PermissionError):
            return False
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_UNLCK))
        return True

    @property
    def name(self) -> str:
        """Name of the file, or the id of a segment without a file."""
        return self.segment_id if self.path is None else self.path.name


def _whole_file(kind: int) -> bytes:
    """Return the packed ``struct flock`` of a lock of type ``kind`` (``F_RDLCK`` ...) on the whole
    file.
    """
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)


def _check_capacity(capacity_bytes: int) -> int:
    rounded = capacity_bytes // mmap.PAGESIZE * mmap.PAGESIZE
    if rounded <= 0:
        raise ConfigError("store.segment", f"{capacity_bytes} bytes: give a page or more")
    return rounded


def _data_offset(capacity_bytes: int) -> int:
    starts = capacity_bytes // layout.GRANULE_BYTES
    return HEAD_BYTES + (starts + mmap.PAGESIZE - 1) // mmap.PAGESIZE * mmap.PAGESIZE


def check_folder(folder: Path) -> None:
    """Create a folder that only this user can enter, or check an existing one.

    Raises: PermissionDeniedError (it is no folder, another user's, or others can enter it).
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.geteuid()
        or stat.S_IMODE(status.st_mode) & 0o077
    ):
        raise PermissionDeniedError(
            "store.segment", f"{folder} must be a folder of ours that others cannot enter (0700)"
        )


class _FileHead(NamedTuple):
    segment_id: bytes
    epoch: int


def _open(
    path: Path, capacity_bytes: int, corruption: CorruptionLog
) -> "tuple[int, _FileHead | None]":
    """Return the locked file and the head of the segment in it; None for an empty file.

    A file that cannot be attached is replaced by a new one and never truncated: clients of its last
    owner may still map it, and a process that touches a page beyond the end is killed.

    Raises: ConflictError (another host creates the file at the same moment).
    """
    for _ in range(4):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _check_file(path, descriptor)
            if _is_at(path, descriptor):  # False if another host has replaced the file since.
                if os.fstat(descriptor).st_size == 0:
                    return descriptor, None
                try:
                    head = _read_file_head(path, descriptor, capacity_bytes, corruption)
                except CorruptionError as error:
                    _quarantine(path, descriptor)
                    corruption.note(f"segment {path.name}", error)
                else:
                    if head is not None:
                        return descriptor, head
                    path.unlink()
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise ConflictError("store.segment", f"{path} is being made by another host")


def _quarantine(path: Path, descriptor: int) -> None:
    """Move a corrupt segment file aside, in place of the one moved aside before. Remove it instead
    if there is no room for two.
    """
    status, room = os.fstat(descriptor), os.fstatvfs(descriptor)
    aside = path.with_name(path.name + QUARANTINED)
    aside.unlink(missing_ok=True)
    free_bytes = room.f_bavail * room.f_frsize
    if room.f_blocks and free_bytes < status.st_size:
        logger.warning("event=quarantine_full path=%s free_bytes=%d", path, free_bytes)
        path.unlink()
    else:
        path.rename(aside)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _check_file(path: Path, descriptor: int) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionDeniedError("store.segment", f"{path} is not a file of ours")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionDeniedError("store.segment", f"{path} is open to others: chmod it to 0600")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConflictError(
            "store.segment", f"{path} belongs to a live host: give this one another name"
        ) from None


def _read_file_head(
    path: Path, descriptor: int, capacity_bytes: int, corruption: CorruptionLog
) -> _FileHead | None:
    """Return the head of a segment that can be attached; None if the file must be created anew.

    Raises: CorruptionError if the head is corrupt; ConflictError if the file never was a segment;
        UnsupportedError (a later version).
    """
    size = os.fstat(descriptor).st_size
    if size % mmap.PAGESIZE:
        raise ConflictError("store.segment", f"{path} is not a segment: move it away")
    data = os.pread(descriptor, HEAD_BYTES, 0)
    if not data.strip(b"\0"):
        return None  # The owner died before it wrote the head.
    head = parse_head(data, MAGIC, FIELDS.size, str(path))
    if head.is_damaged:
        corruption.note(f"head of segment {path.name}", "a copy of it, made anew from the other")
    granule, capacity, segment_id, epoch = max(
        (FIELDS.unpack(copy) for copy in head.copies), key=operator.itemgetter(3)
    )
    if (granule, capacity) != (layout.GRANULE_BYTES, capacity_bytes) or size < _data_offset(
        capacity_bytes
    ):
        logger.warning("event=segment_replaced path=%s capacity_bytes=%d", path, capacity)
        return None
    if epoch > MAX_EPOCH:
        raise CorruptionError("store.segment", f"{path} has seen epoch {epoch}, which none can be")
    return _FileHead(segment_id, epoch)


def _check_room(path: Path, descriptor: int, size_bytes: int) -> None:
    room = os.fstatvfs(descriptor)
    if room.f_blocks == 0:
        return  # A hugetlbfs without a limit: reserving fails if it is full.
    free_bytes = room.f_bavail * room.f_frsize + os.fstat(descriptor).st_blocks * 512
    if free_bytes < size_bytes:
        raise CapacityError(
            "store.segment",
            f"{path} needs {size_bytes} bytes, its file system has {free_bytes} free: lower "
            "store.segment_bytes, or store.memory of `tandem serve`, or enlarge the tmpfs",
            field="store.segment_bytes",
        )


def _reserve(path: Path, descriptor: int, begin: int, length: int) -> None:
    try:
        os.posix_fallocate(descriptor, begin, length)
    except OSError as error:
        raise CapacityError(
            "store.segment", f"{path}: {length} bytes cannot be reserved: {error.strerror}"
        ) from None

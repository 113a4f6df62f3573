"""Packed weights of a checkpoint on disk, so that a second start maps them instead of packing.

A folder holds one checkpoint in one weight format: a file of packed bytes for each operator, laid
out as in docs/design/models/weight_formats.md, and ``manifest.json``, which names the files'
source. Files are written under another name, synced and renamed before the manifest names them, so
an interrupted run loses only the file it was writing, and the next run continues. They are written
while the model loads, or afterwards in the background (``packed_writer.py``). A manifest of another
source, format or layout, or a file of another size, is refused, logged and rebuilt.

Files are mapped shared and read-only, so processes that serve the same model share the memory. One
process writes at a time; another that also packs keeps its result in its own memory. Files that
another user may write to are not mapped: shortening a mapped file kills the processes that use it,
and no check at opening could prevent that. Finished files are never written to.
"""

import fcntl
import hashlib
import logging
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.core.errors import CorruptionError
from tandem.models.sources.gguf_files import find_gguf, list_parts

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "LAYOUT",
    "MIN_CACHED_BYTES",
    "PackedCache",
    "PackedCaches",
    "PackedFile",
    "PackedManifest",
    "choose_root",
    "find_risk",
    "has_manifest",
    "list_packed_files",
    "may_write_cache",
]

logger = logging.getLogger(__name__)

DEFAULT_ROOT = Path("~/.cache/tandem/packed")

MIN_CACHED_BYTES = 256 << 20
"""Packed bytes of a model below which packing takes about a second, so nothing is cached."""

LAYOUT = "tandem-experts-1"
"""Name of the layout in docs/design/models/weight_formats.md; a changed layout gets the next
number.
"""

MANIFEST_NAME = "manifest.json"
SUFFIX = ".packed"
PARTIAL_SUFFIX = ".partial"

WRITE_BYTES = 4 << 20
"""Bytes written in one call. A writer that is told to stop writes at most this much more."""
SYNC_BYTES = 32 << 20
"""Bytes written between two syncs to disk, so that little unwritten data stays in memory."""


def choose_root(wish: str, folder: Path, size_bytes: int) -> Path | None:
    """Return the folder for a checkpoint's packed weights; None: they are not cached.

    Args:
        wish: ``auto`` (in the user's cache folder, if the weights are large), ``off``, or a folder.
        folder: the checkpoint's folder.
        size_bytes: size of all packed weights.
    """
    if wish == "off" or (wish == "auto" and size_bytes < MIN_CACHED_BYTES):
        return None
    root = DEFAULT_ROOT if wish == "auto" else Path(wish)
    # The hash of the path separates checkpoints of the same name; a changed checkpoint at the same
    # path replaces its own cache.
    place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    return root.expanduser() / f"{folder.name}-{place}"


def may_write_cache(wish: str, folder: Path) -> bool:
    """Return True if loading a checkpoint may write packed weights, judged by its files' sizes.

    Args: as for ``choose_root``.
    """
    gguf = find_gguf(folder)
    files = folder.glob("*.safetensors") if gguf is None else list_parts(gguf)
    num_bytes = sum(each.stat().st_size for each in files)
    # Packed weights take a quarter to a half of the checkpoint's size, so twice that size is given,
    # to include checkpoints near the limit.
    return choose_root(wish, folder, 2 * num_bytes) is not None


def has_manifest(root: Path) -> bool:
    """Return True if a folder of ``choose_root`` holds packed weights, from whatever version of the
    checkpoint they were made.
    """
    return next(root.glob(f"*/{MANIFEST_NAME}"), None) is not None


class PackedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A finished file of packed weights, as the manifest lists it."""

    size_bytes: int
    crc32: int


class PackedManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of a cache folder's manifest: what its packed weights were made from, and its
    finished files.
    """

    layout: str
    source: str
    """Hash over everything that the packed bytes depend on; see ``name_packed_source``."""
    weight_format: str
    files: dict[str, PackedFile]
    """Finished files, by dotted path of the operator."""


class PackedCaches:
    """Packed caches of one checkpoint, a folder for each weight format in use.

    Use as a context manager. Not thread-safe.

    Args:
        root: folder that holds a folder per format.
        find_source: returns ``PackedManifest.source``; called only when a manifest is compared or
            written, as the hash may take a while.
        is_behind: True to note packed weights now and write them later, by the caller of
            ``take_unwritten``.
    """

    def __init__(
        self, root: Path, *, find_source: Callable[[], str], is_behind: bool = False
    ) -> None:
        self.root = root
        self._find_source = find_source
        self._is_behind = is_behind
        self._caches: dict[str, PackedCache] = {}

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all caches; idempotent."""
        for cache in self._caches.values():
            cache.close()

    def open(self, weight_format: str) -> "PackedCache":
        """Return the cache of a weight format; the first call opens it, later calls return the
        same.
        """
        cache = self._caches.get(weight_format)
        if cache is None:
            cache = PackedCache(
                self.root / weight_format,
                find_source=self._find_source,
                weight_format=weight_format,
                is_behind=self._is_behind,
            )
            self._caches[weight_format] = cache
        return cache

    @property
    def folders(self) -> list[Path]:
        """Folders of the caches that have been opened, one for each weight format."""
        return [cache.folder for cache in self._caches.values()]

    def take_unwritten(self) -> "list[PackedCache]":
        """Return the caches whose packed weights still wait to be written to disk, and forget them;
        the caller closes them.
        """
        caches = [cache for cache in self._caches.values() if cache.unwritten]
        self._caches = {k: c for k, c in self._caches.items() if not c.unwritten}
        return caches

    def verify(self) -> None:
        """Read every file of the caches in use and compare checksums.

        Raises: CorruptionError (names the file).
        """
        for cache in self._caches.values():
            cache.verify()


class PackedCache:
    """A folder of packed weights of one checkpoint in one weight format.

    Use as a context manager; closing releases the write lock. Mapped weights stay mapped. Not
    thread-safe.

    Args:
        folder: made when something is written; accessible to its owner alone.
        find_source: as for ``PackedCaches``.
        weight_format: the format's name.
        is_behind: as for ``PackedCaches``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        find_source: Callable[[], str],
        weight_format: str,
        is_behind: bool = False,
    ) -> None:
        self.folder = folder
        self.unwritten: dict[str, NDArray[np.uint8]] = {}
        """Packed weights that wait for ``write`` to put them into files, by dotted path of the
        operator; borrowed from the operators.
        """
        self._find_source = find_source
        self._weight_format = weight_format
        self._is_behind = is_behind
        self._lock: BinaryIO | None = None
        self._can_write = True
        self._files = self._read_manifest()

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock that lets one process write to the folder. Idempotent."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def files(self) -> Mapping[str, PackedFile]:
        """Finished files of packed weights, by dotted path of the operator that reads them."""
        return self._files

    def find(self, name: str, size_bytes: int) -> NDArray[np.uint8] | None:
        """Return an operator's packed weights, mapped read-only; None if they are not cached."""
        path = self.locate(name, size_bytes)
        try:
            return None if path is None else np.memmap(path, np.uint8, "r")
        except OSError as error:
            logger.warning("event=packed_file_refused path=%s error=%r", path, str(error))
            return None

    def locate(self, name: str, size_bytes: int) -> Path | None:
        """Return the file of an operator's packed weights; None if they are not cached."""
        entry = self._files.get(name)
        if entry is None:
            return None
        path = self._path(name)
        try:
            info = path.stat()
        except OSError as error:
            logger.warning("event=packed_file_refused path=%s error=%r", path, str(error))
            return None
        risk = find_risk(info)
        if risk:
            logger.warning("event=packed_file_refused path=%s why=%r", path, risk)
            return None
        if not size_bytes == entry.size_bytes == info.st_size:
            logger.warning(
                "event=packed_file_refused path=%s size_bytes=%d wanted_bytes=%d",
                path,
                info.st_size,
                size_bytes,
            )
            return None
        return path

    def keep(self, name: str, packed: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        """Write packed weights to the cache and return them mapped, to use instead of the given
        memory.

        None: the given memory stays in use, because it will be written later (and is borrowed until
        then), another process is writing to the folder, or the disk is full, which is logged once.
        """
        flat = packed.reshape(-1)
        if self._is_behind:
            self.unwritten[name] = flat
            return None
        return self.find(name, len(flat)) if self.write(name, flat) else None

    def write(
        self,
        name: str,
        packed: NDArray[np.uint8],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Write packed weights durably and add them to the manifest; return True if they are cached
        now.

        Args:
            name: name of the operator.
            packed: its bytes, contiguous.
            should_stop: checked between two writes; if it returns True, no file is left.
        """
        if should_stop() or not self._can_write or not self._take_lock():
            return False
        if self.find(name, len(packed)) is not None:
            return True  # Of a process that wrote while this one packed.
        path = self._partial_path(name)
        try:
            crc32 = self._write_file(path, packed, should_stop)
            if crc32 is None:
                path.unlink(missing_ok=True)
                return False
            path.rename(self._path(name))
            files = {**self._files, name: PackedFile(len(packed), crc32)}
            self._write_manifest(files)
        except OSError as error:
            path.unlink(missing_ok=True)
            self._stop_writing(str(error))
            return False
        self._files = files
        return True

    @staticmethod
    def _write_file(
        path: Path, packed: NDArray[np.uint8], should_stop: Callable[[], bool]
    ) -> int | None:
        """Write and sync a new file; return its CRC-32, or None if it was told to stop."""
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            # Allocate the whole file at once, so that a full disk is found before anything is
            # written.
            os.posix_fallocate(descriptor, 0, len(packed))
            crc32 = 0
            for begin in range(0, len(packed), WRITE_BYTES):
                if should_stop():
                    return None
                part = packed[begin : begin + WRITE_BYTES].data
                crc32 = zlib.crc32(part, crc32)
                while part:
                    part = part[os.write(descriptor, part) :]
                if (begin + WRITE_BYTES) % SYNC_BYTES == 0:
                    os.fdatasync(descriptor)
            os.fsync(file.fileno())
        return crc32

    def is_unchanged(self, name: str, size_bytes: int) -> bool:
        """Read an operator's finished file and return True if it has the content that was
        written.
        """
        entry, path = self._files.get(name), self.locate(name, size_bytes)
        if entry is None or path is None:
            return False
        crc32 = 0
        with path.open("rb", buffering=0) as file:
            while part := file.read(WRITE_BYTES):
                crc32 = zlib.crc32(part, crc32)
        return crc32 == entry.crc32

    def verify(self) -> None:
        """Read every finished file and compare checksums.

        Raises: CorruptionError (names the file).
        """
        for name, entry in sorted(self._files.items()):
            if not self.is_unchanged(name, entry.size_bytes):
                raise CorruptionError(
                    "models.verify_packed",
                    f"{self._path(name).name} in {self.folder} is not what was written: remove "
                    "the folder, it is built again",
                )

    def _path(self, name: str) -> Path:
        return self.folder / (name + SUFFIX)

    def _partial_path(self, name: str) -> Path:
        return self.folder / (name + SUFFIX + PARTIAL_SUFFIX)

    def _read_manifest(self) -> dict[str, PackedFile]:
        """Return the finished files if the manifest says that they were made from this checkpoint,
        in this format and layout; else none.
        """
        path = self.folder / MANIFEST_NAME
        try:
            risk = find_risk(self.folder.stat())
            if risk:
                return self._refuse(risk)
            found = msgspec.json.decode(path.read_bytes(), type=PackedManifest)
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            return self._refuse(str(error))
        wanted = self._make_manifest({})
        for field in ("layout", "source", "weight_format"):
            if getattr(found, field) != getattr(wanted, field):
                return self._refuse(f"another {field}")
        return found.files

    def _refuse(self, why: str) -> dict[str, PackedFile]:
        logger.warning("event=packed_cache_refused folder=%s why=%r", self.folder, why)
        return {}

    def _make_manifest(self, files: dict[str, PackedFile]) -> PackedManifest:
        return PackedManifest(
            layout=LAYOUT,
            source=self._find_source(),
            weight_format=self._weight_format,
            files=files,
        )

    def _write_manifest(self, files: dict[str, PackedFile]) -> None:
        manifest = self._make_manifest(files)
        path = self.folder / MANIFEST_NAME
        partial = path.with_name(MANIFEST_NAME + PARTIAL_SUFFIX)
        with partial.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest)))
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _take_lock(self) -> bool:
        """Take the lock that lets one process write to the folder; return True if it is held. The
        manifest is read again, as another process may have changed it.
        """
        if self._lock is not None:
            return True
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            risk = find_risk(self.folder.stat())
            if risk:
                self._stop_writing(risk)
                return False
            # The lock file is opened without truncation: in a folder of another user it could be a
            # link to one of our files.
            lock = (self.folder / ".lock").open("ab")
        except OSError as error:
            self._stop_writing(str(error))
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            self._stop_writing("another process writes to it")
            return False
        self._lock = lock
        self._files = self._read_manifest()
        return True

    def _stop_writing(self, why: str) -> None:
        self._can_write = False
        logger.warning("event=packed_cache_not_written folder=%s why=%r", self.folder, why)


def list_packed_files(folder: Path) -> list[Path]:
    """Return the finished files of packed weights in a folder, whatever they were made from,
    without those that other users may write to.
    """
    try:
        return [path for path in sorted(folder.glob(f"*{SUFFIX}")) if not find_risk(path.stat())]
    except OSError as error:
        logger.warning("event=packed_cache_refused folder=%s why=%r", folder, str(error))
        return []


def find_risk(info: os.stat_result) -> str:
    """Return the reason why other users may write to a file or folder; empty if only we and root
    may.
    """
    if info.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {info.st_uid}"
    return "others may write to it" if info.st_mode & 0o022 else ""

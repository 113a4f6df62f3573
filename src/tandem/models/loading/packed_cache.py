"""Packed weights of a checkpoint on disk, so that a second start maps them instead of packing.

A folder holds one checkpoint in one weight format: a file of packed bytes per operator, as
docs/design/models/weight_formats.md lays them out, and ``manifest.json``, which names their
sources. Files are written whole under another name, synced and renamed before the manifest names
them, so a run that is cut short loses the file it was at, and the next one goes on. They are
written while the model loads, or behind it (``packed_writer.py``). A manifest of another source,
format or layout, or a file of another size, is refused, logged and rebuilt.

Files are mapped shared and read-only: processes that serve the same model share the memory. One
process writes at a time; another that would like to keeps what it packs in memory of its own. What
another user may write to is not mapped: shortening a mapped file ends the processes that use
it, and no check at opening could see that. Nothing here writes to a finished file.
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
"""Packed bytes of a model below which packing again takes about a second: no file is made."""

LAYOUT = "tandem-experts-1"
"""The layout of docs/design/models/weight_formats.md; a change of it takes the next number."""

MANIFEST_NAME = "manifest.json"
SUFFIX = ".packed"
PARTIAL_SUFFIX = ".partial"

WRITE_BYTES = 4 << 20
"""Written at once: what a writer that is told to stop still does."""
SYNC_BYTES = 32 << 20
"""Written between two syncs, so that little memory waits for the disk."""


def choose_root(wish: str, folder: Path, size_bytes: int) -> Path | None:
    """Return where a checkpoint's packed weights are kept; None for nowhere.

    Args:
        wish: ``auto`` (under the user's cache folder, if there is much to keep), ``off``, or a
            folder.
        folder: the checkpoint's.
        size_bytes: of all packed weights.
    """
    if wish == "off" or (wish == "auto" and size_bytes < MIN_CACHED_BYTES):
        return None
    root = DEFAULT_ROOT if wish == "auto" else Path(wish)
    # The hash of the path separates checkpoints of the same name; a changed checkpoint at the same
    # path replaces its own cache.
    place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    return root.expanduser() / f"{folder.name}-{place}"


def may_write_cache(wish: str, folder: Path) -> bool:
    """Return True if loading a checkpoint may write packed weights; by the size of its files alone.

    Args: as of ``choose_root``.
    """
    gguf = find_gguf(folder)
    files = folder.glob("*.safetensors") if gguf is None else list_parts(gguf)
    num_bytes = sum(each.stat().st_size for each in files)
    # Packed weights take a quarter to a half of the checkpoint's size, so twice that size is given,
    # to include checkpoints near the limit.
    return choose_root(wish, folder, 2 * num_bytes) is not None


def has_manifest(root: Path) -> bool:
    """Return True if anything was kept under a root of ``choose_root``, of whatever source."""
    return next(root.glob(f"*/{MANIFEST_NAME}"), None) is not None


class PackedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One finished file."""

    size_bytes: int
    crc32: int


class PackedManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The source of a folder of packed weights, and the parts that are finished."""

    layout: str
    source: str
    """Hash over what the packed bytes were made from; see ``tandem.models.loading.loader``."""
    weight_format: str
    files: dict[str, PackedFile]
    """By dotted path of the operator."""


class PackedCaches:
    """The caches of one checkpoint, a folder for each format that its rules ask for.

    Use as a context manager. Not thread-safe.

    Args:
        root: holds a folder per format.
        find_source: returns ``PackedManifest.source``; asked when there is a manifest to compare or
            to write, as the hash behind it may take a while.
        is_behind: weights are noted when they are packed, and written later by whom
            ``take_unwritten`` gives them to.
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
        """Close all of them; idempotent."""
        for cache in self._caches.values():
            cache.close()

    def open(self, weight_format: str) -> "PackedCache":
        """Return the cache of a format, the same one each time."""
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
        """Those of the formats in use."""
        return [cache.folder for cache in self._caches.values()]

    def take_unwritten(self) -> "list[PackedCache]":
        """Return the caches that have weights to write; they are the caller's to close."""
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
    """A folder of packed weights, for one checkpoint and one weight format.

    Use as a context manager; closing gives up the right to write. What was mapped stays mapped.
    Not thread-safe.

    Args:
        folder: made when something is written; readable by its owner alone.
        find_source: see ``PackedCaches``.
        weight_format: the format's name.
        is_behind: see ``PackedCaches``.
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
        """Packed weights that wait for ``write``, by operator; borrowed."""
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
        """Let other processes write. Idempotent."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def files(self) -> Mapping[str, PackedFile]:
        """The finished files, by operator."""
        return self._files

    def find(self, name: str, size_bytes: int) -> NDArray[np.uint8] | None:
        """Return an operator's finished weights, mapped read-only; None where there are none."""
        path = self.locate(name, size_bytes)
        try:
            return None if path is None else np.memmap(path, np.uint8, "r")
        except OSError as error:
            logger.warning("event=packed_file_refused path=%s error=%r", path, str(error))
            return None

    def locate(self, name: str, size_bytes: int) -> Path | None:
        """Return the file of an operator's finished weights; None where there is none."""
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
        """Write what was packed and return it mapped, to be used instead of the memory given.

        None: that memory stays in use, because it is written later (and borrowed until then), or
        another process writes to the folder, or the disk has no room, which is logged once.
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
        """Make packed weights durable and name them in the manifest; whether they are there now.

        Args:
            name: of the operator.
            packed: its bytes, contiguous.
            should_stop: asked between two writes; true leaves no file.
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
        """Write and sync a new file; return its CRC-32, or None where it was told to stop."""
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

    def verify(self) -> None:
        """Read every finished file and compare checksums.

        Raises: CorruptionError (names the file).
        """
        for name, entry in sorted(self._files.items()):
            weights = self.find(name, entry.size_bytes)
            if weights is None or zlib.crc32(weights.data) != entry.crc32:
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
        """Return what is finished, if it is of this source, format and layout, else nothing."""
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
        """Become the one writer; what the manifest says may have changed until then."""
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
    """Return the finished files of a folder that only we may write to, whatever their source."""
    try:
        return [path for path in sorted(folder.glob(f"*{SUFFIX}")) if not find_risk(path.stat())]
    except OSError as error:
        logger.warning("event=packed_cache_refused folder=%s why=%r", folder, str(error))
        return []


def find_risk(info: os.stat_result) -> str:
    """Return which other users may write to a file or folder; empty if only we and root may."""
    if info.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {info.st_uid}"
    return "others may write to it" if info.st_mode & 0o022 else ""

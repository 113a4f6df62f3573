"""Packed weights of a checkpoint on disk, so that a second start maps them instead of packing.

A folder holds one checkpoint in one weight format: a file of packed bytes per operator, as
docs/design/kernels.md lays them out, and ``manifest.json``, which says what they were made from.
Files are written whole under another name, synced and renamed before the manifest names them, so a
run that is cut short loses the file it was at, and the next one goes on. A manifest of another
source, format or layout, or a file of another size, is refused, logged and rebuilt.

Files are mapped shared and read-only: processes that serve the same model share the memory. One
process writes at a time; another that would like to keeps what it packs in memory of its own. What
somebody else may write to is not mapped: whoever shortens a mapped file ends the processes that use
it, and no check at opening could see that. Nothing here writes to a finished file.
"""

import fcntl
import hashlib
import logging
import os
import zlib
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
    "PackedCache",
    "PackedCaches",
    "PackedFile",
    "PackedManifest",
    "choose_root",
    "find_risk",
    "may_write_cache",
]

logger = logging.getLogger(__name__)

DEFAULT_ROOT = Path("~/.cache/tandem/packed")

MIN_CACHED_BYTES = 256 << 20
"""Packed bytes of a model below which packing again takes about a second: no file is made."""

LAYOUT = "tandem-experts-1"
"""The layout of docs/design/kernels.md; a change of it takes the next number."""

MANIFEST_NAME = "manifest.json"
SUFFIX = ".packed"
PARTIAL_SUFFIX = ".partial"


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
    # Two checkpoints of one name live in two places; a changed one replaces its own.
    place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    return root.expanduser() / f"{folder.name}-{place}"


def may_write_cache(wish: str, folder: Path) -> bool:
    """Whether loading a checkpoint may write packed weights; by the size of its files alone.

    Args: as of ``choose_root``.
    """
    gguf = find_gguf(folder)
    files = folder.glob("*.safetensors") if gguf is None else list_parts(gguf)
    num_bytes = sum(each.stat().st_size for each in files)
    # Packing makes a half or a quarter of what a file has, so what is near the limit counts.
    return choose_root(wish, folder, 2 * num_bytes) is not None


class PackedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One finished file."""

    size_bytes: int
    crc32: int


class PackedManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a folder of packed weights was made from, and what is finished."""

    layout: str
    source: str
    """Hash over what the packed bytes were made from; see ``tandem.models.loader``."""
    weight_format: str
    files: dict[str, PackedFile]
    """By dotted path of the operator."""


class PackedCaches:
    """The caches of one checkpoint, a folder for each format that its rules ask for.

    Use as a context manager. Not thread-safe.

    Args:
        root: holds a folder per format.
        source: see ``PackedManifest``.
    """

    def __init__(self, root: Path, *, source: str) -> None:
        self.root = root
        self._source = source
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
            folder = self.root / weight_format
            cache = PackedCache(folder, source=self._source, weight_format=weight_format)
            self._caches[weight_format] = cache
        return cache

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
        source: see ``PackedManifest``.
        weight_format: the format's name.
    """

    def __init__(self, folder: Path, *, source: str, weight_format: str) -> None:
        self.folder = folder
        self._manifest = PackedManifest(
            layout=LAYOUT, source=source, weight_format=weight_format, files={}
        )
        self._lock: BinaryIO | None = None
        self._can_write = True
        self._reserved: dict[str, np.memmap] = {}
        self._manifest = self._read_manifest()

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes write; remove what was begun and not finished. Idempotent."""
        for name in list(self._reserved):
            del self._reserved[name]
            self._partial_path(name).unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def manifest(self) -> PackedManifest:
        """What is there."""
        return self._manifest

    def find(self, name: str, size_bytes: int) -> NDArray[np.uint8] | None:
        """Return an operator's finished weights, mapped read-only; None where there are none."""
        entry = self._manifest.files.get(name)
        if entry is None:
            return None
        path = self._path(name)
        try:
            info = path.stat()
            size = info.st_size
            risk = find_risk(info)
            if risk:
                logger.warning("event=packed_file_refused path=%s why=%r", path, risk)
                return None
            if not size_bytes == entry.size_bytes == size:
                logger.warning(
                    "event=packed_file_refused path=%s size_bytes=%d wanted_bytes=%d",
                    path,
                    size,
                    size_bytes,
                )
                return None
            return np.memmap(path, np.uint8, "r")
        except OSError as error:
            logger.warning("event=packed_file_refused path=%s error=%r", path, str(error))
            return None

    def reserve(self, name: str, size_bytes: int) -> NDArray[np.uint8] | None:
        """Return zeroed memory to pack into, backed by a file.

        None where another process writes to the folder, or the disk has no room; said once.
        """
        if not self._can_write or not self._take_lock():
            return None
        path = self._partial_path(name)
        try:
            path.unlink(missing_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "r+b") as file:
                # All blocks now: a page that finds no room later would end the process.
                os.posix_fallocate(file.fileno(), 0, size_bytes)
                self._reserved[name] = np.memmap(file, np.uint8, "r+")
        except OSError as error:
            path.unlink(missing_ok=True)
            self._stop_writing(str(error))
            return None
        return self._reserved[name]

    def commit(self, name: str) -> None:
        """Make what was packed into reserved memory durable and name it in the manifest.

        A disk that fails here costs the file, not the run: the memory stays valid.
        """
        memory = self._reserved.pop(name)
        path = self._partial_path(name)
        try:
            memory.flush()
            with path.open("rb") as file:
                os.fsync(file.fileno())
            path.rename(self._path(name))
            entry = PackedFile(len(memory), zlib.crc32(memory.data))
            files = {**self._manifest.files, name: entry}
            manifest = msgspec.structs.replace(self._manifest, files=files)
            self._write_manifest(manifest)
            self._manifest = manifest
        except OSError as error:
            path.unlink(missing_ok=True)
            self._stop_writing(str(error))

    def verify(self) -> None:
        """Read every finished file and compare checksums.

        Raises: CorruptionError (names the file).
        """
        for name, entry in sorted(self._manifest.files.items()):
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

    def _read_manifest(self) -> PackedManifest:
        """Return what the folder says if it is of this source, format and layout, else nothing."""
        path = self.folder / MANIFEST_NAME
        wanted = self._manifest
        try:
            risk = find_risk(self.folder.stat())
            if risk:
                logger.warning("event=packed_cache_refused folder=%s why=%r", self.folder, risk)
                return wanted
            found = msgspec.json.decode(path.read_bytes(), type=PackedManifest)
        except FileNotFoundError:
            return wanted
        except (OSError, msgspec.MsgspecError) as error:
            logger.warning("event=packed_cache_refused folder=%s why=%r", self.folder, str(error))
            return wanted
        for field in ("layout", "source", "weight_format"):
            if getattr(found, field) != getattr(wanted, field):
                logger.warning(
                    "event=packed_cache_refused folder=%s why=%r", self.folder, f"another {field}"
                )
                return wanted
        return found

    def _write_manifest(self, manifest: PackedManifest) -> None:
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
            # Not truncated: in a folder of somebody else it could be a link to any file of ours.
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
        self._manifest = self._read_manifest()
        return True

    def _stop_writing(self, why: str) -> None:
        self._can_write = False
        logger.warning("event=packed_cache_not_written folder=%s why=%r", self.folder, why)


def find_risk(info: os.stat_result) -> str:
    """Return who else may write to a file or folder; nothing where that is only us and root."""
    if info.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {info.st_uid}"
    return "others may write to it" if info.st_mode & 0o022 else ""

"""Hash over all bytes of a checkpoint's weights, computed once, by threads, while loading.

A tensor's digest is SHA-256 over the SHA-256 of each of its leaves of 64 MiB, so that many threads
can hash one tensor of a fused MoE layer. The digest of the weights is SHA-256 over name, dtype,
shape and digest of every tensor, by name: the division into files does not matter.

Digests are stored by file in the user's cache folder, and are valid while inode, size, mtime and
ctime are unchanged. (ctime reveals tools that restore mtime, such as rsync.) A file that changed
within two seconds before its hash might change again without a new timestamp: such a digest is not
trusted. docs/design/engine/kv_identity.md has the grammar and the measured rates.
"""

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tandem.core.errors import CorruptionError
from tandem.models.loading.packed_cache import find_risk

if TYPE_CHECKING:
    from typing import Self

    from tandem.models.sources.source import TensorEntry

__all__ = ["DigestCache", "WeightHasher", "name_packed_source"]

logger = logging.getLogger(__name__)

DEFAULT_ROOT = Path("~/.cache/tandem/digests")

LEAF_BYTES = 64 << 20
"""Bytes of a tensor in one leaf of the hash; part of the digest's definition."""

READ_BYTES = 1 << 20
"""Bytes read at once: a buffer that stays in a core's L2 cache between copy and hash."""

MIN_CACHED_BYTES = 64 << 20
"""Bytes of weights, hashed in about 50 ms, below which digests are not stored."""

SETTLED_NS = 2_000_000_000
"""Nanoseconds after a file's last change from which another change gets another timestamp; covers
file systems that store whole seconds.
"""

CACHE_VERSION = 1

Progress = Callable[[int, int, str], None]


class FileState(NamedTuple):
    """Facts about a file whose equality means that it has not changed."""

    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def read(cls, path: Path) -> "FileState":
        """Return the facts by which a change of a file is noticed; links are followed."""
        info = path.stat()
        return cls(info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


class HashedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Digests of one file's tensors, and the state of the file when it was hashed."""

    state: FileState
    tensors: dict[str, str]
    """Hex digest by tensor name."""


class DigestRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stored form of a digest cache: digests of all files of a checkpoint."""

    version: int
    folder: str
    files: dict[str, HashedFile]
    """Digests by file name in the folder."""


class DigestCache:
    """Digests of one checkpoint's files, stored on disk.

    A damaged file, or one of another owner, is ignored, and the weights are hashed again.

    Args:
        root: folder, made with mode 0700 when something is written.
        folder: the checkpoint's folder.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self._folder = str(folder.resolve())
        place = hashlib.sha256(self._folder.encode()).hexdigest()[:12]
        self.path = root.expanduser() / f"{folder.resolve().name}-{place}.json"

    @classmethod
    def of_user(cls, folder: Path) -> "DigestCache":
        """Return the digest cache of a checkpoint in the user's cache folder."""
        return cls(DEFAULT_ROOT, folder)

    def read(self) -> dict[str, HashedFile]:
        """Return the stored digests that can be trusted, by file name: of files that had not
        changed for a while when they were hashed, in a cache that no other user may write.
        """
        try:
            info = self.path.stat()
            risk = find_risk(self.path.parent.stat()) or find_risk(info)
            if risk:
                return self._refuse(risk)
            record = msgspec.json.decode(self.path.read_bytes(), type=DigestRecord)
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            return self._refuse(str(error))
        if record.version != CACHE_VERSION or record.folder != self._folder:
            return self._refuse("of another version or folder")
        return {
            name: file
            for name, file in record.files.items()
            if file.state.ctime_ns + SETTLED_NS <= info.st_mtime_ns
        }

    def write(self, files: dict[str, HashedFile], began_ns: int) -> None:
        """Replace the stored digests; a failing disk is logged.

        Args:
            files: digests by file name.
            began_ns: time since the epoch before any byte was read, stored as the record's mtime: a
                file that is edited while it is hashed must get a later timestamp.
        """
        record = DigestRecord(CACHE_VERSION, self._folder, files)
        partial = None
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, partial = tempfile.mkstemp(dir=self.path.parent, suffix=".partial")
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(record))
            os.utime(partial, ns=(began_ns, began_ns))
            Path(partial).rename(self.path)
        except OSError as error:
            logger.warning("event=digests_not_kept path=%s error=%r", self.path, str(error))
            if partial is not None:
                Path(partial).unlink(missing_ok=True)

    def _refuse(self, why: str) -> dict[str, HashedFile]:
        logger.warning("event=digests_refused path=%s why=%r", self.path, why)
        return {}


def name_packed_source(weights: str, config: dict[str, str], read_dtype: str) -> str:
    """Return a hash over everything that the bytes of packed weights depend on.

    Args:
        weights: digest of ``WeightHasher.result``.
        config: values of ``tandem.models.identity.list_config_values``.
        read_dtype: dtype to which weights were rounded before packing; empty: none.
    """
    facts = json.dumps([weights, config, read_dtype], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()


class _Leaf(NamedTuple):
    tensor: str
    begin: int
    end: int


class WeightHasher:
    """Hash of a checkpoint's weights, computed in threads that start at construction.

    Use as a context manager; leaving it cancels tasks that have not begun. One thread calls
    ``result``.

    Args:
        entries: the tensors, by name.
        num_threads: most threads; hashing releases the GIL.
        cache: stored digests of unchanged files; None: hash all.
    """

    def __init__(
        self, entries: "Mapping[str, TensorEntry]", *, num_threads: int, cache: DigestCache | None
    ) -> None:
        self._entries = entries
        self._began_ns = time.time_ns()
        paths = {entry.path for entry in entries.values()}
        self._states = {path: FileState.read(path) for path in sorted(paths)}
        total = sum(entry.end - entry.begin for entry in entries.values())
        self._cache = cache if total >= MIN_CACHED_BYTES else None
        self._known = {} if self._cache is None else self._cache.read()
        self._missing = {path for path in self._states if not self._is_known(path)}
        missing = [entry for entry in entries.values() if entry.path in self._missing]
        self.num_bytes = sum(entry.end - entry.begin for entry in missing)
        """Bytes to hash; 0 if all digests were stored."""
        self._executor = ThreadPoolExecutor(max(1, num_threads), "weight-hash")
        self._tasks: dict[Future[list[bytes]], list[_Leaf]] = {
            self._executor.submit(_hash_leaves, path, leaves): leaves
            for path, leaves in _make_batches(missing)
        }
        self._result: str | None = None

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(cancel_futures=True)

    def result(self, progress: Progress | None = None) -> str:
        """Wait for the digest of the weights, hex; every call returns the same one.

        Args:
            progress: ``progress(done_bytes, total_bytes, what)`` while waiting.

        Raises: CorruptionError if a file changed or ended meanwhile.
        """
        if self._result is None:
            self._result = self._join(progress)
        return self._result

    def _is_known(self, path: Path) -> bool:
        file = self._known.get(path.name)
        names = {name for name, entry in self._entries.items() if entry.path == path}
        return (
            file is not None and file.state == self._states[path] and file.tensors.keys() == names
        )

    def _join(self, progress: Progress | None) -> str:
        leaves: dict[_Leaf, bytes] = {}
        done = 0
        for task in as_completed(self._tasks):
            batch = self._tasks[task]
            leaves |= zip(batch, task.result(), strict=True)
            done += sum(leaf.end - leaf.begin for leaf in batch)
            if progress is not None:
                progress(done, self.num_bytes, "hash of the weights")
        for path in self._missing:
            if FileState.read(path) != self._states[path]:
                raise CorruptionError(
                    "models.hash_weights", f"{path.name} changed while it was read: load it again"
                )
        digests: dict[str, str] = {}
        for path in self._states.keys() - self._missing:
            digests |= self._known[path.name].tensors
        for name, entry in self._entries.items():
            if entry.path in self._missing:
                whole = b"".join(leaves[leaf] for leaf in _list_leaves(entry))
                digests[name] = hashlib.sha256(whole).hexdigest()
        if self._missing and self._cache is not None:
            self._cache.write(self._list_files(digests), self._began_ns)
        return self._combine(digests)

    def _list_files(self, digests: dict[str, str]) -> dict[str, HashedFile]:
        tensors: dict[Path, dict[str, str]] = {path: {} for path in self._states}
        for name, entry in self._entries.items():
            tensors[entry.path][name] = digests[name]
        return {path.name: HashedFile(self._states[path], tensors[path]) for path in tensors}

    def _combine(self, digests: dict[str, str]) -> str:
        whole = hashlib.sha256(b"tandem-weights-1\0")
        for name in sorted(self._entries):
            entry = self._entries[name]
            line = [name, entry.dtype, list(entry.shape), digests[name]]
            whole.update(json.dumps(line).encode() + b"\0")
        return whole.hexdigest()


def _list_leaves(entry: "TensorEntry") -> Iterator[_Leaf]:
    """Yield the leaves of a tensor (its ranges of 64 MiB, each hashed by one task); an empty tensor
    has one empty leaf.
    """
    for begin in range(entry.begin, max(entry.end, entry.begin + 1), LEAF_BYTES):
        yield _Leaf(entry.name, begin, min(begin + LEAF_BYTES, entry.end))


def _make_batches(entries: Iterable["TensorEntry"]) -> Iterator[tuple[Path, list[_Leaf]]]:
    """Yield batches of neighbouring leaves (ranges of tensors that are hashed separately), about a
    leaf's size each, so that small tensors share a task.
    """
    batch: list[_Leaf] = []
    path, size = None, 0
    for entry in sorted(entries, key=lambda entry: (entry.path, entry.begin)):
        for leaf in _list_leaves(entry):
            if path is not None and batch and (path != entry.path or size >= LEAF_BYTES):
                yield path, batch
                batch, size = [], 0
            path = entry.path
            batch.append(leaf)
            size += leaf.end - leaf.begin
    if path is not None and batch:
        yield path, batch


def _hash_leaves(path: Path, leaves: list[_Leaf]) -> list[bytes]:
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        begin, end = leaves[0].begin, leaves[-1].end
        os.posix_fadvise(file.fileno(), begin, end - begin, os.POSIX_FADV_WILLNEED)
        return [_hash_leaf(path, file.fileno(), leaf, buffer) for leaf in leaves]


def _hash_leaf(path: Path, descriptor: int, leaf: _Leaf, buffer: memoryview) -> bytes:
    """Hash a leaf by reading into a buffer: a file cut meanwhile gives an error, where a mapping
    would crash.

    Raises: CorruptionError (the file has become shorter).
    """
    digest = hashlib.sha256()
    position = leaf.begin
    while position < leaf.end:
        part = buffer[: min(len(buffer), leaf.end - position)]
        count = os.preadv(descriptor, [part], position)
        if not count:
            raise CorruptionError(
                "models.hash_weights", f"{path.name} ended while it was read: load it again"
            )
        digest.update(part[:count])
        position += count
    return digest.digest()

"""The hash over all bytes of a checkpoint's weights: in threads, beside loading, and once.

A tensor's digest is SHA-256 over the SHA-256 of each of its leaves of 64 MiB, so that one tensor of
a fused MoE layer is hashed by many threads. The digest of the weights is SHA-256 over name, dtype,
shape and digest of every tensor by name: how tensors are spread over files does not count.

Digests are kept by file under the user's cache folder, and are valid while inode, size, mtime and
ctime are what they were. (ctime finds what restores mtime, such as rsync.) A file that changed
within two seconds of the hash might change again without another timestamp: such a digest is not
believed. docs/design/engine/kv_identity.md has the grammar and the measured rates.
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
"""Bytes of a tensor, what one hash takes in; part of the definition of the digest."""

READ_BYTES = 1 << 20
"""Read at once: a buffer that stays in a core's L2 between the copy and the hash."""

MIN_CACHED_BYTES = 64 << 20
"""Bytes of weights that are hashed in about 50 ms: below that no file is kept."""

SETTLED_NS = 2_000_000_000
"""Time between the last change of a file and its hash after which another change gets another
timestamp; covers file systems that keep whole seconds."""

CACHE_VERSION = 1

Progress = Callable[[int, int, str], None]


class FileState(NamedTuple):
    """The facts that are compared to know that a file has not changed."""

    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def read(cls, path: Path) -> "FileState":
        """Return the state of the file itself, links followed."""
        info = path.stat()
        return cls(info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


class HashedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Digests of one file's tensors, and the state of the file that they are of."""

    state: FileState
    tensors: dict[str, str]
    """Hex digest by name."""


class DigestRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All files of a checkpoint."""

    version: int
    folder: str
    files: dict[str, HashedFile]
    """By the file's name in the folder."""


class DigestCache:
    """Digests of one checkpoint's files on disk. Damage and other owners cost a hash, no error.

    Args:
        root: made when something is written, 0700.
        folder: the checkpoint's.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self._folder = str(folder.resolve())
        place = hashlib.sha256(self._folder.encode()).hexdigest()[:12]
        self.path = root.expanduser() / f"{folder.resolve().name}-{place}.json"

    @classmethod
    def of_user(cls, folder: Path) -> "DigestCache":
        """Return the cache of a checkpoint under the user's cache folder."""
        return cls(DEFAULT_ROOT, folder)

    def read(self) -> dict[str, HashedFile]:
        """Return what may be believed, by the file's name."""
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
        """Replace what is there; a disk that refuses is logged.

        Args:
            files: by name.
            began_ns: before any byte of them was read, since the epoch. The record's mtime: what is
                edited while its file is hashed must get another timestamp, however long that takes.
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
    """Return a hash over what the bytes of packed weights are made from.

    Args:
        weights: see ``WeightHasher.result``.
        config: see ``tandem.models.identity.list_config_values``.
        read_dtype: the dtype that rounded the weights before they were packed; empty for none.
    """
    facts = json.dumps([weights, config, read_dtype], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()


class _Leaf(NamedTuple):
    tensor: str
    begin: int
    end: int


class WeightHasher:
    """Hashes a checkpoint's weights in threads of its own, from construction on.

    Use as a context manager; leaving it drops what has not begun. One thread calls ``result``.

    Args:
        entries: the tensors, by name.
        num_threads: at most so many; hashing releases the GIL.
        cache: digests of files that have not changed are taken from here; None = hash all.
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
        """Bytes that are hashed; 0 if all digests were known."""
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
        """Wait for the digest of the weights, hex; the same one each time.

        Args:
            progress: ``progress(done_bytes, total_bytes, what)`` while there is something to wait
                for.

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
    """Yield the leaves of a tensor; an empty one has an empty leaf."""
    for begin in range(entry.begin, max(entry.end, entry.begin + 1), LEAF_BYTES):
        yield _Leaf(entry.name, begin, min(begin + LEAF_BYTES, entry.end))


def _make_batches(entries: Iterable["TensorEntry"]) -> Iterator[tuple[Path, list[_Leaf]]]:
    """Yield neighbours in a file, about a leaf's size of them: small tensors cost no task each."""
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
    """Read into a buffer, not mapped: a file that is cut meanwhile is an error and no SIGBUS."""
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

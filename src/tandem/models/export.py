"""Writing of a checkpoint in another stored format: ``tandem convert --to``.

Values are written as bfloat16; codes in layouts that other programs read: integers as
compressed-tensors, fp8 as DeepSeek's blocks. One matrix is in memory at a time. Everything is
written to a folder beside the target (``Draft``), which is renamed once all of it is on the disk;
``config.json``, without which a folder is no model, is written last.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tandem.core.errors import CapacityError, ConfigError, NotFoundError, UnsupportedError
from tandem.kernels.weights.formats import (
    WEIGHT_FORMATS,
    WeightFormat,
    explain_groups,
    find_format,
    fit_groups,
)
from tandem.models.codecs.writing import (
    CODED_PARTS,
    OTHER_MODULES,
    EncoderChoice,
    make_encoder,
)
from tandem.models.families import Checkpoint, open_checkpoint, read_json
from tandem.models.families.names import IMAGE_PARTS
from tandem.models.gguf.mixtures import MIXTURES
from tandem.models.sources.gguf_files import find_gguf
from tandem.models.sources.safetensors import SafetensorsSource
from tandem.models.sources.source import Progress

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "COPIED",
    "INDEX",
    "Draft",
    "ExportReport",
    "check_absent",
    "check_room",
    "explain_write",
    "export_checkpoint",
]

SHARD_BYTES = 4 << 30
MARKER = ".tandem-convert"
"""File in a folder that a conversion writes to. The conversion at work holds a lock on it; a folder
with an unlocked marker was left by a killed conversion.
"""
LOCK_ATTEMPTS = 100
"""Attempts to take the lock; each fails only if another conversion ended at that moment."""
COPIED = (".json", ".jinja", ".model", ".txt", ".md", ".tiktoken")
"""Suffixes of other files that are copied to the new checkpoint; code is not."""
INDEX = "model.safetensors.index.json"
PLAIN_WORDS = (
    *("embed_tokens", "lm_head", "gate", "router", "shared_expert_gate"),
    *("in_proj_a", "in_proj_b", "in_proj_ba", "a_proj", "b_proj"),
)
"""Last names of modules whose matrices are never quantized: embeddings, from which rows are looked
up, and scores that choose or gate.
"""
ST_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}
ST_DTYPES = {name: dtype for dtype, name in ST_NAMES.items()}


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The files that a conversion of a checkpoint wrote, and their size."""

    folder: str
    weight_format: str
    num_tensors: int
    num_coded: int
    """Number of matrices that are now stored as codes."""
    size_bytes: int
    source_bytes: int
    note: str = ""
    """A note for the user; empty if there is none."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """A tensor to write; its weight, when encoded, gives several tensors, and ``key`` (the last
    part of the name) says which this is.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    weight: str
    """Name of the weight to which the tensor belongs."""
    key: str

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return prod(self.shape) * self.dtype.itemsize


def export_checkpoint(
    path_or_id: str | Path, to: str, out: Path, *, progress: Progress | None = None
) -> ExportReport:
    """Write a checkpoint with its weights in another format.

    Args:
        path_or_id: a folder, or a hub id that was pulled before.
        to: ``bf16``, ``fp8`` or an integer format; embeddings, heads, routers and vectors remain
            plain values, in bfloat16 if they have two dimensions.
        out: the folder to make; it must not exist, nor be written by another conversion.
        progress: called after each tensor of the source.

    Raises:
        NotFoundError, CorruptionError: errors of the source.
        ConfigError: ``out`` exists or is being written, or an unknown format.
        UnsupportedError: a format without checkpoint layout, weights that are not matrices, or
            GGUF.
        CapacityError: the disk is full.
    """
    checkpoint = open_checkpoint(path_or_id)
    try:
        find_format(to)
    except NotFoundError:
        what = f"to {to!r}: no format to write: {_advise_format(to)}"
        raise ConfigError("models.export", what, field="to") from None
    check_absent(out)
    if find_gguf(checkpoint.folder) is not None:
        what = f"{checkpoint.folder.name} is GGUF: it runs as it is; convert its original"
        raise UnsupportedError("models.export", what)
    with ExitStack() as stack:
        source = SafetensorsSource(
            checkpoint.folder,
            dtype=torch.float32,
            progress=progress,
            quantization=checkpoint.quantization,
        )
        stack.enter_context(source)
        weights = _list_weights(source)
        widths = {shape[1] for name, shape in weights.items() if _is_matrix(name, shape)}
        weight_format = fit_groups(to, widths)
        encoders, raised = _choose_encoders(to, weight_format, weights)
        _check_matrices(weights, encoders)
        planned = list(_plan(weights, source, encoders))
        try:
            with Draft(out) as draft:
                check_room(out, sum(tensor.size_bytes for tensor in planned))
                _write_shards(draft.folder, planned, _Maker(source, weights, encoders))
                _write_rest(draft.folder, checkpoint, encoders, planned)
                draft.publish()
        except OSError as error:
            raise explain_write(error, out) from error
    return ExportReport(
        folder=str(out),
        weight_format=weight_format.name,
        num_tensors=len(planned),
        num_coded=len({t.weight for t in planned if t.key}),
        size_bytes=sum(tensor.size_bytes for tensor in planned),
        source_bytes=sum(entry.end - entry.begin for entry in source.entries.values()),
        note="; ".join(filter(None, (explain_groups(to, weight_format, widths), raised))),
    )


def _advise_format(name: str) -> str:
    """Return which format may have been meant, or else all that can be written."""
    names = ["int8", "int4"]
    for weight_format in WEIGHT_FORMATS.values():
        with suppress(UnsupportedError):
            make_encoder(weight_format)
            names.append(weight_format.name)
    near = get_close_matches(name, [*names, *MIXTURES], n=1)
    if near:
        return f"did you mean --to {near[0]}?"
    return f"choose one of {', '.join(names)}, or of a GGUF file's {', '.join(MIXTURES)}"


def explain_write(error: OSError, out: Path) -> Exception:
    """Convert an OSError from writing a folder to an error for the user."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"the disk of {out} is full: free space there, or name a folder elsewhere"
        return CapacityError("models.export", what)
    return ConfigError("models.export", f"cannot write {out}: {error}", field="out")


def _list_weights(source: SafetensorsSource) -> dict[str, tuple[int, ...]]:
    """Return all weights with the shapes of their values; tensors that hold codes are not
    listed.
    """
    coded = source.list_coded()
    parts = {part for name in coded for part in source.list_parts(name)}
    plain = {
        name: entry.shape
        for name, entry in source.entries.items()
        if name not in parts and not CODED_PARTS.search(name)
    }
    return dict(sorted((plain | coded).items()))


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    module = name.removesuffix(".weight")
    word = module.rpartition(".")[2]
    is_seen = name.startswith(IMAGE_PARTS)
    return len(shape) == 2 and name.endswith(".weight") and word not in PLAIN_WORDS and not is_seen


def _choose_encoders(
    to: str, weight_format: WeightFormat, weights: dict[str, tuple[int, ...]]
) -> tuple[EncoderChoice | None, str]:
    """Return the encoders of a model's matrices, and a note for the user if there are two.

    ``int4`` of a model with routed experts keeps queries, keys and values in int8: they are a few
    hundredths of such a model's weights, and half of what 4 bits lose, most of it by the values.
    llama.cpp's mixtures do likewise. A whole name, such as ``int4g32``, means all matrices.

    Raises: UnsupportedError (no checkpoint layout has the format).
    """
    usual = make_encoder(weight_format)
    if usual is None:
        return None, ""
    names = [name for name, shape in weights.items() if _is_matrix(name, shape)]
    attention = {weights[name][1] for name in names if OTHER_MODULES.match(name[: -len(".weight")])}
    if to != "int4" or not attention or not any(".experts." in name for name in names):
        return EncoderChoice(usual), ""
    kept = fit_groups("int8", attention)
    return EncoderChoice(usual, make_encoder(kept)), f"queries, keys and values in {kept.name}"


def _check_matrices(weights: dict[str, tuple[int, ...]], encoders: EncoderChoice | None) -> None:
    if encoders is None:
        return
    for name, shape in weights.items():
        if len(shape) > 2 and ".experts." in name:
            raise UnsupportedError(
                "models.export",
                f"{name!r}, {list(shape)}, has the experts of a layer in one tensor, which no "
                "layout of codes has: use --to bf16",
            )
        if _is_matrix(name, shape):
            encoders.find(name).check(name, shape)


def _plan(
    weights: dict[str, tuple[int, ...]], source: SafetensorsSource, encoders: EncoderChoice | None
) -> Iterator[_Planned]:
    for name, shape in weights.items():
        if encoders is not None and _is_matrix(name, shape):
            stem = name.removesuffix(".weight")
            for key, (dtype, size) in encoders.find(name).list_tensors(shape).items():
                yield _Planned(f"{stem}.{key}", dtype, size, name, key)
            continue
        entry = source.entries.get(name)
        stored = None if entry is None or source.find_storage(name) else ST_DTYPES[entry.dtype]
        # Vectors keep their stored dtype: some, such as a router's bias, are stored in float32.
        dtype = torch.bfloat16 if stored is None or len(shape) > 1 else stored
        yield _Planned(name, dtype, shape, name, "")


class _Maker:
    """Maker of the tensors to write; it reads and encodes one weight at a time, of which several
    tensors may come.
    """

    def __init__(
        self,
        source: SafetensorsSource,
        weights: dict[str, tuple[int, ...]],
        encoders: EncoderChoice | None,
    ) -> None:
        self._source = source
        self._weights = weights
        self._encoders = encoders
        self._name = ""
        self._tensors: dict[str, Tensor] = {}

    def make(self, planned: _Planned) -> Tensor:
        if self._name != planned.weight:
            self._name = planned.weight
            values = torch.empty(self._weights[planned.weight])
            self._source.read_into(planned.weight, values)
            if planned.key and self._encoders is not None:
                self._tensors = self._encoders.find(planned.weight).encode(values)
            else:
                self._tensors = {"": values.to(planned.dtype)}
        tensor = self._tensors[planned.key]
        assert (tensor.dtype, tuple(tensor.shape)) == (planned.dtype, planned.shape), planned.name
        return tensor.contiguous()


def check_absent(out: Path) -> None:
    """Check that a folder does not exist. Raises: ConfigError (something has its name)."""
    if out.exists() or out.is_symlink():
        raise ConfigError(
            "models.export", f"{out} is there already: name a new folder", field="out"
        )


def check_room(out: Path, size_bytes: int) -> None:
    """Raise CapacityError if the disk of a folder has no room."""
    free = shutil.disk_usage(out.parent).free
    if size_bytes > free:
        raise CapacityError(
            "models.export",
            f"{out} takes {size_bytes >> 20} MiB and its disk has {free >> 20} free: free "
            "space there, or name a folder elsewhere",
        )


class Draft:
    """The folder beside ``out`` that a conversion writes to, and locks until exit.

    An unpublished folder is removed at exit. A killed conversion leaves the folder with its marker,
    but the lock ends with its process, so the next conversion takes the folder over.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self.folder = out.with_name(out.name + ".partial")
        self._marker = self.folder / MARKER
        self._lock: int | None = None

    def __enter__(self) -> "Self":
        """Create and lock the folder.

        Raises: ConfigError (another conversion is at work, or the folder is not a conversion's);
            OSError (the folder cannot be made or emptied).
        """
        self._out.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(LOCK_ATTEMPTS):
            if self._lock is None:
                self._try_lock()
        if self._lock is None:
            raise self._refuse_second()
        try:
            # Check again that the output is absent: the process that held the lock before may have
            # published it.
            check_absent(self._out)
            self._empty()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def publish(self) -> None:
        """Sync all files to the disk and rename the draft folder to its final name ``out``."""
        for path in (*self.folder.iterdir(), self.folder):
            _sync(path)
        self.folder.rename(self._out)
        # The marker is removed only after the rename: a draft folder without its marker would block
        # the next conversion.
        self._marker = self._out / MARKER
        _sync(self._out.parent)

    def _try_lock(self) -> None:
        """Try to lock the marker; nothing happens if the folder was renamed or removed meanwhile.

        Raises: ConfigError (another conversion holds the lock).
        """
        is_link = self.folder.is_symlink()
        if not is_link:
            self.folder.mkdir(exist_ok=True)
        if is_link or (any(self.folder.iterdir()) and not self._marker.exists()):
            if not is_link and not self.folder.exists():
                return
            what = f"{self.folder} is in the way, and no conversion made it: remove it"
            raise ConfigError("models.export", what, field="out")
        with ExitStack() as stack:
            try:
                lock = os.open(self._marker, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_same = os.path.samestat(os.fstat(lock), self._marker.stat())
            except FileNotFoundError:
                return
            except BlockingIOError:
                raise self._refuse_second() from None
            if is_same:
                self._lock = lock
                stack.pop_all()

    def _refuse_second(self) -> ConfigError:
        what = f"another conversion writes {self._out} now: wait for it, or name another folder"
        return ConfigError("models.export", what, field="out")

    def _empty(self) -> None:
        """Remove everything from the draft folder but the marker file, by which a later conversion
        recognises a draft.
        """
        for path in self.folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != MARKER:
                path.unlink()

    def _leave(self) -> None:
        assert self._lock is not None
        with suppress(OSError):
            if self._marker.parent == self.folder:
                self._empty()
            self._marker.unlink()
            if self._marker.parent == self.folder:
                self.folder.rmdir()
        os.close(self._lock)


def _split(planned: list[_Planned]) -> list[list[_Planned]]:
    shards: list[list[_Planned]] = [[]]
    size = 0
    for tensor in planned:
        if shards[-1] and size + tensor.size_bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.size_bytes
    return shards


def _write_shards(folder: Path, planned: list[_Planned], maker: _Maker) -> None:
    shards = _split(planned)
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys((tensor.name for tensor in shard), name)
        _write_shard(folder / name, shard, maker.make)
    if len(shards) > 1:
        total = sum(tensor.size_bytes for tensor in planned)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
        (folder / INDEX).write_text(text)


def _write_shard(path: Path, shard: list[_Planned], make: Callable[[_Planned], Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position, begins = 0, dict[str, int]()
    # Tensors of wide items come first in the file, so that each begins at a multiple of its item
    # size.
    for tensor in sorted(shard, key=lambda tensor: -tensor.dtype.itemsize):
        begins[tensor.name], end = position, position + tensor.size_bytes
        header[tensor.name] = {
            "dtype": ST_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        # Allocate the whole file at once, so that a full disk is found before hours of work.
        os.posix_fallocate(file.fileno(), 0, 8 + len(text) + position)
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in shard:
            data = make(tensor)
            file.seek(8 + len(text) + begins[tensor.name])
            if data.numel():
                file.write(data.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _write_rest(
    folder: Path, checkpoint: Checkpoint, encoders: EncoderChoice | None, planned: list[_Planned]
) -> None:
    for path in sorted(checkpoint.folder.iterdir()):
        is_weights = path.name.endswith((INDEX, ".safetensors")) or path.name == "config.json"
        if path.is_file() and path.suffix in COPIED and not is_weights:
            shutil.copyfile(path, folder / path.name)
    config = read_json(checkpoint.folder / "config.json")
    config.pop("quantization_config", None)
    config.pop("compression_config", None)
    config.pop("torch_dtype", None)
    config["dtype"] = "bfloat16"
    if encoders is not None:
        coded = {tensor.weight for tensor in planned if tensor.key}
        plain = {
            tensor.weight.removesuffix(".weight")
            for tensor in planned
            if tensor.weight not in coded and len(tensor.shape) == 2
        }
        config["quantization_config"] = encoders.describe(sorted(plain))
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

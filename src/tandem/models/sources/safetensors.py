"""A safetensors checkpoint, read tensor by tensor through mmap, with every tensor accounted for.

The safetensors format: 8 bytes little-endian header length, a JSON object from tensor name to
dtype, shape and byte range, then the bytes. The header is parsed here, because errors must name
tensor and file before anything is allocated. Data is copied from the page cache directly to the
operator's memory.

Invariants: a name is in one file; a file's ranges lie within it; files lie in the folder; after
loading, every tensor was used or is known to be harmless. Pickles are never opened.
"""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Self, TypeGuard

import torch
from torch import Tensor

from tandem.core.errors import (
    ConfigError,
    CorruptionError,
    NotFoundError,
    ShapeError,
    UnsupportedError,
)
from tandem.kernels.cpu.device import CPU
from tandem.kernels.device import Device
from tandem.kernels.devices import choose_execution
from tandem.kernels.interfaces import Execution, Shard
from tandem.kernels.weights.blocks import CodedMatrix
from tandem.kernels.weights.formats import WeightFormat
from tandem.models.codecs.choice import UNUSED_TENSORS, make_codec
from tandem.models.codecs.codec import Codec
from tandem.models.families import read_json
from tandem.models.planning.quantization import Quantization
from tandem.models.sources.foreign import refuse_foreign_tensors
from tandem.models.sources.mapping import MappedFiles
from tandem.models.sources.shards import cut_codes, decode_into
from tandem.models.sources.source import Progress, TensorEntry, UseLedger, require_finite

__all__ = ["SafetensorsSource", "read_header"]

MAX_HEADER_BYTES = 100 << 20
"""Largest header, the limit of the safetensors library."""

MAX_DIMENSIONS = 16

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Stored dtypes that convert to a model's dtype; all others are refused by name."""

OTHER_DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16"), 16),
    **dict.fromkeys(("I32", "U32"), 32),
    **dict.fromkeys(("I64", "U64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


def _corrupt(path: Path, what: str) -> CorruptionError:
    return CorruptionError("models.read_weights", f"{path.name}: {what}: download it again")


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Parse and check the header of a safetensors file.

    Raises:
        CorruptionError: the header is cut or invalid, or a tensor's range does not fit its shape or
            the file; the text names file and tensor.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise _corrupt(path, f"a header of {length} bytes in a file of {size}")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise _corrupt(path, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _corrupt(path, "its header is not an object")
    header.pop("__metadata__", None)
    entries = {name: _read_entry(path, name, raw, 8 + length) for name, raw in header.items()}
    position = 8 + length
    for entry in sorted(entries.values(), key=lambda entry: entry.begin):
        if entry.begin != position:
            raise _corrupt(path, f"tensor {entry.name!r} overlaps another or leaves a gap")
        if entry.end > size:
            missing = entry.end - size
            raise _corrupt(path, f"the file is cut: tensor {entry.name!r} misses {missing} bytes")
        position = entry.end
    if position != size:
        raise _corrupt(path, f"{size - position} bytes belong to no tensor")
    return entries


def _read_entry(path: Path, name: str, raw: object, base: int) -> TensorEntry:
    if not isinstance(raw, dict):
        raise _corrupt(path, f"tensor {name!r} is described by a {type(raw).__name__}")
    dtype, shape, offsets = raw.get("dtype"), raw.get("shape"), raw.get("data_offsets")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise _corrupt(path, f"tensor {name!r} has shape {shape!r}, offsets {offsets!r}")
    if not isinstance(dtype, str) or (dtype not in DTYPES and dtype not in OTHER_DTYPE_BITS):
        raise _corrupt(path, f"tensor {name!r} has the unknown dtype {dtype!r}")
    bits = DTYPES[dtype].itemsize * 8 if dtype in DTYPES else OTHER_DTYPE_BITS[dtype]
    if (offsets[1] - offsets[0]) * 8 != prod(shape) * bits:
        raise _corrupt(
            path, f"tensor {name!r}, {dtype} {shape}, has {offsets[1] - offsets[0]} bytes"
        )
    return TensorEntry(name, path, dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size < 1 << 62 for size in value)
    )


def _list_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder, those of the index if there is one.

    Raises: NotFoundError (a file is missing, or there is none); ConfigError (the index names a file
        outside of the folder); UnsupportedError (pickles only).
    """
    index_path = folder / "model.safetensors.index.json"
    if index_path.exists():
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise _corrupt(index_path, "no weight_map in it")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            # A shard must be a plain file name: a path could reach any file of the host. The file
            # itself may be a symbolic link, as in the hub's cache.
            if name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
                raise ConfigError(
                    "models.open_weights",
                    f"{index_path.name} refers to {name!r}, outside of its folder: not read",
                )
            if not (folder / name).is_file():
                first = next(t for t, file in weight_map.items() if file == name)
                raise NotFoundError(
                    "models.open_weights",
                    f"{name}, which holds {first!r} by the index, is missing in {folder}: pull it",
                )
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    single = folder / "model.safetensors"
    if single in files:
        return [single]
    if len(files) == 1:
        return files
    if files:
        raise NotFoundError(
            "models.open_weights",
            f"{len(files)} safetensors files but no {index_path.name} in {folder}: pull it",
        )
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise UnsupportedError(
            "models.open_weights",
            f"{folder} has pickled weights only, which can run code on loading: "
            "convert them to safetensors",
        )
    raise NotFoundError("models.open_weights", f"no *.safetensors file in {folder}")


class SafetensorsSource:
    """The weights of a checkpoint folder with safetensors.

    Not thread-safe. Use as a context manager: files are mapped while it is open.

    Args:
        folder: folder with one safetensors file, or several and their index.
        dtype: dtype in which operators read values.
        device: device on which operators get their weights.
        execution: implementation of the operators that read; None: chosen for device and dtype.
        progress: ``progress(done_bytes, total_bytes, what)`` after each tensor; bytes as stored.
        quantization: quantization of the weights; None: they are not quantized.

    Raises:
        NotFoundError: no weights, or a file that the index names is missing.
        CorruptionError: a file does not fit its header.
        ConfigError: the index points outside of the folder, or disagrees with the files.
        UnsupportedError: weights are stored as pickles only.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: Device = CPU,
        execution: Execution | None = None,
        progress: Progress | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        self.folder = folder
        self.dtype = dtype
        self.device = device.torch_device
        self.execution = execution or choose_execution(device, dtype)
        self.entries: dict[str, TensorEntry] = {}
        for path in _list_files(folder):
            for name, entry in read_header(path).items():
                if name in self.entries:
                    raise ConfigError(
                        "models.open_weights",
                        f"tensor {name!r} is in {self.entries[name].path.name} and in {path.name}",
                    )
                self.entries[name] = entry
        self._check_index()
        refuse_foreign_tensors(folder, self.entries)
        self._words: dict[str, list[str]] = {}
        for name in self.entries:
            module, _, word = name.rpartition(".")
            self._words.setdefault(module, []).append(word)
        self._codec = None if quantization is None else make_codec(quantization)
        self._ledger = UseLedger(
            self.entries, progress, None if quantization is None else UNUSED_TENSORS
        )
        self._maps = MappedFiles()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the files; idempotent."""
        self._maps.close()

    def _check_index(self) -> None:
        index_path = self.folder / "model.safetensors.index.json"
        if not index_path.exists():
            return
        for name, file in read_json(index_path)["weight_map"].items():
            entry = self.entries.get(name)
            if entry is None or entry.path.name != file:
                raise NotFoundError(
                    "models.open_weights",
                    f"tensor {name!r} is not in {file}, where {index_path.name} says it is",
                )

    def has(self, name: str) -> bool:
        """Return True if the checkpoint holds ``name``, as plain values or as codes."""
        return name in self.entries or self._find_codec(name) is not None

    def list_coded(self) -> dict[str, tuple[int, ...]]:
        """Return the weights that are stored as codes, with the shapes of their values."""
        return {} if self._codec is None else self._codec.list_weights(self)

    def list_parts(self, name: str) -> list[str]:
        """Return the tensors of a quantized weight: all tensors of its module except the bias."""
        stem = name.removesuffix(".weight")
        own = [n for n in (f"{name}_blocks", f"{name}_scales") if n in self.entries]
        parts = self._words.get(stem, [])
        return own or [f"{stem}.{word}" for word in parts if word != "bias"]

    def find_storage(self, name: str) -> str:
        """Return how a weight is coded; empty for plain values."""
        codec = self._find_codec(name)
        return "" if codec is None else codec.tell(name)

    def read_into(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        """Copy or decode a weight, or a shard of it, into ``out``."""
        codec = self._find_codec(name)
        if codec is not None:
            decode_into(out, shard, lambda whole: codec.read_into(self, name, whole))
        elif shard is None:
            out.copy_(self.view(name, DTYPES, tuple(out.shape)))
        else:
            whole = self.view(name, DTYPES, shard.widen(tuple(out.shape)))
            out.copy_(whole.narrow(shard.axis, shard.start, shard.stop - shard.start))
        require_finite(name, out)

    def find_format(self, name: str) -> WeightFormat | None:
        """Return the weight format that can hold a weight's codes; None if there is none."""
        codec = self._find_codec(name)
        return None if codec is None else codec.find_format(self, name)

    def read_packed(
        self, name: str, expert_id: int | None = None, shard: Shard | None = None
    ) -> CodedMatrix:
        """Return a weight's codes in the format of ``find_format``.

        Raises: UnsupportedError (no weight format holds them); the errors of the codec.
        """
        codec = self._find_codec(name)
        if codec is None:
            what = f"tensor {name!r} has no codes: read its values"
            raise UnsupportedError("models.read_weights", what)
        matrix = codec.read_packed(self, name, expert_id)
        return matrix if shard is None else cut_codes(name, matrix, shard)

    def _find_codec(self, name: str) -> Codec | None:
        codec = self._codec
        return codec if codec is not None and codec.holds(self, name) else None

    def view(
        self, name: str, dtypes: Mapping[str, torch.dtype], shape: tuple[int, ...] | None = None
    ) -> Tensor:
        """Return a tensor as stored, not copied; marks it as used."""
        entry = self.entries.get(name)
        where = "models.read_weights"
        if entry is None:
            raise NotFoundError(
                where, f"tensor {name!r} is missing in {self.folder}: is the checkpoint complete?"
            )
        if entry.dtype not in dtypes:
            raise ShapeError(
                where,
                f"tensor {name!r} in {entry.path.name} has dtype {entry.dtype}: "
                f"need one of {', '.join(dtypes)}",
            )
        shape = entry.shape if shape is None else shape
        if entry.shape != shape:
            raise ShapeError(
                where,
                f"tensor {name!r} in {entry.path.name} has shape {list(entry.shape)}: "
                f"the configuration needs {list(shape)}",
            )
        self._ledger.mark(name)
        dtype, count = dtypes[entry.dtype], prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        data = self._maps.get(entry.path)
        return torch.frombuffer(data, dtype=dtype, count=count, offset=entry.begin).view(shape)

    def skip(self, prefix: str) -> None:
        """Mark all tensors whose names start with a prefix as used, so that they do not count as
        left over after loading.
        """
        self._ledger.skip(prefix)

    def list_sizes(self) -> dict[str, int]:
        """Return the stored bytes of each tensor."""
        return {name: entry.end - entry.begin for name, entry in self.entries.items()}

    def check_all_used(self, harmless: Mapping[str, str]) -> dict[str, str]:
        """Return the unused tensors with the reason why they are not needed, {name: why}."""
        return self._ledger.check(harmless)

    def holds_exactly(self, dtype: torch.dtype) -> bool:
        """Return True if reading in ``dtype`` rounds no stored value."""
        if self._codec is not None and not self._codec.is_exact:
            return False
        return all(
            entry.dtype not in DTYPES or torch.promote_types(DTYPES[entry.dtype], dtype) == dtype
            for entry in self.entries.values()
        )

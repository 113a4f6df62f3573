"""A checkpoint's tensors, read one by one through mmap, with every tensor accounted for.

The safetensors format: 8 bytes little-endian header length, a JSON object from tensor name to
dtype, shape and byte range, then the bytes. We parse the header ourselves, because what is wrong
with a file must be told by tensor name and file before anything is allocated; data goes straight
from the page cache into the operator's memory, so loading needs no copy of its own.

Invariants: a name is in one file; a file's ranges lie within it; files lie in the folder; after
loading, every tensor was used or is known to be harmless. Pickles are never opened.
"""

import json
import mmap
import re
from collections.abc import Callable
from dataclasses import dataclass
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
from tandem.models.families import read_json

__all__ = ["TensorEntry", "WeightSource"]

MAX_HEADER_BYTES = 100 << 20
"""The limit of the format's own library."""

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

HARMLESS_EXTRAS = {
    r"\.rotary_emb\.inv_freq$": "RoPE frequencies, which are computed from the configuration",
    r"\.self_attn\.masked_bias$|\.self_attn\.bias$": "the causal mask of an old checkpoint",
}
"""Tensors of a checkpoint that no operator needs, as patterns, and why."""

BYTES = {"U8": torch.uint8}

BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the two tensors of a weight in mxfp4, as gpt-oss's checkpoints have them."""

GROUP_SIZE = 32
"""Inputs that share a scale in mxfp4."""

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""What the codes of a positive float of 4 bits stand for."""

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor is: byte range within ``path``, header already skipped."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def _corrupt(path: Path, what: str) -> CorruptionError:
    return CorruptionError("models.read_weights", f"{path.name}: {what}: download it again")


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Parse and check the header of a safetensors file.

    Raises:
        CorruptionError: it is cut, absurd, or a tensor's range does not fit its shape or the
            file; the text names file and tensor.
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


def decode_mxfp4(blocks: Tensor, exponents: Tensor) -> Tensor:
    """Return the float32 weights of OCP microscaling blocks, [N, K].

    Args:
        blocks: uint8 [N, K / 32, 16]: byte i holds input 2 i in its low half, 2 i + 1 in its high.
        exponents: uint8 [N, K / 32]: e8m0, so 127 is a scale of 1, and 255 is NaN.
    """
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(2).int()
    values = torch.where(codes >= 8, -E2M1[codes & 7], E2M1[codes & 7])
    # By their bits, which are a float's own exponent; torch's powers need not be exact.
    bits = exponents.int() << 23
    bits[exponents == 0] = 1 << 22
    bits[exponents == 255] = 0x7FC0_0000
    scales = bits.view(torch.float32)
    return (values * scales[..., None]).flatten(1)


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size < 1 << 62 for size in value)
    )


def _list_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder; the index decides where there is one."""
    index_path = folder / "model.safetensors.index.json"
    if index_path.exists():
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise _corrupt(index_path, "no weight_map in it")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            # A shard is a plain name: a path could reach any file of the machine. The file itself
            # may be a symbolic link, as in the hub's cache.
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


class WeightSource:
    """All tensors of a checkpoint folder; a ``WeightReader`` for operators.

    Not thread-safe. Use as a context manager: files are mapped while it is open.

    Args:
        folder: holds one safetensors file, or several and their index.
        dtype: what operators get.
        device: where they get it.
        progress: ``progress(done_bytes, total_bytes, what)`` after each tensor; bytes as stored.

    Raises:
        NotFoundError: no weights, or a file that the index names is missing.
        CorruptionError: a file is not what its header says.
        ConfigError: the index points outside of the folder, or disagrees with the files.
        UnsupportedError: weights in pickles only.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
    ) -> None:
        self.folder = folder
        self.dtype = dtype
        self.device = torch.device(device)
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
        self.total_bytes = sum(entry.end - entry.begin for entry in self.entries.values())
        self._progress = progress
        self._used: set[str] = set()
        self._done_bytes = 0
        self._maps: dict[Path, mmap.mmap] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the files; idempotent."""
        while self._maps:
            self._maps.popitem()[1].close()

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
        """Whether the checkpoint holds ``name``, as it is or in blocks of mxfp4."""
        return name in self.entries or f"{name}{BLOCKS}" in self.entries

    def read_into(self, name: str, out: Tensor) -> None:
        """Copy a tensor into ``out``; see ``tandem.kernels.operator.WeightReader``.

        Experts that are stored in blocks of mxfp4, ``{name}_blocks`` and ``{name}_scales``, are
        decoded: exactly, in float32 and bfloat16.
        """
        if name not in self.entries and f"{name}{BLOCKS}" in self.entries:
            self._decode_into(name, out)
            return
        out.copy_(self._view(name, DTYPES, tuple(out.shape)))

    def _view(self, name: str, dtypes: dict[str, torch.dtype], shape: tuple[int, ...]) -> Tensor:
        """Return a tensor as it is stored, not copied; marks it as used."""
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
        if entry.shape != shape:
            raise ShapeError(
                where,
                f"tensor {name!r} in {entry.path.name} has shape {list(entry.shape)}: "
                f"the configuration needs {list(shape)}",
            )
        self._mark_used(entry)
        dtype, count = dtypes[entry.dtype], prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        data = self._map(entry.path)
        return torch.frombuffer(data, dtype=dtype, count=count, offset=entry.begin).view(shape)

    def _decode_into(self, name: str, out_EKN: Tensor) -> None:
        """Decode experts stored as [E, N, K / 32, 16] blocks and [E, N, K / 32] scales."""
        count, inputs, outputs = out_EKN.shape
        groups = inputs // GROUP_SIZE
        blocks = self._view(f"{name}{BLOCKS}", BYTES, (count, outputs, groups, GROUP_SIZE // 2))
        scales = self._view(f"{name}{SCALES}", BYTES, (count, outputs, groups))
        # One expert at a time: in float32 they take eight times what is stored.
        for out_KN, codes, exponents in zip(out_EKN, blocks, scales, strict=True):
            out_KN.copy_(decode_mxfp4(codes, exponents).t())

    def skip(self, prefix: str) -> None:
        """Mark tensors as used; see ``tandem.kernels.operator.WeightReader``."""
        for name, entry in self.entries.items():
            if name.startswith(prefix):
                self._mark_used(entry)

    def _mark_used(self, entry: TensorEntry) -> None:
        if entry.name in self._used:
            return
        self._used.add(entry.name)
        self._done_bytes += entry.end - entry.begin
        if self._progress is not None:
            self._progress(self._done_bytes, self.total_bytes, entry.name)

    def check_all_used(self, harmless: dict[str, str]) -> dict[str, str]:
        """Return {name: why} of the tensors nobody read.

        Args:
            harmless: exact names that this model has no use for, and why.

        Raises:
            ConfigError: a tensor was not used and is not known to be harmless.
        """
        unused: dict[str, str] = {}
        for name in sorted(self.entries.keys() - self._used):
            reasons = [why for p, why in HARMLESS_EXTRAS.items() if re.search(p, name)]
            if name in harmless:
                reasons.append(harmless[name])
            if not reasons:
                raise ConfigError(
                    "models.read_weights",
                    f"tensor {name!r} in {self.entries[name].path.name} belongs to no module of "
                    "the model: the configuration does not fit the weights",
                )
            unused[name] = reasons[0]
        return unused

    def holds_exactly(self, dtype: torch.dtype) -> bool:
        """Whether reading in ``dtype`` rounds no stored tensor."""
        return all(
            entry.dtype not in DTYPES or torch.promote_types(DTYPES[entry.dtype], dtype) == dtype
            for entry in self.entries.values()
        )

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            with path.open("rb") as file:
                # Copy-on-write: torch wants a writable buffer, and nothing writes to it, so the
                # pages stay the page cache's and cost no memory of ours.
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[path]

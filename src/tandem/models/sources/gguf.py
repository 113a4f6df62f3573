"""Weights in GGUF files, read through mmap.

``GgufSource`` returns weights by the skeleton's names: ``tandem.models.gguf.names`` tells which
tensors make up a weight, ``tandem.models.codecs.gguf_blocks`` the meaning of their bytes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem._native import decode_blocks
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
from tandem.kernels.weights.blocks import BlockMatrix, CodedMatrix, interleave_rows
from tandem.kernels.weights.formats import WeightFormat, find_format, find_whole_blocks
from tandem.kernels.weights.recode import join_formats
from tandem.models.codecs.gguf_blocks import BLOCK_TYPES, FLOAT_TYPES
from tandem.models.gguf.names import COPIES, HARMLESS, How, Recipe, list_noted, make_recipes
from tandem.models.gguf.states import StateSizes, find_sizes
from tandem.models.sources.gguf_files import GgufFiles
from tandem.models.sources.gguf_header import BLOCK_SIZES, GgufTensor
from tandem.models.sources.mapping import MappedFiles
from tandem.models.sources.shards import cut_codes, decode_into
from tandem.models.sources.source import Progress, TensorEntry, UseLedger, require_finite

__all__ = ["GgufSource"]

TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CHUNK_WEIGHTS = 1 << 20
"""Weights that are decoded at a time, which are in float32 in addition to the result."""

CODED_HOW = (
    How.PLAIN,
    How.UNPERMUTE,
    How.INTERLEAVE,
    How.TRANSPOSE,
    How.ORDERED,
    How.TURNED_INPUTS,
)
"""Recipes that keep all inputs of an output together, so its codes can be used unchanged."""


class GgufSource:
    """The weights of a GGUF model.

    Not thread-safe. Use as a context manager: files are mapped while it is open.

    Args:
        path: the file, or any part of a split one.
        dtype: dtype in which operators read values.
        device: device on which operators get their weights.
        execution: implementation of the operators that read; None: chosen for device and dtype.
        progress: called once for each tensor, with the bytes as stored.

    Raises: the errors of ``GgufFiles.open``; UnsupportedError (a tensor's type cannot be decoded).
    """

    def __init__(
        self,
        path: Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: Device = CPU,
        execution: Execution | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.path = path
        self.dtype = dtype
        self.device = device.torch_device
        self.execution = execution or choose_execution(device, dtype)
        self.files = GgufFiles.open(path)
        self._harmless = dict(_list_harmless(self.files.tensors))
        for tensor in self.files.tensors.values():
            self._check_kind(tensor)
        self.entries: dict[str, TensorEntry] = {
            t.name: TensorEntry(t.name, self.files.paths[t.name], t.kind, t.shape, t.begin, t.end)
            for t in self.files.tensors.values()
        }
        self._recipes = make_recipes(
            self.files.architecture, self.files.tensors, self._find_state_sizes()
        )
        num_layers = self.files.metadata.get(f"{self.files.architecture}.block_count")
        if type(num_layers) is int and 0 < num_layers <= len(self.files.tensors):
            self._recipes |= list_noted(self.files.metadata, num_layers)
        self._ledger = UseLedger(self.entries, progress)
        self._maps = MappedFiles()

    def _find_state_sizes(self) -> StateSizes | None:
        try:
            return find_sizes(self.files.architecture, self.files.metadata)
        except ValueError as error:
            what = f"{self.path.name}: {error}: sizes of a state that do not fit"
            raise ConfigError("models.open_weights", what) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the files; idempotent."""
        self._maps.close()

    def _check_kind(self, tensor: GgufTensor) -> None:
        known = (*FLOAT_TYPES, *BLOCK_TYPES)
        if tensor.kind not in known and tensor.name not in self._harmless:
            raise UnsupportedError(
                "models.open_weights",
                f"tensor {tensor.name!r} in {self.files.paths[tensor.name].name} is of type "
                f"{tensor.kind}, which is not decoded here: quantize the model to one of "
                f"{', '.join(known)}",
            )

    def has(self, name: str) -> bool:
        """Return True if the file holds all tensors that a weight is made from."""
        return name in self._recipes

    def find_storage(self, name: str) -> str:
        """Return the block types of a weight's tensors; empty for plain values."""
        recipe = self._recipes.get(name)
        kinds = [] if recipe is None else [self.files.tensors[t].kind for t in recipe.tensors]
        return " and ".join(sorted(set(kinds) & BLOCK_TYPES.keys()))

    def read_into(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        """Decode a weight, or a shard of it, into ``out``."""
        recipe = self._find(name)
        parts = [self._open(tensor) for tensor in recipe.tensors]
        if shard is not None and shard.axis == 0 and recipe.how is How.PLAIN and len(parts) == 1:
            # A shard of whole rows is contiguous in the file, so only its bytes are read.
            if parts[0].shape != shard.widen(tuple(out.shape)):
                raise _refuse_shape(name, parts, out)
            parts = [parts[0].narrow(shard.start, shard.stop)]
            shard = None
        decode_into(out, shard, lambda whole: self._decode(name, recipe, parts, whole))
        require_finite(name, out)
        for tensor in recipe.tensors:
            self._ledger.mark(tensor)

    def _decode(self, name: str, recipe: Recipe, parts: "list[_Stored]", out: Tensor) -> None:
        """Decode the tensors of a weight into ``out``, whole, by the operation of its recipe."""
        match recipe.how:
            case How.PLAIN:
                _fill(name, parts, out)
            case How.UNPERMUTE:
                straight = torch.empty(out.shape, dtype=out.dtype)
                _fill(name, parts, straight)
                out.copy_(straight[torch.from_numpy(self._unpermute(len(out)))])
            case How.MINUS_ONE:
                values = torch.empty(out.shape, dtype=torch.float32)
                _fill(name, parts, values)
                out.copy_(values - 1)
            case How.ORDERED:
                straight = torch.empty(out.shape, dtype=out.dtype)
                _fill_rows(name, parts, straight)
                out.copy_(straight[torch.from_numpy(_require_order(name, recipe, len(out)))])
            case How.TURNED_INPUTS:
                straight = torch.empty(out.shape, dtype=out.dtype)
                _fill(name, parts, straight)
                order = _require_order(name, recipe, out.shape[-1])
                out.copy_(straight[..., torch.from_numpy(order)])
            case How.LOG_RATE:
                rates = torch.empty(out.shape, dtype=torch.float32)
                _fill_flat(name, parts[0], rates)
                if bool((rates >= 0).any()):
                    what = f"tensor {parts[0].shape} of {name!r} has a rate that does not decay"
                    raise CorruptionError("models.read_weights", what)
                logs = torch.log(-rates)
                order = recipe.order
                out.copy_(logs if order is None else logs[torch.from_numpy(order)])
            case How.INTERLEAVE:
                _fill_interleaved(name, parts, out)
            case How.TRANSPOSE:
                for i, expert in enumerate(out):
                    _fill(name, [part.select(i) for part in parts], expert.t())
            case How.FLAT:
                _fill_flat(name, parts[0], out)
            case How.STACKED:
                _require_equal(name, parts)
                if len(out) % len(parts):
                    raise _refuse_shape(name, parts, out)
                for part, rows in zip(parts, out.chunk(len(parts)), strict=True):
                    _fill_flat(name, part, rows)
            case How.JOIN_KV:
                _fill_kv(name, parts, out)
            case How.NOTED:
                assert recipe.values is not None, name
                if out.numel() != len(recipe.values):
                    raise _refuse_shape(name, parts, out)
                out.copy_(torch.from_numpy(recipe.values).view(out.shape))

    def find_format(self, name: str) -> WeightFormat | None:
        """Return the weight format that can hold a weight's codes; None if there is none."""
        recipe = self._recipes.get(name)
        if recipe is None or recipe.how not in CODED_HOW:
            return None
        kinds = [self.files.tensors[tensor].kind for tensor in recipe.tensors]
        if recipe.how is How.TURNED_INPUTS and _find_blocks(recipe, kinds[0]) is None:
            return None
        return join_formats(
            [find_format(BLOCK_TYPES[k].weight_format) if k in BLOCK_TYPES else None for k in kinds]
        )

    def read_packed(
        self, name: str, expert_id: int | None = None, shard: Shard | None = None
    ) -> CodedMatrix:
        """Return a weight's codes in the format of ``find_format``.

        Raises: UnsupportedError (no weight format holds them); ShapeError (``expert_id`` or
            ``shard`` does not fit the weight).
        """
        recipe, wanted = self._find(name), self.find_format(name)
        if wanted is None:
            what = f"tensor {name!r} has no codes that one of our formats holds: read its values"
            raise UnsupportedError("models.read_weights", what)
        parts = [self._open(tensor) for tensor in recipe.tensors]
        if (expert_id is None) != (len(parts[0].shape) == 2):
            what = f"tensor {name!r} has the shape {list(parts[0].shape)}: expert {expert_id!r}"
            raise ShapeError("models.read_weights", what)
        if expert_id is not None:
            parts = [part.select(expert_id) for part in parts]
        if recipe.how is not How.ORDERED:
            _require_equal(name, parts)
        order = None
        if recipe.how is How.UNPERMUTE:
            order = self._unpermute(parts[0].shape[0])
        elif recipe.how is How.ORDERED:
            order = _require_order(name, recipe, sum(part.shape[0] for part in parts))
        elif recipe.how is How.INTERLEAVE:
            order = interleave_rows(parts[0].shape[0], len(parts))
        for tensor in recipe.tensors:
            self._ledger.mark(tensor)
        rows = tuple((part.kind, part.matrix) for part in parts)
        if recipe.how is How.TURNED_INPUTS:
            _require_order(name, recipe, parts[0].shape[-1])
            blocks = _find_blocks(recipe, parts[0].kind)
            rows = tuple((kind, _take_blocks(matrix, kind, blocks)) for kind, matrix in rows)
        matrix = BlockMatrix(wanted, parts[0].shape[-1], rows, order)
        if shard is None:
            return matrix
        return cut_codes(name, matrix, shard, max(BLOCK_SIZES[part.kind][0] for part in parts))

    def skip(self, prefix: str) -> None:
        """Mark the tensors of all weights whose names start with a prefix as used, so that they do
        not count as left over after loading.
        """
        for name, recipe in self._recipes.items():
            if name.startswith(prefix):
                for tensor in recipe.tensors:
                    self._ledger.mark(tensor)

    def list_sizes(self) -> dict[str, int]:
        """Return the stored bytes of each weight."""
        return {
            name: sum(t.end - t.begin for t in (self.files.tensors[n] for n in recipe.tensors))
            for name, recipe in self._recipes.items()
        }

    def check_all_used(self, harmless: Mapping[str, str]) -> dict[str, str]:
        """Return the unused tensors with the reason why they are not needed, {name: why}."""
        known = dict(self._harmless)
        for name, why in harmless.items():
            recipe = self._recipes.get(name)
            known |= dict.fromkeys(() if recipe is None else recipe.tensors, why)
        return self._ledger.check(known)

    def holds_exactly(self, dtype: torch.dtype) -> bool:
        """Return True if reading in ``dtype`` rounds no stored value; codes count as float32."""
        kinds = {tensor.kind for tensor in self.files.tensors.values()}
        stored = {TORCH_DTYPES.get(kind, torch.float32) for kind in kinds}
        return all(torch.promote_types(kind, dtype) == dtype for kind in stored)

    def _find(self, name: str) -> Recipe:
        recipe = self._recipes.get(name)
        if recipe is None:
            raise NotFoundError(
                "models.read_weights",
                f"no tensor of {self.path.name} is {name!r}: is the file complete, and of the "
                f"architecture {self.files.architecture}?",
            )
        return recipe

    def _unpermute(self, num_rows: int) -> NDArray[np.int64]:
        """Return the row in the file for each row of a q or k projection: llama.cpp stores rotated
        pairs as neighbours, transformers as two halves of a head.
        """
        architecture, metadata = self.files.architecture, self.files.metadata
        size = metadata.get(f"{architecture}.attention.key_length")
        if type(size) is not int:
            heads = metadata.get(f"{architecture}.attention.head_count")
            width = metadata.get(f"{architecture}.embedding_length")
            size = width // heads if type(width) is int and type(heads) is int and heads else 0
        if size < 2 or size % 2 or num_rows % size:
            what = f"heads of {size} in {num_rows} rows of q or k"
            raise ConfigError("models.read_weights", f"{self.path.name}: {what}")
        return np.arange(num_rows).reshape(-1, size // 2, 2).swapaxes(1, 2).ravel()

    def _open(self, name: str) -> "_Stored":
        tensor, path = self.files.tensors[name], self.files.paths[name]
        size = tensor.end - tensor.begin
        raw = np.frombuffer(self._maps.get(path), np.uint8, count=size, offset=tensor.begin)
        return _Stored(tensor.kind, tensor.shape, raw)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor, or one expert of it, as stored in the file."""

    kind: str
    shape: tuple[int, ...]
    raw: NDArray[np.uint8]

    def select(self, index: int) -> "_Stored":
        """Return one entry of the first dimension, such as an expert, not copied."""
        if not 0 <= index < self.shape[0]:
            what = f"expert {index} of {self.shape[0]}"
            raise NotFoundError("models.read_weights", what)
        size = len(self.raw) // self.shape[0]
        return _Stored(self.kind, self.shape[1:], self.raw[index * size : (index + 1) * size])

    def narrow(self, start: int, stop: int) -> "_Stored":
        """Return the entries ``start`` to ``stop`` of the first dimension, not copied."""
        size = len(self.raw) // self.shape[0]
        shape = (stop - start, *self.shape[1:])
        return _Stored(self.kind, shape, self.raw[start * size : stop * size])

    @property
    def matrix(self) -> NDArray[np.uint8]:
        """Bytes of each row, [N, bytes]."""
        block, size = BLOCK_SIZES[self.kind]
        return self.raw.reshape(-1, self.shape[-1] // block * size)

    def copy_into(self, out: Tensor) -> None:
        """Write the decoded values to ``out``, which has the tensor's shape and any strides."""
        if self.kind in TORCH_DTYPES:
            dtype = TORCH_DTYPES[self.kind]
            raw = self.raw if self.raw.ctypes.data % dtype.itemsize == 0 else self.raw.copy()
            out.copy_(torch.frombuffer(raw, dtype=dtype).view(out.shape))
            return
        if out.ndim > 2:
            for i, part in enumerate(out):
                self.select(i).copy_into(part)
            return
        rows = self.matrix
        step = max(1, CHUNK_WEIGHTS // self.shape[-1])
        target = out if out.ndim == 2 else out.view(1, -1)
        if target.is_contiguous() and target.dtype in (torch.float32, torch.bfloat16):
            decode_blocks(None, ([(self.kind, rows)], None), target)
            return
        for first in range(0, len(rows), step):
            some = rows[first : first + step]
            values = torch.empty(len(some), self.shape[-1])
            decode_blocks(None, ([(self.kind, some)], None), values)
            target[first : first + step] = values


def _list_harmless(tensors: Mapping[str, GgufTensor]) -> Iterator[tuple[str, str]]:
    extra = {name.split(".nextn.")[0] for name in tensors if ".nextn." in name}
    for name in tensors:
        for pattern, why in HARMLESS.items():
            if re.search(pattern, name):
                yield name, why
        block, part = ".".join(name.split(".")[:2]), ".".join(name.split(".")[2:])
        if f"{block}.{COPIES.get(part)}" in tensors:
            yield name, f"a copy of what {COPIES[part]} holds"
        if block in extra:
            yield name, HARMLESS[r"^blk\.\d+\.nextn\."]


def _refuse_shape(name: str, parts: list[_Stored], out: Tensor) -> ShapeError:
    stored = " and ".join(str(list(part.shape)) for part in parts)
    return ShapeError(
        "models.read_weights",
        f"tensor {name!r} is made of {stored}: the configuration needs {list(out.shape)}",
    )


def _require_equal(name: str, parts: list[_Stored]) -> None:
    """Check that parts of a tensor, such as gate and up, have equal shapes, even if their sum is
    right.

    Raises: ShapeError (they differ).
    """
    if len({part.shape for part in parts}) > 1:
        stored = " and ".join(str(list(part.shape)) for part in parts)
        what = f"tensor {name!r} is made of {stored}: they should be alike"
        raise ShapeError("models.read_weights", what)


def _fill(name: str, parts: list[_Stored], out: Tensor) -> None:
    """Decode tensors into ``out``, concatenated by rows; experts along their outputs."""
    if len(parts) == 1:
        shape = parts[0].shape
        # A vector equals a matrix of one row: the file and the module may differ in that dimension.
        if shape != out.shape and (1, *shape) != tuple(out.shape):
            raise _refuse_shape(name, parts, out)
        parts[0].copy_into(out.view(shape) if out.ndim != len(shape) else out)
        return
    _require_equal(name, parts)
    axis = out.ndim - 2 if out.ndim > 1 else 0
    sizes = [part.shape[axis] if len(part.shape) > axis else 0 for part in parts]
    rest = {part.shape[:axis] + part.shape[axis + 1 :] for part in parts}
    if sum(sizes) != out.shape[axis] or rest != {(*out.shape[:axis], *out.shape[axis + 1 :])}:
        raise _refuse_shape(name, parts, out)
    first = 0
    for part, size in zip(parts, sizes, strict=True):
        part.copy_into(out.narrow(axis, first, size))
        first += size


def _fill_flat(name: str, part: _Stored, out: Tensor) -> None:
    """Decode a tensor whose shape differs only in dimensions of size 1, or that forms a vector."""
    wanted = _drop_ones(out.shape)
    is_vector = len(wanted) <= 1 and prod(part.shape) == out.numel()
    if not is_vector and _drop_ones(part.shape) != wanted:
        raise _refuse_shape(name, [part], out)
    part.copy_into(out.view(part.shape))


def _drop_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _fill_rows(name: str, parts: list[_Stored], out: Tensor) -> None:
    """Decode tensors with any numbers of rows into ``out``, concatenated."""
    flat = out.view(len(out), -1) if out.ndim > 1 else out
    rest = {part.shape[1:] for part in parts}
    if sum(part.shape[0] for part in parts) != len(out) or rest != {tuple(flat.shape[1:])}:
        raise _refuse_shape(name, parts, out)
    first = 0
    for part in parts:
        part.copy_into(flat[first : first + part.shape[0]])
        first += part.shape[0]


def _require_order(name: str, recipe: Recipe, size: int) -> NDArray[np.int64]:
    """Return the order of rows or inputs in a recipe. Raises: ShapeError (the order is for another
    number of them).
    """
    assert recipe.order is not None, name
    if len(recipe.order) != size:
        what = f"tensor {name!r} has {size} rows or inputs, and heads have {len(recipe.order)}"
        raise ShapeError("models.read_weights", what)
    return recipe.order


def _find_blocks(recipe: Recipe, kind: str) -> NDArray[np.integer] | None:
    """Return which of the file's blocks of inputs each block of the weight's inputs is, by the
    recipe's order; None if the order splits blocks.
    """
    assert recipe.order is not None, recipe
    return find_whole_blocks(recipe.order, BLOCK_SIZES[kind][0])


def _take_blocks(
    matrix: NDArray[np.uint8], kind: str, blocks: NDArray[np.integer] | None
) -> NDArray[np.uint8]:
    assert blocks is not None, "a format of blocks that are taken apart"
    taken = matrix.reshape(len(matrix), -1, BLOCK_SIZES[kind][1])[:, blocks]
    return np.ascontiguousarray(taken.reshape(matrix.shape))


def _fill_interleaved(name: str, parts: list[_Stored], out: Tensor) -> None:
    """Decode tensors into alternating columns of ``out`` [..., 2 F]; weights have inputs first."""
    for i, part in enumerate(parts):
        columns = out[..., i :: len(parts)]
        turned = columns.transpose(-1, -2) if out.ndim == 3 else columns
        if part.shape != tuple(turned.shape):
            raise _refuse_shape(name, parts, out)
        part.copy_into(turned)


def _fill_kv(name: str, parts: list[_Stored], out: Tensor) -> None:
    """Fill [H * (key + value), latent] from keys [H, latent, key] and values [H, value, latent]."""
    keys, values = parts
    if len(keys.shape) != 3 or len(values.shape) != 3 or out.ndim != 2:
        raise _refuse_shape(name, parts, out)
    heads, latent, key = keys.shape
    value = values.shape[1]
    if values.shape != (heads, value, latent) or out.shape != (heads * (key + value), latent):
        raise _refuse_shape(name, parts, out)
    both = out.view(heads, key + value, latent)
    keys.copy_into(both[:, :key].transpose(1, 2))
    values.copy_into(both[:, key:])

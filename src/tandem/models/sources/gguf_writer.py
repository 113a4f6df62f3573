"""Writing of a GGUF file: a header of metadata and tensor descriptions, then the tensors' bytes.

The format is that of ``gguf_header``, which can read every file written here.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from tandem.models.sources.gguf_header import (
    ARRAY,
    BLOCK_SIZES,
    DEFAULT_ALIGNMENT,
    MAGIC,
    SCALARS,
    STRING,
    TYPE_IDS,
    Value,
)

__all__ = ["PlannedTensor", "write_gguf"]

VERSION = 3
UINT32, INT32, FLOAT32, BOOL, UINT64 = 4, 5, 6, 7, 10


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of a file that is being written."""

    name: str
    kind: str
    """Name of the tensor's type, such as ``Q4_K``."""
    shape: tuple[int, ...]
    """Shape with outputs first."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor in the file, without the padding behind it."""
        weights, size = BLOCK_SIZES[self.kind]
        return prod(self.shape) // weights * size


def write_gguf(
    file: BinaryIO,
    metadata: Mapping[str, Value],
    tensors: Sequence[PlannedTensor],
    make: Callable[[PlannedTensor], NDArray[np.uint8]],
) -> None:
    """Write a whole GGUF file.

    Whole numbers are written as uint32 if they fit, as llama.cpp expects for its keys.

    Args:
        file: written from its current position on.
        metadata: values by key.
        tensors: the tensors, in the file's order.
        make: returns a tensor's bytes; called when they are written.
    """
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    parts += [_pack_text(key) + _pack_value(value) for key, value in metadata.items()]
    offset = 0
    for tensor in tensors:
        sizes = tensor.shape[::-1]
        parts.append(_pack_text(tensor.name) + struct.pack("<I", len(sizes)))
        parts.append(struct.pack(f"<{len(sizes)}QIQ", *sizes, TYPE_IDS[tensor.kind], offset))
        offset += _align(tensor.size_bytes)
    header = b"".join(parts)
    file.write(header + bytes(_align(len(header)) - len(header)))
    for tensor in tensors:
        data = np.ascontiguousarray(make(tensor)).reshape(-1).view(np.uint8)
        assert data.size == tensor.size_bytes, tensor
        file.write(data.data)
        file.write(bytes(_align(data.size) - data.size))


def _align(size: int) -> int:
    return -(-size // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _pack_text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _pack_value(value: Value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _pack_text(value)
    if isinstance(value, list):
        head = struct.pack("<IIQ", ARRAY, STRING, len(value))
        return head + b"".join(_pack_text(text) for text in value)
    if isinstance(value, np.ndarray):
        kind = next(i for i, (_, dtype) in SCALARS.items() if np.dtype(dtype) == value.dtype)
        return struct.pack("<IIQ", ARRAY, kind, len(value)) + value.tobytes()
    kind = _choose_kind(value)
    return struct.pack("<I", kind) + struct.pack(SCALARS[kind][0], value)


def _choose_kind(value: float) -> int:
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, float):
        return FLOAT32
    if value < 0:
        return INT32
    return UINT32 if value < 1 << 32 else UINT64

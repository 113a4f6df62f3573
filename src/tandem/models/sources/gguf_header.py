"""The header of a GGUF file: metadata and the places of tensors, checked before use.

The format (docs/design/models/gguf.md): magic, version, counts, key-value pairs, tensor
descriptions, padding to the alignment, then the tensors' bytes. All of it is read from a mapping,
and every length is compared with the rest of the file, and with a limit, before it is used: so the
memory for a header is bounded by its own bytes and by the limits here.

Invariants: names are unique; a tensor's range has the size given by its type and shape, lies within
the file, begins at the alignment and overlaps no other range; between tensors there is only
padding.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tandem.core.errors import CorruptionError, UnsupportedError
from tandem.models.sources.mapping import map_file

__all__ = ["BLOCK_SIZES", "GgufHeader", "GgufTensor", "Value", "map_gguf", "read_gguf_header"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MIN_ALIGNMENT, MAX_ALIGNMENT = 8, 1 << 20

MAX_PAIRS = 1 << 14
MAX_TENSORS = 1 << 16
MAX_HEADER_BYTES = 256 << 20
"""Largest header, far above that of any tokenizer; bounds the memory that a header may take."""
MAX_ELEMENTS = 1 << 22
"""Most elements of all arrays together: strings become objects of some 60 bytes each."""
MAX_NAME_BYTES = 1 << 16
MAX_DIMENSIONS = 4
MAX_WEIGHTS = 1 << 48

BLOCK_SIZES: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q8_1": (32, 40),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "Q8_K": (256, 292),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ3_XXS": (256, 98),
    "IQ1_S": (256, 50),
    "IQ4_NL": (32, 18),
    "IQ3_S": (256, 110),
    "IQ2_S": (256, 82),
    "IQ4_XS": (256, 136),
    "I8": (1, 1),
    "I16": (1, 2),
    "I32": (1, 4),
    "I64": (1, 8),
    "F64": (1, 8),
    "IQ1_M": (256, 56),
    "BF16": (1, 2),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
    "NVFP4": (64, 36),
    "Q1_0": (128, 18),
}
"""Weights and bytes of a block by type, also for types that are not decoded."""

TYPE_IDS = (
    {name: i for i, name in enumerate(("F32", "F16", "Q4_0", "Q4_1"))}
    | {name: 6 + i for i, name in enumerate(list(BLOCK_SIZES)[4:28])}
    | {"BF16": 30, "TQ1_0": 34, "TQ2_0": 35, "MXFP4": 39, "NVFP4": 40, "Q1_0": 41}
)
TYPE_NAMES = {number: name for name, number in TYPE_IDS.items()}

STRING, ARRAY = 8, 9
SCALARS: dict[int, tuple[str, str]] = {
    0: ("<B", "u1"),
    1: ("<b", "i1"),
    2: ("<H", "<u2"),
    3: ("<h", "<i2"),
    4: ("<I", "<u4"),
    5: ("<i", "<i4"),
    6: ("<f", "<f4"),
    7: ("<?", "?"),
    10: ("<Q", "<u8"),
    11: ("<q", "<i8"),
    12: ("<d", "<f8"),
}
"""Codes of scalar metadata types for struct and for NumPy, by the type's number."""

Numbers = NDArray[np.generic]
Value = int | float | bool | str | list[str] | Numbers
"""A metadata value; arrays of numbers are copied from the file."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The place of a tensor in a GGUF file, its type and its shape."""

    name: str
    kind: str
    """Name of the tensor's type, such as ``Q4_K``."""
    shape: tuple[int, ...]
    """Shape with outputs first, the reverse of the file's order."""
    begin: int
    """First byte, counted from the start of the file."""
    end: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a GGUF file: its metadata and the places of its tensors."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]


def map_gguf(path: Path) -> mmap.mmap:
    """Map a GGUF file into memory. Raises: CorruptionError (the file is empty)."""
    if path.stat().st_size == 0:
        raise _corrupt(path, "the file is empty")
    return map_file(path)


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check the header of one file.

    Raises:
        CorruptionError: the header is cut or invalid, or a tensor does not fit its description or
            the file; the text names file and tensor.
        UnsupportedError: another version, byte order or unknown tensor type.
    """
    with map_gguf(path) as data:
        cursor = _Cursor(path, data)
        return _read(cursor)


def _corrupt(path: Path, what: str) -> CorruptionError:
    return CorruptionError("models.read_gguf", f"{path.name}: {what}: download it again")


class _Cursor:
    """A position in a mapped header; every read is checked against the header's end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.size = len(data)
        self.position = 0
        self.num_elements = 0
        self._data = data
        self._end = min(len(data), MAX_HEADER_BYTES)

    def take(self, size: int, what: str) -> bytes:
        if size > self._end - self.position:
            limit = "of the header's limit " if self._end < self.size else ""
            raise _corrupt(
                self.path,
                f"{what} at byte {self.position} wants {size} bytes, and {limit}"
                f"{self._end - self.position} are left",
            )
        begin = self.position
        self.position += size
        return self._data[begin : self.position]

    def number(self, code: str, what: str) -> int:
        return struct.unpack(code, self.take(struct.calcsize(code), what))[0]

    def text(self, what: str, *, max_bytes: int = MAX_HEADER_BYTES) -> str:
        size = self.number("<Q", f"the length of {what}")
        if size > max_bytes:
            raise _corrupt(self.path, f"{what} has {size} bytes, more than {max_bytes}")
        raw = self.take(size, what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            # The vocabularies of some published files hold tokens that are not valid UTF-8.
            return raw.decode("utf-8", "replace")

    def value(self, kind: int, what: str) -> Value:
        if kind == STRING:
            return self.text(what)
        if kind == ARRAY:
            return self._array(what)
        if kind not in SCALARS:
            raise _corrupt(self.path, f"{what} has the unknown type {kind}")
        return self.number(SCALARS[kind][0], what)

    def _array(self, what: str) -> list[str] | Numbers:
        kind = self.number("<I", f"the type of {what}")
        count = self.number("<Q", f"the length of {what}")
        self.num_elements += count
        if self.num_elements > MAX_ELEMENTS:
            raise _corrupt(
                self.path,
                f"{what} has {count} elements: all arrays together may have {MAX_ELEMENTS}",
            )
        if kind == STRING:
            return self._texts(count, what)
        if kind not in SCALARS:
            raise _corrupt(self.path, f"{what} is an array of type {kind}: not of this format")
        dtype = np.dtype(SCALARS[kind][1])
        return np.frombuffer(self.take(count * dtype.itemsize, what), dtype)

    def _texts(self, count: int, what: str) -> list[str]:
        """Read the strings of an array, of which a vocabulary has hundreds of thousands."""
        read_length = struct.Struct("<Q").unpack_from
        data, position, end = self._data, self.position, self._end
        texts: list[str] = []
        for _ in range(count):
            begin = position + 8
            position = begin + read_length(data, position)[0] if begin <= end else end + 1
            if position > end:
                # ``text`` raises the error that says which part is cut.
                self.position = begin - 8
                texts.append(self.text(what))
            raw = data[begin:position]
            try:
                texts.append(raw.decode())
            except UnicodeDecodeError:
                texts.append(raw.decode("utf-8", "replace"))
        self.position = position
        return texts


def _read(cursor: _Cursor) -> GgufHeader:
    path = cursor.path
    magic = cursor.take(4, "the magic")
    if magic != MAGIC:
        raise _corrupt(path, f"it begins with {magic!r}, not with {MAGIC!r}")
    version = cursor.number("<I", "the version")
    if version not in VERSIONS:
        is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        what = "its byte order is big-endian" if is_swapped else f"version {version} of the format"
        known = ", ".join(map(str, VERSIONS))
        raise UnsupportedError(
            "models.read_gguf", f"{path.name}: {what}: convert it to version {known}, little-endian"
        )
    num_tensors = cursor.number("<Q", "the number of tensors")
    num_pairs = cursor.number("<Q", "the number of metadata pairs")
    if num_tensors > MAX_TENSORS or num_pairs > MAX_PAIRS:
        raise _corrupt(path, f"{num_tensors} tensors and {num_pairs} metadata pairs")
    metadata: dict[str, Value] = {}
    for i in range(num_pairs):
        key = cursor.text(f"metadata key {i}", max_bytes=MAX_NAME_BYTES)
        if key in metadata:
            raise _corrupt(path, f"metadata {key!r} is there twice")
        kind = cursor.number("<I", f"the type of {key!r}")
        metadata[key] = cursor.value(kind, f"metadata {key!r}")
    raw = [_read_tensor(cursor, i) for i in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if (
        type(alignment) is not int
        or not MIN_ALIGNMENT <= alignment <= MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        raise _corrupt(path, f"general.alignment is {alignment!r}: not a power of two from 8")
    base = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, kind, shape, offset in raw:
        if name in tensors:
            raise _corrupt(path, f"tensor {name!r} is there twice")
        tensors[name] = _place_tensor(path, name, kind, shape, base + offset)
    _check_ranges(path, tensors, base, alignment, cursor.size)
    return GgufHeader(path, metadata, tensors)


def _read_tensor(cursor: _Cursor, i: int) -> tuple[str, int, tuple[int, ...], int]:
    name = cursor.text(f"the name of tensor {i}", max_bytes=MAX_NAME_BYTES)
    what = f"tensor {name!r}"
    num_dimensions = cursor.number("<I", f"the shape of {what}")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise _corrupt(cursor.path, f"{what} has {num_dimensions} dimensions")
    sizes = struct.unpack(f"<{num_dimensions}Q", cursor.take(8 * num_dimensions, what))
    kind = cursor.number("<I", f"the type of {what}")
    return name, kind, tuple(reversed(sizes)), cursor.number("<Q", f"the offset of {what}")


def _place_tensor(
    path: Path, name: str, number: int, shape: tuple[int, ...], begin: int
) -> GgufTensor:
    kind = TYPE_NAMES.get(number)
    if kind is None:
        raise UnsupportedError(
            "models.read_gguf", f"{path.name}: tensor {name!r} has the unknown type {number}"
        )
    block, size = BLOCK_SIZES[kind]
    count = prod(shape)
    if not 1 <= count <= MAX_WEIGHTS:
        raise _corrupt(path, f"tensor {name!r} has the shape {list(shape)}")
    if shape[-1] % block:
        raise _corrupt(
            path, f"tensor {name!r}, {kind} {list(shape)}, has rows that are no blocks of {block}"
        )
    return GgufTensor(name, kind, shape, begin, begin + count // block * size)


def _check_ranges(
    path: Path, tensors: Mapping[str, GgufTensor], base: int, alignment: int, size: int
) -> None:
    """Check that the tensors fill the rest of the file without gaps, in any order."""
    end = base
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.begin):
        if tensor.begin < end:
            raise _corrupt(path, f"tensor {tensor.name!r} overlaps another or the header")
        if tensor.begin != -(-end // alignment) * alignment:
            raise _corrupt(path, f"tensor {tensor.name!r} is not where the one before it ends")
        if tensor.end > size:
            missing = tensor.end - size
            raise _corrupt(path, f"the file is cut: tensor {tensor.name!r} misses {missing} bytes")
        end = tensor.end
    if size - end >= alignment:
        raise _corrupt(path, f"{size - end} bytes belong to no tensor")

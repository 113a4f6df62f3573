"""GGUF's block types: the meaning of their bytes, and their codes in our weight formats.

A tensor's row consists of whole blocks of 32 or 256 consecutive weights. The native core reads
files (``tandem.kernels.weights.blocks``); ``dequantize`` and ``unpack`` are its oracle in NumPy and
share no code with it. ``dequantize`` repeats llama.cpp's float32 arithmetic operation by operation,
so values are bitwise those of the ``gguf`` package. Matrices keep their blocks, rearranged.
``unpack`` returns codes in a type's plain format, in which it can be joined with others
(``tandem.kernels.weights.recode``): exactly, except that scales of superblocks (products of an fp16
number and an integer) are rounded to fp16.

docs/design/models/gguf.md lists the types, the formats and their costs.

Shapes: N rows, K inputs, B blocks, W weights of a block, G groups of a block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tandem.core.errors import UnsupportedError
from tandem.kernels.weights.formats import QuantizedMatrix, find_format
from tandem.kernels.weights.recode import make_plain
from tandem.models.codecs.gguf_codebooks import split_codebook

__all__ = ["BLOCK_TYPES", "FLOAT_TYPES", "BlockType", "dequantize", "unpack"]

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

FLOAT_TYPES = ("F32", "F16", "BF16")
"""GGUF types that store values, not codes."""

IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


class Blocks(NamedTuple):
    """Blocks split into parts: a weight is ``scale * (code - offset) + minimum``."""

    codes: Bytes
    """Code of each weight, [B, W]."""
    offset: int
    scales: Floats
    """Scale of each group, [B, G]."""
    minima: Floats | None


@dataclass(frozen=True, slots=True)
class BlockType:
    """A GGUF block type, such as Q4_K: how it codes a fixed number of weights in a block of
    bytes.
    """

    name: str
    weight_format: str
    """Name of our weight format that holds the type, in the same number of bytes."""
    split: Callable[[Bytes], Blocks] | None
    """Function that splits blocks [B, bytes] into parts; None for mxfp4, whose codes are floats."""


def _half(raw: Bytes) -> Floats:
    """Return the fp16 number in two bytes of each block, [B, 1]."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _nibbles(raw: Bytes, width: int) -> Bytes:
    """Return 4-bit codes: of each ``width`` bytes all low halves, then all high halves."""
    parts = raw.reshape(len(raw), -1, 1, width)
    codes = np.empty((len(raw), parts.shape[1], 2, width), np.uint8)
    np.bitwise_and(parts[:, :, 0], 15, out=codes[:, :, 0])
    np.right_shift(parts[:, :, 0], 4, out=codes[:, :, 1])
    return codes.reshape(len(raw), -1)


def _fifth_bits(raw: Bytes) -> Bytes:
    """Return the highest bits of 32 codes, as 0 or 16."""
    bits = np.unpackbits(np.ascontiguousarray(raw), axis=-1, bitorder="little")
    return np.left_shift(bits, 4, dtype=np.uint8)


def _split_q4_0(raw: Bytes) -> Blocks:
    return Blocks(_nibbles(raw[:, 2:], 16), 8, _half(raw[:, :2]), None)


def _split_q4_1(raw: Bytes) -> Blocks:
    return Blocks(_nibbles(raw[:, 4:], 16), 0, _half(raw[:, :2]), _half(raw[:, 2:4]))


def _split_q5_0(raw: Bytes) -> Blocks:
    codes = _nibbles(raw[:, 6:], 16) | _fifth_bits(raw[:, 2:6])
    return Blocks(codes, 16, _half(raw[:, :2]), None)


def _split_q5_1(raw: Bytes) -> Blocks:
    codes = _nibbles(raw[:, 8:], 16) | _fifth_bits(raw[:, 4:8])
    return Blocks(codes, 0, _half(raw[:, :2]), _half(raw[:, 2:4]))


def _split_q8_0(raw: Bytes) -> Blocks:
    return Blocks(raw[:, 2:] ^ np.uint8(128), 128, _half(raw[:, :2]), None)


IQ4_NL_CODES = (np.array(IQ4_NL_VALUES) + 128).astype(np.uint8)


def _split_iq4_nl(raw: Bytes) -> Blocks:
    return Blocks(IQ4_NL_CODES[_nibbles(raw[:, 2:], 16)], 128, _half(raw[:, :2]), None)


def _split_iq4_xs(raw: Bytes) -> Blocks:
    high = np.ascontiguousarray(raw[:, 2:4]).view(np.uint16)
    low = np.stack([raw[:, 4:8] & 15, raw[:, 4:8] >> 4], -1).reshape(len(raw), 8)
    levels = low | ((high >> (2 * np.arange(8))) & 3) << 4
    scales = _half(raw[:, :2]) * (levels.astype(np.float32) - 32)
    return Blocks(IQ4_NL_CODES[_nibbles(raw[:, 8:], 16)], 128, scales, None)


def _pairs(raw: Bytes) -> Bytes:
    """Return 2-bit codes: of each 32 bytes the lowest two bits of all, then the next two, and so
    on.
    """
    parts = raw.reshape(len(raw), -1, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return np.asarray((parts & 3).reshape(len(raw), -1), np.uint8)


def _split_q2_k(raw: Bytes) -> Blocks:
    scales = _half(raw[:, 80:82]) * (raw[:, :16] & 15).astype(np.float32)
    minima = -(_half(raw[:, 82:84]) * (raw[:, :16] >> 4).astype(np.float32))
    return Blocks(_pairs(raw[:, 16:80]), 0, scales, minima)


def _split_q3_k(raw: Bytes) -> Blocks:
    third = (raw[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    codes = _pairs(raw[:, 32:96]) | third.reshape(len(raw), 256) << 2
    low = np.concatenate([raw[:, 96:104] & 15, raw[:, 96:104] >> 4], axis=-1)
    high = raw[:, None, 104:108] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    levels = low | (high & 3).reshape(len(raw), 16) << 4
    return Blocks(
        np.asarray(codes, np.uint8), 4, _half(raw[:, 108:]) * (levels.astype(np.float32) - 32), None
    )


def _split_k_scales(raw: Bytes) -> tuple[Floats, Floats]:
    """Return scales and minima [B, 8] from the first 16 bytes of Q4_K and Q5_K blocks.

    The bytes hold two fp16 numbers, then 8 scales and 8 minima of 6 bits: the first four of each
    have a byte, whose upper two bits belong to the last four.
    """
    scales, minima, rest = (raw[:, begin : begin + 4] for begin in (4, 8, 12))
    s = np.concatenate([scales & 63, (rest & 15) | ((scales >> 2) & 48)], axis=-1)
    m = np.concatenate([minima & 63, (rest >> 4) | ((minima >> 2) & 48)], axis=-1)
    return _half(raw[:, :2]) * s.astype(np.float32), -(_half(raw[:, 2:4]) * m.astype(np.float32))


def _split_q4_k(raw: Bytes) -> Blocks:
    return Blocks(_nibbles(raw[:, 16:], 32), 0, *_split_k_scales(raw))


def _split_q5_k(raw: Bytes) -> Blocks:
    codes = _nibbles(raw[:, 48:], 32).reshape(len(raw), 8, 32)
    high = raw[:, 16:48]
    for i in range(8):
        codes[:, i] |= ((high >> i) & 1) << 4
    return Blocks(codes.reshape(len(raw), 256), 0, *_split_k_scales(raw))


def _split_q6_k(raw: Bytes) -> Blocks:
    codes = _nibbles(raw[:, :128], 64).reshape(len(raw), 2, 4, 32)
    high = raw[:, 128:192].reshape(len(raw), 2, 32)
    for i in range(4):
        codes[:, :, i] |= ((high >> (2 * i)) & 3) << 4
    scales = np.ascontiguousarray(raw[:, 192:208]).view(np.int8).astype(np.float32)
    return Blocks(codes.reshape(len(raw), 256), 32, _half(raw[:, 208:]) * scales, None)


E2M1_CODES = (E2M1_DOUBLED + 12).astype(np.uint8)


def _split_nvfp4(raw: Bytes) -> Blocks:
    """Split NVFP4 blocks; scales are e4m3 without sign, and the NaN code means 0."""
    levels = np.where(raw[:, :4] == 0x7F, 0, raw[:, :4] & 0x7F).astype(np.uint32)
    scales = (levels << 20).astype(np.uint32).view(np.float32) * np.float32(2.0**119)
    return Blocks(E2M1_CODES[_nibbles(raw[:, 4:], 8)], 12, scales, None)


def _split_by_codebook(name: str) -> Callable[[Bytes], Blocks]:
    def split(raw: Bytes) -> Blocks:
        codes, scales = split_codebook(name, raw)
        return Blocks(codes, 128, scales, None)

    return split


BLOCK_TYPES = {
    kind.name: kind
    for kind in (
        BlockType("Q4_0", "int4g32sym", _split_q4_0),
        BlockType("Q4_1", "int4g32", _split_q4_1),
        BlockType("Q5_0", "int5g32sym", _split_q5_0),
        BlockType("Q5_1", "int5g32", _split_q5_1),
        BlockType("Q8_0", "int8g32", _split_q8_0),
        BlockType("Q2_K", "q2k", _split_q2_k),
        BlockType("Q3_K", "q3k", _split_q3_k),
        BlockType("Q4_K", "q4k", _split_q4_k),
        BlockType("Q5_K", "q5k", _split_q5_k),
        BlockType("Q6_K", "q6k", _split_q6_k),
        BlockType("IQ4_NL", "iq4nl", _split_iq4_nl),
        BlockType("IQ4_XS", "iq4xs", _split_iq4_xs),
        BlockType("MXFP4", "mxfp4", None),
        BlockType("NVFP4", "nvfp4", _split_nvfp4),
        BlockType("IQ2_XXS", "iq2xxs", _split_by_codebook("IQ2_XXS")),
        BlockType("IQ2_XS", "iq2xs", _split_by_codebook("IQ2_XS")),
        BlockType("IQ2_S", "iq2s", _split_by_codebook("IQ2_S")),
        BlockType("IQ3_XXS", "iq3xxs", _split_by_codebook("IQ3_XXS")),
        BlockType("IQ3_S", "iq3s", _split_by_codebook("IQ3_S")),
    )
}
"""GGUF types that are read as codes, by name."""


def find_block_type(name: str) -> BlockType:
    """Return a block type that can be decoded.

    Raises: UnsupportedError (blocks of this type are not decoded here).
    """
    if name not in BLOCK_TYPES:
        known = ", ".join((*FLOAT_TYPES, *BLOCK_TYPES))
        raise UnsupportedError(
            "models.read_gguf", f"type {name} is not decoded here: quantize the model to {known}"
        )
    return BLOCK_TYPES[name]


def dequantize(name: str, raw: Bytes) -> Floats:
    """Return the weights of blocks [B, bytes] of a type, float32 [B, weights of a block]."""
    kind = find_block_type(name)
    with np.errstate(over="ignore", invalid="ignore"):
        if kind.split is None:
            return _half_powers(raw[:, :1]) * E2M1_DOUBLED[_nibbles(raw[:, 1:], 16)]
        codes, offset, scales, minima = kind.split(raw)
        num_groups = scales.shape[1]
        weights = codes.astype(np.float32).reshape(len(raw), num_groups, -1)
        weights -= np.float32(offset)
        weights *= scales[..., None]
        if minima is not None:
            weights += minima[..., None]
        return weights.reshape(len(raw), -1)


def _half_powers(exponents: Bytes) -> Floats:
    """Return 2^(e - 128), built from bits: half of the e8m0 value, as the codes are doubled."""
    e = exponents.astype(np.uint32)
    bits = np.where(e < 2, np.uint32(0x0020_0000) << e, (np.maximum(e, 1) - 1) << 23)
    return bits.astype(np.uint32).view(np.float32)


def unpack(name: str, raw: Bytes) -> QuantizedMatrix:
    """Return the codes [N, K] of rows [N, blocks, bytes] in the block type's plain format, which
    has an fp16 scale for each group.

    A scale or minimum beyond fp16 becomes infinite, which packing refuses.
    """
    kind = find_block_type(name)
    weight_format = make_plain(find_format(kind.weight_format))
    num_rows = len(raw)
    blocks = raw.reshape(-1, raw.shape[-1])
    if kind.split is None:
        return _unpack_mxfp4(blocks, num_rows)
    with np.errstate(over="ignore", invalid="ignore"):
        codes, offset, scales, minima = kind.split(blocks)
        if weight_format.has_minimum:
            low = np.float32(-offset) * scales if minima is None else minima
            kept = low.astype(np.float16).reshape(num_rows, -1)
        else:
            kept = None
            codes = codes + np.uint8(2 ** (weight_format.bits - 1) - offset)
        halves = scales.astype(np.float16).reshape(num_rows, -1)
    return QuantizedMatrix(weight_format, codes.reshape(num_rows, -1), halves, kept)


HALVED_CODES = np.array([0, 0, 1, 2, 2, 3, 4, 5], np.uint8)
"""E2M1 codes of half of each positive value; 0.25 and 0.75 are rounded to even."""


def _unpack_mxfp4(blocks: Bytes, num_rows: int) -> QuantizedMatrix:
    codes, exponents = _nibbles(blocks[:, 1:], 16), blocks[:, :1].astype(np.uint32)
    tiny = exponents[:, 0] == 0
    if tiny.any():
        # The kernels' scales cannot represent 2^-127, so the scale becomes 2^-126 and the codes are
        # halved.
        halves = codes[tiny]
        codes[tiny] = HALVED_CODES[halves & 7] | (halves & 8)
        exponents = np.maximum(exponents, 1)
    scales = (exponents << 23).view(np.float32).reshape(num_rows, -1)
    return QuantizedMatrix(find_format("mxfp4"), codes.reshape(num_rows, -1), scales, None)

"""GGUF's IQ2 and IQ3 types in NumPy: blocks of codebook indices and signs.

The magnitudes are the native core's (``list_codebook``), which are ggml's; the layout of indices,
signs and scales in blocks is implemented here again, as an oracle of the native decoder.

Shapes: B blocks of 256 weights, G groups of a block.
"""

import numpy as np
from numpy.typing import NDArray

from tandem._native import list_codebook

__all__ = ["split_codebook"]

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Indices = NDArray[np.int64]

CENTRE = 128
WIDTHS = {"IQ2_XXS": 8, "IQ2_XS": 8, "IQ2_S": 8, "IQ3_XXS": 4, "IQ3_S": 4}
"""Weights per entry of each codebook."""


def split_codebook(name: str, raw: Bytes) -> tuple[Bytes, Floats]:
    """Return codes [B, 256], each standing for ``code - 128``, and scales [B, G]."""
    indices, signs, levels = _SPLITS[name](raw)
    book = np.frombuffer(list_codebook(name), np.uint8).reshape(-1, WIDTHS[name])
    magnitudes = book[indices].reshape(len(raw), -1).astype(np.int64) - CENTRE
    is_negative = np.unpackbits(signs.astype(np.uint8), axis=-1, bitorder="little").astype(bool)
    codes = np.where(is_negative, -magnitudes, magnitudes) + CENTRE
    d = np.ascontiguousarray(raw[:, :2]).view(np.float16).astype(np.float32)
    odd = (2 * levels + 1).astype(np.float32)
    part = {"IQ3_S": 1.0, "IQ3_XXS": 0.25}.get(name, 0.125)
    return codes.astype(np.uint8), d * np.float32(part) * odd


def _words(raw: Bytes, dtype: str) -> Indices:
    return np.ascontiguousarray(raw).view(dtype).astype(np.int64)


def _nibbles(raw: Bytes) -> Indices:
    """Return both 4-bit halves of each byte, the low one first."""
    return np.stack([raw & 15, raw >> 4], -1).reshape(len(raw), -1).astype(np.int64)


def _complete(seven: Indices) -> Indices:
    """Return eight sign bits from seven: the last makes the number of negative signs even."""
    ones = np.unpackbits(seven.astype(np.uint8)[..., None], axis=-1).sum(-1, dtype=np.int64)
    return seven | (ones % 2) << 7


def _split_aside(words: Indices) -> tuple[Indices, Indices]:
    """Split words that hold four groups of seven signs and a scale level into signs and levels."""
    seven = (words[..., None] >> np.arange(0, 28, 7)) & 127
    return _complete(seven).reshape(len(words), -1), words >> 28


def _split_iq2_xxs(raw: Bytes) -> tuple[Indices, Indices, Indices]:
    groups = raw[:, 2:].reshape(len(raw), 8, 8)
    signs, levels = _split_aside(_words(groups[..., 4:], "<u4")[..., 0])
    return groups[..., :4].reshape(len(raw), -1).astype(np.int64), signs, levels


def _split_iq2_xs(raw: Bytes) -> tuple[Indices, Indices, Indices]:
    words = _words(raw[:, 2:66], "<u2")
    return words & 511, _complete(words >> 9), _nibbles(raw[:, 66:])


def _split_iq2_s(raw: Bytes) -> tuple[Indices, Indices, Indices]:
    upper = (raw[:, 66:74, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & 3
    indices = raw[:, 2:34] | upper.reshape(len(raw), 32).astype(np.int64) << 8
    return indices, raw[:, 34:66].astype(np.int64), _nibbles(raw[:, 74:])


def _split_iq3_xxs(raw: Bytes) -> tuple[Indices, Indices, Indices]:
    signs, levels = _split_aside(_words(raw[:, 66:], "<u4"))
    return raw[:, 2:66].astype(np.int64), signs, levels


def _split_iq3_s(raw: Bytes) -> tuple[Indices, Indices, Indices]:
    upper = np.unpackbits(raw[:, 66:74], axis=-1, bitorder="little").astype(np.int64)
    return raw[:, 2:66] | upper << 8, raw[:, 74:106].astype(np.int64), _nibbles(raw[:, 106:])


_SPLITS = {
    "IQ2_XXS": _split_iq2_xxs,
    "IQ2_XS": _split_iq2_xs,
    "IQ2_S": _split_iq2_s,
    "IQ3_XXS": _split_iq3_xxs,
    "IQ3_S": _split_iq3_s,
}

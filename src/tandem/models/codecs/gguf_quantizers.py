"""Quantization of values to GGUF blocks in NumPy, by the searches of llama.cpp's quantizer.

A type with blocks of 32 weights takes its scale from the extremes; superblocks try several scales
per group and take the one with the least weighted error, then quantize the scales themselves. No
importance matrix is used; without one, llama.cpp's quantizer does not offer IQ1, IQ2 and IQ3 types
either.

Groups lie along the first axis, [weights of a group, groups], so that sums over a group are sums of
long rows.
"""

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.core.errors import UnsupportedError
from tandem.models.codecs.gguf_blocks import IQ4_NL_VALUES

__all__ = ["QUANTIZED_TYPES", "quantize_rows"]

Bytes = NDArray[Any]
"""An array of bytes, uint8."""
Floats = NDArray[np.float32]
Integers = NDArray[np.int32]

CHUNK_WEIGHTS = 1 << 18
"""Weights that are quantized at a time, so that they fit in a core's cache with their results."""
SMALLEST_PEAK = np.float32(1e-15)
"""Largest magnitude of a group below which its scale is 0."""


def quantize_rows(name: str, values: Floats, pool: Executor | None = None) -> Bytes:
    """Quantize rows [..., K] to blocks; return bytes [..., bytes of a row].

    Raises: UnsupportedError (a type without a quantizer, a row that is not whole blocks, values
        that are not finite or beyond fp16 scales).
    """
    if name not in _QUANTIZERS:
        known = ", ".join(_QUANTIZERS)
        raise UnsupportedError("models.quantize", f"type {name}: values are coded as {known}")
    weights, size, quantize = _QUANTIZERS[name]
    if values.shape[-1] % weights:
        what = f"rows of {values.shape[-1]} weights are no blocks of {weights}"
        raise UnsupportedError("models.quantize", f"{name}: {what}")
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, weights)
    out = np.empty((len(blocks), size), np.uint8)
    step = CHUNK_WEIGHTS // weights

    def code(begin: int) -> bool:
        part = blocks[begin : begin + step]
        with np.errstate(over="ignore", invalid="ignore"):
            made, halves = quantize(part)
        out[begin : begin + step] = made
        return bool(np.isfinite(part).all() and np.isfinite(halves).all())

    begins = range(0, len(blocks), step)
    done = map(code, begins) if pool is None else pool.map(code, begins)
    if not all(list(done)):
        what = "a weight that is not finite, or beyond fp16 scales"
        raise UnsupportedError("models.quantize", f"{name}: {what}: repair the checkpoint")
    return out.reshape(*values.shape[:-1], values.shape[-1] // weights * size)


Quantized = tuple[Bytes, NDArray[Any]]
"""Blocks as bytes, and the fp16 numbers in them."""


def _halves(*numbers: Floats) -> Bytes:
    return np.stack(numbers, -1).astype("<f2").view(np.uint8)


def _invert(numbers: Floats) -> Floats:
    """Return 1 / x of each number, and 0 for 0."""
    return np.divide(1, numbers, out=np.zeros_like(numbers), where=numbers != 0)


def _find_peaks(groups: Floats, axis: int) -> Floats:
    """Return the weight of largest magnitude of each group, with its sign."""
    places = np.abs(groups).argmax(axis, keepdims=True)
    return np.take_along_axis(groups, places, axis).squeeze(axis)


def _pack_nibbles(codes: NDArray[np.integer], width: int) -> Bytes:
    """Pack 4-bit codes [B, N]: of each 2 * width codes the first half in low bits, the second in
    high bits.
    """
    parts = codes.astype(np.uint8).reshape(len(codes), -1, 2, width)
    return (parts[:, :, 0] | parts[:, :, 1] << 4).reshape(len(codes), -1)


def _pack_fifth_bits(codes: NDArray[np.integer]) -> Bytes:
    return np.packbits((codes >> 4 & 1).astype(np.uint8), axis=-1, bitorder="little")


def _code_symmetric(blocks: Floats, levels: int) -> tuple[NDArray[np.uint8], Floats]:
    """Return codes and scales of Q4_0 and Q5_0: the weight of largest magnitude gets code 0."""
    scales = _find_peaks(blocks, 1) / np.float32(-(levels // 2))
    shifted = blocks * _invert(scales)[:, None] + np.float32(levels / 2 + 0.5)
    return np.minimum(shifted, levels - 1).astype(np.uint8), scales


def _code_between(blocks: Floats, levels: int) -> tuple[NDArray[np.uint8], Floats, Floats]:
    """Return the codes, scales and minima of blocks in Q4_1 or Q5_1, whose codes are spread between
    the smallest and the largest weight.
    """
    low = blocks.min(1)
    scales = (blocks.max(1) - low) / np.float32(levels - 1)
    codes = (blocks - low[:, None]) * _invert(scales)[:, None] + np.float32(0.5)
    return np.minimum(codes, levels - 1).astype(np.uint8), scales, low


def _quantize_q4_0(blocks: Floats) -> Quantized:
    codes, scales = _code_symmetric(blocks, 16)
    head = _halves(scales)
    return np.hstack([head, _pack_nibbles(codes, 16)]), head.view(np.float16)


def _quantize_q4_1(blocks: Floats) -> Quantized:
    codes, scales, low = _code_between(blocks, 16)
    head = _halves(scales, low)
    return np.hstack([head, _pack_nibbles(codes, 16)]), head.view(np.float16)


def _quantize_q5_0(blocks: Floats) -> Quantized:
    codes, scales = _code_symmetric(blocks, 32)
    head = _halves(scales)
    parts = [head, _pack_fifth_bits(codes), _pack_nibbles(codes & 15, 16)]
    return np.hstack(parts), head.view(np.float16)


def _quantize_q5_1(blocks: Floats) -> Quantized:
    codes, scales, low = _code_between(blocks, 32)
    head = _halves(scales, low)
    parts = [head, _pack_fifth_bits(codes), _pack_nibbles(codes & 15, 16)]
    return np.hstack(parts), head.view(np.float16)


def _quantize_q8_0(blocks: Floats) -> Quantized:
    scales = np.abs(blocks).max(1) / np.float32(127)
    scaled = blocks * _invert(scales)[:, None]
    # Round to the nearest integer, halves away from zero.
    codes = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
    head = _halves(scales)
    return np.hstack([head, codes.view(np.uint8)]), head.view(np.float16)


def _round(values: NDArray[Any], low: int, high: int) -> Floats:
    return np.clip(np.rint(values), low, high)


def _search_scale(groups: Floats, half: int) -> Floats:
    """Return the best scale of each group for codes from -half to half - 1; errors are weighted by
    squares.
    """
    peaks = _find_peaks(groups, 0)
    is_empty = np.abs(peaks) < SMALLEST_PEAK
    safe = np.where(is_empty, np.float32(1), peaks)
    weights = groups * groups
    best = np.zeros_like(peaks)
    scales = np.zeros_like(peaks)
    # The unscaled choice comes first, so another scale is taken only if its error is smaller.
    for i in (0, *range(-9, 0), *range(1, 10)):
        codes = _round(groups * (np.float32(-(half + 0.1 * i)) / safe), -half, half - 1)
        weighted = weights * codes
        by_value = (weighted * groups).sum(0)
        by_code = (weighted * codes).sum(0)
        is_better = (by_code > 0) & ((by_value * by_value > best * by_code) | (i == 0))
        found = np.divide(by_value, by_code, out=np.zeros_like(best), where=by_code > 0)
        scales = np.where(is_better, found, scales)
        best = np.where(is_better, found * by_value, best)
    return np.where(is_empty, np.float32(0), scales)


def _search_third_scale(groups: Floats) -> Floats:
    """Return the best scale of each group of Q3_K (codes -4 to 3), changing codes while the error
    falls.
    """
    peaks = _find_peaks(groups, 0)
    is_empty = np.abs(peaks) < SMALLEST_PEAK
    safe = np.where(is_empty, np.float32(1), peaks)
    codes = _round(groups * (np.float32(-4) / safe), -4, 3)
    weights = groups * groups
    by_value = (weights * groups * codes).sum(0)
    by_code = (weights * codes * codes).sum(0)
    for _ in range(5):
        has_changed = False
        for value, code, weight in zip(groups, codes, weights, strict=True):
            rest_value = by_value - weight * value * code
            rest_code = by_code - weight * code * code
            ratio = np.divide(rest_code, rest_value, out=np.zeros_like(value), where=rest_value > 0)
            changed = _round(value * ratio, -4, 3)
            new_value = rest_value + weight * value * changed
            new_code = rest_code + weight * changed * changed
            is_better = (rest_value > 0) & (changed != code) & (new_code > 0)
            is_better &= new_value * new_value * by_code > by_value * by_value * new_code
            code[is_better] = changed[is_better]
            by_value = np.where(is_better, new_value, by_value)
            by_code = np.where(is_better, new_code, by_code)
            has_changed |= bool(is_better.any())
        if not has_changed:
            break
    found = np.divide(by_value, by_code, out=np.zeros_like(peaks), where=by_code > 0)
    return np.where(is_empty, np.float32(0), found)


class _Search:
    """Search for scales and minima of groups, with several trial scales.

    Args:
        top: the largest code.
        first: addend to ``top`` in the first trial.
        tries: number of further trials, each with 0.1 more.
        is_absolute: True to weigh absolute errors, False for squared errors.
    """

    def __init__(self, top: int, first: float, tries: int, *, is_absolute: bool = False) -> None:
        self.top = top
        self.factors = [np.float32(first + 0.1 * i + top) for i in range(tries + 1)]
        self.is_absolute = is_absolute

    def run(self, groups: Floats, weights: Floats) -> tuple[Floats, Floats]:
        """Return the best scales found, and negated minima, of groups [weights, groups], errors
        weighed by ``weights``.
        """
        low, high = np.minimum(groups.min(0), 0), groups.max(0)
        is_flat = high == low
        scales, minima = (high - low) / np.float32(self.top), low
        sum_w, sum_x = weights.sum(0), (weights * groups).sum(0)
        codes = self._code(groups, minima, high, np.float32(self.top))
        best = self._measure(groups, weights, codes, scales, minima)
        for factor in self.factors:
            # Each search step starts from the best minimum found so far.
            codes = self._code(groups, minima, high, factor)
            weighted = weights * codes
            sum_l = weighted.sum(0)
            sum_l2 = (weighted * codes).sum(0)
            sum_xl = (weighted * groups).sum(0)
            det = sum_w * sum_l2 - sum_l * sum_l
            safe = np.where(det > 0, det, np.float32(1))
            scale = (sum_w * sum_xl - sum_x * sum_l) / safe
            minimum = (sum_l2 * sum_x - sum_l * sum_xl) / safe
            is_above = minimum > 0
            through_zero = sum_xl / np.where(sum_l2 > 0, sum_l2, np.float32(1))
            scale = np.where(is_above, through_zero, scale)
            minimum = np.where(is_above, np.float32(0), minimum)
            error = self._measure(groups, weights, codes, scale, minimum)
            is_better = (det > 0) & (error < best)
            best = np.where(is_better, error, best)
            scales = np.where(is_better, scale, scales)
            minima = np.where(is_better, minimum, minima)
        return np.where(is_flat, np.float32(0), scales), -minima

    def _code(self, groups: Floats, minima: Floats, high: Floats, factor: np.float32) -> Floats:
        span = high - minima
        inverse = factor / np.where(span == 0, np.float32(1), span)
        return _round((groups - minima) * inverse, 0, self.top)

    def _measure(
        self, groups: Floats, weights: Floats, codes: Floats, scales: Floats, minima: Floats
    ) -> Floats:
        error = codes * scales + minima - groups
        return (weights * (np.abs(error) if self.is_absolute else error * error)).sum(0)


def _code_groups(
    groups: Floats, scales: Floats, minima: Floats | float, low: int, high: int
) -> NDArray[np.uint8]:
    """Return the codes of groups [n, B, G] as [B, G * n], counted from 0; scale 0 gives the lowest
    value.
    """
    inverse = _invert(np.asarray(scales, np.float32))
    codes = _round((groups + minima) * inverse, low, high) - np.float32(low)
    codes = np.where(scales == 0, np.float32(-low), codes)
    return np.moveaxis(codes, 0, -1).reshape(codes.shape[1], -1).astype(np.uint8)


def _arrange(blocks: Floats, size: int) -> Floats:
    """Return the groups of blocks [B, 256] of weights as [size, B, groups], a group in a column."""
    return np.ascontiguousarray(np.moveaxis(blocks.reshape(len(blocks), -1, size), -1, 0))


def _round_half(numbers: Floats) -> Floats:
    return numbers.astype(np.float16).astype(np.float32)


def _code_levels(numbers: Floats, top: int) -> tuple[NDArray[np.uint8], Floats]:
    """Quantize non-negative scales or minima: integers [B, G] and an fp16 step [B, 1]."""
    largest = np.maximum(numbers.max(1, keepdims=True), 0)
    levels = _round(numbers * (np.float32(top) * _invert(largest)), 0, top).astype(np.uint8)
    return levels, _round_half(largest / np.float32(top))


def _search_superblock(
    blocks: Floats, size: int, search: _Search, weights: Callable[[Floats], Floats], top: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8], Bytes]:
    """Return codes [B, 256], integer scales and minima [B, G], and their two fp16 factors."""
    groups = _arrange(blocks, size)
    flat = groups.reshape(size, -1)
    scales, minima = (n.reshape(groups.shape[1:]) for n in search.run(flat, weights(flat)))
    s, d = _code_levels(scales, top)
    m, step = _code_levels(minima, top)
    codes = _code_groups(groups, d * s, step * m, 0, search.top)
    return codes, s, m, _halves(d[:, 0], step[:, 0])


def _weigh_by_mean(groups: Floats) -> Floats:
    return np.sqrt((groups * groups).mean(0)) + np.abs(groups)


def _pack_k_scales(s: Bytes, m: Bytes) -> Bytes:
    """Pack eight scales and eight minima of 6 bits into 12 bytes."""
    first = (s[:, :4] & 63) | (s[:, 4:] >> 4) << 6
    second = (m[:, :4] & 63) | (m[:, 4:] >> 4) << 6
    return np.hstack([first, second, (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4])


def _pack_pairs(codes: Bytes) -> Bytes:
    """Pack 2-bit codes [B, 256]: in each 128, four runs of 32 codes share 32 bytes."""
    parts = codes.reshape(len(codes), 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(parts << shifts, axis=2).reshape(len(codes), 64)


def _quantize_q2_k(blocks: Floats) -> Quantized:
    search = _Search(3, -0.5, 15, is_absolute=True)
    codes, s, m, head = _search_superblock(blocks, 16, search, np.abs, 15)
    return np.hstack([s | m << 4, _pack_pairs(codes), head]), head.view(np.float16)


def _quantize_q4_k(blocks: Floats) -> Quantized:
    search = _Search(15, -1.0, 20)
    codes, s, m, head = _search_superblock(blocks, 32, search, _weigh_by_mean, 63)
    parts = [head, _pack_k_scales(s, m), _pack_nibbles(codes, 32)]
    return np.hstack(parts), head.view(np.float16)


def _quantize_q5_k(blocks: Floats) -> Quantized:
    search = _Search(31, -0.5, 15)
    codes, s, m, head = _search_superblock(blocks, 32, search, _weigh_by_mean, 63)
    bits = (codes.reshape(len(codes), 8, 32) >> 4) << np.arange(8, dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce(bits, axis=1)
    parts = [head, _pack_k_scales(s, m), high, _pack_nibbles(codes & 15, 32)]
    return np.hstack(parts), head.view(np.float16)


def _code_signed_levels(scales: Floats, half: int, top: int) -> tuple[Floats, Floats]:
    """Quantize signed scales: integers [B, G] and an fp16 factor [B, 1]; the peak becomes -half."""
    peaks = _find_peaks(scales, 1)[:, None]
    factor = np.float32(-half) * _invert(peaks)
    return _round(scales * factor, -half, top), _round_half(_invert(factor))


def _quantize_q3_k(blocks: Floats) -> Quantized:
    groups = _arrange(blocks, 16)
    scales = _search_third_scale(groups.reshape(16, -1)).reshape(groups.shape[1:])
    levels, d = _code_signed_levels(scales, 32, 31)
    codes = _code_groups(groups, d * levels, 0.0, -4, 3)
    third = (codes.reshape(len(codes), 8, 32) >> 2) << np.arange(8, dtype=np.uint8)[:, None]
    s = (levels + 32).astype(np.uint8)
    low = (s[:, :8] & 15) | (s[:, 8:] & 15) << 4
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce((s >> 4).reshape(len(s), 4, 4) << shifts, axis=1)
    head = _halves(d[:, 0])
    parts = [np.bitwise_or.reduce(third, axis=1), _pack_pairs(codes & 3), low, high, head]
    return np.hstack(parts), head.view(np.float16)


def _quantize_q6_k(blocks: Floats) -> Quantized:
    groups = _arrange(blocks, 16)
    scales = _search_scale(groups.reshape(16, -1), 32).reshape(groups.shape[1:])
    levels, d = _code_signed_levels(scales, 128, 127)
    codes = _code_groups(groups, d * levels, 0.0, -32, 31)
    low = _pack_nibbles(codes & 15, 64)
    high = _pack_pairs(codes >> 4)
    head = _halves(d[:, 0])
    parts = [low, high, levels.astype(np.int8).view(np.uint8), head]
    return np.hstack(parts), head.view(np.float16)


_TABLE = np.array(IQ4_NL_VALUES, np.float32)
_HALVES = np.arange(-256, 256) / 2
_NEAREST = np.searchsorted((_TABLE[1:] + _TABLE[:-1]) / 2, _HALVES, "right").astype(np.uint8)
"""Index of the nearest table value for each half-integer from -128 on; midpoints between values are
half-integers.
"""


def _look_up(values: Floats) -> NDArray[np.uint8]:
    """Return the index of the nearest table value; of the upper one for a tie."""
    halves = np.clip(np.floor(values * np.float32(2)), -256, 255).astype(np.int16)
    return _NEAREST[halves + np.int16(256)]


def _search_table_scale(groups: Floats) -> Floats:
    """Return the best scale of each group with table codes; errors are weighted by squares."""
    peaks = _find_peaks(groups, 0)
    is_empty = np.abs(peaks) < SMALLEST_PEAK
    safe = np.where(is_empty, np.float32(1), peaks)
    weights = groups * groups
    best, scales = np.zeros_like(peaks), np.zeros_like(peaks)
    factors = [-_TABLE[0], *(_TABLE[0] + np.float32(i) for i in range(-7, 8))]
    for i, factor in enumerate(factors):
        values = _TABLE[_look_up(groups * (factor / safe))]
        weighted = weights * values
        by_value, by_code = (weighted * groups).sum(0), (weighted * values).sum(0)
        is_better = (by_code > 0) & ((by_value * by_value > best * by_code) | (i == 0))
        found = np.divide(by_value, by_code, out=np.zeros_like(best), where=by_code > 0)
        scales = np.where(is_better, found, scales)
        best = np.where(is_better, found * by_value, best)
    return np.where(is_empty, np.float32(0), scales)


def _quantize_iq4_nl(blocks: Floats) -> Quantized:
    scales = _search_table_scale(np.ascontiguousarray(blocks.T))
    codes = _look_up(blocks * _invert(scales)[:, None])
    head = _halves(scales)
    return np.hstack([head, _pack_nibbles(codes, 16)]), head.view(np.float16)


def _quantize_iq4_xs(blocks: Floats) -> Quantized:
    groups = _arrange(blocks, 32)
    scales = _search_table_scale(groups.reshape(32, -1)).reshape(groups.shape[1:])
    d = _find_peaks(scales, 1)[:, None] / np.float32(-32)
    levels = _round(scales * _invert(d), -32, 31)
    codes = _look_up(groups * _invert(d * levels))
    codes = np.moveaxis(codes, 0, -1).reshape(len(blocks), 256)
    s = (levels + 32).astype(np.uint8)
    high = (s >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16)
    low = (s[:, 0::2] & 15) | (s[:, 1::2] & 15) << 4
    head = _halves(d[:, 0])
    joined = np.bitwise_or.reduce(high, axis=1).astype("<u2")[:, None].view(np.uint8)
    return np.hstack([head, joined, low, _pack_nibbles(codes, 16)]), head.view(np.float16)


_QUANTIZERS: dict[str, tuple[int, int, Callable[[Floats], Quantized]]] = {
    "Q4_0": (32, 18, _quantize_q4_0),
    "Q4_1": (32, 20, _quantize_q4_1),
    "Q5_0": (32, 22, _quantize_q5_0),
    "Q5_1": (32, 24, _quantize_q5_1),
    "Q8_0": (32, 34, _quantize_q8_0),
    "Q2_K": (256, 84, _quantize_q2_k),
    "Q3_K": (256, 110, _quantize_q3_k),
    "Q4_K": (256, 144, _quantize_q4_k),
    "Q5_K": (256, 176, _quantize_q5_k),
    "Q6_K": (256, 210, _quantize_q6_k),
    "IQ4_NL": (32, 18, _quantize_iq4_nl),
    "IQ4_XS": (256, 136, _quantize_iq4_xs),
}
"""For each GGUF type: weights of a block, bytes of a block, and the function that quantizes to it.
"""

QUANTIZED_TYPES = tuple(_QUANTIZERS)

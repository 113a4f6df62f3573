"""Weight formats as data, and plain float64 arithmetic that defines their meaning.

A format codes groups of consecutive weights of one output. ``quantize`` and ``dequantize`` are the
oracle of the native packer and kernels: numpy, a line a step, no code shared with them. They also
measure a format's own error, apart from any kernel's.

Shapes: N outputs, K inputs, G groups of ``group_size`` inputs.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from tandem.core.errors import NotFoundError, ShapeError, UnsupportedError

__all__ = [
    "BLOCK_ROWS",
    "WEIGHT_FORMATS",
    "QuantizedMatrix",
    "WeightFormat",
    "dequantize",
    "explain_groups",
    "find_format",
    "find_whole_blocks",
    "fit_groups",
    "list_floats",
    "pair_formats",
    "quantize",
    "round_to_bf16",
    "select_rows",
    "split_pair",
    "stack",
]

FloatArray = NDArray[np.float64]

LARGEST_FP16 = 65504.0
LARGEST_E4M3 = 448.0
LARGEST_E2M1 = 6.0
ROW_GROUP_SIZE = 128
"""Number of activations that share a quantization scale, for weight formats with one scale per row
of weights.
"""
BLOCK_ROWS = 128
"""Outputs that share a scale in ``fp8``."""
SUPERBLOCK_SIZE = 256
"""Inputs in a superblock: their scales and minima are integers times common fp16 numbers."""
TABLES = ("", "iq4nl", "e2m1", "iq2xxs", "iq2xs", "iq2s", "iq3xxs", "iq3s")
"""Code tables by the native core's index; the first entry is no table."""
LEVELS_ASIDE = ("iq2xxs", "iq3xxs")
"""Codebooks that store the scale bits above the signs, within the bits counted for codes."""
UPPER_BITS = ("iq2s", "iq3s")
"""Codebooks whose indices have separate upper bits, one for every four inputs."""


class FormatFields(TypedDict):
    """Fields that describe a weight format to the native core."""

    bits: int
    group_size: int
    has_minimum: bool
    is_float: bool
    scale_bits: int
    table: int
    has_zeros: bool


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A storage format of weights.

    Integer formats: ``scale * (code - 2^(bits - 1))``, or ``scale * code + minimum``, where codes
    are unsigned, scale and minimum are fp16, one per group. Float formats: ``scale * code``, where
    codes are small floats: e4m3 with an fp32 scale for each block of 128 x 128 (``fp8``) or each
    output (``fp8row``), e2m1 with a power of two for each 32 inputs (``mxfp4``); or the weight
    itself in float32 or bf16.

    Formats that only hold codes of a file unchanged (``is_stored_only``): scales and minima of
    groups are integers times an fp16 number of 256 weights (``q4k``), codes are looked up in a
    table (``iq4nl``), or a group has an integer zero point (``int4g128zp``: ``scale * (code -
    zero)``). ``nvfp4`` has e2m1 codes, a scale in e4m3 for 16 inputs and a float32 factor for each
    output. These formats are packed from stored blocks and codes; values are never quantized to
    them.
    """

    name: str
    bits: int
    """Bits of a code: 32 (float32) and 16 (bf16), which have no groups, 8, or 2 to 6."""
    group_size: int = 0
    """Inputs that share a scale; 0 for unquantized values, and for one scale per row."""
    has_minimum: bool = False
    is_float: bool = False
    """True if codes are floats (e4m3 with 8 bits, e2m1 with 4), or weights are unquantized
    floats.
    """
    scale_bits: int = 0
    """Bits of the integers that code scales and minima in a superblock; 0: each group has fp16
    scales.
    """
    table: str = ""
    """GGUF type of the table in which codes are looked up: iq4nl, a table of values, or a type with
    a codebook of four or eight magnitudes per entry and separate signs; empty: no table.
    """
    has_zeros: bool = False
    """True if minima are ``-scale * zero``, where zero is a 4-bit integer."""
    down: "WeightFormat | None" = None
    """Format of the down projections of experts, if it differs from gate's and up's."""

    @property
    def is_integer(self) -> bool:
        """True if weights are integer codes that are multiplied with int8 activations."""
        return self.bits < 16 and not self.is_float

    @property
    def is_stored_only(self) -> bool:
        """True if weights come only from a file's codes, since values are never quantized to this
        format.
        """
        return self.scale_bits > 0 or bool(self.table) or self.has_zeros

    @property
    def has_factor(self) -> bool:
        """True if scales are multiplied by an output's factor, or divided by its absolute value if
        negative.
        """
        return self.table == "e2m1"

    @property
    def holds_values(self) -> bool:
        """True if the format stores the weights themselves (float32 or bf16), not codes."""
        return self.bits >= 16

    @property
    def has_blocks(self) -> bool:
        """True if a block of ``BLOCK_ROWS`` outputs shares scales."""
        return self.is_float and self.bits == 8 and self.group_size > 0

    @property
    def fields(self) -> FormatFields:
        """The format's fields as keyword arguments of the native core."""
        return {
            "bits": self.bits,
            "group_size": self.group_size,
            "has_minimum": self.has_minimum,
            "is_float": self.is_float,
            "scale_bits": self.scale_bits,
            "table": TABLES.index(self.table),
            "has_zeros": self.has_zeros,
        }

    @property
    def field_tuple(self) -> tuple[int, int, bool, bool, int, int, bool]:
        """The format's fields as a tuple, for a second format in a call of the native core."""
        return (
            self.bits,
            self.group_size,
            self.has_minimum,
            self.is_float,
            self.scale_bits,
            TABLES.index(self.table),
            self.has_zeros,
        )

    @property
    def activation_group_size(self) -> int:
        """Inputs whose activations share an int8 scale; 0 if activations are bf16 or float32."""
        return (self.group_size or ROW_GROUP_SIZE) if self.is_integer else 0

    @property
    def bits_per_weight(self) -> float:
        """Average bits that a weight takes in a large matrix, scales included."""
        if self.is_float and self.group_size > 0:
            # Both float formats with groups store 64 bytes of scales for a group of 64 outputs: 8
            # bits for each group of inputs of an output.
            return self.bits + 8 / self.group_size
        if not self.is_integer or self.group_size == 0:
            return float(self.bits)
        if self.has_factor:
            return self.bits + 8 / self.group_size
        if self.has_zeros:
            return self.bits + (16 + 4) / self.group_size
        numbers = 1 + self.has_minimum
        if self.scale_bits:
            shared = 16 * numbers / SUPERBLOCK_SIZE
            level_bits = 0 if self.table in LEVELS_ASIDE else self.scale_bits
            upper = 0.25 if self.table in UPPER_BITS else 0.0
            return self.bits + upper + level_bits * numbers / self.group_size + shared
        return self.bits + 16 * numbers / self.group_size


def _list_formats() -> list[WeightFormat]:
    formats = [WeightFormat("f32", 32, is_float=True)]
    formats += [WeightFormat("bf16", 16, is_float=True)]
    formats += [WeightFormat("fp8", 8, 128, is_float=True)]
    formats += [WeightFormat("fp8row", 8, is_float=True)]
    formats += [WeightFormat("mxfp4", 4, 32, is_float=True)]
    formats += [WeightFormat("int8row", 8)]
    formats += [WeightFormat(f"int8g{size}", 8, size) for size in (16, 32, 64, 128)]
    formats += [WeightFormat(f"int8g{size}min", 8, size, True) for size in (16, 32, 64, 128)]
    formats += [WeightFormat(f"int4g{size}", 4, size, True) for size in (32, 64, 128)]
    formats += [WeightFormat(f"int4g{size}sym", 4, size) for size in (32, 64, 128)]
    formats += [
        WeightFormat(f"int4g{size}zp", 4, size, True, has_zeros=True) for size in (32, 64, 128)
    ]
    formats += [WeightFormat("int5g32", 5, 32, True), WeightFormat("int5g32sym", 5, 32)]
    formats += [WeightFormat("q2k", 2, 16, True, scale_bits=4)]
    formats += [WeightFormat("q3k", 3, 16, scale_bits=6)]
    formats += [WeightFormat("q4k", 4, 32, True, scale_bits=6)]
    formats += [WeightFormat("q5k", 5, 32, True, scale_bits=6)]
    formats += [WeightFormat("q6k", 6, 16, scale_bits=8)]
    formats += [WeightFormat("nvfp4", 4, 16, table="e2m1")]
    formats += [WeightFormat("iq4nl", 4, 32, table="iq4nl")]
    formats += [WeightFormat("iq4xs", 4, 32, scale_bits=6, table="iq4nl")]
    books = (
        ("iq2xxs", 2, 32),
        ("iq2xs", 2, 16),
        ("iq2s", 2, 16),
        ("iq3xxs", 3, 32),
        ("iq3s", 3, 32),
    )
    formats += [
        WeightFormat(name, bits, size, scale_bits=4, table=name) for name, bits, size in books
    ]
    return formats


WEIGHT_FORMATS = {weight_format.name: weight_format for weight_format in _list_formats()}
"""All weight formats by name. ``int4...`` and ``int5...`` have a minimum unless they say ``sym``,
``int8...`` only if it says ``min``; ``q...`` and ``iq...`` hold blocks of the GGUF types of these
names; ``nvfp4`` is the format of modelopt and compressed-tensors of that name.
"""

_ALIASES = {"int8": "int8g128", "int4": "int4g32"}


def find_format(name: str) -> WeightFormat:
    """Return the weight format of this name; ``int8`` means int8g128, ``int4`` means int4g32.

    A name such as ``q4k+q6k`` is a pair for experts: the second format holds the down projections.

    Raises: NotFoundError (there is no such format; the text lists those that there are).
    """
    first, plus, second = name.partition("+")
    if plus:
        return pair_formats(find_format(first), find_format(second))
    weight_format = WEIGHT_FORMATS.get(_ALIASES.get(name, name))
    if weight_format is None:
        known = ", ".join([*_ALIASES, *WEIGHT_FORMATS])
        raise NotFoundError("kernels.find_format", f"weight format {name!r}: choose one of {known}")
    return weight_format


def fit_groups(name: str, widths: Collection[int]) -> WeightFormat:
    """Return the weight format of this name whose groups fill matrices of the given numbers of
    inputs.

    ``int8`` and ``int4`` leave the size of groups open: if inputs are no groups of the usual size,
    they mean the largest size below that fills all of them. A whole name means itself, and so does
    each name if no size fills them.

    Raises: NotFoundError (there is no such format).
    """
    usual = find_format(name)
    if name not in _ALIASES:
        return usual
    fitting = [
        other
        for size in range(usual.group_size, 0, -1)
        if (other := WEIGHT_FORMATS.get(f"{name}g{size}")) and not any(k % size for k in widths)
    ]
    return fitting[0] if fitting else usual


def explain_groups(name: str, chosen: WeightFormat, widths: Collection[int]) -> str:
    """Return why ``fit_groups`` chose a format of other groups than usual; empty if it did not."""
    usual = find_format(name).group_size
    if chosen.group_size == usual:
        return ""
    odd = min(k for k in widths if k % usual)
    return f"groups of {chosen.group_size}, as {odd} inputs are no groups of {usual}"


def pair_formats(gate_up: WeightFormat, down: WeightFormat) -> WeightFormat:
    """Return the format of experts with one format for gate and up and another for down.

    Raises: NotFoundError (a format that is not integer, or is a pair itself).
    """
    if gate_up == down:
        return gate_up
    pair = (gate_up, down)
    if any(held.down is not None or not held.is_integer for held in pair):
        what = f"{gate_up.name}+{down.name}: a pair is of two integer formats"
        raise NotFoundError("kernels.find_format", f"weight format {what}")
    return replace(gate_up, name=f"{gate_up.name}+{down.name}", down=down)


def split_pair(weight_format: WeightFormat) -> tuple[WeightFormat, WeightFormat]:
    """Return the format of gate and up, and that of down, of a format of experts; a single format
    is both.
    """
    if weight_format.down is None:
        return weight_format, weight_format
    first, _, _ = weight_format.name.partition("+")
    return WEIGHT_FORMATS[first], weight_format.down


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A quantized matrix [N, K] with separate codes and scales.

    Codes are uint8 [N, K]. Scales are [N, G], fp16; float32 for fp8, one row for 128 outputs, for
    fp8row, and for mxfp4, powers of two; e4m3 codes for nvfp4. Minima are fp16 [N, G], the zero
    points of formats that have these, or the factors of nvfp4, float32 [N, 1], of which negative
    ones divide.
    """

    weight_format: WeightFormat
    codes: NDArray[np.uint8]
    scales: NDArray[np.float16 | np.float32 | np.uint8]
    minima: NDArray[np.float16 | np.float32] | None

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs, (N, K)."""
        num_outputs, num_inputs = self.codes.shape
        return num_outputs, num_inputs

    @property
    def arrays(self) -> tuple[object, object, object]:
        """Codes, scales and minima in the form that the native core takes."""
        return self.codes, self.scales, self.minima


def stack(matrices: "list[QuantizedMatrix]") -> QuantizedMatrix:
    """Concatenate the outputs of matrices of one format and width.

    REQUIRES: in ``fp8`` all matrices but the last have whole blocks of outputs.
    """
    first = matrices[0]
    if len(matrices) == 1:
        return first
    minima = [matrix.minima for matrix in matrices if matrix.minima is not None]
    return QuantizedMatrix(
        first.weight_format,
        np.concatenate([matrix.codes for matrix in matrices]),
        np.concatenate([matrix.scales for matrix in matrices]),
        np.concatenate(minima) if minima else None,
    )


def select_rows(matrix: QuantizedMatrix, rows: slice | NDArray[np.int64]) -> QuantizedMatrix:
    """Return some outputs of a matrix, contiguous.

    Raises: ShapeError (fp8 outputs that are not whole blocks, whose scales they share).
    """
    if matrix.weight_format.has_blocks:
        blocks = None if isinstance(rows, slice) else find_whole_blocks(rows)
        if blocks is None:
            raise ShapeError("kernels.select_rows", "outputs of fp8 share scales: take all of them")
        codes, scales = matrix.codes[rows], matrix.scales[blocks]
        return QuantizedMatrix(
            matrix.weight_format, np.ascontiguousarray(codes), np.ascontiguousarray(scales), None
        )
    scales, minima = matrix.scales[rows], matrix.minima
    return QuantizedMatrix(
        matrix.weight_format,
        np.ascontiguousarray(matrix.codes[rows]),
        np.ascontiguousarray(scales),
        None if minima is None else np.ascontiguousarray(minima[rows]),
    )


def find_whole_blocks(
    order: NDArray[np.integer], size: int = BLOCK_ROWS
) -> NDArray[np.integer] | None:
    """Return the block number of each run of ``size`` rows in an order; None if a run is no whole
    block.
    """
    if len(order) % size:
        return None
    runs = np.reshape(order, (-1, size))
    is_whole = (runs[:, 0] % size == 0) & (np.diff(runs, axis=1) == 1).all(axis=1)
    return runs[:, 0] // size if bool(is_whole.all()) else None


def round_to_bf16(values: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return float32 values rounded to the nearest bf16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    result = rounded.astype(np.uint32).view(np.float32)
    return np.where(np.isnan(values), np.float32(np.nan), result)


def list_floats(bits: int) -> NDArray[np.float32]:
    """Return the values of all codes of e4m3 (8 bits) or e2m1 (4 bits); e4m3's NaN codes
    are NaN.
    """
    mantissa, bias = (3, 7) if bits == 8 else (1, 1)
    codes = np.arange(2**bits)
    magnitude = codes % 2 ** (bits - 1)
    exponent, fraction = magnitude >> mantissa, magnitude % 2**mantissa / 2**mantissa
    normal = (1 + fraction) * 2.0 ** (exponent - bias)
    values = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), normal)
    if bits == 8:
        values[magnitude == 127] = np.nan
    return np.where(codes >= 2 ** (bits - 1), -values, values).astype(np.float32)


def _round_to_codes(values: NDArray[np.float32], bits: int) -> NDArray[np.uint8]:
    """Return the codes of the nearest representable floats, ties to the even code."""
    positive = list_floats(bits)[: 2 ** (bits - 1)]
    positive = positive[np.isfinite(positive)].astype(np.float64)
    magnitude = np.minimum(np.abs(values).astype(np.float64), positive[-1])
    middles = (positive[1:] + positive[:-1]) / 2
    below = np.searchsorted(middles, magnitude, "left")
    is_tie = np.isin(magnitude, middles)
    codes = below + (is_tie & (below % 2 == 1))
    return (codes + np.where(np.signbit(values), 2 ** (bits - 1), 0)).astype(np.uint8)


def quantize(weights: NDArray[np.floating], weight_format: WeightFormat) -> QuantizedMatrix:
    """Quantize a matrix [N, K]; each operation is in float32.

    Raises: ShapeError (K is not whole groups of the format); UnsupportedError (the format holds
        unquantized values or stored codes only; a weight is not finite, or too large for an fp16
        scale).
    """
    if weight_format.holds_values:
        what = f"{weight_format.name} has no codes: use round_to_bf16, or the values themselves"
        raise UnsupportedError("kernels.quantize", what)
    if weight_format.is_stored_only:
        what = f"{weight_format.name} holds blocks of files: use another format for values"
        raise UnsupportedError("kernels.quantize", what)
    size = weight_format.group_size or (weights.shape[-1] if weights.ndim else 1)
    if weights.ndim != 2 or (weight_format.is_integer and weights.shape[1] % size):
        what = f"weights {weights.shape}: give [N, K] with K a multiple of the group, {size}"
        raise ShapeError("kernels.quantize", what, field="weights")
    with np.errstate(over="ignore"):
        w = weights.astype(np.float32)
    if not np.isfinite(w).all():
        raise _refuse(weights)
    if weight_format.is_float:
        return _quantize_float(w, weight_format)
    groups = w.reshape(len(w), -1, size)
    levels = np.float32(2**weight_format.bits)
    low = np.zeros(groups.shape[:2], np.float32)
    with np.errstate(over="ignore"):
        if weight_format.has_minimum:
            low = groups.min(-1)
            steps = (groups.max(-1) - low) / (levels - 1)
        elif weight_format.bits == 8:
            steps = np.abs(groups).max(-1) / np.float32(127)
        else:
            peak = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)[..., 0]
            steps = peak / -(levels / 2)
    if max(np.abs(steps).max(initial=0), np.abs(low).max(initial=0)) > LARGEST_FP16:
        raise _refuse(weights)
    scales, minima = steps.astype(np.float16), low.astype(np.float16)
    step = scales.astype(np.float32)[..., None]
    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step != 0)
    ratio = (groups - minima.astype(np.float32)[..., None]) * inverse
    offset = 0 if weight_format.has_minimum else levels / 2
    lowest = 1 if weight_format.bits == 8 and not weight_format.has_minimum else 0
    codes = np.clip(np.rint(ratio) + offset, lowest, levels - 1).astype(np.uint8)
    kept = minima if weight_format.has_minimum else None
    return QuantizedMatrix(weight_format, codes.reshape(w.shape), scales, kept)


def _quantize_float(w_NK: NDArray[np.float32], weight_format: WeightFormat) -> QuantizedMatrix:
    """Quantize to a float format; each block's largest weight gets (nearly) the largest code."""
    size = weight_format.group_size or w_NK.shape[1]
    rows = BLOCK_ROWS if weight_format.has_blocks else 1
    amax = np.array(
        [
            [np.abs(w_NK[i : i + rows, k : k + size]).max() for k in range(0, w_NK.shape[1], size)]
            for i in range(0, len(w_NK), rows)
        ],
        np.float32,
    )
    if weight_format.bits == 8:
        scales = amax / np.float32(LARGEST_E4M3)
    else:
        # The scale is the power of two that brings the largest value below 8. It is doubled if
        # rounding that value down to 6 would be a larger error than any rounding between 4 and 6.
        exponent = np.where(amax == 0, -126, np.frexp(amax)[1] - 3)
        exponent += amax > 7 * np.exp2(exponent.astype(np.float64))
        scales = np.exp2(np.clip(exponent, -126, 127)).astype(np.float32)
    wide = _spread(scales, rows, size, w_NK.shape)
    ratio = np.divide(w_NK, wide, out=np.zeros_like(w_NK), where=wide != 0)
    return QuantizedMatrix(weight_format, _round_to_codes(ratio, weight_format.bits), scales, None)


def _spread(
    scales: NDArray[np.float32], rows: int, size: int, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """Return the scale of each weight, [N, K], from the scales of blocks of ``rows`` x ``size``
    weights.
    """
    return scales.repeat(rows, 0).repeat(size, 1)[: shape[0], : shape[1]]


def _refuse(weights: NDArray[np.floating]) -> UnsupportedError:
    what = f"weights up to {np.abs(weights).max()}: not finite, or beyond fp16 scales"
    return UnsupportedError("kernels.quantize", what, field="weights")


def dequantize(matrix: QuantizedMatrix) -> FloatArray:
    """Return the dequantized weights, float64 [N, K]."""
    weight_format = matrix.weight_format
    if weight_format.is_float:
        rows = BLOCK_ROWS if weight_format.has_blocks else 1
        size = weight_format.group_size or matrix.codes.shape[1]
        codes = list_floats(weight_format.bits).astype(np.float64)[matrix.codes]
        scales = matrix.scales.astype(np.float32)
        return codes * _spread(scales, rows, size, codes.shape)
    if weight_format.has_factor:
        return _dequantize_nvfp4(matrix)
    size = weight_format.group_size or matrix.codes.shape[1]
    codes = matrix.codes.astype(np.float64).reshape(len(matrix.codes), -1, size)
    scales = matrix.scales.astype(np.float64)[..., None]
    if matrix.minima is None:
        weights = scales * (codes - 2 ** (weight_format.bits - 1))
    elif weight_format.has_zeros:
        weights = scales * (codes - matrix.minima.astype(np.float64)[..., None])
    else:
        weights = scales * codes + matrix.minima.astype(np.float64)[..., None]
    return weights.reshape(matrix.codes.shape)


def _dequantize_nvfp4(matrix: QuantizedMatrix) -> FloatArray:
    """Dequantize nvfp4 in the float32 arithmetic of the checkpoint's own decoders."""
    assert matrix.minima is not None, "no factors"
    factors = matrix.minima.astype(np.float32)
    scales = list_floats(8)[matrix.scales.astype(np.uint8)]
    steps = np.where(factors > 0, scales * factors, scales / np.abs(factors))
    values = list_floats(4)[matrix.codes] * steps.repeat(matrix.weight_format.group_size, 1)
    return values.astype(np.float64)

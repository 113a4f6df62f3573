"""Weight formats as data, and the naive float64 arithmetic that says what each of them means.

A format codes groups of consecutive weights of one output. ``quantize`` and ``dequantize`` are the
oracle of the native packer and kernels: numpy, a line a step, no code shared with them. They also
measure a format's own error, apart from any kernel's.

Shapes: N outputs, K inputs, G groups of ``group_size`` inputs.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.core.errors import NotFoundError, ShapeError, UnsupportedError

__all__ = [
    "WEIGHT_FORMATS",
    "QuantizedMatrix",
    "WeightFormat",
    "dequantize",
    "find_format",
    "quantize",
    "round_to_bf16",
]

FloatArray = NDArray[np.float64]

LARGEST_FP16 = 65504.0


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How weights are stored: ``scale * (code - 2^(bits - 1))``, or ``scale * code + minimum``.

    Codes are unsigned; scale and minimum are fp16, one per group.
    """

    name: str
    bits: int
    """16 (bf16, no groups), 8 or 4."""
    group_size: int = 0
    """Weights that share a scale; 0 for bf16."""
    has_minimum: bool = False

    @property
    def is_integer(self) -> bool:
        """Whether weights are codes, multiplied with int8 activations."""
        return self.bits < 16

    @property
    def bits_per_weight(self) -> float:
        """Stored bits, scales included."""
        if not self.is_integer:
            return float(self.bits)
        return self.bits + 16 * (1 + self.has_minimum) / self.group_size


def _list_formats() -> list[WeightFormat]:
    formats = [WeightFormat("bf16", 16)]
    formats += [WeightFormat(f"int8g{size}", 8, size) for size in (16, 32, 64, 128)]
    formats += [WeightFormat(f"int8g{size}min", 8, size, True) for size in (16, 32, 64, 128)]
    formats += [WeightFormat(f"int4g{size}", 4, size, True) for size in (32, 64, 128)]
    formats += [WeightFormat(f"int4g{size}sym", 4, size) for size in (32, 64, 128)]
    return formats


WEIGHT_FORMATS = {weight_format.name: weight_format for weight_format in _list_formats()}
"""By name. ``int4...`` has a minimum unless it says ``sym``, ``int8...`` if it says ``min``."""

_ALIASES = {"int8": "int8g128", "int4": "int4g32"}


def find_format(name: str) -> WeightFormat:
    """Return the format of this name; ``int8`` means int8g128, ``int4`` means int4g32.

    Raises: NotFoundError.
    """
    weight_format = WEIGHT_FORMATS.get(_ALIASES.get(name, name))
    if weight_format is None:
        known = ", ".join([*_ALIASES, *WEIGHT_FORMATS])
        raise NotFoundError("kernels.find_format", f"weight format {name!r}: choose one of {known}")
    return weight_format


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix [N, K] in an integer format: codes uint8 [N, K], scales and minima fp16 [N, G]."""

    weight_format: WeightFormat
    codes: NDArray[np.uint8]
    scales: NDArray[np.float16]
    minima: NDArray[np.float16] | None


def round_to_bf16(values: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return float32 values rounded to the nearest bf16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    result = rounded.astype(np.uint32).view(np.float32)
    return np.where(np.isnan(values), np.float32(np.nan), result)


def quantize(weights: NDArray[np.floating], weight_format: WeightFormat) -> QuantizedMatrix:
    """Code a matrix [N, K] in an integer format.

    Raises: ShapeError (K is not whole groups); UnsupportedError (bf16 has no codes; a weight that
        is not finite, or too large for an fp16 scale).
    """
    size = weight_format.group_size
    if not weight_format.is_integer:
        raise UnsupportedError("kernels.quantize", "bf16 has no codes: use round_to_bf16")
    if weights.ndim != 2 or weights.shape[1] % size:
        what = f"weights {weights.shape}: give [N, K] with K a multiple of the group, {size}"
        raise ShapeError("kernels.quantize", what, field="weights")
    groups = weights.astype(np.float64).reshape(len(weights), -1, size)
    levels = 2**weight_format.bits
    low = np.zeros(groups.shape[:2])
    if weight_format.has_minimum:
        low = groups.min(-1)
        steps = (groups.max(-1) - low) / (levels - 1)
    elif weight_format.bits == 8:
        steps = np.abs(groups).max(-1) / 127
    else:
        peak = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)[..., 0]
        steps = peak / -8
    largest = max(np.abs(steps).max(initial=0), np.abs(low).max(initial=0))
    if not (np.isfinite(weights).all() and largest <= LARGEST_FP16):
        what = f"weights up to {np.abs(weights).max()}: not finite, or beyond fp16 scales"
        raise UnsupportedError("kernels.quantize", what, field="weights")
    # Through float32, as any caller who holds float32 scales would round them.
    scales = steps.astype(np.float32).astype(np.float16)
    minima = low.astype(np.float32).astype(np.float16)
    step = scales.astype(np.float64)[..., None]
    offset = 0 if weight_format.has_minimum else levels // 2
    lowest = 1 if weight_format.bits == 8 and not weight_format.has_minimum else 0
    shifted = groups - minima.astype(np.float64)[..., None]
    ratio = np.divide(shifted, step, out=np.zeros_like(shifted), where=step != 0)
    codes = np.clip(np.rint(ratio) + offset, lowest, levels - 1).astype(np.uint8)
    kept = minima if weight_format.has_minimum else None
    return QuantizedMatrix(weight_format, codes.reshape(weights.shape), scales, kept)


def dequantize(matrix: QuantizedMatrix) -> FloatArray:
    """Return the weights that the codes stand for, [N, K]."""
    size = matrix.weight_format.group_size
    codes = matrix.codes.astype(np.float64).reshape(len(matrix.codes), -1, size)
    scales = matrix.scales.astype(np.float64)[..., None]
    if matrix.minima is None:
        weights = scales * (codes - 2 ** (matrix.weight_format.bits - 1))
    else:
        weights = scales * codes + matrix.minima.astype(np.float64)[..., None]
    return weights.reshape(matrix.codes.shape)

"""Matrices of integer codes with scales and zero points, as GPTQ, AWQ and others store them.

``weight = scale * (code - zero)`` with unsigned codes. Values are computed in float32 with one
product each; codes are converted unchanged to a weight format, whose scales and minima are fp16.

Shapes: N outputs, K inputs, G groups.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.core.errors import CorruptionError, ShapeError, UnsupportedError
from tandem.kernels.weights.formats import LARGEST_FP16, QuantizedMatrix, WeightFormat

__all__ = ["IntegerMatrix", "split_bytes", "unpack_inputs", "unpack_outputs"]

FP16_ROUNDING = 2.0**-11
"""Relative rounding error of a normal fp16 number."""


@dataclass(frozen=True, slots=True)
class IntegerMatrix:
    """Integer codes uint8 [N, K], scales float32 [N, G], zero points float32 [N, G] or one
    number.
    """

    name: str
    """Name of the weight, for error messages."""
    bits: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | float
    group_size: int
    """Inputs of a group; the last group may have fewer."""
    group_ids: Tensor | None = None
    """Quantization group of each input, int64 [K]; None: groups are runs of consecutive inputs."""

    def read_into(self, out: Tensor) -> None:
        """Write the decoded values [N, K], rounded once to the dtype of ``out``.

        Raises: ShapeError (``out`` has another shape).
        """
        if self.codes.shape != out.shape:
            what = f"weight {self.name!r} has codes of shape {list(self.codes.shape)}"
            needs = f"the configuration needs {list(out.shape)}"
            raise ShapeError("models.read_weights", f"{what}: {needs}")
        inputs = self.codes.shape[1]
        order = self.group_ids
        if order is None:
            order = torch.arange(inputs) // self.group_size
        zeros = self.zeros[:, order] if isinstance(self.zeros, Tensor) else self.zeros
        out.copy_((self.codes.float() - zeros) * self.scales[:, order])

    def pack(self, weight_format: WeightFormat) -> QuantizedMatrix:
        """Return the codes in a weight format of equally many bits whose group size divides this
        one's.

        Raises:
            CorruptionError: a zero point is not the middle, in a format without minimum.
            UnsupportedError: a scale or minimum is beyond fp16.
        """
        size = weight_format.group_size or self.codes.shape[1]
        scales = self._spread(self.scales, size)
        self._require_fp16("scale", scales)
        middle = float(1 << (self.bits - 1))
        minima, kept, stored = None, None, None
        if weight_format.has_minimum:
            zeros = self.zeros
            if isinstance(zeros, Tensor):
                zeros = self._spread(zeros, size)
            minima = -scales * zeros
            if weight_format.has_zeros:
                stored = torch.as_tensor(zeros).expand_as(scales).half()
                kept = -scales.half().float() * zeros
            else:
                self._require_fp16("minimum", minima)
                stored = minima.half()
                kept = stored.float()
        elif isinstance(self.zeros, Tensor) and not bool((self.zeros == middle).all()):
            raise CorruptionError(
                "models.read_weights",
                f"weight {self.name!r} has a zero point other than {middle:g}, and its "
                "quantization_config says that it is symmetric: correct one of them",
            )
        codes = _recode(self.codes, scales, minima, kept, int(middle), size)
        return QuantizedMatrix(
            weight_format,
            np.ascontiguousarray(codes.numpy()),
            np.ascontiguousarray(scales.half().numpy()),
            None if stored is None else np.ascontiguousarray(stored.numpy()),
        )

    def _require_fp16(self, what: str, numbers: Tensor) -> None:
        if not bool((numbers.abs() <= LARGEST_FP16).all()):
            raise UnsupportedError(
                "models.read_weights",
                f"weight {self.name!r} has a {what} that is not finite or beyond fp16: "
                "choose bf16 for it",
            )

    def _spread(self, numbers: Tensor, size: int) -> Tensor:
        """Repeat numbers of groups for each smaller group of ``size`` inputs within them."""
        count = self.codes.shape[1] // size
        return numbers.repeat_interleave(max(1, self.group_size // size), 1)[:, :count]


def _recode(
    codes: Tensor,
    scales: Tensor,
    minima: Tensor | None,
    kept_minima: Tensor | None,
    middle: int,
    size: int,
) -> Tensor:
    """Choose the nearest codes again for groups whose tiny scale fp16 represents badly.

    For other groups the rounding of the scale moves no value by half a step, so codes stay.
    """
    rounded = scales.half().float()
    is_bad = (rounded - scales).abs() > FP16_ROUNDING * scales.abs()
    if not is_bad.any():
        return codes
    groups = codes.unflatten(1, (-1, size)).clone()
    step, offset = scales[is_bad][:, None], float(middle)
    base = torch.full_like(step, 0.0)
    kept = base
    if minima is not None and kept_minima is not None:
        offset = 0.0
        base, kept = minima[is_bad][:, None], kept_minima[is_bad][:, None]
    values = (groups[is_bad].float() - offset) * step + base
    divisor = rounded[is_bad][:, None]
    ratio = torch.where(divisor == 0, 0.0, (values - kept) / divisor)
    groups[is_bad] = (ratio.round() + offset).clamp(0, 2 * middle - 1).to(torch.uint8)
    return groups.flatten(1)


def split_bytes(words: Tensor, bits: int) -> Tensor:
    """Return the codes in int32 words, lowest bits first: uint8 [..., 32 / bits]."""
    data = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))
    if bits == 8:
        return data
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)


def unpack_inputs(words: Tensor, bits: int) -> Tensor:
    """Return codes [N, K] of words [K bits / 32, N], which hold consecutive inputs."""
    return split_bytes(words, bits).permute(1, 0, 2).flatten(1)


def unpack_outputs(words: Tensor, bits: int) -> Tensor:
    """Return codes [N, R] of words [R, N bits / 32], which hold consecutive outputs."""
    return split_bytes(words, bits).flatten(1).t().contiguous()

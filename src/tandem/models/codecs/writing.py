"""Quantization of matrices for checkpoints: compressed-tensors for integers, DeepSeek's blocks for
fp8.

Formats without minimum are quantized as our packer does, so that a written checkpoint and one
packed while loading are the same model. Formats with minimum get integer zero points, as files
cannot hold a minimum; scale and zero point are searched for.

Shapes: G groups, K weights of a group.
"""

import re
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tandem.core.errors import UnsupportedError
from tandem.kernels.weights.formats import BLOCK_ROWS, LARGEST_FP16, WeightFormat, quantize

__all__ = [
    "CODED_PARTS",
    "OTHER_MODULES",
    "Encoder",
    "EncoderChoice",
    "make_encoder",
    "search_zeros",
]

CODED_PARTS = re.compile(
    r"\.(input_scale|input_zero_point|input_global_scale|[kvq]_scale|kv_scale|output_scale)$"
)
"""Tensors that describe quantized codes or activations and are useless beside plain values."""

OTHER_MODULES = re.compile(r".*\.[qkv]_proj$")
"""Projections of queries, keys and values, which other programs compute as one matrix: they have
one format.
"""
RANGE_SHARES = {4: (1.04, 0.98, 0.92, 0.86, 0.8, 0.7), 8: ()}
"""By bits of a code: the steps that are tried besides the one that spans a group's range, as shares
of it. 256 codes lose more by cut ends than they gain.
"""
CHUNK_WEIGHTS = 1 << 18
"""Weights that are quantized at a time, so that they fit in a core's cache with their results."""
SMALLEST_STEP = 2.0**-25
"""Steps below this, or this one, are 0 in fp16."""

Tensors = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class Encoder(Protocol):
    """Quantization of matrices [N, K] for a checkpoint file in one format."""

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that a matrix can be quantized. Raises: UnsupportedError (its shape does not allow
        it).
        """
        ...

    def list_tensors(self, shape: tuple[int, ...]) -> Tensors:
        """Return dtype and shape of each tensor that ``encode`` returns, by the last part of its
        name.
        """
        ...

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        """Quantize a matrix of float32 values; return its tensors by the last part of their
        names.
        """
        ...

    def describe(self, plain: list[str]) -> dict[str, Any]:
        """Return the ``quantization_config``; ``plain`` are the modules that are not quantized."""
        ...


@dataclass(frozen=True, slots=True)
class EncoderChoice:
    """The encoders of a model's matrices: one for all, or another one for some of them."""

    usual: Encoder
    other: Encoder | None = None
    """Encoder of the matrices whose modules match ``OTHER_MODULES``; None: the usual one."""

    def find(self, name: str) -> Encoder:
        """Return the encoder of a weight."""
        is_other = OTHER_MODULES.match(name.removesuffix(".weight"))
        return self.other if self.other is not None and is_other else self.usual

    def describe(self, plain: list[str]) -> dict[str, Any]:
        """Return the ``quantization_config``; ``plain`` are the modules that are not quantized."""
        config = self.usual.describe(plain)
        if self.other is not None:
            # The first group whose targets match applies.
            (scheme,) = self.other.describe(plain)["config_groups"].values()
            groups = [scheme | {"targets": [f"re:{OTHER_MODULES.pattern}"]}]
            groups += config["config_groups"].values()
            config["config_groups"] = {f"group_{i}": group for i, group in enumerate(groups)}
        return config


def make_encoder(weight_format: WeightFormat) -> Encoder | None:
    """Return the encoder of a format; None for bf16.

    Raises: UnsupportedError (no checkpoint layout has this format).
    """
    if weight_format.bits == 16:
        return None
    if weight_format.holds_values:
        what = f"{weight_format.name}: values are written in bfloat16: use bf16"
        raise UnsupportedError("models.export", what)
    if weight_format.is_stored_only or weight_format.bits == 5:
        what = f"{weight_format.name} is a layout of GGUF files alone: use another format"
        raise UnsupportedError("models.export", what)
    if weight_format.name == "fp8":
        return Fp8Encoder(weight_format)
    if weight_format.name == "fp8row":
        return Fp8RowEncoder(weight_format)
    if weight_format.is_float:
        what = f"{weight_format.name} is a layout of gpt-oss's experts alone: use another format"
        raise UnsupportedError("models.export", what)
    return IntegerEncoder(weight_format)


class Fp8Encoder:
    """Encoder to e4m3 with a scale for each block of 128 x 128."""

    def __init__(self, weight_format: WeightFormat) -> None:
        self._format = weight_format

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Accept any matrix: a block or row of any size can be quantized."""
        del name, shape

    def list_tensors(self, shape: tuple[int, ...]) -> Tensors:
        """Return dtype and shape of ``weight`` and ``weight_scale_inv``."""
        grid = (-(-shape[0] // BLOCK_ROWS), -(-shape[1] // self._format.group_size))
        return {
            "weight": (torch.float8_e4m3fn, shape),
            "weight_scale_inv": (torch.float32, grid),
        }

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        """Quantize a matrix to e4m3 codes and block scales."""
        coded = quantize(values.numpy(), self._format)
        codes = torch.from_numpy(coded.codes).view(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": torch.from_numpy(coded.scales)}

    def describe(self, plain: list[str]) -> dict[str, Any]:
        """Return DeepSeek's ``quantization_config`` for fp8 blocks."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK_ROWS, self._format.group_size],
            "modules_to_not_convert": plain,
        }


class Fp8RowEncoder:
    """Encoder to e4m3 with a scale for each output: compressed-tensors' float-quantized."""

    def __init__(self, weight_format: WeightFormat) -> None:
        self._format = weight_format

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Accept any matrix: a row of any length can be quantized."""
        del name, shape

    def list_tensors(self, shape: tuple[int, ...]) -> Tensors:
        """Return dtype and shape of ``weight`` and ``weight_scale``."""
        return {
            "weight": (torch.float8_e4m3fn, shape),
            "weight_scale": (torch.float32, (shape[0], 1)),
        }

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        """Quantize a matrix to e4m3 codes and scales of outputs."""
        coded = quantize(values.numpy(), self._format)
        codes = torch.from_numpy(coded.codes).view(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": torch.from_numpy(coded.scales)}

    def describe(self, plain: list[str]) -> dict[str, Any]:
        """Return compressed-tensors' ``quantization_config`` for fp8 with a scale per output."""
        weights = {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": "channel",
            "dynamic": False,
        }
        return _describe_compressed("float-quantized", weights, plain)


def search_zeros(groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Choose scale and zero point of each group by the least weighted error, and code it with them.

    The first try is the step that spans the group's range from its lower end. Then come steps near
    it and smaller ones, which cut off both ends: their zero point is the code nearest to 0 where
    the range is in the middle of the codes. For the codes of each try the scale is the one with the
    least weighted square error. A weight of a group counts by its magnitude and by the group's, as
    in llama.cpp's search for its superblocks. Linear in the weights: some 15 passes a try.

    Args:
        groups: float32 [G, weights of a group].
        bits: bits of a code, 4 or 8.

    Returns: codes uint8 [G, weights of a group], scales fp16 [G], zero points uint8 [G].

    Raises: UnsupportedError (a weight is not finite, or a scale beyond fp16).
    """
    top = 2**bits - 1
    # A group lies along the first axis, so that sums over it are sums of long rows.
    x_KG = groups.t().contiguous()
    # The range includes zero, so that the zero point is a valid code.
    low, high = x_KG.amin(0).clamp(max=0), x_KG.amax(0).clamp(min=0)
    if not bool(((high - low) / top <= LARGEST_FP16).all()):
        what = "a weight that is not finite, or beyond fp16 scales: use --to bf16"
        raise UnsupportedError("models.export", what)
    weights_KG = (x_KG * x_KG).mean(0).sqrt() + x_KG.abs()
    best, scales, zeros = torch.full_like(low, -1.0), torch.zeros_like(low), torch.zeros_like(low)
    for i, share in enumerate((1.0, *RANGE_SHARES[bits])):
        inverse = _invert((high - low) * (share / top))
        place = -low * inverse if i == 0 else top / 2 - (low + high) / 2 * inverse
        zero = place.round().clamp(0, top)
        codes_KG = _code(x_KG, inverse, zero, top)
        weighted_KG = weights_KG * codes_KG
        by_code, by_value = (weighted_KG * codes_KG).sum(0), (weighted_KG * x_KG).sum(0)
        found = torch.where(by_code > 0, by_value / by_code, 0.0)
        # The error is the weighted square of the group, which all steps share, less this.
        gain = found * by_value
        is_better = gain > best
        best = torch.where(is_better, gain, best)
        scales = torch.where(is_better, found, scales)
        zeros = torch.where(is_better, zero, zeros)
    halves = scales.half()
    codes_KG = _code(x_KG, _invert(halves.float()), zeros, top) + zeros
    return codes_KG.t().to(torch.uint8), halves, zeros.to(torch.uint8)


def _invert(steps: Tensor) -> Tensor:
    """Return 1 / step, and 0 for steps that fp16 rounds to 0."""
    return torch.where(steps < SMALLEST_STEP, 0.0, 1 / steps)


def _code(x_KG: Tensor, inverse: Tensor, zeros: Tensor, top: int) -> Tensor:
    """Return the nearest codes, counted from the zero point."""
    return torch.minimum(torch.maximum((x_KG * inverse).round(), -zeros), top - zeros)


class IntegerEncoder:
    """Encoder to integer codes: compressed-tensors' pack-quantized."""

    def __init__(self, weight_format: WeightFormat) -> None:
        self._format = weight_format
        self._per_word = 32 // weight_format.bits

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that the inputs are whole groups. Raises: UnsupportedError (they are not)."""
        size = self._format.group_size
        if size and shape[1] % size:
            raise UnsupportedError(
                "models.export",
                f"{name!r} has {shape[1]} inputs, which are no groups of {size}: choose a format "
                "of smaller groups",
            )

    def _count_groups(self, inputs: int) -> int:
        return inputs // self._format.group_size if self._format.group_size else 1

    def list_tensors(self, shape: tuple[int, ...]) -> Tensors:
        """Return dtype and shape of codes, scales, shape and zero points."""
        outputs, inputs = shape
        groups = self._count_groups(inputs)
        tensors: Tensors = {
            "weight_packed": (torch.int32, (outputs, -(-inputs // self._per_word))),
            "weight_scale": (torch.float16, (outputs, groups)),
            "weight_shape": (torch.int64, (2,)),
        }
        if self._format.has_minimum:
            rows = -(-outputs // self._per_word)
            tensors["weight_zero_point"] = (torch.int32, (rows, groups))
        return tensors

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        """Quantize a matrix to packed codes, scales and zero points."""
        if self._format.has_minimum:
            codes, scales, zeros = self._code_with_zeros(values)
        else:
            coded = quantize(values.numpy(), self._format)
            codes, scales, zeros = coded.codes, coded.scales, None
        tensors = {
            "weight_packed": self._pack(codes),
            "weight_scale": torch.from_numpy(np.ascontiguousarray(scales)),
            "weight_shape": torch.tensor(values.shape),
        }
        if zeros is not None:
            tensors["weight_zero_point"] = self._pack(zeros.T).t().contiguous()
        return tensors

    def _code_with_zeros(self, values: Tensor) -> tuple[Any, Any, Any]:
        """Quantize with zero points; return codes [N, K], fp16 scales and integer zero points [N,
        G].
        """
        shape = (values.shape[0], self._count_groups(values.shape[1]))
        groups = values.reshape(shape[0] * shape[1], -1)
        codes = torch.empty(groups.shape, dtype=torch.uint8)
        scales = torch.empty(len(groups), dtype=torch.float16)
        zeros = torch.empty(len(groups), dtype=torch.uint8)
        size = max(1, CHUNK_WEIGHTS // groups.shape[1])
        for begin in range(0, len(groups), size):
            part = slice(begin, begin + size)
            codes[part], scales[part], zeros[part] = search_zeros(groups[part], self._format.bits)
        return (
            codes.view(values.shape).numpy(),
            scales.view(shape).numpy(),
            zeros.view(shape).numpy(),
        )

    def _pack(self, codes: Any) -> Tensor:
        """Pack codes [R, C] into int32 words [R, ceil(C / per word)], the first code in the low
        bits.
        """
        rows, columns = codes.shape
        padded = np.zeros((rows, -(-columns // self._per_word) * self._per_word), np.uint8)
        padded[:, :columns] = codes
        if self._format.bits == 4:
            padded = padded[:, 0::2] | (padded[:, 1::2] << 4)
        return torch.from_numpy(np.ascontiguousarray(padded).view("<i4"))

    def describe(self, plain: list[str]) -> dict[str, Any]:
        """Return compressed-tensors' ``quantization_config`` for integer codes."""
        size = self._format.group_size
        weights = {
            "num_bits": self._format.bits,
            "type": "int",
            "symmetric": not self._format.has_minimum,
            "strategy": "group" if size else "channel",
            "group_size": size or None,
            "dynamic": False,
        }
        return _describe_compressed("pack-quantized", weights, plain)


def _describe_compressed(layout: str, weights: dict[str, Any], plain: list[str]) -> dict[str, Any]:
    """Return a compressed-tensors ``quantization_config`` with one scheme for all weights."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": plain,
    }

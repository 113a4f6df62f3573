"""Matrices of e2m1 codes, two per byte, with a scale for each 16 or 32 inputs of an output.

NVFP4 has e4m3 scales, F8_E4M3 [N, K / 16], and a float32 factor of the tensor that multiplies them
(``weight_scale_2``, which modelopt writes beside ``weight``) or divides them
(``weight_global_scale``, compressed-tensors beside ``weight_packed``). OCP microscaling has powers
of two as scales, U8 [N, K / 32]. Codes are U8 [N, K / 2], the first of a byte in its low half.

Shapes: N outputs, K inputs, G groups.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.core.errors import CorruptionError, ShapeError
from tandem.kernels.weights.formats import QuantizedMatrix, WeightFormat, find_format
from tandem.models.codecs.codec import FLOATS, find_scheme, require_format, split_name, view_matrix
from tandem.models.codecs.fp8 import E4M3, Fp8Codec
from tandem.models.codecs.mxfp4 import E2M1, decode_mxfp4, pack_mxfp4, unpack_nibbles
from tandem.models.planning.quantization import Quantization, Scheme
from tandem.models.sources.source import StoredTensors

__all__ = ["BYTES", "Fp4Matrix", "ModeloptCodec", "read_fp4"]

BYTES = {"U8": torch.uint8}
NVFP4_GROUP = 16
"""Inputs that share an e4m3 scale."""
LARGEST_CODE = 0x7E
"""Largest e4m3 code of a positive number."""


@dataclass(frozen=True, slots=True)
class Fp4Matrix:
    """A matrix of e2m1 codes: bytes of two codes uint8 [N, K / 2], scales uint8 [N, G]."""

    name: str
    """Name of the weight, for error messages."""
    codes: Tensor
    scales: Tensor
    factor: float | None
    """Factor of the tensor, which multiplies the scales, or if negative divides them by its
    absolute value; None: scales are exponents (mxfp4).
    """

    def read_into(self, out: Tensor) -> None:
        """Write the decoded values, products in float32, rounded once to the dtype of ``out``."""
        if self.factor is None:
            blocks = self.codes.unflatten(1, (self.scales.shape[1], -1))
            out.copy_(decode_mxfp4(blocks, self.scales))
            return
        scales = self.scales.view(torch.float8_e4m3fn).float()
        # The factor is a float32 tensor: a Python float would make torch multiply or divide in
        # another precision.
        factor = torch.tensor(abs(self.factor), dtype=torch.float32)
        scales = scales * factor if self.factor > 0 else scales / factor
        codes = unpack_nibbles(self.codes).int()
        values = torch.where(codes >= 8, -E2M1[codes & 7], E2M1[codes & 7])
        out.copy_((values.unflatten(1, (scales.shape[1], -1)) * scales[..., None]).flatten(1))

    def pack(self) -> QuantizedMatrix:
        """Return the codes as nvfp4 or mxfp4.

        Raises: CorruptionError (a scale is negative or NaN).
        """
        if self.factor is None:
            return pack_mxfp4(self.codes.unflatten(1, (self.scales.shape[1], -1)), self.scales)
        if int(self.scales.max()) > LARGEST_CODE:
            raise CorruptionError(
                "models.read_weights",
                f"weight {self.name!r} has a scale that is negative or no number: its file is "
                "damaged, or was made so: download it again",
            )
        codes = np.ascontiguousarray(unpack_nibbles(self.codes).numpy())
        factors = np.full((len(codes), 1), self.factor, np.float32)
        scales = np.ascontiguousarray(self.scales.numpy())
        return QuantizedMatrix(find_format("nvfp4"), codes, scales, factors)


def read_fp4(
    stored: StoredTensors, name: str, codes: str, shape: tuple[int, ...] | None, scheme: Scheme
) -> Fp4Matrix:
    """Read an FP4 weight and its scales.

    Args:
        stored: the checkpoint's tensors.
        name: name of the weight.
        codes: name of the tensor with its codes.
        shape: required shape [N, K]; None: any.
        scheme: quantization scheme of the weight's module.

    Raises: the errors of ``StoredTensors.view``; ShapeError (inputs are not whole groups; the
        tensor's factor is not a single number); CorruptionError (a factor is not a valid scale).
    """
    half = None if shape is None else (shape[0], shape[1] // 2)
    packed = view_matrix(stored, codes, BYTES, half)
    outputs, inputs = packed.shape[0], packed.shape[1] * 2
    if inputs % scheme.group_size or (shape is not None and inputs != shape[1]):
        what = f"tensor {codes!r} has {inputs} inputs: not those of the configuration, or no whole"
        raise ShapeError("models.read_weights", f"{what} groups of {scheme.group_size}")
    stem, grid = split_name(name), (outputs, inputs // scheme.group_size)
    if scheme.group_size != NVFP4_GROUP:
        return Fp4Matrix(name, packed, stored.view(f"{stem}.weight_scale", BYTES, grid), None)
    scales = stored.view(f"{stem}.weight_scale", E4M3, grid).view(torch.uint8)
    multiplies = f"{stem}.weight_scale_2" in stored.entries
    factor_name = f"{stem}.weight_scale_2" if multiplies else f"{stem}.weight_global_scale"
    number = stored.view(factor_name, FLOATS)
    if number.numel() != 1:
        what = f"tensor {factor_name!r} has shape {list(number.shape)}: a tensor has one number"
        raise ShapeError("models.read_weights", what)
    factor = float(number)
    if not 0 < factor < float("inf"):
        raise CorruptionError(
            "models.read_weights",
            f"tensor {factor_name!r} is {factor}, which is no scale: download it again",
        )
    return Fp4Matrix(name, packed, scales, factor if multiplies else -factor)


class ModeloptCodec:
    """Codec of NVIDIA modelopt's layouts: NVFP4, and fp8 with one scale per tensor or output."""

    is_exact: bool = False

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization
        self._fp8 = Fp8Codec(quantization)

    def holds(self, stored: StoredTensors, name: str) -> bool:
        """Return True if the weight is stored as bytes of two e2m1 codes, or in e4m3."""
        return self._has_pairs(stored, name) or self._fp8.holds(stored, name)

    def list_weights(self, stored: StoredTensors) -> dict[str, tuple[int, ...]]:
        """Return all weights in this format, with the shapes of their values."""
        pairs = {n: e.shape for n, e in stored.entries.items() if self._has_pairs(stored, n)}
        found = {n: (*shape[:-1], shape[-1] * 2) for n, shape in pairs.items()}
        return found | self._fp8.list_weights(stored)

    def tell(self, name: str) -> str:
        """Return a text for users that says how a weight is coded, such as bits and group size."""
        return str(find_scheme(self._quantization, name))

    def read_into(self, stored: StoredTensors, name: str, out: Tensor) -> None:
        """Decode a whole weight into ``out`` [N, K], which has the dtype that is wanted."""
        if self._has_pairs(stored, name):
            self._read(stored, name, tuple(out.shape)).read_into(out)
        else:
            self._fp8.read_into(stored, name, out)

    def find_format(self, stored: StoredTensors, name: str) -> WeightFormat | None:
        """Return the weight format that can hold the codes; None if there is none."""
        if not self._has_pairs(stored, name):
            return self._fp8.find_format(stored, name)
        inputs = stored.entries[name].shape[-1] * 2
        return find_scheme(self._quantization, name).find_format(inputs)

    def read_packed(
        self, stored: StoredTensors, name: str, expert_id: int | None
    ) -> QuantizedMatrix:
        """Return the codes of a weight with their scales, unchanged, in the format of
        ``find_format``.
        """
        if not self._has_pairs(stored, name):
            return self._fp8.read_packed(stored, name, expert_id)
        require_format(self.find_format(stored, name), name)
        return self._read(stored, name, None).pack()

    def _read(self, stored: StoredTensors, name: str, shape: tuple[int, ...] | None) -> Fp4Matrix:
        return read_fp4(stored, name, name, shape, find_scheme(self._quantization, name))

    @staticmethod
    def _has_pairs(stored: StoredTensors, name: str) -> bool:
        entry = stored.entries.get(name)
        is_matrix = entry is not None and entry.dtype in BYTES and len(entry.shape) == 2
        return is_matrix and name.endswith(".weight")

"""Matrices of e4m3 codes with float scales: DeepSeek's blocks, or one scale per tensor or output.

``{module}.weight``, F8_E4M3 [N, K], and ``{module}.weight_scale_inv`` or ``weight_scale``, which
multiplies the codes (despite its name): [N / 128, K / 128], [N, 1], or one number.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.core.errors import ShapeError
from tandem.kernels.weights.formats import BLOCK_ROWS, QuantizedMatrix, WeightFormat, find_format
from tandem.models.codecs.codec import FLOATS, find_scheme, require_format, split_name, view_matrix
from tandem.models.planning.quantization import Quantization, Scheme
from tandem.models.sources.source import StoredTensors, refuse_nan

__all__ = ["E4M3", "Fp8Codec", "Fp8Matrix", "read_fp8"]

E4M3 = {"F8_E4M3": torch.float8_e4m3fn}
SCALES = {**FLOATS, "F8_E8M0": torch.float8_e8m0fnu}
GROUP_SIZE = 128
NAN_CODE = 0x7F
"""Code of NaN in e4m3, without the sign bit."""


class Fp8Codec:
    """Codec of e4m3 weights with float scales."""

    is_exact: bool = False

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization

    def holds(self, stored: StoredTensors, name: str) -> bool:
        """Return True if the weight is stored as e4m3 codes, this codec's format."""
        entry = stored.entries.get(name)
        return entry is not None and entry.dtype in E4M3 and name.endswith(".weight")

    def list_weights(self, stored: StoredTensors) -> dict[str, tuple[int, ...]]:
        """Return all weights in this format, with the shapes of their values."""
        return {n: entry.shape for n, entry in stored.entries.items() if self.holds(stored, n)}

    def tell(self, name: str) -> str:
        """Return a text for users that says how a weight is coded, such as bits and group size."""
        return str(find_scheme(self._quantization, name))

    def read_into(self, stored: StoredTensors, name: str, out: Tensor) -> None:
        """Decode a whole weight into ``out`` [N, K], which has the dtype that is wanted."""
        self._read(stored, name, tuple(out.shape)).read_into(out)

    def find_format(self, stored: StoredTensors, name: str) -> WeightFormat | None:
        """Return fp8 or fp8row, if the scales are per block or per row; else None."""
        shape = stored.entries[name].shape
        return find_scheme(self._quantization, name).find_format(shape[-1]) if shape else None

    def read_packed(
        self, stored: StoredTensors, name: str, expert_id: int | None
    ) -> QuantizedMatrix:
        """Return the codes of a weight with their scales, unchanged, in the format of
        ``find_format``.
        """
        del expert_id
        require_format(self.find_format(stored, name), name)
        return self._read(stored, name, None).pack(name)

    def _read(self, stored: StoredTensors, name: str, shape: tuple[int, ...] | None) -> "Fp8Matrix":
        return read_fp8(stored, name, shape, find_scheme(self._quantization, name))


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A matrix of e4m3 codes [N, K], with a float32 scale for each block of (outputs, inputs)."""

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]

    def read_into(self, out: Tensor) -> None:
        """Write the decoded values, products in float32, rounded once to the dtype of ``out``."""
        outputs, inputs = self.codes.shape
        rows = torch.arange(outputs) // self.block[0]
        columns = torch.arange(inputs) // self.block[1]
        out.copy_(self.codes.float() * self.scales[rows][:, columns])

    def pack(self, name: str) -> QuantizedMatrix:
        """Return the codes as fp8row if each output has its own scale, else as fp8.

        REQUIRES: a block is a multiple of fp8's blocks, the whole matrix, or one output.

        Raises: CorruptionError (a code is NaN; scales are checked when they are packed).
        """
        outputs, inputs = self.codes.shape
        bits = self.codes.view(torch.uint8)
        if bits.numel() and int((bits & 0x7F).max()) == NAN_CODE:
            refuse_nan(name, "float8_e4m3fn")
        codes = np.ascontiguousarray(bits.numpy())
        if self.block == (1, inputs):
            return QuantizedMatrix(find_format("fp8row"), codes, self.scales.numpy(), None)
        rows = torch.arange(0, outputs, BLOCK_ROWS) // self.block[0]
        columns = torch.arange(0, inputs, GROUP_SIZE) // self.block[1]
        scales = self.scales[rows][:, columns].contiguous().numpy()
        return QuantizedMatrix(find_format("fp8"), codes, scales, None)


def read_fp8(
    stored: StoredTensors, name: str, shape: tuple[int, ...] | None, scheme: Scheme
) -> Fp8Matrix:
    """Read an fp8 weight and its scales.

    Raises: the errors of ``StoredTensors.view``; ShapeError (scales do not match the scheme).
    """
    codes = view_matrix(stored, name, E4M3, shape)
    outputs, inputs = codes.shape
    stem = split_name(name)
    scale_name = f"{stem}.weight_scale_inv"
    if scale_name not in stored.entries:
        scale_name = f"{stem}.weight_scale"
    if scheme.block == (0, 0):
        scales = stored.view(scale_name, SCALES)
        if scales.numel() != 1:
            raise ShapeError(
                "models.read_weights",
                f"tensor {scale_name!r} has shape {list(scales.shape)}, and quantization_config "
                "says that a tensor has one scale",
            )
        return Fp8Matrix(codes, scales.float().view(1, 1), (max(1, outputs), max(1, inputs)))
    block = scheme.block or (1, max(1, inputs))
    grid = (-(-outputs // block[0]), -(-inputs // block[1]))
    is_row = scheme.block is None and stored.entries.get(scale_name) is not None
    if is_row and stored.entries[scale_name].shape == (outputs,):
        scales = stored.view(scale_name, SCALES).view(outputs, 1)
    else:
        scales = stored.view(scale_name, SCALES, grid)
    return Fp8Matrix(codes, scales.float(), block)

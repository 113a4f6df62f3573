"""Codec of compressed-tensors checkpoints, as llm-compressor stores them.

Four layouts, distinguished by a weight's tensors: ``weight_packed`` int32 [N, K bits / 32] with
``weight_shape`` (pack-quantized), ``weight_packed`` U8 [N, K / 2] (nvfp4- and
mxfp4-pack-quantized), ``weight`` I8 [N, K] (int-quantized), ``weight`` F8_E4M3 [N, K]
(float-quantized). Each has ``weight_scale`` and, if not symmetric, ``weight_zero_point``: I8 [N,
G], or int32 [N bits / 32, G]. Integers are signed in I8, and offset by half their range in words.
"""

import torch
from torch import Tensor

from tandem.core.errors import CorruptionError, ShapeError
from tandem.kernels.weights.formats import QuantizedMatrix, WeightFormat
from tandem.models.codecs.codec import (
    FLOATS,
    WORDS,
    find_scheme,
    require_format,
    split_name,
    view_matrix,
)
from tandem.models.codecs.fp4 import BYTES, Fp4Matrix, read_fp4
from tandem.models.codecs.fp8 import E4M3, read_fp8
from tandem.models.codecs.integers import IntegerMatrix, split_bytes
from tandem.models.planning.quantization import Quantization, Scheme
from tandem.models.sources.source import StoredTensors

__all__ = ["CompressedTensorsCodec"]

SIGNED = {"I8": torch.int8}
SIZES = {"I64": torch.int64, "I32": torch.int32}


def _is_fp4(scheme: Scheme) -> bool:
    return scheme.is_float and scheme.bits == 4


class CompressedTensorsCodec:
    """Codec of compressed-tensors weights, in four layouts."""

    is_exact: bool = False

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization

    def holds(self, stored: StoredTensors, name: str) -> bool:
        """Return True if the weight is stored as codes: in packed words, in I8 or in e4m3."""
        if f"{split_name(name)}.weight_packed" in stored.entries:
            return True
        entry = stored.entries.get(name)
        is_code = entry is not None and (entry.dtype in SIGNED or entry.dtype in E4M3)
        return is_code and name.endswith(".weight")

    def list_weights(self, stored: StoredTensors) -> dict[str, tuple[int, ...]]:
        """Return all weights in this format, with the shapes of their values."""
        found = {n: entry.shape for n, entry in stored.entries.items() if self.holds(stored, n)}
        for name in stored.entries:
            stem = name.removesuffix(".weight_packed")
            if stem != name and stored.entries[name].dtype in BYTES:
                outputs, pairs = stored.entries[name].shape
                found[f"{stem}.weight"] = (outputs, pairs * 2)
            elif stem != name:
                shape = stored.view(f"{stem}.weight_shape", SIZES, (2,))
                found[f"{stem}.weight"] = tuple(int(size) for size in shape)
        return found

    def tell(self, name: str) -> str:
        """Return a text for users that says how a weight is coded, such as bits and group size."""
        return str(find_scheme(self._quantization, name))

    def read_into(self, stored: StoredTensors, name: str, out: Tensor) -> None:
        """Decode a whole weight into ``out`` [N, K], which has the dtype that is wanted."""
        scheme = find_scheme(self._quantization, name)
        if _is_fp4(scheme):
            self._read_fp4(stored, name, tuple(out.shape), scheme).read_into(out)
        elif scheme.is_float:
            read_fp8(stored, name, tuple(out.shape), scheme).read_into(out)
        else:
            self._read(stored, name, tuple(out.shape), scheme).read_into(out)

    def find_format(self, stored: StoredTensors, name: str) -> WeightFormat | None:
        """Return the weight format that can hold the codes; None if there is none."""
        scheme = find_scheme(self._quantization, name)
        if name in stored.entries:
            shape = stored.entries[name].shape
            inputs = shape[-1] if shape else 0
        else:
            shape = stored.entries[f"{split_name(name)}.weight_packed"].shape
            word_bits = 8 if _is_fp4(scheme) else 32
            inputs = shape[-1] * word_bits // scheme.bits if shape else 0
        return scheme.find_format(inputs) if inputs else None

    def read_packed(
        self, stored: StoredTensors, name: str, expert_id: int | None
    ) -> QuantizedMatrix:
        """Return the codes of a weight with their scales, unchanged, in the format of
        ``find_format``.
        """
        del expert_id
        scheme = find_scheme(self._quantization, name)
        weight_format = require_format(self.find_format(stored, name), name)
        if _is_fp4(scheme):
            return self._read_fp4(stored, name, None, scheme).pack()
        if scheme.is_float:
            return read_fp8(stored, name, None, scheme).pack(name)
        return self._read(stored, name, None, scheme).pack(weight_format)

    def _read_fp4(
        self, stored: StoredTensors, name: str, shape: tuple[int, ...] | None, scheme: Scheme
    ) -> Fp4Matrix:
        return read_fp4(stored, name, f"{split_name(name)}.weight_packed", shape, scheme)

    def _read(
        self, stored: StoredTensors, name: str, shape: tuple[int, ...] | None, scheme: Scheme
    ) -> IntegerMatrix:
        codes = self._read_codes(stored, name, shape, scheme)
        outputs, inputs = codes.shape
        size = scheme.group_size or inputs
        groups = -(-inputs // size)
        stem = split_name(name)
        scales = stored.view(f"{stem}.weight_scale", FLOATS, (outputs, groups)).float()
        zeros: Tensor | float = float(1 << (scheme.bits - 1))
        if not scheme.is_symmetric:
            zeros = self._read_zeros(stored, f"{stem}.weight_zero_point", (outputs, groups), scheme)
        return IntegerMatrix(
            name,
            scheme.bits,
            codes,
            scales,
            zeros,
            size,
            self._read_order(stored, stem, scheme, inputs),
        )

    def _read_codes(
        self, stored: StoredTensors, name: str, shape: tuple[int, ...] | None, scheme: Scheme
    ) -> Tensor:
        """Return the codes [N, K] as unsigned integers.

        Raises: ShapeError (another shape); CorruptionError (a code beyond the scheme's bits).
        """
        middle = 1 << (scheme.bits - 1)
        if name in stored.entries:
            codes = view_matrix(stored, name, SIGNED, shape)
            if scheme.bits < 8 and not bool(((codes >= -middle) & (codes < middle)).all()):
                raise CorruptionError(
                    "models.read_weights",
                    f"tensor {name!r} has codes beyond the {scheme.bits} bits of its "
                    "quantization_config",
                )
            return (codes.view(torch.uint8) + middle).bitwise_and((1 << scheme.bits) - 1)
        stem, per_word = split_name(name), 32 // scheme.bits
        said = [int(size) for size in stored.view(f"{stem}.weight_shape", SIZES, (2,))]
        if shape is not None and said != list(shape):
            raise ShapeError(
                "models.read_weights",
                f"tensor '{stem}.weight_shape' says {said}: the configuration needs {list(shape)}",
            )
        if not all(0 < size < 1 << 31 for size in said):
            what = f"tensor '{stem}.weight_shape' says {said}, which is no shape"
            raise ShapeError("models.read_weights", what)
        outputs, inputs = said
        words = stored.view(f"{stem}.weight_packed", WORDS, (outputs, -(-inputs // per_word)))
        return split_bytes(words, scheme.bits).flatten(1)[:, :inputs]

    def _read_zeros(
        self, stored: StoredTensors, name: str, shape: tuple[int, int], scheme: Scheme
    ) -> Tensor:
        """Return the zero points [N, G] as unsigned integers."""
        outputs, groups = shape
        middle = 1 << (scheme.bits - 1)
        entry = stored.entries.get(name)
        if entry is None or entry.dtype in SIGNED:
            return stored.view(name, SIGNED, shape).float() + middle
        words = stored.view(name, WORDS, (-(-outputs * scheme.bits // 32), groups))
        return split_bytes(words.t(), scheme.bits).flatten(1).t()[:outputs].float()

    def _read_order(
        self, stored: StoredTensors, stem: str, scheme: Scheme, inputs: int
    ) -> Tensor | None:
        """Return the group of each input from ``weight_g_idx``; None if groups are consecutive.

        Raises: CorruptionError (a group that does not exist).
        """
        name = f"{stem}.weight_g_idx"
        if not scheme.is_ordered or not scheme.group_size:
            return None
        order = stored.view(name, WORDS, (inputs,)).long()
        if not 0 <= int(order.min()) <= int(order.max()) < -(-inputs // scheme.group_size):
            raise CorruptionError(
                "models.read_weights",
                f"tensor {name!r} has a group that is not there: download the checkpoint again",
            )
        return order

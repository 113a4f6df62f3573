"""GPTQ, as AutoGPTQ and GPTQModel store it.

``qweight`` int32 [K bits / 32, N], ``qzeros`` int32 [G, N bits / 32], ``scales`` [G, N] and
``g_idx`` int32 [K], the group of each input. In the layout ``gptq`` a zero point is stored as one
less than it is, in ``gptq_v2`` as itself. With ``desc_act`` inputs of a group lie anywhere: such
weights have no format of ours and are read as values.
"""

import torch
from torch import Tensor

from tandem.core.errors import CorruptionError
from tandem.kernels.formats import QuantizedMatrix, WeightFormat
from tandem.models.codecs.codec import (
    FLOATS,
    WORDS,
    find_scheme,
    require_format,
    split_name,
    view_matrix,
)
from tandem.models.codecs.integers import IntegerMatrix, unpack_inputs, unpack_outputs
from tandem.models.quantization import Quantization, Scheme
from tandem.models.sources.source import StoredTensors

__all__ = ["GptqCodec"]


class GptqCodec:
    """See the module, and ``tandem.models.codecs.codec.Codec``."""

    is_exact: bool = False

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization

    def holds(self, stored: StoredTensors, name: str) -> bool:
        """Whether there is a ``qweight``."""
        return f"{split_name(name)}.qweight" in stored.entries

    def list_weights(self, stored: StoredTensors) -> dict[str, tuple[int, ...]]:
        """Return all weights in this format."""
        names = [n.removesuffix(".qweight") for n in stored.entries if n.endswith(".qweight")]
        found: dict[str, tuple[int, ...]] = {}
        for stem in names:
            scheme = find_scheme(self._quantization, stem)
            rows, outputs = view_matrix(stored, f"{stem}.qweight", WORDS).shape
            found[f"{stem}.weight"] = (outputs, rows * 32 // scheme.bits)
        return found

    def tell(self, name: str) -> str:
        """Return the scheme of a weight in words."""
        return str(find_scheme(self._quantization, name))

    def read_into(self, stored: StoredTensors, name: str, out: Tensor) -> None:
        """Decode a weight [N, K]."""
        self._read(stored, name, tuple(out.shape)).read_into(out)

    def find_format(self, stored: StoredTensors, name: str) -> WeightFormat | None:
        """Return the integer format that holds the codes."""
        shape = stored.entries[f"{split_name(name)}.qweight"].shape
        scheme = find_scheme(self._quantization, name)
        return scheme.find_format(shape[0] * 32 // scheme.bits) if shape else None

    def read_packed(
        self, stored: StoredTensors, name: str, expert_id: int | None
    ) -> QuantizedMatrix:
        """Return the codes of a weight."""
        del expert_id
        weight_format = require_format(self.find_format(stored, name), name)
        return self._read(stored, name, None).pack(weight_format)

    def _read(
        self, stored: StoredTensors, name: str, shape: tuple[int, ...] | None
    ) -> IntegerMatrix:
        stem, scheme = split_name(name), find_scheme(self._quantization, name)
        per_word = 32 // scheme.bits
        if shape is None:
            words = view_matrix(stored, f"{stem}.qweight", WORDS)
        else:
            words = view_matrix(stored, f"{stem}.qweight", WORDS, (shape[1] // per_word, shape[0]))
        inputs, outputs = words.shape[0] * per_word, words.shape[1]
        groups = -(-inputs // (scheme.group_size or inputs))
        scales = stored.view(f"{stem}.scales", FLOATS, (groups, outputs))
        packed = stored.view(f"{stem}.qzeros", WORDS, (groups, -(-outputs // per_word)))
        zeros = unpack_outputs(packed, scheme.bits)[:outputs]
        if self._quantization.is_offset:
            zeros = (zeros + 1) & ((1 << scheme.bits) - 1)
        return IntegerMatrix(
            name,
            scheme.bits,
            unpack_inputs(words, scheme.bits),
            scales.float().t().contiguous(),
            zeros.float(),
            scheme.group_size or inputs,
            self._read_order(stored, stem, inputs, groups, scheme),
        )

    def _read_order(
        self, stored: StoredTensors, stem: str, inputs: int, groups: int, scheme: Scheme
    ) -> Tensor | None:
        """Return the group of each input; None for runs, which is what a format of ours has."""
        name = f"{stem}.g_idx"
        if name not in stored.entries and not scheme.is_ordered:
            return None
        order = stored.view(name, WORDS, (inputs,)).long()
        if inputs and not 0 <= int(order.min()) <= int(order.max()) < groups:
            raise CorruptionError(
                "models.read_weights",
                f"tensor {name!r} has a group beyond {groups}: download the checkpoint again",
            )
        runs = torch.arange(inputs) // (scheme.group_size or inputs)
        if torch.equal(order, runs):
            return None
        if not scheme.is_ordered:
            raise CorruptionError(
                "models.read_weights",
                f"tensor {name!r} orders inputs, and quantization_config says desc_act is false: "
                "correct one of them",
            )
        return order

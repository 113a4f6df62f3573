"""Codec of GPTQ checkpoints, as AutoGPTQ and GPTQModel store them.

``qweight`` int32 [K bits / 32, N], ``qzeros`` int32 [G, N bits / 32], ``scales`` [G, N] and
``g_idx`` int32 [K], the group of each input. The layout ``gptq`` stores a zero point minus one,
``gptq_v2`` the zero point itself. With ``desc_act`` a group's inputs may lie anywhere: no weight
format holds such weights, so they are read as values.
"""

import torch
from torch import Tensor

from tandem.core.errors import CorruptionError
from tandem.models.codecs.codec import FLOATS, WORDS, find_scheme, split_name, view_matrix
from tandem.models.codecs.integers import IntegerMatrix, unpack_inputs, unpack_outputs
from tandem.models.codecs.words import WordCodec
from tandem.models.planning.quantization import Scheme
from tandem.models.sources.source import StoredTensors

__all__ = ["GptqCodec"]


class GptqCodec(WordCodec):
    """Codec of GPTQ weights."""

    def _count_codes(self, name: str) -> tuple[int, int]:
        return 32 // find_scheme(self._quantization, name).bits, 1

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
        """Return the group of each input; None if groups are consecutive, as weight formats need.

        Raises: CorruptionError (a group that does not exist, or an order that the configuration
            denies).
        """
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

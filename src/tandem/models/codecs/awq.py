"""Codec of AWQ checkpoints in the layout ``gemm``.

``qweight`` int32 [K, N / 8], ``qzeros`` int32 [G, N / 8] and ``scales`` [G, N]. A word holds eight
outputs: the lowest four bits are output 0, the next ones 2, 4, 6, 1, 3, 5, 7.
"""

import torch
from torch import Tensor

from tandem.models.codecs.codec import FLOATS, WORDS, find_scheme, split_name, view_matrix
from tandem.models.codecs.integers import IntegerMatrix, split_bytes
from tandem.models.codecs.words import WordCodec
from tandem.models.sources.source import StoredTensors

__all__ = ["AwqCodec"]

BITS = 4
PER_WORD = 8
PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
"""For each of eight consecutive outputs: which 4-bit field of a packed 32-bit word holds its code.
"""


class AwqCodec(WordCodec):
    """Codec of AWQ weights in the layout ``gemm``."""

    def _count_codes(self, name: str) -> tuple[int, int]:
        del name
        return 1, PER_WORD

    def _read(
        self, stored: StoredTensors, name: str, shape: tuple[int, ...] | None
    ) -> IntegerMatrix:
        stem, scheme = split_name(name), find_scheme(self._quantization, name)
        wanted = None if shape is None else (shape[1], shape[0] // PER_WORD)
        words = view_matrix(stored, f"{stem}.qweight", WORDS, wanted)
        inputs, columns = words.shape
        groups = -(-inputs // (scheme.group_size or inputs))
        scales = stored.view(f"{stem}.scales", FLOATS, (groups, columns * PER_WORD))
        zeros: Tensor | float = float(1 << (BITS - 1))
        if not scheme.is_symmetric:
            packed = stored.view(f"{stem}.qzeros", WORDS, (groups, columns))
            zeros = _unpack(packed).float()
        steps = scales.float().t().contiguous()
        size = scheme.group_size or inputs
        return IntegerMatrix(name, BITS, _unpack(words), steps, zeros, size)


def _unpack(words: Tensor) -> Tensor:
    """Return codes [N, R] of words [R, N / 8]."""
    codes = split_bytes(words, BITS)[..., PLACES]
    return codes.flatten(1).t().contiguous()

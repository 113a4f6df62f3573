"""AWQ in the layout ``gemm``.

``qweight`` int32 [K, N / 8], ``qzeros`` int32 [G, N / 8] and ``scales`` [G, N]. A word holds eight
outputs: the lowest four bits are output 0, the next ones 2, 4, 6, 1, 3, 5, 7.
"""

import torch
from torch import Tensor

from tandem.kernels.formats import QuantizedMatrix, WeightFormat
from tandem.models.codecs.codec import (
    FLOATS,
    WORDS,
    find_scheme,
    require_format,
    split_name,
    view_matrix,
)
from tandem.models.codecs.integers import IntegerMatrix, split_bytes
from tandem.models.quantization import Quantization
from tandem.models.sources.source import StoredTensors

__all__ = ["AwqCodec"]

BITS = 4
PER_WORD = 8
PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
"""Where in a word each of eight outputs is."""


class AwqCodec:
    """See the module, and ``tandem.models.codecs.codec.Codec``."""

    is_exact: bool = False

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization

    def holds(self, stored: StoredTensors, name: str) -> bool:
        """Whether there is a ``qweight``."""
        return f"{split_name(name)}.qweight" in stored.entries

    def list_weights(self, stored: StoredTensors) -> dict[str, tuple[int, ...]]:
        """Return all weights in this format."""
        stems = [n.removesuffix(".qweight") for n in stored.entries if n.endswith(".qweight")]
        shapes = {stem: view_matrix(stored, f"{stem}.qweight", WORDS).shape for stem in stems}
        return {f"{stem}.weight": (n * PER_WORD, k) for stem, (k, n) in shapes.items()}

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
        return scheme.find_format(shape[0]) if shape else None

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

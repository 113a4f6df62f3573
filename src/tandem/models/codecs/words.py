"""Common part of formats whose codes lie in 32-bit words named ``qweight``: GPTQ and AWQ."""

from abc import ABC, abstractmethod

from torch import Tensor

from tandem.kernels.weights.formats import QuantizedMatrix, WeightFormat
from tandem.models.codecs.codec import (
    WORDS,
    find_scheme,
    require_format,
    split_name,
    view_matrix,
)
from tandem.models.codecs.integers import IntegerMatrix
from tandem.models.planning.quantization import Quantization
from tandem.models.sources.source import StoredTensors

__all__ = ["WordCodec"]


class WordCodec(ABC):
    """Base of codecs whose codes lie in a ``qweight`` of 32-bit words.

    A subclass tells how many codes a word holds along each dimension, and reads a matrix.
    """

    is_exact: bool = False

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization

    @abstractmethod
    def _count_codes(self, name: str) -> tuple[int, int]:
        """Return how many inputs and how many outputs a word of a weight holds."""

    @abstractmethod
    def _read(
        self, stored: StoredTensors, name: str, shape: tuple[int, ...] | None
    ) -> IntegerMatrix:
        """Read a weight; its shape must be ``shape`` [N, K] if that is given."""

    def holds(self, stored: StoredTensors, name: str) -> bool:
        """Return True if the checkpoint has a ``qweight``, words of codes, of the weight."""
        return f"{split_name(name)}.qweight" in stored.entries

    def list_weights(self, stored: StoredTensors) -> dict[str, tuple[int, ...]]:
        """Return all weights in this format, with the shapes of their values."""
        found: dict[str, tuple[int, ...]] = {}
        for name in stored.entries:
            if not name.endswith(".qweight"):
                continue
            stem = name.removesuffix(".qweight")
            per_input, per_output = self._count_codes(stem)
            rows, columns = view_matrix(stored, name, WORDS).shape
            found[f"{stem}.weight"] = (columns * per_output, rows * per_input)
        return found

    def tell(self, name: str) -> str:
        """Return a text for users that says how a weight is coded, such as bits and group size."""
        return str(find_scheme(self._quantization, name))

    def read_into(self, stored: StoredTensors, name: str, out: Tensor) -> None:
        """Decode a whole weight into ``out`` [N, K], which has the dtype that is wanted."""
        self._read(stored, name, tuple(out.shape)).read_into(out)

    def find_format(self, stored: StoredTensors, name: str) -> WeightFormat | None:
        """Return the integer weight format that can hold the codes; None if there is none."""
        shape = stored.entries[f"{split_name(name)}.qweight"].shape
        scheme = find_scheme(self._quantization, name)
        return scheme.find_format(shape[0] * self._count_codes(name)[0]) if shape else None

    def read_packed(
        self, stored: StoredTensors, name: str, expert_id: int | None
    ) -> QuantizedMatrix:
        """Return the codes of a weight with their scales, unchanged, in the format of
        ``find_format``.
        """
        del expert_id
        weight_format = require_format(self.find_format(stored, name), name)
        return self._read(stored, name, None).pack(weight_format)

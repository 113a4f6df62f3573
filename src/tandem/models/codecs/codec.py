"""What every stored format promises: values, and codes in one of our formats where it has one.

A codec knows which tensors of a container a weight is made of. It owns no memory: it reads what
``StoredTensors`` maps, and what it returns is new.
"""

from typing import Protocol

from torch import Tensor

from tandem.kernels.formats import QuantizedMatrix, WeightFormat
from tandem.models.sources.source import StoredTensors

__all__ = ["Codec"]


class Codec(Protocol):
    """A stored format. Names are those of the weight in the skeleton, ``....weight`` mostly."""

    def holds(self, stored: StoredTensors, name: str) -> bool:
        """Whether ``name`` is stored in this format; marks nothing as used."""
        ...

    def read_into(self, stored: StoredTensors, name: str, out: Tensor) -> None:
        """Decode a weight into ``out``; see ``tandem.kernels.operator.WeightReader``."""
        ...

    def find_format(self, stored: StoredTensors, name: str) -> WeightFormat | None:
        """Return our format that holds the weight; see ``WeightReader.find_format``."""
        ...

    def read_packed(
        self, stored: StoredTensors, name: str, expert_id: int | None
    ) -> QuantizedMatrix:
        """Return the weight's codes; see ``WeightReader.read_packed``."""
        ...

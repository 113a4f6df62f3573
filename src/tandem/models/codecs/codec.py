"""The interface of every stored format: values, and codes in one of our formats where it has one.

A codec knows which tensors of a container a weight is made of. It owns no memory: it reads what
``StoredTensors`` maps, and what it returns is new.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from tandem.core.errors import ConfigError, ShapeError, UnsupportedError
from tandem.kernels.weights.formats import QuantizedMatrix, WeightFormat
from tandem.models.planning.quantization import Quantization, Scheme
from tandem.models.sources.source import StoredTensors

__all__ = [
    "FLOATS",
    "WORDS",
    "Codec",
    "find_scheme",
    "require_format",
    "split_name",
    "view_matrix",
]

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of scales."""
WORDS = {"I32": torch.int32}
"""The dtype of words that hold several codes."""


class Codec(Protocol):
    """A stored format. Names are those of the weight in the skeleton, ``....weight`` mostly."""

    is_exact: bool
    """True if bfloat16 and float32 hold every value."""

    def holds(self, stored: StoredTensors, name: str) -> bool:
        """Return True if ``name`` is stored in this format; marks nothing as used."""
        ...

    def list_weights(self, stored: StoredTensors) -> dict[str, tuple[int, ...]]:
        """Return all weights in this format, with the shapes of their values."""
        ...

    def tell(self, name: str) -> str:
        """Return in words how a weight that is held is coded."""
        ...

    def read_into(self, stored: StoredTensors, name: str, out: Tensor) -> None:
        """Decode a weight into ``out``; see ``tandem.kernels.interfaces.WeightReader``."""
        ...

    def find_format(self, stored: StoredTensors, name: str) -> WeightFormat | None:
        """Return our format that holds the weight; see ``WeightReader.find_format``."""
        ...

    def read_packed(
        self, stored: StoredTensors, name: str, expert_id: int | None
    ) -> QuantizedMatrix:
        """Return the weight's codes; see ``WeightReader.read_packed``."""
        ...


def split_name(name: str) -> str:
    """Return the module of a weight: ``a.b`` of ``a.b.weight``."""
    return name.removesuffix(".weight")


def find_scheme(quantization: Quantization, name: str) -> Scheme:
    """Return how a weight that the checkpoint codes is coded.

    Raises: ConfigError (the configuration says that it is not).
    """
    scheme = quantization.find_scheme(split_name(name))
    if scheme is None:
        raise ConfigError(
            "models.read_weights",
            f"weight {name!r} is coded in the checkpoint, and its quantization_config says that "
            "this module is not",
        )
    return scheme


def require_format(weight_format: WeightFormat | None, name: str) -> WeightFormat:
    """Return the format.

    Raises: UnsupportedError (there is none).
    """
    if weight_format is None:
        what = f"weight {name!r} has codes that no format of ours holds: read its values"
        raise UnsupportedError("models.read_weights", what)
    return weight_format


def view_matrix(
    stored: StoredTensors,
    name: str,
    dtypes: Mapping[str, torch.dtype],
    shape: tuple[int, ...] | None = None,
) -> Tensor:
    """Return a tensor of two dimensions; see ``StoredTensors.view``.

    Raises: as it; ShapeError (other dimensions, or none of one).
    """
    tensor = stored.view(name, dtypes, shape)
    if tensor.dim() != 2 or not tensor.numel():
        what = f"tensor {name!r} has shape {list(tensor.shape)}: a matrix is read here"
        raise ShapeError("models.read_weights", what)
    return tensor

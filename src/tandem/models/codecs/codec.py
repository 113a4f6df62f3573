"""Interface of stored formats: values, and codes if a weight format can hold them.

A codec knows which tensors of a container make up a weight. It owns no memory: it reads the mapped
``StoredTensors`` and returns new tensors.
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
"""Dtypes in which scales are stored, by safetensors name."""
WORDS = {"I32": torch.int32}
"""Dtype of words that hold several codes, by safetensors name."""


class Codec(Protocol):
    """A format in which checkpoints store weights, with the code that reads it. Weights are named
    as in transformers' model, usually ``....weight``.
    """

    is_exact: bool
    """True if bfloat16 and float32 represent every value exactly."""

    def holds(self, stored: StoredTensors, name: str) -> bool:
        """Return True if ``name`` is stored in this format; marks nothing as used."""
        ...

    def list_weights(self, stored: StoredTensors) -> dict[str, tuple[int, ...]]:
        """Return all weights in this format, with the shapes of their values."""
        ...

    def tell(self, name: str) -> str:
        """Return a text for users that says how a weight in this format is coded."""
        ...

    def read_into(self, stored: StoredTensors, name: str, out: Tensor) -> None:
        """Decode a weight into ``out``, as ``tandem.kernels.interfaces.WeightReader`` does."""
        ...

    def find_format(self, stored: StoredTensors, name: str) -> WeightFormat | None:
        """Return the weight format that can hold the weight's codes; None if there is none."""
        ...

    def read_packed(
        self, stored: StoredTensors, name: str, expert_id: int | None
    ) -> QuantizedMatrix:
        """Return the weight's codes in the format of ``find_format``."""
        ...


def split_name(name: str) -> str:
    """Return the module name of a weight: ``a.b`` for ``a.b.weight``."""
    return name.removesuffix(".weight")


def find_scheme(quantization: Quantization, name: str) -> Scheme:
    """Return the scheme by which a quantized weight is coded.

    Raises: ConfigError (the configuration says that the module is not quantized).
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
    """Return the format if there is one.

    Raises: UnsupportedError (the format is None).
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
    """Return a stored tensor of two dimensions.

    Raises: the errors of ``StoredTensors.view``; ShapeError (another number of dimensions, or an
        empty one).
    """
    tensor = stored.view(name, dtypes, shape)
    if tensor.dim() != 2 or not tensor.numel():
        what = f"tensor {name!r} has shape {list(tensor.shape)}: a matrix is read here"
        raise ShapeError("models.read_weights", what)
    return tensor

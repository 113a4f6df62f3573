"""Which operators run natively, and the views they take: the one place that decides.

Native operators take CPU tensors of float32 or bfloat16 that need no gradient. A tensor crosses by
DLPack, which costs as much as a small operator; so what outlives a call (weights, the buffers of a
step) is viewed once.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem import _native

__all__ = ["NATIVE_DTYPES", "Buffer", "is_native", "view_tensor"]

NATIVE_DTYPES = (torch.float32, torch.bfloat16)
"""What native operators take, of activations, weights and the cache alike."""


def is_native(tensor: Tensor) -> bool:
    """Whether operators on ``tensor`` run natively; elsewhere torch computes them."""
    return (
        tensor.device.type == "cpu"
        and tensor.dtype in NATIVE_DTYPES
        and not (tensor.requires_grad and torch.is_grad_enabled())
    )


def view_tensor(tensor: Tensor) -> _native.TensorView:
    """View a CPU tensor; the memory is shared and kept alive."""
    plain: Any = tensor.detach() if tensor.requires_grad else tensor
    return _native.TensorView(plain)


class Buffer(NamedTuple):
    """Memory of a step with its view, made once for all layers."""

    tensor: Tensor
    view: _native.TensorView

    @classmethod
    def allocate(cls, *shape: int, dtype: torch.dtype) -> "Buffer":
        """Return a buffer with unspecified contents."""
        tensor = torch.empty(shape, dtype=dtype)
        return cls(tensor, view_tensor(tensor))

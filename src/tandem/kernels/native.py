"""Views of tensors for native operators, and which tensors those accept.

Native operators accept CPU tensors of float32 or bfloat16 that need no gradient. Passing a tensor
by DLPack costs as much as a small operator, so tensors that outlive a call (weights, buffers of a
step) are viewed once.
"""

import torch
from torch import Tensor, to_dlpack

from tandem import _native

__all__ = ["NATIVE_DTYPES", "TORCH_DTYPES", "Buffer", "is_native", "view_tensor"]

NATIVE_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes that native operators accept for activations, weights and the cache."""

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""torch's dtype for each name in ``tandem.core.spec.DTYPE_BYTES``."""


def is_native(tensor: Tensor) -> bool:
    """Return True if native operators accept ``tensor``; otherwise torch computes."""
    return (
        tensor.device.type == "cpu"
        and tensor.dtype in NATIVE_DTYPES
        and not (tensor.requires_grad and torch.is_grad_enabled())
    )


def view_tensor(tensor: Tensor) -> _native.TensorView:
    """View a CPU tensor; the memory is shared and kept alive."""
    # torch's C function makes the DLPack capsule: ``Tensor.__dlpack__`` is Python code and takes
    # three times as long.
    return _native.TensorView(to_dlpack(tensor.detach() if tensor.requires_grad else tensor))


class Buffer:
    """A tensor that outlives a call, with a native view that is made on first use.

    Args:
        tensor: weights, or memory of a step.
        view: the same memory viewed in another shape; None: the tensor's own shape.
    """

    tensor: Tensor
    view: _native.TensorView

    def __init__(self, tensor: Tensor, view: _native.TensorView | None = None) -> None:
        self.tensor = tensor
        if view is not None:
            self.view = view

    def __getattr__(self, name: str) -> _native.TensorView:
        # Python calls __getattr__ only while the attribute is missing, so only for the first view.
        # A layer reads views dozens of times, and a property would cost a call each time.
        if name != "view":
            raise AttributeError(name)
        self.view = view_tensor(self.tensor)
        return self.view

    @classmethod
    def allocate(cls, *shape: int, dtype: torch.dtype) -> "Buffer":
        """Return a buffer (a tensor with a cached native view) with unspecified contents."""
        return cls(torch.empty(shape, dtype=dtype))

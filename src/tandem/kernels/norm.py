"""RMSNorm. Shapes: T tokens, D the normalised dimension."""

import torch
from torch import Tensor

from tandem import _native
from tandem.kernels.native import is_native, view_tensor
from tandem.kernels.operator import Operator, WeightReader, freeze, read_rows

__all__ = ["RmsNorm"]


class RmsNorm(Operator):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in float32.

    Source: arXiv:1910.07467.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.weight_view: _native.TensorView | None = None

    def load(self, reader: WeightReader, name: str) -> None:
        """Read ``weight``."""
        self.weight = freeze(read_rows(reader, [(f"{name}.weight", self.size)]))
        self.weight_view = view_tensor(self.weight) if is_native(self.weight) else None

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return [..., D], new."""
        if self.weight_view is None or not is_native(x_TD) or x_TD.dtype != self.weight.dtype:
            return torch.rms_norm(x_TD, (self.size,), self.weight, self.eps)
        rows = x_TD.reshape(-1, self.size)
        out = torch.empty_like(rows)
        self.run(view_tensor(rows), view_tensor(out))
        return out.view(x_TD.shape)

    def run(
        self,
        x_TD: _native.TensorView,
        out: _native.TensorView,
        pool: _native.ThreadPool | None = None,
        residual: _native.TensorView | None = None,
    ) -> None:
        """Norm views natively; with a residual, norm ``residual += x_TD``, in place."""
        assert self.weight_view is not None, "the norm was not loaded for native operators"
        _native.rms_norm(x_TD, self.weight_view, out, self.eps, residual, pool)

"""RMSNorm. Shapes: T tokens, D the normalised dimension."""

from torch import Tensor, rms_norm

from tandem.kernels.operator import Operator, WeightReader, freeze

__all__ = ["RmsNorm"]


class RmsNorm(Operator):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in float32.

    Source: arXiv:1910.07467.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size = size
        self.eps = eps

    def load(self, reader: WeightReader, name: str) -> None:
        """Read ``weight``."""
        self.weight = freeze(self._read_rows(reader, [(f"{name}.weight", self.size)]))

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return [..., D], new."""
        return rms_norm(x_TD, (self.size,), self.weight, self.eps)

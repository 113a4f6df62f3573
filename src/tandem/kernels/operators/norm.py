"""RMSNorm. Shapes: T tokens, D the normalised dimension."""

from torch import Tensor

from tandem.kernels.interfaces import WeightReader
from tandem.kernels.native import Buffer
from tandem.kernels.operators.operator import Operator, freeze, read_rows

__all__ = ["RmsNorm"]


class RmsNorm(Operator):
    """``x / sqrt(mean(x^2) + eps) * (offset + weight)`` over the last dimension, in float32.

    Source: arXiv:1910.07467; the offset of 1 is Gemma's.
    """

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.offset = offset

    def load(self, reader: WeightReader, name: str) -> None:
        """Read ``weight``."""
        self.weight = freeze(read_rows(reader, [(f"{name}.weight", self.size)]))
        self.held = Buffer(self.weight)
        self._execution = reader.execution

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return [..., D], new."""
        return self._execution.norm(x_TD, self.held, self.eps, self.offset)

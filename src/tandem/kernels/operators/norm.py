"""RMSNorm and LayerNorm. Shapes: T tokens, D the normalised dimension."""

from torch import Tensor
from torch.nn import functional

from tandem.core.model.layers import LayerNormSpec
from tandem.kernels.interfaces import WeightReader
from tandem.kernels.native import Buffer
from tandem.kernels.operators.operator import Operator, freeze, read_rows

__all__ = ["LayerNorm", "RmsNorm"]


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
        """Read ``weight`` [D] from the checkpoint."""
        self.weight = freeze(read_rows(reader, [(f"{name}.weight", self.size)]))
        self.held = Buffer(self.weight)
        self._execution = reader.execution

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return the norm of ``x_TD`` [..., D], new."""
        return self._execution.norm(x_TD, self.held, self.eps, self.offset)


class LayerNorm(Operator):
    """``(x - mean(x)) / sqrt(var(x) + eps) * (offset + weight) + bias``, in float32.

    Source: arXiv:1607.06450; the offset of 1 is Nemotron's. A row's result depends on that row
    alone.
    """

    def __init__(self, spec: LayerNormSpec) -> None:
        super().__init__()
        self.spec = spec

    def load(self, reader: WeightReader, name: str) -> None:
        """Read ``weight``, and ``bias`` if there is one."""
        size = self.spec.size
        weight = read_rows(reader, [(f"{name}.weight", size)]).float() + self.spec.offset
        self.weight = freeze(weight)
        self.bias = None
        if self.spec.has_bias:
            self.bias = freeze(read_rows(reader, [(f"{name}.bias", size)]).float())

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return the norm of ``x_TD`` [..., D], new."""
        normed = functional.layer_norm(
            x_TD.float(), self.weight.shape, self.weight, self.bias, self.spec.eps
        )
        return normed.to(x_TD.dtype)

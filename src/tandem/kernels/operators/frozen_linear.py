"""A frozen linear layer with packed weights that PEFT accepts as ``nn.Linear``.

Shapes: T rows, K inputs, N outputs.
"""

import torch
from torch import Tensor, nn

from tandem._native import ThreadPool
from tandem.core.model.layers import FrozenLinearSpec
from tandem.kernels.cpu.autograd import multiply_frozen
from tandem.kernels.cpu.linear import PackedLinear
from tandem.kernels.interfaces import WeightReader
from tandem.kernels.operators.operator import Operator, freeze, read_rows
from tandem.kernels.weights.formats import WeightFormat

__all__ = ["FrozenLinear"]


class FrozenLinear(Operator, nn.Linear):
    """``y = x W^T + b`` with W [N, K] packed and without gradient; x gets a gradient.

    PEFT wraps instances of ``nn.Linear`` and reads only device and dtype of ``weight``, which is an
    empty tensor here. To merge an adapter, export from the checkpoint instead.

    Args:
        spec: sizes, and whether the checkpoint has a bias.
        weight_format: format in which W is packed.
        pool: runs the kernels; borrowed for the life of the layer.
    """

    def __init__(
        self, spec: FrozenLinearSpec, *, weight_format: WeightFormat, pool: ThreadPool
    ) -> None:
        nn.Module.__init__(self)
        self.in_features = spec.in_features
        self.out_features = spec.out_features
        self.has_bias = spec.has_bias
        self.weight_format = weight_format
        self._pool = pool
        self.weight = freeze(torch.empty(0))
        self.bias = None  # type: ignore[assignment]

    def load(self, reader: WeightReader, name: str) -> None:
        """Read and pack ``weight``, and ``bias`` if there is one."""
        rows = [(f"{name}.weight", self.out_features)]
        weight = read_rows(reader, rows, self.in_features, is_scratch=True)
        biases = [(f"{name}.bias", self.out_features)]
        bias = read_rows(reader, biases) if self.has_bias else None
        self.packed = PackedLinear.pack(self.weight_format, weight, bias, pool=self._pool)
        self.packed_bytes = self.packed.size_bytes
        self.weight = freeze(torch.empty(0, dtype=reader.dtype))

    def forward(self, input: Tensor) -> Tensor:
        """Return ``x W^T + b`` [..., N], new, in the dtype of the input; W gets no gradient."""
        return multiply_frozen(self.packed, input)

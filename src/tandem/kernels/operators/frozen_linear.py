"""A frozen linear layer with packed weights that PEFT accepts as ``nn.Linear``.

Shapes: T rows, K inputs, N outputs.
"""

import torch
from torch import Tensor, nn

from tandem.core.model.layers import FrozenLinearSpec
from tandem.kernels.cpu.autograd import multiply_frozen
from tandem.kernels.cpu.linear import PackedLinear
from tandem.kernels.interfaces import WeightReader
from tandem.kernels.operators.operator import Operator, freeze
from tandem.kernels.weights.matrix import MatrixSettings, read_matrix

__all__ = ["FrozenLinear"]


class FrozenLinear(Operator, nn.Linear):
    """``y = x W^T + b`` with W [N, K] packed and without gradient; x gets a gradient.

    PEFT wraps instances of ``nn.Linear`` and reads only device and dtype of ``weight``, which is an
    empty tensor here. To merge an adapter, export from the checkpoint instead.

    Args:
        spec: sizes of the matrix; tells also if the checkpoint has a bias.
        settings: format in which W is packed, and the threads that run the kernels. If the
            checkpoint has codes in this format, they are packed without decoding.
    """

    def __init__(self, spec: FrozenLinearSpec, *, settings: MatrixSettings) -> None:
        nn.Module.__init__(self)
        self.in_features = spec.in_features
        self.out_features = spec.out_features
        self.has_bias = spec.has_bias
        self._settings = settings
        self.weight = freeze(torch.empty(0))
        self.bias = None  # type: ignore[assignment]

    def load(self, reader: WeightReader, name: str) -> None:
        """Read and pack ``weight``, and ``bias`` if there is one."""
        parts = [(name, self.out_features)]
        matrix = read_matrix(
            self, "", reader, self._settings, parts, self.in_features, has_bias=self.has_bias
        )
        assert isinstance(matrix, PackedLinear), "one part in one format"
        self.packed = matrix
        self.weight = freeze(torch.empty(0, dtype=reader.dtype))

    def forward(self, input: Tensor) -> Tensor:
        """Return ``x W^T + b`` [..., N], new, in the dtype of the input; W gets no gradient."""
        return multiply_frozen(self.packed, input)

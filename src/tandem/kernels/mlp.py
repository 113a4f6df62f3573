"""The dense SwiGLU block. Shapes: T tokens, D hidden, F intermediate."""

from torch import Tensor
from torch.nn import functional

from tandem.kernels.matrix import TENSORS, MatrixSettings, read_matrix
from tandem.kernels.operator import Operator, WeightReader

__all__ = ["Mlp", "swiglu"]


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of [..., 2 F] whose first half is the gate; [..., F], new."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate).mul_(up)


class Mlp(Operator):
    """``down(silu(gate(x)) * up(x))`` with gate and up as one matrix (arXiv:2002.05202)."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        has_bias: bool = False,
        settings: MatrixSettings = TENSORS,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.has_bias = has_bias
        self.settings = settings

    def load(self, reader: WeightReader, name: str) -> None:
        """Read ``{gate,up,down}_proj``."""
        size, bias = self.intermediate_size, self.has_bias
        gate_up = [(f"{name}.gate_proj", size), (f"{name}.up_proj", size)]
        down = [(f"{name}.down_proj", self.hidden_size)]
        settings = self.settings
        # Where no module has to search for them.
        self.matrices = (
            read_matrix(
                self, "gate_up_", reader, settings, gate_up, self.hidden_size, has_bias=bias
            ),
            read_matrix(self, "down_", reader, settings, down, size, has_bias=bias),
        )

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return [..., D], new."""
        gate_up, down = self.matrices
        return down.forward(swiglu(gate_up.forward(x_TD, dtype=x_TD.dtype)), dtype=x_TD.dtype)

    def add_into_(self, residual_TD: Tensor, x_TD: Tensor) -> None:
        """Add the block's output for ``x_TD`` to ``residual_TD``, in place."""
        gate_up, down = self.matrices
        down.add_into_(residual_TD, swiglu(gate_up.forward(x_TD, dtype=x_TD.dtype)))

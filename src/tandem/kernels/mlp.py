"""The dense SwiGLU block. Shapes: T tokens, D hidden, F intermediate."""

from torch import Tensor
from torch.nn import functional

from tandem import _native
from tandem.kernels.operator import Operator, WeightReader, freeze
from tandem.kernels.step import NativeStep, project_into

__all__ = ["Mlp", "swiglu"]


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of [..., 2 F] whose first half is the gate; [..., F], new."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate).mul_(up)


class Mlp(Operator):
    """``down(silu(gate(x)) * up(x))`` with gate and up as one matrix (arXiv:2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, has_bias: bool = False) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.has_bias = has_bias

    def load(self, reader: WeightReader, name: str) -> None:
        """Read ``{gate,up,down}_proj``."""
        size = self.intermediate_size
        gate_up = [(f"{name}.{part}.weight", size) for part in ("gate_proj", "up_proj")]
        self.gate_up_weight = freeze(self._read_rows(reader, gate_up, self.hidden_size))
        down = [(f"{name}.down_proj.weight", self.hidden_size)]
        self.down_weight = freeze(self._read_rows(reader, down, size))
        self.gate_up_bias = self.down_bias = None
        if self.has_bias:
            biases = [(f"{name}.{part}.bias", size) for part in ("gate_proj", "up_proj")]
            self.gate_up_bias = freeze(self._read_rows(reader, biases))
            down = [(f"{name}.down_proj.bias", self.hidden_size)]
            self.down_bias = freeze(self._read_rows(reader, down))
        # Made once, and where no module has to search for them.
        self._products = (
            self.gate_up_weight.t(),
            self.gate_up_bias,
            self.down_weight.t(),
            self.down_bias,
        )

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return [..., D], new."""
        hidden = swiglu(functional.linear(x_TD, self.gate_up_weight, self.gate_up_bias))
        return functional.linear(hidden, self.down_weight, self.down_bias)

    def add_into_(
        self, residual_TD: Tensor, x_TD: Tensor, native: NativeStep | None = None
    ) -> None:
        """Add the block's output for ``x_TD`` to ``residual_TD``, in place.

        ``native`` is that of the step, if it has one.
        """
        gate_up_weight, gate_up_bias, down_weight, down_bias = self._products
        if native is None:
            hidden = swiglu(functional.linear(x_TD, self.gate_up_weight, gate_up_bias))
        else:
            gate_up, gate_up_view = native.buffer("gate_up", 2 * self.intermediate_size)
            hidden, hidden_view = native.buffer("hidden", self.intermediate_size)
            project_into(gate_up, x_TD, gate_up_weight, gate_up_bias)
            _native.swiglu(gate_up_view, hidden_view, native.pool)
        residual_TD.addmm_(hidden, down_weight)
        if down_bias is not None:
            residual_TD += down_bias

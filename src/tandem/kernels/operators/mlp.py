"""The dense MLP, gated or not. Shapes: T tokens, D hidden, F intermediate."""

import torch
from torch import Tensor

from tandem.core.model.layers import MlpSpec
from tandem.kernels.activation import activate, apply_function
from tandem.kernels.interfaces import AdaptedPart, Matrix, MatrixWrapper, WeightReader
from tandem.kernels.operators.lora import AdaptedRows
from tandem.kernels.operators.operator import Operator
from tandem.kernels.weights.matrix import TENSORS, MatrixSettings, read_matrix

__all__ = ["Mlp"]


class Mlp(Operator):
    """``down(f(gate(x)) * up(x))`` with gate and up as one matrix (arXiv:2002.05202).

    Without a gate it is ``down(f(up(x)))``.

    Args:
        spec: sizes, activation (one that needs no parameters) and checkpoint names.
        settings: how the matrices are stored and run.
    """

    def __init__(self, spec: MlpSpec, *, settings: MatrixSettings = TENSORS) -> None:
        super().__init__()
        assert spec.activation is not None, "an activation that no operator has"
        self.spec = spec
        self.activation = spec.activation
        self.settings = settings

    def load(self, reader: WeightReader, name: str) -> None:
        """Read the gate, up and down projections."""
        spec, settings = self.spec, self.settings
        size, bias = spec.intermediate_size, spec.has_bias
        rows = spec.num_up_rows // len(spec.gate_up_names)
        gate_up = [(f"{name}.{part}", rows) for part in spec.gate_up_names]
        down = [(f"{name}.{spec.down_name}", spec.hidden_size)]
        # A plain attribute holds the matrices, because a look-up through nn.Module is slow.
        self.matrices: tuple[Matrix, Matrix] = (
            read_matrix(
                self, "gate_up_", reader, settings, gate_up, spec.hidden_size, has_bias=bias
            ),
            read_matrix(self, "down_", reader, settings, down, size, has_bias=bias),
        )

    def adapt(self, wrapper: MatrixWrapper, name: str) -> dict[str, AdaptedPart]:
        """Make the projections take LoRA adapters; return them by checkpoint name."""
        gate_up, down = (wrapper.wrap_matrix(matrix) for matrix in self.matrices)
        self.matrices = (gate_up, down)
        spec = self.spec
        rows = spec.num_up_rows // len(spec.gate_up_names)
        parts: dict[str, AdaptedPart] = {
            f"{name}.{part}": AdaptedRows(gate_up, spec.hidden_size, rows, i * rows)
            for i, part in enumerate(spec.gate_up_names)
        }
        down_part = AdaptedRows(down, spec.intermediate_size, spec.hidden_size)
        return {**parts, f"{name}.{spec.down_name}": down_part}

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return the MLP's output [..., D], new."""
        gate_up, down = self.matrices
        hidden = self._activate(gate_up.forward(x_TD, dtype=x_TD.dtype))
        return down.forward(hidden, dtype=x_TD.dtype)

    def add_into_(self, residual_TD: Tensor, x_TD: Tensor, gate_T1: Tensor | None = None) -> None:
        """Add the MLP's output for ``x_TD`` to ``residual_TD``, in place.

        Each token's output is multiplied by the sigmoid of ``gate_T1`` if that is given.
        """
        gate_up, down = self.matrices
        hidden = self._activate(gate_up.forward(x_TD, dtype=x_TD.dtype))
        if gate_T1 is not None:
            hidden *= torch.sigmoid(gate_T1)
        down.add_into_(residual_TD, hidden)

    def _activate(self, gate_up: Tensor) -> Tensor:
        if self.spec.is_gated:
            return activate(self.activation, gate_up)
        return apply_function(self.activation.name, gate_up)

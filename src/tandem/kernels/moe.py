"""Mixture of experts: the router, and its block with the experts.

Shapes: T tokens, D hidden, E experts, K experts per token.
"""

from torch import Tensor, nn

from tandem.kernels.execution import choose_execution
from tandem.kernels.experts import RoutedExperts
from tandem.kernels.matrix import TENSORS, MatrixSettings, read_matrix
from tandem.kernels.operator import Operator, WeightReader

__all__ = ["MoeBlock", "Router"]


class Router(Operator):
    """Choose each token's K experts by softmax of a linear score; of equals, the lower id.

    Args:
        hidden_size: D.
        num_experts: E.
        top_k: K.
        is_normalised: whether the K weights are scaled to sum to one.
        has_bias: whether the score has a bias, which counts for choice and weights.
        settings: how the matrix is stored and run.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        is_normalised: bool,
        has_bias: bool = False,
        settings: MatrixSettings = TENSORS,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.top_k = top_k
        self.is_normalised = is_normalised
        self.has_bias = has_bias
        self.settings = settings

    def load(self, reader: WeightReader, name: str) -> None:
        """Read ``weight`` [E, D] and, if there is one, ``bias`` [E]."""
        parts, size = [(name, self.num_experts)], self.hidden_size
        self._execution = choose_execution(reader.device, reader.dtype)
        self.matrix = read_matrix(
            self, "", reader, self.settings, parts, size, has_bias=self.has_bias
        )

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (logits [T, E], weights [T, K] of the dtype of ``x_TD``, expert ids [T, K])."""
        logits = self.matrix.forward(x_TD, dtype=x_TD.dtype)
        weights, ids = self._execution.route(logits, self.top_k, is_normalised=self.is_normalised)
        return logits, weights, ids

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The face of transformers' routers: any leading dimensions, flattened."""
        return self.route(hidden_states.reshape(-1, self.hidden_size))


class MoeBlock(Operator):
    """A router and its experts; either may still be the skeleton's own module.

    Args:
        gate: returns (logits, weights [T, K], ids [T, K]).
        experts: called as ``experts(hidden, ids, weights)``.
        gate_name: what the checkpoint calls the router.
        is_pair: ``forward`` returns the weights [T, K] as well, as gpt-oss's layers want it.
    """

    def __init__(
        self,
        gate: nn.Module,
        experts: nn.Module,
        *,
        gate_name: str = "gate",
        is_pair: bool = False,
    ) -> None:
        super().__init__()
        self.add_module(gate_name, gate)
        self.experts = experts
        self.is_pair = is_pair
        # Where no module has to search for them.
        self._parts = (gate, experts)

    @property
    def is_fusable(self) -> bool:
        """Whether both parts are operators, so that the block can add into a residual."""
        gate, experts = self._parts
        return isinstance(gate, Router) and isinstance(experts, RoutedExperts)

    def load(self, reader: WeightReader, name: str) -> None:
        """Do nothing: the parts, being modules of their own, are loaded by name."""

    def forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the block's output, shaped as ``hidden_states``, new."""
        gate, experts = self._parts
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, ids = gate(x)
        out = experts(x, ids, weights).reshape(hidden_states.shape)
        return (out, weights) if self.is_pair else out

    @property
    def operators(self) -> tuple[Router, RoutedExperts]:
        """The parts of a block that is fusable."""
        gate, experts = self._parts
        assert isinstance(gate, Router), gate
        assert isinstance(experts, RoutedExperts), experts
        return gate, experts

    def add_into_(self, residual_TD: Tensor, x_TD: Tensor) -> None:
        """Add the block's output for ``x_TD`` to ``residual_TD``, in place."""
        router, experts = self.operators
        _, weights, ids = router.route(x_TD)
        experts.add_into_(residual_TD, x_TD, ids, weights)

"""Mixture of experts: the router, and its block with the experts.

Shapes: T tokens, D hidden, E experts, K experts per token.
"""

import torch
from torch import Tensor, nn

from tandem.kernels.interfaces import WeightReader
from tandem.kernels.native import Buffer
from tandem.kernels.operators.experts import RoutedExperts
from tandem.kernels.operators.linear import Linear
from tandem.kernels.operators.mlp import Mlp
from tandem.kernels.operators.operator import Operator, freeze
from tandem.kernels.routing import SOFTMAX, RoutingRule
from tandem.kernels.weights.matrix import TENSORS, MatrixSettings, read_matrix

__all__ = ["MoeBlock", "Router"]


class Router(Operator):
    """Choose each token's K experts by a linear score; of equals, the lower id.

    Args:
        hidden_size: D.
        num_experts: E.
        top_k: K.
        rule: how scores become a choice and weights.
        has_bias: whether the score has a bias, which counts for choice and weights.
        choice_bias: the checkpoint's name, below the router's parent, of a bias that counts for
            the choice alone; empty is none.
        settings: how the matrix is stored and run.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        rule: RoutingRule = SOFTMAX,
        has_bias: bool = False,
        choice_bias: str = "",
        settings: MatrixSettings = TENSORS,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.top_k = top_k
        self.rule = rule
        self.has_bias = has_bias
        self.settings = settings
        self.choice_bias: Buffer | None = None
        self._choice_bias_name = choice_bias

    def load(self, reader: WeightReader, name: str) -> None:
        """Read ``weight`` [E, D] and, if there are such, the biases [E]."""
        parts, size = [(name, self.num_experts)], self.hidden_size
        self._execution = reader.execution
        self.matrix = read_matrix(
            self, "", reader, self.settings, parts, size, has_bias=self.has_bias
        )
        if self._choice_bias_name:
            # Never rounded: a choice between near scores depends on it.
            bias = torch.empty(self.num_experts, dtype=torch.float32, device=reader.device)
            reader.read_into(f"{name.rpartition('.')[0]}.{self._choice_bias_name}", bias)
            self.e_score_correction_bias = freeze(bias)
            self.choice_bias = Buffer(bias)

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (logits [T, E], weights [T, K] of the dtype of ``x_TD``, expert ids [T, K])."""
        logits = self.matrix.forward(x_TD, dtype=x_TD.dtype)
        weights, ids = self._execution.route(logits, self.top_k, self.rule, self.choice_bias)
        return logits, weights, ids

    def forward(self, hidden_states: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
        """The face of transformers' routers: any leading dimensions, flattened.

        Some blocks pass the bias of the choice, which is held here.
        """
        return self.route(hidden_states.reshape(-1, self.hidden_size))


class MoeBlock(Operator):
    """A router and its experts; any part may still be the skeleton's own module.

    Args:
        gate: returns (logits, weights [T, K], ids [T, K]).
        experts: called as ``experts(hidden, ids, weights)``.
        gate_name: what the checkpoint calls the router.
        shared: (the checkpoint's name, the module) of the experts that every token uses.
        shared_gate: the same of a score [T, 1] whose sigmoid multiplies their output.
        is_pair: ``forward`` returns the weights [T, K] as well, as gpt-oss's layers want it.
    """

    def __init__(
        self,
        gate: nn.Module,
        experts: nn.Module,
        *,
        gate_name: str = "gate",
        shared: tuple[str, nn.Module] | None = None,
        shared_gate: tuple[str, nn.Module] | None = None,
        is_pair: bool = False,
    ) -> None:
        super().__init__()
        self.add_module(gate_name, gate)
        self.experts = experts
        for part in (shared, shared_gate):
            if part is not None:
                self.add_module(*part)
        self.is_pair = is_pair
        # Where no module has to search for them.
        self._parts = (gate, experts)
        self._shared = None if shared is None else shared[1]
        self._shared_gate = None if shared_gate is None else shared_gate[1]

    @property
    def is_fusable(self) -> bool:
        """Whether all parts are operators, so that the block can add into a residual."""
        gate, experts = self._parts
        return (
            isinstance(gate, Router)
            and isinstance(experts, RoutedExperts)
            and (self._shared is None or isinstance(self._shared, Mlp))
            and (self._shared_gate is None or isinstance(self._shared_gate, Linear))
        )

    def load(self, reader: WeightReader, name: str) -> None:
        """Do nothing: the parts, being modules of their own, are loaded by name."""

    def forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the block's output, shaped as ``hidden_states``, new."""
        gate, experts = self._parts
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, ids = gate(x)
        out = experts(x, ids, weights)
        if self._shared is not None:
            shared = self._shared(x)
            if self._shared_gate is not None:
                shared *= torch.sigmoid(self._shared_gate(x))
            out = out + shared
        out = out.reshape(hidden_states.shape)
        return (out, weights) if self.is_pair else out

    @property
    def operators(self) -> tuple[Router, RoutedExperts]:
        """The parts of a block that is fusable."""
        gate, experts = self._parts
        assert isinstance(gate, Router), gate
        assert isinstance(experts, RoutedExperts), experts
        return gate, experts

    @property
    def shared(self) -> Mlp | None:
        """The experts that every token uses, of a block that is fusable."""
        assert self._shared is None or isinstance(self._shared, Mlp), self._shared
        return self._shared

    @property
    def shared_gate(self) -> Linear | None:
        """The score of the shared experts, of a block that is fusable."""
        assert self._shared_gate is None or isinstance(self._shared_gate, Linear)
        return self._shared_gate

    def add_into_(self, residual_TD: Tensor, x_TD: Tensor) -> None:
        """Add the block's output for ``x_TD`` to ``residual_TD``, in place."""
        router, experts = self.operators
        _, weights, ids = router.route(x_TD)
        experts.add_into_(residual_TD, x_TD, ids, weights)
        if self.shared is not None:
            gate = self.shared_gate
            self.shared.add_into_(residual_TD, x_TD, None if gate is None else gate(x_TD))

"""Mixture of experts: the router, and the block of router and experts.

Shapes: T tokens, D hidden, E experts, K experts per token.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from tandem.core.model.layers import MoeBlockSpec, RouterSpec
from tandem.kernels.interfaces import WeightReader
from tandem.kernels.native import Buffer
from tandem.kernels.operators.experts import RoutedExperts
from tandem.kernels.operators.linear import Linear
from tandem.kernels.operators.mlp import Mlp
from tandem.kernels.operators.operator import Operator, freeze, read_rows
from tandem.kernels.weights.matrix import TENSORS, MatrixSettings, read_matrix

__all__ = ["ExpertChoice", "MoeBlock", "Router"]


class Router(Operator):
    """Choice of each token's K experts by a linear score; of equal scores, the lower id.

    Args:
        spec: sizes, routing rule and checkpoint names.
        settings: how the matrix is stored and run.
    """

    def __init__(self, spec: RouterSpec, *, settings: MatrixSettings = TENSORS) -> None:
        super().__init__()
        self.spec = spec
        self.hidden_size = spec.hidden_size
        self.num_experts = spec.num_experts
        self.top_k = spec.top_k
        self.rule = spec.rule
        self.settings = settings
        self.choice_bias: Buffer | None = None

    def load(self, reader: WeightReader, name: str) -> None:
        """Read ``weight`` [E, D], and the biases [E] if there are any."""
        own = name if self.spec.norm_eps is None else f"{name}.proj"
        parts, size = [(own, self.num_experts)], self.hidden_size
        self._execution = reader.execution
        self.matrix = read_matrix(
            self, "", reader, self.settings, parts, size, has_bias=self.spec.has_bias
        )
        if self.spec.choice_bias:
            # The router's bias stays float32: rounding could change the choice between experts with
            # close scores.
            bias = torch.empty(self.num_experts, dtype=torch.float32, device=reader.device)
            reader.read_into(f"{name.rpartition('.')[0]}.{self.spec.choice_bias}", bias)
            self.e_score_correction_bias = freeze(bias)
            self.choice_bias = Buffer(bias)
        if self.spec.norm_eps is not None:
            self.scale = freeze(read_rows(reader, [(f"{name}.scale", size)]))
            self.held_scale = Buffer(self.scale)
        if self.spec.has_expert_scale:
            scales = torch.empty(self.num_experts, dtype=torch.float32, device=reader.device)
            reader.read_into(f"{name}.per_expert_scale", scales)
            self.per_expert_scale = freeze(scales)

    def prepare(self, x_TD: Tensor) -> Tensor:
        """Return the input of the router's matrix: the hidden states, or their norm."""
        eps = self.spec.norm_eps
        return x_TD if eps is None else self._execution.norm(x_TD, self.held_scale, eps)

    def scale_logits_(self, logits_TE: Tensor) -> None:
        """Scale logits in place by 1 / sqrt(D), if the router norms its input."""
        if self.spec.norm_eps is not None:
            logits_TE *= self.hidden_size**-0.5

    def scale_weights_(self, weights_TK: Tensor, ids_TK: Tensor) -> None:
        """Multiply router weights by their experts' factors in place, if the router has any."""
        if self.spec.has_expert_scale:
            weights_TK *= self.per_expert_scale[ids_TK]

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (logits [T, E], weights [T, K] of the dtype of ``x_TD``, expert ids [T, K])."""
        logits = self.matrix.forward(self.prepare(x_TD), dtype=x_TD.dtype)
        self.scale_logits_(logits)
        weights, ids = self._execution.route(logits, self.top_k, self.rule, self.choice_bias)
        self.scale_weights_(weights, ids)
        return logits, weights, ids

    def forward(self, hidden_states: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
        """Run with the interface of transformers' routers; leading dimensions are flattened.

        Some of transformers' blocks pass the bias of the choice, which is ignored, as the router
        holds it.
        """
        return self.route(hidden_states.reshape(-1, self.hidden_size))


class MoeBlock(Operator):
    """A router and its experts; any part may still be transformers' own module.

    Args:
        spec: checkpoint names of the parts.
        parts: modules by these names. The router returns (logits, weights [T, K], ids [T, K]);
            experts are called as ``experts(hidden, ids, weights)``.
    """

    def __init__(self, spec: MoeBlockSpec, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        self.spec = spec
        for name in (spec.gate_name, "experts", spec.shared_name, spec.shared_gate_name):
            if name:
                self.add_module(name, parts[name])
        # Plain attributes hold the gate and the experts, because a look-up through nn.Module is
        # slow. Their types are checked once here, because a step would ask in every layer.
        gate, experts = self._parts = (parts[spec.gate_name], parts["experts"])
        self._operators: tuple[Router, RoutedExperts] | None = None
        if isinstance(gate, Router) and isinstance(experts, RoutedExperts):
            self._operators = (gate, experts)
        self._shared = parts[spec.shared_name] if spec.shared_name else None
        self._shared_gate = parts[spec.shared_gate_name] if spec.shared_gate_name else None

    def load(self, reader: WeightReader, name: str) -> None:
        """Do nothing: the parts load themselves as modules."""

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
        return (out, weights) if self.spec.is_pair else out

    @property
    def operators(self) -> tuple[Router, RoutedExperts]:
        """The router and the routed experts. The caller ensures that all parts of the block are
        operators.
        """
        assert self._operators is not None, f"parts of transformers: {self._parts}"
        return self._operators

    @property
    def shared(self) -> Mlp | None:
        """Shared experts of a block whose parts are all operators; None: there are none."""
        assert self._shared is None or isinstance(self._shared, Mlp), self._shared
        return self._shared

    @property
    def shared_gate(self) -> Linear | None:
        """Projection to the shared experts' gate, of a block whose parts are all operators; None:
        none.
        """
        assert self._shared_gate is None or isinstance(self._shared_gate, Linear)
        return self._shared_gate


class ExpertChoice(NamedTuple):
    """A layer's choice of experts; a native step overwrites its buffers in the next layer.

    Shapes: T tokens, D hidden, K experts per token.
    """

    block: MoeBlock | None
    """Block of the router and experts; None: they are beside the layer's MLP."""
    experts: RoutedExperts
    residual: Buffer
    """Residual stream, [T, D]."""
    x: Buffer
    """Normed hidden states, the experts' input, [T, D]."""
    ids: Buffer
    """Chosen expert ids, int64 [T, K]."""
    weights: Buffer
    """Router weights, [T, K]."""

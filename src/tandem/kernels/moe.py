"""Mixture of experts: the router, and its block with the experts.

Shapes: T tokens, D hidden, E experts, K experts per token.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from tandem import _native
from tandem.kernels.experts import RoutedExperts
from tandem.kernels.native import is_native, view_tensor
from tandem.kernels.operator import Operator, WeightReader, freeze
from tandem.kernels.step import NativeStep, project_into

__all__ = ["MoeBlock", "Router"]


class Router(Operator):
    """Choose each token's K experts by softmax of a linear score; of equals, the lower id.

    Args:
        hidden_size: D.
        num_experts: E.
        top_k: K.
        is_normalised: whether the K weights are scaled to sum to one.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, *, is_normalised: bool
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.top_k = top_k
        self.is_normalised = is_normalised
        self._scoring = "softmax_normalised" if is_normalised else "softmax"

    def load(self, reader: WeightReader, name: str) -> None:
        """Read ``weight`` [E, D]."""
        rows = [(f"{name}.weight", self.num_experts)]
        self.weight = freeze(self._read_rows(reader, rows, self.hidden_size))
        self._weight_t = self.weight.t()

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (logits [T, E], weights [T, K] of the dtype of ``x_TD``, expert ids [T, K])."""
        logits = functional.linear(x_TD, self.weight)
        if is_native(logits):
            weights = logits.new_empty(len(logits), self.top_k)
            ids = torch.empty(weights.shape, dtype=torch.int64)
            _native.route(
                view_tensor(logits), view_tensor(weights), view_tensor(ids), self._scoring
            )
            return logits, weights, ids
        if self.is_normalised:
            # The softmax over all, renormalised over K, is the softmax over the K best.
            best, ids = torch.topk(logits, self.top_k, dim=-1)
            weights = torch.softmax(best, -1, dtype=torch.float32)
        else:
            weights = torch.softmax(logits, -1, dtype=torch.float32)
            weights, ids = torch.topk(weights, self.top_k, dim=-1)
        return logits, weights.to(x_TD.dtype), ids

    def route_natively(self, x_TD: Tensor, native: NativeStep) -> tuple[Tensor, Tensor]:
        """Return (weights [T, K], ids [T, K]) in buffers of the step, valid until the next call."""
        logits, logits_view = native.buffer("router_logits", self.num_experts)
        project_into(logits, x_TD, self._weight_t, None)
        weights, weights_view = native.buffer("router_weights", self.top_k)
        ids, ids_view = native.buffer("router_ids", self.top_k, torch.int64)
        _native.route(logits_view, weights_view, ids_view, self._scoring, pool=native.pool)
        return weights, ids

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The face of transformers' routers: any leading dimensions, flattened."""
        return self.route(hidden_states.reshape(-1, self.hidden_size))


class MoeBlock(Operator):
    """A router and its experts; either may still be the skeleton's own module.

    Args:
        gate: returns (logits, weights [T, K], ids [T, K]).
        experts: called as ``experts(hidden, ids, weights)``.
    """

    def __init__(self, gate: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        # Where no module has to search for them.
        self._parts = (gate, experts)

    @property
    def is_fusable(self) -> bool:
        """Whether both parts are operators, so that the block can add into a residual."""
        return isinstance(self.gate, Router) and isinstance(self.experts, RoutedExperts)

    def load(self, reader: WeightReader, name: str) -> None:
        """Do nothing: the parts, being modules of their own, are loaded by name."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the block's output, shaped as ``hidden_states``, new."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, ids = self.gate(x)
        return self.experts(x, ids, weights).reshape(hidden_states.shape)

    def add_into_(
        self, residual_TD: Tensor, x_TD: Tensor, native: NativeStep | None = None
    ) -> None:
        """Add the block's output for ``x_TD`` to ``residual_TD``, in place.

        ``native`` is that of the step, if it has one.
        """
        gate, experts = self._parts
        assert isinstance(gate, Router), gate
        assert isinstance(experts, RoutedExperts), experts
        if native is None:
            _, weights, ids = gate.route(x_TD)
        else:
            weights, ids = gate.route_natively(x_TD, native)
        experts.add_into_(residual_TD, x_TD, ids, weights)

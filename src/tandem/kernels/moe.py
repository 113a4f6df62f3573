"""Mixture of experts: the router, and its block with the experts.

Shapes: T tokens, D hidden, E experts, K experts per token.
"""

import torch
from torch import Tensor, nn

from tandem import _native
from tandem.kernels.experts import RoutedExperts
from tandem.kernels.matrix import TENSORS, MatrixSettings, read_matrix
from tandem.kernels.native import Buffer, is_native, view_tensor
from tandem.kernels.operator import Operator, WeightReader
from tandem.kernels.step import NativeStep

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
        self._scoring = "softmax_normalised" if is_normalised else "softmax"

    def load(self, reader: WeightReader, name: str) -> None:
        """Read ``weight`` [E, D] and, if there is one, ``bias`` [E]."""
        parts, size = [(name, self.num_experts)], self.hidden_size
        self._matrix = read_matrix(
            self, "", reader, self.settings, parts, size, has_bias=self.has_bias
        )

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (logits [T, E], weights [T, K] of the dtype of ``x_TD``, expert ids [T, K])."""
        logits = self._matrix.forward(x_TD, dtype=x_TD.dtype)
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

    def route_natively(self, x_TD: Buffer, native: NativeStep) -> tuple[Buffer, Buffer]:
        """Return (weights [T, K], ids [T, K]) in buffers of the step, valid until the next call."""
        dtype = self._matrix.out_dtype
        logits = native.buffer("router_logits", self.num_experts, dtype)
        weights = native.buffer("router_weights", self.top_k, dtype)
        ids = native.buffer("router_ids", self.top_k, torch.int64)
        self._matrix.run(x_TD, logits)
        _native.route(logits.view, weights.view, ids.view, self._scoring, pool=native.pool)
        return weights, ids

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

    def add_into_(self, residual_TD: Tensor, x_TD: Tensor) -> None:
        """Add the block's output for ``x_TD`` to ``residual_TD``, in place."""
        gate, experts = self._parts
        assert isinstance(gate, Router), gate
        assert isinstance(experts, RoutedExperts), experts
        _, weights, ids = gate.route(x_TD)
        experts.add_into_(residual_TD, x_TD, ids, weights)

    def add_natively(self, residual_TD: Buffer, x_TD: Buffer, native: NativeStep) -> None:
        """As ``add_into_``, in buffers of a native step."""
        gate, experts = self._parts
        assert isinstance(gate, Router), gate
        assert isinstance(experts, RoutedExperts), experts
        weights, ids = gate.route_natively(x_TD, native)
        experts.add_natively(residual_TD, x_TD, ids, weights, native)

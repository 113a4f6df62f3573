"""Mixture of experts: Router, Experts, and the block of both.

Shapes: T tokens, D hidden, F intermediate of one expert, E experts, K experts per token.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from tandem import _native
from tandem.core.errors import ShapeError
from tandem.kernels.mlp import swiglu
from tandem.kernels.native import is_native, view_tensor
from tandem.kernels.operator import Operator, WeightReader, freeze
from tandem.kernels.step import NativeStep, project_into

__all__ = ["Experts", "MoeBlock", "Router", "read_experts"]


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


class Experts(Operator):
    """The routed experts of one layer: SwiGLU blocks, each scaled by its router weight.

    Args:
        num_experts: E.
        hidden_size: D.
        intermediate_size: F.
    """

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size

    def load(self, reader: WeightReader, name: str) -> None:
        """Read either layout: one tensor for all experts, or three for each."""
        e, d, f = self.num_experts, self.hidden_size, self.intermediate_size
        # Inputs first in memory: float32 products of a few rows take a quarter less time than with
        # rows of W, those of many rows an eighth. The views have the usual shapes.
        gate_up = torch.empty((e, d, 2 * f), dtype=reader.dtype, device=reader.device)
        down = torch.empty((e, f, d), dtype=reader.dtype, device=reader.device)
        read_experts(reader, name, gate_up.transpose(1, 2), down.transpose(1, 2))
        self.gate_up_weight = freeze(gate_up.transpose(1, 2))
        self.down_weight = freeze(down.transpose(1, 2))
        # Views made once: making them in the loop over experts costs as much as a small product.
        self._gate_up_t = list(gate_up)
        self._down_t = list(down)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs, [T, D], new.

        Args:
            hidden_states: [T, D]; not modified.
            top_k_index: int64 [T, K] in [-1, E); -1 = computed elsewhere, adds 0.
            top_k_weights: [T, K].

        Raises:
            ShapeError: an id outside of [-1, E), or shapes that do not fit together.
        """
        out = torch.zeros_like(hidden_states)
        self.add_into_(out, hidden_states, top_k_index, top_k_weights)
        return out

    def add_into_(self, residual_TD: Tensor, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> None:
        """Add the weighted sum to ``residual_TD``, in place; as ``forward`` otherwise.

        Cost: each chosen expert's weights are read once, whatever the number of its tokens.
        """
        if ids_TK.shape != w_TK.shape or len(ids_TK) != len(x_TD):
            raise ShapeError(
                "kernels.run_experts",
                f"ids {tuple(ids_TK.shape)}, weights {tuple(w_TK.shape)}, {len(x_TD)} tokens: "
                "give [tokens, top_k] of both",
            )
        if len(x_TD) == 1:
            self._add_one_(residual_TD, x_TD, ids_TK, w_TK)
        elif len(x_TD) > 1:
            self._add_many_(residual_TD, x_TD, ids_TK, w_TK)

    def _add_one_(self, residual_1D: Tensor, x_1D: Tensor, ids_1K: Tensor, w_1K: Tensor) -> None:
        for expert_id, weight in zip(ids_1K[0].tolist(), w_1K[0].tolist(), strict=True):
            if 0 <= expert_id < self.num_experts:
                hidden = swiglu(torch.mm(x_1D, self._gate_up_t[expert_id]))
                residual_1D.addmm_(hidden, self._down_t[expert_id], alpha=weight)
            elif expert_id != -1:
                self._refuse_id(expert_id)

    def _add_many_(self, residual_TD: Tensor, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> None:
        """Sort the (token, expert) pairs by expert, run each expert once, sum per token.

        The sum runs over a token's K slots in their order, so it does not depend on the batch.
        """
        tokens, top_k = ids_TK.shape
        sorted_ids, order = torch.sort(ids_TK.flatten(), stable=True)
        bounds = torch.arange(self.num_experts + 1, device=ids_TK.device)
        ends = torch.searchsorted(sorted_ids, bounds).tolist()
        if ends[-1] < tokens * top_k or (ends[0] and sorted_ids[0] < -1):
            self._refuse_id(int(sorted_ids[-1] if ends[-1] < tokens * top_k else sorted_ids[0]))
        x = x_TD.index_select(0, order // top_k)
        gate_up = x.new_empty(len(x), 2 * self.intermediate_size)
        chosen = [(i, a, b) for i, (a, b) in enumerate(pairwise(ends)) if a < b]
        for expert_id, a, b in chosen:
            torch.mm(x[a:b], self._gate_up_t[expert_id], out=gate_up[a:b])
        hidden = swiglu(gate_up)
        for expert_id, a, b in chosen:
            torch.mm(hidden[a:b], self._down_t[expert_id], out=x[a:b])
        if ends[0]:
            x[: ends[0]] = 0
        outputs = torch.empty_like(x)
        outputs[order] = x
        outputs = outputs.view(tokens, top_k, -1)
        residual_TD[:, None].baddbmm_(w_TK[:, None], outputs)

    def _refuse_id(self, expert_id: int) -> None:
        raise ShapeError(
            "kernels.run_experts",
            f"expert id {expert_id} of {self.num_experts} experts: pass -1 for one elsewhere",
        )


def read_experts(reader: WeightReader, name: str, gate_up_EFD: Tensor, down_EDF: Tensor) -> None:
    """Fill gate_up [E, 2 F, D] and down [E, D, F], whichever way the checkpoint stores them.

    transformers 5 saves one tensor for all experts; the hub's checkpoints have three for each.
    """
    if reader.has(f"{name}.gate_up_proj"):
        reader.read_into(f"{name}.gate_up_proj", gate_up_EFD)
        reader.read_into(f"{name}.down_proj", down_EDF)
        return
    size = down_EDF.shape[2]
    for i, (gate_up, down) in enumerate(zip(gate_up_EFD, down_EDF, strict=True)):
        reader.read_into(f"{name}.{i}.gate_proj.weight", gate_up[:size])
        reader.read_into(f"{name}.{i}.up_proj.weight", gate_up[size:])
        reader.read_into(f"{name}.{i}.down_proj.weight", down)


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
        return isinstance(self.gate, Router) and isinstance(self.experts, Experts)

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
        assert isinstance(experts, Experts), experts
        if native is None:
            _, weights, ids = gate.route(x_TD)
        else:
            weights, ids = gate.route_natively(x_TD, native)
        experts.add_into_(residual_TD, x_TD, ids, weights)

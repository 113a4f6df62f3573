"""Routed experts of a layer as tensors of the model's dtype, on any device.

Shapes: T tokens, D hidden, F intermediate of one expert, E experts, K experts per token.
"""

from itertools import pairwise

import torch
from torch import Tensor

from tandem.core.errors import ShapeError
from tandem.kernels.activation import activate
from tandem.kernels.interfaces import WeightReader
from tandem.kernels.operators.experts import (
    MAX_GATHERED_BYTES,
    RoutedExperts,
    read_biases,
    read_experts,
)
from tandem.kernels.operators.operator import allocate_scratch, freeze

__all__ = ["Experts"]

TOKENS_PER_SUM = 64
"""Tokens whose expert outputs are summed at a time: in float32 they fit in a cache, 4 MiB for K = 8
and D = 2048.
"""


class Experts(RoutedExperts):
    """Experts whose weights are tensors of the model's dtype, on any device."""

    def load(self, reader: WeightReader, name: str) -> None:
        """Read any checkpoint layout: one tensor for all experts, either way around, or three for
        each.
        """
        e, d, f = self.num_experts, self.hidden_size, self.intermediate_size
        # Weights are stored with the input dimension first: float32 products of a few rows take a
        # quarter less time than with W's usual layout, products of many rows an eighth less. The
        # transposed views have the usual shapes.
        gate_up = torch.empty((e, d, 2 * f), dtype=reader.dtype, device=reader.device)
        down = torch.empty((e, f, d), dtype=reader.dtype, device=reader.device)
        if self.is_transposed:
            stored = allocate_scratch(e, d, 2 * f, dtype=reader.dtype)
            reader.read_into(f"{name}.gate_up_proj", stored)
            reader.read_into(f"{name}.down_proj", down)
            gate, up = self.spec.gate_up_rows
            gate_up[..., :f], gate_up[..., f:] = stored[..., gate], stored[..., up]
        else:
            read_experts(reader, name, gate_up.transpose(1, 2), down.transpose(1, 2))
        self._is_host = reader.execution.is_host
        self.gate_up_weight = freeze(gate_up.transpose(1, 2))
        self.down_weight = freeze(down.transpose(1, 2))
        # The transposed views are made once here: making a view inside the loop over experts costs
        # as much as a small product.
        self._gate_up_t = list(gate_up)
        self._down_t = list(down)
        if self.has_bias:
            gate_bias, up_bias, down_bias = read_biases(self, reader, name)
            self.gate_up_bias = freeze(torch.cat((gate_bias, up_bias), dim=1))
            self.down_bias = freeze(down_bias)

    def add_into_(self, residual_TD: Tensor, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> None:
        """Add the experts' weighted sum to the residual stream.

        Raises: ShapeError (shapes do not fit together).
        """
        if ids_TK.shape != w_TK.shape or len(ids_TK) != len(x_TD):
            raise ShapeError(
                "kernels.run_experts",
                f"ids {tuple(ids_TK.shape)}, weights {tuple(w_TK.shape)}, {len(x_TD)} tokens: "
                "give [tokens, top_k] of both",
            )
        expert_bytes = 3 * self.hidden_size * self.intermediate_size * x_TD.itemsize
        if not self._is_host and ids_TK.numel() * expert_bytes <= MAX_GATHERED_BYTES:
            self._add_gathered_(residual_TD, x_TD, ids_TK, w_TK)
        elif len(x_TD) == 1:
            self._add_one_(residual_TD, x_TD, ids_TK, w_TK)
        elif len(x_TD) > 1:
            self._add_many_(residual_TD, x_TD, ids_TK, w_TK)

    def _add_gathered_(
        self, residual_TD: Tensor, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor
    ) -> None:
        """Gather the chosen experts' weights and multiply, without reading values on the host.

        So the call can be captured. An id beyond the experts is an error on the device.
        """
        tokens, top_k = ids_TK.shape
        ids = ids_TK.flatten().clamp_min(0)
        x = x_TD.repeat_interleave(top_k, 0)[:, None]
        gate_up = torch.bmm(x, self.gate_up_weight.transpose(1, 2).index_select(0, ids))[:, 0]
        if self.has_bias:
            gate_up = gate_up + self.gate_up_bias.index_select(0, ids)
        hidden = activate(self.activation, gate_up)[:, None]
        out = torch.bmm(hidden, self.down_weight.transpose(1, 2).index_select(0, ids))[:, 0]
        if self.has_bias:
            out = out + self.down_bias.index_select(0, ids)
        weights = w_TK.float().masked_fill(ids_TK < 0, 0.0)
        outputs = out.view(tokens, top_k, -1).float()
        residual_TD += torch.bmm(weights[:, None], outputs)[:, 0]

    def _add_one_(self, residual_1D: Tensor, x_1D: Tensor, ids_1K: Tensor, w_1K: Tensor) -> None:
        for expert_id, weight in zip(ids_1K[0].tolist(), w_1K[0].tolist(), strict=True):
            if 0 <= expert_id < self.num_experts:
                gate_up = torch.mm(x_1D, self._gate_up_t[expert_id])
                if self.has_bias:
                    gate_up += self.gate_up_bias[expert_id]
                hidden = activate(self.activation, gate_up)
                residual_1D.addmm_(hidden, self._down_t[expert_id], alpha=weight)
                if self.has_bias:
                    residual_1D.add_(self.down_bias[expert_id], alpha=weight)
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
            if self.has_bias:
                gate_up[a:b] += self.gate_up_bias[expert_id]
        hidden = activate(self.activation, gate_up)
        for expert_id, a, b in chosen:
            torch.mm(hidden[a:b], self._down_t[expert_id], out=x[a:b])
            if self.has_bias:
                x[a:b] += self.down_bias[expert_id]
        if ends[0]:
            x[: ends[0]] = 0
        outputs = torch.empty_like(x)
        outputs[order] = x
        outputs = outputs.view(tokens, top_k, -1)
        # A native router gives float32 weights whatever the model's dtype is, so the sum is
        # computed in float32 as well.
        for residual, w, part in zip(
            *(t.split(TOKENS_PER_SUM) for t in (residual_TD, w_TK.float(), outputs)), strict=True
        ):
            residual += torch.bmm(w[:, None], part.float())[:, 0]

    def _refuse_id(self, expert_id: int) -> None:
        raise ShapeError(
            "kernels.run_experts",
            f"expert id {expert_id} of {self.num_experts} experts: pass -1 for one elsewhere",
        )

"""Routed experts without a gate: two matrices each, in any weight format.

On the host an expert runs over all tokens that chose it. A row's result does not depend on other
rows, and a token adds its experts in the order of their ids. On another device, for few tokens, the
chosen experts' weights are gathered, so that no tensor's value is read by the host.

Shapes: T tokens, D hidden, F intermediate of one expert, E experts, K experts per token.
"""

import torch
from torch import Tensor

from tandem.core.errors import ShapeError
from tandem.core.model.layers import ExpertsSpec
from tandem.kernels.activation import apply_function
from tandem.kernels.interfaces import Matrix, WeightReader
from tandem.kernels.operators.experts import MAX_GATHERED_BYTES, RoutedExperts
from tandem.kernels.operators.operator import allocate_scratch, freeze
from tandem.kernels.weights.matrix import (
    TENSORS,
    MatrixSettings,
    TensorMatrix,
    make_matrix,
    read_matrix,
)

__all__ = ["UngatedExperts"]


class UngatedExperts(RoutedExperts):
    """Experts of the form ``down(f(up(x)))``, each scaled by its router weight.

    Args:
        spec: sizes and activation of the experts.
        settings: how their matrices are stored and run.
    """

    def __init__(self, spec: ExpertsSpec, settings: MatrixSettings = TENSORS) -> None:
        super().__init__(spec)
        assert not spec.is_gated and not spec.has_bias, "gated experts have a bank of their own"
        self.settings = settings

    def load(self, reader: WeightReader, name: str) -> None:
        """Read either checkpoint layout: the up projections of all experts in one tensor and the
        down projections in another, or both tensors for each expert.
        """
        size, hidden = self.intermediate_size, self.hidden_size
        shapes = (("up_proj", size, hidden), ("down_proj", hidden, size))
        self._matrices: list[tuple[Matrix, ...]] = []
        self._stacked: list[Tensor] = []
        if not reader.execution.is_host and self.settings.weight_format is None:
            self._load_stacked(reader, name, shapes)
            return
        stacked: list[Tensor] = []
        if reader.has(f"{name}.up_proj"):
            for part, rows, columns in shapes:
                whole = allocate_scratch(self.num_experts, rows, columns, dtype=reader.dtype)
                reader.read_into(f"{name}.{part}", whole)
                stacked.append(whole)
        for i in range(self.num_experts):
            if stacked:
                pair = [
                    make_matrix(
                        self, f"{part}_{i}_", self.settings, self._own(whole[i], reader), None
                    )
                    for (part, _, _), whole in zip(shapes, stacked, strict=True)
                ]
            else:
                pair = [
                    read_matrix(
                        self,
                        f"{part}_{i}_",
                        reader,
                        self.settings,
                        [(f"{name}.{i}.{part}", rows)],
                        columns,
                    )
                    for part, rows, columns in shapes
                ]
            self._matrices.append(tuple(pair))

    def _load_stacked(
        self, reader: WeightReader, name: str, shapes: tuple[tuple[str, int, int], ...]
    ) -> None:
        """Read the up projections of all experts into one device tensor, likewise down; matrices
        are views.
        """
        is_one = reader.has(f"{name}.up_proj")
        for part, rows, columns in shapes:
            shape = (self.num_experts, rows, columns)
            whole = torch.empty(shape, dtype=reader.dtype, device=reader.device)
            if is_one:
                reader.read_into(f"{name}.{part}", whole)
            for i in range(0 if is_one else self.num_experts):
                reader.read_into(f"{name}.{i}.{part}.weight", whole[i])
            self._stacked.append(freeze(whole))
        self._matrices = [
            tuple(TensorMatrix(freeze(weight)) for weight in pair)
            for pair in zip(*self._stacked, strict=True)
        ]

    def _own(self, weight: Tensor, reader: WeightReader) -> Tensor:
        """Return the weight itself if it will be packed, else a copy on the model's device."""
        if self.settings.weight_format is not None:
            return weight
        return weight.to(reader.device, copy=True)

    def add_into_(self, residual_TD: Tensor, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> None:
        """Add the experts' weighted sum to the residual stream.

        Raises: ShapeError (shapes do not fit together, or an id is outside of [-1, E)).
        """
        if ids_TK.shape != w_TK.shape or len(ids_TK) != len(x_TD):
            raise ShapeError(
                "kernels.run_experts",
                f"ids {tuple(ids_TK.shape)}, weights {tuple(w_TK.shape)}, {len(x_TD)} tokens: "
                "give [tokens, top_k] of both",
            )
        expert_bytes = 2 * self.hidden_size * self.intermediate_size * x_TD.itemsize
        if self._stacked and ids_TK.numel() * expert_bytes <= MAX_GATHERED_BYTES:
            self._add_gathered_(residual_TD, x_TD, ids_TK, w_TK)
            return
        total = torch.zeros(residual_TD.shape, dtype=torch.float32, device=residual_TD.device)
        chosen: list[int] = ids_TK.unique().tolist()
        if chosen and not -1 <= chosen[0] <= chosen[-1] < self.num_experts:
            what = f"expert ids {chosen[0]} to {chosen[-1]} of {self.num_experts} experts"
            raise ShapeError("kernels.run_experts", f"{what}: pass -1 for one elsewhere")
        inner = x_TD.dtype if self.settings.weight_format is None else torch.float32
        if len(x_TD) == 1 and len(chosen) == ids_TK.shape[1]:
            # A single token needs no rows picked by expert, which would take longer than the
            # products of small experts.
            x = x_TD.contiguous()
            shares = dict(zip(ids_TK[0].tolist(), w_TK[0].tolist(), strict=True))
            for expert_id in chosen:
                if expert_id >= 0:
                    out = self._run_expert(expert_id, x, inner)
                    total += out.mul_(shares[expert_id])
            residual_TD += total
            return
        for expert_id in chosen:
            if expert_id < 0:
                continue
            is_chosen = ids_TK == expert_id
            rows = is_chosen.any(-1).nonzero()[:, 0]
            weights = (w_TK.float() * is_chosen).sum(-1)[rows]
            out = self._run_expert(expert_id, x_TD[rows].contiguous(), inner)
            total.index_add_(0, rows, out * weights[:, None])
        residual_TD += total

    def _run_expert(self, expert_id: int, x_RD: Tensor, inner: torch.dtype) -> Tensor:
        """Return one expert's outputs in float32, new; ``inner`` is the dtype of its up product."""
        up, down = self._matrices[expert_id]
        hidden = apply_function(self.activation.name, up.forward(x_RD, dtype=inner))
        return down.forward(hidden, dtype=torch.float32)

    def _add_gathered_(
        self, residual_TD: Tensor, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor
    ) -> None:
        """Gather the chosen experts' weights and multiply; reads no values, so it can be
        captured.
        """
        ids = ids_TK.flatten().clamp_min(0)
        up, down = (part.transpose(1, 2) for part in self._stacked)
        x = x_TD.repeat_interleave(ids_TK.shape[1], 0)[:, None]
        raised = torch.bmm(x, up.index_select(0, ids))
        hidden = apply_function(self.activation.name, raised)
        out = torch.bmm(hidden, down.index_select(0, ids)).view(*ids_TK.shape, -1).float()
        weights = w_TK.float().masked_fill(ids_TK < 0, 0.0)
        residual_TD += torch.bmm(weights[:, None], out)[:, 0]

"""Routed experts with LoRA in torch's autograd graph: packed weights are frozen, factors train.

The graph has one node per layer. The native core multiplies with the frozen weights; torch
multiplies with the factors of rank r, one expert at a time, in float32. The factors' outputs for
gate and up enter the native forward pass before the activation, and their gradients for the
intermediate enter the native backward pass, so nothing is computed twice.

Shapes: T tokens, K experts per token, P (token, expert) pairs sorted by expert, E experts, D
hidden, F intermediate size of one expert, R rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.core.model.layers import Activation
from tandem.kernels.activation import activate
from tandem.kernels.cpu.autograd import FrozenExperts, as_floats

__all__ = ["ExpertFactors", "run_adapted_experts"]


@dataclass(frozen=True, slots=True)
class ExpertFactors:
    """LoRA of all experts of a layer: each matrix W becomes ``W + scale * B A``, float32."""

    gate_up_a: Tensor
    """Matrices A of gate and up, [E, R, D]."""
    gate_up_b: Tensor
    """Matrices B of gate and up, [E, 2 F, R]; gate's outputs come first."""
    down_a: Tensor
    """Matrices A of down, [E, R, F]."""
    down_b: Tensor
    """Matrices B of down, [E, D, R]."""
    scale: float


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The pairs of a token and an expert that it chose, sorted by expert as the kernels need
    them.
    """

    slots: Tensor
    """Index of each pair in the flattened [T, K] choices, [P]."""
    tokens: Tensor
    counts: list[int]
    """Number of pairs of each expert."""

    def split(self) -> Iterator[tuple[int, slice]]:
        """Yield each expert that some token chose, with the slice of its (token, expert) pairs."""
        first = 0
        for expert, count in enumerate(self.counts):
            if count:
                yield expert, slice(first, first + count)
            first += count


def _list_pairs(ids_TK: Tensor, num_experts: int) -> _Pairs:
    flat = ids_TK.flatten().long()
    here = (flat >= 0).nonzero().flatten()
    slots = here[torch.argsort(flat[here], stable=True)]
    counts = torch.bincount(flat[here], minlength=num_experts).tolist()
    return _Pairs(slots, slots // ids_TK.shape[1], counts)


class _AdaptedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        experts: FrozenExperts,
        activation: Activation,
        scale: float,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        *factors: Tensor,
    ) -> Tensor:
        up_a, up_b, down_a, down_b = factors
        ids, weights = ids_TK.contiguous(), weights_TK.float().contiguous()
        pairs, inner = _list_pairs(ids, experts.num_experts), experts.intermediate_size
        num_pairs, columns = len(pairs.slots), experts.inner_columns
        delta = torch.zeros(num_pairs, 2, columns)
        wide = x_TD.float()
        for e, rows in pairs.split():
            added = wide[pairs.tokens[rows]] @ up_a[e].t() @ up_b[e].t()
            delta[rows, :, :inner] = added.mul_(scale).view(-1, 2, inner)
        kept = torch.empty(num_pairs, 2 * columns, dtype=experts.inner_dtype)
        out = experts.forward(
            as_floats(x_TD), ids, weights, delta_PC=delta.view(num_pairs, -1), kept_PC=kept
        )
        del delta
        w = weights.flatten()[pairs.slots, None] * scale
        for e, rows in pairs.split():
            h = _activate(kept[rows], activation, inner)
            out.index_add_(0, pairs.tokens[rows], (h @ down_a[e].t() @ down_b[e].t()) * w[rows])
        ctx.experts, ctx.activation, ctx.scale, ctx.pairs = experts, activation, scale, pairs
        ctx.save_for_backward(x_TD, ids, weights_TK, kept, *factors)
        return out.to(x_TD.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        x_TD, ids, weights_TK, kept, up_a, up_b, down_a, down_b = ctx.saved_tensors
        experts, pairs, scale = ctx.experts, ctx.pairs, ctx.scale
        inner, columns, num_pairs = experts.intermediate_size, experts.inner_columns, len(kept)
        weights, d_out = weights_TK.float().contiguous(), grads[0].float()
        w = weights.flatten()[pairs.slots, None]
        d_factors = [torch.zeros_like(factor) for factor in (up_a, up_b, down_a, down_b)]
        extra = torch.zeros(num_pairs, columns)
        added_weight = torch.zeros(num_pairs)
        for e, rows in pairs.split():
            h = _activate(kept[rows], ctx.activation, inner)
            d_y = d_out[pairs.tokens[rows]]
            low, d_low = h @ down_a[e].t(), d_y @ down_b[e] * scale
            added_weight[rows] = (low * d_low).sum(1)
            d_low *= w[rows]
            extra[rows, :inner] = d_low @ down_a[e]
            d_factors[2][e] = d_low.t() @ h
            d_factors[3][e] = (d_y * (w[rows] * scale)).t() @ low
        d_gate_up = torch.empty(num_pairs, 2 * columns, dtype=experts.inner_dtype)
        d_x, d_weights = experts.backward(
            None,
            ids,
            weights,
            as_floats(grads[0]),
            kept_PC=kept,
            extra_PF=extra,
            d_gate_up_PC=d_gate_up,
        )
        d_weights.view(-1)[pairs.slots] += added_weight
        wide = x_TD.float()
        for e, rows in pairs.split():
            d_inner = d_gate_up[rows].view(-1, 2, columns)[..., :inner].flatten(1).float()
            x = wide[pairs.tokens[rows]]
            d_low = d_inner @ up_b[e] * scale
            d_factors[0][e] = d_low.t() @ x
            d_factors[1][e] = d_inner.t() @ (x @ up_a[e].t()) * scale
            d_x.index_add_(0, pairs.tokens[rows], d_low @ up_a[e])
        return (
            None,
            None,
            None,
            d_x.to(x_TD.dtype),
            None,
            d_weights.to(weights_TK.dtype),
            *d_factors,
        )


def _activate(kept: Tensor, activation: Activation, inner: int) -> Tensor:
    gate_up = kept.view(len(kept), 2, -1)[..., :inner].flatten(1).float()
    return activate(activation, gate_up)


def run_adapted_experts(
    experts: FrozenExperts,
    activation: Activation,
    factors: ExpertFactors,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
) -> Tensor:
    """Run a layer's routed experts with LoRA; return the weighted sum [T, D] in the dtype of
    ``x_TD``.

    Differentiable in x, the weights and the factors. For the backward pass gate and up are kept: 2
    F items of ``experts.inner_dtype`` for each pair.

    Args:
        experts: the packed weights, which are frozen.
        activation: the experts' activation function.
        factors: the LoRA factors that are added to the experts' weights.
        x_TD: hidden states of any floating dtype.
        ids_TK: expert ids as in ``PackedExperts.forward``.
        weights_TK: router weights of any floating dtype.

    Raises: the errors of ``PackedExperts.forward`` and ``PackedExperts.backward``.
    """
    tensors = (factors.gate_up_a, factors.gate_up_b, factors.down_a, factors.down_b)
    with torch.autocast("cpu", enabled=False):
        out = _AdaptedExperts.apply(
            experts, activation, factors.scale, x_TD, ids_TK, weights_TK, *tensors
        )
    assert isinstance(out, Tensor), type(out)
    return out

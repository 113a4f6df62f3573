"""Frozen packed weights as nodes of torch's autograd graph, with native forward and backward
passes.

Weights get no gradient. A layer's routed experts are one node of the graph, and so is a matrix. For
the backward pass, experts either keep gate and up (in bf16, or float32 if the weights are f32), or
keep only their input and compute gate and up again; both give bitwise the same gradients.

Shapes: T tokens or rows, K experts per token, D hidden, N outputs.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["FrozenExperts", "FrozenMatrix", "as_floats", "multiply_frozen", "run_experts"]


class FrozenExperts(Protocol):
    """Forward and backward products of a layer's routed experts; ``PackedExperts``
    implements them.
    """

    @property
    def num_experts(self) -> int:
        """Number of experts, E."""
        ...

    @property
    def intermediate_size(self) -> int:
        """Intermediate size of one expert, F."""
        ...

    @property
    def inner_columns(self) -> int:
        """Columns that gate and up each take, padded to whole blocks: F or a little more."""
        ...

    @property
    def inner_dtype(self) -> torch.dtype:
        """Dtype of gate, up and their gradients when the backward pass computes them."""
        ...

    def forward(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        delta_PC: Tensor | None = None,
        kept_PC: Tensor | None = None,
    ) -> Tensor:
        """Sum the chosen experts' outputs, each scaled by its router weight."""
        ...

    def backward(
        self,
        x_TD: Tensor | None,
        ids_TK: Tensor,
        weights_TK: Tensor,
        d_out_TD: Tensor,
        *,
        kept_PC: Tensor | None = None,
        delta_PC: Tensor | None = None,
        extra_PF: Tensor | None = None,
        d_gate_up_PC: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients with respect to the input ``x_TD`` and the router weights
        ``weights_TK``.
        """
        ...


class FrozenMatrix(Protocol):
    """Forward and backward products of a matrix; ``PackedLinear`` implements them."""

    def forward(self, x_TK: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Return ``x W^T + b``, of ``dtype``."""
        ...

    def backward(self, d_out_TN: Tensor) -> Tensor:
        """Return the gradient with respect to ``x``."""
        ...


def as_floats(x: Tensor) -> Tensor:
    """Convert a tensor for the kernels: contiguous, and float32 unless it is bfloat16."""
    return (x if x.dtype == torch.bfloat16 else x.float()).contiguous()


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        experts: FrozenExperts,
        is_kept: bool,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
    ) -> Tensor:
        ctx.experts, ctx.x_dtype = experts, x_TD.dtype
        ids, kept = ids_TK.contiguous(), None
        if is_kept:
            num_pairs = int(torch.count_nonzero(ids >= 0))
            kept = torch.empty(num_pairs, 2 * experts.inner_columns, dtype=experts.inner_dtype)
        ctx.save_for_backward(None if is_kept else x_TD, ids, weights_TK, kept)
        weights = weights_TK.float().contiguous()
        return experts.forward(as_floats(x_TD), ids, weights, kept_PC=kept).to(x_TD.dtype)

    # once_differentiable renames the parameter ctx, so pyright sees an incompatible override.
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[None, None, Tensor, None, Tensor]:
        x_TD, ids, weights_TK, kept = ctx.saved_tensors
        d_x, d_weights = ctx.experts.backward(
            None if x_TD is None else as_floats(x_TD),
            ids,
            weights_TK.float().contiguous(),
            as_floats(grads[0]),
            kept_PC=kept,
        )
        return None, None, d_x.to(ctx.x_dtype), None, d_weights.to(weights_TK.dtype)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: FrozenMatrix, x_TK: Tensor) -> Tensor:
        ctx.matrix = matrix
        ctx.x_dtype = x_TK.dtype
        x = as_floats(x_TK)
        return matrix.forward(x, dtype=x.dtype).to(x_TK.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[None, Tensor]:
        (d_out,) = grads
        rows = as_floats(d_out.reshape(-1, d_out.shape[-1]))
        d_x = ctx.matrix.backward(rows).view(*d_out.shape[:-1], -1)
        return None, d_x.to(ctx.x_dtype)


def run_experts(
    experts: FrozenExperts,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    is_kept: bool = True,
) -> Tensor:
    """Run routed experts; return the weighted sum [T, D], differentiable in x and router weights.

    The result has the dtype of ``x_TD``.

    Args:
        experts: the packed weights, which are frozen.
        x_TD: hidden states of any floating dtype.
        ids_TK: expert ids as in ``PackedExperts.forward``.
        weights_TK: router weights of any floating dtype.
        is_kept: True to keep gate and up for the backward pass, 2 F items of
            ``experts.inner_dtype`` for each token and expert; False to compute them again.

    Raises: the errors of ``PackedExperts.forward``; in the backward pass those of
        ``PackedExperts.backward``.
    """
    out = _Experts.apply(experts, is_kept, x_TD, ids_TK, weights_TK)
    assert isinstance(out, Tensor), type(out)
    return out


def multiply_frozen(matrix: FrozenMatrix, x_TK: Tensor) -> Tensor:
    """Return ``x W^T + b`` [..., N] in the dtype of ``x_TK``, differentiable in x; W is frozen.

    Raises: the errors of ``PackedLinear.forward``.
    """
    out = _Multiply.apply(matrix, x_TK)
    assert isinstance(out, Tensor), type(out)
    return out

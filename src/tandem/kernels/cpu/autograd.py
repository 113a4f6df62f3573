"""Frozen packed weights in torch's graph: their forward and backward passes are native.

The weights take no gradient. What stands in the graph is one node for a layer's routed experts and
one for a matrix. Nothing but the inputs is kept for the backward pass, which computes the rest
again, so that checkpointing of activations gains and costs nothing here.

Shapes: T tokens or rows, K experts per token, D hidden, N outputs.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tandem.kernels.cpu.experts import PackedExperts
    from tandem.kernels.cpu.linear import PackedLinear

__all__ = ["multiply_frozen", "run_experts"]


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, experts: "PackedExperts", x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        ctx.experts = experts
        ctx.save_for_backward(x_TD, ids_TK, weights_TK)
        x = x_TD if x_TD.dtype == torch.bfloat16 else x_TD.float()
        out = experts.forward(x.contiguous(), ids_TK.contiguous(), weights_TK.float().contiguous())
        return out.to(x_TD.dtype)

    # The decorator hides the name of ctx.
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[None, Tensor, None, Tensor]:
        x_TD, ids_TK, weights_TK = ctx.saved_tensors
        d_x, d_weights = ctx.experts.backward(
            x_TD.float().contiguous(),
            ids_TK.contiguous(),
            weights_TK.float().contiguous(),
            grads[0].float().contiguous(),
        )
        return None, d_x.to(x_TD.dtype), None, d_weights.to(weights_TK.dtype)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: "PackedLinear", x_TK: Tensor) -> Tensor:
        ctx.matrix = matrix
        ctx.x_dtype = x_TK.dtype
        x = x_TK if x_TK.dtype == torch.bfloat16 else x_TK.float()
        return matrix.forward(x.contiguous(), dtype=x.dtype).to(x_TK.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[None, Tensor]:
        (d_out,) = grads
        rows = d_out.reshape(-1, d_out.shape[-1]).float().contiguous()
        d_x = ctx.matrix.backward(rows).view(*d_out.shape[:-1], -1)
        return None, d_x.to(ctx.x_dtype)


def run_experts(
    experts: "PackedExperts", x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Return the weighted sum [T, D] in the dtype of ``x_TD``, differentiable in x and weights.

    Raises: as ``PackedExperts.forward``; in the backward pass as ``PackedExperts.backward``.
    """
    out = _Experts.apply(experts, x_TD, ids_TK, weights_TK)
    assert isinstance(out, Tensor), type(out)
    return out


def multiply_frozen(matrix: "PackedLinear", x_TK: Tensor) -> Tensor:
    """Return ``x W^T + b`` [..., N] in the dtype of ``x_TK``, differentiable in x.

    Raises: as ``PackedLinear.forward``.
    """
    out = _Multiply.apply(matrix, x_TK)
    assert isinstance(out, Tensor), type(out)
    return out

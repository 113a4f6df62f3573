"""The gated delta rule's recurrence as a node of torch's autograd graph, with native passes.

One node computes a layer's recurrence over a sequence. It keeps its inputs and the initial state;
the backward pass computes the intermediate states again. Convolution, gates and norms around it are
torch operators. The gradient of the last state is ignored, since no gradient flows from one call to
the next.

Shapes: T tokens, G key heads, V value heads; v and k sizes of value and key heads; P panels of a
state.
"""

from typing import Any

import torch
from torch import Tensor

from tandem import _native
from tandem.kernels.native import view_tensor

__all__ = ["NativeScan"]


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        pool: _native.ThreadPool | None,
        q_TGk: Tensor,
        k_TGk: Tensor,
        v_TVv: Tensor,
        decay: Tensor,
        beta_TV: Tensor,
        state_VPkc: Tensor,
    ) -> tuple[Tensor, Tensor]:
        parts = [part.contiguous() for part in (q_TGk, k_TGk, v_TVv, decay, beta_TV)]
        last = state_VPkc.clone(memory_format=torch.contiguous_format)
        out = torch.empty_like(parts[2])
        ctx.pool = pool
        ctx.save_for_backward(*parts, last.clone())
        q, k, v, shares, beta = map(view_tensor, parts)
        _native.scan_delta(q, k, v, shares, beta, view_tensor(last), view_tensor(out), pool)
        ctx.mark_non_differentiable(last)
        return out, last

    # once_differentiable renames the parameter ctx, so pyright sees an incompatible override.
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        _, k_TGk, v_TVv, decay, beta_TV, _ = saved
        d_q, d_k = (k_TGk.new_empty(*v_TVv.shape[:2], k_TGk.shape[2]) for _ in range(2))
        d_v, d_decay, d_beta = map(torch.empty_like, (v_TVv, decay, beta_TV))
        q, k, v, shares, beta, state = map(view_tensor, saved)
        _native.scan_delta_backward(
            q,
            k,
            v,
            shares,
            beta,
            state,
            view_tensor(grads[0].contiguous()),
            view_tensor(d_q),
            view_tensor(d_k),
            view_tensor(d_v),
            view_tensor(d_decay),
            view_tensor(d_beta),
            ctx.pool,
        )
        # Several value heads share a key head, so the gradient of the key head is the sum of
        # theirs.
        d_q, d_k = (d.unflatten(1, (k_TGk.shape[1], -1)).sum(2) for d in (d_q, d_k))
        return None, d_q, d_k, d_v, d_decay, d_beta, None


class NativeScan:
    """The native recurrence as a ``Scan`` of ``kernels.torch.gated_delta``; threads share the
    heads.
    """

    def __init__(self, pool: _native.ThreadPool | None) -> None:
        self._pool = pool

    def __call__(
        self,
        q_TGk: Tensor,
        k_TGk: Tensor,
        v_TVv: Tensor,
        decay: Tensor,
        beta_TV: Tensor,
        state_VPkc: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Run the recurrence; return each token's output [T, V, v] and the last state, both new."""
        out, last = _Scan.apply(self._pool, q_TGk, k_TGk, v_TVv, decay, beta_TV, state_VPkc)
        return out, last

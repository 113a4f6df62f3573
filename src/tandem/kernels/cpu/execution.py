"""Implementations of the operators on the CPU, in the native core."""

from collections.abc import Callable

import torch
from torch import Tensor

from tandem import _native
from tandem.core.model.layers import RoutingRule
from tandem.kernels.cpu.delta_scan import NativeScan
from tandem.kernels.cpu.step import CpuStep
from tandem.kernels.gated_delta import GatedDeltaRows, GatedDeltaRule, StateSlots
from tandem.kernels.interfaces import Angles, Step
from tandem.kernels.native import NATIVE_DTYPES, Buffer, is_native, view_tensor
from tandem.kernels.paged import PagedBatch, PagedKvCache
from tandem.kernels.routing import StepRouting
from tandem.kernels.states import StateCache
from tandem.kernels.torch.execution import TorchExecution
from tandem.kernels.torch.gated_delta import run_gated_delta

__all__ = ["CpuExecution"]


class CpuExecution(TorchExecution):
    """Native operators on the CPU, with torch's as a fallback.

    Torch runs tensors that need a gradient or have another dtype than the weights, and steps whose
    KV is float16.

    Args:
        pool: threads that share a step's work, kept; None: the caller's thread.
    """

    is_native = True
    is_host = True

    def __init__(self, pool: _native.ThreadPool | None = None) -> None:
        self._pool = pool

    def begin_step(
        self,
        batch: PagedBatch,
        cache: PagedKvCache,
        ropes: tuple[Angles, ...],
        dtype: torch.dtype,
        on_layer: Callable[[int], None] | None = None,
        states: StateCache | None = None,
        routing: StepRouting | None = None,
    ) -> Step:
        """Return a native step, or torch's if the cache or the dtype is not native."""
        if not cache.is_native or dtype not in NATIVE_DTYPES:
            return super().begin_step(batch, cache, ropes, dtype, on_layer, states, routing)
        return CpuStep(batch, cache, ropes, dtype, self._pool, on_layer, states, routing)

    def norm(self, x_TD: Tensor, weight_D: Buffer, eps: float, offset: float = 0.0) -> Tensor:
        """Apply an RMS norm with the native kernel, or torch's if the dtypes differ."""
        weight = weight_D.tensor
        if not is_native(x_TD) or x_TD.dtype != weight.dtype:
            return super().norm(x_TD, weight_D, eps, offset)
        rows = x_TD.reshape(-1, len(weight))
        out = torch.empty_like(rows)
        _native.rms_norm(
            view_tensor(rows), weight_D.view, view_tensor(out), eps, weight_offset=offset
        )
        return out.view(x_TD.shape)

    def gated_delta(self, rule: GatedDeltaRule, rows: GatedDeltaRows, slots: StateSlots) -> Tensor:
        """Run the gated delta rule natively; with gradients, in torch around the native
        recurrence.
        """
        parts = (rows.x_TC, rows.z_TVv, rows.a_TVd, rows.b_TV)
        if not all(map(is_native, parts)):
            return run_gated_delta(rule, rows, slots, NativeScan(self._pool))
        out = torch.empty(rows.z_TVv.shape, dtype=rows.z_TVv.dtype)
        rule.native.run(
            view_tensor(rows.x_TC),
            view_tensor(rows.z_TVv),
            view_tensor(rows.a_TVd),
            view_tensor(rows.b_TV),
            view_tensor(out),
            slots.states.view,
            slots.carried.view,
            rows.query_start,
            rows.slot_ids,
            self._pool,
        )
        return out

    def soft_cap_(self, x_TV: Tensor, cap: float) -> None:
        """Apply the soft cap ``cap * tanh(x / cap)`` in place."""
        _native.soft_cap(view_tensor(x_TV.view(-1, x_TV.shape[-1])), cap)

    def route(
        self, logits_TE: Tensor, top_k: int, rule: RoutingRule, bias_E: Buffer | None = None
    ) -> tuple[Tensor, Tensor]:
        """Choose each token's experts natively; logits that need a gradient go through torch."""
        if not is_native(logits_TE):
            return super().route(logits_TE, top_k, rule, bias_E)
        weights = logits_TE.new_empty(len(logits_TE), top_k)
        ids = torch.empty(weights.shape, dtype=torch.int64)
        _native.route(
            view_tensor(logits_TE),
            view_tensor(weights),
            view_tensor(ids),
            rule.native_scoring,
            None if bias_E is None else bias_E.view,
            rule.num_groups,
            rule.num_top_groups,
            rule.weight_scale,
            num_group_choices=rule.num_group_choices,
        )
        return weights, ids

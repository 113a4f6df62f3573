"""Implementations of the operators in torch, on any device."""

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.core.model.layers import RoutingRule
from tandem.kernels.gated_delta import GatedDeltaRows, GatedDeltaRule, StateSlots
from tandem.kernels.interfaces import Angles, Step
from tandem.kernels.native import Buffer
from tandem.kernels.paged import PagedBatch, PagedKvCache
from tandem.kernels.routing import StepRouting
from tandem.kernels.states import StateCache
from tandem.kernels.torch.gated_delta import run_gated_delta
from tandem.kernels.torch.step import TorchStep

__all__ = ["TorchExecution"]


class TorchExecution:
    """Operators in torch, on any device.

    Args:
        is_host: True if the device's memory is the host's.
    """

    is_native = False

    def __init__(self, *, is_host: bool = True) -> None:
        self.is_host = is_host

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
        """Return a step that runs in torch, with its attention planned."""
        return TorchStep(batch, cache, ropes, dtype, on_layer, states, routing)

    def norm(self, x_TD: Tensor, weight_D: Buffer, eps: float, offset: float = 0.0) -> Tensor:
        """Apply an RMS norm with weight ``offset + weight``."""
        weight = weight_D.tensor
        if offset:
            normed = torch.rms_norm(x_TD.float(), weight.shape, offset + weight.float(), eps)
            return normed.to(x_TD.dtype)
        return torch.rms_norm(x_TD, weight.shape, weight, eps)

    def gated_delta(self, rule: GatedDeltaRule, rows: GatedDeltaRows, slots: StateSlots) -> Tensor:
        """Run the gated delta rule over a step's rows in torch; update their state slots."""
        return run_gated_delta(rule, rows, slots)

    def soft_cap_(self, x_TV: Tensor, cap: float) -> None:
        """Apply the soft cap ``cap * tanh(x / cap)`` in place."""
        x_TV.div_(cap).tanh_().mul_(cap)

    def route(
        self, logits_TE: Tensor, top_k: int, rule: RoutingRule, bias_E: Buffer | None = None
    ) -> tuple[Tensor, Tensor]:
        """Choose the ``top_k`` experts of each token; return their weights and ids."""
        is_softmax = rule.scoring == "softmax"
        logits = logits_TE.float()
        scores = torch.softmax(logits, -1) if is_softmax else torch.sigmoid(logits)
        # For a softmax, experts are ranked by logits: the exponential may round different logits to
        # equal scores.
        choices = logits if is_softmax else scores
        if bias_E is not None:
            choices = choices + bias_E.tensor
        if rule.num_groups > 1:
            grouped = choices.unflatten(-1, (rule.num_groups, -1))
            best = grouped.topk(min(rule.num_group_choices, grouped.shape[-1]), -1).values.sum(-1)
            kept = torch.zeros_like(best).scatter_(
                -1, best.topk(rule.num_top_groups, -1).indices, 1
            )
            choices = grouped.masked_fill(kept[..., None] == 0, float("-inf")).flatten(-2)
        ids = torch.topk(choices, top_k, dim=-1).indices
        if is_softmax and rule.is_normalised:
            # A softmax over all experts, renormalised over the K chosen, equals the softmax over
            # these K.
            weights = torch.softmax(logits.gather(-1, ids), -1)
        else:
            weights = scores.gather(-1, ids)
            if rule.is_normalised:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return (weights * rule.weight_scale).to(logits_TE.dtype), ids

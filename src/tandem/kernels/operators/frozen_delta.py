"""A gated delta rule of transformers that trains: its recurrence and gradient are native.

Projections stay the module's own, so that adapters wrap them; convolution, gates and norms run in
torch's graph. The module becomes one of a class between ours and its own, with all it had: its
names, its weights, and its own forward pass, which takes the steps that continue from a cache.

Shapes: B rows, T tokens, D hidden, C channels, V value heads.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tandem.core.model.layers import GatedDeltaSpec
from tandem.kernels.gated_delta import GatedDeltaRows, StateSlots
from tandem.kernels.operators.gated_delta import list_rows, make_rule
from tandem.kernels.torch.gated_delta import Scan, run_gated_delta

__all__ = ["FrozenGatedDelta", "freeze_mixer"]

CONTINUED = ("cache", "cache_params", "cu_seq_lens_q", "seq_idx")
"""Arguments with which rows are no whole sequences: of a cache, and of several in one row."""


class FrozenGatedDelta(nn.Module):
    """The forward pass over whole sequences; see ``freeze_mixer``."""

    spec: GatedDeltaSpec
    scan: Scan

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return [B, T, D], new; tokens that the mask [B, T] leaves out are taken for zeros."""
        if args or any(kwargs.get(name) is not None for name in CONTINUED):
            return super().forward(hidden_states, *args, attention_mask=attention_mask, **kwargs)
        x_BTD = hidden_states
        if attention_mask is not None:
            x_BTD = (x_BTD * attention_mask[:, :, None]).to(x_BTD.dtype)
        mixed = self._mix(x_BTD)
        return getattr(self, self.spec.out_name)(mixed)

    def _mix(self, x_BTD: Tensor) -> Tensor:
        """Run what is between the projections, in float32 also where products are rounded."""
        spec, (num_rows, num_tokens) = self.spec, x_BTD.shape[:2]
        qkvz, ba = (
            torch.cat([getattr(self, name)(x_BTD) for name in names], -1).flatten(0, 1)
            for names in (spec.qkvz_names, spec.ba_names)
        )
        orders = list_rows(spec)
        if orders[0] is not None and orders[1] is not None:
            qkvz, ba = qkvz[:, orders[0]], ba[:, orders[1]]
        x_TC, z_TVv = qkvz.split([spec.num_channels, spec.all_values], -1)
        b_TV, a_TV = ba.chunk(2, -1)
        ends = range(0, num_rows * num_tokens + 1, num_tokens)
        rows = GatedDeltaRows(x_TC, z_TVv, a_TV, b_TV, ends, range(num_rows))
        with torch.autocast(x_BTD.device.type, enabled=False):
            parts: tuple[Any, ...] = (self.conv1d, self.A_log, self.dt_bias)
            conv, a_log, dt_bias = parts
            rule = make_rule(
                spec, conv.weight, a_log, dt_bias, getattr(self, spec.norm_name).weight
            )
            slots = StateSlots.allocate(rule, num_rows, x_TC.dtype)
            mixed = run_gated_delta(rule, rows, slots, self.scan)
        return mixed.unflatten(0, (num_rows, num_tokens))


def freeze_mixer(module: Any, spec: GatedDeltaSpec, scan: Scan) -> Any:
    """Return a mixer of transformers with the forward pass of ``FrozenGatedDelta``.

    Args:
        module: has what ``spec`` names; not used afterwards, the result has its parts.
        spec: of the rule that it computes.
        scan: runs the recurrence, differentiable.
    """
    kind = type(module)
    frozen: Any = type(f"Frozen{kind.__name__}", (FrozenGatedDelta, kind), {})
    made = frozen.__new__(frozen)
    made.__dict__ = module.__dict__
    made.spec, made.scan = spec, scan
    return made

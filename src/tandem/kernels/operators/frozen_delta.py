"""Trainable mixers with transformers' gated delta rules, with native recurrence and gradient.

Projections remain the module's own, so that adapters can wrap them; convolution, gates and norms
are torch operators. The module becomes an instance of a subclass of this module's class and its
original class. It keeps its names, weights and original forward pass, which runs steps that
continue from a cache.

Shapes: B rows, T tokens, D hidden, C channels, V value heads.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tandem.core.model.layers import GatedDeltaSpec, KimiDeltaSpec
from tandem.kernels.gated_delta import GatedDeltaRows, GatedDeltaRule, StateSlots
from tandem.kernels.operators.gated_delta import list_rows, make_rule
from tandem.kernels.state_space.kimi_delta import make_kimi_delta_rule, project_kimi_delta
from tandem.kernels.torch.gated_delta import Scan, run_gated_delta

__all__ = ["FrozenGatedDelta", "FrozenKimiDelta", "freeze_mixer"]

CONTINUED = ("cache", "cache_params", "cu_seq_lens_q", "seq_idx")
"""Arguments whose presence means that the rows of a call are not whole sequences, because of a
cache or several sequences packed in one row.
"""


class FrozenDelta(nn.Module):
    """transformers' mixer with a gated delta rule (a recurrence over tokens), given a native
    forward pass over whole sequences that adapters can be trained through.
    """

    scan: Scan

    @property
    @abstractmethod
    def output(self) -> nn.Module:
        """The mixer's output projection, a module that adapters may have wrapped."""

    @abstractmethod
    def project(self, x_TD: Tensor, ends: Sequence[int], slots: Sequence[int]) -> GatedDeltaRows:
        """Apply the input projections to all tokens; return their results, which the recurrence
        takes.
        """

    @abstractmethod
    def make_rule(self) -> GatedDeltaRule:
        """Return the gated delta rule (the recurrence's weights and sizes) of the module's
        weights.
        """

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Run over whole sequences; return [B, T, D], new. Masked tokens [B, T] count as zeros.

        A call that continues from a cache, or has several sequences in a row, runs transformers'
        own forward pass.
        """
        if args or any(kwargs.get(name) is not None for name in CONTINUED):
            return super().forward(hidden_states, *args, attention_mask=attention_mask, **kwargs)
        x_BTD = hidden_states
        if attention_mask is not None:
            x_BTD = (x_BTD * attention_mask[:, :, None]).to(x_BTD.dtype)
        return self.output(self._mix(x_BTD))

    def _mix(self, x_BTD: Tensor) -> Tensor:
        """Run convolution, gates and recurrence, between the input and output projections; in
        float32 even under autocast.
        """
        num_rows, num_tokens = x_BTD.shape[:2]
        ends = range(0, num_rows * num_tokens + 1, num_tokens)
        rows = self.project(x_BTD.flatten(0, 1), ends, range(num_rows))
        with torch.autocast(x_BTD.device.type, enabled=False):
            rule = self.make_rule()
            slots = StateSlots.allocate(rule, num_rows, rows.x_TC.dtype)
            mixed = run_gated_delta(rule, rows, slots, self.scan)
        return mixed.unflatten(0, (num_rows, num_tokens))


class FrozenGatedDelta(FrozenDelta):
    """transformers' mixer with a gated delta rule, whose forward pass can be trained with
    adapters.
    """

    spec: GatedDeltaSpec

    @property
    def output(self) -> nn.Module:
        """The mixer's output projection, a module that adapters may have wrapped."""
        return getattr(self, self.spec.out_name)

    def project(self, x_TD: Tensor, ends: Sequence[int], slots: Sequence[int]) -> GatedDeltaRows:
        """Apply the q, k, v, z, b and a projections to all tokens; return the results, which the
        recurrence takes.
        """
        spec = self.spec
        qkvz, ba = (
            torch.cat([getattr(self, name)(x_TD) for name in names], -1)
            for names in (spec.qkvz_names, spec.ba_names)
        )
        orders = list_rows(spec)
        if orders[0] is not None and orders[1] is not None:
            qkvz, ba = qkvz[:, orders[0]], ba[:, orders[1]]
        x_TC, z_TVv = qkvz.split([spec.num_channels, spec.all_values], -1)
        b_TV, a_TV = ba.chunk(2, -1)
        return GatedDeltaRows(x_TC, z_TVv, a_TV, b_TV, ends, slots)

    def make_rule(self) -> GatedDeltaRule:
        """Return the gated delta rule (the recurrence's weights and sizes) of the module's
        weights.
        """
        parts: tuple[Any, ...] = (self.conv1d, self.A_log, self.dt_bias)
        conv, a_log, dt_bias = parts
        norm = getattr(self, self.spec.norm_name).weight
        return make_rule(self.spec, conv.weight, a_log, dt_bias, norm)


class FrozenKimiDelta(FrozenDelta):
    """transformers' mixer with Kimi delta attention, whose forward pass can be trained with
    adapters.
    """

    spec: KimiDeltaSpec

    @property
    def output(self) -> nn.Module:
        """The mixer's output projection, a module that adapters may have wrapped."""
        return self.get_submodule("o_proj")

    def project(self, x_TD: Tensor, ends: Sequence[int], slots: Sequence[int]) -> GatedDeltaRows:
        """Apply the input projections to all tokens; return their results, which the recurrence
        takes.
        """
        return project_kimi_delta(self, x_TD, ends, slots)

    def make_rule(self) -> GatedDeltaRule:
        """Return the Kimi delta rule (the recurrence's weights and sizes) of the module's
        weights.
        """
        parts: tuple[Any, ...] = (self.conv1d, self.forget_gate, self.o_norm)
        conv, gate, norm = parts
        return make_kimi_delta_rule(self.spec, conv.weight, gate.A_log, gate.dt_bias, norm.weight)


def freeze_mixer(module: Any, spec: GatedDeltaSpec | KimiDeltaSpec, scan: Scan) -> Any:
    """Return a transformers mixer with the trainable forward pass of ``FrozenDelta``.

    Args:
        module: module with the parts that ``spec`` names; the result takes over its parts, so do
            not use it afterwards.
        spec: sizes and names of the module's rule.
        scan: differentiable recurrence.
    """
    kind = type(module)
    own = FrozenKimiDelta if isinstance(spec, KimiDeltaSpec) else FrozenGatedDelta
    frozen: Any = type(f"Frozen{kind.__name__}", (own, kind), {})
    made = frozen.__new__(frozen)
    made.__dict__ = module.__dict__
    made.spec, made.scan = spec, scan
    return made

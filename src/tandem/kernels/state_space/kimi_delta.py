"""Kimi delta attention with its projections: a gated delta rule with one decay per key item.

Shapes: T tokens, D hidden, H heads, d items of a head's query, key and value.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.core.model.mixers import KimiDeltaSpec
from tandem.kernels.gated_delta import GatedDeltaRows, GatedDeltaRule, StateSlots
from tandem.kernels.interfaces import AdaptedPart, MatrixWrapper, WeightReader
from tandem.kernels.native import Buffer
from tandem.kernels.operators.lora import AdaptedRows
from tandem.kernels.state_space.mixers import NativeRows, StateSpace
from tandem.kernels.state_space.rules import StateRows
from tandem.kernels.torch.gated_delta import run_gated_delta
from tandem.kernels.weights.matrix import TENSORS, MatrixSettings, read_matrix

__all__ = ["KimiDelta", "make_kimi_delta_rule", "project_kimi_delta"]

QKV_NAMES = ("q_proj", "k_proj", "v_proj")
DECAY_NAMES = ("forget_gate.f_a_proj", "forget_gate.f_b_proj")
"""Checkpoint names of the two projections that give the decays."""
GATE_NAMES = ("g_a_proj", "g_b_proj")
"""Checkpoint names of the two projections that give the output's gate."""


class KimiDelta(StateSpace):
    """A gated delta rule over the tokens of sequences, with a decay for each key item.

    The projections to decays and betas, which control the state, are separate matrices in a format
    without loss.

    Args:
        spec: sizes of the layer.
        state_idx: index of the layer among those with a state.
        settings: how the other projections are stored and run.
        decay_settings: how the projections to decays and betas are stored and run.
    """

    def __init__(
        self,
        spec: KimiDeltaSpec,
        *,
        state_idx: int,
        settings: MatrixSettings = TENSORS,
        decay_settings: MatrixSettings = TENSORS,
    ) -> None:
        super().__init__(state_idx=state_idx, settings=settings)
        self.spec = spec
        self.decay_settings = decay_settings

    def load(self, reader: WeightReader, name: str) -> None:
        """Read the projections, and in float32 the convolution's, the decays' and the norm's
        weights.
        """
        spec, values, hidden = self.spec, self.spec.num_values, self.spec.hidden_size
        qkv = [(part, values) for part in QKV_NAMES]
        first_decay, last_decay = DECAY_NAMES
        first_gate, last_gate = GATE_NAMES
        betas = [("b_proj", spec.num_heads), (first_decay, spec.decay_waist)]
        (
            self.in_matrix,
            self.gate_matrix,
            self.beta_matrix,
            self.decay_matrix,
            self.output_matrix,
        ) = (
            read_matrix(
                self,
                prefix,
                reader,
                settings,
                [(f"{name}.{part}", rows) for part, rows in parts],
                in_features,
            )
            for prefix, settings, parts, in_features in (
                ("in_", self.settings, [*qkv, (first_gate, spec.gate_waist)], hidden),
                ("gate_", self.settings, [(last_gate, values)], spec.gate_waist),
                ("beta_", self.decay_settings, betas, hidden),
                ("decay_", self.decay_settings, [(last_decay, values)], spec.decay_waist),
                ("out_", self.settings, [("o_proj", hidden)], values),
            )
        )
        self.rule = make_kimi_delta_rule(
            spec,
            *(
                self._read_vector(reader, f"{name}.{part}", *shape)
                for part, shape in (
                    ("conv1d.weight", (spec.num_channels, 1, spec.conv_width)),
                    ("forget_gate.A_log", (1, 1, spec.num_heads, 1)),
                    ("forget_gate.dt_bias", (values,)),
                    ("o_norm.weight", (spec.head_dim,)),
                )
            ),
        )

    def adapt(self, wrapper: MatrixWrapper, name: str) -> dict[str, AdaptedPart]:
        """Make the projections take LoRA adapters; return them by checkpoint name."""
        spec, values, hidden = self.spec, self.spec.num_values, self.spec.hidden_size
        self.in_matrix = first = wrapper.wrap_matrix(self.in_matrix)
        self.gate_matrix = gate = wrapper.wrap_matrix(self.gate_matrix)
        self.beta_matrix = betas = wrapper.wrap_matrix(self.beta_matrix)
        self.decay_matrix = decays = wrapper.wrap_matrix(self.decay_matrix)
        self.output_matrix = last = wrapper.wrap_matrix(self.output_matrix)
        parts = {
            part: AdaptedRows(first, hidden, values, i * values) for i, part in enumerate(QKV_NAMES)
        }
        parts |= {
            GATE_NAMES[0]: AdaptedRows(first, hidden, spec.gate_waist, 3 * values),
            GATE_NAMES[1]: AdaptedRows(gate, spec.gate_waist, values),
            "b_proj": AdaptedRows(betas, hidden, spec.num_heads),
            DECAY_NAMES[0]: AdaptedRows(betas, hidden, spec.decay_waist, spec.num_heads),
            DECAY_NAMES[1]: AdaptedRows(decays, spec.decay_waist, values),
            "o_proj": AdaptedRows(last, values, hidden),
        }
        return {f"{name}.{part}": rows for part, rows in parts.items()}

    def mix_native(self, h_TD: Buffer, native: NativeRows, slots: StateSlots) -> Buffer:
        """Project natively and run the rule; return the output projection's input, a step's
        buffer.
        """
        spec, values, rows = self.spec, self.spec.num_values, native.rows
        end = spec.num_channels + spec.gate_waist
        projected = native.make("kimi_in", end, None)
        dtype = self.beta_matrix.out_dtype
        betas = native.make("kimi_betas", spec.num_heads + spec.decay_waist, dtype)
        decays = native.make("kimi_decays", values, dtype)
        gate, mixed = (native.make(name, values, None) for name in ("kimi_gate", "state_mixed"))
        self.in_matrix.run(h_TD, projected)
        self.beta_matrix.run(h_TD, betas)
        waist = native.make("kimi_gate_waist", spec.gate_waist, None)
        waist.tensor.copy_(native.cut(projected, spec.num_channels, end).tensor)
        self.gate_matrix.run(waist, gate)
        waist = native.make("kimi_decay_waist", spec.decay_waist, dtype)
        waist.tensor.copy_(betas.tensor[:, spec.num_heads :])
        self.decay_matrix.run(waist, decays)
        self.rule.native.run(
            native.cut(projected, 0, spec.num_channels).view,
            gate.view,
            decays.view,
            native.cut(betas, 0, spec.num_heads).view,
            mixed.view,
            slots.states.view,
            slots.carried.view,
            rows.query_start,
            rows.slot_ids,
            native.pool,
        )
        return mixed

    def mix_torch(self, h_TD: Tensor, rows: StateRows, slots: StateSlots) -> Tensor:
        """Project and run the rule in torch; return the output projection's input, new."""
        spec, dtype = self.spec, h_TD.dtype
        projected = self.in_matrix.forward(h_TD, dtype=dtype)
        x_TC, waist = projected.split([spec.num_channels, spec.gate_waist], -1)
        gate = self.gate_matrix.forward(waist.contiguous(), dtype=dtype)
        betas = self.beta_matrix.forward(h_TD, dtype=self.beta_matrix.out_dtype or dtype)
        b_TH, waist = betas.split([spec.num_heads, spec.decay_waist], -1)
        decays = self.decay_matrix.forward(waist.contiguous(), dtype=betas.dtype)
        delta_rows = GatedDeltaRows(
            x_TC, gate, decays, b_TH, rows.query_start, rows.slot_ids, rows.slots_T
        )
        return run_gated_delta(self.rule, delta_rows, slots)


def make_kimi_delta_rule(
    spec: KimiDeltaSpec, conv_C1W: Tensor, a_log_H: Tensor, dt_bias_Hd: Tensor, norm_d: Tensor
) -> GatedDeltaRule:
    """Return a layer's Kimi delta rule (the recurrence's weights and sizes), made of the
    checkpoint's tensors.
    """
    return GatedDeltaRule(
        conv_C1W[:, 0].T,
        a_log_H.float().flatten().exp(),
        dt_bias_Hd,
        norm_d,
        num_k_heads=spec.num_heads,
        key_dim=spec.head_dim,
        norm_eps=spec.norm_eps,
        gate="sigmoid",
    )


def project_kimi_delta(
    module: Any, x_TD: Tensor, query_start: Sequence[int], slot_ids: Sequence[int]
) -> GatedDeltaRows:
    """Apply the input projections of a transformers module; return the rows for the rule.

    Args:
        module: module with the linear modules that ``KimiDelta.load`` reads.
        x_TD: hidden states.
        query_start: first row of each sequence, and the number of rows.
        slot_ids: state slot of each sequence.
    """
    gate = module.forget_gate
    qkv = torch.cat([getattr(module, name)(x_TD) for name in QKV_NAMES], -1)
    z = module.g_b_proj(module.g_a_proj(x_TD))
    decays = gate.f_b_proj(gate.f_a_proj(x_TD))
    return GatedDeltaRows(qkv, z, decays, module.b_proj(x_TD), query_start, slot_ids)

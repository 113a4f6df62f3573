"""The gated delta rule in torch, on any device, differentiable in its rows.

Shapes: T rows, W convolution width, C channels, G key heads, V value heads; v and k sizes of value
and key heads; d decays of a head, P panels of a state.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from tandem.kernels.gated_delta import GatedDeltaRows, GatedDeltaRule, StateSlots

__all__ = ["Scan", "run_gated_delta", "scan_tokens"]

LENGTH_EPS = 1e-6
"""Epsilon under the root when queries and keys are scaled to unit length; the model families'
value.
"""

Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Recurrence over a sequence's tokens, with the signature of ``scan_tokens``."""


def run_gated_delta(
    rule: GatedDeltaRule, rows: GatedDeltaRows, slots: StateSlots, scan: Scan | None = None
) -> Tensor:
    """Return the layer's outputs [T, V * v], new, in the dtype of ``rows.x_TC``; update the state
    slots.

    Gradients flow to the rows, not into the slots. ``scan`` defaults to ``scan_tokens``. With
    ``rows.slots_T`` all rows are computed at once, without a gradient.
    """
    if rows.slots_T is not None:
        return _run_decodes(rule, rows, slots, rows.slots_T)
    outs = [rows.z_TVv[:0]]
    for i, slot in enumerate(rows.slot_ids):
        part = slice(rows.query_start[i], rows.query_start[i + 1])
        if part.stop > part.start:
            outs.append(_run_sequence(rule, rows, slots, part, slot, scan or scan_tokens))
    return torch.cat(outs)


def _run_sequence(
    rule: GatedDeltaRule,
    rows: GatedDeltaRows,
    slots: StateSlots,
    part: slice,
    slot: int,
    scan: Scan,
) -> Tensor:
    x_TC = rows.x_TC[part]
    carried = slots.carried.tensor[slot]
    seen = torch.cat([carried, x_TC])
    mixed_CT = F.conv1d(seen.float().T, rule.conv_WC.T[:, None], groups=rule.num_channels)
    given = _prepare(rule, mixed_CT.T, rows.a_TVd[part], rows.b_TV[part])
    state = slots.states.tensor[slot]
    out_TVv, last = scan(*given, state)
    with torch.no_grad():
        state.copy_(last)
        carried.copy_(seen[len(x_TC) :])
    return _gate(rule, out_TVv, rows.z_TVv[part]).to(x_TC.dtype)


def _run_decodes(
    rule: GatedDeltaRule, rows: GatedDeltaRows, slots: StateSlots, slots_T: Tensor
) -> Tensor:
    """Run one token of each sequence, by operators that a graph can hold."""
    seen_TWC = torch.cat((slots.carried.tensor.index_select(0, slots_T), rows.x_TC[:, None]), 1)
    mixed_TC = (seen_TWC.float() * rule.conv_WC).sum(1)
    q_TGk, k_TGk, v_TVv, decay, beta_TV = _prepare(rule, mixed_TC, rows.a_TVd, rows.b_TV)
    group = rule.num_v_heads // rule.num_k_heads
    q_TVk1, k_TVk1 = (heads.repeat_interleave(group, 1)[..., None] for heads in (q_TGk, k_TGk))
    state_TVPkc = slots.states.tensor.index_select(0, slots_T)
    state = state_TVPkc.transpose(2, 3).flatten(3)[..., : rule.value_dim]
    state = state * decay.reshape(*decay.shape[:2], -1, 1)
    update_TVv = beta_TV[..., None] * (v_TVv - (state * k_TVk1).sum(2))
    state = state + k_TVk1 * update_TVv[:, :, None]
    out_TVv = (state * q_TVk1).sum(2)
    panels, columns = rule.state_shape[1], rule.state_shape[3]
    whole = F.pad(state, (0, panels * columns - rule.value_dim))
    whole = whole.unflatten(-1, (panels, -1)).transpose(2, 3)
    slots.states.tensor.index_copy_(0, slots_T, whole)
    slots.carried.tensor.index_copy_(0, slots_T, seen_TWC[:, 1:])
    return _gate(rule, out_TVv, rows.z_TVv).to(rows.x_TC.dtype)


def _prepare(
    rule: GatedDeltaRule, mixed_TC: Tensor, a_TVd: Tensor, b_TV: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys, values, decays and betas of the convolution's outputs."""
    keys = rule.num_k_heads * rule.key_dim
    parts = F.silu(mixed_TC).split([keys, keys, rule.num_v_heads * rule.value_dim], -1)
    q_TGk, k_TGk = (
        _scale_to_length(heads.unflatten(-1, (rule.num_k_heads, -1))) for heads in parts[:2]
    )
    v_TVv = parts[2].unflatten(-1, (rule.num_v_heads, -1))
    rise = F.softplus(a_TVd.float() + rule.decay_bias_Vd)
    rate = rule.decay_rate_V
    if rule.decays_by_item:
        rise, rate = rise.unflatten(-1, (rule.num_v_heads, -1)), rate[:, None]
    beta_TV = torch.sigmoid(b_TV.float()) * rule.beta_scale
    return q_TGk * rule.key_dim**-0.5, k_TGk, v_TVv, torch.exp(-rate * rise), beta_TV


def _gate(rule: GatedDeltaRule, out_TVv: Tensor, z_TVv: Tensor) -> Tensor:
    """Return the normed and gated outputs, float32 [T, V * v]."""
    normed = torch.rms_norm(out_TVv, rule.norm_v.shape, rule.norm_v, rule.norm_eps)
    z = z_TVv.float().unflatten(-1, (rule.num_v_heads, -1))
    gate = F.silu(z) if rule.gate == "silu" else torch.sigmoid(z)
    return (normed * gate).flatten(1)


def _scale_to_length(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + LENGTH_EPS)


def scan_tokens(
    q_TGk: Tensor,
    k_TGk: Tensor,
    v_TVv: Tensor,
    decay: Tensor,
    beta_TV: Tensor,
    state_VPkc: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence token by token; return outputs [T, V, v] and the last state, both new.

    Args:
        q_TGk: queries, normed and scaled.
        k_TGk: keys, normed.
        v_TVv: values.
        decay: factor by which the state decays, [T, V], or [T, V, k] for each of its rows.
        beta_TV: strength of the state's update.
        state_VPkc: initial state in panels of value columns; not modified.
    """
    group, size = v_TVv.shape[1] // k_TGk.shape[1], v_TVv.shape[2]
    q_TVk, k_TVk = (heads.repeat_interleave(group, 1) for heads in (q_TGk, k_TGk))
    state_Vkv = state_VPkc.transpose(1, 2).flatten(2)[..., :size]
    outs: list[Tensor] = []
    rows_TVd1 = decay.reshape(*decay.shape[:2], -1, 1)
    for q, k, v, share, beta in zip(q_TVk, k_TVk, v_TVv, rows_TVd1, beta_TV, strict=True):
        state_Vkv = state_Vkv * share
        seen = (state_Vkv * k[:, :, None]).sum(1)
        update = beta[:, None] * (v - seen)
        state_Vkv = state_Vkv + k[:, :, None] * update[:, None]
        outs.append((state_Vkv * q[:, :, None]).sum(1))
    panels = state_VPkc.shape[1]
    whole = F.pad(state_Vkv, (0, panels * state_VPkc.shape[3] - size))
    return torch.stack(outs), whole.unflatten(-1, (panels, -1)).transpose(1, 2)

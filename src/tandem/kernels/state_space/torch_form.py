"""State spaces in torch, on any device.

Shapes: T rows, W convolution width, C channels, H heads, P items of a head, N items of B and C.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from tandem.kernels.gated_delta import StateSlots
from tandem.kernels.state_space.rules import Mamba2Rule, ShortConvRule, StateRows

__all__ = ["run_mamba2", "run_short_conv"]


def run_short_conv(
    rule: ShortConvRule, x_T3C: Tensor, rows: StateRows, slots: StateSlots
) -> Tensor:
    """Return [T, C], new, in the dtype of ``x_T3C`` (its rows are B, C, x); update the slots."""
    if rows.slots_T is not None:
        b, c, x = x_T3C.chunk(3, -1)
        mixed = _convolve_decodes(slots, rows.slots_T, b * x, rule.conv_WC, rule.bias_C)
        return (c.float() * mixed).to(x.dtype)
    outs = [x_T3C[:0, : x_T3C.shape[1] // 3]]
    for part, slot in _list_parts(rows):
        b, c, x = x_T3C[part].chunk(3, -1)
        seen = torch.cat([slots.carried.tensor[slot], b * x])
        mixed = _convolve(seen, rule.conv_WC, rule.bias_C)
        slots.carried.tensor[slot] = seen[len(x) :]
        outs.append((c.float() * mixed).to(x.dtype))
    return torch.cat(outs)


def run_mamba2(
    rule: Mamba2Rule,
    x_TC: Tensor,
    z_THP: Tensor,
    dt_TH: Tensor,
    rows: StateRows,
    slots: StateSlots,
) -> Tensor:
    """Return the layer's normed outputs [T, H * P], new, in the dtype of ``x_TC``; update the
    slots.

    Args:
        rule: the weights.
        x_TC: input of the convolution.
        z_THP: gate, [T, H * P].
        dt_TH: time steps before their bias.
        rows: sequences of the rows.
        slots: states of the sequences.
    """
    if rows.slots_T is not None:
        mixed = _convolve_decodes(slots, rows.slots_T, x_TC, rule.conv_WC, rule.conv_bias_C)
        y = _step_decodes(rule, F.silu(mixed), dt_TH.float(), slots, rows.slots_T)
        return _gate(rule, y, z_THP).to(x_TC.dtype)
    outs = [z_THP[:0]]
    for part, slot in _list_parts(rows):
        seen = torch.cat([slots.carried.tensor[slot], x_TC[part]])
        mixed = F.silu(_convolve(seen, rule.conv_WC, rule.conv_bias_C))
        slots.carried.tensor[slot] = seen[len(seen) - len(rule.conv_WC) + 1 :]
        y = _scan(rule, mixed, dt_TH[part].float(), slots.states.tensor[slot])
        outs.append(_gate(rule, y, z_THP[part]).to(x_TC.dtype))
    return torch.cat(outs)


def _gate(rule: Mamba2Rule, y_THP: Tensor, z_THP: Tensor) -> Tensor:
    """Return the gated and normed outputs, float32 [T, H * P]."""
    gated = y_THP * F.silu(z_THP.float())
    grouped = gated.unflatten(-1, (rule.num_groups, -1))
    normed = torch.rms_norm(grouped, grouped.shape[-1:], None, rule.norm_eps).flatten(1)
    return normed * rule.norm_HP


def _list_parts(rows: StateRows) -> Iterator[tuple[slice, int]]:
    for i, slot in enumerate(rows.slot_ids):
        part = slice(rows.query_start[i], rows.query_start[i + 1])
        if part.stop > part.start:
            yield part, slot


def _convolve(seen: Tensor, conv_WC: Tensor, bias_C: Tensor | None) -> Tensor:
    weight = conv_WC.T[:, None]
    return F.conv1d(seen.float().T[None], weight, bias_C, groups=len(weight))[0].T


def _convolve_decodes(
    slots: StateSlots, slots_T: Tensor, x_TC: Tensor, conv_WC: Tensor, bias_C: Tensor | None
) -> Tensor:
    """Return the convolution of each sequence's next token, float32 [T, C]; update the slots."""
    seen_TWC = torch.cat((slots.carried.tensor.index_select(0, slots_T), x_TC[:, None]), 1)
    slots.carried.tensor.index_copy_(0, slots_T, seen_TWC[:, 1:])
    mixed_TC = (seen_TWC.float() * conv_WC).sum(1)
    return mixed_TC if bias_C is None else mixed_TC + bias_C


def _step_decodes(
    rule: Mamba2Rule, mixed_TC: Tensor, dt_TH: Tensor, slots: StateSlots, slots_T: Tensor
) -> Tensor:
    """Return ``_scan`` of one token of each sequence, by operators that a graph can hold."""
    x, b, c, dt = _prepare(rule, mixed_TC, dt_TH)
    decay = torch.exp(-rule.decay_rate_H * dt)
    state = slots.states.tensor.index_select(0, slots_T)
    panels, columns = state.shape[2], state.shape[4]
    state = state.transpose(2, 3).flatten(3)[..., : rule.head_dim]
    update = dt[..., None] * x
    state = state * decay[..., None, None] + b[..., None] * update[:, :, None]
    out_THP = (state * c[..., None]).sum(2) + rule.skip_H[:, None] * x
    whole = F.pad(state, (0, panels * columns - rule.head_dim))
    whole = whole.unflatten(-1, (panels, -1)).transpose(2, 3)
    slots.states.tensor.index_copy_(0, slots_T, whole)
    return out_THP.flatten(1)


def _prepare(
    rule: Mamba2Rule, mixed_TC: Tensor, dt_TH: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x [T, H, P], B and C [T, H, N], and time steps [T, H]."""
    groups, keys = rule.num_groups, rule.num_groups * rule.state_dim
    x, b, c = mixed_TC.split([rule.num_values, keys, keys], -1)
    b, c = (
        part.unflatten(-1, (groups, -1)).repeat_interleave(rule.num_heads // groups, 1)
        for part in (b, c)
    )
    low, high = rule.dt_limits
    dt = F.softplus(dt_TH + rule.dt_bias_H).clamp(low, high)
    return x.unflatten(-1, (rule.num_heads, rule.head_dim)), b, c, dt


def _scan(rule: Mamba2Rule, mixed_TC: Tensor, dt_TH: Tensor, state_HKNc: Tensor) -> Tensor:
    """Run the recurrence; return outputs with the skip connection, [T, H * P]; update the state."""
    size = rule.head_dim
    x, b, c, dt = _prepare(rule, mixed_TC, dt_TH)
    decay = torch.exp(-rule.decay_rate_H * dt)
    state = state_HKNc.transpose(1, 2).flatten(2)[..., :size]
    outs: list[Tensor] = []
    for t in range(len(x)):
        update = dt[t][:, None] * x[t]
        state = state * decay[t][:, None, None] + b[t][:, :, None] * update[:, None]
        outs.append((state * c[t][:, :, None]).sum(1) + rule.skip_H[:, None] * x[t])
    panels = state_HKNc.shape[1]
    whole = F.pad(state, (0, panels * state_HKNc.shape[3] - size))
    state_HKNc.copy_(whole.unflatten(-1, (panels, -1)).transpose(1, 2))
    return torch.stack(outs).flatten(1)

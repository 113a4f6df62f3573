"""Float64 NumPy oracles of state spaces, and bounds on a kernel's error.

Mamba2, arXiv:2405.21060, section 3, as in transformers' ``granitemoehybrid``; the short convolution
of LFM2, as in ``lfm2``.

Shapes: T tokens of one sequence, W convolution width, C channels, H heads, P items of a head, G
groups, N items of B and C.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tandem.kernels.oracles.reference import silu
from tandem.kernels.tolerance import ACCUMULATE_EPS, EXP_ULPS, SMALLEST, UNIT_ROUNDOFF

__all__ = ["Mamba2Weights", "mamba2", "mamba2_bound", "short_conv", "short_conv_bound"]

Array = npt.NDArray[np.float64]


def short_conv(x_T3C: Array, conv_WC: Array, bias_C: Array | None = None) -> Array:
    """Return C * conv(B * x) [T, C] of a whole sequence, whose rows are (B, C, x)."""
    b, c, x = np.split(x_T3C, 3, axis=-1)
    return c * _convolve(b * x, conv_WC, bias_C)


def short_conv_bound(
    x_T3C: Array, conv_WC: Array, dtype: torch.dtype, bias_C: Array | None = None
) -> Array:
    """Bound the error of ``short_conv``: products are rounded to the dtype, then summed."""
    b, c, x = np.split(x_T3C, 3, axis=-1)
    terms = len(conv_WC) + 2
    magnitude = _convolve(
        np.abs(b * x), np.abs(conv_WC), None if bias_C is None else np.abs(bias_C)
    )
    relative = UNIT_ROUNDOFF[dtype] + terms * ACCUMULATE_EPS
    y = np.abs(c * _convolve(b * x, conv_WC, bias_C))
    return np.abs(c) * magnitude * relative + UNIT_ROUNDOFF[dtype] * y + SMALLEST


def _convolve(x_TC: Array, conv_WC: Array, bias_C: Array | None) -> Array:
    width = len(conv_WC)
    padded = np.concatenate([np.zeros((width - 1, x_TC.shape[1])), x_TC])
    taps = (conv_WC[j] * padded[j : j + len(x_TC)] for j in range(width))
    return sum(taps, np.zeros_like(x_TC)) + (0.0 if bias_C is None else bias_C)


@dataclass(frozen=True)
class Mamba2Weights:
    """The weights of a Mamba2 layer in float64, as its exact reference takes them."""

    conv_WC: Array  # noqa: N815 - a shape suffix
    decay_rate_H: Array  # noqa: N815
    dt_bias_H: Array  # noqa: N815
    skip_H: Array  # noqa: N815
    norm_HP: Array  # noqa: N815
    num_groups: int
    state_dim: int
    norm_eps: float
    dt_limits: tuple[float, float]
    conv_bias_C: Array | None = None  # noqa: N815

    def split(self, mixed_TC: Array) -> tuple[Array, Array, Array]:
        """Split the channels into x [T, H, P], B and C [T, H, N]."""
        heads, keys = len(self.decay_rate_H), self.num_groups * self.state_dim
        values = mixed_TC.shape[-1] - 2 * keys
        x, b, c = np.split(mixed_TC, [values, values + keys], axis=-1)
        size, group = (len(x), self.num_groups, self.state_dim), heads // self.num_groups
        b, c = (part.reshape(size).repeat(group, axis=1) for part in (b, c))
        return x.reshape(len(x), heads, -1), b, c

    def find_steps(self, dt_TH: Array) -> Array:
        """Return the time steps dt [T, H]: softplus of the biased input, clamped to the limits."""
        return np.clip(np.logaddexp(0, dt_TH + self.dt_bias_H), *self.dt_limits)


def mamba2(x_TC: Array, z_THP: Array, dt_TH: Array, w: Mamba2Weights) -> tuple[Array, Array]:
    """Run Mamba2 over a whole sequence; return normed outputs [T, H * P] and last state [H,
    N, P].
    """
    x, b, c = w.split(silu(_convolve(x_TC, w.conv_WC, w.conv_bias_C)))
    dt = w.find_steps(dt_TH)
    decay = np.exp(-w.decay_rate_H * dt)
    state = np.zeros((*b.shape[1:], x.shape[-1]))
    out = np.zeros_like(x)
    for t in range(len(x)):
        update = dt[t][:, None] * x[t]
        state = state * decay[t][:, None, None] + b[t][:, :, None] * update[:, None]
        out[t] = np.einsum("hnp,hn->hp", state, c[t]) + w.skip_H[:, None] * x[t]
    gated = (out.reshape(z_THP.shape) * silu(z_THP)).reshape(len(x), w.num_groups, -1)
    normed = gated / np.sqrt((gated**2).mean(-1, keepdims=True) + w.norm_eps)
    return normed.reshape(z_THP.shape) * w.norm_HP, state


def mamba2_bound(
    x_TC: Array, z_THP: Array, dt_TH: Array, w: Mamba2Weights, dtype: torch.dtype
) -> tuple[Array, Array]:
    """Bound the error of ``mamba2`` to first order: of outputs [T, H * P] and state [H, N, P].

    Each element of the state depends on its predecessor only through its decay, so its error decays
    likewise, and each token adds its own rounding errors.
    """
    eps, widest = ACCUMULATE_EPS, EXP_ULPS + 4
    mixed = _convolve(x_TC, w.conv_WC, w.conv_bias_C)
    bias = None if w.conv_bias_C is None else np.abs(w.conv_bias_C)
    rounded = (len(w.conv_WC) + 2) * eps * _convolve(np.abs(x_TC), np.abs(w.conv_WC), bias)
    # The slope of SiLU is at most 1.1, so SiLU enlarges an input error by at most that factor.
    opened = silu(mixed)
    x, b, c = w.split(opened)
    x_error, b_error, c_error = w.split(1.1 * rounded + widest * eps * np.abs(opened) + SMALLEST)
    raw = dt_TH + w.dt_bias_H
    dt = w.find_steps(dt_TH)
    # The slopes of softplus and of the clamp are at most 1, so neither enlarges an input error.
    dt_error = eps * np.abs(raw) + 14 * eps * np.logaddexp(0, raw) + eps * dt
    decay = np.exp(-w.decay_rate_H * dt)
    log_error = w.decay_rate_H * (dt_error + 2 * eps * dt)
    # The exponent is capped at 80 against overflow: the decay times exp(80) exceeds any error that
    # the decay can have.
    decay_error = decay * (np.expm1(np.minimum(log_error, 80)) + EXP_ULPS * eps) + SMALLEST
    state, error = (np.zeros((*b.shape[1:], x.shape[-1])) for _ in range(2))
    out, out_error = np.zeros_like(x), np.zeros_like(x)
    terms = w.state_dim + 3
    for t in range(len(x)):
        update = dt[t][:, None] * x[t]
        update_error = (
            dt[t][:, None] * x_error[t] + dt_error[t][:, None] * np.abs(x[t]) + eps * np.abs(update)
        )
        d, added = decay[t][:, None, None], b[t][:, :, None] * update[:, None]
        error = (
            d * error
            + (decay_error[t][:, None, None] + 2 * eps * d) * np.abs(state)
            + b_error[t][:, :, None] * np.abs(update)[:, None]
            + np.abs(b[t])[:, :, None] * update_error[:, None]
            + 2 * eps * np.abs(added)
            + SMALLEST
        )
        state = state * d + added
        out[t] = np.einsum("hnp,hn->hp", state, c[t]) + w.skip_H[:, None] * x[t]
        magnitude = np.einsum("hnp,hn->hp", np.abs(state), np.abs(c[t]))
        skip = np.abs(w.skip_H)[:, None]
        out_error[t] = (
            np.einsum("hnp,hn->hp", error, np.abs(c[t]))
            + np.einsum("hnp,hn->hp", np.abs(state), c_error[t])
            + terms * eps * (magnitude + skip * np.abs(x[t]))
            + skip * x_error[t]
        )
    gate = silu(z_THP)
    shape = (len(x), w.num_groups, -1)
    gated = (out.reshape(z_THP.shape) * gate).reshape(shape)
    gated_error = out_error.reshape(z_THP.shape) * np.abs(gate)
    gated_error = gated_error.reshape(shape) + (widest + 1) * eps * np.abs(gated)
    inverse = 1 / np.sqrt((gated**2).mean(-1, keepdims=True) + w.norm_eps)
    inherited = (np.abs(gated) * gated_error).mean(-1, keepdims=True) * inverse**2
    relative = inherited + (gated.shape[-1] / 2 + 6) * eps
    weight = np.abs(w.norm_HP).reshape(1, w.num_groups, -1)
    y = np.abs(gated) * inverse * weight
    bound = gated_error * inverse * weight + relative * y + UNIT_ROUNDOFF[dtype] * y + SMALLEST
    return bound.reshape(z_THP.shape), error

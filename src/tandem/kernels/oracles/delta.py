"""Float64 NumPy oracle of the gated delta rule, and bounds on a kernel's error.

Gated DeltaNet, arXiv:2412.06464, equation 10, as in transformers' ``qwen3_next``; Kimi delta
attention, arXiv:2510.26692, equation 1, as in ``kimi_linear``, where each item of a key has a decay
of its own.

Shapes: T tokens of one sequence, W convolution width, C channels, G key heads, V value heads; v and
k sizes of value and key heads; d decays of a head: 1 or k.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tandem.kernels.oracles.reference import silu
from tandem.kernels.tolerance import ACCUMULATE_EPS, EXP_ULPS, SMALLEST, UNIT_ROUNDOFF

__all__ = ["DeltaWeights", "gated_delta", "gated_delta_bound"]

Array = npt.NDArray[np.float64]

LENGTH_EPS = 1e-6


@dataclass(frozen=True)
class DeltaWeights:
    """The weights of a layer with a gated delta rule in float64, as its exact reference takes
    them.
    """

    conv_WC: Array  # noqa: N815 - a shape suffix
    decay_rate_V: Array  # noqa: N815
    decay_bias_Vd: Array  # noqa: N815
    norm_v: Array
    num_k_heads: int
    key_dim: int
    norm_eps: float
    beta_scale: float = 1.0
    gate: str = "silu"

    def split(self, mixed_TC: Array) -> tuple[Array, Array, Array]:
        """Split the channels into queries and keys [T, V, k] and values [T, V, v]."""
        heads, keys = len(self.decay_rate_V), self.num_k_heads * self.key_dim
        q, k, v = np.split(mixed_TC, [keys, 2 * keys], axis=-1)
        size = (len(mixed_TC), self.num_k_heads, self.key_dim)
        group = heads // self.num_k_heads
        q, k = (part.reshape(size).repeat(group, axis=1) for part in (q, k))
        return q, k, v.reshape(len(mixed_TC), heads, -1)

    def find_rises(self, a_TVd: Array) -> tuple[Array, Array]:
        """Return the inputs of softplus [T, V, d] and the decay rates [V, 1]."""
        heads = len(self.decay_rate_V)
        raw = a_TVd + self.decay_bias_Vd
        return raw.reshape(len(raw), heads, -1), self.decay_rate_V[:, None]


def gated_delta(
    x_TC: Array, z_TVv: Array, a_TVd: Array, b_TV: Array, w: DeltaWeights
) -> tuple[Array, Array]:
    """Run the rule over a whole sequence; return gated outputs [T, V * v] and last state
    [V, k, v].
    """
    q, k, v = w.split(silu(_convolve(x_TC, w.conv_WC)))
    q = q / np.sqrt((q**2).sum(-1, keepdims=True) + LENGTH_EPS) * w.key_dim**-0.5
    k = k / np.sqrt((k**2).sum(-1, keepdims=True) + LENGTH_EPS)
    raw, rate = w.find_rises(a_TVd)
    decay = np.exp(-rate * np.logaddexp(0, raw))
    beta = w.beta_scale * _sigmoid(b_TV)
    state = np.zeros((*k.shape[1:], v.shape[-1]))
    out = np.zeros_like(v)
    for t in range(len(x_TC)):
        state = state * decay[t][:, :, None]
        update = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * update[:, None]
        out[t] = np.einsum("hkv,hk->hv", state, q[t])
    normed = out / np.sqrt((out**2).mean(-1, keepdims=True) + w.norm_eps) * w.norm_v
    return normed.reshape(z_TVv.shape) * _open(z_TVv, w.gate), state


def gated_delta_bound(
    x_TC: Array, z_TVv: Array, a_TVd: Array, b_TV: Array, w: DeltaWeights, dtype: torch.dtype
) -> tuple[Array, Array]:
    """Bound the error of ``gated_delta`` to first order: of outputs [T, V * v] and state [V, k, v].

    A state's error is propagated by decay (I - beta k k^T), which lengthens no column while beta is
    at most 2. So a column's error is bounded in length, and each token adds its own rounding
    errors. Elementwise bounds would grow by a factor 1 + beta per token.
    """
    eps, widest = ACCUMULATE_EPS, EXP_ULPS + 4
    mixed = _convolve(x_TC, w.conv_WC)
    mixed_error = (len(w.conv_WC) + 1) * eps * _convolve(np.abs(x_TC), np.abs(w.conv_WC))
    # The slope of SiLU is at most 1.1, so SiLU enlarges an input error by at most that factor.
    opened = silu(mixed)
    q, k, v = w.split(opened)
    q_error, k_error, v_error = w.split(
        1.1 * mixed_error + widest * eps * np.abs(opened) + SMALLEST
    )
    q, q_error = _scale_to_length(q, q_error, w.key_dim**-0.5)
    k, k_error = _scale_to_length(k, k_error, 1.0)
    raw, rate = w.find_rises(a_TVd)
    rise = np.logaddexp(0, raw)
    log_error = rate * (eps * np.abs(raw) + 14 * eps * rise)
    decay = np.exp(-rate * rise)
    # The exponent is capped at 80 against overflow: the decay times exp(80) exceeds any error that
    # the decay can have.
    decay_error = decay * (np.expm1(np.minimum(log_error, 80)) + EXP_ULPS * eps) + SMALLEST
    beta = w.beta_scale * _sigmoid(b_TV)
    beta_error = widest * eps * beta + SMALLEST
    terms = w.key_dim + 3
    state = np.zeros((*k.shape[1:], v.shape[-1]))
    column_error = np.zeros(v.shape[1:])
    out, out_error = np.zeros_like(v), np.zeros_like(v)

    def sum_keys(state: Array, key: Array) -> Array:
        return np.einsum("hkv,hk->hv", state, key)

    for t in range(len(x_TC)):
        d, d_error, be = decay[t][:, :, None], decay_error[t][:, :, None], beta[t][:, None]
        old = np.abs(state)
        seen = sum_keys(d * state, k[t])
        rounded = terms * eps * sum_keys(d * old, np.abs(k[t]))
        gap = v[t] - seen
        update = be * gap
        update_error = be * (
            v_error[t]
            + sum_keys(d * old, k_error[t])
            + rounded
            + sum_keys(d_error * old, np.abs(k[t]))
            + 3 * eps * (np.abs(v[t]) + np.abs(seen))
        ) + beta_error[t][:, None] * np.abs(gap)
        state = d * state + k[t][:, :, None] * update[:, None]
        added = (
            (d_error + 3 * eps * d) * old
            + (k_error[t] + 3 * eps * np.abs(k[t]))[:, :, None] * np.abs(update)[:, None]
            + np.abs(k[t])[:, :, None] * update_error[:, None]
        )
        largest = decay[t].max(-1)[:, None]
        column_error = largest * column_error + np.sqrt((added**2).sum(1)) + SMALLEST
        out[t] = sum_keys(state, q[t])
        product = (np.abs(q[t]) * np.abs(k[t])).sum(-1)[:, None]
        out_error[t] = (
            np.sqrt((q[t] ** 2).sum(-1))[:, None] * column_error
            + sum_keys(np.abs(state), q_error[t])
            + terms * eps * (sum_keys(d * old, np.abs(q[t])) + product * np.abs(update))
        )
    inverse = 1 / np.sqrt((out**2).mean(-1, keepdims=True) + w.norm_eps)
    inherited = (np.abs(out) * out_error).mean(-1, keepdims=True) * inverse**2
    relative = inherited + (out.shape[-1] / 2 + 6) * eps
    normed = np.abs(out * inverse * w.norm_v)
    normed_error = out_error * inverse * np.abs(w.norm_v) + relative * normed
    gate = np.abs(_open(z_TVv, w.gate))
    y = normed.reshape(gate.shape) * gate
    bound = normed_error.reshape(gate.shape) * gate + (widest * eps + UNIT_ROUNDOFF[dtype]) * y
    return bound + SMALLEST, np.broadcast_to(column_error[:, None], state.shape)


def _convolve(x_TC: Array, w_WC: Array) -> Array:
    """Sum the products of each channel's last W inputs with W; zeros precede the first input."""
    width = len(w_WC)
    padded = np.concatenate([np.zeros((width - 1, x_TC.shape[1])), x_TC])
    return sum((padded[j : j + len(x_TC)] * w_WC[j] for j in range(width)), np.zeros_like(x_TC))


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(x / 2))


def _open(z: Array, gate: str) -> Array:
    return silu(z) if gate == "silu" else _sigmoid(z)


def _scale_to_length(x: Array, error: Array, scale: float) -> tuple[Array, Array]:
    """Return x / length * scale, and the bound on its error."""
    inverse = 1 / np.sqrt((x**2).sum(-1, keepdims=True) + LENGTH_EPS)
    relative = (np.abs(x) * error).sum(-1, keepdims=True) * inverse**2
    relative = relative + (x.shape[-1] / 2 + 6) * ACCUMULATE_EPS
    y = x * inverse * scale
    return y, error * inverse * scale + relative * np.abs(y)

"""Error bounds of operators against their float64 oracles: derived and elementwise.

The form is ``c * eps_acc * sum |a||b| + eps_out * |y|``: an accumulation error that grows with the
sum's terms, and the rounding of the result to its dtype. ``eps`` is the unit roundoff (half the
distance from 1 to the next number). ``c`` is the number of roundings on the longest path to a
result: K for a sum of K products in an unknown order (Higham, *Accuracy and Stability*, section
3.1), so it holds for any blocking, vector width and thread count. The error of one stage enters the
next multiplied by that stage's derivative.

All functions take the float64 inputs as the kernel got them (already rounded to its dtype), so the
error of storing a weight in a format is not included.
"""

import numpy as np
import numpy.typing as npt
import torch

from tandem.kernels.oracles import reference

__all__ = [
    "ACCUMULATE_EPS",
    "UNIT_ROUNDOFF",
    "attention",
    "choose_experts",
    "experts",
    "linear",
    "log_softmax",
    "logits",
    "mlp",
    "rms_norm",
    "rope",
    "share_of_mass",
]

Array = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Unit roundoff of the dtypes that results are rounded to."""

ACCUMULATE_EPS = 2.0**-24
"""Unit roundoff of sums, which are in float32 whatever the dtype of the operands."""

SMALLEST = 2.0**-126
"""Magnitude below which float32 results may be flushed to zero; each term of a sum may err
by this.
"""

EXP_ULPS = 4
"""Roundings of a vectorised exp or sigmoid: libraries promise one to three ulp."""


def linear(x_TD: Array, w_ND: Array, dtype: torch.dtype, x_error: Array | float = 0.0) -> Array:
    """Bound the error of ``x W^T``; ``x_error`` is the error of ``x_TD`` itself."""
    size = x_TD.shape[-1]
    magnitude = np.abs(x_TD) @ np.abs(w_ND).T
    inherited = (np.zeros_like(x_TD) + x_error) @ np.abs(w_ND).T
    y = np.abs(x_TD @ w_ND.T)
    bound = (size + 1) * ACCUMULATE_EPS * magnitude + UNIT_ROUNDOFF[dtype] * y + inherited
    return bound + size * SMALLEST


def rms_norm(y_TD: Array, dtype: torch.dtype) -> Array:
    """Bound the error of RMSNorm, relative to the result.

    The sum of squares has no cancellation, so its relative error is D eps_acc, which the root
    halves. Five more roundings follow. transformers rounds to the dtype before the weight is
    applied, our kernels after: one more rounding.
    """
    size = y_TD.shape[-1]
    relative = (size / 2 + 5) * ACCUMULATE_EPS + 2 * UNIT_ROUNDOFF[dtype]
    return relative * np.abs(y_TD) + SMALLEST


def rope(positions_T: Ids, factor: float, dtype: torch.dtype) -> Array:
    """Bound the error of cos and sin [T, 1]: that of their argument, as their slope is at most 1.

    Frequencies have a few roundings (power, division, interpolation: 8), the angle one more, so the
    error grows with the position, as in every float32 implementation.
    """
    angle_error = 9 * ACCUMULATE_EPS * np.abs(positions_T[:, None].astype(np.float64))
    return factor * (angle_error + EXP_ULPS * ACCUMULATE_EPS + UNIT_ROUNDOFF[dtype])


def attention(
    q_THd: Array,
    k_CKd: Array,
    v_CKd: Array,
    scale: float,
    dtype: torch.dtype,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks_H: Array | None = None,
) -> Array:
    """Bound the error of causal GQA; arguments as for ``reference.attention``.

    A score with error e changes its probability by a factor up to exp(2 e) (its own and the
    normaliser's error); scores may be rounded to the dtype before the softmax, and probabilities
    after it. If the context is attended in parts, they are merged with weights that have a few more
    roundings. A cap has slope at most 1, and its tanh an error of EXP_ULPS units of the cap.
    """
    num_tokens, heads, size = q_THd.shape
    context, kv_heads, value_size = v_CKd.shape
    eps = UNIT_ROUNDOFF[dtype]
    out = np.zeros((num_tokens, heads, value_size))
    for t in range(num_tokens):
        end = context - num_tokens + t + 1
        seen = slice(max(0, end - window) if window else 0, end)
        for h in range(heads):
            g = h // (heads // kv_heads)
            k, v = k_CKd[seen, g], v_CKd[seen, g]
            scores = k @ q_THd[t, h] * scale
            magnitude = np.abs(k) @ np.abs(q_THd[t, h]) * abs(scale)
            score_error = (size + 2) * ACCUMULATE_EPS * magnitude + 2 * eps * np.abs(scores)
            if soft_cap:
                scores = soft_cap * np.tanh(scores / soft_cap)
                score_error += (EXP_ULPS + 3) * ACCUMULATE_EPS * soft_cap
            sink = -np.inf if sinks_H is None else sinks_H[h]
            largest = max(scores.max(), sink)
            p = np.exp(scores - largest)
            p /= p.sum() + np.exp(sink - largest)
            relative = np.expm1(2 * score_error.max())
            relative += (EXP_ULPS + 2 * len(k)) * ACCUMULATE_EPS + 2 * eps
            out[t, h] = relative * (p @ np.abs(v)) + 2 * eps * np.abs(p @ v) + SMALLEST
    return out


def choose_experts(logits_TE: Array, weights_TP: Array, dtype: torch.dtype) -> Array:
    """Bound the error of a router's weights, given its logits: exponentials, their sum, one
    quotient.
    """
    relative = (2 * EXP_ULPS + logits_TE.shape[-1] + 3) * ACCUMULATE_EPS + UNIT_ROUNDOFF[dtype]
    return relative * np.abs(weights_TP) + SMALLEST


def mlp(x_TD: Array, gate_up: Array, down_DF: Array, dtype: torch.dtype) -> Array:
    """Bound the error of SwiGLU: errors of gate and up pass through SiLU (slope below 1.1) and the
    product.
    """
    eps = UNIT_ROUNDOFF[dtype]
    gate, up = np.split(x_TD @ gate_up.T, 2, axis=-1)
    gate_error, up_error = np.split(linear(x_TD, gate_up, dtype), 2, axis=-1)
    hidden = reference.silu(gate) * up
    hidden_error = (
        1.1 * gate_error * (np.abs(up) + up_error) + np.abs(reference.silu(gate)) * up_error
    )
    # SiLU's result is rounded to the dtype, and so is its product with the up projection.
    hidden_error += (EXP_ULPS * ACCUMULATE_EPS + 2 * eps) * np.abs(hidden)
    return linear(hidden, down_DF, dtype, hidden_error)


def experts(
    x_TD: Array, ids_TP: Ids, w_TP: Array, gate_up: Array, down: Array, dtype: torch.dtype
) -> Array:
    """Bound the error of a weighted sum of experts: each expert's own, scaled, and the sum's
    roundings.
    """
    eps = UNIT_ROUNDOFF[dtype]
    top_k = ids_TP.shape[1]
    bound = np.full_like(x_TD, SMALLEST)
    for t in range(len(x_TD)):
        for e, weight in zip(ids_TP[t], w_TP[t], strict=True):
            if e >= 0:
                x = x_TD[t : t + 1]
                y = np.abs(reference.mlp(x, gate_up[e], down[e])[0])
                own = mlp(x, gate_up[e], down[e], dtype)[0]
                # If the sum over experts is accumulated in the dtype, it is rounded once for each
                # expert.
                bound[t] += np.abs(weight) * (
                    own + ((top_k + 2) * ACCUMULATE_EPS + top_k * eps) * y
                )
    return bound


ROUNDINGS_PER_LAYER = 24
"""Roundings to the dtype that a layer adds to the residual stream: norm, projections, RoPE, scores,
probabilities, mix, output, sum; and as many in the feed-forward half.
"""

GEMMS_PER_LAYER = 7
"""Sums over K terms in sequence within a layer: q or k, scores, mix, output, gate or up, down,
router; each adds K float32 roundings, which matter if the dtype is float32 too.
"""

CONFIDENCE = 6
"""Standard deviations in the bound: with 10^6 logits compared, one in a thousand runs would exceed
5.7.
"""


def logits(h_TD: Array, head_VD: Array, num_layers: int, dtype: torch.dtype) -> Array:
    """Bound the error of a whole model's logits, probabilistically.

    n roundings add up as sqrt(n) (Higham and Mary 2019); worst-case bounds of a deep composition
    are useless. RMSNorm keeps the relative size of earlier errors, so a relative error in the
    normed hidden state ``h_TD`` reaches the vocabulary as independent errors of its elements: a sum
    of squares.
    """
    rounded = ROUNDINGS_PER_LAYER * UNIT_ROUNDOFF[dtype] ** 2
    summed = GEMMS_PER_LAYER * h_TD.shape[-1] * ACCUMULATE_EPS**2
    spread = np.sqrt(h_TD**2 @ (head_VD**2).T)
    return CONFIDENCE * np.sqrt(num_layers * (rounded + summed)) * spread


def share_of_mass(logits_V: Array, temperature: float) -> float:
    """Bound the relative error of a quotient of two sums of weights exp((x - top) / T).

    The exponent has four roundings (difference, T, its inverse, product), which the exponential
    multiplies by the exponent, at most 87 for a weight that is not flushed; then the exponential's
    roundings, and 7 of a block's sum. Sums over blocks are float64. Both sums have this error.
    """
    steps = min(87.0, float(np.ptp(logits_V)) / temperature)
    return 2 * (4 * steps + EXP_ULPS + 7) * ACCUMULATE_EPS


def log_softmax(logits_RV: Array) -> Array:
    """Bound the error of log-probabilities, [R, 1].

    The logarithm turns the relative error of the sum into an absolute one. The terms that matter
    lie near the largest: a term exp(-s) has s roundings, and s exp(-s) is below 1. Terms below
    exp(-87) are flushed and negligible.
    """
    return np.full((len(logits_RV), 1), (4 + EXP_ULPS + 7) * ACCUMULATE_EPS)

"""Float64 NumPy oracle of products over packed weights, and bounds on a kernel's error.

Weights are decoded and activations quantized in a straightforward way. Tolerances are elementwise
and derived: the rounding of every fp32 operation at the magnitude of its terms, and activation
codes that may fall on the other side of a tie.

Shapes: T rows, K inputs, N outputs, E experts, D hidden, F intermediate of one expert.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.core.model.layers import SILU, Activation
from tandem.kernels.weights.formats import (
    WeightFormat,
    dequantize,
    quantize,
    round_to_bf16,
    split_pair,
)

__all__ = [
    "EPS",
    "SMALLEST_AMAX",
    "TINY",
    "Layer",
    "activate",
    "bound_product",
    "code_exactly",
    "code_nearly",
    "decode",
    "round_values",
    "run_expert",
    "run_experts",
    "run_linear",
]

Array = NDArray[np.float64]

EPS = 2.0**-24
"""Relative error of one fp32 rounding."""
TINY = 2.0**-126
"""Error of an operation that flushes denormals to zero, as vdpbf16ps does."""
SMALLEST_AMAX = 1e-30
"""Largest magnitude in a group of activations below which the group is coded as zeros."""
SLOPE = 1.14
"""Bound on the derivative of activations: SiLU's is at most 1.0998, GELU's 1.129, its tanh form's
1.130.
"""
ACTIVATION_ROUNDINGS = 16
"""Roundings in an activation: the exponential's 2 ulp, a sum, a division, products."""
ARGUMENT_ROUNDINGS = 4
"""Roundings of the exponential's argument, each relative to the argument."""
LARGEST_ARGUMENT = 87.0
"""Largest argument of the exponential; larger ones are cut off."""


def decode(weights: NDArray[np.floating], weight_format: WeightFormat) -> Array:
    """Return the weights [N, K] after quantization to a format and back."""
    if weight_format.holds_values:
        return round_values(weights, weight_format)
    return dequantize(quantize(weights, weight_format))


def round_values(values: NDArray[np.floating], weight_format: WeightFormat) -> Array:
    """Round operands as kernels do that multiply weights without quantizing activations: to float32
    in f32, else to bf16.
    """
    is_wide = weight_format.bits == 32
    rounded = values.astype(np.float32) if is_wide else round_to_bf16(values)
    return rounded.astype(np.float64)


def _group(x: NDArray[np.floating], weight_format: WeightFormat) -> NDArray[np.floating]:
    """Return x in groups [groups, group size]; a row's last group is padded with zeros."""
    size = weight_format.activation_group_size
    padding = -x.shape[-1] % size
    return np.pad(x, ((0, 0), (0, padding))).reshape(-1, size)


def _ungroup(groups: Array, shape: tuple[int, ...]) -> Array:
    num_groups = -(-shape[1] // groups.shape[1])
    return groups.reshape(shape[0], num_groups * groups.shape[1])[:, : shape[1]]


def code_exactly(x_TK: NDArray[np.floating], weight_format: WeightFormat) -> Array:
    """Quantize a float32 input exactly as the kernels do."""
    if not weight_format.is_integer:
        return round_values(x_TK, weight_format)
    groups = _group(x_TK.astype(np.float32), weight_format)
    amax = np.abs(groups).max(-1, keepdims=True)
    is_zero = amax < SMALLEST_AMAX
    inverse = np.float32(127) / np.where(is_zero, np.float32(1), amax)
    codes = np.where(is_zero, 0, np.rint(groups * inverse)).astype(np.float64)
    step = np.where(is_zero, 0, amax / np.float32(127)).astype(np.float64)
    return _ungroup(codes * step, x_TK.shape)


def code_nearly(h_TK: Array, error_TK: Array, weight_format: WeightFormat) -> tuple[Array, Array]:
    """Quantize the intermediate; return it and a bound on the kernel's deviation from it.

    The kernel's value lies in [h - error, h + error]. Quantization is monotonic, so the codes of
    the two ends enclose the kernel's.
    """
    if weight_format.bits == 32:
        return h_TK, error_TK + EPS * np.abs(h_TK)
    if not weight_format.is_integer:
        error = error_TK + EPS * np.abs(h_TK)
        ends = (h_TK, h_TK - error, h_TK + error)
        middle, low, high = (round_to_bf16(v).astype(np.float64) for v in ends)
        return middle, np.maximum(high - middle, middle - low)
    h, error = (_group(v, weight_format) for v in (h_TK, error_TK))
    amax = np.abs(h).max(-1, keepdims=True)
    amax_error = error.max(-1, keepdims=True) + EPS * amax
    is_zero = amax + amax_error < SMALLEST_AMAX
    safe = np.where(amax == 0, 1, amax)
    step = amax / 127
    code = np.where(is_zero, 0, h / safe * 127)
    # Error bound of h * (127 / amax) in float32: two quotients and one product round once each.
    blur = 127 * (error / safe + np.abs(h) / safe * amax_error / safe + 3 * EPS)
    middle = np.rint(code)
    spread = np.maximum(np.rint(code + blur) - middle, middle - np.rint(code - blur))
    bound = step * spread + np.abs(middle) * (amax_error / 127 + EPS * step)
    may_vanish = amax - amax_error < SMALLEST_AMAX
    bound = np.where(may_vanish, np.abs(h) + error, bound)
    return _ungroup(middle * step, h_TK.shape), _ungroup(bound, h_TK.shape)


def bound_product(rows_TK: Array, weights_NK: Array, weight_format: WeightFormat) -> Array:
    """Bound the error of the product of rows and weights, [T, N], given exact operands."""
    size = rows_TK.shape[1]
    magnitude = np.abs(rows_TK) @ np.abs(weights_NK).T
    if not weight_format.is_integer:
        # Each product and each sum rounds once, and the scaling and adding of a group's sum once
        # more. Values below the smallest normal number may be flushed to zero.
        largest = 1 + np.abs(rows_TK).max(initial=0) + np.abs(weights_NK).max(initial=0)
        flushed = 2 * size * TINY * largest
        groups = math.ceil(size / weight_format.group_size) if weight_format.group_size else 0
        return (size + groups + 4) * EPS * magnitude + flushed
    groups = math.ceil(size / weight_format.activation_group_size)
    if not weight_format.has_minimum:
        # Sums of integer codes are exact; per group only the product of the scales and the fused
        # multiply-add round.
        return (groups + 3) * EPS * magnitude
    # The kernel sums codes and minimum separately, so the rounding error grows with these terms,
    # which are larger than the weights that they add up to.
    grouped = weights_NK.reshape(len(weights_NK), groups, -1)
    minimum = np.abs(grouped.min(-1, keepdims=True))
    terms = (np.abs(grouped) + 2 * minimum).reshape(weights_NK.shape)
    return (2 * groups + 4) * EPS * (np.abs(rows_TK) @ terms.T)


def run_linear(
    x_TK: NDArray[np.floating], weights_NK: Array, bias_N: Array, weight_format: WeightFormat
) -> tuple[Array, Array]:
    """Return ``x W^T + b`` for decoded weights and float32 input, and its tolerance."""
    rows = code_exactly(x_TK, weight_format)
    y = rows @ weights_NK.T + bias_N
    return y, bound_product(rows, weights_NK, weight_format) + EPS * np.abs(y) + TINY


def activate(g: Array, activation: Activation) -> tuple[Array, Array]:
    """Return the activation of the clamped gate, and its error bound for an exact gate."""
    if activation.name == "gelu":
        f = np.array([v / 2 * (1 + math.erf(v / math.sqrt(2))) for v in g.flat]).reshape(g.shape)
        # erf has an absolute error of 2 ulp of 1, so 1 + erf has no small relative error where erf
        # is near -1; the bound is therefore proportional to |g|.
        return f, (ACTIVATION_ROUNDINGS * np.abs(f) + 4 * np.abs(g)) * EPS
    z = activation.alpha * g
    if activation.name == "gelu_tanh":
        z = 2 * math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
    f = g / (1 + np.exp(-np.clip(z, -700, None)))
    argument = np.minimum(np.abs(z), LARGEST_ARGUMENT)
    roundings = ACTIVATION_ROUNDINGS + ARGUMENT_ROUNDINGS * argument
    return f, roundings * EPS * np.abs(f) + SMALLEST_AMAX


@dataclass
class Layer:
    """Decoded weights: gate and up [E, F, D], down [E, D, F]; biases [E, F], [E, F], [E, D]."""

    weight_format: WeightFormat
    gate: Array
    up: Array
    down: Array
    biases: tuple[Array, Array, Array] | None = None
    activation: Activation = SILU


def run_expert(layer: Layer, expert: int, rows_TD: Array) -> tuple[Array, Array]:
    """Return the output of one expert for rows that are already quantized, and the bound on its
    error.
    """
    gate, up, down = layer.gate[expert], layer.up[expert], layer.down[expert]
    activation = layer.activation
    g, u = rows_TD @ gate.T, rows_TD @ up.T
    g_error = bound_product(rows_TD, gate, layer.weight_format)
    u_error = bound_product(rows_TD, up, layer.weight_format)
    if layer.biases is not None:
        g, u = g + layer.biases[0][expert], u + layer.biases[1][expert]
        g_error, u_error = g_error + EPS * np.abs(g), u_error + EPS * np.abs(u)
    # Clamping never increases the distance between two values, so the error bounds stay valid.
    limit = activation.bound
    g, u = np.minimum(g, limit), np.clip(u, -limit, limit) + activation.up_offset
    u_error = u_error + EPS * np.abs(u)
    f, f_error = activate(g, activation)
    f_error += SLOPE * g_error
    h = f * u
    h_error = f_error * (np.abs(u) + u_error) + np.abs(f) * u_error
    h_error += EPS * np.abs(h) + SMALLEST_AMAX * (1 + np.abs(u))
    _, down_format = split_pair(layer.weight_format)
    h, h_error = code_nearly(h, h_error, down_format)
    y = h @ down.T
    y_error = bound_product(h, down, down_format) + h_error @ np.abs(down).T
    if layer.biases is not None:
        y = y + layer.biases[2][expert]
        y_error = y_error + EPS * np.abs(y)
    return y, y_error


def run_experts(
    layer: Layer, x_TD: NDArray[np.floating], ids_TP: NDArray[np.integer], weights_TP: Array
) -> tuple[Array, Array]:
    """Return the layer's output [T, D] for float32 input, and its tolerance; id -1 adds nothing."""
    rows = code_exactly(x_TD, layer.weight_format)
    out, tolerance = np.zeros(rows.shape), np.zeros(rows.shape)
    magnitude = np.zeros(rows.shape)
    for expert in range(len(layer.gate)):
        tokens, slots = np.nonzero(ids_TP == expert)
        y, error = run_expert(layer, expert, rows[tokens])
        w = weights_TP.astype(np.float64)[tokens, slots][:, None]
        np.add.at(out, tokens, w * y)
        np.add.at(tolerance, tokens, np.abs(w) * error)
        np.add.at(magnitude, tokens, np.abs(w * y))
    return out, tolerance + (ids_TP.shape[1] + 1) * EPS * magnitude + TINY

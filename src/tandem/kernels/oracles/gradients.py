"""Float64 NumPy oracle of gradients through packed experts, and bounds on a kernel's error.

The chain rule is written out over decoded weights. A kernel rounds to bf16 in three places: gate
and up; their gradients; and the transposed weights together with their multiplicands.
``check_stages`` takes the first two from the kernel, so that each stage is compared within the
bound of fp32 sums and one rounding; ``run_gradients`` rounds nothing.

Shapes: T tokens, K experts per token, P (token, expert) pairs, E experts, D hidden, F intermediate
of one expert, C columns of a pair: gate, then up.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.core.model.layers import Activation
from tandem.kernels.oracles.packed import (
    ACTIVATION_ROUNDINGS,
    ARGUMENT_ROUNDINGS,
    EPS,
    LARGEST_ARGUMENT,
    TINY,
    Layer,
    activate,
    bound_product,
    code_exactly,
    round_values,
)
from tandem.kernels.weights.formats import WeightFormat, find_format

__all__ = ["BF16_EPS", "Stages", "bound_turned", "check_stages", "list_pairs", "run_gradients"]

Array = NDArray[np.float64]

BF16_EPS = 2.0**-8
"""Relative error of one rounding to bf16."""
FLUSHED = 1e-30
"""Error bound of gates below the exponential's cut-off."""
TURNED_OUTPUTS = 1024
"""Number of outputs whose weights are transposed at a time in the backward pass; the kernel adds
the sums over these pieces.
"""


def choose_rounding(weight_format: WeightFormat) -> WeightFormat:
    """Return the format of gradients and transposed weights: f32 if weights are f32, else bf16."""
    return weight_format if weight_format.bits == 32 else find_format("bf16")


def bound_turned(rows_TN: Array, weights_NK: Array) -> Array:
    """Bound the error of a product with transposed weights, given operands that are already
    rounded.
    """
    parts = 1 + rows_TN.shape[1] // TURNED_OUTPUTS
    magnitude = np.abs(rows_TN) @ np.abs(weights_NK)
    return bound_product(rows_TN, weights_NK.T, find_format("bf16")) + parts * EPS * magnitude


def list_pairs(ids_TK: NDArray[np.integer]) -> tuple[NDArray[np.integer], ...]:
    """Return (experts, tokens, slots) of the pairs whose id is not -1, in the kernel's order."""
    tokens, slots = np.nonzero(ids_TK >= 0)
    experts = ids_TK[tokens, slots]
    order = np.argsort(experts, kind="stable")
    return experts[order], tokens[order], slots[order]


def differentiate(g: Array, activation: Activation) -> tuple[tuple[Array, Array], ...]:
    """Return (value, error bound) of the activation of the clamped gate, and of its derivative."""
    f = activate(g, activation)
    if activation.name == "gelu":
        part = np.array([(1 + math.erf(v / math.sqrt(2))) / 2 for v in g.flat]).reshape(g.shape)
        bell = g * np.exp(-(g**2) / 2) / math.sqrt(2 * math.pi)
        slope = part + bell
        roundings = ACTIVATION_ROUNDINGS + ARGUMENT_ROUNDINGS * np.minimum(g**2, LARGEST_ARGUMENT)
        return f, (slope, roundings * EPS * (1 + np.abs(bell)) + FLUSHED)
    z, dz = activation.alpha * g, np.full_like(g, activation.alpha)
    if activation.name == "gelu_tanh":
        factor = 2 * math.sqrt(2 / math.pi)
        z, dz = factor * (g + 0.044715 * g**3), factor * (1 + 3 * 0.044715 * g**2)
    s = 1 / (1 + np.exp(-np.clip(z, -700, None)))
    roundings = ACTIVATION_ROUNDINGS + ARGUMENT_ROUNDINGS * np.minimum(np.abs(z), LARGEST_ARGUMENT)
    error = roundings * EPS * s * (1 + np.minimum(np.abs(g * dz), LARGEST_ARGUMENT)) + FLUSHED
    return f, (s * (1 + g * dz * (1 - s)), error)


@dataclass
class Stages:
    """Intermediate results of a kernel: gate and up and their gradients [P, 2, F], then final
    results.
    """

    kept: Array
    d_gate_up: Array
    d_x: Array
    d_weights: Array


def check_stages(
    layer: Layer,
    x_TD: NDArray[np.floating],
    ids_TK: NDArray[np.integer],
    weights_TK: Array,
    d_out_TD: NDArray[np.floating],
    stages: Stages,
    *,
    delta: Array | float = 0.0,
    extra: Array | float = 0.0,
) -> dict[str, int]:
    """Count the values of each stage that deviate from exact ones by more than their bound.

    Args:
        layer: decoded weights.
        x_TD: float32 input of the kernel.
        ids_TK: expert ids; -1 adds nothing.
        weights_TK: router weights.
        d_out_TD: float32, gradient with respect to the output.
        stages: the kernel's intermediate and final results.
        delta: [P, 2, F], addend to gate and up.
        extra: [P, F], addend to the weighted gradient of the intermediate.
    """
    wants = {name: np.zeros(getattr(stages, name).shape) for name in vars(stages)}
    bounds = {name: np.full(wants[name].shape, TINY) for name in vars(stages)}
    experts, tokens, slots = list_pairs(ids_TK)
    rounding = choose_rounding(layer.weight_format)
    # Relative error of one rounding to bf16; 0 for float32, which keeps the computed value.
    unit = 0.0 if rounding.bits == 32 else BF16_EPS
    rows, d_rows = code_exactly(x_TD, layer.weight_format), round_values(d_out_TD, rounding)
    delta = np.broadcast_to(delta, stages.kept.shape)
    extra = np.broadcast_to(extra, stages.kept[:, 0].shape)
    magnitude = np.zeros(x_TD.shape)
    for e in np.unique(experts):
        own = experts == e
        for which, matrix in enumerate((layer.gate[e], layer.up[e])):
            y = rows[tokens[own]] @ matrix.T
            error = bound_product(rows[tokens[own]], matrix, layer.weight_format)
            if layer.biases is not None:
                y = y + layer.biases[which][e]
            error += 2 * EPS * (np.abs(y) + np.abs(delta[own, which]))
            y = y + delta[own, which]
            wants["kept"][own, which] = y
            bounds["kept"][own, which] = error * (1 + unit) + unit * np.abs(y) + TINY
        g, u = stages.kept[own, 0], stages.kept[own, 1]
        limit = layer.activation.bound
        is_in, is_up_in = g <= limit, np.abs(u) <= limit
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit) + layer.activation.up_offset
        u_error = EPS * np.abs(u)
        (f, f_error), (slope, slope_error) = differentiate(g, layer.activation)
        w = weights_TK[tokens[own], slots[own]][:, None]
        d_y, down = d_rows[tokens[own]], round_values(layer.down[e], rounding)
        d_h, h_error = d_y @ down, bound_turned(d_y, down)
        total = w * d_h + extra[own]
        total_error = np.abs(w) * h_error + 2 * EPS * (np.abs(w * d_h) + np.abs(extra[own]))
        steep, steep_error = u * slope, np.abs(u) * slope_error + u_error * np.abs(slope)
        steep_error += u_error * slope_error + EPS * np.abs(steep)
        for which, factor, error, inside in (
            (0, steep, steep_error, is_in),
            (1, f, f_error, is_up_in),
        ):
            value = total * factor
            off = total_error * (np.abs(factor) + error) + np.abs(total) * error
            off += 2 * EPS * np.abs(value)
            wants["d_gate_up"][own, which] = value * inside
            bounds["d_gate_up"][own, which] = (off + unit * (np.abs(value) + off)) * inside
        bounds["d_gate_up"][own] += TINY
        part = np.zeros(d_y.shape)
        error = np.zeros(d_y.shape)
        for which, matrix in enumerate((layer.gate[e], layer.up[e])):
            turned, d_inner = round_values(matrix, rounding), stages.d_gate_up[own, which]
            part += d_inner @ turned
            error += bound_turned(d_inner, turned) + EPS * (np.abs(d_inner) @ np.abs(turned))
        np.add.at(wants["d_x"], tokens[own], part)
        np.add.at(bounds["d_x"], tokens[own], error)
        np.add.at(magnitude, tokens[own], np.abs(part))
        h, size = f * u, f.shape[1]
        product_error = f_error * (np.abs(u) + u_error) + np.abs(f) * u_error + EPS * np.abs(h)
        off = (h_error * (np.abs(h) + product_error) + np.abs(d_h) * product_error).sum(1)
        off += (size + 2) * EPS * np.abs(d_h * h).sum(1)
        value = (d_h * h).sum(1)
        if layer.biases is not None:
            bias = layer.biases[2][e]
            value = value + d_y @ bias
            off += (len(bias) + size + 2) * EPS * (np.abs(d_y) @ np.abs(bias))
            off += EPS * np.abs(d_h * h).sum(1)
        wants["d_weights"][tokens[own], slots[own]] = value
        bounds["d_weights"][tokens[own], slots[own]] += off
    bounds["d_x"] += (ids_TK.shape[1] + 1) * EPS * magnitude
    return {
        name: int((np.abs(getattr(stages, name) - wants[name]) > bounds[name]).sum())
        for name in wants
    }


def run_gradients(
    layer: Layer,
    x_TD: Array,
    ids_TK: NDArray[np.integer],
    weights_TK: Array,
    d_out_TD: Array,
) -> tuple[Array, Array]:
    """Return the exact gradients with respect to the input [T, D] and the router weights [T, K]."""
    d_x, d_weights = np.zeros(x_TD.shape), np.zeros(weights_TK.shape)
    limit = layer.activation.bound
    experts, tokens, slots = list_pairs(ids_TK)
    for e in np.unique(experts):
        t, k = tokens[experts == e], slots[experts == e]
        g, u = x_TD[t] @ layer.gate[e].T, x_TD[t] @ layer.up[e].T
        y_bias = 0.0
        if layer.biases is not None:
            g, u = g + layer.biases[0][e], u + layer.biases[1][e]
            y_bias = d_out_TD[t] @ layer.biases[2][e]
        is_in, is_up_in = g <= limit, np.abs(u) <= limit
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit) + layer.activation.up_offset
        (f, _), (slope, _) = differentiate(g, layer.activation)
        d_h, w = d_out_TD[t] @ layer.down[e], weights_TK[t, k][:, None]
        d_weights[t, k] = (d_h * f * u).sum(1) + y_bias
        d_gate, d_up = w * d_h * u * slope * is_in, w * d_h * f * is_up_in
        np.add.at(d_x, t, d_gate @ layer.gate[e] + d_up @ layer.up[e])
    return d_x, d_weights

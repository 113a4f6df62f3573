"""The oracle of gradients through packed experts, and how far a kernel may be from it.

The chain rule written out in float64 numpy over decoded weights. Bounds follow the same products in
the order of magnitude of their terms: a sum of n products in fp32 is off by at most (n + 1) EPS of
the sum of magnitudes, and errors of one step go through the next by its derivative.

Shapes: T tokens, P experts per token, E experts, D hidden, F intermediate of one expert.
"""

import numpy as np
from numpy.typing import NDArray

from tandem.kernels.cpu.packed_oracle import (
    ACTIVATION_ROUNDINGS,
    ARGUMENT_ROUNDINGS,
    EPS,
    LARGEST_ARGUMENT,
    SLOPE,
    TINY,
    Layer,
)

__all__ = ["bound_sum", "run_gradients"]

Array = NDArray[np.float64]

CURVATURE = 0.5
"""The largest second derivative of silu is 1/2, at 0; alpha multiplies it."""
FLUSHED = 1e-30
"""What gates below the exponential's cut-off lose."""


def bound_sum(rows_TK: Array, weights_KN: Array) -> Array:
    """Bound for a product in fp32 with weights that may be rounded once when they are widened."""
    size = rows_TK.shape[-1]
    return (size + 2) * EPS * (np.abs(rows_TK) @ np.abs(weights_KN)) + size * TINY


def run_gradients(
    layer: Layer,
    x_TD: Array,
    ids_TP: NDArray[np.integer],
    weights_TP: Array,
    d_out_TD: Array,
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return (gradient, bound) for the input [T, D] and for the router weights [T, P]; silu only.

    Args:
        layer: decoded weights.
        x_TD: the input, exactly as the kernel gets it.
        ids_TP: expert ids; -1 adds nothing.
        weights_TP: router weights.
        d_out_TD: gradient with respect to the output.
    """
    d_x, x_bound = np.zeros(x_TD.shape), np.full(x_TD.shape, TINY)
    d_w, w_bound = np.zeros(weights_TP.shape), np.full(weights_TP.shape, TINY)
    magnitude = np.zeros(x_TD.shape)
    alpha, limit = layer.activation.alpha, layer.activation.limit
    for e in range(len(layer.gate)):
        gate, up, down = layer.gate[e], layer.up[e], layer.down[e]
        tokens, slots = np.nonzero(ids_TP == e)
        x, d_y, w = x_TD[tokens], d_out_TD[tokens], weights_TP[tokens, slots][:, None]
        g, u = x @ gate.T, x @ up.T
        g_error, u_error = bound_sum(x, gate.T), bound_sum(x, up.T)
        if layer.biases is not None:
            g, u = g + layer.biases[0][e], u + layer.biases[1][e]
            g_error, u_error = g_error + EPS * np.abs(g), u_error + EPS * np.abs(u)
        is_in, is_up_in = g <= limit, np.abs(u) <= limit
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit) + layer.activation.up_offset
        u_error = u_error + EPS * np.abs(u)
        s = 1 / (1 + np.exp(-np.clip(alpha * g, -700, None)))
        f, slope = g * s, s * (1 + alpha * g * (1 - s))
        argument = np.minimum(np.abs(alpha * g), LARGEST_ARGUMENT)
        roundings = ACTIVATION_ROUNDINGS + ARGUMENT_ROUNDINGS * argument
        f_error = roundings * EPS * np.abs(f) + SLOPE * g_error + FLUSHED
        slope_error = roundings * EPS * s * (1 + argument) + CURVATURE * alpha * g_error + FLUSHED
        d_h, h_error = d_y @ down, bound_sum(d_y, down)
        # Two or three roundings of a product of three or four numbers.
        d_up = w * d_h * f * is_up_in
        d_up_error = np.abs(w) * (h_error * (np.abs(f) + f_error) + np.abs(d_h) * f_error)
        d_up_error = (d_up_error + 3 * EPS * np.abs(w * d_h * f)) * is_up_in
        d_gate = w * d_h * u * slope * is_in
        steep, steep_error = u * slope, np.abs(u) * slope_error + u_error * np.abs(slope)
        steep_error += u_error * slope_error
        d_gate_error = np.abs(w) * (h_error * (np.abs(steep) + steep_error))
        d_gate_error += np.abs(w * d_h) * steep_error + 4 * EPS * np.abs(w * d_h * steep)
        d_gate_error *= is_in
        rows, stacked = np.concatenate([d_gate, d_up], 1), np.concatenate([gate, up], 0)
        row_error = np.concatenate([d_gate_error, d_up_error], 1)
        own = rows @ stacked
        np.add.at(d_x, tokens, own)
        np.add.at(magnitude, tokens, np.abs(own))
        np.add.at(x_bound, tokens, bound_sum(rows, stacked) + row_error @ np.abs(stacked))
        h = f * u
        product_error = f_error * (np.abs(u) + u_error) + np.abs(f) * u_error + EPS * np.abs(h)
        terms, size = np.abs(d_h * h).sum(1), h.shape[1]
        own_error = (h_error * (np.abs(h) + product_error) + np.abs(d_h) * product_error).sum(1)
        d_w[tokens, slots] = (d_h * h).sum(1)
        w_bound[tokens, slots] += own_error + (size + 2) * EPS * terms
        if layer.biases is not None:
            bias = layer.biases[2][e]
            d_w[tokens, slots] += d_y @ bias
            w_bound[tokens, slots] += (len(bias) + size + 2) * EPS * (np.abs(d_y) @ np.abs(bias))
            w_bound[tokens, slots] += (len(bias) + 2) * EPS * terms
    return (d_x, x_bound + (ids_TP.shape[1] + 1) * EPS * magnitude), (d_w, w_bound)

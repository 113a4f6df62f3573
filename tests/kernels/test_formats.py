"""Goal: weight formats mean what their data says, and err no more than they promise.

Method: hand-made groups, bounds derived from the step, and the error of a whole Gaussian expert
against float64, weights and activations coded.
"""

import numpy as np
import pytest
import torch

from each import each
from tandem.core.errors import NotFoundError, ShapeError, UnsupportedError
from tandem.kernels.weights.formats import (
    WEIGHT_FORMATS,
    QuantizedMatrix,
    WeightFormat,
    dequantize,
    find_format,
    list_floats,
    quantize,
    round_to_bf16,
)

INTEGER = [f for f in WEIGHT_FORMATS.values() if f.is_integer and not f.is_stored_only]
EXPERT_ERRORS = {
    "bf16": 0.005,
    "fp8": 0.05,
    "fp8row": 0.05,
    "mxfp4": 0.21,
    "int8row": 0.024,
    "int8g32": 0.016,
    "int8g128": 0.021,
    "int4g32": 0.145,
    "int4g32sym": 0.175,
}
"""Largest relative error of one expert, weights and activations coded."""


def test_names_and_aliases():
    assert find_format("int8") is WEIGHT_FORMATS["int8g128"]
    assert find_format("int4") is WEIGHT_FORMATS["int4g32"]
    assert find_format("int4").has_minimum
    assert not find_format("int8").has_minimum
    assert find_format("bf16").bits_per_weight == 16
    assert find_format("int4g32").bits_per_weight == 5
    assert find_format("int8g128").bits_per_weight == 8.125
    with pytest.raises(NotFoundError, match="int6") as caught:
        find_format("int6")
    assert "int8g128" in str(caught.value)


def test_round_to_bf16_rounds_ties_to_even_and_keeps_nan():
    ulp = 2.0**-7
    values = np.array([1, 1 + ulp / 2, 1 + 3 * ulp / 2, 1 + 0.51 * ulp, np.nan, np.inf, -2.5])
    want = np.array([1, 1, 1 + 2 * ulp, 1 + ulp, np.nan, np.inf, -2.5])
    np.testing.assert_array_equal(round_to_bf16(values), want)


@each("weight_format", INTEGER)
def test_error_is_within_half_a_step(weight_format: WeightFormat):
    weights = np.random.default_rng(0).standard_normal((8, 256)).astype(np.float32)
    matrix = quantize(weights, weight_format)
    error = np.abs(dequantize(matrix) - weights)
    step = np.abs(matrix.scales.astype(np.float64)).repeat(weight_format.group_size or 256, 1)
    # Rounding of scale and minimum to fp16 may put the extreme weight out of the codes' range.
    slack = 2.0**-11 * 2**weight_format.bits * step
    is_clipped = weight_format.bits < 8 and not weight_format.has_minimum
    # Symmetric 4 bits end at +7, 5 bits at +15, on the side that does not hold the peak.
    assert (error <= step * (1.0 if is_clipped else 0.5) + slack).all()


def test_codes_of_a_known_group():
    group = np.linspace(-1, 1, 32)[None]
    eight = quantize(group, WEIGHT_FORMATS["int8g32"])
    assert (eight.codes[0, 0], eight.codes[0, -1]) == (1, 255)
    four = quantize(group, WEIGHT_FORMATS["int4g32"])
    assert (four.codes[0, 0], four.codes[0, -1]) == (0, 15)
    assert four.minima is not None
    assert four.minima[0, 0] == -1
    symmetric = quantize(group, WEIGHT_FORMATS["int4g32sym"])
    # The peak is the first of the two largest, -1; it gets the code 0 with a positive step.
    assert symmetric.codes[0, 0] == 0
    assert symmetric.scales[0, 0] == np.float16(0.125)
    mirrored = quantize(-group, WEIGHT_FORMATS["int4g32sym"])
    assert mirrored.codes[0, 0] == 0
    assert mirrored.scales[0, 0] == np.float16(-0.125)


@each("weight_format", INTEGER)
@each("value", [0.0, 3.0, -3.0, 1e-9])
def test_constant_groups(weight_format: WeightFormat, value: float):
    weights = np.full((2, 128), value)
    got = dequantize(quantize(weights, weight_format))
    # Below fp16's smallest step nothing is left but the absolute error of that step.
    np.testing.assert_allclose(got, weights, rtol=2.0**-10, atol=2.0**-24)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_refuses_what_cannot_be_held(bad: float):
    weights = np.ones((2, 128))
    weights[1, 5] = bad
    for weight_format in INTEGER:
        with pytest.raises(UnsupportedError, match=r"kernels\.quantize"):
            quantize(weights, weight_format)


def test_refuses_wrong_shapes():
    with pytest.raises(ShapeError, match="128"):
        quantize(np.ones((2, 192)), WEIGHT_FORMATS["int8g128"])
    with pytest.raises(UnsupportedError, match="round_to_bf16"):
        quantize(np.ones((2, 192)), WEIGHT_FORMATS["bf16"])


def test_values_of_e4m3_are_those_of_torch():
    codes = torch.arange(256, dtype=torch.uint8)
    want = codes.view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(list_floats(8), want)


def test_values_of_e2m1():
    want = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    np.testing.assert_array_equal(list_floats(4), np.concatenate([want, -want]))


def test_fp8_rounds_as_torch_does():
    """Blocks whose largest weight is 448 have the scale 1, so that codes are plain conversions."""
    rng = np.random.default_rng(3)
    weights = rng.standard_normal((200, 300)) * np.exp2(rng.integers(-12, 7, (200, 300)))
    ties = (list_floats(8)[:126] + list_floats(8)[1:127]) / 2
    weights[0, : len(ties)] = ties
    weights[::128, ::128] = 448
    weights = np.clip(weights, -448, 448).astype(np.float32)
    matrix = quantize(weights, WEIGHT_FORMATS["fp8"])
    assert (matrix.scales == 1).all()
    assert matrix.scales.shape == (2, 3)
    want = torch.from_numpy(weights).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(matrix.codes, want)


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_decoded_checkpoints_keep_their_weights(name: str):
    """A matrix that the format holds is held: native fp8 and mxfp4 checkpoints lose nothing."""
    weight_format = WEIGHT_FORMATS[name]
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 2**weight_format.bits, (256, 256)).astype(np.uint8)
    codes[np.isnan(list_floats(weight_format.bits)[codes])] = 0
    if name == "fp8":
        # DeepSeek's scales fill their blocks.
        codes[::128, ::128] = 126
        scales = rng.uniform(1e-5, 1e-3, (2, 2)).astype(np.float32)
    else:
        scales = np.exp2(rng.integers(-20, 5, (256, 8))).astype(np.float32)
        codes[:64] &= 9  # Groups whose largest code is 0.5.
    weights = dequantize(QuantizedMatrix(weight_format, codes, scales, None)).astype(np.float32)
    again = dequantize(quantize(weights, weight_format))
    # The scale of fp8 goes through a product and a quotient, each rounded to float32.
    np.testing.assert_allclose(again, weights, rtol=2.0**-22 if name == "fp8" else 0, atol=0)


def test_fp8row_has_a_scale_for_each_output():
    """Rows of very different sizes are coded alike; a block's scale loses the small ones."""
    rng = np.random.default_rng(5)
    weights = rng.standard_normal((130, 200)) * np.exp2(rng.integers(-30, 30, (130, 1)))
    matrix = quantize(weights, WEIGHT_FORMATS["fp8row"])
    assert matrix.scales.shape == (130, 1)
    off = np.abs(dequantize(matrix) - weights).max(1) / np.abs(weights).max(1)
    assert (off <= 2.0**-4).all()
    assert WEIGHT_FORMATS["fp8row"].bits_per_weight == 8


def test_mxfp4_scales_lose_no_more_than_its_widest_step():
    weight_format = WEIGHT_FORMATS["mxfp4"]
    for peak in (4.0, 6.0, 6.9, 7.1, 7.9, 8.0):
        weights = np.zeros((1, 32), np.float32)
        weights[0, 0] = peak
        matrix = quantize(weights, weight_format)
        assert abs(dequantize(matrix)[0, 0] - peak) <= 1.0
        assert matrix.scales[0, 0] == (1 if peak <= 7 else 2)


def code_activations(x: np.ndarray, weight_format: WeightFormat) -> np.ndarray:
    if not weight_format.is_integer:
        return round_to_bf16(x).astype(np.float64)
    groups = x.reshape(len(x), -1, weight_format.activation_group_size)
    step = np.abs(groups).max(-1, keepdims=True) / 127
    return (np.rint(groups / step) * step).reshape(x.shape)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (i % 3 != 0)) for i, n in enumerate(EXPERT_ERRORS)],
)
def test_error_of_an_expert_on_gaussian_weights(name: str):
    weight_format = find_format(name)
    rng = np.random.default_rng(1)
    hidden, intermediate = 2048, 768
    x = rng.standard_normal((8, hidden))
    gate, up = rng.standard_normal((2, intermediate, hidden)) / np.sqrt(hidden)
    down = rng.standard_normal((hidden, intermediate)) / np.sqrt(intermediate)

    def run(code_weights, code_rows) -> np.ndarray:
        rows = code_rows(x)
        g, u = rows @ code_weights(gate).T, rows @ code_weights(up).T
        return code_rows(g / (1 + np.exp(-g)) * u) @ code_weights(down).T

    def coded(weights: np.ndarray) -> np.ndarray:
        if weight_format.bits == 16:
            return round_to_bf16(weights).astype(np.float64)
        return dequantize(quantize(weights, weight_format))

    want = run(lambda w: w, lambda a: a)
    got = run(coded, lambda a: code_activations(a, weight_format))
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    bound = EXPERT_ERRORS[name]
    assert 0.5 * bound < error <= bound

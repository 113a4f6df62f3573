"""Goal: int4 with integer zero points, as GPTQ, AWQ and compressed-tensors store it, at its size.

Method: random codes, scales and zero points, laid out on every instruction set and read back as
numbers, bitwise the products of their float32 arithmetic; products against the float64 oracle; the
size against that of the checkpoint's tensors.
"""

import numpy as np
import pytest
import torch

from each import each
from tandem._native import ThreadPool, kernel_isas
from tandem.core.errors import UnsupportedError
from tandem.kernels.cpu.linear import PackedLinear, count_bytes
from tandem.kernels.oracles.packed import run_linear
from tandem.kernels.weights.formats import QuantizedMatrix, dequantize, find_format
from tandem.kernels.weights.recode import can_represent, join_formats, recode


@pytest.fixture(scope="module")
def pool() -> ThreadPool:
    return ThreadPool(2, oversubscribe=True)


GROUPS = (32, 64, 128)
OUTS, INPUTS = 70, 256


def draw(size: int, *, seed: int = 0) -> QuantizedMatrix:
    """All codes and zero points occur; some scales are 0, subnormal, or below 0."""
    rng = np.random.default_rng(seed)
    groups = (OUTS, INPUTS // size)
    scales = rng.normal(scale=0.02, size=groups).astype(np.float16)
    scales[1, 0], scales[2, 0] = 0, 2.0**-24
    return QuantizedMatrix(
        find_format(f"int4g{size}zp"),
        rng.integers(0, 16, (OUTS, INPUTS), dtype=np.uint8),
        scales,
        rng.integers(0, 16, groups).astype(np.float16),
    )


@pytest.mark.parametrize("size", GROUPS)
def test_weights_and_products_are_those_of_the_checkpoint(size: int, pool: ThreadPool):
    matrix = draw(size)
    x = torch.randn(17, INPUTS, generator=torch.Generator().manual_seed(1))
    weights = dequantize(matrix)
    want, bound = run_linear(x.numpy(), weights, np.zeros(OUTS), matrix.weight_format)
    results = []
    for isa in (*kernel_isas(), "amx_emulated"):
        linear = PackedLinear.from_codes(matrix, pool=pool, isa=isa)
        assert np.array_equal(linear.unpack().double().numpy(), weights), isa
        got = linear.forward(x)
        assert (np.abs(got.double().numpy() - want) <= bound).all(), isa
        for rows in (1, 2, 5):
            assert torch.equal(linear.forward(x[3 : 3 + rows]), got[3 : 3 + rows]), isa
        results.append(got)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("size", GROUPS)
def test_gradients_are_those_of_the_weights(size: int, pool: ThreadPool):
    """Weights and gradients are rounded to bf16 and summed in fp32."""
    matrix = draw(size, seed=2)
    weights = torch.from_numpy(dequantize(matrix)).bfloat16().double()
    d_out = torch.randn(3, OUTS, generator=torch.Generator().manual_seed(3)).bfloat16().float()
    want = d_out.double() @ weights
    for isa in (*kernel_isas(), "amx_emulated"):
        linear = PackedLinear.from_codes(matrix, pool=pool, isa=isa)
        torch.testing.assert_close(linear.backward(d_out).double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", GROUPS)
def test_packed_size_is_that_of_the_checkpoint(size: int):
    """Codes, fp16 scales and zero points of 4 bits."""
    outs, inputs = 2048, 1024
    stored = outs * inputs // 2 + outs * inputs // size * 2 + outs * inputs // size // 2
    weight_format = find_format(f"int4g{size}zp")
    assert count_bytes(weight_format, inputs, outs) == stored
    assert weight_format.bits_per_weight * outs * inputs / 8 == stored


@each("zero", [16, -1, 0.5, 1.5, 7.25, np.nan, np.inf])
def test_what_is_no_zero_point_is_refused(zero: float, pool: ThreadPool):
    matrix = draw(64)
    assert matrix.minima is not None
    matrix.minima[66, 1] = zero
    with pytest.raises(UnsupportedError, match="output 66 has"):
        PackedLinear.from_codes(matrix, pool=pool)


def test_it_joins_others_with_a_minimum_in_fp16():
    """Products of scales and zero points have up to 15 bits, of which fp16 keeps 11."""
    matrix = draw(128)
    wide = join_formats([matrix.weight_format, find_format("int4g64sym")])
    assert wide is find_format("int4g64")
    assert can_represent(wide, matrix.weight_format)
    again = dequantize(recode(matrix, wide))
    error = np.abs(again - dequantize(matrix))
    scales = np.abs(matrix.scales.astype(np.float64)).repeat(128, 1)
    assert (error <= 16 * scales * 2.0**-11 + 2.0**-24).all()

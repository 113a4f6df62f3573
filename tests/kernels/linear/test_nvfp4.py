"""Goal: a matrix of NVFP4 keeps the codes of a checkpoint at their size, and its weights.

Method: all codes beside all scales of e4m3, with factors that multiply and that divide, laid out on
every instruction set and read back as numbers: bitwise those of a decoder that is written out here.
Products and gradients against the float64 oracle over those numbers; one row among others, and
instruction sets among each other, bitwise. Scales that are no numbers are refused.
"""

import numpy as np
import pytest
import torch

from tandem._native import ThreadPool, kernel_isas
from tandem.core.errors import UnsupportedError
from tandem.kernels.cpu.experts import PackedExperts
from tandem.kernels.cpu.experts import count_bytes as count_expert_bytes
from tandem.kernels.cpu.linear import PackedLinear, count_bytes
from tandem.kernels.oracles.packed import Layer, run_experts, run_linear
from tandem.kernels.weights.formats import QuantizedMatrix, dequantize, find_format, round_to_bf16

ISAS = [*kernel_isas(), "amx_emulated"]
NVFP4 = find_format("nvfp4")
LARGEST_RATIO = 1.02
OUTS, INS = 70, 512
"""One panel and a piece of the next."""
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.fixture(scope="module")
def pool():
    return ThreadPool(2, oversubscribe=True)


def draw(outs: int = OUTS, inputs: int = INS, *, seed: int = 0, std: float = 0.0):
    """Random codes and scales; with ``std`` weights of about that size."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (outs, inputs)).astype(np.uint8)
    scales = rng.integers(0, 0x7F, (outs, inputs // 16)).astype(np.uint8)
    factors = np.exp(rng.normal(size=(outs, 1))).astype(np.float32)
    if std:
        scales = rng.integers(0x60, 0x70, scales.shape).astype(np.uint8)
        factors *= np.float32(std / 300)
    factors[::2] *= -1
    factors[::2] = 1 / factors[::2]
    return QuantizedMatrix(NVFP4, codes, scales, factors)


def decode(matrix: QuantizedMatrix) -> np.ndarray:
    """As the checkpoints' own programs do: a scale, then a product, each rounded to float32."""
    grid = np.array(E2M1 + [-x for x in E2M1], np.float32)
    out = np.empty(matrix.codes.shape, np.float32)
    for row, codes in enumerate(matrix.codes):
        factor = matrix.minima[row, 0]
        for group, code in enumerate(matrix.scales[row]):
            exponent, mantissa = int(code) >> 3, int(code) & 7
            scale = (
                np.float32(mantissa * 2.0**-9)
                if exponent == 0
                else np.float32((1 + mantissa / 8) * 2.0 ** (exponent - 7))
            )
            step = scale * factor if factor > 0 else scale / -factor
            at = slice(16 * group, 16 * group + 16)
            out[row, at] = grid[codes[at]] * step
    return out


def test_packed_size_is_that_of_the_file():
    for outs, inputs in ((2048, 768), (5120, 2048)):
        stored = outs * inputs * 9 / 16
        assert count_bytes(NVFP4, inputs, outs) <= LARGEST_RATIO * stored
        assert NVFP4.bits_per_weight * outs * inputs / 8 == stored
    assert count_expert_bytes(NVFP4, 8, 2048, 768) <= LARGEST_RATIO * 8 * 3 * 768 * 2048 * 9 / 16


@pytest.mark.parametrize("isa", ISAS)
def test_weights_are_bitwise_those_of_the_decoder(isa, pool):
    """But for the sign of zeros, as codes are integers."""
    matrix = draw()
    want = decode(matrix) + np.float32(0)
    linear = PackedLinear.from_codes(matrix, pool=pool, isa=isa)
    got = linear.unpack().numpy() + np.float32(0)
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32))
    assert np.array_equal(dequantize(matrix), want)
    some = torch.tensor([3, 69, 0, 64, 3])
    assert np.array_equal(linear.take_rows(some).numpy(), want[some])


@pytest.mark.parametrize("isa", ISAS)
def test_products_and_gradients_are_those_of_the_weights(isa, pool):
    matrix = draw(std=INS**-0.5)
    linear = PackedLinear.from_codes(matrix, pool=pool, isa=isa)
    weights = decode(matrix).astype(np.float64)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(17, INS, generator=generator)
    want, bound = run_linear(x.numpy(), weights, np.zeros(OUTS), NVFP4)
    got = linear.forward(x)
    assert (np.abs(got.double().numpy() - want) <= bound).all()
    for rows in (1, 2, 5):
        assert torch.equal(linear.forward(x[3 : 3 + rows]), got[3 : 3 + rows])
    d_out = torch.randn(3, OUTS, generator=generator)
    rounded = round_to_bf16(weights.astype(np.float32)).astype(np.float64)
    grad = round_to_bf16(d_out.numpy()).astype(np.float64)
    wanted, terms = grad @ rounded, np.abs(grad) @ np.abs(rounded)
    off = np.abs(linear.backward(d_out).double().numpy() - wanted)
    assert (off <= (OUTS + 2) * 2.0**-24 * terms + 1e-30).all()


def test_instruction_sets_and_threads_agree_bitwise(pool):
    matrix = draw(std=INS**-0.5)
    x = torch.randn(9, INS, generator=torch.Generator().manual_seed(2))
    results = [PackedLinear.from_codes(matrix, pool=pool, isa=isa).forward(x) for isa in ISAS]
    results.append(PackedLinear.from_codes(matrix, pool=ThreadPool(1)).forward(x))
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("num_parts", [1, 2])
def test_experts_hold_them(num_parts, pool):
    """Each part of a down projection has the factors of all its outputs."""
    hidden, inner, count = 256, 256, 2
    made = [
        [draw(inner, hidden, seed=3 * e + i, std=0.05) for i in range(2)]
        + [draw(hidden, inner, seed=3 * e + 2, std=0.05)]
        for e in range(count)
    ]
    experts = PackedExperts(NVFP4, count, hidden, inner, pool=pool, num_parts=num_parts)
    for e, matrices in enumerate(made):
        experts.pack_codes(e, *matrices)
    gate, up, down = (np.stack([decode(m[i]) for m in made]).astype(np.float64) for i in range(3))
    x = torch.randn(5, hidden, generator=torch.Generator().manual_seed(3))
    ids = torch.tensor([[0, 1]] * 5)
    weights = torch.full((5, 2), 0.5)
    got = experts.forward(x, ids, weights)
    layer = Layer(NVFP4, gate, up, down)
    want, bound = run_experts(layer, x.numpy(), ids.numpy(), weights.double().numpy())
    assert (np.abs(got.double().numpy() - want) <= num_parts * bound).all()


def test_scales_that_are_no_numbers_are_refused(pool):
    for scale, factor in ((0x7F, 1.0), (0x81, 1.0), (0x38, 0.0), (0x38, np.inf), (0x38, np.nan)):
        matrix = draw()
        matrix.scales[69, 3] = scale
        matrix.minima[69, 0] = factor
        with pytest.raises(UnsupportedError, match="output 69"):
            PackedLinear.from_codes(matrix, pool=pool)

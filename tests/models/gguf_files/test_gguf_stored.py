"""Goal: a matrix keeps a file's blocks at their size, and its weights are the file's.

Method: random and extreme blocks of every type, laid out in the type's own format on every
instruction set, read back as numbers and compared bitwise with the ``gguf`` package; products and
gradients against the float64 oracle over those numbers; one row among others, and instruction sets
and threads among each other, bitwise. The rule of sizes is asserted for every type.
"""

import gguf
import numpy as np
import pytest
import torch
from test_gguf_blocks import HALVES, draw_blocks, draw_sane

from quick import rest_slow
from tandem._native import ThreadPool, kernel_isas
from tandem.core.errors import ShapeError, UnsupportedError
from tandem.kernels.cpu.experts import PackedExperts
from tandem.kernels.cpu.experts import count_bytes as count_expert_bytes
from tandem.kernels.cpu.linear import PackedLinear, count_bytes
from tandem.kernels.oracles.packed import Layer, run_experts, run_linear
from tandem.kernels.weights.blocks import BlockMatrix
from tandem.kernels.weights.formats import find_format, pair_formats, round_to_bf16
from tandem.models.codecs.gguf_blocks import BLOCK_TYPES
from tandem.models.sources.gguf_header import BLOCK_SIZES

ISAS = [*kernel_isas(), "amx_emulated"]
LARGEST_RATIO = 1.02
"""Of packed to stored size; a format that breaks it is not added."""
INTEGER = [kind for kind in BLOCK_TYPES if kind != "MXFP4"]
OUTS = 70
"""One panel and a piece of the next."""


@pytest.fixture(scope="module")
def pool():
    return ThreadPool(2, oversubscribe=True)


def lay_out(kind: str, raw: np.ndarray, inputs: int) -> BlockMatrix:
    weight_format = find_format(BLOCK_TYPES[kind].weight_format)
    return BlockMatrix(weight_format, inputs, ((kind, raw.reshape(-1, count_row(kind, inputs))),))


def count_row(kind: str, inputs: int) -> int:
    block, size = BLOCK_SIZES[kind]
    return inputs // block * size


def draw(kind: str, outs: int, inputs: int, *, seed: int = 0, std: float = 0.0) -> np.ndarray:
    """Random blocks; with ``std`` such of about that size of values."""
    raw = draw_sane(kind, outs * inputs // BLOCK_SIZES[kind][0])
    np.random.default_rng(seed).shuffle(raw)
    if std and kind == "MXFP4":
        raw[:, 0] = 127 + round(np.log2(std / 3))
    elif std and kind == "NVFP4":
        raw[:, :4] = (7 + round(np.log2(std / 3))) * 8 + raw[:, :4] % 8
    elif std:
        factor = np.float16(std / decode(kind, raw).std())
        for at in HALVES[kind]:
            halves = np.ascontiguousarray(raw[:, at : at + 2]).view(np.float16)
            raw[:, at : at + 2] = (halves * factor).view(np.uint8)
    return raw


def decode(kind: str, raw: np.ndarray) -> np.ndarray:
    """By the package."""
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])


def make_extreme(kind: str) -> np.ndarray:
    """Blocks of bytes 0 and 255, with scales of 0, the smallest and the largest, of either sign."""
    size = BLOCK_SIZES[kind][1]
    halves = [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x7BFF, 0xFBFF, 0x3C00]
    made = []
    for fill in (0, 255, 0x0F, 0xF0, 0x55, 0xAA):
        for i, half in enumerate(halves):
            block = np.full(size, fill, np.uint8)
            for j, at in enumerate(HALVES[kind]):
                block[at : at + 2] = (
                    np.array([halves[i - j], half][j == 0], "<u2").reshape(1).view(np.uint8)
                )
            if kind == "MXFP4":
                # 0 is none of our kernels' scales, and 255 no number.
                block[0] = (1, 2, 64, 126, 127, 128, 200, 251)[i]
            if kind == "NVFP4":
                block[:4] = (0, 1, 7, 8, 0x38, 0x7E, 0x7F, 0xFF)[i]
            made.append(block)
    return np.stack(made)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_packed_size_is_that_of_the_file(kind):
    """The rule, for matrices and experts whose outputs are whole panels."""
    weight_format = find_format(BLOCK_TYPES[kind].weight_format)
    # NVFP4 has a number for each output, which 256 inputs are too few for.
    least = 768 if kind == "NVFP4" else 256
    for outs, inputs in ((64, least), (2048, 768), (5120, 2048)):
        stored = outs * count_row(kind, inputs)
        assert count_bytes(weight_format, inputs, outs) <= LARGEST_RATIO * stored
        assert weight_format.bits_per_weight * outs * inputs / 8 == pytest.approx(stored)
    stored = 8 * 3 * 768 * count_row(kind, 2048)
    assert count_expert_bytes(weight_format, 8, 2048, 768) <= LARGEST_RATIO * stored


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_weights_are_bitwise_those_of_the_package(kind, isa, pool):
    """Zeros have their signs; scales beyond products of fp16 are no matter."""
    inputs = 3 * 256
    random = draw(kind, OUTS, inputs)
    extreme = make_extreme(kind)
    per_row = inputs // BLOCK_SIZES[kind][0]
    extreme = np.resize(extreme, (-(-len(extreme) // per_row) * per_row, extreme.shape[1]))
    for raw in (random, extreme):
        linear = PackedLinear.from_codes(lay_out(kind, raw, inputs), pool=pool, isa=isa)
        with np.errstate(over="ignore"):
            want = decode(kind, raw).reshape(-1, inputs)
        got = linear.unpack().numpy()
        if kind == "MXFP4":
            # The package has no negative zero, e2m1 has.
            got = got + np.float32(0)
        assert np.array_equal(got.view(np.uint32), want.view(np.uint32))


# Those between agree bitwise with both, as another test has it.
@pytest.mark.parametrize(
    "isa",
    [
        pytest.param(isa, marks=[pytest.mark.slow] * (0 < i < len(ISAS) - 1))
        for i, isa in enumerate(ISAS)
    ],
)
@pytest.mark.parametrize("kind", INTEGER)
def test_products_are_those_of_the_weights(kind, isa, pool):
    """One row, which is unpacked in registers, and several, which are not."""
    inputs = 512
    raw = draw(kind, OUTS, inputs, std=inputs**-0.5)
    matrix = lay_out(kind, raw, inputs)
    linear = PackedLinear.from_codes(matrix, pool=pool, isa=isa)
    weights = decode(kind, raw).reshape(-1, inputs).astype(np.float64)
    x = torch.randn(17, inputs, generator=torch.Generator().manual_seed(1))
    want, bound = run_linear(x.numpy(), weights, np.zeros(OUTS), matrix.weight_format)
    got = linear.forward(x)
    assert (np.abs(got.double().numpy() - want) <= bound).all()
    for rows in (1, 2, 5):
        assert torch.equal(linear.forward(x[3 : 3 + rows]), got[3 : 3 + rows])


@pytest.mark.parametrize("kind", INTEGER)
def test_instruction_sets_and_threads_agree_bitwise(kind, pool):
    inputs = 512
    matrix = lay_out(kind, draw(kind, OUTS, inputs, std=inputs**-0.5), inputs)
    x = torch.randn(9, inputs, generator=torch.Generator().manual_seed(2))
    pools = [pool, ThreadPool(1), ThreadPool(5, oversubscribe=True)]
    results = [PackedLinear.from_codes(matrix, pool=pool, isa=isa).forward(x) for isa in ISAS]
    results += [PackedLinear.from_codes(matrix, pool=each).forward(x) for each in pools]
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("kind", [kind for kind in INTEGER if kind[:3] in ("IQ2", "IQ3")])
def test_products_with_codebooks_do_not_overflow(kind, pool):
    """Blocks have equal bytes, each of 256, and a row has the signs of each output's weights.

    Products of the largest entries with 127 are then added, where sums of 16 bits could overflow.
    """
    outs, inputs = 128, 512
    raw = np.repeat(np.arange(256, dtype=np.uint8)[:, None], BLOCK_SIZES[kind][1], axis=1)
    for at in HALVES[kind]:
        raw[:, at : at + 2] = np.array([1], np.float16).view(np.uint8)
    weights = decode(kind, raw).reshape(outs, inputs)
    x = torch.from_numpy(np.sign(weights))
    want = torch.from_numpy(np.abs(weights).sum(1))
    for isa in ISAS:
        linear = PackedLinear.from_codes(lay_out(kind, raw, inputs), pool=pool, isa=isa)
        got = torch.stack([linear.forward(x[i : i + 1])[0, i] for i in range(outs)])
        assert torch.allclose(got, want, rtol=1e-5), isa
        assert torch.equal(linear.forward(x).diagonal(), got), isa


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", INTEGER)
def test_gradients_are_those_of_the_weights(kind, isa, pool):
    """Weights and gradients are rounded to bf16, and products summed in fp32."""
    inputs = 256
    raw = draw(kind, OUTS, inputs, std=inputs**-0.5)
    linear = PackedLinear.from_codes(lay_out(kind, raw, inputs), pool=pool, isa=isa)
    weights = round_to_bf16(decode(kind, raw).reshape(-1, inputs)).astype(np.float64)
    d_out = torch.randn(3, OUTS, generator=torch.Generator().manual_seed(3))
    rows = round_to_bf16(d_out.numpy()).astype(np.float64)
    error = np.abs(linear.backward(d_out).double().numpy() - rows @ weights)
    assert (error <= (OUTS + 4) * 2.0**-24 * (np.abs(rows) @ np.abs(weights)) + 1e-30).all()


PAIRS = [
    *((kind, kind) for kind in INTEGER),
    ("Q4_K", "Q6_K"),
    ("Q8_0", "Q5_0"),
    ("Q3_K", "Q4_K"),
    ("Q6_K", "IQ4_XS"),
]
"""Types of gate and up, and of down."""


QUICK = [("NVFP4", "NVFP4"), ("IQ2_XXS", "IQ2_XXS"), ("Q4_K", "Q6_K"), ("Q8_0", "Q5_0")]
"""Formats alone and beside each other; products of a matrix, above, have all of them."""


@pytest.mark.parametrize(("outer", "last"), rest_slow(QUICK, PAIRS))
def test_experts_are_those_of_the_weights(outer, last, pool):
    """In one part, and in parts that are whole superblocks, packed or copied from one."""
    hidden, inner, top_k = 256, 768, 2
    kinds = (outer, outer, last)
    weight_format = pair_formats(
        find_format(BLOCK_TYPES[outer].weight_format), find_format(BLOCK_TYPES[last].weight_format)
    )
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    raws = [
        [
            draw(kind, *shape, seed=3 * e + i, std=shape[1] ** -0.5)
            for i, (kind, shape) in enumerate(zip(kinds, shapes, strict=True))
        ]
        for e in range(2)
    ]
    banks = [
        PackedExperts(weight_format, 2, hidden, inner, pool=pool, num_parts=parts)
        for parts in (1, 3)
    ]
    for bank in banks:
        for e, matrices in enumerate(raws):
            gate, up, down = (
                lay_out(kind, raw, shape[1])
                for kind, raw, shape in zip(kinds, matrices, shapes, strict=True)
            )
            bank.pack_codes(e, gate, up, down)
    banks.append(
        PackedExperts(
            weight_format,
            2,
            hidden,
            inner,
            pool=pool,
            num_parts=3,
            storage=banks[0].packed.reshape(-1),
        )
    )
    values = [
        np.stack([decode(kind, raws[e][i]).reshape(shape) for e in range(2)]).astype(np.float64)
        for i, (kind, shape) in enumerate(zip(kinds, shapes, strict=True))
    ]
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(7, hidden, generator=generator)
    ids = torch.tensor([[0, 1]] * 6 + [[1, -1]])
    router = torch.rand(7, top_k, generator=generator)
    layer = Layer(weight_format, values[0], values[1], values[2])
    want, bound = run_experts(layer, x.numpy(), ids.numpy(), router.double().numpy())
    results = [bank.forward(x, ids, router) for bank in banks]
    for got in results:
        assert (np.abs(got.double().numpy() - want) <= 3 * bound).all()
    assert torch.equal(results[1], results[2])
    d_out = torch.randn(7, hidden, generator=generator)
    gradients = [bank.backward(x, ids, router, d_out)[0] for bank in banks]
    wide = [torch.from_numpy(v).float().requires_grad_(False) for v in values]
    inputs = x.clone().requires_grad_()
    y = torch.zeros(7, hidden)
    for e in range(2):
        gate, up, down = (v[e] for v in wide)
        h = torch.nn.functional.silu(inputs @ gate.T) * (inputs @ up.T)
        y = y + ((ids == e) * router).sum(-1, keepdim=True) * (h @ down.T)
    (want_grad,) = torch.autograd.grad(y, inputs, d_out)
    # Three roundings to bf16, and activations in int8.
    for gradient in gradients:
        assert (gradient - want_grad).norm() <= 0.03 * want_grad.norm()


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_numbers_that_are_not_finite_are_refused(kind, pool):
    """Infinities and NaN of a block's fp16 numbers, by the output that has them."""
    for at in HALVES[kind]:
        for half in (0x7C00, 0xFC00, 0x7E01):
            matrix = lay_out(kind, draw(kind, OUTS, 512), 512)
            matrix.parts[0][1][66, at : at + 2] = np.array([half], "<u2").view(np.uint8)
            with pytest.raises(UnsupportedError, match="output 66"):
                PackedLinear.from_codes(matrix, pool=pool)


def test_what_blocks_alone_hold_is_not_coded_from_values(pool):
    """Neither values, nor inputs that are no superblocks, nor blocks of another type."""
    q4k = find_format("q4k")
    with pytest.raises(UnsupportedError, match="laid out from a file's blocks"):
        PackedLinear.pack(q4k, torch.ones(64, 256), pool=pool)
    with pytest.raises(ShapeError, match="256"):
        PackedLinear(q4k, 320, 64, pool=pool)
    raw = draw_blocks("Q5_K", 64)
    with pytest.raises(UnsupportedError, match="Q5_K"):
        PackedLinear.from_codes(BlockMatrix(q4k, 256, (("Q5_K", raw),)), pool=pool)

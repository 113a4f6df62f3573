"""Goal: the promises of PackedLinear, and its arithmetic.

Method: the float64 oracle of ``tandem.kernels.oracles.packed`` with its derived tolerance, and
mutants of it that must be told apart; bitwise comparisons between batches, threads and instruction
sets; every refusal with its class and its words. What it shares with PackedExperts (coding, layout)
is tested there.
"""

import threading

import numpy as np
import pytest
import torch

from each import each
from tandem._native import PackedMatrix, ThreadPool, kernel_isas
from tandem.core.errors import (
    ConfigError,
    ConflictError,
    NotFoundError,
    ShapeError,
    UnsupportedError,
)
from tandem.kernels.cpu.linear import PackedLinear, count_bytes
from tandem.kernels.oracles.packed import decode, run_linear
from tandem.kernels.weights.formats import WEIGHT_FORMATS, WeightFormat

ISAS = [*kernel_isas(), "amx_emulated"]
"""The last has AMX's arithmetic in plain code; it is never chosen unless it is named."""
SLOW_ISAS = ("plain", "amx_emulated")
FORMATS = [name for name, held in WEIGHT_FORMATS.items() if not held.is_stored_only]
SOME_FORMATS = [
    "f32",
    "bf16",
    "fp8",
    "fp8row",
    "mxfp4",
    "int8row",
    "int8g128",
    "int8g16min",
    "int4g32",
    "int4g64sym",
    "int5g32",
]
EXACT_FORMATS = ["f32", *(name for name in FORMATS if WEIGHT_FORMATS[name].is_integer)]
"""One result on all instruction sets."""
INS, OUTS = 256, 200
BF16_EPS = 2.0**-8


@pytest.fixture(scope="module")
def pool() -> ThreadPool:
    return ThreadPool(2, oversubscribe=True)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_linear(
    name: str, pool: ThreadPool, isa: str | None = None, *, ins: int = INS, outs: int = OUTS
) -> PackedLinear:
    weights, bias = draw(outs, ins) / ins**0.5, draw(outs, seed=1)
    return PackedLinear.pack(WEIGHT_FORMATS[name], weights, bias, pool=pool, isa=isa)


def check(name: str, x: torch.Tensor, pool: ThreadPool, *isas: str, outs: int = OUTS) -> None:
    ins, weight_format = x.shape[1], WEIGHT_FORMATS[name]
    weights = decode((draw(outs, ins) / ins**0.5).numpy(), weight_format)
    bias = draw(outs, seed=1).double().numpy()
    want, bound = run_linear(x.float().numpy(), weights, bias, weight_format)
    assert np.isfinite(want).all()
    for isa in isas:
        linear = make_linear(name, pool, isa, ins=ins, outs=outs)
        got = linear.forward(x).double().numpy()
        worst = (np.abs(got - want) / bound).max(initial=0)
        assert worst <= 1, f"{isa}: error is {worst:.2f} of the tolerance"
        rounded = linear.forward(x, dtype=torch.bfloat16).double().numpy()
        is_near = np.abs(rounded - want) <= bound * (1 + BF16_EPS) + BF16_EPS * np.abs(want)
        assert is_near.all(), isa


# Arithmetic ----------------------------------------------------------------------------------


@each("name", FORMATS)
def test_matches_the_oracle(name: str, pool: ThreadPool):
    check(name, draw(9, INS, seed=2), pool, *ISAS)


@each(
    ("name", "ins", "outs"),
    [
        ("f32", 1, 1),
        ("f32", 77, 130),
        ("f32", 555, 65),
        ("bf16", 1, 1),
        ("bf16", 77, 130),
        ("fp8", 77, 130),
        ("fp8", 1, 300),
        ("fp8row", 77, 130),
        ("mxfp4", 50, 65),
        ("int8row", 77, 130),
        ("int8g16", 48, 1),
        ("int4g32", 160, 129),
    ],
)
def test_odd_sizes(name: str, ins: int, outs: int, pool: ThreadPool):
    check(name, draw(5, ins, seed=3), pool, *ISAS, outs=outs)


@each("name", SOME_FORMATS)
def test_every_regime(name: str, pool: ThreadPool):
    for rows in (0, 1, 2, 6, 7, 13, 47, 49, 193):
        check(name, draw(rows, INS, seed=4), pool, kernel_isas()[-1])


@each("name", ["f32", "bf16", "fp8", "fp8row", "mxfp4", "int8g32", "int4g32"])
@each("scale", [1e-38, 1e-20, 1e4, 1e15])
def test_magnitudes_of_the_input(name: str, scale: float, pool: ThreadPool):
    x = draw(5, INS, seed=5)
    x[:, :32] *= scale
    check(name, x, pool, *ISAS)
    check(name, draw(3, INS, seed=6) * scale, pool, *ISAS)


@each("name", SOME_FORMATS)
def test_input_in_bf16(name: str, pool: ThreadPool):
    check(name, draw(9, INS, seed=7).bfloat16(), pool, kernel_isas()[-1])


MUTANTS = {
    "none": lambda w, b: None,
    "scale by half a percent": lambda w, b: w.__imul__(1.005),
    "scale one row": lambda w, b: w[17].__imul__(1.01),
    "skip the last group": lambda w, b: w[:, -16:].fill(0),
    "zero 16 columns": lambda w, b: w[:, 16:32].fill(0),
    "swap two rows": lambda w, b: w.__setitem__([3, 5], w[[5, 3]]),
    "swap two inputs": lambda w, b: w.__setitem__((slice(None), [0, 1]), w[:, [1, 0]]),
    "forget the bias": lambda w, b: b.fill(0),
    "forget the last row": lambda w, b: w[-1].fill(0),
}


@each("name", SOME_FORMATS)
def test_mutants_are_caught(name: str, pool: ThreadPool):
    x = draw(6, INS, seed=8)
    got = make_linear(name, pool).forward(x).double().numpy()
    decoded = decode((draw(OUTS, INS) / INS**0.5).numpy(), WEIGHT_FORMATS[name])
    for mutant, change in MUTANTS.items():
        weights, bias = decoded.copy(), draw(OUTS, seed=1).double().numpy()
        change(weights, bias)
        want, bound = run_linear(x.numpy(), weights, bias, WEIGHT_FORMATS[name])
        assert (np.abs(got - want) > bound).any() == (mutant != "none"), mutant


@each("name", SOME_FORMATS)
def test_adds_into_a_residual(name: str, pool: ThreadPool):
    linear = make_linear(name, pool)
    x, residual = draw(9, INS, seed=9), draw(9, OUTS, seed=10)
    y = linear.forward(x)
    added = residual.clone()
    linear.add_into_(added, x)
    assert torch.equal(added, residual + y)
    narrow = residual.bfloat16()
    want = (narrow.float() + y).bfloat16()
    linear.add_into_(narrow, x)
    assert torch.equal(narrow, want)


# Invariance ----------------------------------------------------------------------------------


@each("name", SOME_FORMATS)
def test_a_row_does_not_depend_on_its_batch(name: str, pool: ThreadPool):
    for isa in ISAS:
        linear = make_linear(name, pool, isa)
        x = draw(300 if isa not in SLOW_ISAS else 40, INS, seed=11)
        whole = linear.forward(x)
        for size in (1, 2, 3, 7, 39):
            for begin in (0, 1, len(x) - size):
                part = slice(begin, begin + size)
                assert torch.equal(linear.forward(x[part]), whole[part]), isa
        pieces = [linear.forward(piece) for piece in x.split(64)]
        assert torch.equal(torch.cat(pieces), whole), isa


@each("name", SOME_FORMATS)
def test_threads_do_not_matter(name: str):
    x = draw(120, INS, seed=12)
    pools = [ThreadPool(threads, oversubscribe=True) for threads in (1, 2, 5)]
    results = [make_linear(name, pool).forward(x) for pool in pools]
    assert all(torch.equal(results[0], other) for other in results[1:])


@each("name", EXACT_FORMATS)
def test_integer_formats_and_f32_agree_bitwise_across_isas(name: str, pool: ThreadPool):
    x = draw(13, INS, seed=13)
    results = [make_linear(name, pool, isa).forward(x) for isa in ISAS]
    assert all(torch.equal(results[0], other) for other in results[1:])


@each("name", [name for name in FORMATS if WEIGHT_FORMATS[name].is_integer])
def test_sums_of_the_largest_codes_do_not_saturate(name: str, pool: ThreadPool):
    """255 times 127 twice is beyond 16 bits, where one of the instructions at hand stops."""
    weight_format = WEIGHT_FORMATS[name]
    for sign in (1.0, -1.0):
        weights, x = torch.full((70, INS), sign), torch.ones(6, INS)
        weights[:, ::16] = 0  # Else a group with minimum would be all codes 0.
        x[3:] = -1
        decoded = decode(weights.numpy(), weight_format)
        want, bound = run_linear(x.numpy(), decoded, np.zeros(70), weight_format)
        assert np.allclose(want, sign * x[:, :1].numpy() * INS * 15 / 16, rtol=0.01)
        for isa in ISAS:
            linear = PackedLinear.pack(weight_format, weights, pool=pool, isa=isa)
            assert (np.abs(linear.forward(x).double().numpy() - want) <= bound).all(), isa


@each("name", FORMATS)
def test_rows_are_those_of_the_unpacked_matrix(name: str, pool: ThreadPool):
    """Bitwise, in any order, as float32 and rounded once; the last panel has fewer outputs."""
    for isa in ISAS:
        linear = make_linear(name, pool, isa)
        values = linear.unpack()
        wanted = torch.tensor([OUTS - 1, 0, 17, 63 % OUTS, 17])
        assert torch.equal(linear.take_rows(wanted), values[wanted]), isa
        narrow = linear.take_rows(wanted, dtype=torch.bfloat16)
        assert torch.equal(narrow, values[wanted].bfloat16()), isa
        assert linear.take_rows(torch.empty(0, dtype=torch.int64)).shape == (0, INS)
        for absent in (-1, OUTS):
            with pytest.raises(ShapeError, match=f"row {absent} of {OUTS}"):
                linear.take_rows(torch.tensor([0, absent]))


def test_concurrent_callers_get_their_own_results(pool: ThreadPool):
    linear = make_linear("int8g128", pool)
    inputs = [draw(rows, INS, seed=rows) for rows in (1, 30, 2, 201)]
    want = [linear.forward(x) for x in inputs]
    wrong: list[int] = []

    def call(i: int) -> None:
        for _ in range(20):
            if not torch.equal(linear.forward(inputs[i]), want[i]):
                wrong.append(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


@each("name", SOME_FORMATS)
def test_bad_values_stay_in_their_row(name: str, pool: ThreadPool):
    for isa in ISAS:
        linear = make_linear(name, pool, isa)
        clean = linear.forward(draw(11, INS, seed=14))
        for bad in (float("nan"), float("inf")):
            x = draw(11, INS, seed=14)
            x[5, 17] = bad
            got = linear.forward(x)
            # Zero weights of float formats make NaN of infinity as well.
            assert not got[5].isfinite().any(), isa
            others = [row for row in range(11) if row != 5]
            assert torch.equal(got[others], clean[others]), isa


# Face ----------------------------------------------------------------------------------------


def test_leading_dimensions(pool: ThreadPool):
    linear = make_linear("int4g32", pool)
    x = draw(6, INS, seed=15)
    want = linear.forward(x)
    assert torch.equal(linear.forward(x.view(2, 3, INS)), want.view(2, 3, OUTS))
    assert torch.equal(linear.forward(x[0]), want[0])
    assert linear.forward(x[:0]).shape == (0, OUTS)
    residual = torch.zeros(2, 3, OUTS)
    linear.add_into_(residual, x.view(2, 3, INS))
    assert torch.equal(residual.view(6, OUTS), want)


@each("name", SOME_FORMATS)
def test_rows_packed_one_block_after_the_other(name: str, pool: ThreadPool):
    weight_format = WEIGHT_FORMATS[name]
    weights = draw(300, INS)
    whole = PackedLinear.pack(weight_format, weights, pool=pool)
    pieces = PackedLinear(weight_format, INS, 300, pool=pool)
    pieces.pack_rows(128, weights[128:])
    pieces.pack_rows(0, weights[:128])
    np.testing.assert_array_equal(pieces.packed, whole.packed)
    narrow = PackedLinear.pack(weight_format, weights.bfloat16(), pool=pool)
    wide = PackedLinear.pack(weight_format, weights.bfloat16().float(), pool=pool)
    np.testing.assert_array_equal(narrow.packed, wide.packed)


@each("name", FORMATS)
def test_packed_bytes_agree_across_isas(name: str, pool: ThreadPool):
    weights = draw(130, INS) * torch.logspace(-8, 2, INS)
    packed = [
        PackedLinear.pack(WEIGHT_FORMATS[name], weights, pool=pool, isa=isa).packed for isa in ISAS
    ]
    for other in packed[1:]:
        np.testing.assert_array_equal(packed[0], other)


def test_storage_is_viewed(pool: ThreadPool):
    weight_format = WEIGHT_FORMATS["int8row"]
    linear = make_linear("int8row", pool)
    size_bytes = count_bytes(weight_format, INS, OUTS)
    assert linear.size_bytes == size_bytes == len(linear.packed)
    mapped = np.zeros(size_bytes + 64, np.uint8)
    start = -mapped.ctypes.data % 64
    mapped = mapped[start : start + size_bytes]
    mapped[:] = linear.packed
    mapped.flags.writeable = False
    reader = PackedLinear(weight_format, INS, OUTS, pool=pool, storage=mapped)
    reader.set_bias(draw(OUTS, seed=1))
    x = draw(3, INS, seed=16)
    assert torch.equal(reader.forward(x), linear.forward(x))
    with pytest.raises(ConflictError, match="read-only"):
        reader.pack_rows(0, draw(OUTS, INS))
    with pytest.raises(ShapeError, match="storage of"):
        PackedLinear(weight_format, INS, OUTS, pool=pool, storage=mapped[64:])


def test_refuses_what_does_not_fit(pool: ThreadPool):
    int8 = WEIGHT_FORMATS["int8g128"]
    linear = make_linear("int8g128", pool)
    x = draw(4, INS)
    for words, wrong in {
        r"x is \[4, 255\]": x[:, 1:].contiguous(),
        "x is .*contiguous": x.repeat(1, 2)[:, ::2],
        "float32 or bfloat16": x.double(),
    }.items():
        with pytest.raises(ShapeError, match=words):
            linear.forward(wrong)
    with pytest.raises(ShapeError, match="x is"):
        linear.forward(x.view(2, 2, INS).transpose(0, 1))
    with pytest.raises(ShapeError, match="out is"):
        linear.forward(x, dtype=torch.float16)
    with pytest.raises(ShapeError, match="residual"):
        linear.add_into_(torch.zeros(3, OUTS), x)
    with pytest.raises(ShapeError, match="out is"):
        linear.add_into_(torch.zeros(4, OUTS + 1), x)
    with pytest.raises(ShapeError, match="bias is"):
        linear.set_bias(torch.zeros(OUTS + 1))
    with pytest.raises(ShapeError, match=r"give \[N, K\]"):
        PackedLinear.pack(int8, torch.zeros(INS), pool=pool)
    for first_row, rows in ((64, OUTS - 64), (0, 100), (128, 73), (-128, 128)):
        with pytest.raises(ShapeError, match="whole blocks of 128 rows"):
            linear.pack_rows(first_row, torch.zeros(rows, INS))
    with pytest.raises(ShapeError, match="group of 128"):
        PackedLinear(int8, 192, 1, pool=pool)
    with pytest.raises(ShapeError, match="beyond 65536"):
        PackedLinear(WEIGHT_FORMATS["int8row"], 2**17, 1, pool=pool)
    with pytest.raises(UnsupportedError, match="3 bits"):
        PackedLinear(WeightFormat("int3", 3, 32), 128, 1, pool=pool)
    with pytest.raises(ConfigError, match="size 0"):
        PackedLinear(int8, 128, 0, pool=pool)
    with pytest.raises(ConfigError, match="unknown ISA"):
        PackedLinear(int8, 128, 1, pool=pool, isa="sse9")


@each("name", SOME_FORMATS)
def test_pack_refuses_weights_that_are_not_finite(name: str, pool: ThreadPool):
    for bad in (float("nan"), float("-inf")):
        weights = draw(OUTS, INS)
        weights[150, 255] = bad
        with pytest.raises(UnsupportedError, match="output 1"):
            PackedLinear.pack(WEIGHT_FORMATS[name], weights, pool=pool)


# Nodes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("outs", [40, 200, 645])
def test_outputs_spread_over_nodes_are_those_in_place(outs: int, pool: ThreadPool):
    """As many logical nodes as there are sub-pools: linear_test.cc; here, what a model asks for."""
    weight_format, node = WEIGHT_FORMATS["int8g32"], pool.node_ids[0]
    weights, x = draw(outs, INS), draw(9, INS, seed=2)
    plain = PackedLinear.pack(weight_format, weights, pool=pool)
    assert not plain.is_bound
    bound = PackedLinear.pack(weight_format, weights, pool=pool, is_bound=True)
    assert torch.equal(bound.forward(x), plain.forward(x))
    sizes = {"in_features": INS, "out_features": outs}
    spread = PackedMatrix(**weight_format.fields, **sizes, share_nodes=[node] * 3)
    spread.pack(pool, weights)
    out = torch.empty(9, outs)
    spread.forward(pool, x, out)
    assert torch.equal(out, plain.forward(x))
    assert np.array_equal(spread.array(), plain.packed)
    if bound.is_bound:
        try:
            assert bound.find_share_nodes() == pool.node_ids
            assert spread.find_share_nodes() == [node] * 3
        except UnsupportedError as error:
            assert "move_pages" in str(error)  # A container may refuse to say.


def test_nodes_are_checked(pool: ThreadPool):
    fields = {**WEIGHT_FORMATS["bf16"].fields, "in_features": 64, "out_features": 64}
    with pytest.raises(NotFoundError, match="4096"):
        PackedMatrix(**fields, share_nodes=[4096])
    weight_format = WEIGHT_FORMATS["bf16"]
    packed = PackedLinear(weight_format, 64, 64, pool=pool).packed
    with pytest.raises(ConfigError, match="nodes for storage"):
        PackedLinear(weight_format, 64, 64, pool=pool, storage=packed, is_bound=True)

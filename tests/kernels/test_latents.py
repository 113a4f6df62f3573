"""Goal: multi-head latent attention is the formula of its paper, and bitwise invariant.

Method: the native parts (rows of queries and keys, matrices of heads) against float64 oracles
within derived bounds, on every ISA; the operator whole, native and in torch, against an oracle that
expands every key and value, which absorbs nothing; mutants must leave the bounds. Alone and in
company, on one thread and on two, results are bitwise equal.
"""

import msgspec
import numpy as np
import pytest
import torch

from each import each
from tandem import _native
from tandem.core.errors import ShapeError
from tandem.core.kv_layout import MlaLayout
from tandem.core.model.layers import MlaSpec, RopeSpec
from tandem.kernels import paged, tolerance
from tandem.kernels.cpu.device import CPU
from tandem.kernels.cpu.linear import PackedLinear
from tandem.kernels.devices import choose_execution
from tandem.kernels.native import Buffer
from tandem.kernels.operators.mla import MlaAttention
from tandem.kernels.operators.operator import running
from tandem.kernels.operators.rope import Rope
from tandem.kernels.oracles import reference
from tandem.kernels.paged import PagedBatch, PagedKvCache, SequenceChunk
from tandem.kernels.weights.formats import find_format
from tandem.kernels.weights.head_matrix import PackedHeads, choose_head_format, count_head_bytes
from tandem.kernels.weights.matrix import TENSORS, MatrixSettings

ISAS = _native.kernel_isas()
both_dtypes = each("dtype", [torch.float32, torch.bfloat16])
every_isa = each("isa", ISAS)
FORMATS = ["bf16", "fp8", "fp8row", "int8row", "int8g16", "int8g32min", "int4g32", "int4g32sym"]
HEADS, RANK, ROPE, NOPE, VALUE = 4, 32, 8, 16, 24


@pytest.fixture(scope="module")
def pool():
    return _native.ThreadPool(2)


def view(tensor):
    return _native.TensorView(tensor)


def make_rows(draw, dtype, num_tokens=5, rope=ROPE):
    """Queries and latents as slices of a wider row, a norm's weight, and angles."""
    wide = draw(num_tokens, HEADS * (NOPE + rope) + RANK + rope, dtype=dtype)
    q = wide[:, : HEADS * (NOPE + rope)].unflatten(1, (HEADS, NOPE + rope))
    kv = wide[:, HEADS * (NOPE + rope) :]
    angles = draw(num_tokens, max(rope, 1) // 2, dtype=torch.float32)
    cos, sin = (torch.cat((f(angles), f(angles)), 1).to(dtype) for f in (torch.cos, torch.sin))
    return q, kv, 1 + draw(RANK, dtype=dtype, scale=0.1), cos, sin


def place(q, kv, weight, cos, sin, **options):
    out = torch.full((len(q), HEADS + 1, kv.shape[1]), 9.0, dtype=q.dtype)
    _native.place_latents(
        view(q), view(kv), view(weight), 1e-6, view(cos), view(sin), view(out), **options
    )
    return out


def rows_by_oracle(q, kv, weight, cos, sin, wide):
    """The rows, and how large what was added to them is."""
    expected = np.full((len(q), HEADS + 1, kv.shape[1]), 9.0)
    c, s = wide(cos), wide(sin)
    ends = np.concatenate([wide(q)[..., NOPE:], wide(kv)[:, None, RANK:]], 1)
    expected[..., RANK:] = reference.rotate(ends, c, s)
    expected[:, HEADS, :RANK] = reference.rms_norm(wide(kv)[:, :RANK], wide(weight), 1e-6)
    size = np.abs(expected)
    swapped = np.roll(ends, ends.shape[-1] // 2, -1)
    size[..., RANK:] = np.abs(ends * c[:, None]) + np.abs(swapped * s[:, None])
    return expected, size


def bound_rows(expected, size, dtype):
    bound = 4 * tolerance.ACCUMULATE_EPS * size
    bound += tolerance.UNIT_ROUNDOFF[dtype] * np.abs(expected)
    key = expected[:, HEADS, :RANK]
    bound[:, HEADS, :RANK] = tolerance.rms_norm(key, dtype)
    return bound


@every_isa
@both_dtypes
@each("rope", [2, 8, 64])
def test_rows_of_queries_and_keys(isa, dtype, rope, draw, wide, count_outside):
    rows = make_rows(draw, dtype, rope=rope)
    expected, size = rows_by_oracle(*rows, wide)
    got = place(*rows, isa=isa)
    assert count_outside(got, expected, bound_rows(expected, size, dtype)) == 0
    # What the absorbed product writes was left alone.
    assert (got[:, :HEADS, :RANK] == 9.0).all()


@both_dtypes
@each("mutant", ["sign", "next token", "not normed", "plain items"])
def test_mutants_of_rows_are_caught(mutant, dtype, draw, wide, count_outside):
    q, kv, weight, cos, sin = make_rows(draw, dtype)
    expected, size = rows_by_oracle(q, kv, weight, cos, sin, wide)
    if mutant == "sign":
        sin = -sin
    elif mutant == "next token":
        cos, sin = cos.roll(1, 0), sin.roll(1, 0)
    elif mutant == "not normed":
        weight = torch.ones_like(weight)
    else:
        q = q.roll(1, -1)
    got = place(q, kv, weight, cos, sin)
    assert count_outside(got, expected, bound_rows(expected, size, dtype)) > 5


@both_dtypes
def test_rows_are_bitwise_independent(dtype, draw, pool):
    rows = make_rows(draw, dtype, num_tokens=40)
    together = place(*rows, pool=pool)
    weight = rows[2]
    for i in (0, 7, 39):
        q, kv, cos, sin = (rows[j][i : i + 1] for j in (0, 1, 3, 4))
        assert torch.equal(place(q, kv, weight, cos, sin)[0], together[i])


def test_rows_that_would_be_read_out_of_bounds_are_refused(draw):
    q, kv, weight, cos, sin = make_rows(draw, torch.float32)
    for bad in (
        (q, kv[:4], weight, cos, sin),
        (q, kv[:, :RANK], weight, cos, sin),
        (q[..., :4], kv, weight, cos, sin),
        (q, kv, weight.bfloat16(), cos, sin),
        (q, kv, weight, cos[:, :4], sin[:, :4]),
        (q, kv, weight, cos, sin[:3]),
        (q.transpose(1, 2), kv, weight, cos, sin),
    ):
        with pytest.raises(ShapeError):
            place(*bad)
    with pytest.raises(ShapeError):
        _native.place_latents(
            view(q),
            view(kv),
            view(weight),
            1e-6,
            view(cos),
            view(sin),
            view(torch.empty(5, HEADS, 40)),
        )


@each("name", FORMATS)
@each("outs", [24, 64, 100, 192])
@each("num_tokens", [1, 7, 60])
def test_a_head_is_multiplied_with_its_own_matrix(name, outs, num_tokens, draw, pool):
    """Bitwise what each head's matrix, padded like all others, gives alone."""
    weight = draw(HEADS, outs, 64, dtype=torch.float32)
    x = draw(num_tokens, HEADS, 80, dtype=torch.bfloat16)[..., 8:72]
    packed = PackedHeads(find_format(name), weight, pool)
    out = torch.full((num_tokens, HEADS + 1, outs + 5), 7.0, dtype=torch.bfloat16)
    packed.run(Buffer(x), Buffer(out[:, :HEADS, 5:]))
    assert torch.equal(packed.forward(x), out[:, :HEADS, 5:])
    assert (out[:, HEADS] == 7.0).all()
    assert (out[..., :5] == 7.0).all()
    if name == "fp8":
        return  # Blocks of 128 outputs reach over two heads of 64.
    for head in range(HEADS):
        alone = PackedLinear.pack(find_format(name), weight[head], pool=pool)
        want = alone.forward(x[:, head].contiguous(), dtype=torch.bfloat16)
        assert torch.equal(out[:, head, 5:], want), head
    assert packed.size_bytes == count_head_bytes(find_format(name), HEADS, 64, outs)


@every_isa
@each("name", ["bf16", "int8g32"])
def test_heads_match_the_oracle(name, isa, draw, wide, count_outside, pool):
    weight_format = find_format(name)
    weight = draw(HEADS * 64, 64, dtype=torch.bfloat16)
    linear = PackedLinear.pack(weight_format, weight, pool=pool, isa=isa)
    x = draw(9, HEADS, 64, dtype=torch.bfloat16)
    got = torch.empty(9, HEADS, 64)
    linear.run_heads(Buffer(x), Buffer(got))
    heads = wide(weight).reshape(HEADS, 64, 64)
    expected = np.stack([reference.linear(wide(x)[:, h], heads[h]) for h in range(HEADS)], 1)
    if name == "bf16":
        bounds = [tolerance.linear(wide(x)[:, h], heads[h], torch.float32) for h in range(HEADS)]
        assert count_outside(got, expected, np.stack(bounds, 1)) == 0
    off = np.abs(got.double().numpy() - expected)
    assert np.linalg.norm(off) < 0.02 * np.linalg.norm(expected)
    assert np.linalg.norm(off) < 0.1 * np.linalg.norm(
        got.double().numpy() - np.roll(expected, 1, 1)
    )


def test_heads_that_do_not_share_the_outputs_are_refused(draw, pool):
    linear = PackedLinear.pack(
        find_format("bf16"), draw(3 * 64, 64, dtype=torch.float32), pool=pool
    )

    def run(x_shape, out_shape):
        x, out = torch.zeros(x_shape), torch.zeros(out_shape)
        linear.run_heads(Buffer(x), Buffer(out))

    run((2, 3, 64), (2, 3, 64))
    for x_shape, out_shape in (
        ((2, 3, 32), (2, 3, 64)),
        ((2, 2, 64), (2, 2, 64)),
        ((2, 3, 64), (2, 3, 65)),
        ((2, 3, 64), (3, 3, 64)),
        ((2, 1, 64), (2, 1, 64)),
        ((2, 0, 64), (2, 0, 64)),
        ((2, 64), (2, 64)),
    ):
        with pytest.raises(ShapeError):
            run(x_shape, out_shape)


def test_a_head_with_few_inputs_falls_back_to_bf16():
    assert choose_head_format(None, 16) is None
    for name, ins, want in (
        ("int8g128", 128, "int8g128"),
        ("int8g128", 64, "bf16"),
        ("int4g32", 48, "bf16"),
        ("bf16", 17, "bf16"),
    ):
        chosen = choose_head_format(find_format(name), ins)
        assert chosen is not None
        assert chosen.name == want


HIDDEN = 48
PLAIN = MlaSpec(
    hidden_size=HIDDEN,
    num_heads=HEADS,
    rank=RANK,
    rope=ROPE,
    nope=NOPE,
    value=VALUE,
    scale=0.3,
    norm_eps=1e-6,
    has_bias=True,
)
SIZES = {"plain queries": PLAIN, "compressed": msgspec.structs.replace(PLAIN, q_rank=20)}
PARAMETERS = RopeSpec(
    head_dim=ROPE,
    rope_type="yarn",
    factor=8.0,
    mscale=0.7,
    mscale_all_dim=0.9,
    original_max_position_embeddings=64,
)


def make_weights(draw, sizes, *, has_bias=True):
    """Every tensor of a layer, by its checkpoint name."""
    rows = sizes.num_heads * sizes.head
    shapes = {"kv_a_proj_with_mqa": (sizes.key, HIDDEN)}
    if sizes.q_rank:
        shapes |= {"q_a_proj": (sizes.q_rank, HIDDEN), "q_b_proj": (rows, sizes.q_rank)}
    else:
        shapes["q_proj"] = (rows, HIDDEN)
    shapes["kv_b_proj"] = (sizes.num_heads * (sizes.nope + sizes.value), sizes.rank)
    shapes["o_proj"] = (HIDDEN, sizes.num_heads * sizes.value)
    f32 = torch.float32
    weights = {
        f"a.{name}.weight": draw(n, k, dtype=f32, scale=k**-0.5) for name, (n, k) in shapes.items()
    }
    norms = {"kv_a_layernorm": sizes.rank} | (
        {"q_a_layernorm": sizes.q_rank} if sizes.q_rank else {}
    )
    for name, size in norms.items():
        weights[f"a.{name}.weight"] = 1 + draw(size, dtype=f32, scale=0.3)
    for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"):
        if has_bias and name in shapes:
            weights[f"a.{name}.bias"] = draw(shapes[name][0], dtype=f32, scale=0.3)
    return weights


def make_operator(reader, sizes, *, dtype=torch.float32, settings=TENSORS, is_interleaved=True):
    spec = msgspec.structs.replace(sizes, is_interleaved=is_interleaved)
    operator = MlaAttention(spec, layer_idx=1, settings=settings)
    operator.load(reader, "a")
    return operator


def run_operator(operator, x, cuts=(), *, dtype=torch.float32, block_size=16):
    """The attention's output for one sequence, in pieces, over blocks in another order."""
    layout = MlaLayout(
        num_layers=2,
        kv_lora_rank=RANK,
        rope_dim=ROPE,
        block_size=block_size,
        dtype="float32" if dtype == torch.float32 else "bfloat16",
    )
    cache = PagedKvCache(layout, 8)
    parts = []
    for begin, end in zip((0, *cuts), (*cuts, len(x)), strict=True):
        chunk = SequenceChunk([0] * (end - begin), begin, [5, 2, 7, 0])
        batch = PagedBatch.build([chunk], block_size)
        execution = choose_execution(CPU, dtype)
        step = execution.begin_step(batch, cache, (Rope(PARAMETERS),), dtype)
        with torch.inference_mode(), running(step):
            parts.append(operator(x[None, begin:end])[0][0].clone())
    return torch.cat(parts)


def by_oracle(weights, sizes, x, *, is_interleaved=True):
    wide = {name.removeprefix("a."): w.double().numpy() for name, w in weights.items()}
    return reference.latent_attention(
        x.double().numpy(),
        wide,
        np.arange(len(x)),
        PARAMETERS,
        num_heads=sizes.num_heads,
        nope=sizes.nope,
        scale=0.3,
        eps=1e-6,
        is_interleaved=is_interleaved,
    )


OPERATOR_BOUND = {torch.float32: 60 * 2.0**-24, torch.bfloat16: 12 * 2.0**-9}
"""Of the error's norm: roundings of float32 in sums of up to 72 random products and six stages, of
which softmax amplifies those before it by scores of up to ten; in bfloat16 the same stages round
their results, once each."""


@pytest.mark.parametrize("runs_in_torch", [False, True], ids=["native", "torch"])
@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize("kind", SIZES)
def test_the_operator_is_the_paper(
    kind, is_interleaved, runs_in_torch, draw, make_reader, monkeypatch
):
    sizes = SIZES[kind]
    weights = make_weights(draw, sizes)
    operator = make_operator(
        make_reader(weights, torch.float32), sizes, is_interleaved=is_interleaved
    )
    x = draw(50, HIDDEN, dtype=torch.float32)
    want = by_oracle(weights, sizes, x, is_interleaved=is_interleaved)
    if runs_in_torch:
        monkeypatch.setattr(paged, "is_native", lambda tensor: False)
    for cuts in ((), (1, 20, 21, 49)):
        got = run_operator(operator, x, cuts).double().numpy()
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert error < OPERATOR_BOUND[torch.float32], cuts
    for mutant in ("rotation", "latent norm", "value"):
        changed = {name: w.clone() for name, w in weights.items()}
        if mutant == "latent norm":
            changed["a.kv_a_layernorm.weight"][3] += 0.1
        elif mutant == "value":
            changed["a.kv_b_proj.weight"][NOPE] *= 1.1
        other = by_oracle(changed, sizes, x, is_interleaved=is_interleaved ^ (mutant == "rotation"))
        error = np.linalg.norm(got - other) / np.linalg.norm(other)
        assert error > 10 * OPERATOR_BOUND[torch.float32], mutant


@each("kind", SIZES)
@each("name", ["bf16", "int8g16"])
def test_packed_operators_are_near_and_bitwise_invariant(kind, name, draw, make_reader):
    sizes = SIZES[kind] if name == "bf16" else SIZES["plain queries"]
    weights = {
        key: w.bfloat16().float() for key, w in make_weights(draw, sizes, has_bias=True).items()
    }
    x = draw(50, HIDDEN, dtype=torch.bfloat16)
    results = []
    for num_threads in (1, 2):
        settings = MatrixSettings(find_format(name), _native.ThreadPool(num_threads))
        reader = make_reader(weights, torch.bfloat16)
        operator = make_operator(reader, sizes, settings=settings)
        assert operator.packed_bytes
        results += [
            run_operator(operator, x, cuts, dtype=torch.bfloat16)
            for cuts in ((), (1, 20, 21, 49), tuple(range(1, 50)))
        ]
    assert all(torch.equal(result, results[0]) for result in results)
    want = by_oracle(weights, sizes, x)
    error = np.linalg.norm(results[0].double().numpy() - want) / np.linalg.norm(want)
    assert error < OPERATOR_BOUND[torch.bfloat16] * (1 if name == "bf16" else 2)

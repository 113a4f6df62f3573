"""Goal: the native decode attention is exact, invariant, and refuses what would read out of bounds.

Method: against the float64 oracle over scattered blocks, on every ISA here; bitwise comparisons
alone, in company and over threads.
"""

import math

import numpy as np
import pytest
import torch

from tandem import _native
from tandem.core.errors import ConfigError, ShapeError, TandemError

LAYERS, KV_HEADS, BLOCK, BLOCKS = 2, 2, 8, 24


def list_isas() -> list[str]:
    found = []
    for isa in ("plain", "avx2", "avx512_bw", "avx512_vnni", "avx512_bf16"):
        try:
            plan(*make_case([3], 16), isa=isa)
        except TandemError:
            continue
        found.append(isa)
    return found


def make_case(contexts, head_dim, kv_dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (BLOCKS, LAYERS, 2, KV_HEADS, BLOCK, head_dim)
    kv = torch.randn(shape, generator=generator).to(kv_dtype)
    width = max(-(-context // BLOCK) for context in contexts)
    order = torch.randperm(BLOCKS, generator=generator)
    table = order[: len(contexts) * width].view(len(contexts), width).contiguous()
    return kv, table, torch.tensor(contexts)


def plan(kv, table, lens, pool=None, isa=""):
    return _native.DecodeAttention(kv, table, lens, pool, isa)


def oracle(kv, table, lens, layer, q, scale):
    """Softmax of scaled products over the context, in float64."""
    out = np.zeros(q.shape)
    kv64, q64 = kv.double().numpy(), q.double().numpy()
    group = q.shape[1] // KV_HEADS
    for s in range(q.shape[0]):
        for head in range(q.shape[1]):
            places = [divmod(t, BLOCK) for t in range(int(lens[s]))]
            pick = [kv64[int(table[s, b]), layer, :, head // group, o] for b, o in places]
            keys, values = np.array([p[0] for p in pick]), np.array([p[1] for p in pick])
            scores = keys @ q64[s, head] * scale
            weights = np.exp(scores - scores.max())
            out[s, head] = weights @ values / weights.sum()
    return out


@pytest.mark.parametrize("isa", list_isas())
@pytest.mark.parametrize("head_dim", [16, 64, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_equals_the_oracle(isa, head_dim, dtype, kv_dtype):
    kv, table, lens = make_case([1, 8, 9, 37], head_dim, kv_dtype)
    q = torch.randn(4, 6, head_dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = torch.full_like(q, math.nan)
    scale = head_dim**-0.5
    for layer in range(LAYERS):
        plan(kv, table, lens, isa=isa).run(layer, q, out, scale)
        expected = oracle(kv, table, lens, layer, q, scale)
        # A score's error is that of head_dim float32 products, an output's that of its context
        # of values below 5, and the weights' relative error is the scores' absolute one.
        eps = 2.0**-24
        bound = 8 * eps * (head_dim + 37) * 5
        if dtype is torch.bfloat16:
            bound += 2.0**-8 * np.abs(expected)
        assert (np.abs(out.double().numpy() - expected) <= bound).all()


@pytest.mark.parametrize("mutant", ["last token", "scale", "other head", "other layer"])
def test_the_bound_catches_mutants(mutant):
    kv, table, lens = make_case([1, 8, 9, 37], 64)
    q = torch.randn(4, 6, 64, generator=torch.Generator().manual_seed(1))
    out = torch.empty_like(q)
    run_lens = lens - (lens > 1).long() if mutant == "last token" else lens
    run_q = q.flip(1).contiguous() if mutant == "other head" else q
    scale = 0.125 * (1.01 if mutant == "scale" else 1.0)
    plan(kv, table, run_lens).run(int(mutant == "other layer"), run_q, out, scale)
    expected = oracle(kv, table, lens, 0, q, 0.125)
    bound = 8 * 2.0**-24 * (64 + 37) * 5
    assert (np.abs(out.double().numpy() - expected) > bound).any()


@pytest.mark.parametrize("isa", list_isas())
def test_bitwise_alone_in_company_and_over_threads(isa):
    kv, table, lens = make_case([5, 23, 1, 40], 64)
    q = torch.randn(4, 8, 64)
    together = torch.empty_like(q)
    plan(kv, table, lens, isa=isa).run(1, q, together, 0.1)
    for s in range(4):
        alone = torch.empty(1, 8, 64)
        rows = slice(s, s + 1)
        plan(kv, table[rows].contiguous(), lens[rows], isa=isa).run(1, q[rows], alone, 0.1)
        assert torch.equal(alone[0], together[s])


def test_threads_share_a_large_step_bitwise():
    shape = (64, 1, 2, KV_HEADS, 64, 64)
    kv = torch.randn(shape)
    table = torch.arange(64).view(8, 8)
    lens = torch.full((8,), 500)
    q = torch.randn(8, 8, 64)
    one, three = torch.empty_like(q), torch.empty_like(q)
    plan(kv, table, lens).run(0, q, one, 0.125)
    pool = _native.ThreadPool(3, oversubscribe=True)
    plan(kv, table, lens, pool).run(0, q, three, 0.125)
    assert torch.equal(one, three)


def test_strided_queries_of_a_fused_projection():
    kv, table, lens = make_case([4, 9], 16)
    qkv = torch.randn(2, 8, 16)
    out, expected = torch.empty(2, 4, 16), torch.empty(2, 4, 16)
    plan(kv, table, lens).run(0, qkv[:, :4], out, 0.25)
    plan(kv, table, lens).run(0, qkv[:, :4].contiguous(), expected, 0.25)
    assert torch.equal(out, expected)


def test_extreme_scores_and_nan_stay_where_they_are():
    kv, table, lens = make_case([9, 9], 16)
    q = torch.randn(2, 2, 16)
    q[0] *= 1e4  # One weight takes all: exp underflows to 0, never to NaN.
    out = torch.empty_like(q)
    plan(kv, table, lens).run(0, q, out, 1.0)
    assert torch.isfinite(out).all()
    q[0, 0, 0] = math.nan
    again = torch.empty_like(q)
    plan(kv, table, lens).run(0, q, again, 1.0)
    assert torch.isnan(again[0, 0]).all()
    assert torch.equal(again[1], out[1])


def test_what_would_read_out_of_bounds_is_refused():
    kv, table, lens = make_case([9, 9], 16)
    q = torch.randn(2, 2, 16)
    for bad_table in (table + BLOCKS, table - BLOCKS):
        with pytest.raises(ShapeError, match="block"):
            plan(kv, bad_table, lens)
    for bad_lens in (torch.tensor([0, 1]), torch.tensor([17, 1]), torch.tensor([-1, 1])):
        with pytest.raises(ShapeError, match="context"):
            plan(kv, table, bad_lens)
    with pytest.raises(ShapeError):
        plan(kv.half(), table, lens)
    with pytest.raises(ShapeError):
        plan(kv.transpose(3, 4), table, lens)
    with pytest.raises(ConfigError):
        plan(kv, table, lens, isa="mmx")
    good = plan(kv, table, lens)
    for bad_q in (q[:1], q[..., :8], torch.randn(2, 3, 16), torch.randn(2, 0, 16)):
        with pytest.raises(ShapeError):
            good.run(0, bad_q, torch.empty_like(bad_q), 1.0)
    with pytest.raises(ShapeError):
        good.run(LAYERS, q, torch.empty_like(q), 1.0)
    with pytest.raises(ShapeError):
        good.run(0, q, torch.empty(2, 2, 8), 1.0)

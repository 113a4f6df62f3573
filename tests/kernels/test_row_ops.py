"""Goal: the native row operators (norm, rotation, SwiGLU, router) are exact and invariant.

Method: against the float64 oracles within derived bounds on every ISA here; mutants must leave the
bound; alone and in company, on one thread and on three, and across ISAs the results are bitwise
equal; what would read out of bounds is refused.
"""

import math

import numpy as np
import pytest
import torch

from each import each
from tandem import _native
from tandem.core.errors import ConfigError, ShapeError
from tandem.kernels import tolerance
from tandem.kernels.oracles import reference

ISAS = _native.kernel_isas()
both_dtypes = each("dtype", [torch.float32, torch.bfloat16])
every_isa = each("isa", ISAS)


def view(tensor):
    return None if tensor is None else _native.TensorView(tensor)


def norm(x, weight, eps=1e-6, *, residual=None, out=None, **options):
    out = torch.full_like(residual if residual is not None else x, math.nan) if out is None else out
    _native.rms_norm(view(x), view(weight), view(out), eps, view(residual), **options)
    return out


@every_isa
@both_dtypes
@each("size", [1, 16, 63, 64, 200, 2048])
@each("scale", [1e-30, 1.0, 1e15])
def test_norm(isa, dtype, size, scale, draw, wide, count_outside):
    x, weight = draw(5, size, dtype=dtype, scale=scale), draw(size, dtype=dtype)
    expected = reference.rms_norm(wide(x), wide(weight), 1e-6)
    bound = tolerance.rms_norm(expected, dtype)
    assert count_outside(norm(x, weight, isa=isa), expected, bound) == 0


@every_isa
@both_dtypes
@each("x_dtype", [torch.float32, torch.bfloat16])
def test_norm_adds_to_the_residual(isa, dtype, x_dtype, draw, wide, count_outside):
    x, weight, residual = (
        draw(4, 100, dtype=x_dtype),
        draw(100, dtype=dtype),
        draw(4, 100, dtype=dtype),
    )
    total = (residual.float() + x.float()).to(dtype)
    out = norm(x, weight, residual=residual, isa=isa)
    assert torch.equal(residual, total)
    expected = reference.rms_norm(wide(total), wide(weight), 1e-6)
    assert count_outside(out, expected, tolerance.rms_norm(expected, dtype)) == 0


@each("mutant", ["eps", "last item", "weight"])
@both_dtypes
def test_norm_mutants(mutant, dtype, draw, wide, count_outside):
    x, weight = draw(5, 96, dtype=dtype, scale=1e-2), draw(96, dtype=dtype)
    expected = reference.rms_norm(wide(x), wide(weight), 1e-5)
    eps = 1e-6 if mutant == "eps" else 1e-5
    if mutant == "last item":
        x = x.clone()
        x[:, -1] = 0
    if mutant == "weight":
        weight = weight.roll(1)
    out = norm(x, weight, eps)
    assert count_outside(out, expected, tolerance.rms_norm(expected, dtype)) > 0


@both_dtypes
def test_rows_are_bitwise_independent(dtype, draw):
    """Of company, threads, strides and ISA."""
    x, weight = draw(700, 300, dtype=dtype), draw(300, dtype=dtype)
    together = norm(x, weight)
    pool = _native.ThreadPool(3, oversubscribe=True)
    assert torch.equal(norm(x, weight, pool=pool), together)
    for row in (0, 350, 699):
        assert torch.equal(norm(x[row : row + 1], weight)[0], together[row])
    for isa in ISAS:
        assert torch.equal(norm(x[:9], weight, isa=isa), together[:9])
    padded = torch.zeros(700, 310, dtype=dtype)
    padded[:, :300] = x
    assert torch.equal(norm(padded[:, :300], weight, out=padded[:, :300]), together)
    assert not padded[:, 300:].any()


def test_a_nan_stays_in_its_row(draw):
    x = draw(3, 70, dtype=torch.float32)
    x[1, 69] = math.nan
    out = norm(x, torch.ones(70))
    assert out.isnan().any(1).tolist() == [False, True, False]


def rotate_by_oracle(x, cos, sin, heads, weights, eps, wide):
    """Each head normed by its weight, if any, then its first items rotated.

    Returns the result and the sum of the magnitudes that each item is made of.
    """
    rotary = cos.shape[1]
    expected, magnitude = wide(x).copy(), np.abs(wide(x))
    for h in range(sum(heads)):
        head, weight = expected[:, h], weights[h >= heads[0]]
        if weight is not None:
            head = reference.rms_norm(head, wide(weight), eps)
        turned = reference.rotate(head[:, None, :rotary], wide(cos), wide(sin))[:, 0]
        expected[:, h] = np.concatenate([turned, head[:, rotary:]], -1)
        magnitude[:, h] = np.abs(head)
        magnitude[:, h, :rotary] += np.abs(np.roll(head[:, :rotary], rotary // 2, -1))
    return expected, magnitude


def bound_rotation(expected, magnitude, size, dtype):
    """Norm, then two products and their sum; in between nothing is rounded to the dtype."""
    bound = (size / 2 + 8) * tolerance.ACCUMULATE_EPS * magnitude
    return bound + tolerance.UNIT_ROUNDOFF[dtype] * np.abs(expected)


ROTATION_MUTANTS = {
    "none": {},
    "signs swapped": {"sin_sign": -1},
    "angles of the next token": {"shift": 1},
    "one head left out": {"heads": (2, 2)},
    "weights of q and k swapped": {"swapped": True},
    "another epsilon": {"eps": 1e-3},
    "one item fewer rotated": {"rotary": 30},
}


@both_dtypes
@each("mutant", ROTATION_MUTANTS)
def test_rotation_mutants(mutant, dtype, draw, wide, count_outside):
    x, q, k = draw(6, 5, 48, dtype=dtype), draw(48, dtype=dtype), draw(48, dtype=dtype)
    angles = draw(7, 16, dtype=torch.float32) * 3
    cos, sin = (torch.cat((part, part), -1).to(dtype) for part in (angles.cos(), angles.sin()))
    expected, magnitude = rotate_by_oracle(x, cos[:6], sin[:6], (3, 2), (q, k), 1e-6, wide)
    bound = bound_rotation(expected, magnitude, 48, dtype)
    wrong = ROTATION_MUTANTS[mutant]
    first, size = wrong.get("shift", 0), wrong.get("rotary", 32)
    cos, sin = (part[first : first + 6, :size].contiguous() for part in (cos, sin))
    weights = (k, q) if wrong.get("swapped") else (q, k)
    out, heads = x.clone(), wrong.get("heads", (3, 2))
    sin *= wrong.get("sin_sign", 1)
    _native.rotate_heads(
        view(out), view(cos), view(sin), *heads, *map(view, weights), wrong.get("eps", 1e-6)
    )
    outside = count_outside(out, expected, bound)
    assert outside == 0 if mutant == "none" else outside > 0


@every_isa
@both_dtypes
@each(("size", "rotary"), [(16, 16), (64, 64), (128, 128), (80, 32), (20, 12)])
@each("normed", ["none", "both", "keys"])
def test_rotate_heads(isa, dtype, size, rotary, normed, draw, wide, count_outside):
    x = draw(6, 7, size, dtype=dtype)
    angles = draw(6, rotary // 2, dtype=torch.float32) * 3
    cos, sin = (torch.cat((part, part), -1).to(dtype) for part in (angles.cos(), angles.sin()))
    q, k = draw(size, dtype=dtype), draw(size, dtype=dtype)
    weights = {"none": (None, None), "both": (q, k), "keys": (None, k)}[normed]
    expected, magnitude = rotate_by_oracle(x, cos, sin, (3, 2), weights, 1e-6, wide)
    bound = bound_rotation(expected, magnitude, size, dtype)
    out = x.clone()
    _native.rotate_heads(
        view(out), view(cos), view(sin), 3, 2, view(weights[0]), view(weights[1]), 1e-6, isa=isa
    )
    assert count_outside(out, expected, bound) == 0
    assert torch.equal(out[:, 5:], x[:, 5:])
    if isa == ISAS[0]:
        for other in ISAS[1:]:
            again = x.clone()
            _native.rotate_heads(
                *(view(t) for t in (again, cos, sin)), 3, 2, *map(view, weights), 1e-6, isa=other
            )
            assert torch.equal(again, out)


@every_isa
@both_dtypes
@each("size", [1, 16, 37, 768])
def test_gate_of_silu(isa, dtype, size, draw, wide, count_outside):
    gate_up = draw(3, 2 * size, dtype=dtype, scale=3.0)
    gate_up[0, 0], gate_up[1, 0] = 90.0, -90.0
    out = torch.full((3, size), math.nan, dtype=dtype)
    _native.gate(view(gate_up), view(out), isa=isa)
    gate, up = np.split(wide(gate_up), 2, -1)
    expected = reference.silu(gate) * up
    relative = (tolerance.EXP_ULPS + 4) * tolerance.ACCUMULATE_EPS + tolerance.UNIT_ROUNDOFF[dtype]
    # Below exp(-87) the exponential is 0.
    bound = relative * np.abs(expected) + 1e-35
    assert count_outside(out, expected, bound) == 0
    gate_up[:, 0] *= 1.03
    _native.gate(view(gate_up), view(out), isa=isa)
    assert count_outside(out, expected, bound) > 0


def route(logits, top_k, scoring, *, weights_dtype=torch.float32, **options):
    rows = len(logits)
    weights = torch.full((rows, top_k), math.nan, dtype=weights_dtype)
    ids = torch.full((rows, top_k), -9)
    if "bias" in options:
        options["bias"] = view(options["bias"])
    _native.route(view(logits), view(weights), view(ids), scoring, **options)
    return weights, ids


SCORINGS = ["softmax", "softmax_normalised", "sigmoid", "sigmoid_normalised"]


@every_isa
@both_dtypes
@each("scoring", SCORINGS)
@each(("experts", "top_k"), [(1, 1), (8, 2), (60, 4), (128, 8), (256, 33)])
def test_route(isa, dtype, scoring, experts, top_k, draw, wide, count_outside):
    logits = draw(17, experts, dtype=dtype, scale=2.0)
    weights, ids = route(logits, top_k, scoring, weights_dtype=dtype, isa=isa)
    expected, expected_ids = reference.choose_experts(wide(logits), top_k, scoring)
    if scoring.startswith("sigmoid"):
        # What float32 rounds to one score may be ordered either way.
        found = np.take_along_axis(wide(logits), ids.numpy(), -1)
        chosen = np.take_along_axis(wide(logits), expected_ids, -1)
        np.testing.assert_allclose(found, chosen, atol=1e-5)
    else:
        assert np.array_equal(ids.numpy(), expected_ids)
    bound = tolerance.choose_experts(wide(logits), expected, dtype)
    assert count_outside(weights, expected, bound) == 0


@every_isa
@each("scoring", SCORINGS)
@each("num_choices", [1, 2])
def test_route_by_groups_with_bias(isa, num_choices, scoring, draw, wide, count_outside):
    logits, bias = draw(40, 64, dtype=torch.float32), draw(64, dtype=torch.float32)
    groups = {"num_groups": 8, "num_top_groups": 3, "num_group_choices": num_choices}
    weights, ids = route(logits, 6, scoring, bias=bias, weight_scale=2.5, isa=isa, **groups)
    expected, expected_ids = reference.choose_experts(
        wide(logits), 6, scoring, bias_E=wide(bias), **groups
    )
    assert np.array_equal(ids.numpy(), expected_ids)
    bound = tolerance.choose_experts(wide(logits), 2.5 * expected, torch.float32)
    assert count_outside(weights, 2.5 * expected, bound) == 0
    others = (
        {},
        groups | {"num_top_groups": 2},
        groups | {"num_groups": 4},
        groups | {"num_group_choices": 3 - num_choices},
    )
    for wrong in others:
        _, other = route(logits, 6, scoring, bias=bias, isa=isa, **wrong)
        assert not torch.equal(other, ids)
    _, other = route(logits, 6, scoring, isa=isa, **groups)
    assert not torch.equal(other, ids)


ROUTER_MUTANTS = {
    "none": {},
    "another scoring": {"scoring": "sigmoid"},
    "not normalised": {"scoring": "softmax"},
    "scale forgotten": {"weight_scale": 1.0},
    "bias in the weights": {"is_bias_added": True},
    "two experts swapped": {"swapped": (3, 9)},
}


@both_dtypes
@each("mutant", ROUTER_MUTANTS)
def test_router_mutants(mutant, dtype, draw, wide, count_outside):
    """Of the weights, in the order of expert ids; the choice is compared above."""
    logits, bias = draw(40, 16, dtype=dtype), draw(16, dtype=torch.float32)
    scoring, scale = "softmax_normalised", 2.5
    expected, expected_ids = reference.choose_experts(wide(logits), 5, scoring, bias_E=wide(bias))
    expected = spread_weights(scale * expected, expected_ids)
    bound = tolerance.choose_experts(wide(logits), expected, dtype)
    wrong = ROUTER_MUTANTS[mutant]
    if wrong.get("is_bias_added"):
        logits = (logits + bias).to(dtype)
    elif "swapped" in wrong:
        a, b = wrong["swapped"]
        logits[:, [a, b]] = logits[:, [b, a]]
    weights, ids = route(
        logits,
        5,
        wrong.get("scoring", scoring),
        bias=None if wrong.get("is_bias_added") else bias,
        weight_scale=wrong.get("weight_scale", scale),
    )
    found = torch.from_numpy(spread_weights(wide(weights), ids.numpy()))
    outside = count_outside(found, expected, bound)
    assert outside == 0 if mutant == "none" else outside > 0


def spread_weights(weights_TK, ids_TK):
    """Return the weight of each of 16 experts, 0 where it was not chosen."""
    spread = np.zeros((len(ids_TK), 16))
    np.put_along_axis(spread, ids_TK, weights_TK, -1)
    return spread


def test_route_is_deepseeks(draw):
    """transformers' own router of DeepSeek-V3, in float32."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

    config = DeepseekV3Config(
        hidden_size=32,
        n_routed_experts=32,
        n_group=8,
        topk_group=4,
        num_experts_per_tok=6,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    router = modeling.DeepseekV3TopkRouter(config)
    torch.nn.init.normal_(router.weight)
    bias = draw(32, dtype=torch.float32, scale=0.1)
    router.e_score_correction_bias.copy_(bias)
    with torch.no_grad():
        logits, want, want_ids = router(draw(50, 32, dtype=torch.float32))
    groups = {"num_groups": 8, "num_top_groups": 4}
    weights, ids = route(logits, 6, "sigmoid_normalised", bias=bias, weight_scale=2.5, **groups)
    order, want_order = ids.argsort(-1), want_ids.argsort(-1)
    assert torch.equal(ids.gather(1, order), want_ids.gather(1, want_order))
    torch.testing.assert_close(weights.gather(1, order), want.gather(1, want_order))


def test_route_is_deepseeks_second(draw):
    """transformers' own router of DeepSeek-V2: a group counts by its best expert alone."""
    from transformers import DeepseekV2Config
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as modeling

    config = DeepseekV2Config(
        hidden_size=32,
        n_routed_experts=32,
        n_group=8,
        topk_group=3,
        num_experts_per_tok=6,
        routed_scaling_factor=16.0,
        topk_method="group_limited_greedy",
    )
    router = modeling.DeepseekV2TopkRouter(config)
    torch.nn.init.normal_(router.weight)
    with torch.no_grad():
        logits, want, want_ids = router(draw(50, 32, dtype=torch.float32))
    groups = {"num_groups": 8, "num_top_groups": 3, "num_group_choices": 1}
    weights, ids = route(logits, 6, "softmax", weight_scale=16.0, **groups)
    order, want_order = ids.argsort(-1), want_ids.argsort(-1)
    assert torch.equal(ids.gather(1, order), want_ids.gather(1, want_order))
    torch.testing.assert_close(weights.gather(1, order), want.gather(1, want_order))


@each("scoring", SCORINGS)
def test_route_of_hard_rows(scoring):
    logits = torch.zeros(5, 40)
    logits[1] = math.inf * torch.tensor([-1.0])
    logits[2, 7] = math.nan
    logits[3] = torch.arange(40.0) * 1e3
    logits[4, 5:] = -math.inf
    weights, ids = route(logits, 4, scoring)
    assert ids[0].tolist() == [0, 1, 2, 3]
    assert ids[3].tolist() == [39, 38, 37, 36] or scoring.startswith("sigmoid")
    assert ids[4].tolist() == [0, 1, 2, 3]
    assert weights.isnan().any(1).tolist()[2:] == [True, False, False]
    assert ((ids >= 0) & (ids < 40)).all()
    assert all(len(set(row)) == 4 for row in ids.tolist())
    alone, alone_ids = route(logits[3:4], 4, scoring)
    assert torch.equal(alone[0], weights[3])
    assert torch.equal(alone_ids[0], ids[3])


def test_routes_are_bitwise_independent(draw):
    logits = draw(3000, 128, dtype=torch.float32)
    for scoring in SCORINGS:
        weights, ids = route(logits, 8, scoring)
        pool = _native.ThreadPool(3, oversubscribe=True)
        shared = route(logits, 8, scoring, pool=pool)
        assert torch.equal(shared[0], weights)
        assert torch.equal(shared[1], ids)
        for isa in ISAS:
            few = route(logits[:50], 8, scoring, isa=isa)
            assert torch.equal(few[0], weights[:50])
            assert torch.equal(few[1], ids[:50])


def test_empty_batches():
    assert norm(torch.empty(0, 8), torch.ones(8)).shape == (0, 8)
    assert route(torch.empty(0, 8), 2, "softmax")[1].shape == (0, 2)
    _native.gate(view(torch.empty(0, 8)), view(torch.empty(0, 4)))
    empty = torch.empty(0, 4)
    _native.rotate_heads(view(torch.empty(0, 2, 4)), view(empty), view(empty), 1, 1)


def test_what_would_read_out_of_bounds_is_refused():
    x, weight, out = torch.ones(2, 8), torch.ones(8), torch.ones(2, 8)
    for bad in (
        (x[0], weight, out),
        (x, weight[:7], out),
        (x, weight, out[:1]),
        (x, weight, out[:, :7]),
        (x.t(), weight[:2], out.t()),
        (x, weight.bfloat16(), out),
        (x.half(), weight, out),
        (x.bfloat16(), weight, out),
    ):
        with pytest.raises(ShapeError):
            _native.rms_norm(*(view(t) for t in bad), 1e-6)
    with pytest.raises(ShapeError):
        _native.rms_norm(*(view(t) for t in (x, weight, out)), 1e-6, view(x[:1]))
    with pytest.raises(ConfigError):
        _native.rms_norm(*(view(t) for t in (x, weight, out)), 1e-6, isa="mmx")
    heads, cos = torch.ones(2, 3, 8), torch.ones(2, 8)
    for bad, counts in (
        ((heads, cos, cos), (2, 2)),
        ((heads, cos[:1], cos[:1]), (1, 1)),
        ((heads, cos, cos[:, :6]), (1, 1)),
        ((heads, torch.ones(2, 10), torch.ones(2, 10)), (1, 1)),
        ((heads, torch.ones(2, 7), torch.ones(2, 7)), (1, 1)),
        ((heads, cos.bfloat16(), cos.bfloat16()), (1, 1)),
        ((heads.transpose(0, 1), cos, cos), (1, 1)),
        ((torch.ones(1, 1, 5000), torch.ones(1, 8), torch.ones(1, 8)), (1, 0)),
    ):
        with pytest.raises(ShapeError):
            _native.rotate_heads(*(view(t) for t in bad), *counts)
    with pytest.raises(ShapeError):
        _native.rotate_heads(*(view(t) for t in (heads, cos, cos)), 1, 1, view(weight[:4]))
    with pytest.raises(ShapeError):
        _native.gate(view(torch.ones(2, 7)), view(torch.ones(2, 4)))
    logits = torch.ones(2, 8)
    for top_k, options in (
        (9, {}),
        (0, {}),
        (2, {"num_groups": 3}),
        (2, {"num_groups": 0}),
        (2, {"num_groups": 4, "num_top_groups": 5}),
        (5, {"num_groups": 4, "num_top_groups": 2}),
        (2, {"bias": torch.ones(7)}),
        (2, {"bias": torch.ones(8).double()}),
    ):
        with pytest.raises(ShapeError):
            route(logits, top_k, "softmax", **options)
    with pytest.raises(ShapeError):
        route(logits.t(), 1, "softmax")
    with pytest.raises(ConfigError, match="scoring"):
        route(logits, 1, "argmax")

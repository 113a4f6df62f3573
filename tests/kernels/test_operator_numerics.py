"""Goal: each torch operator agrees with its float64 oracle within the derived tolerance.

Method: weights and inputs are drawn in the operator's dtype, the oracle gets the same numbers in
float64, and every element is compared; the hard cases run through the same comparison.
"""

import numpy as np
import pytest
import torch

from each import each
from tandem.core.errors import ShapeError
from tandem.core.model.layers import (
    ExpertsSpec,
    MlpSpec,
    MoeBlockSpec,
    RopeSpec,
    RouterSpec,
    RoutingRule,
)
from tandem.kernels import tolerance
from tandem.kernels.operators.linear import Embedding, Linear, LmHead
from tandem.kernels.operators.mlp import Mlp
from tandem.kernels.operators.moe import MoeBlock, Router
from tandem.kernels.operators.norm import RmsNorm
from tandem.kernels.operators.rope import Rope, apply_rope_
from tandem.kernels.oracles import reference
from tandem.kernels.torch.experts import Experts

DTYPES = [torch.float32, torch.bfloat16]
both_dtypes = each("dtype", DTYPES)


@both_dtypes
@each(("tokens", "size", "outputs"), [(1, 64, 33), (5, 37, 16), (0, 8, 4)])
def test_linear(dtype, tokens, size, outputs, draw, wide, make_reader, count_outside):
    weight, bias = draw(outputs, size, dtype=dtype), draw(outputs, dtype=dtype)
    x = draw(tokens, size, dtype=dtype)
    layer = Linear(size, outputs, has_bias=True)
    layer.load(make_reader({"l.weight": weight, "l.bias": bias}, dtype), "l")
    expected = reference.linear(wide(x), wide(weight), wide(bias))
    bound = tolerance.linear(wide(x), wide(weight), dtype)
    # The bias is one more term of the sum, and shifts what is rounded.
    bound = bound + (tolerance.UNIT_ROUNDOFF[dtype] + tolerance.ACCUMULATE_EPS) * (
        np.abs(expected) + np.abs(wide(bias))
    )
    assert count_outside(layer(x), expected, bound) == 0


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e15], ids=["denormal", "tiny", "huge"])
def test_linear_at_the_ends_of_the_range(scale, draw, wide, make_reader, count_outside):
    x, weight = draw(3, 40, dtype=torch.float32, scale=scale), draw(8, 40, dtype=torch.float32)
    layer = Linear(40, 8)
    layer.load(make_reader({"l.weight": weight}, torch.float32), "l")
    expected = reference.linear(wide(x), wide(weight))
    bound = tolerance.linear(wide(x), wide(weight), torch.float32)
    assert count_outside(layer(x), expected, bound) == 0


def test_nan_stays_in_its_row(draw, make_reader):
    dtype = torch.float32
    x = draw(4, 16, dtype=dtype)
    x[2, 3] = float("nan")
    weights = {
        "m.gate_proj.weight": draw(24, 16, dtype=dtype),
        "m.up_proj.weight": draw(24, 16, dtype=dtype),
        "m.down_proj.weight": draw(16, 24, dtype=dtype),
    }
    layer = Mlp(MlpSpec(hidden_size=16, intermediate_size=24))
    layer.load(make_reader(weights, dtype), "m")
    assert layer(x).isnan().any(1).tolist() == [False, False, True, False]


@both_dtypes
def test_embedding_and_tied_head(dtype, draw, wide, make_reader, count_outside):
    weight = draw(19, 24, dtype=dtype)
    embedding = Embedding(19, 24)
    embedding.load(make_reader({"e.weight": weight}, dtype), "e")
    ids = torch.tensor([0, 18, 7, 7])
    assert np.array_equal(wide(embedding(ids)), reference.embedding(ids.numpy(), wide(weight)))
    head = LmHead(24, 19, tied_to=lambda: embedding)
    head.load(make_reader({}, dtype), "lm_head")
    assert head.weight.data_ptr() == embedding.weight.data_ptr()
    x = draw(3, 24, dtype=dtype)
    bound = tolerance.linear(wide(x), wide(weight), dtype)
    assert count_outside(head(x), reference.linear(wide(x), wide(weight)), bound) == 0
    with pytest.raises(IndexError):
        embedding(torch.tensor([19]))


@both_dtypes
@each("scale", [1.0, 1e-20, 1e15])
def test_rms_norm(dtype, scale, draw, wide, make_reader, count_outside):
    weight, x = draw(48, dtype=dtype), draw(6, 48, dtype=dtype, scale=scale)
    norm = RmsNorm(48, 1e-6)
    norm.load(make_reader({"n.weight": weight}, dtype), "n")
    expected = reference.rms_norm(wide(x), wide(weight), 1e-6)
    assert count_outside(norm(x), expected, tolerance.rms_norm(expected, dtype)) == 0


ROPES = [
    RopeSpec(head_dim=32),
    RopeSpec(head_dim=16, rope_type="linear", factor=4.0),
    RopeSpec(head_dim=32, rope_type="dynamic", factor=3.0, max_position_embeddings=64),
    RopeSpec(head_dim=64, rope_type="yarn", factor=8.0, original_max_position_embeddings=256),
    RopeSpec(
        head_dim=64,
        rope_type="yarn",
        factor=8.0,
        mscale=0.7,
        mscale_all_dim=1.2,
        truncate=False,
        original_max_position_embeddings=256,
    ),
    RopeSpec(
        head_dim=64,
        rope_type="llama3",
        rope_theta=500000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=512,
    ),
    *(
        RopeSpec(
            head_dim=16,
            rope_type="longrope",
            factor=8.0,
            original_max_position_embeddings=64,
            attention_factor=attention_factor,
            short_factor=tuple(1 + 0.1 * i for i in range(8)),
            long_factor=tuple(1 + 2.0 * i for i in range(8)),
        ).serve(context)
        for context, attention_factor in ((64, None), (65, None), (65, 1.3))
    ),
]


@each("parameters", ROPES)
@both_dtypes
def test_rope(parameters, dtype, draw, wide, count_outside):
    positions = torch.tensor([0, 1, 2, 63, 64, 65, 500, 4000])
    rope = Rope(parameters)
    cos, sin = rope.compute(positions, dtype)
    expected_cos, expected_sin = reference.rope(parameters, positions.numpy())
    bound = tolerance.rope(positions.numpy(), rope.attention_factor, dtype)
    bound = np.broadcast_to(bound, expected_cos.shape)
    assert count_outside(cos, expected_cos, bound) == 0
    assert count_outside(sin, expected_sin, bound) == 0
    x = draw(8, 3, parameters.head_dim, dtype=dtype)
    out = torch.empty_like(x)
    half = parameters.head_dim // 2
    signed = torch.cat((-sin[:, :half], sin[:, half:]), -1)
    apply_rope_(out, x, cos[:, None], signed[:, None])
    expected = reference.rotate(wide(x), wide(cos), wide(sin))
    # Two products and a sum, each rounded to the dtype.
    size = np.abs(wide(x)) + np.abs(np.roll(wide(x), half, -1))
    bound = 3 * tolerance.UNIT_ROUNDOFF[dtype] * rope.attention_factor * size
    assert count_outside(out, expected, bound) == 0


def test_rope_angles_do_not_depend_on_the_batch():
    rope = Rope(ROPES[2])
    together = rope.compute(torch.tensor([3, 70, 900]), torch.float32)
    for i, position in enumerate([3, 70, 900]):
        alone = rope.compute(torch.tensor([position]), torch.float32)
        assert torch.equal(together[0][i], alone[0][0])
        assert torch.equal(together[1][i], alone[1][0])


@both_dtypes
def test_mlp(dtype, draw, wide, make_reader, count_outside):
    gate, up = draw(40, 24, dtype=dtype), draw(40, 24, dtype=dtype)
    down, x = draw(24, 40, dtype=dtype), draw(7, 24, dtype=dtype)
    layer = Mlp(MlpSpec(hidden_size=24, intermediate_size=40))
    parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    layer.load(make_reader({f"m.{k}.weight": v for k, v in parts.items()}, dtype), "m")
    gate_up = np.concatenate([wide(gate), wide(up)])
    expected = reference.mlp(wide(x), gate_up, wide(down))
    bound = tolerance.mlp(wide(x), gate_up, wide(down), dtype)
    assert count_outside(layer(x), expected, bound) == 0
    residual = draw(7, 24, dtype=dtype)
    into = residual.clone()
    layer.add_into_(into, x)
    total = expected + wide(residual)
    bound = bound + 2 * tolerance.UNIT_ROUNDOFF[dtype] * np.abs(total)
    assert count_outside(into, total, bound) == 0


def make_router(hidden, count, top_k, *, is_normalised):
    rule = RoutingRule(is_normalised=is_normalised)
    return Router(RouterSpec(hidden_size=hidden, num_experts=count, top_k=top_k, rule=rule))


@both_dtypes
@each("is_normalised", [True, False])
def test_router(dtype, is_normalised, draw, wide, make_reader, count_outside):
    weight, x = draw(8, 32, dtype=dtype), draw(40, 32, dtype=dtype)
    router = Router(
        RouterSpec(
            hidden_size=32, num_experts=8, top_k=3, rule=RoutingRule(is_normalised=is_normalised)
        )
    )
    router.load(make_reader({"g.weight": weight}, dtype), "g")
    logits, weights, ids = router(x)
    expected, expected_ids = reference.router(wide(x), wide(weight), 3, is_normalised=is_normalised)
    logit_bound = tolerance.linear(wide(x), wide(weight), dtype)
    exact = reference.linear(wide(x), wide(weight))
    assert count_outside(logits, exact, logit_bound) == 0
    ordered = np.sort(exact, axis=-1)[:, ::-1]
    clear = (ordered[:, :3] - ordered[:, 1:4]).min(axis=-1) > 2 * logit_bound.max()
    assert clear.sum() > 10, "the draw has too many near ties to mean anything"
    assert np.array_equal(ids.numpy()[clear], expected_ids[clear])
    relative = np.expm1(2 * logit_bound.max()) + 2 * tolerance.UNIT_ROUNDOFF[dtype] + 1e-5
    bound = relative * expected[clear]
    assert count_outside(weights[torch.from_numpy(clear)], expected[clear], bound) == 0


def load_experts(dtype, draw, make_reader, *, is_fused=True):
    gate_up, down = draw(6, 80, 24, dtype=dtype), draw(6, 24, 40, dtype=dtype)
    tensors = {"x.gate_up_proj": gate_up, "x.down_proj": down}
    if not is_fused:
        tensors = {}
        for i in range(6):
            tensors[f"x.{i}.gate_proj.weight"] = gate_up[i, :40]
            tensors[f"x.{i}.up_proj.weight"] = gate_up[i, 40:]
            tensors[f"x.{i}.down_proj.weight"] = down[i]
    experts = Experts(ExpertsSpec(num_experts=6, hidden_size=24, intermediate_size=40))
    experts.load(make_reader(tensors, dtype), "x")
    return experts, gate_up, down


def route(case: str, tokens: int) -> torch.Tensor:
    ids = torch.stack([torch.arange(t, t + 2) % 6 for t in range(tokens)])
    if case == "all to one":
        ids = torch.full((tokens, 2), 4)
    elif case == "one has none":
        ids[ids == 3] = 5
    elif case == "some elsewhere":
        ids[::2, 0] = -1
    elif case == "all elsewhere":
        ids[:] = -1
    return ids


@both_dtypes
@each("tokens", [0, 1, 2, 19])
@each("case", ["spread", "all to one", "one has none", "some elsewhere", "all elsewhere"])
def test_experts(dtype, tokens, case, draw, wide, make_reader, count_outside):
    experts, gate_up, down = load_experts(dtype, draw, make_reader)
    x = draw(tokens, 24, dtype=dtype)
    ids = route(case, tokens) if tokens else torch.zeros(0, 2, dtype=torch.int64)
    weights = draw(tokens, 2, dtype=dtype).abs()
    args = (wide(x), ids.numpy(), wide(weights), wide(gate_up), wide(down))
    bound = tolerance.experts(*args, dtype)
    assert count_outside(experts(x, ids, weights), reference.experts(*args), bound) == 0


@pytest.mark.parametrize("tokens", [1, 7])
def test_experts_in_bf16_take_weights_in_float32(tokens, draw, wide, make_reader, count_outside):
    """As the native router gives them; a prefill refused the mixture."""
    dtype = torch.bfloat16
    experts, gate_up, down = load_experts(dtype, draw, make_reader)
    x, weights = draw(tokens, 24, dtype=dtype), draw(tokens, 2, dtype=torch.float32).abs()
    ids = route("spread", tokens)
    args = (wide(x), ids.numpy(), wide(weights), wide(gate_up), wide(down))
    bound = tolerance.experts(*args, dtype)
    assert count_outside(experts(x, ids, weights), reference.experts(*args), bound) == 0


def test_router_weights_are_not_rounded_to_bf16(draw, make_reader):
    """Two slots of one expert all but cancel; in bf16 the first weight is 1, and they would."""
    experts, _, _ = load_experts(torch.bfloat16, draw, make_reader)
    x = draw(7, 24, dtype=torch.bfloat16)
    ids = torch.arange(7)[:, None].expand(7, 2) % 6
    once = experts(x, ids, torch.tensor([1.0, 0.0]).expand(7, 2))
    assert once.all()
    little = experts(x, ids, torch.tensor([1 + 2**-9, -1.0]).expand(7, 2))
    assert torch.equal(little, once * 2**-9)


@both_dtypes
def test_sums_over_experts_depend_on_no_other_token(dtype, draw, make_reader):
    """Each expert's product has the same shape; the others' values and weights differ."""
    experts, _, _ = load_experts(dtype, draw, make_reader)
    tokens = 150  # More than are summed at once.
    x, ids = draw(tokens, 24, dtype=dtype), route("spread", tokens)
    weights = draw(tokens, 2, dtype=torch.float32)
    whole = experts(x, ids, weights)
    for count in (1, 70, 149):
        company, others = draw(tokens, 24, dtype=dtype), draw(tokens, 2, dtype=torch.float32)
        company[:count], others[:count] = x[:count], weights[:count]
        assert torch.equal(experts(company, ids, others)[:count], whole[:count])


def test_both_expert_layouts_load_equal(draw, make_reader):
    fused, gate_up, down = load_experts(torch.float32, draw, make_reader)
    tensors = {}
    for i in range(6):
        tensors[f"x.{i}.gate_proj.weight"] = gate_up[i, :40]
        tensors[f"x.{i}.up_proj.weight"] = gate_up[i, 40:]
        tensors[f"x.{i}.down_proj.weight"] = down[i]
    apart = Experts(ExpertsSpec(num_experts=6, hidden_size=24, intermediate_size=40))
    apart.load(make_reader(tensors, torch.float32), "x")
    assert torch.equal(fused.gate_up_weight, apart.gate_up_weight)
    assert torch.equal(fused.down_weight, apart.down_weight)


@each("tokens", [1, 5])
@each("bad", [6, -2])
def test_experts_refuse_an_id_out_of_range(tokens, bad, draw, make_reader):
    experts, _, _ = load_experts(torch.float32, draw, make_reader)
    ids = torch.zeros(tokens, 2, dtype=torch.int64)
    ids[-1, 1] = bad
    with pytest.raises(ShapeError, match=f"expert id {bad} of 6"):
        experts(torch.zeros(tokens, 24), ids, torch.ones(tokens, 2))
    with pytest.raises(ShapeError, match="top_k"):
        experts(torch.zeros(tokens, 24), ids, torch.ones(tokens, 3))


def test_a_nan_token_does_not_reach_others_of_its_expert(draw, make_reader):
    experts, _, _ = load_experts(torch.float32, draw, make_reader)
    x = draw(4, 24, dtype=torch.float32)
    x[1] = float("nan")
    out = experts(x, torch.full((4, 2), 3), torch.ones(4, 2))
    assert out.isnan().any(1).tolist() == [False, True, False, False]


def test_moe_block(draw, wide, make_reader, count_outside):
    dtype = torch.float32
    experts, gate_up, down = load_experts(dtype, draw, make_reader)
    gate = draw(6, 24, dtype=dtype)
    router = Router(
        RouterSpec(hidden_size=24, num_experts=6, top_k=2, rule=RoutingRule(is_normalised=True))
    )
    router.load(make_reader({"g.weight": gate}, dtype), "g")
    x = draw(2, 5, 24, dtype=dtype)
    flat = wide(x).reshape(10, 24)
    expected = reference.moe_block(
        flat, wide(gate), wide(gate_up), wide(down), 2, is_normalised=True
    )
    weights, ids = reference.router(flat, wide(gate), 2, is_normalised=True)
    bound = tolerance.experts(flat, ids, weights, wide(gate_up), wide(down), dtype)
    # The weights are off by what the logits are.
    bound = bound + np.abs(expected).max() * 1e-5
    out = MoeBlock(MoeBlockSpec(gate_name="gate"), {"gate": router, "experts": experts})(x)
    assert out.shape == x.shape
    assert count_outside(out.view(10, 24), expected, bound) == 0

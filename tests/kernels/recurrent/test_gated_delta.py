"""Goal: the gated delta rule is right, and depends on its sequence alone.

Method: the native form on every ISA, and torch's, against the float64 oracle within a derived
bound; mutants must leave it. Any chunks, batch, threads and ISA give the same bits. Extreme gates
and inputs of zero leave numbers; what would write out of bounds is refused.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from each import each
from tandem import _native
from tandem.core.errors import ConfigError, ShapeError
from tandem.kernels.cpu.execution import CpuExecution
from tandem.kernels.gated_delta import GatedDeltaRows, GatedDeltaRule, StateSlots
from tandem.kernels.native import view_tensor
from tandem.kernels.oracles import delta
from tandem.kernels.torch.execution import TorchExecution

ISAS = _native.kernel_isas()
both_dtypes = each("dtype", [torch.float32, torch.bfloat16])
every_isa = each("isa", ISAS)
SHAPES = {"odd": (1, 3, 5, 7, 4), "narrow": (2, 4, 16, 40, 2), "family": (2, 4, 128, 128, 4)}
SHAPES |= {"items": (1, 3, 5, 7, 4), "narrow items": (2, 4, 16, 40, 2), "kimi": (2, 2, 128, 128, 4)}
"""Key heads, value heads, sizes of their heads, convolution width."""
BY_ITEM = ("items", "narrow items", "kimi")
"""Shapes whose items of a key decay apart."""


def make_rule(draw, shape, **options):
    k_heads, v_heads, key, value, width = SHAPES[shape]
    channels = 2 * k_heads * key + v_heads * value
    decays = v_heads * key if shape in BY_ITEM else v_heads
    return GatedDeltaRule(
        draw(width, channels, dtype=torch.float32, scale=0.5),
        draw(v_heads, dtype=torch.float32).exp(),
        draw(decays, dtype=torch.float32) - 2,
        draw(value, dtype=torch.float32),
        num_k_heads=k_heads,
        key_dim=key,
        norm_eps=1e-6,
        **options,
    )


def make_rows(draw, rule, lengths, dtype, gate_dtype=None):
    total, starts = sum(lengths), [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    values = rule.num_v_heads * rule.value_dim
    return GatedDeltaRows(
        draw(total, rule.num_channels, dtype=dtype),
        draw(total, values, dtype=dtype),
        draw(total, len(rule.decay_bias_Vd), dtype=gate_dtype or dtype),
        draw(total, rule.num_v_heads, dtype=gate_dtype or dtype),
        starts,
        list(range(len(lengths)))[::-1],
    )


def run(rule, rows, slots=None, *, isa="", pool=None):
    """Return the outputs of the native rule, and the slots after them."""
    slots = slots or StateSlots.allocate(rule, len(rows.slot_ids), rows.x_TC.dtype)
    out = torch.full_like(rows.z_TVv, math.nan)
    parts = (rows.x_TC, rows.z_TVv, rows.a_TVd, rows.b_TV, out)
    rule.native.run(
        *map(view_tensor, parts),
        slots.states.view,
        slots.carried.view,
        rows.query_start,
        rows.slot_ids,
        pool=pool,
        isa=isa,
    )
    return out, slots


def cut(rows, spans, slot_ids=None):
    """Return the rows of some spans, each a sequence's next ones."""
    index = torch.cat([torch.arange(begin, end) for begin, end in spans])
    starts = [0]
    for begin, end in spans:
        starts.append(starts[-1] + end - begin)
    parts = (part[index] for part in (rows.x_TC, rows.z_TVv, rows.a_TVd, rows.b_TV))
    return GatedDeltaRows(*parts, starts, slot_ids or rows.slot_ids)


def to_oracle(rule, wide):
    return delta.DeltaWeights(
        wide(rule.conv_WC),
        wide(rule.decay_rate_V),
        wide(rule.decay_bias_Vd),
        wide(rule.norm_v),
        rule.num_k_heads,
        rule.key_dim,
        rule.norm_eps,
        rule.beta_scale,
        rule.gate,
    )


def open_state(rule, panels):
    """Return [V, k, v] of a sequence's panels, checking that what completes them is zero."""
    whole = panels.transpose(1, 2).flatten(2)
    assert not whole[..., rule.value_dim :].any()
    return whole[..., : rule.value_dim]


def count_all_outside(rule, rows, out, slots, wide, count_outside):
    weights, outside = to_oracle(rule, wide), 0
    for i, slot in enumerate(rows.slot_ids):
        part = slice(rows.query_start[i], rows.query_start[i + 1])
        args = [wide(x[part]) for x in (rows.x_TC, rows.z_TVv, rows.a_TVd, rows.b_TV)]
        expected, state = delta.gated_delta(*args, weights)
        bound, state_bound = delta.gated_delta_bound(*args, weights, out.dtype)
        outside += count_outside(out[part], expected, bound)
        got = open_state(rule, slots.states.tensor[slot])
        outside += count_outside(got, state, state_bound)
        kept = rule.carried_shape[0]
        assert torch.equal(slots.carried.tensor[slot], rows.x_TC[part][-kept:])
    return outside


@every_isa
@both_dtypes
@each("shape", SHAPES)
def test_native(isa, dtype, shape, draw, wide, count_outside):
    rule = make_rule(draw, shape)
    rows = make_rows(draw, rule, [40, 5], dtype)
    out, slots = run(rule, rows, isa=isa)
    assert count_all_outside(rule, rows, out, slots, wide, count_outside) == 0


OPTIONS = [("narrow", {"beta_scale": 2.0}), ("narrow items", {"gate": "sigmoid"})]


@each(("shape", "options"), OPTIONS)
@each("execution", [CpuExecution(), TorchExecution()])
@both_dtypes
def test_executions(execution, shape, options, dtype, draw, wide, count_outside):
    """Gates in float32 beside rows of another dtype; the options of other families."""
    rule = make_rule(draw, shape, **options)
    rows = make_rows(draw, rule, [33, 4], dtype, torch.float32)
    slots = StateSlots.allocate(rule, 2, dtype)
    out = execution.gated_delta(rule, rows, slots)
    assert count_all_outside(rule, rows, out, slots, wide, count_outside) == 0


@pytest.mark.slow
def test_the_oracle_is_the_familys(draw, wide):
    """transformers' own recurrence, in float32; importing the family takes seconds."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    rule = make_rule(draw, "narrow")
    rows = make_rows(draw, rule, [30], torch.float32)
    weights = to_oracle(rule, wide)
    args = [wide(x) for x in (rows.x_TC, rows.z_TVv, rows.a_TVd, rows.b_TV)]
    expected, state = delta.gated_delta(*args, weights)
    mixed = modeling.causal_conv1d_fn(rows.x_TC.T[None], rule.conv_WC.T, activation="silu")
    keys = rule.num_k_heads * rule.key_dim
    q, k, v = mixed[0].T[None].split([keys, keys, rule.num_v_heads * rule.value_dim], -1)
    out, last = modeling.torch_recurrent_gated_delta_rule(
        q.unflatten(-1, (rule.num_k_heads, -1)),
        k.unflatten(-1, (rule.num_k_heads, -1)),
        v.unflatten(-1, (rule.num_v_heads, -1)),
        g=-rule.decay_rate_V * torch.nn.functional.softplus(rows.a_TVd + rule.decay_bias_Vd)[None],
        beta=rows.b_TV.sigmoid()[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    norm = modeling.Qwen3NextRMSNormGated(rule.value_dim, eps=rule.norm_eps)
    norm.weight.data.copy_(rule.norm_v)
    y = norm(out[0].flatten(0, 1), rows.z_TVv.view(-1, rule.value_dim))
    assert np.allclose(wide(y.detach()).reshape(expected.shape), expected, atol=1e-4)
    assert np.allclose(wide(last[0]), state, atol=1e-4)


@pytest.mark.slow
def test_the_oracle_by_item_is_the_familys(draw, wide):
    """As above, for Kimi-Linear."""
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    rule = make_rule(draw, "kimi", gate="sigmoid")
    rows = make_rows(draw, rule, [30], torch.float32)
    args = [wide(x) for x in (rows.x_TC, rows.z_TVv, rows.a_TVd, rows.b_TV)]
    expected, state = delta.gated_delta(*args, to_oracle(rule, wide))
    mixed = modeling.causal_conv1d_fn(rows.x_TC.T[None], rule.conv_WC.T, activation="silu")
    heads = mixed[0].T[None].unflatten(-1, (3, rule.num_v_heads, -1)).unbind(2)
    raw = (rows.a_TVd + rule.decay_bias_Vd).unflatten(-1, (rule.num_v_heads, -1))
    out, last = modeling.recurrent_kimi_delta_attention(
        *heads,
        g=-rule.decay_rate_V[:, None] * torch.nn.functional.softplus(raw)[None],
        beta=rows.b_TV.sigmoid()[None],
        initial_state=None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    norm = modeling.KimiLinearRMSNormGated(rule.value_dim, eps=rule.norm_eps)
    norm.weight.data.copy_(rule.norm_v)
    y = norm(out[0].flatten(0, 1), rows.z_TVv.view(-1, rule.value_dim))
    assert np.allclose(wide(y.detach()).reshape(expected.shape), expected, atol=1e-4)
    assert np.allclose(wide(last[0]), state, atol=1e-4)


MUTANTS = {
    "none": lambda rule: None,
    "convolution reversed": lambda rule: rule.conv_WC.copy_(rule.conv_WC.flip(0)),
    "one tap left out": lambda rule: rule.conv_WC[0].zero_(),
    "decay rates of other heads": lambda rule: rule.decay_rate_V.copy_(rule.decay_rate_V.roll(1)),
    "no bias of the decay": lambda rule: rule.decay_bias_Vd.zero_(),
    "beta of another range": lambda rule: setattr(rule, "beta_scale", 1.01),
    "another gate": lambda rule: setattr(rule, "gate", "sigmoid"),
    "norm": lambda rule: rule.norm_v.copy_(rule.norm_v.roll(1)),
    "epsilon": lambda rule: setattr(rule, "norm_eps", 1e-2),
    "queries for keys": lambda rule: swap_channels(rule.conv_WC, rule.num_k_heads * rule.key_dim),
}
MUTANTS_BY_ITEM = {
    "none": lambda rule: None,
    "decays of other items": lambda rule: rule.decay_bias_Vd.copy_(rule.decay_bias_Vd.roll(1)),
    "one decay a head": lambda rule: rule.decay_bias_Vd.copy_(
        rule.decay_bias_Vd.view(rule.num_v_heads, -1)[:, :1].expand(-1, rule.key_dim).flatten()
    ),
}
CASES = [("narrow", name) for name in MUTANTS]
CASES += [("narrow items", name) for name in MUTANTS_BY_ITEM]


def swap_channels(conv, keys):
    conv[:, : 2 * keys] = torch.cat([conv[:, keys : 2 * keys], conv[:, :keys]], -1)


@both_dtypes
@each(("shape", "name"), CASES)
def test_mutants(shape, name, dtype, draw, wide, count_outside):
    rule = make_rule(draw, shape)
    rows = make_rows(draw, rule, [30, 6], dtype)
    right = to_oracle(rule, wide)
    right = replace(right, **{key: np.copy(v) for key, v in vars(right).items() if np.ndim(v)})
    (MUTANTS if shape == "narrow" else MUTANTS_BY_ITEM)[name](rule)
    out, _ = run(rule, rows)
    part = slice(0, 30)
    args = [wide(x[part]) for x in (rows.x_TC, rows.z_TVv, rows.a_TVd, rows.b_TV)]
    expected, _ = delta.gated_delta(*args, right)
    bound, _ = delta.gated_delta_bound(*args, right, dtype)
    outside = count_outside(out[part], expected, bound)
    assert outside == 0 if name == "none" else outside > 0


@both_dtypes
@each("shape", SHAPES)
def test_chunks_batches_threads_and_isas_change_no_bit(shape, dtype, draw):
    rule = make_rule(draw, shape)
    lengths = [70, 1, 37]
    rows = make_rows(draw, rule, lengths, dtype)
    want, slots = run(rule, rows)
    pool = _native.ThreadPool(3, oversubscribe=True)
    for other in [run(rule, rows, pool=pool), *(run(rule, rows, isa=isa) for isa in ISAS)]:
        assert torch.equal(other[0], want)
        assert torch.equal(other[1].states.tensor, slots.states.tensor)
        assert torch.equal(other[1].carried.tensor, slots.carried.tensor)
    generator = torch.Generator().manual_seed(3)
    for _ in range(6):
        done, again = [0, 0, 0], StateSlots.allocate(rule, 3, dtype)
        got = torch.full_like(want, math.nan)
        while done != lengths:
            chosen = torch.randperm(3, generator=generator).tolist()[:2]
            spans, ids = [], []
            for s in chosen:
                count = int(torch.randint(0, 40, (), generator=generator))
                begin, end = done[s], min(done[s] + count, lengths[s])
                spans.append((rows.query_start[s] + begin, rows.query_start[s] + end))
                ids.append(rows.slot_ids[s])
                done[s] = end
            part, _ = run(rule, cut(rows, spans, ids), again, pool=pool)
            index = torch.cat([torch.arange(begin, end) for begin, end in spans])
            got[index] = part
        assert torch.equal(got, want)
        assert torch.equal(again.states.tensor, slots.states.tensor)
        assert torch.equal(again.carried.tensor, slots.carried.tensor)


def test_slots_of_others_stay(draw):
    rule = make_rule(draw, "odd")
    rows = replace(make_rows(draw, rule, [9], torch.float32), slot_ids=[2])
    slots = StateSlots.allocate(rule, 4, torch.float32)
    slots.states.tensor[[0, 1, 3]] = 7.0
    slots.carried.tensor[[0, 1, 3]] = 7.0
    run(rule, rows, slots)
    assert (slots.states.tensor[[0, 1, 3]] == 7.0).all()
    assert (slots.carried.tensor[[0, 1, 3]] == 7.0).all()
    assert slots.states.tensor[2].any()


@every_isa
@both_dtypes
@each("fill", [0.0, 1e30, -1e30, math.inf, -math.inf])
@each("shape", ["narrow", "items"])
def test_extreme_gates_leave_numbers(isa, dtype, shape, fill, draw, wide, count_outside):
    """Decays of 0 and 1, betas of 0 and 1: forgetting all, keeping all."""
    rule = make_rule(draw, shape)
    rows = make_rows(draw, rule, [40, 5], dtype)
    rows.a_TVd.fill_(fill)
    rows.b_TV[::2].fill_(fill)
    rows.x_TC[10:20] = 0  # Queries and keys without a length.
    out, slots = run(rule, rows, isa=isa)
    assert out.isfinite().all()
    assert slots.states.tensor.isfinite().all()
    if math.isfinite(fill):
        assert count_all_outside(rule, rows, out, slots, wide, count_outside) == 0


def test_a_nan_stays_in_its_sequence(draw):
    rule = make_rule(draw, "odd")
    rows = make_rows(draw, rule, [20, 20], torch.float32)
    want, _ = run(rule, rows)
    rows.x_TC[5] = math.nan
    out, _ = run(rule, rows)
    assert torch.equal(out[20:], want[20:])
    assert torch.equal(out[:5], want[:5])
    assert out[5:20].isnan().all()


KEPT = {"num_k_heads": 1, "key_dim": 5, "norm_eps": 1e-6}
"""Of the shape ``odd``."""


def test_refusals(draw):
    rule = make_rule(draw, "odd")
    rows = make_rows(draw, rule, [4, 4], torch.float32)
    slots = StateSlots.allocate(rule, 2, torch.float32)
    for wrong in (
        {"slot_ids": [0, 0]},
        {"slot_ids": [0, 2]},
        {"slot_ids": [0, -1]},
        {"query_start": [0, 4, 9]},
        {"query_start": [0, 5, 4]},
        {"query_start": [0, 8]},
        {"x_TC": rows.x_TC[:, 1:]},
        {"z_TVv": rows.z_TVv.bfloat16()},
        {"b_TV": rows.b_TV[:3]},
    ):
        with pytest.raises(ShapeError):
            run(rule, replace(rows, **wrong), slots)
    with pytest.raises(ShapeError, match="states"):
        run(rule, rows, StateSlots.allocate(make_rule(draw, "narrow"), 2, torch.float32))
    with pytest.raises(ShapeError, match="biases of the decays"):
        GatedDeltaRule(rule.conv_WC, rule.decay_rate_V, torch.zeros(4), rule.norm_v, **KEPT)
    with pytest.raises(ConfigError, match="tanh"):
        make_rule(draw, "odd", gate="tanh")
    with pytest.raises(ConfigError, match="isa"):
        run(rule, rows, isa="nonsense")


def test_torch_and_native_are_close_over_many_tokens(draw):
    rule = make_rule(draw, "narrow")
    rows = make_rows(draw, rule, [600], torch.float32)
    torch_slots = StateSlots.allocate(rule, 1, torch.float32)
    want = TorchExecution().gated_delta(rule, rows, torch_slots)
    out, slots = run(rule, rows)
    assert torch.allclose(out, want, atol=1e-4)
    assert torch.allclose(slots.states.tensor, torch_slots.states.tensor, atol=1e-5)

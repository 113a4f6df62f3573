"""Goal: Mamba2's state space is right, and depends on its sequence alone.

Method: the native form on every ISA, and torch's, against the float64 oracle within a derived
bound; mutants must leave it. Any chunks, batch, threads and ISA give the same bits. Extreme time
steps leave numbers; what would write out of bounds is refused.
"""

import copy
import math

import numpy as np
import pytest
import torch

from each import each
from tandem import _native
from tandem.core.errors import ConfigError, ShapeError
from tandem.kernels.gated_delta import StateSlots
from tandem.kernels.native import view_tensor
from tandem.kernels.oracles import state_spaces as oracle
from tandem.kernels.state_space.rules import Mamba2Rule, StateRows
from tandem.kernels.state_space.torch_form import run_mamba2

ISAS = _native.kernel_isas()
both_dtypes = each("dtype", [torch.float32, torch.bfloat16])
every_isa = each("isa", ISAS)
SHAPES = {"odd": (3, 7, 1, 5, 4), "narrow": (4, 40, 2, 16, 2), "family": (8, 64, 2, 128, 4)}
"""Heads, items of a head, groups, items of B and C, convolution width."""


def make_rule(draw, shape, **options):
    heads, size, groups, state, width = SHAPES[shape]
    channels = heads * size + 2 * groups * state
    options = {
        "dt_limits": (0.05, 0.9),
        "conv_bias_C": draw(channels, dtype=torch.float32),
    } | options
    return Mamba2Rule(
        draw(width, channels, dtype=torch.float32, scale=0.5),
        draw(heads, dtype=torch.float32).exp(),
        draw(heads, dtype=torch.float32) - 1,
        draw(heads, dtype=torch.float32),
        draw(heads * size, dtype=torch.float32),
        num_groups=groups,
        state_dim=state,
        norm_eps=1e-5,
        **options,
    )


def make_rows(draw, rule, lengths, dtype, dt_dtype=None):
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    total = starts[-1]
    parts = (
        draw(total, rule.num_channels, dtype=dtype),
        draw(total, rule.num_values, dtype=dtype),
        draw(total, rule.num_heads, dtype=dt_dtype or dtype),
    )
    return parts, StateRows(starts, list(range(len(lengths)))[::-1])


def run(rule, parts, rows, slots=None, *, isa="", pool=None):
    """Return the outputs of the native rule, and the slots after them."""
    slots = slots or StateSlots.allocate(rule, len(rows.slot_ids), parts[0].dtype)
    out = torch.full_like(parts[1], math.nan)
    scratch = torch.full(parts[1].shape, math.nan)
    rule.native.run(
        *map(view_tensor, (*parts, scratch, out)),
        slots.states.view,
        slots.carried.view,
        rows.query_start,
        rows.slot_ids,
        pool=pool,
        isa=isa,
    )
    return out, slots


def to_oracle(rule, wide):
    bias = None if rule.conv_bias_C is None else np.copy(wide(rule.conv_bias_C))
    vectors = (rule.conv_WC, rule.decay_rate_H, rule.dt_bias_H, rule.skip_H, rule.norm_HP)
    sizes = (rule.num_groups, rule.state_dim, rule.norm_eps, rule.dt_limits)
    return oracle.Mamba2Weights(*(np.copy(wide(x)) for x in vectors), *sizes, bias)


def open_state(rule, panels):
    """Return [H, N, P] of a sequence's panels, checking that what completes them is zero."""
    whole = panels.transpose(1, 2).flatten(2)
    assert not whole[..., rule.head_dim :].any()
    return whole[..., : rule.head_dim]


def count_all_outside(weights, rule, parts, rows, out, slots, wide, count_outside):
    outside = 0
    for i, slot in enumerate(rows.slot_ids):
        part = slice(rows.query_start[i], rows.query_start[i + 1])
        args = [wide(x[part]) for x in parts]
        expected, state = oracle.mamba2(*args, weights)
        bound, state_bound = oracle.mamba2_bound(*args, weights, out.dtype)
        outside += count_outside(out[part], expected, bound)
        got = open_state(rule, slots.states.tensor[slot])
        outside += count_outside(got, state, state_bound)
    return outside


@every_isa
@both_dtypes
@each("shape", SHAPES)
@each("options", [{}, {"conv_bias_C": None, "dt_limits": (0, math.inf)}])
def test_native(isa, dtype, shape, options, draw, wide, count_outside):
    rule = make_rule(draw, shape, **options)
    parts, rows = make_rows(draw, rule, [40, 5], dtype)
    out, slots = run(rule, parts, rows, isa=isa)
    weights = to_oracle(rule, wide)
    assert count_all_outside(weights, rule, parts, rows, out, slots, wide, count_outside) == 0
    kept = rule.carried_shape[0]
    assert torch.equal(slots.carried.tensor[1], parts[0][40 - kept : 40])


@both_dtypes
def test_torch(dtype, draw, wide, count_outside):
    """The form of other devices, its steps in float32, continued from its slots; the last token
    of each sequence as a graph computes it, with a row of padding."""
    rule = make_rule(draw, "narrow")
    parts, rows = make_rows(draw, rule, [21, 4], dtype, torch.float32)
    slots = StateSlots.allocate(rule, 2, dtype)
    out = parts[1].new_empty(25, rule.num_values)
    for index, own in (
        (list(range(8)), StateRows([0, 8], [1])),
        ([*range(8, 20), *range(21, 24)], StateRows([0, 12, 15], [1, 0])),
        ([20, 24, 20], StateRows([], [], torch.tensor([1, 0, 1]))),
    ):
        out[index] = run_mamba2(rule, *(part[index] for part in parts), own, slots)
    weights = to_oracle(rule, wide)
    assert count_all_outside(weights, rule, parts, rows, out, slots, wide, count_outside) == 0


@pytest.mark.slow
def test_the_oracle_is_the_familys(draw, wide):
    """transformers' own scan, in float32; importing the family takes seconds."""
    modeling = pytest.importorskip("transformers.models.granitemoehybrid.modeling_granitemoehybrid")
    rule = make_rule(draw, "narrow")
    (x, z, dt), _ = make_rows(draw, rule, [30], torch.float32)
    expected, _ = oracle.mamba2(*map(wide, (x, z, dt)), to_oracle(rule, wide))
    mixed = modeling.causal_conv1d_fn(
        x.T[None], rule.conv_WC.T, rule.conv_bias_C, activation="silu"
    )[0].T
    keys = rule.num_groups * rule.state_dim
    values, b, c = mixed.split([rule.num_values, keys, keys], -1)
    y = modeling.mamba2_chunk_scan(
        values.unflatten(-1, (rule.num_heads, -1))[None],
        dt[None],
        -rule.decay_rate_H,
        b.unflatten(-1, (rule.num_groups, -1))[None],
        c.unflatten(-1, (rule.num_groups, -1))[None],
        chunk_size=8,
        D=rule.skip_H,
        dt_bias=rule.dt_bias_H,
        dt_softplus=True,
        dt_limit=rule.dt_limits,
    )
    size = rule.num_values // rule.num_groups
    norm = modeling.GraniteMoeHybridRMSNormGated(rule.num_values, size, eps=rule.norm_eps)
    norm.weight.data.copy_(rule.norm_HP)
    assert np.allclose(wide(norm(y[0].flatten(1), z).detach()), expected, atol=1e-4)


def swap_keys(rule):
    keys = rule.num_groups * rule.state_dim
    b, c = rule.conv_WC[:, -2 * keys :].clone().chunk(2, -1)
    rule.conv_WC[:, -2 * keys :] = torch.cat([c, b], -1)


MUTANTS = {
    "none": lambda rule: None,
    "convolution reversed": lambda rule: rule.conv_WC.copy_(rule.conv_WC.flip(0)),
    "no bias of the convolution": lambda rule: rule.conv_bias_C.zero_(),
    "decay rates of other heads": lambda rule: rule.decay_rate_H.copy_(rule.decay_rate_H.roll(1)),
    "no bias of the steps": lambda rule: rule.dt_bias_H.zero_(),
    "no skip": lambda rule: rule.skip_H.zero_(),
    "norm": lambda rule: rule.norm_HP.copy_(rule.norm_HP.roll(1)),
    "epsilon": lambda rule: setattr(rule, "norm_eps", 1e-2),
    "no largest step": lambda rule: setattr(rule, "dt_limits", (0.05, math.inf)),
    "no smallest step": lambda rule: setattr(rule, "dt_limits", (0.0, 0.9)),
    "B for C": swap_keys,
}


@both_dtypes
@each("name", MUTANTS)
def test_mutants(name, dtype, draw, wide, count_outside):
    rule = make_rule(draw, "narrow")
    weights = to_oracle(rule, wide)
    parts, rows = make_rows(draw, rule, [30, 6], dtype)
    mutant = copy.deepcopy(rule)
    MUTANTS[name](mutant)
    out, slots = run(mutant, parts, rows)
    outside = count_all_outside(weights, rule, parts, rows, out, slots, wide, count_outside)
    assert outside == 0 if name == "none" else outside > 0


@both_dtypes
@each("shape", SHAPES)
def test_chunks_batches_threads_and_isas_change_no_bit(shape, dtype, draw):
    rule = make_rule(draw, shape)
    lengths = [70, 1, 37]
    parts, rows = make_rows(draw, rule, lengths, dtype)
    want, slots = run(rule, parts, rows)
    pool = _native.ThreadPool(3, oversubscribe=True)
    runs = [run(rule, parts, rows, pool=pool), *(run(rule, parts, rows, isa=i) for i in ISAS)]
    for other in runs:
        assert torch.equal(other[0], want)
        assert torch.equal(other[1].states.tensor, slots.states.tensor)
        assert torch.equal(other[1].carried.tensor, slots.carried.tensor)
    generator = torch.Generator().manual_seed(3)
    for _ in range(4):
        done, again = [0, 0, 0], StateSlots.allocate(rule, 3, dtype)
        got = torch.full_like(want, math.nan)
        while done != lengths:
            spans, ids, starts = [], [], [0]
            for s in torch.randperm(3, generator=generator).tolist()[:2]:
                count = int(torch.randint(0, 40, (), generator=generator))
                end = min(done[s] + count, lengths[s])
                spans.append(torch.arange(done[s], end) + rows.query_start[s])
                starts.append(starts[-1] + len(spans[-1]))
                ids.append(rows.slot_ids[s])
                done[s] = end
            index = torch.cat(spans)
            some = [part[index] for part in parts]
            got[index] = run(rule, some, StateRows(starts, ids), again, pool=pool)[0]
        assert torch.equal(got, want)
        assert torch.equal(again.states.tensor, slots.states.tensor)
        assert torch.equal(again.carried.tensor, slots.carried.tensor)


def test_slots_of_others_stay(draw):
    rule = make_rule(draw, "odd")
    parts, _ = make_rows(draw, rule, [9], torch.float32)
    slots = StateSlots.allocate(rule, 4, torch.float32)
    for held in (slots.states.tensor, slots.carried.tensor):
        held[[0, 1, 3]] = 7.0
    run(rule, parts, StateRows([0, 9], [2]), slots)
    assert (slots.states.tensor[[0, 1, 3]] == 7.0).all()
    assert (slots.carried.tensor[[0, 1, 3]] == 7.0).all()
    assert slots.states.tensor[2].any()


@every_isa
@both_dtypes
@each("fill", [0.0, 1e30, -1e30, math.inf, -math.inf])
def test_extreme_steps_leave_numbers(isa, dtype, fill, draw, wide, count_outside):
    """Steps at both limits: forgetting much, keeping much."""
    rule = make_rule(draw, "narrow")
    parts, rows = make_rows(draw, rule, [40, 5], dtype)
    parts[2].fill_(fill)
    parts[0][10:20] = 0
    out, slots = run(rule, parts, rows, isa=isa)
    assert out.isfinite().all()
    assert slots.states.tensor.isfinite().all()
    weights = to_oracle(rule, wide)
    if math.isfinite(fill):
        assert count_all_outside(weights, rule, parts, rows, out, slots, wide, count_outside) == 0


def test_a_nan_stays_in_its_sequence(draw):
    rule = make_rule(draw, "odd")
    parts, rows = make_rows(draw, rule, [20, 20], torch.float32)
    want, _ = run(rule, parts, rows)
    parts[0][5] = math.nan
    out, _ = run(rule, parts, rows)
    assert torch.equal(out[20:], want[20:])
    assert torch.equal(out[:5], want[:5])
    assert out[5:20].isnan().all()
    parts[0][5], parts[2][7] = 0.0, math.nan
    assert run(rule, parts, rows)[0][7:20].isnan().all()


def test_refusals(draw):
    rule = make_rule(draw, "odd")
    parts, rows = make_rows(draw, rule, [4, 4], torch.float32)
    for starts, ids in (([0, 4, 8], [0, 0]), ([0, 4, 8], [0, 2]), ([0, 4, 9], [0, 1])):
        with pytest.raises(ShapeError):
            run(rule, parts, StateRows(starts, ids), StateSlots.allocate(rule, 2, torch.float32))
    x, z, dt = parts
    for wrong in ((x[:, 1:], z, dt), (x, z.bfloat16(), dt), (x, z, dt[:3])):
        with pytest.raises(ShapeError):
            run(rule, wrong, rows)
    with pytest.raises(ShapeError, match="states"):
        run(rule, parts, rows, StateSlots.allocate(make_rule(draw, "narrow"), 2, torch.float32))
    with pytest.raises(ConfigError, match="isa"):
        run(rule, parts, rows, isa="nonsense")
    unequal = make_rule(draw, "odd")
    unequal.num_groups = 2
    with pytest.raises(ShapeError, match="groups"):
        _ = unequal.native

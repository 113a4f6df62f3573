"""Goal: the short convolution is right, and depends on its sequence alone.

Method: the native form on every ISA, and torch's, against the float64 oracle within a derived
bound; mutants must leave it. Any chunks, batch, threads and ISA give the same bits. What would
write out of bounds is refused.
"""

import math
from itertools import pairwise

import pytest
import torch

from each import each
from tandem import _native
from tandem.core.errors import ConfigError, ShapeError
from tandem.kernels.gated_delta import StateSlots
from tandem.kernels.native import view_tensor
from tandem.kernels.oracles import state_spaces as oracle
from tandem.kernels.state_space.rules import ShortConvRule, StateRows
from tandem.kernels.state_space.torch_form import run_short_conv

ISAS = _native.kernel_isas()
both_dtypes = each("dtype", [torch.float32, torch.bfloat16])
every_isa = each("isa", ISAS)
SHAPES = {"odd": (7, 4), "narrow": (67, 2), "family": (512, 3)}
"""Channels, width."""


def make_rule(draw, shape, has_bias=True):
    channels, width = SHAPES[shape]
    conv = draw(width, channels, dtype=torch.float32)
    return ShortConvRule(conv, draw(channels, dtype=torch.float32) if has_bias else None)


def make_rows(draw, rule, lengths, dtype):
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    x = draw(starts[-1], 3 * rule.conv_WC.shape[1], dtype=dtype)
    return x, StateRows(starts, list(range(len(lengths)))[::-1])


def run(rule, x, rows, slots=None, *, isa="", pool=None):
    """Return the outputs of the native rule, and the slots after them."""
    slots = slots or StateSlots.allocate(rule, len(rows.slot_ids), x.dtype)
    out = torch.full((len(x), x.shape[1] // 3), math.nan, dtype=x.dtype)
    rule.native.run(
        view_tensor(x),
        view_tensor(out),
        slots.carried.view,
        rows.query_start,
        rows.slot_ids,
        pool=pool,
        isa=isa,
    )
    return out, slots


def count_all_outside(rule, x, rows, out, wide, count_outside):
    conv, bias = wide(rule.conv_WC), None if rule.bias_C is None else wide(rule.bias_C)
    outside = 0
    for begin, end in pairwise(rows.query_start):
        part = wide(x[begin:end])
        bound = oracle.short_conv_bound(part, conv, x.dtype, bias)
        outside += count_outside(out[begin:end], oracle.short_conv(part, conv, bias), bound)
    return outside


@every_isa
@both_dtypes
@each("shape", SHAPES)
@each("has_bias", [True, False])
def test_native(isa, dtype, shape, has_bias, draw, wide, count_outside):
    rule = make_rule(draw, shape, has_bias)
    x, rows = make_rows(draw, rule, [40, 1, 5], dtype)
    out, slots = run(rule, x, rows, isa=isa)
    assert count_all_outside(rule, x, rows, out, wide, count_outside) == 0
    b, _, values = x.chunk(3, -1)
    kept, last = rule.carried_shape[0], rows.slot_ids[0]
    assert torch.equal(slots.carried.tensor[last], (b * values)[:40][-kept:])


@both_dtypes
def test_torch(dtype, draw, wide, count_outside):
    """The form of other devices, continued from its slots."""
    rule = make_rule(draw, "narrow")
    x, rows = make_rows(draw, rule, [20, 3], dtype)
    slots = StateSlots.allocate(rule, 2, dtype)
    pieces = [
        run_short_conv(rule, x[:8], StateRows([0, 8], [1]), slots),
        run_short_conv(rule, x[8:], StateRows([0, 12, 15], [1, 0]), slots),
    ]
    assert count_all_outside(rule, x, rows, torch.cat(pieces), wide, count_outside) == 0


MUTANTS = {
    "none": lambda rule: None,
    "reversed": lambda rule: rule.conv_WC.copy_(rule.conv_WC.flip(0)),
    "one tap left out": lambda rule: rule.conv_WC[0].zero_(),
    "one channel shifted": lambda rule: rule.conv_WC.copy_(rule.conv_WC.roll(1, 1)),
    "no bias": lambda rule: rule.bias_C.zero_(),
}


@both_dtypes
@each("name", MUTANTS)
def test_mutants(name, dtype, draw, wide, count_outside):
    rule = make_rule(draw, "narrow")
    right = ShortConvRule(rule.conv_WC.clone(), rule.bias_C.clone())
    x, rows = make_rows(draw, rule, [30, 6], dtype)
    MUTANTS[name](rule)
    out, _ = run(rule, x, rows)
    outside = count_all_outside(right, x, rows, out, wide, count_outside)
    assert outside == 0 if name == "none" else outside > 0


@both_dtypes
@each("shape", SHAPES)
def test_chunks_batches_threads_and_isas_change_no_bit(shape, dtype, draw):
    rule = make_rule(draw, shape)
    lengths = [170, 1, 37]
    x, rows = make_rows(draw, rule, lengths, dtype)
    want, slots = run(rule, x, rows)
    pool = _native.ThreadPool(3, oversubscribe=True)
    for other in [run(rule, x, rows, pool=pool), *(run(rule, x, rows, isa=isa) for isa in ISAS)]:
        assert torch.equal(other[0], want)
        assert torch.equal(other[1].carried.tensor, slots.carried.tensor)
    again = StateSlots.allocate(rule, 3, dtype)
    for i, slot in enumerate(rows.slot_ids):
        begin, end = rows.query_start[i : i + 2]
        cuts = [begin, min(begin + 1, end), min(begin + 34, end), end]
        for a, b in pairwise(cuts):
            part, _ = run(rule, x[a:b], StateRows([0, b - a], [slot]), again)
            assert torch.equal(part, want[a:b])
    assert torch.equal(again.carried.tensor, slots.carried.tensor)


def test_slots_of_others_stay(draw):
    rule = make_rule(draw, "odd")
    x, _ = make_rows(draw, rule, [9], torch.float32)
    slots = StateSlots.allocate(rule, 4, torch.float32)
    slots.carried.tensor[[0, 1, 3]] = 7.0
    run(rule, x, StateRows([0, 9], [2]), slots)
    assert (slots.carried.tensor[[0, 1, 3]] == 7.0).all()
    assert slots.carried.tensor[2].any()


def test_refusals(draw):
    rule = make_rule(draw, "odd")
    x, rows = make_rows(draw, rule, [4, 4], torch.float32)
    for starts, ids in (
        ([0, 4, 8], [0, 0]),
        ([0, 4, 8], [0, 2]),
        ([0, 4, 9], [0, 1]),
        ([0, 8], [0, 1]),
    ):
        slots = StateSlots.allocate(rule, 2, torch.float32)
        with pytest.raises(ShapeError):
            run(rule, x, StateRows(starts, ids), slots)
    with pytest.raises(ShapeError):
        run(rule, x[:, 1:], rows)
    with pytest.raises(ShapeError, match="carried"):
        run(rule, x, rows, StateSlots.allocate(make_rule(draw, "narrow"), 2, torch.float32))
    with pytest.raises(ShapeError, match="conv"):
        _native.ShortConv(view_tensor(torch.ones(20, 4)))
    with pytest.raises(ConfigError, match="isa"):
        run(rule, x, rows, isa="nonsense")

"""Goal: paged attention agrees with the oracle whatever the batch, blocks and earlier context.

Method: keys and values of the whole context are drawn, the earlier part is put into the cache by
hand through a scrambled block table, the step's own part through ``Step.write_kv``; the oracle sees
the plain arrays. The same queries run in one piece, in chunks and one by one.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from each import each
from tandem.core.model.layers import RopeSpec
from tandem.core.spec import GqaLayout
from tandem.kernels import paged, tolerance
from tandem.kernels.cpu.device import CPU
from tandem.kernels.devices import choose_execution
from tandem.kernels.interfaces import PLAIN, AttentionRule
from tandem.kernels.native import Buffer
from tandem.kernels.operators.rope import Rope
from tandem.kernels.oracles import reference
from tandem.kernels.paged import PagedBatch, PagedKvCache, SequenceChunk
from tandem.kernels.torch import attention as torch_attention

HEADS, KV_HEADS, SIZE, LAYERS = 6, 2, 16, 3
SCALE = SIZE**-0.5
SINKS = Buffer(torch.tensor([0.7, -1.3, 2.1, 0.2, 1.4, -0.4]))
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
both_dtypes = each("dtype", list(NAMES))


@pytest.fixture(autouse=True, params=["native", "torch"])
def operators(request, monkeypatch):
    """Both ways of computing: torch's is what runs elsewhere than on the CPU."""
    if request.param == "torch":
        monkeypatch.setattr(paged, "is_native", lambda tensor: False)
    return request.param


RULES = {
    "window": AttentionRule(window=7),
    "window of one": AttentionRule(window=1),
    "cap": AttentionRule(soft_cap=0.8),
    "sinks": AttentionRule(sinks=SINKS),
    "all": AttentionRule(11, 0.8, SINKS),
}


def oracle_rule(rule):
    """The same for the oracle."""
    sinks = None if rule.sinks is None else rule.sinks.tensor.double().numpy()
    return {"window": rule.window, "soft_cap": rule.soft_cap, "sinks_H": sinks}


class Case:
    """A cache and sequences with drawn queries, keys and values."""

    def __init__(self, lengths, dtype, draw, block_size=8, kv_dtype=None, rule=PLAIN):
        self.rule = rule
        kv_dtype = kv_dtype or dtype
        self.dtype, self.block_size = dtype, block_size
        layout = GqaLayout(
            num_layers=LAYERS,
            num_kv_heads=KV_HEADS,
            head_dim=SIZE,
            block_size=block_size,
            dtype=NAMES[kv_dtype],
        )
        counts = [-(-length // block_size) for length in lengths]
        self.cache = PagedKvCache(layout, sum(counts) + 1)
        order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(3))
        blocks = iter(order.tolist())
        self.tables = [[next(blocks) for _ in range(count)] for count in counts]
        self.q = [draw(n, HEADS, SIZE, dtype=dtype) for n in lengths]
        self.kv = [draw(n, 2, KV_HEADS, SIZE, dtype=dtype).to(kv_dtype).to(dtype) for n in lengths]
        self.rope = Rope(RopeSpec(head_dim=SIZE))

    def run(self, parts, layer_idx=1):
        """Attend tokens parts[s] = (start, end) of each sequence as one step."""
        chunks = [
            SequenceChunk([0] * (end - start), start, self.tables[s])
            for s, (start, end) in enumerate(parts)
            if end > start
        ]
        batch = PagedBatch.build(chunks, self.block_size)
        execution = choose_execution(CPU, self.dtype)
        plan = execution.begin_step(batch, self.cache, (self.rope,), self.dtype)
        rows = [(s, *part) for s, part in enumerate(parts) if part[1] > part[0]]
        q = torch.cat([self.q[s][a:b] for s, a, b in rows])
        kv = torch.cat([self.kv[s][a:b] for s, a, b in rows])
        plan.write_kv(layer_idx, kv)
        out = plan.attend(layer_idx, q, kv, SCALE, self.rule).view(-1, HEADS, SIZE)
        return dict(
            zip([s for s, _, _ in rows], out.split([b - a for _, a, b in rows]), strict=True)
        )

    def oracle(self, s, start, end):
        q = self.q[s][start:end].double().numpy()
        keys, values = self.kv[s][:end].double().numpy().transpose(1, 0, 2, 3)
        rule = oracle_rule(self.rule)
        bound = tolerance.attention(q, keys, values, SCALE, self.dtype, **rule)
        return reference.attention(q, keys, values, SCALE, **rule), bound


@both_dtypes
@each("block_size", [1, 8, 16])
def test_mixed_batch(dtype, block_size, draw, count_outside):
    lengths = [1, 40, 9, 33, 64, 5]
    case = Case(lengths, dtype, draw, block_size)
    first = [(0, n - 1) for n in lengths]
    for s, out in case.run(first).items():
        assert count_outside(out, *case.oracle(s, *first[s])) == 0
    # Now three decode, one prefills on top of its context, one starts anew, one is idle.
    second = [(0, 1), (39, 40), (8, 9), (10, 33), (63, 64), (0, 0)]
    for s, out in case.run(second).items():
        assert count_outside(out, *case.oracle(s, *second[s])) == 0


@both_dtypes
@each("name", RULES)
def test_rules_in_a_mixed_batch(name, dtype, draw, count_outside):
    """Windows, caps and sinks, whole, decoding and in chunks, beside sequences of other lengths."""
    lengths = [1, 40, 9, 33, 30, 5]
    case = Case(lengths, dtype, draw, rule=RULES[name])
    first = [(0, n - 1) for n in lengths]
    for s, out in case.run(first).items():
        assert count_outside(out, *case.oracle(s, *first[s])) == 0
    second = [(0, 1), (39, 40), (8, 9), (10, 33), (29, 30), (0, 0)]
    for s, out in case.run(second).items():
        assert count_outside(out, *case.oracle(s, *second[s])) == 0


@pytest.mark.parametrize("name", RULES)
def test_rules_over_tiles(name, draw, count_outside, monkeypatch):
    """Tiles of earlier context that some queries of a chunk see, or none, or all."""
    monkeypatch.setattr(torch_attention, "TILE_TOKENS", 8)
    monkeypatch.setattr(torch_attention, "MAX_GATHER_BYTES", 4096)
    monkeypatch.setattr(torch_attention, "CAUSAL_ROWS", 5)
    case = Case([60, 50], torch.float32, draw, rule=RULES[name])
    case.run([(0, 30), (0, 49)])
    for part in ([(30, 59), (49, 50)], [(59, 60), (0, 0)]):
        for s, out in case.run(part).items():
            assert count_outside(out, *case.oracle(s, *part[s])) == 0


WRONG_RULES = {
    "window one more": ("window", lambda rule: replace(rule, window=8)),
    "window one less": ("window", lambda rule: replace(rule, window=6)),
    "cap before the scale": ("cap", lambda rule: replace(rule, soft_cap=rule.soft_cap * SCALE)),
    "no sinks": ("sinks", lambda rule: replace(rule, sinks=None)),
    "sinks of other heads": (
        "sinks",
        lambda rule: replace(rule, sinks=Buffer(rule.sinks.tensor.roll(1))),
    ),
}


@each("name", WRONG_RULES)
@each("first", [10, 39])
def test_wrong_rules_are_caught(name, first, draw, count_outside):
    """The bound tells a rule from its neighbours, in a prefill and in a decode."""
    right, spoil = WRONG_RULES[name]
    case = Case([40], torch.float32, draw, rule=RULES[right])
    expected = case.oracle(0, first, 40)
    case.rule = spoil(case.rule)
    case.run([(0, first)])
    assert count_outside(case.run([(first, 40)])[0], *expected) > 0


MUTANTS = {
    "none": lambda case: None,
    "scale": lambda case: [q.mul_(1.25) for q in case.q],
    "heads swapped": lambda case: [q.copy_(q.flip(1)) for q in case.q],
    "a key of the context": lambda case: case.kv[0][3, 0].zero_(),
    "the last value": lambda case: case.kv[0][-1, 1].zero_(),
}


@both_dtypes
@each("name", MUTANTS)
@each("first", [10, 39])
def test_mutants(name, first, dtype, draw, count_outside):
    case = Case([40], dtype, draw)
    expected = case.oracle(0, first, 40)
    MUTANTS[name](case)
    case.run([(0, first)])
    outside = count_outside(case.run([(first, 40)])[0], *expected)
    assert outside == 0 if name == "none" else outside > 0


@both_dtypes
def test_chunks_equal_one_piece(dtype, draw, count_outside):
    case = Case([150], dtype, draw)
    for start, end in [(0, 70), (70, 71), (71, 79), (79, 149), (149, 150)]:
        out = case.run([(start, end)])[0]
        assert count_outside(out, *case.oracle(0, start, end)) == 0


def test_long_context_is_attended_in_tiles(draw, count_outside, monkeypatch):
    monkeypatch.setattr(torch_attention, "TILE_TOKENS", 16)
    monkeypatch.setattr(torch_attention, "MAX_GATHER_BYTES", 4096)
    monkeypatch.setattr(torch_attention, "CAUSAL_ROWS", 8)
    case = Case([90, 70], torch.float32, draw)
    case.run([(0, 60), (0, 69)])
    for part in ([(60, 89), (69, 70)], [(89, 90), (0, 0)]):
        for s, out in case.run(part).items():
            assert count_outside(out, *case.oracle(s, *part[s])) == 0


def test_kv_in_a_smaller_dtype(draw, count_outside):
    case = Case([30], torch.float32, draw, kv_dtype=torch.bfloat16)
    assert case.cache.dtype == torch.bfloat16
    for start, end in [(0, 20), (20, 29), (29, 30)]:
        out = case.run([(start, end)])[0]
        assert count_outside(out, *case.oracle(0, start, end)) == 0


def test_layers_do_not_share_slots(draw):
    case = Case([10], torch.float32, draw)
    case.run([(0, 10)], layer_idx=2)
    assert not case.cache.tensor[:, :2].any()
    context = reference.gather_context(
        case.cache.tensor.double().numpy(), case.tables[0], layer_idx=2, length=10
    )
    assert np.array_equal(context, case.kv[0].double().numpy().transpose(1, 0, 2, 3))


def test_nan_of_one_sequence_stays_there(draw):
    case = Case([12, 12], torch.float32, draw)
    case.kv[0][5] = float("nan")
    case.run([(0, 11), (0, 11)])
    out = case.run([(11, 12), (11, 12)])
    assert out[0].isnan().all()
    assert not out[1].isnan().any()

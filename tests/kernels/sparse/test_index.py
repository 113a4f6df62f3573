"""Goal: the native index chooses what float64 scores choose, and attention sees those keys alone.

Method: index keys and latents in scattered blocks behind one another, on every ISA, in every type;
choices are compared with scores in float64 wherever these do not nearly tie, attention with the
oracle on the chosen keys. What would read beyond a context is refused.
"""

import math

import pytest
import torch

from each import each
from tandem import _native
from tandem.core.errors import ConfigError, ShapeError
from tandem.kernels import tolerance
from tandem.kernels.native import view_tensor
from tandem.kernels.oracles import reference

ISAS = _native.kernel_isas()
BLOCK, KEY, VALUE, DIM, TOP, HEADS, INDEX_HEADS = 16, 40, 32, 24, 70, 6, 5
LENGTH, NUM_QUERIES = 203, 150
TYPES = [("", torch.float32), ("", torch.bfloat16), ("int8", torch.uint8), ("fp8", torch.uint8)]


class Blocks:
    """One sequence in blocks that hold latents, then index keys."""

    def __init__(self, kv_format, dtype, *, isa=""):
        self.generator = torch.Generator().manual_seed(3)
        item, scale = (1, 2) if kv_format else (dtype.itemsize, 0)
        self.index_offset = BLOCK * (KEY * item + scale)
        size = self.index_offset + BLOCK * (DIM * item + scale)
        count = -(-LENGTH // BLOCK)
        fill = 255 if kv_format else math.nan
        self.memory = torch.full((count + 1, size // item), fill, dtype=dtype)
        self.table = torch.randperm(count + 1, generator=self.generator)[None, :count].contiguous()
        place, view = _native.KvPool.placed, view_tensor(self.memory)
        latents = place(view, kv_format, BLOCK, KEY, VALUE, [0])
        index = place(view, kv_format, BLOCK, DIM, DIM, [self.index_offset])
        # Numbers that floats hold exactly, and e4m3 nearly.
        self.latents, self.keys = self.draw(LENGTH, KEY), self.draw(LENGTH, DIM)
        whole, last = [0, LENGTH], [0, NUM_QUERIES]
        for pool, rows in ((latents, self.latents), (index, self.keys)):
            plan = _native.PlannedAttention(pool, self.table, whole, [LENGTH], None, isa)
            plan.store(0, view_tensor(rows[:, None].contiguous()))
        self.attention, self.index = (
            _native.PlannedAttention(pool, self.table, last, [LENGTH], None, isa)
            for pool in (latents, index)
        )

    def draw(self, *shape):
        rows = torch.randint(-7, 8, shape, generator=self.generator).float() / 8
        rows[..., 0] = 0.875
        return rows

    def choose(self, q, weights):
        chosen = torch.full((NUM_QUERIES, TOP), -1, dtype=torch.int32)
        self.index.choose(0, view_tensor(q), view_tensor(weights), 0.5, view_tensor(chosen))
        return chosen

    def score(self, q, weights):
        products = torch.einsum("thi,ci->thc", q.double(), self.keys.double()).relu()
        scores = 0.5 * torch.einsum("th,thc->tc", weights.double(), products)
        seen = (
            torch.arange(LENGTH)[None]
            <= (LENGTH - NUM_QUERIES + torch.arange(NUM_QUERIES))[:, None]
        )
        return scores.masked_fill(~seen, -math.inf)


@each("isa", ISAS)
@each(("kv_format", "dtype"), TYPES)
def test_choices_are_those_of_float64_and_attention_sees_them_alone(kv_format, dtype, isa):
    blocks = Blocks(kv_format, dtype, isa=isa)
    q = blocks.draw(NUM_QUERIES, INDEX_HEADS, DIM)
    weights = torch.randn(NUM_QUERIES, INDEX_HEADS, generator=blocks.generator)
    chosen, scores = blocks.choose(q, weights), blocks.score(q, weights)
    # Eighths are no multiples of int8's scale, 0.875 / 127.
    slack = {"": 1e-5, "fp8": 1e-2, "int8": 0.15}[kv_format]
    queries = torch.randn(NUM_QUERIES, HEADS, KEY, generator=blocks.generator)
    out = torch.full((NUM_QUERIES, HEADS, VALUE), math.nan)
    args = (view_tensor(queries), view_tensor(out), 0.2)
    blocks.attention.attend(0, *args, chosen=view_tensor(chosen))
    for t in range(NUM_QUERIES):
        position = LENGTH - NUM_QUERIES + t
        if position < TOP:
            assert chosen[t].tolist() == [*range(position + 1), *[0] * (TOP - position - 1)]
        own = chosen[t, : min(TOP, position + 1)].long()
        assert (own.diff() > 0).all()
        least = scores[t].topk(len(own)).values[-1]
        assert (scores[t, own] >= least - slack).all()
        left = torch.ones(LENGTH, dtype=torch.bool).index_fill(0, own, value=False)
        assert (scores[t, left] <= least + slack).all()
        keys = blocks.latents[own, None].double().numpy()
        given = (queries[t, None].double().numpy(), keys, keys[..., :VALUE], 0.2)
        want, bound = reference.attention(*given), tolerance.attention(*given, torch.float32)
        error = abs(out[t, None].double().numpy() - want)
        assert (error <= bound + (2e-2 if kv_format else 0)).all()


def test_a_list_of_all_keys_gives_the_bits_of_none():
    blocks = Blocks("", torch.float32)
    q = torch.randn(NUM_QUERIES, HEADS, KEY, generator=blocks.generator)
    outs = [torch.empty(NUM_QUERIES, HEADS, VALUE) for _ in range(2)]
    all_of_them = torch.zeros(NUM_QUERIES, LENGTH, dtype=torch.int32)
    all_of_them[-1] = torch.arange(LENGTH)
    blocks.attention.attend(0, view_tensor(q), view_tensor(outs[0]), 0.2)
    blocks.attention.attend(
        0, view_tensor(q), view_tensor(outs[1]), 0.2, chosen=view_tensor(all_of_them)
    )
    assert torch.equal(*outs)


def test_of_equal_scores_the_lowest_positions_are_chosen():
    blocks = Blocks("", torch.float32)
    q = blocks.draw(NUM_QUERIES, INDEX_HEADS, DIM)
    for weight in (0.0, -0.0):
        chosen = blocks.choose(q, torch.full((NUM_QUERIES, INDEX_HEADS), weight))
        assert chosen[-1].tolist() == list(range(TOP))


def test_what_would_read_out_of_bounds_is_refused():
    blocks = Blocks("", torch.float32)
    q = torch.zeros(NUM_QUERIES, HEADS, KEY)
    out = torch.zeros(NUM_QUERIES, HEADS, VALUE)
    good = blocks.choose(torch.zeros(NUM_QUERIES, 1, DIM), torch.zeros(NUM_QUERIES, 1))

    def attend(chosen, **rule):
        args = (view_tensor(q), view_tensor(out), 1.0)
        blocks.attention.attend(0, *args, chosen=view_tensor(chosen), **rule)

    attend(good)
    for row, column, value in ((-1, -1, LENGTH), (-1, 0, -1), (-1, 1, 0), (90, -1, 200)):
        bad = good.clone()
        bad[row, column] = value
        with pytest.raises(ShapeError, match="ascend"):
            attend(bad)
    with pytest.raises(ShapeError, match="window"):
        attend(good, window=3)
    with pytest.raises(ShapeError, match="int32"):
        attend(good.long())
    with pytest.raises(ShapeError, match="heads"):
        blocks.choose(torch.zeros(NUM_QUERIES, 129, DIM), torch.zeros(NUM_QUERIES, 129))
    with pytest.raises(ShapeError, match="weights"):
        blocks.choose(torch.zeros(NUM_QUERIES, 2, DIM), torch.zeros(NUM_QUERIES, 1))
    with pytest.raises(ShapeError, match="a layer at byte"):
        _native.KvPool.placed(view_tensor(blocks.memory), "", BLOCK, KEY, VALUE, [2048])
    with pytest.raises(ConfigError, match="int4"):
        codes = torch.zeros(2, 4096, dtype=torch.uint8)
        _native.KvPool.placed(view_tensor(codes), "int4", BLOCK, KEY, VALUE, [0])

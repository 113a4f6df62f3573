"""Blocks of ranks of unlike tensor-parallel sizes fill each other byte for byte, and no byte more.

The oracle lays the heads of a whole model out for a rank by numpy's own indexing; it shares no
arithmetic with the ranges that it checks.
"""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.kv_layout import GqaLayout, MlaLayout
from tandem.engine.disaggregation.head_slices import (
    ByteRange,
    HeldHeads,
    have_same_rows,
    map_blocks,
    sum_ranges,
)
from tandem.engine.disaggregation.peers import OpenPeer

NUM_EXAMPLES = 60
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "fp8": 1}
UNTOUCHED = 0xEE


class Model:
    """KV of one block in all heads, of random bytes."""

    def __init__(self, num_heads, num_layers, block_size, head_dim, dtype, seed) -> None:
        self.num_heads = num_heads
        self.shape = {
            "num_layers": num_layers, "block_size": block_size, "head_dim": head_dim, "dtype": dtype
        }  # fmt: skip
        self.is_coded = dtype in {"int8", "fp8"}
        rng = np.random.default_rng(seed)
        row_bytes = head_dim * ITEM_BYTES[dtype]
        # UNTOUCHED is left out, so that a byte that was not written shows.
        self.elements = rng.integers(
            0, 0xEE, (num_layers, 2, num_heads, block_size, row_bytes), dtype=np.uint8
        )
        self.scales = rng.integers(
            0, 0xEE, (num_layers, 2, num_heads, block_size, 2), dtype=np.uint8
        )

    def hold(self, first, end):
        """The block of the rank that holds heads ``first`` to ``end``, and what it says of it."""
        held = HeldHeads(GqaLayout(num_kv_heads=end - first, **self.shape), first)
        layers = []
        for layer in range(self.shape["num_layers"]):
            layers.append(self.elements[layer, :, first:end].reshape(-1))
            if self.is_coded:
                layers.append(self.scales[layer, :, first:end].reshape(-1))
        block = np.concatenate(layers)
        assert len(block) == held.layout.bytes_per_block
        return held, block


@st.composite
def draw_models(draw):
    return Model(
        draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12])),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 2, 16])),
        draw(st.sampled_from([2, 4, 8])),
        draw(st.sampled_from(sorted(ITEM_BYTES))),
        draw(st.integers(0, 2**32)),
    )


def draw_share(draw, num_heads):
    """Heads of one rank: any range, an equal share among others."""
    first = draw(st.integers(0, num_heads - 1))
    return first, draw(st.integers(first + 1, num_heads))


def copy(ranges, source, target):
    for each in ranges:
        assert 0 <= each.source <= each.source + each.length <= len(source)
        assert 0 <= each.target <= each.target + each.length <= len(target)
        assert (target[each.target : each.target + each.length] == UNTOUCHED).all(), "twice"
        target[each.target : each.target + each.length] = source[
            each.source : each.source + each.length
        ]


def check_merged(ranges):
    assert all(each.length > 0 for each in ranges)
    for one, other in itertools.pairwise(ranges):
        is_adjacent = (one.source + one.length, one.target + one.length) == other[:2]
        assert not is_adjacent, "adjacent ranges are one"


@given(draw_models(), st.data())
@settings(max_examples=NUM_EXAMPLES, deadline=None)
def test_one_peer_fills_the_heads_that_both_hold_and_nothing_else(model, data):
    source, theirs = model.hold(*draw_share(data.draw, model.num_heads))
    target, wanted = model.hold(*draw_share(data.draw, model.num_heads))
    num_layers = model.shape["num_layers"]
    first_layer = data.draw(st.integers(0, num_layers - 1))
    layers = range(first_layer, data.draw(st.integers(first_layer + 1, num_layers)))
    ranges = map_blocks(source, target, layers)
    check_merged(ranges)
    ours = np.full(len(wanted), UNTOUCHED, np.uint8)
    copy(ranges, theirs, ours)
    # What should have been filled, by the same layout of a model that knows only shared heads.
    first = max(source.first_head, target.first_head)
    end = min(
        source.first_head + source.layout.num_kv_heads,
        target.first_head + target.layout.num_kv_heads,
    )
    expected = Model(model.num_heads, **model.shape, seed=0)
    for mine, all_heads in (
        (expected.elements, model.elements),
        (expected.scales, model.scales),
    ):
        mine[:] = UNTOUCHED
        if first < end:
            mine[layers.start : layers.stop, :, first:end] = all_heads[
                layers.start : layers.stop, :, first:end
            ]
    mine = expected.hold(target.first_head, target.first_head + target.layout.num_kv_heads)[1]
    assert (ours == mine).all()


@given(draw_models(), st.data())
@settings(max_examples=NUM_EXAMPLES, deadline=None)
def test_ranks_of_any_size_give_each_other_whole_blocks(model, data):
    """Prefill with one tensor-parallel size, decode with another, layer by layer."""
    sizes = [size for size in range(1, model.num_heads + 1) if model.num_heads % size == 0]
    prefill_share = model.num_heads // data.draw(st.sampled_from(sizes))
    decode_share = model.num_heads // data.draw(st.sampled_from(sizes))
    layers = range(model.shape["num_layers"])
    for begin in range(0, model.num_heads, decode_share):
        target, wanted = model.hold(begin, begin + decode_share)
        ours = np.full(len(wanted), UNTOUCHED, np.uint8)
        for first in range(0, model.num_heads, prefill_share):
            source, theirs = model.hold(first, first + prefill_share)
            by_layer = [map_blocks(source, target, range(i, i + 1)) for i in layers]
            merged = OpenPeer(None, None, by_layer).list_ranges(layers)
            assert merged == map_blocks(source, target, layers)
            copy(merged, theirs, ours)
            is_same = prefill_share == decode_share and first == begin
            assert not is_same or merged == [ByteRange(0, 0, len(wanted))]
            if sum(each.length for each in merged) == len(wanted):
                # What both sides compare after a read: the peer's sum over what it gave.
                given_bytes = [(each.source, each.length) for each in merged]
                whole = sum_ranges(wanted, [(0, len(wanted))])
                assert sum_ranges(theirs, given_bytes) == whole
                damaged = theirs.copy()
                damaged[merged[-1].source] ^= 1
                assert sum_ranges(damaged, given_bytes) != whole
        assert (ours == wanted).all()


def test_latents_belong_to_all_heads():
    layout = MlaLayout(
        num_layers=3, block_size=4, kv_lora_rank=8, rope_dim=2, dtype="bfloat16"
    )  # fmt: skip
    held = HeldHeads(layout)
    assert map_blocks(held, held, range(3)) == [ByteRange(0, 0, layout.bytes_per_block)]
    assert map_blocks(held, held, range(1, 2)) == [
        ByteRange(layout.bytes_per_layer, layout.bytes_per_layer, layout.bytes_per_layer)
    ]


def test_rows_are_compared_without_the_number_of_heads():
    shape = {"num_layers": 2, "block_size": 4, "head_dim": 8, "dtype": "bfloat16"}
    layout = GqaLayout(num_kv_heads=2, **shape)
    assert have_same_rows(layout, GqaLayout(num_kv_heads=8, **shape))
    for name, value in {**shape, "head_dim": 16, "dtype": "int8", "block_size": 8}.items():
        other = GqaLayout(num_kv_heads=2, **{**shape, name: value})
        assert have_same_rows(layout, other) == (value == shape[name])

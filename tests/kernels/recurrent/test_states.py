"""The slots of states: their layout, copies, and refusals."""

import numpy as np
import pytest
import torch

from tandem.core.errors import ShapeError
from tandem.core.spec import StateLayout
from tandem.kernels.gated_delta import GatedDeltaRule, StateSlots
from tandem.kernels.paged import NO_SLOT, PagedBatch, SequenceChunk
from tandem.kernels.states import StateCache

LAYOUT = StateLayout(
    num_layers=3,
    num_value_heads=4,
    key_dim=5,
    value_dim=40,
    num_channels=2 * 2 * 5 + 4 * 40,
    conv_width=3,
)


def test_parts_of_layers_fill_a_slot_without_overlap() -> None:
    """Parts of layers lie one after the other, each at a cache line; bytes are by formula."""
    cache = StateCache(LAYOUT, 2)
    cache.tensor[:] = 255
    for slots in cache.layers:
        assert not (slots.states.tensor[1].view(torch.uint8) != 255).any()
        slots.states.tensor[1] = 0
        slots.carried.tensor[1] = 0
    left = int((cache.tensor[1] != 0).sum())
    parts = 4 * 2 * 5 * 32 * 4, 2 * 180 * 2
    assert left == LAYOUT.bytes_per_state - 3 * sum(parts)
    assert LAYOUT.bytes_per_state == 3 * (5120 + 768)
    assert bool((cache.tensor[0] == 255).all()), "the other slot was written"
    assert all(LAYOUT.layer_slice(i).carried % 64 == 0 for i in range(3))


def test_views_are_those_that_the_rule_takes() -> None:
    """A slot's views have the shapes of the layer's rule."""
    rule = GatedDeltaRule(
        torch.zeros(3, 180), torch.ones(4), torch.ones(4), torch.ones(40), num_k_heads=2,
        key_dim=5, norm_eps=1e-6,
    )  # fmt: skip
    own, slots = StateSlots.allocate(rule, 2, torch.bfloat16), StateCache(LAYOUT, 2).layers[1]
    assert slots.states.tensor.shape == own.states.tensor.shape
    assert slots.carried.tensor.shape == own.carried.tensor.shape
    assert slots.carried.tensor.dtype == own.carried.tensor.dtype


def test_a_copy_and_a_clear_touch_their_slot_alone() -> None:
    """Copying gives all layers' bytes; what is neither source nor target stays."""
    cache = StateCache(LAYOUT, 4)
    size = 4 * LAYOUT.bytes_per_state
    cache.view_bytes()[:] = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    before = cache.tensor.clone()
    cache.copy(2, 0)
    cache.clear(3)
    assert torch.equal(cache.tensor[0], before[2])
    assert torch.equal(cache.tensor[1:3], before[1:3])
    assert not bool(cache.tensor[3].any())
    with pytest.raises(ShapeError, match="slot 4 of 4"):
        cache.copy(4, 0)
    with pytest.raises(ShapeError, match="slot -1 of 4"):
        cache.clear(-1)


def test_a_batch_tells_slots_and_which_begin() -> None:
    """Slots are in the order of sequences; those of first chunks are fresh."""
    chunks = [
        SequenceChunk([1, 2], 0, [0], state_slot=5),
        SequenceChunk([3], 7, [1], state_slot=2),
        SequenceChunk([4], 0, [2]),
    ]
    batch = PagedBatch.build(chunks, 8)
    assert batch.state_slots == (5, 2, NO_SLOT)
    assert batch.fresh_slots == (5,)

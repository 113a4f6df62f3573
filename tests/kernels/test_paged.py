"""Goal: the batch and the block pool hold what their docstrings promise; wrong input is named."""

from pathlib import Path

import pytest
import torch

from tandem.core.errors import CapacityError, ShapeError, UnsupportedError
from tandem.core.spec import KVLayout
from tandem.kernels.paged import MIN_HUGE_BYTES, PagedBatch, PagedKvCache, SequenceChunk

LAYOUT = KVLayout(num_layers=2, num_kv_heads=3, head_dim=4, block_size=8, dtype="float32")


def test_layout_sizes_and_offsets():
    assert LAYOUT.bytes_per_token == 2 * 2 * 3 * 4 * 4
    assert LAYOUT.bytes_per_block == 8 * LAYOUT.bytes_per_token
    cache = PagedKvCache(LAYOUT, 5)
    block = cache.tensor[3]
    assert block.is_contiguous()
    assert block.numel() * 4 == LAYOUT.bytes_per_block
    assert block[1].storage_offset() * 4 == 3 * LAYOUT.bytes_per_block + LAYOUT.layer_offset(1)
    head = block[1, 1, 2]
    assert head.storage_offset() * 4 == 3 * LAYOUT.bytes_per_block + LAYOUT.head_offset(1, 1, 2)


CODED = KVLayout(num_layers=2, num_kv_heads=3, head_dim=4, block_size=8, dtype="int8")


def test_coded_layout_keeps_scales_within_the_layer():
    assert CODED.bytes_per_layer == 2 * 3 * 8 * (4 + 2)
    assert CODED.bytes_per_block == 2 * CODED.bytes_per_layer == 8 * CODED.bytes_per_token
    assert CODED.scale_offset == 2 * 3 * 8 * 4
    assert CODED.head_offset(1, 1, 2) == CODED.bytes_per_layer + 5 * 8 * 4
    cache = PagedKvCache(CODED, 5)
    assert cache.tensor.shape == (5, 2, CODED.bytes_per_layer)
    assert cache.native is not None
    with pytest.raises(UnsupportedError, match="int8 KV"):
        PagedKvCache(CODED, 5, device="meta")


def test_copy_block_copies_codes_and_their_scales():
    cache = PagedKvCache(CODED, 3)
    cache.tensor[0] = torch.randint(1, 255, cache.tensor.shape[1:], dtype=torch.uint8)
    cache.tensor[2] = 255
    cache.copy_block(0, 2, 5)
    for layer in range(2):
        for first, width in ((0, 4), (CODED.scale_offset, 2)):
            parts = cache.tensor[[0, 2], layer, first : first + 48 * width].view(2, 6, 8, width)
            assert torch.equal(parts[0, :, :5], parts[1, :, :5])
            assert not parts[1, :, 5:].any()
    cache.copy_block(0, 1, 8)
    assert torch.equal(cache.tensor[0], cache.tensor[1])


def test_batch_rows_slots_and_wants():
    chunks = [
        SequenceChunk([1, 2, 3], 6, [4, 0], "last"),
        SequenceChunk([9], 0, [2], "none"),
        SequenceChunk([5, 6], 14, [7, 1], "all"),
    ]
    batch = PagedBatch.build(chunks, 8)
    assert batch.token_ids.tolist() == [1, 2, 3, 9, 5, 6]
    assert batch.positions.tolist() == [6, 7, 8, 0, 14, 15]
    assert batch.slot_blocks.tolist() == [4, 4, 0, 2, 1, 1]
    assert batch.slot_offsets.tolist() == [6, 7, 0, 0, 6, 7]
    assert batch.query_start == (0, 3, 4, 6)
    assert batch.context_lens == (9, 1, 16)
    assert batch.block_table.tolist() == [[4, 0], [2, 2], [7, 1]]
    assert batch.logit_rows.tolist() == [2, 4, 5]
    # Block 0 gets its first token and keeps room; block 2 too; block 1 is filled up.
    assert batch.fresh_blocks == (0, 2)


def test_runs_cover_the_slots_of_a_prefill():
    batch = PagedBatch.build([SequenceChunk(list(range(45)), 5, [3, 1, 0, 2])], 16)
    assert batch.slot_runs == ((3, 5, 0, 11), (1, 0, 11, 27), (0, 0, 27, 43), (2, 0, 43, 45))
    decode = PagedBatch.build([SequenceChunk([1], 5, [3]), SequenceChunk([1], 0, [0])], 16)
    assert decode.slot_runs is None


def test_empty_batch():
    batch = PagedBatch.build([], 8)
    assert batch.num_tokens == batch.num_sequences == 0


@pytest.mark.parametrize(
    ("chunk", "text"),
    [
        (SequenceChunk([], 0, [1]), "0 tokens from position 0"),
        (SequenceChunk([1], -1, [1]), "position -1"),
        (SequenceChunk([1] * 9, 0, [1]), "9 tokens in 1 blocks of 8"),
        (SequenceChunk([1], 0, [1], "some"), "wants='some'"),
    ],
)
def test_wrong_chunks_are_named(chunk, text):
    with pytest.raises(ShapeError, match=text):
        PagedBatch.build([chunk], 8)


def test_copy_block_keeps_a_prefix_and_clears_the_rest():
    cache = PagedKvCache(LAYOUT, 3)
    cache.tensor[0] = torch.randn(cache.tensor.shape[1:])
    cache.tensor[2] = float("nan")
    cache.copy_block(0, 2, 5)
    assert torch.equal(cache.tensor[2, :, :, :, :5], cache.tensor[0, :, :, :, :5])
    assert not cache.tensor[2, :, :, :, 5:].any()
    with pytest.raises(ShapeError, match="9 tokens of a block of 8"):
        cache.copy_block(0, 1, 9)


def test_foreign_memory_must_fit():
    shape = (4, *LAYOUT.shape)
    memory = torch.zeros(shape)
    assert PagedKvCache(LAYOUT, 4, tensor=memory).tensor.data_ptr() == memory.data_ptr()
    for wrong in (memory[:3], memory.double(), memory.transpose(1, 2)):
        with pytest.raises(ShapeError, match="need contiguous"):
            PagedKvCache(LAYOUT, 4, tensor=wrong)


def count_resident_bytes() -> int:
    """Without pages of files, which the kernel takes back as it likes; with huge ones set aside."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return sum(int(line[1]) << 10 for line in lines if line[0] in ("RssAnon:", "HugetlbPages:"))


def test_large_pools_take_huge_pages_as_they_are_used_and_give_them_back():
    num_blocks = 64 * MIN_HUGE_BYTES // LAYOUT.bytes_per_block // 8  # 128 MiB.
    before = count_resident_bytes()
    cache = PagedKvCache(LAYOUT, num_blocks)
    assert cache.tensor.data_ptr() % (2 << 20) == 0
    huge_is_preset = count_resident_bytes() - before > 100 << 20
    assert not cache.tensor[::1000].any()
    cache.tensor[num_blocks // 2 :] = 1.0
    held = count_resident_bytes() - before
    assert held > 60 << 20
    assert huge_is_preset or held < 120 << 20
    view = cache.tensor[-1]
    del cache
    assert view.eq(1).all()
    del view
    assert count_resident_bytes() - before < 30 << 20
    # Rounding a small pool up to whole huge pages would mostly be waste.
    assert PagedKvCache(LAYOUT, 5).tensor.data_ptr() % (2 << 20)


def test_an_impossible_pool_is_refused():
    with pytest.raises(CapacityError):
        PagedKvCache(LAYOUT, 1 << 40)

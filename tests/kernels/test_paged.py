"""Goal: the batch and the block pool hold what their docstrings promise; wrong input is named."""

import mmap
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from each import each
from tandem._native import PlannedAttention, TensorView
from tandem.core.errors import CapacityError, ShapeError, UnsupportedError
from tandem.core.spec import GqaLayout, KVLayout, MlaLayout
from tandem.kernels.cpu.device import MIN_HUGE_BYTES, CpuDevice
from tandem.kernels.paged import PagedBatch, PagedKvCache, SequenceChunk
from tandem.transfer import Op, Transfer, TransferConfig, TransferEngine

LAYOUT = GqaLayout(num_layers=2, num_kv_heads=3, head_dim=4, block_size=8, dtype="float32")


def test_layout_sizes_and_offsets():
    assert LAYOUT.bytes_per_token == 2 * 2 * 3 * 4 * 4
    assert LAYOUT.bytes_per_block == 8 * LAYOUT.bytes_per_token
    cache = PagedKvCache(LAYOUT, 5)
    block = cache.tensor[3]
    assert block.is_contiguous()
    assert block.numel() * 4 == LAYOUT.bytes_per_block
    assert block[1].storage_offset() * 4 == 3 * LAYOUT.bytes_per_block + LAYOUT.bytes_per_layer
    offset = block[1].storage_offset() * 4
    assert LAYOUT.layer_slice(3, 1) == (offset, LAYOUT.bytes_per_layer)
    head = block[1, 1, 2]
    assert head.storage_offset() * 4 == 3 * LAYOUT.bytes_per_block + LAYOUT.head_offset(1, 1, 2)


CODED = GqaLayout(num_layers=2, num_kv_heads=3, head_dim=4, block_size=8, dtype="int8")


class Apart(CpuDevice):
    """A device whose memory the host does not see, without native kernels."""

    torch_device = torch.device("meta")
    is_host = False
    has_native_kernels = False


def test_coded_layout_keeps_scales_within_the_layer():
    assert CODED.bytes_per_layer == 2 * 3 * 8 * (4 + 2)
    assert CODED.bytes_per_block == 2 * CODED.bytes_per_layer == 8 * CODED.bytes_per_token
    assert CODED.scale_offset == 2 * 3 * 8 * 4
    assert CODED.head_offset(1, 1, 2) == CODED.bytes_per_layer + 5 * 8 * 4
    cache = PagedKvCache(CODED, 5)
    assert cache.tensor.shape == (5, 2, CODED.bytes_per_layer)
    assert cache.native is not None
    with pytest.raises(UnsupportedError, match="int8 KV"):
        PagedKvCache(CODED, 5, device=Apart())


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


@each(
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


MLA = MlaLayout(num_layers=2, kv_lora_rank=6, rope_dim=2, block_size=8, dtype="float32")
CODED_MLA = msgspec.structs.replace(MLA, dtype="fp8")
LAYOUTS = pytest.mark.parametrize(
    "layout", [LAYOUT, CODED, MLA, CODED_MLA], ids=["gqa", "gqa int8", "mla", "mla fp8"]
)


def test_a_latent_block_is_a_row_per_token():
    assert MLA.shape == (2, 8, 6 + 2)
    assert MLA.bytes_per_token == 2 * 8 * 4
    assert CODED_MLA.bytes_per_layer == 8 * (8 + 2)
    assert CODED_MLA.layer_slice(0, 1) == (80, 80)
    assert PagedKvCache(CODED_MLA, 5).tensor.shape == (5, 2, 80)


@LAYOUTS
def test_layer_slices_tile_the_pool(layout):
    cache = PagedKvCache(layout, 3)
    flat = cache.tensor.view(torch.uint8).flatten()
    end = 0
    for block_id in range(3):
        for layer_idx in range(layout.num_layers):
            offset, length = layout.layer_slice(block_id, layer_idx)
            assert offset == end
            cache.tensor[block_id, layer_idx].view(torch.uint8).fill_(7)
            assert flat[offset : offset + length].eq(7).all()
            assert flat.eq(7).sum() == end + length
            end = offset + length
    assert end == len(flat) == 3 * layout.bytes_per_block


@LAYOUTS
def test_layouts_keep_their_kind_on_the_wire(layout):
    encoded = msgspec.msgpack.encode(layout)
    assert msgspec.msgpack.decode(encoded, type=KVLayout) == layout


@LAYOUTS
def test_stored_rows_are_in_their_slots_and_copied(layout):
    """As native attention writes them: a row of each chunk for each token."""
    cache = PagedKvCache(layout, 4)
    batch = PagedBatch.build([SequenceChunk(list(range(11)), 0, [2, 1])], 8)
    plan = PlannedAttention(cache.native, batch.block_table, batch.query_start, batch.context_lens)
    rows = torch.arange(1, 12)[:, None, None].expand(11, layout.chunks_per_layer, layout.row_size)
    plan.store(1, TensorView(rows.float().contiguous()))
    assert not cache.tensor[:, 0].any()
    assert not cache.tensor[[0, 3]].any()
    if not layout.is_coded:
        slots = cache.slots[1][batch.slot_blocks, batch.slot_offsets]
        assert torch.equal(slots.flatten(1), rows.flatten(1).float())
        gathered = cache.chunks[1][cache.gather_index(torch.tensor([[2, 1]]))]
        heads = gathered.view(layout.chunks_per_layer, 16, layout.row_size)
        assert torch.equal(heads[:, :11], rows.float().transpose(0, 1))
    cache.tensor[3] = 1
    cache.copy_block(2, 3, 5)
    if layout.is_coded:
        parts = (
            cache.tensor[:, :, : layout.scale_offset].unflatten(2, layout.layer_shape),
            cache.tensor[:, :, layout.scale_offset :].unflatten(2, (*layout.layer_shape[:-1], 2)),
        )
    else:
        parts = (cache.tensor,)
    for part in parts:
        assert part[2, 1].any()
        assert torch.equal(part[3, ..., :5, :], part[2, ..., :5, :])
        assert not part[3, ..., 5:, :].any()


def align(size, shift=0):
    """A writable array at a multiple of 64, plus ``shift``."""
    raw = np.zeros(size + 128, np.uint8)
    first = -raw.ctypes.data % 64 + shift
    return raw[first : first + size]


def test_foreign_memory_is_used_in_place():
    memory = align(4 * LAYOUT.bytes_per_block + 100)
    cache = PagedKvCache(LAYOUT, 4, memory=memory)
    assert cache.tensor.data_ptr() == memory.ctypes.data
    cache.tensor.view(torch.uint8).fill_(3)
    assert memory.sum() == 3 * 4 * LAYOUT.bytes_per_block


def test_foreign_memory_must_fit():
    size = 4 * LAYOUT.bytes_per_block
    with pytest.raises(ShapeError, match=f"{size - 1} bytes"):
        PagedKvCache(LAYOUT, 4, memory=align(size - 1))
    with pytest.raises(ShapeError, match="contiguous"):
        PagedKvCache(LAYOUT, 4, memory=align(2 * size)[::2])
    with pytest.raises(ShapeError, match="multiple of 64"):
        PagedKvCache(LAYOUT, 4, memory=align(size, 32))
    memory = align(size)
    memory.flags.writeable = False
    with pytest.raises(UnsupportedError, match="read-only"):
        PagedKvCache(LAYOUT, 4, memory=memory)
    with pytest.raises(UnsupportedError, match="host memory for a cache on meta"):
        PagedKvCache(LAYOUT, 4, memory=align(size), device=Apart())


def test_a_mapping_shows_the_blocks_to_its_other_owner(tmp_path):
    """Two mappings of one file, as an instance has them that maps the pool of another."""
    path = tmp_path / "pool"
    path.write_bytes(bytes(2 * MLA.bytes_per_block))
    with path.open("r+b") as file:
        ours, theirs = (mmap.mmap(file.fileno(), 0) for _ in range(2))
    cache = PagedKvCache(MLA, 2, memory=memoryview(ours))
    cache.tensor[1, 1] = torch.arange(64).view(8, 8)
    offset, length = MLA.layer_slice(1, 1)
    assert np.frombuffer(theirs[offset : offset + length], np.float32).tolist() == list(range(64))


def test_the_transfer_engine_moves_layers_of_a_pool_that_it_allocated():
    secret = TransferConfig(secret="0123456789abcdef0123456789abcdef")
    with TransferEngine(secret) as giver, TransferEngine(secret) as taker:
        pool = giver.allocate(3 * LAYOUT.bytes_per_block, name="kv")
        cache = PagedKvCache(LAYOUT, 3, memory=pool.array)
        cache.tensor.copy_(torch.randn(cache.tensor.shape))
        local = taker.allocate(LAYOUT.bytes_per_layer)
        offset, length = LAYOUT.layer_slice(2, 1)
        segment = taker.open(giver.address, deadline_s=60)
        transfer = Transfer(Op.READ, local, segment, pool.offset + offset, length)
        taker.submit([transfer], deadline_s=60).wait()
        taken = torch.from_numpy(local.array).view(torch.float32).view(LAYOUT.layer_shape)
        assert torch.equal(taken, cache.tensor[2, 1])
    # The memory outlives the engines for as long as the cache holds it.
    assert torch.equal(taken, cache.tensor[2, 1])


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

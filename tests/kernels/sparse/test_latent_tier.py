"""Goal: rows come back as they were written, whichever are in memory, and no bad byte is used.

Method: random rows against a dictionary, with little memory and little staging memory; reads that
fail or do not end.
"""

import errno
import os
import re
import resource
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tandem._native import DirectReader
from tandem.core.errors import CapacityError, ConfigError, CorruptionError, DeadlineError
from tandem.core.spec import MlaLayout
from tandem.kernels.latents.file import RowFile, open_unnamed
from tandem.kernels.latents.pages import count_file_bytes
from tandem.kernels.latents.tier import LatentTier

LAYOUT = MlaLayout(
    num_layers=3, block_size=8, dtype="bfloat16", kv_lora_rank=500, rope_dim=40, index_dim=4,
    index_layers=(0,),
)  # fmt: skip


@pytest.mark.parametrize("row_bytes", [80, 1000, 1152, 2304, 4096, 5000])
@pytest.mark.parametrize("staging_pages", [2, 7, 2048])
def test_a_file_gives_the_rows_that_it_got(tmp_path, monkeypatch, staging_pages, row_bytes):
    """A row alone is one page, unless pages that no row crosses would be a fifth empty."""
    monkeypatch.setattr("tandem.kernels.latents.file.STAGING_BYTES", 4096 * staging_pages)
    file, rng = RowFile(tmp_path, 400, row_bytes), np.random.default_rng(1)
    held = np.zeros((400, row_bytes), np.uint8)
    for count in (1, 3, 40, 400):
        rows = np.sort(rng.choice(400, count, replace=False))
        held[rows] = rng.integers(0, 256, (count, row_bytes), np.uint8)
        file.write(rows, held[rows])
        wanted = np.sort(rng.choice(400, count, replace=False))
        out = np.empty((count, row_bytes), np.uint8)
        assert len(file.read(wanted, out)) == 0
        assert (out == held[wanted]).all()
    assert file.written_bytes == 444 * row_bytes
    assert os.fstat(file._descriptor).st_size == count_file_bytes(400, row_bytes)
    before = file.read_bytes
    for row in range(100):
        file.read(np.array([row]), out[:1])
    num_pages = (file.read_bytes - before) // 4096
    assert num_pages == 100 if row_bytes in {80, 1000, 1152, 4096} else num_pages > 100


def test_rows_in_memory_are_the_files(tmp_path):
    tier, rng = LatentTier(LAYOUT, 20, folder=tmp_path, memory_bytes=64 * 1080), None
    rng = np.random.default_rng(2)
    memory = tier.memory
    held = {}
    for _ in range(300):
        rows = rng.choice(3 * tier.rows_per_layer, 30, replace=False)
        is_new = np.array([row not in held or rng.random() < 0.2 for row in rows.tolist()])
        slots = tier.place(rows, is_new)
        assert len(set(slots.tolist())) == len(rows)
        for row, slot, new in zip(rows.tolist(), slots, is_new, strict=True):
            if new:
                held[row] = rng.integers(0, 256, tier.row_bytes, np.uint8)
                memory[slot] = held[row]
            assert (memory[slot] == held[row]).all()
        tier.write(rows[is_new], slots[is_new])
    assert 0 < tier.counters.hits < tier.counters.chosen


def test_a_copied_block_has_the_first_tokens_of_each_layer(tmp_path):
    tier = LatentTier(LAYOUT, 4, folder=tmp_path, memory_bytes=7 * 1080)
    memory, written = tier.memory, {}
    for layer in range(3):
        for first in (0, 4):
            rows = layer * tier.rows_per_layer + 8 + first + np.arange(4)
            slots = tier.place(rows, np.ones(4, bool))
            memory[slots] = written[layer, first] = np.full((4, 1080), 7 * layer + first, np.uint8)
            tier.write(rows, slots)
    tier.copy_block(1, 3, 6)
    for layer in range(3):
        rows = layer * tier.rows_per_layer + 24 + np.arange(6)
        slots = tier.place(rows, np.zeros(6, bool))
        expected = np.concatenate((written[layer, 0], written[layer, 4][:2]))
        assert (memory[slots] == expected).all()


def test_reads_that_fail_are_named_and_read_again(tmp_path, monkeypatch):
    tier = LatentTier(LAYOUT, 20, folder=tmp_path, memory_bytes=8 * 1080)
    for block in range(20):
        rows = block * 8 + np.arange(8)
        slots = tier.place(rows, np.ones(8, bool))
        tier.memory[slots] = block
        tier.write(rows, slots)
    wanted = np.array([3 * 8, 17 * 8 + 1])
    with monkeypatch.context() as patch:
        patch.setattr(DirectReader, "finish", _fail)
        with pytest.raises(CorruptionError):
            tier.place(wanted, np.zeros(2, bool))
    assert tier.take_lost_blocks() == {3, 17}
    assert tier.take_lost_blocks() == set()
    slots = tier.place(wanted, np.zeros(2, bool))
    assert tier.memory[slots, 0].tolist() == [3, 17]


@pytest.mark.parametrize("rank", [500, 501, 502])
def test_a_write_that_never_came_to_the_disk_is_found(tmp_path, monkeypatch, rank):
    layout = msgspec.structs.replace(LAYOUT, kv_lora_rank=rank, dtype="int8")
    tier = LatentTier(layout, 20, folder=tmp_path, memory_bytes=8 * 550)
    for row, does_come in ((5, True), (90, True), (5, False)):
        slots = tier.place(np.array([row]), np.ones(1, bool))
        tier.memory[slots] = row + does_come
        with monkeypatch.context() as patch:
            if not does_come:
                patch.setattr(os, "pwrite", lambda _, data, __: len(data))
            tier.write(np.array([row]), slots)
    tier.place(np.arange(8, 16), np.ones(8, bool))
    assert tier.memory[tier.place(np.array([90]), np.zeros(1, bool)), 3] == 91
    with pytest.raises(CorruptionError, match="1 latents are not what was written"):
        tier.place(np.array([5]), np.zeros(1, bool))
    assert tier.take_lost_blocks() == {0}


def _fail(*_):
    raise CorruptionError("transfer.read_direct", "the file ends too soon")


def test_memory_of_a_read_that_does_not_end_is_not_reused(tmp_path, monkeypatch):
    file = RowFile(tmp_path, 100, 1000)
    out = np.empty((1, 1000), np.uint8)
    finish = DirectReader.finish
    with monkeypatch.context() as patch:
        patch.setattr(DirectReader, "is_done", lambda *_: False)
        patch.setattr(DirectReader, "finish", _stall)
        assert file.read(np.array([1]), out).tolist() == [0]
        assert isinstance(file.failure, DeadlineError)
        with pytest.raises(DeadlineError):
            file.read(np.array([2]), out)
    assert finish is DirectReader.finish
    assert len(file.read(np.array([2]), out)) == 0


def test_rows_behind_a_read_that_does_not_end_are_not_read(tmp_path, monkeypatch):
    """Their pages would come to memory that the read may still write to."""
    monkeypatch.setattr("tandem.kernels.latents.file.STAGING_BYTES", 2 * 4096)
    file = RowFile(tmp_path, 100, 1000)
    begun, begin = [], DirectReader.begin
    with monkeypatch.context() as patch:
        patch.setattr(DirectReader, "begin", lambda *args: begun.append(args) or begin(*args))
        patch.setattr(DirectReader, "finish", _stall)
        failed = file.read(np.array([1, 50, 90]), np.empty((3, 1000), np.uint8))
    assert failed.tolist() == [0, 1, 2]
    assert len(begun) == 2


@pytest.mark.parametrize("has_unnamed", [True, False])
def test_a_file_has_no_name_while_its_length_is_reserved(tmp_path, monkeypatch, has_unnamed):
    """A process that is killed meanwhile leaves nothing, though a disk without such files."""
    found, reserve, open_file = [], os.posix_fallocate, os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return open_file(path, flags, *args, **kwargs)

    def note(*args):
        found.extend(tmp_path.iterdir())
        reserve(*args)
        found.append("reserved")

    monkeypatch.setattr(os, "posix_fallocate", note)
    if not has_unnamed:
        monkeypatch.setattr(os, "open", refuse)
    file = RowFile(tmp_path, 100, 1000)
    assert found == ["reserved"]
    file.write(np.arange(4), np.ones((4, 1000), np.uint8))
    out = np.zeros((1, 1000), np.uint8)
    assert len(file.read(np.array([3]), out)) == 0
    assert out.all()


def test_a_folder_that_takes_no_file_is_named_with_its_setting(tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "absent", Path("/proc")):
        with pytest.raises(ConfigError, match=re.escape(str(place))) as caught:
            open_unnamed(place)
        assert caught.value.field == "engine.latents_folder"
    if os.geteuid() == 0:
        tmp_path.chmod(0o700)
        os.seteuid(65_534)
        try:
            with pytest.raises(ConfigError, match="Permission denied"):
                open_unnamed(tmp_path)
        finally:
            os.seteuid(0)


def test_a_file_that_the_disk_has_no_room_for_takes_none(tmp_path, monkeypatch):
    with pytest.raises(CapacityError, match=r"MiB are free: lower engine\.num_kv_blocks"):
        RowFile(tmp_path, 1 << 40, 4096)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(CapacityError, match="File too large") as caught:
            RowFile(tmp_path, 1000, 4096)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.field == "engine.latents_folder"


def _stall(*_):
    raise DeadlineError("transfer.read_direct", "no answer of the disk")

"""Goal: packed weights are written behind a model that serves, whole or not at all.

Method: a model is loaded with an empty cache; its writer is started, stopped between any two
writes, starved of disk, or finds another writer. What the next start finds must be whole.
"""

import errno
import fcntl
import logging
import os
import threading

import numpy as np
import pytest
import torch
from loading import load_checkpoint

from quick import rest_slow
from tandem.core.clock import MonotonicClock
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.models.config import ModelConfig
from tandem.models.convert import convert_model
from tandem.models.loading import loader, packed_cache
from tandem.models.loading.packed_cache import PackedCache, choose_root
from tandem.models.loading.packed_writer import PackedWriter
from tandem.models.loading.weight_digest import WeightHasher

IDS = list(range(3, 40))
TIMEOUT_S = 60.0


@pytest.fixture
def folder(checkpoint, edit_weights):
    folder = checkpoint("qwen3_moe", hidden_size=64, moe_intermediate_size=64, dtype="bfloat16")
    edit_weights(folder, lambda t: t.update({name: w.bfloat16() for name, w in t.items()}))
    return folder


@pytest.fixture
def root(tmp_path, folder):
    found = choose_root(str(tmp_path / "packed"), folder, 0)
    assert found is not None
    return found


def load(folder, root, **options):
    return load_checkpoint(
        folder,
        dtype="float32",
        expert_format="int8g32",
        packed_cache="off" if root is None else str(root.parent),
        **options,
    )


def count_files(root):
    return len(list(root.rglob("*.packed"))), len(list(root.rglob("*.partial")))


def test_nothing_is_written_before_the_model_serves(folder, root, open_session, monkeypatch):
    plain = open_session(load(folder, None)).run(IDS)
    model = load(folder, root, is_written_behind=True)
    assert not root.exists()
    assert torch.equal(open_session(model).run(IDS), plain)
    writer = model.packed_writer
    writer.start()
    assert writer.wait(TIMEOUT_S)
    writer.close()
    assert count_files(root) == (3, 0)
    assert (
        convert_model(folder, "int8g32", packed_cache=str(root.parent), is_verified=True).num_packed
        == 0
    )
    assert torch.equal(open_session(model).run(IDS), plain)
    # The next start packs nothing, writes nothing and reads what was written.
    monkeypatch.setattr("tandem.kernels.cpu.experts.PackedExperts.pack_expert", None)
    again = load(folder, root, is_written_behind=True)
    assert again.packed_writer is None
    assert torch.equal(open_session(again).run(IDS), plain)


def test_the_hash_is_not_waited_for_where_nothing_was_kept(folder, root, monkeypatch):
    """Loading goes on beside it; a manifest is compared to it first."""
    waits = []
    monkeypatch.setattr(
        "tandem.models.loading.loader.apply_plan",
        lambda *args, _original=loader.apply_plan: (waits.append(list(results)), _original(*args)),
    )
    original, results = WeightHasher.result, []

    def note(self, progress=None):
        results.append(1)
        return original(self, progress)

    monkeypatch.setattr(WeightHasher, "result", note)
    model = load(folder, root, is_written_behind=True)
    assert waits == [[]]
    model.packed_writer.start()
    assert model.packed_writer.wait(TIMEOUT_S)
    load(folder, root, is_written_behind=True)
    assert waits[1]


@pytest.mark.parametrize("num_writes", rest_slow([0, 5], [0, 3, 5, 14]))
def test_stopped_between_two_writes(num_writes, folder, root, open_session, monkeypatch):
    """Finished files stay, what was begun leaves nothing, and the next start writes the rest."""
    monkeypatch.setattr(packed_cache, "WRITE_BYTES", 16 << 10)
    model = load(folder, root, is_written_behind=True)
    writer = model.packed_writer
    write, counts = os.write, []

    def write_and_stop(descriptor, data):
        counts.append(1)
        if len(counts) == num_writes:
            writer._stopping.set()
        return write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr("os.write", write_and_stop)
        if num_writes == 0:
            writer.close()
        writer.start()
        assert writer.wait(TIMEOUT_S)
    writer.close()
    assert len(counts) == num_writes
    num_files, num_partial = count_files(root)
    assert (num_files < 3, num_partial) == (True, 0)
    again = load(folder, root, is_written_behind=True)
    assert sum(len(c.unwritten) for c in again.packed_writer._caches) == 3 - num_files
    again.packed_writer.start()
    assert again.packed_writer.wait(TIMEOUT_S)
    assert count_files(root) == (3, 0)
    plain = open_session(load(folder, None)).run(IDS)
    assert torch.equal(open_session(load(folder, root)).run(IDS), plain)


def test_closing_does_not_wait_for_the_rest(folder, root, monkeypatch):
    """A writer that is held in a write is told to stop, and does no other."""
    monkeypatch.setattr(packed_cache, "WRITE_BYTES", 16 << 10)
    writer = load(folder, root, is_written_behind=True).packed_writer
    begun, go = threading.Event(), threading.Event()
    write, counts = os.write, []

    def write_slowly(descriptor, data):
        counts.append(1)
        begun.set()
        assert go.wait(TIMEOUT_S)
        return write(descriptor, data)

    monkeypatch.setattr("os.write", write_slowly)
    writer.start()
    assert begun.wait(TIMEOUT_S)
    closer = threading.Thread(target=writer.close)
    closer.start()
    assert writer._stopping.wait(TIMEOUT_S)
    go.set()
    closer.join(TIMEOUT_S)
    assert not closer.is_alive()
    assert len(counts) == 1
    assert count_files(root) == (0, 0)


def test_a_full_disk_is_a_warning(folder, root, open_session, monkeypatch, caplog):
    model = load(folder, root, is_written_behind=True)
    plain = open_session(model).run(IDS)

    def fail(*_):
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr("os.fdatasync", fail)
        patch.setattr("os.write", fail)
        model.packed_writer.start()
        assert model.packed_writer.wait(TIMEOUT_S)
    assert caplog.text.count("event=packed_cache_not_written") == 1
    assert count_files(root) == (0, 0)
    assert torch.equal(open_session(model).run(IDS), plain)


def test_another_writer_goes_before(folder, root, open_session, caplog):
    model = load(folder, root, is_written_behind=True)
    (root / "int8g32").mkdir(parents=True, mode=0o700)
    with (root / "int8g32" / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with caplog.at_level(logging.WARNING):
            model.packed_writer.start()
            assert model.packed_writer.wait(TIMEOUT_S)
    assert caplog.text.count("another process writes") == 1
    assert count_files(root) == (0, 0)


def test_what_another_process_wrote_meanwhile_is_kept(folder, root):
    model = load(folder, root, is_written_behind=True)
    load(folder, root)
    before = {path: path.stat().st_ino for path in root.rglob("*.packed")}
    model.packed_writer.start()
    assert model.packed_writer.wait(TIMEOUT_S)
    assert {path: path.stat().st_ino for path in root.rglob("*.packed")} == before


def test_weights_of_several_parts_are_written_at_once(checkpoint, tmp_path):
    """They are copies: memory to write from would come on top."""
    folder = checkpoint("qwen3_moe", hidden_size=64, moe_intermediate_size=128, dtype="bfloat16")
    root = choose_root(str(tmp_path / "packed"), folder, 0)
    assert root is not None
    assert load(folder, root, expert_parts=2, is_written_behind=True).packed_writer is None
    assert count_files(root) == (3, 0)


def test_a_file_is_synced_piece_by_piece(tmp_path, monkeypatch):
    """No more than a piece waits for the disk."""
    monkeypatch.setattr(packed_cache, "WRITE_BYTES", 1000)
    monkeypatch.setattr(packed_cache, "SYNC_BYTES", 3000)
    events = []
    write, sync = os.write, os.fdatasync
    monkeypatch.setattr("os.write", lambda *args: (events.append("w"), write(*args))[1])
    monkeypatch.setattr("os.fdatasync", lambda *args: (events.append("s"), sync(*args))[1])
    packed = np.arange(7500, dtype=np.uint8)
    with PackedCache(tmp_path / "c", find_source=str, weight_format="bf16") as cache:
        assert cache.write("a", packed)
        assert np.array_equal(cache.find("a", len(packed)), packed)
        cache.verify()
    assert "".join(events) == "wwwswwwsww"


def test_closing_twice_and_before_the_start(tmp_path):
    writer = PackedWriter([PackedCache(tmp_path, find_source=str, weight_format="bf16")])
    writer.close()
    writer.close()


def test_an_instance_alone_writes_behind_and_siblings_map(folder, root):
    """Of several, the first has written when it is ready: the next ones map its file."""
    config = ModelConfig(
        path=str(folder), expert_format="int8g32", packed_cache=str(root.parent), proof="off"
    )
    engine = EngineConfig(num_kv_blocks=16, max_model_len=64)
    alone = build_engine(config, engine, MonotonicClock())
    assert alone.model.packed_writer is not None
    assert count_files(root) == (0, 0)
    sibling = build_engine(config, engine, MonotonicClock(), num_siblings=2)
    assert sibling.model.packed_writer is None
    assert count_files(root) == (3, 0)

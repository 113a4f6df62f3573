"""Goal: every byte of the weights counts, wherever it lies, and unchanged files are read once.

Method: files of random tensors; leaves and thresholds are made small, so that a few KiB have all
the cases that gigabytes have. A hasher counts the bytes that it hashes.
"""

import hashlib
import json
import logging
import os
import time

import msgspec
import pytest
import torch
from loading import load_checkpoint
from safetensors.torch import load_file, save_file

from tandem.core.errors import CorruptionError
from tandem.models.convert import convert_model
from tandem.models.loading import weight_digest
from tandem.models.loading.weight_digest import DigestCache, WeightHasher, name_packed_source
from tandem.models.sources.containers import open_source


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(weight_digest, "LEAF_BYTES", 1024)
    monkeypatch.setattr(weight_digest, "READ_BYTES", 300)
    monkeypatch.setattr(weight_digest, "MIN_CACHED_BYTES", 1)


@pytest.fixture
def folder(tmp_path):
    generator = torch.Generator().manual_seed(0)
    place = tmp_path / "model"
    place.mkdir()
    tensors = {
        "experts.down_proj": torch.randn(4, 40, 30, generator=generator),
        "a": torch.randn(3, generator=generator),
        "empty": torch.zeros(0, 3),
        "whole": torch.randn(512, generator=generator),
    }
    save_file(tensors, place / "model.safetensors")
    return place


def hash_folder(folder, cache=None, threads=2):
    with (
        open_source(folder) as source,
        WeightHasher(source.entries, num_threads=threads, cache=cache) as hasher,
    ):
        return hasher.result(), hasher.num_bytes


def settle(cache):
    """Move the record's time on, as if it had been written long after the weights."""
    later = cache.path.stat().st_mtime_ns + 10 * 10**9
    os.utime(cache.path, ns=(later, later))


def test_the_digest_is_what_the_docstring_says(folder):
    whole = hashlib.sha256(b"tandem-weights-1\0")
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        data = tensor.numpy().tobytes()
        leaves = [data[i : i + 1024] for i in range(0, len(data), 1024)] or [b""]
        digest = hashlib.sha256(b"".join(hashlib.sha256(leaf).digest() for leaf in leaves))
        line = [name, "F32", list(tensor.shape), digest.hexdigest()]
        whole.update(json.dumps(line).encode() + b"\0")
    for threads in (1, 3):
        assert hash_folder(folder, threads=threads)[0] == whole.hexdigest()


@pytest.mark.parametrize("offset", [0, 4096 + 17, 9600, 19_199])
def test_one_bit_anywhere_in_a_fused_tensor_counts(folder, offset):
    """The samples of earlier versions, 4 KiB at start, middle and end, missed most of them."""
    before = hash_folder(folder)[0]
    with open_source(folder) as source:
        entry = source.entries["experts.down_proj"]
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(entry.begin + offset)
        byte = file.read(1)[0]
        file.seek(entry.begin + offset)
        file.write(bytes([byte ^ 1]))
    assert hash_folder(folder)[0] != before


def test_names_and_shapes_count_and_files_do_not(folder, tmp_path):
    digest = hash_folder(folder)[0]
    tensors = load_file(folder / "model.safetensors")
    split = tmp_path / "split"
    split.mkdir()
    weight_map = {}
    for i, name in enumerate(tensors):
        save_file({name: tensors[name]}, split / f"{i}.safetensors", metadata={"x": "y"})
        weight_map[name] = f"{i}.safetensors"
    (split / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert hash_folder(split)[0] == digest
    for change in ({"b": tensors["a"]}, {"a": tensors["a"][None]}):
        other = {name: t for name, t in tensors.items() if name != "a"} | change
        save_file(other, folder / "model.safetensors")
        assert hash_folder(folder)[0] != digest


def test_unchanged_files_are_hashed_once(folder, tmp_path):
    cache = DigestCache(tmp_path / "digests", folder)
    digest, num_bytes = hash_folder(folder, cache)
    assert num_bytes == 4 * (4 * 40 * 30 + 3 + 512)
    assert cache.path.stat().st_mode & 0o777 == 0o600
    assert cache.path.parent.stat().st_mode & 0o777 == 0o700
    # Written a moment after the weights: another edit could have the same timestamp.
    assert hash_folder(folder, cache) == (digest, num_bytes)
    settle(cache)
    assert hash_folder(folder, cache) == (digest, 0)


def test_a_hash_of_long_does_not_settle_what_it_read(folder, tmp_path):
    """An edit of a tensor that was read already may have the timestamp of the edit before."""
    cache = DigestCache(tmp_path / "digests", folder)
    with (
        open_source(folder) as source,
        WeightHasher(source.entries, num_threads=1, cache=cache) as hasher,
    ):
        began_ns = time.time_ns()
        hasher.result()
    assert cache.path.stat().st_mtime_ns <= began_ns
    late = cache.path.stat().st_mtime_ns
    file = msgspec.structs.replace(next(iter(read_all(cache).values())), tensors={})
    for age_ns, is_believed in ((10**9, False), (3 * 10**9, True)):
        state = file.state._replace(ctime_ns=late - age_ns)
        cache.write({"x": msgspec.structs.replace(file, state=state)}, late)
        assert bool(cache.read()) == is_believed


def read_all(cache):
    """Return a record's files, believed or not."""
    return msgspec.json.decode(cache.path.read_bytes(), type=weight_digest.DigestRecord).files


def test_only_changed_files_are_hashed_again(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for i in range(3):
        save_file({f"t{i}": torch.full((100,), float(i))}, folder / f"{i}.safetensors")
    index = {"weight_map": {f"t{i}": f"{i}.safetensors" for i in range(3)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    cache = DigestCache(tmp_path / "digests", folder)
    first = hash_folder(folder, cache)[0]
    settle(cache)
    path = folder / "1.safetensors"
    info = path.stat()
    save_file({"t1": torch.full((100,), 9.0)}, path)
    # ctime tells, even where size and mtime are restored.
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    second, num_bytes = hash_folder(folder, cache)
    assert second != first
    assert num_bytes == 400
    settle(cache)
    assert hash_folder(folder, cache) == (second, 0)
    assert hash_folder(folder)[0] == second


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-20]),
        lambda path: path.write_text(path.read_text().replace('"version":1', '"version":7')),
        lambda path: path.write_text(path.read_text().replace('"folder":"', '"folder":"/x')),
        lambda path: path.chmod(0o666),
        lambda path: path.parent.chmod(0o777),
    ],
)
def test_a_record_that_may_be_wrong_is_not_believed(folder, tmp_path, damage, caplog):
    cache = DigestCache(tmp_path / "digests", folder)
    digest, num_bytes = hash_folder(folder, cache)
    damage(cache.path)
    settle(cache)
    with caplog.at_level(logging.WARNING):
        assert hash_folder(folder, cache) == (digest, num_bytes)
    assert "event=digests_refused" in caplog.text


def test_a_folder_that_takes_no_record_is_said(folder, tmp_path, caplog):
    (tmp_path / "file").touch()
    cache = DigestCache(tmp_path / "file" / "digests", folder)
    with caplog.at_level(logging.WARNING):
        assert hash_folder(folder, cache)[1] > 0
    assert "event=digests_not_kept" in caplog.text


def test_weights_that_change_meanwhile_are_refused(folder, tmp_path):
    cache = DigestCache(tmp_path / "digests", folder)
    path = folder / "model.safetensors"
    with open_source(folder) as source:
        hasher = WeightHasher(source.entries, num_threads=1, cache=cache)
        with hasher:
            os.truncate(path, path.stat().st_size + 1)
            with pytest.raises(CorruptionError, match=r"model\.safetensors changed"):
                hasher.result()
        os.truncate(path, source.entries["whole"].begin)
        with (
            WeightHasher(source.entries, num_threads=1, cache=cache) as hasher,
            pytest.raises(CorruptionError, match="ended while it was read"),
        ):
            hasher.result()
    assert not cache.path.exists()


def test_progress_ends_at_all_bytes(folder):
    seen = []
    with (
        open_source(folder) as source,
        WeightHasher(source.entries, num_threads=2, cache=None) as hasher,
    ):
        digest = hasher.result(lambda done, total, what: seen.append((done, total)))
        assert hasher.result(lambda *_: pytest.fail("nothing to wait for")) == digest
    assert seen[-1] == (hasher.num_bytes, hasher.num_bytes)
    assert len(seen) > 5


def test_models_know_their_weights(checkpoint, edit_weights, edit_config, tmp_path, monkeypatch):
    monkeypatch.setattr(weight_digest, "DEFAULT_ROOT", tmp_path / "digests")
    folder = checkpoint("llama")
    first = load_checkpoint(folder).weights_digest
    assert load_checkpoint(folder, dtype="bfloat16").weights_digest == first
    edit_config(folder, rms_norm_eps=1e-5)
    assert load_checkpoint(folder).weights_digest == first
    edit_weights(folder, lambda t: t.update({"model.norm.weight": t["model.norm.weight"] * 1.01}))
    assert load_checkpoint(folder).weights_digest != first


def test_packed_experts_are_those_of_the_dtype_that_read_them(checkpoint, tmp_path, monkeypatch):
    """float32 weights read as bfloat16 pack to other codes: found in a cache, they are not ours."""
    monkeypatch.setattr(weight_digest, "DEFAULT_ROOT", tmp_path / "digests")
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64}
    folder = checkpoint("qwen3_moe", **sizes)

    def read_packed(dtype, cache):
        model = load_checkpoint(
            folder, dtype=dtype, expert_format="int8g32", packed_cache=str(tmp_path / cache)
        )
        del model
        return [p.read_bytes() for p in sorted((tmp_path / cache).rglob("*.packed"))]

    wide, narrow = read_packed("float32", "one"), read_packed("bfloat16", "two")
    assert wide != narrow
    assert read_packed("bfloat16", "one") == narrow


def test_conversion_and_loading_agree_on_the_source(
    checkpoint, edit_weights, tmp_path, monkeypatch
):
    monkeypatch.setattr(weight_digest, "DEFAULT_ROOT", tmp_path / "digests")
    folder = checkpoint("qwen3_moe", hidden_size=64, moe_intermediate_size=64, dtype="bfloat16")
    edit_weights(folder, lambda t: t.update({name: w.bfloat16() for name, w in t.items()}))
    convert_model(folder, "int8g32", packed_cache=str(tmp_path / "packed"))
    monkeypatch.setattr("tandem.kernels.cpu.experts.PackedExperts.pack_expert", None)
    for dtype in ("float32", "bfloat16"):
        load_checkpoint(
            folder, dtype=dtype, expert_format="int8g32", packed_cache=str(tmp_path / "packed")
        )


def test_sources_of_packed_weights_differ_by_each_fact():
    facts = [("w", {"a": "1"}, ""), ("v", {"a": "1"}, ""), ("w", {"a": "2"}, "")]
    facts += [("w", {"a": "1"}, "bfloat16")]
    assert len({name_packed_source(*each) for each in facts}) == 4

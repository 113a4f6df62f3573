"""Goal: latents in a file give bitwise the tokens that latents in memory give.

Method: tiny models with sparse attention through the whole engine, with memory for one token's
choice and for more, beside the same model with all latents in memory: alone, in company, in chunks,
with prefixes that are found again, after preemption. Then with a disk that fails.
"""

import errno
import os

import pytest

pytest.importorskip("transformers", reason="models need the `serve` extra")

from latent_engines import LONGER, PROMPTS, build, configure, generate
from sparse import TOP, save_sparse
from transformers import DeepseekV32Config

from tandem._native import DirectReader
from tandem.core.errors import ConfigError, InternalError, UnsupportedError
from tandem.core.wire import FinishReason
from tandem.engine.planning import plan_engine
from tandem.models.config import ModelConfig
from tandem.models.proof.tiny import make_tiny, save_tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A GLM-5, whose layers share an index, and a DeepSeek-V3.2, each of whose layers has one."""
    from sparse import SIZES

    glm = save_sparse(tmp_path_factory.mktemp("glm"))
    sizes = {k: v for k, v in SIZES.items() if k != "indexer_types"}
    sizes |= {"num_hidden_layers": 2, "n_group": 2, "topk_group": 1}
    deepseek = tmp_path_factory.mktemp("deepseek")
    save_tiny(make_tiny(DeepseekV32Config(**sizes), 0), deepseek)
    return {"glm": glm, "deepseek": deepseek}


@pytest.mark.parametrize(
    ("family", "dtype", "kv_dtype", "memory"),
    [
        ("glm", "bfloat16", "auto", f"{(TOP + 1) * 80}B"),
        pytest.param("glm", "bfloat16", "int8", "100KiB", marks=pytest.mark.slow),
        ("deepseek", "float32", "auto", "20KiB"),
    ],
)
def test_tokens_are_those_of_latents_in_memory(folders, tmp_path, family, dtype, kv_dtype, memory):
    plain = build(folders[family], dtype=dtype, kv_dtype=kv_dtype)
    expected, _ = generate(plain.engine, PROMPTS)
    again, _ = generate(build(folders[family], dtype=dtype, kv_dtype=kv_dtype).engine, [LONGER])
    built = build(folders[family], memory, tmp_path, dtype=dtype, kv_dtype=kv_dtype)
    assert generate(built.engine, PROMPTS)[0] == expected
    found, (last,) = generate(built.engine, [LONGER])
    assert found == again
    assert last.cached_len == 117
    counted = built.read_latents()
    layers, row = built.cache.layout.num_layers, built.cache.latents.row_bytes
    num_tokens = sum(map(len, PROMPTS)) + len(LONGER) + 4 * 19 - 117
    # Those of a block whose first tokens are another's are copied.
    assert counted.latent_written_bytes == layers * row * (num_tokens + 5)
    assert 0 < counted.num_latent_hits < counted.num_chosen_latents
    assert counted.latent_read_bytes > 0
    assert not list(tmp_path.iterdir())


def test_preemption_changes_no_token(folders, tmp_path):
    """Twelve blocks, of which the answers need more: one is put back and computed again."""
    expected, _ = generate(build(folders["glm"]).engine, PROMPTS[1:], 90)
    built = build(folders["glm"], "6KiB", tmp_path, num_kv_blocks=12, max_model_len=190)
    assert generate(built.engine, PROMPTS[1:], 90)[0] == expected
    assert built.engine.get_stats().num_preemptions > 0


def test_a_read_that_fails_ends_its_request_and_its_prefix_is_forgotten(
    folders, tmp_path, monkeypatch
):
    """A request beside it goes on, and the next one with the prompt computes it anew."""
    expected, _ = generate(build(folders["glm"]).engine, [PROMPTS[1], LONGER])
    built = build(folders["glm"], "6KiB", tmp_path)
    generate(built.engine, [PROMPTS[0]])
    cached = built.prefixes.count_cached_blocks
    keys = []
    built.prefixes.extend_keys(built.prefixes.make_root_key(""), keys, PROMPTS[0])
    assert cached(keys) == len(PROMPTS[0]) // 16
    bad_block = built.prefixes.find_node(keys[3]).block_id
    tier = built.cache.latents
    begin, finish = DirectReader.begin, DirectReader.finish
    bad_reads = set()

    def note(self, file, offset, length, at):
        read = begin(self, file, offset, length, at)
        if built.prefixes.find_node(keys[3]) is None:
            return read  # What is written to the block from now on is there.
        rows = range(offset // tier.row_bytes, (offset + length) // tier.row_bytes)
        if any(row % tier.rows_per_layer // 16 == bad_block for row in rows):
            bad_reads.add(read)
        return read

    def fail(self, read, timeout_ms):
        finish(self, read, timeout_ms)
        if read in bad_reads:
            raise InternalError("transfer.read_direct", os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(DirectReader, "begin", note)
        patch.setattr(DirectReader, "finish", fail)
        (good, bad), (_, last) = generate(built.engine, [PROMPTS[1], LONGER])
    assert last.finish_reason is FinishReason.ERROR
    assert "Input/output error" in last.error_text
    assert bad[0] == []
    assert good == expected[0]
    # Blocks that are read beside the bad one may be lost with it.
    assert cached(keys) <= 3
    built.prefixes.check()
    (found,), (last,) = generate(built.engine, [LONGER])
    assert found == expected[1]
    assert last.cached_len <= 48


def test_a_write_that_fails_ends_its_request(folders, tmp_path, monkeypatch):
    expected, _ = generate(build(folders["glm"]).engine, [PROMPTS[0]])
    built = build(folders["glm"], "6KiB", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", _raise)
        (_,), (last,) = generate(built.engine, [PROMPTS[0]])
    assert last.finish_reason is FinishReason.ERROR
    assert generate(built.engine, [PROMPTS[0]])[0] == expected


def _raise(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("model", "settings", "error", "words"),
    [
        ("demo", {}, UnsupportedError, "attend to all tokens"),
        ("glm", {"memory": f"{TOP * 80}B"}, ConfigError, f"give it {(TOP + 1) * 80} bytes"),
        ("glm", {"max_model_len": TOP}, ConfigError, "all latents in each step"),
        ("glm", {"folder": "/absent"}, ConfigError, "No such file"),
        ("glm", {"folder": ""}, ConfigError, "needs both"),
        ("glm", {"is_shared": True}, UnsupportedError, "no store"),
        ("glm", {"num_kv_blocks": 1 << 40}, ConfigError, "the disk has room"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(folders, tmp_path, model, settings, error, words):
    with pytest.raises(error, match=words):
        plan(folders.get(model, model), **{"folder": tmp_path, **settings})


def plan(path, memory="6KiB", folder="", dtype="bfloat16", *, is_shared=False, **settings):
    model = ModelConfig(path=str(path), dtype=dtype, packed_cache="off")
    return plan_engine(model, configure(memory, folder, **settings), is_shared=is_shared)


def test_the_plan_tells_memory_and_disk(folders, tmp_path):
    planned = plan(folders["glm"], folder=tmp_path)
    rows = {what: (value, why) for what, value, why in planned.rows()}
    # Two of four layers have index keys of 24 items.
    assert planned.kv.block_bytes == 2 * 16 * 24 * 2
    assert f"{6144 // 80} rows of 80 bytes" in rows["latents"][0]
    disk = planned.kv.num_blocks * 4 * 16 * 4096 / (4096 // 80)
    assert f"{disk / 2**20:.0f} MiB in {tmp_path}" in rows["latents"][0]
    assert f"{2 * 24 * 2} bytes a token" in rows["KV cache"][1]

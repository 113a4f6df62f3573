"""Goal: `tandem convert --to` writes checkpoints that load again as the same model, or nothing.

Method: tiny models are written in each format and read back by the codecs that read other
programs' files; full disks and interruptions are made where the writer asks the system.
"""

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loading import load_checkpoint
from quantized import CODERS, SLOW, write_quantized
from safetensors.torch import load_file

from tandem.core.errors import CapacityError, ConfigError, ShapeError, UnsupportedError
from tandem.finetune.training.model import plan_training
from tandem.kernels.paged import PagedBatch, SequenceChunk
from tandem.kernels.weights.formats import WEIGHT_FORMATS, quantize
from tandem.models import export
from tandem.models.codecs.writing import search_zeros
from tandem.models.export import export_checkpoint
from tandem.models.families import open_checkpoint
from tandem.models.gguf_export import export_gguf
from tandem.models.loading.hub import DEMO_FOLDER
from tandem.models.planning.planner import plan_model
from tandem.models.sources.containers import open_source
from tandem.models.tokenizing.tokenizer import load_tokenizer

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}
MOE = {"moe_intermediate_size": 128, "num_experts": 3, "num_experts_per_tok": 3}
RECORDED = Path(__file__).parents[2] / "real" / "recorded.json"
EXPERTS_OF_96 = {"moe_intermediate_size": 96}
IDS = list(range(3, 30))
K = "model.layers.0.self_attn.k_proj.weight"
DOWN = "model.layers.0.mlp.experts.2.down_proj.weight"


@pytest.fixture
def moe(checkpoint):
    return checkpoint("qwen3_moe", num_key_value_heads=2, **SIZES, **MOE)


def read(folder, name, *shape):
    with open_source(folder, quantization=open_checkpoint(folder).quantization) as source:
        values = torch.empty(shape)
        source.read_into(name, values)
        return values


SOME = ("fp8", "fp8row", "int8row", "int8g16min", "int8g128", "int4g32", "int4g64sym")
FORMATS = [
    pytest.param(name, marks=() if name in SOME else pytest.mark.slow)
    for name in WEIGHT_FORMATS
    if name != "mxfp4"
    and not WEIGHT_FORMATS[name].holds_values
    and not WEIGHT_FORMATS[name].is_stored_only
    and WEIGHT_FORMATS[name].bits != 5
]


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_is_taken_over_as_it_is(name, moe, tmp_path, open_session):
    out = tmp_path / "out"
    report = export_checkpoint(moe, name, out)
    assert (report.weight_format, report.num_coded) == (name, 4 + 3 * 3)
    assert report.size_bytes < report.source_bytes
    stored = load_file(moe / "model.safetensors")
    quantization = open_checkpoint(out).quantization
    # A file has zero points in the place of minima.
    has_zeros = WEIGHT_FORMATS[name].bits == 4 and WEIGHT_FORMATS[name].has_minimum
    read_as = f"{name}zp" if has_zeros else name
    with open_source(out, quantization=quantization) as source:
        for weight in (K, DOWN):
            packed = source.read_packed(weight)
            assert packed.weight_format.name == read_as
            values = torch.empty(packed.codes.shape)
            source.read_into(weight, values)
            if not WEIGHT_FORMATS[name].has_minimum:
                ours = quantize(stored[weight].numpy(), WEIGHT_FORMATS[name])
                assert np.array_equal(packed.codes, ours.codes)
                assert np.array_equal(packed.scales, ours.scales)
            # Half a step of e4m3 is a 16th of a value; one of integers is of the range.
            bits = 4 if WEIGHT_FORMATS[name].is_float else WEIGHT_FORMATS[name].bits - 1
            step = 2.0**-bits * 2 * stored[weight].abs().max()
            assert (values - stored[weight]).abs().max() <= step
    plan = plan_model(out, dtype="float32")
    assert {m.weight_format for m in plan.matrices if m.role in ("qkv", "experts")} == {read_as}
    logits = open_session(load_checkpoint(out, dtype="float32")).run(IDS)
    assert logits.isfinite().all()


def measure_search(groups, codes, scales, zeros):
    """Return the weighted square error of each group."""
    weights = groups.square().mean(1, keepdim=True).sqrt() + groups.abs()
    values = (codes.float() - zeros.float()[:, None]) * scales.float()[:, None]
    return (weights * (values - groups).square()).sum(1)


def test_scale_and_zero_point_are_searched_for():
    """Less error than by the ends of the range, in nearly each group, and hardly more than by all
    zero points with sixty steps.
    """
    generator = torch.Generator().manual_seed(4)
    groups = torch.randn(400, 32, generator=generator) * 0.02
    groups[:100] += 0.03  # All of one sign, for most of which the zero point is an end.
    groups[100:200, 5] *= 8  # One that stands out.
    found = measure_search(groups, *search_zeros(groups, 4))
    low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    best = torch.full((400,), torch.inf)
    for share in torch.linspace(0.5, 1.1, 60):
        scales = ((high - low) / 15 * share).half()
        for zero in range(16):
            zeros = torch.full((400,), float(zero))
            codes = ((groups / scales.float()[:, None]).round() + zero).clamp(0, 15)
            best = torch.minimum(best, measure_search(groups, codes, scales, zeros))
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round()
    codes = ((groups / scales.float()[:, None]).round() + zeros[:, None]).clamp(0, 15)
    plain = measure_search(groups, codes, scales, zeros)
    assert float(found.sum()) < 0.9 * float(plain.sum())
    assert float((found <= plain * 1.001).float().mean()) > 0.99
    assert float(found.sum()) < 1.1 * float(best.sum())


def test_zeros_and_tiny_weights_have_the_scale_0():
    """And one weight among zeros is kept."""
    groups = torch.zeros(4, 32)
    groups[1] = 1e-42
    groups[2] = 1e-9
    groups[3, 7] = -0.25
    codes, scales, zeros = search_zeros(groups, 4)
    values = (codes.float() - zeros.float()[:, None]) * scales.float()[:, None]
    assert torch.allclose(values[:3], torch.zeros(3, 32))
    assert torch.allclose(values[3], groups[3], rtol=1e-3)
    for value in (torch.nan, torch.inf, 1e20):
        with pytest.raises(UnsupportedError, match="not finite, or beyond fp16"):
            search_zeros(torch.full((1, 32), value), 4)


@pytest.fixture(scope="module")
def demo_logits():
    """Return ``score(folder)``: the demo model's log-probabilities of four KiB of text, its weights
    decoded to float32.
    """
    text = json.loads(RECORDED.read_text())["text"]
    ids = load_tokenizer(DEMO_FOLDER).encode(text)[:1024]

    def score(folder):
        model = load_checkpoint(folder, dtype="float32", expert_format="f32", linear_format="f32")
        cache = model.allocate_kv(len(ids) // 64 + 1, block_size=64)
        chunk = SequenceChunk(ids, 0, list(range(len(ids) // 64 + 1)), "all")
        return torch.log_softmax(model.forward(PagedBatch.build([chunk], 64), cache), -1)

    return score


def test_int4_is_nearer_to_the_model_than_the_rounding_of_q4_1(demo_logits, tmp_path):
    """By the Kullback-Leibler divergence from the model as it is: our blocks of Q4_1 are those of
    llama.cpp's quantizer, byte by byte (test_gguf_export.py).
    """
    export_checkpoint(DEMO_FOLDER, "int4", tmp_path / "int4")
    export_gguf(DEMO_FOLDER, "q4_1", tmp_path / "q4_1")
    wanted = demo_logits(DEMO_FOLDER)
    found = {}
    for name in ("int4", "q4_1"):
        logprobs = demo_logits(tmp_path / name)
        found[name] = float((wanted.exp() * (wanted - logprobs)).sum(-1).mean())
    assert 0 < found["int4"] < 0.97 * found["q4_1"]


def test_int4_of_experts_keeps_queries_keys_and_values_in_int8(moe, tmp_path):
    """As llama.cpp's mixtures keep keys and values; a dense model and a whole name do not."""
    report = export_checkpoint(moe, "int4", tmp_path / "out")
    assert (report.weight_format, report.note) == (
        "int4g32",
        "queries, keys and values in int8g128",
    )
    plan = plan_model(tmp_path / "out", dtype="float32")
    found = {(m.role, m.weight_format) for m in plan.matrices}
    assert {("qkv", "int8g128"), ("attention_out", "int4g32zp"), ("experts", "int4g32zp")} <= found
    export_checkpoint(moe, "int4g32", tmp_path / "whole")
    plan = plan_model(tmp_path / "whole", dtype="float32")
    assert ("qkv", "int4g32zp") in {(m.role, m.weight_format) for m in plan.matrices}


def test_widths_that_are_no_groups_of_128_get_smaller_ones(checkpoint, tmp_path, open_session):
    """As in SmolLM2, whose hidden size is 576: written, packed while loading, and trained on, with
    a word about it. A whole name means itself.
    """
    sizes = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 48, "num_hidden_layers": 1}
    folder = checkpoint("llama", num_key_value_heads=2, **sizes)
    report = export_checkpoint(folder, "int8", tmp_path / "out")
    why = "groups of 64, as 192 inputs are no groups of 128"
    assert (report.weight_format, report.note) == ("int8g64", why)
    plan = plan_model(folder, dtype="float32", linear_format="int8")
    assert (plan.linear.weight_format, plan.linear.reason) == ("int8g64", f"as asked for, in {why}")
    wanted = open_session(load_checkpoint(folder, dtype="float32")).run(IDS)
    for path, wish in ((tmp_path / "out", "auto"), (folder, "int8")):
        logits = open_session(load_checkpoint(path, dtype="float32", linear_format=wish)).run(IDS)
        assert float((logits - wanted).norm() / wanted.norm()) < 0.05
    assert plan_training(str(folder), linear_format="int8").linear.weight_format == "int8g64"
    with pytest.raises(UnsupportedError, match="no groups of 128"):
        export_checkpoint(folder, "int8g128", tmp_path / "second")
    with pytest.raises(ShapeError):
        plan_model(folder, dtype="float32", linear_format="int8g128")


def test_experts_get_smaller_groups_too(checkpoint):
    folder = checkpoint("qwen3_moe", num_key_value_heads=2, **SIZES, **MOE | EXPERTS_OF_96)
    plan = plan_model(folder, dtype="float32", expert_format="int8")
    assert plan.experts.weight_format == "int8g32"
    assert "96 inputs are no groups of 128" in plan.experts.reason


@pytest.mark.parametrize("kind", ["fp8 blocks", "ct int4 g32 asym", "gptq 4 g32 act-order"])
def test_codes_become_bfloat16_values(kind, checkpoint, tmp_path, open_session):
    folder = checkpoint("llama", num_key_value_heads=2, **SIZES)
    plain = write_quantized(folder, kind)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "code.py").write_text("raise SystemExit")
    report = export_checkpoint(folder, "bf16", tmp_path / "out")
    assert (report.weight_format, report.num_coded) == ("bf16", 0)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == plain.keys()
    for name, tensor in written.items():
        wanted = torch.bfloat16 if plain[name].dim() > 1 else torch.float32
        assert tensor.dtype == wanted
        assert torch.equal(tensor, plain[name].to(wanted)), name
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"model.safetensors", "config.json", "tokenizer.json", *_generation(folder)}
    ours = open_session(load_checkpoint(tmp_path / "out", dtype="bfloat16")).run(IDS)
    theirs = open_session(
        load_checkpoint(folder, dtype="bfloat16", expert_format="bf16", linear_format="bf16")
    ).run(IDS)
    assert torch.equal(ours, theirs)


def _generation(folder):
    return {p.name for p in folder.glob("generation_config.json")}


def test_shards_have_an_index(moe, tmp_path, monkeypatch, open_session):
    export_checkpoint(moe, "bf16", tmp_path / "one")
    monkeypatch.setattr(export, "SHARD_BYTES", 1 << 17)
    export_checkpoint(moe, "bf16", tmp_path / "many")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = (
        open_session(load_checkpoint(tmp_path / n, dtype="float32")).run(IDS)
        for n in ("one", "many")
    )
    assert torch.equal(one, many)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_conversion_leaves_nothing(stop, moe, tmp_path):
    calls = []

    def interrupt(*call):
        calls.append(call)
        if len(calls) == 5:
            assert not (tmp_path / "out").exists()
            assert not (tmp_path / "out.partial" / "config.json").exists()
            raise stop

    with pytest.raises(stop):
        export_checkpoint(moe, "int8", tmp_path / "out", progress=interrupt)
    assert not list(tmp_path.glob("out*"))


def test_what_a_killed_conversion_left_is_replaced(moe, tmp_path):
    left = tmp_path / "out.partial"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    with pytest.raises(ConfigError, match="no conversion made it"):
        export_checkpoint(moe, "bf16", tmp_path / "out")
    (left / export.MARKER).touch()
    export_checkpoint(moe, "bf16", tmp_path / "out")
    assert not left.exists()
    with pytest.raises(ConfigError, match="is there already"):
        export_checkpoint(moe, "bf16", tmp_path / "out")


def test_a_draft_is_not_written_through_a_link(moe, tmp_path):
    """What lies behind it is somebody's, also if a conversion once wrote there."""
    behind = tmp_path / "behind"
    behind.mkdir()
    (tmp_path / "out.partial").symlink_to(behind)
    with pytest.raises(ConfigError, match="no conversion made it"):
        export_checkpoint(moe, "bf16", tmp_path / "out")
    (behind / export.MARKER).touch()
    (behind / "model.safetensors").write_bytes(b"dear")
    with pytest.raises(ConfigError, match="no conversion made it"):
        export_checkpoint(moe, "bf16", tmp_path / "out")
    assert (behind / "model.safetensors").read_bytes() == b"dear"


def test_a_full_disk_is_told(moe, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 10))
        with pytest.raises(CapacityError, match="0 free"):
            export_checkpoint(moe, "bf16", tmp_path / "out")

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(CapacityError, match=r"disk of .* is full"):
        export_checkpoint(moe, "bf16", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_what_no_layout_has_is_refused(moe, tmp_path, checkpoint):
    with pytest.raises(UnsupportedError, match="gpt-oss"):
        export_checkpoint(moe, "mxfp4", tmp_path / "out")
    with pytest.raises(UnsupportedError, match="use bf16"):
        export_checkpoint(moe, "f32", tmp_path / "out")
    with pytest.raises(ConfigError, match="'int3': no format to write: did you mean --to int8"):
        export_checkpoint(moe, "int3", tmp_path / "out")
    with pytest.raises(ConfigError, match="did you mean --to q4_k_"):
        export_checkpoint(moe, "q4_k_x", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"choose one of int8, int4, .*GGUF.* q4_k_m") as caught:
        export_checkpoint(moe, "tiny", tmp_path / "out")
    assert "iq2xxs" not in str(caught.value), "what can be read only is not offered"
    with pytest.raises(UnsupportedError, match="in one tensor"):
        export_checkpoint(checkpoint("gpt_oss"), "int8", tmp_path / "out")
    with pytest.raises(UnsupportedError, match="no groups of 128"):
        export_checkpoint(checkpoint("llama"), "int8", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_every_kind_of_codes_can_be_written_as_values(checkpoint, tmp_path):
    """The list of weights and parts of each codec is whole: nothing is left, nothing is missing."""
    for kind in CODERS.keys() - SLOW:
        folder = checkpoint("llama", num_key_value_heads=2, **SIZES)
        names = write_quantized(folder, kind).keys()
        out = tmp_path / f"out-{kind}"
        export_checkpoint(folder, "bf16", out)
        assert load_file(out / "model.safetensors").keys() == names, kind

"""Goal: `tandem convert --to` writes checkpoints that load again as the same model, or nothing.

Method: tiny models are written in each format and read back by the codecs that read other
programs' files; full disks and interruptions are made where the writer asks the system.
"""

import errno
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loading import load_checkpoint
from quantized import CODERS, SLOW, write_quantized
from safetensors.torch import load_file

from tandem.core.errors import CapacityError, ConfigError, ShapeError, UnsupportedError
from tandem.finetune.training.model import plan_training
from tandem.kernels.weights.formats import WEIGHT_FORMATS, quantize
from tandem.models import export
from tandem.models.export import export_checkpoint
from tandem.models.families import open_checkpoint
from tandem.models.planning.planner import plan_model
from tandem.models.sources.containers import open_source

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}
MOE = {"moe_intermediate_size": 128, "num_experts": 3, "num_experts_per_tok": 3}
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
    with pytest.raises(ConfigError, match="int3"):
        export_checkpoint(moe, "int3", tmp_path / "out")
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

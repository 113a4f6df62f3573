"""Goal: the identity of a loaded model has every fact that decides about sharing, and no other.

Method: a checkpoint is loaded twice with one thing changed. Where sharing is allowed, the KV that
both write is compared as well: equal up to rounding, and bitwise equal within a rounding class.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from loading import load_checkpoint

from tandem.core.spec import NUMERICS_VERSION
from tandem.kernels.paged import PagedBatch, SequenceChunk
from tandem.models import identity
from tandem.models.loading.hub import DEMO_FOLDER

IDS = list(range(3, 40))
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "head_dim": 32,
}


def identify(model, sharing="relaxed"):
    return model.kv_identity(model.kv_layout(16), sharing)


def write_kv(model):
    """Return the KV of a prompt, [layers, 2, kv_heads, tokens, head_dim] in float32."""
    cache = model.allocate_kv(3, block_size=16)
    model.forward(PagedBatch.build([SequenceChunk(IDS, 0, [0, 1, 2], "all")], 16), cache)
    whole = torch.cat(list(cache.tensor.float()), dim=-2)
    return whole[..., : len(IDS), :]


def fields(ours, theirs, *, forbids):
    return [d.field for d in identify(ours).compare(identify(theirs)) if d.forbids == forbids]


def test_equal_models_are_equal(checkpoint):
    folder = checkpoint("qwen3_moe", **SIZES)
    one, two = (load_checkpoint(folder, dtype="bfloat16") for _ in range(2))
    assert identify(one) == identify(two)
    assert torch.equal(write_kv(one), write_kv(two))
    assert identify(one, "strict").root_key() != identify(one).root_key()


def test_configuration(checkpoint, edit_config):
    """Fields are changed one after the other, each beside the one before."""
    folder = checkpoint("qwen3_moe", **SIZES)
    before = load_checkpoint(folder)
    for field, value, counts in (
        ("rms_norm_eps", 1e-5, True),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 5e5}, True),
        ("num_experts_per_tok", 1, True),
        ("norm_topk_prob", True, True),
        ("a_field_of_tomorrow", 1, True),
        ("initializer_range", 0.5, False),
        ("use_cache", False, False),
        ("eos_token_id", 7, False),
        ("transformers_version", "4.0.0", False),
    ):
        edit_config(folder, **{field: value})
        after = load_checkpoint(folder)
        assert fields(before, after, forbids=True) == ([f"config.{field}"] if counts else [])
        assert (identify(before).digest == identify(after).digest) != counts
        if not counts:
            assert torch.equal(write_kv(before), write_kv(after)), field
        before = after


def test_ignored_fields_have_reasons():
    assert all(reason for reason in identity.IGNORED_CONFIG.values())


def test_one_value_inside_a_fused_tensor(checkpoint, edit_weights):
    folder = checkpoint("gpt_oss", hidden_size=128, intermediate_size=128)
    before = load_checkpoint(folder)

    def change(tensors):
        tensors["model.layers.1.mlp.experts.gate_up_proj"][3, 70, 90] += 1

    edit_weights(folder, change)
    assert fields(before, load_checkpoint(folder), forbids=True) == ["weights"]


def test_dtype_and_formats(checkpoint):
    folder = checkpoint("qwen3_moe", **SIZES)
    narrow = load_checkpoint(folder, dtype="bfloat16")
    wide = load_checkpoint(folder, dtype="float32")
    assert fields(narrow, wide, forbids=True) == ["dtype", "layout.dtype"]
    # The same weights in bf16, once in tensors and once packed: what differs is the order of sums.
    tensors = load_checkpoint(folder, dtype="bfloat16", expert_format="none", linear_format="none")
    assert identify(tensors).digest == identify(narrow).digest
    assert fields(narrow, tensors, forbids=False) == ["rounding.operators", "rounding.torch"]
    torch.testing.assert_close(write_kv(tensors), write_kv(narrow), rtol=0.05, atol=0.05)
    # In float32 they are other weights.
    rounded = load_checkpoint(folder, dtype="float32", linear_format="bf16")
    assert "formats.lm_head" in fields(wide, rounded, forbids=True)
    packed = load_checkpoint(folder, dtype="bfloat16", linear_format="int8")
    assert "formats.model.layers.2.self_attn" in fields(narrow, packed, forbids=True)


def test_layers_of_the_skeleton_only_round(checkpoint, tmp_path):
    folder = checkpoint("qwen3", **SIZES)
    rules = tmp_path / "rules.yaml"
    rules.write_text("- match: {name: '^model.layers.1$'}\n  replace: {class: default}\n")
    fused, kept = load_checkpoint(folder), load_checkpoint(folder, rules=rules)
    assert kept.is_fused != fused.is_fused
    assert fields(fused, kept, forbids=True) == []
    assert fields(fused, kept, forbids=False) == ["rounding.operators"]
    torch.testing.assert_close(write_kv(kept), write_kv(fused), rtol=1e-4, atol=1e-4)


def test_bf16_instructions_count_where_something_is_bf16(checkpoint, monkeypatch):
    folder = checkpoint("qwen3_moe", **SIZES)
    narrow = load_checkpoint(folder, dtype="bfloat16")
    integers = load_checkpoint(folder, dtype="float32", expert_format="int8", linear_format="int8")
    mixed = load_checkpoint(folder, dtype="float32", expert_format="fp8", linear_format="int8")
    models = [narrow, integers, mixed]
    units = []
    for isa in ("avx2", "avx512_vnni", "avx512_bf16"):
        monkeypatch.setattr(identity, "kernel_isas", lambda isa=isa: ["plain", isa])
        units.append([identify(model).rounding.bf16_unit for model in models])
    assert units == [["", "", ""], ["", "", ""], ["avx512_bf16", "", "avx512_bf16"]]


def test_torch_counts_where_it_attends(checkpoint, monkeypatch):
    """KV in float16 has no native attention: under ``strict``, another torch must not be shared."""
    model = load_checkpoint(checkpoint("llama", **SIZES), dtype="bfloat16")
    layouts = [model.kv_layout(16, dtype) for dtype in ("auto", "int8", "float16")]
    ours = [model.kv_identity(layout, "strict") for layout in layouts]
    assert [bool(found.rounding.torch) for found in ours] == [False, False, True]
    monkeypatch.setattr(torch, "__version__", "9.9")
    theirs = [model.kv_identity(layout, "strict") for layout in layouts]
    assert [a.digest == b.digest for a, b in zip(ours, theirs, strict=True)] == [True, True, False]


def test_devices_of_torch_only_round(checkpoint):
    """Products on a GPU are other sums than on a CPU, by the same operators and torch."""
    model = load_checkpoint(checkpoint("llama", **SIZES), dtype="float32", linear_format="none")
    ours = identify(model)
    model.skeleton.to("meta")
    assert [d.field for d in ours.compare(identify(model)) if d.forbids] == []
    assert identify(model).rounding.torch != ours.rounding.torch


def test_parts_of_experts_only_round(checkpoint):
    folder = checkpoint("qwen3_moe", **{**SIZES, "moe_intermediate_size": 256})
    one, two = (
        load_checkpoint(folder, dtype="float32", expert_format="int8", expert_parts=parts)
        for parts in (1, 2)
    )
    assert fields(one, two, forbids=True) == []
    assert fields(one, two, forbids=False) == ["rounding.expert_parts"]
    torch.testing.assert_close(write_kv(two), write_kv(one), rtol=1e-4, atol=1e-4)


GOLDEN = json.loads((Path(__file__).parents[1] / "kv_of_the_demo_model.json").read_text())
FLOAT32_TOLERANCE, BF16_TOLERANCE = 5e-6, 2e-3
"""Ten times what was seen: of float32's sums in other orders, and of bfloat16's roundings."""


def compare_with_golden(kv):
    """Return the largest error of the projections, relative to the sizes of both vectors."""
    flat = kv.flatten(2).double()
    slopes = torch.linspace(0.5, 1.5, 4)[:, None]
    directions = (slopes * torch.arange(flat.shape[-1])).sin().double()
    found = torch.einsum("lkn,cn->lkc", flat, directions)
    size = flat.norm(dim=-1)[..., None] * directions.norm(dim=-1)
    expected = torch.tensor(GOLDEN["projections"], dtype=torch.float64)
    return float(((found - expected).abs() / size).max())


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", FLOAT32_TOLERANCE), ("bfloat16", BF16_TOLERANCE)]
)
def test_values_are_those_of_the_numerics_version(dtype, tolerance):
    """KV on SSDs outlives upgrades: if this fails, and rightly, raise ``NUMERICS_VERSION``.

    Of each layer's keys and values, four projections on fixed directions, recorded in float32.
    """
    assert GOLDEN["numerics_version"] == NUMERICS_VERSION, "record the new version's values"
    assert compare_with_golden(write_kv(load_checkpoint(DEMO_FOLDER, dtype=dtype))) < tolerance


@pytest.mark.parametrize(
    "change",
    [{"rope_parameters": {"rope_type": "default", "rope_theta": 1.001e4}}, {"rms_norm_eps": 1e-5}],
)
def test_a_small_change_of_values_is_seen(change, tmp_path, edit_config):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(DEMO_FOLDER / name, tmp_path)
    edit_config(tmp_path, **change)
    error = compare_with_golden(write_kv(load_checkpoint(tmp_path, dtype="float32")))
    assert error > 2 * FLOAT32_TOLERANCE

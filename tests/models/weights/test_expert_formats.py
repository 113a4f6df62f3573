"""Goal: a model with experts in a weight format computes what the format says, and says so.

Method: the same checkpoint with its expert weights replaced by what their codes stand for, run by
torch in float32, is the oracle; what may differ is how the kernels code activations. Formats must
differ from each other by more than they differ from their oracles, so that a mix-up would show.
"""

from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from loading import load_checkpoint
from safetensors.torch import load_file, save_file

from quick import rest_slow
from tandem.core.errors import ConfigError, ShapeError, UnsupportedError
from tandem.core.spec import ModelSpec
from tandem.kernels.weights.formats import dequantize, find_format, quantize, round_to_bf16
from tandem.models.planning.planner import plan_model
from tandem.models.planning.precision import choose_dtype

IDS = list(range(3, 60))
SIZES = {"hidden_size": 128, "moe_intermediate_size": 128}
FORMATS = ["bf16", "int8g128", "int8g32", "int4g32", "int4g32sym"]

LARGEST_ERROR = {16: 0.004, 8: 0.02, 4: 0.02}
"""Of the logits, as a norm relative to the logits' own: bf16 or int8 activations, three layers."""
SMALLEST_CHANGE = {16: 0.0005, 8: 0.001, 4: 0.05}
"""What coding the weights changes at least."""


def code(weights: torch.Tensor, name: str) -> torch.Tensor:
    weight_format = find_format(name)
    matrix = weights.reshape(-1, weights.shape[-1]).numpy()
    if weight_format.is_integer:
        coded = dequantize(quantize(matrix, weight_format))
    else:
        coded = round_to_bf16(matrix)
    return torch.from_numpy(coded.astype(np.float32)).reshape(weights.shape)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Median over tokens: where two experts score alike, a token may go to the other one."""
    return ((a - b).norm(dim=-1) / b.norm(dim=-1)).median().item()


def to_other_layout(folder):
    """Store all experts of a layer as one tensor instead of three for each, as transformers can."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    layers = {name.partition(".experts.")[0] for name in tensors if ".experts.0." in name}
    assert layers
    for layer in layers:
        base = f"{layer}.experts"
        count = sum(name.startswith(f"{base}.") for name in tensors) // 3
        parts = [
            [tensors.pop(f"{base}.{i}.{kind}_proj.weight") for i in range(count)]
            for kind in ("gate", "up", "down")
        ]
        gate, up, down = (torch.stack(part) for part in parts)
        tensors[f"{base}.gate_up_proj"] = torch.cat((gate, up), dim=1)
        tensors[f"{base}.down_proj"] = down
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("name", rest_slow(["bf16", "int8g32", "int4g32"], FORMATS))
def test_logits_are_those_of_the_coded_weights(name, checkpoint, edit_weights, open_session):
    folder = checkpoint("qwen3_moe", **SIZES)
    plain = open_session(load_checkpoint(folder, dtype="float32")).run(IDS)
    ours = open_session(load_checkpoint(folder, dtype="float32", expert_format=name)).run(IDS)

    def code_experts(tensors):
        for key in tensors:
            if ".experts." in key:
                tensors[key] = code(tensors[key], name)

    edit_weights(folder, code_experts)
    oracle = open_session(load_checkpoint(folder, dtype="float32")).run(IDS)
    bits = find_format(name).bits
    assert relative(ours, oracle) < LARGEST_ERROR[bits]
    assert relative(oracle, plain) > SMALLEST_CHANGE[bits]
    if bits < 16:
        assert relative(ours, plain) > relative(ours, oracle)


@pytest.mark.parametrize(
    ("dtype", "name"),
    rest_slow(
        [("float32", "int4g32"), ("bfloat16", "bf16")],
        product(["float32", "bfloat16"], ["bf16", "int4g32"]),
    ),
)
def test_both_layouts_of_a_checkpoint_pack_alike(name, dtype, checkpoint, open_session):
    folder = checkpoint("qwen3_moe", **SIZES)
    split = open_session(load_checkpoint(folder, dtype=dtype, expert_format=name)).run(IDS)
    to_other_layout(folder)
    stacked = open_session(load_checkpoint(folder, dtype=dtype, expert_format=name)).run(IDS)
    assert torch.equal(stacked, split)


def test_experts_do_not_depend_on_the_batch(checkpoint):
    model = load_checkpoint(checkpoint("qwen3_moe", **SIZES), expert_format="int8g32")
    experts = model.skeleton.model.layers[1].mlp.experts
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 128, generator=generator)
    ids = torch.randint(-1, 6, (40, 2), generator=generator)
    weights = torch.rand(40, 2, generator=generator)
    whole = experts(x, ids, weights)
    rows = [experts(x[i : i + 1], ids[i : i + 1], weights[i : i + 1]) for i in range(40)]
    assert torch.equal(whole, torch.cat(rows))


def test_rules_give_layers_formats_of_their_own(checkpoint, tmp_path, open_session):
    folder = checkpoint("qwen3_moe", **SIZES)
    path = tmp_path / "rules.yaml"
    path.write_text(
        "- match: {name: 'layers.0.mlp.experts$'}\n"
        "  replace: {class: Experts, kwargs: {format: int4}}\n"
        "- match: {name: 'layers.1.mlp.experts$'}\n"
        "  replace: {class: Experts, kwargs: {format: none}}\n"
    )
    planned = plan_model(folder, rules=path, expert_format="int8g32")
    found = {m.module: m.weight_format for m in planned.modules}
    assert [found[f"model.layers.{i}.mlp.experts"] for i in range(3)] == [
        "int4g32",
        "none",
        "int8g32",
    ]
    mixed = load_checkpoint(folder, rules=path, expert_format="int8g32")
    uniform = load_checkpoint(folder, expert_format="int8g32")
    assert mixed.is_fused
    # KV of one must never serve the other.
    again = load_checkpoint(folder, rules=path, expert_format="int8g32")
    ours, theirs, same = (m.kv_identity(m.kv_layout()) for m in (mixed, uniform, again))
    assert ours == same
    assert [str(d) for d in ours.compare(theirs) if d.forbids] == [
        "formats.model.layers.0.mlp.experts: 'int4g32' here, 'int8g32' there",
        "formats.model.layers.1.mlp.experts: None here, 'int8g32' there",
    ]
    a, b = open_session(mixed).run(IDS), open_session(uniform).run(IDS)
    assert not torch.equal(a, b)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{class: Experts, kwargs: {format: int5}}", "weight format 'int5'"),
        ("{class: Experts, kwargs: {format: [int8]}}", "weight format"),
        ("{class: RmsNorm, kwargs: {format: int8}}", "RmsNorm takes no weight format"),
    ],
)
def test_formats_in_rules_are_checked(text, error, checkpoint, tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(f"- match: {{name: x}}\n  replace: {text}")
    with pytest.raises(ConfigError, match=error):
        plan_model(checkpoint("qwen3_moe"), rules=path)


def test_what_fits_no_format_is_refused(checkpoint):
    folder = checkpoint("qwen3_moe")
    with pytest.raises(ConfigError, match="'int3': choose one of") as caught:
        load_checkpoint(folder, expert_format="int3")
    assert caught.value.field == "model.expert_format"
    with pytest.raises(ShapeError, match="hidden_size 48 is not a multiple"):
        load_checkpoint(folder, expert_format="int8")
    with pytest.raises(UnsupportedError, match="cuda"):
        plan_model(folder, linear_format="bf16", device="cuda")
    with pytest.raises(UnsupportedError, match="cuda"):
        plan_model(folder, expert_format="bf16", device="cuda", expert_device="cuda")


def make_spec(**changes) -> ModelSpec:
    sizes = {"num_layers": 2, "num_heads": 1, "num_kv_heads": 1, "head_dim": 64}
    sizes |= {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 10}
    sizes |= {"max_position_embeddings": 10, "num_experts": 4, "top_k": 2, "num_moe_layers": 2}
    sizes |= {"moe_intermediate_size": 256, "dtype": "float32"}
    return ModelSpec(name="x", model_type="x", architecture="X", **(sizes | changes))


def test_plans_say_bytes_and_why(checkpoint):
    folder = checkpoint("qwen3_moe", **SIZES)
    auto = plan_model(folder, dtype="bfloat16")
    names = [choice.weight_format for choice in (auto.experts, auto.linear, auto.router)]
    assert names == ["bf16", "bf16", "bf16"]
    (first, *_) = experts = [m for m in auto.matrices if m.role == "experts"]
    assert len(experts) == 3
    assert first.size_bytes == first.plain_bytes == 2 * prod(first.shape)
    assert first.reason == "the model's own dtype, on native kernels"
    int8 = plan_model(folder, dtype="bfloat16", expert_format="int8", linear_format="none")
    assert int8.experts.weight_format == "int8g128"
    assert int8.expert_bytes == 3 * prod(first.shape) * (128 + 2) // 128
    assert int8.linear.reason == "bfloat16 tensors, as asked for"
    assert not int8.is_native
    plain = plan_model(folder, dtype="float32")
    assert plain.expert_bytes == 3 * 4 * prod(first.shape)
    assert (plain.linear.weight_format, plain.linear.reason) == ("f32", first.reason)
    dense = plan_model(checkpoint("llama"), expert_format="int8")
    assert (dense.experts.weight_format, dense.expert_bytes) == ("none", 0)


def test_plans_count_what_is_loaded(checkpoint):
    dense = {"mlp_only_layers": [1], "intermediate_size": 128}
    for changes in ({}, {"tie_word_embeddings": True}, dense):
        folder = checkpoint("qwen3_moe", **SIZES, **changes)
        for experts, linear in (("auto", "auto"), ("int8", "int8g32"), ("none", "int8g16")):
            model = load_checkpoint(
                folder, dtype="bfloat16", expert_format=experts, linear_format=linear
            )
            assert model.plan.weight_bytes == model.weight_bytes, (changes, experts, linear)


@pytest.mark.parametrize(
    ("has_unit", "changes", "dtype"),
    [
        (True, {}, "bfloat16"),
        (False, {}, "float32"),
        (True, {"num_moe_layers": 0}, "bfloat16"),
        (True, {"checkpoint_dtype": "float32"}, "float32"),
    ],
)
def test_auto_dtype_looks_at_the_machine(has_unit, changes, dtype, monkeypatch):
    class Features:
        avx512_bf16 = has_unit
        amx_bf16 = False

    monkeypatch.setattr("tandem.models.planning.precision.cpu_features", Features)
    chosen = choose_dtype(make_spec(**({"checkpoint_dtype": "bfloat16"} | changes)), "auto")
    assert chosen.dtype == dtype
    assert choose_dtype(chosen, "float32").dtype == "float32"

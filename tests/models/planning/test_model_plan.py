"""Goal: a plan says what the modules are and what weights take, and loading does what it says.

Method: sizes are compared with the configuration that made the modules, bytes with what a loaded
model holds. Plans are changed by hand to see that loading decides nothing itself.
"""

import subprocess
import sys

import msgspec
import pytest
from loading import load_checkpoint
from safetensors.torch import load_file

from quick import rest_slow
from tandem.core.errors import ConflictError, UnsupportedError
from tandem.core.model.layers import Activation, GqaSpec, NormSpec, RoutingRule
from tandem.core.model.plan import ModelPlan
from tandem.finetune.training.model import plan_training
from tandem.models.loading.loader import load_model
from tandem.models.planning.plan_report import render_plan
from tandem.models.planning.planner import plan_model

SIZES = {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 64, "intermediate_size": 64}


def test_layers_that_mix_moe_and_mlp(checkpoint):
    folder = checkpoint("qwen3_moe", mlp_only_layers=[1])
    layers = plan_model(folder).layers
    mixer = GqaSpec(
        hidden_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        scale=0.25,
        qk_norm=NormSpec(size=16, eps=1e-6),
    )
    assert [layer.index for layer in layers] == [0, 1, 2]
    assert all(layer.mixer == mixer for layer in layers)
    assert layers[1].mlp.intermediate_size == 72
    moe = layers[0].mlp
    assert moe == layers[2].mlp
    assert (moe.num_experts, moe.top_k, moe.intermediate_size) == (6, 2, 40)
    assert moe.router.rule == RoutingRule()
    assert moe.experts.activation == Activation()


def test_layers_with_windows_sinks_and_biases(checkpoint):
    folder = checkpoint(
        "gpt_oss",
        rope_parameters={
            "rope_type": "yarn",
            "factor": 8.0,
            "rope_theta": 150000.0,
            "original_max_position_embeddings": 64,
        },
    )
    layers = plan_model(folder).layers
    assert [layer.mixer.window for layer in layers] == [20, 0, 20]
    assert all(layer.mixer.has_sinks and layer.mixer.has_qkv_bias for layer in layers)
    experts = layers[0].mlp.experts
    assert (experts.has_bias, experts.is_transposed) == (True, True)
    assert experts.activation == Activation(alpha=1.702, limit=7.0, up_offset=1.0)
    assert all(layer.mlp.experts == experts for layer in layers)
    rope = layers[0].rope
    assert (rope.rope_type, rope.rope_theta, rope.factor) == ("yarn", 150000.0, 8.0)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_places_of_adapters_are_those_of_the_loaded_model(model_type, checkpoint):
    """It protects checks of adapters before a model is loaded, and sizes of their memory."""
    model = load_checkpoint(checkpoint(model_type))
    planned = {
        place.module: (place.out_features, place.in_features)
        for layer in model.plan.layers
        for place in layer.adapters
    }
    parts = model.enable_adapters(1).modules
    assert planned == {n: (p.out_features, p.in_features) for n, p in parts.items()}


def test_matrices_belong_to_their_layers_and_a_device(checkpoint):
    plan = plan_model(checkpoint("qwen3_moe", mlp_only_layers=[1]))
    for layer in plan.layers:
        assert all(m.module.startswith(f"model.layers.{layer.index}.") for m in layer.matrices)
    roles = [sorted({m.role for m in layer.matrices}) for layer in plan.layers]
    assert roles[0] == ["attention_out", "experts", "qkv", "router"]
    assert roles[1] == ["attention_out", "down", "gate_up", "qkv"]
    assert {m.role for m in plan.other_matrices} == {"embedding", "head"}
    assert {m.device for m in plan.matrices} == {"cpu"}


def test_a_plan_of_training_packs_what_is_frozen(checkpoint):
    """The plan is what fine-tuning loads, and what its forecast counts."""
    plan = plan_training(str(checkpoint("qwen3_moe", **SIZES)), linear_format="int8")
    found = {m.module.rpartition("layers.0.")[2] or m.module: m for m in plan.modules}
    assert found["self_attn.q_proj"].operator == "FrozenLinear"
    assert found["mlp.experts"].operator == "default"
    assert found["lm_head"].weight_format == "int8g128"
    assert found["mlp.gate"].operator == found["self_attn"].operator == "default"
    kept = plan_training(str(checkpoint("qwen3_moe", **SIZES)), is_bf16=True, is_head_packed=False)
    operators = {m.module: m.operator for m in kept.modules}
    assert operators["lm_head"] == operators["model.layers.0.self_attn.q_proj"] == "default"
    assert operators["model.layers.0.mlp.experts"] == "FrozenExperts"


LOADED = {
    "llama": {},
    "llama-biases": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "gpt_oss": {},
    "deepseek_v2": {},
    "deepseek_v3": {},
}
QUICK_LOADED = [("llama-biases", "float32", "none"), ("qwen3_moe", "float32", "none")]
QUICK_LOADED += [("deepseek_v3", "float32", "none"), ("qwen3_moe", "float32", "auto")]
QUICK_LOADED += [(name, "bfloat16", "auto") for name in LOADED]


@pytest.mark.parametrize(
    ("name", "dtype", "how"),
    rest_slow(
        QUICK_LOADED,
        [
            (name, *how)
            for name in LOADED
            for how in (("float32", "none"), ("float32", "auto"), ("bfloat16", "auto"))
        ],
    ),
)
def test_bytes_are_those_of_the_loaded_model(name, dtype, how, checkpoint):
    model_type, changes = name.partition("-")[0], LOADED[name]
    is_latent = model_type.startswith("deepseek")
    folder = checkpoint(model_type, **({} if is_latent else SIZES), **changes)
    model = load_checkpoint(folder, dtype=dtype, expert_format=how, linear_format=how)
    assert model.plan.is_native == (how == "auto")
    stored = load_file(folder / "model.safetensors").values()
    assert model.spec.num_parameters == sum(tensor.numel() for tensor in stored)
    counted = model.plan.weight_bytes
    if how == "none":
        assert counted == model.weight_bytes
    if how == "none" and not is_latent:
        assert counted == 4 * model.spec.num_parameters
    # Packed matrices pad their last block, and keep biases in memory of their own.
    assert 0.8 * model.weight_bytes <= counted <= 1.2 * model.weight_bytes


def test_a_format_of_a_rule_takes_groups_that_fill_its_matrices(checkpoint, tmp_path):
    """``int8`` and ``int4`` leave the size of groups open, by rule as by setting, and say it."""
    sizes = {"hidden_size": 192, "head_dim": 48, "num_key_value_heads": 2, "num_hidden_layers": 1}
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "- match: {name: 'layers.0.mlp$'}\n  replace: {class: Mlp, kwargs: {format: int8}}\n"
        "- match: {name: 'mlp.experts$'}\n  replace: {class: Experts, kwargs: {format: int8}}\n"
        "- match: {name: 'lm_head$'}\n  replace: {class: LmHead, kwargs: {format: int8g32}}\n"
    )
    for folder, role, width in (
        (checkpoint("llama", intermediate_size=320, **sizes), "gate_up", 192),
        (checkpoint("qwen3_moe", moe_intermediate_size=64, **sizes), "experts", 64),
    ):
        plan = plan_model(folder, dtype="float32", rules=rules)
        found = {matrix.role: matrix.weight_format for matrix in plan.matrices}
        assert (found[role], found["head"]) == ("int8g64", "int8g32")
        notes = {module.note for module in plan.modules if module.weight_format == "int8g64"}
        assert notes == {f"groups of 64, as {width} inputs are no groups of 128"}


def test_matrices_have_places_shapes_and_reasons(checkpoint, tmp_path):
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "- match: {name: 'layers.1.mlp.experts$'}\n"
        "  replace: {class: Experts, kwargs: {format: int8g32}}\n"
        "- match: {name: 'layers.2.mlp.experts$'}\n"
        "  replace: {class: default}\n"
    )
    folder = checkpoint("qwen3_moe", **SIZES, tie_word_embeddings=True)
    plan = plan_model(folder, dtype="bfloat16", rules=rules)
    found = {(m.module, m.role): m for m in plan.matrices}
    qkv = found["model.layers.0.self_attn", "qkv"]
    assert (qkv.shape, qkv.weight_format) == ((8 * 32, 128), "bf16")
    assert found["model.layers.0.mlp.gate", "router"].shape == (6, 128)
    experts = [found[f"model.layers.{i}.mlp.experts", "experts"] for i in range(3)]
    assert {m.shape for m in experts} == {(6, 3 * 64, 128)}
    assert [(m.weight_format, m.reason) for m in experts] == [
        ("bf16", "the model's own dtype, on native kernels"),
        ("int8g32", "rules.yaml:1 asks for it"),
        ("none", "a module of the skeleton"),
    ]
    assert experts[1].size_bytes < experts[1].plain_bytes == experts[2].size_bytes
    head = found["lm_head", "head"]
    assert head.size_bytes > head.plain_bytes == 0
    plain = plan_model(folder, dtype="float32", linear_format="none").matrices
    assert [(m.size_bytes, m.reason) for m in plain if m.role == "head"] == [
        (0, "the embedding's tensor")
    ]
    text = render_plan(plan)
    assert "rules.yaml:1 asks for it" in text
    assert "moe 2 of 6 x 64" in text


def test_loading_obeys_the_plan(checkpoint):
    """A format that nobody asked for, written into the plan by hand, is what is loaded."""
    plan = plan_model(checkpoint("qwen3_moe", **SIZES), dtype="bfloat16")
    name = "model.layers.1.mlp.experts"
    modules = tuple(
        msgspec.structs.replace(m, weight_format="int8g32") if m.module == name else m
        for m in plan.modules
    )
    model = load_model(msgspec.structs.replace(plan, modules=modules))
    identity = model.kv_identity(model.kv_layout())
    assert identity.formats == {name: "int8g32"}
    problem = msgspec.structs.replace(plan.modules[0], problem="it is broken")
    with pytest.raises(UnsupportedError, match="it is broken"):
        load_model(msgspec.structs.replace(plan, modules=(problem, *plan.modules[1:])))


def test_a_plan_of_another_configuration_is_refused(checkpoint, edit_config):
    folder = checkpoint("llama")
    plan = plan_model(folder)
    edit_config(folder, rms_norm_eps=1e-5)
    with pytest.raises(ConflictError, match="make the plan anew"):
        load_model(plan)


def test_a_plan_is_data(checkpoint):
    plan = plan_model(checkpoint("qwen3_moe", mlp_only_layers=[1]))
    assert msgspec.json.decode(msgspec.json.encode(plan), type=ModelPlan) == plan
    code = "import sys, tandem.core.model.plan; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

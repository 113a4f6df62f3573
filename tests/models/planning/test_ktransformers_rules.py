"""Goal: rule files in KTransformers' grammar do what they say, module by module."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoConfig

from quick import rest_slow
from tandem.cli.commands.plan import plan as plan_command
from tandem.models import plan_model, render_plan

FOLDER = Path(__file__).parents[3] / "examples" / "rules" / "ktransformers"
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 31,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
LATENT = {"self_attn": "MlaAttention", "mlp.experts": "Experts", "mlp": "MoeBlock"}
FILES = {
    "deepseek-v3": ("deepseek_v3", LATENT),
    "deepseek-v3-amx": ("deepseek_v3", LATENT),
    "deepseek-v3-multi-gpu": ("deepseek_v3", LATENT),
    "deepseek-v3-sft": ("deepseek_v3", LATENT),
    "deepseek-v2-lite": ("deepseek_v2", LATENT),
    "mixtral": (
        "mixtral",
        {"self_attn.q_proj": "Linear", "mlp.experts": "Experts", "mlp": "MoeBlock"},
    ),
}


@pytest.fixture
def write_config(tmp_path):
    def write(model_type: str) -> Path:
        changes = {"n_group": 2, "topk_group": 1, "q_lora_rank": 16, "n_shared_experts": 1}
        if model_type == "deepseek_v2":
            changes = {"q_lora_rank": None, "n_shared_experts": 2}
        if model_type == "mixtral":
            changes = {"num_local_experts": 4}
        known = AutoConfig.for_model(model_type)
        fields = {k: v for k, v in (TINY | changes).items() if hasattr(known, k)}
        config = AutoConfig.for_model(model_type, **fields)
        names = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3", "mixtral": "Mixtral"}
        config.architectures = [f"{names[model_type]}ForCausalLM"]
        folder = tmp_path / model_type
        config.save_pretrained(folder)
        return folder

    return write


def test_the_files_are_those_that_are_tested():
    assert {path.stem for path in FOLDER.iterdir()} == set(FILES)


@pytest.mark.parametrize(
    "name", rest_slow(["deepseek-v3", "deepseek-v3-multi-gpu", "mixtral"], FILES)
)
def test_each_file_gives_our_operators(name, write_config):
    model_type, operators = FILES[name]
    path = FOLDER / f"{name}.yaml"
    plan = plan_model(write_config(model_type), rules=path)
    modules = {module.module: module for module in plan.modules}
    assert not [module.problem for module in plan.modules if module.problem]
    for layer in (5, 30):
        for part, operator in operators.items():
            module = modules[f"model.layers.{layer}.{part}"]
            taken = module.owner or module.operator
            assert operator == module.operator or taken.endswith("self_attn"), module
            assert module.rule.startswith(f"{name}.yaml:") or module.owner, module
    # The published embedding rule keeps the module; the experts' rule ends the walk below them.
    assert modules["model.embed_tokens"].rule.startswith(f"{name}.yaml:")
    text = render_plan(plan)
    assert "asked for cuda" in text


def test_layers_of_several_gpus_go_to_the_rules_of_their_device(write_config):
    path = FOLDER / "deepseek-v3-multi-gpu.yaml"
    plan = plan_model(write_config("deepseek_v3"), rules=path)
    lines = path.read_text().splitlines()
    for layer, device in ((5, "cuda:0"), (29, "cuda:0"), (30, "cuda:1")):
        for part in ("self_attn", "mlp", "mlp.experts"):
            name = f"model.layers.{layer}.{part}"
            module = next(m for m in plan.modules if m.module == name)
            first = int(module.rule.rpartition(":")[2]) - 1
            assert f'"{device}"' in lines[first + 3], (name, lines[first : first + 4])
            assert device in module.note


def test_unused_rules_and_conflicts_are_listed(write_config, capsys):
    folder = write_config("deepseek_v3")
    path = FOLDER / "deepseek-v3-multi-gpu.yaml"
    plan_command(model=str(folder), rules=path, json=True, help_all=False)
    report = json.loads(capsys.readouterr().out)
    # transformers 5 has one RoPE for all layers, which these rules by layer do not match.
    text = path.read_text().splitlines()
    unused = [
        int(place.rpartition(":")[2]) - 1 for place in report["unused_rules"] if "multi" in place
    ]
    assert any("rotary_emb" in text[line] for line in unused)
    more = folder / "more.yaml"
    more.write_text(
        path.read_text()
        + '\n- match: {name: "^model.layers.7.mlp$"}\n  replace: {class: default}\n'
    )
    plan_command(model=str(folder), rules=more, json=False, help_all=False)
    printed = capsys.readouterr().out
    assert re.search(r"unused: more.yaml:\d+ matched no module", printed)
    assert re.search(r"shadowed: more.yaml:\d+, all its modules went", printed)

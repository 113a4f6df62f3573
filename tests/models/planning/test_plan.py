"""Goal: rules resolve to operators here, published files load, and the plan tells all of it."""

from pathlib import Path

import pytest
import torch
from loading import load_checkpoint

from tandem.core.errors import ConfigError, NotFoundError, UnsupportedError
from tandem.models import plan_model, render_plan
from tandem.models.planning.places import list_placed_layers

EXAMPLES = Path(__file__).parents[3] / "examples" / "rules"


@pytest.fixture
def write_rules(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "rules.yaml"
        path.write_text(text)
        return path

    return write


def modules_of(plan):
    return {module.module: module for module in plan.modules}


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen3_moe", "gpt_oss"])
def test_builtin_rules_take_every_module_with_weights(model_type, checkpoint):
    folder = checkpoint(model_type)
    (folder / "model.safetensors").unlink()
    plan = plan_model(folder)
    found = modules_of(plan)
    assert found["model.layers.2"].operator == "DecoderLayer"
    assert found["model.layers.0.self_attn"].operator == "Attention"
    assert found["model.layers.0.self_attn.q_proj"].note == "part of model.layers.0.self_attn"
    mlp = "MoeBlock" if plan.spec.is_moe else "Mlp"
    assert found["model.layers.0.mlp"].operator == mlp
    for name in ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"):
        assert found[name].operator != "default", name
    text = render_plan(plan)
    assert "model.layers.* x3" in text
    assert plan.spec.dtype_reason in text
    placed = list_placed_layers(plan)
    assert [(each.first, each.num_layers) for each in placed] == [(0, 3), (-1, 1)]
    sizes = [each.num_layers * part.size_bytes for each in placed for part in each.parts]
    assert sum(sizes) == sum(matrix.size_bytes for matrix in plan.matrices)
    assert ("experts" in placed[0].kind) == plan.spec.is_moe
    assert {part.device for each in placed for part in each.parts} == {"cpu"}


def test_published_file_runs_through_aliases(checkpoint, open_session):
    folder = checkpoint("qwen3_moe")
    path = EXAMPLES / "qwen3-moe-ktransformers.yaml"
    plan = plan_model(folder, rules=path)
    found = modules_of(plan)
    assert found["model.layers.1.mlp.experts"].operator == "Experts"
    assert found["model.layers.1.mlp"].operator == "MoeBlock"
    assert found["model.layers.1.self_attn"].operator == "Attention"
    assert found["model.layers.1.input_layernorm"].operator == "RmsNorm"
    assert found["model.embed_tokens"].operator == "default"
    assert found["model.layers.1"].operator == "DecoderLayer"
    assert "asked for cuda, runs on cpu" in render_plan(plan)
    ids = list(range(20))
    ours = open_session(load_checkpoint(folder, rules=path)).run(ids)
    plain = open_session(load_checkpoint(folder)).run(ids)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


def test_example_that_keeps_layers(checkpoint, open_session):
    folder = checkpoint("qwen3")
    model = load_checkpoint(folder, rules=EXAMPLES / "keep-first-layers.yaml")
    assert not model.is_fused
    found = modules_of(model.plan)
    assert found["model.layers.1"].operator == "default"
    assert found["model.layers.2"].operator == "DecoderLayer"
    ids = list(range(20))
    plain = open_session(load_checkpoint(folder)).run(ids)
    torch.testing.assert_close(open_session(model).run(ids), plain, rtol=1e-5, atol=1e-5)


def test_unused_and_shadowed_rules_are_reported(checkpoint, write_rules):
    path = write_rules(
        """
- match: {name: "mlp$"}
  replace: {class: Mlp}
- match: {name: "^model\\\\.layers\\\\.1\\\\.mlp$"}
  replace: {class: default}
- match: {name: "visual"}
  replace: {class: default}
"""
    )
    plan = plan_model(checkpoint("llama"), rules=path)
    assert [place for place in plan.unused_rules if "rules.yaml" in place] == ["rules.yaml:6"]
    text = render_plan(plan)
    assert "unused: rules.yaml:6" in text
    assert "shadowed: rules.yaml:4, all its modules went to rules.yaml:2" in text
    assert plan.shadowed_rules["rules.yaml:4"] == ("rules.yaml:2",)


def test_known_name_without_operator_is_reported_and_refused_at_load(checkpoint, write_rules):
    folder = checkpoint("llama")
    path = write_rules(
        "- match: {name: self_attn$}\n"
        "  replace: {class: ktransformers.operators.attention.KQwen3NextAttention}"
    )
    plan = plan_model(folder, rules=path)
    assert modules_of(plan)["model.layers.0.self_attn"].note == "no operator here"
    with pytest.raises(UnsupportedError, match=r"rules\.yaml:1.*KQwen3NextAttention.*self_attn"):
        load_checkpoint(folder, rules=path)


def test_operator_that_does_not_fit_is_refused(checkpoint, write_rules):
    folder = checkpoint("llama")
    path = write_rules("- match: {name: mlp$}\n  replace: {class: Experts}")
    assert "cannot: " in modules_of(plan_model(folder, rules=path))["model.layers.0.mlp"].note
    with pytest.raises(
        UnsupportedError, match=r"Experts cannot take model\.layers\.0\.mlp: LlamaMLP"
    ):
        load_checkpoint(folder, rules=path)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{class: Atention}", "did you mean Attention"),
        ("{class: os.system}", "unknown operator 'os.system'"),
        ("{class: torch.nn.Linear}", "unknown operator 'torch.nn.Linear'"),
        ("{class: Linear, kwargs: {devise: cpu}}", "unknown kwargs devise"),
    ],
)
def test_unknown_operators_and_arguments(text, error, checkpoint, write_rules):
    path = write_rules(f"\n- match: {{name: lm_head}}\n  replace: {text}")
    for act in (plan_model, load_checkpoint):
        with pytest.raises(ConfigError, match=error) as caught:
            act(checkpoint("llama"), rules=path)
        assert "rules.yaml:2" in str(caught.value)


def test_missing_rule_file(checkpoint, tmp_path):
    with pytest.raises(NotFoundError, match=r"nothing\.yaml"):
        plan_model(checkpoint("llama"), rules=tmp_path / "nothing.yaml")

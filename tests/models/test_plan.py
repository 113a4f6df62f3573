"""Goal: rules resolve to operators here, published files load, and the report tells all of it."""

from pathlib import Path

import pytest
import torch

from tandem.core.errors import ConfigError, NotFoundError, UnsupportedError
from tandem.models import explain_rules, load_model

EXAMPLES = Path(__file__).parents[2] / "examples" / "rules"


@pytest.fixture
def write_rules(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "rules.yaml"
        path.write_text(text)
        return path

    return write


def outcomes_of(report):
    return {outcome.module: outcome for outcome in report.outcomes}


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen3_moe", "gpt_oss"])
def test_builtin_rules_take_every_module_with_weights(model_type, checkpoint):
    folder = checkpoint(model_type)
    (folder / "model.safetensors").unlink()
    report = explain_rules(folder)
    found = outcomes_of(report)
    assert found["model.layers.2"].operator == "DecoderLayer"
    assert found["model.layers.0.self_attn"].operator == "Attention"
    assert found["model.layers.0.self_attn.q_proj"].note == "part of model.layers.0.self_attn"
    mlp = "MoeBlock" if report.spec.is_moe else "Mlp"
    assert found["model.layers.0.mlp"].operator == mlp
    for name in ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"):
        assert found[name].operator != "default", name
    text = report.render()
    assert "model.layers.* x3" in text
    assert report.spec.dtype_reason in text


def test_published_file_runs_through_aliases(checkpoint, open_session):
    folder = checkpoint("qwen3_moe")
    path = EXAMPLES / "qwen3-moe-ktransformers.yaml"
    report = explain_rules(folder, path)
    found = outcomes_of(report)
    assert found["model.layers.1.mlp.experts"].operator == "Experts"
    assert found["model.layers.1.mlp"].operator == "MoeBlock"
    assert found["model.layers.1.self_attn"].operator == "Attention"
    assert found["model.layers.1.input_layernorm"].operator == "RmsNorm"
    assert found["model.embed_tokens"].operator == "default"
    assert found["model.layers.1"].operator == "DecoderLayer"
    assert "asked for cuda, runs on cpu" in report.render()
    ids = list(range(20))
    ours = open_session(load_model(folder, rules=path)).run(ids)
    plain = open_session(load_model(folder)).run(ids)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


def test_example_that_keeps_layers(checkpoint, open_session):
    folder = checkpoint("qwen3")
    model = load_model(folder, rules=EXAMPLES / "keep-first-layers.yaml")
    assert not model.is_fused
    found = outcomes_of(model.report)
    assert found["model.layers.1"].operator == "default"
    assert found["model.layers.2"].operator == "DecoderLayer"
    ids = list(range(20))
    plain = open_session(load_model(folder)).run(ids)
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
    report = explain_rules(checkpoint("llama"), path)
    assert [
        report.rules[i].line for i in report.unused if report.rules[i].source == "rules.yaml"
    ] == [6]
    text = report.render()
    assert "unused: rules.yaml:6" in text
    assert "shadowed: rules.yaml:4, all its modules went to rules.yaml:2" in text
    assert report.to_json()["shadowed_rules"]["rules.yaml:4"] == ["rules.yaml:2"]


def test_known_name_without_operator_is_reported_and_refused_at_load(checkpoint, write_rules):
    folder = checkpoint("llama")
    path = write_rules(
        "- match: {name: self_attn$}\n"
        "  replace: {class: ktransformers.operators.attention.KDeepseekV2Attention}"
    )
    report = explain_rules(folder, path)
    assert outcomes_of(report)["model.layers.0.self_attn"].note == "no operator here"
    with pytest.raises(UnsupportedError, match=r"rules\.yaml:1.*KDeepseekV2Attention.*self_attn"):
        load_model(folder, rules=path)


def test_operator_that_does_not_fit_is_refused(checkpoint, write_rules):
    folder = checkpoint("llama")
    path = write_rules("- match: {name: mlp$}\n  replace: {class: Experts}")
    assert "cannot: " in outcomes_of(explain_rules(folder, path))["model.layers.0.mlp"].note
    with pytest.raises(
        UnsupportedError, match=r"Experts cannot take model\.layers\.2\.mlp: LlamaMLP"
    ):
        load_model(folder, rules=path)


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
    for act in (explain_rules, lambda folder, rules: load_model(folder, rules=rules)):
        with pytest.raises(ConfigError, match=error) as caught:
            act(checkpoint("llama"), path)
        assert "rules.yaml:2" in str(caught.value)


def test_missing_rule_file(checkpoint, tmp_path):
    with pytest.raises(NotFoundError, match=r"nothing\.yaml"):
        explain_rules(checkpoint("llama"), tmp_path / "nothing.yaml")

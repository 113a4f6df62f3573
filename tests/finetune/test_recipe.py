"""Recipes: the tutorial's runs unchanged, and what is wrong in one is named."""

import math

import pytest
import torch
from safetensors.torch import load_file

from tandem.core.errors import ConfigError, NotFoundError, UnsupportedError
from tandem.finetune.recipes.recipe import make_recipe, read_recipe
from tandem.finetune.training.trainer import finetune
from tutorial import RECIPE, RULE, RULE_PATH

LEAST = {"model_name_or_path": "demo", "output_dir": "out"}


def test_the_tutorials_recipe(tmp_path, monkeypatch):
    """All its keys are obeyed, or noted as having no effect; overrides go before the file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / RULE_PATH).parent.mkdir(parents=True)
    (tmp_path / RULE_PATH).write_text(RULE)
    recipe = read_recipe("recipe.yaml", ["lora_rank=16", "learning_rate=1e-3"])
    assert (recipe.method.lora_rank, recipe.train.learning_rate) == (16, 1e-3)
    assert recipe.model.expert_format == "int8"
    assert (recipe.model.cpu_infer, recipe.train.warmup_steps) == (32, 0.1)
    assert recipe.train.resume_from_checkpoint is None
    assert any("cuda:0" in note for note in recipe.notes)
    assert any(note.startswith("chunk_size") for note in recipe.notes)


def test_todays_kt_keys():
    """The nested keys of LLaMA-Factory's current tree."""
    nested = {"kt_backend": "AMXBF16", "kt_num_threads": 3, "kt_share_backward_bb": True}
    recipe = make_recipe({**LEAST, "use_kt": True, "kt_config": nested})
    assert (recipe.model.expert_format, recipe.model.cpu_infer) == ("bf16", 3)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"lora_rnak": 8}, ConfigError, "did you mean lora_rank"),
        ({"lora_rank": 0}, ConfigError, "lora_rank"),
        ({"lora_rank": "many"}, ConfigError, "lora_rank"),
        ({"stage": "rm"}, UnsupportedError, "use sft, dpo or pt"),
        ({"finetuning_type": "full"}, UnsupportedError, "use lora"),
        ({"quantization_bit": 4}, UnsupportedError, "expert_format"),
        ({"fp16": True}, UnsupportedError, "bf16"),
        ({"kt_backend": "AMXInt3"}, ConfigError, "amxint4"),
        ({"kt_config": 3}, ConfigError, "mapping"),
        ({"kt_optimize_rule": "absent.yaml"}, NotFoundError, "expert_format"),
        ({"warmup_ratio": 1.5}, ConfigError, "warmup_ratio"),
        ({"warmup_ratio": "high"}, ConfigError, "warmup_ratio 'high'"),
        ({"warmup_ratio": [0.1]}, ConfigError, "warmup_ratio"),
        ({"num_train_epochs": math.inf}, ConfigError, "num_train_epochs is inf"),
        ({"val_size": math.inf}, ConfigError, "val_size is inf"),
        ({"warmup_steps": math.inf}, ConfigError, "warmup_steps is inf"),
        ({"seed": -1}, ConfigError, "seed"),
        ({"seed": 2**32}, ConfigError, "seed"),
        ({"default_system": "\ud83d\ude00"}, ConfigError, "default_system is not Unicode"),
        ({"output_dir": "a\0b"}, ConfigError, "output_dir is not Unicode"),
        ({"eval_strategy": "sometimes"}, ConfigError, "eval_strategy"),
        ({"output_dir": ""}, ConfigError, "output_dir"),
    ],
)
def test_wrong_keys_are_named(changes, kind, message):
    """Nothing that would change the result is passed over."""
    with pytest.raises(kind, match=message):
        make_recipe({**LEAST, **changes})


def test_wishes_that_are_off_are_no_wishes():
    """A refused key that is false asks for nothing."""
    make_recipe({**LEAST, "fp16": False, "predict_with_generate": False, "quantization_bit": None})


def test_files_that_are_no_recipes(tmp_path):
    """A list, broken YAML, values that no type has, and a missing file."""
    path = tmp_path / "r.yaml"
    with pytest.raises(NotFoundError):
        read_recipe(path)
    for text in ("- a\n", "a: [\n", "a: 2020-13-45\n", "a: !!bool x\n", "a: " + "[" * 700):
        path.write_text(text)
        with pytest.raises(ConfigError):
            read_recipe(path)
    path.write_text("model_name_or_path: demo\n")
    with pytest.raises(ConfigError, match="key=value"):
        read_recipe(path, ["output_dir"])
    with pytest.raises(ConfigError, match="not YAML"):
        read_recipe(path, ["output_dir=2020-13-45"])


def test_plain_texts_are_learned(tmp_path):
    """``stage: pt`` as in LLaMA-Factory's example: rows of the cutoff's size, no template."""
    recipe = make_recipe({**LEAST, "stage": "pt"})
    assert recipe.is_packed
    assert not make_recipe({**LEAST, "stage": "pt", "packing": False}).is_packed
    assert not make_recipe(LEAST).is_packed
    with pytest.raises(ConfigError, match="a plain text has no turns"):
        make_recipe({**LEAST, "stage": "pt", "template": "qwen3"})
    (tmp_path / "texts.jsonl").write_text('{"text": "some words here"}\n' * 20)
    values = {"dataset": str(tmp_path / "texts.jsonl"), "stage": "pt", "cutoff_len": 16}
    output = {"output_dir": str(tmp_path / "out"), "max_steps": 1, "logging_steps": 1}
    report = finetune(make_recipe({**LEAST, **values, **output, "report_to": "none"}))
    assert report.num_examples > 1
    assert report.results["train_loss"] > 0
    with pytest.raises(ConfigError, match="lower it"):
        finetune(
            make_recipe({**LEAST, **values, **output, "cutoff_len": 2048, "output_dir": "new"})
        )


def test_loraplus_learns_b_faster(make_values, tmp_path):
    """Adam's first step is the rate times what does not depend on it."""
    found = []
    for ratio in (None, 4.0):
        options = {"max_steps": 1, "warmup_steps": 0, "lora_dropout": 0.0, "plot_loss": False}
        values = make_values(tmp_path / str(ratio), **options, loraplus_lr_ratio=ratio)
        finetune(make_recipe(values))
        found.append(load_file(tmp_path / str(ratio) / "adapter_model.safetensors"))
    for name, plain in found[0].items():
        wanted = 4 * plain if "lora_B" in name else plain
        assert torch.allclose(found[1][name], wanted, rtol=1e-5, atol=1e-9)

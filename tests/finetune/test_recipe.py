"""Recipes: the tutorial's runs unchanged, and what is wrong in one is named."""

import math

import pytest
import torch
from safetensors.torch import load_file

from each import each
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
        ({"max_steps": 0}, ConfigError, "-1 for num_train_epochs"),
        ({"lr_scheduler_kwargs": 3}, ConfigError, "lr_scheduler_kwargs 3 is not a mapping"),
        ({"lr_scheduler_kwargs": "{a: ["}, ConfigError, "lr_scheduler_kwargs '{a: \\['"),
        ({"lr_scheduler_kwargs": {"min_lr": [1]}}, ConfigError, "lr_scheduler_kwargs"),
        ({"eval_strategy": "sometimes"}, ConfigError, "eval_strategy"),
        ({"output_dir": ""}, ConfigError, "output_dir"),
    ],
)
def test_wrong_keys_are_named(changes, kind, message):
    """Nothing that would change the result is passed over."""
    with pytest.raises(kind, match=message):
        make_recipe({**LEAST, **changes})


@each("off", [False, None, 0, "false", "False", "no", "none", "0"])
def test_wishes_that_are_off_are_no_wishes(off):
    """A refused key that is off asks for nothing, however that is written; do_train is refused."""
    make_recipe({**LEAST, "fp16": off, "predict_with_generate": off, "quantization_bit": off})
    if off not in (None, "no", "none"):
        with pytest.raises(UnsupportedError, match="tandem eval"):
            make_recipe({**LEAST, "do_train": off})
        for key in ("pure_bf16", "neat_packing"):
            recipe = make_recipe({**LEAST, key: off})
            assert (recipe.train.bf16, recipe.is_packed) == (False, False)
        assert make_recipe(
            {**LEAST, "disable_gradient_checkpointing": off}
        ).train.gradient_checkpointing


@each("key", ["do_train", "pure_bf16", "neat_packing", "disable_gradient_checkpointing"])
def test_what_is_neither_true_nor_false_is_refused(key):
    """Any text was taken for true."""
    with pytest.raises(ConfigError, match="give true or false") as caught:
        make_recipe({**LEAST, key: "perhaps"})
    assert caught.value.field == key
    make_recipe({**LEAST, key: "true"})


RULED, CHECKPOINTS = "rule.yaml", "gradient_checkpointing"


@each(
    ("keys", "field", "wanted", "unheeded"),
    [
        ({"warmup_steps": 7, "warmup_ratio": 0.1}, "warmup_steps", 7, "warmup_ratio"),
        ({"warmup_steps": 0, "warmup_ratio": 0.1}, "warmup_steps", 0.1, ""),
        ({"warmup_steps": 7, "warmup_ratio": 0}, "warmup_steps", 7, ""),
        ({"bf16": True, "pure_bf16": False}, "bf16", True, ""),
        ({"bf16": False, "pure_bf16": True}, "bf16", True, ""),
        ({"bf16": "false", "pure_bf16": "true"}, "bf16", True, ""),
        ({"bf16": False, "pure_bf16": False, "bf16_full": True}, "bf16", True, ""),
        ({"packing": True, "neat_packing": False}, "packing", True, ""),
        ({"packing": False, "neat_packing": True}, "packing", True, ""),
        ({"packing": None, "neat_packing": False}, "packing", None, ""),
        ({"eval_strategy": "no", "evaluation_strategy": "steps"}, "eval_strategy", "no", "e"),
        (
            {"gradient_checkpointing": True, "disable_gradient_checkpointing": True},
            "gradient_checkpointing",
            True,
            "disable_gradient_checkpointing",
        ),
        ({"cpu_infer": 2, "kt_num_threads": 3}, "cpu_infer", 2, "kt_num_threads"),
        ({"expert_format": "int4", "kt_backend": "AMXInt8"}, "expert_format", "int4", "kt_backend"),
        ({"kt_backend": "AMXInt4", "kt_optimize_rule": RULED}, "expert_format", "int4", "kt_opt"),
        ({"kt_backend": "auto", "kt_optimize_rule": RULED}, "expert_format", "int8", ""),
        (
            {"kt_expert_weight_format": "int8", "kt_backend": "AMXInt4"},
            "expert_format",
            "int8",
            "kt_backend",
        ),
    ],
)
def test_keys_that_set_the_same_have_one_precedence(
    keys, field, wanted, unheeded, tmp_path, monkeypatch
):
    """Whatever their order; a key that is passed over is told. What is true in one of
    LLaMA-Factory's two keys is true, and steps go before their share, as in transformers.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / RULED).write_text(RULE)
    for order in (keys, dict(reversed(keys.items()))):
        recipe = make_recipe({**LEAST, **order})
        assert recipe.flatten()[field] == wanted
        passed = [note for note in recipe.notes if "goes before it" in note]
        assert [note.startswith(unheeded) for note in passed] == [True] * bool(unheeded)


@each(
    ("lines", "word", "field", "wanted"),
    [
        ("pure_bf16: true", "bf16=false", "bf16", False),
        ("bf16: false", "pure_bf16=true", "bf16", True),
        ("neat_packing: true", "packing=false", "packing", False),
        ("warmup_steps: 7", "warmup_ratio=0.1", "warmup_steps", 0.1),
        ("warmup_ratio: 0.1", "warmup_steps=0", "warmup_steps", 0),
        ("warmup_ratio: 0.1", "warmup_ratio=null", "warmup_steps", 0),
        ("kt_config: {kt_backend: AMXInt8}", "kt_backend=AMXInt4", "expert_format", "int4"),
        ("kt_config: {kt_backend: AMXInt8}", "expert_format=bf16", "expert_format", "bf16"),
        ("expert_format: int4", "kt_backend=AMXInt8", "expert_format", "int8"),
        ("fp16: true", "fp16=false", "bf16", False),
        ("disable_gradient_checkpointing: true", f"{CHECKPOINTS}=true", CHECKPOINTS, True),
    ],
)
def test_a_word_goes_before_all_keys_of_the_file_that_set_the_same(
    lines, word, field, wanted, tmp_path
):
    """Under whatever name the file has them."""
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model_name_or_path: demo\noutput_dir: out\n{lines}\n")
    recipe = read_recipe(path, [word])
    assert recipe.flatten()[field] == wanted


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

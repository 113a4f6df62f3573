"""Recipes: the tutorial's runs unchanged, and what is wrong in one is named."""

import pytest

from tandem.core.errors import ConfigError, NotFoundError, UnsupportedError
from tandem.finetune.recipe import make_recipe, read_recipe

TUTORIAL = """\
### model
model_name_or_path: opensourcerelease/DeepSeek-V3-bf16
trust_remote_code: true
### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
### dataset
dataset: identity
template: deepseek
cutoff_len: 2048
max_samples: 100000
overwrite_cache: true
preprocessing_num_workers: 16
dataloader_num_workers: 4
### output
output_dir: saves/Kllama_deepseekV3
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none # choices: [none, wandb, tensorboard, swanlab, mlflow]
### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
### ktransformers
use_kt: true # use KTransformers as LoRA sft backend
kt_optimize_rule: rule.yaml
cpu_infer: 32
chunk_size: 8192
"""
RULE = r"""
- match:
    name: "^model\\.layers\\.([0-9]|[12][0-9])\\.mlp\\.experts$"
  replace:
    class: ktransformers.operators.experts.KTransformersExperts
    kwargs:
      prefill_device: "cuda:0"
      prefill_op: "KExpertsTorch"
      generate_device: "cpu"
      generate_op: "KSFTExpertsCPU"
      out_device: "cuda:0"
      backend: "AMXInt8"
  recursive: False
"""
LEAST = {"model_name_or_path": "demo", "output_dir": "out"}


def test_the_tutorials_recipe(tmp_path, monkeypatch):
    """All its keys are obeyed, or noted as having no effect; overrides go before the file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(TUTORIAL)
    (tmp_path / "rule.yaml").write_text(RULE)
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
        ({"stage": "dpo"}, UnsupportedError, "use sft"),
        ({"finetuning_type": "full"}, UnsupportedError, "use lora"),
        ({"quantization_bit": 4}, UnsupportedError, "expert_format"),
        ({"fp16": True}, UnsupportedError, "bf16"),
        ({"kt_backend": "AMXInt3"}, ConfigError, "amxint4"),
        ({"kt_config": 3}, ConfigError, "mapping"),
        ({"kt_optimize_rule": "absent.yaml"}, NotFoundError, "expert_format"),
        ({"warmup_ratio": 1.5}, ConfigError, "warmup_ratio"),
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
    """A list, broken YAML and a missing file."""
    path = tmp_path / "r.yaml"
    with pytest.raises(NotFoundError):
        read_recipe(path)
    for text in ("- a\n", "a: [\n"):
        path.write_text(text)
        with pytest.raises(ConfigError):
            read_recipe(path)
    path.write_text("model_name_or_path: demo\n")
    with pytest.raises(ConfigError, match="key=value"):
        read_recipe(path, ["output_dir"])

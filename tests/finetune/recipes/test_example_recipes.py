"""Goal: the outcome of each example recipe of LLaMA-Factory is known, and told by name.

Method: the keys that decide it, of each training recipe below ``examples`` in release 0.9.5, go
through the reader with the keys that nearly all have. Those that need a CPU and LoRA alone are
accepted; the others are refused by the first key that cannot be obeyed. The page of outcomes is
made of the same table.
"""

from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import UnsupportedError
from tandem.finetune.data.named_templates import LATER_NAMES, NAMED_TEXTS
from tandem.finetune.recipes.recipe import make_recipe
from tandem.models.planning.quantization import read_quantization

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "example_recipes.md"
COMMON: dict[str, Any] = {
    "model_name_or_path": "some/model",
    "trust_remote_code": True,
    "do_train": True,
    "lora_rank": 8,
    "lora_target": "all",
    "dataset": "identity,alpaca_en_demo",
    "cutoff_len": 2048,
    "max_samples": 1000,
    "overwrite_cache": True,
    "preprocessing_num_workers": 16,
    "dataloader_num_workers": 4,
    "output_dir": "saves",
    "logging_steps": 10,
    "save_steps": 500,
    "plot_loss": True,
    "overwrite_output_dir": True,
    "save_only_model": False,
    "report_to": "none",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1.0e-4,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "ddp_timeout": 180000000,
    "resume_from_checkpoint": None,
}
"""Of nearly all recipes, which none is refused for."""
REASONS = {
    "finetuning_type": "use lora",
    "stage": "use sft, dpo or pt",
    "template": "the checkpoint's own",
    "image_max_pixels": "models here read text only",
    "quantization_bit": "use expert_format: int8 and linear_format: int8",
    "deepspeed": "use gradient_accumulation_steps",
    "ray_num_workers": "use gradient_accumulation_steps",
    "tokenized_path": "prepared data is not kept",
    "pissa_init": "PiSSA changes the frozen weights",
    "do_predict": "`tandem eval --adapter`",
    "model": "use model_name_or_path",
}
"""By key: what a refusal says."""
RECIPES: dict[str, tuple[dict[str, Any], str | None]] = {
    "ascend/qwen3_5_full_sft_fsdp2": (
        {
            "use_v1_kernels": True,
            "flash_attn": "fa2",
            "finetuning_type": "full",
            "template": "qwen3_5_nothink",
        },
        "finetuning_type",
    ),
    "ascend/qwen3_full_sft_fsdp2": (
        {
            "use_v1_kernels": True,
            "flash_attn": "fa2",
            "finetuning_type": "full",
            "template": "qwen3",
        },
        "finetuning_type",
    ),
    "ascend/qwen3moe_full_sft_fsdp": (
        {
            "use_v1_kernels": True,
            "flash_attn": "fa2",
            "finetuning_type": "full",
            "disable_gradient_checkpointing": False,
            "template": "qwen3",
        },
        "finetuning_type",
    ),
    "ascend/qwen3vlmoe_full_sft_fsdp2": (
        {
            "image_max_pixels": 262144,
            "use_v1_kernels": True,
            "flash_attn": "fa2",
            "finetuning_type": "full",
            "disable_gradient_checkpointing": False,
            "template": "qwen3_vl",
        },
        "image_max_pixels",
    ),
    "ascend/qwen3vlmoe_lora_sft_fsdp": (
        {
            "image_max_pixels": 262144,
            "use_v1_kernels": True,
            "disable_gradient_checkpointing": False,
            "flash_attn": "disabled",
            "template": "qwen3_vl",
        },
        "image_max_pixels",
    ),
    "extras/adam_mini/qwen2_full_sft": (
        {"finetuning_type": "full", "use_adam_mini": True, "template": "qwen"},
        "finetuning_type",
    ),
    "extras/apollo/llama3_full_sft": (
        {"finetuning_type": "full", "use_apollo": True, "template": "llama3", "pure_bf16": True},
        "finetuning_type",
    ),
    "extras/asft/llama2_full_asft": (
        {
            "finetuning_type": "full",
            "deepspeed": "examples/deepspeed/ds_z0_config.json",
            "use_asft_loss": True,
            "template": "llama2",
        },
        "finetuning_type",
    ),
    "extras/asft/qwen2_full_asft": (
        {
            "finetuning_type": "full",
            "deepspeed": "examples/deepspeed/ds_z0_config.json",
            "use_asft_loss": True,
            "template": "qwen",
        },
        "finetuning_type",
    ),
    "extras/badam/llama3_full_sft": (
        {"finetuning_type": "full", "use_badam": True, "template": "llama3"},
        "finetuning_type",
    ),
    "extras/dft/qwen2_full_sft": (
        {"finetuning_type": "full", "use_dft_loss": True, "template": "qwen"},
        "finetuning_type",
    ),
    "extras/eaft/qwen25_05b_eaft_full": (
        {"finetuning_type": "full", "use_eaft_loss": True, "template": "qwen"},
        "finetuning_type",
    ),
    "extras/fp8/llama3_fp8_deepspeed_sft": (
        {
            "finetuning_type": "full",
            "template": "llama3",
            "fp8": True,
            "deepspeed": "examples/deepspeed/ds_z3_fp8_config.json",
        },
        "finetuning_type",
    ),
    "extras/fp8/llama3_fp8_fsdp_sft": (
        {"finetuning_type": "full", "template": "llama3", "fp8": True},
        "finetuning_type",
    ),
    "extras/fsdp_qlora/llama3_lora_sft": (
        {"quantization_bit": 4, "template": "llama3"},
        "quantization_bit",
    ),
    "extras/galore/llama3_full_sft": (
        {"finetuning_type": "full", "use_galore": True, "template": "llama3", "pure_bf16": True},
        "finetuning_type",
    ),
    "extras/llama_pro/llama3_freeze_sft": (
        {
            "finetuning_type": "freeze",
            "freeze_trainable_layers": 8,
            "use_llama_pro": True,
            "template": "llama3",
        },
        "finetuning_type",
    ),
    "extras/loraplus/llama3_lora_sft": ({"loraplus_lr_ratio": 16.0, "template": "llama3"}, None),
    "extras/mod/llama3_full_sft": (
        {
            "finetuning_type": "full",
            "mixture_of_depths": "convert",
            "template": "llama3",
            "optim": "paged_adamw_8bit",
            "pure_bf16": True,
        },
        "finetuning_type",
    ),
    "extras/muon/qwen2_full_sft": (
        {"finetuning_type": "full", "use_muon": True, "template": "qwen"},
        "finetuning_type",
    ),
    "extras/nlg_eval/llama3_lora_predict": (
        {"do_predict": True, "template": "llama3"},
        "do_predict",
    ),
    "extras/oft/llama3_oft_sft": (
        {"finetuning_type": "oft", "template": "llama3"},
        "finetuning_type",
    ),
    "extras/oft/qwen2_5vl_oft_sft": (
        {"image_max_pixels": 262144, "finetuning_type": "oft", "template": "qwen2_vl"},
        "image_max_pixels",
    ),
    "extras/pissa/llama3_lora_sft": ({"pissa_init": True, "template": "llama3"}, "pissa_init"),
    "extras/qoft/llama3_oft_sft_awq": (
        {"finetuning_type": "oft", "template": "llama3"},
        "finetuning_type",
    ),
    "extras/qoft/llama3_oft_sft_bnb_npu": (
        {
            "quantization_bit": 4,
            "quantization_method": "bnb",
            "finetuning_type": "oft",
            "template": "llama3",
        },
        "quantization_bit",
    ),
    "extras/qoft/llama3_oft_sft_gptq": (
        {"finetuning_type": "oft", "template": "llama3"},
        "finetuning_type",
    ),
    "ktransformers/train_lora/deepseek_v2_lora_sft_kt": (
        {"template": "deepseek", "use_kt": True},
        None,
    ),
    "ktransformers/train_lora/deepseek_v3_lora_sft_kt": (
        {"template": "deepseek3", "use_kt": True},
        None,
    ),
    "ktransformers/train_lora/qwen3_5moe_lora_sft_kt": (
        {"template": "qwen3_5", "use_kt": True},
        "template",
    ),
    "ktransformers/train_lora/qwen3moe_lora_sft_kt": ({"template": "qwen3", "use_kt": True}, None),
    "megatron/qwen2_vl_full": (
        {"image_max_pixels": 262144, "finetuning_type": "full", "template": "qwen2_vl"},
        "image_max_pixels",
    ),
    "megatron/qwen3_moe_full": (
        {"finetuning_type": "full", "template": "qwen3_nothink"},
        "finetuning_type",
    ),
    "train_full/qwen3_full_sft": (
        {
            "finetuning_type": "full",
            "deepspeed": "examples/deepspeed/ds_z3_config.json",
            "template": "qwen3_nothink",
        },
        "finetuning_type",
    ),
    "train_full/qwen3vl_full_sft": (
        {
            "image_max_pixels": 262144,
            "finetuning_type": "full",
            "freeze_vision_tower": True,
            "deepspeed": "examples/deepspeed/ds_z3_config.json",
            "template": "qwen3_vl_nothink",
        },
        "image_max_pixels",
    ),
    "train_lora/qwen3_lora_dpo": (
        {"stage": "dpo", "pref_beta": 0.1, "pref_loss": "sigmoid", "template": "qwen3_nothink"},
        None,
    ),
    "train_lora/qwen3_lora_kto": (
        {"stage": "kto", "pref_beta": 0.1, "template": "qwen3_nothink"},
        "stage",
    ),
    "train_lora/qwen3_lora_pretrain": ({"stage": "pt"}, None),
    "train_lora/qwen3_lora_reward": ({"stage": "rm", "template": "qwen3_nothink"}, "stage"),
    "train_lora/qwen3_lora_sft": ({"template": "qwen3_nothink"}, None),
    "train_lora/qwen3_lora_sft_ds3": (
        {"deepspeed": "examples/deepspeed/ds_z3_config.json", "template": "qwen3_nothink"},
        "deepspeed",
    ),
    "train_lora/qwen3_lora_sft_ray": (
        {"template": "qwen3_nothink", "ray_num_workers": 4},
        "ray_num_workers",
    ),
    "train_lora/qwen3_preprocess": (
        {"template": "qwen3_nothink", "tokenized_path": "saves/qwen3-4b/dataset/sft"},
        "tokenized_path",
    ),
    "train_lora/qwen3vl_lora_dpo": (
        {
            "image_max_pixels": 262144,
            "stage": "dpo",
            "pref_beta": 0.1,
            "pref_loss": "sigmoid",
            "template": "qwen3_vl_nothink",
        },
        "image_max_pixels",
    ),
    "train_lora/qwen3vl_lora_sft": (
        {"image_max_pixels": 262144, "template": "qwen3_vl_nothink"},
        "image_max_pixels",
    ),
    "train_qlora/llama3_lora_sft_aqlm": ({"template": "llama3"}, None),
    "train_qlora/llama3_lora_sft_awq": ({"template": "llama3"}, None),
    "train_qlora/llama3_lora_sft_gptq": ({"template": "llama3"}, None),
    "train_qlora/qwen3_lora_sft_bnb_npu": (
        {"quantization_bit": 4, "quantization_method": "bnb", "template": "qwen3_nothink"},
        "quantization_bit",
    ),
    "train_qlora/qwen3_lora_sft_otfq": (
        {"quantization_bit": 4, "quantization_method": "bnb", "template": "qwen3_nothink"},
        "quantization_bit",
    ),
    "v1/train_batching_strategy/train_full_fsdp2_batching_normal": (
        {"model": "Qwen/Qwen3-0.6B"},
        "model",
    ),
    "v1/train_batching_strategy/train_full_fsdp2_dynamic_batching": (
        {"model": "Qwen/Qwen3-0.6B"},
        "model",
    ),
    "v1/train_batching_strategy/train_full_fsdp2_dynamic_padding_free": (
        {"model": "Qwen/Qwen3-0.6B"},
        "model",
    ),
    "v1/train_batching_strategy/train_full_fsdp2_padding_free": (
        {"model": "Qwen/Qwen3-0.6B"},
        "model",
    ),
    "v1/train_freeze/train_freeze_sft": ({"model": "Qwen/Qwen3-4B"}, "model"),
    "v1/train_full/train_full_deepspeed": ({"model": "Qwen/Qwen3-0.6B"}, "model"),
    "v1/train_full/train_full_fsdp2": ({"model": "Qwen/Qwen3-0.6B"}, "model"),
    "v1/train_full/train_full_liger_kernel": ({"model": "Qwen/Qwen3-0.6B"}, "model"),
    "v1/train_full/train_full_ulysses_cp": ({"model": "Qwen/Qwen3-0.6B"}, "model"),
    "v1/train_lora/export_lora": ({"model": "Qwen/Qwen3-4B"}, "model"),
    "v1/train_lora/train_lora_sft": ({"model": "Qwen/Qwen3-4B"}, "model"),
    "v1/train_lora/train_lora_sft_rank0": ({"model": "Qwen/Qwen3-4B"}, "model"),
    "v1/train_qlora/quantization": ({"model": "Qwen/Qwen3-0.6B"}, "model"),
}
"""By path: the keys that decide, and the one that is refused; None for those that are accepted."""


def _find_refusal(values: dict[str, Any]) -> tuple[str, str] | None:
    """Return (key, text) of a refusal."""
    try:
        recipe = make_recipe({**values, **{k: v for k, v in COMMON.items() if k not in values}})
    except UnsupportedError as error:
        return error.field or "", str(error)
    template = recipe.data.template
    if template in LATER_NAMES:
        return "template", "LLaMA-Factory's text is not here, leave it out for the checkpoint's own"
    assert template is None or template in NAMED_TEXTS
    return None


@pytest.mark.parametrize("path", RECIPES)
def test_the_outcome_of_a_recipe(path):
    """Accepted without a word, or refused by the key, with the reason and what to use."""
    values, refused = RECIPES[path]
    found = _find_refusal(values)
    if refused is None:
        assert found is None
    else:
        assert found is not None
        assert found[0] == refused
        assert REASONS[refused] in found[1]


def test_the_page_tells_each_outcome():
    """One row for each recipe, and no others."""
    text = PAGE.read_text(encoding="utf-8")
    rows = dict(
        (cell.strip() for cell in line.strip("|").split("|")[:2])
        for line in text.splitlines()
        if line.startswith("| `")
    )
    wanted = {
        f"`{path}`": "accepted" if key is None else f"refused: `{key}`"
        for path, (_, key) in RECIPES.items()
    }
    assert rows == wanted


def test_quantized_checkpoints_of_accepted_recipes():
    """The recipe says nothing of them: GPTQ and AWQ are read, AQLM is refused when it is opened."""
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    for config in (gptq, {**awq, "version": "gemm"}):
        assert read_quantization({"quantization_config": config}) is not None
    with pytest.raises(UnsupportedError, match="use another checkpoint of the model"):
        read_quantization({"quantization_config": {"quant_method": "aqlm"}})

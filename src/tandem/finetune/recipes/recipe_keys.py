"""Keys of LLaMA-Factory's recipes that have another name in Tandem, no effect, or are refused.

Recipes of the KTransformers tutorials and of today's LLaMA-Factory run unchanged. A key that would
change the result, and that Tandem cannot follow, is refused with the reason and the nearest key
that works.
"""

import difflib
import math
from pathlib import Path
from typing import Any

import yaml

from tandem.core.config import parse_yaml
from tandem.core.errors import ConfigError, NotFoundError, UnsupportedError

__all__ = ["IGNORED", "REFUSED", "translate_keys"]

WHERE = "finetune.read_recipe"

IGNORED = {
    "trust_remote_code": "no code of a checkpoint is ever run",
    "use_kt": "frozen experts always run on our kernels; expert_format: none turns them off",
    "chunk_size": "the kernels take a batch of any size",
    "overwrite_cache": "prepared data is not cached",
    "preprocessing_num_workers": "data is prepared in one process",
    "ddp_timeout": "there is one process",
    "use_v1_kernels": "there are no others than our own",
    "flash_attn": "attention is torch's scaled_dot_product_attention",
    "kt_threadpool_count": "the thread pool follows the NUMA nodes of the machine",
    "kt_tp_enabled": "the thread pool follows the NUMA nodes of the machine",
    "kt_max_cache_depth": "gate and up of experts are kept in bf16 for the backward pass",
    "kt_share_backward_bb": "the backward pass reads the forward pass's packed weights",
    "kt_weight_lifecycle": "packed weights stay for the run",
    "kt_model_max_length": "cutoff_len bounds the length",
    "kt_cpu_activation": "gate and up of experts are kept in bf16 for the backward pass",
    "kt_weight_path": "weights are read from model_name_or_path",
    "kt_non_expert_weight_path": "weights are read from model_name_or_path",
    "infer_backend": "there is one",
    "logging_dir": "reporters choose their own folder",
    "enable_liger_kernel": "the loss is taken piece by piece anyhow",
    "streaming": "data is read as a whole",
    "do_train": "a recipe is trained; `tandem eval` measures",
    "do_eval": "what val_size or eval_dataset holds out is measured at the end",
}
"""Keys that have no effect on the result here, with the reason; ``Recipe.notes`` lists those that a
recipe has.
"""

REFUSED = {
    "model": (
        "recipes of LLaMA-Factory's v1 interface are not read",
        "model_name_or_path, with the keys of examples/train_lora",
    ),
    "quantization_bit": (
        "base weights are quantized by format",
        "expert_format: int8 and linear_format: int8",
    ),
    "quantization_method": (
        "base weights are quantized by format",
        "expert_format: int8 and linear_format: int8",
    ),
    "kt_use_lora_experts": (
        "no experts are added to the model's own",
        "lora_target: all,experts",
    ),
    "use_dora": ("DoRA needs the norms of unpacked weights", "lora_rank"),
    "pissa_init": ("PiSSA changes the frozen weights", "lora_rank"),
    "pissa_convert": ("PiSSA changes the frozen weights", "lora_rank"),
    "loraplus_lr_embedding": ("embeddings are not trained", "loraplus_lr_ratio"),
    "create_new_adapter": ("one adapter is trained", "adapter_name_or_path"),
    "additional_target": ("full copies of modules are not trained", "lora_target"),
    "use_unsloth": ("the model is transformers' own", "expert_format"),
    "fp16": ("float16 overflows without loss scaling", "bf16: true"),
    "ref_model": ("the reference is the model without its adapter", "model_name_or_path"),
    "ref_model_adapters": ("the reference is the model without its adapter", "stage: dpo"),
    "ref_model_quantization_bit": ("the reference shares the frozen weights", "expert_format"),
    "pref_bco_weight": ("losses of pairs are pref_loss's", "pref_loss: sigmoid"),
    "ld_alpha": ("tokens of an answer weigh alike", "pref_loss: ipo"),
    "simpo_gamma": ("SimPO has no reference", "pref_loss: sigmoid"),
    "kto_chosen_weight": ("KTO is not built", "stage: dpo"),
    "kto_rejected_weight": ("KTO is not built", "stage: dpo"),
    "predict_with_generate": ("training does not generate", "`tandem eval --adapter`"),
    "do_predict": ("training does not generate", "`tandem eval --adapter`"),
    "compute_accuracy": ("training does not measure answers", "`tandem eval --adapter`"),
    "freeze_trainable_layers": ("only LoRA is trained", "finetuning_type: lora"),
    "deepspeed": ("there is one process", "gradient_accumulation_steps"),
    "image_max_pixels": ("models here read text only", "dataset"),
    "video_max_pixels": ("models here read text only", "dataset"),
    "freeze_vision_tower": ("models here read text only", "lora_target"),
    "freeze_multi_modal_projector": ("models here read text only", "lora_target"),
    "freeze_language_model": ("models here read text only", "lora_target"),
    "ray_num_workers": ("there is one process", "gradient_accumulation_steps"),
    "tokenized_path": ("prepared data is not kept", "dataset"),
    "use_galore": ("the optimizer is AdamW", "learning_rate"),
    "use_apollo": ("the optimizer is AdamW", "learning_rate"),
    "use_badam": ("the optimizer is AdamW", "learning_rate"),
    "use_adam_mini": ("the optimizer is AdamW", "learning_rate"),
    "use_muon": ("the optimizer is AdamW", "learning_rate"),
    "use_llama_pro": ("no layers are added", "lora_target"),
    "mixture_of_depths": ("all tokens go through all layers", "lora_target"),
    "use_dft_loss": ("the loss is the plain one", "stage: sft"),
    "use_asft_loss": ("the loss is the plain one", "stage: sft"),
    "use_eaft_loss": ("the loss is the plain one", "stage: sft"),
    "fp8": ("frozen weights are packed by format", "expert_format: fp8"),
    "rope_scaling": ("RoPE is the checkpoint's", "cutoff_len"),
}
"""Keys that are refused because they would change the result: (reason, what to use instead). A key
whose value means "off", such as false or null, is ignored.
"""

PREFERENCE_LOSSES = ("sigmoid", "hinge", "ipo")
"""Supported losses of stage dpo: those of LLaMA-Factory that compare the model with a reference.

orpo and simpo have no reference, and trl no longer has kto_pair.
"""

_KT_FORMATS = {
    "amxbf16": "bf16",
    "bf16": "bf16",
    "llamafile": "bf16",
    "auto": "auto",
    "amxint8": "int8",
    "int8": "int8",
    "amxint4": "int4",
    "int4": "int4",
    "fp8": "fp8",
    "amxfp8": "fp8",
}
"""Our weight format for each name of a backend or expert format of KTransformers."""


def translate_keys(
    values: dict[str, Any], known: frozenset[str]
) -> tuple[dict[str, Any], list[str]]:
    """Translate a recipe's keys; return the values under names in ``known``, and notes about keys
    without effect.

    Raises: the errors of ``recipe.read_recipe``.
    """
    out: dict[str, Any] = {}
    notes: list[str] = []
    for key, value in _unnest(values).items():
        if key in known:
            _check_choice(key, value)
            # A key with the value null keeps the setting's default.
            if value is not None:
                out[key] = _join(value)
        elif key == "do_train" and value is False:
            what = "do_train: false: there is nothing else to do: use `tandem eval`"
            raise UnsupportedError(WHERE, what, field=key)
        elif key in IGNORED:
            notes.append(f"{key}: no effect here, {IGNORED[key]}")
        elif key in REFUSED:
            if value not in (None, False, "no", "none", 0):
                why, instead = REFUSED[key]
                raise UnsupportedError(WHERE, f"{key}: {why}: use {instead}", field=key)
        else:
            _translate(key, value, out, notes, known)
    return out, notes


def _join(value: Any) -> Any:
    """Return a list in a recipe as a text with commas; any other value unchanged."""
    if isinstance(value, list):
        return ",".join(str(item) for item in value)
    return value


def _unnest(values: dict[str, Any]) -> dict[str, Any]:
    nested = values.get("kt_config")
    if nested is None:
        return {k: v for k, v in values.items() if k != "kt_config"}
    if not isinstance(nested, dict):
        raise ConfigError(
            WHERE, "kt_config is not a mapping: write its keys below it", field="kt_config"
        )
    return {**{k: v for k, v in values.items() if k != "kt_config"}, **nested}


def _check_choice(key: str, value: Any) -> None:
    if key == "stage" and value not in ("sft", "dpo", "pt", None):
        what = f"stage {value!r} is not built: use sft, dpo or pt"
    elif key == "pref_loss" and value not in (*PREFERENCE_LOSSES, None):
        what = f"pref_loss {value!r} is not built: use {', '.join(PREFERENCE_LOSSES)}"
    elif key == "finetuning_type" and value not in ("lora", None):
        what = f"finetuning_type {value!r} would change frozen weights: use lora"
    else:
        return
    raise UnsupportedError(WHERE, what, field=key)


def _translate(
    key: str, value: Any, out: dict[str, Any], notes: list[str], known: frozenset[str]
) -> None:
    """Translate a key that has another name or value here, and set its values in ``out``.

    Raises: ConfigError (an unknown key, a wrong value); UnsupportedError (a value that Tandem does
        not offer); NotFoundError (a rule file that it names).
    """
    if value is None:
        return
    if key == "warmup_ratio":
        # transformers 5 has no warmup_ratio: a warmup_steps below 1 is a share of all steps.
        try:
            ratio = float(value)
        except (TypeError, ValueError):
            ratio = math.nan
        if not 0 <= ratio < 1:
            raise ConfigError(WHERE, f"warmup_ratio {value!r}: give 0 to 1", field=key)
        if ratio > 0:
            out["warmup_steps"] = ratio
    elif key == "evaluation_strategy":
        out["eval_strategy"] = value
    elif key == "disable_gradient_checkpointing":
        out["gradient_checkpointing"] = not value
    elif key in ("pure_bf16", "bf16_full"):
        out["bf16"] = bool(value)
    elif key in ("kt_backend", "kt_expert_weight_format"):
        _set_format(out, key, str(value))
    elif key == "kt_num_threads":
        out["cpu_infer"] = value
    elif key == "kt_optimize_rule":
        _read_rule(Path(str(value)), out, notes)
    elif key == "neat_packing":
        # Packed examples never attend to each other here, which is what neat_packing asks for: so
        # it means packing.
        if value:
            out["packing"] = True
    elif key == "optim":
        if value not in ("adamw_torch", "adamw_hf"):
            raise UnsupportedError(WHERE, f"optim {value!r}: use adamw_torch", field=key)
    elif key == "mix_strategy":
        if value != "concat":
            raise UnsupportedError(WHERE, f"{key} {value!r}: use concat", field=key)
    else:
        close = difflib.get_close_matches(key, [*known, *IGNORED], n=1)
        hint = f": did you mean {close[0]}?" if close else ": remove it"
        raise ConfigError(WHERE, f"unknown key {key!r}{hint}", field=key)


def _set_format(out: dict[str, Any], key: str, name: str) -> None:
    found = _KT_FORMATS.get(name.lower())
    if found is None:
        known = ", ".join(sorted(_KT_FORMATS))
        raise ConfigError(WHERE, f"{key} {name!r}: choose one of {known}", field=key)
    if found != "auto":
        out["expert_format"] = found


def _read_rule(path: Path, out: dict[str, Any], notes: list[str]) -> None:
    """Set the experts' weight format in ``out`` by the backend in a KTransformers rule file.

    A note lists the devices that the file names and that are not used: all layers run on the CPU.

    Raises: NotFoundError (the file cannot be read); ConfigError (the file is not a list of rules).
    """
    key = "kt_optimize_rule"
    try:
        rules = parse_yaml(path.read_text("utf-8"))
    except OSError as error:
        what = (
            f"kt_optimize_rule {path}: {error}: copy the file there, or set expert_format instead"
        )
        raise NotFoundError(WHERE, what, field=key) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(WHERE, f"{path} is not YAML: {error}", field=key) from error
    if not isinstance(rules, list):
        raise ConfigError(WHERE, f"{path} is not a list of rules", field=key)
    devices: set[str] = set()
    for rule in rules:
        replace = rule.get("replace") if isinstance(rule, dict) else None
        kwargs = (replace.get("kwargs") if isinstance(replace, dict) else None) or {}
        if not isinstance(kwargs, dict):
            raise ConfigError(WHERE, f"{path}: kwargs of a rule is not a mapping", field=key)
        devices |= {str(v) for k, v in kwargs.items() if k.endswith("_device")}
        kind = str(replace.get("class", "")) if isinstance(replace, dict) else ""
        if "expert" in kind.lower() and kwargs.get("backend") is not None:
            _set_format(out, "backend", str(kwargs["backend"]))
    others = sorted(device for device in devices if device != "cpu")
    if others:
        notes.append(f"kt_optimize_rule: asks for {', '.join(others)}, all layers run on the CPU")

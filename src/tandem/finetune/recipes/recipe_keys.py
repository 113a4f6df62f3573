"""Keys of LLaMA-Factory's recipes that have another name in Tandem, no effect, or are refused.

Recipes of the KTransformers tutorials and of today's LLaMA-Factory run unchanged. A key that would
change the result, and that Tandem cannot follow, is refused with the reason and the nearest key
that works.
"""

import difflib
import math
from pathlib import Path
from typing import Any

import msgspec
import yaml

from tandem.core.config import parse_yaml
from tandem.core.errors import ConfigError, NotFoundError, UnsupportedError

__all__ = ["IGNORED", "REFUSED", "translate_keys"]

WHERE = "finetune.read_recipe"
ARGUMENTS = "lr_scheduler_kwargs"

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


_ALIASES = {
    "warmup_steps": ("warmup_ratio",),
    "eval_strategy": ("evaluation_strategy",),
    "gradient_checkpointing": ("disable_gradient_checkpointing",),
    "bf16": ("pure_bf16", "bf16_full"),
    "packing": ("neat_packing",),
    "cpu_infer": ("kt_num_threads",),
    "expert_format": ("kt_expert_weight_format", "kt_backend", "kt_optimize_rule"),
}
"""By key: other keys that set it. Of those that a recipe has, in whatever order, the key itself
goes before the others, and these go in the order of this table.
"""
_YIELDING = ("warmup_steps", "bf16", "packing")
"""Keys whose value 0 or false goes before no other key: in LLaMA-Factory each of two such keys has
its own default, and either one asks.
"""


def translate_keys(
    values: dict[str, Any], known: frozenset[str]
) -> tuple[dict[str, Any], list[str]]:
    """Translate a recipe's keys; return the values under names in ``known``, and notes about keys
    without effect. The order of the keys has no influence.

    Raises: the errors of ``recipe.read_recipe``.
    """
    out: dict[str, Any] = {}
    notes: list[str] = []
    values = _unnest(values)
    others = {alias for aliases in _ALIASES.values() for alias in aliases}
    for key, value in values.items():
        if key in known:
            _check_choice(key, value)
            # A key with the value null keeps the setting's default.
            if value is not None:
                out[key] = _read_arguments(value) if key == ARGUMENTS else _join(value)
        elif key == "do_train" and value is not None and not _read_flag(key, value):
            what = "do_train: false: there is nothing else to do: use `tandem eval`"
            raise UnsupportedError(WHERE, what, field=key)
        elif key in IGNORED:
            notes.append(f"{key}: no effect here, {IGNORED[key]}")
        elif key in REFUSED:
            if not _is_off(value):
                why, instead = REFUSED[key]
                raise UnsupportedError(WHERE, f"{key}: {why}: use {instead}", field=key)
        elif key not in others:
            _check_other(key, value, known)
    for key, aliases in _ALIASES.items():
        is_asked = key in out and not (key in _YIELDING and _is_off(out[key]))
        chosen = key if is_asked else ""
        for alias in aliases:
            value = values.get(alias)
            wish = None if value is None else _translate(alias, value, notes)
            if wish is None:
                continue
            if not chosen:
                out[key], chosen = wish, alias
            elif str(out[key]).lower() != str(wish).lower():
                notes.append(f"{alias}: no effect here, {chosen} goes before it")
    return out, notes


def _read_flag(key: str, value: Any) -> bool:
    """Return a key's true or false, which may be written as text or as 1 or 0.

    Raises: ConfigError (it is neither).
    """
    try:
        return msgspec.convert(value, bool, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(WHERE, f"{key} {value!r}: give true or false", field=key) from error


def _is_off(value: Any) -> bool:
    """Return True if a key's value asks for nothing."""
    if isinstance(value, str):
        return value.strip().lower() in ("", "no", "none", "null", "false", "off", "0", "0.0")
    return value in (None, False, 0)


def _join(value: Any) -> Any:
    """Return a list in a recipe as a text with commas; any other value unchanged."""
    if isinstance(value, list):
        return ",".join(str(item) for item in value)
    return value


def _read_arguments(value: Any) -> dict[str, Any]:
    """Return the arguments of a schedule, which may be written as JSON text.

    YAML 1.1 takes 1e-6 for a text: a text that is a number is read as one.

    Raises: ConfigError (it is no mapping).
    """
    try:
        mapping = parse_yaml(value) if isinstance(value, str) else value
    except yaml.YAMLError as error:
        what = f"{ARGUMENTS} {value!r} is neither YAML nor JSON: {error}"
        raise ConfigError(WHERE, what, field=ARGUMENTS) from error
    if not isinstance(mapping, dict):
        what = f"{ARGUMENTS} {value!r} is not a mapping: write its keys below it"
        raise ConfigError(WHERE, what, field=ARGUMENTS)
    return {str(key): _read_number(item) for key, item in mapping.items() if item is not None}


def _read_number(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return int(number) if number.is_integer() and value.strip("+-").isdigit() else number


def _unnest(values: dict[str, Any]) -> dict[str, Any]:
    nested = values.get("kt_config")
    if nested is None:
        return {k: v for k, v in values.items() if k != "kt_config"}
    if not isinstance(nested, dict):
        raise ConfigError(
            WHERE, "kt_config is not a mapping: write its keys below it", field="kt_config"
        )
    return {**nested, **{k: v for k, v in values.items() if k != "kt_config"}}


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


def _translate(alias: str, value: Any, notes: list[str]) -> Any:
    """Return the value that one of ``_ALIASES`` gives its key; None if it asks for nothing.

    Raises: ConfigError (a wrong value); NotFoundError (a rule file that it names).
    """
    if alias == "warmup_ratio":
        # transformers 5 has no warmup_ratio: a warmup_steps below 1 is a share of all steps.
        try:
            ratio = float(value)
        except (TypeError, ValueError):
            ratio = math.nan
        if not 0 <= ratio < 1:
            raise ConfigError(WHERE, f"warmup_ratio {value!r}: give 0 to 1", field=alias)
        return ratio or None
    if alias == "disable_gradient_checkpointing":
        return not _read_flag(alias, value)
    if alias in ("pure_bf16", "bf16_full", "neat_packing"):
        # Packed examples never attend to each other here, which is what neat_packing asks for: so
        # it means packing.
        return _read_flag(alias, value) or None
    if alias in ("kt_backend", "kt_expert_weight_format"):
        return _read_format(alias, str(value))
    if alias == "kt_optimize_rule":
        return _read_rule(Path(str(value)), notes)
    return value


def _check_other(key: str, value: Any, known: frozenset[str]) -> None:
    """Check a key of which Tandem has one value only, and no setting.

    Raises: ConfigError (an unknown key); UnsupportedError (another value).
    """
    only = {"optim": ("adamw_torch", "adamw_hf"), "mix_strategy": ("concat",)}.get(key)
    if only is None:
        names = [*known, *IGNORED, *(name for group in _ALIASES.values() for name in group)]
        close = difflib.get_close_matches(key, names, n=1)
        hint = f": did you mean {close[0]}?" if close else ": remove it"
        raise ConfigError(WHERE, f"unknown key {key!r}{hint}", field=key)
    if value is not None and value not in only:
        raise UnsupportedError(WHERE, f"{key} {value!r}: use {only[0]}", field=key)


def _read_format(key: str, name: str) -> str | None:
    found = _KT_FORMATS.get(name.lower())
    if found is None:
        known = ", ".join(sorted(_KT_FORMATS))
        raise ConfigError(WHERE, f"{key} {name!r}: choose one of {known}", field=key)
    return None if found == "auto" else found


def _read_rule(path: Path, notes: list[str]) -> str | None:
    """Return the experts' weight format by the backend in a KTransformers rule file; None if it
    names none.

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
    found: str | None = None
    for rule in rules:
        replace = rule.get("replace") if isinstance(rule, dict) else None
        kwargs = (replace.get("kwargs") if isinstance(replace, dict) else None) or {}
        if not isinstance(kwargs, dict):
            raise ConfigError(WHERE, f"{path}: kwargs of a rule is not a mapping", field=key)
        devices |= {str(v) for k, v in kwargs.items() if k.endswith("_device")}
        kind = str(replace.get("class", "")) if isinstance(replace, dict) else ""
        if "expert" in kind.lower() and kwargs.get("backend") is not None:
            found = _read_format("backend", str(kwargs["backend"])) or found
    others = sorted(device for device in devices if device != "cpu")
    if others:
        notes.append(f"kt_optimize_rule: asks for {', '.join(others)}, all layers run on the CPU")
    return found

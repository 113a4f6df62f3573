"""A fine-tuning recipe: the keys that Tandem reads, under LLaMA-Factory's names.

A recipe file is flat YAML. ``recipe_keys`` translates other names of keys and refuses those that
Tandem cannot follow. This module has the fields with their bounds, in the groups of LLaMA-Factory's
examples.
"""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from tandem.core.config import parse_yaml
from tandem.core.errors import ConfigError, NotFoundError
from tandem.finetune.recipes.recipe_keys import translate_keys

__all__ = [
    "DataKeys",
    "MethodKeys",
    "ModelKeys",
    "OutputKeys",
    "PreferenceKeys",
    "Recipe",
    "TrainKeys",
    "read_recipe",
]

MAX_RECIPE_BYTES = 1 << 20
"""Largest recipe file, in bytes."""
WHERE = "finetune.read_recipe"


class ModelKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model that is tuned, and the storage of its frozen weights."""

    model_name_or_path: Annotated[str, Meta(min_length=1, description="Folder, hub id, or `demo`.")]
    adapter_name_or_path: Annotated[
        str | None, Meta(description="Folder of an adapter to go on training; None is a new one.")
    ] = None
    expert_format: Annotated[
        str,
        Meta(
            description="Weight format of frozen routed experts: bf16, int8, int4, none (tensors), "
            "or stored (the codes of a GGUF file or quantized checkpoint as they are)."
        ),
    ] = "auto"
    linear_format: Annotated[
        str,
        Meta(
            description="Weight format of the other frozen matrices: as expert_format; none keeps "
            "tensors."
        ),
    ] = "none"
    cpu_infer: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None,
        Meta(description="Threads of the kernels; None = all cores."),
    ] = None


class MethodKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the adapter that is trained."""

    stage: Annotated[
        Literal["sft", "dpo", "pt"],
        Meta(description="sft = answers; dpo = pairs of answers; pt = plain texts."),
    ] = "sft"
    finetuning_type: Annotated[Literal["lora"], Meta(description="Adapters; nothing else.")] = (
        "lora"
    )
    lora_rank: Annotated[int, Meta(ge=1, le=1024, description="Rank of the adapters.")] = 8
    lora_alpha: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Scale times rank; None = twice the rank."),
    ] = None
    lora_dropout: Annotated[float, Meta(ge=0, lt=1, description="Of the adapters' input.")] = 0.0
    lora_target: Annotated[
        str,
        Meta(
            description="Names of linear modules, comma-separated; all = attention, shared experts "
            "and dense MLPs; experts = routed experts, as in `all,experts`."
        ),
    ] = "all"
    loraplus_lr_ratio: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Learning rate of B matrices over that of A (LoRA+); None = equal."),
    ] = None
    use_rslora: Annotated[bool, Meta(description="Scale by alpha / sqrt(rank).")] = False


class PreferenceKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of learning from pairs of answers; the reference is the model without its
    adapter.
    """

    pref_loss: Annotated[Literal["sigmoid", "hinge", "ipo"], Meta(description="Of stage dpo.")] = (
        "sigmoid"
    )
    pref_beta: Annotated[
        float, Meta(gt=0, description="How much leaving the reference costs (ipo: its tau).")
    ] = 0.1
    pref_ftx: Annotated[
        float,
        Meta(ge=0, description="Weight of the mean of the chosen answers' losses, which is added."),
    ] = 0.0
    dpo_label_smoothing: Annotated[
        float,
        Meta(ge=0, lt=0.5, description="Share of pairs taken to be the wrong way round; sigmoid."),
    ] = 0.0


class DataKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the data that is learned from."""

    dataset: Annotated[str, Meta(description="Names in dataset_info.json, comma-separated.")] = ""
    eval_dataset: Annotated[str, Meta(description="The same, for evaluation.")] = ""
    dataset_dir: Annotated[str, Meta(description="Folder of dataset_info.json.")] = "data"
    template: Annotated[
        str | None, Meta(description="LLaMA-Factory's template name; None = the checkpoint's.")
    ] = None
    enable_thinking: Annotated[
        bool,
        Meta(description="Answers without reasoning are learned with an empty one; false: none."),
    ] = True
    default_system: Annotated[
        str | None, Meta(description="System message of records that have none.")
    ] = None
    cutoff_len: Annotated[int, Meta(ge=2, description="Tokens of an example at most.")] = 2048
    max_samples: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Records of each dataset at most.")
    ] = None
    val_size: Annotated[
        float, Meta(ge=0, description="Records for validation: a count, or a share below 1.")
    ] = 0.0
    packing: Annotated[
        bool | None, Meta(description="Fill each row with several examples; None = stage pt alone.")
    ] = None
    train_on_prompt: Annotated[bool, Meta(description="Learn the prompts as well.")] = False
    mask_history: Annotated[bool, Meta(description="Learn the last answer only.")] = False
    dataloader_num_workers: Annotated[int, Meta(ge=0, description="Processes that collate.")] = 0


class OutputKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the files that a run writes: which, where and how often."""

    output_dir: Annotated[str, Meta(min_length=1, description="Folder of all results.")]
    logging_steps: Annotated[int, Meta(ge=1, description="Steps between log lines.")] = 10
    save_steps: Annotated[int, Meta(ge=1, description="Steps between checkpoints.")] = 500
    save_total_limit: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Checkpoints to keep; None = all.")
    ] = None
    save_only_model: Annotated[
        bool, Meta(description="Leave optimizer and random state out of checkpoints.")
    ] = False
    plot_loss: Annotated[bool, Meta(description="Draw training_loss.png.")] = False
    overwrite_output_dir: Annotated[
        bool, Meta(description="Train into a folder that holds results already.")
    ] = False
    report_to: Annotated[
        str, Meta(description="As transformers takes it; none for files only.")
    ] = "none"


class TrainKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the training loop; names and defaults are those of transformers'
    TrainingArguments.
    """

    per_device_train_batch_size: Annotated[int, Meta(ge=1)] = 8
    per_device_eval_batch_size: Annotated[int, Meta(ge=1)] = 8
    gradient_accumulation_steps: Annotated[int, Meta(ge=1)] = 1
    learning_rate: Annotated[float, Meta(gt=0)] = 5e-5
    num_train_epochs: Annotated[float, Meta(gt=0)] = 3.0
    max_steps: Annotated[
        int, Meta(description="Steps of the run; below 0: as many as num_train_epochs takes.")
    ] = -1
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: Annotated[
        dict[str, bool | int | float | str] | None,
        Meta(description="Arguments of the schedule, such as `{min_lr: 1.0e-6}`."),
    ] = None
    warmup_steps: Annotated[
        float, Meta(ge=0, description="Steps, or below 1 a share of all of them.")
    ] = 0
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    adam_beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.999
    adam_epsilon: Annotated[float, Meta(gt=0)] = 1e-8
    max_grad_norm: Annotated[float, Meta(ge=0)] = 1.0
    gradient_checkpointing: bool = False
    bf16: Annotated[bool, Meta(description="Frozen tensors and activations in bf16.")] = False
    seed: Annotated[int, Meta(ge=0, lt=2**32)] = 42
    eval_strategy: Literal["no", "steps", "epoch"] = "no"
    eval_steps: Annotated[int, Meta(ge=1)] | None = None
    resume_from_checkpoint: Annotated[
        str | bool | None, Meta(description="A checkpoint folder; true = the last one.")
    ] = None


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """All settings (keys) of a training run, by group; ``notes`` say which keys have no effect
    here, and why.
    """

    model: ModelKeys
    method: MethodKeys
    preference: PreferenceKeys
    data: DataKeys
    output: OutputKeys
    train: TrainKeys
    notes: tuple[str, ...] = ()

    @property
    def is_packed(self) -> bool:
        """True if a training row is packed with several examples; as in LLaMA-Factory, plain texts
        are by default.
        """
        packing = self.data.packing
        return self.method.stage == "pt" if packing is None else packing

    def flatten(self) -> dict[str, Any]:
        """Return all keys and values as one flat mapping, as a recipe file has them."""
        flat: dict[str, Any] = {}
        for name in _GROUPS:
            flat.update(msgspec.to_builtins(getattr(self, name)))
        return flat


_GROUPS: dict[str, Any] = {
    "model": ModelKeys,
    "method": MethodKeys,
    "preference": PreferenceKeys,
    "data": DataKeys,
    "output": OutputKeys,
    "train": TrainKeys,
}


def read_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe file, and replace or add keys.

    Args:
        path: a YAML file with one mapping.
        overrides: ``key=value`` words with values in YAML. Each replaces or adds a key, and goes
            before all keys of the file that would set the same.

    Raises:
        NotFoundError: no such file, or a rule file that it names is missing.
        ConfigError: not a mapping, an unknown key, or a value out of bounds; ``field`` names the
            key.
        UnsupportedError: a key asks for something that Tandem does not do; the text names an
            alternative.
    """
    values, later = _read_yaml(Path(path)), dict[str, Any]()
    for word in overrides or []:
        key, sign, text = word.partition("=")
        if not sign or not key:
            raise ConfigError(WHERE, f"{word!r}: write key=value", field=key or None)
        try:
            later[key] = parse_yaml(text)
        except yaml.YAMLError as error:
            raise ConfigError(WHERE, f"{word!r} is not YAML: {error}", field=key) from error
    return make_recipe(values, later)


def make_recipe(values: dict[str, Any], overrides: dict[str, Any] | None = None) -> Recipe:
    """Return the recipe of a flat mapping of keys to values, with those of ``overrides`` before
    them.

    Raises: the errors of ``read_recipe``.
    """
    known = {f.name: group for group, kind in _GROUPS.items() for f in msgspec.structs.fields(kind)}
    later = overrides or {}
    kept = {key: value for key, value in values.items() if key not in later}
    translated, notes = translate_keys(kept, frozenset(known))
    replaced, more_notes = translate_keys(later, frozenset(known))
    translated, notes = {**translated, **replaced}, [*notes, *more_notes]
    parts: dict[str, dict[str, Any]] = {group: {} for group in _GROUPS}
    for key, value in translated.items():
        parts[known[key]][key] = value
    built: dict[str, Any] = {}
    for group, kind in _GROUPS.items():
        try:
            built[group] = msgspec.convert(parts[group], kind, strict=False)
        except msgspec.ValidationError as error:
            text = str(error)
            field = text.rpartition("$.")[2].rstrip("`") if "$." in text else None
            raise ConfigError(WHERE, f"{text}: correct the recipe", field=field) from error
        _check_values(built[group])
    if built["train"].max_steps == 0:
        what = "max_steps 0: nothing would be trained: give the steps, or -1 for num_train_epochs"
        raise ConfigError(WHERE, what, field="max_steps")
    recipe = Recipe(**built, notes=tuple(notes))
    if recipe.method.stage == "pt":
        _check_texts(recipe)
    return _check_preferences(recipe) if recipe.method.stage == "dpo" else recipe


def _check_values(keys: msgspec.Struct) -> None:
    """Refuse values that the fields' bounds allow: infinite numbers, and text that UTF-8 cannot
    encode or that has a zero character.

    Raises: ConfigError (there is one; ``field`` names its key).
    """
    for key, value in msgspec.structs.asdict(keys).items():
        if isinstance(value, float) and math.isinf(value):
            raise ConfigError(WHERE, f"{key} is {value}: give a finite number", field=key)
        if isinstance(value, str) and any(
            sign == "\0" or "\ud800" <= sign <= "\udfff" for sign in value
        ):
            # YAML reads JSON's \uD83D\uDE00 as two characters, each one half of a surrogate pair,
            # and not as one emoji. No name of a file or a template has a zero character.
            what = f"{key} is not Unicode text: write the characters themselves"
            raise ConfigError(WHERE, what, field=key)


def _check_texts(recipe: Recipe) -> None:
    """Refuse keys that have no meaning for plain texts (stage pt).

    Raises: ConfigError (one is set; ``field`` names it).
    """
    data = recipe.data
    for key, is_set in (
        ("template", data.template is not None),
        ("default_system", data.default_system is not None),
        ("mask_history", data.mask_history),
    ):
        if is_set:
            what = f"{key} with stage pt: a plain text has no turns: remove it"
            raise ConfigError(WHERE, what, field=key)


def _check_preferences(recipe: Recipe) -> Recipe:
    """Refuse keys that have no meaning for pairs of answers (stage dpo).

    Returns: the recipe, with notes about keys that have no effect on pairs.

    Raises: ConfigError (one is set; ``field`` names it).
    """
    for key, why in (
        ("packing", "rows of pairs are not packed"),
        ("train_on_prompt", "a pair has one prompt, which both answers share"),
    ):
        if getattr(recipe.data, key):
            raise ConfigError(WHERE, f"{key} with stage dpo: {why}: remove it", field=key)
    preference = recipe.preference
    if preference.dpo_label_smoothing and preference.pref_loss != "sigmoid":
        what = f"dpo_label_smoothing with pref_loss {preference.pref_loss}: use sigmoid"
        raise ConfigError(WHERE, what, field="dpo_label_smoothing")
    if recipe.method.lora_dropout:
        note = "lora_dropout: no effect here, stage dpo compares with the reference without dropout"
        return msgspec.structs.replace(recipe, notes=(*recipe.notes, note))
    return recipe


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_RECIPE_BYTES:
            raise ConfigError(WHERE, f"{path} has more than {MAX_RECIPE_BYTES} bytes: no recipe")
        value = parse_yaml(path.read_text("utf-8"))
    except OSError as error:
        what = f"cannot read {path}: {error}: give a recipe, a YAML file"
        raise NotFoundError(WHERE, what) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(WHERE, f"{path} is not YAML: {error}") from error
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(WHERE, f"{path} is not a mapping of keys: write `key: value` lines")
    return value

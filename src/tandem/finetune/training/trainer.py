"""A fine-tuning run: data, model and adapter, transformers' Trainer, and the files that are
written.
"""

import logging
import math
import os
import shutil
import warnings
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from peft import LoraConfig
from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainingArguments,
    set_seed,
)

from tandem.core.errors import ConfigError, UnsupportedError
from tandem.finetune.artefacts import name_full_disk, plot_losses, write_card, write_json
from tandem.finetune.data.dataset import Dataset, prepare_data
from tandem.finetune.data.examples import collate
from tandem.finetune.data.templates import load_tokenizer
from tandem.finetune.recipes.recipe import Recipe
from tandem.finetune.recipes.targets import find_expert_parameters, find_targets, name_targets
from tandem.finetune.training.allocator import map_large_blocks
from tandem.finetune.training.callbacks import (
    STATE_NAME,
    BarCallback,
    CheckpointCallback,
    LogCallback,
)
from tandem.finetune.training.epochs import EpochTrainer
from tandem.finetune.training.expert_adapters import adapt_model, open_adapter
from tandem.finetune.training.loss import Head, compute_loss, find_head
from tandem.finetune.training.model import load_frozen
from tandem.finetune.training.output_folder import check_folders, clear_folder, make_folder
from tandem.finetune.training.schedule import plan_schedule
from tandem.models.families import open_checkpoint

__all__ = [
    "RunReport",
    "check_packages",
    "count_steps",
    "finetune",
    "make_lora_config",
]

logger = logging.getLogger(__name__)
WHERE = "finetune.run"
SHOWN_BAD_ROWS = 5
REPORTERS = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "swanlab": ("swanlab",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
}
"""Values of ``report_to``, each with packages of which one must be installed."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """The result of a training run: its output folder, its scores, and what it was trained on."""

    output_dir: str
    results: dict[str, Any]
    num_examples: int
    num_bad_rows: int
    num_too_short: int
    trainable_parameters: int


class LoraTrainer(EpochTrainer):
    """The trainer of answers and plain texts.

    Args:
        head: the model's head, for a loss that is computed piece by piece
            (``tandem.finetune.training.loss``); None: transformers' own loss.
        options: arguments of ``Trainer``.
    """

    def __init__(self, *, head: Head | None, **options: Any) -> None:
        super().__init__(**options)
        self._head = head

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the loss of a batch, and count its tokens. In evaluation, or if outputs are
        wanted, the loss is the model's own.
        """
        if model.training:
            seen = inputs.get("attention_mask")
            self.num_tokens += inputs["input_ids"].numel() if seen is None else int(seen.sum())
        if self._head is None or return_outputs or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        num_items = num_items_in_batch if self.model_accepts_loss_kwargs else None
        with self.accelerator.autocast():
            return compute_loss(model.get_base_model(), self._head, inputs, num_items)


def finetune(recipe: Recipe, *, has_bar: bool = False) -> RunReport:
    """Train an adapter by a recipe; write it and the records of the run to ``output_dir``.

    Args:
        recipe: the run's settings; see ``read_recipe``.
        has_bar: True to show a progress bar with loss and tokens/s on standard error.

    Raises: the errors of ``check_packages``, ``check_folders``, ``prepare_data`` and
        ``load_frozen``; CapacityError (the disk is full).
    """
    with warnings.catch_warnings():
        # transformers and PEFT warn about each other's names that will change: users can do nothing
        # about it.
        warnings.simplefilter("ignore", FutureWarning)
        return _run(recipe, has_bar=has_bar)


def _run(recipe: Recipe, *, has_bar: bool) -> RunReport:
    folder = Path(recipe.output.output_dir)
    check_packages(recipe)
    resume_from = check_folders(recipe)
    make_folder(folder)
    set_seed(recipe.train.seed)
    checkpoint = open_checkpoint(recipe.model.model_name_or_path)
    tokenizer = load_tokenizer(checkpoint)
    data = prepare_data(recipe, tokenizer)
    for row in data.bad_rows[:SHOWN_BAD_ROWS]:
        logger.warning("event=bad_row path=%s line=%d why=%r", row.path, row.line, row.why)
    # From here on large blocks are mapped and returned to the system when freed: memory in use is
    # then what the prediction counts.
    map_large_blocks()
    # Arguments are checked before the model is loaded, which may take minutes.
    schedule = plan_schedule(recipe.train, count_steps(recipe, len(data.train)))
    arguments = _make_arguments(recipe, folder, schedule, has_bar=has_bar)
    model = _make_model(recipe)
    if resume_from is None:
        # The folder is emptied only now: a run that cannot begin must not delete earlier results.
        clear_folder(folder)
    set_seed(recipe.train.seed)
    trainer = _make_trainer(recipe, model, arguments, tokenizer, data)
    trainer.add_callback(LogCallback(folder))
    trainer.add_callback(
        CheckpointCallback(
            folder,
            recipe.output.save_steps,
            trainer=trainer,
            limit=recipe.output.save_total_limit,
            has_run_state=not recipe.output.save_only_model,
            resume_from=resume_from,
        )
    )
    trainer.lr_ratio = recipe.method.loraplus_lr_ratio or 1.0
    # PrinterCallback writes to standard output, where the command writes its own report.
    trainer.remove_callback(PrinterCallback)
    if has_bar:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(BarCallback(lambda: trainer.num_tokens))
    trained = trainer.train(
        resume_from_checkpoint=None if resume_from is None else str(resume_from)
    )
    results = {**trained.metrics, "epoch": trainer.state.epoch}
    write_json(folder / "train_results.json", results)
    if data.validation:
        evaluated = trainer.evaluate()
        write_json(folder / "eval_results.json", evaluated)
        results |= evaluated
    write_json(folder / "all_results.json", results)
    _save_adapter(model, tokenizer, folder)
    trainer.state.save_to_json(str(folder / STATE_NAME))
    if recipe.output.plot_loss:
        if not plot_losses(trainer.state.log_history, folder / "training_loss.png"):
            logger.warning("event=no_plot why=%r", "no loss was logged: lower logging_steps")
        for key in ("eval_loss", "rewards/accuracies"):
            name = f"training_{key.replace('/', '_')}.png"
            plot_losses(trainer.state.log_history, folder / name, key)
    write_card(folder, recipe, results)
    return RunReport(
        output_dir=str(folder),
        results=results,
        num_examples=len(data.train),
        num_bad_rows=len(data.bad_rows),
        num_too_short=data.num_unlearnable,
        trainable_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
    )


def _make_trainer(
    recipe: Recipe,
    model: Any,
    arguments: Any,
    tokenizer: Any,
    data: Dataset,
) -> EpochTrainer:
    if recipe.method.stage == "dpo":
        from tandem.finetune.training.preferences import make_pair_trainer

        trainer = make_pair_trainer(
            model,
            arguments,
            tokenizer=tokenizer,
            train=data.train,
            validation=data.validation,
            answer_weight=recipe.preference.pref_ftx,
        )
        # Making the trainer drew random numbers: the seed is set again, so that runs of all kinds
        # begin alike.
        set_seed(recipe.train.seed)
        return trainer
    return LoraTrainer(
        head=find_head(model.get_base_model()),
        model=model,
        args=arguments,
        train_dataset=data.train,  # type: ignore[arg-type]
        eval_dataset=data.validation or None,  # type: ignore[arg-type]
        data_collator=partial(collate, pad_id=tokenizer.pad_token_id or 0),
    )


def _make_model(recipe: Recipe) -> Any:
    frozen = load_frozen(
        recipe.model.model_name_or_path,
        is_bf16=recipe.train.bf16,
        expert_format=recipe.model.expert_format,
        linear_format=recipe.model.linear_format,
        num_threads=recipe.model.cpu_infer,
        is_head_packed=recipe.method.stage != "dpo",
        context=recipe.data.cutoff_len,
    )
    if recipe.model.adapter_name_or_path is not None:
        folder = Path(recipe.model.adapter_name_or_path)
        return open_adapter(frozen.model, folder, is_trainable=True)
    return adapt_model(frozen.model, make_lora_config(recipe, frozen.model))


def make_lora_config(recipe: Recipe, model: Any) -> LoraConfig:
    """Return PEFT's configuration of the adapters that a recipe asks for.

    Args:
        recipe: the run's settings.
        model: the model to adapt; it may be on the meta device.

    Raises: ConfigError: ``lora_target`` names a module that the model lacks, or routed experts
        together with dropout.
    """
    method = recipe.method
    parameters = find_expert_parameters(model, method.lora_target)
    if parameters and method.lora_dropout > 0:
        what = f"lora_dropout {method.lora_dropout}: adapters of routed experts have none in PEFT"
        raise ConfigError(
            WHERE, f"{what}: set 0, or leave experts out of lora_target", field="lora_dropout"
        )
    alpha = 2 * method.lora_rank if method.lora_alpha is None else method.lora_alpha
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=method.lora_rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        lora_dropout=method.lora_dropout,
        target_modules=name_targets(model, find_targets(model, method.lora_target)),
        target_parameters=parameters or None,
        use_rslora=method.use_rslora,
        base_model_name_or_path=recipe.model.model_name_or_path,
    )


def count_steps(recipe: Recipe, num_rows: int) -> int:
    """Return the number of optimizer steps of a run with ``num_rows`` training rows in an epoch."""
    train = recipe.train
    if train.max_steps > 0:
        return train.max_steps
    num_batches = math.ceil(num_rows / train.per_device_train_batch_size)
    per_epoch = max(math.ceil(num_batches / train.gradient_accumulation_steps), 1)
    return math.ceil(train.num_train_epochs * per_epoch)


def _make_arguments(
    recipe: Recipe, folder: Path, schedule: dict[str, Any], *, has_bar: bool
) -> TrainingArguments:
    train, has_validation = recipe.train, bool(recipe.data.val_size or recipe.data.eval_dataset)
    sinks = [part.strip() for part in recipe.output.report_to.split(",") if part.strip()]
    if train.eval_strategy != "no" and not has_validation:
        what = f"eval_strategy {train.eval_strategy} without data: set val_size or eval_dataset"
        raise ConfigError(WHERE, what, field="eval_strategy")
    # A later release of transformers renames gradient_checkpointing, and warns of false: so the
    # option is passed only if it is on.
    options: dict[str, Any] = {"gradient_checkpointing": True}
    if not train.gradient_checkpointing:
        options = {}
    make: Any = TrainingArguments
    if recipe.method.stage == "dpo":
        from tandem.finetune.training.preferences import make_pair_arguments

        make = partial(make_pair_arguments, recipe.preference)
    try:
        return make(
            output_dir=str(folder),
            per_device_train_batch_size=train.per_device_train_batch_size,
            per_device_eval_batch_size=train.per_device_eval_batch_size,
            gradient_accumulation_steps=train.gradient_accumulation_steps,
            learning_rate=train.learning_rate,
            num_train_epochs=train.num_train_epochs,
            max_steps=train.max_steps,
            lr_scheduler_type=train.lr_scheduler_type,
            lr_scheduler_kwargs=schedule or None,
            warmup_steps=train.warmup_steps,
            weight_decay=train.weight_decay,
            adam_beta1=train.adam_beta1,
            adam_beta2=train.adam_beta2,
            adam_epsilon=train.adam_epsilon,
            max_grad_norm=train.max_grad_norm,
            **options,
            bf16=train.bf16,
            seed=train.seed,
            eval_strategy=train.eval_strategy,
            eval_steps=train.eval_steps,
            logging_steps=recipe.output.logging_steps,
            # transformers saves no checkpoints: our CheckpointCallback does.
            save_strategy="no",
            report_to=sinks or "none",
            # More data loading processes than CPUs would only wait for each other; the order of
            # examples does not depend on their number.
            dataloader_num_workers=min(
                recipe.data.dataloader_num_workers, len(os.sched_getaffinity(0))
            ),
            dataloader_pin_memory=False,
            remove_unused_columns=False,
            label_names=["labels"],
            disable_tqdm=not has_bar,
            use_cpu=True,
        )
    except ValueError as error:
        raise ConfigError(WHERE, f"transformers refuses the recipe: {error}") from error


def check_packages(recipe: Recipe) -> None:
    """Check that the packages that ``stage`` and ``report_to`` need are installed.

    Raises: UnsupportedError: one is missing, which the text names; ConfigError: an unknown
        ``report_to``.
    """
    if recipe.method.stage == "dpo" and not find_spec("trl"):
        what = "stage dpo: trl is not installed: pip install 'tandem-llm[dpo]'"
        raise UnsupportedError(WHERE, what, field="stage")
    for name in (part.strip() for part in recipe.output.report_to.split(",")):
        if name in ("", "none", "all"):
            continue
        if name not in REPORTERS:
            what = f"report_to {name!r}: choose none, {', '.join(REPORTERS)}"
            raise ConfigError(WHERE, what, field="report_to")
        if not any(find_spec(package) for package in REPORTERS[name]):
            package = REPORTERS[name][0]
            what = f"report_to {name}: {package} is not installed: pip install {package}"
            raise UnsupportedError(WHERE, what, field="report_to")


def _save_adapter(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write the adapter and the tokenizer to a folder. ``adapter_config.json``, without which a
    folder is no adapter, is written last.

    Raises: CapacityError (the disk is full).
    """
    advice = "free space there, then go on with resume_from_checkpoint: true"
    with name_full_disk(folder, advice):
        _write_adapter(model, tokenizer, folder)


def _write_adapter(model: Any, tokenizer: Any, folder: Path) -> None:
    partial_folder = folder / ".adapter.partial"
    shutil.rmtree(partial_folder, ignore_errors=True)
    model.save_pretrained(partial_folder, save_embedding_layers=False)
    tokenizer.save_pretrained(partial_folder)
    (partial_folder / "README.md").unlink(missing_ok=True)
    files = sorted(partial_folder.iterdir(), key=lambda path: path.name == "adapter_config.json")
    for path in files:
        path.replace(folder / path.name)
    partial_folder.rmdir()

"""The part of ``tandem finetune --dry-run`` that predicts a run on another machine."""

import sys

import typer

from tandem.cli.output import format_bytes, print_json, print_table
from tandem.cli.planning.placing import find_machine, find_shape
from tandem.core.errors import UnsupportedError
from tandem.finetune.recipes.recipe import Recipe
from tandem.placement.shape import FORMAT_BYTES
from tandem.placement.training import TrainingWishes, plan_training_on

__all__ = ["show_training"]

KEPT = {"auto": "bf16", "none": "bf16"}
"""Weight formats in a recipe that leave a bf16 model's weights unchanged."""


def show_training(recipe: Recipe, hardware: str, *, as_json: bool) -> None:
    """Print the predicted memory and speed of a training run on a described machine.

    Args:
        recipe: recipe of the run; as no data is read, each row is assumed to have ``cutoff_len``
            tokens.
        hardware: name of a machine, or a file.
        as_json: True to print one JSON document.

    Raises: UnsupportedError (a format that planning does not know, or a run over pairs of answers);
        errors of ``find_machine`` and ``find_shape``.
    """
    if recipe.method.stage != "sft":
        what = f"stage {recipe.method.stage}: a run elsewhere is predicted for sft alone"
        raise UnsupportedError("cli.finetune", what)
    # Of fine-tuning on GPU and CPU together published runs alone are known.
    spec, efficiencies = find_machine(hardware, "published")
    shape, _ = find_shape(recipe.model.model_name_or_path)
    wishes = TrainingWishes(
        tokens=recipe.train.per_device_train_batch_size * recipe.data.cutoff_len,
        accumulation=recipe.train.gradient_accumulation_steps,
        rank=recipe.method.lora_rank,
        is_checkpointed=recipe.train.gradient_checkpointing,
        expert_format=_name_format(recipe.model.expert_format, is_bf16=recipe.train.bf16),
        dense_format=_name_format(recipe.model.linear_format, is_bf16=recipe.train.bf16),
    )
    planned = plan_training_on(spec, shape, wishes, efficiencies)
    if as_json:
        print_json({"plan": planned, "wishes": wishes, "fits": planned.fits})
    else:
        rows = [
            (name, memory.device, format_bytes(size))
            for memory in planned.memory
            for name, size in memory.parts.items()
        ]
        print_table(("memory", "device", "bytes"), rows)
        for memory in planned.memory:
            used, have = format_bytes(memory.used_bytes), format_bytes(memory.capacity_bytes)
            sys.stdout.write(f"{memory.device}: {used} of {have}\n")
        sys.stdout.write(
            f"{shape.name} on {spec.title}: {planned.trainable_parameters:,} weights of rank "
            f"{wishes.rank}; steps of {wishes.accumulation} x {wishes.tokens} tokens, "
            f"{planned.step_s:.1f} s each, {planned.tokens_per_s:.1f} tokens/s\n"
        )
        if not planned.fits:
            sys.stdout.write("does not fit: see the sums above\n")
    if not planned.fits:
        raise typer.Exit(1)


def _name_format(name: str, *, is_bf16: bool) -> str:
    known = KEPT.get(name, name) if is_bf16 or name not in KEPT else "f32"
    if known not in FORMAT_BYTES:
        what = f"format {name}: a run elsewhere is predicted for {', '.join(FORMAT_BYTES)}"
        raise UnsupportedError("cli.finetune", what)
    return known

"""Files that a finished run writes beside the adapter: results, loss plot, model card."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from tandem.core.errors import CapacityError
from tandem.finetune.recipes.recipe import Recipe

__all__ = [
    "name_full_disk",
    "plot_losses",
    "smooth_losses",
    "write_card",
    "write_json",
    "write_text",
]


@contextmanager
def name_full_disk(folder: Path, advice: str) -> Iterator[None]:
    """Raise an error that names the full disk, if the block fails for lack of space.

    The caller removes its files.

    Raises: CapacityError, in place of the error of the system or of safetensors.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = error.errno if isinstance(error, OSError) else None
        is_full = number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
        if not is_full:
            raise
        what = f"the disk of {folder} is full: {advice}"
        raise CapacityError("finetune.write", what) from error


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically: readers see the whole file or the old one."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, atomically (see ``write_text``)."""
    write_text(path, json.dumps(value, indent=4, sort_keys=True) + "\n")


def smooth_losses(losses: list[float], weight: float = 0.9) -> list[float]:
    """Return the exponential moving average of a loss curve, starting with its first value."""
    smoothed: list[float] = []
    for loss in losses:
        last = smoothed[-1] if smoothed else loss
        smoothed.append(weight * last + (1 - weight) * loss)
    return smoothed


def plot_losses(history: list[dict[str, Any]], path: Path, key: str = "loss") -> bool:
    """Draw a curve of transformers' log history as PNG; return False if the history has no such
    curve.
    """
    points = [(entry["step"], entry[key]) for entry in history if key in entry]
    if not points:
        return False
    # matplotlib's objects are used directly: pyplot would look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, losses = [p[0] for p in points], [p[1] for p in points]
    figure = Figure(figsize=(6.4, 4.0), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, losses, color="#1f77b4", alpha=0.4, label="original")
    axes.plot(steps, smooth_losses(losses), color="#1f77b4", label="smoothed")
    axes.set_xlabel("step")
    axes.set_ylabel(key)
    axes.legend()
    figure.tight_layout()
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, format="png")
    partial.replace(path)
    return True


def write_card(folder: Path, recipe: Recipe, results: dict[str, Any]) -> None:
    """Write README.md, the model card: the adapter's model and the settings it was trained with."""
    model, keys = recipe.model.model_name_or_path, recipe.flatten()
    shown = [
        *(("pref_loss", "pref_beta", "pref_ftx") if recipe.method.stage == "dpo" else ()),
        "lora_rank",
        "lora_alpha",
        "lora_dropout",
        "lora_target",
        "learning_rate",
        "num_train_epochs",
        "max_steps",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "lr_scheduler_type",
        "warmup_steps",
        "cutoff_len",
        "packing",
        "bf16",
        "expert_format",
        "linear_format",
        "seed",
    ]
    settings = "\n".join(f"| {key} | {keys[key]} |" for key in shown)
    measured = "\n".join(f"| {key} | {value} |" for key, value in sorted(results.items()))
    text = f"""---
base_model: {json.dumps(model)}
library_name: peft
tags:
- lora
- {recipe.method.stage}
---

# LoRA adapter of {model}

Trained on {recipe.data.dataset or "a dataset"} by `tandem finetune`.

| Key | Value |
|---|---|
{settings}

| Result | Value |
|---|---|
{measured}
"""
    write_text(folder / "README.md", text)

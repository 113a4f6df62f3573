"""``tandem finetune``: train a LoRA adapter as a recipe says."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.output import JsonFlag, print_json

__all__ = ["finetune"]


def finetune(
    recipe: Annotated[Path, typer.Argument(help="YAML file with LLaMA-Factory's keys.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value words, which go before the file.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Train a LoRA adapter; leave it, its log, results and loss plot in the recipe's output_dir."""
    from tandem.cli.extras import require_extra
    from tandem.finetune.recipe import read_recipe

    read = read_recipe(recipe, overrides)
    for note in read.notes:
        sys.stderr.write(f"{note}\n")
    require_extra("finetune", "peft", "accelerate", "pyarrow")
    from tandem.finetune.trainer import finetune as run

    report = run(read, has_bar=sys.stderr.isatty())
    if json:
        print_json(asdict(report))
        return
    left_out = f", {report.num_bad_rows} bad rows left out" if report.num_bad_rows else ""
    too_short = (
        f", {report.num_too_short} cut off before any answer" if report.num_too_short else ""
    )
    loss = report.results.get("train_loss", float("nan"))
    sys.stdout.write(
        f"{report.output_dir}: loss {loss:.4f}, {report.trainable_parameters} parameters on "
        f"{report.num_examples} examples{left_out}{too_short}\n"
    )

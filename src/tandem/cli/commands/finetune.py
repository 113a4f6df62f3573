"""``tandem finetune``: train a LoRA adapter as a recipe says."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tandem.cli.commands.evaluate import adapts_experts
from tandem.cli.output import JsonFlag, format_bytes, print_json, print_next, print_table

if TYPE_CHECKING:
    from tandem.finetune.forecast.prediction import RunPrediction
    from tandem.finetune.recipes.recipe import Recipe

__all__ = ["finetune"]


def finetune(
    recipe: Annotated[Path, typer.Argument(help="YAML file with LLaMA-Factory's keys.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value words, which go before the file.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what memory and time it will take; train nothing."),
    ] = False,
    hardware: Annotated[
        str,
        typer.Option(
            help="With --dry-run: another machine, a name of `tandem plan --list` or a YAML file. "
            "The model may then be a configuration of that list."
        ),
    ] = "",
    json: JsonFlag = False,
) -> None:
    """Train a LoRA adapter; leave it, its log, results and loss plot in the recipe's output_dir."""
    from tandem.cli.extras import require_extra
    from tandem.finetune.recipes.recipe import read_recipe

    read = read_recipe(recipe, overrides)
    for note in read.notes:
        sys.stderr.write(f"{note}\n")
    if hardware:
        if not dry_run:
            what = "it predicts a run on another machine: give --dry-run too"
            raise typer.BadParameter(what, param_hint="'--hardware'")
        from tandem.cli.planning.training import show_training

        show_training(read, hardware, as_json=json)
        return
    require_extra("finetune", "peft", "accelerate", "pyarrow")
    if dry_run:
        _show_prediction(read, json=json)
        if not json:
            print_next("tandem", "finetune", recipe, *(overrides or ()))
        return
    from tandem.finetune.training.trainer import finetune as run

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
        f"{report.output_dir}: mean loss {loss:.4f}, {report.trainable_parameters} parameters on "
        f"{report.num_examples} examples{left_out}{too_short}\n"
    )
    model, folder = read.model.model_name_or_path, Path(report.output_dir)
    if adapts_experts(folder):
        # The server cannot serve an adapter of routed experts beside the base model's weights, so
        # exporting a merged model is proposed.
        print_next("tandem", "export", model, "--adapter", folder, "--out", "FOLDER")
    else:
        print_next("tandem", "chat", model, "--adapter", folder)


def _show_prediction(recipe: "Recipe", *, json: bool) -> None:
    from tandem.finetune.forecast.prediction import predict_run

    predicted = predict_run(recipe)
    facts = {name: getattr(predicted, name) for name in ("total_bytes", "fits", "total_s")}
    if json:
        print_json({**msgspec.structs.asdict(predicted), **facts})
    else:
        rows = [(p.name, p.device, format_bytes(p.size_bytes), p.why) for p in predicted.parts]
        rows.append(("sum", "", format_bytes(predicted.total_bytes), ""))
        print_table(("memory", "device", "bytes", "why"), rows)
        sys.stdout.write(render_prediction(predicted))
    if predicted.problems or not predicted.fits:
        raise typer.Exit(1)


def render_prediction(predicted: "RunPrediction") -> str:
    """Return the sentences that are printed below the table of a run's predicted memory."""
    data = predicted.data
    lines = [
        f"{data.num_rows} rows, {data.num_tokens} tokens, the longest row {data.longest}; "
        f"{data.num_bad_rows} bad rows left out, {data.num_too_short} cut off before any answer",
        f"{predicted.num_steps} steps of {_clock(predicted.step_s)} each, "
        f"{predicted.tokens_per_s:.0f} tokens/s: {_clock(predicted.total_s)} of training, where "
        "nothing else runs",
    ]
    needed, free = format_bytes(predicted.total_bytes), format_bytes(predicted.available_bytes)
    if predicted.fits:
        lines.append(f"fits: needs {needed} of {free}")
    else:
        lines.append(f"does not fit: needs {needed}, there are {free}")
        changed = format_bytes(predicted.changed_bytes)
        if predicted.changed_bytes <= predicted.available_bytes:
            lines.append(f"fits with {' '.join(predicted.changes)}: {changed}")
        else:
            lines.append(f"needs {changed} even with {' '.join(predicted.changes)}")
    lines += [f"would be refused: {problem}" for problem in predicted.problems]
    return "\n".join(lines) + "\n"


def _clock(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"

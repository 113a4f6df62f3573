"""``tandem eval``: measure a model, with or without an adapter, on held-out records."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.extras import require_extra
from tandem.cli.output import JsonFlag, print_json, print_table

__all__ = ["evaluate"]


def evaluate(
    model: Annotated[str, typer.Argument(help="Folder, hub id or `demo`.")],
    data: Annotated[str, typer.Option(help="File of records, or a name in --dataset-dir.")],
    adapter: Annotated[Path | None, typer.Option(help="Folder of a LoRA adapter.")] = None,
    dataset_dir: Annotated[Path, typer.Option(help="Folder of dataset_info.json.")] = Path("data"),
    template: Annotated[str | None, typer.Option(help="As of a recipe.")] = None,
    max_samples: Annotated[int | None, typer.Option(min=1, help="Rows at most.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 256,
    expert_format: Annotated[str, typer.Option(help="As of a recipe.")] = "auto",
    bf16: Annotated[bool, typer.Option("--bf16", help="Tensors in bfloat16.")] = False,
    predictions: Annotated[Path | None, typer.Option(help="JSON lines of all answers.")] = None,
    json: JsonFlag = False,
) -> None:
    """Print perplexity, exact match, BLEU-1 to 4 and ROUGE-1, 2 and L of greedy answers."""
    require_extra("finetune", "peft", "sacrebleu", "rouge_score")
    from tandem.finetune.evaluate import evaluate_records
    from tandem.finetune.tuned import TunedModel

    tuned = TunedModel(model, adapter, template=template, is_bf16=bf16, expert_format=expert_format)
    has_bar = sys.stderr.isatty()

    def show(done: int, total: int) -> None:
        sys.stderr.write(f"\r{done} of {total}" + ("\n" if done == total else ""))

    report = evaluate_records(
        tuned,
        data,
        dataset_dir=dataset_dir,
        max_samples=max_samples,
        max_tokens=max_tokens,
        predictions=predictions,
        progress=show if has_bar else None,
    )
    if json:
        print_json(asdict(report))
        return
    bad = f", {report.num_bad_rows} bad rows left out" if report.num_bad_rows else ""
    rows = [(name, f"{value:.2f}") for name, value in report.metrics.items()]
    print_table(("metric", "value"), rows, f"{report.num_rows} rows{bad}")

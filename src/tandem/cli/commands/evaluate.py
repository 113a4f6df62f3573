"""``tandem eval``: measure a model, with or without an adapter, on held-out records."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from tandem.cli.extras import describe_extra, require_extra
from tandem.cli.output import JsonFlag, print_json, print_table
from tandem.engine.config import KvDtype
from tandem.models.config import ModelConfig

if TYPE_CHECKING:
    from tandem.evaluation.records import EvaluatedModel

__all__ = ["adapts_experts", "evaluate"]


def evaluate(
    model: Annotated[str, typer.Argument(help="Folder, hub id or `demo`.")],
    data: Annotated[str, typer.Option(help="File of records, or a name in --dataset-dir.")],
    adapter: Annotated[Path | None, typer.Option(help="Folder of a LoRA adapter.")] = None,
    dataset_dir: Annotated[Path, typer.Option(help="Folder of dataset_info.json.")] = Path("data"),
    template: Annotated[str | None, typer.Option(help="As of a recipe.")] = None,
    max_samples: Annotated[int | None, typer.Option(min=1, help="Rows at most.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 256,
    formats: Annotated[
        str, typer.Option(help="Weight formats to compare with bf16, as int8,int4.")
    ] = "",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], typer.Option(help="As model.dtype.")
    ] = "auto",
    expert_format: Annotated[str, typer.Option(help="As model.expert_format.")] = "auto",
    linear_format: Annotated[str, typer.Option(help="As model.linear_format.")] = "auto",
    kv_dtype: Annotated[KvDtype, typer.Option(help="As engine.kv_dtype.")] = "auto",
    predictions: Annotated[Path | None, typer.Option(help="JSON lines of all answers.")] = None,
    json: JsonFlag = False,
) -> None:
    """Print accuracy and perplexity of the records' answers, and exact match of greedy ones.

    The model runs as `tandem serve` runs it; with an adapter of routed experts as it was trained.
    With --formats it is loaded in one format after the other, and the Kullback-Leibler divergence
    of each from bf16 is measured too. BLEU-1 to 4 and ROUGE-1, 2 and L of the greedy answers need
    the extra `finetune`.
    """
    names = [name.strip() for name in formats.split(",")] if formats else []
    if names and (expert_format, linear_format) != ("auto", "auto"):
        raise typer.BadParameter("--formats sets those of experts and of all other matrices")
    if len(names) > 1 and predictions is not None:
        raise typer.BadParameter("--predictions is one file: give one format, or none")
    require_extra("serve", "torch", "transformers")
    from tandem.evaluation.records import evaluate_records

    load = None
    if adapter is not None and adapts_experts(adapter):
        if names:
            raise typer.BadParameter(
                "--formats: merge an adapter of routed experts (tandem export)"
            )
        load = _load_tuned(adapter)
    has_bar = sys.stderr.isatty()

    def show(done: int, total: int) -> None:
        sys.stderr.write(f"\r{done} of {total}" + ("\n" if done == total else ""))

    report = evaluate_records(
        ModelConfig(
            path=model, dtype=dtype, expert_format=expert_format, linear_format=linear_format
        ),
        data,
        formats=names,
        adapter=adapter,
        kv_dtype=kv_dtype,
        template=template,
        dataset_dir=dataset_dir,
        max_samples=max_samples,
        max_tokens=max_tokens,
        predictions=predictions,
        progress=show if has_bar else None,
        load=load,
    )
    missing = describe_extra(", ".join(report.missing), "finetune") if report.missing else None
    if json:
        figures: dict[str, Any] = {"formats": report.metrics}
        if not names:
            (scores,) = report.metrics.values()
            figures = {"metrics": scores}
        figures |= {"num_rows": report.num_rows, "num_bad_rows": report.num_bad_rows}
        print_json(figures | {"left_out": missing})
        return
    bad = f", {report.num_bad_rows} bad rows left out" if report.num_bad_rows else ""
    title = f"{report.num_rows} rows{bad}"
    if names:
        columns = list(next(iter(report.metrics.values())))
        lines = [
            (name, *(_show(column, scores[column]) for column in columns))
            for name, scores in report.metrics.items()
        ]
        print_table(("format", *columns), lines, title)
    else:
        (scores,) = report.metrics.values()
        lines = [(name, _show(name, value)) for name, value in scores.items()]
        print_table(("metric", "value"), lines, title)
    if missing is not None:
        sys.stdout.write(f"BLEU and ROUGE: {missing}\n")


def _show(metric: str, value: float) -> str:
    return f"{value:.5f}" if metric == "kl_divergence" else f"{value:.2f}"


def adapts_experts(adapter: Path) -> bool:
    """Return True if an adapter changes routed experts; such an adapter is not served
    separately.
    """
    try:
        config = msgspec.json.decode((adapter / "adapter_config.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        # A file that cannot be read is not reported here: loading the adapter reports it.
        return False
    return isinstance(config, dict) and bool(config.get("target_parameters"))


def _load_tuned(adapter: Path) -> "Callable[[ModelConfig], EvaluatedModel]":
    """Return a function that loads the model with an adapter of any kind, by the code that trains
    it and not as it is served.
    """
    require_extra("finetune", "peft")
    from tandem.finetune.tuned import TunedModel

    def load(config: ModelConfig) -> TunedModel:
        is_bf16 = config.dtype == "bfloat16"
        return TunedModel(config.path, adapter, is_bf16=is_bf16, expert_format=config.expert_format)

    return load

"""Measuring a model, with or without an adapter, on records that it did not learn from."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tandem.finetune.artefacts import write_text
from tandem.finetune.data.records import load_dataset
from tandem.finetune.metrics import measure_texts
from tandem.finetune.tuned import TunedModel

__all__ = ["EvalReport", "evaluate_records"]


@dataclass(frozen=True, slots=True)
class EvalReport:
    """Scores over the good rows of a file; percentages but for the perplexity."""

    metrics: dict[str, float]
    num_rows: int
    num_bad_rows: int


def evaluate_records(
    model: TunedModel,
    data: str,
    *,
    dataset_dir: str | Path = "data",
    max_samples: int | None = None,
    max_tokens: int = 256,
    cutoff_len: int = 2048,
    predictions: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> EvalReport:
    """Answer every row's last question greedily and compare with its answer.

    Args:
        model: what is measured.
        data: a file, or a name in ``dataset_dir``'s ``dataset_info.json``.
        dataset_dir: a dataset folder.
        max_samples: rows at most.
        max_tokens: of an answer at most.
        cutoff_len: tokens of a row for the perplexity at most.
        predictions: file to write as JSON lines {prompt, predict, label}, as LLaMA-Factory does.
        progress: ``progress(done, total)`` after each row.

    Raises: as ``load_dataset``.
    """
    records = load_dataset(data, Path(dataset_dir), max_samples)
    rows = records.conversations
    answers: list[str] = []
    for answer in model.predict(rows, max_tokens):
        answers.append(answer)
        if progress is not None:
            progress(len(answers), len(rows))
    references = [row.answer for row in rows]
    metrics = {"perplexity": model.perplexity(rows, cutoff_len)}
    metrics |= measure_texts(answers, references)
    if predictions is not None:
        lines = (
            {"prompt": row.messages[-2].content, "predict": answer, "label": row.answer}
            for row, answer in zip(rows, answers, strict=True)
        )
        write_text(
            predictions, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        )
    return EvalReport(metrics, len(rows), len(records.bad_rows))

"""Measures one model, in one or several weight formats, on records that it was not trained on."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import msgspec
from torch import Tensor

from tandem.core.errors import ConfigError
from tandem.engine.config import KvDtype
from tandem.evaluation.questions import Questions, read_questions
from tandem.evaluation.scores import KeptLogprobs, Scores
from tandem.evaluation.served import ServedModel
from tandem.finetune.artefacts import name_full_disk, write_text
from tandem.finetune.data.examples import Example
from tandem.finetune.metrics import PACKAGES, measure_matches, measure_texts
from tandem.models.config import ModelConfig
from tandem.models.families import open_checkpoint
from tandem.models.planning.planner import plan_model

__all__ = ["REFERENCE", "EvalReport", "EvaluatedModel", "evaluate_records"]

REFERENCE = "bf16"
"""The weight format that other formats are compared with."""
MIB = 1 << 20


class EvaluatedModel(Protocol):
    """A model under evaluation, which generates answers and scores texts."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory."""
        ...

    def generate(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        end_ids: Sequence[int],
        on_answer: Callable[[], None],
    ) -> list[list[int]]:
        """Return the greedy answer to each prompt.

        Args:
           prompts: token ids.
           max_tokens: most tokens of an answer; the end of the context may cut it shorter.
           end_ids: tokens that end an answer, in addition to the model's own.
           on_answer: called after each answer.
        """
        ...

    def compute_logprobs(self, example: Example) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (token ids, log-probabilities) of a row's labelled tokens, piece by piece.

        Shapes: N labelled tokens in a piece, V vocabulary: int64 [N] and float32 [N, V]; row n is
        the model's distribution at the position of token n.
        """
        ...


@dataclass(frozen=True, slots=True)
class EvalReport:
    """The result of an evaluation: scores over the valid rows of a data file."""

    metrics: dict[str, dict[str, float]]
    """Scores by weight format, in the order of measurement. ``accuracy``, ``agreement``,
    ``exact_match``, BLEU and ROUGE are percentages.
    """
    num_rows: int
    num_bad_rows: int
    missing: tuple[str, ...]
    """Packages that are not installed, without which BLEU and ROUGE are omitted."""


@dataclass(frozen=True, slots=True)
class _Task:
    """Settings and questions of an evaluation that all weight formats share."""

    questions: Questions
    max_tokens: int
    missing: tuple[str, ...]
    on_answer: Callable[[], None]

    def answer(self, model: EvaluatedModel) -> tuple[list[str], dict[str, float]]:
        """Return the model's greedy answers to the questions, and figures of their similarity to
        the references.
        """
        asked, references = self.questions, self.questions.references
        ids = model.generate(asked.prompts, self.max_tokens, asked.end_ids, self.on_answer)
        answers = [asked.decode(answer) for answer in ids]
        figures = measure_matches(answers, references)
        return answers, figures if self.missing else figures | measure_texts(answers, references)

    def score(
        self, model: EvaluatedModel, kept: KeptLogprobs | None, *, is_reference: bool
    ) -> dict[str, float]:
        """Return the token-level scores of the rows' reference answers.

        Args:
           model: the model to measure.
           kept: log-probabilities of the reference format; None if there is no comparison.
           is_reference: True if this model is the reference, whose log-probabilities are saved in
               ``kept``.
        """
        scores = Scores()
        if kept is not None and not is_reference:
            kept.rewind()
        for example in self.questions.examples:
            for labels, logprobs in model.compute_logprobs(example):
                if kept is None:
                    scores.add(labels, logprobs)
                elif is_reference:
                    kept.append(logprobs)
                    scores.add(labels, logprobs, logprobs)
                else:
                    scores.add(labels, logprobs, kept.take(*logprobs.shape))
        return scores.summarize(has_reference=kept is not None)


def evaluate_records(
    config: ModelConfig,
    data: str,
    *,
    formats: Sequence[str] = (),
    adapter: Path | None = None,
    kv_dtype: KvDtype = "auto",
    template: str | None = None,
    dataset_dir: Path = Path("data"),
    max_samples: int | None = None,
    max_tokens: int = 256,
    cutoff_len: int = 2048,
    predictions: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    load: Callable[[ModelConfig], EvaluatedModel] | None = None,
) -> EvalReport:
    """Answer every row's last question greedily, and score the reference answers.

    If formats are given, the model is loaded in one after the other, and each is compared with
    bf16, whose log-probabilities are kept in a temporary file: four bytes for each token of an
    answer and each entry of the vocabulary.

    Args:
       config: the model, with its weight formats unless ``formats`` is given.
       data: a file, or a name in ``dataset_info.json`` of ``dataset_dir``.
       formats: weight formats of the routed experts and all other matrices except embedding and
           routers; bf16 is always measured first.
       adapter: folder of a LoRA adapter; None is the model without one.
       kv_dtype: number format of KV.
       template: name of a template, as in a recipe; None takes the checkpoint's own.
       dataset_dir: a dataset folder.
       max_samples: most rows to read.
       max_tokens: most tokens of an answer.
       cutoff_len: most tokens of a scored row.
       predictions: file to write as JSON lines {prompt, predict, label}, as LLaMA-Factory does;
           with several formats it holds the answers of the last.
       progress: called as ``progress(done, total)`` after each answer.
       load: loads the model with its adapter; None loads a ``ServedModel``.

    Raises: the errors of ``read_questions`` and ``ServedModel``; CapacityError (a full disk).
    """
    configs = {config.expert_format: config}
    if formats:
        names = dict.fromkeys([REFERENCE, *formats])
        configs = {name: _set_format(config, name) for name in names}
    for each in configs.values():
        # Every format is planned before the first weights are read, so that a format that does not
        # fit is refused at once.
        plan_model(
            each.path,
            dtype=each.dtype,
            expert_format=each.expert_format,
            linear_format=each.linear_format,
        )
    questions = read_questions(
        open_checkpoint(config.path),
        data,
        dataset_dir=dataset_dir,
        template=template,
        max_samples=max_samples,
        cutoff_len=cutoff_len,
    )
    total, done = len(configs) * len(questions.prompts), 0

    def note() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    def serve(wanted: ModelConfig) -> EvaluatedModel:
        lengths = [len(prompt) + max_tokens for prompt in questions.prompts]
        return ServedModel(wanted, kv_dtype, lengths, adapter)

    load = serve if load is None else load
    missing = tuple(name for name in PACKAGES if find_spec(name) is None)
    task = _Task(questions, max_tokens, missing, note)
    metrics: dict[str, dict[str, float]] = {}
    with ExitStack() as opened:
        kept = opened.enter_context(closing(KeptLogprobs())) if formats else None
        for name, each in configs.items():
            model = load(each)
            figures = {"weights_mib": model.weight_bytes / MIB} if formats else {}
            figures |= task.score(model, kept, is_reference=name == REFERENCE)
            answers, nearness = task.answer(model)
            metrics[name] = figures | nearness
            if predictions is not None:
                with name_full_disk(predictions.parent, "free some, or choose another"):
                    _write(predictions, questions, answers)
            # The model is freed before the next format's is loaded, since two may not fit into
            # memory.
            del model
    return EvalReport(metrics, len(questions.prompts), questions.num_bad_rows, missing)


def _set_format(config: ModelConfig, name: str) -> ModelConfig:
    if not name:
        what = "a format without a name: give them as int8,int4"
        raise ConfigError("evaluation.formats", what, field="formats")
    return msgspec.structs.replace(config, expert_format=name, linear_format=name)


def _write(path: Path, asked: Questions, answers: Sequence[str]) -> None:
    lines = (
        {"prompt": question, "predict": answer, "label": reference}
        for question, answer, reference in zip(
            asked.questions, answers, asked.references, strict=True
        )
    )
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))

"""`tandem bench deferral`: the effect of deferred experts on a model's loss and choices.

The texts are windows of Python source that the models were not trained on. The first tokens of a
window are a prompt, which defers no experts; the others are an answer. Ours is a figure of the
answers with a number of deferred experts, the baseline the same figure with none; no time is
measured. The demo model has two experts per token. A model with 8 of 32 experts per token is
measured too if it exists; it is made by ``make deferral``.
"""

import sysconfig
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tandem.bench.harness import BenchCase
from tandem.core.errors import NotFoundError
from tandem.kernels.paged import PagedBatch, SequenceChunk
from tandem.models.loading.hub import DEMO_FOLDER
from tandem.models.loading.loader import load_model
from tandem.models.planning.planner import plan_model
from tandem.models.tokenizing.tokenizer import load_tokenizer
from tandem.placement.choosers import MIN_IMMEDIATE

__all__ = ["MANY_EXPERTS", "make_cases"]

MANY_EXPERTS = Path("~/.cache/tandem/bench/many-experts/model")
HELD_OUT = ("ast.py", "locale.py", "venv/__init__.py", "unittest/loader.py")
"""Modules of the standard library that the recipe of the training run keeps out of the training
data, chosen by a hash of their names; their texts are scored here.
"""
WINDOW, PROMPT = 256, 64
MAX_DIVERGENCE = 0.05
"""Largest allowed Kullback-Leibler divergence of a model with deferred experts (added one layer
later) from the same model without, in nats per token. It holds for eight experts per token, of
which as many are immediate as the setting ``auto`` keeps.
"""
MAX_WINDOWS, QUICK_WINDOWS = 96, 4
BLOCK_SIZE = 64


class _Scores(NamedTuple):
    """Figures over the tokens of all answers (the tokens of each text after its prompt)."""

    loss: float
    agreement: float
    """Share of tokens whose most likely successor is the same as without deferral."""
    divergence: float
    """Kullback-Leibler divergence from the model without deferral, in nats per token."""


class _Model:
    """One model, which runs with any number of deferred experts (whose outputs the next layer
    adds).
    """

    def __init__(self, folder: Path, num_windows: int) -> None:
        self._folder, self._num_windows = folder, num_windows
        self._scores: dict[int, _Scores] = {}

    @cached_property
    def top_k(self) -> int:
        """Number of experts that the model chooses for a token."""
        plan = plan_model(self._folder)
        return plan.spec.top_k

    @cached_property
    def _windows(self) -> list[list[int]]:
        root = Path(sysconfig.get_paths()["stdlib"])
        found = [root / name for name in HELD_OUT if (root / name).is_file()]
        if not found:
            raise NotFoundError("bench.deferral", f"{root} has none of {', '.join(HELD_OUT)}")
        tokenizer = load_tokenizer(self._folder)
        text = "".join(path.read_text("utf-8") for path in found)
        ids = tokenizer.encode(text)
        starts = range(0, len(ids) - WINDOW, WINDOW)
        return [ids[start : start + WINDOW] for start in starts][: self._num_windows]

    @cached_property
    def _exact(self) -> list[Tensor]:
        return self._compute(0)

    def _compute(self, num_deferred: int) -> list[Tensor]:
        """Return the log-probabilities of the next token after each token of the answers except the
        last.
        """
        model = load_model(plan_model(self._folder, deferred_experts=num_deferred))
        table = list(range(-(-WINDOW // BLOCK_SIZE)))
        cache = model.allocate_kv(len(table), block_size=BLOCK_SIZE)
        logits: list[Tensor] = []
        for ids in self._windows:
            chunk = SequenceChunk(ids, 0, table, "all", prompt_len=PROMPT)
            rows = model.forward(PagedBatch.build([chunk], BLOCK_SIZE), cache)
            logits.append(functional.log_softmax(rows[PROMPT:-1], -1))
        return logits

    def score(self, num_deferred: int) -> _Scores:
        """Return the figures of the model with ``num_deferred`` deferred experts (whose outputs the
        next layer adds); they are computed once for each number.
        """
        if num_deferred not in self._scores:
            ours = self._exact if num_deferred == 0 else self._compute(num_deferred)
            sums, count = torch.zeros(3, dtype=torch.float64), 0
            for ids, mine, exact in zip(self._windows, ours, self._exact, strict=True):
                targets = torch.tensor(ids[PROMPT + 1 :])
                sums[0] += functional.nll_loss(mine, targets, reduction="sum")
                sums[1] += (mine.argmax(-1) == exact.argmax(-1)).sum()
                sums[2] += (exact.exp() * (exact - mine)).sum()
                count += len(targets)
            self._scores[num_deferred] = _Scores(*(sums / count).tolist())
        return self._scores[num_deferred]

    def check(self, num_deferred: int) -> str:
        """Return ``ok``, or the error: the model predicts no better than chance, or deferral
        changes it too much.
        """
        score, num_immediate = self.score(num_deferred), self.top_k - num_deferred
        if score.loss >= 8:
            return f"a loss of {score.loss:.2f}: this model knows nothing"
        if num_immediate >= MIN_IMMEDIATE and score.divergence > MAX_DIVERGENCE:
            return f"a divergence of {score.divergence:.3f}, above {MAX_DIVERGENCE}"
        return "ok"


def make_cases(*, quick: bool) -> Iterator[BenchCase]:
    """Yield loss, agreement and divergence for each number of deferred experts.

    Args:
       quick: a few windows, on the demo model alone.
    """
    folders = {"demo": DEMO_FOLDER}
    if not quick and MANY_EXPERTS.expanduser().is_dir():
        folders["many-experts"] = MANY_EXPERTS.expanduser()
    for name, folder in folders.items():
        model = _Model(folder, QUICK_WINDOWS if quick else MAX_WINDOWS)
        for num_deferred in range(model.top_k + 1):
            for figure, unit, higher in (
                ("loss", "nats a token", False),
                ("agreement", "of likeliest tokens", True),
                ("divergence", "nats a token", False),
            ):
                yield _make_case(model, name, num_deferred, figure, unit, is_higher=higher)


def _make_case(
    model: _Model, name: str, num_deferred: int, figure: str, unit: str, *, is_higher: bool
) -> BenchCase:
    has_baseline = figure == "loss"
    return BenchCase(
        name=f"model={name} deferred={num_deferred} figure={figure}",
        unit=unit,
        ours=lambda: getattr(model.score(num_deferred), figure),
        check=lambda: model.check(num_deferred),
        baseline=(lambda: model.score(0).loss) if has_baseline else None,
        baseline_name="none deferred" if has_baseline else None,
        higher_is_better=is_higher,
        max_rounds=1,
    )

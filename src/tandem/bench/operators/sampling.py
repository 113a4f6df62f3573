"""`tandem bench sampling`: choosing tokens from logits, against torch and against reading the
logits.

The logits are Gaussian, of a large vocabulary, and in the CPU's cache, as they are after the LM
head has written them. The rival composes torch's own operators as other servers do, with one thread
or all, whichever is faster: a maximum; softmax and a draw by inversion; sort, softmax, cumulative
sum, mask and a draw; log-softmax and the largest. The ceiling is a plain sum of the logits.

Checks compare the drawn tokens with the float64 oracle, as the tests do.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem import _native
from tandem.bench.harness import BenchCase, time_call
from tandem.kernels import tolerance
from tandem.kernels.native import view_tensor
from tandem.kernels.oracles import reference

__all__ = ["make_cases"]

VOCAB_SIZES = {"qwen3": 151_936, "demo": 8192}
QUICK_VOCABS = ("qwen3",)
ROWS = (1, 16)
SPREAD = 3.0
"""Standard deviation of the logits: at temperature 0.6, top_p 0.9 keeps some dozens of tokens."""
NUM_TOP = 20
RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "all": {"temperature": 1.0},
    "top_k": {"temperature": 0.7, "top_k": 50},
    "top_p": {"temperature": 0.6, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
}
CALLS = 10
"""Calls timed together, since one call takes only some microseconds."""


def draw(mass: Tensor) -> Tensor:
    """Draw one index per row by its probability mass; torch's ``multinomial`` took a hundred times
    as long here.
    """
    total = mass.cumsum(-1)
    target = torch.rand(len(mass), 1) * total[:, -1:]
    return torch.searchsorted(total, target, right=True).clamp_(max=mass.shape[1] - 1)


def compose(logits: Tensor, rule: dict[str, Any]) -> Tensor:
    """Choose a token for each row of logits with torch's operators, as the sampling rule says;
    returns [rows].
    """
    if rule["temperature"] == 0.0:
        return logits.argmax(-1)
    scaled = logits / rule["temperature"]
    if "top_k" in rule:
        values, ids = scaled.topk(rule["top_k"])
        return ids.gather(1, draw(values.softmax(-1)))[:, 0]
    probs = scaled.softmax(-1)
    if "min_p" in rule:
        probs = probs * (probs >= rule["min_p"] * probs.amax(-1, keepdim=True))
    if "top_p" in rule:
        probs, ids = probs.sort(-1, descending=True)
        probs = probs * (probs.cumsum(-1) - probs < rule["top_p"])
        return ids.gather(1, draw(probs))[:, 0]
    return draw(probs)[:, 0]


@dataclass
class _Case:
    """One measured case: rows of logits and a sampling rule (how a token is chosen); rule None
    computes log-probabilities.
    """

    vocab_size: int
    num_rows: int
    rule: dict[str, Any] | None
    rival_threads: int = 1

    def prepare(self) -> str:
        """Make the rows of logits, check our result, choose the number of threads with which the
        rival is faster; return ``ok`` or the error.
        """
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(self.num_rows, self.vocab_size, generator=generator) * SPREAD
        self.view = view_tensor(self.logits)
        advised = _native.recommend_threads(_native.read_topology()).threads
        self.pool = _native.ThreadPool(advised)
        self.ids = list(range(self.num_rows))
        self.draws = [(i + 0.37) / (self.num_rows + 1) for i in range(self.num_rows)]
        if self.rule is not None:
            self.rules = [_native.SamplingRule(**self.rule) for _ in self.ids]
        problem = self._check()
        times = {}
        for threads in {1, advised}:
            self.rival_threads = threads
            times[threads] = min(self.time_rival() for _ in range(3))
        self.rival_threads = min(times, key=lambda threads: times[threads])
        return problem

    def _check(self) -> str:
        found = self._run()
        for row, result in enumerate(found):
            values = self.logits[row].double().numpy()
            if self.rule is None:
                want = reference.log_softmax(values[None])
                bound = tolerance.log_softmax(want)[0, 0]
                if not abs(result - want[0, row]) <= bound:
                    return f"log-probability {result} of row {row} is not {want[0, row]}"
            elif result not in self._list_right(values, self.draws[row]):
                return f"token {result} of row {row} is not the oracle's"
        return "ok"

    def _list_right(self, values: Any, draw: float) -> set[int]:
        assert self.rule is not None
        if self.rule["temperature"] == 0.0:
            return {int(np.argmax(values))}
        error = tolerance.share_of_mass(values, self.rule["temperature"])
        order, mass = reference.keep_tokens(values, **self.rule)
        first, last = (
            reference.choose_token(order, mass, min(max(draw + nudge, 0.0), 1.0))
            for nudge in (-error, error)
        )
        return set(order[first : last + 1].tolist())

    def _run(self) -> list[Any]:
        if self.rule is None:
            return _native.gather_logprobs(self.view, self.ids, NUM_TOP, self.pool)[0]
        return _native.sample_tokens(self.view, self.rules, self.draws, self.ids, self.pool)

    def _run_rival(self) -> None:
        if self.rule is not None:
            compose(self.logits, self.rule)
            return
        logprobs = self.logits.log_softmax(-1)
        logprobs.topk(NUM_TOP)
        logprobs.gather(1, torch.tensor(self.ids)[:, None])

    def _time(self, call: Callable[[], object]) -> float:
        return time_call(lambda: [call() for _ in range(CALLS)]) / CALLS * 1e6

    def time_ours(self) -> float:
        """Return the microseconds of one call of our sampler."""
        return self._time(self._run)

    def time_rival(self) -> float:
        """Return the microseconds of the same choice by torch's operators."""
        torch.set_num_threads(self.rival_threads)
        return self._time(self._run_rival)

    def time_reading(self) -> float:
        """Return the microseconds of a sum of all logits."""
        torch.set_num_threads(1)
        return self._time(self.logits.sum)


def _make_case(model: str, num_rows: int, rule: str) -> BenchCase:
    case = _Case(VOCAB_SIZES[model], num_rows, RULES.get(rule))
    return BenchCase(
        name=f"vocab={model} rule={rule} rows={num_rows}",
        unit="us",
        ours=case.time_ours,
        check=case.prepare,
        baseline=case.time_rival,
        baseline_name=lambda: f"torch threads={case.rival_threads}",
        ceiling=case.time_reading,
    )


def make_cases(*, quick: bool) -> Iterator[BenchCase]:
    """Yield the cases; ``quick`` leaves out the small vocabulary."""
    vocabs = QUICK_VOCABS if quick else tuple(VOCAB_SIZES)
    for model, num_rows, rule in itertools.product(vocabs, ROWS, (*RULES, "logprobs")):
        yield _make_case(model, num_rows, rule)

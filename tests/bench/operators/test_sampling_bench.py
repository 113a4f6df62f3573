"""The sampling benchmark runs at toy size, so that it cannot rot: check, rival and ceiling."""

from collections.abc import Iterator

import pytest
import torch

from tandem.bench.harness import run_cases
from tandem.bench.operators import sampling


@pytest.fixture(autouse=True)
def toy_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also restores torch's threads, which the rival sets."""
    num_threads = torch.get_num_threads()
    monkeypatch.setattr(sampling, "VOCAB_SIZES", {"qwen3": 300, "demo": 70})
    yield
    torch.set_num_threads(num_threads)


def test_cases_run_at_toy_size():
    records = list(run_cases("sampling", sampling.make_cases(quick=False), budget_s=0.2, rounds=1))
    assert len(records) == 24
    for record in records:
        assert record.check == "ok", record.case
        assert record.ratio is not None
        assert record.ceiling_fraction is not None
        assert "threads=" in (record.baseline_name or "")


@pytest.mark.parametrize("rule", ["greedy", "top_p", "logprobs"])
def test_a_wrong_result_reports_no_time(rule, monkeypatch: pytest.MonkeyPatch):
    wrong = [-1.5] if rule == "logprobs" else [299]
    monkeypatch.setattr(sampling._Case, "_run", lambda _: wrong)
    (record,) = run_cases("s", [sampling._make_case("qwen3", 1, rule)], budget_s=1, rounds=1)
    assert record.ours is None
    assert "row 0" in record.check


def test_quick_is_a_part():
    quick = {case.name for case in sampling.make_cases(quick=True)}
    full = {case.name for case in sampling.make_cases(quick=False)}
    assert quick < full

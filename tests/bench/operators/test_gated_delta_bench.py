"""The gated delta benchmark runs at toy size, so that it cannot rot: check, rival and limits."""

from collections.abc import Iterator

import pytest
import torch

from tandem.bench.harness import run_cases
from tandem.bench.operators import gated_delta


@pytest.fixture(autouse=True)
def toy_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also restores torch's threads, which the rival sets."""
    num_threads = torch.get_num_threads()
    monkeypatch.setattr(gated_delta, "COLD_BYTES", 1 << 16)
    monkeypatch.setattr(gated_delta, "SHAPES", {"toy": gated_delta._Shape(128, 2, 4, 16, 32)})
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.slow  # transformers' family takes seconds to import.
def test_cases_run_at_toy_size():
    cases = [gated_delta._make_case("toy", *rows) for rows in ((1, 1), (3, 1), (2, 70))]
    for record in run_cases("gated-delta", cases, budget_s=1, rounds=1):
        assert record.check == "ok", record.case
        assert record.ratio is not None
        assert record.ceiling_fraction is not None
        assert "projections int8g128" in record.limits
        assert "threads=" in (record.baseline_name or "")


def test_a_wrong_result_reports_no_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gated_delta, "LARGEST_ERROR", 1e-9)
    cases = [gated_delta._make_case("toy", 1, 20)]
    (record,) = run_cases("gated-delta", cases, budget_s=1, rounds=1)
    assert record.ours is None
    assert "relative error" in record.check


def test_quick_is_a_part(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    quick = {case.name for case in gated_delta.make_cases(quick=True)}
    full = {case.name for case in gated_delta.make_cases(quick=False)}
    assert quick < full

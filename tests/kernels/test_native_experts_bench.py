"""Goal: the kernel benchmark does not rot.

Method: its own cases at toy size, one round each; every check passes and every figure is there.
"""

from collections.abc import Iterator

import pytest
import torch

from tandem.bench import kernels
from tandem.bench.harness import run_cases


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    """The rival sets torch's number of threads."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def test_cases_run_at_toy_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "HIDDEN", 256)
    monkeypatch.setattr(kernels, "INNER", 128)
    cases = kernels.make_cases(quick=True)
    records = list(run_cases("kernels", cases, budget_s=5, rounds=1))
    assert len(records) == len(kernels.FORMATS) * len(kernels.QUICK_TOKENS)
    for record in records:
        assert record.check == "ok", record.case
        assert record.ratio is not None
        assert record.ceiling_fraction is not None
        assert "threads=" in (record.baseline_name or "")


def test_a_wrong_result_reports_no_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "HIDDEN", 256)
    monkeypatch.setattr(kernels, "INNER", 128)
    monkeypatch.setattr(kernels, "FORMATS", {"int8g128": 1e-6})
    cases = kernels.make_cases(quick=True)
    records = list(run_cases("kernels", cases, pattern="*tokens=1", budget_s=5, rounds=1))
    assert [record.ours for record in records] == [None]
    assert "relative error" in records[0].check

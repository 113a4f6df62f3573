"""Goal: the kernel benchmarks do not rot.

Method: their own cases at toy size, one round each; every check passes and every figure is there.
"""

import itertools
from collections.abc import Iterator

import pytest
import torch

from tandem.bench import linear, moe
from tandem.bench.harness import run_cases

TOY_SHAPES = [moe.Shape("toy", 256, 128, 2, 4), moe.Shape("toy-2", 512, 256, 2, 2)]


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    """The rival sets torch's number of threads."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "SHAPES", TOY_SHAPES)
    monkeypatch.setattr(linear, "SHAPES", {"toy": (256, 300), "toy-2": (128, 64)})
    monkeypatch.setattr(linear, "QUICK_SHAPES", ("toy",))
    for module in (moe, linear):
        monkeypatch.setattr(module, "TOTAL_WEIGHTS", 500_000)


@pytest.mark.parametrize("quick", [True, False])
def test_cases_run_at_toy_size(quick: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(moe, "TOKENS", (4, 30))
    monkeypatch.setattr(linear, "ROWS", (4, 30))
    cases = itertools.chain(moe.make_cases(quick=quick), linear.make_cases(quick=quick))
    records = list(run_cases("kernels", cases, budget_s=5, rounds=1))
    if quick:
        assert len(records) == 3 * len(moe.QUICK_TOKENS) + 3 * len(linear.QUICK_ROWS)
    else:
        assert len(records) == 2 * 2 * (len(moe.FORMATS) + len(linear.FORMATS))
    for record in records:
        assert record.check == "ok", record.case
        assert record.ratio is not None
        assert record.ceiling_fraction is not None
        assert "threads=" in (record.baseline_name or "")


@pytest.mark.parametrize("module", [moe, linear], ids=["moe", "linear"])
def test_a_wrong_result_reports_no_time(module, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "FORMATS", {"int8g128": 1e-6})
    monkeypatch.setattr(module, "QUICK_FORMATS", ("int8g128",))
    cases = module.make_cases(quick=True)
    records = list(run_cases("kernels", cases, pattern="*tokens=1", budget_s=5, rounds=1))
    assert [record.ours for record in records] == [None]
    assert "relative error" in records[0].check


def test_cases_that_do_not_match_make_no_weights(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object) -> None:
        raise AssertionError(args)

    monkeypatch.setattr(moe, "_Layers", refuse)
    cases = linear.make_cases(quick=True)
    records = list(run_cases("kernels", cases, pattern="op=linear*", budget_s=5, rounds=1))
    assert {record.check for record in records} == {"ok"}

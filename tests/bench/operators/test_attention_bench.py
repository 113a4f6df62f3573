"""The attention benchmark runs at toy size, so that it cannot rot: check, rival and ceiling."""

from collections.abc import Iterator

import pytest
import torch

from tandem.bench.harness import run_cases
from tandem.bench.operators import attention


@pytest.fixture(autouse=True)
def toy_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also restores torch's threads, which the rival sets."""
    num_threads = torch.get_num_threads()
    monkeypatch.setattr(attention, "COLD_BYTES", 1 << 20)
    shapes = {
        "gqa": attention._Shape(heads=4, kv_heads=2, key_dim=32, value_dim=32),
        "mla": attention._Shape(heads=4, kv_heads=1, key_dim=40, value_dim=32),
    }
    monkeypatch.setattr(attention, "SHAPES", shapes)
    yield
    torch.set_num_threads(num_threads)


def test_cases_run_at_toy_size():
    cases = [
        attention._make_case("gqa", "bf16", 1, 100),
        attention._make_case("gqa", "int8", 1, 100),
        attention._make_case("gqa", "fp8", 3, 100),
        attention._make_case("gqa", "bf16", 70, 70),
        attention._make_case("mla", "bf16", 1, 100),
        attention._make_case("mla", "bf16", 5, 70),
    ]
    for record in run_cases("attention", cases, budget_s=1, rounds=1):
        assert record.check == "ok", record.case
        assert record.ratio is not None
        assert record.ceiling_fraction is not None
        assert "threads=" in (record.baseline_name or "")


def test_a_wrong_result_reports_no_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "ERRORS", {"bf16": 1e-9})
    cases = [attention._make_case("gqa", "bf16", 1, 100)]
    (record,) = run_cases("attention", cases, budget_s=1, rounds=1)
    assert record.ours is None
    assert "relative error" in record.check


def test_quick_is_a_part():
    quick = {case.name for case in attention.make_cases(quick=True)}
    full = {case.name for case in attention.make_cases(quick=False)}
    assert quick < full
    for kind in ("gqa", "mla"):
        for context in (1024, 1 << 20):
            assert f"kind={kind} kv=bf16 tokens=1 context={context}" in full


def test_a_case_that_does_not_fit_says_so(monkeypatch: pytest.MonkeyPatch):
    """A million tokens of a real head take 11 GB with the rival's copies."""
    monkeypatch.setattr(attention, "ROW_BYTES", 1 << 50)
    cases = [attention._make_case("gqa", "bf16", 1, 100)]
    (record,) = run_cases("attention", cases, budget_s=1, rounds=1)
    assert record.ours is None
    assert "MiB of memory" in record.check

"""The harness: ratios point the right way, rounds interleave, a failed check gives no time."""

import itertools
import os
import signal
import tempfile
from pathlib import Path

import pytest

from tandem.bench.harness import BenchCase, format_record, run_cases
from tandem.cli.commands.bench import exit_when_terminated
from tandem.core.errors import InternalError, NotFoundError


def ok() -> str:
    return "ok"


def run_one(case: BenchCase, rounds: int = 4):
    (record,) = run_cases("toy", [case], budget_s=5.0, rounds=rounds)
    return record


def test_rounds_interleave_and_ratio_is_of_each_round():
    calls: list[str] = []
    ours, rival = itertools.cycle([1.0, 2.0]), itertools.cycle([3.0, 4.0])

    def time_ours() -> float:
        calls.append("a")
        return next(ours)

    def time_rival() -> float:
        calls.append("b")
        return next(rival)

    record = run_one(
        BenchCase("x=1", "ms", time_ours, ok, baseline=time_rival, baseline_name="rival")
    )
    assert calls == ["a", "b"] * 4
    assert record.ratio == pytest.approx(2.5)  # Median of 3, 2, 3, 2: not of medians.
    assert record.ratio_iqr == (2.0, 3.0)
    assert record.n == 4


@pytest.mark.parametrize(("higher", "ratio"), [(True, 0.5), (False, 2.0)])
def test_above_one_means_ours_is_better(higher: bool, ratio: float):
    case = BenchCase(
        "x=1", "u", lambda: 1.0, ok, lambda: 2.0, "rival", lambda: 2.0, higher_is_better=higher
    )
    record = run_one(case)
    assert record.ratio == ratio
    assert record.ceiling_fraction == ratio


def test_failed_check_gives_no_time():
    def never() -> float:
        raise AssertionError("timed although the check failed")

    def explode() -> str:
        raise InternalError("toy.check", "broken")

    for check in (lambda: "row 3 differs", explode):
        record = run_one(BenchCase("x=1", "ms", never, check))
        assert record.ours is None
        assert record.n == 0
        assert "FAILED" in format_record(record)


def test_pattern_selects_and_an_empty_selection_is_an_error():
    cases = [BenchCase(f"phase={p}", "ms", lambda: 1.0, ok) for p in ("prefill", "decode")]
    names = [r.case for r in run_cases("toy", cases, patterns=["*=dec*"], budget_s=1, rounds=1)]
    assert names == ["phase=decode"]
    both = run_cases("toy", cases, patterns=["*=dec*", "*=pre*"], budget_s=1, rounds=1)
    assert [record.case for record in both] == ["phase=prefill", "phase=decode"]
    with pytest.raises(NotFoundError):
        list(run_cases("toy", cases, patterns=["nope"], budget_s=1, rounds=1))


def test_the_best_rival_is_the_baseline():
    rivals = {"slow": lambda: 9.0, "quick": lambda: 3.0}
    record = run_one(BenchCase("x=1", "us", lambda: 2.0, ok, rivals=rivals))
    assert record.baseline_name == "quick"
    assert record.ratio == pytest.approx(1.5)
    assert record.others == {"slow": 9.0}
    assert "slow 9 us" in format_record(record)
    case = BenchCase("x=1", "op/s", lambda: 2.0, ok, rivals=rivals, higher_is_better=True)
    assert run_one(case).baseline_name == "slow"


def test_limits_are_reported_by_name():
    record = run_one(
        BenchCase("x=1", "us", lambda: 2.0, ok, ceiling=lambda: 1.0, limits={"kept": lambda: 3.0})
    )
    assert record.ceiling_fraction == pytest.approx(0.5)
    assert record.limits == {"kept": (3.0, 1.5)}
    assert "150% of kept 3 us" in format_record(record)


def test_a_bench_that_is_terminated_leaves_no_files(tmp_path):
    """A time limit ends it by SIGTERM, and its models are gigabytes in the temporary folder."""
    handler = signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(SystemExit, match="143"),
        exit_when_terminated(),
        tempfile.TemporaryDirectory(dir=tmp_path) as folder,
    ):
        (Path(folder) / "model").write_bytes(b"weights")
        os.kill(os.getpid(), signal.SIGTERM)
        signal.sigtimedwait([], 5.0)
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is handler

"""Goal: the planner's benchmark measures a step and predicts the same one."""

import pytest

from tandem.bench.harness import run_cases
from tandem.bench.serving import planned


@pytest.mark.slow
def test_each_phase_is_measured_beside_its_prediction():
    cases = planned.make_cases(quick=True)
    patterns = ["format=int8g128 phase=decode*batch=1", "format=int8g128 phase=prefill*"]
    records = [*run_cases("plan", cases, patterns=patterns, budget_s=0.0, rounds=1)]
    assert [record.check for record in records] == ["ok", "ok"]
    for record in records:
        assert record.baseline_name == "the planner"
        assert record.ours is not None
        assert record.baseline is not None
        assert record.ratio == pytest.approx(record.baseline / record.ours)

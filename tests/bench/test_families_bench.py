"""Goal: the bench of families compares a step with that step's own operators, all of them."""

import pytest

pytest.importorskip("transformers", reason="the bench needs the `serve` extra")

from tandem.bench.serving.families import make_cases


def test_a_case_records_the_operators_of_a_step():
    """A baseline that leaves operators out would flatter no one, but mean nothing."""
    case = next(iter(make_cases(quick=True)))
    assert case.name == "family=llama size=toy phase=decode batch=1"
    assert case.check() == "ok"
    assert case.baseline is not None
    assert case.ours() > 0
    assert case.baseline() > 0

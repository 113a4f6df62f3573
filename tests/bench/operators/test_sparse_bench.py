"""The benchmark of sparse attention runs at toy size, so that it cannot rot."""

import pytest

from tandem.bench.harness import run_cases
from tandem.bench.operators import sparse


@pytest.mark.slow  # It writes and loads a model.
def test_cases_run_at_toy_size():
    records = list(run_cases("sparse", sparse.make_cases(quick=True), budget_s=1, rounds=1))
    parts = [record.case.split()[0].removeprefix("part=") for record in records]
    assert parts == ["step", "index", "file", "file", "file", "fetch"]
    for record in records:
        assert record.check == "ok", record.case
    assert all(record.ratio is not None for record in records if record is not records[1])
    assert records[1].ceiling_fraction is not None

"""The transfer bench runs at toy size: its cases are right and each yields a record."""

import fnmatch

from tandem.bench.harness import run_cases
from tandem.bench.transfer import make_cases


def test_cases_check_and_measure():
    records = list(
        run_cases(
            "transfer",
            make_cases(quick=True),
            patterns=["* size=4096 batch=1 walk=no"],
            budget_s=0.05,
            rounds=2,
        )
    )
    assert len(records) == 8
    assert all(record.check == "ok" and record.ratio for record in records)
    assert fnmatch.fnmatch(records[0].case, "transport=tcp op=write *")

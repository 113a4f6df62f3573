"""The cluster benchmark runs at toy size, so that it cannot rot: checks, arms and records."""

import pytest
import torch

from tandem.bench.harness import run_cases
from tandem.bench.serving import cluster


def test_cases_at_toy_size():
    num_threads = torch.get_num_threads()
    try:
        records = list(
            run_cases(
                "cluster",
                cluster.make_cases(quick=True),
                patterns=["case=prefix*", "case=chat tiers=L1+L3 turn=[12]*"],
                budget_s=0.1,
                rounds=1,
            )
        )
    finally:
        torch.set_num_threads(num_threads)
    assert len(records) == 3
    assert [record.check for record in records] == ["ok"] * 3
    assert all(record.ours and record.baseline for record in records)


@pytest.mark.slow
def test_interference_at_toy_size():
    """Three instance processes: both arms give the same tokens, and both metrics have a ratio."""
    records = list(
        run_cases(
            "cluster",
            cluster.make_cases(quick=True),
            patterns=["case=interference*"],
            budget_s=0.1,
            rounds=1,
        )
    )
    assert [record.check for record in records] == ["ok"] * 2
    assert all(record.ours and record.baseline for record in records)

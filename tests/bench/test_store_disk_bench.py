"""`tandem bench store-disk` at toy size. Goal: it runs, and its check can fail."""

import pytest

from tandem.bench import store_disk
from tandem.bench.harness import run_cases


@pytest.fixture(autouse=True)
def toy_sizes(monkeypatch, tmp_path):
    monkeypatch.setattr(store_disk, "QUICK_SIZES", (10_000,))
    monkeypatch.setattr(store_disk, "QUICK_TOTAL_BYTES", 100_000)
    monkeypatch.setattr(store_disk.tempfile, "tempdir", str(tmp_path))


def run() -> dict[str, str]:
    cases = store_disk.make_cases(quick=True)
    records = run_cases("store-disk", cases, budget_s=0.1, rounds=1)
    return {record.case: record.check for record in records}


def test_all_cases_run(tmp_path):
    assert set(run().values()) == {"ok"}
    assert not list(tmp_path.iterdir())


def test_wrong_bytes_are_seen(monkeypatch):
    async def load_nothing(disk):
        return None

    monkeypatch.setattr(store_disk._Disk, "_read", load_nothing)
    assert all("other bytes" in check for check in run().values())

"""The transfer bench runs at toy size: its cases are right and each yields a record."""

import fnmatch
import os
from pathlib import Path

import pytest

from tandem.bench import transfer
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


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_cases_without_polling_run_where_they_say_and_nowhere_afterwards(
    monkeypatch: pytest.MonkeyPatch,
):
    free = os.sched_getaffinity(0)
    measure, seen = transfer._measure_us, []

    def spy(function):
        parents = [f"/proc/{os.getpid()}", *_list_children()]
        seen.append([sorted(_list_cores(parent)) for parent in parents])
        return measure(function)

    monkeypatch.setattr(transfer, "_measure_us", spy)
    for cores, expected in (
        ("one", {((min(free),), (min(free),))}),
        ("two", {((min(free),), (sorted(free)[1],))}),
    ):
        seen.clear()
        (record,) = run_cases(
            "transfer",
            make_cases(quick=True),
            patterns=[f"transport=tcp op=read size=4096 * polling=no cores={cores}"],
            budget_s=0.05,
            rounds=1,
        )
        assert record.check == "ok"
        assert record.baseline_name == "blocking sockets"
        assert record.ratio
        # Of this process and of the one that serves this case, the younger of two.
        assert {(one[0][0], one[-1][0]) for one in seen} == expected
        assert all(len(sets) == 1 for one in seen for sets in (one[0], one[-1]))
    assert _list_cores(f"/proc/{os.getpid()}") == {tuple(sorted(free))}


def _list_children() -> list[str]:
    """Return the folders of this process's children, the youngest last."""
    text = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
    folders = [f"/proc/{child}" for child in text.split()]
    return sorted(folders, key=_begin_ticks)  # Numbers begin anew at some point.


def _begin_ticks(process: str) -> int:
    return int(Path(process, "stat").read_text().rsplit(")", 1)[1].split()[19])


def _list_cores(process: str) -> set[tuple[int, ...]]:
    """Return the sets of cores that its threads may use."""
    tasks = Path(process, "task").iterdir()
    return {tuple(sorted(os.sched_getaffinity(int(task.name)))) for task in tasks}

"""`tandem bench store` at toy size, so that it cannot rot. Goal: its checks hold, and can fail."""

import contextlib
import os

import pytest

from tandem.bench import store as bench
from tandem.bench.harness import run_cases


def test_deciders_are_measured(monkeypatch):
    monkeypatch.setattr(bench, "NUM_DIRECTORY_KEYS", 20_000)
    cases = [*bench._make_directory_cases(quick=True), bench._make_exists_case(3000)]
    records = list(run_cases("store", cases, budget_s=0.1, rounds=1))
    assert [record.check for record in records] == ["ok"] * 3
    memory = next(record for record in records if "op=memory" in record.case)
    assert memory.unit == "bytes/object"
    assert memory.ours is not None


def test_the_curve_of_the_allocator():
    for distribution in bench.DISTRIBUTIONS:
        filling, *rest = bench.trace_allocator(distribution, 20_000, points=2)
        assert filling.used_share >= 0.93
        assert [point.num_puts for point in rest] == [10_000, 20_000]
        assert all(point.mean_ns > 0 for point in rest)


@pytest.fixture
def toy_sizes(monkeypatch):
    monkeypatch.setattr(bench, "SEGMENT_BYTES", 2**26)
    monkeypatch.setattr(bench, "QUICK_HOST_BYTES", 2**26)
    monkeypatch.setattr(bench, "MEASURE_S", 0.001)
    monkeypatch.setattr(bench, "QUICK_SIZES", (4096,))
    monkeypatch.setattr(bench, "BATCHES", (3,))
    monkeypatch.setattr(bench, "NUM_CLIENTS", 2)
    monkeypatch.setattr(bench, "LATENCY_S", 0.1)
    monkeypatch.setattr(bench, "_make_allocator_cases", lambda quick: iter(()))
    monkeypatch.setattr(bench, "_make_directory_cases", lambda quick: iter(()))


def end_with(name, cases):
    """Cases up to one: the next would start the store of the other path."""
    for case in cases:
        yield case
        if case.name.startswith(name):
            return


def test_objects_within_a_host(toy_sizes):
    """One store, which is two processes; ``first_put`` runs in ``test_children.py``."""
    cases = bench.make_cases(quick=True)
    with contextlib.closing(cases):
        records = list(
            run_cases(
                "store",
                end_with("op=exists", cases),
                patterns=["op=exists*", "path=*"],
                budget_s=0.1,
                rounds=1,
            )
        )
    num_near = 2 if len(os.sched_getaffinity(0)) > 1 else 0
    assert [record.check for record in records] == ["ok"] * (7 + num_near)
    assert {record.case.split()[0] for record in records} == {"path=samehost", "op=exists"}


@pytest.mark.slow
def test_objects_over_both_paths(toy_sizes):
    cases = bench.make_cases(quick=True)
    records = list(run_cases("store", cases, budget_s=0.1, rounds=1))
    num_near = 4 if len(os.sched_getaffinity(0)) > 1 else 0
    assert [record.check for record in records] == ["ok"] * (15 + num_near)
    assert sum(" cores=near" in record.case for record in records) == num_near
    assert {record.case.split()[0] for record in records} == {
        "path=samehost", "path=tcp", "op=exists", "op=find", "op=first_put",
    }  # fmt: skip

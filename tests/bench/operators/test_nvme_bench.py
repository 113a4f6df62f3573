"""Goal: the benchmark of experts on disk compares equal work, over pages that are gone."""

import mmap

import numpy as np
import pytest

from tandem.bench.harness import run_cases
from tandem.bench.operators import nvme


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    for name, value in {"HIDDEN": 128, "INNER": 64, "NUM_EXPERTS": 64, "QUICK_TOKENS": 4}.items():
        monkeypatch.setattr(nvme, name, value)


def test_cases_measure_every_way():
    (record,) = run_cases("nvme", nvme.make_cases(quick=True), budget_s=0.1, rounds=1)
    assert record.check == "ok"
    assert min(record.ours, record.baseline, record.ceiling) > 0
    assert record.baseline_name in ("mapped", "mapped willneed")
    assert record.limits["planned"][0] > 0
    assert record.limits["without guesses"][0] > 0


def test_routers_choose_the_trace_and_guess_as_often_right_as_they_should(tmp_path, monkeypatch):
    """Otherwise nothing would be read ahead, and both figures would be of the same work."""
    monkeypatch.setattr("tandem.placement.experts.tier.MIN_GUESSES", 4)
    model = nvme._Model(tmp_path, num_layers=3, num_tokens=6)
    case = nvme._Case(model, 16, repeats=False)
    for layer in (1, 2):
        router = model.make_router(layer, case.trace)
        for x, token in zip(model.x, case.trace, strict=True):
            chosen = set(token[layer][0].tolist())
            assert set(router.route(x[layer])[2][0].tolist()) == chosen
            guessed = set(router.route(x[layer - 1])[2][0].tolist())
            assert len(guessed & chosen) == round(nvme.TOP_K * nvme.GUESSED_RIGHT)
    assert case.check() == "ok"
    assert case.num_guessed > 0


def test_other_sums_give_no_time(monkeypatch):
    monkeypatch.setattr(nvme, "_equal", lambda *_: False)
    (record,) = run_cases("nvme", nvme.make_cases(quick=True), budget_s=0.1, rounds=1)
    assert record.ours is None
    assert "other sums" in record.check


def test_resident_pages_are_counted(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * (64 * mmap.PAGESIZE))
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    assert nvme.count_resident(np.frombuffer(mapped, np.uint8)) == 64

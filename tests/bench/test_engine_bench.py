"""The engine benchmark runs at toy size, so that it cannot rot: check and record."""

import contextlib
import sys

import pytest
from transformers.utils.logging import disable_progress_bar

from tandem.bench.harness import run_cases
from tandem.bench.serving import engine as engine_bench
from tandem.bench.serving.driver import EngineDriver
from tandem.bench.serving.engine import _make_deep_model

LAYERS = 48
CALLS_PER_LAYER = 60
"""Calls of Python and C functions that one layer of a decode step may cost; 44 when it was set."""


@pytest.mark.slow
def test_quick_case_checks_and_compares():
    """The command around it is that of the model benchmark, and tested with it."""
    with contextlib.closing(engine_bench.make_cases(quick=True)) as cases:
        run = run_cases("engine", cases, patterns=("model=tiny48*",), budget_s=0.1, rounds=1)
        record = next(iter(run))
    assert record.case.split()[1] == "dtype=float32"
    assert record.check == "ok"
    assert record.baseline_name.startswith("transformers")
    assert record.ratio > 0
    assert record.n >= 1


def test_a_deep_model_of_tiny_width_costs_little_outside_kernels(tmp_path):
    """Calls are counted, not timed: they are what a step costs beside its kernels."""
    disable_progress_bar()
    driver = EngineDriver(_make_deep_model(tmp_path), "bfloat16")
    driver.add(list(range(100)), 16)
    for _ in range(4):  # The prompt, and what the first steps set up.
        driver.engine.step()
    num_calls = 0

    def count(_frame, event, _argument):
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        outputs = driver.engine.step()
    finally:
        sys.setprofile(None)
    assert len(outputs) == 1
    assert LAYERS < num_calls < CALLS_PER_LAYER * LAYERS

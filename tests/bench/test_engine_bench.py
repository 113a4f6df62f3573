"""The engine benchmark runs at toy size, so that it cannot rot: command, check and record."""

import json
import subprocess
import sys

from transformers.utils.logging import disable_progress_bar

from tandem.bench.harness import BenchRecord
from tandem.bench.serving.driver import EngineDriver
from tandem.bench.serving.engine import _make_deep_model

LAYERS = 48
CALLS_PER_LAYER = 60
"""Calls of Python and C functions that one layer of a decode step may cost; 44 when it was set."""


def test_quick_case_checks_and_compares():
    result = subprocess.run(
        [
            sys.executable, "-m", "tandem", "bench", "engine",
            "--quick", "--cases", "model=tiny48*", "--json", "-",
        ],
        capture_output=True,
        text=True,
        timeout=200,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["case"].split()[1] for record in records] == ["dtype=float32"]
    for record in records:
        assert set(record) == set(BenchRecord.__struct_fields__)
        assert record["check"] == "ok"
        assert record["baseline_name"].startswith("transformers")
        assert record["ratio"] > 0
        assert record["n"] >= 1


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

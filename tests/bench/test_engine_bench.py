"""The engine benchmark runs at toy size, so that it cannot rot: command, check and record."""

import json
import subprocess
import sys

from transformers.utils.logging import disable_progress_bar

from tandem.bench.driver import EngineDriver
from tandem.bench.engine import _make_deep_model
from tandem.bench.harness import BenchRecord

STEP_MS = 2.0
"""Outside of kernels, of 48 layers of tiny width; here the whole step, kernels and all."""


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
    assert [record["case"].split()[1] for record in records] == ["dtype=float32", "dtype=bfloat16"]
    for record in records:
        assert set(record) == set(BenchRecord.__struct_fields__)
        assert record["check"] == "ok"
        assert record["baseline_name"].startswith("transformers")
        assert record["ratio"] > 0
        assert record["n"] >= 1


def test_a_deep_model_of_tiny_width_costs_little_outside_kernels(tmp_path):
    """The best of some steps, as others may run here; it took 1.2 ms on the reference machine."""
    disable_progress_bar()
    driver = EngineDriver(_make_deep_model(tmp_path), "bfloat16")
    best_ms = min(driver.measure("decode", [list(range(100))]) for _ in range(30))
    assert best_ms < STEP_MS

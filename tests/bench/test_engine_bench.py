"""The engine benchmark runs at toy size, so that it cannot rot: command, check and record."""

import json
import subprocess
import sys

from tandem.bench.harness import BenchRecord


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
    (line,) = result.stdout.splitlines()
    record = json.loads(line)
    assert set(record) == set(BenchRecord.__struct_fields__)
    assert record["check"] == "ok"
    assert record["baseline_name"].startswith("transformers")
    assert record["ratio"] > 0
    assert record["n"] >= 1

"""The fine-tuning benchmark runs at toy size, so that it cannot rot."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("peft", reason="fine-tuning needs the `finetune` extra")


@pytest.mark.slow
def test_quick_cases_check_and_compare():
    """The command starts its processes, compares losses, and gives tokens/s and memory."""
    command = [sys.executable, "-m", "tandem", "bench", "finetune", "--quick", "--json", "-"]
    result = subprocess.run(
        [*command, "--cases", "*format=int8*"], capture_output=True, text=True, timeout=400
    )
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["unit"] for record in records] == ["tok/s", "GB"]
    assert all(record["check"] == "ok" and record["ratio"] > 0 for record in records)

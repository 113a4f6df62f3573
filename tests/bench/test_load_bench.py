"""The loading benchmark's child process loads, answers and tells what that took."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.bench.serving.load import make_cases
from tandem.core.errors import UnsupportedError


@pytest.mark.slow
def test_the_child_loads_and_tells(tmp_path):
    """As the benchmark starts it, without the rival, which takes ten minutes to install."""
    module = "tandem.bench.serving.load_child"
    command = [sys.executable, "-m", module, "demo", str(tmp_path), "5,6,7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["token"] == max(range(4096), key=outcome["logits"].__getitem__)
    assert outcome["seconds"] > 0
    assert outcome["num_progress_calls"] > 10
    assert 0 < outcome["layer_bytes"] < outcome["packed_bytes"]
    assert any(Path(tmp_path).rglob("*.packed"))


def test_without_a_rival_there_is_nothing_to_measure():
    with pytest.raises(UnsupportedError, match="--with-peers"):
        next(make_cases(quick=True))

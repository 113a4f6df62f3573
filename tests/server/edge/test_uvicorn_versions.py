"""Goal: the connection class, which uses parts of uvicorn that it does not promise, fits each
release that pyproject.toml allows.

Method: the last of each minor release is put before the installed one, and the tests of connections
run on it in a process of their own.
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MINORS = range(30, 55)
"""Of 0.x: those that pyproject.toml allows."""
TESTS = ROOT / "tests" / "server" / "edge" / "test_connections.py"


def test_the_releases_tested_are_those_allowed():
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (line,) = {each for group in lines.values() for each in group if each.startswith("uvicorn")}
    low, high = re.fullmatch(r"uvicorn\[standard\]>=0\.(\d+),<0\.(\d+)", line).groups()
    assert range(int(low), int(high)) == MINORS


@pytest.mark.download
@pytest.mark.parametrize("minor", MINORS)
def test_connections_on_a_release(minor, tmp_path):
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*pip, f"uvicorn~=0.{minor}.0"], check=True, timeout=120)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    told = "import uvicorn; print(uvicorn.__version__, uvicorn.__file__)"
    command = [sys.executable, "-c", told]
    found = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert found.startswith(f"0.{minor}.")
    assert str(tmp_path) in found
    tests = [sys.executable, "-m", "pytest", "-q", "-n0", "-m", "not slow", str(TESTS)]
    ran = subprocess.run(
        tests, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, ran.stdout[-4000:]

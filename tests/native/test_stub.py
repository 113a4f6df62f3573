"""Goal: the committed type stub is the one that the built extension generates."""

import subprocess
import sys
from pathlib import Path

import pytest

import tandem
from tandem import _native

STUB = Path(tandem.__file__).parent / "_native" / "_core.pyi"


def test_stub_is_current(tmp_path: Path):
    generated = tmp_path / "_core.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "tandem._native._core"]
    subprocess.run([*command, "-o", str(generated)], check=True, timeout=60)
    if generated.read_text() != STUB.read_text():
        pytest.fail(f"the stub is stale, run: {' '.join(command[1:])} -o {STUB}")


def test_package_exports_the_whole_extension():
    from tandem._native import _core

    public = {name for name in dir(_core) if not name.startswith("_")}
    assert public == set(_native.__all__)

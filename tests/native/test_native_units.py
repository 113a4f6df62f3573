"""Goal: the native unit tests pass under the sanitizers.

Method: CMake builds them without Python into build/, twice: address and undefined-behaviour
sanitizer, thread sanitizer. Slow because of the first build; later ones take a second.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def run(command: list[str], **extra_env: str) -> None:
    bin_folder = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", **extra_env}
    program = shutil.which(command[0], path=env["PATH"])
    assert program is not None, f"{command[0]} is missing: install the `dev` extra"
    result = subprocess.run(
        [program, *command[1:]], env=env, capture_output=True, text=True, timeout=900, check=False
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-8000:]


@pytest.mark.parametrize("sanitizers", ["address;undefined", "thread"])
def test_native_units(sanitizers: str):
    build = ROOT / "build" / f"native-{sanitizers.replace(';', '-')}"
    options = {
        "TANDEM_BUILD_PYTHON": "OFF",
        "TANDEM_BUILD_TESTS": "ON",
        "TANDEM_SANITIZE": sanitizers,
        "CMAKE_UNITY_BUILD": "ON",  # A third of the time.
    }
    defines = [f"-D{name}={value}" for name, value in options.items()]
    run(["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", *defines])
    run(["cmake", "--build", str(build)])
    run(
        [str(build / "native" / "native_tests")],
        ASAN_OPTIONS="detect_leaks=1",
        UBSAN_OPTIONS="print_stacktrace=1",
        TSAN_OPTIONS="halt_on_error=1",
    )

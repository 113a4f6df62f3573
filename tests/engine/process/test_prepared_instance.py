"""Goal: an instance that is prepared imports before it has settings, and ends with its server."""

import subprocess
import sys

import pytest

from tandem.engine.process.instance import PREPARE

PROGRAM = """
import time
from tandem.engine.process import instance
def import_libraries():
    print("imports", flush=True)
    if {is_slow}:
        time.sleep(600)
instance.import_libraries = import_libraries
instance.main()
"""


@pytest.mark.parametrize(
    ("text", "is_slow", "shown"),
    [
        (PREPARE, False, "imports\n"),
        (PREPARE, True, "imports\n"),
        pytest.param(b"", False, "", marks=pytest.mark.slow),
    ],
)
def test_an_instance_that_gets_no_settings(text, is_slow, shown):
    """It ends when the server does, also while it imports."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(is_slow=is_slow)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as child:  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(text)
        child.stdin.flush()
        assert child.stdout.read(len(shown)).decode() == shown
        _, errors = child.communicate(timeout=60)
        assert (child.returncode, errors) == (0, b"")

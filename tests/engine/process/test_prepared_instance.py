"""Goal: an instance that is prepared imports before it has settings, and ends if it gets none."""

import subprocess
import sys

import pytest

from tandem.engine.process.instance import PREPARE

PROGRAM = """
import sys
from tandem.engine.process import instance
instance.LIBRARIES = ("colorsys",)
print(instance.main(), "colorsys" in sys.modules)
"""


@pytest.mark.parametrize(("text", "is_imported"), [(PREPARE, True), (b"", False)])
def test_an_instance_that_gets_no_settings(text, is_imported):
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=text, capture_output=True, timeout=300, check=True
    )
    assert (told.stdout.decode().split(), told.stderr) == (["0", str(is_imported)], b"")

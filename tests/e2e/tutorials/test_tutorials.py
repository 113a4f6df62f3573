"""Every command of the README and of a tutorial runs, in its order, in a clean folder, and prints
what is shown.

Method: `tools/run_page.py` runs the page; outputs are compared in shape.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_print_what_it_shows(page):
    if "ip netns" in page.read_text() and (os.geteuid() != 0 or not shutil.which("ip")):
        pytest.skip("needs root and ip (iproute2)")
    result = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "run_page.py"), str(page)],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert result.returncode == 0, result.stderr
    assert "blocks run" in result.stdout

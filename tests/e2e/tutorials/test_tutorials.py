"""Every command of a tutorial runs, in its order, in a clean folder, and prints what is shown.

Method: `tools/run_page.py` runs the page; outputs are compared in shape.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_tutorial_print_what_it_shows(page):
    result = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "run_page.py"), str(page)],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert result.returncode == 0, result.stderr
    assert "blocks run" in result.stdout

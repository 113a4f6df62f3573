"""What the pages of security and reliability name as their proof exists and is run by somebody."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("docs/reliability.md", "docs/design/security.md")
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def list_rows(page):
    """Return the cells of each row under a header that ends with a command or a check."""
    rows, is_proved = [], False
    for line in (ROOT / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            is_proved = False
        elif cells[-1] in ("Command", "Checked by"):
            is_proved = True
        elif is_proved and not set(line) <= set("|- "):
            rows.append(cells)
    return rows


@pytest.mark.parametrize("page", PAGES)
def test_each_row_names_a_proof_that_exists(page):
    rows = list_rows(page)
    assert len(rows) > 15
    for cells in rows:
        paths = re.findall(r"tests/[\w/]+(?:\.py)?", cells[-1])
        targets = re.findall(r"make ([\w-]+)", cells[-1])
        assert paths or targets, cells
        assert [path for path in paths if not (ROOT / path).exists()] == []
        assert set(targets) <= TARGETS


def test_a_command_of_the_page_selects_tests():
    """A slow or long test is run with `-m`, one of `make test` without: else none is selected."""
    for *_, command in list_rows(PAGES[0]):
        for mark, paths in re.findall(r"`T (?:-m (slow|long) )?(tests[^`]*)`", command):
            for path in paths.split():
                files = [ROOT / path] if path.endswith(".py") else (ROOT / path).glob("test_*.py")
                text = "".join(file.read_text() for file in files)
                assert "def test" in text
                marked = re.search(rf"mark\.{mark}\b", text)
                assert not mark or marked, f"{path} has no {mark} test"

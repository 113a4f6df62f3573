"""README and tutorials keep their form, and the tool that runs them sees what differs."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")
MAX_LINES, MAX_CELL_WORDS = 190, 25
_spec = importlib.util.spec_from_file_location("run_page", ROOT / "tools" / "run_page.py")
run_page = importlib.util.module_from_spec(_spec)
sys.modules["run_page"] = run_page
_spec.loader.exec_module(run_page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_fenced_command_is_run(page):
    kinds = FENCE.findall(page.read_text())
    assert set(kinds) <= {"sh", "text", "bash"}
    # Installing, by make or without it, takes minutes: CI and tools/check_wheel.py do it.
    assert kinds.count("bash") == 2 * (page == README)
    assert "sh" in kinds


def test_the_readme_is_short_and_its_cells_too():
    text = README.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [cell for row in rows for cell in row.strip("|").split("|")]
    assert [cell for cell in cells if len(cell.split()) > MAX_CELL_WORDS] == []
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert len(pictures) == 2
    assert all((ROOT / picture).is_file() for picture in pictures)


def test_links_lead_to_files_and_headings():
    """In every page of the repository; addresses of the internet are not asked."""
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
    ]
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    broken = []
    for page, text in texts.items():
        for link in LINK.findall(text):
            name, _, heading = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            found = texts.get(target, "")
            # As pages are read on GitHub: lower case, hyphens, no punctuation.
            known = {
                re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-")
                for title in re.findall(r"^#+ (.*)$", found, re.MULTILINE)
            }
            if not target.exists() or (
                heading and heading not in known and f'id="{heading}"' not in found
            ):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_outputs_are_compared_in_shape():
    came = "model demo\ntook 1.25 s of 3 GiB\nextra line\nid chatcmpl-0123456789abcdef01 done\n"
    same = "took 99 s of 512 MiB\n...\nid chatcmpl-fedcba987654321000 done\n"
    assert run_page.find_missing(same, came) is None
    assert run_page.find_missing("model de...\n", came) is None
    assert run_page.find_missing("took 1 s of 3 apples\n", came) == "took 1 s of 3 apples"
    # The order counts.
    assert run_page.find_missing("extra line\nmodel demo\n", came) == "model demo"
    assert run_page.find_missing("modern...\n", came) == "modern..."

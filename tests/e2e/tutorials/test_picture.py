"""The README's picture of the page is a picture of the page as it is.

Method: the tool that made it makes another one of a real server; the two are compared by blocks, as
curves and figures differ from run to run and the arrangement does not.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
PICTURE = ROOT / "docs" / "images" / "page.png"
TOOL = ROOT / "tools" / "page" / "picture.py"
BLOCK = 40
"""Pixels of a side; both sides of the picture are multiples but for a rest."""
NEAR = 14.0
"""Mean difference of two blocks that count as equal, of 255."""
LEAST_SHARE = 0.85


def read_blocks(file):
    """Return the mean colour of each block, [rows, columns, 3]."""
    image = pytest.importorskip("PIL.Image")
    pixels = np.asarray(image.open(file).convert("RGB"), dtype=np.float64)
    rows, columns = pixels.shape[0] // BLOCK, pixels.shape[1] // BLOCK
    cut = pixels[: rows * BLOCK, : columns * BLOCK]
    return cut.reshape(rows, BLOCK, columns, BLOCK, 3).mean(axis=(1, 3))


def share_of_near_blocks(one, other):
    return float((np.abs(one - other).mean(axis=2) <= NEAR).mean())


@pytest.mark.slow
def test_the_picture_is_of_the_page_as_it_is(tmp_path):
    pytest.importorskip("playwright.sync_api")
    if shutil.which("chromium") is None:
        pytest.skip("chromium is not installed")
    now = tmp_path / "page.png"
    done = subprocess.run(
        [sys.executable, str(TOOL), str(now)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    kept, seen = read_blocks(PICTURE), read_blocks(now)
    assert kept.shape == seen.shape
    # The measure tells pictures apart: upside down it is another one.
    assert share_of_near_blocks(kept, kept[::-1]) < LEAST_SHARE
    remedy = f"python tools/page/picture.py {PICTURE.relative_to(ROOT)}"
    assert share_of_near_blocks(kept, seen) >= LEAST_SHARE, f"make it again: {remedy}"

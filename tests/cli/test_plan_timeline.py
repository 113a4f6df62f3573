"""Goal: `tandem plan --timeline` draws the lanes of the step that serves, by planned speeds."""

import re

import pytest
from typer.testing import CliRunner

from tandem.cli.main import app

MACHINE = "xeon6430x2-4090"


def draw(model, machine, file, *more):
    words = ["plan", model, "--hardware", machine, "--timeline", str(file), *more]
    return CliRunner().invoke(app, words)


def test_a_page_has_both_lanes_and_every_layer(tmp_path):
    file = tmp_path / "out.html"
    result = draw("deepseek-v3", MACHINE, file, "--quality", "int4")
    assert result.exit_code == 0, result.output
    page = file.read_text()
    for kind, first in (("layer", 0), ("submit", 3), ("late submit", 3)):
        found = [int(n) for n in re.findall(rf"<title>{kind} (\d+):", page)]
        assert found == list(range(first, 61)), kind
    # The last piece of work ends at the right edge; nothing is drawn beyond it.
    ends = [
        float(x) + float(w) for x, w in re.findall(r'<rect x="([\d.]+)".*?width="([\d.]+)"', page)
    ]
    assert max(ends) == pytest.approx(1600, abs=0.5)
    shares = [int(share) for share in re.findall(r"<td>(\d+)%</td>", page)]
    assert len(shares) == 4
    assert all(0 < share <= 100 for share in shares)
    assert not re.search(r"<script|https?://(?!www.w3.org/2000/svg)", page)


def test_one_lane_is_refused_in_words(tmp_path):
    result = draw("llama3-70b", "reference", tmp_path / "out.html")
    assert result.exit_code != 0
    assert not (tmp_path / "out.html").exists()

"""Goal: every row of ``tools/hardware_check.py`` runs over what stands for its hardware."""

import importlib.util
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "hardware_check.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("hardware_check", TOOL)
    module = sys.modules["hardware_check"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["hardware_check"]


@pytest.mark.slow
def test_every_row_runs_over_its_stand_in(tool):
    outcomes = [tool.check_row(row, stand_in=True) for row in tool.ROWS]
    assert [o for o in outcomes if o.state != "run"] == []
    assert all(o.detail.startswith("stand-in: ") for o in outcomes)


def test_what_is_missing_is_absent_and_what_is_wrong_failed(tool, monkeypatch, capsys):
    def fail(stand_in):
        raise AssertionError("another sum")

    rows = (
        tool.Row("one", lambda: "no such thing", fail),
        tool.Row("two", lambda: "", fail),
        tool.Row("three", lambda: "", lambda stand_in: "as it should be"),
    )
    monkeypatch.setattr(tool, "ROWS", rows)
    assert tool.main([]) == 1
    lines = capsys.readouterr().out.splitlines()[2:]
    assert lines == [
        "| one | absent | no such thing |",
        "| two | failed | AssertionError: another sum |",
        "| three | run | as it should be |",
    ]
    monkeypatch.setattr(tool, "ROWS", rows[2:])
    assert tool.main(["--json"]) == 0

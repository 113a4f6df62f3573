"""The install that says how far it is: what it takes from pip's words, and what a failure shows."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def install(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("install", ROOT / "tools" / "install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "LOG", tmp_path / "install.log")
    return module


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("  [3/26] Building CXX object native/a.cc.o", "building the extension: 3 of 26"),
        ("Collecting torch>=2.6 (from x)", "collecting torch>=2.6"),
        ("  Downloading torch-2.9.whl (800 MB)", "downloading torch-2.9.whl"),
        ("  Installing build dependencies: started", "installing build dependencies"),
        ("Installing collected packages: a, b", "writing the packages into the environment"),
        ("  warning: [3/26] is in the middle", None),
        ("", None),
    ],
)
def test_progress_is_read_from_what_pip_says(install, line, text):
    described = install.describe(line)
    assert described == text or (text is not None and described.startswith(text))


def test_a_failure_shows_the_end_of_the_log_and_its_code(install, capsys):
    assert install.main(["--no-such-option"]) != 0
    shown = capsys.readouterr().err
    assert "no such option: --no-such-option" in shown
    assert str(install.LOG) in shown
    assert "no such option" in install.LOG.read_text()

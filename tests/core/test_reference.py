"""Generated pages are current, so the set of settings is frozen: growth is a reviewed diff."""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_generated_pages_are_current(monkeypatch, capsys):
    """The tool runs in this process, which has imported what the pages tell of."""
    tools = ROOT / "tools"
    monkeypatch.setattr(sys, "path", [str(tools), *sys.path])
    monkeypatch.setattr(sys, "argv", ["reference.py", "--check"])
    assert runpy.run_path(str(tools / "reference.py"))["main"]() == 0, capsys.readouterr().err


def test_every_setting_is_used_somewhere():
    """A setting that nothing reads is a promise that nobody keeps."""
    from tandem.cli.config import Config
    from tandem.core.config import list_fields

    source = "\n".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "src" / "tandem").rglob("*.py")
        if path.name != "config.py" or path.parent.name in {"server", "engine"}
    )
    unused = [
        field.path
        for field in list_fields(Config)
        if f".{field.path.rsplit('.', 1)[1]}" not in source
    ]
    assert unused == []

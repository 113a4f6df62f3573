"""No two files import each other; and the tool that looks finds it where they do."""

import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch):
    """The tool, which is no module of the package."""
    monkeypatch.syspath_prepend(str(TOOLS))
    import import_circles

    yield import_circles
    sys.modules.pop("import_circles", None)


def test_the_package_has_no_circle(tool, capsys):
    assert tool.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("first", "second", "count"),
    [
        ("from package import b", "from package import a", 1),
        ("from package.b import Thing", "import package.a", 1),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package.b import Thing",
            "from package.a import Other",
            1,
        ),
        ("from package import b", "def late():\n    from package import a", 0),
        ("from package import b", "import sys", 0),
        ("from package.inner.c import Thing", "import sys", 1),
    ],
)
def test_a_circle_is_found(tool, tmp_path, first, second, count, capsys):
    """Also one for the type checker alone, and one by way of a folder's ``__init__``."""
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text(first)
    (package / "b.py").write_text(second)
    (package / "inner" / "__init__.py").write_text("from package.a import Other")
    (package / "inner" / "c.py").write_text("")
    assert tool.main(tmp_path) == count, capsys.readouterr().out

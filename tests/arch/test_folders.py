"""No folder of the package grows until nobody finds anything in it."""

from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "tandem"
MAX_FILES = 15
"""Modules of a folder beside its ``__init__``; more are rooms of their own."""


def find_large(package: Path) -> dict[str, int]:
    """Return the folders of a package that have too many modules."""
    counts = {
        str(folder.relative_to(package)): sum(
            path.name != "__init__.py" for path in folder.glob("*.py")
        )
        for folder in [package, *(path for path in package.rglob("*") if path.is_dir())]
    }
    return {name: count for name, count in counts.items() if count > MAX_FILES}


def test_no_folder_has_too_many_modules():
    assert find_large(PACKAGE) == {}


@pytest.mark.parametrize(("count", "is_large"), [(MAX_FILES, False), (MAX_FILES + 1, True)])
def test_a_large_folder_is_found(tmp_path, count, is_large):
    (tmp_path / "room").mkdir()
    for name in ["__init__", *map(str, range(count))]:
        (tmp_path / "room" / f"{name}.py").touch()
    assert find_large(tmp_path) == ({"room": count} if is_large else {})

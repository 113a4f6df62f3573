"""No folder grows until nobody finds anything in it."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_FILES = 15
"""Files of a folder beside its ``__init__.py``; a folder with more is divided by subject."""
TREES = ("src", "native", "tests", "docs", "benchmarks", "tools", "examples")
BUILT = (".pyc", ".so")
CORPUS = "native/transfer/wire/corpus"
"""Inputs of a fuzzer, one file each; nobody looks for one of them by name."""


def find_large(root: Path) -> dict[str, int]:
    """Return the folders of the trees that hold too many files, and how many they hold."""
    counts = {}
    for tree in TREES:
        for folder, _, names in os.walk(root / tree):
            files = [name for name in names if name != "__init__.py" and not name.endswith(BUILT)]
            counts[str(Path(folder).relative_to(root))] = len(files)
    counts.pop(CORPUS, None)
    return {name: count for name, count in counts.items() if count > MAX_FILES}


def test_no_folder_has_too_many_files():
    assert find_large(ROOT) == {}


@pytest.mark.parametrize(("count", "is_large"), [(MAX_FILES, False), (MAX_FILES + 1, True)])
def test_a_large_folder_is_found(tmp_path, count, is_large):
    room = tmp_path / "native" / "room"
    room.mkdir(parents=True)
    for name in ["__init__.py", "built.so", *map(str, range(count))]:
        (room / name).touch()
    assert find_large(tmp_path) == ({"native/room": count} if is_large else {})

"""The check of names in pages: what does not exist is found, what exists is not."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def names():
    spec = importlib.util.spec_from_file_location("names", ROOT / "tools" / "names.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def files(names):
    return names.list_files()


@pytest.mark.parametrize(
    "said",
    [
        "`engine/scheduling/scheduler.py`",
        "`scheduler.py`",
        "`docs/design/store/store.md`",
        "``tandem.core.clock``",
        "tandem.core.clock.ManualClock",
        "`core.clock.ManualClock.advance`",
        "`tandem.sim.World`",
        "`tandem._native.crc32c`",
        "`engine.block_size`",
        "`store.lease_ms`",
        "`torch.nn.Linear`",
        "`x.y`",
        "a sentence.with no space",
    ],
)
def test_what_exists_is_not_named(names, files, said):
    assert list(names.find_untrue(said, "README.md", files)) == []


@pytest.mark.parametrize(
    "said",
    [
        "engine/schedulers.py",
        "no_such_page.md",
        "tandem.core.clocks",
        "tandem.core.clock.NoSuchClock",
        "core.clock.ManualClock.no_such_method",
        "tandem.sim.NoSuchWorld",
        "tandem._native.no_such_function",
        "engine.no_such_setting",
    ],
)
def test_what_does_not_exist_is_named_with_its_line(names, files, said):
    text = f"One line.\nAnother `{said}`, and a third\n"
    assert list(names.find_untrue(text, "README.md", files)) == [(1, said)]


def test_docstrings_of_all_kinds_are_read(names):
    source = (
        '"""Module."""\nx = 1\n"""Of x."""\nclass A:\n    """Of A."""\n    y: int\n    """Of y."""'
    )
    texts = names.find_docstrings(names.ast.parse(source))
    assert sorted(text for _, text in texts) == ["Module.", "Of A.", "Of x.", "Of y."]


@pytest.mark.parametrize(
    ("path", "text", "problem"),
    [
        ("rpc/a.py", "class LostPeer: ...", "row of peer"),
        ("rpc/a.py", "class PeerLostError: ...", ""),
        ("rpc/a.py", "def take_turn(): ...", "another meaning"),
        ("bench/clients/a.py", "def take_turn(turn): ...", ""),
        ("store/a.py", "self.damage = 1", "say corruption"),
        ("store/a.py", "for edge in a: ...", "say boundary"),
    ],
)
def test_a_word_has_one_meaning(names, path, text, problem):
    """The glossary's tables are rules for the names of the package."""
    found = [line for line in names.find_ambiguous({path: text}) if line.startswith(path)]
    assert bool(found) == bool(problem), found
    assert all(problem in line for line in found)


def test_classes_of_the_glossary_exist(names):
    assert any("Segment, in the row" in line for line in names.find_ambiguous({}))

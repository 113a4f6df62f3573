"""Goal: control flow tells errors apart by their type or code, never by their text or place.

``where``, ``what`` and the message are for people: whoever rewords one must break nothing.
"""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "tandem"
TEXTS = {"where", "what"}
"""Of a ``TandemError``; not ``numpy.where``, which is called."""


def find_decisions(text: str) -> list[int]:
    """Return the lines that compare, search or take apart an error's text or place."""
    found: set[int] = set()
    if not any(f".{name}" in text for name in TEXTS):
        return []  # Most files need no parse.
    tree = ast.parse(text)
    caught = {
        node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name
    } | {"error", "failure"}

    def is_text(node: ast.expr) -> bool:
        if isinstance(node, ast.Attribute) and node.attr in TEXTS:
            return isinstance(node.value, ast.Name) and node.value.id in caught
        return False

    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and any(map(is_text, [node.left, *node.comparators])):
            found.add(node.lineno)
        is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if is_method and is_text(node.func.value):  # error.where.startswith(...)
            found.add(node.lineno)
    return sorted(found)


@pytest.mark.parametrize(
    "decision",
    [
        'error.where != "rpc.send"',
        'error.where.startswith("transfer.")',
        '"full" in error.what',
    ],
)
def test_a_decision_by_text_is_found(decision):
    code = f"try:\n    f()\nexcept Exception as error:\n    if {decision}:\n        raise\n"
    assert find_decisions(code) == [4]


def test_passing_a_text_on_is_no_decision():
    code = "try:\n    f()\nexcept E as e:\n    raise F(e.where, e.what) from None\n"
    assert find_decisions(code) == []


def test_no_decision_by_text_in_the_package():
    decisions = {
        f"{path.relative_to(SOURCE)}:{line}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line in find_decisions(path.read_text())
    }
    assert decisions == set()

"""A docstring begins with what it is about: a verb or a noun, not a word that puts it off."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TREES = ("src", "tools")
BARRED = {"What", "Of", "Whether", "Which", "Where", "When", "How", "Who", "As", "That"}


QUOTED = re.compile(rf"""["'][\s`,.:;]*({"|".join(sorted(BARRED))})\b""")
"""In a text without it is no such docstring: most files need no parse."""


def find_docstrings(tree: ast.AST) -> list[tuple[int, str]]:
    """Return (line, text) of the docstrings of modules, classes, functions and attributes."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for part in body if isinstance(body, list) else ():
            value = getattr(part, "value", None)
            is_text = isinstance(part, ast.Expr) and isinstance(value, ast.Constant)
            if is_text and isinstance(value.value, str):
                found.append((part.lineno, value.value))
    return found


def find_barred(text: str) -> list[int]:
    found = find_docstrings(ast.parse(text)) if QUOTED.search(text) else []
    return [line for line, doc in found if doc.split() and doc.split()[0].strip("`,.:;") in BARRED]


def test_no_docstring_begins_with_a_word_that_puts_it_off():
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for tree in TREES
        for path in sorted((ROOT / tree).rglob("*.py"))
        for line in find_barred(path.read_text())
    ]
    assert not found


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('"""Of a module."""', [1]),
        ('class A:\n    """How it is."""\n    x = 1\n    """Bytes."""', [2]),
        ('x = 1\n"""Whether."""\ny = 2\n"""Ofttimes."""', [2]),
    ],
)
def test_each_place_is_looked_at(text, lines):
    assert find_barred(text) == lines

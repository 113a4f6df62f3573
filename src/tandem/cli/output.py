"""Results on standard output: a table for a person, JSON with ``--json``."""

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["JsonFlag", "format_bytes", "print_json", "print_table"]

PIPED_WIDTH = 4096
"""Columns where no terminal says how many there are: wide enough not to wrap a key of a store."""

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def print_json(value: Any) -> None:
    """Write ``value`` (structs included) as one indented JSON document."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2)
    sys.stdout.write(text.decode() + "\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """Write a table that fits the terminal; piped output is not cut.

    Cells are text: rich's markup and names of emoji in them mean nothing, and what a terminal would
    take for a command is escaped.
    """
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    table = Table(*columns, title=title or None, title_justify="left", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(_escape(str(cell))) for cell in row))
    console.print(table)


def _escape(text: str) -> str:
    """Return text in which what cannot be printed stands as in a Python literal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def format_bytes(size_bytes: int) -> str:
    """Return a size in its largest fitting binary unit, three digits."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.{0 if size_bytes % unit == 0 else 1}f} {name}"
    return f"{size_bytes} B"

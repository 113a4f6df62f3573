"""Results on standard output: a table for a person, JSON with ``--json``."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

__all__ = [
    "JsonFlag",
    "format_bytes",
    "make_bars",
    "print_json",
    "print_next",
    "print_table",
    "show_work",
]

PIPED_WIDTH = 4096
"""Width of a table in columns if there is no terminal: wide enough not to wrap a key of a store."""

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def print_json(value: Any) -> None:
    """Print ``value`` (structs included) as one indented JSON document."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2)
    sys.stdout.write(text.decode() + "\n")


@contextmanager
def show_work(what: str) -> Iterator[None]:
    """Show a spinner on standard error, if it is a terminal, while the block runs; then erase
    it.
    """
    if not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(Text(what)):
        yield


def make_bars(*columns: "ProgressColumn", is_off: bool = False) -> "Progress":
    """Return progress bars on standard error, which vanish at the end. Nothing is drawn if it is no
    terminal; standard output has the result only.

    Args:
        columns: what a bar shows; none: rich's own choice.
        is_off: True to draw nothing.
    """
    from rich.progress import Progress

    console = Console(stderr=True)
    off = is_off or not console.is_terminal
    return Progress(*columns, console=console, transient=True, disable=off)


def print_next(*words: object, why: str = "") -> None:
    """Print a command that uses the result, quoted for a shell, to standard error.

    Standard output has the result only, which a script may read.

    Args:
        words: words of the command; the user is to replace those in capitals.
        why: purpose of the command, if its name does not tell.
    """
    command = shlex.join(str(word) for word in words)
    line = _escape(f"next: {command}{why and f', {why}'}")
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """Print a table that fits the terminal; piped output is not cut.

    Cells are plain text: rich's markup and emoji names in them have no effect, and control
    characters are escaped.
    """
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    table = Table(*columns, title=title or None, title_justify="left", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(_escape(str(cell))) for cell in row))
    console.print(table)


def _escape(text: str) -> str:
    """Return text with unprintable characters escaped as in a Python literal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def format_bytes(size_bytes: int) -> str:
    """Return a size in bytes as text, with three digits in the largest binary unit that fits."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.{0 if size_bytes % unit == 0 else 1}f} {name}"
    return f"{size_bytes} B"

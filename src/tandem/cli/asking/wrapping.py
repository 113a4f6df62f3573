"""Wrapping of a stream of text between words, in a terminal."""

import shutil
import sys
from collections.abc import Callable

from rich.cells import cell_len

__all__ = ["make_writer"]


def make_writer() -> Callable[[str], None]:
    """Return a function that writes pieces of text to standard output, wrapped on a terminal."""
    if not sys.stdout.isatty():
        return _write
    return _Wrapper(shutil.get_terminal_size().columns).write


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class _Wrapper:
    """Begins a new line where a word would cross the edge.

    A word is written as it comes, so that a stream does not lag; if it then crosses the edge, what
    is there of it is erased and written in the next line.

    Args:
        width: columns of the terminal.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._word = ""
        """The end of the text as far back as the last blank, all in the present line."""

    def write(self, text: str) -> None:
        """Write a piece of text."""
        for char in text:
            self._put(char)
        sys.stdout.flush()

    def _put(self, char: str) -> None:
        out = sys.stdout
        if char == "\n":
            self._column, self._word = 0, ""
            out.write(char)
            return
        cells = cell_len(char)
        if self._column + cells > self._width - 1:
            if char == " ":
                out.write("\n")
                self._column, self._word = 0, ""
                return
            before = cell_len(self._word)
            # A word that fills the line is cut; others move to the next line.
            if 0 < before < self._column:
                out.write(f"\x1b[{before}D\x1b[K\n{self._word}")
                self._column = before
            else:
                out.write("\n")
                self._column, self._word = 0, ""
        out.write(char)
        self._column += cells
        self._word = "" if char == " " else self._word + char

"""The text of a generation as a parser reads it: forward, waiting where more must come.

Parsers are generators that yield when they need more text, so that a syntax reads like one for
whole texts. Every decision waits until the text that is there can only mean one thing; that makes
the result independent of how the text was cut.
"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

__all__ = ["Reading", "TextSource"]

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Yields when more text is needed; returns what was read."""


class TextSource:
    """Text that arrives in pieces and is taken from its front."""

    def __init__(self) -> None:
        self.text = ""
        """Text that has come and was not taken yet."""
        self.is_ended = False
        self._record: str | None = None

    def push(self, text: str) -> None:
        """Add text at the end."""
        self.text += text

    def end(self) -> None:
        """Declare that no more text comes."""
        self.is_ended = True

    def take(self, count: int) -> str:
        """Take ``count`` characters, which are there."""
        taken, self.text = self.text[:count], self.text[count:]
        if self._record is not None:
            self._record += taken
        return taken

    def give_back(self, text: str) -> None:
        """Undo the taking of ``text``, which was taken last."""
        self.text = text + self.text
        if self._record is not None:
            self._record = self._record.removesuffix(text)

    def record(self, already: str) -> None:
        """Begin to remember what is taken, after the text ``already``, which was taken before."""
        self._record = already

    def recall(self) -> str:
        """Return what was taken since ``record``, and remember no more."""
        recorded, self._record = self._record, None
        return recorded if recorded is not None else ""

    def wait_for(self, count: int) -> Reading[bool]:
        """Wait until ``count`` characters are there; False if the text ends before."""
        while len(self.text) < count:
            if self.is_ended:
                return False
            yield
        return True

    def skip_space(self) -> Reading[None]:
        """Take white space until something else comes."""
        while True:
            stripped = self.text.lstrip()
            self.take(len(self.text) - len(stripped))
            if self.text or self.is_ended:
                return
            yield

    def starts_with(self, mark: str) -> Reading[bool]:
        """Wait until it is certain whether the text goes on with ``mark``; takes nothing."""
        while len(self.text) < len(mark) and mark.startswith(self.text):
            if self.is_ended:
                return False
            yield
        return self.text.startswith(mark)

    def read_until(
        self, marks: Sequence[str], emit: Callable[[str], None] | None = None
    ) -> Reading[str | None]:
        """Take the text before the first of ``marks``, and that mark.

        Args:
            marks: none begins with another.
            emit: gets the text as soon as it is certain; None drops it.

        Returns: the mark, or None if the text ended before.
        """
        pattern = re.compile("|".join(re.escape(mark) for mark in marks))
        while True:
            found = pattern.search(self.text)
            if found is not None:
                before = self.take(found.start())
                if emit is not None and before:
                    emit(before)
                return self.take(found.end() - found.start())
            keep = 0 if self.is_ended else count_held(self.text, marks)
            certain = self.take(len(self.text) - keep)
            if emit is not None and certain:
                emit(certain)
            if self.is_ended:
                return None
            yield

    def collect_until(self, marks: Sequence[str]) -> Reading[tuple[str, str | None]]:
        """Take the text before the first of ``marks``, and that mark; return both."""
        parts: list[str] = []
        mark = yield from self.read_until(marks, parts.append)
        return "".join(parts), mark


def count_held(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest end of ``text`` that may become one of ``marks``."""
    longest = min(max(len(mark) for mark in marks) - 1, len(text))
    for length in range(longest, 0, -1):
        end = text[len(text) - length :]
        if any(mark.startswith(end) for mark in marks):
            return length
    return 0

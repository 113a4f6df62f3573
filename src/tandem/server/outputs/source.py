"""The text of a generation as parsers read it: forward, waiting where more must arrive.

Parsers are generators that yield when they need more text, so that they can be written as for a
whole text. Every decision waits until the text so far allows only one; so the result does not
depend on how the text was cut.
"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

__all__ = ["Reading", "TextSource"]

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Generator that yields when it needs more text to arrive, and returns the result of its reading
(such as an answer's part).
"""


class TextSource:
    """A text that arrives in pieces and is read from its front."""

    def __init__(self) -> None:
        self.text = ""
        """Text that has arrived and was not read yet."""
        self.is_ended = False
        self.is_cut = False
        """True if the text has ended though more was to come."""
        self._record: str | None = None

    def push(self, text: str) -> None:
        """Add text that has arrived at the end."""
        self.text += text

    def end(self, *, is_cut: bool) -> None:
        """Declare that no more text comes; ``is_cut`` as of ``OutputParser.flush``."""
        self.is_ended, self.is_cut = True, is_cut

    def take(self, count: int) -> str:
        """Read ``count`` characters, which must have arrived."""
        taken, self.text = self.text[:count], self.text[count:]
        if self._record is not None:
            self._record += taken
        return taken

    def give_back(self, text: str) -> None:
        """Undo the reading of ``text``, the part that was read last, so that it is read again."""
        self.text = text + self.text
        if self._record is not None:
            self._record = self._record.removesuffix(text)

    def record(self, already: str) -> None:
        """Begin to record what is read; the record starts with ``already``, which was read
        before.
        """
        self._record = already

    def recall(self) -> str:
        """Return what was read since ``record`` was called, and stop recording."""
        recorded, self._record = self._record, None
        return recorded if recorded is not None else ""

    def wait_for(self, count: int) -> Reading[bool]:
        """Wait until ``count`` characters have arrived; return False if the text ends before."""
        while len(self.text) < count:
            if self.is_ended:
                return False
            yield
        return True

    def skip_space(self) -> Reading[None]:
        """Skip white space until something else arrives."""
        while True:
            stripped = self.text.lstrip()
            self.take(len(self.text) - len(stripped))
            if self.text or self.is_ended:
                return
            yield

    def starts_with(self, mark: str) -> Reading[bool]:
        """Wait until it is certain whether the text goes on with ``mark``, and return that; nothing
        is read.
        """
        while len(self.text) < len(mark) and mark.startswith(self.text):
            if self.is_ended:
                return False
            yield
        return self.text.startswith(mark)

    def read_until(
        self, marks: Sequence[str], emit: Callable[[str], None] | None = None
    ) -> Reading[str | None]:
        """Read the text before the first of ``marks`` (texts such as the end of a call), and that
        mark.

        Args:
            marks: marks to look for; none may begin with another.
            emit: called with the text as soon as it is certain; None: the text is dropped.

        Returns: the mark; None if the text ended before one.
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
        """Read the text before the first of ``marks`` (texts such as the end of a call), and that
        mark; return both. The mark is None if the text ended before one.
        """
        parts: list[str] = []
        mark = yield from self.read_until(marks, parts.append)
        return "".join(parts), mark


def count_held(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest end of ``text`` that may be the beginning of one of
    ``marks``.
    """
    longest = min(max(len(mark) for mark in marks) - 1, len(text))
    for length in range(longest, 0, -1):
        end = text[len(text) - length :]
        if any(mark.startswith(end) for mark in marks):
            return length
    return 0

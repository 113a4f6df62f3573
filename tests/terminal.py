"""A ``tandem`` command in a pseudo-terminal, as a person types to it and reads it."""

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 60


class Terminal:
    """A command and the terminal it runs in, from entering to leaving the context.

    It leads a session of its own, so that ``os.killpg(terminal.process.pid, SIGINT)`` is Ctrl-C.

    Args:
        arguments: after ``tandem``.
        home: its home folder.
    """

    def __init__(self, *arguments: str, home: Path) -> None:
        self._end, child = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tandem", *arguments],
            stdin=child, stdout=child, stderr=child, start_new_session=True,
            env={**os.environ, "HOME": str(home), "TERM": "xterm"},
        )  # fmt: skip
        os.close(child)
        self._seen = ""

    def expect(self, words: str) -> None:
        """Read until words are on the screen, after those that were expected before."""
        while words not in self._seen:
            assert select.select([self._end], [], [], TIMEOUT_S)[0], self._seen
            self._seen += os.read(self._end, 4096).decode(errors="replace")
        self._seen = self._seen.split(words, 1)[1]

    def type(self, keys: bytes) -> None:
        """Send what keys send."""
        os.write(self._end, keys)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._end)

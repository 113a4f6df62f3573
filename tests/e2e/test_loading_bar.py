"""Goal: a terminal sees how far loading has come, and afterwards nothing of it; a file never does.

Method: ``tandem serve`` under a pseudo-terminal, and the bar alone with reports of a load, as a
load may end before the server hears of it. What they send is drawn on a screen of our own that
knows what the bar sends. Pipes are checked for every server of these tests (``conftest.serve``).
"""

import io
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest
from rich.console import Console

from tandem.cli.commands import serve
from tandem.core.wire import InstanceStage, StageChanged

TIMEOUT_S = 120.0
DONE = re.compile(r"([\d.]+)/([\d.]+|\?) (\w+)")


class Screen:
    """Lines as a terminal shows them: text, ends of lines, cursor up, line erased, colours."""

    PART = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")

    def __init__(self) -> None:
        self.lines = [""]
        self.row = self.column = 0
        self.shown: list[str] = []
        self.is_cursor_hidden = False

    def draw(self, text: str) -> None:
        for part in self.PART.finditer(text):
            argument, code, back, feed, words = part.groups()
            if back:
                self.column = 0
            elif feed:
                self.row += 1
                if self.row == len(self.lines):
                    self.lines.append("")
            elif words:
                line = self.lines[self.row].ljust(self.column)
                end = self.column + len(words)
                self.lines[self.row] = line[: self.column] + words + line[end:]
                self.column = end
                self.shown.append(self.lines[self.row])
            elif code == "A":
                self.row -= int(argument or 1)
            elif code == "K":
                assert argument == "2", part.group()
                self.lines[self.row] = ""
            elif argument == "?25":
                self.is_cursor_hidden = code == "l"
            else:
                assert code == "m", part.group()


def read_terminal(parent: int, process: subprocess.Popen) -> str:
    """Return what is written until it serves and has ended."""
    seen, end_s = b"", time.monotonic() + TIMEOUT_S
    while time.monotonic() < end_s:
        if not select.select([parent], [], [], 1.0)[0]:
            continue
        try:
            data = os.read(parent, 1 << 16)
        except OSError:  # Linux's end of a terminal whose programs are gone.
            return seen.decode()
        if b"Serving" in data and process.poll() is None:
            process.terminate()
        seen += data
    raise AssertionError(f"not within {TIMEOUT_S} s: {seen!r}")


def read_figures(screen: Screen) -> list[tuple[str, str]]:
    """Return (done, total) of each state of the bar, in the order in which it was drawn."""
    return [found.groups()[:2] for line in screen.shown for found in DONE.finditer(line)]


def check_nothing_is_left(screen: Screen) -> None:
    left = "\n".join(screen.lines)
    assert "━" not in left
    assert not DONE.search(left), left
    assert not screen.is_cursor_hidden


def test_the_bar_moves_and_vanishes(monkeypatch):
    sent = io.StringIO()
    monkeypatch.setattr(
        serve, "Console", lambda stderr: Console(file=sent, force_terminal=True, width=120)
    )
    with serve.show_loading(quiet=False) as show:
        show(StageChanged(InstanceStage.STARTING))
        show(StageChanged(InstanceStage.LOADING, "reading the configuration"))
        for done in range(0, 101, 10):
            show(StageChanged(InstanceStage.LOADING, "model.layers.0", done, 100))
        show(StageChanged(InstanceStage.READY))
    screen = Screen()
    screen.draw(sent.getvalue())
    known = [(float(done), float(total)) for done, total in read_figures(screen) if total != "?"]
    assert known[0] == (0, 100)
    assert known[-1] == (100, 100)
    assert known == sorted(known)
    assert any("model.layers" in line for line in screen.shown)
    check_nothing_is_left(screen)


@pytest.mark.slow
def test_a_terminal_is_left_clean():
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "tandem", "serve", "demo", "--port", "0"],
        stdin=subprocess.DEVNULL, stdout=child, stderr=child,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )  # fmt: skip
    os.close(child)
    try:
        screen = Screen()
        screen.draw(read_terminal(parent, process))
        assert process.wait(TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(parent)
    assert any("Serving" in line for line in screen.lines)
    check_nothing_is_left(screen)

"""Goal: a terminal sees how far loading has come, and afterwards nothing of it; a file never does.

Method: ``tandem serve`` on a model of some 400 MB under a pseudo-terminal, whose bytes are drawn on
a screen of our own that knows what the bar sends. Pipes are checked for every server of these tests
(``conftest.serve``).
"""

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.bench.serving.model import write_random_model
from tandem.models.loading.hub import DEMO_FOLDER

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 28,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
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


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The demo's tokenizer, and weights that take a while."""
    folder = tmp_path_factory.mktemp("bar") / "model"
    shutil.copytree(DEMO_FOLDER, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    vocab_size = json.loads((DEMO_FOLDER / "config.json").read_text())["vocab_size"]
    write_random_model(folder, SHAPE | {"vocab_size": vocab_size}, model_type="qwen3")
    return folder


def command(model: Path) -> list[str]:
    # Weights that an earlier run has packed would be mapped at once, without a bar.
    packed = ("--model.packed-cache", "off")
    return [sys.executable, "-m", "tandem", "serve", str(model), "--port", "0", *packed]


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


def test_a_terminal_sees_the_bar_move_and_vanish(model):
    parent, child = pty.openpty()
    process = subprocess.Popen(
        command(model), stdin=subprocess.DEVNULL, stdout=child, stderr=child,
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
    figures = [found.groups() for line in screen.shown for found in DONE.finditer(line)]
    known = [(float(done), float(total)) for done, total, _ in figures if total != "?"]
    assert known, screen.shown
    assert known[-1][0] == known[-1][1] > 0
    assert known == sorted(known)
    assert any(total == "?" or float(done) < float(total) for done, total, _ in figures)
    assert any("model.layers" in line or "reading" in line for line in screen.shown)
    left = "\n".join(screen.lines)
    assert "Serving" in left
    assert "━" not in left
    assert not DONE.search(left), left
    assert not screen.is_cursor_hidden

"""Run the commands of a page, in their order, and compare what they print with what it shows.

A block fenced as ``sh`` is run by bash, in one folder that is empty at first; one fenced as
``bash`` is shown only. A block fenced as ``text`` right after is the output, compared in shape:
numbers, ids and runs of spaces may differ, ``...`` stands for any lines or the rest of one, and
lines that the page leaves out may come between. A command that begins with ``tandem serve``, also
in a network namespace, runs until the next one begins, or the page ends; it has started when it
names its address. Port 8000 of the page is a free one here. Processes that a block leaves in the
background end with the page.

    python tools/run_page.py docs/tutorials/tools.md [--write]

``--write`` puts what came into the page, for a person to shorten.
"""

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(r"^```(?P<kind>sh|text)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN_ONLY = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""Blocks of commands that are not run here."""
SERVE = re.compile(r"^(?:ip netns exec \S+ )?tandem serve (?!.*--dry-run)")
PORT = "8000"
TIMEOUT_S = 600
_VARIABLE = (
    (re.compile(r"\b(?:\w+[_-])?[0-9a-f]{16,}\b|\bfp_\w+"), "ID"),
    (re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]"), ""),
    (re.compile(r"[━╸╺─▁-█#]+"), "-"),
    (re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"), "N"),
    (re.compile(r"\bN (?:B|KiB|MiB|GiB|TiB)\b"), "SIZE"),
    (re.compile(r"\bN (?:us|ms|s|min|h)\b"), "TIME"),
    (re.compile(r"\s+"), " "),
)


@dataclass
class Step:
    """A block of commands and what the page shows of its output."""

    commands: str
    shown: str | None
    line: int


def read_steps(page: Path) -> Iterator[Step]:
    """Yield the blocks of a page that are run."""
    text = page.read_text(encoding="utf-8")
    found = list(BLOCK.finditer(text))
    for at, block in enumerate(found):
        if block["kind"] != "sh":
            continue
        after = found[at + 1] if at + 1 < len(found) else None
        shown = None
        if after is not None and after["kind"] == "text":
            between = text[block.end() : after.start()]
            shown = after["body"] if not between.strip() else None
        yield Step(block["body"], shown, text.count("\n", 0, block.start()) + 2)


def simplify(line: str) -> str:
    """Return a line without what differs from run to run."""
    for pattern, name in _VARIABLE:
        line = pattern.sub(name, line)
    return line.strip()


def find_missing(shown: str, came: str) -> str | None:
    """Return the first line that is shown and did not come, in order; None if all did."""
    lines = iter([simplify(line) for line in came.splitlines()])
    for line in shown.splitlines():
        wanted = simplify(line)
        begin = wanted.removesuffix("...").rstrip()
        if wanted in ("", "..."):
            continue
        is_begun = begin != wanted
        if not any(each == wanted or (is_begun and each.startswith(begin)) for each in lines):
            return line
    return None


class Server:
    """A ``tandem serve`` that runs beside the commands after it."""

    def __init__(self, command: str, folder: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.output: list[str] = []
        self._is_up = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._is_up.wait(TIMEOUT_S) or self._process.poll() is not None:
            self.stop()
            sys.exit(f"{command}: did not start:\n{''.join(self.output)}")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output.append(line)
            if "http://" in line:
                self._is_up.set()
        self._is_up.set()

    def stop(self) -> None:
        """End it as Ctrl-C would."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(10)


def run_steps(steps: list[Step], folder: Path) -> Iterator[tuple[Step, str]]:
    """Yield each step with what it printed; ends the program where one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = dict(os.environ)
    programs = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment |= {"PATH": programs, "TANDEM_SERVER__PORT": port, "COLUMNS": "100"}
    server: Server | None = None
    groups: list[int] = []
    try:
        for step in steps:
            commands = step.commands.replace(f":{PORT}", f":{port}")
            if SERVE.match(commands):
                if server is not None:
                    server.stop()
                server = Server(commands.strip(), folder, environment)
                yield step, "".join(server.output).replace(f":{port}", f":{PORT}")
                continue
            with subprocess.Popen(
                ["bash", "-ec", commands], cwd=folder, env=environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            ) as block:  # fmt: skip
                groups.append(block.pid)
                timer = threading.Timer(TIMEOUT_S, os.killpg, (block.pid, signal.SIGKILL))
                timer.start()
                try:
                    came, _ = block.communicate()
                finally:
                    timer.cancel()
            if block.returncode:
                sys.exit(f"line {step.line}: status {block.returncode}:\n{came[-4000:]}")
            yield step, came.replace(f":{port}", f":{PORT}")
    finally:
        if server is not None:
            server.stop()
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGTERM)


def main() -> None:
    """Run a page; says the line that did not come, or how many blocks were run."""
    parser = argparse.ArgumentParser(description="Run the commands of a page.")
    parser.add_argument("page", type=Path)
    parser.add_argument("--write", action="store_true", help="put the output into the page")
    options = parser.parse_args()
    steps = list(read_steps(options.page))
    text = options.page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        for step, came in run_steps(steps, Path(name)):
            if options.write:
                old = f"```sh\n{step.commands}```\n"
                if step.shown is not None:
                    old += f"\n```text\n{step.shown}```\n"
                new = f"```sh\n{step.commands}```\n"
                if step.shown is not None:
                    lines = "\n".join(line.rstrip() for line in came.rstrip().splitlines())
                    new += f"\n```text\n{lines}\n```\n"
                text = text.replace(old, new)
            elif step.shown is not None:
                missing = find_missing(step.shown, came)
                if missing is not None:
                    sys.exit(f"line {step.line}: {missing!r} did not come:\n{came[-4000:]}")
    if options.write:
        options.page.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{options.page.name}: {len(steps)} blocks run\n")


if __name__ == "__main__":
    main()

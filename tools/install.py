"""Install with pip and say on one line how far it is: ``install.py PIP_ARGUMENTS...``.

Most of a first install is torch's download and the build of the extension, minutes during which
pip says nothing, or with ``--verbose`` everything. What it says goes into ``build/install.log``; of
it the line shows the package or the source in hand. If pip fails, the end of the log is printed.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

LOG = Path(__file__).parent.parent / "build" / "install.log"
TAIL_LINES = 60
BUILT = re.compile(r"\s*\[(\d+)/(\d+)\]")
FETCHED = re.compile(r"\s*(Collecting|Downloading|Installing build dependencies) ?(\S*)")
SHOWN = 60
"""Columns of what is in hand."""


def describe(line: str) -> str | None:
    """Return what a line of pip or ninja tells of the progress, if anything."""
    if match := BUILT.match(line):
        return f"building the extension: {match[1]} of {match[2]}"
    if line.startswith("Installing collected packages"):
        return "writing the packages into the environment"
    if match := FETCHED.match(line):
        return f"{match[1].lower()} {match[2]}".strip()
    return None


def show(text: str, begin_s: float) -> None:
    """Write over the line; where there is no terminal, write a line of its own."""
    taken_s = time.monotonic() - begin_s
    line = f"{text[:SHOWN]:{SHOWN}} {taken_s:4.0f} s"
    sys.stderr.write(f"\r{line}" if sys.stderr.isatty() else f"{line}\n")
    sys.stderr.flush()


def main(arguments: list[str]) -> int:
    """Run pip; return its exit code."""
    LOG.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--verbose"]
    begin_s, shown = time.monotonic(), ""
    with (
        LOG.open("w") as log,
        subprocess.Popen(
            [*command, "--progress-bar", "off", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as pip,
    ):
        assert pip.stdout is not None
        for line in pip.stdout:
            log.write(line)
            text = describe(line)
            if text is not None and text != shown:
                show(text, begin_s)
                shown = text
    if pip.returncode:
        tail = LOG.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        sys.stderr.write("\n" + "\n".join(tail) + f"\nThe whole log is {LOG}\n")
    elif shown:
        show("installed", begin_s)
        sys.stderr.write("\n" if sys.stderr.isatty() else "")
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

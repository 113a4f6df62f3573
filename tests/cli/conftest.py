"""Commands run in this process: to start Python and import torch for each costs seconds."""

import logging
import signal
import sys
import threading
from pathlib import Path

import pytest

from tandem.cli import main as cli
from tandem.server.config import ACCESS_LOGGER

sys.path.insert(0, str(Path(__file__).parent))  # Sibling modules of these tests.

from command_tree import ROOT


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command through its entry point, in this process; return status, output and errors."""
    # The command configures logging for its process, which is ours.
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)
    access = logging.getLogger(ACCESS_LOGGER)
    access_level = access.level
    # An interrupted one hides the errors that the interrupt causes.
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)

    monkeypatch.setattr(cli, "app", ROOT)
    # Some commands defer imports in their process.
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    # A shell has its background commands ignore SIGINT; the command here shall take it.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["tandem", *arguments])
        try:
            cli.main()
            status = 0
        except SystemExit as end:
            status = end.code or 0
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    yield call
    access.setLevel(access_level)
    signal.signal(signal.SIGINT, previous)

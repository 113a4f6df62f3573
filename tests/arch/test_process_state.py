"""A test that changes the process is told of: tests/conftest.py asks after each."""

import gc
import logging
import os
import signal
import sys

import pytest
import torch

import tandem
from process_state import list_changes, read_state


def test_each_change_is_told_until_it_is_undone(tmp_path):
    before = read_state(with_modules=True)
    assert list_changes(before, read_state(with_modules=True)) == {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_TESTS_ADDED", "1")
        patch.delenv("HF_HUB_OFFLINE")
        patch.chdir(tmp_path)
        patch.syspath_prepend(tmp_path)
        patch.setattr(logging.root, "level", 1)
        patch.setitem(sys.modules, "tandem", None)
        handler = signal.signal(signal.SIGHUP, lambda *_: None)
        gc.disable()
        torch.set_default_dtype(torch.float64)
        try:
            changes = list_changes(before, read_state(with_modules=True))
        finally:
            torch.set_default_dtype(torch.float32)
            gc.enable()
            signal.signal(signal.SIGHUP, handler)
    assert set(changes) == {
        "$HF_HUB_OFFLINE",
        "$TANDEM_TESTS_ADDED",
        "SIGHUP",
        "folder",
        "garbage collection",
        "import path",
        "log level",
        "module tandem",
        "torch's dtype",
    }
    assert changes["$TANDEM_TESTS_ADDED"] == (None, "1")
    assert changes["folder"] == (before["folder"], os.path.realpath(tmp_path))
    assert changes["module tandem"] == (tandem, None)
    assert list_changes(before, read_state(with_modules=True)) == {}

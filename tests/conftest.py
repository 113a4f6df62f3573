"""Shared by all tests: hub offline, and markers that a file's name implies."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

import tandem  # noqa: F401  # Before torch, which then obeys TANDEM_MAX_ISA.
from tandem.kernels import calibration

sys.path.append(str(Path(__file__).parent))  # For helpers of several folders.
os.environ["HF_HUB_OFFLINE"] = "1"
# A plan must not depend on whether this machine was measured before.
calibration.DEFAULT_ROOT = Path(os.devnull) / "hardware"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# As in an instance: spinning OpenMP threads starve each other on shared cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shared two-core machine stalls for tens of milliseconds: a deadline would test the neighbours.
# `make test` repeats the same examples, so that a change is judged by what it changed; `make
# test-slow` looks for new ones.
settings.register_profile("explore", deadline=None, print_blob=True)
settings.register_profile("repeat", settings.get_profile("explore"), derandomize=True)
settings.load_profile("repeat")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Keep the garbage collector away from what lives to the end: tests, and what they import.

    They are most objects of the process: a full collection would walk them each time, for most of
    a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "e2e" in Path(str(item.fspath)).parts:
            item.add_marker(pytest.mark.e2e)

"""Shared by all tests: hub offline, and markers that a file's name implies."""

import functools
import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

import tandem  # noqa: F401  # Before torch, which then obeys TANDEM_MAX_ISA.
from tandem.kernels import calibration

sys.path.append(str(Path(__file__).parent))  # For helpers of several folders.
os.environ["HF_HUB_OFFLINE"] = "1"
# A plan must not depend on whether this machine was measured before.
calibration.DEFAULT_ROOT = Path(os.devnull) / "hardware"
# A command that measures it here needs figures, not exact ones.
calibration.calibrate = functools.partial(calibration.calibrate, budget_s=0, num_experts=16)
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# As in an instance: spinning OpenMP threads starve each other on shared cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Packages of a few tests, whose import takes seconds: every process collects every test.
for name in ("anthropic", "datasets", "ollama", "openai"):
    if (spec := importlib.util.find_spec(name)) is not None and spec.loader is not None:
        spec.loader = importlib.util.LazyLoader(spec.loader)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])

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


def pytest_runtest_setup() -> None:
    """Let torch compute on one thread, whatever the test before has left.

    Several processes run tests at once, of tensors so small that threads only cost time.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


ONE_SERVER = {
    "tests/e2e/answers/test_log_likelihood.py",
    "tests/e2e/answers/test_structured.py",
    "tests/e2e/test_demo_server.py",
    "tests/e2e/test_disaggregated_serve.py",
    "tests/e2e/test_terminal.py",
}
"""Files whose tests ask the one ``server`` of a process (``tests/e2e/conftest.py``)."""


class FilesByServer(LoadFileScheduling):
    """One process runs all tests of a file, and all files that share a server."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "tests/e2e" if file in ONE_SERVER else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> FilesByServer | None:
    return FilesByServer(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.e2e)

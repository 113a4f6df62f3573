"""Shared by all tests: hub offline, and markers that a file's name implies."""

import functools
import gc
import importlib.util
import os
import random
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before numpy, whose threads spin for milliseconds after each product: an oracle's small ones took
# ten times the CPU.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

import tandem  # noqa: F401  # Before torch, which then obeys TANDEM_MAX_ISA.
from tandem.kernels import calibration

sys.path.append(str(Path(__file__).parent))  # For helpers of several folders.
from process_state import list_changes, read_state

os.environ["HF_HUB_OFFLINE"] = "1"
# A plan must not depend on whether this machine was measured before.
calibration.DEFAULT_ROOT = Path(os.devnull) / "hardware"
# A command that measures it here needs figures, not exact ones.
calibration.calibrate = functools.partial(calibration.calibrate, budget_s=0, num_experts=16)
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# As in an instance: spinning OpenMP threads starve each other on shared cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


class LatePackage(types.ModuleType):
    """A package that is imported when a test takes something of it.

    ``importlib.util.LazyLoader`` would import it at ``isinstance``, which pytest asks of every name
    of a module.
    """

    def __getattr__(self, name: str) -> Any:
        if sys.modules[self.__name__] is self:
            # pytest asks modules for `__test__` and `_mock_name`, and others for `__file__`.
            if name.startswith("_") and name not in ("__path__", "__version__"):
                raise AttributeError(name)
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


# Packages of a few tests, whose import takes seconds: every process collects every test.
for name in ("anthropic", "datasets", "ollama", "openai", "peft"):
    if (spec := importlib.util.find_spec(name)) is not None:
        sys.modules[name] = LatePackage(name)
        sys.modules[name].__spec__ = spec
# transformers would take the folder of that name beside this file for the package, and look for its
# version in the files of all distributions.
sys.modules["kernels"] = None  # type: ignore[assignment]

# A shared two-core machine stalls for tens of milliseconds: a deadline would test the neighbours.
# `make test` repeats the same few examples, so that a change is judged by what it changed; `make
# test-slow` looks for new ones, of which it has a hundred where a test says nothing.
settings.register_profile("explore", deadline=None, print_blob=True)
settings.register_profile(
    "repeat", settings.get_profile("explore"), derandomize=True, max_examples=40
)
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
    """Let torch compute on one thread, and draw the same numbers, whatever tests before have done.

    Several processes run tests at once, of tensors so small that threads only cost time.
    """
    random.seed(0)
    np.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
        torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def process_as_found_by_module() -> Iterator[None]:
    """Fail where the tests of a file, and what they share, leave the process changed."""
    before = read_state(with_modules=True)
    yield
    changes = list_changes(before, read_state(with_modules=True))
    assert not changes, "the tests, or what they share, left this changed"


@pytest.fixture(autouse=True)
def process_as_found(process_as_found_by_module: None) -> Iterator[None]:
    """Fail where a test leaves the process changed, in which the next one runs."""
    before = read_state()
    yield
    changes = list_changes(before, read_state())
    assert not changes, "the test left this changed"


SHARED = {
    "the server of tests/e2e/conftest.py": {
        "tests/e2e/answers/test_log_likelihood.py",
        "tests/e2e/answers/test_structured.py",
        "tests/e2e/test_demo_server.py",
        "tests/e2e/test_disaggregated_serve.py",
        "tests/e2e/test_terminal.py",
    },
    "the process that tests/models/forks.py forks": {
        "tests/models/export/test_export_killed.py",
        "tests/models/weights/test_loading_memory.py",
        "tests/models/weights/test_packed_cache.py",
    },
}
"""Files whose tests share what takes seconds to start, by what that is."""


class FilesByShared(LoadFileScheduling):
    """One process runs all tests of a file, and all files that share what one has to start."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return next((shared for shared, files in SHARED.items() if file in files), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> FilesByShared | None:
    return FilesByShared(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.e2e)

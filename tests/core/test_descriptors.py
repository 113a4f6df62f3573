"""Descriptors: a process takes as many as it may have, and keeps the last for itself.

Goal: the usual soft limit is no limit of ours, and the reserve is where it is said to be. Method:
processes with limits of their own.
"""

import json
import resource
import subprocess
import sys

import pytest

PROGRAM = """
import json, resource
from tandem.core.descriptors import is_scarce, raise_limit
scarce = [fd for fd in range(2048) if is_scarce(fd)]
raise_limit()
print(json.dumps([scarce[:1], resource.getrlimit(resource.RLIMIT_NOFILE)]))
"""


def run_with(soft: int, hard: int) -> tuple[list[int], list[int]]:
    """Return the first scarce descriptor, if there is one, and the limits after raising them."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )
    scarce, limits = json.loads(done.stdout)
    return scarce, limits


@pytest.mark.parametrize(
    ("soft", "first"),
    [(1024, 1024 - 256), (400, 400 - 100), (60, 60 - 16)],
    ids=["most", "a quarter", "least"],
)
def test_the_last_descriptors_are_scarce_and_the_limit_can_be_raised(soft, first):
    hard = min(1200, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    scarce, limits = run_with(soft, hard)
    assert scarce == [first]
    assert limits == [hard, hard]


def test_a_limit_that_is_as_high_as_it_may_be_stays():
    assert run_with(300, 300) == ([300 - 75], [300, 300])

"""On which cores processes run while they are measured."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["on_cores"]


@contextlib.contextmanager
def on_cores(places: Mapping[int, int]) -> Iterator[None]:
    """Keep all threads of processes on a core each: process id to core.

    Only what is inside is kept: afterwards the system moves them as it likes, which need not be at
    once.
    """
    free = {process_id: os.sched_getaffinity(process_id) for process_id in places}
    try:
        for process_id, core in places.items():
            _keep_on(process_id, {core})
        yield
    finally:
        for process_id, cores in free.items():
            _keep_on(process_id, cores)


def _keep_on(process_id: int, cores: set[int]) -> None:
    with contextlib.suppress(FileNotFoundError):  # The process has ended,
        for task in Path(f"/proc/{process_id}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # or the thread.
                os.sched_setaffinity(int(task.name), cores)

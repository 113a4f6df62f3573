"""Pins processes to cores while they are measured."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["on_cores"]


@contextlib.contextmanager
def on_cores(places: Mapping[int, int]) -> Iterator[None]:
    """Pin all threads of processes to one core each; ``places`` maps process ids to cores.

    The pinning holds inside the block. Afterwards the system may move the threads again, but need
    not do so at once.
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
    with contextlib.suppress(FileNotFoundError):  # The process may have ended.
        for task in Path(f"/proc/{process_id}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # The thread may have ended.
                os.sched_setaffinity(int(task.name), cores)

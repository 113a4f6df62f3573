"""Threads for work whose time depends on the size of a request, shared fairly among clients.

The event loop serves every stream, so such work runs here: decoding large bodies, rendering,
encoding, long answers. Self-clocked fair queueing decides which job is next: a job's tag is its
cost, added to the last tag of its client or of the job begun last, and the job with the smallest
tag goes first. Clients with waiting work get equal shares, one with little work goes ahead of those
with much, and the jobs of one client keep their order.
Source: Golestani, "A self-clocked fair queueing scheme", INFOCOM 1994.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

from tandem.server.clients import current_client

__all__ = ["LARGE_COST", "SMALL_COST", "WorkThreads"]

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

SMALL_COST = 1 << 12
"""Cost in bytes of input or output below which work takes far less than a millisecond, so that it
may run on the event loop."""
LARGE_COST = 1 << 17
"""Cost in bytes from which a job may take tenths of a second; one thread is kept for smaller
jobs."""
_JOB_COST = 1 << 8
"""Fixed cost of each job, in bytes, in addition to the bytes that it handles."""


@dataclass(slots=True, eq=False)
class _Job:
    call: Callable[[], Any]
    cost: int
    tag: float
    done: "asyncio.Future[Any]"

    @property
    def is_large(self) -> bool:
        return self.cost >= LARGE_COST


@dataclass(slots=True)
class _Queue:
    """The jobs of one client that wait for a thread."""

    jobs: deque[_Job] = field(default_factory=deque)
    last_tag: float = 0.0


class WorkThreads:
    """A pool of threads that runs functions for clients. Used on one event loop.

    Args:
        num_threads: number of threads; with more than one, large jobs leave one of them free.
    """

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        self._num_free = num_threads
        self._num_free_large = max(num_threads - 1, 1)
        self._queues: dict[str, _Queue] = {}
        self._clock = 0.0
        """Tag of the job begun last. A tag is the sum of costs at which a job is due, by which
        clients get equal shares (fair queueing).
        """

    async def run(self, function: Callable[[*_Ts], _T], cost: int, *args: *_Ts) -> _T:
        """Run ``function`` on a thread and return its result.

        A job that is cancelled before its turn never runs.

        Args:
            function: called with the context variables of the caller.
            cost: estimated number of bytes that it reads and writes.
            args: arguments of the function.
        """
        queue = self._queues.setdefault(current_client.get(), _Queue())
        queue.last_tag = max(queue.last_tag, self._clock) + cost + _JOB_COST
        done = asyncio.get_running_loop().create_future()
        call = partial(copy_context().run, function, *args)
        queue.jobs.append(_Job(call, cost, queue.last_tag, done))
        self._begin_jobs()
        return await done

    def close(self) -> None:
        """Wait for running jobs; drop waiting ones."""
        for queue in self._queues.values():
            for job in queue.jobs:
                job.done.cancel()
        self._queues.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _begin_jobs(self) -> None:
        while self._num_free and (client := self._choose_client()) is not None:
            queue = self._queues[client]
            job = queue.jobs.popleft()
            self._clock = max(self._clock, job.tag)
            if not queue.jobs:
                # Forget a client without jobs: its last tag (the virtual time of its last job's
                # end) is not later than the clock, so its next job would get the same tag without
                # it.
                del self._queues[client]
            if job.done.cancelled():
                continue
            self._num_free -= 1
            self._num_free_large -= job.is_large
            running = asyncio.get_running_loop().run_in_executor(self._pool, job.call)
            running.add_done_callback(partial(self._end_job, job))

    def _choose_client(self) -> str | None:
        """Return the client whose first waiting job is next by fair queueing; None if no job may
        begin now.
        """
        heads = [
            (queue.jobs[0].tag, client)
            for client, queue in self._queues.items()
            if self._num_free_large or not queue.jobs[0].is_large
        ]
        return min(heads)[1] if heads else None

    def _end_job(self, job: _Job, running: "asyncio.Future[Any]") -> None:
        self._num_free += 1
        self._num_free_large += job.is_large
        if not job.done.done():
            if running.cancelled():
                job.done.cancel()
            elif (error := running.exception()) is not None:
                job.done.set_exception(error)
            else:
                job.done.set_result(running.result())
        elif not running.cancelled():
            # Retrieve the exception, so that asyncio does not log it: nobody awaits this task.
            running.exception()
        self._begin_jobs()

"""Background tasks that outlive the caller that started them, and end with their owner; functions
that run in a thread.
"""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from types import CoroutineType

__all__ = ["Tasks", "in_thread"]

P = ParamSpec("P")
T = TypeVar("T")


def in_thread(step: Callable[P, T]) -> "Callable[P, CoroutineType[Any, Any, T]]":
    """Return a coroutine function that runs ``step``, which blocks, in a thread."""

    @functools.wraps(step)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(step, *args, **kwargs)

    return run


class Tasks:
    """The background tasks of one owner, on one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Start a coroutine in a task that continues when its caller is gone."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def keep(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the current task, which counts as one of these tasks until the
        coroutine ends.
        """
        task = asyncio.current_task()
        assert task is not None, "coroutines run in tasks"
        self._tasks.add(task)
        try:
            return await work
        finally:
            self._tasks.discard(task)

    def list_running(self) -> list[asyncio.Future[Any]]:
        """Return the tasks that have not ended."""
        return list(self._tasks)

    def cancel(self) -> None:
        """Cancel all tasks."""
        for task in list(self._tasks):
            task.cancel()

    async def join(self) -> None:
        """Wait until all current tasks have ended. Their errors are ignored."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def aclose(self) -> None:
        """Cancel all tasks and wait for their end."""
        self.cancel()
        await self.join()

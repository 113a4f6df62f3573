"""Work of a master that no caller's going ends."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["Tasks"]

T = TypeVar("T")


class Tasks:
    """The tasks of one master, on one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run a coroutine that its caller's going does not end."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def keep(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it in the present task, which is one of these meanwhile."""
        task = asyncio.current_task()
        assert task is not None, "coroutines run in tasks"
        self._tasks.add(task)
        try:
            return await work
        finally:
            self._tasks.discard(task)

    async def aclose(self) -> None:
        """End all of them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

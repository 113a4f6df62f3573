"""Work that goes on behind its caller, until its owner is closed."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["Tasks"]

T = TypeVar("T")


class Tasks:
    """The tasks of one owner, on one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run a coroutine that goes on when its caller is gone."""
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

    def list_running(self) -> list[asyncio.Future[Any]]:
        """Return those that have not ended."""
        return list(self._tasks)

    def cancel(self) -> None:
        """Cancel all of them."""
        for task in list(self._tasks):
            task.cancel()

    async def join(self) -> None:
        """Wait until those that there are have ended, however they do."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def aclose(self) -> None:
        """End all of them."""
        self.cancel()
        await self.join()

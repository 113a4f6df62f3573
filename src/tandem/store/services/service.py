"""The life of a store's process: its parts are closed in the reverse order of opening."""

import contextlib
from abc import ABC, abstractmethod
from typing import Self

__all__ = ["Service"]


class Service(ABC):
    """An async context manager that opens all parts of a process, or leaves none open."""

    def __init__(self) -> None:
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as opening:
            await self._start(opening)
            self._open = opening.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    @abstractmethod
    async def _start(self, opening: contextlib.AsyncExitStack) -> None:
        """Open the parts of the process in order, and register each with ``opening``, which closes
        them in the reverse order.
        """

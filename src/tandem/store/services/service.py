"""The life of a process of a store: what is opened is closed in the opposite order."""

import contextlib
from abc import ABC, abstractmethod
from typing import Self

__all__ = ["Service"]


class Service(ABC):
    """An async context manager; entering it opens all, or leaves nothing open."""

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
        """Open one after the other."""

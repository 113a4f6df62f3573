"""What tests share because it takes seconds to start, though some want it new or end it."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Generic, TypeVar

__all__ = ["Shared"]

T = TypeVar("T")


class Shared(Generic[T]):
    """Starts something for the first test that asks, and again for the first after one ended it.

    So tests that share it may run in any order. In their file the one that wants it new comes
    first and the one that ends it last: then it starts once. A context manager: nothing runs after
    it.

    Args:
        start: makes the context manager of what is shared.
    """

    def __init__(self, start: Callable[[], AbstractContextManager[T]]) -> None:
        self._start = start
        self._stack = ExitStack()
        self._live: T | None = None

    def __enter__(self) -> "Shared[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def get(self) -> T:
        """Return what is shared; start it if it does not run."""
        if self._live is None:
            self._live = self._stack.enter_context(self._start())
        return self._live

    def get_new(self) -> T:
        """Return what no test has had before."""
        self._end()
        return self.get()

    @contextlib.contextmanager
    def use_up(self) -> Iterator[T]:
        """Give what is shared to the block, which may end it."""
        try:
            yield self.get()
        finally:
            self._end()

    def _end(self) -> None:
        self._live = None
        self._stack.close()

"""Coroutines that begin at once, not at the loop's next turn."""

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["start_eagerly"]

T = TypeVar("T")


def start_eagerly(work: Coroutine[Any, Any, T]) -> "asyncio.Future[T]":
    """Run a coroutine up to where it first waits; the rest of it is a task of the running loop.

    Before it waits it must not ask for its task (as ``asyncio.timeout`` does): Python 3.11 has
    none then.
    """
    loop = asyncio.get_running_loop()
    if sys.version_info >= (3, 12):
        return asyncio.Task(work, loop=loop, eager_start=True)
    ended = loop.create_future()
    try:
        waits_for = work.send(None)
    except StopIteration as end:
        ended.set_result(end.value)
    except asyncio.CancelledError:
        ended.cancel()
    except Exception as error:  # noqa: BLE001 - as a task
        ended.set_exception(error)
    else:
        return loop.create_task(_Rest(work, waits_for))
    return ended


class _Rest(Coroutine[Any, Any, T]):
    """Be ``work``, which waits for something already."""

    def __init__(self, work: Coroutine[Any, Any, T], waits_for: Any) -> None:
        self._work = work
        self._waits_for = waits_for
        self._is_awaited = False

    def send(self, value: Any) -> Any:
        if self._is_awaited:
            return self._work.send(value)
        self._is_awaited = True
        return self._waits_for

    def throw(self, *error: Any) -> Any:
        if not self._is_awaited:
            # Cancelled before anybody knew for what it waits.
            self._is_awaited = True
            if asyncio.isfuture(self._waits_for):
                self._waits_for.cancel()
        return self._work.throw(*error)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Any:
        raise TypeError("for a task alone")

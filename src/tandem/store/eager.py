"""Coroutines that begin at once, not at the loop's next turn."""

import asyncio
import sys
import types
from collections.abc import Coroutine, Generator
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
        return loop.create_task(_go_on(work, waits_for))
    return ended


@types.coroutine
def _go_on(work: Coroutine[Any, Any, T], waits_for: Any) -> Generator[Any, Any, T]:
    """Be ``work``, which waits for something already."""
    value: Any = None
    thrown: BaseException | None = None
    while True:
        try:
            value = yield waits_for
        except GeneratorExit:
            work.close()
            raise
        except BaseException as error:  # noqa: BLE001 - handed on
            thrown = error
        try:
            waits_for = work.send(value) if thrown is None else work.throw(thrown)
        except StopIteration as end:
            return end.value
        thrown = None

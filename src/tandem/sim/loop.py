"""An event loop in virtual time, and clocks that read it.

``VirtualLoop`` is asyncio's own loop over a selector that never waits: when no callback is ready,
the time jumps to the next timer. Callbacks therefore run in asyncio's order, and runs with equal
seeds are equal. It has no sockets and no threads.

A callback or task belongs to the process in whose context it was created (``OWNER``). Work of a
stopped process is postponed until the process continues; work of a killed one is cancelled.
"""

import asyncio
import contextvars
import selectors
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Protocol, TypeVar

__all__ = ["OWNER", "DriftingClock", "LoopClock", "Owner", "VirtualLoop", "run_virtual"]

T = TypeVar("T")

MIN_LEAP_S = 1e-6
"""Smallest advance of the time in seconds: clocks that count from long ago cannot represent less,
so a poll for a time would never end.
"""
MAX_S = 1e7
"""Longest run in seconds: above about 1.6e7 a double cannot resolve the loop's nanosecond, and a
timer due exactly now would never be considered due.
"""
MAX_CLEANUPS = 10
"""Largest number of rounds of cancelling tasks at the end of a run; a cancelled task may start
others.
"""


class Owner(Protocol):
    """The owner of a callback: a simulated process."""

    is_alive: bool
    stalled_until_s: float

    def own(self, task: asyncio.Task[Any]) -> None:
        """Record a task that was started in this process's context, so that it ends with the
        process.
        """
        ...


OWNER: contextvars.ContextVar[Owner | None] = contextvars.ContextVar("OWNER", default=None)
"""The process whose code is running; None for code of the world itself."""


class VirtualSelector(selectors.SelectSelector):
    """A selector that never waits: it advances the virtual time by the time it should
    have slept.
    """

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """Advance the time by ``timeout`` seconds; no file is ever ready."""
        if timeout is None:
            raise AssertionError("deadlock: nothing will ever happen again")
        if timeout > 0:
            self.now_s += max(timeout, MIN_LEAP_S)
            if self.now_s > MAX_S:
                raise AssertionError(f"a run of more than {MAX_S:.0f} s: it would never end")
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time advances only when no callback is ready.

    Without ready callbacks and timers, ``run_until_complete`` raises AssertionError.
    """

    def __init__(self) -> None:
        self._virtual = VirtualSelector()
        super().__init__(self._virtual)
        self.stalled_until_s = 0.0
        """Time in seconds after which no process is stopped."""
        self.set_task_factory(_make_task)

    @property
    def now_s(self) -> float:
        """Virtual time in seconds since the loop was created."""
        return self._virtual.now_s

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._virtual.now_s

    def call_soon(
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """Call back in this iteration of the loop, or, if the owner is stopped, when it
        continues.
        """
        if self._virtual.now_s < self.stalled_until_s:
            owner = OWNER.get() if context is None else context.get(OWNER)
            if owner is not None and owner.is_alive and owner.stalled_until_s > self._virtual.now_s:
                return self.call_at(owner.stalled_until_s, callback, *args, context=context)
        return super().call_soon(callback, *args, context=context)

    async def poll(self, is_over: Callable[[], bool], draw_period_s: Callable[[], float]) -> None:
        """Sleep until ``is_over()`` is True, which is checked after each period.

        Equivalent to a loop of sleeps, but the task is resumed only once.
        """
        over = self.create_future()

        def ring() -> None:
            if is_over():
                wake()
            else:
                self.call_soon(wait)

        def wait() -> None:
            nonlocal timer
            if is_over():
                wake()
            elif not over.done():
                timer = self.call_later(draw_period_s(), ring)

        def wake() -> None:
            if not over.done():
                over.set_result(None)

        timer = self.call_later(draw_period_s(), ring)
        try:
            await over
        finally:
            timer.cancel()


def _make_task(
    loop: asyncio.AbstractEventLoop,
    work: Coroutine[Any, Any, T] | Generator[Any, None, T],
    **options: Any,
) -> asyncio.Task[T]:
    task = asyncio.Task(work, loop=loop, **options)  # pyright: ignore[reportArgumentType]
    context = options.get("context")
    owner = OWNER.get() if context is None else context.get(OWNER)
    if owner is not None:
        owner.own(task)
    return task


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``main()`` to its end in virtual time, then cancel the tasks that it left.

    Raises: the errors of ``main``; AssertionError if it waits for an event that can never happen.
    """
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main())
    finally:
        for _ in range(MAX_CLEANUPS):
            if not (tasks := asyncio.all_tasks(loop)):
                break
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()


class LoopClock:
    """Reads the time of the loop in which it was created."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def now_s(self) -> float:
        """Return the loop's time in seconds."""
        return self._loop.time()


class DriftingClock:
    """The clock of one process, with an origin and a rate; it may leap forward but never goes back.

    Args:
       rate: seconds of this clock per second of the loop.
       origin_s: time of this clock when the loop began.
    """

    def __init__(self, rate: float, origin_s: float) -> None:
        self.rate, self.origin_s = rate, origin_s
        self._loop = asyncio.get_running_loop()

    def now_s(self) -> float:
        """Return the clock's time in seconds."""
        return self.origin_s + self.rate * self._loop.time()

    def leap(self, seconds: float) -> None:
        """Advance the clock by ``seconds`` >= 0 at once."""
        assert seconds >= 0, seconds
        self.origin_s += seconds

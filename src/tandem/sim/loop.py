"""An event loop in virtual time, and the clocks that tell it.

``VirtualLoop`` is asyncio's own loop over a selector that never waits: when nothing is left to do
now, the time of the next timer has come. Callbacks therefore run in asyncio's order, and equal
programs with equal seeds run equally. It has no sockets and no threads.

A callback or task belongs to the process in whose context it was made (``OWNER``). Work of
a stopped process is put off until the process continues; work of a killed one is cancelled.
"""

import asyncio
import contextvars
import selectors
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Protocol, TypeVar

__all__ = ["OWNER", "DriftingClock", "LoopClock", "Owner", "VirtualLoop", "run_virtual"]

T = TypeVar("T")

MIN_LEAP_S = 1e-6
"""Less is nothing to clocks that count from long ago: they would be asked for ever."""
MAX_S = 1e7
"""Above about 1.6e7 seconds a double swallows the loop's resolution of a nanosecond, and a timer
that is due exactly now would be waited for for ever."""
MAX_CLEANUPS = 10
"""Rounds in which tasks that are cancelled at the end of a run may begin others."""


class Owner(Protocol):
    """The owner of a callback: a process."""

    is_alive: bool
    stalled_until_s: float

    def own(self, task: asyncio.Task[Any]) -> None:
        """Take note of a task that began in this process's context."""
        ...


OWNER: contextvars.ContextVar[Owner | None] = contextvars.ContextVar("OWNER", default=None)
"""The process whose code this is; None for code of the world itself."""


class VirtualSelector(selectors.SelectSelector):
    """Never waits: the time that the loop would have slept has passed when it returns."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """Advance the time by ``timeout``, seconds; nothing is ever ready."""
        if timeout is None:
            raise AssertionError("deadlock: nothing will ever happen again")
        if timeout > 0:
            self.now_s += max(timeout, MIN_LEAP_S)
            if self.now_s > MAX_S:
                raise AssertionError(f"a run of more than {MAX_S:.0f} s: it would never end")
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time moves only when nothing is left to do.

    A loop with nothing to do and no timer raises AssertionError out of ``run_until_complete``.
    """

    def __init__(self) -> None:
        self._virtual = VirtualSelector()
        super().__init__(self._virtual)
        self.stalled_until_s = 0.0
        """No process is stopped beyond."""
        self.set_task_factory(_make_task)

    @property
    def now_s(self) -> float:
        """The virtual time, seconds since the loop was made."""
        return self._virtual.now_s

    def time(self) -> float:
        """Return ``now_s``."""
        return self._virtual.now_s

    def call_soon(
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """Call back in this turn of the loop, or when the owner, if stopped, goes on."""
        if self._virtual.now_s < self.stalled_until_s:
            owner = OWNER.get() if context is None else context.get(OWNER)
            if owner is not None and owner.is_alive and owner.stalled_until_s > self._virtual.now_s:
                return self.call_at(owner.stalled_until_s, callback, *args, context=context)
        return super().call_soon(callback, *args, context=context)

    async def poll(self, is_over: Callable[[], bool], draw_period_s: Callable[[], float]) -> None:
        """Sleep until ``is_over()``, which is asked after each period.

        As sleeping in a loop, step by step, but the task sleeps through it.
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
    """Run ``main()`` to its end in virtual time, and cancel what it left.

    Raises: what ``main`` raises; AssertionError if it waits for what can never happen.
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
    """The time of the loop that it was made in."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def now_s(self) -> float:
        """Return the loop's time, seconds."""
        return self._loop.time()


class DriftingClock:
    """The clock of one process: starts somewhere, has a rate, may leap forward; never goes back.

    Args:
        rate: its seconds in a second of the loop.
        origin_s: its time when the loop began.
    """

    def __init__(self, rate: float, origin_s: float) -> None:
        self.rate, self.origin_s = rate, origin_s
        self._loop = asyncio.get_running_loop()

    def now_s(self) -> float:
        """Return its time, seconds."""
        return self.origin_s + self.rate * self._loop.time()

    def leap(self, seconds: float) -> None:
        """Go forward by ``seconds`` >= 0 at once."""
        assert seconds >= 0, seconds
        self.origin_s += seconds

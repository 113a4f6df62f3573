"""A process of the simulated world: its code and tasks die, stop and continue together."""

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from tandem.core.errors import TandemError
from tandem.sim.loop import OWNER, VirtualLoop

__all__ = ["Handler", "Process"]

T = TypeVar("T")
Handler = Callable[[Any, Any], Any]
"""Function that handles a call: takes the caller's session and the request, and returns the answer
or a coroutine of it.
"""

MANY_TASKS = 64
"""Number of tasks above which finished ones are removed from the list."""


class ProcessWorld(Protocol):
    """The part of a ``World`` (a simulated run) that its processes use."""

    violations: list[str]

    @property
    def ids(self) -> Iterator[int]:
        """Unique numbers for processes."""
        ...


class Process:
    """A process that can die; all tasks that its code started end with it.

    Args:
       world: the world; the failure of a task started by ``spawn`` is a violation there.
       name: name of its role; ``instance_id`` identifies this process.
    """

    def __init__(self, world: ProcessWorld, name: str) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.world = world
        self.name = name
        self.instance_id = f"{name}#{next(world.ids)}"
        self.is_alive = True
        self.stalled_until_s = 0.0
        self.loop = loop
        self.context = contextvars.copy_context()
        self.context.run(OWNER.set, self)
        self.methods: dict[str, tuple[Handler, type[Any], type[Any]]] = {}
        """Methods by name: handler, type of the request, type of the answer."""
        self.tasks: list[asyncio.Task[Any]] = []
        """Tasks in order of their start, some of them finished. A set's order would depend on
        addresses and make runs differ.
        """
        self._max_tasks = MANY_TASKS

    def serve(self, methods: Iterable[tuple[str, Handler, type[Any], type[Any]]]) -> None:
        """Register the methods that other processes may call: name, handler, type of the request,
        type of the answer.
        """
        for name, handler, request_type, response_type in methods:
            self.methods[name] = (handler, request_type, response_type)

    # The methods below run code as this process.

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function as this process: tasks that it starts stop and die with the process."""
        if OWNER.get() is self:
            return function(*args)
        return self.context.run(function, *args)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task of this process. If it fails with anything but a TandemError, the world
        records a violation, which fails the test.
        """
        task = self.loop.create_task(work, context=self.context)
        task.add_done_callback(self._note_end)
        return task

    def own(self, task: asyncio.Task[Any]) -> None:
        """Add a task to those that die with this process; the loop calls this for each new task."""
        self.tasks.append(task)
        if len(self.tasks) > self._max_tasks:
            self.tasks = [task for task in self.tasks if not task.done()]
            self._max_tasks = MANY_TASKS + 2 * len(self.tasks)

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and self.is_alive and not isinstance(error, TandemError):
            self.world.violations.append(f"{self.name} failed: {error!r}")

    # The methods below end the process, stop it, and wait for the end of a stop.

    def kill(self) -> None:
        """Kill the process, as SIGKILL does; ``World.kill`` ends its sessions as well."""
        self.is_alive = False
        for task in self.tasks:
            task.cancel()
        self.tasks = []

    @property
    def is_stalled(self) -> bool:
        """True while the process is stopped, as by SIGSTOP."""
        return self.stalled_until_s > self.loop.now_s

    def stall_until(self, time_s: float) -> None:
        """Stop the process until the loop's time is ``time_s``."""
        self.stalled_until_s = time_s
        self.loop.stalled_until_s = max(self.loop.stalled_until_s, time_s)

    async def pass_stall(self) -> None:
        """Wait until the process is not stopped. For tasks of other processes; its own ones stop
        with it.
        """
        while self.stalled_until_s > self.loop.now_s:
            await asyncio.sleep(self.stalled_until_s - self.loop.now_s)

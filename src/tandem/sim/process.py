"""A process of the simulated world: code and tasks that die, stop and go on together."""

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from tandem.core.errors import TandemError
from tandem.sim.loop import OWNER, VirtualLoop

__all__ = ["Handler", "Process"]

T = TypeVar("T")
Handler = Callable[[Any, Any], Any]
"""Takes the caller's session and the request; returns the answer, or a coroutine of it."""

MANY_TASKS = 64
"""From here on tasks that are done are dropped."""


class ProcessWorld(Protocol):
    """The part of a ``World`` that its processes use."""

    violations: list[str]

    @property
    def ids(self) -> Iterator[int]:
        """Numbers of processes, each once."""
        ...


class Process:
    """Something that can die. All tasks that its code began end with it, at whatever step.

    Args:
        world: its world; a task of ``spawn`` that fails is a violation there.
        name: of the role that it plays; ``instance_id`` is its own.
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
        """Its methods: handler, type of the request, type of the answer."""
        self.tasks: list[asyncio.Task[Any]] = []
        """In order: a set would make a run depend on addresses. Some may be done."""
        self._max_tasks = MANY_TASKS

    def serve(self, methods: Iterable[tuple[str, Handler, type[Any], type[Any]]]) -> None:
        """Answer these: name, handler, type of the request, type of the answer."""
        for name, handler, request_type, response_type in methods:
            self.methods[name] = (handler, request_type, response_type)

    # The methods below run code as this process.

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function as this process: what it starts is stopped and dies with it."""
        if OWNER.get() is self:
            return function(*args)
        return self.context.run(function, *args)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin a task of this process whose failure is a violation, TandemErrors excepted."""
        task = self.loop.create_task(work, context=self.context)
        task.add_done_callback(self._note_end)
        return task

    def own(self, task: asyncio.Task[Any]) -> None:
        """Let a task die with this process; the loop calls it for each that begins."""
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
        """End it, as SIGKILL does; ``World.kill`` ends its sessions as well."""
        self.is_alive = False
        for task in self.tasks:
            task.cancel()
        self.tasks = []

    @property
    def is_stalled(self) -> bool:
        """True if it is stopped, as by SIGSTOP."""
        return self.stalled_until_s > self.loop.now_s

    def stall_until(self, time_s: float) -> None:
        """Stop it dead; it goes on at ``time_s`` of the loop."""
        self.stalled_until_s = time_s
        self.loop.stalled_until_s = max(self.loop.stalled_until_s, time_s)

    async def pass_stall(self) -> None:
        """Wait until it is not stopped, on behalf of a task that is not its own."""
        while self.stalled_until_s > self.loop.now_s:
            await asyncio.sleep(self.stalled_until_s - self.loop.now_s)

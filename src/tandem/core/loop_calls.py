"""Threads that run an event loop, and calls into it from other threads."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tandem.core.errors import PeerLostError

__all__ = ["LoopThread"]

T = TypeVar("T")


class LoopThread:
    """A thread that runs an event loop until it is closed.

    Args:
        name: name of the thread.
        loop_factory: makes the loop; None: asyncio's default.
    """

    def __init__(
        self,
        name: str,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    ) -> None:
        self._loop_factory = loop_factory
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._started.wait()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop, for ``call_soon_threadsafe``."""
        return self._loop

    @property
    def is_current(self) -> bool:
        """True if the caller is on this thread, where ``run`` would wait for ever."""
        return threading.current_thread() is self._thread

    def submit(self, work: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Start a coroutine on the loop, from any thread; return a future of its result.

        Raises: RuntimeError (the loop is closed; ``work`` is closed too).
        """
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the loop and return its result; block until then.

        An interrupt or the time limit cancels the coroutine.

        Raises: TimeoutError (``timeout_s`` has passed); RuntimeError (the loop is closed); errors
            of ``work``.
        """
        future = self.submit(work)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()  # Also cancel the call if the waiting thread is interrupted.
            raise

    async def call(self, work: Coroutine[Any, Any, T], where: str) -> T:
        """Run a coroutine on this loop, awaited from another event loop; return its result.

        Args:
            work: the coroutine; closed if it cannot run.
            where: name of the caller's operation, for errors.

        Raises: PeerLostError (the loop is closed); errors of ``work``.
        """
        try:
            future = self.submit(work)
        except RuntimeError as error:
            raise PeerLostError(where, "the instance is stopping") from error
        return await asyncio.wrap_future(future)

    def close(self, timeout_s: float | None = None) -> None:
        """Stop the loop, cancel its tasks and wait for the thread to end. Idempotent."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self._loop_factory) as runner:
            self._loop = runner.get_loop()
            self._loop.call_soon(self._started.set)
            self._loop.run_forever()

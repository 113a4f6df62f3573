"""Event loops of other threads: a thread that runs one, and calls into it."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tandem.core.errors import PeerLostError

__all__ = ["LoopThread"]

T = TypeVar("T")


class LoopThread:
    """A thread with an event loop, which runs until it is closed.

    Args:
        name: of the thread.
        loop_factory: makes the loop; None: asyncio's own.
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
        """The loop, for ``call_soon_threadsafe``."""
        return self._loop

    @property
    def is_current(self) -> bool:
        """True on the thread itself, where ``run`` would wait for ever."""
        return threading.current_thread() is self._thread

    def submit(self, work: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Begin a coroutine on the loop; from any thread.

        Raises: RuntimeError (the loop is closed; ``work`` is closed too).
        """
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Return the result of a coroutine; blocks, and cancels it when interrupted or too late.

        Raises: TimeoutError; RuntimeError (the loop is closed); as ``work`` raises.
        """
        future = self.submit(work)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()  # Also cancel the call if the waiting thread is interrupted.
            raise

    async def call(self, work: Coroutine[Any, Any, T], where: str) -> T:
        """Return the result of a coroutine; from another event loop.

        Args:
            work: closed if it cannot run.
            where: names the caller in the error.

        Raises: PeerLostError (the loop is closed); as ``work`` raises.
        """
        try:
            future = self.submit(work)
        except RuntimeError as error:
            raise PeerLostError(where, "the instance is stopping") from error
        return await asyncio.wrap_future(future)

    def close(self, timeout_s: float | None = None) -> None:
        """Stop the loop, cancel what it runs, wait for the thread to end. Idempotent."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self._loop_factory) as runner:
            self._loop = runner.get_loop()
            self._loop.call_soon(self._started.set)
            self._loop.run_forever()

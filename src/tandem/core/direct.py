"""Tasks that go on where what they wait for ends, not at the loop's next turn.

A handler that waits for one answer costs asyncio a task and some ten turns of its loop, which is
more than what the handler does. ``DirectTask`` begins at once, and where it waits for a
``DirectFuture`` (another such task is one), whoever ends that runs it on. For anything else it
waits as any task does. All of it belongs to the thread that is the loop at the time.
"""

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["DirectFuture", "DirectTask", "shield"]

T = TypeVar("T")


class DirectFuture(asyncio.Future[T]):
    """A future that tells of its end at once, if asked to.

    ``set_result``, ``set_exception`` and ``cancel`` return when those have run that were to go on.
    """

    _waiting: "list[Callable[[], None]] | None" = None

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call it where this ends. REQUIRES: it has not."""
        if self._waiting is None:
            self._waiting = [callback]
        else:
            self._waiting.append(callback)

    def set_result(self, result: T) -> None:
        """As of any future."""
        super().set_result(result)
        if self._waiting is not None:
            self._tell()

    def set_exception(self, exception: "type[BaseException] | BaseException") -> None:
        """As of any future."""
        super().set_exception(exception)
        if self._waiting is not None:
            self._tell()

    def cancel(self, msg: Any = None) -> bool:
        """As of any future."""
        is_new = super().cancel(msg)
        if is_new and self._waiting is not None:
            self._tell()
        return is_new

    def _tell(self) -> None:
        waiting, self._waiting = self._waiting, None
        for callback in waiting or ():
            try:
                callback()
            except Exception as error:  # noqa: BLE001 - as what a loop calls back
                # Of nobody's concern here: others wait, and whoever ended this goes on.
                self.get_loop().call_exception_handler(
                    {"message": f"{callback!r} raised", "exception": error, "future": self}
                )


class _Running(threading.local):
    task: "DirectTask[Any] | None" = None
    """Whose coroutine runs on this thread, innermost."""


_running = _Running()


class DirectTask(DirectFuture[T]):
    """Runs a coroutine; see above. To be made on the thread that is the loop.

    Inside, ``asyncio.current_task`` is none or another's: what asks for it (``asyncio.timeout``,
    and from Python 3.12 on ``asyncio.wait_for``) is not for here.

    ``cancel`` is as of a task. It does not reach what this waits for if that is a ``DirectTask``,
    which is its own owner's.
    """

    def __init__(self, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._work = work
        self._waits_for: asyncio.Future[Any] | None = None
        self._must_cancel = False
        self._step()
        if not self.done():
            # For ``asyncio.all_tasks``, and so for the end of ``asyncio.run``. It takes tasks of
            # any kind, whatever its annotation says.
            asyncio._register_task(self)  # pyright: ignore[reportArgumentType]

    def cancel(self, msg: Any = None) -> bool:
        """Have the coroutine be interrupted; false if it has ended."""
        if self.done():
            return False
        waits_for = self._waits_for
        if waits_for is None:  # It runs, up to its next wait.
            self._must_cancel = True
        elif isinstance(waits_for, DirectFuture):
            # It stays as it is; when it ends, it finds that nobody waits for it.
            self._waits_for = None
            self._must_cancel = True
            self.get_loop().call_soon(self._step)
        elif not waits_for.cancel(msg):
            self._must_cancel = True
        return True

    def _step(self) -> None:
        self._waits_for = None
        is_cancelled, self._must_cancel = self._must_cancel, False
        outer, _running.task = _running.task, self
        result: Any = None
        failure: BaseException | None = None
        try:
            try:
                if is_cancelled:
                    waits_for = self._work.throw(asyncio.CancelledError())
                else:
                    waits_for = self._work.send(None)
            finally:
                _running.task = outer
            self._wait(waits_for)
        except StopIteration as end:
            result = end.value
        except BaseException as error:  # noqa: BLE001 - as a task
            failure = error
        else:
            return
        # Who goes on now is not to see the exception that ended this one as being handled.
        if self._must_cancel or isinstance(failure, asyncio.CancelledError):
            super().cancel()
        elif failure is None:
            self.set_result(result)
        else:
            if failure.__traceback__ is not None:
                # This frame holds the task, which holds the exception. (From Python 3.12 on the
                # coroutine's frame keeps its callers', this one too: the collector's work.)
                failure.__traceback__ = failure.__traceback__.tb_next
            self.set_exception(failure)
            if not isinstance(failure, Exception):
                raise failure

    def _wait(self, waits_for: Any) -> None:
        if isinstance(waits_for, DirectFuture):
            waits_for.when_done(functools.partial(self._go_on, waits_for))
        elif asyncio.isfuture(waits_for):
            waits_for.add_done_callback(self._go_on)
        elif waits_for is None:  # As ``asyncio.sleep(0)``.
            self.get_loop().call_soon(self._step)
            return
        else:
            self._work.close()
            raise RuntimeError(f"a coroutine waits for {waits_for!r}")
        waits_for._asyncio_future_blocking = False
        self._waits_for = waits_for
        if self._must_cancel:
            self._must_cancel = False
            self.cancel()

    def _go_on(self, waits_for: "asyncio.Future[Any]") -> None:
        if waits_for is self._waits_for:
            self._step()
        elif not waits_for.cancelled():
            waits_for.exception()  # Seen: nobody waits for it any more.


async def shield(task: "DirectTask[T]") -> T:
    """Wait for a task that the waiter's being cancelled does not cancel."""
    if _running.task is None and not task.done():
        return await asyncio.shield(task)
    return await task

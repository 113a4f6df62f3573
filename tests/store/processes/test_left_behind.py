"""Goal: a call that ends before its turn, or too late, leaves no coroutine that nobody awaits.

Method: pytest makes an error of the warning that Python gives for such a coroutine.
"""

import asyncio
import gc
import types

import pytest

from tandem.core.errors import DeadlineError, PeerLostError
from tandem.store.client.blocking import _BlockingCalls, drive
from tandem.store.config import StoreConfig
from tandem.store.election.elected import _Finished


def begin_work(log):
    async def work():
        log.append("begun")
        await asyncio.sleep(0)
        return 7

    return _Finished(work(), lambda *, is_answered: log.append(is_answered))


def test_work_is_finished_once_however_it_ends():
    log = []
    assert asyncio.run(begin_work(log)) == 7
    assert log == ["begun", True]

    async def cancel(*, is_begun):
        task = asyncio.create_task(begin_work(log))
        for _ in range(is_begun):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    log.clear()
    asyncio.run(cancel(is_begun=True))
    assert log == ["begun", False]
    log.clear()
    asyncio.run(cancel(is_begun=False))
    begin_work(log).close()
    gc.collect()
    assert log == []


class LostChannel:
    def begin_threadsafe(self, *_, **__):
        raise PeerLostError("test", "gone")


def test_a_blocking_call_that_is_late_or_dropped_leaves_nothing():
    clock = types.SimpleNamespace(now_s=iter((0.0, 9.0, 0.0)).__next__)
    loop_calls = types.SimpleNamespace(
        clock=clock, config=StoreConfig(), machine="", ids=None, call=lambda *_, **__: wait()
    )

    async def wait():
        pytest.fail("nobody asked")

    calls = _BlockingCalls(loop_calls, LostChannel(), None)
    with pytest.raises(DeadlineError):
        drive(calls.call("exists", None, int, 5.0))
    calls.begin("exists", None, int, 5.0)

    async def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drive(calls.gather(interrupt(), wait()))
    gc.collect()

"""Goal: direct tasks are tasks, but for when they go on."""

import asyncio
import gc
import sys
from collections.abc import Coroutine
from typing import Any

import pytest

from tandem.core.direct import DirectFuture, DirectTask, shield


def begin(work: Coroutine[Any, Any, Any]) -> DirectTask[Any]:
    return DirectTask(work, asyncio.get_running_loop())


def make_gate(*, is_direct: bool = True) -> asyncio.Future[str]:
    loop = asyncio.get_running_loop()
    return DirectFuture(loop=loop) if is_direct else loop.create_future()


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(work, 10)

    asyncio.run(bounded())


async def wait_for(gate: asyncio.Future[str], steps: list[str]) -> str:
    steps.append("begun")
    try:
        text = await gate
    except KeyError:
        text = "caught"
    except asyncio.CancelledError:
        steps.append("cancelled")
        raise
    steps.append(text)
    return text


def test_it_begins_at_once_and_goes_on_where_its_future_ends():
    async def main() -> None:
        steps: list[str] = []
        gate = make_gate()
        tasks = [begin(wait_for(gate, steps)) for _ in range(2)]
        assert steps == ["begun", "begun"]
        assert not tasks[0].done()
        gate.set_result("ended")
        assert steps == ["begun", "begun", "ended", "ended"]
        assert [task.result() for task in tasks] == ["ended", "ended"]

    run(main())


def test_one_that_waits_for_another_goes_on_with_it():
    async def main() -> None:
        gate = make_gate()
        inner = begin(wait_for(gate, []))

        async def wait_twice() -> str:
            return await inner + await shield(inner)

        outer = begin(wait_twice())
        gate.set_result("a")
        assert outer.result() == "aa"

    run(main())


def test_one_that_never_waits_is_done():
    async def main() -> None:
        async def fail() -> None:
            raise ValueError("early")

        async def work() -> str:
            return "at once"

        assert begin(work()).result() == "at once"
        assert await begin(work()) == "at once"
        with pytest.raises(ValueError, match="early"):
            await begin(fail())

    run(main())


@pytest.mark.parametrize("is_direct", [True, False])
def test_it_waits_for_futures_of_any_kind(is_direct):
    async def main() -> None:
        async def work(gate: asyncio.Future[str]) -> str:
            text = await wait_for(gate, [])
            await asyncio.sleep(0)
            await asyncio.sleep(0.001)
            return text

        gates = [make_gate(is_direct=is_direct) for _ in range(3)]
        tasks = [begin(work(gate)) for gate in gates]
        gates[0].set_result("later")
        gates[1].set_exception(KeyError("x"))
        gates[2].cancel()
        assert await asyncio.gather(*tasks[:2]) == ["later", "caught"]
        with pytest.raises(asyncio.CancelledError):
            await tasks[2]
        assert tasks[2].cancelled()

    run(main())


@pytest.mark.parametrize("is_direct", [True, False])
def test_cancelled_while_it_waits(is_direct):
    async def main() -> None:
        steps: list[str] = []
        gate = make_gate(is_direct=is_direct)
        task = begin(wait_for(gate, steps))
        assert task.cancel()
        assert task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert steps == ["begun", "cancelled"]
        assert not task.cancel()
        if is_direct:
            gate.set_result("nobody waits")
        assert steps == ["begun", "cancelled"]

    run(main())


def test_cancelled_before_what_it_waits_for_ends_in_the_same_turn():
    async def main() -> None:
        for is_direct in (True, False):
            steps: list[str] = []
            gate = make_gate(is_direct=is_direct)
            task = begin(wait_for(gate, steps))
            if not is_direct:
                gate.set_result("late")  # The task hears of it at the next turn.
            task.cancel()
            if is_direct:
                gate.set_result("late")
            with pytest.raises(asyncio.CancelledError):
                await task
            assert steps == ["begun", "cancelled"]

    run(main())


def test_cancelled_by_itself_and_caught():
    async def main() -> None:
        caught: list[int] = []

        async def work() -> str:
            tasks[0].cancel()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                caught.append(1)
            await asyncio.sleep(0)
            return "lived"

        async def begin_later() -> str:
            await asyncio.sleep(0)
            return await work()

        tasks = [begin(begin_later())]
        assert await tasks[0] == "lived"
        assert caught == [1]

    run(main())


@pytest.mark.parametrize("is_task", [True, False])
def test_who_waits_shielded_can_leave(is_task):
    """Of either kind: the work goes on, and its owner sees how it ends."""

    async def main() -> None:
        gate = make_gate()
        work = begin(wait_for(gate, []))
        waiter = asyncio.ensure_future(shield(work)) if is_task else begin(shield(work))
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert not work.done()
        gate.set_result("done")
        assert await work == "done"

    run(main())


def test_an_error_that_nobody_looks_at_is_told():
    async def main() -> None:
        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, told_of: told.append(told_of))

        async def fail() -> None:
            raise ValueError("lost")

        begin(fail())
        gc.collect()
        assert [str(each["exception"]) for each in told] == ["lost"]

    run(main())


def test_what_one_waiter_raises_is_not_the_others():
    async def main() -> None:
        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, told_of: told.append(told_of))
        steps: list[str] = []
        gate = make_gate()
        task = begin(wait_for(gate, steps))

        def fail() -> None:
            raise ValueError("a waiter's own")

        task.when_done(fail)
        others = [begin(wait_for(gate, steps)) for _ in range(2)]
        gate.set_result("ended")
        assert [other.result() for other in others] == ["ended", "ended"]
        assert [str(each["exception"]) for each in told] == ["a waiter's own"]

    run(main())


def test_who_goes_on_handles_no_exception_of_what_ended():
    async def main() -> None:
        async def fail_after(waits_for: asyncio.Future[str]) -> None:
            try:
                await waits_for
            finally:
                raise KeyError("own")

        gate = make_gate()
        inner = begin(wait_for(gate, []))
        outer = begin(fail_after(inner))
        gate.set_result("ended")
        with pytest.raises(KeyError) as caught:
            await outer
        assert caught.value.__context__ is None

    run(main())


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="frames keep their callers from 3.12 on")
def test_failures_leave_no_garbage():
    async def main() -> None:
        async def fail(waits_for: asyncio.Future[str]) -> None:
            await waits_for
            raise ValueError("x")

        gc.collect()
        gc.disable()
        try:
            for _ in range(100):
                gate = make_gate()
                task = begin(fail(gate))
                gate.set_result("")
                assert isinstance(task.exception(), ValueError)
            del task, gate
            assert gc.collect() < 100
        finally:
            gc.enable()

    run(main())


def test_cancelled_in_its_last_step():
    async def main() -> None:
        async def work(gate: asyncio.Future[str]) -> str:
            await gate
            tasks[0].cancel()
            return "too late"

        gate = make_gate()
        tasks = [begin(work(gate))]
        gate.set_result("")
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]

    run(main())


def test_what_is_no_future_is_refused():
    async def main() -> None:
        class Odd:
            def __await__(self) -> Any:
                yield "odd"

        async def work() -> None:
            await Odd()

        with pytest.raises(RuntimeError, match="odd"):
            await begin(work())

    run(main())

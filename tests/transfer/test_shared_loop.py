"""A loop that another thread borrows: what runs there, what wakes its own thread, who waits."""

import asyncio
import threading
import time

import pytest

from tandem.transfer import SharedLoop


class Borrower:
    """A thread that borrows a loop, one call at a time."""

    def __init__(self, loop: SharedLoop) -> None:
        self.loop = loop

    async def run(self, function):
        """Have the thread be the loop for a call; returns what that returns, and the thread."""

        def borrow():
            with self.loop.borrow():
                return function(), threading.current_thread()

        return await asyncio.to_thread(borrow)


def run_shared(main) -> None:
    with asyncio.Runner(loop_factory=SharedLoop) as runner:
        runner.run(asyncio.wait_for(main(), 30))


def test_what_becomes_ready_has_run_on_the_borrowers_thread():
    async def main() -> None:
        borrower, seen = Borrower(asyncio.get_running_loop()), []
        gate = asyncio.get_running_loop().create_future()

        async def follow() -> None:
            await gate
            seen.append(threading.current_thread())
            await asyncio.sleep(0)
            seen.append(threading.current_thread())

        following = asyncio.ensure_future(follow())
        await asyncio.sleep(0)

        def open_gate() -> int:
            assert asyncio.get_running_loop() is borrower.loop
            gate.set_result(None)
            return len(seen)

        before, thread = await borrower.run(open_gate)
        assert before == 0
        assert seen == [thread, thread]
        assert thread is not threading.current_thread()
        assert following.done()

    run_shared(main)


def test_a_task_that_waits_goes_on_upon_the_loops_own_thread():
    async def main() -> None:
        borrower, seen = Borrower(asyncio.get_running_loop()), []

        async def wait() -> None:
            seen.append(threading.current_thread())
            await asyncio.sleep(0.01)
            seen.append(threading.current_thread())

        task, thread = await borrower.run(lambda: asyncio.ensure_future(wait()))
        await task
        assert seen == [thread, threading.current_thread()]
        # The timer was earlier than anything that the loop waited for, which is the limit of this
        # test: it was told.

    run_shared(main)


def test_an_early_timer_wakes_a_loop_that_sleeps_long():
    loop, fired = SharedLoop(), threading.Event()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        with loop.borrow():
            loop.call_later(0.01, fired.set)
        assert fired.wait(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def test_nobody_borrows_a_loop_that_is_busy():
    async def main() -> None:
        borrower = Borrower(asyncio.get_running_loop())
        events: list[str] = []
        asking = asyncio.ensure_future(borrower.run(lambda: events.append("borrowed")))
        await asyncio.sleep(0)
        end_s = time.monotonic() + 0.05
        while time.monotonic() < end_s:
            pass  # Busy, without letting go.
        events.append("let go")
        await asking
        assert events == ["let go", "borrowed"]

    run_shared(main)


def test_an_error_in_the_body_is_the_borrowers_and_the_loop_lives_on():
    async def main() -> None:
        borrower = Borrower(asyncio.get_running_loop())

        def fail() -> None:
            asyncio.get_running_loop().call_soon(seen.append, 1)
            raise ValueError("mine")

        seen: list[int] = []
        with pytest.raises(ValueError, match="mine"):
            await borrower.run(fail)
        await asyncio.sleep(0.01)
        assert seen == [1]
        result, _ = await borrower.run(lambda: 5)
        assert result == 5

    run_shared(main)


def test_borrowers_and_the_loop_never_run_at_once():
    async def main() -> None:
        loop = asyncio.get_running_loop()
        inside, most, total = 0, 0, 0

        def step() -> None:
            nonlocal inside, most, total
            inside += 1
            most = max(most, inside)
            time.sleep(0)  # Another thread may run.
            inside -= 1
            total += 1

        def borrow() -> None:
            for _ in range(200):
                with loop.borrow():
                    step()
                    loop.call_soon(step)

        async def own() -> None:
            for _ in range(200):
                step()
                await asyncio.sleep(0.0001)

        await asyncio.gather(own(), *(asyncio.to_thread(borrow) for _ in range(4)))
        await asyncio.sleep(0.01)
        assert most == 1
        assert total == 200 + 4 * 400

    run_shared(main)


def test_a_busy_loop_lets_borrowers_in():
    """It lets go of the lock for a microsecond a turn: who waits must be next all the same.

    What is counted is the turns that the loop has made although one waited before them.
    """

    async def main() -> None:
        loop = asyncio.get_running_loop()
        gate = loop._sharing.gate  # Held by whom waits: of a loop that runs none else holds it.
        num_borrowed = num_overtaken = 0
        end_s = time.monotonic() + 60

        def borrow() -> None:
            nonlocal num_borrowed
            while not is_over:
                with loop.borrow():
                    num_borrowed += 1

        is_over = False
        borrowing = asyncio.ensure_future(asyncio.to_thread(borrow))
        await asyncio.sleep(0)
        for _ in range(50):
            while not gate.locked() and time.monotonic() < end_s:
                time.sleep(0)  # Busy, until one waits.
            before = num_borrowed
            await asyncio.sleep(0)
            num_overtaken += num_borrowed == before
        is_over = True
        await borrowing
        assert num_overtaken == 0

    run_shared(main)


def test_a_loop_that_a_borrower_stops_stops():
    loop = SharedLoop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    with loop.borrow():
        loop.call_soon(loop.stop)
    thread.join(10)
    assert not thread.is_alive()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"), loop.borrow():
        pass


def test_who_waits_for_a_loop_hears_that_it_is_closed():
    loop, errors = SharedLoop(), []

    def borrow() -> None:
        try:
            with loop.borrow():
                errors.append(None)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=borrow)
    thread.start()
    loop.close()
    thread.join(10)
    assert errors == ["the loop is closed"]


def test_borrowing_passes_the_checks_of_asyncios_debug_mode():
    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_debug(True)
        seen: list[int] = []
        await Borrower(loop).run(lambda: loop.call_soon(seen.append, 1))
        assert seen == [1]
        loop.call_soon(seen.append, 2)
        await asyncio.sleep(0)
        assert seen == [1, 2]

    run_shared(main)

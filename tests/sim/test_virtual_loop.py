"""The loop of the simulated world.

Goal: virtual time passes only when nothing is left to do, a seed means one run, what is polled for
is found when a loop of sleeps would find it, and what can never end says so. Method: random
programs of all that moves a loop.
"""

import asyncio
import random
import time

import pytest

from tandem.sim import DriftingClock, LoopClock, run_virtual

PERIODS_S = (0.0, 0.05, 0.05, 0.1, 0.3, 5.0)
"""Some are equal, so that the order of what is due at one time is looked at as well."""


class Program:
    """Tasks that sleep, wait, give up, cancel each other and tell the time."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.log: list[tuple[float, str]] = []
        self.tasks: list[asyncio.Task] = []
        self.event = asyncio.Event()

    def note(self, text: str) -> None:
        self.log.append((asyncio.get_running_loop().time(), text))

    def period_s(self) -> float:
        return self.chance.choice((*PERIODS_S, self.chance.uniform(0, 0.2)))

    async def run(self) -> list[tuple[float, str]]:
        self.tasks = [asyncio.ensure_future(self.work(f"t{i}")) for i in range(30)]
        await asyncio.gather(*self.tasks, return_exceptions=True)
        return self.log

    async def work(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(60):
            kind = self.chance.randrange(7)
            self.note(f"{name} {kind}")
            if kind == 0:
                timers = [loop.call_later(self.period_s(), self.note, name) for _ in range(12)]
                for timer in timers[: self.chance.randrange(13)]:
                    timer.cancel()
            elif kind == 1:
                loop.call_soon(self.note, f"{name} soon")
            elif kind == 2:
                self.event.set()
                self.event.clear()
            elif kind == 3 and self.chance.random() < 0.1:
                self.chance.choice(self.tasks).cancel()
            elif kind == 4:
                try:
                    async with asyncio.timeout(self.period_s()):
                        await self.event.wait()
                except TimeoutError:
                    self.note(f"{name} late")
            elif kind == 5:
                waits = [asyncio.ensure_future(asyncio.sleep(self.period_s())) for _ in range(2)]
                await asyncio.wait(waits, timeout=self.period_s())
                for wait in waits:
                    wait.cancel()
            await asyncio.sleep(self.period_s())


@pytest.mark.parametrize("seed", range(4))
def test_a_seed_means_one_run(seed):
    logs = [run_virtual(lambda: Program(seed).run()) for _ in range(2)]
    assert len(logs[0]) > 1000
    assert logs[0] == logs[1]
    assert [at for at, _ in logs[0]] == sorted(at for at, _ in logs[0])


def test_time_is_that_of_timers_and_callbacks_take_none():
    async def main() -> list[float]:
        loop, seen = asyncio.get_running_loop(), []
        for _ in range(3):
            loop.call_soon(lambda: seen.append(loop.time()))
            await asyncio.sleep(1000.0)
            seen.append(loop.time())
        time.sleep(0.001)  # What passes outside does not count.
        return [*seen, loop.time()]

    assert run_virtual(main) == pytest.approx([0, 1000, 1000, 2000, 2000, 3000, 3000], abs=1e-3)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_poll_ends_as_a_loop_of_sleeps_does(is_cancelled):
    """At the same time, after as many looks."""

    async def main(is_poll) -> tuple[float, int]:
        loop = asyncio.get_running_loop()
        looks = 0

        def is_over() -> bool:
            nonlocal looks
            looks += 1
            return loop.time() > 3.02

        async def wait() -> None:
            if is_poll:
                await loop.poll(is_over, lambda: 0.05)
                return
            while True:
                await asyncio.sleep(0.05)
                if is_over():
                    return

        waiting = asyncio.ensure_future(wait())
        if is_cancelled:
            loop.call_later(1.01, waiting.cancel)
        await asyncio.wait([waiting])
        assert waiting.cancelled() is is_cancelled
        await asyncio.sleep(10)  # Nothing is looked at any more.
        return loop.time(), looks

    polled, slept = run_virtual(lambda: main(True)), run_virtual(lambda: main(False))
    assert polled[0] == slept[0]
    # A poll looks twice, when the timer rings and when the task would have run.
    assert polled[1] == 2 * slept[1] - (not is_cancelled)


def test_a_loop_without_anything_to_do_says_so():
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(AssertionError, match="deadlock"):
        run_virtual(main)


def test_a_run_beyond_what_a_clock_can_tell_apart_says_so():
    """It used to spin: at 1e8 s, now plus the loop's nanosecond is now, and no timer came due."""

    async def main() -> None:
        await asyncio.sleep(1e8)

    with pytest.raises(AssertionError, match="more than 10000000 s"):
        run_virtual(main)


def test_what_a_run_leaves_is_cancelled():
    ended = []

    async def linger() -> None:
        try:
            await asyncio.sleep(1e9)
        finally:
            ended.append(asyncio.get_running_loop().time())

    async def main() -> None:
        lingering = asyncio.ensure_future(linger())
        await asyncio.sleep(1)
        assert not lingering.done()

    run_virtual(main)
    assert ended == pytest.approx([1.0])


def test_clocks_tell_the_time_of_the_loop_each_at_its_rate():
    async def main() -> None:
        true, slow = LoopClock(), DriftingClock(0.5, 100.0)
        await asyncio.sleep(10)
        assert true.now_s() == pytest.approx(10)
        assert slow.now_s() == pytest.approx(105)
        slow.leap(20)
        assert slow.now_s() == pytest.approx(125)

    run_virtual(main)

"""Processes and the ways between them in the simulated world.

Goal: a killed process does nothing more, a stopped one nothing until it wakes, and messages are
lost, late, doubled and cut off as ``Faults`` says; a seed means one run. Method: a small service.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from tandem.core.errors import CapacityError, DeadlineError, PeerLostError
from tandem.sim import Faults, Process, Session, World, run_virtual


class Add(msgspec.Struct):
    amount: int


class Adder:
    """Counts what it is asked to add; the answer comes ``delay_s`` later."""

    def __init__(self) -> None:
        self.total = 0
        self.delay_s = 0.0

    def serve(self, process: Process) -> None:
        process.serve([("add", self.add, Add, int), ("refuse", self.refuse, Add, int)])

    async def add(self, caller: Session, request: Add) -> int:
        self.total += request.amount
        await asyncio.sleep(self.delay_s)
        return self.total

    def refuse(self, caller: Session, request: Add) -> int:
        raise CapacityError("test.adder", "full", field="amount")


class Pair:
    """A client with a session to an adder."""

    def __init__(self, seed: int = 1, faults: Faults | None = None) -> None:
        self.world = World(seed, Faults() if faults is None else faults)
        self.client, self.server = Process(self.world, "client"), Process(self.world, "server")
        self.adder = Adder()
        self.adder.serve(self.server)
        self.session = self.world.open_session(self.client, self.server)

    def add(self, amount: int = 1, timeout_s: float = 5.0) -> Coroutine[Any, Any, int]:
        return self.session.call("add", Add(amount), int, timeout_s=timeout_s)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtual(main)


def test_a_call_reaches_the_other_process_and_errors_come_back():
    async def main() -> None:
        pair = Pair()
        assert await pair.add(3) == 3
        assert await pair.add(4) == 7
        with pytest.raises(CapacityError, match="full") as caught:
            await pair.session.call("refuse", Add(1), int)
        assert caught.value.field == "amount"
        assert pair.world.num_answers == {"add": 2, "refuse": 1}
        assert not pair.world.violations

    run(main)


def test_all_that_a_killed_process_began_ends():
    """Tasks of tasks too, of handlers as well, and none begins again."""

    async def main() -> None:
        pair = Pair()
        beats = []

        async def beat(name: str) -> None:
            while True:
                await asyncio.sleep(1)
                beats.append(name)

        async def begin() -> None:
            inner = asyncio.ensure_future(beat("inner"))
            await beat("outer")
            await inner

        pair.server.spawn(begin())
        pair.adder.delay_s = 100
        call = asyncio.ensure_future(pair.add())
        others = asyncio.ensure_future(beat("other"))
        await asyncio.sleep(2.5)
        assert sorted(beats) == ["inner", "inner", "other", "other", "outer", "outer"]
        beats.clear()
        pair.world.kill(pair.server)
        await asyncio.sleep(3)
        assert set(beats) == {"other"}
        with pytest.raises(PeerLostError):
            await call
        with pytest.raises(PeerLostError):
            await pair.add()
        others.cancel()
        assert not pair.world.violations

    run(main)


def test_a_stopped_process_does_nothing_until_it_wakes():
    async def main() -> None:
        pair = Pair()
        loop, beats = asyncio.get_running_loop(), []

        async def beat() -> None:
            while True:
                await asyncio.sleep(1)
                beats.append(loop.time())

        pair.server.spawn(beat())
        await asyncio.sleep(2.5)
        pair.server.stall_until(10.0)
        with pytest.raises(DeadlineError):
            await pair.add(timeout_s=1.0)
        assert pair.adder.total == 0
        assert await pair.add(timeout_s=20.0) == 2, "what was under way arrives when it wakes"
        await asyncio.sleep(1.5)
        assert beats[:2] == pytest.approx([1, 2], abs=0.01)
        assert beats[2] == pytest.approx(10, abs=0.01)
        assert beats[3] == pytest.approx(11, abs=0.01)

    run(main)


def test_a_stall_ends_the_sessions_of_the_process():
    async def main() -> None:
        pair = Pair()
        pair.world.stall(pair.server)
        await pair.session.lost.wait()
        assert asyncio.get_running_loop().time() == pytest.approx(3, abs=0.01)
        assert pair.server.is_stalled
        with pytest.raises(PeerLostError):
            await pair.add()

    run(main)


def test_a_task_that_fails_is_a_violation_and_its_product_error_is_none():
    async def main() -> None:
        pair = Pair()

        async def fail(error: Exception) -> None:
            raise error

        tasks = [pair.server.spawn(fail(e)) for e in (ValueError("odd"), CapacityError("x", "y"))]
        await asyncio.wait(tasks)
        await asyncio.sleep(0)
        assert pair.world.violations == ["server failed: ValueError('odd')"]

    run(main)


@pytest.mark.parametrize(
    ("faults", "least", "most"),
    [
        (Faults(), 100, 100),
        (Faults(double=1.0), 200, 200),
        (Faults(lose=1.0), 0, 0),
        (Faults(lose=0.3), 50, 90),
    ],
)
def test_messages_are_lost_and_doubled_as_often_as_said(faults, least, most):
    async def main() -> None:
        pair = Pair(faults=faults)
        answers = await asyncio.gather(*(pair.add() for _ in range(100)), return_exceptions=True)
        failed = [a for a in answers if isinstance(a, Exception)]
        assert all(isinstance(a, DeadlineError) for a in failed)
        assert least <= pair.adder.total <= most
        # Either way can be lost, so more calls fail than requests are lost.
        assert (100 - len(failed) <= pair.adder.total) and bool(failed) is bool(faults.lose)

    run(main)


def test_what_is_late_arrives_after_the_caller_has_given_up():
    async def main() -> None:
        pair = Pair(faults=Faults(late=1.0))
        with pytest.raises(DeadlineError):
            await pair.add(timeout_s=0.05)
        await asyncio.sleep(30)
        assert pair.adder.total == 1

    run(main)


def test_nothing_passes_where_the_way_is_cut_until_it_is_mended():
    async def main() -> None:
        pair = Pair()
        mend = pair.world.cut_off("client", ("server", "elsewhere"))
        with pytest.raises(DeadlineError):
            await pair.add(timeout_s=1.0)
        await pair.session.lost.wait()
        mend()
        pair.session = pair.world.open_session(pair.client, pair.server)
        assert await pair.add() == 1

    run(main)


def test_a_crash_strikes_at_its_step():
    """At each step of a call in turn; the last of them leaves the call as it was."""

    async def play(step: int) -> tuple[int, bool]:
        pair = Pair()
        pair.world.crash_at[step] = lambda: pair.world.kill(pair.server)
        try:
            await pair.add()
        except PeerLostError:
            return pair.adder.total, False
        return pair.adder.total, True

    outcomes = [run_virtual(lambda step=step: play(step)) for step in (1, 2, 3, 4)]
    assert outcomes == [(0, False), (1, False), (1, False), (1, True)]


def test_a_seed_means_one_run():
    faults = Faults(lose=0.1, late=0.1, double=0.1)

    async def play(seed: int) -> list[tuple[float, str]]:
        pair, log = Pair(seed, faults), []

        async def call(number: int) -> None:
            try:
                result = str(await pair.add(number, timeout_s=2.0))
            except DeadlineError:
                result = "failed"
            log.append((asyncio.get_running_loop().time(), f"{number} {result}"))

        await asyncio.gather(*(call(i) for i in range(50)))
        return log

    logs = [run_virtual(lambda seed=seed: play(seed)) for seed in (1, 1, 2)]
    assert logs[0] == logs[1]
    assert logs[0] != logs[2]

"""Goal: work is shared by client, small before large, and never runs on the event loop.

Method: jobs that wait for an event of their own, so that the order in which they begin is the
queue's and not the machine's.
"""

import asyncio
import threading

from tandem.server.clients import current_client
from tandem.server.text.work_threads import LARGE_COST, WorkThreads

WAIT_S = 60.0


class Jobs:
    """Runs jobs of clients; ``began`` is their order."""

    def __init__(self, num_threads):
        self.threads = WorkThreads(num_threads)
        self.began = []
        self.gates = {}
        self.tasks = {}

    def add(self, name, client, cost):
        gate = self.gates[name] = threading.Event()

        def work():
            self.began.append(name)
            assert gate.wait(WAIT_S)
            return name

        async def run():
            current_client.set(client)
            return await self.threads.run(work, cost)

        self.tasks[name] = asyncio.create_task(run())

    async def until_begun(self, count):
        async with asyncio.timeout(WAIT_S):
            while len(self.began) < count:
                await asyncio.sleep(0)

    async def finish(self):
        for gate in self.gates.values():
            gate.set()
        async with asyncio.timeout(WAIT_S):
            assert await asyncio.gather(*self.tasks.values()) == list(self.tasks)
        self.threads.close()


def test_one_with_little_goes_ahead_of_those_with_much():
    async def work():
        jobs = Jobs(1)
        jobs.add("first", "a", 1000)
        await jobs.until_begun(1)
        for client in "abcdef":
            for turn in range(2):
                jobs.add(f"{client}{turn}", client, 50_000)
        jobs.add("late", "g", 10)
        await asyncio.sleep(0)
        await jobs.finish()
        assert jobs.began[:2] == ["first", "late"]
        # Then each of the others once before any of them twice.
        assert {name[0] for name in jobs.began[2:8]} == set("abcdef")
        for client in "abcdef":
            assert jobs.began.index(f"{client}0") < jobs.began.index(f"{client}1")

    asyncio.run(work())


def test_large_jobs_leave_a_thread_free():
    async def work():
        jobs = Jobs(2)
        for name in ("large", "larger"):
            jobs.add(name, name, LARGE_COST)
        await jobs.until_begun(1)
        jobs.add("small", "c", 10)
        await jobs.until_begun(2)
        assert jobs.began == ["large", "small"]
        await jobs.finish()

    asyncio.run(work())


def test_a_job_without_a_caller_never_begins():
    async def work():
        jobs = Jobs(1)
        for name in ("running", "left", "last"):
            jobs.add(name, "a", 10)
            await asyncio.sleep(0)
        jobs.tasks.pop("left").cancel()
        await jobs.finish()
        assert jobs.began == ["running", "last"]

    asyncio.run(work())


def test_an_error_reaches_the_caller_and_the_thread_goes_on():
    async def work():
        threads = WorkThreads(1)

        def fail():
            raise KeyError("x")

        for _ in range(3):
            try:
                await threads.run(fail, 0)
            except KeyError:
                continue
            raise AssertionError("no error")
        assert await threads.run(lambda: 5, 0) == 5
        threads.close()

    asyncio.run(work())

"""Goal: a call of a client ends by its deadline, whatever does not answer, and has one deadline.

Method: on a virtual clock, each call meets a master that never answers, one that is gone, and hosts
that never answer; then the parts that wait on their own, each by itself. No time is measured.
"""

import asyncio
import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
from store_world import StoreWorld

from tandem.core.clock import ManualClock
from tandem.core.errors import DeadlineError, TandemError
from tandem.sim import Faults, run_virtual
from tandem.store.client.blocking import _BlockingCalls, drive
from tandem.store.client.buffers import Part
from tandem.store.client.client import AsyncStoreClient
from tandem.store.client.options import PutOptions
from tandem.store.config import StoreConfig
from tandem.store.formats import layout
from tandem.store.messages import (
    Endpoint,
    HostExtents,
    KeyBytes,
    Located,
    StartedPut,
    StartStatus,
)
from tandem.store.ports import _Peers

DEADLINE_S = 2.0
TRAVEL_S = 0.1
"""What the simulated network may add after a deadline: an answer on its way, a poll of a loop."""
CONFIG = StoreConfig(deadline_ms=int(DEADLINE_S * 1e3), put_wait_ms=500, inline_bytes=100)

CALLS = {
    "get": lambda client, _: client.get("key"),
    "get_many": lambda client, _: client.get_many(["key", "key2"]),
    "get_range": lambda client, _: client.get_range("key", 10, 100),
    "get_into": lambda client, parts: client.get_into("key", parts[0]),
    "get_into_many": lambda client, parts: client.get_into_many(["key", "key2"], parts),
    "put": lambda client, _: client.put("new", bytes(50_000)),
    "put_inline": lambda client, _: client.put("new", b"small"),
    "put_many": lambda client, _: client.put_many(["a", "b"], [bytes(5000)] * 2),
    "put_from": lambda client, parts: client.put_from("new", parts[0]),
    "put_replicas": lambda client, _: client.put(
        "new", bytes(50_000), PutOptions(replicas=2, upsert=True)
    ),
    "exists": lambda client, _: client.exists("key"),
    "size": lambda client, _: client.size("key"),
    "remove": lambda client, _: client.remove("key"),
    "remove_prefix": lambda client, _: client.remove_prefix("k"),
    "pin": lambda client, _: client.pin("key", hard=True),
    "list_keys": lambda client, _: client.list_keys(),
    "status": lambda client, _: client.status(),
    "drain": lambda client, _: client.drain("h0"),
}


async def take(call: str, trouble: str) -> float:
    """Return how long a call takes in some trouble, virtual seconds."""
    world = StoreWorld(1, CONFIG, Faults())
    world.start_master()
    for name in ("h0", "h1"):
        world.start_host(name, 2**20)
    await asyncio.sleep(2)
    process, client = world.start_client("c")
    for key in ("key", "key2"):
        await client.put(key, bytes(50_000), PutOptions(replicas=2))
    parts = [Part(client.register(np.zeros(50_000, np.uint8))) for _ in range(2)]
    if trouble == "the master is stopped":
        world.master_process.stall_until(1000.0)
    elif trouble == "the master is gone":
        world.kill_master()
    elif trouble == "hosts are stopped":
        for host, _ in world.hosts.values():
            host.stall_until(1000.0)
    if trouble in ("hosts are stopped", "bytes do not move"):
        client._port.read = client._port.write = stay_out
    begin_s = process.loop.time()
    with contextlib.suppress(TandemError):
        await CALLS[call](client, parts)
    return process.loop.time() - begin_s


async def stay_out(endpoint, pieces, timeout_s) -> None:
    await asyncio.sleep(timeout_s)
    raise DeadlineError("test.move", "nothing came")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "trouble",
    ["the master is stopped", "the master is gone", "hosts are stopped", "bytes do not move"],
)
def test_no_call_takes_longer_than_its_deadline(call, trouble):
    assert run_virtual(lambda: take(call, trouble)) <= DEADLINE_S + TRAVEL_S


# A client that blocks its thread does one thing after the other.


class Hosts:
    """Two hosts that take all the time they are given, and a master that sends everybody there."""

    def __init__(self) -> None:
        self.clock = ManualClock(1000.0)
        self.endpoints = [Endpoint(i, f"h{i}", "m", f"a{i}", 2**41, 2**42) for i in range(2)]
        self.timeouts_s: list[float] = []

    def begin_threadsafe(self, method, request, response, *, timeout_s):
        return SimpleNamespace(wait=lambda _: self.answer(method, request))

    def answer(self, method, request):
        if method == "start_put":
            places = [HostExtents(i, [0], [0]) for i in range(2)]
            statuses = bytes([StartStatus.GRANTED])
            return StartedPut(statuses=statuses, grant=1, places=places, endpoints=self.endpoints)
        if method == "commit_put":
            return KeyBytes(b"\x03")
        assert method == "locate", method
        count = len(request.keys)
        columns = [50_000] * count + [1] * count + [i % 2 for i in range(count)] + [0] * count
        return Located(
            np.array(columns, "<i8").tobytes(), self.endpoints, 100_000, bytes(8 * count)
        )

    def register(self, memory):
        return memory

    def unregister(self, handle) -> None:
        pass

    async def read(self, endpoint, pieces, timeout_s) -> None:
        self.timeouts_s.append(timeout_s)
        self.clock.advance(timeout_s)
        raise DeadlineError("test.move", "nothing came")

    write = read


def make_blocking(hosts: Hosts) -> AsyncStoreClient:
    client = AsyncStoreClient(hosts, hosts, clock=hosts.clock, config=CONFIG)
    calls = _BlockingCalls(client._calls, hosts, None)
    calls.sleep = lambda seconds: _advance(hosts.clock, seconds)
    return client.make_twin(calls, hosts)


async def _advance(clock: ManualClock, seconds: float) -> None:
    clock.advance(seconds)


@pytest.mark.parametrize("kind", ["put", "get_many", "get_range_many"])
def test_hosts_that_are_met_one_after_the_other_share_one_deadline(kind):
    hosts = Hosts()
    client = make_blocking(hosts)
    keys = ["a", "b"]
    work = {
        "put": lambda: client.put("key", bytes(50_000), PutOptions(replicas=2)),
        "get_many": lambda: client.get_many(keys),
        "get_range_many": lambda: client.get_range_many(keys, [(0, 100)] * 2),
    }[kind]
    try:
        results = drive(work())
    except TandemError as error:
        results = [error]
    assert all(isinstance(result, TandemError) for result in results)
    assert len(hosts.timeouts_s) >= 2
    # Each had a moment, also the one for which nothing was left.
    assert hosts.clock.now_s() - 1000.0 <= DEADLINE_S + 0.01


def test_what_is_told_behind_a_call_does_not_hold_it_up():
    """A report of a bad replica, and a grant that is given back, go by way of the loop."""

    async def run() -> None:
        loop, told = asyncio.get_running_loop(), asyncio.Event()

        async def tell(*_) -> None:
            told.set()

        patient = SimpleNamespace(
            clock=ManualClock(), config=CONFIG, machine="", ids=None, tell=tell,
            spawn=lambda work: loop.create_task(work),
        )  # fmt: skip
        calls = _BlockingCalls(patient, None, loop)
        # On this very thread: it would wait for itself.
        drive(calls.tell("report_bad", None, KeyBytes))
        await asyncio.wait_for(told.wait(), 60)

    asyncio.run(run())


async def wait_for_an_opening() -> float:
    peers = _Peers(SimpleNamespace())
    loop = asyncio.get_running_loop()
    peers._opened["a"] = loop.create_task(asyncio.sleep(100))
    begin_s = loop.time()
    with pytest.raises(DeadlineError, match="not opened"):
        await peers.move(None, Endpoint(0, "h", "m", "a", 0), [], 1.0)
    return loop.time() - begin_s


def test_an_opening_by_somebody_else_is_not_waited_for_beyond_the_deadline():
    assert run_virtual(wait_for_an_opening) == pytest.approx(1.0)


def test_the_layout_of_the_canned_answers_is_that_of_the_store():
    assert layout.count_chunks(50_000) == 1


@pytest.mark.parametrize("kind", ["put_many", "size_many"])
def test_the_work_of_a_large_batch_counts(kind, monkeypatch):
    """What a client does with each object of a batch takes of the batch's deadline."""
    clock, count = ManualClock(), 20_000
    begin_s, looked = clock.now_s(), 0

    class Slow(list):
        def __iter__(self):
            nonlocal looked
            for item in super().__iter__():
                clock.advance(2 * DEADLINE_S / count)
                looked += 1
                yield item

    class Channel:
        async def call(self, method, request, response_type, *, timeout_s=None):
            return Located(np.full(count, 5, np.int64).tobytes(), [], 0)

    client = AsyncStoreClient(Channel(), SimpleNamespace(), clock=clock, config=CONFIG)
    keys = [f"k{i}" for i in range(count)]
    if kind == "put_many":
        work = client.put_many(keys, Slow([b"v"] * count))
    else:
        monkeypatch.setattr(
            "tandem.store.client.client.zip",
            lambda *columns, strict: Slow(zip(*columns, strict=strict)),
            raising=False,
        )
        work = client.size_many(keys)
    with pytest.raises(DeadlineError):
        asyncio.run(work)
    assert looked < count
    assert clock.now_s() - begin_s < 1.2 * DEADLINE_S

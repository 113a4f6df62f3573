"""Goal: a host that is stopped holds up no put for more than a small multiple of its usual time.

Method: on a virtual clock a host of several stops while its session lives on, as after SIGSTOP;
puts go on meanwhile. What a put may take is counted in virtual seconds.
"""

import asyncio

import pytest
from store_world import StoreWorld

from quick import rest_slow
from tandem.core.errors import DeadlineError
from tandem.sim import Faults, run_virtual
from tandem.store.client.client import PutResult
from tandem.store.client.options import PutOptions
from tandem.store.client.put_batch import MIN_WRITE_S as MIN_WRITE_PATIENCE_S
from tandem.store.config import StoreConfig
from tandem.store.master.policies import HostView, rank_replicas
from tandem.store.master.state.answering import MIN_WRITE_S
from tandem.store.master.state.orders import ORDER_TIMEOUT_S
from tandem.store.usual_time import UsualTime

STOP_S = 9.0
"""Less than the lease of a session."""


async def begin(names: tuple[str, ...], *, seed: int = 1, inline_bytes: int = 1000):
    world = StoreWorld(seed, StoreConfig(inline_bytes=inline_bytes), Faults())
    world.start_master()
    for name in names:
        world.start_host(name, 2**25)
    await asyncio.sleep(2)
    _, client = world.start_client("c")
    return world, client


def hold_bytes_of(world: StoreWorld, client, name: str) -> None:
    """Have bytes for a host that is stopped stay on the way, as on tcp."""
    write = client._port.write

    async def write_or_wait(endpoint, pieces, timeout_s) -> None:
        process = world.hosts[name][0]
        if endpoint.name == name and process.is_stalled:
            await asyncio.sleep(timeout_s)
            raise DeadlineError("test.write", "nothing was taken")
        await write(endpoint, pieces, timeout_s)

    client._port.write = write_or_wait


async def put_beside_a_stopped_host(
    seed: int, size: int, replicas: int, *, is_tcp: bool, is_known: bool
) -> tuple[list[float], list[str], StoreWorld]:
    """Put for as long as a host is stopped; return what each took, and the log's worth of hosts."""
    world, client = await begin(("h0", "h1", "h2"), seed=seed)
    if is_tcp:
        hold_bytes_of(world, client, "h1")
    options = PutOptions(replicas=replicas)
    if is_known:  # Else the client has no right to write there yet.
        for i in range(20):
            await client.put(f"before{i}", bytes(size), options)
    loop = asyncio.get_running_loop()
    end_s = loop.time() + STOP_S
    world.hosts["h1"][0].stall_until(end_s)
    took_s: list[float] = []
    count = 0
    while loop.time() < end_s - 1:
        begin_s = loop.time()
        assert await client.put(f"k{count}", bytes(size), options) is PutResult.CREATED
        took_s.append(loop.time() - begin_s)
        count += 1
        await asyncio.sleep(0.05)
    assert not [host for host in world.master.state.hosts.values() if host.caller is None]
    await asyncio.sleep(5)
    silent = [host.name for host in world.master.state.hosts.values() if host.line.is_silent]
    for i in range(count):
        assert await client.get(f"k{i}") == bytes(size)
    for i in range(20):
        await client.put(f"after{i}", bytes(size), options)
    used = {host.name for host in world.master.state.hosts.values() if host.used_bytes}
    assert used == {"h0", "h1", "h2"}
    return took_s, silent, world


SIZES = [(100, False), (50_000, False), (50_000, True)]
"""Bytes of a value, and whether those for a host that is stopped stay on the way."""
# A put with the request; into granted space, which the client has or not; and one that is held up.
QUICK = [(0, 100, False, False, 1), (0, 50_000, False, True, 2), (0, 50_000, False, False, 1)]
QUICK += [(0, 50_000, True, True, 1), (0, 50_000, True, False, 2)]


@pytest.mark.parametrize(
    ("seed", "size", "is_tcp", "is_known", "replicas"),
    rest_slow(
        QUICK,
        [
            (seed, *size, is_known, replicas)
            for seed in (0, 1)
            for size in SIZES
            for is_known in (False, True)
            for replicas in (1, 2)
        ],
    ),
)
def test_puts_leave_a_host_that_is_stopped(seed, size, is_tcp, is_known, replicas):
    took_s, silent, _ = run_virtual(
        lambda: put_beside_a_stopped_host(seed, size, replicas, is_tcp=is_tcp, is_known=is_known)
    )
    most_s = 2 * MIN_WRITE_S + (2 * MIN_WRITE_PATIENCE_S if is_tcp else 0)
    assert max(took_s) < most_s
    # Once it is known to be silent, none waits for it.
    assert sum(each > 0.1 for each in took_s) <= 2
    assert not silent, "it answers again"


async def put_to_the_only_host(stop_s: float, size: int) -> float:
    world, client = await begin(("h0",))
    await client.put("before", bytes(size))
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    world.hosts["h0"][0].stall_until(begin_s + stop_s)
    assert await client.put("key", bytes(size)) is PutResult.CREATED
    return loop.time() - begin_s


@pytest.mark.parametrize("size", [100, 50_000])
def test_the_only_host_is_waited_for(size):
    """Nothing is won by giving up on it: it is asked for as long as before."""
    assert 3 <= run_virtual(lambda: put_to_the_only_host(3.0, size)) < ORDER_TIMEOUT_S


async def put_while_all_are_stopped() -> float:
    world, client = await begin(("h0", "h1", "h2"))
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    for process, _ in world.hosts.values():
        process.stall_until(begin_s + 3.0)
    assert await client.put("key", bytes(100)) is PutResult.CREATED
    return loop.time() - begin_s


def test_a_put_outlives_a_moment_in_which_no_host_answers():
    assert run_virtual(put_while_all_are_stopped) < 3 + ORDER_TIMEOUT_S


def test_readers_prefer_hosts_that_answer():
    views = [
        HostView(0, "a", "here", 0, 0, is_silent=True),
        HostView(1, "b", "there", 0, 0, load_bytes=5.0),
        HostView(2, "c", "there", 0, 0),
    ]
    assert rank_replicas(views, "here") == [2, 1, 0]


def test_a_usual_time_follows_what_is_usual():
    usual = UsualTime()
    assert usual.multiply(4, least_s=0.25, most_s=5) == 0.25
    for _ in range(100):
        usual.note(0.1)
    assert usual.multiply(4, least_s=0.25, most_s=5) == pytest.approx(0.4, rel=0.05)
    usual.note(1.0)  # Jitter counts more than the mean.
    assert usual.multiply(4, least_s=0.25, most_s=5) > 1.0
    for _ in range(100):
        usual.note(30.0)
    assert usual.multiply(4, least_s=0.25, most_s=5) == 5

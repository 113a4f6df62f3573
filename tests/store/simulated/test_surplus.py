"""Goal: copies beyond those that were asked for go before any object does.

Method: outages of hosts leave third copies of objects that want two; then space is needed.
"""

import asyncio
from unittest.mock import patch

import pytest
from store_world import StoreWorld

from tandem._native import fill_rows, locate_rows
from tandem.sim import Faults, run_virtual
from tandem.store.client.options import PutOptions
from tandem.store.config import StoreConfig
from tandem.store.master.state.index import Directory, Passes, Replica

HOSTS = ("h0", "h1", "h2")
NUM_OBJECTS, SIZE = 120, 4_000
EXTENT = 4_608
CAPACITY = 2**20
CONFIG = StoreConfig(
    lease_ms=200, high_watermark=0.9, eviction_step=0.05, max_repairs=16, strategy="most_free"
)


def count_copies(world: StoreWorld) -> int:
    directory = world.master.state.directory
    return sum(len(directory.copies.replicas(directory.find(key))) for key in directory.list_keys())


async def copied(world: StoreWorld, count: int) -> None:
    """Wait for repair to have made so many copies."""
    async with asyncio.timeout(60):
        while world.master.state.counters.replicas_copied < count:
            await asyncio.sleep(0.1)


async def make_surplus(options: PutOptions):
    """Return a world with objects that want two copies, many of which have three; and a client."""
    world = StoreWorld(3, CONFIG, Faults())
    world.start_master()
    for name in HOSTS:
        world.start_host(name, CAPACITY)
    await asyncio.sleep(2)
    _, client = world.start_client("c")
    for i in range(NUM_OBJECTS):
        await client.put(f"key{i}", bytes([i]) * SIZE, options)
    for name in ("h2", "h1"):
        (host,) = [host for host in world.master.state.hosts.values() if host.name == name]
        directory = world.master.state.directory
        missing = sum(
            directory.num_in_memory[row] == 2 for row in directory.copies.rows_on_host(host.number)
        )
        before = world.master.state.counters.replicas_copied
        world.kill_host(name)
        await copied(world, before + missing)
        world.start_host(name, CAPACITY)
        await asyncio.sleep(2)
    return world, client


async def need_space(options: PutOptions) -> None:
    world, client = await make_surplus(options)
    counters = world.master.state.counters
    num_copies = count_copies(world)
    assert num_copies > 2.5 * NUM_OBJECTS
    # What fits below the watermark once the surplus is gone, and not before.
    num_new = int((3 * 0.83 * CAPACITY) / EXTENT) - 2 * NUM_OBJECTS
    assert (num_new + num_copies) * EXTENT > 3 * 0.9 * CAPACITY
    for i in range(num_new):
        await client.put(f"new{i}", bytes(SIZE))
        await asyncio.sleep(0.02)
    await asyncio.sleep(2)
    assert counters.replicas_dropped > 0
    assert counters.objects_evicted == 0
    directory = world.master.state.directory
    assert len(directory) == NUM_OBJECTS + num_new
    for i in range(NUM_OBJECTS):
        assert len(directory.copies.replicas(directory.find(f"key{i}"))) >= 2
        assert await client.get(f"key{i}") == bytes([i]) * SIZE
    # Beyond that, objects go as ever: none that is pinned, and no pinned one for a copy.
    for i in range(num_new):
        await client.put(f"more{i}", bytes(SIZE))
    assert counters.objects_evicted > 0
    if options.hard_pin:
        assert all(directory.find(f"key{i}") >= 0 for i in range(NUM_OBJECTS))


@pytest.mark.parametrize("hard_pin", [False, True])
def test_surplus_copies_go_before_objects(hard_pin):
    run_virtual(lambda: need_space(PutOptions(replicas=2, hard_pin=hard_pin)))


async def stay_without_need() -> None:
    world, _ = await make_surplus(PutOptions(replicas=2))
    num_copies = count_copies(world)
    await asyncio.sleep(30)
    assert count_copies(world) == num_copies
    assert world.master.state.counters.replicas_dropped == 0


def test_surplus_copies_stay_while_there_is_room():
    """They are readable, and dropping them is work."""
    run_virtual(stay_without_need)


async def drain_beside_surplus() -> None:
    """A copy on a host that is drained does not make another one surplus."""
    _, client = await make_surplus(PutOptions(replicas=2))
    await client.drain("h0")
    for i in range(300):
        await client.put(f"new{i}", bytes(SIZE))
        await asyncio.sleep(0.05)
    async with asyncio.timeout(120):
        while {h.name: h.stage.value for h in (await client.status()).hosts}["h0"] != "drained":
            await asyncio.sleep(0.5)


def test_a_drain_ends_while_space_is_needed():
    run_virtual(drain_beside_surplus)


async def report_twice() -> None:
    """Readers that meet one bad copy at once report it at once."""
    world = StoreWorld(2, CONFIG, Faults())
    world.start_master()
    for name in ("h0", "h1"):
        world.start_host(name, CAPACITY)
    await asyncio.sleep(2)
    _, client = world.start_client("c")
    value = bytes(range(250)) * 16
    await client.put("key", value, PutOptions(replicas=2))
    segment = world.segments["h0"]
    ((offset, header),) = segment.scan()
    _, end = segment.span(header)
    segment.data[offset + end - 1] ^= 1
    master = world.master
    (bad,) = [number for number, host in master.state.hosts.items() if host.name == "h0"]
    host, in_turn, all_know = master.state.hosts[bad], asyncio.Lock(), asyncio.Barrier(3)
    send = host.line.order

    async def order(*arguments, **options):
        async with in_turn:  # The world's messages may overtake each other.
            verdict = await send(*arguments, **options)
        await all_know.wait()
        return verdict

    with patch.object(host.line, "order", order):
        version = master.state.directory.version[master.state.directory.find("key")]
        reports = (master.departures.verify_replica("key", version, bad) for _ in range(3))
        assert await asyncio.gather(*reports) == [False] * 3
    assert master.state.counters.replicas_corrupt == 1
    assert await client.get("key") == value
    await copied(world, 1)
    assert len(master.state.directory.copies.replicas(master.state.directory.find("key"))) == 2


def test_a_bad_copy_that_is_reported_twice_costs_one_copy():
    """The last good copy, or the one that repair has made, is not given up in its place."""
    run_virtual(report_twice)


def make_directory() -> Directory:
    directory = Directory(Passes(fill_rows, locate_rows))
    for i in range(6):
        directory.insert(
            f"k{i}",
            size=100,
            checksum=0,
            version=i + 1,
            replicas=[Replica(host, 1000 * i) for host in range(3 if i % 2 else 2)],
            wanted=2,
        )
    return directory


def test_surplus_is_what_is_beyond_the_copies_wanted_on_hosts_that_are_there():
    directory = make_directory()
    rows = [directory.find(f"k{i}") for i in range(6)]
    assert directory.victims.pick_surplus(0, 1, 1000) == [rows[1], rows[3], rows[5]]
    assert directory.victims.pick_surplus(0, 1, 101) == [rows[1], rows[3]]
    directory.touch(rows[1])
    directory.extend_lease(rows[3], 50)
    assert directory.victims.pick_surplus(0, 1, 1000) == [rows[5], rows[1]]
    assert directory.victims.pick_surplus(0, 50, 1000) == [rows[3], rows[5], rows[1]]
    assert directory.victims.pick_surplus(3, 50, 1000) == []
    directory.copies.lose_host(2)
    assert directory.victims.pick_surplus(0, 50, 1000) == []
    directory.copies.find_host(2)
    directory.copies.drop_replica(rows[3], 1)
    assert directory.victims.pick_surplus(2, 50, 1000) == [rows[5], rows[1]]

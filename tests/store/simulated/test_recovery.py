"""Goal: a new master takes nothing for absent, or gone, before its hosts have told what they have.

What is removed then is what was there when that was asked for, and nothing that came since.
"""

import asyncio
import contextlib
import itertools

import pytest
from store_world import StoreWorld

from tandem.core.errors import CapacityError
from tandem.sim import Faults, run_virtual
from tandem.store.client.client import PutResult
from tandem.store.client.options import PutOptions
from tandem.store.config import StoreConfig
from tandem.store.election.roster import Member, MemoryRosterStore, Roster
from tandem.store.master.master import StoreMaster
from tandem.store.master.state.index import NO_ROW
from tandem.store.messages import HostStage, PinObjects

HOSTS = ("h0", "h1", "h2")
CAPACITY = 2**18


async def begin_anew(seed: int, replicas: int):
    """Return a world with an object and a new master, and a client."""
    world = StoreWorld(seed, StoreConfig(), Faults())
    world.start_master()
    for name in HOSTS:
        world.start_host(name, CAPACITY)
    await asyncio.sleep(2)
    _, client = world.start_client("c")
    await client.put("key", b"value", PutOptions(replicas=replicas))
    world.kill_master()
    await asyncio.sleep(0.5)
    world.start_master()
    return world, client


async def remove_from_a_new_master(seed: int, kind: str) -> list[str]:
    """Remove or pin at a master that has not yet heard of the object; returns the keys left."""
    world, client = await begin_anew(seed, replicas=2)
    while not world.master.state.hosts:  # The first one joins.
        await asyncio.sleep(0.001)
    removals = world.master.removals
    if kind == "prefix":
        assert (await removals._remove_matches("k")).count == 1
    elif kind == "key":
        removed = await removals._remove_keys(["key", "another"])
        assert removed.flags == b"\x01\x00"
    else:
        pinned = await world.master.pins._pin_all(PinObjects(keys=["key"], hard=True))
        assert pinned.flags == b"\x01"
    await asyncio.sleep(5)
    return (await client.list_keys()).keys


@pytest.mark.parametrize(("kind", "left"), [("key", []), ("prefix", []), ("pin", ["key"])])
def test_a_new_master_hears_its_hosts_before_it_says_that_nothing_is_there(kind, left):
    for seed in range(5):
        assert run_virtual(lambda seed=seed: remove_from_a_new_master(seed, kind)) == left


async def kill_a_master_that_has_removed(seed: int) -> tuple[bool, list[str]]:
    """Remove what one of two hosts has told of; return whether that was so, and the keys left."""
    world, client = await begin_anew(seed, replicas=3)
    directory = world.master.state.directory
    while (row := directory.find("key")) == NO_ROW:
        await asyncio.sleep(0.0005)
    was_early = len(directory.copies.replicas(row)) < 3
    removals = world.master.removals
    assert (await removals._remove_keys(["key"])).flags == b"\x01"
    world.kill_master()
    world.start_master()
    await asyncio.sleep(5)
    return was_early, (await client.list_keys()).keys


def test_no_host_brings_back_what_a_new_master_has_removed():
    """Not one, either, that tells of its copy only to the next master."""
    seen = [
        run_virtual(lambda seed=seed: kill_a_master_that_has_removed(seed)) for seed in range(9)
    ]
    assert any(was_early for was_early, _ in seen)
    assert all(keys == [] for _, keys in seen)


async def give_up_a_removal(seed: int, kind: str) -> bytes:
    """Put what a removal, given up by its caller, waits for at a new master; return its value."""
    world = StoreWorld(seed, StoreConfig(), Faults())
    world.start_master()
    world.start_host("h0", CAPACITY)
    _, client = world.start_client("c")
    await asyncio.sleep(0.3)
    assert world.master.state.awaited.is_learning
    removal = client.remove("key") if kind == "key" else client.remove_prefix("k")
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(removal, 0.1)
    # An upsert waits for nobody; nor does it claim that there was no other.
    assert await client.put("key", b"value", PutOptions(upsert=True)) is PutResult.REPLACED
    assert world.master.state.awaited.is_learning
    await asyncio.sleep(3)
    return await client.get("key")


@pytest.mark.parametrize("kind", ["key", "prefix"])
def test_a_removal_takes_nothing_that_was_put_after_it_was_given_up(kind):
    for seed in range(3):
        assert run_virtual(lambda seed=seed: give_up_a_removal(seed, kind)) == b"value"


async def put_what_one_host_can_hold(delay_s: float) -> tuple[object, int]:
    """Put it while that host is away; returns the result, and what of the other is left."""
    world = StoreWorld(1, StoreConfig(put_wait_ms=3000), Faults())
    world.start_master()
    world.start_host("small", CAPACITY)
    await asyncio.sleep(2)
    _, client = world.start_client("c")
    for i in range(10):
        await client.put(f"key{i}", bytes(20_000))
    world.start_host("large", 16 * CAPACITY)
    await asyncio.sleep(2)
    world.kill_host("large")
    putting = asyncio.ensure_future(client.put("large", bytes(4 * CAPACITY)))
    await asyncio.sleep(delay_s)
    if delay_s < 3:
        world.start_host("large", 16 * CAPACITY)
    (result,) = await asyncio.gather(putting, return_exceptions=True)
    return result, len((await client.list_keys()).keys)


def test_a_put_waits_for_a_host_that_could_hold_it_and_evicts_nothing_meanwhile():
    result, num_keys = run_virtual(lambda: put_what_one_host_can_hold(1))
    assert (result, num_keys) == (PutResult.CREATED, 11)
    result, num_keys = run_virtual(lambda: put_what_one_host_can_hold(5))
    assert isinstance(result, CapacityError)
    assert num_keys == 10


class Ticking:
    """A clock that goes on by a millisecond whenever it is read."""

    def __init__(self) -> None:
        self._now_ms = itertools.count(1)

    def now_s(self) -> float:
        return next(self._now_ms) / 1e3


def test_a_recovery_that_ends_while_it_is_looked_at_is_not_the_last():
    async def main() -> None:
        for recovery_ms in range(1, 6):
            config = StoreConfig(recovery_ms=recovery_ms)
            roster = MemoryRosterStore()
            master = StoreMaster(config, clock=Ticking(), epoch=1, draw=lambda _: 0, roster=roster)
            await master.membership.load()
            await master.state.awaited.recover()
            await roster.save(Roster(members={"h0": Member("id")}))
            await master.membership.load()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(master.state.awaited.recover(), 1)
            await master.aclose()

    run_virtual(main)


async def remove_beside_a_host_that_comes_back(seed: int) -> bool:
    """Remove while a host that this master knows joins anew; returns whether it still did then."""
    world = StoreWorld(seed, StoreConfig(), Faults())
    world.start_master()
    world.start_host("h0", CAPACITY)
    _, client = world.start_client("c")
    await asyncio.sleep(2)
    await client.put("key", b"value")
    world.kill_host("h0")
    world.start_host("h0", CAPACITY)
    (host,) = world.master.state.hosts.values()
    while host.stage is not HostStage.JOINING:
        await asyncio.sleep(0.0005)
    assert (await world.master.removals._remove_keys(["key"])).flags == b"\x01"
    was_joining = host.stage is HostStage.JOINING
    await asyncio.sleep(3)
    assert (await client.list_keys()).keys == []
    return was_joining


def test_a_removal_does_not_wait_for_a_host_that_comes_back():
    """The master knows what it has, and that takes long where it is much."""
    seen = [
        run_virtual(lambda seed=seed: remove_beside_a_host_that_comes_back(seed))
        for seed in range(9)
    ]
    assert any(seen)

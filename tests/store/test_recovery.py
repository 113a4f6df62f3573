"""Goal: a new master takes nothing for absent before its hosts have told what they have."""

import asyncio

import pytest
from store_world import Faults, World, run_virtual

from tandem.store.config import StoreConfig
from tandem.store.messages import PinObjects
from tandem.store.writing import PutOptions

HOSTS = ("h0", "h1", "h2")
CAPACITY = 2**18


async def remove_from_a_new_master(seed: int, kind: str) -> list[str]:
    """Remove or pin at a master that has not yet heard of the object; returns the keys left."""
    world = World(seed, StoreConfig(), Faults())
    world.start_master()
    for name in HOSTS:
        world.start_host(name, CAPACITY)
    await asyncio.sleep(2)
    _, client = world.start_client("c")
    await client.put("key", b"value", PutOptions(replicas=2))
    world.kill_master()
    await asyncio.sleep(0.5)
    world.start_master()
    while not world.master.hosts:  # The first one joins.
        await asyncio.sleep(0.001)
    removals = world.master.removals
    if kind == "prefix":
        assert await removals._remove_matches("k") == 1
    elif kind == "key":
        assert await removals._remove_keys(["key", "another"]) == b"\x01\x00"
    else:
        pinned = await world.master._pin_objects(PinObjects(keys=["key"], hard=True))
        assert pinned.flags == b"\x01"
    await asyncio.sleep(5)
    return (await client.list_keys()).keys


@pytest.mark.parametrize(("kind", "left"), [("key", []), ("prefix", []), ("pin", ["key"])])
def test_a_new_master_hears_its_hosts_before_it_says_that_nothing_is_there(kind, left):
    for seed in range(5):
        assert run_virtual(lambda seed=seed: remove_from_a_new_master(seed, kind)) == left

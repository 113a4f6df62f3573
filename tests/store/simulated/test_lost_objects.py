"""Goal: of an object whose hosts are lost all calls say the same: it cannot be read.

Method: on a virtual clock one of two hosts is killed, and calls about its object follow.
"""

import asyncio
import functools

import pytest
from store_world import StoreWorld

from tandem.core.errors import PeerLostError
from tandem.sim import Faults, run_virtual
from tandem.store.client.options import PutOptions, PutResult
from tandem.store.config import StoreConfig


async def lose(seed: int):
    """Return a client of a store in which the only host of "key" is lost."""
    world = StoreWorld(seed, StoreConfig(inline_bytes=0), Faults())
    world.start_master()
    world.start_host("h0", 2**25)
    await asyncio.sleep(2)
    _, client = world.start_client("c")
    assert await client.put("key", bytes(9000)) is PutResult.CREATED
    world.start_host("h1", 2**25)
    await asyncio.sleep(2)
    world.kill_host("h0")
    await asyncio.sleep(60)
    return client


async def check(upsert: bool) -> None:
    client = await lose(7 + upsert)
    assert not await client.exists("key")
    with pytest.raises(PeerLostError):
        await client.size("key")
    with pytest.raises(PeerLostError):
        await client.get("key")
    assert await client.put("key", b"new", PutOptions(upsert=upsert)) is PutResult.CREATED
    assert await client.exists("key")
    assert await client.size("key") == 3
    assert await client.put("key", b"newer", PutOptions(upsert=True)) is PutResult.REPLACED


def test_a_lost_object_is_unreadable_to_every_call():
    for upsert in (False, True):
        run_virtual(functools.partial(check, upsert))

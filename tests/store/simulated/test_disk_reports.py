"""Goal: what a host tells of its disk is believed in the order in which it came to be."""

import asyncio
from unittest.mock import patch

from store_world import StoreWorld

from tandem.sim import Faults, run_virtual
from tandem.store.config import StoreConfig
from tandem.store.master.state.space import HostSpace


def test_an_object_that_is_on_the_disk_before_its_commit_ends_is_kept():
    """The report of it may be taken before the host's answer to the order that sealed it."""

    async def main() -> None:
        world = StoreWorld(3, StoreConfig(), Faults())
        world.start_master()
        world.add_disk("h0")
        world.start_host("h0", 2**20)
        await asyncio.sleep(2)
        _, client = world.start_client("c")
        order = HostSpace.order

        async def take_the_answer_late(self, method, *args, **fields):
            answer = await order(self, method, *args, **fields)
            if method == "seal":
                await asyncio.sleep(1.5)
            return answer

        with patch.object(HostSpace, "order", take_the_answer_late):
            await client.put("key", bytes(5000))
        await asyncio.sleep(3)
        directory = world.master.state.directory
        assert directory.disks(directory.find("key"))
        assert await client.get("key") == bytes(5000)

    run_virtual(main)

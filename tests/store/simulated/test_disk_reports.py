"""Goal: what a host tells of its disk is believed in the order in which it came to be."""

import asyncio
from unittest.mock import patch

from store_world import StoreWorld

from tandem.sim import Faults, run_virtual
from tandem.store.client.options import PutOptions
from tandem.store.config import StoreConfig
from tandem.store.host.disk import DiskTier
from tandem.store.host.host import StoreHost
from tandem.store.master.state.orders import OrderLine


def test_an_object_that_is_on_the_disk_before_its_commit_ends_is_kept():
    """The report of it may be taken before the host's answer to the order that sealed it."""

    async def main() -> None:
        world = StoreWorld(3, StoreConfig(), Faults())
        world.start_master()
        world.add_disk("h0")
        world.start_host("h0", 2**20)
        await asyncio.sleep(2)
        _, client = world.start_client("c")
        order = OrderLine.order

        async def take_the_answer_late(self, method, *args, **fields):
            answer = await order(self, method, *args, **fields)
            if method == "seal":
                await asyncio.sleep(1.5)
            return answer

        with patch.object(OrderLine, "order", take_the_answer_late):
            await client.put("key", bytes(5000))
        await asyncio.sleep(3)
        directory = world.master.state.directory
        assert directory.copies.disks(directory.find("key"))
        assert await client.get("key") == bytes(5000)

    run_virtual(main)


async def evict_with_one_disk_reported() -> tuple[StoreWorld, int]:
    """Put an object that both disks write, evict it when the master knows of one; return its row.

    The reports of the other host are kept back by the caller.
    """
    world = StoreWorld(3, StoreConfig(), Faults())
    world.start_master()
    for name in ("h0", "h1"):
        world.add_disk(name)
        world.start_host(name, 2**20)
    await asyncio.sleep(2)
    _, client = world.start_client("c")
    await client.put("key", bytes(5000), PutOptions(replicas=2))
    await asyncio.sleep(0.5)
    assert all(world.hosts[name][1].disk.index.find("key") for name in ("h0", "h1"))
    directory = world.master.state.directory
    row = directory.find("key")
    (reported,) = directory.copies.disks(row)
    assert world.master.state.hosts[reported].name == "h1"
    assert world.master.departures.evict_row(row), "a disk keeps it"
    return world, row


def test_a_removal_reaches_a_disk_that_has_not_reported_its_record():
    """The host is there and the report is late; the next master would believe its inventory."""

    async def main() -> None:
        tell = StoreHost._tell_disk

        async def tell_late(self, *arguments):
            if self.name == "h0":
                await asyncio.sleep(10)  # As after a report that was lost.
            return await tell(self, *arguments)

        with patch.object(StoreHost, "_tell_disk", tell_late):
            world, _ = await evict_with_one_disk_reported()
            _, client = world.start_client("d")
            assert await client.remove("key")
            world.kill_master()
            world.start_master()
            await asyncio.sleep(5)
            assert not await client.exists("key")
            await asyncio.sleep(15)
            assert world.hosts["h0"][1].disk.index.find("key") is None

    run_virtual(main)


def test_a_report_that_an_eviction_overtakes_is_not_believed():
    """The record is being forgotten: were it listed, the directory would rely on it."""

    async def main() -> None:
        tell, forget = StoreHost._tell_disk, DiskTier.forget
        is_evicted = asyncio.Event()

        async def tell_after_eviction(self, *arguments):
            if self.name == "h0":
                await is_evicted.wait()
            return await tell(self, *arguments)

        async def forget_late(self, *arguments):
            await asyncio.sleep(1)
            await forget(self, *arguments)

        with (
            patch.object(StoreHost, "_tell_disk", tell_after_eviction),
            patch.object(DiskTier, "forget", forget_late),
        ):
            world, row = await evict_with_one_disk_reported()
            is_evicted.set()
            await asyncio.sleep(0.5)
            state = world.master.state
            assert [state.hosts[n].name for n in state.directory.copies.disks(row)] == ["h1"]
            await asyncio.sleep(5)
            assert world.hosts["h0"][1].disk.index.find("key") is None
            _, client = world.start_client("d")
            assert await client.get("key") == bytes(5000)

    run_virtual(main)

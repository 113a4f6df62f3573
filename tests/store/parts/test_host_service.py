"""A host process that cannot start leaves nothing open: not its segment, its disk, its engine."""

import asyncio
import os

import pytest

from tandem.core.errors import InternalError
from tandem.sim import run_virtual
from tandem.store import HostService, StoreConfig, StoreHost
from tandem.store.election import LeaderClient
from tandem.store.host import DiskFolder, DiskTier, HostSegment
from tandem.store.services.host import find_segment_folder
from tandem.transfer import TransferEngine

HOMES = {"LeaderClient": LeaderClient}
CLOSED = {
    (HostSegment, "close"),
    (TransferEngine, "close"),
    (DiskFolder, "close"),
    (DiskTier, "aclose"),
    (StoreHost, "aclose"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["LeaderClient.start", "Segment.reserve_rest"])
async def test_a_start_that_fails_closes_what_was_open(tmp_path, monkeypatch, name):
    """Whichever step fails; and the segment's file can be opened again, so its lock is free."""
    closed = []

    def watch(owner: type, method: str) -> None:
        real = getattr(owner, method)

        def close(self, *args, **kwargs):
            closed.append((owner, method))
            return real(self, *args, **kwargs)

        monkeypatch.setattr(owner, method, close)

    for owner, method in CLOSED:
        watch(owner, method)

    def fail(*_: object) -> None:
        raise InternalError("test.start", "no")

    owner, method = name.split(".")
    monkeypatch.setattr(HostSegment if owner == "Segment" else HOMES[owner], method, fail)
    config = StoreConfig(
        master=f"ipc://{tmp_path}/m.sock",
        name="h",
        segment_dir=str(tmp_path / "segments"),
        segment_bytes=2**20,
        ssd_dir=str(tmp_path / "disk"),
        ssd_bytes=2**24,
    )
    with pytest.raises(InternalError, match="no"):
        async with HostService(config):
            pass
    assert set(closed) == CLOSED
    path = tmp_path / "segments" / "h.segment"
    (await asyncio.to_thread(HostSegment.open_file, path, 2**20)).close()


def test_users_of_a_machine_have_folders_of_their_own(monkeypatch):
    folders = set()
    for uid in (0, 1000):
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        folders.add(str(find_segment_folder(StoreConfig())))
    assert folders == {"/dev/shm/tandem-0", "/dev/shm/tandem-1000"}


class _Port:
    """A data path that nobody uses."""

    address = ""
    read_base = 0

    def former_writers(self) -> set[int]:
        return set()


class _Master:
    """Takes no news: what is told to it stays under way."""

    def __init__(self) -> None:
        self.num_told = 0
        self.num_cancelled = 0

    async def call(self, *_: object, **__: object) -> None:
        self.num_told += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.num_cancelled += 1


async def grow_and_close() -> tuple[int, int, int]:
    host = StoreHost("h", "m", HostSegment.make_anonymous(2**20), _Port())
    master = _Master()
    host.master = master
    host.is_joined.set()
    host.on_grown()
    host.on_grown()
    await asyncio.sleep(0.01)
    told = master.num_told
    await host.aclose()
    return told, master.num_cancelled, len(asyncio.all_tasks()) - 1


def test_news_of_growth_ends_with_the_host():
    """Each is a task that the host keeps: none is lost to another, none outlives the host."""
    assert run_virtual(grow_and_close) == (2, 2, 0)

"""What goes from the disk of a host, while the disk fails, hangs, or its process dies.

Goal: nobody is told that something is gone while a start would find it, and everybody is once none
does. Method: the disk of ``tandem.sim``, with one step of it held up or refused.
"""

import asyncio
import resource
import threading

import numpy as np
import pytest
from test_disk_faults import Bench, run_day

from tandem.core.errors import CapacityError, InternalError, NotFoundError
from tandem.rpc import make_runtime_dir
from tandem.sim import MemoryDisk
from tandem.store.host import disk_io, disk_removal
from tandem.store.host.disk_files import DiskFolder
from tandem.store.host.host import StoreHost
from tandem.store.messages import DiskState


def hold(disk: MemoryDisk, name: str, *, raises: Exception | None = None) -> asyncio.Event:
    """Have calls of a method wait until the event is set; then they fail, if asked to."""
    opened, method = asyncio.Event(), getattr(disk, name)

    async def held(*arguments):
        await opened.wait()
        if raises is not None:
            raise raises
        return await method(*arguments)

    setattr(disk, name, held)
    return opened


async def fill(bench: Bench) -> int:
    """Have objects on the disk alone, in one bucket that takes no more; returns its number."""
    for i in range(4):
        bench.put(f"k{i}", 20_000)
    await bench.settle()
    for key in list(bench.at):
        bench.wipe(key)
    await bench.start()
    (number,) = bench.tier.index.buckets
    return number


def test_what_was_evicted_from_a_disk_that_is_given_up_is_told():
    async def day(disk: MemoryDisk, bench: Bench) -> None:
        number = await fill(bench)
        assert sorted(bench.told) == ["k0", "k1", "k2", "k3"]
        hold(disk, "drop_bucket", raises=InternalError("test", "input/output error")).set()
        with pytest.raises(InternalError):
            await bench.tier.removal.evict(number)
        assert bench.tier.state is DiskState.FAILED
        assert disk.is_condemned
        bench.listen()
        assert not bench.told

    run_day(1, day)


def test_a_load_takes_nothing_for_gone_that_a_start_would_find():
    async def day(disk: MemoryDisk, bench: Bench) -> None:
        number = await fill(bench)
        opened = hold(disk, "drop_bucket")
        evicting = asyncio.ensure_future(bench.tier.removal.evict(number))
        await asyncio.sleep(1)
        loading = asyncio.ensure_future(bench.tier.load(bench.headers["k0"], 0))
        await asyncio.sleep(1)
        assert not loading.done()
        assert disk.files
        opened.set()
        with pytest.raises(NotFoundError):
            await loading
        await evicting
        assert not disk.files

    run_day(1, day)


def test_an_inventory_has_what_a_start_would_find():
    async def list_disk(bench: Bench) -> list[str]:
        host = object.__new__(StoreHost)
        host.disk, host.segment = bench.tier, bench.segment
        pages = [page async for page in host._list_inventory()]
        return [key for records, is_disk in pages if is_disk for key in records.keys]

    async def day(disk: MemoryDisk, bench: Bench) -> None:
        number = await fill(bench)
        opened = hold(disk, "drop_bucket")
        evicting = asyncio.ensure_future(bench.tier.removal.evict(number))
        await asyncio.sleep(1)
        assert sorted(await list_disk(bench)) == ["k0", "k1", "k2", "k3"]
        opened.set()
        await evicting
        assert sorted(bench.tier.dropped) == ["k0", "k1", "k2", "k3"]
        assert await list_disk(bench) == []

    run_day(1, day)


def test_the_index_of_a_bucket_that_is_gone_is_not_taken_for_that_of_the_next():
    """A start gives the number of the last bucket again if that was removed."""

    async def day(disk: MemoryDisk, bench: Bench) -> None:
        bench.put("old", 20_000)
        await bench.settle()
        disk.lose_process()
        await bench.start()  # Which writes the index.
        may_go, has_died = asyncio.Event(), asyncio.Event()
        for name in ("drop_bucket", "drop_note"):
            method = getattr(disk, name)

            async def go_and_die(*arguments, method=method):
                await may_go.wait()
                await method(*arguments)
                has_died.set()
                await asyncio.sleep(3600)

            setattr(disk, name, go_and_die)
        await bench.forget("old")
        may_go.set()
        await has_died.wait()
        del disk.drop_bucket, disk.drop_note
        disk.lose_process()
        await bench.start()
        bench.put("new", 20_000)
        await bench.settle()
        assert "new" in bench.told
        disk.lose_process()
        await bench.start()
        await bench.check()

    run_day(1, day)


def test_a_dead_bucket_that_cannot_be_removed_at_once_is_removed_later():
    async def day(disk: MemoryDisk, bench: Bench) -> None:
        await fill(bench)
        method, failures = disk.drop_bucket, iter(range(2))

        async def fail_twice(number):
            if next(failures, None) is not None:
                raise InternalError("test", "input/output error")
            await method(number)

        disk.drop_bucket = fail_twice
        for i in range(4):
            await bench.forget(f"k{i}")
        await asyncio.sleep(10)
        assert not disk.files
        assert not bench.tier.index.buckets
        assert bench.tier.state is DiskState.ACTIVE

    run_day(1, day)


def test_a_forget_waits_for_a_bucket_that_others_give_up():
    """Its tombstone could not be written, so only the end of the bucket makes it hold."""

    async def day(disk: MemoryDisk, bench: Bench) -> None:
        number = await fill(bench)
        unwritten = hold(disk, "append_note", raises=InternalError("test", "input/output error"))
        opened = hold(disk, "drop_bucket")
        forgetting = asyncio.ensure_future(bench.forget("k0"))
        await asyncio.sleep(0.1)
        evicting = asyncio.ensure_future(bench.tier.removal.evict(number))
        await asyncio.sleep(0.1)
        unwritten.set()
        await asyncio.sleep(1)
        assert not forgetting.done()
        opened.set()
        await forgetting
        await evicting
        assert not disk.files

    run_day(1, day)


@pytest.mark.parametrize("error", ["full", "hung"])
def test_tombstones_that_cannot_be_compacted_are_tombstones_all_the_same(error, monkeypatch):
    monkeypatch.setattr(disk_removal, "COMPACT_TOMBSTONES", -(10**9))

    async def day(disk: MemoryDisk, bench: Bench) -> None:
        await fill(bench)
        raises = CapacityError("test", "no space") if error == "full" else None
        opened = hold(disk, "write_note", raises=raises)
        if error == "full":
            opened.set()
        await asyncio.wait_for(bench.forget("k0"), disk_io.HANG_S + 1)
        if error == "hung":
            assert bench.tier.state is DiskState.FAILED
            return
        assert len(bench.tier.index) == 3
        del disk.write_note
        disk.lose_process()
        await bench.start()
        assert await bench.check() == 3

    run_day(1, day)


def test_compaction_keeps_the_tombstones_of_buckets_whose_files_are_there(monkeypatch):
    monkeypatch.setattr(disk_removal, "COMPACT_TOMBSTONES", -(10**9))

    async def day(disk: MemoryDisk, bench: Bench) -> None:
        number = await fill(bench)
        await bench.forget("k0")
        bench.put("other", 20_000)
        await bench.settle()
        hold(disk, "drop_bucket")
        evicting = asyncio.ensure_future(bench.tier.removal.evict(number))
        await asyncio.sleep(0.1)
        forgetting = asyncio.ensure_future(bench.forget("other"))
        await asyncio.sleep(1)
        evicting.cancel()
        forgetting.cancel()
        del disk.drop_bucket
        disk.lose_process()
        bench.doomed.clear()
        await bench.start()
        await bench.check(must_have=False)

    run_day(1, day)


def test_a_disk_is_condemned_without_descriptors(tmp_path):
    """The mark is what keeps a start from believing the disk; nothing may be wanting for it."""
    tmp_path.chmod(0o700)
    marks = make_runtime_dir()
    try:
        folder = DiskFolder.open(tmp_path, None, marks=marks)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            folder.condemn()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        folder.close()
        (tmp_path / f"{1:016x}.bucket").touch(mode=0o600)
        DiskFolder.open(tmp_path, None, marks=marks).close()
        assert not list(tmp_path.glob("*.bucket"))
        (tmp_path / f"{1:016x}.bucket").touch(mode=0o600)
        DiskFolder.open(tmp_path, None, marks=marks).close()
        assert list(tmp_path.glob("*.bucket")), "it is condemned but once"
        assert not list(marks.iterdir()), "what is not needed any more is gone"
    finally:
        for file in marks.iterdir():
            file.unlink()
        marks.rmdir()


def test_a_copy_that_is_cancelled_again_has_ended_all_the_same(monkeypatch):
    """Whoever ended a load cancels it, and so does the next join, which then frees its space."""
    begun, may_end = threading.Event(), threading.Event()

    def copy(target, source):
        begun.set()
        assert may_end.wait(60)
        target[:] = source

    monkeypatch.setattr(disk_io, "OFF_LOOP_BYTES", 0)
    monkeypatch.setattr(disk_io.np, "copyto", copy)
    target = np.zeros(8, np.uint8)

    async def main() -> None:
        copying = asyncio.ensure_future(disk_io.copy_bytes(target, np.ones(8, np.uint8)))
        assert await asyncio.to_thread(begun.wait, 20)
        for _ in range(3):
            copying.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
        assert not copying.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await copying
        assert target.all()

    try:
        asyncio.run(asyncio.wait_for(main(), 60))
    finally:
        may_end.set()

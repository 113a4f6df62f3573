"""The SSD tier of one host, killed at every step it takes on its disk.

Goal: what was told to be stored is there and bit-exact after any crash, what was forgotten is not,
and a full, failing, rotten or hanging disk costs copies only. Method: a scripted day of puts,
loads, removals and evictions on a disk that loses what was not synced; the day ends at each step.
"""

import asyncio
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from tandem.core.errors import (
    CorruptionError,
    InternalError,
    NotFoundError,
    PeerLostError,
    TandemError,
)
from tandem.sim import LoopClock, MemoryDisk, MemoryPort, run_virtual
from tandem.store.formats import layout
from tandem.store.formats.checksum import checksum_table, make_table
from tandem.store.formats.headers import ExtentHeader
from tandem.store.host import disk_io
from tandem.store.host.disk import DiskTier
from tandem.store.host.disk_removal import Removal
from tandem.store.host.host import StoreHost
from tandem.store.host.segment import HostSegment
from tandem.store.messages import Ack, DiskState, Joined, KeyBytes

CAPACITY = 4 * 2**20
SEGMENT = 2**20


class Bench:
    """A segment, a tier, and a note of what was said about each object."""

    def __init__(self, disk: MemoryDisk, *, capacity: int = CAPACITY) -> None:
        self.disk = disk
        self.segment = HostSegment.make_anonymous(SEGMENT)
        self.capacity = capacity
        self.values: dict[tuple[str, int], bytes] = {}
        self.headers: dict[str, ExtentHeader] = {}
        self.at: dict[str, int] = {}
        self.told: dict[str, int] = {}
        self.forgotten: set[tuple[str, int]] = set()
        self.doomed: set[str] = set()
        """A forget, or an eviction, of these has begun."""
        self.versions = itertools.count(1)
        self._free = 0
        self.tier: DiskTier | None = None

    def stop(self) -> None:
        """Nothing of an earlier life goes on."""
        if self.tier is not None:
            for task in [*self.tier.io.tasks, self.tier._running]:
                if task is not None:
                    task.cancel()

    async def start(self) -> DiskTier:
        self.stop()
        self.disk.empty()
        self.tier = DiskTier(
            MemoryPort(self.disk), self.segment, capacity_bytes=self.capacity, clock=LoopClock()
        )
        await self.tier.open()
        self.tier.start()
        return self.tier

    def put(self, key: str, size: int) -> None:
        if key in self.at:
            self.wipe(key)
        version = next(self.versions)
        value = np.random.default_rng(version).integers(0, 256, size, np.uint8)
        table = make_table([value])
        header = ExtentHeader(key, size, version, checksum_table(table), 1, False, 0)
        length = layout.extent_bytes(len(key), size)
        if self._free + length > SEGMENT:
            self._free = 0  # Around the corner, over what was wiped before.
        offset, self._free = self._free, self._free + length
        for other, at in list(self.at.items()):
            old = layout.extent_bytes(len(other), self.headers[other].size)
            if at < offset + length and offset < at + old:
                self.wipe(other)
        data = self.segment.data[offset : offset + length]
        table_at = layout.table_offset(len(key))
        data[table_at : table_at + len(table)] = np.frombuffer(table, np.uint8)
        value_at = layout.value_offset(len(key), size)
        data[value_at : value_at + size] = value
        self.segment.seal(offset, header)
        self.values[key, version] = value.tobytes()
        self.headers[key], self.at[key] = header, offset
        self.told.pop(key, None)
        self.tier.on_sealed(offset, header)

    def wipe(self, key: str) -> None:
        offset = self.at.pop(key)
        self.segment.wipe(offset)
        self.tier.on_wiped(offset, key)

    async def forget(self, key: str) -> None:
        if key in self.at:
            self.wipe(key)
        version = self.headers[key].version
        self.doomed.add(key)
        self.told.pop(key, None)
        await self.tier.forget([key], [version])
        self.forgotten |= {(key, v) for k, v in self.values if k == key and v <= version}
        self.doomed.discard(key)

    def listen(self) -> None:
        stored, dropped = self.tier.take_changes()
        for key in dropped:
            self.told.pop(key, None)
        for key, version in stored.items():
            if self.headers[key].version == version:
                self.told[key] = version

    async def settle(self) -> None:
        for _ in range(400):
            await asyncio.sleep(0.05)
            if not self.tier.status().num_queued:
                break
        self.listen()

    async def read(self, key: str, version: int) -> bytes:
        """Load into a segment of its own, at 0."""
        record = self.tier.index.find(key)
        if record is None or record.header.version != version:
            raise NotFoundError("test.read", key)
        shelf, mine = HostSegment.make_anonymous(SEGMENT), self.tier.segment
        self.tier.segment = shelf
        try:
            await self.tier.load(record.header, 0)
        finally:
            self.tier.segment = mine
        at = layout.value_offset(len(key), record.header.size)
        return shelf.data[at : at + record.header.size].tobytes()

    async def check(self, *, must_have: bool = True) -> int:
        """Compare all that the disk shows with what was written; returns how many there are."""
        for record in self.tier.index.list_records():
            name = (record.header.key, record.header.version)
            assert name not in self.forgotten, f"{name} was forgotten"
            assert await self.read(*name) == self.values[name]
        if must_have:
            for key, version in self.told.items():
                if key not in self.doomed:
                    assert await self.read(key, version) == self.values[key, version]
        return len(self.tier.index)


async def play(bench: Bench) -> None:
    """A day: enough for several buckets, an eviction, removals in every state."""
    await bench.start()
    sizes = (0, 10, 5000, 70_000, 150_000)
    for i in range(16):
        bench.put(f"a{i % 11}", sizes[i % 5])
        if i % 4 == 3:
            await asyncio.sleep(0.002)
            bench.listen()
        if i % 5 == 4:
            await bench.forget(f"a{i % 11}")
    await bench.settle()
    for i in range(40):
        bench.put(f"b{i}", sizes[(i + 3) % 5])
        if i % 8 == 7:
            bench.listen()
            await bench.settle()
            await bench.forget(f"b{i - 3}")
    await bench.settle()
    await bench.check()


@pytest.mark.parametrize("is_power_lost", [False, True])
def test_a_crash_at_a_sample_of_steps(is_power_lost):
    whole = MemoryDisk(1)
    run_virtual(lambda: play(Bench(whole)))
    assert whole.steps > 120
    for step in range(1 + is_power_lost, whole.steps, 13):
        run_virtual(lambda step=step: crash_and_return(step, is_power_lost))


@pytest.mark.slow
@pytest.mark.parametrize("is_power_lost", [False, True])
def test_a_crash_at_every_step(is_power_lost):
    whole = MemoryDisk(1)
    run_virtual(lambda: play(Bench(whole)))
    for step in range(1, whole.steps):
        run_virtual(lambda step=step: crash_and_return(step, is_power_lost))


async def crash_and_return(step: int, is_power_lost: bool) -> None:
    disk = MemoryDisk(1)
    disk.crash_at = step
    bench = Bench(disk)
    day = asyncio.ensure_future(play(bench))
    while disk.steps < step:
        await asyncio.sleep(0.0005)
    assert not day.done()
    day.cancel()
    bench.stop()
    await asyncio.wait([day])
    (disk.lose_power if is_power_lost else disk.lose_process)()
    # What was dropped for want of room was not told yet: an eviction may be under way.
    bench.listen()
    gone = set(bench.told) - {r.header.key for r in bench.tier.index.list_records()}
    for key in gone:
        bench.told.pop(key)
    disk.crash_at = -1
    bench.segment = HostSegment.make_anonymous(SEGMENT)
    bench.at.clear()
    await bench.start()
    await bench.check()
    # And it works on.
    bench.put("after", 1000)
    await bench.settle()
    assert bench.told["after"]
    await bench.check()


async def sync_nothing(disk: MemoryDisk, number: int) -> None:
    await disk._step()


async def bury_nothing(removal: Removal, records) -> None:
    return None


MUTANTS = {
    "copies count before they are synced": (MemoryDisk, "sync", sync_nothing),
    "what is forgotten is not buried": (Removal, "bury", bury_nothing),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name, monkeypatch):
    monkeypatch.setattr(*MUTANTS[name])
    whole = MemoryDisk(1)
    run_virtual(lambda: play(Bench(whole)))
    with pytest.raises((AssertionError, TandemError)):
        for step in range(1, whole.steps):
            run_virtual(lambda step=step: crash_and_return(step, True))


def run_day(seed: int, day, **faults) -> None:
    async def main() -> None:
        disk = MemoryDisk(seed)
        bench = Bench(disk, **faults)
        await bench.start()
        await day(disk, bench)

    run_virtual(main)


def test_a_full_disk_costs_copies_only_and_recovers():
    async def day(disk: MemoryDisk, bench: Bench) -> None:
        disk.room_bytes = 1024
        bench.put("a", 1000)
        await asyncio.sleep(5)
        assert bench.tier.state is DiskState.FULL
        assert len(bench.tier.index) == 0
        disk.room_bytes = 2**30
        await asyncio.sleep(30)
        bench.listen()
        assert bench.tier.state is DiskState.ACTIVE
        assert list(bench.told) == ["a"]
        await bench.check()

    run_day(1, day)


def test_a_disk_filled_by_others_goes_on_with_what_it_has():
    async def day(disk: MemoryDisk, bench: Bench) -> None:
        disk.room_bytes = 2 * 2**20
        for i in range(60):
            bench.put(f"k{i}", 100_000)
            await bench.settle()
        assert len(bench.tier.index) > 8
        assert bench.tier.status().used_bytes <= disk.room_bytes
        assert bench.tier.index.find("k59") is not None
        await bench.check()

    run_day(1, day)


def test_failing_writes_and_reads():
    async def day(disk: MemoryDisk, bench: Bench) -> None:
        disk.fail_rate = 0.3
        for i in range(40):
            bench.put(f"k{i % 20}", 30_000)
            await asyncio.sleep(3)
            bench.listen()
            if i % 7 == 0:
                await bench.forget(f"k{i % 20}")
        assert bench.tier.counts["errors"]
        disk.fail_rate = 0.0
        for _ in range(30):
            await asyncio.sleep(5)
            bench.listen()
        assert bench.tier.state is DiskState.ACTIVE
        kept = await bench.check()
        assert kept > 10
        disk.lose_power()
        await bench.start()
        assert await bench.check() == kept

    run_day(3, day)


def test_a_record_that_cannot_be_read_is_dropped():
    async def day(disk: MemoryDisk, bench: Bench) -> None:
        bench.put("a", 30_000)
        await bench.settle()
        disk.fail_rate = 1.0
        with pytest.raises(CorruptionError):
            await bench.read("a", 1)
        disk.fail_rate = 0.0
        assert bench.tier.take_changes()[1] == {"a": 1}
        with pytest.raises(NotFoundError):
            await bench.read("a", 1)

    run_day(3, day)


def test_every_flipped_bit_is_found():
    """Also those in heads, keys, tables, index files; before a start and after one."""

    async def day(disk: MemoryDisk, bench: Bench) -> None:
        for i in range(12):
            bench.put(f"k{i}", 20_000)
        await bench.settle()
        num_found = 0
        for turn in range(120):
            disk.rot()
            if turn % 10 == 0:
                name = disk.random.choice(sorted(disk.notes) or ["none"])
                data = bytearray(disk.notes.get(name) or b"\0")
                data[disk.random.randrange(len(data))] ^= 4
                disk.notes[name] = bytes(data)
            if turn % 20 == 19:
                disk.lose_process()
                await bench.start()
            for record in bench.tier.index.list_records():
                name = (record.header.key, record.header.version)
                try:
                    assert await bench.read(*name) == bench.values[name]
                except CorruptionError:
                    num_found += 1
            bench.listen()
        assert num_found > 3

    run_day(5, day)


def test_a_disk_that_hangs_is_given_up_and_empty_after_a_restart():
    async def day(disk: MemoryDisk, bench: Bench) -> None:
        bench.put("a", 30_000)
        await bench.settle()
        disk.is_hung = True
        bench.put("b", 30_000)
        await asyncio.sleep(0.1)
        removal = asyncio.ensure_future(bench.forget("a"))
        await asyncio.sleep(3 * disk_io.HANG_S)
        assert removal.done()
        assert not removal.exception()
        assert bench.tier.state is DiskState.FAILED
        assert bench.tier.take_changes()[1].keys() <= {"a"}
        for i in range(10):
            bench.put(f"c{i}", 1000)  # Nobody waits.
        with pytest.raises(NotFoundError):
            await bench.tier.load(bench.headers["b"], 0)
        disk.lose_process()
        await bench.start()
        assert len(bench.tier.index) == 0  # Or what was removed would be back.
        await bench.settle()
        await bench.check(must_have=False)

    run_day(6, day)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_forget_that_comes_again_waits_for_the_first(is_cancelled):
    """The answer to the first was lost, or its session; the note of it is not yet on the disk."""

    async def day(disk: MemoryDisk, bench: Bench) -> None:
        bench.put("a", 30_000)
        bench.put("b", 1000)
        await bench.settle()
        assert len(bench.tier.index) == 2
        disk.slow_s = 1.0
        first = asyncio.ensure_future(bench.tier.forget(["a"], [bench.headers["a"].version]))
        await asyncio.sleep(0.1)
        if is_cancelled:
            first.cancel()
            await asyncio.wait([first])
        await bench.forget("a")
        disk.lose_process()
        disk.slow_s = 0.0005
        await bench.start()
        await bench.check()
        assert bench.tier.index.find("a") is None

    run_day(8, day)


def test_a_forget_waits_for_an_eviction_that_is_under_way():
    async def day(disk: MemoryDisk, bench: Bench) -> None:
        bench.put("a", 30_000)
        await bench.settle()
        bench.wipe("a")  # It is not in memory, or it would be written anew.
        (number,) = bench.tier.index.buckets
        drop, life = disk.drop_bucket, disk.life

        async def drop_late(number: int) -> None:
            await asyncio.sleep(1)
            if disk.life == life:
                await drop(number)

        disk.drop_bucket = drop_late
        evicting = asyncio.ensure_future(bench.tier.removal.evict(number))
        await asyncio.sleep(0.1)
        assert bench.tier.index.find("a") is None
        await bench.forget("a")
        disk.lose_process()
        await bench.start()
        await bench.check(must_have=False)
        assert bench.tier.index.find("a") is None
        evicting.cancel()

    run_day(9, day)


@pytest.mark.parametrize("num_failures", [2, 1000])
def test_a_bucket_that_cannot_be_removed_never_comes_back(num_failures):
    async def day(disk: MemoryDisk, bench: Bench) -> None:
        bench.put("a", 30_000)
        await bench.settle()
        bench.wipe("a")
        (number,) = bench.tier.index.buckets
        drop, left = disk.drop_bucket, [num_failures]

        async def drop_sometimes(number: int) -> None:
            left[0] -= 1
            if left[0] >= 0:
                raise InternalError("test.disk", "cannot remove")
            await drop(number)

        disk.drop_bucket = drop_sometimes
        evicting = asyncio.ensure_future(bench.tier.removal.evict(number))
        await asyncio.sleep(0.01)
        assert not bench.tier.take_changes()[1]  # It could still come back.
        await bench.forget("a")
        if num_failures > 100:
            with pytest.raises(InternalError):
                await evicting
            assert bench.tier.state is DiskState.FAILED
        else:
            await evicting
            assert bench.tier.state is not DiskState.FAILED
            assert bench.tier.take_changes()[1] == {"a": bench.headers["a"].version}
        disk.lose_process()
        await bench.start()
        await bench.check(must_have=False)
        assert bench.tier.index.find("a") is None

    run_day(10, day)


def test_a_slow_disk_keeps_nobody_waiting():
    async def day(disk: MemoryDisk, bench: Bench) -> None:
        disk.slow_s = 1.0
        clock = asyncio.get_running_loop()
        begin_s = clock.time()
        for i in range(500):
            bench.put(f"k{i}", 1000)
        assert clock.time() == begin_s
        disk.slow_s = 0.0005
        await bench.settle()
        await bench.check()

    run_day(7, day)


def test_hot_objects_are_carried_forward():
    """What is in memory keeps its copy on the disk, though its bucket is evicted."""

    async def day(disk: MemoryDisk, bench: Bench) -> None:
        bench.put("hot", 50_000)
        await bench.settle()
        hot = bench.at.pop("hot")  # Never wiped by what follows.
        bench._free = hot + layout.extent_bytes(3, 50_000)
        for i in range(120):
            if bench._free + 2 * 60_000 > SEGMENT:
                bench._free = hot + layout.extent_bytes(3, 50_000)
            bench.put(f"k{i}", 60_000)
            await bench.settle()
        assert bench.tier.counts["evicted"] > 10
        assert bench.tier.index.find("hot") is not None
        assert bench.tier.index.find("k0") is None
        assert bench.tier.index.file_bytes <= CAPACITY
        await bench.check(must_have=False)

    run_day(8, day)


def test_objects_too_large_for_the_disk_are_left_out():
    async def day(disk: MemoryDisk, bench: Bench) -> None:
        bench.put("large", 200_000)
        bench.put("small", 2_000)
        await bench.settle()
        assert list(bench.told) == ["small"]
        assert bench.tier.counts["skipped"] >= 1

    run_day(9, day, capacity=100_000)


def test_a_load_that_is_cancelled_touches_memory_no_more():
    async def day(disk: MemoryDisk, bench: Bench) -> None:
        bench.put("a", 30_000)
        await bench.settle()
        disk.slow_s = 1.0
        loading = asyncio.ensure_future(bench.tier.load(bench.headers["a"], SEGMENT // 2))
        await asyncio.sleep(0.01)
        loading.cancel()
        await asyncio.wait([loading])
        bench.segment.data[SEGMENT // 2 :] = 7
        await asyncio.sleep(60)
        assert (bench.segment.data[SEGMENT // 2 :] == 7).all()
        with pytest.raises(TandemError):
            await bench.tier.load(bench.headers["a"]._replace(version=9), 0)

    run_day(10, day)


class FickleMaster:
    """A master that a host joins twice: the first session is lost while the host still joins."""

    def __init__(self) -> None:
        self.name, self.instance_id, self.is_lost = "master", "m", False
        self.num_joins = self.num_done = 0
        self.reported: list[int] = []

    async def call(self, method, request, response_type, *, timeout_s=None):
        await asyncio.sleep(0.001)
        if method == "join":
            self.num_joins += 1
            return Joined(epoch=1, host=0, session=self.num_joins)
        if method == "inventory_done":
            self.num_done += 1
            if self.num_done == 2:
                raise PeerLostError("test.call", "the session is over")
        if method == "disk_report":
            if request.session != self.num_joins:
                raise PeerLostError("test.call", "the session is over")
            self.reported.append(request.session)
            return KeyBytes(bytes(len(request.stored)))
        return Ack()


class StubbornPort:
    """The data path of a host whose former writers do not let go yet."""

    address, read_base = "memory", 0

    def former_writers(self) -> set[int]:
        return {1}

    async def close_writer(self, base: int) -> bool:
        return False


def test_the_disk_is_reported_in_the_session_that_came_of_joining():
    """A join may fail after its reports have begun. (Found by the simulator, seed 598.)"""

    async def main() -> None:
        bench = Bench(MemoryDisk(0))
        tier = await bench.start()
        host = StoreHost("h", "h", bench.segment, StubbornPort(), tier)
        master = FickleMaster()
        host.on_master(master)
        await asyncio.sleep(20)
        assert master.num_joins == 2
        assert master.reported.count(2) > 3
        await host.aclose()
        bench.stop()

    run_virtual(main)


async def end_a_report_that_has_just_begun(turns: int, kind: str) -> bool:
    """Cancel what waits for news of a disk, some turns of the loop after there was some."""
    bench = Bench(MemoryDisk(1))
    tier = await bench.start()
    await asyncio.sleep(30)  # All is written, or looked for.

    class Master:
        async def call(self, method, request, response, *, timeout_s=None):
            return KeyBytes(b"")

    if kind == "report":
        host = StoreHost("h", "m", bench.segment, SimpleNamespace(former_writers=set), tier)
        task = asyncio.ensure_future(host._report_disk(tier, Master(), 1))
        wake = host._disk_changed.set
    else:
        tier.queue.is_behind = True  # It waits for work, and for the next scan.
        task, wake = tier._running, tier.queue.has_work.set
        wake()
    await asyncio.sleep(0.001)
    wake()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task], timeout=100)
    return task.done()


@pytest.mark.parametrize("kind", ["report", "write behind"])
def test_a_host_ends_also_at_the_moment_when_its_disk_has_news(kind):
    for turns in range(6):
        assert run_virtual(lambda turns=turns: end_a_report_that_has_just_begun(turns, kind))


def test_a_file_system_smaller_than_the_tier_is_not_rewritten_for_ever():
    """Nobody calls: what is in memory is written once or twice, and the state says why no more."""

    async def main() -> None:
        disk = MemoryDisk(3, room_bytes=int(2.5 * SEGMENT / 4))
        bench = Bench(disk, capacity=8 * SEGMENT)
        tier = await bench.start()
        tier.writing._bucket_bytes = SEGMENT // 4
        for i in range(14):
            bench.put(f"key{i}", SEGMENT // 16)
        await asyncio.sleep(20)
        first = tier.counts["written_bytes"]
        await asyncio.sleep(40)
        assert tier.counts["written_bytes"] == first <= 3 * SEGMENT
        assert tier.state is DiskState.FULL
        assert 0 < len(tier.index) < 14
        disk.room_bytes = 100 * SEGMENT
        bench.put("more", SEGMENT // 16)
        bench.put("most", SEGMENT // 4)
        await asyncio.sleep(60)
        assert tier.state is DiskState.ACTIVE
        bench.stop()

    run_virtual(main)

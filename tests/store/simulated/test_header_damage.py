"""Goal: no flipped bit of a header is believed, whatever field it is in, and none stops the store.

Method: every bit of each kind of header is flipped in files that nobody has open. The store comes
back, gives no wrong value, takes puts, brings nothing back that was removed, and names what is
damaged. For whole processes a systematic sample stands for all bits: each field of each header.
"""

import asyncio
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from store_world import StoreWorld
from test_disk_faults import Bench
from test_segment import CAPACITY, put

from tandem.core.errors import ConflictError, CorruptionError, NotFoundError, UnsupportedError
from tandem.rpc import make_runtime_dir
from tandem.sim import Faults, MemoryDisk, run_virtual
from tandem.store import (
    ClientService,
    HostService,
    MasterService,
    PutOptions,
    PutResult,
    StoreConfig,
)
from tandem.store.corruption_log import MAX_NAMED, CorruptionLog
from tandem.store.formats import headers, layout
from tandem.store.formats.headers import (
    COPIES_AT,
    HEAD_BYTES,
    MAX_EPOCH,
    RecordTombstone,
    pack_head,
    pack_tombstones,
    parse_head,
    parse_tombstones,
)
from tandem.store.formats.records import append_record
from tandem.store.host import segment_file as segment_module
from tandem.store.host.segment import MARK, HostSegment
from tandem.store.master.master import StoreMaster
from tandem.store.master.state.versions import MAX_EPOCH_JUMP
from tandem.store.messages import ExtentRecords, HostStage
from tandem.store.services.master import next_epoch

MAGIC = b"TANDTST\0"
FIELDS = bytes(range(1, 37))
HEAD_BITS = 8 * (headers.HEAD.size + len(FIELDS) + 4)
SEGMENT_HEAD_BITS = 8 * (headers.HEAD.size + segment_module.FIELDS.size + 4)


def flip(data: bytearray, bit: int, *bases: int) -> None:
    for base in bases:
        data[base + bit // 8] ^= 1 << bit % 8


# The codec.


def test_every_flipped_bit_of_a_head_is_found_and_the_other_copy_read():
    whole = pack_head(MAGIC, FIELDS)
    assert parse_head(whole, MAGIC, len(FIELDS), "x") == ([FIELDS, FIELDS], False)
    for bit in range(HEAD_BITS):
        for copy in COPIES_AT:
            data = bytearray(whole)
            flip(data, bit, copy)
            assert parse_head(bytes(data), MAGIC, len(FIELDS), "x") == ([FIELDS], True), bit
        data = bytearray(whole)
        flip(data, bit, *COPIES_AT)
        with pytest.raises(CorruptionError):
            parse_head(bytes(data), MAGIC, len(FIELDS), "x")


def test_a_head_that_is_cut_off_or_of_another_kind_is_none():
    whole = pack_head(MAGIC, FIELDS)
    for length in range(HEAD_BITS // 8):
        with pytest.raises(CorruptionError):
            parse_head(whole[:length], MAGIC, len(FIELDS), "x")
    with pytest.raises(CorruptionError):
        parse_head(whole, b"TANDOTH\0", len(FIELDS), "x")
    with pytest.raises(CorruptionError):
        parse_head(whole, MAGIC, len(FIELDS) - 1, "x")


def test_only_a_head_that_holds_together_is_a_later_format(monkeypatch):
    monkeypatch.setattr(headers, "FORMAT", headers.FORMAT + 1)
    later = bytearray(pack_head(MAGIC, FIELDS + b"more"))
    monkeypatch.undo()
    with pytest.raises(UnsupportedError, match="format 3"):
        parse_head(bytes(later), MAGIC, len(FIELDS), "x")
    flip(later, 70, *COPIES_AT)
    with pytest.raises(CorruptionError):
        parse_head(bytes(later), MAGIC, len(FIELDS), "x")


def test_no_flipped_bit_of_a_list_of_removals_brings_an_object_back():
    tombstones = [RecordTombstone(version, 7) for version in range(1, 4)]
    whole = pack_tombstones(tombstones)
    assert parse_tombstones(whole) == (tombstones, 0)
    for bit in range(8 * len(whole)):
        data = bytearray(whole)
        flip(data, bit, 0)
        assert parse_tombstones(bytes(data)) == (tombstones, 1), bit


def test_a_medium_that_rots_away_is_told_of_by_a_count():
    corruption = CorruptionLog()
    for number in range(3 * MAX_NAMED):
        corruption.note(f"record {number}", "rot")
        corruption.note("record 0", "rot")
    assert len(corruption.names) == MAX_NAMED + 1
    assert corruption.names[-1] == f"and {2 * MAX_NAMED} more, see the log"


# A segment.


@pytest.fixture
def path(tmp_path):
    folder = tmp_path / "segments"
    folder.mkdir(mode=0o700)
    return folder / "a.segment"


def test_a_segment_survives_every_flipped_bit_of_one_copy_of_its_head(path):
    segment = HostSegment.open_file(path, CAPACITY)
    segment.epoch = 5
    header = put(segment, 0, "key", b"x" * 1000)
    identity = segment.segment_id
    segment.close()
    for bit in range(SEGMENT_HEAD_BITS):
        with path.open("r+b") as file:
            at = COPIES_AT[bit % 2] + bit // 8
            (byte,) = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), at)
        segment = HostSegment.open_file(path, CAPACITY)
        assert (segment.segment_id, segment.epoch) == (identity, 5), bit
        assert list(segment.scan()) == [(0, header)], bit
        assert segment.corruption.names == ["head of segment a.segment"], bit
        segment.close()
    HostSegment.open_file(path, CAPACITY).close()  # Each time it was made anew from the other.
    assert not list(path.parent.glob("*.quarantined"))


@pytest.mark.parametrize("bit", range(0, SEGMENT_HEAD_BITS, 11))
def test_a_segment_whose_head_is_gone_is_quarantined_and_never_believed(path, bit):
    segment = HostSegment.open_file(path, CAPACITY)
    segment.epoch = 5
    put(segment, 0, "key", b"x" * 1000)
    identity = segment.segment_id
    segment.close()
    data = bytearray(path.read_bytes())
    flip(data, bit, *COPIES_AT)
    path.write_bytes(data)
    for turn in range(2):
        segment = HostSegment.open_file(path, CAPACITY)
        assert segment.segment_id != identity
        assert segment.epoch == 0
        assert list(segment.scan()) == []
        assert segment.corruption.names == ([] if turn else ["segment a.segment"])
        put(segment, 512, f"other{turn}", b"y")
        segment.wipe(512)
        segment.close()
    assert path.with_name("a.segment.quarantined").read_bytes() == data


def test_a_process_that_dies_between_the_copies_of_a_head_loses_nothing(path):
    segment = HostSegment.open_file(path, CAPACITY)
    segment.epoch, identity = 5, segment.segment_id
    segment.close()
    before = path.read_bytes()
    segment = HostSegment.open_file(path, CAPACITY)
    segment.epoch = 6
    segment.close()
    after = path.read_bytes()
    for cut in range(SEGMENT_HEAD_BITS // 8):
        for base in COPIES_AT:
            torn = after[: base + cut] + before[base + cut :]
            path.write_bytes(torn)
            segment = HostSegment.open_file(path, CAPACITY)
            assert segment.epoch in (5, 6)
            assert segment.segment_id == identity
            segment.close()
    assert not list(path.parent.glob("*.quarantined"))


def test_every_flipped_bit_of_an_object_costs_that_object_alone(path):
    segment = HostSegment.open_file(path, CAPACITY)
    kept = {at: put(segment, at, f"key{at}", bytes(1000)) for at in (0, 8192)}
    length = layout.HEADER_BYTES + len("between")
    for bit in range(8 * length):
        put(segment, 4096, "between", b"value")
        segment.data[4096 + bit // 8] ^= 1 << bit % 8
        segment.close()
        segment = HostSegment.open_file(path, CAPACITY)
        assert dict(segment.scan()) == kept, bit
        assert segment.corruption.names == ["object at 4096 of segment a.segment"], bit
    segment.close()


def test_an_object_of_an_epoch_that_was_never_obeyed_is_not_believed(path):
    segment = HostSegment.open_file(path, CAPACITY)
    segment.epoch = 3
    good = put(segment, 0, "good", b"x", version=3 << layout.VERSION_BITS | 9)
    put(segment, 4096, "bad", b"x", version=4 << layout.VERSION_BITS)
    assert list(segment.scan()) == [(0, good)]
    assert segment.corruption.names == ["object at 4096 of segment a.segment"]
    segment.close()


def test_an_object_that_was_copied_to_another_place_is_not_believed(path):
    segment = HostSegment.open_file(path, CAPACITY)
    header = put(segment, 0, "key", b"x")
    segment.data[4096:4608] = segment.data[:512]
    segment._starts[8] = MARK
    assert list(segment.scan()) == [(0, header)]
    other = HostSegment.make_anonymous(CAPACITY)
    other.data[:512] = segment.data[:512]
    other._starts[0] = MARK
    assert list(other.scan()) == []
    segment.close()


def test_no_flipped_bit_of_a_mark_takes_or_makes_an_object(path):
    segment = HostSegment.open_file(path, CAPACITY)
    kept = {at: put(segment, at, f"key{at}", bytes(1000)) for at in (0, 4096)}
    for bit in range(8):
        segment._starts[8] ^= 1 << bit
        segment._starts[3] ^= 1 << bit
        segment.close()
        segment = HostSegment.open_file(path, CAPACITY)
        assert dict(segment.scan()) == kept, bit
        assert len(segment.corruption.names) == 2
        assert set(segment._starts.tolist()) == {0, MARK}
    segment.close()


# A disk.


async def damage_a_disk(change, *, is_sealed: bool) -> tuple[list[str], dict, MemoryDisk]:
    """Write objects, change a file of the disk while nobody has it; return damage and records."""
    disk = MemoryDisk(1)
    bench = Bench(disk)
    tier = await bench.start()
    for i in range(4):
        bench.put(f"k{i}", 5000)
    async with asyncio.timeout(60):
        while len(tier.index) < 4:
            await asyncio.sleep(0.01)
    await tier.forget(["k3"], [tier.index.find("k3").header.version])
    if is_sealed:
        await tier.writing._abandon_bucket()
    bench.stop()
    change(disk)
    tier = await bench.start()
    found = {record.header.key: record for record in tier.list_records()}
    for key in list(bench.at):
        bench.wipe(key)
    for key, record in found.items():
        assert key != "k3"
        try:
            await tier.load(record.header, 0)
        except (CorruptionError, NotFoundError):
            continue
        value = bench.values[key, record.header.version]
        at = layout.value_offset(len(key), len(value))
        assert bench.segment.data[at : at + len(value)].tobytes() == value
    bench.put("new", 5000)
    async with asyncio.timeout(60):
        while tier.index.find("new") is None:
            await asyncio.sleep(0.01)
    return tier.corruption.names, found, disk


def list_bits(num_bytes: int, step: int) -> range:
    return range(0, 8 * num_bytes, step)


def damage_with(change, *, is_sealed: bool) -> tuple[list[str], dict, MemoryDisk]:
    return run_virtual(lambda: damage_a_disk(change, is_sealed=is_sealed))


def flip_bucket(bit: int, *bases: int):
    return lambda disk: flip(disk.files[1].data, bit, *bases)


def flip_note(suffix: str, bit: int):
    def change(disk: MemoryDisk) -> None:
        (name,) = [name for name in disk.notes if name.endswith(suffix)]
        data = bytearray(disk.notes[name])
        flip(data, bit % (8 * len(data)), 0)
        disk.notes[name] = bytes(data)

    return change


@pytest.mark.parametrize("is_sealed", [False, True])
def test_flipped_bits_of_the_head_of_a_bucket(is_sealed):
    for bit in list_bits(headers.HEAD.size + 36 + 4, 13):
        names, found, _ = damage_with(flip_bucket(bit, 0), is_sealed=is_sealed)
        assert (names, len(found)) == (["head of bucket 1"], 3), bit
        names, found, disk = damage_with(flip_bucket(bit, *COPIES_AT), is_sealed=is_sealed)
        assert (names, found, list(disk.quarantined)) == (["bucket 1"], {}, [1]), bit


def test_flipped_bits_of_the_header_of_a_record():
    """Records behind it in a bucket without index are lost with it, and no wrong one is found."""
    for bit in list_bits(layout.HEADER_BYTES + 2, 13):
        names, found, _ = damage_with(flip_bucket(bit, HEAD_BYTES), is_sealed=False)
        assert (names, found) == (["record at 4096 of bucket 1"], {}), bit
        names, found, _ = damage_with(flip_bucket(bit, HEAD_BYTES), is_sealed=True)
        assert len(found) == 3  # The index has it; its own header is compared when it is read.
        assert names == ["record at 4096 of bucket 1"], bit


def test_flipped_bits_of_an_index_have_the_bucket_read():
    for bit in [*list_bits(headers.HEAD.size + 24, 29), *range(8 * HEAD_BYTES, 8 * 4400, 97)]:
        names, found, _ = damage_with(flip_note(".index", bit), is_sealed=True)
        assert len(found) == 3, bit
        assert names == ["index of bucket 1"], bit


def test_flipped_bits_of_the_list_of_removals():
    for bit in list_bits(40, 7):
        names, found, _ = damage_with(flip_note("removed", bit), is_sealed=True)
        assert (names, len(found)) == (["list of removals"], 3), bit


def test_a_bucket_that_was_never_begun_is_no_damage():
    names, found, disk = damage_with(
        lambda disk: disk.files[1].data.__setitem__(slice(HEAD_BYTES), bytes(HEAD_BYTES)),
        is_sealed=False,
    )
    assert (names, found, disk.quarantined) == ([], {}, {})


# The epoch.


def test_a_flipped_bit_in_the_note_of_the_epoch_is_never_an_epoch(tmp_path):
    path = tmp_path / "epoch"
    assert next_epoch(tmp_path, CorruptionLog()) == 1
    whole = path.read_bytes()
    for bit in range(0, 8 * (headers.HEAD.size + 12), 3):
        for copies, expected in ((COPIES_AT[:1], 2), (COPIES_AT, 1)):
            data = bytearray(whole)
            flip(data, bit, *copies)
            path.write_bytes(data)
            corruption = CorruptionLog()
            assert next_epoch(tmp_path, corruption) == expected, bit
            assert corruption.names == ["note of the epoch"], bit
    assert (tmp_path / "epoch.quarantined").exists()
    path.write_bytes(b"17\n")  # As it was before it had a checksum.
    assert next_epoch(tmp_path, CorruptionLog()) == 1


async def tell_of_one(epoch: int):
    """Be an inventory with one object, of a version that was not told of before."""
    records = ExtentRecords()
    header = headers.ExtentHeader("key", 1, epoch << layout.VERSION_BITS, 0, 1, False, 0)
    append_record(records, 0, header)
    yield records, True


async def join_with_epoch(epoch: int, *, on_disk: bool) -> tuple[int, str, list]:
    """Let a host that has seen an epoch join beside one that has not; return what became of it."""
    world = StoreWorld(1, StoreConfig(recovery_ms=100, deadline_ms=5000), Faults())
    world.start_master()
    world.start_host("good", 2**18)
    await asyncio.sleep(1)
    segment = world.segments["bad"] = world._watch(HostSegment.make_anonymous(2**18))
    if not on_disk:
        segment.epoch = epoch
    world.start_host("bad", 2**18)
    if on_disk:
        world.hosts["bad"][1]._list_inventory = lambda: tell_of_one(epoch)
    await asyncio.sleep(2)
    _, client = world.start_client("c")
    results = [await client.put(f"k{i}", b"value") for i in range(5)]
    results.append(await client.exists("nothing"))
    bad = [host.stage for host in world.master.state.hosts.values() if host.name == "bad"]
    return world.master.epoch, bad, results


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("bit", [17, 20, 22])
def test_an_epoch_beyond_belief_stays_with_its_host(bit, on_disk):
    """Also one that is told by the version of an object; nobody waits for that host."""
    epoch, bad, results = run_virtual(lambda: join_with_epoch(1 << bit, on_disk=on_disk))
    assert epoch < 10
    assert bad in ([], [HostStage.LOST])
    assert results == [PutResult.CREATED] * 5 + [False]


def test_an_epoch_that_starts_can_explain_is_outbid():
    epoch, bad, results = run_virtual(lambda: join_with_epoch(1000, on_disk=False))
    assert epoch == 1001
    assert bad == [HostStage.ACTIVE]
    assert results == [PutResult.CREATED] * 5 + [False]


def test_no_epoch_is_beyond_what_a_version_holds():
    segment = HostSegment.make_anonymous(2**16)
    segment.epoch = MAX_EPOCH
    for epoch in (-1, MAX_EPOCH + 1, 2**40):
        with pytest.raises(ValueError, match="epoch"):
            segment.epoch = epoch
    assert segment.epoch == MAX_EPOCH
    master = StoreMaster(StoreConfig(), clock=_Still(), epoch=MAX_EPOCH - 3, draw=lambda _: 0)
    master.state.versions.outbid(MAX_EPOCH - 1)
    assert master.epoch == MAX_EPOCH
    assert 0 < master.state.versions.take() < 2**63
    with pytest.raises(ConflictError):
        master.state.versions.outbid(MAX_EPOCH)
    low = StoreMaster(StoreConfig(), clock=_Still(), epoch=1, draw=lambda _: 0)
    low.state.versions.outbid(MAX_EPOCH_JUMP + 1)
    with pytest.raises(ConflictError, match="remove the files"):
        low.state.versions.outbid(low.epoch + MAX_EPOCH_JUMP + 1)


class _Still:
    def now_s(self) -> float:
        return 0.0


# Whole processes.


def list_corruptions(folder: Path) -> list[tuple[str, object]]:
    """Name a field of a header, and the function that flips a bit of it in the files of a host."""

    def in_file(name: str, bit: int, *bases: int):
        def change() -> bool:
            end = max(bases) + bit // 8
            # The newest bucket may hold no record yet.
            files = sorted(path for path in folder.glob(name) if path.stat().st_size > end)
            if not files:
                return False
            with files[-1].open("r+b") as file:
                for base in bases:
                    at = base + bit // 8
                    (byte,) = os.pread(file.fileno(), 1, at)
                    os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), at)
            return True

        return change

    def in_object(bit: int):
        def change() -> bool:
            (file,) = folder.glob("segments/*.segment")
            data = np.memmap(file, np.uint8, mode="r+")
            capacity = CONFIG.segment_bytes
            at = HEAD_BYTES + capacity // layout.GRANULE_BYTES
            marks = np.flatnonzero(data[HEAD_BYTES:at])
            if not len(marks):
                return False
            begin = -(-at // 4096) * 4096
            data[begin + int(marks[-1]) * layout.GRANULE_BYTES + bit // 8] ^= 1 << bit % 8
            return True

        return change

    found: list[tuple[str, object]] = []
    for byte in (0, 8, 12, 16, 20, 28, 44, 46, 49, 52):  # Each field of a segment's head.
        for bases in (COPIES_AT[:1], COPIES_AT[1:], COPIES_AT):
            found.append((f"segment head {byte}", in_file("segments/*.segment", 8 * byte, *bases)))
    for byte in (0, 4, 6, 7, 8, 16, 21, 24, 28, 32, 40, 50, 60, 64):  # Of an object.
        found.append((f"object {byte}", in_object(8 * byte + 1)))
    for byte in (0, 8, 12, 16, 20, 28, 36, 52):  # Of the head of a bucket.
        for bases in (COPIES_AT[:1], COPIES_AT):
            found.append((f"bucket {byte}", in_file("ssd/*.bucket", 8 * byte + 2, *bases)))
    for byte in (0, 8, 16, 30, 32):
        for bases in (COPIES_AT[:1], COPIES_AT):
            found.append((f"folder {byte}", in_file("ssd/folder", 8 * byte + 3, *bases)))
    found += [(f"record {byte}", in_file("ssd/*.bucket", 8 * byte, HEAD_BYTES)) for byte in (4, 60)]
    return found


CONFIG = StoreConfig(
    name="h1",
    segment_bytes=2**22,
    ssd_bytes=2**24,
    lease_ms=100,
    recovery_ms=0,
    deadline_ms=10_000,
    put_wait_ms=2000,
)


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_the_store_comes_back_whatever_bit_of_a_header_was_flipped(tmp_path, caplog, stride):
    """Each field of each header of the files of a host, while that host is down."""
    import msgspec

    corruption = list_corruptions(tmp_path)[::stride]

    tmp_path.chmod(0o700)
    runtime = make_runtime_dir()
    config = msgspec.structs.replace(
        CONFIG,
        master=f"ipc://{runtime}/m.sock",
        segment_dir=str(tmp_path / "segments"),
        ssd_dir=str(tmp_path / "ssd"),
    )
    rng = np.random.default_rng(0)
    values: dict[str, bytes] = {}
    removed: set[str] = set()

    async def check(client, turn: int) -> None:
        for key, value in list(values.items()):
            try:
                assert await client.get(key) == value
            except NotFoundError:
                del values[key]
        for key in removed:
            assert not await client.exists(key)
        for i, size in enumerate((0, 3000, 70_000, 20_000)):
            key = f"k{turn}-{i}"
            values[key] = rng.integers(0, 256, size, np.uint8).tobytes()
            assert await client.put(key, values[key]) is PutResult.CREATED
            assert await client.get(key) == values[key]
        values[f"k{turn}-1"] = b"newer"
        upsert = PutOptions(upsert=True)
        assert await client.put(f"k{turn}-1", b"newer", upsert) is PutResult.REPLACED
        assert await client.remove(f"k{turn}-3")
        del values[f"k{turn}-3"]
        removed.add(f"k{turn}-3")

    async def run() -> int:
        num_flipped = 0
        async with MasterService(config), ClientService(config) as service:
            client = service.client
            for turn, (name, change) in enumerate([("nothing", None), *corruption]):
                was_flipped = change is not None and change()
                num_flipped += was_flipped
                caplog.clear()
                async with HostService(config) as host, asyncio.timeout(60):
                    await host.host.is_joined.wait()
                    await check(client, turn)
                    status = (await client.status()).hosts[0]
                    if was_flipped:
                        assert status.damaged, name
                        assert all(repr(each) in caplog.text for each in status.damaged), name
                    else:
                        assert not status.damaged, (name, status.damaged)
                    while (await client.status()).hosts[0].disk.num_queued:
                        await asyncio.sleep(0.01)
        return num_flipped

    try:
        assert asyncio.run(run()) == len(corruption)
    finally:
        shutil.rmtree(runtime)

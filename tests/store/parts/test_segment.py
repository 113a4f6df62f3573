"""A segment file: what survives a crash, what is refused, what is found to be rotten.

Method: a segment is written, its process "dies" between any two stores into the file, and another
one attaches; bytes are flipped at random.
"""

import asyncio
import fcntl
import mmap
import os
import random
import re
import shutil
import struct
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

from tandem._native import measure_extents, populate_pages
from tandem.core.errors import (
    CapacityError,
    ConfigError,
    ConflictError,
    CorruptionError,
    UnsupportedError,
)
from tandem.rpc import make_runtime_dir
from tandem.store import ClientService, HostService, MasterService, PutResult, StoreConfig
from tandem.store.formats import headers, layout
from tandem.store.formats.checksum import checksum_table, make_table
from tandem.store.formats.headers import ExtentHeader
from tandem.store.formats.records import append_record
from tandem.store.host import segment_file as segment_module
from tandem.store.host.segment import HostSegment
from tandem.store.messages import ExtentRecords

CAPACITY = 2**20


@pytest.fixture
def path(tmp_path):
    folder = tmp_path / "segments"
    folder.mkdir(mode=0o700)
    return folder / "a.segment"


def put(
    segment: HostSegment, offset: int, key: str, value: bytes, version: int = 1
) -> ExtentHeader:
    """Do what client and host do together."""
    view = np.frombuffer(value, np.uint8)
    table = make_table([view])
    header = ExtentHeader(key, len(value), version, checksum_table(table), 2, True, 1234)
    key_bytes = len(key.encode())
    at = offset + layout.table_offset(key_bytes)
    segment.data[at : at + len(table)] = np.frombuffer(table, np.uint8)
    at = offset + layout.value_offset(key_bytes, len(value))
    segment.data[at : at + len(value)] = view
    segment.seal(offset, header)
    return header


def test_layout_agrees_with_itself():
    for key_bytes in (1, 63, 64, 65, 1000):
        for size in (0, 1, 65_536, 65_537, 10**7):
            extent = layout.extent_bytes(key_bytes, size)
            end = layout.value_offset(key_bytes, size) + size
            assert end <= extent < end + layout.GRANULE_BYTES
            assert extent % layout.GRANULE_BYTES == 0
            assert layout.table_bytes(size) >= 4 * layout.count_chunks(size)
    with pytest.raises(ConfigError):
        layout.extent_bytes(1, -1)


def test_native_geometry_is_that_of_layout():
    rng = random.Random(3)
    keys = ["k" * rng.choice((1, 63, 64, 65, 127, 1000)) for _ in range(500)]
    sizes = [rng.choice((0, 1, 511, 65_535, 65_536, 65_537, rng.randrange(10**9))) for _ in keys]
    expected = [layout.extent_bytes(len(key), size) for key, size in zip(keys, sizes, strict=True)]
    assert measure_extents(keys, sizes) == expected
    with pytest.raises(ConfigError):
        measure_extents(["k"], [2**40 + 1])


def test_objects_are_sealed_together_or_not_at_all():
    """Their values lie where readers look for them, and one that is wrong keeps the others out."""
    rng = random.Random(4)
    values = [rng.randbytes(size) for size in (0, 1, 65_536, 200_000)]
    records = ExtentRecords()
    at = 0
    for i, value in enumerate(values):
        checksum = checksum_table(make_table([np.frombuffer(value, np.uint8)]))
        header = ExtentHeader(f"key-{i}", len(value), i + 1, checksum, 1, False, 0)
        append_record(records, at, header)
        at += layout.extent_bytes(5, len(value))
    segment = HostSegment.make_anonymous(CAPACITY)
    blob = b"".join(values)
    for wrong in (blob[:-1] + bytes([blob[-1] ^ 1]), blob[:-1], blob + b"x"):
        with pytest.raises(CorruptionError):
            segment.seal_many(records, values=wrong)
    records.versions.pop()
    with pytest.raises(CorruptionError, match="different lengths"):
        segment.seal_many(records, values=blob)
    records.versions.append(4)
    assert not segment.list_offsets()
    assert not segment.data.any()
    segment.seal_many(records, values=blob)
    for (offset, header), value in zip(segment.scan(), values, strict=True):
        assert segment.is_intact(offset, header)
        begin = offset + layout.value_offset(5, header.size)
        assert segment.data[begin : begin + header.size].tobytes() == value
    with pytest.raises(ConflictError):
        segment.seal_many(records, values=blob)


def test_tables_do_not_depend_on_how_a_value_is_cut():
    rng = random.Random(0)
    value = np.random.default_rng(0).integers(0, 256, 400_000, dtype=np.uint8)
    whole = make_table([value])
    assert len(whole) == 4 * layout.count_chunks(len(value))
    for _ in range(20):
        cuts = sorted(rng.choices(range(len(value)), k=rng.randrange(6)))
        assert make_table(np.split(value, cuts)) == whole


def test_objects_survive_their_process(path):
    segment = HostSegment.open_file(path, CAPACITY)
    segment.epoch = 7
    first = put(segment, 0, "first", b"x" * 100_000)
    second = put(segment, 2**18, "zweites-ü", b"", version=9)
    identity = segment.segment_id
    segment.close()
    again = HostSegment.open_file(path, CAPACITY)
    assert again.segment_id == identity
    assert again.epoch == 7
    assert list(again.scan()) == [(0, first), (2**18, second)]
    assert again.is_intact(0, first)
    assert again.is_intact(2**18, second)
    again.wipe(0)
    assert list(again.scan()) == [(2**18, second)]
    again.close()


def test_a_segment_of_another_size_is_made_anew(path):
    segment = HostSegment.open_file(path, CAPACITY)
    put(segment, 0, "key", b"x")
    identity = segment.segment_id
    segment.close()
    other = HostSegment.open_file(path, 2 * CAPACITY)
    assert other.segment_id != identity
    assert list(other.scan()) == []
    other.close()


def test_a_later_format_is_refused_and_left_alone(path):
    HostSegment.open_file(path, CAPACITY).close()
    with pytest.MonkeyPatch.context() as later:
        later.setattr(headers, "FORMAT", headers.FORMAT + 1)
        data = headers.pack_head(segment_module.MAGIC, bytes(99)) + path.read_bytes()[4096:]
    path.write_bytes(data)
    with pytest.raises(UnsupportedError, match="format 3"):
        HostSegment.open_file(path, CAPACITY)
    assert path.read_bytes() == data


@pytest.mark.parametrize("kept", range(0, 80, 4))
def test_a_crash_while_a_header_is_written_leaves_no_object(path, kept):
    """The mark is the last store; until then the header may be there to any length."""
    segment = HostSegment.open_file(path, CAPACITY)
    put(segment, 0, "key", b"x" * 1000)
    written = segment.data[: layout.table_offset(3)].copy()
    segment.wipe(0)
    segment.data[:kept] = written[:kept]
    segment.close()
    again = HostSegment.open_file(path, CAPACITY)
    assert list(again.scan()) == []
    put(again, 0, "other", b"y" * 1000)  # And its place can be used.
    again.close()


def test_broken_headers_are_dropped_and_no_others(path):
    segment = HostSegment.open_file(path, CAPACITY)
    offsets = [i * 4096 for i in range(40)]
    headers = {at: put(segment, at, f"key-{at}", bytes(1000)) for at in offsets}
    rng = random.Random(1)
    broken = set(rng.sample(offsets, 15))
    for at in broken:
        segment.data[at + rng.randrange(40)] ^= 1 << rng.randrange(8)
    found = dict(segment.scan())
    assert set(found) == set(offsets) - broken
    assert all(found[at] == headers[at] for at in found)
    assert dict(segment.scan()) == found
    segment.close()


def test_flipped_values_and_tables_are_found(path):
    segment = HostSegment.open_file(path, CAPACITY)
    header = put(segment, 0, "key", bytes(range(256)) * 1000)
    begin, end = segment.span(header)
    table_end = begin + 4 * layout.count_chunks(header.size)
    rng = random.Random(2)
    value_at = layout.value_offset(3, header.size)
    for at in [*range(begin, table_end), *(rng.randrange(value_at, end) for _ in range(50))]:
        segment.data[at] ^= 0x10
        assert not segment.is_intact(0, header), at
        segment.data[at] ^= 0x10
    assert segment.is_intact(0, header)
    segment.close()


def test_wrong_orders_are_refused():
    segment = HostSegment.make_anonymous(CAPACITY)
    put(segment, 0, "key", bytes(5000))
    with pytest.raises(ConflictError, match="another object"):
        put(segment, 0, "other", b"")
    # An extent that begins before and reaches into it.
    segment2 = HostSegment.make_anonymous(CAPACITY)
    put(segment2, 2048, "key", b"x")
    with pytest.raises(ConflictError, match="another object"):
        put(segment2, 0, "long", bytes(5000))
    header = ExtentHeader("k", 10, 1, 0, 1, False, 0)
    for offset in (-512, 100, CAPACITY, 2**60):
        with pytest.raises(ConfigError):
            segment.seal(offset, header)
    for offset in (-512, 100, 2**60):
        with pytest.raises(ConfigError):
            segment.wipe(offset)
    with pytest.raises(CorruptionError):
        segment.read_header(2**19)
    segment.wipe(2**19)  # Nothing is there, and that is that.


def test_pins_are_kept_with_the_object(path):
    segment = HostSegment.open_file(path, CAPACITY)
    header = put(segment, 512, "key", b"value")
    segment.repin(512, hard=False, soft_pin_ms=99)
    segment.close()
    again = HostSegment.open_file(path, CAPACITY)
    expected = header._replace(hard_pin=False, soft_pin_ms=99)
    assert list(again.scan()) == [(512, expected)]
    assert again.is_intact(512, expected)
    again.close()


def test_a_large_segment_is_usable_at_once_and_grows_behind(path, monkeypatch):
    monkeypatch.setattr(segment_module, "FIRST_RESERVE_BYTES", 2**16)
    monkeypatch.setattr(segment_module, "RESERVE_STEP_BYTES", 2**18)
    segment = HostSegment.open_file(path, CAPACITY)
    assert segment.usable_bytes == 2**16
    with pytest.raises(ConfigError):
        segment.seal(2**17, ExtentHeader("k", 10, 1, 0, 1, False, 0))
    grown: list[int] = []
    segment.reserve_rest(grown.append)
    segment._reserving.join(60)
    assert grown[-1] == segment.usable_bytes == CAPACITY
    header = put(segment, CAPACITY - 8192, "key", bytes(5000))
    segment.close()
    again = HostSegment.open_file(path, CAPACITY)
    assert again.usable_bytes < CAPACITY or grown  # Whatever holds an object is usable.
    assert list(again.scan()) == [(CAPACITY - 8192, header)]
    assert again.is_intact(CAPACITY - 8192, header)
    again.close()


def test_pages_are_mapped_before_they_are_used(path):
    def mapped_bytes() -> int:
        is_ours, found = False, 0
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if "-" in line.split(" ", 1)[0]:
                is_ours = str(path) in line
            elif is_ours and line.startswith("Rss:"):
                found += int(line.split()[1]) * 1024
        return found

    capacity = 2**25
    segment = HostSegment.open_file(path, capacity)
    try:
        segment.data[:5] = 7
        if not populate_pages(segment.data[:1]):
            pytest.skip("the kernel cannot populate pages (Linux 5.14)")
        assert mapped_bytes() < capacity // 2
        segment.reserve_rest(lambda usable_bytes: None)
        segment._reserving.join(60)
        # The kernel may take single pages of a file back; without this, none would be there.
        assert mapped_bytes() >= capacity * 3 // 4
        assert segment.data[:6].tolist() == [7] * 5 + [0]
    finally:
        segment.close(remove=True)


def test_a_file_that_gives_way_is_never_shortened(path):
    """Clients of its last owner may still map it: what they touch must not go away under them."""
    segment = HostSegment.open_file(path, CAPACITY)
    put(segment, CAPACITY - 8192, "key", b"value")
    with path.open("rb") as file:
        old = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    inode = path.stat().st_ino
    segment.close()
    other = HostSegment.open_file(path, CAPACITY // 2)
    assert path.stat().st_ino != inode
    assert other.segment_id != segment.segment_id
    assert b"key" in old[-8192:]
    with pytest.raises(ConflictError):
        HostSegment.open_file(path, CAPACITY // 2)
    other.close()


def test_who_may_write_to_the_file_is_noticed(path):
    segment = HostSegment.open_file(path, CAPACITY)
    assert segment.has_no_writers()
    with path.open("rb") as file:
        lock = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
        assert not segment.has_no_writers()
    assert segment.has_no_writers()
    segment.close()
    assert HostSegment.make_anonymous(CAPACITY).has_no_writers()


@pytest.fixture
def huge_folder(tmp_path):
    """A folder on hugetlbfs, with 16 MiB of pages reserved for the test."""
    number = Path("/proc/sys/vm/nr_hugepages")
    if os.geteuid() != 0 or not number.exists():
        pytest.skip("hugetlbfs: needs root and a kernel that has it")
    before = int(number.read_text())
    try:
        number.write_text(str(before + 8))
    except OSError as error:
        pytest.skip(f"hugetlbfs: no pages can be reserved: {error}")
    free = re.search(r"HugePages_Free: *(\d+)", Path("/proc/meminfo").read_text())
    mount = tmp_path / "huge"
    mount.mkdir(mode=0o700)
    command = ["mount", "-t", "hugetlbfs", "-o", "mode=0700,size=16M", "none", str(mount)]
    try:
        if free is None or int(free[1]) < 8:
            pytest.skip("hugetlbfs: the memory is too scattered for 8 pages")
        if subprocess.run(command, capture_output=True, timeout=10, check=False).returncode:
            pytest.skip("hugetlbfs: cannot be mounted here")
        try:
            yield mount
        finally:
            # What is still mapped somewhere goes with its last user.
            subprocess.run(["umount", "-l", str(mount)], timeout=10, check=True)
    finally:
        number.write_text(str(before))


def test_a_segment_on_huge_pages_survives_and_is_reached_by_its_peers(huge_folder, tmp_path):
    with pytest.raises(CapacityError, match="free"):
        HostSegment.open_file(huge_folder / "large.segment", 2**25)
    tmp_path.chmod(0o700)
    config = StoreConfig(
        master=f"ipc://{tmp_path}/m.sock",
        segment_dir=str(huge_folder),
        segment_bytes=2**23,
        name="huge",
        recovery_ms=0,
        deadline_ms=10_000,
    )
    values = [bytes([i]) * 300_000 for i in range(1, 5)]
    keys = [f"key-{i}" for i in range(4)]

    async def live(is_first: bool) -> None:
        async with MasterService(config), HostService(config) as host:
            await host.host.is_joined.wait()
            async with ClientService(config) as service:
                if is_first:
                    await service.client.put_many(keys, values)
                assert await service.client.get_many(keys) == values

    for is_first in (True, False):
        asyncio.run(asyncio.wait_for(live(is_first), 60))


@pytest.mark.asyncio
@pytest.mark.parametrize("does_grow", [True, False])
async def test_a_put_waits_for_the_segment_that_will_hold_it(tmp_path, monkeypatch, does_grow):
    """A host serves before all of its memory is reserved: what it will hold is not refused."""
    monkeypatch.setattr(segment_module, "FIRST_RESERVE_BYTES", 2**16)
    may_grow = threading.Event()
    reserve = segment_module._reserve

    def reserve_later(path, descriptor, begin, length):
        if begin > 0:  # Behind what is taken at once.
            assert may_grow.wait(60)
            if not does_grow:
                raise CapacityError("test.reserve", "others have filled the file system")
        reserve(path, descriptor, begin, length)

    monkeypatch.setattr(segment_module, "_reserve", reserve_later)
    folder = make_runtime_dir()
    config = StoreConfig(
        master=f"ipc://{folder}/m.sock",
        segment_dir=str(tmp_path / "segments"),
        segment_bytes=2**22,
        recovery_ms=0,
    )
    try:
        async with MasterService(config), HostService(config) as host:
            await asyncio.wait_for(host.host.is_joined.wait(), 60)
            async with ClientService(config) as service:
                with pytest.raises(CapacityError):
                    await service.client.put("never", bytes(2**23))
                putting = asyncio.ensure_future(service.client.put("later", bytes(2**20)))
                await asyncio.wait([putting], timeout=0.3)
                assert not putting.done()
                may_grow.set()
                if does_grow:
                    assert await asyncio.wait_for(putting, 60) is PutResult.CREATED
                else:
                    with pytest.raises(CapacityError):
                        await asyncio.wait_for(putting, config.put_wait_ms / 1e3 - 1)
    finally:
        may_grow.set()
        shutil.rmtree(folder)

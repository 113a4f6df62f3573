"""Device memory through host buffers: right bytes, bounded memory, overlap, clean errors."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
from staged_path import DeviceServer, RemoteDevice, StagedPath

from tandem.core.errors import (
    ConfigError,
    ConflictError,
    DeadlineError,
    InternalError,
    NotFoundError,
    PermissionDeniedError,
    TandemError,
)
from tandem.transfer import Op

MIB = 1 << 20


class FakeDevice:
    """Memory that only copies reach; each takes ``delay_s`` and is told to ``on_copy``."""

    def __init__(self, length: int, delay_s: float = 0.0) -> None:
        self.bytes = np.zeros(length, np.uint8)
        self.delay_s = delay_s
        self.fails_at: int | None = None
        self.num_copies = 0
        self.on_copy: Callable[[], None] = lambda: None

    @property
    def length(self) -> int:
        return len(self.bytes)

    def _begin(self, offset: int, size: int) -> None:
        assert offset >= 0
        assert offset + size <= self.length
        if self.fails_at is not None and offset <= self.fails_at < offset + size:
            raise RuntimeError("the device fell off the bus")
        self.num_copies += 1
        self.on_copy()
        if self.delay_s:
            threading.Event().wait(self.delay_s)

    def read(self, offset, target) -> None:
        self._begin(offset, len(target))
        target[:] = self.bytes[offset : offset + len(target)]

    def write(self, offset, source) -> None:
        self._begin(offset, len(source))
        self.bytes[offset : offset + len(source)] = source


@pytest.fixture
def pair(world):
    giver, taker = world.engine(), world.engine(transports=("tcp",))
    remote = giver.allocate(4 * MIB)
    return taker, taker.open(giver.address), remote


@pytest.mark.parametrize("length", [0, 1, 65536, 65537, 3 * 65536, MIB + 12345])
@pytest.mark.parametrize("num_chunks", [1, 2, 4])
def test_bytes_come_through_both_ways(world, pair, length, num_chunks):
    taker, segment, remote = pair
    device = FakeDevice(2 * MIB)
    device.bytes[:] = world.random(2 * MIB)
    before = device.bytes.copy()
    with StagedPath(taker, chunk_bytes=65536, num_chunks=num_chunks) as path:
        path.move(Op.WRITE, device, 777, segment, remote.offset + 99, length)
        assert np.array_equal(remote.array[99 : 99 + length], before[777 : 777 + length])
        assert not remote.array[:99].any()
        assert not remote.array[99 + length :].any()
        assert np.array_equal(device.bytes, before)
        device.bytes[:] = 5
        path.move(Op.READ, device, 777, segment, remote.offset + 99, length)
        assert np.array_equal(device.bytes[777 : 777 + length], before[777 : 777 + length])
        assert (device.bytes[:777] == 5).all()
        assert (device.bytes[777 + length :] == 5).all()


@pytest.mark.parametrize("op", [Op.WRITE, Op.READ])
def test_device_and_wire_overlap(world, op):
    """With several chunks the copies of the device hide behind the wire, which is slowed here."""
    from transfer_faults import FaultProxy

    with FaultProxy() as proxy:
        giver = world.engine(advertise=(proxy.address,))
        proxy.target = giver.address
        taker = world.engine(transports=("tcp",), stall_ms=5000)
        remote = giver.allocate(MIB)
        segment = taker.open(giver.address)
        device = FakeDevice(MIB)

        def count_overlaps(num_chunks: int) -> int:
            """Move 16 chunks; returns the copies that began while the wire was at work."""
            with StagedPath(taker, chunk_bytes=65536, num_chunks=num_chunks) as path:
                path.move(op, device, 0, segment, remote.offset, 65536)
                running: list[int] = []
                device.on_copy = lambda: running.append(taker.core.batch_counters.num_running)
                proxy.delay_s = 0.01  # There and back: 20 ms a chunk.
                path.move(op, device, 0, segment, remote.offset, MIB)
                proxy.delay_s = 0
                assert len(running) == 16
                return sum(num > 0 for num in running)

        assert count_overlaps(1) == 0
        assert count_overlaps(4) >= 8
        for engine in (taker, giver):
            engine.close(deadline_s=5)


@pytest.mark.parametrize("op", [Op.WRITE, Op.READ])
def test_errors_leave_nothing_running(world, pair, op):
    taker, segment, remote = pair
    device = FakeDevice(2 * MIB)
    with StagedPath(taker, chunk_bytes=65536) as path:
        device.fails_at = MIB // 2
        with pytest.raises(RuntimeError, match="fell off"):
            path.move(op, device, 0, segment, remote.offset, MIB)
        device.fails_at = None
        seen, there = device.bytes.copy(), remote.array.copy()
        with pytest.raises(TandemError):
            path.move(op, device, 0, segment, remote.offset + 4 * MIB - 65536, MIB)
        with pytest.raises(ConfigError):
            path.move(op, device, 2 * MIB - 1, segment, remote.offset, 2)
        with pytest.raises(ConfigError):
            path.move(op, device, -1, segment, remote.offset, 2)
        with pytest.raises(DeadlineError):
            path.move(op, device, 0, segment, remote.offset, MIB, deadline_s=0)
        if op == Op.READ:
            assert np.array_equal(remote.array, there)
        else:
            assert np.array_equal(device.bytes, seen)
        path.move(op, device, 0, segment, remote.offset, MIB)  # It still works.
    with pytest.raises(ConflictError):
        path.move(op, device, 0, segment, remote.offset, 1)
    path.close()
    with pytest.raises(ConfigError):
        StagedPath(taker, chunk_bytes=0)


def test_staged_through_a_file_and_a_closed_segment(world, tmp_path):
    engine = world.engine()
    device = FakeDevice(MIB)
    device.bytes[:] = world.random(MIB)
    file = engine.open_file(tmp_path / "f", length=MIB, writable=True)
    with StagedPath(engine, chunk_bytes=100_000) as path:
        path.move(Op.WRITE, device, 0, file, 0, MIB)
        assert np.array_equal(np.fromfile(tmp_path / "f", np.uint8), device.bytes)
        file.close()
        with pytest.raises(NotFoundError):
            path.move(Op.READ, device, 0, file, 0, MIB)


def open_far(world, device, **how):
    giver, taker = world.engine(), world.engine(transports=("tcp",))
    giver.serve_calls(DeviceServer(device, **how))
    return taker, taker.open(giver.address)


@pytest.mark.parametrize("length", [0, 1, 5000, MIB, 3 * MIB + 12345])
def test_a_far_device_is_read_and_written(world, length):
    device = FakeDevice(4 * MIB)
    device.bytes[:] = world.random(4 * MIB)
    before = device.bytes.copy()
    taker, segment = open_far(world, device)
    with RemoteDevice(taker, segment, 4 * MIB) as far:
        target = np.zeros(length, np.uint8)
        far.read(777, target)
        assert np.array_equal(target, before[777 : 777 + length])
        source = world.random(length)
        far.write(777, source)
    assert np.array_equal(device.bytes[777 : 777 + length], source)
    assert np.array_equal(device.bytes[:777], before[:777])
    assert np.array_equal(device.bytes[777 + length :], before[777 + length :])


def test_two_devices_that_share_no_transport(world):
    """Ours, host buffers, the wire, host buffers, theirs; and into a third process's memory."""
    near, device = FakeDevice(2 * MIB), FakeDevice(2 * MIB)
    device.bytes[:] = world.random(2 * MIB)
    taker, segment = open_far(world, device)
    third = world.engine()
    place = third.allocate(2 * MIB)
    with (
        RemoteDevice(taker, segment, 2 * MIB, chunk_bytes=100_000) as far,
        StagedPath(taker, chunk_bytes=300_000, num_chunks=2) as path,
    ):
        there = taker.open(third.address)
        path.move(Op.WRITE, far, 0, there, place.offset, 2 * MIB)
        path.move(Op.READ, near, 0, there, place.offset, 2 * MIB)
    assert np.array_equal(near.bytes, device.bytes)


def test_what_a_far_device_refuses(world):
    device = FakeDevice(MIB)
    device.fails_at = 500_000
    taker, segment = open_far(world, device, is_writable=False)
    with RemoteDevice(taker, segment, 2 * MIB, chunk_bytes=65_536) as far:
        with pytest.raises(ConfigError, match="1048576"):
            far.read(MIB - 10, np.zeros(11, np.uint8))
        with pytest.raises(PermissionDeniedError):
            far.write(0, np.zeros(10, np.uint8))
        target = np.zeros(MIB, np.uint8)
        with pytest.raises(InternalError, match="fell off the bus"):
            far.read(0, target)
        seen = target.copy()
        far.read(0, np.zeros(10, np.uint8))
        assert np.array_equal(target, seen)
    with pytest.raises(ConfigError):
        taker.call(segment, b"tndstage")
    with pytest.raises(ConfigError):
        RemoteDevice(taker, segment, MIB, chunk_bytes=MIB + 1)


def test_chunks_of_a_far_device_overlap(world):
    """While one chunk is copied on the far side the next ones are there already, and no more."""
    device = FakeDevice(MIB, delay_s=0.01)
    server, waiting = DeviceServer(device), []

    def handler(calls):
        waiting.append(len(calls))
        return server(calls)

    giver, taker = world.engine(), world.engine(transports=("tcp",))
    giver.serve_calls(handler)
    segment = taker.open(giver.address)
    with RemoteDevice(taker, segment, MIB, chunk_bytes=MIB // 16, num_chunks=4) as far:
        far.read(0, np.zeros(MIB, np.uint8))
    assert device.num_copies == 16
    assert 1 < max(waiting) <= 4

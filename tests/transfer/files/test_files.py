"""Files as segments: right bytes through io_uring and threads, buffered and direct; typed errors.

Canaries stand around each range. What the kernel of this machine refuses is skipped by name.
"""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from tests_transfer_world import move
from transfer_faults import inject_faults

from tandem.core.errors import (
    CancelledError,
    ConfigError,
    ConflictError,
    DeadlineError,
    NotFoundError,
    PermissionDeniedError,
    UnsupportedError,
)
from tandem.transfer import Op, Transfer

MIB = 1 << 20
PAGE = 4096


@pytest.fixture(params=["io_uring", "threads"])
def engine(request, world):
    from tandem._native import probe_io_uring

    if request.param == "io_uring" and not probe_io_uring().is_available:
        pytest.skip(f"io_uring: {probe_io_uring().detail}")
    return world.engine(file_backend=request.param)


def aligned(nbytes: int) -> np.ndarray:
    raw = np.zeros(nbytes + PAGE, np.uint8)
    begin = -raw.ctypes.data % PAGE
    return raw[begin : begin + nbytes]


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(
    ("offset", "local_offset", "length"),
    [
        (0, 0, 3 * MIB),
        (PAGE, PAGE, 5 * PAGE),
        (1, 1, 2 * MIB + 77),  # Head and tail inside pages, the same distance on both sides.
        (5, 0, MIB),  # Never alignable.
        (PAGE, 0, 100),
        (3 * MIB - 1, 9, 1),
    ],
)
def test_bytes_come_back(engine, world, tmp_path, direct, offset, local_offset, length):
    with engine.open_file(tmp_path / "f", length=3 * MIB, writable=True, direct=direct) as file:
        data = aligned(4 * MIB)
        data[:] = world.random(4 * MIB)
        sent = data[local_offset : local_offset + length].copy()
        local = engine.register(data)
        move(engine, file, Op.WRITE, local, offset, length, local_offset=local_offset)
        file.sync()
        on_disk = np.fromfile(tmp_path / "f", np.uint8)
        assert np.array_equal(on_disk[offset : offset + length], sent)
        assert not on_disk[:offset].any()
        assert not on_disk[offset + length :].any()
        data[:] = 0
        move(engine, file, Op.READ, local, offset, length, local_offset=local_offset)
        assert np.array_equal(data[local_offset : local_offset + length], sent)
        assert not data[:local_offset].any()
        assert not data[local_offset + length :].any()
        if direct and not file.is_direct:
            assert "direct" in file.refusals


@pytest.mark.parametrize("kept", [(0, 0), (0, 1), (1, 2), (0, 3)])
def test_bytes_come_back_whatever_the_page_cache_has(engine, world, tmp_path, kept):
    """Parts that it has go straight to their place, the others through blocks of the engine."""
    with engine.open_file(tmp_path / "f", length=3 * MIB, writable=True) as file:
        sent = world.random(3 * MIB)
        local = engine.register(data := np.array(sent, np.uint8))
        move(engine, file, Op.WRITE, local, 0, 3 * MIB)
        file.sync()
        with (tmp_path / "f").open("rb") as plain:
            os.posix_fadvise(plain.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            begin, end = (part * MIB // 2 for part in kept)
            plain.seek(begin)
            assert len(plain.read(end - begin)) == end - begin
        data[:] = 0
        move(engine, file, Op.READ, local, 0, 3 * MIB)
        assert np.array_equal(data, sent)


def test_direct_is_told(world, tmp_path):
    engine = world.engine()
    file = engine.open_file(tmp_path / "f", length=MIB, writable=True, direct=True)
    if not file.is_direct:
        pytest.skip(f"O_DIRECT: {file.refusals['direct']}")
    assert file.length == MIB
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600
    # Reserved, not a hole.
    assert (tmp_path / "f").stat().st_blocks * 512 >= MIB


def test_many_transfers_of_one_batch(engine, world, tmp_path):
    file = engine.open_file(tmp_path / "f", length=8 * MIB, writable=True)
    data = world.random(8 * MIB)
    local = engine.register(data)
    places = np.random.default_rng(3).permutation(128) * 65536
    parts = [Transfer(Op.WRITE, local, file, int(at), 65536, local_offset=int(at)) for at in places]
    batch = engine.submit(parts)
    batch.wait(60)
    assert all(batch.status(i).is_done for i in range(len(parts)))
    assert np.array_equal(np.fromfile(tmp_path / "f", np.uint8), data)


def test_what_is_refused(engine, tmp_path):
    (tmp_path / "f").write_bytes(b"x" * 100)
    (tmp_path / "empty").write_bytes(b"")
    local = engine.register(bytearray(200))
    with pytest.raises(NotFoundError):
        engine.open_file(tmp_path / "none")
    with pytest.raises(ConfigError, match="regular"):
        engine.open_file(tmp_path)
    with pytest.raises(ConfigError):
        engine.open_file(tmp_path / "empty")
    with pytest.raises(ConflictError, match="100"):
        engine.open_file(tmp_path / "f", length=101, writable=True)
    with pytest.raises(ConfigError, match="writable"):
        engine.open_file(tmp_path / "new", length=101)
    with pytest.raises(ConfigError):
        engine.open_file(tmp_path / "new", length=-1, writable=True)
    file = engine.open_file(tmp_path / "f")
    with pytest.raises(PermissionDeniedError):
        move(engine, file, Op.WRITE, local, 0, 1)
    with pytest.raises(ConfigError, match="100"):
        move(engine, file, Op.READ, local, 1, 100)
    with pytest.raises(UnsupportedError):
        move(engine, file, Op.READ, local, 0, 1, transport="tcp")
    with pytest.raises(UnsupportedError):
        move(engine, engine.local_segment, Op.READ, local, local.offset, 1, transport="file")
    assert file.buffers["file"].length == 100
    assert not file.buffers["file"].can_write
    file.close()
    with pytest.raises(NotFoundError):
        move(engine, file, Op.READ, local, 0, 1)
    with pytest.raises(NotFoundError):
        file.close()


def test_truncated_file_is_an_error_not_a_hang(engine, tmp_path):
    path = tmp_path / "f"
    path.write_bytes(bytes(4 * MIB))
    file = engine.open_file(path)
    os.truncate(path, MIB)
    local = engine.register(bytearray(4 * MIB))
    with pytest.raises(RuntimeError, match="shorter"):
        move(engine, file, Op.READ, local, 0, 4 * MIB)
    move(engine, file, Op.READ, local, 0, MIB)  # The rest still works.


def test_no_byte_comes_after_a_cancel(engine, world, tmp_path):
    size = 32 * MIB
    file = engine.open_file(tmp_path / "f", length=size, writable=True)
    local = engine.register(world.random(size))
    move(engine, file, Op.WRITE, local, 0, size)
    for round_ in range(6):
        target = np.zeros(size, np.uint8)
        buffer = engine.register(target)
        batch = engine.submit([Transfer(Op.READ, buffer, file, 0, size)])
        if round_ % 2:
            threading.Event().wait(0.002)
        batch.cancel()
        seen = target.copy()
        try:
            batch.wait()
        except CancelledError:
            pass
        else:
            assert batch.status(0).is_done
        engine.unregister(buffer)
        assert np.array_equal(target, seen)


def test_closing_a_file_ends_its_batches(engine, tmp_path):
    file = engine.open_file(tmp_path / "f", length=64 * MIB, writable=True)
    local = engine.register(np.zeros(64 * MIB, np.uint8))
    batches = [engine.submit([Transfer(Op.WRITE, local, file, 0, 64 * MIB)]) for _ in range(4)]
    file.close()
    for batch in batches:
        assert batch.is_finished
    with pytest.raises(CancelledError):
        for batch in batches:
            batch.wait()
    engine.unregister(local)


def test_backend_is_told(world, tmp_path):
    engine = world.engine(file_backend="threads")
    assert engine.core.file_backend == ("", "")
    engine.open_file(tmp_path / "f", length=10, writable=True)
    assert engine.core.file_backend == ("threads", "")


def test_a_disk_that_hangs_holds_up_no_batch(engine, world, tmp_path):
    """A batch ends by its deadline, its memory is free then, and no late byte follows."""
    file = engine.open_file(tmp_path / "f", length=4 * MIB, writable=True)
    first, second = world.random(4 * MIB), world.random(4 * MIB)
    ours = engine.register(first)
    move(engine, file, Op.WRITE, ours, 0, 4 * MIB)
    target = np.zeros(4 * MIB, np.uint8)
    buffer = engine.register(target)
    with inject_faults(engine, "file", delay=1.0, delay_s=3.0):
        with pytest.raises(DeadlineError):
            move(engine, file, Op.READ, buffer, 0, 4 * MIB, deadline_s=0.1)
        engine.unregister(buffer)
        assert not target.any(), "the disk has answered, for which nobody waits"
        seen = target.copy()
        stale = engine.submit([Transfer(Op.WRITE, ours, file, 0, 4 * MIB)], deadline_s=0.1)
        with pytest.raises(DeadlineError):
            stale.wait()
    # What was left behind may still reach the file: this one waits for it, and comes after.
    move(engine, file, Op.WRITE, engine.register(second), 0, 4 * MIB)
    assert np.array_equal(np.fromfile(tmp_path / "f", np.uint8), second)
    assert np.array_equal(target, seen)


HUNG = """
import gc, sys
sys.path.insert(0, sys.argv[3])
from tandem.core.errors import DeadlineError
from tandem.transfer import Op, Transfer, TransferConfig, TransferEngine
from transfer_faults import inject_faults
engine = TransferEngine(TransferConfig(file_backend=sys.argv[2]))
file = engine.open_file(sys.argv[1], length=1 << 20, writable=True)
local = engine.register(bytearray(1 << 20))
with inject_faults(engine, "file", delay=1.0, delay_s=120.0):
    try:
        engine.submit([Transfer(Op.READ, local, file, 0, 1 << 20)], deadline_s=0.1).wait()
    except DeadlineError:
        print("late", flush=True)
engine.close()
del engine, file, local
gc.collect()
print("closed", flush=True)
"""


@pytest.mark.parametrize("backend", ["auto", "threads"])
def test_a_disk_that_hangs_keeps_no_process(tmp_path, backend):
    """The engine closes and its process ends before the disk has answered."""
    done = subprocess.run(
        [sys.executable, "-c", HUNG, str(tmp_path / "f"), backend, str(Path(__file__).parents[1])],
        capture_output=True,
        text=True,
        timeout=60,  # Less than the disk takes.
        check=True,
    )
    assert done.stdout.split() == ["late", "closed"]

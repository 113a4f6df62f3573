"""Buffers that are pieces of a file: peers of our user on this host map it too.

Goal: right bytes, whatever the file; no copy after a buffer was taken back; and who owns the file
next can find out whether anybody still writes to it. Method: files on tmpfs, engines here and in
processes that are stopped, killed and forked, grants written by hand.
"""

import contextlib
import fcntl
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from raw_wire import (
    BYE,
    CONTROL,
    DESCRIBE,
    DESCRIPTION,
    GRANT,
    GRANTED,
    PING,
    PONG,
    RawPeer,
    frame,
    text,
)
from tests_transfer_world import SECRET, Op, move

from tandem.core.errors import (
    ConfigError,
    DeadlineError,
    NotFoundError,
    PermissionDeniedError,
    UnsupportedError,
)

MIB = 2**20
PAGE = mmap.PAGESIZE
TIMEOUT_S = 60.0


class TmpfsFile:
    """A file without a name, 0600, mapped in full."""

    def __init__(self, size: int) -> None:
        self.fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        os.ftruncate(self.fd, size)
        self.array = np.frombuffer(mmap.mmap(self.fd, size), np.uint8)

    def has_writers(self) -> bool:
        """Whether any process holds the lock of those that may write."""
        try:
            self._lock(fcntl.F_WRLCK)
        except (BlockingIOError, PermissionError):
            return True
        self._lock(fcntl.F_UNLCK)
        return False

    def _lock(self, kind: int) -> None:
        request = struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, request)

    def count_mappings(self) -> int:
        """Return how often this process maps it."""
        inode = str(os.fstat(self.fd).st_ino)
        with open("/proc/self/maps") as maps:
            return sum(line.split()[4] == inode for line in maps)

    def wait_writers(self, expected: bool) -> None:
        end_s = time.monotonic() + TIMEOUT_S
        while self.has_writers() != expected:
            assert time.monotonic() < end_s, f"writers: {not expected}"
            time.sleep(0.005)


@pytest.fixture
def file() -> Iterator[TmpfsFile]:
    file = TmpfsFile(4 * MIB)
    yield file
    os.close(file.fd)


def register(giver, file, begin=0, end=None, **how):
    return giver.register(file.array[begin:end], file=file.fd, file_offset=begin, **how)


@pytest.mark.parametrize(("begin", "nbytes"), [(0, 4 * MIB), (PAGE, 1), (12_345, 3 * MIB + 77)])
def test_bytes_arrive_both_ways_through_a_mapping(world, file, begin, nbytes):
    giver, taker = world.engine(), world.engine()
    end = min(begin + nbytes + 200, len(file.array))
    remote = register(giver, file, begin, end, name="file")
    segment = taker.open(giver.address)
    assert segment.buffer("file").is_shared
    length = end - begin
    data = world.random(length)
    move(taker, segment, Op.WRITE, taker.register(data), remote.offset, length, transport="shm")
    assert np.array_equal(file.array[begin:end], data)
    assert not file.array[:begin].any()
    assert not file.array[end:].any()
    back = np.zeros(length, np.uint8)
    move(taker, segment, Op.READ, taker.register(back), remote.offset, length, transport="shm")
    assert np.array_equal(back, data)
    for wrong in ((remote.offset + length - 1, 2), (remote.offset - 1, 1)):
        with pytest.raises((ConfigError, NotFoundError, UnsupportedError)):
            move(taker, segment, Op.READ, taker.register(bytearray(2)), *wrong, transport="shm")


def test_a_wrong_claim_about_the_file_is_refused(world, file):
    giver = world.engine()
    other = TmpfsFile(MIB)
    private = mmap.mmap(file.fd, MIB, flags=mmap.MAP_PRIVATE)
    wrong = [
        (np.zeros(PAGE, np.uint8), file.fd, 0),
        (np.frombuffer(private, np.uint8), file.fd, 0),
        (file.array[PAGE:], file.fd, 0),
        (file.array, file.fd, PAGE),
        (other.array, file.fd, 0),
        (file.array, other.fd, 0),
        (file.array, 1 << 20, 0),
        (file.array, file.fd, -1),
    ]
    for array, fd, offset in wrong:
        with pytest.raises(ConfigError):
            giver.register(array, file=fd, file_offset=offset)
    os.fchmod(file.fd, 0o606)
    with pytest.raises(PermissionDeniedError):
        register(giver, file)
    os.close(other.fd)


def test_a_file_is_mapped_once_however_many_buffers_it_has(world, file):
    giver, taker = world.engine(), world.engine()
    reader = register(giver, file, remote="read")
    writers = [register(giver, file, remote="write") for _ in range(10)]
    local = taker.register(np.arange(100, dtype=np.uint8))
    own = file.count_mappings()
    with taker.open(giver.address) as segment:
        move(taker, segment, Op.READ, local, reader.offset, 100, transport="shm")
        assert file.count_mappings() == own + 1
        assert not file.has_writers()  # Who only reads is in nobody's way.
        for writer in writers:
            move(taker, segment, Op.WRITE, local, writer.offset, 100, transport="shm")
        assert file.count_mappings() == own + 2  # One to read, one to write.
        with pytest.raises((PermissionDeniedError, UnsupportedError)):
            move(taker, segment, Op.WRITE, local, reader.offset, 100, transport="shm")
        again = register(giver, file, remote="read")
        move(taker, segment, Op.READ, local, again.offset, 100, transport="shm")
        assert file.count_mappings() == own + 2
        for writer in writers:
            assert file.has_writers()
            giver.unregister(writer, deadline_s=60)
        for buffer in (reader, again):
            giver.unregister(buffer, deadline_s=60)
        file.wait_writers(False)
        assert file.count_mappings() == own


def test_nothing_arrives_after_a_buffer_was_taken_back(world, file):
    """Writers by several registrations of one file; one is taken back, the others go on."""
    giver = world.engine()
    takers = [world.engine(transports=("shm",)) for _ in range(2)]
    for _ in range(3):
        buffers = [register(giver, file, i * MIB, (i + 1) * MIB) for i in range(2)]
        ends: list[Exception] = []
        written = [threading.Semaphore(0) for _ in takers]
        stop = threading.Event()

        def hammer(i, buffers=buffers, ends=ends, written=written, stop=stop):
            local = takers[i].register(np.full(MIB, 7, np.uint8))
            with takers[i].open(giver.address) as segment:
                try:
                    while not stop.is_set():
                        move(takers[i], segment, Op.WRITE, local, buffers[i].offset, MIB)
                        written[i].release()
                except Exception as error:
                    ends.append(error)

        threads = [threading.Thread(target=hammer, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for counter in written:
            assert counter.acquire(timeout=TIMEOUT_S)
        giver.unregister(buffers[0], deadline_s=60)
        file.array[:MIB] = 0
        for _ in range(5):
            assert written[1].acquire(timeout=TIMEOUT_S)
        for thread in threads:
            thread.join(TIMEOUT_S)
            stop.set()
            assert not thread.is_alive()
        assert not file.array[:MIB].any()
        assert [type(end) for end in ends] in ([NotFoundError], [UnsupportedError])
        giver.unregister(buffers[1], deadline_s=60)


def test_holes_are_left_alone_and_a_cut_file_kills_nobody(world):
    """Only what is asked for is touched; where there is nothing to touch the copy is an error."""
    file = TmpfsFile(64 * MIB)
    giver, taker = world.engine(), world.engine(transports=("shm",))
    remote = register(giver, file)
    segment = taker.open(giver.address)
    local = taker.register(bytearray(MIB))
    for i in range(4):
        move(taker, segment, Op.READ, local, remote.offset + i * 16 * MIB + 5, 100)
    assert os.fstat(file.fd).st_blocks * 512 <= 4 * 128 * 1024
    os.ftruncate(file.fd, 40 * MIB)
    move(taker, segment, Op.WRITE, local, remote.offset + 20 * MIB, MIB)
    with pytest.raises(UnsupportedError):
        move(taker, segment, Op.READ, local, remote.offset + 50 * MIB, MIB)
    with pytest.raises(UnsupportedError):
        move(taker, segment, Op.WRITE, local, remote.offset + 40 * MIB - 100, 200)
    os.close(file.fd)


# Another process that writes, and is stopped, killed or forked.

WRITER = """
import os, sys, threading
import numpy as np
from tandem.transfer import Op, Transfer, TransferConfig, TransferEngine
secret, address, offset, nbytes, how = sys.argv[1:]
taker = TransferEngine(TransferConfig(secret=secret, transports=("shm",)))
local = taker.register(np.full(int(nbytes), 7, np.uint8))
segment = taker.open(address)
transfer = Transfer(Op.WRITE, local, segment, int(offset), int(nbytes))
taker.submit([transfer]).wait(60)
if how == "fork" and os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print("written", flush=True)
if how == "fork":
    os._exit(0)
try:
    while True:
        taker.submit([transfer]).wait(60)
except Exception as error:
    print(type(error).__name__, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def writer(giver, buffer, nbytes, how="") -> Iterator[subprocess.Popen[str]]:
    what = (SECRET, giver.address, str(buffer.offset), str(nbytes), how)
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", WRITER, *what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "written\n"
        yield process
    finally:
        process.kill()
        process.wait(TIMEOUT_S)
        process.stdin.close()
        process.stdout.close()


def stop(process: subprocess.Popen[str]) -> None:
    """Send SIGSTOP and wait until every thread has stopped."""
    process.send_signal(signal.SIGSTOP)
    end_s = time.monotonic() + TIMEOUT_S
    folder = Path(f"/proc/{process.pid}/task")
    while any(
        (task / "stat").read_text().rsplit(")", 1)[1].split()[0] != "T" for task in folder.iterdir()
    ):
        assert time.monotonic() < end_s
        time.sleep(0.001)


def test_a_stopped_writer_keeps_the_buffer_until_it_wakes(world, file):
    giver = world.engine()
    buffer = register(giver, file, remote="write")
    with writer(giver, buffer, 4 * MIB) as process:
        stop(process)
        with pytest.raises(DeadlineError):
            giver.unregister(buffer, deadline_s=0.3)
        assert file.has_writers()
        process.send_signal(signal.SIGCONT)
        giver.unregister(buffer, deadline_s=TIMEOUT_S)
        file.array[:] = 0
        assert process.stdout.readline() in ("NotFoundError\n", "UnsupportedError\n")
        assert not file.array.any()
        file.wait_writers(False)


def test_a_killed_writer_has_let_go(world, file):
    giver = world.engine()
    buffer = register(giver, file, remote="write")
    with writer(giver, buffer, 4 * MIB) as process:
        stop(process)
        process.kill()
        process.wait(TIMEOUT_S)
        assert not file.has_writers()
        giver.unregister(buffer, deadline_s=60)


def test_a_forked_child_of_a_writer_counts_as_one(world, file):
    """It could not write, but it holds the lock; the wrong way round would be the dangerous one."""
    giver = world.engine()
    buffer = register(giver, file, remote="write")
    with writer(giver, buffer, MIB, "fork") as process:
        process.wait(TIMEOUT_S)
        giver.unregister(buffer, deadline_s=60)  # The engine was the parent's, which is dead.
        assert file.has_writers()
        process.stdin.close()
        file.wait_writers(False)


OWNER = """
import mmap, os, sys
import numpy as np
from tandem.transfer import TransferConfig, TransferEngine
fd = os.open(sys.argv[2], os.O_RDWR)
array = np.frombuffer(mmap.mmap(fd, 0), np.uint8)
engine = TransferEngine(TransferConfig(secret=sys.argv[1]))
engine.register(array, file=fd, name="file", remote="write")
print(engine.address, flush=True)
sys.stdin.read()
"""


def test_a_peer_lets_go_when_the_owner_has_died(world, tmp_path):
    """So that the next owner of the file need not wait for those who notice late."""
    path = tmp_path / "file"
    path.touch(0o600)
    os.truncate(path, MIB)
    taker = world.engine()
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, SECRET, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    segment = taker.open(process.stdout.readline().strip())
    local = taker.register(np.full(MIB, 7, np.uint8))
    offset = segment.buffer("file").offset
    move(taker, segment, Op.WRITE, local, offset, MIB, transport="shm")
    assert path.read_bytes() == bytes([7]) * MIB
    file = TmpfsFile(PAGE)
    os.close(file.fd)
    file.fd = os.open(path, os.O_RDWR)
    assert file.has_writers()
    process.kill()
    process.wait(TIMEOUT_S)
    process.stdin.close()
    process.stdout.close()
    file.wait_writers(False)  # Nobody asked the taker to do anything.
    os.close(file.fd)


# Grants by hand.


def read_start_time() -> int:
    with open("/proc/self/stat") as stat:
        return int(stat.read().rsplit(")", 1)[1].split()[19])


def encode_grant(file: TmpfsFile, **changes: int) -> bytes:
    status = os.fstat(file.fd)
    fields = {
        "pid": os.getpid(),
        "start_time": read_start_time(),
        "base": MIB,
        "length": len(file.array),
        "rights": 3,
        "fd": file.fd,
        "device": status.st_dev,
        "inode": status.st_ino,
        "file_offset": 0,
        "is_sealed": 0,
    }
    assert fields.keys() >= changes.keys()
    fields |= changes
    process = text("host") + struct.pack("<IQ", fields["pid"], fields["start_time"])
    buffer = struct.pack("<QQBQQ", fields["base"], fields["length"], fields["rights"], 0, 0)
    place = struct.pack("<IQQ", fields["fd"], fields["device"], fields["inode"])
    rest = struct.pack("<QB", fields["file_offset"], fields["is_sealed"])
    return process + buffer + text("") + place + rest


@contextlib.contextmanager
def grant_by_hand(grant: bytes) -> Iterator[str]:
    """Serve one segment with one buffer at 1 MiB, and this grant to whoever asks."""
    listener = socket.create_server(("127.0.0.1", 0))
    buffer = struct.pack("<QQB", MIB, 4 * MIB, 7) + text("file") + text("cpu")
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    description = text("raw") + struct.pack("<H", 1) + text(address) + struct.pack("<I", 1)

    def serve(stream: socket.socket) -> None:
        with contextlib.suppress(EOFError, OSError), RawPeer(stream) as peer:
            if peer.accept(SECRET, 3) != CONTROL:
                return
            while True:
                kind, _, offset = peer.receive_at()
                if kind == DESCRIBE:
                    stream.sendall(frame(DESCRIPTION, description + buffer))
                elif kind == GRANT:
                    stream.sendall(frame(GRANTED, grant, offset=offset))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                thread = threading.Thread(target=serve, args=(listener.accept()[0],))
                thread.start()
                threads.append(thread)

    threads: list[threading.Thread] = []
    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield address
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join(TIMEOUT_S)
        for thread in threads:
            thread.join(TIMEOUT_S)


def copy_by(taker, address: str, nbytes: int) -> None:
    with taker.open(address) as segment:
        local = taker.register(np.full(nbytes, 9, np.uint8))
        move(taker, segment, Op.WRITE, local, MIB, nbytes, deadline_s=5)


def test_a_grant_by_hand_is_taken(world, file):
    """The control of the test below: what is refused there is refused for the one difference."""
    with grant_by_hand(encode_grant(file)) as address:
        copy_by(world.engine(transports=("shm",)), address, 1000)
    assert (file.array[:1000] == 9).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"inode": 1},
        {"device": 1},
        {"length": 2**40},
        {"file_offset": PAGE},
        {"file_offset": 2**63},
        {"length": 2**64 - 2**21, "file_offset": 2**21},
        {"start_time": 5},
        {"pid": 2**22 - 1},
        {"fd": 2**20},
        {"fd": 2**32 - 1},
        {"is_sealed": 1},
    ],
    ids=lambda changes: ",".join(f"{key}={value}" for key, value in changes.items()),
)
def test_hostile_grants_are_refused(world, file, changes):
    taker = world.engine(transports=("shm",), lease_ms=1000)
    expected = pytest.raises((UnsupportedError, DeadlineError))
    with grant_by_hand(encode_grant(file, **changes)) as address, expected:
        copy_by(taker, address, 1000)
    assert not file.array.any()
    assert not file.has_writers()


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "open to others", "locked"])
def test_grants_of_what_is_no_file_of_ours_are_refused(world, file, kind):
    opened = []
    if kind == "pipe":
        opened = list(os.pipe())
    elif kind in ("folder", "device"):
        opened = [os.open("/dev/shm" if kind == "folder" else "/dev/zero", os.O_RDONLY)]
    elif kind == "open to others":
        os.fchmod(file.fd, 0o662)
    else:  # Somebody who has the file now looks whether anybody else writes to it.
        file._lock(fcntl.F_WRLCK)
    named = file
    if opened:
        named = TmpfsFile(4 * MIB)
        os.close(named.fd)
        named.fd = opened[0]
    with grant_by_hand(encode_grant(named)) as address, pytest.raises(UnsupportedError):
        copy_by(world.engine(transports=("shm",)), address, 1000)
    assert not file.array.any()
    for fd in opened:
        os.close(fd)


@pytest.mark.parametrize(("version", "rest"), [(2, 0), (3, 9)])
def test_peers_of_version_2_are_told_of_no_file(world, file, version, rest):
    """They would take it for memory that is sealed."""
    giver = world.engine()
    buffers = [register(giver, file), giver.allocate(PAGE)]
    with open("/proc/sys/kernel/random/boot_id") as boot:
        host = f"{boot.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    process = text(host) + struct.pack("<IQ", os.getpid(), read_start_time())
    known = []
    with RawPeer.connect(
        giver.address, SECRET, CONTROL, max_version=version, process=process
    ) as peer:
        for buffer in buffers:
            peer.stream.sendall(frame(GRANT, offset=buffer.offset))
            (kind, code, _), grant = peer.receive()
            assert (kind, code) == (GRANTED, 0)
            place = grant[-20 - rest :][:20]
            known.append(struct.unpack("<iQQ", place)[0] >= 0)
        peer.stream.sendall(frame(BYE) + frame(PING))
        assert peer.receive()[0][0] == PONG  # It has heard that we let go of everything.
    assert known == [version >= 3, True]

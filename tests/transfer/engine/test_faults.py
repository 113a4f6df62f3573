"""Paths that fail, peers that die: data arrive bit-exact, or the batch ends in a named error.

Goal: under every fault no hang (each batch ends within its deadline), no wrong byte, no late byte
(canaries). Method: tcp forced through seeded proxies, one a rail; real processes that are killed.
"""

import contextlib
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from tests_transfer_world import SECRET, child, move
from transfer_faults import FaultProxy, inject_faults

from tandem._native import RailState
from tandem.core.errors import (
    CancelledError,
    ConfigError,
    CorruptionError,
    DeadlineError,
    InternalError,
    PeerLostError,
    UnsupportedError,
)
from tandem.transfer import Op, Transfer

MIB = 1 << 20


@contextlib.contextmanager
def rails(world, count, *, seed=0, **settings):
    """A giver behind ``count`` proxies; the control connection does not pass through them."""
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(FaultProxy(seed + i)) for i in range(count)]
        giver = world.engine(name="giver", advertise=tuple(p.address for p in proxies))
        for proxy in proxies:
            proxy.target = giver.address
        settings = {
            "transports": ("tcp",),
            "stall_ms": 150,
            "handshake_timeout_ms": 500,
            **settings,
        }
        taker = world.engine(name="taker", **settings)
        yield giver, taker, taker.open(giver.address), proxies
        for engine in (taker, giver):
            engine.close(deadline_s=5)


def wait_until(condition, limit_s=60.0):
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit, "did not come true in time"
        time.sleep(0.002)


@pytest.mark.parametrize("op", [Op.WRITE, Op.READ])
def test_several_rails_carry_one_transfer(world, op):
    with rails(world, 3) as (giver, taker, segment, _):
        wait_until(lambda: all(r.state == RailState.HEALTHY for r in segment.rails))
        remote = giver.allocate(16 * MIB)
        data = world.random(16 * MIB)
        source, target = (data, remote.array) if op == Op.WRITE else (remote.array, data)
        if op == Op.READ:
            source[:] = world.random(16 * MIB)
        local = taker.register(data)
        for _ in range(10):
            move(taker, segment, op, local, remote.offset, 16 * MIB)
            assert np.array_equal(source, target)
            if all(rail.bytes_moved > 0 for rail in segment.rails):
                break
        moved = [rail.bytes_moved for rail in segment.rails]
        assert all(moved)
        assert sum(moved) % (16 * MIB) == 0


@pytest.mark.parametrize("op", [Op.WRITE, Op.READ])
@pytest.mark.parametrize("fault", ["cut", "dead", "stall", "corrupt", "drop", "delay"])
def test_data_survive_a_bad_rail(world, fault, op):
    """One rail of two has a fault from the middle of the transfer on; the caller sees no error."""
    with rails(world, 2, seed=3, checksum=True) as (giver, taker, segment, proxies):
        wait_until(lambda: all(r.state == RailState.HEALTHY for r in segment.rails))
        size = 8 * MIB
        remote = giver.allocate(size)
        for _ in range(2):
            expected = world.random(size)
            data = expected.copy() if op == Op.WRITE else np.zeros(size, np.uint8)
            if op == Op.READ:
                remote.array[:] = expected
            local = taker.register(data)
            bad = proxies[0]
            bad.rate = 100e6
            batch = taker.submit([Transfer(op, local, segment, remote.offset, size)], deadline_s=60)
            before = bad.num_bytes
            with contextlib.suppress(AssertionError):
                wait_until(
                    lambda b=before, x=batch, bad=bad: bad.num_bytes > b + 200_000 or x.is_finished,
                    3,
                )
            match fault:
                case "cut":
                    bad.cut()
                case "dead":
                    bad.is_dead = True
                case "stall":
                    bad.is_stalled = True
                case "corrupt":
                    bad.corrupt = 0.3
                case "drop":
                    bad.drop = 0.3
                case "delay":
                    bad.delay_s = 0.3
            batch.wait()
            assert np.array_equal(data if op == Op.READ else remote.array, expected)
            taker.unregister(local)
            bad.is_dead = bad.is_stalled = False
            bad.corrupt = bad.drop = bad.delay_s = bad.rate = 0


def test_recovered_rail_is_used_again(world):
    with rails(world, 2) as (giver, taker, segment, proxies):
        remote, local = giver.allocate(4 * MIB), taker.register(world.random(4 * MIB))
        wait_until(lambda: all(r.state == RailState.HEALTHY for r in segment.rails))
        proxies[0].is_dead = True
        wait_until(lambda: segment.rails[0].state == RailState.CLOSED)
        move(taker, segment, Op.WRITE, local, remote.offset, 4 * MIB)
        proxies[0].is_dead = False

        def is_used():
            before = segment.rails[0].bytes_moved
            move(taker, segment, Op.WRITE, local, remote.offset, 4 * MIB)
            return segment.rails[0].bytes_moved > before + MIB

        wait_until(is_used, 60)


def test_rail_that_leads_to_a_stranger_is_terminated(world):
    with rails(world, 2) as (giver, taker, segment, proxies):
        stranger = world.engine()  # Same secret, another epoch.
        remote, local = giver.allocate(MIB), taker.register(world.random(MIB))
        wait_until(lambda: all(r.state == RailState.HEALTHY for r in segment.rails))
        proxies[0].target = stranger.address
        proxies[0].cut()
        wait_until(lambda: segment.rails[0].state == RailState.TERMINATED)
        move(taker, segment, Op.WRITE, local, remote.offset, MIB)
        assert segment.rails[1].state == RailState.HEALTHY


def test_slow_rail_is_avoided(world):
    with rails(world, 2) as (giver, taker, segment, proxies):
        size = 8 * MIB
        remote, local = giver.allocate(size), taker.register(world.random(size))
        wait_until(lambda: all(r.state == RailState.HEALTHY for r in segment.rails))
        proxies[1].rate = 2e6
        for _ in range(4):
            move(taker, segment, Op.WRITE, local, remote.offset, size)
        fast, slow = (rail.bytes_moved for rail in segment.rails)
        assert slow < 0.2 * fast


def test_all_rails_cut_ends_within_the_deadline(world):
    with rails(world, 2) as (giver, taker, segment, proxies):
        remote = giver.allocate(4 * MIB)
        target = np.zeros(4 * MIB, np.uint8)
        local = taker.register(target)
        move(taker, segment, Op.READ, local, remote.offset, 4096)
        for proxy in proxies:
            proxy.is_stalled = True
        with pytest.raises((DeadlineError, PeerLostError)):
            move(taker, segment, Op.READ, local, remote.offset, 4 * MIB, deadline_s=0.7)
        seen = target.copy()
        remote.array[:] = 1
        for proxy in proxies:
            proxy.is_stalled = False
        move(
            taker,
            segment,
            Op.READ,
            taker.register(np.zeros(4 * MIB, np.uint8)),
            remote.offset,
            4 * MIB,
        )
        assert np.array_equal(seen, target)  # Nothing came late into the first buffer.


def test_no_write_lands_after_a_later_one(world):
    """The fence: what a dead rail still holds must not overwrite what was written since."""
    with rails(world, 2) as (giver, taker, segment, proxies):
        remote = giver.allocate(MIB)
        old = taker.register(np.full(MIB, 1, np.uint8))
        new = taker.register(np.full(MIB, 2, np.uint8))
        for round_ in range(5):
            wait_until(lambda: all(r.state != RailState.CLOSED for r in segment.rails))
            proxies[round_ % 2].is_stalled = True
            batch = taker.submit([Transfer(Op.WRITE, old, segment, remote.offset, MIB)])
            if round_ % 2:
                batch.cancel()
            with contextlib.suppress(CancelledError):
                batch.wait(60)
            move(taker, segment, Op.WRITE, new, remote.offset, MIB)
            proxies[round_ % 2].is_stalled = False
            # The bytes that the proxy held back now reach a connection that is fenced.
            move(taker, segment, Op.WRITE, new, remote.offset, 1)
            assert (remote.array == 2).all()
            time.sleep(0.02)
            assert (remote.array == 2).all()
            remote.array[:] = 0


def test_random_faults_never_hang_or_lie(world):
    """Seeded faults on every rail, many batches: each ends in time, right or with an error."""
    with rails(world, 3, seed=11, checksum=True) as (giver, taker, segment, proxies):
        size = 2 * MIB
        remote = giver.allocate(size)
        rng = np.random.default_rng(5)
        outcomes = []
        for _ in range(25):
            for proxy in proxies:
                proxy.corrupt = float(rng.choice([0, 0, 0.05]))
                proxy.drop = float(rng.choice([0, 0, 0.02]))
                proxy.delay_s = float(rng.choice([0, 0, 0.01]))
                proxy.is_stalled = bool(rng.random() < 0.1)
                proxy.is_dead = bool(rng.random() < 0.1)
                if rng.random() < 0.1:
                    proxy.cut()
            expected = world.random(size)
            remote.array[:] = expected
            target = np.zeros(size + 128, np.uint8)
            local = taker.register(target)
            try:
                move(
                    taker,
                    segment,
                    Op.READ,
                    local,
                    remote.offset,
                    size,
                    local_offset=64,
                    deadline_s=2,
                )
                assert np.array_equal(target[64:-64], expected)
                outcomes.append("done")
            except (DeadlineError, CorruptionError) as error:
                outcomes.append(type(error).__name__)
            assert not target[:64].any()
            assert not target[-64:].any()
            taker.unregister(local)
        assert outcomes.count("done") >= 15, outcomes


def test_notifications_are_exactly_once_over_a_breaking_control(world):
    with FaultProxy(7) as proxy:
        giver, taker = world.engine(), world.engine(transports=("tcp",), lease_ms=5000)
        proxy.target = giver.address
        segment = taker.open(proxy.address)
        stop = threading.Event()

        def breaker():
            while not stop.wait(0.03):
                proxy.cut()

        thread = threading.Thread(target=breaker)
        thread.start()
        try:
            for number in range(60):
                taker.notify(segment, str(number), deadline_s=10)
        finally:
            stop.set()
            thread.join(60)
        assert [n.name for n in giver.notifications(1)] == [str(number) for number in range(60)]


SERVER = """
import sys, numpy as np
from tandem.transfer import TransferConfig, TransferEngine
engine = TransferEngine(TransferConfig(name="child", secret=sys.argv[1],
                                       listen=("127.0.0.1:" + sys.argv[2],)))
shared = engine.allocate(64 << 20, name="shared")
plain = np.zeros(64 << 20, np.uint8)
engine.register(plain, name="plain")
print(engine.address, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("transport", ["shm", "cma", "tcp"])
def test_transfer_to_another_process(world, transport):
    with child(SERVER, "0") as (_, address):
        taker = world.engine()
        segment = taker.open(address)
        remote = segment.buffer("shared" if transport == "shm" else "plain")
        data, back = world.random(5 * MIB), np.zeros(5 * MIB, np.uint8)
        move(
            taker,
            segment,
            Op.WRITE,
            taker.register(data),
            remote.offset + 7,
            5 * MIB,
            transport=transport,
        )
        move(
            taker,
            segment,
            Op.READ,
            taker.register(back),
            remote.offset + 7,
            5 * MIB,
            transport=transport,
        )
        assert np.array_equal(data, back)


@pytest.mark.parametrize(
    "transports", [("shm", "tcp"), pytest.param(("cma", "tcp"), marks=pytest.mark.slow), ("tcp",)]
)
def test_killed_peer_is_lost_and_comes_back(world, transports):
    taker = world.engine(transports=transports, lease_ms=2000)
    local = taker.register(world.random(32 * MIB))
    with child(SERVER, "0") as (process, address):
        segment = taker.open(address)
        remote = segment.buffer("shared")
        transfer = Transfer(Op.WRITE, local, segment, remote.offset, 32 * MIB)
        move(taker, segment, Op.WRITE, local, remote.offset, MIB)
        batches = [taker.submit([transfer]) for _ in range(10)]
        os.kill(process.pid, signal.SIGKILL)
        end_s = time.monotonic() + 60
        with pytest.raises(PeerLostError):
            while time.monotonic() < end_s:
                for batch in batches:
                    batch.wait(60)
                batches = [taker.submit([transfer])]
        process.wait(60)
        with child(SERVER, address.rsplit(":", 1)[1]) as (_, again):
            assert again == address
            with pytest.raises(PeerLostError):
                move(taker, segment, Op.WRITE, local, remote.offset, 1)
            fresh = taker.open(address)
            move(taker, fresh, Op.WRITE, local, fresh.buffer("shared").offset, MIB)


def test_stopped_peer_is_lost_within_the_lease(world):
    taker = world.engine(transports=("tcp",), lease_ms=600, handshake_timeout_ms=200)
    local = taker.register(world.random(32 * MIB))
    with child(SERVER, "0") as (process, address):
        segment = taker.open(address)
        remote = segment.buffer("plain")
        move(taker, segment, Op.WRITE, local, remote.offset, MIB)
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(PeerLostError):  # Not DeadlineError: the lease ends first.
            move(taker, segment, Op.WRITE, local, remote.offset, 32 * MIB, deadline_s=60)
        os.kill(process.pid, signal.SIGCONT)


NOBODY = 65534
FALLBACK = """
import os, sys
import numpy as np
from tandem.transfer import Op, Transfer, TransferConfig, TransferEngine
if sys.argv[3] == "drop":
    os.setgid(65534)
    os.setuid(65534)
taker = TransferEngine(TransferConfig(secret=sys.argv[1]))
segment = taker.open(sys.argv[2])
out = np.zeros(1 << 20, np.uint8)
local = taker.register(out)
for name in ("shared", "mapped", "plain"):
    remote = segment.buffer(name)
    taker.submit([Transfer(Op.READ, local, segment, remote.offset, 1 << 20)]).wait(60)
moved = [taker.bytes_copied(t) >> 20 for t in ("shm", "cma")]
print(*moved, sum(r.bytes_moved for r in segment.rails) >> 20, sorted(segment.refusals))
"""


def make_giver_of_three(world):
    """An engine that offers shared, plain and mapped memory; and the file, to be closed."""
    giver = world.engine(name="giver")
    giver.allocate(MIB, name="shared")
    giver.register(np.zeros(MIB, np.uint8), name="plain")
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
    os.ftruncate(fd, MIB)
    giver.register(np.frombuffer(mmap.mmap(fd, MIB), np.uint8), name="mapped", file=fd)
    return giver, fd


def test_refused_by_the_kernel_falls_back_by_name(world):
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    giver, fd = make_giver_of_three(world)
    for how, expected in (("keep", "2 1 0 []"), ("drop", "0 0 3 ['cma', 'shm']")):
        done = subprocess.run(
            [sys.executable, "-c", FALLBACK, SECRET, giver.address, how],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stdout.strip() == expected, done.stderr
    os.close(fd)


def test_another_pid_namespace_falls_back_by_name(world):
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare, to enter another pid namespace")
    giver, fd = make_giver_of_three(world)
    inside = ("unshare", "--pid", "--fork", "--mount-proc")
    if subprocess.run([*inside, "true"], capture_output=True, timeout=60, check=False).returncode:
        pytest.skip("this kernel gives no pid namespace")
    done = subprocess.run(
        [*inside, sys.executable, "-c", FALLBACK, SECRET, giver.address, "keep"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == "0 0 3 ['cma', 'shm']", done.stderr
    os.close(fd)


def test_direct_path_that_is_forced_and_refused_is_an_error(world):
    giver, taker = world.engine(), world.engine(transports=("tcp",))
    remote = giver.allocate(100)
    local = taker.register(bytearray(100))
    with pytest.raises(UnsupportedError):
        move(taker, taker.open(giver.address), Op.READ, local, remote.offset, 1, transport="shm")


def move_between_canaries(world, taker, segment, op, remote):
    """Move random bytes to or from ``remote`` but for its 64 first and last, which stay."""
    size = remote.array.size - 128
    expected = world.random(size)
    remote.array[:] = 7
    target = np.full(size + 128, 7, np.uint8)
    (target if op == Op.WRITE else remote.array)[64:-64] = expected
    local = taker.register(target)
    move(taker, segment, op, local, remote.offset + 64, size, local_offset=64)
    for memory in (target, remote.array):
        assert np.array_equal(memory[64:-64], expected)
        assert (memory[:64] == 7).all()
        assert (memory[-64:] == 7).all()
    taker.unregister(local)


@pytest.mark.parametrize("op", [Op.WRITE, Op.READ])
@pytest.mark.parametrize("fault", ["drop_frames", "duplicate", "reorder"])
def test_frames_that_go_astray_cost_no_byte(world, fault, op):
    """Lost, doubled and swapped frames on every rail: right data in time, canaries intact."""
    with rails(world, 2, seed=5, min_slice_bytes=16384, max_slice_bytes=65536) as (
        giver,
        taker,
        segment,
        proxies,
    ):
        size = 2 * MIB
        remote = giver.allocate(size + 128)
        for proxy in proxies:
            setattr(proxy, fault, 0.03)
        for _ in range(6):
            move_between_canaries(world, taker, segment, op, remote)
        assert sum(proxy.num_faults for proxy in proxies) > 3


@pytest.mark.parametrize("op", [Op.WRITE, Op.READ])
@pytest.mark.parametrize("transport", ["shm", "cma"])
@pytest.mark.parametrize(
    "faults",
    [
        {"drop": 0.3},
        {"corrupt": 0.3},
        {"duplicate": 0.5},
        {"reorder": 0.5},
        {"delay": 0.3, "delay_s": 0.003},
        {"delay": 0.05, "delay_s": 0.1},  # A stall.
        {"is_dead": True},
        {"drop": 0.1, "corrupt": 0.1, "duplicate": 0.2, "delay": 0.1, "delay_s": 0.001},
    ],
    ids=lambda faults: "+".join(f"{name}={value}" for name, value in faults.items()),
)
def test_faults_inside_the_host_cost_no_byte(world, transport, faults, op):
    """What a direct transport fails to move another one moves; canaries on both sides."""
    size = 3 * MIB
    giver, taker = world.engine(), world.engine(transports=(transport, "tcp"))
    remote = giver.allocate(size + 128)
    segment = taker.open(giver.address)
    with inject_faults(taker, transport, seed=9, **faults) as count:
        for _ in range(3):
            move_between_canaries(world, taker, segment, op, remote)
    assert count.num_faults > 0
    counters = taker.core.counters(segment.id)
    if "is_dead" in faults:
        assert (transport, "write", "bytes") not in counters
        assert (transport, "read", "bytes") not in counters
        assert counters["tcp", op.name.lower(), "bytes"] == 3 * size
    if "is_dead" in faults or "drop" in faults or "corrupt" in faults:
        assert counters[transport, "", "failovers"] > 0
    before = sum(rail.bytes_moved for rail in segment.rails)
    local = taker.register(bytearray(100))
    move(taker, segment, Op.READ, local, remote.offset, 100)  # It is used again.
    assert sum(rail.bytes_moved for rail in segment.rails) == before


def test_faults_without_another_path_end_the_batch(world, tmp_path):
    engine = world.engine()
    local = engine.register(np.zeros(2 * MIB, np.uint8))
    file = engine.open_file(tmp_path / "f", length=2 * MIB, writable=True)
    for transport, segment, offset in (
        ("local", engine.local_segment, local.offset),
        ("file", file, 0),
    ):
        for how in ({"drop": 0.5}, {"is_dead": True}):
            with (
                inject_faults(engine, transport, seed=1, **how) as count,
                pytest.raises(InternalError),
            ):
                for _ in range(20):
                    move(engine, segment, Op.READ, local, offset, 2 * MIB)
            assert count.num_faults > 0
        move(engine, segment, Op.READ, local, offset, 2 * MIB)
    for wrong in ({"drop": 1.5}, {"drop": -0.1}, {"drop": 0.6, "corrupt": 0.6}):
        with pytest.raises(ConfigError), inject_faults(engine, "shm", **wrong):
            pass
    with pytest.raises(ConfigError), inject_faults(engine, "tcp"):
        pass


@pytest.mark.parametrize("op", [Op.WRITE, Op.READ])
def test_another_transport_takes_over_when_all_rails_are_cut(world, op):
    """tcp is preferred here; with its rails dead, shared memory moves what is left."""
    with rails(world, 2, transports=("tcp", "shm")) as (giver, taker, segment, proxies):
        wait_until(lambda: all(r.state == RailState.HEALTHY for r in segment.rails))
        size = 16 * MIB
        remote = giver.allocate(size)
        expected = world.random(size)
        data = expected.copy() if op == Op.WRITE else np.zeros(size, np.uint8)
        if op == Op.READ:
            remote.array[:] = expected
        local = taker.register(data)
        move(taker, segment, op, local, remote.offset, 4096)
        assert taker.bytes_copied("shm") == 0
        for proxy in proxies:
            proxy.rate = 50e6
        batch = taker.submit([Transfer(op, local, segment, remote.offset, size)], deadline_s=60)
        before = proxies[0].num_bytes
        wait_until(lambda: proxies[0].num_bytes > before + 200_000)
        for proxy in proxies:
            proxy.is_dead = True
        cut = time.monotonic()
        batch.wait()
        print(f"all rails cut: done {time.monotonic() - cut:.3f} s later")
        assert np.array_equal(data if op == Op.READ else remote.array, expected)
        assert 0 < taker.bytes_copied("shm") < size
        for proxy in proxies:
            proxy.is_dead, proxy.rate = False, 0
        wait_until(lambda: all(r.state != RailState.CLOSED for r in segment.rails))
        copied = taker.bytes_copied("shm")
        move(taker, segment, op, local, remote.offset, size)
        assert taker.bytes_copied("shm") == copied  # The rails are used again.

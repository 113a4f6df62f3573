"""What the engine promises, on every transport; misuse is an exception, never a crash."""

import asyncio
import gc
import os
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from tests_transfer_world import SECRET, move
from transfer_faults import FaultProxy

from idleness import check_idle_child
from tandem.core.errors import (
    CancelledError,
    CapacityError,
    ConfigError,
    ConflictError,
    DeadlineError,
    NotFoundError,
    PeerLostError,
    PermissionDeniedError,
    ShapeError,
    UnsupportedError,
)
from tandem.transfer import Op, Transfer, TransferConfig, TransferEngine

TRANSPORTS = ["local", "shm", "cma", "tcp"]


def open_pair(world, transport, nbytes, **settings):
    """Taker, segment, remote array, its buffer: set up so that ``transport`` reaches it."""
    giver = world.engine(name="giver")
    taker = giver if transport == "local" else world.engine(name="taker", **settings)
    remote = giver.allocate(nbytes, name="remote")
    segment = giver.local_segment if transport == "local" else taker.open(giver.address)
    return taker, segment, remote


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("nbytes", [1, 4095, 65_537, 3_000_001])
def test_bytes_arrive_both_ways(world, transport, nbytes):
    taker, segment, remote = open_pair(world, transport, nbytes + 200)
    data = world.random(nbytes + 64)
    # Canaries on both sides of the range, here and there.
    local = taker.register(data)
    move(
        taker,
        segment,
        Op.WRITE,
        local,
        remote.offset + 100,
        nbytes,
        local_offset=32,
        transport=transport,
    )
    assert np.array_equal(remote.array[100 : 100 + nbytes], data[32 : 32 + nbytes])
    assert not remote.array[:100].any()
    assert not remote.array[100 + nbytes :].any()
    target = np.full(nbytes + 64, 0xAB, np.uint8)
    back = taker.register(target)
    move(
        taker,
        segment,
        Op.READ,
        back,
        remote.offset + 100,
        nbytes,
        local_offset=32,
        transport=transport,
    )
    assert np.array_equal(target[32:-32], data[32:-32])
    assert (target[:32] == 0xAB).all()
    assert (target[-32:] == 0xAB).all()


@pytest.mark.parametrize("checksum", [False, True])
def test_batch_of_many_ranges_over_tcp(world, checksum):
    taker, segment, remote = open_pair(world, "tcp", 1 << 20, checksum=checksum, lanes=3)
    data = world.random(1 << 20)
    local = taker.register(data)
    size = 4096
    order = world.rng.permutation((1 << 20) // size)
    batch = taker.submit(
        [
            Transfer(
                Op.WRITE,
                local,
                segment,
                remote.offset + int(i) * size,
                size,
                local_offset=int(i) * size,
            )
            for i in order
        ],
        transport="tcp",
    )
    batch.wait(60)
    assert np.array_equal(remote.array, data)
    assert all(batch.status(i).is_done for i in range(len(batch)))
    batch.wait()  # A second wait returns the same.


def test_fastest_transport_is_chosen_and_named(world):
    taker, segment, remote = open_pair(world, "shm", 1000)
    local = taker.register(np.ones(1000, np.uint8))
    move(taker, segment, Op.WRITE, local, remote.offset, 1000)
    assert taker.bytes_copied("shm") == 1000
    giver = world.engines[0]
    plain = giver.register(bytearray(1000), name="plain")
    move(taker, segment, Op.WRITE, local, plain.offset, 1000)
    assert taker.bytes_copied("cma") == 1000
    with pytest.raises(UnsupportedError):
        move(taker, segment, Op.WRITE, local, plain.offset, 10, transport="shm")


def test_transport_list_is_obeyed(world):
    taker, segment, remote = open_pair(world, "tcp", 1000, transports=("tcp",))
    local = taker.register(np.ones(1000, np.uint8))
    move(taker, segment, Op.WRITE, local, remote.offset, 1000)
    assert taker.bytes_copied("shm") == taker.bytes_copied("cma") == 0
    assert sum(rail.bytes_moved for rail in segment.rails) == 1000


def test_ipv6_and_wildcard(world):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 loopback: {error}")
    giver = world.engine(listen=("[::]:0",))
    assert giver.address.startswith("[::]:")
    taker = world.engine(transports=("tcp",))
    segment = taker.open(f"[::1]:{giver.address.rsplit(':', 1)[1]}")
    remote = giver.register(bytearray(100_000))
    local = taker.register(world.random(100_000))
    move(taker, segment, Op.WRITE, local, remote.offset, 100_000)
    assert segment.rails[0].remote.startswith("[::1]:")


@pytest.mark.parametrize(
    "make",
    [
        lambda: bytearray(64),
        lambda: np.zeros((4, 16), np.uint8),
        lambda: memoryview(bytearray(64)),
        lambda: torch.zeros(32, dtype=torch.bfloat16),
        lambda: np.zeros(64, bool),
        lambda: torch.zeros(16, dtype=torch.float32),
    ],
)
def test_anything_with_host_memory_registers(world, make):
    engine = world.engine()
    thing = make()
    buffer = engine.register(thing)
    assert buffer.length == 64
    source = engine.register(np.arange(64, dtype=np.uint8))
    move(engine, engine.local_segment, Op.WRITE, source, buffer.offset, 64)
    raw = thing.view(torch.uint8).numpy() if isinstance(thing, torch.Tensor) else thing
    assert bytes(memoryview(raw).cast("B")) == bytes(range(64))


def test_registration_refuses_what_cannot_be(world):
    engine = world.engine()
    with pytest.raises(UnsupportedError):
        engine.register(object())
    with pytest.raises(ShapeError):
        engine.register(np.zeros((8, 8), np.uint8)[:, ::2])
    with pytest.raises(ConfigError):
        engine.register(bytearray(0))
    with pytest.raises(ConfigError):
        engine.allocate(0)
    with pytest.raises(ConfigError):
        engine.allocate(-1)
    with pytest.raises(CapacityError):
        engine.allocate(1 << 60)
    engine.register(bytearray(8), name="taken")
    with pytest.raises(ConflictError):
        engine.register(bytearray(8), name="taken")
    with pytest.raises(UnsupportedError):
        _ = engine.register(bytearray(8)).array


def test_memory_lives_while_registered(world):
    engine = world.engine()
    buffer = engine.register(bytearray(b"keep me!"))
    gc.collect()
    out = np.zeros(8, np.uint8)
    move(engine, engine.local_segment, Op.READ, engine.register(out), buffer.offset, 8)
    assert out.tobytes() == b"keep me!"
    holder = bytearray(8)
    held = engine.register(holder)
    with pytest.raises(BufferError):
        holder.extend(b"x")
    engine.unregister(held)
    holder.extend(b"x")


def test_arrays_outlive_buffer_and_engine(world):
    engine = world.engine()
    buffer = engine.allocate(100)
    array = buffer.array
    engine.unregister(buffer)
    engine.close()
    array[:] = 7
    assert array.sum() == 700


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rights_and_bounds(world, transport):
    giver = world.engine()
    taker = giver if transport == "local" else world.engine()
    readable = giver.allocate(100, remote="read", name="r")
    writable = giver.allocate(100, remote="write", name="w")
    private = giver.allocate(100, remote=False, name="p")
    segment = giver.local_segment if transport == "local" else taker.open(giver.address)
    local = taker.register(bytearray(200))
    move(taker, segment, Op.READ, local, readable.offset, 100, transport=transport)
    move(taker, segment, Op.WRITE, local, writable.offset, 100, transport=transport)
    errors = (PermissionDeniedError, NotFoundError, UnsupportedError)
    for op, buffer in ((Op.WRITE, readable), (Op.READ, writable), (Op.READ, private)):
        with pytest.raises(errors):
            move(taker, segment, op, local, buffer.offset, 1, transport=transport)
    for offset, length in ((50, 51), (0, 101), (0, 2**62), (99, 2)):
        with pytest.raises((ConfigError, NotFoundError)):
            move(
                taker,
                segment,
                Op.READ,
                local,
                readable.offset + offset,
                length,
                transport=transport,
            )
    with pytest.raises((ConfigError, NotFoundError, UnsupportedError)):
        move(taker, segment, Op.READ, local, 5, 1, transport=transport)
    with pytest.raises((ConfigError, NotFoundError)):
        move(taker, segment, Op.READ, local, readable.offset, 100, local_offset=150)
    for bad in (-1, 2**63):
        with pytest.raises(ConfigError):
            move(taker, segment, Op.READ, local, bad, 1)
    const = taker.register(b"read only")
    with pytest.raises(PermissionDeniedError):
        move(taker, segment, Op.READ, const, readable.offset, 5)
    move(taker, segment, Op.WRITE, const, writable.offset, 5, transport=transport)
    assert writable.array[:5].tobytes() == b"read "
    assert set(segment.buffers) >= {"r", "w"}
    assert "p" not in segment.buffers


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_unregistered_memory_is_out_of_reach(world, transport):
    taker, segment, remote = open_pair(world, transport, 1000)
    giver = world.engines[0]
    local = taker.register(bytearray(1000))
    move(taker, segment, Op.WRITE, local, remote.offset, 1000, transport=transport)
    giver.unregister(remote)
    with pytest.raises(NotFoundError):
        giver.unregister(remote)  # Double free.
    for how in ({}, {"transport": transport}):
        with pytest.raises((NotFoundError, UnsupportedError)):
            move(taker, segment, Op.WRITE, local, remote.offset, 1000, **how)
    assert giver.allocate(1000).offset != remote.offset


def test_unregister_under_fire_ends_cleanly(world):
    """Writers on every transport hammer a buffer that is taken away: errors, then silence."""
    giver = world.engine()
    takers = [world.engine(transports=(kind,)) for kind in ("shm", "cma", "tcp")]
    for _ in range(3):
        remote = giver.allocate(1 << 20)
        ends: list[Exception] = []
        started = threading.Semaphore(0)

        def hammer(taker, offset, ends=ends, started=started):
            local = taker.register(np.full(1 << 20, 7, np.uint8))
            with taker.open(giver.address) as segment:
                try:
                    while True:
                        move(taker, segment, Op.WRITE, local, offset, 1 << 20)
                        started.release()
                except Exception as error:
                    ends.append(error)

        threads = [threading.Thread(target=hammer, args=(t, remote.offset)) for t in takers]
        for thread in threads:
            thread.start()
        for _ in range(6):
            assert started.acquire(timeout=60)
        giver.unregister(remote, deadline_s=60)
        remote.array[:] = 0
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        # Whatever was still under way was refused before it touched the memory.
        assert not remote.array.any()
        assert all(isinstance(e, (NotFoundError, UnsupportedError)) for e in ends), ends
        assert len(ends) == 3


def test_unregister_while_the_peer_is_leaving(world):
    """A good-bye that crosses our request to let go must still be heard."""
    giver = world.engine()
    taker = world.engine(transports=("cma",))
    local = taker.register(bytearray(100))
    for _ in range(60):
        remote = giver.register(bytearray(100))
        segment = taker.open(giver.address)
        move(taker, segment, Op.WRITE, local, remote.offset, 100)
        leaving = threading.Thread(target=segment.close)
        leaving.start()
        giver.unregister(remote, deadline_s=60)
        leaving.join(60)


def test_descriptors_return(world):
    giver, taker = world.engine(), world.engine()
    remote = giver.register(bytearray(1000))
    local = taker.register(bytearray(1000))

    def visit():
        for kind in ("cma", "tcp"):
            with taker.open(giver.address) as segment:
                move(taker, segment, Op.WRITE, local, remote.offset, 1000, transport=kind)

    def count():
        return len(os.listdir("/proc/self/fd"))

    visit()
    before = count()
    for _ in range(20):
        visit()
        taker.unregister(taker.allocate(4096))
    limit = time.monotonic() + 60
    while count() > before:
        gc.collect()
        assert time.monotonic() < limit, "descriptors leak"
        time.sleep(0.01)


EXIT = """
import os, sys
from tandem.core.errors import ConflictError
from tandem.transfer import Op, Transfer, TransferConfig, TransferEngine
giver = TransferEngine(TransferConfig(secret="x" * 32))
taker = TransferEngine(TransferConfig(secret="x" * 32, transports=("tcp",), nic_weight=1.0,
                                      local_addresses=("127.0.0.1",)))
file = taker.open_file(sys.argv[1], length=4096, writable=True)
page = taker.register(bytearray(4096))
prepared = taker.prepare([Transfer(Op.WRITE, page, file, 0, 4096)])
prepared.submit().wait()
remote, local = giver.register(bytearray(10)), taker.register(bytearray(10))
segment = taker.open(giver.address)
batch = taker.submit([Transfer(Op.READ, local, segment, remote.offset, 10)])
batch.wait()
if os.fork() == 0:
    core = taker.core
    for call in (prepared.submit, file.sync, file.refresh, lambda: core.batch_counters,
                 lambda: core.counters(None), lambda: core.counters(segment.id),
                 lambda: core.quota_rates, lambda: core.file_backend,
                 lambda: taker.open_file(sys.argv[1])):
        try:
            call()
        except ConflictError:
            continue
        os._exit(1)
    del call, core, prepared, page, file, batch, segment, local, remote, giver, taker
    sys.exit(0)  # Finalizers and all.
assert os.wait()[1] == 0
prepared.submit().wait()
assert taker.quota_rates == [float("inf")]
taker.submit([Transfer(Op.READ, local, segment, remote.offset, 10)]).wait()
print("ok")
"""


def test_parent_and_child_exit_without_close(tmp_path):
    command = [sys.executable, "-c", EXIT, str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("ok\n", "", 0)


def test_use_after_close(world):
    engine = world.engine()
    peer = world.engine()
    buffer = engine.register(bytearray(10))
    segment = engine.open(peer.address)
    remote = peer.register(bytearray(10))
    engine.close()
    engine.close()
    for call in (
        lambda: engine.register(bytearray(1)),
        lambda: engine.allocate(1),
        lambda: engine.unregister(buffer),
        lambda: engine.open(peer.address),
        lambda: engine.submit([]),
        lambda: move(engine, segment, Op.READ, buffer, remote.offset, 1),
        lambda: engine.notify(segment, "x"),
        lambda: engine.notifications(),
        lambda: segment.refresh(),
        lambda: segment.close(),
    ):
        with pytest.raises(ConflictError):
            call()
    with buffer, segment:
        pass


def test_with_gives_back_what_it_holds(world):
    peer = world.engine()
    remote = peer.register(bytearray(10))
    with TransferEngine(TransferConfig(secret=SECRET)) as engine:
        with engine.register(bytearray(10)) as local, engine.open(peer.address) as segment:
            move(engine, segment, Op.READ, local, remote.offset, 10)
        for call in (lambda: engine.unregister(local), segment.close):
            with pytest.raises(NotFoundError):
                call()
    with pytest.raises(ConflictError):
        engine.open(peer.address)
    with pytest.raises(ZeroDivisionError), TransferEngine(TransferConfig()) as engine:
        raise ZeroDivisionError
    with pytest.raises(ConflictError):
        engine.allocate(1)


def test_peers_connect_to_what_is_advertised(world):
    """A host behind a translation of addresses listens on one address and tells another."""
    with FaultProxy() as front:
        told = world.engine(advertise=(front.address,))
        front.target = told.address
        remote = told.register(bytearray(100))
        taker = world.engine(transports=("tcp",))
        segment = taker.open(told.address)
        local = taker.register(b"a" * 100)
        before = front.num_bytes
        move(taker, segment, Op.WRITE, local, remote.offset, 100)
        assert [rail.remote for rail in segment.rails] == [front.address]
        assert front.num_bytes > before + 100


def test_segment_use_after_close(world):
    giver, taker = world.engine(), world.engine()
    remote = giver.register(bytearray(10))
    local = taker.register(bytearray(10))
    segment = taker.open(giver.address)
    segment.close()
    with pytest.raises(NotFoundError):
        segment.close()
    with pytest.raises(NotFoundError):
        move(taker, segment, Op.READ, local, remote.offset, 1)
    other = world.engine()
    with pytest.raises(NotFoundError):
        other.submit([Transfer(Op.READ, local, segment, remote.offset, 1)])


def test_secret_must_match_and_stay_hidden(world):
    giver = world.engine()
    stranger = world.engine(secret="another secret, long enough")
    with pytest.raises(PermissionDeniedError, match="secret") as caught:
        stranger.open(giver.address)
    assert SECRET not in str(caught.value)
    mute = TransferEngine(TransferConfig())
    world.engines.append(mute)
    with pytest.raises(PermissionDeniedError):
        mute.open(giver.address)
    with pytest.raises(NotFoundError):
        _ = mute.address
    with pytest.raises(ConfigError):
        TransferConfig(secret="short")
    with pytest.raises(ConfigError, match=r"transfer\.secret is no valid text"):
        TransferConfig(secret=SECRET + "\ud800")


@pytest.mark.parametrize(
    "setting",
    [
        {"io_threads": 0},
        {"io_threads": -1},
        {"lanes": 65},
        {"deadline_ms": 10**40},
        {"nic_weight": float("nan")},
        {"rail_gbps": (1.0, -1.0)},
        {"transports": ("pigeon",)},
        {"name": 5},
    ],
    ids=str,
)
def test_settings_out_of_bounds_are_refused_in_python_too(setting):
    """An engine without threads was a crash of the process."""
    (name,) = setting
    with pytest.raises(ConfigError, match=f"transfer.{name}"):
        TransferConfig(**setting)


def test_strangers_bytes_do_not_disturb(world):
    """Garbage, silence and oversized frames on the port; a proper peer is served meanwhile."""
    giver = world.engine(handshake_timeout_ms=200)
    host, port = giver.address.rsplit(":", 1)
    silent = [socket.create_connection((host, int(port))) for _ in range(5)]
    loud = socket.create_connection((host, int(port)))
    loud.sendall(os.urandom(100_000))
    taker, remote = world.engine(), giver.register(bytearray(100))
    move(taker, taker.open(giver.address), Op.WRITE, taker.register(b"a" * 100), remote.offset, 100)
    for one in [*silent, loud]:
        one.settimeout(60)
        try:
            while one.recv(4096):
                pass
        except ConnectionError:
            pass
        one.close()


def test_replayed_handshake_is_refused(world):
    """What a listener on the wire recorded opens no second session: the nonces are fresh."""
    giver, taker = world.engine(), world.engine(transports=("tcp",))
    recorded: list[bytes] = []
    front = socket.create_server(("127.0.0.1", 0))

    def record():
        near, _ = front.accept()
        front.close()  # Nobody is there when the taker tries again.
        host, port = giver.address.rsplit(":", 1)
        far = socket.create_connection((host, int(port)))
        for one in (near, far):
            one.settimeout(60)
        recorded.append(near.recv(4096))  # Hello.
        far.sendall(recorded[0])
        near.sendall(far.recv(4096))
        recorded.append(near.recv(4096))  # Proof.
        near.close()
        far.close()

    thread = threading.Thread(target=record)
    thread.start()
    with pytest.raises((PeerLostError, DeadlineError)):
        taker.open(f"127.0.0.1:{front.getsockname()[1]}", deadline_s=60)
    thread.join(60)
    host, port = giver.address.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as replay:
        replay.settimeout(60)
        replay.sendall(recorded[0])
        assert replay.recv(4096)[4] == 2  # A challenge, with another nonce.
        replay.sendall(recorded[1])
        answer = replay.recv(4096)
        assert answer[4] == 4  # Ready ...
        assert answer[5] != 0  # ... with a refusal.


def test_notifications_come_in_order(world):
    giver, taker = world.engine(name="giver"), world.engine(name="taker")
    segment = taker.open(giver.address)
    for number in range(50):
        taker.notify(segment, f"n{number}", bytes([number]) * number)
    got = giver.notifications(1)
    assert [(n.peer, n.name, n.payload) for n in got] == [
        ("taker", f"n{number}", bytes([number]) * number) for number in range(50)
    ]
    assert giver.notifications() == []


def test_notification_queue_is_bounded(world):
    giver, taker = world.engine(max_notifications=3), world.engine()
    segment = taker.open(giver.address)
    for _ in range(3):
        taker.notify(segment, "x")
    with pytest.raises(CapacityError):
        taker.notify(segment, "one too many")
    assert len(giver.notifications()) == 3
    taker.notify(segment, "again")
    with pytest.raises(ConfigError):
        taker.notify(segment, "big", bytes(2 << 20))
    with pytest.raises(ConfigError, match="name is no valid text"):
        taker.notify(segment, "\ud800")


def test_await_and_cancelled_await(world):
    taker, segment, remote = open_pair(world, "tcp", 1 << 25, transports=("tcp",))
    data = world.random(1 << 25)
    local = taker.register(data)

    async def main():
        transfer = Transfer(Op.WRITE, local, segment, remote.offset, 1 << 25)
        batch = taker.submit([transfer])
        await asyncio.gather(batch, batch)
        await batch
        with pytest.raises(NotFoundError):
            await taker.submit([Transfer(Op.WRITE, local, segment, 1, 1)])
        for _ in range(50):
            batches = [taker.submit([transfer]) for _ in range(2)]
            awaiting = asyncio.gather(batches[-1])
            await asyncio.sleep(0)
            if batches[-1].is_finished:
                continue  # It was faster than we; try again.
            awaiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await awaiting
            assert batches[-1].is_finished
            for batch in batches[:-1]:
                await batch
            try:
                batches[-1].wait()
            except CancelledError:
                return
        pytest.fail("no batch was ever cancelled")

    asyncio.run(asyncio.wait_for(main(), 60))
    assert np.array_equal(remote.array, data)


def test_empty_batch_and_empty_transfer(world):
    taker, segment, remote = open_pair(world, "tcp", 10)
    taker.submit([]).wait(60)
    local = taker.register(bytearray(1))
    batch = taker.submit([Transfer(Op.READ, local, segment, remote.offset, 0)])
    batch.wait(60)
    batch.cancel()
    batch.wait(60)  # It had ended well: cancelling came too late.
    with pytest.raises(NotFoundError):
        batch.status(1)


def test_nobody_there(world):
    engine = world.engine()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(PeerLostError):
        engine.open(f"127.0.0.1:{port}", deadline_s=60)
    for bad in ("", "nowhere", "1.2.3.4", "::1:5", "[::1]", "127.0.0.1:99999"):
        with pytest.raises(ConfigError):
            engine.open(bad)
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        pytest.raises((DeadlineError, PeerLostError)),
    ):
        engine.open(f"127.0.0.1:{mute.getsockname()[1]}", deadline_s=0.3)


def test_address_in_use(world):
    engine = world.engine()
    with pytest.raises(ConflictError):
        world.engine(listen=(engine.address,))


def test_fork_leaves_the_parent_alone(world):
    taker, segment, remote = open_pair(world, "tcp", 1000, transports=("tcp",))
    local = taker.register(np.full(1000, 5, np.uint8))
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        verdict = b"?"
        try:
            try:
                move(taker, segment, Op.WRITE, local, remote.offset, 1000)
            except ConflictError:
                verdict = b"y"
            taker.close()
        finally:
            os.write(write_end, verdict)
            os._exit(0)
    os.close(write_end)
    assert os.read(read_end, 1) == b"y"
    os.close(read_end)
    assert os.waitpid(pid, 0)[1] == 0
    move(taker, segment, Op.WRITE, local, remote.offset, 1000)
    assert remote.array.sum() == 5000


IDLE = """
import sys, time
from tandem.transfer import Op, Transfer, TransferConfig, TransferEngine
giver = TransferEngine(TransferConfig(secret="x" * 32))
taker = TransferEngine(TransferConfig(secret="x" * 32, transports=("tcp",)))
remote = giver.register(bytearray(4096))
local = taker.register(bytearray(4096))
segment = taker.open(giver.address)
for _ in range(100):
    taker.submit([Transfer(Op.WRITE, local, segment, remote.offset, 4096)]).wait()
time.sleep(0.5)
print("ready", flush=True)
sys.stdin.read()
"""


def test_idle_engine_uses_no_cpu():
    """Its threads neither poll nor wake up by a timer."""
    check_idle_child(IDLE)


def test_cancel_wins_or_loses_cleanly(world):
    taker, segment, remote = open_pair(world, "tcp", 8 << 20, transports=("tcp",))
    target = np.zeros(8 << 20, np.uint8)
    local = taker.register(target)
    remote.array[:] = 9
    outcomes = set()
    for round_ in range(30):
        target[:] = 0
        batch = taker.submit([Transfer(Op.READ, local, segment, remote.offset, 8 << 20)])
        for _ in range(round_ * 300):
            pass
        batch.cancel()
        seen = target.copy()
        try:
            batch.wait(60)
            outcomes.add("done")
            assert (target == 9).all()
        except CancelledError:
            outcomes.add("cancelled")
        time.sleep(0.002)
        assert np.array_equal(seen, target)
    assert "cancelled" in outcomes
    move(taker, segment, Op.READ, local, remote.offset, 8 << 20)
    assert (target == 9).all()


@pytest.mark.parametrize("transport", ["local", "shm", "cma", "tcp"])
def test_deadline_ends_a_batch_that_nobody_waits_for(world, transport):
    taker, segment, remote = open_pair(world, transport, 64 << 20)
    local = taker.register(np.zeros(64 << 20, np.uint8))
    batches = [
        taker.submit(
            [Transfer(Op.WRITE, local, segment, remote.offset, 64 << 20)],
            deadline_s=0.01,
            transport=transport,
        )
        for _ in range(8)
    ]
    limit = time.monotonic() + 60
    while not all(batch.is_finished for batch in batches):
        assert time.monotonic() < limit
        time.sleep(0.001)
    with pytest.raises(DeadlineError):
        for batch in batches:
            batch.wait()


def test_rails_pair_addresses_that_are_near(world):
    """Fewer addresses here than there: each of theirs goes with the nearest of ours."""
    giver = world.engine(
        listen=("127.0.1.1:0", "127.0.2.1:0", "127.0.1.2:0", "127.0.2.2:0", "127.0.1.3:0")
    )
    taker = world.engine(transports=("tcp",), local_addresses=("127.0.1.9", "127.0.2.9"))
    pairs = [
        (rail.local.rsplit(":", 1)[0], rail.remote.rsplit(":", 1)[0])
        for rail in taker.open(giver.address).rails
    ]
    assert [local.split(".")[2] for local, _ in pairs] == ["1", "2", "1", "2", "1"]
    assert [remote.split(".")[2] for _, remote in pairs] == ["1", "2", "1", "2", "1"]
    more = world.engine(
        transports=("tcp",), local_addresses=tuple(f"127.0.{n}.9" for n in (1, 1, 2, 2, 1, 2))
    )
    listed = more.open(giver.address).rails
    assert len(listed) == 6
    for rail in listed:
        assert rail.local.split(".")[2] == rail.remote.split(".")[2]


def test_first_free_port_of_a_range_is_taken(world):
    first = world.engine(listen=("127.0.0.1:0",))
    low = int(first.address.rsplit(":", 1)[1])
    if low > 65_000:
        low -= 100
    high = low + 50
    taken = [world.engine(listen=(f"127.0.0.1:{low}-{high}",)) for _ in range(2)]
    ports = [int(engine.address.rsplit(":", 1)[1]) for engine in taken]
    assert ports == sorted(set(ports))
    assert all(low <= port <= high for port in ports)
    world.engine().open(taken[1].address)
    used = f"127.0.0.1:{ports[0]}-{ports[0]}"
    with pytest.raises(ConflictError):
        world.engine(listen=(used,))
    for wrong in ("127.0.0.1:9-8", "127.0.0.1:0-8", "127.0.0.1:70-70000", "127.0.0.1:1-", "h-o:"):
        with pytest.raises(ConfigError):
            world.engine(listen=(wrong,))

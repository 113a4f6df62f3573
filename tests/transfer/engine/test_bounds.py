"""What an engine holds for others, and after its end.

Goal: answers that a peer does not read cost the server no memory, also when the buffer goes; and a
closed engine keeps no thread and no descriptor. Method: a client made by hand that reads nothing,
and the process's own resident bytes, threads and descriptors.
"""

import contextlib
import gc
import os
import threading

import numpy as np
import pytest
from raw_wire import RAIL, READ, RawPeer, frame
from test_faults import rails, wait_until
from tests_transfer_world import SECRET, Op, Transfer, move

from tandem._native import RailState
from tandem.core.errors import ConflictError, NotFoundError, TandemError
from tandem.transfer import TransferConfig, TransferEngine

MIB = 1 << 20
SLICE_BYTES = 4 * MIB


def resident_bytes() -> int:
    """Of this process, shared memory that it has touched included."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ask_unread(peer: RawPeer, offset: int, count: int) -> None:
    """Send READs of 4 MiB without reading an answer."""
    asked = (frame(READ, id_=n + 1, offset=offset, length=SLICE_BYTES) for n in range(count))
    peer.stream.sendall(b"".join(asked))


def test_unregister_drops_what_a_peer_has_not_read(world):
    """200 unread answers of 4 MiB from one buffer: 800 MiB if they were copied."""
    giver = world.engine()
    buffer = giver.allocate(SLICE_BYTES)
    buffer.array[:] = 7
    with RawPeer.connect(giver.address, SECRET, RAIL) as peer:
        ask_unread(peer, buffer.offset, 200)
        # The first answer is sent when all requests, which come in one piece, have been queued.
        peer.stream.recv(1, 2)  # MSG_PEEK
        before = resident_bytes()
        giver.unregister(buffer, deadline_s=60)
        assert resident_bytes() - before < 64 * MIB
        # One answer had been begun: only the end of the connection takes it back.
        assert peer.is_closed()


def test_a_peer_that_leaves_a_gibibyte_unread_is_left(world):
    giver = world.engine()
    buffer = giver.allocate(SLICE_BYTES)
    before = resident_bytes()
    with RawPeer.connect(giver.address, SECRET, RAIL) as peer:
        ask_unread(peer, buffer.offset, 1500)
        assert peer.is_closed()
    giver.unregister(buffer, deadline_s=60)
    assert resident_bytes() - before < 64 * MIB


def test_reads_of_other_buffers_survive_an_unregister(world):
    """The connection with the begun answer is closed; what else it owed is asked for again."""
    with rails(world, 1) as (giver, taker, segment, proxies):
        wait_until(lambda: all(r.state == RailState.HEALTHY for r in segment.rails))
        size = 8 * MIB
        gone, kept = giver.allocate(size), giver.allocate(size)
        gone.array[:], kept.array[:] = 1, 2
        first, second = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        proxies[0].rate = 20e6
        batches = [
            taker.submit([Transfer(Op.READ, taker.register(data), segment, remote.offset, size)])
            for data, remote in ((first, gone), (second, kept))
        ]
        before = proxies[0].num_bytes
        wait_until(lambda: proxies[0].num_bytes > before + MIB)
        giver.unregister(gone, deadline_s=60)
        proxies[0].rate = 0
        with pytest.raises(NotFoundError):
            batches[0].wait(60)
        batches[1].wait(60)
        assert (second == 2).all()
        assert set(np.unique(first)) <= {0, 1}


def count_held() -> tuple[list[str], int]:
    """Threads and descriptors of this process."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as file:
            names.append(file.read().strip())
    # The kernel ends its own workers of a ring that was closed when it likes.
    kept = sorted(name for name in names if not name.startswith("iou-"))
    return kept, len(os.listdir("/proc/self/fd"))


def test_a_closed_engine_keeps_no_thread_and_no_descriptor(tmp_path):
    """While it, its segments and its batches are still referred to, and no cycle is collected."""
    gc.collect()
    gc.disable()
    try:
        before = count_held()
        giver = TransferEngine(TransferConfig(secret=SECRET, io_threads=2))
        taker = TransferEngine(TransferConfig(secret=SECRET, copy_threads=2))
        giver.serve_calls(lambda calls: [b""] * len(calls))
        remote, local = (each.register(np.zeros(MIB, np.uint8)) for each in (giver, taker))
        segment = taker.open(giver.address)
        for transport in ("tcp", "cma"):
            move(taker, segment, Op.WRITE, local, remote.offset, MIB, transport=transport)
        taker.call(segment, b"")
        file = taker.open_file(tmp_path / "f", length=MIB, writable=True)
        move(taker, file, Op.WRITE, local, 0, MIB)
        batch = taker.submit([Transfer(Op.READ, local, segment, remote.offset, MIB)])
        for engine in (taker, giver):
            engine.close(deadline_s=5)
        wait_until(lambda: count_held() == before)  # A Python thread ends after its join.
        assert batch.is_finished
        with pytest.raises(ConflictError):
            taker.submit([Transfer(Op.READ, local, segment, remote.offset, MIB)])
        with pytest.raises(ConflictError):
            taker.open(giver.address)
        batch.cancel()
        taker.close()
        assert count_held() == before
    finally:
        gc.enable()


def test_close_beside_calls_of_other_threads_leaves_nothing(world):
    """The last call that still runs ends the threads; nobody hangs."""
    giver = world.engine()
    remote = giver.allocate(MIB)
    before = count_held()
    for number in range(10):
        taker = TransferEngine(TransferConfig(secret=SECRET, transports=("tcp",)))
        segment = taker.open(giver.address)
        buffers = [taker.register(np.zeros(MIB, np.uint8)) for _ in range(3)]
        is_begun = threading.Semaphore(0)

        def use(local, taker=taker, segment=segment, is_begun=is_begun):
            try:
                while True:
                    move(taker, segment, Op.READ, local, remote.offset, MIB)
                    is_begun.release()
            except TandemError:
                return

        threads = [threading.Thread(target=use, args=(local,)) for local in buffers]
        for thread in threads:
            thread.start()
        for _ in range(1 + number % 5):
            assert is_begun.acquire(timeout=60)
        taker.close(deadline_s=5)
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    # The giver's ends of the connections are closed when it has seen that the others are.
    wait_until(lambda: count_held() == before)

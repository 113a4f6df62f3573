"""Calls: a handler answers each once, and whatever breaks is a typed error in time.

Goal: an answered call was executed exactly once, a failed one at most once and never after a later
one; no endless wait; hostile frames close one connection and nothing else. Method: handlers that
count what they execute, against threads, event loops, seeded proxies, killed processes and frames
written by hand.
"""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
import raw_wire as raw
from raw_wire import RawPeer
from tests_transfer_world import SECRET, child
from transfer_faults import FaultProxy

from idleness import check_idle_child, list_threads, observe
from tandem.core.errors import (
    CancelledError,
    CapacityError,
    ConfigError,
    ConflictError,
    CorruptionError,
    DeadlineError,
    InternalError,
    NotFoundError,
    PeerLostError,
    TandemError,
    UnsupportedError,
)
from tandem.transfer import MAX_CALL_BYTES


def echo(calls):
    return [call.payload for call in calls]


def open_pair(world, handler=echo, **settings):
    """Return a giver that serves, a taker, and the segment between them."""
    giver, taker = world.engine(name="giver"), world.engine(name="taker", **settings)
    if handler is not None:
        giver.serve_calls(handler)
    return giver, taker, taker.open(giver.address)


def test_a_call_in_two_steps(world):
    kept = []

    def answer_all_but_late(calls):
        kept.extend(call for call in calls if call.payload == b"late")
        return [None if call.payload == b"late" else call.payload for call in calls]

    _, taker, segment = open_pair(world, answer_all_but_late)
    calls = [taker.begin_call(segment, str(i).encode()) for i in range(20)]
    assert [call.wait(60) for call in reversed(calls)] == [
        str(i).encode() for i in reversed(range(20))
    ]
    with pytest.raises(ConflictError, match="taken before"):
        calls[3].wait(60)
    # What nobody waits for harms nobody.
    taker.begin_call(segment, b"left")
    assert taker.call(segment, b"next") == b"next"
    with pytest.raises(ConfigError):
        taker.begin_call(segment, bytes(MAX_CALL_BYTES + 1))
    pending = taker.begin_call(segment, b"late")
    taker.close()
    with pytest.raises(TandemError):
        pending.wait(60)


def test_a_call_in_two_steps_that_nobody_answers_in_time(world):
    keeper = Keeper()
    _, taker, segment = open_pair(world, keeper)
    pending = taker.begin_call(segment, b"kept")
    keeper.wait()
    with pytest.raises(DeadlineError):
        pending.wait(0.05)
    with pytest.raises(ConflictError):
        pending.wait(60)
    keeper.kept.pop().reply(b"late")


class Keeper:
    """A handler that answers nothing until it is told to."""

    def __init__(self):
        self.kept = []
        self.came = threading.Semaphore(0)

    def __call__(self, calls):
        self.kept.extend(calls)
        self.came.release(len(calls))
        return [None] * len(calls)

    def wait(self):
        assert self.came.acquire(timeout=60)


@pytest.mark.parametrize("polling_us", [0, 50])
def test_answers_are_those_of_the_handler(world, polling_us):
    names = set()

    def handler(calls):
        names.update(call.peer for call in calls)
        return [call.payload[::-1] for call in calls]

    _, taker, segment = open_pair(world, handler, polling_us=polling_us)
    for size in (0, 1, 200, 5000, 100_000, MAX_CALL_BYTES):
        payload = world.random(size).tobytes()
        assert taker.call(segment, payload) == payload[::-1]
    assert names == {"taker"}


def test_what_is_too_large_is_refused_and_nothing_else_suffers(world):
    answers = {b"large": bytes(MAX_CALL_BYTES + 1), b"small": b"yes"}
    _, taker, segment = open_pair(world, lambda calls: [answers[call.payload] for call in calls])
    with pytest.raises(ConfigError):
        taker.call(segment, bytes(MAX_CALL_BYTES + 1))
    with pytest.raises(InternalError, match="1048577"):
        taker.call(segment, b"large")
    assert taker.call(segment, b"small") == b"yes"
    with pytest.raises(TypeError):
        taker.call(segment, "text")


def test_calls_need_a_handler_and_only_one(world):
    giver, taker, segment = open_pair(world, None)
    with pytest.raises(UnsupportedError):
        taker.call(segment, b"")
    giver.serve_calls(echo)
    assert taker.call(segment, b"a") == b"a"
    with pytest.raises(ConflictError):
        giver.serve_calls(echo)


def test_errors_of_the_handler_reach_their_caller(world):
    def handler(calls):
        kind = calls[0].payload
        if kind == b"typed":
            raise CapacityError("test.handle", "the shelf is full")
        if kind == b"bug":
            raise ZeroDivisionError("by nought")
        if kind == b"count":
            return []
        return [NotFoundError("test.handle", "no such key") for _ in calls]

    _, taker, segment = open_pair(world, handler)
    with pytest.raises(CapacityError, match=r"\[test.handle\] the shelf is full"):
        taker.call(segment, b"typed")
    with pytest.raises(InternalError, match="by nought"):
        taker.call(segment, b"bug")
    with pytest.raises(InternalError, match="0 answers to 1 calls"):
        taker.call(segment, b"count")
    with pytest.raises(NotFoundError, match="no such key"):
        taker.call(segment, b"each")


def test_many_threads_share_a_connection(world):
    """Each call is executed once and gets its own answer; they overlap instead of queueing up."""
    executed: Counter[bytes] = Counter()
    largest = 0

    def handler(calls):
        nonlocal largest
        executed.update(call.payload for call in calls)
        largest = max(largest, len(calls))
        return [b"<" + call.payload + b">" for call in calls]

    _, taker, segment = open_pair(world, handler)
    wrong = []

    def work(number):
        for i in range(150):
            payload = f"{number}/{i}".encode()
            if taker.call(segment, payload) != b"<" + payload + b">":
                wrong.append(payload)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert len(executed) == 16 * 150
    assert set(executed.values()) == {1}
    assert largest > 1


def test_event_loops_await_calls(world):
    _, taker, segment = open_pair(world, lambda calls: [c.payload * 2 for c in calls])

    async def main():
        answers = await asyncio.gather(
            *(taker.call_async(segment, bytes([i % 256])) for i in range(500))
        )
        assert answers == [bytes([i % 256]) * 2 for i in range(500)]
        with pytest.raises(ConfigError):
            await taker.call_async(segment, bytes(MAX_CALL_BYTES + 1))

    asyncio.run(main())
    asyncio.run(main())  # Another loop, another inbox.


def test_a_cancelled_await_leaves_the_others_alone(world):
    keeper = Keeper()
    _, taker, segment = open_pair(world, keeper)

    async def main():
        task = asyncio.create_task(taker.call_async(segment, b"left"))
        other = asyncio.create_task(taker.call_async(segment, b"kept"))
        for _ in range(2):
            await asyncio.to_thread(keeper.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for call in keeper.kept:
            call.reply(call.payload)
        assert await other == b"kept"
        with pytest.raises(DeadlineError):
            await taker.call_async(segment, b"late", deadline_s=0.05)

    asyncio.run(main())


def test_awaited_calls_end_in_the_order_of_their_deadlines(world):
    _, taker, segment = open_pair(world, Keeper())

    async def main():
        ended = []

        async def call(deadline_s):
            with pytest.raises(DeadlineError):
                await taker.call_async(segment, b"", deadline_s=deadline_s)
            ended.append(deadline_s)

        patient = asyncio.ensure_future(taker.call_async(segment, b"", deadline_s=600))
        deadlines = (0.3, 0.1, 0.2, 0.1, *(0.3 + 0.0005 * i for i in range(50)))
        await asyncio.gather(*map(call, deadlines))
        assert ended[:3] == [0.1, 0.1, 0.2]
        assert sorted(ended) == sorted(deadlines)
        await call(0.05)  # The timers of those before do not count for it.
        assert not patient.done(), "nor did one of them end a call that has more time"
        patient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await patient

    asyncio.run(main())


def test_a_late_answer_is_nobodys(world):
    keeper = Keeper()
    _, taker, segment = open_pair(world, keeper)
    with pytest.raises(DeadlineError):
        taker.call(segment, b"late", deadline_s=0.1)
    keeper.wait()
    keeper.kept.pop().reply(b"the answer to another question")
    for number in range(20):
        answer = asyncio.run(_ask_and_answer(taker, segment, keeper, number))
        assert answer == str(number).encode()


async def _ask_and_answer(taker, segment, keeper, number):
    task = asyncio.create_task(taker.call_async(segment, str(number).encode()))
    await asyncio.to_thread(keeper.wait)
    call = keeper.kept.pop()
    assert call.reply(call.payload)
    assert not call.reply(b"twice")
    return await task


def test_a_dropped_call_is_refused(world):
    def forget(calls):
        gc.collect()
        return [None] * len(calls)

    _, taker, segment = open_pair(world, forget)
    with pytest.raises(InternalError, match="no answer"):
        taker.call(segment, b"", deadline_s=60)


def test_a_call_may_be_answered_from_another_thread(world):
    keeper = Keeper()
    _, taker, segment = open_pair(world, keeper)

    def answer():
        keeper.wait()
        call = keeper.kept.pop()
        with pytest.raises(ConfigError):
            call.reply(bytes(MAX_CALL_BYTES + 1))
        call.fail(CapacityError("test.answer", "later"))

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(CapacityError):
        taker.call(segment, b"")
    thread.join(60)


def test_too_many_unanswered_calls_are_refused_at_once(world):
    keeper = Keeper()
    _, taker, segment = open_pair(world, keeper)

    async def main():
        tasks = [
            asyncio.create_task(taker.call_async(segment, bytes(MAX_CALL_BYTES), deadline_s=60))
            for _ in range(70)
        ]
        refused = [task for task in tasks if await _fails(task, CapacityError)]
        assert len(refused) == 70 - 64  # MiB.
        for _ in range(64):
            await asyncio.to_thread(keeper.wait)
        for call in keeper.kept:
            call.reply(b"")
        keeper.kept.clear()
        assert {await task for task in tasks if task not in refused} == {b""}

    async def _fails(task, kind):
        await asyncio.wait([task], timeout=0.02)
        return task.done() and isinstance(task.exception(), kind)

    asyncio.run(main())


SERVER = """
import sys, threading
from tandem.transfer import TransferConfig, TransferEngine
engine = TransferEngine(TransferConfig(secret=sys.argv[1]))
kept = []
def handler(calls):
    kept.extend(calls)
    return [call.payload if call.payload != b"keep" else None for call in calls]
engine.serve_calls(handler)
print(engine.address, flush=True)
sys.stdin.read()
"""


def call_in_thread(taker, segment, payload, **how):
    """Return a thread that calls, and where its outcome will be."""
    outcome = []

    def work():
        try:
            outcome.append(taker.call(segment, payload, **how))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, outcome


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_dies_in_a_call_is_lost(world, how):
    taker = world.engine(lease_ms=500)
    with child(SERVER) as (process, address):
        segment = taker.open(address)
        assert taker.call(segment, b"hello") == b"hello"
        thread, outcome = call_in_thread(taker, segment, b"keep", deadline_s=30)
        assert taker.call(segment, b"behind it") == b"behind it"
        os.kill(process.pid, how)
        thread.join(60)
        assert isinstance(outcome[0], PeerLostError), "lost before the deadline, which is 30 s"
        with pytest.raises(PeerLostError):
            for _ in range(100):
                taker.call(segment, b"again", deadline_s=60)
        if how == signal.SIGSTOP:
            os.kill(process.pid, signal.SIGCONT)


def test_a_peer_that_stops_before_the_first_call_is_lost(world):
    """Its connection for calls is never ready; nobody watches that in a busy loop, either."""
    before = list_threads()
    taker = world.engine(lease_ms=600)
    with child(SERVER) as (process, address):
        segment = taker.open(address)
        os.kill(process.pid, signal.SIGSTOP)
        # Its threads run on until each has taken the signal, and might still answer.
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        # Not DeadlineError: the lease ends first.
        thread, outcome = call_in_thread(taker, segment, b"hello", deadline_s=60)
        seen = observe({*list_threads() - before, str(thread.native_id)}, until=outcome.__len__)
        thread.join(60)
        assert isinstance(outcome[0], PeerLostError)
        assert len(seen) > 1, "the one that calls, and the engine's"
        for each in seen.values():
            assert each.num_awake * 2 <= each.num_looks, seen
        os.kill(process.pid, signal.SIGCONT)


KEEPER = """
import queue, sys
from tandem.transfer import TransferConfig, TransferEngine
kept = queue.Queue()
def handler(calls):
    for call in calls:
        kept.put(call)
    return [None] * len(calls)
engine = TransferEngine(TransferConfig(secret=sys.argv[1]))
engine.serve_calls(handler)
print(engine.address, flush=True)
for line in sys.stdin:
    call = kept.get(timeout=60)
    print("kept", flush=True)
    sys.stdin.readline()
    call.reply(b"at last")
"""
WAITER = """
import sys
from tandem.transfer import TransferConfig, TransferEngine
engine = TransferEngine(TransferConfig(secret=sys.argv[1], lease_ms=600))
segment = engine.open(sys.argv[2])
print("open", flush=True)
while sys.stdin.readline():
    try:
        print(engine.call(segment, b"x", deadline_s=60).decode(), flush=True)
    except Exception as error:
        print(repr(error), flush=True)
"""


def test_a_machine_that_stood_still_loses_nobody(world):
    """Who wakes first has heard nothing for longer than the lease, and has slept itself."""
    with (
        child(KEEPER) as (keeper, address),
        child(WAITER, address) as (waiter, _),
    ):
        for _ in range(3):
            for process in (waiter, keeper):
                process.stdin.write("go\n")
                process.stdin.flush()
            assert keeper.stdout.readline() == "kept\n"
            for process in (keeper, waiter):
                os.kill(process.pid, signal.SIGSTOP)
            time.sleep(1.5)
            os.kill(waiter.pid, signal.SIGCONT)
            time.sleep(0.05)  # Time enough to give the other one up.
            os.kill(keeper.pid, signal.SIGCONT)
            keeper.stdin.write("answer\n")
            keeper.stdin.flush()
            assert waiter.stdout.readline() == "at last\n"


def test_a_slow_handler_is_no_lost_peer(world):
    """The lease is about the peer's process: an answer may take longer."""
    keeper = Keeper()
    _, taker, segment = open_pair(world, keeper, lease_ms=200)
    thread, outcome = call_in_thread(taker, segment, b"slow", deadline_s=20)
    keeper.wait()
    thread.join(1.0)
    assert thread.is_alive()
    keeper.kept.pop().reply(b"at last")
    thread.join(60)
    assert outcome == [b"at last"]


@pytest.mark.parametrize("end", ["giver", "taker", "segment"])
def test_closing_ends_calls(world, end):
    keeper = Keeper()
    giver, taker, segment = open_pair(world, keeper)
    thread, outcome = call_in_thread(taker, segment, b"x", deadline_s=30)
    keeper.wait()
    {"giver": giver, "taker": taker, "segment": segment}[end].close()
    thread.join(60)
    expected = PeerLostError if end == "giver" else CancelledError
    assert isinstance(outcome[0], expected)
    late = {"giver": PeerLostError, "taker": ConflictError, "segment": NotFoundError}[end]
    with pytest.raises(late):
        for _ in range(100):
            taker.call(segment, b"x", deadline_s=60)
    # The others learn of the end when they read it.
    assert end != "giver" or not keeper.kept.pop().reply(b"in vain")


def test_a_forked_child_can_neither_call_nor_serve(world):
    _, taker, segment = open_pair(world)
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                taker.call(segment, b"x")
            except ConflictError:
                try:
                    taker.serve_calls(echo)
                except ConflictError:
                    code = 0
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert taker.call(segment, b"x") == b"x"


def test_calls_survive_a_connection_that_breaks(world):
    """Each attempt is executed at most once, an answered one exactly once, and in order."""
    executed = []

    def handler(calls):
        executed.extend(int(call.payload) for call in calls)
        return echo(calls)

    giver = world.engine()
    giver.serve_calls(handler)
    with FaultProxy(5, giver.address) as proxy:
        taker = world.engine(transports=("tcp",))
        segment = taker.open(proxy.address)
        answered, failed, attempt = set(), 0, 0
        stop = threading.Event()

        def cut():
            while not stop.wait(0.03):
                proxy.cut()

        cutter = threading.Thread(target=cut)
        cutter.start()
        limit = time.monotonic() + 60
        try:
            while (len(answered) < 300 or failed < 5) and time.monotonic() < limit:
                attempt += 1
                try:
                    assert taker.call(segment, str(attempt).encode(), deadline_s=60) == (
                        str(attempt).encode()
                    )
                    answered.add(attempt)
                except PeerLostError:
                    failed += 1
        finally:
            stop.set()
            cutter.join(60)
        assert len(answered) >= 300
        assert failed >= 5
        counts = Counter(executed)
        assert max(counts.values()) == 1
        assert answered <= set(counts)
        assert executed == sorted(executed)
        taker.close(deadline_s=5)


@pytest.mark.parametrize("fault", ["drop_frames", "duplicate", "reorder", "corrupt"])
def test_frames_that_go_astray_are_typed_errors(world, fault):
    counts: Counter[bytes] = Counter()

    def handler(calls):
        counts.update(call.payload for call in calls)
        return echo(calls)

    giver = world.engine()
    giver.serve_calls(handler)
    with FaultProxy(6, giver.address) as proxy:
        taker = world.engine(transports=("tcp",), handshake_timeout_ms=300)
        segment = taker.open(proxy.address)
        setattr(proxy, fault, 0.05)
        outcomes: Counter[str] = Counter()
        for number in range(150):
            payload = f"call {number}".encode()
            try:
                assert taker.call(segment, payload, deadline_s=0.2) == payload
                assert counts[payload] == 1
                outcomes["answered"] += 1
            except (PeerLostError, DeadlineError) as error:
                outcomes[type(error).__name__] += 1
        assert max(counts.values()) == 1
        assert outcomes["answered"] >= 20
        assert proxy.num_faults > 0
        taker.close(deadline_s=5)


def hostile_frames():
    ok = raw.frame(raw.CALL, b"ok", id_=5)
    yield "a number that does not rise", raw.CALLS, [ok, raw.frame(raw.CALL, b"again", id_=5)]
    yield "number zero", raw.CALLS, [raw.frame(raw.CALL, b"zero", id_=0)]
    yield "over the control connection", raw.CONTROL, [ok]
    yield "over a rail", raw.RAIL, [ok]
    yield "too large", raw.CALLS, [raw.frame(raw.CALL, id_=1, size=MAX_CALL_BYTES + 1)]
    yield "an answer from a client", raw.CALLS, [raw.frame(raw.REPLY, b"x", id_=1)]
    bad = bytearray(ok)
    bad[-1] ^= 1
    yield "a wrong check sum", raw.CALLS, [bytes(bad)]
    yield "an unknown type", raw.CALLS, [raw.frame(50, id_=1)]
    yield "garbage after a call", raw.CALLS, [ok, os.urandom(200)]


@pytest.mark.parametrize(("role", "frames"), [f[1:] for f in hostile_frames()],
                         ids=[f[0] for f in hostile_frames()])  # fmt: skip
def test_hostile_frames_close_their_connection_only(world, role, frames):
    giver, taker, segment = open_pair(world)
    with RawPeer.connect(giver.address, SECRET, role) as hostile:
        for one in frames:
            hostile.stream.sendall(one)
        assert hostile.is_closed()
    assert taker.call(segment, b"still here") == b"still here"


def test_a_call_in_pieces_and_calls_in_one_piece(world):
    giver, *_ = open_pair(world)
    with RawPeer.connect(giver.address, SECRET, raw.CALLS) as peer:
        for byte in raw.frame(raw.CALL, b"slowly", id_=1):
            peer.stream.sendall(bytes([byte]))
        assert peer.receive() == ((raw.REPLY, 0, 1), b"slowly")
        peer.stream.sendall(b"".join(raw.frame(raw.CALL, b"%d" % i, id_=i) for i in range(2, 900)))
        assert [peer.receive()[1] for _ in range(2, 900)] == [b"%d" % i for i in range(2, 900)]


def test_a_half_sent_call_is_not_executed(world):
    seen = []
    giver, taker, segment = open_pair(
        world, lambda calls: [seen.append(c.payload) or b"" for c in calls]
    )
    with RawPeer.connect(giver.address, SECRET, raw.CALLS) as peer:
        peer.stream.sendall(raw.frame(raw.CALL, b"half a call", id_=1)[:-3])
    taker.call(segment, b"whole")
    assert seen == [b"whole"]


def test_a_peer_that_reads_no_answers_is_dropped(world):
    """What it asks is bounded by what is answered: its connection ends, ours lives."""
    giver, taker, segment = open_pair(world, lambda calls: [bytes(MAX_CALL_BYTES) for _ in calls])
    with RawPeer.connect(giver.address, SECRET, raw.CALLS) as greedy:
        with contextlib.suppress(ConnectionError, TimeoutError):
            for i in range(1, 400):
                greedy.stream.sendall(raw.frame(raw.CALL, b"", id_=i))
        assert taker.call(segment, b"x") == bytes(MAX_CALL_BYTES)
        assert greedy.is_closed()


def serve_raw(version, script):
    """Serve handshakes and descriptions; ``script(peer)`` has the connection of calls."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(60)
    peers = []

    def serve_one(peer):
        with contextlib.suppress(EOFError, OSError):
            role = peer.accept(SECRET, version)
            if role == raw.CALLS:
                script(peer)
            while role != raw.CALLS:
                (kind, _, id_), _ = peer.receive()
                if kind == raw.DESCRIBE:
                    empty = raw.text("raw") + struct.pack("<HI", 0, 0)
                    peer.stream.sendall(raw.frame(raw.DESCRIPTION, empty))
                elif kind == raw.PING:
                    peer.stream.sendall(raw.frame(raw.PONG, id_=id_))

    def serve():
        with contextlib.suppress(OSError):
            while True:
                peers.append(RawPeer(listener.accept()[0]))
                threading.Thread(target=serve_one, args=(peers[-1],), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return listener, peers


@contextlib.contextmanager
def raw_server(version, script):
    listener, peers = serve_raw(version, script)
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()
        for peer in peers:
            peer.stream.close()


def test_an_older_peer_is_not_asked(world):
    with raw_server(1, lambda peer: pytest.fail("it was asked")) as address:
        taker = world.engine()
        with pytest.raises(UnsupportedError, match="version 1"):
            taker.call(taker.open(address), b"x")
        taker.close(deadline_s=5)


@pytest.mark.parametrize("answer", ["twice", "unasked", "error", "oversized", "cut"])
def test_a_hostile_server_is_a_typed_error(world, answer):
    def script(peer):
        (kind, _, id_), payload = peer.receive()
        assert kind == raw.CALL
        good = raw.frame(raw.REPLY, payload, id_=id_)
        frames = {
            "twice": good + good,
            "unasked": raw.frame(raw.REPLY, payload, id_=id_ + 7),
            "error": raw.frame(raw.REPLY, b"\xff" * 9, id_=id_, code=3),
            "oversized": raw.frame(raw.REPLY, id_=id_, size=MAX_CALL_BYTES + 1),
            "cut": good[:-1],
        }
        peer.stream.sendall(frames[answer])
        if answer == "cut":
            peer.stream.shutdown(socket.SHUT_RDWR)
        peer.receive()

    with raw_server(2, script) as address:
        taker = world.engine(handshake_timeout_ms=300, lease_ms=500)
        segment = taker.open(address)
        expected = CorruptionError if answer == "error" else PeerLostError
        if answer == "twice":
            assert taker.call(segment, b"x", deadline_s=60) == b"x"
        else:
            with pytest.raises(expected):
                taker.call(segment, b"x", deadline_s=60)
        taker.close(deadline_s=5)


IDLE = """
import sys, time
from tandem.transfer import TransferConfig, TransferEngine
one, two = (TransferEngine(TransferConfig(secret="x" * 32)) for _ in range(2))
one.serve_calls(lambda calls: [call.payload for call in calls])
segment = two.open(one.address)
for _ in range(100):
    two.call(segment, b"x")
time.sleep(0.3)
print("ready", flush=True)
sys.stdin.read()
two.close()
one.close()
"""


def test_an_idle_server_of_calls_uses_no_cpu():
    """Its threads neither poll nor wake up by a timer."""
    check_idle_child(IDLE)


def test_an_engine_that_serves_ends_with_its_process():
    """No close, a handler that is asleep: the interpreter ends all the same."""
    code = SERVER.replace("sys.stdin.read()", "")
    done = subprocess.run(
        [sys.executable, "-c", code, SECRET], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stderr == ""

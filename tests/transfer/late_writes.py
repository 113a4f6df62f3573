"""Rounds of one failed and one later WRITE against another process that is stopped or slow."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from tests_transfer_world import SECRET, move

from tandem.core.errors import CancelledError, DeadlineError, PeerLostError
from tandem.transfer import Op, Transfer, TransferConfig, TransferEngine

MIB = 1 << 20
RANGE_BYTES = 2 * MIB
NUM_RANGES = 64
RUN_S, STOP_S = 0.005, 0.015
"""Turns of a process that is slowed down."""

FAR = """
import sys, numpy as np
from tandem.transfer import TransferConfig, TransferEngine
engine = TransferEngine(TransferConfig(name="far", secret=sys.argv[1], io_threads=2))
buffer = engine.allocate(int(sys.argv[2]), name="shared")
print(engine.address, buffer.offset, flush=True)
for line in sys.stdin:
    begin, length, value = map(int, line.split())
    print(int((buffer.array[begin:begin + length] == value).sum()), flush=True)
"""

WRITER = """
import sys, numpy as np
from tandem.transfer import Op, Transfer, TransferConfig, TransferEngine
address, offset, length = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
engine = TransferEngine(TransferConfig(secret=sys.argv[1], transports=("tcp",), lease_ms=60_000,
                                       stall_ms=60_000))
segment = engine.open(address)
local = engine.register(np.full(length, 1, np.uint8))
warm = engine.submit([Transfer(Op.WRITE, local, segment, offset, 1)]).wait()
print("ready", flush=True)
sys.stdin.readline()
batch = engine.submit([Transfer(Op.WRITE, local, segment, offset, length)])
print("begun", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Case:
    """How the first WRITE moves and ends, and how the second one comes."""

    first: str
    second: str
    lanes: int
    end: str  # "cancel", "deadline", "lost" or "close".
    reopening: str  # "same", "again", "other engine" or "opened before".
    is_stopped: bool = True


def all_cases() -> Iterator[Case]:
    """Every combination that makes sense."""
    transports = ("tcp", "shm", "cma")
    for first, second, lanes in itertools.product(transports, transports, (1, 4)):
        for end in ("cancel", "deadline", "lost", "close"):
            for reopening in ("same", "again", "other engine", "opened before"):
                if end in ("lost", "close") and reopening == "same":
                    continue
                if end == "lost" and first != "tcp":
                    continue  # A copy needs no answer.
                yield Case(first, second, lanes, end, reopening)


class FarProcess:
    """A process whose memory is written; it can be stopped. A context manager."""

    def __init__(self) -> None:
        words = [sys.executable, "-c", FAR, SECRET, str(NUM_RANGES * RANGE_BYTES)]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.address, offset = self.process.stdout.readline().split()
        self.offset = int(offset)
        self.expected: dict[int, int] = {}

    def stop(self) -> None:
        """Stop it; returns when no thread of it runs any more."""
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        """Continue it."""
        os.kill(self.process.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def slowed_down(self) -> Iterator[None]:
        """Let it run a quarter of the time, in turns of a few milliseconds.

        As if it had little of a busy core, on any machine, and without keeping the core busy.
        """
        is_over = threading.Event()

        def take_turns() -> None:
            while not is_over.wait(RUN_S):
                os.kill(self.process.pid, signal.SIGSTOP)
                is_over.wait(STOP_S)
                self.go_on()

        thread = threading.Thread(target=take_turns)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def count(self, offset: int, length: int, value: int) -> int:
        """Ask how many bytes of a range hold this value."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{offset - self.offset} {length} {value}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def settle(self) -> None:
        """Return when it has read what connections that were closed had left behind."""
        engine = self.make_engine(("tcp",), 4)
        with engine, engine.open(self.address) as segment:
            local = engine.register(np.zeros(RANGE_BYTES, np.uint8))
            for _ in range(8):
                move(engine, segment, Op.READ, local, self.offset, RANGE_BYTES, deadline_s=30)

    def make_engine(self, transports: tuple[str, ...], lanes: int = 1, **how) -> TransferEngine:
        """Make an engine of this process that reaches the far one."""
        settings = {
            "secret": SECRET,
            "transports": transports,
            "lanes": lanes,
            "handshake_timeout_ms": 60_000,
            "stall_ms": 60_000,
            "lease_ms": 60_000,
            "deadline_ms": 60_000,
            **how,
        }
        return TransferEngine(TransferConfig(**settings))

    @contextlib.contextmanager
    def writer_of_another_process(self, offset: int, length: int) -> Iterator["OtherWriter"]:
        """Start a process that has a segment of this one open and writes when it is told."""
        writer = OtherWriter(self.address, offset, length)
        try:
            yield writer
        finally:
            writer.kill()

    def check_all(self, num_rounds: int) -> None:
        """Compare every range with what was written there last."""
        self.settle()
        for place, value in self.expected.items():
            seen = self.count(place, RANGE_BYTES, value)
            assert seen == RANGE_BYTES, f"{RANGE_BYTES - seen} old bytes after {num_rounds} rounds"

    def __enter__(self) -> "FarProcess":
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


class OtherWriter:
    """Another process that begins one WRITE and may be killed in the middle of it."""

    def __init__(self, address: str, offset: int, length: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, SECRET, address, str(offset), str(length)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._expect("ready")

    def begin(self) -> None:
        """Submit the WRITE; what the socket takes is on its way when this returns."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self._expect("begun")

    def kill(self) -> None:
        """End it; returns when it is dead."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate(timeout=10)

    def _expect(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == line


def run_case(far: FarProcess, case: Case, number: int) -> bool:
    """Do one round; False if old bytes were seen. Its range is looked at again at the end."""
    place = far.offset + number % NUM_RANGES * RANGE_BYTES
    old_value, new_value = 1 + number % 100, 101 + number % 100
    transports = ("shm", "cma", "tcp")
    lease = {"lease_ms": 150} if case.end == "lost" else {}
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(far.make_engine(transports, case.lanes, **lease))
        other = stack.enter_context(far.make_engine(transports, case.lanes))
        segment = engine.open(far.address)
        before = other.open(far.address)
        data = np.full(RANGE_BYTES, new_value, np.uint8)
        new = other.register(data)
        for each, path, local in (
            (engine, segment, engine.register(bytearray(1))),
            (other, before, other.register(bytearray(1))),
        ):
            # Maps the buffer and asks over the rails, while the far process can answer.
            for transport in dict.fromkeys((case.first, case.second)):
                move(each, path, Op.READ, local, place, 1, transport=transport)
        if case.is_stopped:
            far.stop()
        try:
            _fail_first(case, engine, segment, place, old_value)
            batch = None
            if case.reopening == "opened before":
                transfer = Transfer(Op.WRITE, new, before, place, RANGE_BYTES)
                batch = other.submit([transfer], transport=case.second)
        finally:
            far.go_on()
        if batch is None:
            if case.reopening == "same":
                writer, path = engine, segment
            else:
                writer = other if case.reopening == "other engine" else engine
                if case.end != "close" and writer is engine:
                    segment.close()
                path = writer.open(far.address)
            local = new if writer is other else writer.register(data)
            transfer = Transfer(Op.WRITE, local, path, place, RANGE_BYTES)
            batch = writer.submit([transfer], transport=case.second)
        batch.wait()
        far.expected[place] = new_value
        # Twice: bytes that are late come after the first look.
        looks = [far.count(place, RANGE_BYTES, new_value) for _ in range(2)]
        return looks == [RANGE_BYTES] * 2


def _fail_first(case: Case, engine, segment, place: int, value: int) -> None:
    local = engine.register(np.full(RANGE_BYTES, value, np.uint8))
    transfer = Transfer(Op.WRITE, local, segment, place, RANGE_BYTES)
    batch = engine.submit([transfer], transport=case.first)
    with contextlib.suppress(CancelledError, DeadlineError, PeerLostError):
        match case.end:
            case "cancel":
                batch.cancel()
                batch.wait()
            case "deadline":
                batch.wait(0)
            case "lost":
                batch.wait()
            case "close":
                segment.close()
                batch.wait()

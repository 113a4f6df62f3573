"""Processes that share a NIC divide it by weight; one that dies leaves its share at once.

Method: real processes with real boards in shared memory, over a shaped veth pair (root, iproute2);
and the board alone, against what others may have written into it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
from tests_transfer_world import SECRET, move
from two_hosts import needs_namespaces, two_hosts

from tandem.core.errors import PermissionDeniedError, UnsupportedError

RATE_MBIT = 200

SENDER = """
import sys, threading, time
import numpy as np
from tandem.transfer import Op, Transfer, TransferConfig, TransferEngine
secret, address, local, weight = sys.argv[1:]
engine = TransferEngine(TransferConfig(
    secret=secret, transports=("tcp",), local_addresses=(local,), rail_gbps=(0.2,),
    nic_weight=float(weight) if weight != "none" else None))
segment = engine.open(address)
remote = segment.buffer("buffer")
memory = engine.register(np.zeros(4 << 20, np.uint8))
def send():
    while True:
        batch = engine.submit([Transfer(Op.WRITE, memory, segment, remote.offset, 4 << 20)])
        batch.wait(60)
threading.Thread(target=send, daemon=True).start()
print("ready", flush=True)
for _ in sys.stdin:
    print(sum(rail.bytes_moved for rail in segment.rails), flush=True)
"""


class Sender:
    """A process that writes as fast as it may."""

    def __init__(self, hosts, weight) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SENDER, SECRET, f"{hosts.theirs[0]}:7000", hosts.ours[0],
             str(weight)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout.readline().strip() == "ready"

    def bytes_moved(self) -> int:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def __enter__(self):
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


def measure(senders, seconds: float) -> list[float]:
    """Bytes per second of each."""
    before = [sender.bytes_moved() for sender in senders]
    begin = time.monotonic()
    time.sleep(seconds)
    after = [sender.bytes_moved() for sender in senders]
    took = time.monotonic() - begin
    return [(b - a) / took for a, b in zip(before, after, strict=True)]


@needs_namespaces
@pytest.mark.slow
@pytest.mark.parametrize("weights", [(3, 1), (1, 1)])
def test_shares_follow_weights_and_the_dead_leave_theirs(weights):
    with two_hosts((RATE_MBIT,)) as hosts, contextlib.ExitStack() as stack:
        senders = [stack.enter_context(Sender(hosts, weight)) for weight in weights]
        measure(senders, 1.0)  # Shares settle within some refreshes of 20 ms.
        seen = []
        for _ in range(6):
            rates = measure(senders, 1.5)
            part = [rate / sum(rates) for rate in rates]
            wanted = [weight / sum(weights) for weight in weights]
            worst = max(abs(p / w - 1) for p, w in zip(part, wanted, strict=True))
            used = sum(rates) / (RATE_MBIT * 1e6 / 8)
            seen.append((worst, used))
            print(f"weights {weights}: parts {part}, worst {worst:.3f}, {used:.2f} of the rate")
            # In one window: senders that get no core on a busy machine leave the link unused.
            if worst < 0.1 and used > 0.85:
                break
        else:
            pytest.fail(f"no window within 10 % of the weights that used the link: {seen}")
        # The lighter one gets all when the other is killed with its share held.
        survivor = senders[1]
        os.kill(senders[0].process.pid, signal.SIGKILL)
        killed = time.monotonic()
        rates, at, last = [], [killed], survivor.bytes_moved()
        while time.monotonic() - killed < 0.6:
            time.sleep(0.04)
            moved = survivor.bytes_moved()
            at.append(time.monotonic())
            rates.append((moved - last) / (at[-1] - at[-2]))
            last = moved
        full = RATE_MBIT * 1e6 / 8
        first = next((i for i, rate in enumerate(rates) if rate > 0.85 * full), None)
        print("survivor, of the whole:", [f"{t - killed:.2f}s {r / full:.2f}" for t, r in
                                          zip(at[1:], rates, strict=True)])  # fmt: skip
        assert first is not None
        # The window that shows it began at most 100 ms after the kill.
        assert at[first] - killed < 0.1


def test_alone_nothing_is_held(world):
    giver = world.engine()
    taker = world.engine(transports=("tcp",), local_addresses=("127.0.0.1",), nic_weight=1)
    remote = giver.allocate(1 << 20)
    local = taker.register(bytearray(1 << 20))
    segment = taker.open(giver.address)
    for _ in range(20):
        move(taker, segment, 1, local, remote.offset, 1 << 20)
    assert taker.quota_rates == [float("inf")]


def find_board() -> str:
    """Return the board of the loopback device, as this network namespace has one of its own."""
    space = os.stat("/proc/self/ns/net").st_ino
    return f"/dev/shm/tandem-{os.getuid()}-{space}-lo"


def test_board_is_ours_alone(world):
    engine = world.engine(local_addresses=("127.0.0.1",), nic_weight=1)
    path = find_board()
    assert os.stat(path).st_mode & 0o777 == 0o600
    engine.close()
    del engine
    os.chmod(path, 0o666)
    try:
        with pytest.raises(PermissionDeniedError, match="not ours alone"):
            world.engine(local_addresses=("127.0.0.1",), nic_weight=1)
    finally:
        os.chmod(path, 0o600)
    with open(path, "r+b") as file:
        good = file.read()
        file.seek(0)
        file.write(b"garbage!")
    try:
        with pytest.raises(UnsupportedError, match="layout"):
            world.engine(local_addresses=("127.0.0.1",), nic_weight=1)
    finally:
        with open(path, "r+b") as file:
            file.write(good)


def test_nonsense_on_the_board_holds_nobody(world):
    """Slots full of random words, as a broken process might leave them: still a rate above 0."""
    giver = world.engine()
    taker = world.engine(transports=("tcp",), local_addresses=("127.0.0.1",), nic_weight=1)
    remote, local = giver.allocate(1 << 20), taker.register(bytearray(1 << 20))
    segment = taker.open(giver.address)
    with open(find_board(), "r+b", buffering=0) as file:
        good = file.read()
        for _ in range(5):
            # Own slot first, others after it; the header and our owner word stay.
            file.seek(64 + 64)
            file.write(os.urandom(len(good) - 128))
            for _ in range(30):
                move(taker, segment, 1, local, remote.offset, 1 << 20, deadline_s=10)
        file.seek(0)
        file.write(good[:64] + bytes(len(good) - 64))

"""Everything at random for a long time: resident memory and descriptors of both sides stay flat.

``python tests/transfer/soak.py MINUTES``: batches on every transport, cancels, files, calls,
notifications, registrations, reopened segments; asleep three quarters of the time. Prints a line a
minute, and fails if a side holds more descriptors, or much more memory, all through the last third
of the time than ever in the first.
"""

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tandem.core.errors import CancelledError, DeadlineError, PeerLostError
from tandem.transfer import Op, Segment, Transfer, TransferConfig, TransferEngine

MIB = 1 << 20
SECRET = "the secret of a soak, of no other use"
NUM_LOOKS = 60
MEMORY_SLACK = 24 * MIB
"""What a short run takes to warm up; a leak of a kilobyte a round is above this in minutes."""

GIVER = """
import sys
import numpy as np
from tandem.transfer import TransferConfig, TransferEngine
engine = TransferEngine(TransferConfig(secret=sys.argv[1]))
engine.allocate(32 << 20, name="shared")
engine.register(np.ones(32 << 20, np.uint8), name="plain")
engine.serve_calls(lambda calls: [call.payload for call in calls])
print(engine.address, flush=True)
for line in sys.stdin:
    engine.notifications()
"""


def read_use(pid: int) -> tuple[int, int]:
    """Return resident bytes and open descriptors of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd"))


class Soak:
    """One engine that does everything to another process."""

    def __init__(self, folder: Path, address: str, seed: int) -> None:
        self.random = random.Random(seed)
        # At low priority on a busy machine the other process may not run for seconds.
        self.engine = TransferEngine(TransferConfig(secret=SECRET, lease_ms=60_000))
        self.address = address
        self.segment: Segment = self.engine.open(address)
        self.memory = np.ones(32 * MIB, np.uint8)
        self.buffer = self.engine.register(self.memory)
        self.file = self.engine.open_file(folder / "f", length=8 * MIB, writable=True)
        self.counts = dict.fromkeys(("batches", "bytes", "calls", "failed", "opened"), 0)

    def step(self) -> None:
        kind = self.random.random()
        if kind < 0.6:
            self.move()
        elif kind < 0.9:
            for _ in range(10):
                payload = self.random.randbytes(self.random.choice((0, 200, 20_000)))
                assert self.engine.call(self.segment, payload) == payload
                self.counts["calls"] += 1
        elif kind < 0.95:
            self.engine.notify(self.segment, "soak", b"x" * self.random.randrange(1000))
        elif kind < 0.98:
            extra = self.engine.register(np.zeros(MIB, np.uint8))
            self.engine.unregister(extra)
        else:
            self.segment.close()
            self.segment = self.engine.open(self.address)
            self.counts["opened"] += 1

    def move(self) -> None:
        pick = self.random.choice
        transport = pick(("shm", "cma", "tcp", "tcp", "file", None))
        target = self.file if transport == "file" else self.segment
        name = pick(("shared", "plain")) if transport != "shm" else "shared"
        base, limit = (
            (0, 8 * MIB) if transport == "file" else (target.buffer(name).offset, 32 * MIB)
        )
        transfers = []
        for _ in range(pick((1, 1, 16, 64))):
            size = min(limit, self.random.randrange(1, pick((100, 70_000, 3 * MIB))))
            at = self.random.randrange(limit - size + 1)
            op = pick((Op.READ, Op.WRITE))
            transfers.append(Transfer(op, self.buffer, target, base + at, size, local_offset=at))
        batch = self.engine.submit(transfers, transport=transport)
        self.counts["batches"] += 1
        if self.random.random() < 0.1:
            batch.cancel()
        try:
            batch.wait(pick((0.0, 30.0, 30.0, 30.0)))
            self.counts["bytes"] += sum(transfer.length for transfer in transfers)
        except (CancelledError, DeadlineError, PeerLostError):
            self.counts["failed"] += 1


def run(minutes: float) -> None:
    """Raises: AssertionError if something grew."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        child = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", GIVER, SECRET],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(child.kill)
        assert child.stdout is not None
        assert child.stdin is not None
        soak = Soak(folder, child.stdout.readline().strip(), seed=1)
        stack.callback(soak.engine.close)
        begin = time.monotonic()
        end, step_s = begin + minutes * 60, minutes * 60 / NUM_LOOKS
        next_look, next_report = begin + step_s, begin
        looks: list[list[tuple[int, int]]] = []
        while (now := time.monotonic()) < end:
            step_began = time.monotonic()
            soak.step()
            child.stdin.write("\n")
            child.stdin.flush()
            time.sleep(3 * (time.monotonic() - step_began))
            if now < next_look:
                continue
            next_look = now + step_s
            looks.append([read_use(pid) for pid in (os.getpid(), child.pid)])
            if now >= next_report:
                next_report = now + 60
                shown = ", ".join(f"{rss / MIB:.0f} MiB {fds} fds" for rss, fds in looks[-1])
                print(f"{(now - begin) / 60:.1f} min: {shown}; {soak.counts}", flush=True)
        # Arenas come and go: what tells of a leak is that a side never comes back to what it had.
        third = len(looks) // 3
        early, late = looks[:third], looks[-third:]
        for side in range(2):
            for what, slack, i in (("bytes resident", MEMORY_SLACK, 0), ("descriptors", 2, 1)):
                most_then = max(look[side][i] for look in early)
                least = min(look[side][i] for look in late)
                assert least <= most_then + slack, f"{least} {what}, {most_then} before"
        print(f"flat: {looks[-1]} after {looks[0]}; {soak.counts}", flush=True)


if __name__ == "__main__":
    run(float(sys.argv[1]))

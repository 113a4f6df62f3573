"""Engines in pairs, closed at the end of the test whatever happened."""

import contextlib
import secrets
import subprocess
import sys
from collections.abc import Iterator

import numpy as np

from tandem.transfer import Op, Transfer, TransferConfig, TransferEngine

SECRET = secrets.token_urlsafe(32)


class World:
    """Makes engines that share a secret; moves and compares random bytes."""

    def __init__(self) -> None:
        self.engines: list[TransferEngine] = []
        self.rng = np.random.default_rng(1)

    def engine(self, **settings) -> TransferEngine:
        settings = {"secret": SECRET, "deadline_ms": 20_000, **settings}
        engine = TransferEngine(TransferConfig(**settings))
        self.engines.append(engine)
        return engine

    def random(self, nbytes: int) -> np.ndarray:
        return self.rng.integers(0, 256, nbytes, dtype=np.uint8)

    def close(self) -> None:
        for engine in self.engines:
            engine.close(deadline_s=5)


def move(engine, segment, op, local, offset, length, *, local_offset=0, deadline_s=15, **how):
    """Submit one transfer and wait for it."""
    transfer = Transfer(op, local, segment, offset, length, local_offset=local_offset)
    engine.submit([transfer], deadline_s=deadline_s, **how).wait()


@contextlib.contextmanager
def child(program: str, *words: str, **how) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that runs this Python program; with it the line that it prints first."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, SECRET, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **how,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait(60)
        process.stdin.close()
        process.stdout.close()


__all__ = ["SECRET", "Op", "Transfer", "World", "child", "move"]

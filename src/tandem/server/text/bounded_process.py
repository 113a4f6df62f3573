"""Child processes for work on clients' input whose time and memory nobody knows in advance.

Owns the processes, one for each piece of work at a time, so at most as many as there are calling
threads. The program limits its own memory; a process that does not answer in time is killed.
Frames on stdin and stdout are a 4-byte length and the content; an answer is msgpack of (is it good,
text).
"""

import os
import select
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from tandem.core.clock import Clock, MonotonicClock
from tandem.core.errors import DeadlineError, PeerLostError, TandemError

__all__ = ["BoundedProcesses"]

_START_TIMEOUT_S = 20.0
"""Seconds for the interpreter to start and take the first frame, on a busy machine."""


class BoundedProcesses:
    """The processes of one program.

    Args:
        program: Python file that is run.
        first: frame that a new process gets before all others, and answers.
        where: name of the operation, for errors.
        clock: clock of the time limits.
    """

    def __init__(self, program: Path, first: bytes, where: str, clock: Clock | None = None) -> None:
        self._program = program
        self._first = first
        self._where = where
        self._clock = clock if clock is not None else MonotonicClock()
        self._lock = threading.Lock()
        """Lock of the sets of idle and busy processes."""
        self._workers: set[subprocess.Popen[bytes]] = set()
        self._idle: list[subprocess.Popen[bytes]] = []

    def start(self) -> tuple[bool, str]:
        """Start a process unless one runs, so that the first ``run`` does not wait for it; return
        its answer to the first frame.

        Raises: PeerLostError or DeadlineError (the process does not answer).
        """
        with self._lock:
            if self._workers:
                return True, ""
        worker, answer = self._start()
        self._give_back(worker)
        return answer

    def run(self, payload: bytes, timeout_s: float) -> tuple[bool, str]:
        """Have a process do the work of one frame; return its answer. Blocks; thread-safe.

        The answer is that to the first frame if a new process refuses that.

        Raises: DeadlineError (it did not answer in time); PeerLostError (it ended meanwhile).
        """
        worker = self._take()
        if worker is None:
            worker, answer = self._start()
            if not answer[0]:
                return answer
        answer = self._exchange(worker, payload, timeout_s)
        self._give_back(worker)
        return answer

    def close(self) -> None:
        """End the processes; work in progress fails. A later ``run`` starts another process."""
        with self._lock:
            workers = list(self._workers)
        for worker in workers:
            self._stop(worker)

    def _take(self) -> "subprocess.Popen[bytes] | None":
        while True:
            with self._lock:
                if not self._idle:
                    return None
                worker = self._idle.pop()
            if worker.poll() is None:
                return worker
            self._stop(worker)

    def _give_back(self, worker: "subprocess.Popen[bytes]") -> None:
        with self._lock:
            if worker in self._workers:
                self._idle.append(worker)

    def _start(self) -> "tuple[subprocess.Popen[bytes], tuple[bool, str]]":
        # The process inherits nothing but the import path: what escapes a sandbox in it finds no
        # secrets in the environment.
        environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        worker = subprocess.Popen(
            [sys.executable, "-P", str(self._program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            # The process has its own group, so that Ctrl-C in a terminal does not reach it: the
            # server drains and still needs it.
            process_group=0,
        )
        with self._lock:
            self._workers.add(worker)
        answer = self._exchange(worker, self._first, _START_TIMEOUT_S)
        if not answer[0]:
            self._stop(worker)
        return worker, answer

    def _exchange(
        self, worker: "subprocess.Popen[bytes]", payload: bytes, timeout_s: float
    ) -> tuple[bool, str]:
        """Send one frame to a process and return the answer; end the process if that fails or is
        late.
        """
        assert worker.stdin is not None
        assert worker.stdout is not None
        deadline_s = self._clock.now_s() + timeout_s
        try:
            self._write(
                worker.stdin.fileno(), len(payload).to_bytes(4, "big") + payload, deadline_s
            )
            length = int.from_bytes(self._read(worker.stdout.fileno(), 4, deadline_s), "big")
            reply = self._read(worker.stdout.fileno(), length, deadline_s)
        except TandemError:
            self._stop(worker)
            raise
        # ValueError means that the pipe was closed in the meantime.
        except (OSError, ValueError) as error:
            self._stop(worker)
            raise PeerLostError(self._where, f"the process ended: {error}") from error
        return msgspec.msgpack.decode(reply, type=tuple[bool, str])

    def _write(self, fd: int, data: bytes, deadline_s: float) -> None:
        """Write all bytes, waiting until the deadline at most, because a stopped process reads
        nothing.
        """
        os.set_blocking(fd, False)
        left = memoryview(data)
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        while left:
            self._wait(poll, deadline_s)
            left = left[os.write(fd, left[: 1 << 20]) :]

    def _read(self, fd: int, size: int, deadline_s: float) -> bytes:
        chunks: list[bytes] = []
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while size > 0:
            self._wait(poll, deadline_s)
            chunk = os.read(fd, min(size, 1 << 20))
            if not chunk:
                raise PeerLostError(self._where, "the process ended without an answer")
            chunks.append(chunk)
            size -= len(chunk)
        return b"".join(chunks)

    def _wait(self, poll: "select.poll", deadline_s: float) -> None:
        remaining_ms = max(0.0, deadline_s - self._clock.now_s()) * 1000
        if not poll.poll(remaining_ms):
            raise DeadlineError(self._where, "the process did not answer in time")

    def _stop(self, worker: "subprocess.Popen[bytes]") -> None:
        with self._lock:
            is_known = worker in self._workers
            self._workers.discard(worker)
            if worker in self._idle:
                self._idle.remove(worker)
        if is_known:
            worker.kill()
            # ``communicate`` waits for the killed process and closes its pipes.
            worker.communicate()

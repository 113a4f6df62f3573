"""Rendering of conversations by the checkpoint's chat template, in separate processes.

Owns the processes of ``template_worker``, one for each conversation rendered at a time, so at most
as many as there are calling threads. A process that does not answer in time is killed.
"""

import os
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from tandem.core.clock import Clock, MonotonicClock
from tandem.core.errors import ConfigError, PeerLostError, TandemError

__all__ = ["ChatTemplate"]

_WORKER = Path(__file__).with_name("template_worker.py")
_START_TIMEOUT_S = 20.0
"""Seconds for the interpreter to start and compile the template, on a busy machine."""


class ChatTemplate:
    """The chat template of one checkpoint.

    Args:
        source: jinja2 text, which is not trusted.
        variables: variables of every rendering beside its own arguments, such as the special
            tokens.
        timeout_s: time limit of a rendering, seconds.
        max_chars: largest length of a rendered text.
    """

    def __init__(
        self,
        source: str,
        variables: dict[str, str],
        *,
        timeout_s: float = 5.0,
        max_chars: int = 2**25,
        clock: Clock | None = None,
    ) -> None:
        self.source = source
        """Text of the chat template (Jinja)."""
        self._variables = variables
        self._timeout_s = timeout_s
        self._max_chars = max_chars
        self._clock = clock if clock is not None else MonotonicClock()
        self._lock = threading.Lock()
        """Lock of the sets of idle and busy worker processes."""
        self._workers: set[subprocess.Popen[bytes]] = set()
        self._idle: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start a process, so that the first conversation does not wait for it.

        Raises:
            ConfigError: the template does not compile.
            PeerLostError: the process does not answer.
        """
        with self._lock:
            is_started = bool(self._workers)
        if not is_started:
            self._give_back(self._start())

    def render(self, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
        """Return the prompt of a conversation. Blocks; thread-safe.

        Args:
            messages: dictionaries with at least "role" and "content".
            arguments: further template variables, such as ``add_generation_prompt``.

        Raises:
            ConfigError: the template refuses the conversation, fails, or exceeds its bounds of
                memory and output; field "messages".
            PeerLostError: the process did not answer in time, or ended; another try may do better.
        """
        variables = {"messages": messages, "tools": None, "documents": None}
        variables |= self._variables | arguments
        try:
            # Arguments are passed on as JSON, the form they came in: msgpack cannot carry integers
            # of more than 64 bits.
            message = msgspec.json.encode((variables, self._max_chars))
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                "chat_template.render",
                f"the template's arguments cannot be passed on: {error}",
                field="chat_template_kwargs",
            ) from error
        worker = self._take()
        is_ok, text = self._exchange(worker, message, self._timeout_s)
        self._give_back(worker)
        if not is_ok:
            raise _refusal(text)
        return text

    def close(self) -> None:
        """End the worker processes; a later ``render`` starts another."""
        with self._lock:
            workers = list(self._workers)
        for worker in workers:
            self._stop(worker)

    def _take(self) -> "subprocess.Popen[bytes]":
        while True:
            with self._lock:
                if not self._idle:
                    break
                worker = self._idle.pop()
            if worker.poll() is None:
                return worker
            self._stop(worker)
        return self._start()

    def _give_back(self, worker: "subprocess.Popen[bytes]") -> None:
        with self._lock:
            if worker in self._workers:
                self._idle.append(worker)

    def _start(self) -> "subprocess.Popen[bytes]":
        # The template's process inherits nothing but the import path: a template that escapes its
        # sandbox finds no secrets in the environment.
        environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        worker = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            # The process has its own group, so that Ctrl-C in a terminal does not reach it: the
            # server drains and still renders conversations.
            process_group=0,
        )
        with self._lock:
            self._workers.add(worker)
        source = msgspec.msgpack.encode(self.source)
        is_ok, text = self._exchange(worker, source, _START_TIMEOUT_S)
        if not is_ok:
            self._stop(worker)
            raise _refusal(f"it does not compile: {text}")
        return worker

    def _exchange(
        self, worker: "subprocess.Popen[bytes]", payload: bytes, timeout_s: float
    ) -> tuple[bool, str]:
        """Send one frame to a worker and return the answer; end the worker if that fails or is
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
            raise _loss(f"ended: {error}") from error
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
            remaining_ms = max(0.0, deadline_s - self._clock.now_s()) * 1000
            if not poll.poll(remaining_ms):
                raise _loss("did not answer in time")
            left = left[os.write(fd, left[: 1 << 20]) :]

    def _read(self, fd: int, size: int, deadline_s: float) -> bytes:
        chunks: list[bytes] = []
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while size > 0:
            remaining_ms = max(0.0, deadline_s - self._clock.now_s()) * 1000
            if not poll.poll(remaining_ms):
                raise _loss("did not answer in time")
            chunk = os.read(fd, min(size, 1 << 20))
            if not chunk:
                raise _loss("ended without an answer")
            chunks.append(chunk)
            size -= len(chunk)
        return b"".join(chunks)

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


def _loss(text: str) -> PeerLostError:
    return PeerLostError(
        "chat_template.render",
        f"the process of the chat template {text}: try again, with a shorter conversation if this "
        "comes again",
    )


def _refusal(text: str) -> ConfigError:
    return ConfigError(
        "chat_template.render", f"the chat template failed: {text}", field="messages"
    )

"""Rendering conversations with the checkpoint's own template, in a process of its own.

Owns the worker process of ``template_worker``: starts it on first use, one conversation at a time,
kills it at the deadline and starts another. Called from tokenizer threads; a lock serialises them.
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
from tandem.core.errors import ConfigError, InternalError, TandemError

__all__ = ["ChatTemplate"]

_WORKER = Path(__file__).with_name("template_worker.py")
_START_TIMEOUT_S = 20.0
"""For the interpreter to start and compile the template, on a busy machine."""


class ChatTemplate:
    """The chat template of one checkpoint.

    Args:
        source: jinja2 text, not trusted.
        variables: what every rendering sees beside its own arguments, the special tokens.
        timeout_s: per rendering.
        max_chars: the longest text a rendering may produce.
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
        self._source = source
        self._variables = variables
        self._timeout_s = timeout_s
        self._max_chars = max_chars
        self._clock = clock if clock is not None else MonotonicClock()
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, so that the first conversation does not wait for it.

        Raises:
            ConfigError: the template does not compile.
        """
        with self._lock:
            if self._worker is None:
                self._start()

    def render(self, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
        """Return the prompt of a conversation. Blocks; thread-safe.

        Args:
            messages: dictionaries with at least "role" and "content".
            arguments: further template variables, such as ``add_generation_prompt``.

        Raises:
            ConfigError: the template refuses the conversation, fails, or exceeds its bounds;
                field "messages".
        """
        variables = {"messages": messages, "tools": None, "documents": None}
        variables |= self._variables | arguments
        try:
            message = msgspec.msgpack.encode((variables, self._max_chars))
        except (OverflowError, RecursionError) as error:
            raise ConfigError(
                "chat_template.render",
                f"the template's arguments cannot be passed on: {error}",
                field="chat_template_kwargs",
            ) from error
        with self._lock:
            if self._worker is None or self._worker.poll() is not None:
                self._start()
            is_ok, text = self._exchange(message, self._timeout_s)
        if not is_ok:
            raise _refusal(text)
        return text

    def close(self) -> None:
        """End the worker process; a later ``render`` starts another."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        self._stop()
        # The path is all it inherits: a template that escaped would find no secrets.
        environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._worker = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        is_ok, text = self._exchange(msgspec.msgpack.encode(self._source), _START_TIMEOUT_S)
        if not is_ok:
            self._stop()
            raise _refusal(f"it does not compile: {text}")

    def _exchange(self, payload: bytes, timeout_s: float) -> tuple[bool, str]:
        """Send one frame and await one; ends the worker if that fails or takes too long."""
        worker = self._worker
        assert worker is not None
        assert worker.stdin is not None
        assert worker.stdout is not None
        deadline_s = self._clock.now_s() + timeout_s
        try:
            # The worker reads a frame whole before it works, so this cannot wait for rendering.
            worker.stdin.write(len(payload).to_bytes(4, "big") + payload)
            worker.stdin.flush()
            length = int.from_bytes(self._read(worker.stdout.fileno(), 4, deadline_s), "big")
            reply = self._read(worker.stdout.fileno(), length, deadline_s)
        except TandemError:
            self._stop()
            raise
        except OSError as error:
            self._stop()
            raise InternalError("chat_template.render", f"worker lost: {error}") from error
        return msgspec.msgpack.decode(reply, type=tuple[bool, str])

    def _read(self, fd: int, size: int, deadline_s: float) -> bytes:
        chunks: list[bytes] = []
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while size > 0:
            remaining_ms = max(0.0, deadline_s - self._clock.now_s()) * 1000
            if not poll.poll(remaining_ms):
                raise _refusal("it did not finish in time")
            chunk = os.read(fd, min(size, 1 << 20))
            if not chunk:
                raise _refusal("its process died, most likely out of memory")
            chunks.append(chunk)
            size -= len(chunk)
        return b"".join(chunks)

    def _stop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        worker.kill()
        # ``communicate`` also closes the pipes.
        worker.communicate()


def _refusal(text: str) -> ConfigError:
    return ConfigError(
        "chat_template.render", f"the chat template failed: {text}", field="messages"
    )

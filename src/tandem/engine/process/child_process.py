"""Child processes of the server: starting one, sending it its settings, ending it.

A child reads one line of settings from standard input. It ends when that input is closed, so it
does not outlive its server, however the server ends. Instances are not started here but forked
(``fork_server``).
"""

import asyncio
import contextlib
import sys
from typing import Protocol

import msgspec

from tandem.core.config import child_environment

__all__ = ["end_child", "start_child", "write_settings"]

EXIT_TIMEOUT_S = 5.0
"""Seconds that a child may take to end by itself before it is killed."""
LOST_TIMEOUT_S = 0.5
"""Seconds that a child that no longer answers may take to end before it is killed; its successor
waits for it."""


class ChildInput(Protocol):
    """The writing end of a child's standard input."""

    def write(self, data: bytes, /) -> None:
        """Write bytes, buffering those that the child does not read yet."""
        ...

    def close(self) -> None:
        """Close it, which tells the child to end."""
        ...


class ChildProcess(Protocol):
    """A running child: a process of asyncio's, or one that the fork server has forked."""

    @property
    def stdin(self) -> ChildInput | None:
        """Standard input of the child."""
        ...

    def kill(self) -> None:
        """Send SIGKILL. Raises: ProcessLookupError (the child has ended)."""
        ...


async def start_child(module: str, *, stdout: int | None = None) -> asyncio.subprocess.Process:
    """Start ``python -m module`` as a child process, which waits for ``write_settings``.

    End it with ``end_child``.

    Args:
        module: name of the module to run.
        stdout: as in ``asyncio.create_subprocess_exec``; None: that of this process.
    """
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # What lies in the folder from which it is started is no library.
        "-m",
        module,
        stdin=asyncio.subprocess.PIPE,
        stdout=stdout,
        env=child_environment(),
        # Ctrl-C in a terminal is for the server, which drains and then ends its children.
        start_new_session=True,
    )


def write_settings(process: ChildProcess, spec: msgspec.Struct) -> None:
    """Write a child's settings to its standard input, once."""
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(spec) + b"\n")


async def end_child(
    process: ChildProcess, exited: "asyncio.Task[int]", *, is_lost: bool = False
) -> None:
    """End a child process, by SIGKILL if it does not end in time.

    Args:
        process: the child, which was started here or forked.
        exited: task of its ``wait()``.
        is_lost: True if it no longer answers, so that it gets ``LOST_TIMEOUT_S`` only.
    """
    if process.stdin is not None:
        process.stdin.close()
    try:
        timeout_s = LOST_TIMEOUT_S if is_lost else EXIT_TIMEOUT_S
        await asyncio.wait_for(asyncio.shield(exited), timeout_s)
    except TimeoutError:
        # Use SIGKILL, since a stopped (SIGSTOP) process does not handle SIGTERM.
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await exited

"""Child processes of the server: starting one, sending it its settings, ending it.

A child reads one line of settings from standard input. It ends when that input is closed, so it
does not outlive its server, however the server ends.
"""

import asyncio
import contextlib
import sys

import msgspec

from tandem.core.config import child_environment

__all__ = ["end_child", "start_child", "write_settings"]

EXIT_TIMEOUT_S = 5.0
"""Seconds that a child may take to end by itself before it is killed."""
LOST_TIMEOUT_S = 0.5
"""Seconds that a child that no longer answers may take to end before it is killed; its successor
waits for it."""


async def start_child(module: str, *, stdout: int | None = None) -> asyncio.subprocess.Process:
    """Start ``python -m module`` as a child process, which waits for ``write_settings``.

    End it with ``end_child``.

    Args:
        module: name of the module to run.
        stdout: as in ``asyncio.create_subprocess_exec``; None: that of this process.
    """
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        stdin=asyncio.subprocess.PIPE,
        stdout=stdout,
        # torch's OpenMP threads spin at every barrier by default; beside any other load on the
        # same cores that turns steps of milliseconds into seconds (measured: 25 ms to 110 ms
        # and more for 64 decodes on two busy cores). OpenMP reads this at load, so only here.
        env=child_environment({"OMP_WAIT_POLICY": "PASSIVE"}),
        # Ctrl-C in a terminal is for the server, which drains and then ends its children.
        start_new_session=True,
    )


def write_settings(process: asyncio.subprocess.Process, spec: msgspec.Struct) -> None:
    """Write a child's settings to its standard input, once."""
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(spec) + b"\n")


async def end_child(
    process: asyncio.subprocess.Process, exited: "asyncio.Task[int]", *, is_lost: bool = False
) -> None:
    """End a child process, by SIGKILL if it does not end in time.

    Args:
        process: a result of ``start_child``.
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

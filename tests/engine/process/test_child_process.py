"""Children that hang are ended without the patience that those have who are well."""

import asyncio
import signal
import sys

from tandem.engine.process import child_process

TIMEOUT_S = 60.0


def test_a_lost_child_is_not_waited_for(monkeypatch):
    """It is stopped, so it does not end by asking; the one that follows it must not wait."""
    monkeypatch.setattr(child_process, "EXIT_TIMEOUT_S", 1e6)

    async def work():
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-S", "-c", "input()", stdin=asyncio.subprocess.PIPE
        )
        exited = asyncio.create_task(process.wait())
        process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(TIMEOUT_S):
            await child_process.end_child(process, exited, is_lost=True)
        assert process.returncode == -signal.SIGKILL

    asyncio.run(work())


def test_a_child_that_is_well_may_end_by_itself(monkeypatch):
    """What it still has to write is written."""
    monkeypatch.setattr(child_process, "EXIT_TIMEOUT_S", TIMEOUT_S)

    async def work():
        program = "import sys; sys.stdin.read(); print('written')"
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-S",
            "-c",
            program,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        exited = asyncio.create_task(process.wait())
        await child_process.end_child(process, exited)
        assert (process.returncode, await process.stdout.read()) == (0, b"written\n")

    asyncio.run(work())

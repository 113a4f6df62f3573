"""Goal: instances are forked from one process, of which they inherit nothing but what is imported;
each ends with its server, and the loss of that process is no instance's loss.

Method: a fork server that imports little, whose children run what they are told.
"""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.core.errors import PeerLostError
from tandem.engine.process import fork_server
from tandem.engine.process.fork_server import UNKNOWN_STATUS, ForkServer

TIMEOUT_S = 60.0
HERE = str(Path(__file__).parent)

TELL = """
import json, os, random, sys, uuid; \
facts = {"pid": os.getpid(), "session": os.getsid(0), "random": random.random(), \
"uuid": str(uuid.uuid4()), "files": sorted(map(int, os.listdir("/proc/self/fd"))), \
"tasks": len(os.listdir("/proc/self/task")), "environment": list(os.environ), \
"wakeup": __import__("signal").set_wakeup_fd(-1)}; \
open(PATH, "w").write(json.dumps(facts)); sys.exit(7)
"""


@pytest.fixture
def light(monkeypatch):
    """The light fork server in the place of the one that imports an engine's libraries."""
    monkeypatch.setattr(fork_server, "MODULE", "light_instance")
    monkeypatch.setenv("PYTHONPATH", HERE)
    monkeypatch.setenv("TANDEM_SERVER__API_KEY", "secret")


def play(work) -> None:
    async def run() -> None:
        async with asyncio.timeout(TIMEOUT_S), ForkServer() as server:
            await work(server)

    asyncio.run(run())


def tell(process, code) -> None:
    process.stdin.write(code.strip().encode() + b"\n")


def test_children_share_nothing_but_what_is_imported(light, tmp_path):
    """No descriptor of another child, no random state, no secret; each its own session; and exit
    statuses arrive, also of one that a signal ended.
    """

    async def work(server) -> None:
        idle = await server.fork()
        children = [await server.fork() for _ in range(2)]
        for i, child in enumerate(children):
            tell(child, TELL.replace("PATH", repr(str(tmp_path / str(i)))))
        assert [await child.wait() for child in children] == [7, 7]
        facts = [json.loads((tmp_path / str(i)).read_text()) for i in range(2)]
        for child, each in zip(children, facts, strict=True):
            assert each["pid"] == child.pid == each["session"]
            assert each["tasks"] == 1
            # Standard input, output and errors, and the folder that is being listed.
            assert each["files"] == [0, 1, 2, 3]
            assert each["wakeup"] == -1
            assert not any(name.startswith("TANDEM_") for name in each["environment"])
        for name in ("random", "uuid"):
            assert facts[0][name] != facts[1][name]
        assert idle.returncode is None
        idle.kill()
        assert await idle.wait() == -signal.SIGKILL
        with pytest.raises(ProcessLookupError):
            idle.kill()

    play(work)


def test_a_child_ends_when_its_input_is_closed(light):
    async def work(server) -> None:
        child = await server.fork()
        child.stdin.close()
        assert await child.wait() == 0

    play(work)


def test_a_fork_server_that_dies_is_replaced(light, tmp_path):
    """Its children go on, and their ends are noticed without it."""

    async def work(server) -> None:
        child = await server.fork()
        first = server.pid
        os.kill(first, signal.SIGKILL)
        other = await fork_again(server)
        assert server.pid != first
        assert child.returncode is None
        tell(child, f"open({str(tmp_path / 'alive')!r}, 'w').close()")
        child.stdin.close()
        assert await child.wait() == UNKNOWN_STATUS
        assert (tmp_path / "alive").exists()
        other.stdin.close()
        assert await other.wait() == 0

    play(work)


async def fork_again(server):
    """Ask until the loss is noticed; a request that was underway fails, and does not hang."""
    while True:
        try:
            return await server.fork()
        except PeerLostError as error:
            assert "the fork server died" in str(error)


def test_what_lies_in_the_folder_of_a_server_is_not_imported(light, tmp_path, monkeypatch):
    """A file there named like a library would run in every instance."""
    (tmp_path / "msgspec.py").write_text("raise SystemExit('another library')")
    monkeypatch.chdir(tmp_path)

    async def work(server) -> None:
        child = await server.fork()
        child.stdin.close()
        assert await child.wait() == 0

    play(work)


def test_a_fork_server_that_cannot_import_is_an_error(monkeypatch):
    monkeypatch.setattr(fork_server, "MODULE", "no_such_module")

    async def work(server) -> None:
        with pytest.raises(PeerLostError, match="the fork server died"):
            await server.fork()

    play(work)


LAUNCHER = """
import asyncio, os, sys
from tandem.engine.process import fork_server
fork_server.MODULE = "light_instance"
async def main():
    async with fork_server.ForkServer() as server:
        child = await server.fork()
        print(server.pid, child.pid, flush=True)
        sys.stdin.read()
        os._exit(0)
asyncio.run(main())
"""


def test_nothing_outlives_the_launcher(light):
    """It is gone without a word, and with it the fork server and the instance."""
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as launcher:  # fmt: skip
        pids = [int(pid) for pid in launcher.stdout.readline().split()]
        ends = [os.pidfd_open(pid) for pid in pids]
        assert len(ends) == 2
    for end in ends:
        assert select.select([end], [], [], TIMEOUT_S)[0], "it still runs"
        os.close(end)

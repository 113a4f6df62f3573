"""Goal: the successor of an instance is prepared while that one is silent, and only then.

Method: the supervisor over a launcher that only notes what it is told, in virtual time; and the
launcher over a program that starts at once.
"""

import asyncio
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from tandem.core.errors import ConfigError, PeerLostError
from tandem.core.wire import InstanceStage, StageChanged
from tandem.engine.config import EngineConfig
from tandem.engine.process import launcher as launcher_module
from tandem.engine.process.instance import InstanceSpec
from tandem.engine.process.launcher import ProcessLauncher
from tandem.engine.process.supervisor import InstanceSupervisor
from tandem.models.config import ModelConfig
from tandem.rpc import RpcConfig
from tandem.sim import run_virtual

LEASE_S = 8.0
SPEC = InstanceSpec(
    model=ModelConfig(path="demo"),
    engine=EngineConfig(),
    rpc=RpcConfig(lease_ms=int(LEASE_S * 1e3)),
)
INFO = SimpleNamespace(pid=1, load_seconds=0.0)
TIMEOUT_S = 60.0


class Client:
    """A ``SessionClient`` that is silent when told to be."""

    is_connected = True

    def __init__(self) -> None:
        self.silent_since_s: float | None = None

    @property
    def silence_s(self) -> float:
        now_s = asyncio.get_running_loop().time()
        return 0.0 if self.silent_since_s is None else now_s - self.silent_since_s

    def on_event(self, callback, event_type) -> None:
        asyncio.get_running_loop().call_soon(callback, self, StageChanged(InstanceStage.READY))

    def on_peer_lost(self, callback) -> None:
        self.lose = callback

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def call(self, method, request, response_type, *, timeout_s=None):
        return INFO


class Launcher:
    """A ``Launcher`` and its child."""

    pid = 1

    def __init__(self) -> None:
        self.client = Client()
        self.told: list[str] = []

    async def start(self, spec):
        self.told.append("start")
        return self

    async def prepare(self) -> None:
        self.told.append("prepare")

    async def discard(self) -> None:
        self.told.append("discard")

    async def close(self) -> None:
        self.told.append("close")

    async def wait(self) -> int:
        await asyncio.Event().wait()
        raise AssertionError

    async def end(self, *, is_lost: bool = False) -> None:
        pass


def test_a_successor_is_prepared_while_an_instance_is_silent():
    async def work() -> None:
        launcher = Launcher()
        async with InstanceSupervisor(SPEC, launcher=launcher) as supervisor:
            await supervisor.wait_ready()
            await asyncio.sleep(3 * LEASE_S)
            assert "prepare" not in launcher.told
            launcher.client.silent_since_s = asyncio.get_running_loop().time()
            await asyncio.sleep(LEASE_S / 3)
            assert "prepare" not in launcher.told
            await asyncio.sleep(LEASE_S / 3)
            assert launcher.told[-1] == "prepare"
            launcher.client.silent_since_s = None
            await asyncio.sleep(LEASE_S / 3)
            assert launcher.told[-1] == "discard", "it is well, and needs no successor"
        assert launcher.told[-1] == "close"

    run_virtual(work)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConfigError("rpc.runtime_dir", "no folder"), "no folder"),
        (OSError("no process"), "no proc"),
    ],
)
def test_an_instance_that_cannot_be_started_is_reported(error, reason):
    """Not waited for: without a temporary folder a server said "starting" for ever."""

    async def work() -> None:
        launcher = Launcher()
        launcher.start = AsyncMock(side_effect=error)
        async with asyncio.timeout(TIMEOUT_S), InstanceSupervisor(SPEC, launcher=launcher) as one:
            with pytest.raises(PeerLostError, match=reason):
                await one.wait_ready()
            assert one.stage.stage is InstanceStage.FAILED

    run_virtual(work)


PROGRAM = "import sys; print(sys.stdin.readline(), flush=True); sys.stdin.read()"


@pytest.fixture
def started(monkeypatch):
    """What was started, with a program that does nothing in the place of an instance."""
    found = []

    async def start(module, *, stdout=None):
        found.append(
            await asyncio.create_subprocess_exec(
                "python3", "-S", "-c", PROGRAM, stdin=asyncio.subprocess.PIPE
            )
        )
        return found[-1]

    monkeypatch.setattr(launcher_module, "start_child", start)
    return found


def play(work) -> None:
    async def run() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await work()

    asyncio.run(run())


def test_a_prepared_process_is_the_next_instance(started):
    async def work() -> None:
        launcher = ProcessLauncher()
        await launcher.prepare()
        await launcher.prepare()
        child = await launcher.start(SPEC)
        assert [child.pid] == [process.pid for process in started]
        other = await launcher.start(SPEC)
        assert other.pid == started[1].pid, "one process is one instance"
        for each in (child, other):
            await each.end()
        await launcher.close()

    play(work)


@pytest.mark.slow
def test_a_prepared_process_that_died_is_not_used(started):
    async def work() -> None:
        launcher = ProcessLauncher()
        await launcher.prepare()
        started[0].kill()
        await started[0].wait()
        child = await launcher.start(SPEC)
        assert child.pid == started[1].pid
        await child.end()
        await launcher.close()

    play(work)


@pytest.mark.slow
def test_a_prepared_process_that_nobody_needs_ends(started):
    async def work() -> None:
        launcher = ProcessLauncher()
        for end in (launcher.discard, launcher.close):
            await launcher.prepare()
            await end()
            assert started[-1].returncode is not None
            await end()

    play(work)

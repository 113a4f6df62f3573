"""Goal: a server knows the instances of all launchers, and connects to those that run now.

Method: real channels, over a socket and over TCP with the cluster's secret, to a launcher that only
has a roster.
"""

import asyncio
import socket

import msgspec
import pytest

from tandem.core.errors import DeadlineError, NotFoundError, PeerLostError
from tandem.core.wire import Empty, InstanceStage
from tandem.engine.config import EngineConfig
from tandem.engine.launching import rosters as rosters_module
from tandem.engine.launching.attached import AttachedLauncher
from tandem.engine.launching.messages import CHANGE, ROSTER, ChangeRoster, Roster, RosterEntry
from tandem.engine.launching.rosters import Rosters
from tandem.engine.process.instance import InstanceSpec, compat_facts
from tandem.models.config import ModelConfig
from tandem.rpc import Auth, RpcConfig, RpcServer, make_identity

WAIT_S = 60.0
SECRET = "a secret of this cluster alone"
RPC = RpcConfig(connect_timeout_ms=2_000, heartbeat_interval_ms=50, lease_ms=500)
SPEC = InstanceSpec(model=ModelConfig(path="demo"), engine=EngineConfig(), rpc=RPC, secret=SECRET)


class Launcher:
    """A launcher without instances; a context manager."""

    def __init__(self, url, *entries, name="l"):
        self.url, self.entries, self.name = url, list(entries), name
        self.changes = []
        self.server = RpcServer(
            url,
            identity=make_identity(name, compat=compat_facts()),
            auth=Auth.for_endpoint(url, SECRET),
            config=RPC,
        )
        self.server.register(ROSTER, lambda *_: self.roster, Empty, Roster)
        self.server.register(CHANGE, self._change, ChangeRoster, Roster)

    @property
    def roster(self):
        return Roster(launcher=self.name, instances=self.entries)

    def _change(self, _, change):
        self.changes.append(change)
        return self.roster

    def tell(self, *entries):
        self.entries = list(entries)
        for peer in self.server.peers:
            peer.push(self.roster)

    async def __aenter__(self):
        await self.server.__aenter__()
        return self

    async def __aexit__(self, *details):
        await self.server.__aexit__(*details)


def entry(name, run="r1", stage=InstanceStage.READY, **fields):
    fields = {"role": "unified", "endpoint": "tcp://10.9.9.9:7101", "pid": 5} | fields
    return RosterEntry(name=name, run=run, stage=stage, **fields)


@pytest.fixture
def place(tmp_path):
    tmp_path.chmod(0o700)
    return f"ipc://{tmp_path}/l.sock"


def run(work):
    async def bounded():
        async with asyncio.timeout(WAIT_S):
            await work()

    asyncio.run(bounded())


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def until(rosters, *names):
    await rosters.wait_for(lambda: {each.name for each in rosters.entries} == set(names))


def test_instances_of_several_launchers_come_and_go(place, monkeypatch):
    monkeypatch.setattr(rosters_module, "RESOLVE_INTERVAL_S", 0.02)
    other = place.replace("l.sock", "m.sock")

    async def work():
        async with (
            Launcher(place, entry("a")) as first,
            Rosters([place, other], None, RPC, forget_s=0.1) as rosters,
        ):
            await until(rosters, "a")
            async with Launcher(other, entry("b"), name="m") as second:
                await until(rosters, "a", "b")
                await rosters.change(ChangeRoster(action="drain", instance="b"))
                await rosters.change(ChangeRoster(action="add", role="decode"))
                assert [change.action for change in second.changes] == ["drain"]
                assert [change.action for change in first.changes] == ["add"], "as few as b's has"
                with pytest.raises(NotFoundError, match="a, b"):
                    await rosters.change(ChangeRoster(action="drain", instance="c"))
                first.tell(entry("a"), entry("a2"))
                await until(rosters, "a", "a2", "b")
            # Its instances may be well for a while; then it has left.
            assert rosters.find("b") is not None
            with pytest.raises(PeerLostError):
                await rosters.change(ChangeRoster(action="drain", instance="b"))
            await until(rosters, "a", "a2")

    run(work)


def test_over_tcp_both_prove_the_secret_and_addresses_lead_to_the_launcher():
    url = f"tcp://localhost:{free_port()}"
    bound = url.replace("localhost", "127.0.0.1")

    async def work():
        async with Launcher(bound, entry("a")):
            async with Rosters([url], SECRET, RPC, forget_s=10) as rosters:
                await rosters.wait_first(WAIT_S)
                [told] = rosters.entries
                assert told.endpoint == "tcp://127.0.0.1:7101", "not where it believes to be"
            async with Rosters([url], SECRET + "!", RPC, forget_s=10) as rosters:
                with pytest.raises(DeadlineError, match="secret"):
                    await rosters.wait_first(0.5)

    run(work)


def test_an_instance_is_connected_to_where_its_present_process_is(place):
    async def work():
        loading = entry("a", stage=InstanceStage.LOADING)
        async with (
            Launcher(place, entry("a", run="", stage=InstanceStage.STARTING)) as launcher,
            Rosters([place], None, RPC, forget_s=10) as rosters,
        ):
            await until(rosters, "a")
            attached = AttachedLauncher(rosters, "a")
            starting = asyncio.create_task(attached.start(SPEC))
            await asyncio.sleep(0)
            assert not starting.done()
            launcher.tell(loading)
            first = await starting
            assert (first.pid, first.client.endpoint) == (5, "tcp://10.9.9.9:7101")
            ended = asyncio.create_task(first.wait())
            launcher.tell(msgspec.structs.replace(loading, stage=InstanceStage.READY))
            launcher.tell(entry("a", run="r2", pid=6))
            await ended
            second = await attached.start(SPEC)
            assert second.pid == 6
            gone = asyncio.create_task(second.wait())
            launcher.tell()
            await gone

    run(work)

"""Goal: a decode instance is linked to a prefill instance that runs and fits, and to no other.

Method: members without processes; a session that the test answers for.
"""

import asyncio
from unittest.mock import AsyncMock

import pytest

from tandem.core.errors import ConfigError, PeerLostError, UnsupportedError
from tandem.engine.cluster import member as member_module
from tandem.engine.cluster.client import make_specs
from tandem.engine.cluster.config import ClusterConfig
from tandem.engine.cluster.member import ClusterMember
from tandem.engine.config import EngineConfig, KvEventConfig
from tandem.engine.process.instance import InstanceSpec
from tandem.engine.process.methods import OPEN_PEER
from tandem.models.config import ModelConfig
from tandem.rpc import RpcConfig

TIMEOUT_S = 60.0


class Info:
    kv_peer, kv_identity = "where the blocks lie", "a model"


class Supervisor:
    """A process that runs, and its session."""

    def __init__(self):
        self.info, self.is_connected, self.num_restarts = Info(), True, 0
        self.errors, self.opened = [], []

    def require_session(self):
        return self

    async def call(self, method, peer):
        assert method is OPEN_PEER
        self.opened.append(peer)
        if self.errors:
            raise self.errors.pop(0)


def make_spec(**fields):
    return InstanceSpec(
        model=ModelConfig(path="demo"), engine=EngineConfig(), rpc=RpcConfig(), **fields
    )


def make_member(role):
    changes = []
    member = ClusterMember(
        make_spec(name=f"{role}-0", role=role),
        on_change=changes.append,
        on_stage=lambda _: None,
        launcher=AsyncMock(),
    )
    member.supervisor = Supervisor()
    return member, changes


def run(work):
    async def bounded():
        async with asyncio.timeout(TIMEOUT_S):
            return await work

    return asyncio.run(bounded())


def test_a_mismatch_is_named_and_not_tried_again_until_one_of_the_two_restarts():
    async def work():
        decode, changes = make_member("decode")
        prefill, _ = make_member("prefill")
        decode.supervisor.errors = [UnsupportedError("kv_peer.open", "dtype: a here, b there")]
        decode.link(prefill)
        await decode.wait_linked()
        assert decode.sources == frozenset()
        assert decode.refusals == {"prefill-0": "dtype: a here, b there"}
        assert not changes
        prefill.supervisor.num_restarts += 1
        decode.link(prefill)
        await decode.wait_linked()
        assert decode.sources == {"prefill-0"}
        assert decode.refusals == {}
        assert changes == [decode]
        assert len(decode.supervisor.opened) == 2

    run(work())


def test_a_lost_peer_is_tried_again_and_a_restarted_one_is_opened_anew(monkeypatch):
    monkeypatch.setattr(member_module, "LINK_PAUSE_S", 0.0)

    async def work():
        decode, _ = make_member("decode")
        prefill, _ = make_member("prefill")
        decode.supervisor.errors = [PeerLostError("kv_peer.open", "gone")] * 3
        decode.link(prefill)
        await decode.wait_linked()
        assert decode.sources == {"prefill-0"}
        decode.link(prefill)
        await decode.wait_linked()
        assert len(decode.supervisor.opened) == 4, "a link that stands is not made again"
        prefill.supervisor.num_restarts += 1
        decode.link(prefill)
        assert decode.sources == frozenset(), "the old run's blocks are gone"
        await decode.wait_linked()
        assert decode.sources == {"prefill-0"}

    run(work())


def test_instances_share_the_cores_and_have_addresses_of_their_own(monkeypatch):
    class Topology:
        cores = [[0, 4], [1, 5], [2, 6]]

    monkeypatch.setattr("tandem._native.read_topology", Topology)
    events = KvEventConfig(endpoint="tcp://127.0.0.1:5557", replay_endpoint="ipc:///a/b")
    specs = make_specs(ClusterConfig(prefill=1, decode=2), make_spec(kv_events=events))
    assert [(spec.name, spec.role, spec.cores) for spec in specs] == [
        ("prefill-0", "prefill", (0, 4)),
        ("decode-0", "decode", (1, 5)),
        ("decode-1", "decode", (2, 6)),
    ]
    assert [spec.kv_events.endpoint[-4:] for spec in specs] == ["5557", "5558", "5559"]
    assert specs[2].kv_events.replay_endpoint == "ipc:///a/b-2"
    assert len({spec.transfer.secret for spec in specs}) == 1
    assert [spec.num_siblings for spec in specs] == [3, 3, 3]
    assert make_specs(ClusterConfig(), make_spec()) == [make_spec()]
    judged = make_specs(ClusterConfig(admission="predicted"), make_spec())
    assert judged == [make_spec(tells_blocks=True)], "what is cached takes no time"
    assert [s.transfer for s in make_specs(ClusterConfig(unified=2), make_spec())] == [None, None]


def test_more_instances_than_cores_share_them_with_a_warning(monkeypatch, caplog):
    """Asked for by name, they run; who looks for lost speed finds the line."""

    class Topology:
        cores = [[0], [1]]

    monkeypatch.setattr("tandem._native.read_topology", Topology)
    specs = make_specs(ClusterConfig(prefill=2, decode=2), make_spec())
    assert [spec.cores for spec in specs] == [(0,), (1,), (0,), (1,)]
    assert "event=cores_shared instances=4 cores=2" in caplog.text
    caplog.clear()
    make_specs(ClusterConfig(unified=2), make_spec())
    assert not caplog.text


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"prefill": 1}, "decode"), ({"decode": 1}, "prefill"),
     ({"prefill": 1, "decode": 1, "unified": 1}, "unified")],
)  # fmt: skip
def test_combinations_that_make_no_cluster_are_refused(fields, field):
    with pytest.raises(ConfigError) as caught:
        ClusterConfig(**fields).require_pairs()
    assert caught.value.field == f"cluster.{field}"

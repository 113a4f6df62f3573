"""Three masters, real processes, on a real etcd: stopped, killed, cut off.

Goal: writes go on after the loss of a leader, what was acknowledged stays, and a leader that wakes
up after its time is refused whatever it does. How soon they go on is not judged here. Method:
SIGKILL and SIGSTOP of masters and of etcd, with a client that writes all the while.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import msgspec
import pytest
from etcd_server import EtcdServer, find_free_port, needs_etcd
from store_cluster import RPC, Child, Cluster

import tandem
from tandem.core.errors import PeerLostError, TandemError
from tandem.rpc import Auth, RpcClient, make_identity, make_runtime_dir
from tandem.store import PutOptions, PutResult, StoreConfig
from tandem.store.config import StoreElectionConfig
from tandem.store.messages import KeyBytes, KeyList, LeaderAnswer, RemoveObjects

pytestmark = needs_etcd
TTL_S = 3
TIMEOUT_S = 60.0


class Masters(Cluster):
    """Three candidates and what they need; the leader's index is asked from them."""

    def __init__(self, folder: Path, segments: Path, etcd: EtcdServer) -> None:
        super().__init__(folder, segments)
        self.etcd = etcd
        self.urls = [f"ipc://{folder}/m{i}.sock" for i in range(3)]
        self.election = StoreElectionConfig(
            backend="etcd",
            endpoints=(etcd.url,),
            prefix=f"/test/{folder.name}",
            ttl_s=TTL_S,
        )
        self.masters: list[Child] = []
        self.config = msgspec.structs.replace(
            self.config, master=",".join(self.urls), recovery_ms=300, lease_ms=1000
        )

    def start_masters(self) -> None:
        for url in self.urls:
            self.masters.append(self.start("master", master=url, election=self.election))

    def restart(self, i: int) -> None:
        self.masters[i] = self.start("master", master=self.urls[i], election=self.election)

    def ask(self, i: int, method: str = "leader", request=None, kind=LeaderAnswer):
        async def ask():
            client = RpcClient(
                self.urls[i],
                identity=make_identity("test", "store_client", {"store": "1"}),
                auth=Auth.for_endpoint(self.urls[i], None),
                config=msgspec.structs.replace(RPC, connect_timeout_ms=1000),
                check_compat=lambda *_: None,
            )
            async with client:
                return await client.call(method, request, kind, timeout_s=2.0)

        return asyncio.run(ask())

    def leaders(self, among=range(3)) -> list[int]:
        found = []
        for i in among:
            try:
                if self.ask(i).is_leader:
                    found.append(i)
            except TandemError:
                continue
        return found

    def wait_leader(self, among=range(3)) -> int:
        found: list[int] = []
        self.wait_for(lambda: found.extend(self.leaders(among)) or found, "a leader")
        (leader,) = found
        return leader


@pytest.fixture(scope="module")
def shared_etcd(tmp_path_factory):
    server = EtcdServer(tmp_path_factory.mktemp("etcd")).start()
    yield server
    server.kill()


@pytest.fixture
def own_etcd(tmp_path):
    server = EtcdServer(tmp_path).start()
    yield server
    server.kill()


def make_masters(etcd: EtcdServer):
    folder = make_runtime_dir()
    segments = Path("/dev/shm") / folder.name
    masters = Masters(folder, segments, etcd)
    try:
        masters.start_masters()
        masters.start("host", name="h1")
        masters.start("host", name="h2")
        yield masters
    finally:
        masters.close()
        shutil.rmtree(folder)
        shutil.rmtree(segments, ignore_errors=True)


@pytest.fixture
def masters(shared_etcd):
    yield from make_masters(shared_etcd)


@pytest.fixture
def masters_own(own_etcd):
    yield from make_masters(own_etcd)


class Writer:
    """Writes without pause in a thread; knows what was acknowledged."""

    def __init__(self, cluster: Masters) -> None:
        self.client = cluster.client()
        self.acked: dict[str, bytes] = {}
        self.errors: list[Exception] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            key, value = f"k{number}", os.urandom(500)
            number += 1
            try:
                # EXISTS is ours as well: the first answer was lost with the leader that gave it.
                self.client.put(key, value, PutOptions(replicas=2))
            except Exception as error:
                self.errors.append(error)
                return
            self.acked[key] = value
            time.sleep(0.002)

    def end(self) -> dict[str, bytes]:
        self._stop.set()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        assert not self.errors, self.errors
        return self.acked


def check_all(client, acked: dict[str, bytes]) -> None:
    keys = list(acked)
    assert len(keys) > 50
    wrong = [k for k, v in zip(keys, client.get_many(keys), strict=True) if v != acked[k]]
    assert not wrong, wrong[:5]


def wait_written(cluster: Masters, writer: Writer, more: int = 20) -> None:
    goal = len(writer.acked) + more
    cluster.wait_for(lambda: len(writer.acked) >= goal or writer.errors, "writes to go on")


def test_writes_go_on_when_the_leader_is_killed(masters):
    client = masters.client()
    masters.wait_hosts(client, 2)
    epochs = [client.status().epoch]
    writer = Writer(masters)
    for _ in range(2):
        wait_written(masters, writer)
        leader = masters.wait_leader()
        masters.masters[leader].kill()
        wait_written(masters, writer)
        epochs.append(client.status().epoch)
        masters.restart(leader)
    acked = writer.end()
    assert epochs == sorted(set(epochs))
    check_all(client, acked)


def test_a_leader_that_was_stopped_is_refused_when_it_wakes(masters):
    client = masters.client()
    masters.wait_hosts(client, 2)
    client.put("precious", b"gold", PutOptions(replicas=2))
    writer = Writer(masters)
    wait_written(masters, writer)
    old = masters.wait_leader()
    epoch = client.status().epoch
    masters.masters[old].signal(signal.SIGSTOP)
    wait_written(masters, writer)
    others = [i for i in range(3) if i != old]
    new = masters.wait_leader(others)
    assert client.status().epoch > epoch

    # Asked while it sleeps, so that this is what it finds on waking, before any clock has rung.
    refusals: list[Exception | None] = []

    def ask_old() -> None:
        try:
            masters.ask(old, "remove", RemoveObjects(keys=["precious"]), KeyBytes)
            refusals.append(None)
        except TandemError as error:
            refusals.append(error)

    asking = [threading.Thread(target=ask_old) for _ in range(8)]
    for thread in asking:
        thread.start()
    time.sleep(0.2)  # Not awaited: that it has begun makes the test harder, not right.
    masters.masters[old].signal(signal.SIGCONT)
    for thread in asking:
        thread.join(TIMEOUT_S)
    assert len(refusals) == 8
    assert all(isinstance(error, TandemError) for error in refusals)
    with pytest.raises(PeerLostError, match="does not lead"):
        masters.ask(old, "remove", RemoveObjects(keys=["precious"]), KeyBytes)
    masters.wait_for(lambda: masters.ask(old).address == masters.urls[new], "it to learn who leads")
    assert not masters.ask(old).is_leader
    wait_written(masters, writer)
    acked = writer.end()
    assert client.get("precious") == b"gold"
    check_all(client, acked)
    assert masters.leaders() == [new]


def test_etcd_killed_and_restarted(masters_own):
    """The leader goes on for as long as it may; after that nobody leads until etcd is back."""
    masters = masters_own
    client = masters.client()
    masters.wait_hosts(client, 2)
    writer = Writer(masters)
    wait_written(masters, writer)
    masters.etcd.kill()
    masters.wait_for(lambda: not masters.leaders(), "the leader to stop")
    written = len(writer.acked)
    masters.etcd.start()
    wait_written(masters, writer)
    acked = writer.end()
    assert len(acked) > written
    check_all(client, acked)


def test_an_etcd_that_hangs_is_not_waited_for(masters_own):
    masters = masters_own
    client = masters.client()
    masters.wait_hosts(client, 2)
    client.put("key", b"value")
    epoch = client.status().epoch
    masters.etcd.stop()
    masters.wait_for(lambda: not masters.leaders(), "the leader to stop")
    with pytest.raises(PeerLostError):
        masters.ask(0, "exists", KeyList(["key"]), KeyBytes)
    masters.etcd.go_on()
    assert client.put("other", b"x") is PutResult.CREATED
    assert client.status().epoch > epoch
    assert client.get("key") == b"value"


def test_one_live_address_is_enough(masters):
    """A client that knows a single follower is sent to the leader, wherever that is."""
    client = masters.client()
    masters.wait_hosts(client, 2)
    leader = masters.wait_leader()
    follower = next(i for i in range(3) if i != leader)
    masters.config = msgspec.structs.replace(masters.config, master=masters.urls[follower])
    other = masters.client()
    assert other.put("key", b"value") is PutResult.CREATED
    assert client.get("key") == b"value"


def test_the_command_line_runs_a_master_with_an_election(shared_etcd, tmp_path):
    folder = make_runtime_dir()
    port = find_free_port()
    source = str(Path(tandem.__file__).parents[1])
    command = [
        sys.executable, "-m", "tandem", "store", "master",
        "--store.master", f"ipc://{folder}/m.sock", "--store.metrics-port", str(port),
        "--election", "etcd", "--etcd-endpoints", f"http://127.0.0.1:1,{shared_etcd.url}",
        "--store.election.prefix", f"/test/{folder.name}", "--store.election.ttl-s", "2",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=dict(os.environ, PYTHONPATH=source),
    )  # fmt: skip
    try:
        assert process.stdout.readline().startswith("store master at ipc://")
        end_s = time.monotonic() + TIMEOUT_S
        while True:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                page = answer.read().decode()
            if "tandem:store_is_leader 1.0" in page:
                break
            assert time.monotonic() < end_s
            time.sleep(0.05)
        assert "tandem:store_epoch 1.0" in page
        assert "tandem:store_terms_total 1.0" in page
    finally:
        process.terminate()
        assert process.wait(TIMEOUT_S) == 0
        process.stdout.close()
        shutil.rmtree(folder)


def test_a_master_has_one_address():
    from tandem.core.errors import ConfigError
    from tandem.store import MasterService

    with pytest.raises(ConfigError, match="one address"):
        MasterService(StoreConfig(master="ipc:///tmp/a.sock,ipc:///tmp/b.sock"))

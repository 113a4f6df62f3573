"""Goal: a single master that is killed forgets neither its hosts nor what was removed.

Method: real processes; the roster is in the files beside the master's socket.
"""

import shutil
import signal
import threading
from pathlib import Path

import msgspec
import pytest
from store_cluster import TIMEOUT_S, Cluster

from tandem.rpc import make_runtime_dir
from tandem.store import PutOptions, PutResult


@pytest.fixture
def cluster():
    folder = make_runtime_dir()
    segments = Path("/dev/shm") / folder.name
    cluster = Cluster(folder, segments)
    # Hosts that are stopped here are not lost.
    cluster.config = msgspec.structs.replace(cluster.config, member_lease_ms=600_000)
    yield cluster
    cluster.close()
    shutil.rmtree(folder)
    shutil.rmtree(segments, ignore_errors=True)


class Asking:
    """A call in a thread of its own."""

    def __init__(self, call) -> None:
        self.answer = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.answer = self._call()
        except Exception as error:
            self.answer = error

    def join(self):
        self._thread.join(2 * TIMEOUT_S)
        assert not self._thread.is_alive()
        return self.answer


def is_lost(client, name):
    """By name: hosts that start together join in any order."""
    stages = {host.name: host.stage.value for host in client.status().hosts}
    return stages[name] == "lost"


def test_a_master_that_starts_anew_waits_for_a_host_that_is_stopped(cluster):
    master = cluster.start("master")
    hosts = [cluster.start("host", name=name) for name in ("h1", "h2")]
    client = cluster.client()
    cluster.wait_hosts(client, 2)
    client.put("key", b"value", PutOptions(preferred=["h2"]))
    client.put("gone", b"value", PutOptions(preferred=["h2"]))
    hosts[1].signal(signal.SIGSTOP)
    master.kill()
    cluster.start("master")
    cluster.wait_hosts(client, 1)
    assert client.status().is_recovering
    others = [cluster.client() for _ in range(4)]
    asking = [
        Asking(lambda: others[0].get("key")),
        Asking(lambda: others[1].exists("key")),
        Asking(lambda: others[2].put("key", b"another")),
        Asking(lambda: others[3].remove("gone")),
    ]
    # What does not depend on the host goes on.
    for i in range(20):
        assert client.put(f"up{i}", b"x", PutOptions(upsert=True)) is PutResult.REPLACED
        assert client.get(f"up{i}") == b"x"
    assert [one.answer for one in asking] == [None] * 4
    hosts[1].signal(signal.SIGCONT)
    assert [one.join() for one in asking] == [b"value", True, PutResult.EXISTS, True]
    assert not client.exists("gone")


def test_a_removal_outlives_the_master_that_made_it(cluster):
    """And a host is retired by the command line."""
    from typer.testing import CliRunner

    from tandem.cli.main import app

    master = cluster.start("master")
    hosts = [cluster.start("host", name=name) for name in ("h1", "h2")]
    client = cluster.client()
    cluster.wait_hosts(client, 2)
    client.put("key", b"value", PutOptions(replicas=2))
    client.put("p/1", b"value", PutOptions(replicas=2))
    hosts[1].kill()
    cluster.wait_for(lambda: is_lost(client, "h2"), "its loss")
    assert client.remove("key")
    assert client.remove_prefix("p/") == 1
    master.kill()
    master = cluster.start("master")
    hosts[1] = cluster.start("host", name="h2")
    cluster.wait_hosts(client, 2)
    assert client.exists_many(["key", "p/1"]) == [False, False]
    client.put("key", b"anew", PutOptions(replicas=2))
    hosts[1].kill()
    master.kill()
    cluster.start("master")
    cluster.wait_hosts(client, 1)
    assert client.status().is_recovering

    def run(*arguments: str):
        return CliRunner().invoke(
            app, ["store", *arguments, "--store.master", cluster.config.master]
        )

    missing = run("retire", "h3")
    assert missing.exit_code != 0
    assert "no host 'h3'" in missing.output + str(missing.exception)
    retired = msgspec.json.decode(run("retire", "h2", "--json").stdout)
    assert retired == {"host": "h2", "stage": "retired"}
    assert not client.status().is_recovering
    assert client.get("key") == b"anew"
    assert not client.exists("p/1")


def test_a_flipped_bit_in_the_roster_undoes_no_removal_and_is_told(cluster):
    master = cluster.start("master")
    hosts = [cluster.start("host", name=name) for name in ("h1", "h2")]
    client = cluster.client()
    cluster.wait_hosts(client, 2)
    client.put("key", b"value", PutOptions(replicas=2))
    hosts[1].kill()
    cluster.wait_for(lambda: is_lost(client, "h2"), "its loss")
    assert client.remove("key")
    master.kill()
    folder = Path(cluster.config.master.removeprefix("ipc://")).parent
    for name in ("members.m.sock", "tombstones.m.sock"):
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 4] ^= 1
        (folder / name).write_bytes(data)
    cluster.start("master")
    cluster.start("host", name="h2")
    cluster.wait_hosts(client, 2)
    assert not client.exists("key")
    assert client.status().damaged == ["roster", "tombstones"]

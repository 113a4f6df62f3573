"""Real processes that are killed, stopped and started again.

Goal: what the simulator promises holds with real sockets, memory and signals. Method: children of
``store_program.py``, SIGKILL and SIGSTOP, and a client in this process that works meanwhile.
"""

import os
import shutil
import signal
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from store_cluster import Cluster

from quick import rest_slow
from tandem.core.errors import CapacityError, ConflictError, PermissionDeniedError
from tandem.rpc import make_runtime_dir
from tandem.store import Part, PutOptions, PutResult
from tandem.store.host.segment import HostSegment


@pytest.fixture
def cluster():
    folder = make_runtime_dir()
    segments = Path("/dev/shm") / folder.name
    cluster = Cluster(folder, segments)
    yield cluster
    cluster.close()
    shutil.rmtree(folder)
    shutil.rmtree(segments, ignore_errors=True)


def make_value(number: int, size: int) -> bytes:
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8).tobytes()


def start_two_hosts(cluster):
    """Return a process of one of two hosts and a client."""
    cluster.start("master")
    first = cluster.start("host", name="h1")
    cluster.start("host", name="h2")
    client = cluster.client()
    cluster.wait_hosts(client, 2)
    return first, client


def test_reads_go_on_when_a_host_is_killed(cluster):
    """Two replicas, a reader without pause, SIGKILL: every get succeeds."""
    doomed, client = start_two_hosts(cluster)
    values = {f"k{i}": make_value(i, 300_000) for i in range(20)}
    for key, value in values.items():
        assert client.put(key, value, PutOptions(replicas=2)) is PutResult.CREATED
    begin_s = time.monotonic()
    killed = False
    num_reads = 0
    while time.monotonic() - begin_s < 4:
        for key, value in values.items():
            if not killed and time.monotonic() - begin_s > 1:
                doomed.kill()
                killed = True
            assert client.get(key) == value
            num_reads += 1
    assert killed
    assert num_reads > 100


def test_lost_replicas_are_made_again(cluster):
    doomed, client = start_two_hosts(cluster)
    values = {f"k{i}": make_value(i, 100_000) for i in range(10)}
    for key, value in values.items():
        client.put(key, value, PutOptions(replicas=2))
    doomed.kill()
    cluster.start("host", name="h3")
    cluster.wait_for(lambda: client.status().num_under_replicated == 0, "repair")
    assert client.list_keys().num_replicas == [2] * 10
    assert {key: client.get(key) for key in values} == values


def test_a_restarted_host_brings_its_objects_back(cluster):
    cluster.start("master")
    host = cluster.start("host", name="h1")
    client = cluster.client()
    cluster.wait_hosts(client, 1)
    values = {f"k{i}": make_value(i, 50_000 + i) for i in range(50)}
    client.put_many(list(values), list(values.values()))
    host.kill()
    cluster.start("host", name="h1")
    cluster.wait_hosts(client, 1)
    assert client.get_many(list(values)) == list(values.values())


def test_a_host_that_comes_back_without_its_memory_joins_when_the_old_one_is_lost(cluster):
    """Its name is taken until the master has noticed; it may not stay out for that."""
    cluster.start("master")
    host = cluster.start("host", name="h1")
    client = cluster.client()
    cluster.wait_hosts(client, 1)
    host.signal(signal.SIGSTOP)  # Its connection stays open until its lease is over.
    cluster.start("host", name="h1", segment_dir=str(cluster.segments / "new"))
    assert client.put("key", b"y") is PutResult.CREATED
    assert client.get("key") == b"y"


@pytest.mark.parametrize("num_objects", rest_slow([20_000], [20_000, 100_000]))
def test_a_new_master_learns_of_many_objects(cluster, num_objects):
    """More than a page of a host's inventory; what waits meanwhile is done."""
    cluster.config = msgspec.structs.replace(
        cluster.config, put_timeout_ms=30_000, deadline_ms=60_000
    )
    master = cluster.start("master")
    host = cluster.start("host", name="h1", segment_bytes=2**27)
    client = cluster.client()
    cluster.wait_hosts(client, 1)
    keys = [f"{i:064}" for i in range(num_objects)]
    for begin in range(0, len(keys), 20_000):
        part = keys[begin : begin + 20_000]
        results = client.put_many(part, [key[-8:].encode() for key in part])
        assert set(results) == {PutResult.CREATED}
    epoch = client.status().epoch
    master.kill()
    cluster.start("master", is_fresh=True)
    assert all(client.exists_many(keys))
    assert client.status().epoch > epoch
    assert client.put("new", b"x") is PutResult.CREATED
    some = keys[::997]
    assert client.get_many(some) == [key[-8:].encode() for key in some]
    assert host.process.poll() is None


def test_a_client_killed_in_mid_put_leaves_nothing(cluster):
    cluster.start("master")
    cluster.start("host", name="h1")
    client = cluster.client()
    cluster.wait_hosts(client, 1)
    size = 2**25
    writer = cluster.start("stall", "key", str(size))
    assert writer.read_line() == "granted"
    assert client.status().hosts[0].used_bytes > size
    assert not client.exists("key")
    writer.kill()
    # Its space is proven free as soon as it is known to be dead.
    assert client.put("big", bytes(2**25 + 2**24)) is PutResult.CREATED
    assert not client.exists("key")


@pytest.mark.parametrize("is_stopped", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_client_that_wakes_after_its_put_expired_harms_nobody(cluster, is_stopped):
    """It slept through its time; its late write must meet no other's object, and says so."""
    cluster.start("master")
    cluster.start("host", name="h1")
    client = cluster.client()
    cluster.wait_hosts(client, 1)
    size = 2**25
    writer = cluster.start("stall", "key", str(size))
    assert writer.read_line() == "granted"
    if is_stopped:
        writer.signal(signal.SIGSTOP)
    cluster.wait_for(lambda: client.status().num_unfinished == 0, "expiry of the put")
    values = {f"k{i}": make_value(i, 2**20) for i in range(60)}
    for key, value in values.items():
        client.put(key, value)
    if is_stopped:
        writer.signal(signal.SIGCONT)
    writer.tell()
    assert writer.read_line() == "write NotFoundError"
    # It begins anew; this time the write is allowed to succeed.
    assert writer.read_line() == "granted"
    kept = [key for key in values if client.exists(key)]
    assert len(kept) > 20
    assert client.get_many(kept) == [values[key] for key in kept]
    writer.tell()
    assert writer.read_line() == "write ok"
    assert writer.read_line() == "put created"
    assert client.get("key") == b"\xee" * size


def test_a_restarted_host_gives_no_space_out_while_an_old_client_may_write(cluster):
    """The client maps the file and is stopped: what was put is read, but nothing is written."""
    cluster.start("master")
    host = cluster.start("host", name="h1")
    client = cluster.client()
    cluster.wait_hosts(client, 1)
    values = {f"k{i}": make_value(i, 100_000) for i in range(10)}
    client.put_many(list(values), list(values.values()))
    writer = cluster.start("stall", "key", str(2**20), "warm")
    assert writer.read_line() == "granted"
    writer.signal(signal.SIGSTOP)
    host.kill()
    cluster.start("host", name="h1")

    def is_read_only() -> bool:
        return [host.stage.value for host in client.status().hosts] == ["read_only"]

    cluster.wait_for(is_read_only, "the host to be back")
    assert client.get_many(list(values)) == list(values.values())
    with pytest.raises(CapacityError):
        client.put("new", bytes(10_000), PutOptions(wait_s=0.5))
    assert is_read_only()
    writer.kill()
    cluster.wait_hosts(client, 1)
    assert client.put("new", bytes(10_000)) is PutResult.CREATED


def test_flipped_bytes_are_found_and_the_replica_replaced(cluster):
    cluster.start("master")
    cluster.start("host", name="h1")
    cluster.start("host", name="h2")
    client = cluster.client()
    cluster.wait_hosts(client, 2)
    value = make_value(1, 500_000)
    client.put("key", value, PutOptions(replicas=2))
    path = cluster.segments / "h1.segment"
    data = path.read_bytes()
    at = data.find(value[300_000:300_064])
    assert at > 0
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\0" * 64)
    for _ in range(10):
        assert client.get("key") == value
        assert client.get_range("key", 299_000, 2000) == value[299_000:301_000]
    cluster.wait_for(lambda: path.read_bytes().find(value[300_000:300_064]) > 0, "repair")
    assert client.list_keys().num_replicas == [2]


def test_drain_moves_everything_while_it_is_read(cluster):
    cluster.start("master")
    leaving = cluster.start("host", name="h1")
    client = cluster.client()
    cluster.wait_hosts(client, 1)
    values = {f"k{i}": make_value(i, 80_000) for i in range(40)}
    client.put_many(list(values), list(values.values()))
    cluster.start("host", name="h2")
    cluster.wait_hosts(client, 2)
    client.drain("h1")

    def is_drained() -> bool:
        for key, value in values.items():
            assert client.get(key) == value
        return client.status().hosts[0].stage.value == "drained"

    cluster.wait_for(is_drained, "drain")
    leaving.kill()
    assert client.get_many(list(values)) == list(values.values())


def test_a_second_owner_of_a_segment_is_refused(tmp_path):
    folder = tmp_path / "segments"
    folder.mkdir(mode=0o700)
    segment = HostSegment.open_file(folder / "a", 2**20)
    with pytest.raises(ConflictError, match="live host"):
        HostSegment.open_file(folder / "a", 2**20)
    segment.close()
    HostSegment.open_file(folder / "a", 2**20).close(remove=True)
    assert not (folder / "a").exists()


def test_foreign_and_open_files_are_refused(tmp_path):
    folder = tmp_path / "segments"
    folder.mkdir(mode=0o700)
    path = folder / "a"
    path.write_bytes(b"somebody's letters" * 100)
    path.chmod(0o600)
    with pytest.raises(ConflictError, match="not a segment"):
        HostSegment.open_file(path, 2**20)
    assert path.read_bytes() == b"somebody's letters" * 100
    path.chmod(0o644)
    with pytest.raises(PermissionDeniedError, match="0600"):
        HostSegment.open_file(path, 2**20)
    folder.chmod(0o755)
    with pytest.raises(PermissionDeniedError, match="0700"):
        HostSegment.open_file(path, 2**20)


def test_a_segment_that_the_file_system_cannot_hold_is_refused(tmp_path):
    folder = tmp_path / "segments"
    folder.mkdir(mode=0o700)
    room = os.statvfs(folder)
    too_much = room.f_bavail * room.f_frsize + 2**30
    with pytest.raises(CapacityError, match="free"):
        HostSegment.open_file(folder / "a", too_much)


@pytest.mark.parametrize("transport", ["tcp", "cma"])
def test_every_way_of_the_bytes_is_bit_exact(cluster, transport):
    cluster.config = msgspec.structs.replace(cluster.config, transports=("local", transport))
    cluster.start("master")
    cluster.start("host", name="h1")
    client = cluster.client()
    cluster.wait_hosts(client, 1)
    for size in (0, 1, 4096, 2**20 + 7):
        value = make_value(size, size)
        assert client.put(f"{size}", value) is PutResult.CREATED
        assert client.get(f"{size}") == value
    assert client.get_range(f"{2**20 + 7}", 70_000, 5000) == value[70_000:75_000]
    source = np.frombuffer(bytearray(make_value(9, 64 * 5000)), np.uint8)
    target = np.zeros_like(source)
    buffers = client.register(source), client.register(target)
    parts = [[Part(b, i * 5000, 2000), Part(b, i * 5000 + 2000, 3000)] for b in buffers
             for i in range(64)]  # fmt: skip
    keys = [f"k{i}" for i in range(64)]
    assert set(client.put_from_many(keys, parts[:64])) == {PutResult.CREATED}
    assert client.get_into_many(keys, parts[64:]) == [5000] * 64
    assert np.array_equal(source, target)


def test_the_command_line(cluster, tmp_path):
    from typer.testing import CliRunner

    from tandem.cli.main import app

    cluster.start("master")
    cluster.start("host", name="h1")
    client = cluster.client()
    cluster.wait_hosts(client, 1)
    file, copy = tmp_path / "in", tmp_path / "out"
    file.write_bytes(make_value(1, 100_000))

    def run(*arguments: str):
        return CliRunner().invoke(
            app, ["store", *arguments, "--store.master", cluster.config.master]
        )

    assert run("put", "key", str(file)).stdout == "created\n"
    assert msgspec.json.decode(run("put", "key", str(file), "--json").stdout)["result"] == "exists"
    assert run("get", "key", str(copy)).exit_code == 0
    assert copy.read_bytes() == file.read_bytes()
    listed = msgspec.json.decode(run("ls", "--json").stdout)
    assert listed == [{"key": "key", "size_bytes": 100_000, "replicas": 1}]
    status = msgspec.json.decode(run("stat", "--json").stdout)
    assert status["num_objects"] == 1
    assert "h1" in run("stat").stdout
    assert run("rm", "key").stdout == "removed 1\n"
    missing = run("rm", "key")
    assert missing.exit_code != 0
    assert "no object 'key'" in str(missing.exception)
    assert run("get", "key").exit_code != 0
    drained = run("drain", "h1", "--wait-s", "20", "--json")
    assert msgspec.json.decode(drained.stdout) == {"host": "h1", "stage": "drained"}
    with pytest.raises(CapacityError, match="none active"):
        client.put("key", b"x", PutOptions(wait_s=0.1))

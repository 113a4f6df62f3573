"""The SSD tier on a real disk, with real processes that are killed.

Goal: every object that is served is bit-exact after SIGKILL at any moment, whatever the disk held;
flipped bits are found, and a disk without room, or with another owner, is met as promised.
"""

import os
import random
import shutil
import time
from pathlib import Path

import msgspec
import pytest
from test_store_processes import Cluster, make_value

from tandem.core.errors import (
    ConflictError,
    NotFoundError,
    PeerLostError,
    PermissionDeniedError,
    UnsupportedError,
)
from tandem.rpc import make_runtime_dir
from tandem.store import PutOptions, PutResult
from tandem.store.formats import headers
from tandem.store.formats.bucket import FOLDER_MAGIC
from tandem.store.host.disk_files import DiskFolder
from tandem.transfer import TransferConfig, TransferEngine


@pytest.fixture
def cluster(tmp_path):
    folder = make_runtime_dir()
    segments = Path("/dev/shm") / folder.name
    cluster = Cluster(folder, segments)
    cluster.folder = folder
    cluster.disk = tmp_path / "ssd"
    cluster.config = msgspec.structs.replace(
        cluster.config, ssd_dir=str(cluster.disk), ssd_bytes=2**28, segment_bytes=2**24
    )
    yield cluster
    cluster.close()
    shutil.rmtree(folder)
    shutil.rmtree(segments, ignore_errors=True)


def disk_of(client, host: int = 0):
    return client.status().hosts[host].disk


def wait_written(cluster, client) -> None:
    def is_written() -> bool:
        disk = disk_of(client)
        return disk is not None and not disk.num_queued

    # Twice: between a seal and the report of it nothing is queued that the master knows of.
    cluster.wait_for(is_written, "write behind")
    written = disk_of(client).counts["written"]
    cluster.wait_for(lambda: disk_of(client).counts["written"] >= written, "a report")


def put_more_than_memory(cluster, client, count: int = 60, size: int = 600_000) -> dict:
    """Three times what memory takes; each is given time to reach the disk."""
    values = {}
    for i in range(count):
        key, value = f"k{i}", make_value(i, size + i)
        assert client.put(key, value) is PutResult.CREATED
        values[key] = value
        cluster.wait_for(lambda i=i: disk_of(client).counts["written"] > i, "write behind")
    return values


def test_more_than_memory_is_kept_and_read_back(cluster):
    cluster.start("master")
    cluster.start("host", name="h1")
    client = cluster.client()
    cluster.wait_hosts(client, 1)
    values = put_more_than_memory(cluster, client)
    status = client.status()
    assert status.num_objects == len(values)
    assert status.hosts[0].num_objects < len(values)
    for key in random.Random(1).sample(list(values), len(values)):
        assert client.get(key) == values[key]
    assert client.get_range("k0", 300_000, 5000) == values["k0"][300_000:305_000]
    assert client.put("k0", b"x") is PutResult.EXISTS
    assert client.put("k0", b"new", PutOptions(upsert=True)) is PutResult.REPLACED
    assert client.get("k0") == b"new"
    assert client.remove("k1")
    with pytest.raises(NotFoundError):
        client.get("k1")
    files = list(cluster.disk.iterdir())
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert cluster.disk.stat().st_mode & 0o777 == 0o700
    assert disk_of(client).counts["errors"] == 0


def test_a_new_machine_finds_its_objects_on_the_disk(cluster):
    """Memory, master and its note of epochs are gone; only the disk is left."""
    cluster.start("master")
    cluster.start("host", name="h1")
    client = cluster.client()
    cluster.wait_hosts(client, 1)
    values = put_more_than_memory(cluster, client, count=12)
    client.remove("k3")
    client.put("k4", b"newer", PutOptions(upsert=True))
    values["k4"] = b"newer"
    wait_written(cluster, client)
    cluster.wait_for(lambda: disk_of(client).num_objects == 11, "write behind")
    client.close()
    for child in cluster.children:
        child.kill()
    for file in [*cluster.segments.iterdir(), cluster.folder / "epoch"]:
        file.unlink()
    cluster.start("master")
    cluster.start("host", name="h1")
    client = cluster.client()
    cluster.wait_hosts(client, 1)
    with pytest.raises(NotFoundError):
        client.get("k3")
    del values["k3"]
    assert {key: client.get(key) for key in values} == values
    assert client.put("k5", b"other", PutOptions(upsert=True)) is PutResult.REPLACED
    assert client.get("k5") == b"other"


def test_killed_at_any_moment(cluster):
    """Under load, again and again; whatever is served afterwards is what was written."""
    chance = random.Random(4)
    cluster.config = msgspec.structs.replace(cluster.config, ssd_bytes=2**25, put_wait_ms=2000)
    cluster.start("master")
    client = cluster.client()
    values: dict[str, set[bytes]] = {}
    served = 0
    for turn in range(4):
        host = cluster.start("host", name="h1")
        cluster.wait_hosts(client, 1)
        end_s = time.monotonic() + chance.uniform(0.3, 1.2)
        count = 0
        while time.monotonic() < end_s:
            key = f"k{chance.randrange(80)}"
            value = make_value(turn * 1000 + count, chance.choice((100, 50_000, 700_000)))
            count += 1
            if chance.random() < 0.15:
                client.remove(key)
                values[key] = set()
            else:
                values.setdefault(key, set()).add(value)
                if client.put(key, value, PutOptions(upsert=True)) is not PutResult.EXISTS:
                    values[key] = {value}
            if count % 3 == 0:
                served += check(client, values, f"k{chance.randrange(80)}")
        host.kill()
        if turn == 2:
            for file in cluster.segments.glob("h1*"):
                file.unlink()  # As if the machine had gone down.
        cluster.wait_for(
            lambda: client.status().hosts[0].stage.value == "lost", "the loss to be seen"
        )
    cluster.start("host", name="h1")
    cluster.wait_hosts(client, 1)
    for key in values:
        served += check(client, values, key)
    assert served > 30


def check(client, values: dict[str, set[bytes]], key: str) -> bool:
    try:
        value = client.get(key)
    except NotFoundError:
        return False
    assert value in values.get(key, ()), f"{key}: {value[:20]!r}"
    return True


def test_flipped_bits_are_found(cluster):
    cluster.start("master")
    host = cluster.start("host", name="h1")
    client = cluster.client()
    cluster.wait_hosts(client, 1)
    values = put_more_than_memory(cluster, client, count=12)
    wait_written(cluster, client)
    host.kill()
    for file in cluster.segments.glob("h1*"):
        file.unlink()
    flipped = 0
    for file in sorted(cluster.disk.glob("*.bucket")):
        data = file.read_bytes()
        for key in ("k2", "k7"):
            at = data.find(values[key][300_000:300_064])
            if at > 0:
                flipped += 1
                with file.open("r+b") as bucket:
                    bucket.seek(at)
                    bucket.write(bytes([data[at] ^ 0x10]))
    assert flipped == 2
    cluster.start("host", name="h1")
    cluster.wait_hosts(client, 1)
    for key, value in values.items():
        if key in ("k2", "k7"):
            with pytest.raises(NotFoundError):
                client.get(key)
        else:
            assert client.get(key) == value
    assert client.put("k2", b"again") is PutResult.CREATED
    assert client.get("k2") == b"again"


def test_a_rotten_copy_is_made_again_from_another_host(cluster):
    cluster.start("master")
    dirs = {name: str(cluster.disk) + name for name in ("h1", "h2")}
    hosts = [cluster.start("host", name=name, ssd_dir=path) for name, path in dirs.items()]
    client = cluster.client()
    cluster.wait_hosts(client, 2)
    value = make_value(1, 500_000)
    client.put("key", value, PutOptions(replicas=2))
    cluster.wait_for(
        lambda: all(h.disk and h.disk.num_objects for h in client.status().hosts), "both disks"
    )
    for host in hosts:
        host.kill()
    for file in cluster.segments.glob("*.segment"):
        file.unlink()
    (bucket,) = Path(dirs["h1"]).glob("*.bucket")
    data = bytearray(bucket.read_bytes())
    at = data.find(value[200_000:200_064])
    assert at > 0
    data[at] ^= 1
    bucket.write_bytes(data)
    cluster.start("host", name="h1", ssd_dir=dirs["h1"])
    cluster.wait_hosts(client, 1)
    with pytest.raises(PeerLostError):
        client.get("key")  # The only copy that is here turns out to be rotten.
    cluster.start("host", name="h2", ssd_dir=dirs["h2"])
    cluster.wait_hosts(client, 2)
    assert client.get("key") == value
    cluster.wait_for(lambda: client.list_keys().num_replicas == [2], "repair")


def test_a_disk_without_room_costs_copies_only(cluster, tmp_path):
    """Files of the host cannot grow; later they can."""
    full = tmp_path / "full"
    full.touch()
    cluster.start("master")
    cluster.start("full_host", str(full), name="h1")
    client = cluster.client()
    cluster.wait_hosts(client, 1)
    values = {f"k{i}": make_value(i, 100_000) for i in range(20)}
    for key, value in values.items():
        assert client.put(key, value) is PutResult.CREATED
    cluster.wait_for(lambda: disk_of(client).state.value == "full", "the disk to be full")
    assert {key: client.get(key) for key in values} == values
    assert disk_of(client).num_objects == 0
    full.unlink()
    cluster.wait_for(lambda: disk_of(client).num_objects == 20, "recovery")
    assert disk_of(client).state.value == "active"


def test_drain_empties_the_disk_as_well(cluster):
    cluster.start("master")
    leaving = cluster.start("host", name="h1", ssd_dir=str(cluster.disk) + "1")
    client = cluster.client()
    cluster.wait_hosts(client, 1)
    values = put_more_than_memory(cluster, client, count=40)
    assert client.status().hosts[0].num_objects < 40
    cluster.start("host", name="h2", ssd_dir=str(cluster.disk) + "2", segment_bytes=2**26)
    cluster.wait_hosts(client, 2)
    client.drain("h1")
    cluster.wait_for(lambda: client.status().hosts[0].stage.value == "drained", "drain")
    leaving.kill()
    assert {key: client.get(key) for key in values} == values


@pytest.fixture
def engine():
    with TransferEngine(TransferConfig()) as engine:
        yield engine


def test_a_folder_has_one_host(tmp_path, engine):
    folder = DiskFolder.open(tmp_path / "ssd", engine, marks=tmp_path)
    with pytest.raises(ConflictError, match="live host"):
        DiskFolder.open(tmp_path / "ssd", engine, marks=tmp_path)
    identity = folder.folder_id
    folder.close()
    again = DiskFolder.open(tmp_path / "ssd", engine, marks=tmp_path)
    assert again.folder_id == identity
    again.close()


@pytest.mark.asyncio
async def test_a_condemned_folder_is_emptied_by_its_next_start(tmp_path, engine):
    """Whoever opens it, under whatever name."""
    folder = DiskFolder.open(tmp_path / "ssd", engine, marks=tmp_path)
    await folder.make_bucket(7, 2**20)
    assert await folder.list_buckets() == [(7, 2**20)]
    folder.condemn()
    folder.close()
    for expected in ([], [(8, 2**20)]):
        folder = DiskFolder.open(tmp_path / "ssd", engine, marks=tmp_path)
        assert await folder.list_buckets() == expected
        if not expected:
            await folder.make_bucket(8, 2**20)
        folder.close()


def test_links_and_open_folders_are_refused(tmp_path, engine):
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    target.chmod(0o600)
    path = tmp_path / "ssd"
    path.mkdir(mode=0o700)
    (path / "folder").symlink_to(target)
    with pytest.raises((OSError, PermissionDeniedError)):
        DiskFolder.open(path, engine, marks=tmp_path)
    assert target.read_bytes() == b"precious"
    (path / "folder").unlink()
    os.link(target, path / "folder")
    with pytest.raises(PermissionDeniedError):
        DiskFolder.open(path, engine, marks=tmp_path)
    assert target.read_bytes() == b"precious"
    (path / "folder").unlink()
    path.chmod(0o755)
    with pytest.raises(PermissionDeniedError, match="0700"):
        DiskFolder.open(path, engine, marks=tmp_path)
    path.chmod(0o700)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises((PermissionDeniedError, FileExistsError)):
        DiskFolder.open(tmp_path / "link", engine, marks=tmp_path)
    (path / "folder").write_bytes(b"somebody's letters, which are long")
    (path / "folder").chmod(0o600)
    with pytest.raises(ConflictError, match="none of ours"):
        DiskFolder.open(path, engine, marks=tmp_path)
    with pytest.MonkeyPatch.context() as later:
        later.setattr(headers, "FORMAT", headers.FORMAT + 1)
        (path / "folder").write_bytes(headers.pack_head(FOLDER_MAGIC, bytes(16)))
    with pytest.raises(UnsupportedError, match="this build knows"):
        DiskFolder.open(path, engine, marks=tmp_path)

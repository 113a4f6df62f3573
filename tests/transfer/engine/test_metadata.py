"""Names of segments: one suite for every store, then what is HTTP's own, then the directory."""

import http.client
import time

import numpy as np
import pytest
from segment_directory import Directory, MemoryMetadata, SegmentRecord
from segment_directory_http import HttpMetadata, MetadataServer
from tests_transfer_world import SECRET, move

from tandem.core.clock import ManualClock
from tandem.core.errors import (
    ConfigError,
    ConflictError,
    NotFoundError,
    PeerLostError,
    PermissionDeniedError,
)
from tandem.transfer import Op


@pytest.fixture(params=["memory", "http"])
def place(request):
    """A store, and the clock of its leases."""
    clock = ManualClock(100.0)
    memory = MemoryMetadata(clock, max_records=50)
    if request.param == "memory":
        yield memory, clock
        return
    with MetadataServer(SECRET, store=memory) as server:
        client = HttpMetadata(server.address, SECRET)
        yield client, clock
        client.close()


def record(name="a", epoch=1, addresses=("10.0.0.1:7",)):
    return SegmentRecord(name=name, epoch=epoch, addresses=addresses)


def test_names_are_held_by_leases_and_epochs(place):
    store, clock = place
    with pytest.raises(NotFoundError):
        store.get("a")
    store.put(record(), 10)
    assert store.get("a") == record()
    with pytest.raises(ConflictError):
        store.put(record(epoch=2), 10)
    clock.advance(9)
    store.put(record(addresses=("10.0.0.2:7",)), 10)  # Renewed, and moved.
    clock.advance(9)
    assert store.get("a").addresses == ("10.0.0.2:7",)
    clock.advance(2)
    with pytest.raises(NotFoundError):
        store.get("a")
    store.put(record(epoch=2), 10)  # Its successor.
    store.remove("a", 1)  # A late good-bye of the old run does not hurt.
    assert store.get("a").epoch == 2
    store.remove("a", 2)
    store.remove("a", 2)
    assert store.names() == []


@pytest.mark.parametrize("name", ["a/b", "host:1", "ü ?&=%2F", "..", "x" * 200])
def test_any_printable_name_is_kept(place, name):
    store, _ = place
    store.put(record(name), 10)
    assert store.get(name).name == name
    assert store.names(name[:1]) == [name]
    assert store.names("zzz") == []
    store.remove(name, 1)
    assert store.names() == []


def test_what_is_refused(place):
    store, clock = place
    for wrong in (record(""), record("a\n"), record("x" * 201), record(epoch=0),
                  record(epoch=2**64), record(addresses=("a:1",) * 257)):  # fmt: skip
        with pytest.raises((ConfigError, NotFoundError)):
            store.put(wrong, 10)
    for lease_s in (0, -1, 3601):
        with pytest.raises(ConfigError):
            store.put(record(), lease_s)
    for number in range(50):
        store.put(record(f"n{number:02}"), 5)
    with pytest.raises(ConflictError):
        store.put(record("one more"), 5)
    clock.advance(6)
    store.put(record("one more"), 5)  # Ended leases make room.
    assert store.names() == ["one more"]


def test_without_the_secret_nothing_is_told_or_taken():
    with MetadataServer(SECRET) as server, HttpMetadata(server.address, SECRET) as friend:
        friend.put(record(), 10)
        stranger = HttpMetadata(server.address, "another secret of the kind")
        for call in (
            lambda: stranger.get("a"),
            lambda: stranger.put(record("b"), 1),
            lambda: stranger.remove("a", 1),
            stranger.names,
        ):
            with pytest.raises(PermissionDeniedError):
                call()
        assert friend.names() == ["a"]
        stranger.close()
    with pytest.raises(ConfigError):
        HttpMetadata("127.0.0.1:1", "short")
    with pytest.raises(ConfigError):
        HttpMetadata("127.0.0.1", SECRET)


def test_hostile_requests_are_refused_and_the_server_lives():
    with MetadataServer(SECRET) as server:
        good = HttpMetadata(server.address, SECRET)
        host, _, port = server.address.rpartition(":")
        headers = {"Authorization": good._token}
        for method, path, body, status in (
            ("PUT", "/segments/a", b"{", 400),
            ("PUT", "/segments/a", b"\xff" * 100, 400),
            ("PUT", "/segments/a", b"[" * 60_000, 400),
            ("PUT", "/segments/a", b" " * 100_000, 503),
            ("PUT", "/segments/a", b'{"record": {"name": "b", "addresses": [], "epoch": 1}, '
                                   b'"lease_s": 1}', 400),
            ("DELETE", "/segments/a?epoch=x", None, 400),
            ("DELETE", "/segments/a?epoch=" + "9" * 5000, None, 400),
            ("POST", "/segments/a", b"{}", 405),
            ("GET", "/other", None, 404),
        ):  # fmt: skip
            raw = http.client.HTTPConnection(host, int(port), timeout=10)
            raw.request(method, path, body, headers)
            assert raw.getresponse().status == status, (method, path, body)
            raw.close()
        good.put(record(), 10)
        assert good.names() == ["a"]
        good.close()


def test_a_lost_server_is_named_and_a_new_one_is_used():
    with MetadataServer(SECRET) as server:
        client = HttpMetadata(server.address, SECRET, timeout_s=2)
        client.put(record(), 10)
        port = int(server.address.rpartition(":")[2])
    with pytest.raises(PeerLostError):
        client.get("a")
    with MetadataServer(SECRET, port=port):
        with pytest.raises(NotFoundError):
            client.get("a")
        client.put(record(), 10)
    client.close()


class CountingMetadata(MemoryMetadata):
    """Tells how often a record was put or renewed."""

    num_puts = 0

    def put(self, record: SegmentRecord, lease_s: float) -> None:
        super().put(record, lease_s)
        self.num_puts += 1


def test_directory_finds_segments_by_name_and_notices_a_new_run(world):
    clock = ManualClock(100.0)
    records = CountingMetadata(clock)
    with MetadataServer(SECRET, store=records) as server:
        store = HttpMetadata(server.address, SECRET)
        first = world.engine(name="store-1")
        taker = world.engine(name="taker")
        finder = Directory(taker, store)
        with pytest.raises(NotFoundError):
            finder.open("store-1")
        with Directory(first, store, lease_s=0.3) as place:
            place.publish()
            with pytest.raises(ConflictError):
                place.publish()
            for _ in range(8):  # Longer than the lease: it is renewed.
                seen, limit = records.num_puts, time.monotonic() + 60
                while records.num_puts == seen:
                    assert time.monotonic() < limit, "it is not renewed"
                    time.sleep(0.005)
                clock.advance(0.25)
                assert store.names() == ["store-1"]
            segment = finder.open("store-1")
            remote = first.allocate(100)
            data = np.arange(100, dtype=np.uint8)
            move(taker, segment, Op.WRITE, taker.register(data), remote.offset, 100)
            assert np.array_equal(remote.array, data)
            usurper = world.engine(name="store-1")
            with pytest.raises(ConflictError):
                Directory(usurper, store).publish()
        assert store.names() == []
        with Directory(usurper, store) as place:
            place.publish()
            assert finder.open("store-1").name == "store-1"
            # A record that leads to another run than it says is no way to open.
            store.remove("store-1", usurper.epoch)
            stale = SegmentRecord(name="store-1", addresses=tuple(usurper.addresses), epoch=7)
            store.put(stale, 10)
            with pytest.raises(PeerLostError, match="another run"):
                finder.open("store-1")
        store.close()

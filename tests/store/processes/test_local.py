"""The API of a store, on one that lives in this process: the promises a user reads.

Method: plain calls; small segments, so that limits are met.
"""

import asyncio
import secrets
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tandem.core.clock import MonotonicClock
from tandem.core.errors import (
    CapacityError,
    ConfigError,
    ConflictError,
    NotFoundError,
    ShapeError,
)
from tandem.store import Part, PutOptions, PutResult, StoreClient, StoreConfig
from tandem.store.client.client import AsyncStoreClient
from tandem.store.client.put_batch import PutBatch
from tandem.store.host.host import StoreHost
from tandem.store.host.segment import HostSegment
from tandem.store.local import LocalStore, MemoryHostPort, MemoryPort, _connect
from tandem.store.master.master import StoreMaster
from tandem.store.master.state.ledger import Space
from tandem.store.messages import CommitPut, CommitStatus, KeyBytes, StartedPut, StartPut

EXAMPLE = Path(__file__).parents[3] / "examples" / "store_hello.py"
CHUNK = 64 * 1024
FAST = StoreConfig(recovery_ms=0, lease_ms=50, put_wait_ms=2000)


@pytest.fixture
def store():
    with StoreClient.local(2**22, FAST) as client:
        yield client


def make_value(length: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("length", [0, 1, 63, 4096, CHUNK - 1, CHUNK, CHUNK + 1, 700_001])
def test_a_value_comes_back_bit_exact(store, length):
    value = make_value(length)
    assert store.put("key", value) is PutResult.CREATED
    assert store.get("key") == value
    assert store.size("key") == length
    assert store.exists("key")


def test_put_of_an_existing_key_says_so_and_changes_nothing(store):
    assert store.put("key", b"first") is PutResult.CREATED
    assert store.put("key", b"second") is PutResult.EXISTS
    assert store.get("key") == b"first"


def test_upsert_replaces(store):
    upsert = PutOptions(upsert=True)
    assert store.put("key", b"first", upsert) is PutResult.CREATED
    assert store.put("key", b"second", upsert) is PutResult.REPLACED
    assert store.get("key") == b"second"


def test_parts_make_one_value(store):
    parts = [b"ab", make_value(CHUNK - 1), b"", make_value(2 * CHUNK + 5, 1), b"z"]
    store.put("key", parts)
    assert store.get("key") == b"".join(parts)


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 0), (0, 1), (CHUNK - 1, 2), (CHUNK, CHUNK), (3 * CHUNK, 777), (199_999, 1), (0, 200_000)],
)
def test_ranges(store, offset, length):
    value = make_value(200_000)
    store.put("key", value)
    assert store.get_range("key", offset, length) == value[offset : offset + length]


@pytest.mark.parametrize(("offset", "length"), [(0, 11), (11, 0), (5, 6)])
def test_a_range_beyond_the_value_is_refused(store, offset, length):
    store.put("key", b"0123456789")
    with pytest.raises(ConfigError, match="10 bytes"):
        store.get_range("key", offset, length)


def test_registered_buffers_move_in_place(store):
    array = np.frombuffer(bytearray(make_value(300_000)), np.uint8)
    buffer = store.register(array)
    parts = [Part(buffer, 0, 100), Part(buffer, 1000, 250_000)]
    store.put_from("key", parts)
    expected = array[:100].tobytes() + array[1000:251_000].tobytes()
    assert store.get("key") == expected
    target = np.zeros(400_000, np.uint8)
    into = store.register(target)
    assert store.get_into("key", [Part(into, 7, 90_000), Part(into, 200_000)]) == len(expected)
    assert target[7:90_007].tobytes() + target[200_000:360_100].tobytes() == expected
    assert not target[:7].any()
    assert not target[90_007:200_000].any()
    assert not target[360_100:].any()
    store.unregister(buffer)
    store.unregister(into)


def test_wrong_buffers_are_refused(store):
    buffer = store.register(np.zeros(10, np.uint8))
    store.put("key", b"x" * 11)
    with pytest.raises(ShapeError, match="the parts hold 10"):
        store.get_into("key", Part(buffer))
    with pytest.raises(ShapeError, match="buffer of 10 bytes"):
        store.put_from("other", Part(buffer, 5, 6))
    with pytest.raises(ShapeError, match="strided"):
        store.register(np.zeros((4, 4), np.uint8)[:, :2])


def test_batches_give_one_result_a_key(store):
    store.put("b", b"old")
    results = store.put_many(["a", "b", "c"], [b"1", b"2", b""])
    assert results == [PutResult.CREATED, PutResult.EXISTS, PutResult.CREATED]
    values = store.get_many(["a", "b", "c", "d"])
    assert values[:3] == [b"1", b"old", b""]
    assert isinstance(values[3], NotFoundError)
    assert store.exists_many(["a", "d", "c"]) == [True, False, True]
    sizes = store.size_many(["b", "d"])
    assert sizes[0] == 3
    assert isinstance(sizes[1], NotFoundError)
    assert store.remove_many(["a", "d"]) == [True, False]
    assert store.remove_many(["a"]) == [False]


def test_missing_is_an_error_that_names_the_key(store):
    for call in (store.get, store.size):
        with pytest.raises(NotFoundError, match="'nope'"):
            call("nope")
    assert store.remove("nope") is False
    assert store.pin("nope", hard=True) is False


def test_prefixes(store):
    store.put_many([f"a/{i}" for i in range(20)] + ["b"], [b"x"] * 21)
    page = store.list_keys("a/", limit=5)
    assert page.keys == sorted(f"a/{i}" for i in range(20))[:5]
    assert not page.is_last
    assert store.list_keys("a/", after="a/8").keys == ["a/9"]
    assert store.remove_prefix("a/") == 20
    assert store.list_keys().keys == ["b"]


@pytest.mark.parametrize("key", ["", "k" * 1025, "\ud800"])
def test_keys_beyond_the_limits_are_refused(store, key):
    with pytest.raises(ConfigError):
        store.put(key, b"x")


def test_values_beyond_the_limits_are_refused():
    config = StoreConfig(recovery_ms=0, max_value_bytes=100, max_batch=3)
    with StoreClient.local(2**20, config) as store:
        with pytest.raises(ConfigError, match="max_value_bytes"):
            store.put("key", b"x" * 101)
        with pytest.raises(ConfigError, match="max_batch"):
            store.put_many(list("abcd"), [b""] * 4)
        with pytest.raises(ConfigError, match="twice"):
            store.put_many(["a", "a"], [b"", b""])
        assert not store.exists("key")


@pytest.mark.parametrize("size", [2**22 - 64, 2**22, 2**22 + 1, 2**23])
def test_what_can_never_fit_is_refused_at_once(store, size):
    """Also if only its table and header are too much; and nothing has to go for it."""
    assert store.put("old", b"stays") is PutResult.CREATED
    with pytest.raises(CapacityError, match="add a host"):
        store.put("key", bytes(size))
    assert store.exists("old")


def test_a_batch_that_can_never_fit_is_refused_at_once(store):
    assert store.put("old", b"stays") is PutResult.CREATED
    with pytest.raises(CapacityError, match="add a host"):
        store.put_many([f"k{i}" for i in range(9)], [bytes(2**19)] * 9)
    assert store.exists("old")


def test_a_full_store_evicts_the_least_recently_used(store):
    value = bytes(2**19)
    for i in range(6):
        store.put(f"k{i}", value)
    store.get("k0")
    for i in range(6, 9):
        store.put(f"k{i}", value)
    assert store.exists("k0")
    assert not store.exists("k1")
    assert store.get("k8") == value


def test_pins_outlive_eviction_until_taken_off(store):
    value = bytes(2**19)
    store.put("hard", value, PutOptions(hard_pin=True))
    store.put("soft", value, PutOptions(soft_pin_s=600))
    for i in range(20):
        store.put(f"k{i}", value)
    assert store.exists_many(["hard", "soft"]) == [True, True]
    assert store.unpin("soft")
    assert store.unpin("hard")
    for i in range(20, 40):
        store.put(f"k{i}", value)
    assert store.exists_many(["hard", "soft"]) == [False, False]


def test_a_store_of_pinned_objects_says_what_would_help():
    config = StoreConfig(recovery_ms=0, put_wait_ms=100)
    with StoreClient.local(2**20, config) as store:
        hard = PutOptions(hard_pin=True)
        assert store.put("a", bytes(2**19), hard) is PutResult.CREATED
        with pytest.raises(CapacityError, match="unpin") as caught:
            store.put("b", bytes(2**19 + 2**18), hard)
        assert caught.value.retryable
        assert store.get("a") == bytes(2**19)


def test_a_put_waits_for_a_reader_to_end():
    config = StoreConfig(recovery_ms=0, put_wait_ms=5000, lease_ms=300)
    with StoreClient.local(2**20, config) as store:
        store.put("a", bytes(2**19))
        store.get("a")  # Leased from here on, for 300 ms.
        assert store.put("b", bytes(2**19 + 2**18)) is PutResult.CREATED
        assert not store.exists("a")


def test_looking_does_not_renew_a_lease_nor_count_as_use():
    config = StoreConfig(recovery_ms=0, put_wait_ms=3000, lease_ms=600_000)
    with StoreClient.local(2**20, config) as store:
        store.put("a", bytes(2**19))
        for _ in range(3):
            assert store.exists("a")
            assert store.size("a") == 2**19
        # Had that leased it, this would wait for ten minutes.
        assert store.put("b", bytes(2**19 + 2**18)) is PutResult.CREATED


def test_threads_share_a_client(store):
    errors = []

    def work(number: int) -> None:
        try:
            for i in range(50):
                value = make_value(1000, number)
                store.put(f"{number}/{i}", value)
                assert store.get(f"{number}/{i}") == value
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors


def test_one_key_many_writers_gives_one_value(store):
    results = []

    def work(number: int) -> None:
        results.append((store.put("key", bytes([number]) * 5000), number))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    winners = [number for result, number in results if result is PutResult.CREATED]
    assert len(winners) == 1
    assert len(results) == 8
    assert store.get("key") == bytes(winners) * 5000


def test_all_space_returns(store):
    for i in range(30):
        store.put(f"k{i}", make_value(10_000 + 137 * i))
    store.remove_prefix("")
    status = store.status()
    assert status.num_objects == 0
    assert status.hosts[0].used_bytes == 0
    assert status.num_unfinished == 0


def test_a_closed_client_refuses(store):
    store.close()
    with pytest.raises(ConflictError, match="closed"):
        store.get("key")


def test_the_example_runs():
    result = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=60, check=True
    )
    assert "PutResult.EXISTS" in result.stdout
    assert "b'hello, store' b'store'" in result.stdout


def test_a_late_copy_of_a_request_does_not_stand_for_its_put():
    """A put expires; a late copy of its request takes space anew, which nobody writes; then the
    first commit comes. It must not seal what was not written. (Found by the simulator.)"""
    config = StoreConfig(recovery_ms=0, put_timeout_ms=50, segment_bytes=2**20)

    async def run() -> None:
        async with LocalStore(config) as store:
            call = store.client._calls.channel.call
            request = StartPut(first_put_id=10**6, keys=["key"], sizes=[10])
            first = await call("start_put", request, StartedPut)
            async with asyncio.timeout(60):
                while (await store.client.status()).num_unfinished:
                    await asyncio.sleep(0.01)
            await call("start_put", request, StartedPut)
            commit = CommitPut(
                first_put_id=10**6, grant=first.grant, checksums=[1], tables=bytes(4)
            )
            answer = await call("commit_put", commit, KeyBytes)
            assert list(answer.flags) == [CommitStatus.EXPIRED]
            assert not await store.client.exists("key")

    asyncio.run(run())


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
def test_a_put_that_ends_before_it_writes_gives_its_space_back(how, monkeypatch):
    """Checksums are taken while the master is asked: who fails there gives back."""

    async def run() -> None:
        async with LocalStore(StoreConfig(recovery_ms=0, segment_bytes=2**20)) as store:
            client, master = store.client, store._master
            begun = asyncio.Event()

            async def prepare(*_) -> None:
                begun.set()
                if how == "fails":
                    raise ShapeError("test", "no memory")
                await asyncio.sleep(60)

            monkeypatch.setattr(PutBatch, "_prepare", prepare)
            put = asyncio.ensure_future(client.put("key", bytes(100_000)))
            await begun.wait()
            assert master.puts.num_unfinished == 1
            put.cancel() if how == "is cancelled" else None
            with pytest.raises((ShapeError, asyncio.CancelledError)):
                await put
            async with asyncio.timeout(60):
                while master.puts.num_unfinished:
                    await asyncio.sleep(0)
            (host,) = master.state.hosts.values()
            assert host.ledger.count_bytes(Space.QUARANTINED) == host.used_bytes == 0

    asyncio.run(run())


class LapsingTerm:
    """A term that may be said to be over, and not to be."""

    is_held = True

    def holds(self) -> bool:
        return self.is_held

    def resign(self, *, min_epoch: int) -> None:
        raise AssertionError(min_epoch)


def test_repair_goes_on_after_a_burst_of_orders_that_failed_at_once():
    """Each copy that ends begins another: hundreds that fail without waiting are no recursion."""

    async def run() -> None:
        config, clock, peers = StoreConfig(recovery_ms=0), MonotonicClock(), {}
        term = LapsingTerm()
        master = StoreMaster(config, clock=clock, epoch=1, draw=secrets.randbelow, term=term)
        master.start()

        async def add_host(name: str) -> StoreHost:
            segment = HostSegment.make_anonymous(2**22)
            host = StoreHost(name, name, segment, MemoryHostPort(name, segment, peers))
            host.on_master(_connect(name, master.methods(), host.orders.methods()))
            await host.is_joined.wait()
            return host

        hosts = [await add_host("a")]
        channel = _connect("client", master.methods(), ())
        client = AsyncStoreClient(channel, MemoryPort(peers), clock=clock, config=config)
        keys = [f"key-{i}" for i in range(600)]
        await client.put_many(keys, [b"x"] * len(keys), PutOptions(replicas=2))
        assert master.state.directory.count_under_replicated() == len(keys)
        term.is_held = False
        hosts.append(await add_host("b"))
        await asyncio.sleep(0.5)
        assert master.state.directory.count_under_replicated() == len(keys)
        term.is_held = True
        async with asyncio.timeout(60):
            while master.state.directory.count_under_replicated():
                await asyncio.sleep(0.01)
        await client.aclose()
        for host in hosts:
            await host.aclose()
        await master.aclose()

    asyncio.run(run())

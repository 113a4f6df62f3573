"""Columns of gets, inline puts, calls over the transfer engine: their corners, and the ways out."""

import asyncio
import concurrent.futures
import itertools
import threading
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem._native import checksum_blob, checksum_values, locate_values
from tandem.core.clock import MonotonicClock
from tandem.core.errors import (
    ConfigError,
    ConflictError,
    DeadlineError,
    NotFoundError,
    PeerLostError,
    ShapeError,
    TandemError,
)
from tandem.rpc import make_runtime_dir, outgoing
from tandem.store import (
    ClientService,
    HostService,
    MasterService,
    Part,
    PutOptions,
    PutResult,
    StoreClient,
    StoreConfig,
)
from tandem.store.client import blocking, drive
from tandem.store.client.master_calls import MasterCalls
from tandem.store.client.reading import ObjectReader
from tandem.store.formats import layout
from tandem.store.formats.checksum import checksum_table, make_table
from tandem.store.local import LocalStore
from tandem.store.messages import (
    CommitStatus,
    KeyBytes,
    PinObjects,
    PrefixRemoval,
    PutInline,
    RemoveObjects,
    RemovePrefix,
    StoreStatus,
)
from tandem.transfer import PollingLoop


@given(
    sizes=st.lists(st.integers(0, 9000), max_size=12),
    chunk_bytes=st.sampled_from([64, 1024, 4096]),
)
def test_checksums_of_many_are_those_of_each(sizes, chunk_bytes):
    memory = np.random.default_rng(len(sizes)).integers(0, 256, 10_000, dtype=np.uint8)
    places = [(10_000 - size) // 2 for size in sizes]
    columns = np.array(places, np.uint64), np.array(sizes, np.uint64)
    checksums, tables = checksum_values(memory, *columns, chunk_bytes)
    expected = []
    for at, size in zip(places, sizes, strict=True):
        chunks = [
            checksum_table(memory[begin : min(begin + chunk_bytes, at + size)].tobytes())
            for begin in range(at, at + size, chunk_bytes)
        ]
        expected.append(b"".join(chunk.to_bytes(4, "little") for chunk in chunks))
    assert tables == b"".join(expected)
    assert checksums == [checksum_table(table) for table in expected]
    blob = b"".join(
        memory[at : at + size].tobytes() for at, size in zip(places, sizes, strict=True)
    )
    assert checksum_blob(blob, sizes, chunk_bytes) == checksums


def test_a_value_beyond_its_blob_is_refused():
    assert checksum_blob(b"abc", [3, 0], 64) == checksum_blob(b"abcd", [3, 0], 64)
    with pytest.raises(ShapeError):
        checksum_blob(b"abc", [2, 2], 64)
    with pytest.raises(ConfigError):
        checksum_blob(b"abc", [3], 0)


@given(st.lists(st.tuples(st.text(max_size=70), st.integers(0, 2**40)), max_size=5))
def test_values_lie_where_the_layout_says(objects):
    keys, sizes = [key for key, _ in objects], [size for _, size in objects]
    expected = [layout.value_offset(len(key.encode()), size) for key, size in objects]
    assert locate_values(keys, sizes) == expected


@pytest.mark.parametrize(("place", "size"), [(0, 101), (101, 0), (100, 1), (2**64 - 1, 2)])
def test_a_value_beyond_the_memory_is_refused(place, size):
    columns = np.array([place], np.uint64), np.array([size], np.uint64)
    with pytest.raises(ShapeError):
        checksum_values(np.zeros(100, np.uint8), *columns, 64)


def make_values(count: int, size: int) -> list[bytes]:
    data = np.random.default_rng(size).bytes(count * size)
    return [data[i * size : (i + 1) * size] for i in range(count)]


@pytest.mark.parametrize("inline_bytes", [0, 8192])
@pytest.mark.parametrize("size", [1, 511, 4096, 32_769, 70_000, 200_000])
def test_batches_come_back_as_they_were(size, inline_bytes):
    config = StoreConfig(recovery_ms=0, inline_bytes=inline_bytes)
    with StoreClient.local(2**24, config) as client:
        keys = [f"{'k' * (i % 130)}{i}" for i in range(24)]
        values = make_values(len(keys), size)
        assert set(client.put_many(keys, values)) == {PutResult.CREATED}
        # In another order, twice, with what is missing or empty between them.
        client.put("empty", b"")
        asked = [*reversed(keys), "none", keys[3], "empty", keys[3]]
        found = client.get_many(asked)
        expected = dict(zip(keys, values, strict=True)) | {"empty": b""}
        for key, value in zip(asked, found, strict=True):
            if key == "none":
                assert isinstance(value, NotFoundError)
            else:
                assert value == expected[key]
        target = client.register(np.zeros(len(keys) * size, np.uint8))
        parts = [Part(target, i * size, size) for i in range(len(keys))]
        assert client.get_into_many(keys, parts) == [size] * len(keys)
        assert target.array.tobytes() == b"".join(values)


def test_a_destination_that_is_too_small_stays_as_it_was():
    with StoreClient.local(2**22) as client:
        client.put_many(["a", "b"], [b"x" * 100, b"y" * 50])
        target = client.register(np.zeros(150, np.uint8))
        first, second = client.get_into_many(["a", "b"], [Part(target, 0, 60), Part(target, 60)])
        assert isinstance(first, ShapeError)
        assert second == 50
        assert target.array.tobytes() == bytes(60) + b"y" * 50 + bytes(40)


def make_request(first_put_id: int, value: bytes, settled_below: int, **more) -> PutInline:
    table = make_table([np.frombuffer(value, np.uint8)])
    return PutInline(
        first_put_id=first_put_id,
        keys=["key"],
        sizes=[len(value)],
        checksums=[checksum_table(table)],
        blob=value,
        settled_below=settled_below,
        **more,
    )


def test_a_late_copy_of_an_inline_put_changes_nothing():
    async def run() -> None:
        async with LocalStore(StoreConfig(recovery_ms=0, segment_bytes=2**20)) as store:
            call = store.client._calls.channel.call
            first = make_request(10, b"first", 10)
            for _ in range(2):
                answer = await call("put_inline", first, KeyBytes)
                assert list(answer.flags) == [CommitStatus.CREATED], "a doubled one sees the result"
            store.client._calls.ids._next = 100
            assert await store.client.remove("key")
            with pytest.raises(ConflictError, match="after its answer"):
                await call("put_inline", first, KeyBytes)
            assert not await store.client.exists("key"), "it would have come back to life"
            second = make_request(111, b"second", 111)
            assert list((await call("put_inline", second, KeyBytes)).flags) == [
                CommitStatus.CREATED
            ]
            with pytest.raises(ConflictError, match="after its answer"):
                await call("put_inline", first, KeyBytes)
            assert await store.client.get("key") == b"second"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("method", "request_of", "answer_type"),
    [
        ("remove", lambda how: RemoveObjects(keys=["key"], **how), KeyBytes),
        ("remove_prefix", lambda how: RemovePrefix(prefix="", **how), PrefixRemoval),
        ("pin", lambda how: PinObjects(keys=["key"], hard=True, **how), KeyBytes),
    ],
)
def test_a_late_copy_of_a_change_changes_nothing(method, request_of, answer_type):
    """Its client has the answer and has gone on: the object is another. (Seeds 1576, 2818.)"""

    async def run() -> None:
        async with LocalStore(StoreConfig(recovery_ms=0, segment_bytes=2**20)) as store:
            client, call = store.client, store.client._calls.channel.call
            client._calls.ids._next = 100
            await client.put("key", b"first")
            request = request_of({"number": 100, "settled_below": 100})
            client._calls.ids._next = 101
            answers = [await call(method, request, answer_type) for _ in range(2)]
            assert answers[0] == answers[1], "a doubled one sees the result"
            await client.put("key", b"second", PutOptions(upsert=True))
            with pytest.raises(ConflictError, match="after its answer"):
                await call(method, request, answer_type)
            assert await client.get("key") == b"second"
            row = store._master.state.directory.find("key")
            assert not store._master.state.directory.is_hard_pinned(row)

    asyncio.run(run())


def test_inline_values_that_changed_on_the_way_are_not_taken():
    async def run() -> None:
        async with LocalStore(StoreConfig(recovery_ms=0, segment_bytes=2**20)) as store:
            call = store.client._calls.channel.call
            request = msgspec.structs.replace(make_request(1, b"value", 1), blob=b"valuf")
            assert list((await call("put_inline", request, KeyBytes)).flags) == [
                CommitStatus.EXPIRED
            ]
            assert not await store.client.exists("key")
            async with asyncio.timeout(60):
                while (await store.client.status()).hosts[0].used_bytes:
                    await asyncio.sleep(0.01)
            with pytest.raises(ConfigError, match="do not fit"):
                request = msgspec.structs.replace(make_request(2, b"value", 2), blob=b"valu")
                await call("put_inline", request, KeyBytes)

    asyncio.run(run())


def make_config(tmp_path, **more) -> StoreConfig:
    return StoreConfig(
        **more,
        master=f"ipc://{make_runtime_dir()}/m.sock",
        segment_dir=str(tmp_path / "segments"),
        segment_bytes=2**22,
        recovery_ms=0,
        transports=("local", "tcp"),
    )


async def wait_for(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_polling", [False, True])
def test_a_client_goes_on_when_its_lane_breaks(tmp_path, is_polling):
    async def run() -> None:
        config = make_config(tmp_path, location_cache=0)
        async with MasterService(config) as master, HostService(config) as host:
            await asyncio.wait_for(host.host.is_joined.wait(), 60)
            async with ClientService(config) as service:
                peer = service._channel._client.peer
                await wait_for(lambda: peer.has_lane)
                client = service.client
                await client.put("key", b"value")
                assert await client.get("key") == b"value"
                assert master.elected.counters.hits == 1
                peer.transport.lane.close()
                assert await client.get("key") == b"value"
                assert not peer.has_lane
                assert not peer.is_lost

    if is_polling:
        with asyncio.Runner(loop_factory=PollingLoop) as runner:
            runner.run(run())
    else:
        asyncio.run(run())


def test_many_threads_of_one_blocking_client(tmp_path, monkeypatch):
    """Put, get, batches and misses from eight threads: ids, scratch memory and peers are shared.

    No step yields the thread to a loop that is not there: ``time.sleep(0)`` takes 50 to 100 us.
    """
    config = make_config(tmp_path)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        time.sleep(seconds)

    clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    monkeypatch.setattr(blocking, "time", clock)
    ready, done = concurrent.futures.Future(), concurrent.futures.Future()

    async def serve() -> None:
        async with MasterService(config), HostService(config) as host:
            await asyncio.wait_for(host.host.is_joined.wait(), 60)
            ready.set_result(None)
            await asyncio.wait_for(asyncio.wrap_future(done), 60)

    def work(client: StoreClient, number: int) -> None:
        for step, size in itertools.product(range(4), (10, 4096, 20_000)):
            keys = [f"{number}/{step}/{size}/{i}" for i in range(5)]
            values = make_values(5, size + number)
            assert client.put(keys[0], values[0]) is PutResult.CREATED
            results = client.put_many(keys, values)
            assert results == [PutResult.EXISTS] + 4 * [PutResult.CREATED]
            assert client.get_many(keys) == values
            assert client.get(keys[1]) == values[1]
            assert client.get_range(keys[2], 1, 5) == values[2][1:6]
            assert client.exists_many([*keys, "none"]) == 5 * [True] + [False]
            assert client.put(keys[0], b"new", PutOptions(upsert=True)) is PutResult.REPLACED
            assert client.get(keys[0]) == b"new"
            assert client.remove_many(keys) == [True] * 5
            with pytest.raises(NotFoundError):
                client.get(keys[0])

    with concurrent.futures.ThreadPoolExecutor() as pool:
        server = pool.submit(asyncio.run, serve())
        ready.result(60)
        try:
            with StoreClient(config) as client:
                for future in [pool.submit(work, client, i) for i in range(8)]:
                    future.result(60)
            assert 0 not in slept
        finally:
            done.set_result(None)
        server.result(60)


@pytest.mark.asyncio
async def test_objects_that_are_asked_for_again_in_another_order_get_their_own_values(monkeypatch):
    """Some wait for a disk, some for a host: the second lookup must not swap what it is told."""
    values = {f"k{i}": bytes([i]) * 3000 for i in range(3)}
    async with LocalStore(StoreConfig(recovery_ms=0, segment_bytes=2**20)) as store:
        await store.client.put_many(list(values), list(values.values()))

        async def look_up_later(self, read, method, unplaced):
            monkeypatch.setattr(ObjectReader, "_look_up", look_up)
            read.again, read.unsure, read.staged = [2], [0], [1]
            read.causes = dict.fromkeys(range(3), NotFoundError("store.get", "not yet"))

        look_up = ObjectReader._look_up
        monkeypatch.setattr(ObjectReader, "_look_up", look_up_later)
        store.client._places.cache.clear()
        assert await store.client.get_many(list(values)) == list(values.values())


class _NoLane:
    """A channel whose session has ended."""

    def begin_threadsafe(self, method, request, response_type, *, timeout_s):
        raise PeerLostError("test.call", "no master")

    async def call(self, method, request, response_type, *, timeout_s=None):
        raise PeerLostError("test.call", "no master")

    async def wait_connected(self, timeout_s):
        raise PeerLostError("test.call", "no master")


def test_a_loop_that_hangs_holds_up_no_thread_of_a_blocking_client(monkeypatch):
    """Each thread keeps the deadline of its call by itself; a watchdog ends the test else."""
    monkeypatch.setattr(outgoing, "LOOP_GRACE_S", 0.05)
    channel = _NoLane()
    config = StoreConfig(deadline_ms=100)
    calls = MasterCalls(channel, clock=MonotonicClock(), config=config, machine="")
    loop = asyncio.new_event_loop()  # It never runs.
    found: list[BaseException] = []

    def call() -> None:
        try:
            drive(blocking._BlockingCalls(calls, channel, loop).simple("status", None, StoreStatus))
        except TandemError as error:
            found.append(error)

    threads = [threading.Thread(target=call, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert [type(error) for error in found] == [DeadlineError] * 2

"""Gets from remembered places: that they ask nobody, and that nobody can tell.

Goal: a client that remembers where an object lay sees what one that asks would see, also when its
host is away from the master and not from the client. Method: real processes' classes for what is
asked; for the rest the simulator's world, where a host is cut off, or a wipe held up, at will.
"""

import asyncio

import msgspec
import numpy as np
import pytest
from store_world import StoreWorld
from test_store_sim import CONFIG

from tandem._native import BatchRead
from tandem._native import LocationCache as NativeCache
from tandem.core.clock import ManualClock
from tandem.core.errors import (
    CorruptionError,
    NotFoundError,
    PeerLostError,
    ShapeError,
    TandemError,
)
from tandem.rpc import make_runtime_dir
from tandem.sim import Faults, Session, run_virtual
from tandem.store import (
    HostService,
    MasterService,
    Part,
    PutOptions,
    PutResult,
    StoreClient,
    StoreConfig,
)
from tandem.store.client import reading as reading_module
from tandem.store.client.location_cache import LocationCache
from tandem.store.formats import layout
from tandem.store.host.orders import HostOrders
from tandem.store.local import LocalStore
from tandem.store.master.state.drops import Drops
from tandem.store.master.state.wipes import Wipes
from tandem.store.messages import Endpoint
from tandem.transfer import PollingLoop

UPSERT = PutOptions(upsert=True, replicas=1)


def count_known(client, keys) -> int:
    places = client._places
    now_s = client._calls.clock.now_s() + places.margin_s
    return BatchRead(keys, 1).place_known(places.cache, now_s)


@pytest.mark.parametrize("size", [1, 4096, 40_000, 300_000])
@pytest.mark.asyncio
async def test_a_second_get_asks_nobody_and_sees_all_that_changes(size):
    async with LocalStore(StoreConfig(recovery_ms=0, segment_bytes=2**25)) as store:
        client, counters = store.client, store._master.state.counters
        keys = [f"key-{i}" * (1 + 20 * i) for i in range(6)]
        values = [bytes([i]) * size for i in range(6)]
        await client.put_many(keys, values)
        target = client.register(np.zeros(6 * size, np.uint8))
        parts = [Part(target, i * size, size) for i in range(6)]
        for asked in (6, 6, 6):
            assert await client.get_many(keys) == values
            assert await client.get(keys[3]) == values[3]
            target.array[:] = 0
            assert await client.get_into_many(keys, parts) == [size] * 6
            assert target.array.tobytes() == b"".join(values)
            assert counters.hits == asked
        # Other pins are no other object.
        await client.pin_many(keys, hard=True)
        await client.unpin_many(keys)
        assert await client.get_many(keys) == values
        assert counters.hits == 6
        # By hand, as if another client had done it.
        other = client.make_twin(client._calls, client._port)
        other._places = type(client._places)(0)
        assert await other.put(keys[0], b"new", UPSERT) is PutResult.REPLACED
        assert await other.remove(keys[1])
        found = await client.get_many(keys)
        assert found[0] == b"new"
        assert isinstance(found[1], NotFoundError)
        assert found[2:] == values[2:]
        assert isinstance(await settle(client.get_into(keys[1], parts[1])), NotFoundError)


async def settle(work):
    try:
        return await work
    except TandemError as error:
        return error


@pytest.mark.asyncio
async def test_what_is_remembered_is_bounded_and_can_be_nothing():
    for limit, expected in ((0, 0), (3, 3), (100, 10)):
        config = StoreConfig(recovery_ms=0, segment_bytes=2**24, location_cache=limit)
        async with LocalStore(config) as store:
            keys = [f"key-{i}" for i in range(10)]
            await store.client.put_many(keys, [b"value"] * 10)
            for _ in range(3):
                assert await store.client.get_many(keys) == [b"value"] * 10
            assert len(store.client._places.cache) == expected
            assert count_known(store.client, keys) == expected
            store.client.on_master()
            assert count_known(store.client, keys) == 0


@pytest.mark.parametrize("transports", [("local", "tcp"), ("local", "shm", "cma")])
def test_over_real_transports_threads_share_what_is_known_until_the_session_ends(
    tmp_path, transports
):
    async def run() -> None:
        config = StoreConfig(
            master=f"ipc://{make_runtime_dir()}/m.sock",
            segment_dir=str(tmp_path / "segments"),
            segment_bytes=2**24,
            recovery_ms=0,
            transports=transports,
        )
        async with MasterService(config) as master, HostService(config) as host:
            await asyncio.wait_for(host.host.is_joined.wait(), 60)
            counters = master.elected.counters
            client = await asyncio.to_thread(StoreClient, config)
            try:
                keys, values = ["a", "b"], [b"1" * 5000, b"2" * 100_000]
                await asyncio.to_thread(client.put_many, keys, values)
                for _ in range(3):
                    assert await asyncio.to_thread(client.get_many, keys) == values
                    assert await asyncio.to_thread(client.get, "a") == values[0]
                assert counters.hits == 2
                cache = client._client._places.cache
                master._server.end_sessions(PeerLostError("test.master", "go"))
                async with asyncio.timeout(60):
                    while len(cache):
                        await asyncio.sleep(0.01)
                assert await asyncio.to_thread(client.get_many, keys) == values
                assert counters.hits >= 4  # More, if it asked before the host was back.
            finally:
                await asyncio.to_thread(client.close)

    with asyncio.Runner(loop_factory=PollingLoop) as runner:
        runner.run(run())


@pytest.mark.asyncio
async def test_rot_at_a_remembered_place_is_found():
    async with LocalStore(StoreConfig(recovery_ms=0, segment_bytes=2**24)) as store:
        client = store.client
        await client.put("key", b"value" * 100)
        assert await client.get("key") == b"value" * 100
        assert count_known(client, ["key"]) == 1
        (offset,) = store._host.segment.list_offsets()
        store._host.segment.data[offset + layout.value_offset(3, 500) + 50] ^= 1
        with pytest.raises((CorruptionError, NotFoundError)):  # Its host gives it up.
            await client.get("key")
        assert count_known(client, ["key"]) == 0


@pytest.mark.asyncio
async def test_a_place_is_not_used_at_the_end_of_its_lease():
    """One that ends while it is read takes the others of its batch with it."""
    config = StoreConfig(recovery_ms=0, segment_bytes=2**24, lease_ms=1000)
    async with LocalStore(config) as store:
        client, clock = store.client, ManualClock()
        client._calls.clock = clock
        await client.put("key", b"value")
        assert await client.get("key") == b"value"
        hits = store._master.state.counters.hits
        for now_s, expected in ((0.7, 0), (0.85, 1), (0.9, 1)):
            clock.advance(now_s - clock.now_s())
            assert await client.get("key") == b"value"
            assert store._master.state.counters.hits == hits + expected


def test_the_hosts_of_a_session_are_forgotten_with_it():
    places = LocationCache(10)
    for i in range(5):
        endpoint = Endpoint(i, f"h{i}", "", "", 0)
        number = places.number(endpoint)
        assert places.number(endpoint) == number
        assert places.endpoint(number) == endpoint
        places.clear()
        assert places.endpoint(number) is None  # A read that is under way fails, and asks.
        assert places.number(endpoint) > number
    assert len(places._endpoints) == 1


def test_columns_that_do_not_fit_are_refused():
    cache = NativeCache(4)
    for columns, versions in ((b"1" * 31, b""), (bytes(32), bytes(7)), (bytes(64), bytes(8))):
        with pytest.raises(CorruptionError):
            BatchRead(["key"], 1).place([0], columns, versions, [(0, 0, 0)], 1.0, cache, 0)
    with pytest.raises(ShapeError):
        BatchRead(["key"], 1).place([1], bytes(32), b"", [], 1.0, cache, 0)
    with pytest.raises(ShapeError):
        BatchRead(["key"], 1).aim([5], [6], 10)
    batch = BatchRead(["key"], 100)
    batch.place([0], np.array([10, 0, 0, 512], "<i8").tobytes(), b"", [(0, 0, 0)], 9.0, cache, 0)
    assert batch.plan(0)[0] == 10
    with pytest.raises(ShapeError):
        batch.check_values(np.zeros(9, np.uint8), None)
    with pytest.raises(TypeError):
        BatchRead([b"key"], 1)


def find_session(world: StoreWorld, name: str) -> Session:
    process, _ = world.hosts[name]
    return next(s for s in world.sessions if s.near is process and s.is_open)


def cut_off(world: StoreWorld, name: str) -> None:
    """End a host's session with the master, for good; clients reach it as before."""
    world.joins[name].cancel()
    world.end_session(find_session(world, name))


async def change_under_a_reader(kind: str) -> tuple[list[bytes | None], float, float]:
    """Cut off the host of an object that a client remembers, and have another change it.

    Returns: what the client got from when the change was acknowledged on; how long that took; and
    how much of the lease was left when it began.
    """
    # A plain put takes the place of an object only once its hosts are declared lost.
    config = msgspec.structs.replace(CONFIG, deadline_ms=8000, member_lease_ms=100)
    world = StoreWorld(5, config, Faults())
    world.start_master()
    for name in ("h0", "h1"):
        world.start_host(name, 2**18)
    await asyncio.sleep(2)
    loop = asyncio.get_running_loop()
    _, reader = world.start_client("c0")
    _, writer = world.start_client("c1")
    assert not await reader.exists("key")  # From now on it has a session.
    await writer.put("key", b"old", PutOptions(replicas=1, preferred=("h0",)))
    assert await reader.get("key") == b"old"
    leased_s = loop.time() + CONFIG.lease_ms / 1e3
    assert count_known(reader, ["key"]) == 1
    cut_off(world, "h0")
    await asyncio.sleep(0.1)
    assert await reader.get("key") == b"old"
    left_s, begun_s = leased_s - loop.time(), loop.time()
    if kind == "remove":
        change = asyncio.ensure_future(writer.remove("key"))
    elif kind == "remove_prefix":
        # Of what another is removing already.
        other = asyncio.ensure_future(world.start_client("c2")[1].remove("key"))
        await asyncio.wait([other], timeout=0.2)
        change = asyncio.ensure_future(writer.remove_prefix("k"))
    else:
        options = UPSERT if kind == "upsert" else PutOptions(replicas=1)
        change = asyncio.ensure_future(writer.put("key", b"new", options))
    while not change.done():
        found = await reader.get("key") if count_known(reader, ["key"]) else b"old"
        assert found in (b"old", b"new")
        await asyncio.sleep(0.01)
    took_s = loop.time() - begun_s
    after: list[bytes | None] = []
    for _ in range(3):
        try:
            after.append(await reader.get("key"))
        except NotFoundError:
            after.append(None)
    return after, took_s, left_s


KINDS = {"remove": None, "remove_prefix": None, "upsert": b"new", "put": b"new"}


@pytest.mark.parametrize("kind", KINDS)
def test_no_change_is_acknowledged_while_a_lost_host_may_still_be_read(kind):
    after, took_s, left_s = run_virtual(lambda: change_under_a_reader(kind))
    assert after == [KINDS[kind]] * 3
    # Long enough, and no longer than the lease.
    assert left_s - 0.2 * CONFIG.lease_ms / 1e3 < took_s < left_s + 0.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["leases of lost hosts", "leases of readers"])
def test_without_the_rule_an_old_value_is_read(kind, rule, monkeypatch):
    if rule == "leases of lost hosts":
        monkeypatch.setattr(Drops, "_finish_unwiped", Drops._finish)
        monkeypatch.setattr(Wipes, "hide_until", lambda *_: None)
    else:
        monkeypatch.setattr(reading_module, "LEASE_SHARE", 10)
    after, _, _ = run_virtual(lambda: change_under_a_reader(kind))
    assert after == [b"old"] * 3


async def read_during_a_wipe() -> tuple[bytes, bytes, bytes]:
    """Hold up the wipe of a replaced object; returns what one that asks and then one that remembers
    got meanwhile, and what that got after."""
    world = StoreWorld(6, CONFIG, Faults())
    world.start_master()
    world.start_host("h0", 2**18)
    await asyncio.sleep(2)
    _, reader = world.start_client("c0")
    _, asking = world.start_client("c1")
    _, writer = world.start_client("c2")
    for client in (reader, asking):
        assert not await client.exists("key")
    await writer.put("key", b"old")
    assert await reader.get("key") == b"old"
    has_come, let_go, wipe = asyncio.Event(), asyncio.Event(), HostOrders._wipe

    async def wipe_late(orders, caller, order):
        has_come.set()
        await let_go.wait()
        answer = wipe(orders, caller, order)
        return await answer if asyncio.iscoroutine(answer) else answer

    process, host = world.hosts["h0"]
    _, *types = process.methods["wipe"]
    process.methods["wipe"] = (lambda caller, order: wipe_late(host.orders, caller, order), *types)
    change = asyncio.ensure_future(writer.put("key", b"new", UPSERT))
    await asyncio.wait_for(has_come.wait(), 60)
    asked = asyncio.ensure_future(asking.get("key"))
    await asyncio.wait([asked], timeout=1)
    assert not change.done()
    first = asked.result() if asked.done() else b""
    second = await reader.get("key")
    let_go.set()
    await change
    assert await asked == b"new"
    return first, second, await reader.get("key")


@pytest.mark.parametrize("is_held", [True, False])
def test_nobody_is_told_of_a_new_value_while_the_old_one_may_be_read(is_held, monkeypatch):
    if not is_held:
        monkeypatch.setattr(Wipes, "hide", lambda *_: None)
        monkeypatch.setattr(Wipes, "show", lambda *_: None)
    first, second, last = run_virtual(read_during_a_wipe)
    assert second == b"old"
    assert last == b"new"
    assert first == (b"" if is_held else b"new")

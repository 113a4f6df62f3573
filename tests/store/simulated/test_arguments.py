"""Goal: a wrong argument is a typed error that names it, on a local store and on a real one.

Method: each call that takes keys, times, numbers or memory is given what no encoder, cast or host
could take; and memory of every type that the transfer engine takes is put and got.
"""

import asyncio
import shutil
import threading

import numpy as np
import pytest
import torch
from store_world import StoreWorld

from tandem.core.errors import ConfigError, NotFoundError, PermissionDeniedError, ShapeError
from tandem.rpc import make_runtime_dir
from tandem.sim import Faults, run_virtual
from tandem.store import (
    HostService,
    MasterService,
    Part,
    PutOptions,
    PutResult,
    StoreClient,
    StoreConfig,
)
from tandem.transfer import TransferConfig, TransferEngine

SURROGATE = "key-\ud800"
NO_TIMES = [float("nan"), float("inf"), -float("inf"), -1.0, 10**400, "soon"]


@pytest.fixture(scope="module", params=["local", "processes"])
def store(request, tmp_path_factory):
    if request.param == "local":
        with StoreClient.local(2**22) as client:
            yield client
        return
    folder = make_runtime_dir()
    config = StoreConfig(
        master=f"ipc://{folder}/m.sock",
        segment_dir=str(tmp_path_factory.mktemp("segments")),
        segment_bytes=2**22,
        recovery_ms=0,
        deadline_ms=20_000,
    )
    runner = asyncio.Runner()
    services = [MasterService(config), HostService(config)]
    ready, stop = asyncio.Event(), asyncio.Event()

    async def serve() -> None:
        async with services[0], services[1] as host:
            await host.host.is_joined.wait()
            ready.set()
            await stop.wait()

    begun = threading.Event()

    async def main() -> None:
        serving = asyncio.ensure_future(serve())
        await asyncio.wait_for(ready.wait(), 60)
        begun.set()
        await serving

    loop = runner.get_loop()
    thread = threading.Thread(target=runner.run, args=(main(),))
    thread.start()
    try:
        assert begun.wait(60)
        with StoreClient(config) as client:
            yield client
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        runner.close()
        shutil.rmtree(folder)


@pytest.mark.parametrize("key", [SURROGATE, 5, b"bytes", None])
@pytest.mark.parametrize("size", [10, 50_000])
def test_keys_that_no_store_can_have(store, key, size):
    buffer = store.register(np.zeros(size, np.uint8))
    calls = [
        lambda: store.put(key, bytes(size)),
        lambda: store.put_many(["good", key], [bytes(size)] * 2),
        lambda: store.put_from(key, Part(buffer)),
        lambda: store.get(key),
        lambda: store.get_many(["good", key]),
        lambda: store.get_range(key, 0, 1),
        lambda: store.get_into(key, Part(buffer)),
        lambda: store.exists(key),
        lambda: store.size(key),
        lambda: store.remove(key),
        lambda: store.remove_prefix(key),
        lambda: store.pin(key, hard=True),
        lambda: store.unpin(key),
        lambda: store.list_keys(key),
        lambda: store.list_keys(after=key),
        lambda: store.drain(key),
        lambda: store.put("good", bytes(size), PutOptions(preferred=[key])),
    ]
    for i, call in enumerate(calls):
        with pytest.raises(ConfigError) as info:
            call()
        assert info.value.where == "store.key", i
    store.unregister(buffer)
    assert not store.exists("good")


@pytest.mark.parametrize("seconds", NO_TIMES)
def test_times_that_are_none(store, seconds):
    for value in (b"x", bytes(50_000)):
        with pytest.raises(ConfigError, match="soft_pin_s"):
            store.put("key", value, PutOptions(soft_pin_s=seconds))
        with pytest.raises(ConfigError, match="wait_s"):
            store.put("key", value, PutOptions(wait_s=seconds))
    with pytest.raises(ConfigError, match="soft_s"):
        store.pin("key", soft_s=seconds, hard=True)
    assert not store.exists("key")


def test_long_times_are_as_long_as_can_be(store):
    options = PutOptions(soft_pin_s=1e300, wait_s=1e300)
    assert store.put("long", b"x", options) is PutResult.CREATED
    assert store.pin("long", soft_s=1e300)
    assert store.remove("long")


@pytest.mark.parametrize("replicas", [0, -1, 256, 2**80, 1.5, "2", None])
def test_numbers_of_replicas_that_are_none(store, replicas):
    for value in (b"x", bytes(50_000)):
        with pytest.raises(ConfigError, match="replicas"):
            store.put("key", value, PutOptions(replicas=replicas))


@pytest.mark.parametrize("given", [(-1, 1), (0, -1), (0.5, 1), (float("nan"), 1), ("a", 1), (1,)])
def test_ranges_that_are_none(store, given):
    store.put("ranged", b"0123456789")
    with pytest.raises(ConfigError, match="range"):
        store.get_range_many(["ranged"], [given])


def test_a_page_of_keys_may_be_asked_to_be_of_any_length(store):
    store.put("listed", b"x")
    assert "listed" in store.list_keys(limit=2**80).keys


@pytest.mark.parametrize("size", [10, 50_000])
def test_a_buffer_that_is_not_registered_is_named(store, size):
    buffer = store.register(bytearray(size))
    assert store.put_from(f"from{size}", Part(buffer)) is PutResult.CREATED
    store.unregister(buffer)
    with StoreClient.local(2**20) as other:
        foreign = other.register(bytearray(size))
        for wrong in (buffer, foreign):
            for parts in (Part(wrong), [Part(wrong, 0, 5), Part(wrong, 5)]):
                with pytest.raises(ConfigError, match="register"):
                    store.put_from("other", parts)
                with pytest.raises(ConfigError, match="register"):
                    store.get_into(f"from{size}", parts)
            with pytest.raises(NotFoundError, match="registered"):
                store.unregister(wrong)
    assert not store.exists("other")


def test_read_only_memory_is_not_read_into(store):
    buffer = store.register(b"0123456789")
    assert store.put_from("read-only", Part(buffer)) is PutResult.CREATED
    with pytest.raises(PermissionDeniedError, match="read-only"):
        store.get_into("read-only", Part(buffer))
    store.unregister(buffer)


MEMORIES = {
    "bfloat16": lambda: torch.arange(20_000).to(torch.bfloat16),
    "float8_e4m3fn": lambda: torch.arange(20_000).to(torch.float8_e4m3fn),
    "float8_e5m2": lambda: torch.arange(20_000).to(torch.float8_e5m2),
    "bool": lambda: torch.arange(20_000) % 3 == 0,
    "float16, two axes": lambda: torch.arange(20_000).reshape(100, 200).to(torch.float16),
    "numpy": lambda: np.arange(20_000, dtype=np.float16).reshape(10, 2000),
    "small": lambda: torch.ones(8, dtype=torch.bfloat16),
}


def bytes_of(memory) -> bytes:
    if isinstance(memory, np.ndarray):
        return memory.tobytes()
    return memory.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("kind", MEMORIES)
def test_memory_of_every_type_that_the_engine_takes(store, kind):
    memory = MEMORIES[kind]()
    engine = TransferEngine(TransferConfig(listen=()))
    engine.unregister(engine.register(memory, remote=False))
    engine.close()
    assert store.put(kind, memory) is PutResult.CREATED
    assert store.get(kind) == bytes_of(memory)
    source = store.register(memory)
    assert store.put_from(f"{kind} from", Part(source)) is PutResult.CREATED
    target = memory.copy() if isinstance(memory, np.ndarray) else memory.clone()
    target[:] = 0
    into = store.register(target)
    assert store.get_into(f"{kind} from", Part(into)) == len(bytes_of(memory))
    assert bytes_of(target) == bytes_of(memory)
    store.unregister(source)
    store.unregister(into)


def test_an_empty_tensor_is_an_empty_value(store):
    assert store.put("empty", torch.zeros(0, dtype=torch.bfloat16)) is PutResult.CREATED
    assert store.get("empty") == b""


@pytest.mark.parametrize(
    "memory",
    [
        torch.zeros(4, 4, dtype=torch.bfloat16).t(),
        torch.zeros(4, device="meta"),
        "text",
        object(),
    ],
)
def test_memory_that_no_store_takes_is_named(store, memory):
    with pytest.raises(ShapeError, match="memory"):
        store.put("key", memory)
    with pytest.raises(ShapeError, match="memory"):
        store.register(memory)


@pytest.mark.parametrize(
    "setting",
    [
        {"recovery_ms": 10**30},
        {"deadline_ms": 0},
        {"segment_bytes": -1},
        {"memory": "much"},
        {"memory": "\ud800"},
        {"secret": "a secret of some length\ud800"},
    ],
    ids=ascii,
)
def test_settings_out_of_bounds_are_refused_in_python_too(setting):
    """A recovery without end held up every put, beyond any deadline."""
    (name,) = setting
    with pytest.raises(ConfigError, match=f"store.{name}"):
        StoreConfig(**setting)


# What the status says.


async def leave_on_a_disk(count: int) -> tuple[int, int]:
    """Return how many objects that want two copies the status misses, and how many there are."""
    world = StoreWorld(1, StoreConfig(inline_bytes=8192), Faults())
    world.add_disk("h0")
    world.start_master()
    world.start_host("h0", 2**20)
    await asyncio.sleep(2)
    _, client = world.start_client("c")
    for i in range(count):
        await client.put(f"k{i}", bytes(1000), PutOptions(replicas=2))
    master = world.master
    for i in range(count):
        row = master.state.directory.find(f"k{i}")
        async with asyncio.timeout(60):
            while not master.state.directory.copies.disks(row):
                await asyncio.sleep(0.1)
        assert master.departures.evict_row(row)
    status = await client.status()
    return status.num_under_replicated, status.num_objects


def test_the_status_counts_objects_on_a_disk_that_want_more_copies():
    assert run_virtual(lambda: leave_on_a_disk(50)) == (50, 50)

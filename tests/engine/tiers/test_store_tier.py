"""KV that outlives its engine: blocks go to a real store and come back verified.

Two engines of the demo model share one store, as two instances do. What is asked of the second one
was computed by the first. Every fault becomes a recompute: the tokens are those of an engine
without a store.
"""

import asyncio
import contextlib
import threading
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from tandem.core.clock import MonotonicClock
from tandem.core.instance_status import sum_stats
from tandem.core.timeline import MissReason
from tandem.core.wire import AddRequest, InstanceStage, SamplingParams
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.groups.group import Group, GroupMemory
from tandem.engine.process.instance_api import InstanceApi
from tandem.engine.tiers.config import TierConfig
from tandem.engine.tiers.mirror import MirroredSink, MirroredTransfers
from tandem.engine.tiers.pins import PinLedger
from tandem.engine.tiers.service import TierService
from tandem.engine.tiers.store_tier import (
    make_object_key,
)
from tandem.models.config import ModelConfig
from tandem.rpc import RpcConfig
from tandem.store import ClientService, HostService, MasterService, StoreConfig
from tandem.transfer import Op, PollingLoop

BLOCK = 16
PROMPT = [(i * 7919) % 3000 + 5 for i in range(10 * BLOCK + 3)]
TIMEOUT_S = 60.0


class LiveStore:
    """Master and host on a thread of their own; ``run`` runs a coroutine function with a client."""

    def __init__(self, folder, **settings) -> None:
        folder.chmod(0o700)
        self.config = StoreConfig(
            master=f"ipc://{folder}/m.sock",
            name="host",
            segment_dir=str(folder / "segments"),
            segment_bytes=2**26,
            **settings,
        )
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        async def serve():
            async with (
                MasterService(self.config, RpcConfig()),
                HostService(self.config, RpcConfig(), keep_segment=False),
            ):
                self._ready.set()
                await asyncio.to_thread(self._stop.wait)

        with asyncio.Runner(loop_factory=PollingLoop) as runner:
            runner.run(serve())

    def run(self, work):
        async def call():
            async with ClientService(self.config, RpcConfig()) as service:
                return await work(service.client)

        with asyncio.Runner(loop_factory=PollingLoop) as runner:
            return runner.run(call())

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(TIMEOUT_S)
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(TIMEOUT_S)


class Served:
    """One engine with its tier; ``generate`` asks the store first, as an instance does."""

    def __init__(self, store, engine=None, model=None, **tiers) -> None:
        # What the store has is loaded however slow the machine is.
        base = {"lookup_timeout_ms": 5000, "min_wait_ms": 20_000, "decision": "load"}
        settings = TierConfig(**(base | tiers))
        self.built = build_engine(
            model or ModelConfig(path="demo"),
            EngineConfig(block_size=BLOCK, num_kv_blocks=200, max_model_len=512, **(engine or {})),
            MonotonicClock(),
            tiers=settings if store is not None else None,
        )
        self.engine = self.built.engine
        self.tier = None
        if store is not None:
            mirror = self.built.mirror
            self.tier = TierService(
                store.config,
                RpcConfig(),
                settings,
                self.built.view_groups(),
                block_size=BLOCK,
                identity=self.built.identity.digest.hex(),
                clock=MonotonicClock(),
                on_load=self.built.planner.note_load,
            )
            if mirror is None:
                self.engine.attach_transfers(self.tier)
                self.tier.start(self.engine, timeout_s=TIMEOUT_S)
            else:
                self.engine.attach_transfers(MirroredTransfers(self.tier, mirror))
                self.tier.start(MirroredSink(self.engine, mirror), timeout_s=TIMEOUT_S)
            assert self.tier.is_connected
        self.count = 0

    def generate(self, prompt, num_tokens=8, salt="", seed=None):
        """Return (tokens, cached tokens)."""
        self.count += 1
        sampling = SamplingParams(
            max_tokens=num_tokens, temperature=0.0 if seed is None else 1.0, seed=seed,
            ignore_eos=True,
        )  # fmt: skip
        request = AddRequest(
            request_id=str(self.count), prompt_ids=list(prompt), sampling=sampling, cache_salt=salt
        )
        stored = 0
        if self.tier is not None:
            missing = self.engine.find_missing_blocks(request)
            stored = missing.num_cached + (asyncio.run(self.tier.count_stored(missing.keys)) or 0)
        self.engine.add(request, num_stored_blocks=stored)
        tokens, cached = [], 0
        deadline = time.monotonic() + TIMEOUT_S
        while self.engine.is_live(request.request_id):
            assert time.monotonic() < deadline, "the request does not end"
            self.engine.wait_for_work(0.1)
            for output in self.engine.step():
                tokens += output.token_ids
                cached = output.cached_len or cached
        self.engine.step()  # Reports the last blocks that became full.
        assert self.engine.get_stats().num_used_blocks == 0
        return tokens, cached

    def wait_stored(self, num_blocks):
        deadline = time.monotonic() + TIMEOUT_S
        while self.tier.counters.stored_blocks < num_blocks:
            assert time.monotonic() < deadline, self.tier.counters
            time.sleep(0.005)

    def close(self):
        if self.tier is not None:
            self.tier.stop()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with LiveStore(tmp_path_factory.mktemp("store")) as live:
        yield live


@pytest.fixture
def serve(store):
    """Makes engines on an empty store."""
    store.run(lambda client: client.remove_prefix(""))
    with contextlib.ExitStack() as stack:

        def make(with_store=True, **tiers):
            served = Served(store if with_store else None, **tiers)
            stack.callback(served.close)
            return served

        yield make


@pytest.fixture(scope="module")
def expected():
    """Tokens of an engine without a store."""
    alone = Served(None)
    return alone.generate(PROMPT)[0]


def test_a_store_that_is_not_there_is_named_and_looked_for(tmp_path, caplog, monkeypatch):
    """An instance serves without it; its state says why, and one line."""
    monkeypatch.setattr("tandem.engine.tiers.service.RETRY_S", 0.01)
    tier = TierService(
        StoreConfig(master="127.0.0.1:1", secret="s" * 40),
        RpcConfig(connect_timeout_ms=50),
        TierConfig(),
        {Group.FULL: GroupMemory(np.zeros(64, dtype=np.uint8), 64)},
        block_size=BLOCK,
        identity="0" * 64,
        clock=MonotonicClock(),
        on_load=lambda *_: None,
    )
    assert tier.state == "connecting"
    asked = []
    real = TierService._serve_connected

    async def count(self):
        asked.append(self.state)
        await real(self)

    monkeypatch.setattr(TierService, "_serve_connected", count)
    tier.start(SimpleNamespace(), timeout_s=TIMEOUT_S)
    deadline = time.monotonic() + TIMEOUT_S
    while len(asked) < 3:
        assert time.monotonic() < deadline, "it does not try again"
        time.sleep(0.01)
    state = tier.state
    tier.stop()
    assert state.startswith("unreachable: ")
    assert "127.0.0.1:1" in state
    assert [record.message.split()[0] for record in caplog.records].count(
        "event=kv_store_unreachable"
    ) == 1


def test_a_prefix_computed_by_one_engine_is_loaded_by_another(serve, expected):
    first, second = serve(), serve()
    assert first.generate(PROMPT) == (expected, 0)
    first.wait_stored(10)
    tokens, cached = second.generate(PROMPT)
    assert (tokens, cached) == (expected, 10 * BLOCK)
    assert second.tier.counters.loaded_blocks == 10
    assert not second.tier.counters.load_failures
    check_timeline(second)
    check_counts(second)


def check_counts(second):
    """What is moved is counted by tier."""
    assert second.generate(PROMPT)[1] > 10 * BLOCK
    parts = [second.engine.get_stats(), second.engine.counters, second.tier.counters]
    stats = sum_stats(InstanceStage.READY, parts)
    assert stats.store_hit_tokens == stats.loaded_tokens == 10 * BLOCK
    # The second time, all of the prompt but its last token was on the device.
    assert stats.prefix_hit_tokens - stats.store_hit_tokens == len(PROMPT) - 1
    assert stats.loaded_bytes == 10 * second.built.cache.layout.bytes_per_block
    assert stats.load_seconds > 0
    assert stats.lookup_tokens == stats.found_tokens == 10 * BLOCK
    assert stats.loaded_blocks == stats.num_loaded_blocks == 10
    assert (stats.num_lookups, stats.num_lookup_timeouts) == (1, 0)


def check_timeline(second):
    """The timeline tells of the load."""
    (told,) = second.engine.list_timelines(["1"])
    (load,) = told.loads
    assert (load.source, load.loaded_blocks, load.failures) == ("store", 10, {})
    assert load.loaded_bytes == second.tier.counters.loaded_bytes
    assert load.end_s >= load.begin_s
    assert (told.device_tokens, told.loaded_tokens) == (0, 10 * BLOCK)
    assert (told.miss.reason, told.miss.position) == (MissReason.NOT_STORED, 10 * BLOCK)


def test_generated_blocks_are_stored_for_the_next_turn(serve):
    first, second = serve(), serve()
    answer, _ = first.generate(PROMPT, num_tokens=40)
    turn = [*PROMPT, *answer, 7, 8, 9]
    first.wait_stored(len(PROMPT + answer) // BLOCK)
    _, cached = second.generate(turn)
    assert cached == (len(PROMPT) + len(answer) - 1) // BLOCK * BLOCK


@pytest.mark.slow  # test_bitwise.py has a prompt and its sampler's state from the store.
def test_seeded_sampling_is_the_same_from_the_store(serve):
    first, second = serve(), serve()
    plain, _ = first.generate(PROMPT, seed=11, num_tokens=12)
    first.wait_stored(10)
    loaded, cached = second.generate(PROMPT, seed=11, num_tokens=12)
    assert cached
    assert loaded == plain


def test_salts_do_not_share(serve, expected):
    first, second = serve(), serve()
    first.generate(PROMPT, salt="alice")
    first.wait_stored(10)
    assert second.generate(PROMPT, salt="bob") == (expected, 0)
    assert second.generate(PROMPT, salt="alice") == (expected, 10 * BLOCK)


def test_evicted_blocks_come_back(serve, expected):
    """``on_evict`` stores what the device drops; the flood drops the first prompt."""
    served = serve(write="on_evict")
    served.generate(PROMPT)
    assert served.tier.counters.stored_blocks == 0
    for shift in range(1, 40):
        served.generate([token + shift for token in PROMPT[: 6 * BLOCK]], num_tokens=1)
    served.wait_stored(10)
    served.engine.flush_cache()
    assert served.generate(PROMPT) == (expected, 10 * BLOCK)


class Peer:
    """A server that hears nothing."""

    def push_threadsafe(self, _):
        pass


def test_pinned_blocks_outlast_others(serve, store):
    """What a client's request pins is still there when the store had to make room for more."""
    served = serve(pin_gib=1.0)
    block_bytes = served.built.cache.layout.bytes_per_block
    api = InstanceApi(
        "i", served.engine, MonotonicClock(), served.tier, info=SimpleNamespace(block_size=BLOCK)
    )
    keys = {}
    for number, pin_len in enumerate((5 * BLOCK + 3, 0)):
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        request = AddRequest(
            request_id=f"p{number}",
            prompt_ids=[(token + number) % 3000 for token in PROMPT],
            sampling=sampling,
            client="ann",
            pin_len=pin_len,
            pin_s=3600.0,
        )
        missing = served.engine.find_missing_blocks(request)
        names = [make_object_key(served.built.identity.digest.hex(), key) for key in missing.keys]
        keys[number] = names
        asyncio.run(api.add(Peer(), request))
        while served.engine.is_live(request.request_id):
            served.engine.step()
        served.engine.step()
        served.wait_stored(10 * (number + 1))

    async def flood(client):
        value = b"x" * 2**20
        for start in range(0, 160, 16):
            await client.put_many([f"flood/{start + i}" for i in range(16)], [value] * 16)
        return [await client.exists_many(names) for names in keys.values()]

    assert 20 * block_bytes < 2**26
    pinned, plain = store.run(flood)
    assert pinned == [True] * 5 + [False] * 5
    assert plain == [False] * 10


def list_keys(store):
    return store.run(lambda client: client.list_keys("kv/")).keys


def test_a_missing_block_is_computed_and_those_before_it_are_used(serve, store, expected):
    first, second = serve(), serve()
    first.generate(PROMPT)
    first.wait_stored(10)
    keys = second.engine._scheduler.make_block_keys(PROMPT, "")
    name = make_object_key(second.built.identity.digest.hex(), keys[4])
    assert store.run(lambda client: client.remove(name))
    assert second.generate(PROMPT) == (expected, 4 * BLOCK)


@pytest.mark.parametrize(
    "size_of",
    [
        lambda n: n - 1,
        pytest.param(lambda n: n + 1, marks=pytest.mark.slow),
        pytest.param(lambda n: 0, marks=pytest.mark.slow),
    ],
)
def test_a_foreign_block_is_computed_and_replaced(serve, store, expected, size_of):
    """An object under the right key that is no block of this layout."""
    first, second = serve(), serve()
    first.generate(PROMPT)
    first.wait_stored(10)
    keys = second.engine._scheduler.make_block_keys(PROMPT, "")
    name = make_object_key(second.built.identity.digest.hex(), keys[3])
    size = size_of(second.built.cache.layout.bytes_per_block)

    async def replace(client):
        await client.remove(name)
        await client.put(name, bytes(size))

    store.run(replace)
    assert second.generate(PROMPT) == (expected, 3 * BLOCK)
    assert second.tier.counters.load_failures["foreign"] == 1
    (told,) = second.engine.list_timelines(["1"])
    assert told.miss.reason is MissReason.LOAD_FAILED
    assert (told.miss.position, told.miss.detail) == (3 * BLOCK, "foreign")


def test_flush_reaches_the_store(serve, store, expected):
    first, second = serve(), serve()
    first.generate(PROMPT)
    first.wait_stored(10)
    assert asyncio.run(first.tier.flush()) >= 10
    assert list_keys(store) == []
    assert second.generate(PROMPT) == (expected, 0)


def test_other_weights_find_nothing_in_the_store(serve, store, expected):
    """A change of weights reaches the store: another identity, under which nothing is found."""
    first, second = serve(), serve()
    first.generate(PROMPT)
    first.wait_stored(10)
    changed = msgspec.structs.replace(first.built.identity, weights="0" * 64)
    assert {key.split("/")[1] for key in list_keys(store)} == {first.built.identity.digest.hex()}
    second.tier._tier._identity = changed.digest.hex()
    assert second.generate(PROMPT) == (expected, 0)
    assert second.tier.counters.found_tokens == 0
    second.wait_stored(10)
    assert {key.split("/")[1] for key in list_keys(store)} == {
        first.built.identity.digest.hex(),
        changed.digest.hex(),
    }
    assert asyncio.run(second.tier.flush()) >= 10
    assert {key.split("/")[1] for key in list_keys(store)} == {first.built.identity.digest.hex()}


def test_a_store_that_is_gone_costs_no_request(tmp_path, expected):
    with LiveStore(tmp_path) as live:
        served = Served(live, load_deadline_ms=3000, lookup_timeout_ms=200, min_wait_ms=0)
        served.generate(PROMPT)
        served.wait_stored(10)
        served.engine.flush_cache()
    try:
        assert served.generate(PROMPT)[0] == expected
    finally:
        served.close()


def test_one_block_is_one_transfer(serve, monkeypatch):
    """From the store's memory to the pool: each byte of a block is moved once, and to its place."""
    first, second = serve(), serve()
    first.generate(PROMPT)
    first.wait_stored(10)
    engine = second.tier._tier._client._port._engine
    size = second.built.cache.layout.bytes_per_block
    pool = second.built.cache.view_bytes()
    names = ("local", "shm", "cma", "tcp")
    before = sum(engine.bytes_copied(name) for name in names)
    targets, copies = [], []
    """Offset in the pool and bytes of each read; arrays that were copied into."""
    submit, copyto = engine.submit_ranges, np.copyto

    def watch(op, segment, ranges, **options):
        for local, offset, _, length in ranges:
            if op is Op.READ:
                targets.append((local._memory.address + offset - pool.ctypes.data, length))
        return submit(op, segment, ranges, **options)

    monkeypatch.setattr(engine, "submit_ranges", watch)
    monkeypatch.setattr(np, "copyto", lambda *args: copies.append(args[0]) or copyto(*args))
    second.generate(PROMPT, num_tokens=1)
    moved = sum(engine.bytes_copied(name) for name in names) - before
    assert second.tier.counters.loaded_blocks == 10
    assert moved == 10 * size
    assert sorted(length for _, length in targets) == [size] * 10
    assert len({offset for offset, _ in targets}) == 10
    assert all(offset % size == 0 and 0 <= offset < pool.nbytes for offset, _ in targets)
    assert not copies, "blocks that were loaded are copied again"


PINNED = [bytes([i]) for i in range(6)]


def test_a_client_pins_leading_blocks_as_far_as_there_is_room():
    ledger = PinLedger(4)
    assert ledger.take("ann", PINNED[:3], 10.0, 0.0) == PINNED[:3]
    # A longer prefix of the same conversation: what is pinned already takes no more room.
    assert ledger.take("ann", PINNED, 10.0, 1.0) == PINNED[:4]
    assert ledger.find_left(PINNED[0], 1.0) == 10.0
    assert ledger.find_left(PINNED[4], 1.0) == 0.0
    assert ledger.take("bob", PINNED[4:], 10.0, 1.0) == PINNED[4:]
    assert PinLedger(0).take("ann", PINNED, 10.0, 0.0) == []


def test_pins_end_and_make_room():
    ledger = PinLedger(2)
    ledger.take("ann", PINNED[:2], 20.0, 0.0)
    ledger.take("ann", PINNED[:1], 5.0, 1.0)
    assert ledger.find_left(PINNED[0], 10.0) == 10.0
    assert ledger.take("ann", PINNED[2:3], 20.0, 10.0) == []
    assert ledger.find_left(PINNED[0], 20.0) == 0.0
    assert ledger.take("ann", PINNED[2:], 20.0, 30.0) == PINNED[2:4]
    assert ledger.find_left(PINNED[2], 30.0) == 20.0

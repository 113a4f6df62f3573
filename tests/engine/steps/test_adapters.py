"""Adapters in an engine and in a cluster: whose KV is whose, and who may free what.

Method: the demo model in float32 with two random adapters in one engine; and the cluster's table
over members in memory that fail, restart and disagree.
"""

import asyncio

import pytest
from random_adapter import write_adapter

from tandem.core.adapter import AdapterInfo, AdapterSource
from tandem.core.clock import MonotonicClock
from tandem.core.errors import (
    CapacityError,
    ConfigError,
    ConflictError,
    CorruptionError,
    NotFoundError,
    PeerLostError,
)
from tandem.core.wire import AddRequest, Empty, SamplingParams
from tandem.engine.adapters import AdapterTable
from tandem.engine.build import build_engine
from tandem.engine.cluster.adapters import ClusterAdapters
from tandem.engine.config import EngineConfig
from tandem.engine.process.methods import LOAD_ADAPTER, UNLOAD_ADAPTER
from tandem.models.config import ModelConfig

PROMPT = [(7 * i) % 300 + 5 for i in range(70)]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(engine, its table of adapters, a folder for them)."""
    folder = tmp_path_factory.mktemp("adapters")
    config = EngineConfig(num_kv_blocks=64, block_size=16, max_model_len=256, threads=1)
    model = ModelConfig(path="demo", dtype="bfloat16", packed_cache="off")
    built = build_engine(model, config, MonotonicClock())
    adapters = built.model.enable_adapters(2)
    table = AdapterTable(adapters, built.engine, built.identity, None)
    return built.engine, table, folder


def add(engine, request_id, adapter="", max_tokens=6):
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    engine.add(
        AddRequest(request_id=request_id, prompt_ids=PROMPT, sampling=sampling, adapter=adapter)
    )


def drain(engine):
    """Return (tokens, cached tokens) by request."""
    tokens, cached = {}, {}
    while engine.has_requests:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            cached[output.request_id] = max(output.cached_len, cached.get(output.request_id, 0))
    return tokens, cached


def test_no_kv_is_shared_between_contents(served):
    """Of one prompt: each content finds its own blocks and no other's, also under one name."""
    engine, table, folder = served
    engine.flush_cache()
    write_adapter(table, folder / "one", 1)
    first = table.load(AdapterSource(name="one", folder=str(folder / "one"))).digest
    write_adapter(table, folder / "one", 2)
    second = table.load(AdapterSource(name="one", folder=str(folder / "one"))).digest
    assert first != second
    told = {}
    for turn in ("cold", "warm"):
        for adapter in ("", first, second):
            add(engine, f"{turn}{adapter}", adapter)
            tokens, cached = drain(engine)
            told[turn, adapter] = tokens[f"{turn}{adapter}"]
            assert (cached[f"{turn}{adapter}"] > 0) == (turn == "warm"), (turn, adapter)
    assert len({tuple(told["cold", a]) for a in ("", first, second)}) == 3
    for adapter in ("", first, second):
        assert told["warm", adapter] == told["cold", adapter]
    engine.flush_cache()
    for adapter in ("", first, second):
        add(engine, f"together{adapter}", adapter)
    tokens, _ = drain(engine)
    for adapter in ("", first, second):
        assert tokens[f"together{adapter}"] == told["cold", adapter]
    table.unload(first)
    table.unload(second)


def test_unloading_waits_for_requests(served):
    """One that runs goes on with its adapter; a new one is refused; then the slot is free."""
    engine, table, folder = served
    write_adapter(table, folder / "held", 3)
    source = AdapterSource(name="held", folder=str(folder / "held"))
    digest = table.load(source).digest
    add(engine, "alone", digest)
    want = drain(engine)[0]["alone"]
    add(engine, "running", digest)
    engine.step()
    table.unload(digest)
    with pytest.raises(NotFoundError):
        add(engine, "late", digest)
    with pytest.raises(NotFoundError):
        table.unload(digest)
    assert digest in table._model._loaded
    assert drain(engine)[0]["running"] == want[1:]
    assert digest not in table._model._loaded
    # Loaded again while a request still runs with it: nothing is freed under it.
    table.load(source)
    add(engine, "running", digest)
    engine.step()
    table.unload(digest)
    table.load(source)
    assert drain(engine)[0]["running"] == want[1:]
    add(engine, "again", digest)
    assert drain(engine)[0]["again"] == want
    add(engine, "cancelled", digest)
    engine.step()
    table.unload(digest)
    engine.cancel("cancelled")
    drain(engine)
    engine.step()
    assert digest not in table._model._loaded


class Member:
    """An instance in memory; ``contents`` says what it reads from a folder."""

    def __init__(self, name):
        self.name, self.info, self.told, self.loaded = name, Info(), [], set()
        self.contents, self.failure = {}, None

    def set_adapters(self, sources):
        self.told = list(sources)

    async def call(self, method, message):
        if method is LOAD_ADAPTER:
            return await self._load(message)
        assert method is UNLOAD_ADAPTER
        if message.digest not in self.loaded:
            raise NotFoundError("test", "it is not loaded here")
        self.loaded.remove(message.digest)
        return Empty()

    async def _load(self, source):
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        digest = self.contents.get(source.folder, source.folder)
        self.loaded.add(digest)
        return make_info(source.name, source.folder, digest)


class Info:
    def __init__(self, *adapters, **failures):
        self.adapters, self.adapter_failures = list(adapters), failures


def make_info(name, folder, digest):
    return AdapterInfo(
        name=name, folder=folder, digest=digest, system_fingerprint="fp", rank=1, num_modules=1,
        size_bytes=0,
    )  # fmt: skip


def run(work):
    async def bounded():
        async with asyncio.timeout(60):
            await work()

    asyncio.run(bounded())


def source_of(name, folder="/a"):
    return AdapterSource(name=name, folder=folder)


def test_cluster_loads_everywhere_or_nowhere():
    async def work():
        members = [Member("a"), Member("b")]
        table = ClusterAdapters(members, lambda _: 0)
        table.begin([])
        await table.load(source_of("x"))
        assert [m.loaded for m in members] == [{"/a"}] * 2
        assert [s.digest for s in members[1].told] == ["/a"]
        with pytest.raises(ConflictError):
            await table.load(source_of("x", "/b"))
        members[1].failure = CorruptionError("test", "damaged")
        with pytest.raises(CorruptionError):
            await table.load(source_of("y", "/b"))
        assert [m.loaded for m in members] == [{"/a"}] * 2
        members[1].failure, members[1].contents = None, {"/b": "other"}
        with pytest.raises(ConflictError):
            await table.load(source_of("y", "/b"))
        assert list(table.table) == ["x"]
        await table.load(source_of("z"))
        await table.unload("x")
        assert members[0].loaded == {"/a"}, "another name has the same content"
        await table.unload("z")
        assert [m.loaded for m in members] == [set()] * 2
        assert members[0].told == []
        with pytest.raises(NotFoundError):
            await table.unload("z")
        for member in members:
            member.info = None
        with pytest.raises(PeerLostError):
            await table.load(source_of("x"))

    run(work)


def test_cluster_frees_after_the_last_request():
    async def work():
        members, live = [Member("a")], {"/a": 1}
        table = ClusterAdapters(members, lambda digest: live[digest])
        table.begin([])
        await table.load(source_of("x"))
        await table.unload("x")
        assert members[0].loaded == {"/a"}
        request = AddRequest(
            request_id="r", prompt_ids=[1], sampling=SamplingParams(), adapter="/a"
        )
        live["/a"] = 0
        table.note_end(request)
        while members[0].loaded:
            await asyncio.sleep(0)
        await table.close()

    run(work)


def test_cluster_brings_a_restarted_instance_in_line():
    async def work():
        members = [Member("a"), Member("b")]
        table = ClusterAdapters(members, lambda _: 0)
        table.begin([])
        members[1].info = None
        await table.load(source_of("x"))
        members[1].info = Info(make_info("old", "/old", "/old"))
        members[1].loaded = {"/old"}
        table.note_serving(members[1])
        while members[1].loaded != {"/a"}:
            await asyncio.sleep(0)
        await table.close()

    run(work)


def test_names_are_counted_and_not_contents():
    async def work():
        table = ClusterAdapters([Member("a")], lambda _: 0, max_adapters=2)
        table.begin([])
        for name in "xy":
            await table.load(source_of(name))
        with pytest.raises(CapacityError):
            await table.load(source_of("z"))
        with pytest.raises(ConflictError):
            await table.load(source_of("x", "/b"))
        await table.unload("x")
        await table.load(source_of("z"))

    run(work)
    with pytest.raises(ConfigError, match="max_adapters"):
        ClusterAdapters([], lambda _: 0, 1).begin([source_of("x"), source_of("y")])


def test_what_a_restarted_instance_cannot_have_is_not_listed():
    """A file was replaced: the name is withdrawn everywhere; one that may come yet stays."""

    async def work():
        members = [Member("a"), Member("b")]
        table = ClusterAdapters(members, lambda _: 0)
        table.begin([])
        await table.load(source_of("x"))
        for failure, names in (
            (PeerLostError("test", "lost"), ["x"]),
            (ConflictError("test", "it has changed"), []),
        ):
            members[1].info, members[1].loaded = Info(), set()
            members[1].failure = failure
            table.note_serving(members[1])
            while table._tasks:
                await asyncio.sleep(0)
            assert list(table.table) == names
        assert members[0].loaded == set()
        assert members[0].told == []
        members[1].failure = None
        await table.load(source_of("x"))
        assert list(table.table) == ["x"]

    run(work)


def test_a_bad_adapter_at_the_start_is_told():
    members = [Member("a")]
    members[0].info = Info(x="it is damaged")
    with pytest.raises(PeerLostError, match="x: it is damaged"):
        ClusterAdapters(members, lambda _: 0).begin([source_of("x")])
    members = [Member("a"), Member("b")]
    for member in members:
        member.info = Info(make_info("x", "/a", member.name))
    with pytest.raises(PeerLostError, match="changed"):
        ClusterAdapters(members, lambda _: 0).begin([source_of("x")])

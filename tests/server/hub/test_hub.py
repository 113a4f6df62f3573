"""Goal: never more models awake than there is memory for, and no request fails for it.

Method: the decision by tables, the hub over engines in memory, and the application of an address
with three such models over HTTP, with requests of all of them at once.
"""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from fake_engine import FakeEngine, make_info
from prometheus_client.parser import text_string_to_metric_families
from serving import LiveServer
from vocabularies import make_byte_level_tokenizer

from tandem.core.errors import CapacityError, ConfigError, NotFoundError, PeerLostError
from tandem.server.app import build_app
from tandem.server.config import ServerConfig
from tandem.server.hub.front import ModelFront
from tandem.server.hub.hub import HostedModel, ModelHub
from tandem.server.hub.residency import Residency

MIB = 2**20
WAIT_S = 60.0


def test_those_sleep_that_nobody_asked_for_the_longest():
    residency = Residency(30, {"a": 10, "b": 10, "c": 10, "d": 25})
    for name in "abc":
        assert residency.choose_victims(name, (), ()) == []
        residency.note_awake(name)
    residency.note_use("a")
    assert residency.choose_victims("d", (), ()) == ["b", "c", "a"]
    assert residency.choose_victims("d", ("b",), ()) == ["c", "a", "b"], "idle ones first"
    assert residency.choose_victims("a", (), ()) == [], "it is awake"
    residency.note_asleep("b")
    assert residency.choose_victims("b", (), ()) == []
    with pytest.raises(CapacityError, match="a are pinned"):
        residency.choose_victims("d", (), ("a",))
    with pytest.raises(ConfigError, match="budget"):
        Residency(9, {"a": 10})
    assert Residency(0, {"a": 10, "b": 10**15}).choose_victims("b", (), ()) == []


class Sleeper(FakeEngine):
    """An engine that counts in ``world`` the memory that those that are awake have."""

    def __init__(self, world, name):
        super().__init__(info=None)
        self.world, self.name, self.gate = world, name, None
        # More than its files promise: adapters, states and windows take memory too.
        self.known = msgspec.structs.replace(make_info(320), memory_bytes=9 * MIB)
        self.num_wakes, self.failure = 0, None

    @property
    def last_info(self):
        return self.known if self.num_wakes else None

    @property
    def num_live(self):
        return self.num_held

    async def submit(self, request):
        async with self.gate():
            return await super().submit(request)

    async def wake(self):
        self.world.awake.add(self.name)
        self.world.most = max(self.world.most, len(self.world.awake))
        await asyncio.sleep(0.002)
        if self.failure is not None:
            raise self.failure
        self.num_wakes += 1
        self.info = self.known
        return self.info

    async def sleep(self):
        while self.num_live:
            await asyncio.sleep(0.001)
        self.info = None
        self.world.awake.discard(self.name)

    async def evict(self):
        self.world.evicted.append(self.name)


class World:
    """Three models of a tokenizer, with memory for two."""

    def __init__(self):
        self.awake, self.most, self.evicted = set(), 0, []
        self.engines = {name: Sleeper(self, name) for name in ("small", "large", "other")}
        config = ServerConfig(port=0, drain_timeout_s=0.5, admin_api_key=("chief",))
        tokenizer = make_byte_level_tokenizer(chat_template=None)
        models, lifecycle = {}, None
        for name, engine in self.engines.items():
            app = build_app(
                ServerConfig(**{**fields(config), "served_model_name": (name,)}),
                engine,
                tokenizer,
                f"org/{name}",
                lifecycle=lifecycle,
            )
            lifecycle = app.state.context.lifecycle
            models[name] = HostedModel(name, app, engine)
        self.hub = ModelHub(models, Residency(20 * MIB, dict.fromkeys(models, 8 * MIB)))
        for name, model in models.items():
            model.app.state.context.hub = self.hub
            model.app.state.context.wake = self.hub.make_loader(name)
            self.engines[name].gate = self.hub.make_gate(name)
        self.config = config


def fields(config):
    return {name: getattr(config, name) for name in config.__struct_fields__}


class Address(LiveServer):
    """A server with the models of a world."""

    def __init__(self, world):
        self.world = world
        super().__init__(world.config, world.engines["small"], None)

    def make_app(self):
        return ModelFront(self.world.hub)


@pytest.fixture(scope="module")
def address():
    live = Address(World())
    yield live
    live.stop()
    live.join()


def ask(live, name, **body):
    body = {"model": name, "prompt": "ab", "max_tokens": 4} | body
    return live.post("/v1/completions", body)


def change(live, action, name):
    return live.post(
        "/models", {"action": action, "model": name}, headers={"Authorization": "Bearer chief"}
    )


def states(live):
    return {each["name"]: each["state"] for each in live.get("/models").json()["models"]}


def test_three_models_within_memory_for_two_answer_everything(address):
    names, done = ["small", "large", "other"], threading.Lock()
    wrong = []

    def run(number):
        name = names[number % 3]
        reply = ask(address, name)
        with done:
            if reply.status_code != 200 or reply.json()["model"] != name:
                wrong.append((number, reply.status_code, reply.text))

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(run, range(200)))
    assert wrong == []
    assert address.world.most == 2
    assert all(engine.num_wakes for engine in address.world.engines.values())
    models = address.get("/models").json()["models"]
    assert {each["need_bytes"] for each in models} == {9 * MIB}, "as they hold, not as estimated"


def test_models_sleep_and_wake_by_name(address):
    assert change(address, "wake", "small").status_code == 200
    assert states(address)["small"] == "awake"
    assert change(address, "sleep", "small").json()["used_bytes"] <= 20 * MIB
    assert states(address)["small"] == "asleep"
    assert ask(address, "small").status_code == 200, "asked for, it wakes"
    assert change(address, "evict", "small").status_code == 200
    assert (states(address)["small"], address.world.evicted[-1]) == ("evicted", "small")
    # One that is pinned keeps its place.
    for name in ("large", "other"):
        assert change(address, "pin", name).status_code == 200
        assert change(address, "wake", name).status_code == 200
    refused = ask(address, "small")
    assert refused.status_code == 503, "it may have room later"
    assert int(refused.headers["Retry-After"]) >= 1
    assert "large, other are pinned" in refused.text
    for name in ("large", "other"):
        assert change(address, "unpin", name).status_code == 200
    assert ask(address, "small").status_code == 200
    assert change(address, "sleep", "nobody").status_code == 404
    assert address.post("/models", {"action": "sleep", "model": "small"}).status_code == 401


def test_what_is_of_no_model_and_of_all(address):
    listed = address.get("/v1/models").json()["data"]
    assert [each["id"] for each in listed] == ["small", "large", "other"]
    assert address.get("/v1/models/other").json()["id"] == "other"
    missing = ask(address, "nobody")
    assert missing.status_code == 404
    assert "small, large, other" in missing.json()["error"]["message"]
    assert ask(address, "org/large").json()["model"] == "large", "by its path"
    assert address.post("/v1/completions", None, data=b"{").status_code == 400
    assert address.get("/health").status_code == 200
    page = address.get("/metrics").text
    families = {each.name: each for each in text_string_to_metric_families(page)}
    told = families["tandem:engine_up"].samples
    assert {sample.labels["model_name"] for sample in told} == {"small", "large", "other"}
    assert len(families["tandem:build_info"].samples) == 1


def test_a_model_that_cannot_wake_gives_its_memory_back():
    async def work():
        world = World()
        world.engines["large"].failure = PeerLostError("fake.wake", "no such weights")
        with pytest.raises(PeerLostError):
            await world.hub.wake("large")
        assert world.hub.models["large"].state == "new"
        assert (world.hub.residency.awake, world.awake) == ([], set())
        world.engines["large"].failure = None
        # Whoever asked first may leave: the others have waited for the same.
        first = asyncio.create_task(world.hub.wake("large"))
        second = asyncio.create_task(world.hub.wake("large"))
        await asyncio.sleep(0)
        first.cancel()
        async with asyncio.timeout(WAIT_S):
            await second
        assert world.engines["large"].num_wakes == 1
        with pytest.raises(NotFoundError):
            await world.hub.wake("nobody")
        await world.hub.close()

    asyncio.run(work())


class CountingHub(ModelHub):
    """A hub that fails a request which asks again and again without letting others go on."""

    num_asked = 0

    async def wake(self, name):
        self.num_asked += 1
        assert self.num_asked < 100, "it asks for ever"
        await super().wake(name)


def test_a_model_that_sleeps_at_once_after_waking_is_woken_again():
    """Between the end of a wake and its callbacks another wake may put the model to sleep; who asks
    for it then must not wait for the wake that has ended.
    """

    async def work():
        world, woken = World(), asyncio.Event()
        small = world.engines["small"]
        small.known = msgspec.structs.replace(small.known, memory_bytes=15 * MIB)

        async def wake():
            small.num_wakes += 1
            await woken.wait()
            small.info = small.known
            return small.info

        small.wake = wake
        hub = CountingHub(world.hub.models, world.hub.residency)

        async def use_later():
            await asyncio.sleep(0)
            async with hub.use("small"):
                pass

        first = asyncio.create_task(hub.wake("small"))
        for _ in range(3):
            await asyncio.sleep(0)
        assert hub.models["small"].state == "waking"
        asyncio.get_running_loop().call_soon(woken.set)
        second = asyncio.create_task(hub.wake("large"))
        third = asyncio.create_task(use_later())
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(first, second, third)
        assert small.num_wakes == 2, "it was put to sleep for the other, and woken for the third"
        await hub.close()

    asyncio.run(work())

"""The same tokens, bit for bit, wherever and however often a request is computed.

Goal: greedy and seeded, a request gets the tokens of one engine alone: disaggregated, from the
store, after eviction, after preemption, and after a failure in mid-prefill, mid-transfer and
mid-decode. Method: the demo model in this process, the real transfer engine, store and dispatcher.
Each case also shows that the thing has really happened.
"""

import asyncio
import math
import time

import msgspec
import pytest
from test_disaggregation import Node
from test_store_tier import LiveStore, Served

from quick import rest_slow
from tandem.conductor.conductor import Conductor
from tandem.conductor.load_count import LoadCount
from tandem.conductor.policies.table import make_policy
from tandem.conductor.routes import InstanceRef
from tandem.core.errors import PeerLostError
from tandem.core.wire import AddRequest, FinishReason, RequestOutput, SamplingParams
from tandem.engine.cluster.dispatcher import Dispatcher
from tandem.engine.cluster.request_states import Limits
from tandem.engine.process.methods import CONTINUE

BLOCK = 16
CHUNK = 48
PROMPT = [(i * 7919) % 3000 + 5 for i in range(10 * BLOCK + 3)]
OTHER = [(i * 104_729) % 3000 + 5 for i in range(10 * BLOCK + 3)]
NUM_TOKENS = 40
TIMEOUT_S = 60.0
SEEDS = {"greedy": None, "seeded": 11}


def make_sampling(seed):
    return SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0.0 if seed is None else 1.0, seed=seed, ignore_eos=True
    )


async def wait_until(is_true, what):
    deadline = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.002)


class SteppedNode(Node):
    """Computes only as many steps as it is allowed; what it gives goes to ``take``."""

    allowed = math.inf
    take = None

    def _run(self):
        while not self._stop.is_set():
            if self.engine.counters.num_steps >= self.allowed:
                time.sleep(0.002)
            elif self.engine.wait_for_work(0.02):
                for output in self.engine.step():
                    if self.take is not None:
                        self.take(output)
                    self.outputs.setdefault(output.request_id, []).append(output)


class NodePort:
    """An instance as the dispatcher sees it; a node that can die."""

    def __init__(self, name, role, node) -> None:
        self.name, self.role, self.node = name, role, node
        self.sources = frozenset()
        self.load = LoadCount()
        self.is_alive = True
        self._sinks = {}
        self._loop = asyncio.get_running_loop()
        node.take = lambda output: self._loop.call_soon_threadsafe(self._put, output)

    @property
    def ref(self):
        return InstanceRef(self.name, 0 if self.is_alive else 1)

    @property
    def info(self):
        return self.node.built.info if self.is_alive else None

    async def submit(self, request, put):
        self._sinks[request.request_id] = put
        self.node.engine.add(request)

    async def call(self, method, message):
        assert method is CONTINUE
        return self.node.engine.continue_request(message)

    def cancel(self, request_id):
        self._sinks.pop(request_id, None)
        self.node.engine.cancel(request_id)

    def release_hold(self, request_id):
        self.node.engine.release_hold(request_id)

    def _put(self, output):
        put = self._sinks.get(output.request_id)
        if put is not None and self.is_alive:
            put(output)

    def die(self):
        """As a process does: nothing more comes, and those who wait are told."""
        self.is_alive = False
        sinks, self._sinks = self._sinks, {}
        for request_id, put in sinks.items():
            error = PeerLostError("engine.run", "the instance is gone")
            put(
                RequestOutput(
                    request_id=request_id,
                    token_ids=[],
                    finish_reason=FinishReason.ERROR,
                    error_code=error.code,
                    error_text=error.what,
                )
            )


@pytest.fixture(scope="module")
def truth():
    """Tokens of one engine alone, by name."""
    node = Node(None)
    for name, seed in SEEDS.items():
        node.engine.add(
            AddRequest(request_id=name, prompt_ids=PROMPT, sampling=make_sampling(seed))
        )
    tokens = {name: node.tokens(name) for name in SEEDS}
    node.close()
    assert tokens["greedy"] != tokens["seeded"]
    assert {len(each) for each in tokens.values()} == {NUM_TOKENS}
    return tokens


class Cluster:
    """Nodes behind the real dispatcher. Made on an event loop; an async context manager."""

    def __init__(self, **roles) -> None:
        self.ports = {
            name: NodePort(
                name, role, SteppedNode(role, name, {"max_batch_tokens": CHUNK, "max_running": 8})
            )
            for name, role in roles.items()
        }
        limits = Limits(lease_s=30.0, recovery_s=10.0, max_attempts=5)
        self.dispatcher = Dispatcher(
            list(self.ports.values()), Conductor(make_policy("prefix")), limits
        )

    async def __aenter__(self):
        for port in self.ports.values():
            if port.role == "decode":
                others = [o for o in self.ports.values() if o.role == "prefill"]
                for other in others:
                    await port.node.exchange.reader.open_peer(other.node.exchange.peer)
                port.sources = frozenset(other.name for other in others)
        self.dispatcher.note_change()
        return self

    async def __aexit__(self, *_):
        await self.dispatcher.close()
        for port in self.ports.values():
            port.node.close()

    def __getitem__(self, name):
        return self.ports[name].node

    async def ask(self, seed):
        """Return the tokens of a request, and their number as they come in ``self.tokens``."""
        self.tokens = []
        # A retry needs a concrete seed; a greedy request draws nothing from it.
        sampling = msgspec.structs.replace(make_sampling(seed), seed=0 if seed is None else seed)
        stream = await self.dispatcher.submit(
            AddRequest(request_id="r", prompt_ids=PROMPT, sampling=sampling, timeout_s=TIMEOUT_S)
        )
        async for output in stream:
            self.tokens += output.token_ids
            last = output
        assert last.finish_reason is FinishReason.LENGTH, last
        return self.tokens


async def disaggregate(seed):
    async with Cluster(p0="prefill", d0="decode") as cluster:
        tokens = await cluster.ask(seed)
        reads = cluster["d0"].reads
        assert (reads.peer_read_blocks, reads.peer_read_failures) == (11, {})
        assert cluster["p0"].engine.counters.generated_tokens == 1
        assert cluster["d0"].engine.counters.num_steps == NUM_TOKENS - 1, "it decodes, no more"
        assert cluster.dispatcher.fallbacks == {}
        return tokens


async def fail_in_mid_prefill(seed):
    async with Cluster(p0="prefill", d0="decode") as cluster:
        cluster["p0"].allowed = 2
        asking = asyncio.create_task(cluster.ask(seed))
        await wait_until(lambda: cluster["p0"].engine.counters.num_steps == 2, "no step")
        view = cluster["p0"].engine.find_prefill("r-1p")
        assert 0 < view.num_complete < 11
        cluster.ports["p0"].die()
        tokens = await asking
        assert cluster.dispatcher.fallbacks == {"prefill_peer_lost": 1}
        return tokens


async def fail_in_mid_transfer(seed):
    async with Cluster(p0="prefill", d0="decode") as cluster:
        cluster["p0"].allowed = 2
        asking = asyncio.create_task(cluster.ask(seed))
        reads = cluster["d0"].reads
        await wait_until(lambda: reads.peer_read_blocks >= 3, reads)
        assert reads.peer_read_blocks < 11
        await asyncio.to_thread(cluster["p0"].exchange.close)
        await wait_until(lambda: reads.peer_read_failures, reads)
        cluster.ports["p0"].die()
        tokens = await asking
        assert sum(cluster.dispatcher.fallbacks.values()) == 1
        [legs] = [o for name, o in cluster["d0"].outputs.items() if name.endswith("a")]
        assert 3 * BLOCK <= legs[0].cached_len < len(PROMPT), "what had come was used"
        return tokens


async def fail_in_mid_decode(seed):
    async with Cluster(p0="prefill", d0="decode", d1="decode") as cluster:
        for name in ("d0", "d1"):
            cluster[name].allowed = 5
        asking = asyncio.create_task(cluster.ask(seed))
        await wait_until(lambda: len(getattr(cluster, "tokens", [])) == 6, "no tokens")
        [dead] = [n for n in ("d0", "d1") if cluster[n].engine.counters.num_steps == 5]
        [other] = {"d0", "d1"} - {dead}
        cluster[other].allowed = math.inf
        cluster.ports[dead].die()
        tokens = await asking
        assert cluster.dispatcher.fallbacks == {"decode_peer_lost": 1}
        assert cluster[other].reads.peer_read_blocks == 11
        assert cluster[other].engine.counters.generated_tokens == NUM_TOKENS - 6
        return tokens


def run_alone(node, seed, name, prompt=PROMPT):
    node.engine.add(AddRequest(request_id=name, prompt_ids=prompt, sampling=make_sampling(seed)))


async def evict(seed):
    node = Node(None, engine={"num_kv_blocks": 14, "max_model_len": 208})
    try:
        for name, prompt in (("first", PROMPT), ("other", OTHER), ("again", PROMPT)):
            run_alone(node, seed, name, prompt)
            node.wait(name)
        assert node.engine.get_stats().evicted_tokens > 11 * BLOCK
        assert node.cached("again") < len(PROMPT) - BLOCK
        assert node.tokens("first") == node.tokens("again")
        return node.tokens("again")
    finally:
        node.close()


async def preempt(seed):
    node = Node(None, engine={"num_kv_blocks": 24, "max_model_len": 208})
    try:
        node.gate.clear()
        run_alone(node, None, "older", OTHER)
        run_alone(node, seed, "ours")
        node.gate.set()
        node.wait("older")
        tokens = node.tokens("ours")
        assert node.engine.get_stats().num_preemptions >= 1
        [timeline] = node.engine.list_timelines(["ours"])
        assert timeline.num_preemptions >= 1
        return tokens
    finally:
        node.close()


async def load_from_store(seed, store):
    first, second = Served(store), Served(store)
    try:
        tokens, _ = await asyncio.to_thread(first.generate, PROMPT, NUM_TOKENS, seed=seed)
        await asyncio.to_thread(first.wait_stored, 10)
        again, cached = await asyncio.to_thread(second.generate, PROMPT, NUM_TOKENS, seed=seed)
        assert cached == 10 * BLOCK
        assert second.tier.counters.loaded_blocks == 10
        assert again == tokens
        return again
    finally:
        first.close()
        second.close()


CASES = [
    disaggregate,
    evict,
    preempt,
    fail_in_mid_prefill,
    fail_in_mid_transfer,
    fail_in_mid_decode,
]
# A sampler's state moves with a request or is made anew; greedy requests have none.
QUICK = [(disaggregate, "seeded"), (evict, "greedy"), (preempt, "seeded")]
QUICK += [(fail_in_mid_prefill, "seeded"), (fail_in_mid_transfer, "greedy")]
QUICK += [(fail_in_mid_decode, "seeded")]


@pytest.mark.parametrize(
    ("case", "name"),
    rest_slow(QUICK, [(case, name) for case in CASES for name in SEEDS]),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_tokens_are_those_of_one_engine_alone(truth, case, name):
    assert asyncio.run(case(SEEDS[name])) == truth[name]


@pytest.mark.parametrize("name", rest_slow(["seeded"], SEEDS))
def test_tokens_are_those_of_one_engine_alone_from_the_store(truth, name, tmp_path):
    with LiveStore(tmp_path) as store:
        assert asyncio.run(load_from_store(SEEDS[name], store)) == truth[name]

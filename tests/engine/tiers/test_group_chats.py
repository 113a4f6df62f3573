"""48 chats with edits and branches get the bits of a fresh run, log-probabilities too.

Goal: on a model with windows and on hybrids of each kind of state, whatever was reused, given up,
sent, loaded or begun elsewhere changes no token and no log-probability.
Method: tiny random models in bfloat16. Each chat has two turns; the second continues the first,
edits it, or branches off within its answer. Every way of serving them is compared with an engine
that reuses nothing, one prompt at a time. Half of the chats are greedy, half seeded.
"""

import asyncio
import shutil
import time

import pytest
from chat_engine import ChatEngine, make_prompt
from hybrid import save_hybrid, save_kimi_delta, save_short_convolutions, save_state_spaces
from sparse import save_sparse
from test_disaggregation import TIMEOUT_S, Node
from test_store_tier import LiveStore, Served
from windowed import save_sharing, save_windowed

from tandem.core.wire import AddRequest, Continuation, PrefillKv, SamplingParams
from tandem.models.config import ModelConfig

pytestmark = pytest.mark.slow

NUM_CHATS, NUM_TOKENS = 48, 24
SIZES = {"block_size": 16, "max_batch_tokens": 64, "max_running": 16}
MODELS = {
    "windowed": save_windowed,
    "sharing": save_sharing,
    "hybrid": save_hybrid,
    "kimi delta": save_kimi_delta,
    "short convolutions": save_short_convolutions,
    "state spaces": save_state_spaces,
    "sparse": save_sparse,
}
ROOM = {kind: {"num_state_slots": 100} for kind in MODELS}
FEW = {kind: {"num_state_slots": 18} for kind in MODELS}
for _kind in ("windowed", "sharing"):
    ROOM[_kind], FEW[_kind] = {"num_window_blocks": 150}, {"num_window_blocks": 40}
ROOM["sparse"], FEW["sparse"] = {}, {}
FIRST = [
    [*make_prompt((90, 61, 40, 33)[i % 4]), *make_prompt(7 + i % 13, i)] for i in range(NUM_CHATS)
]


def make_sampling(i):
    return SamplingParams(
        max_tokens=NUM_TOKENS, temperature=float(i % 2), seed=i, ignore_eos=True, logprobs=2
    )


def make_request(name, i, prompt, **fields):
    fields = {"message_end": len(prompt) - 2, **fields}
    return AddRequest(request_id=name, prompt_ids=prompt, sampling=make_sampling(i), **fields)


def go_on(i, prompt, answer):
    """The prompt of a chat's second turn."""
    tokens = [token for token, _ in answer]
    own = make_prompt(9 + i % 11, i + 60)
    if i % 3 == 0:
        return [*prompt, *tokens, *own]
    if i % 3 == 1:
        return [*prompt[: len(prompt) * 2 // 3], *own]
    return [*prompt, *tokens[: 3 + i % 17], *own]


def run(engine, prompts, label, stop_after=None, **fields):
    """Answer all prompts at once, or as far as so many steps go."""
    told = {f"{label}{i}": [] for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        engine.add(make_request(f"{label}{i}", i, prompt, **fields.get("of", lambda i: {})(i)))
    for _ in range(stop_after or 20_000):
        if not engine.has_requests:
            break
        for output in engine.step():
            assert output.error_text is None, output.error_text
            told[output.request_id] += zip(output.token_ids, output.logprobs or (), strict=True)
    assert stop_after or not engine.has_requests
    return list(told.values())


class Case:
    """A model, its chats, and the answers of a fresh run."""

    def __init__(self, kind, folder) -> None:
        self.kind = kind
        self.folder = MODELS[kind](folder)
        self.model = ModelConfig(
            path=str(self.folder), dtype="bfloat16", packed_cache="off", proof="off"
        )
        fresh = self.make(prefix_cache=False, num_kv_blocks=40)

        def ask(i, prompt):
            fresh.add(make_request(f"{i} {len(prompt)}", i, prompt))
            told = []
            while fresh.has_requests:
                for output in fresh.step():
                    told += zip(output.token_ids, output.logprobs or (), strict=True)
            return told

        self.first = [ask(i, prompt) for i, prompt in enumerate(FIRST)]
        turns = zip(range(NUM_CHATS), FIRST, self.first, strict=True)
        self.prompts = [go_on(*turn) for turn in turns]
        self.second = [ask(i, prompt) for i, prompt in enumerate(self.prompts)]
        assert len({str(answer) for answer in self.first + self.second}) > 1.5 * NUM_CHATS

    def make(self, **settings):
        sizes = SIZES | {"num_kv_blocks": 900, "max_model_len": 256} | ROOM[self.kind] | settings
        return ChatEngine(self.folder, **sizes).engine

    def check(self, engine, label):
        assert run(engine, FIRST, f"{label}a") == self.first
        assert run(engine, self.prompts, f"{label}b") == self.second


@pytest.fixture(scope="module", params=list(MODELS))
def case(request, tmp_path_factory):
    return Case(request.param, tmp_path_factory.mktemp(request.param.replace(" ", "-")))


def test_plain_and_cached(case):
    case.check(case.make(prefix_cache=False, overlap="on"), "plain")
    engine = case.make(overlap="on")
    case.check(engine, "cold")
    before = engine.get_stats().prefix_hit_tokens
    assert before > 1000
    case.check(engine, "warm")
    total = sum(map(len, FIRST + case.prompts))
    assert engine.get_stats().prefix_hit_tokens - before > 0.6 * total


def test_evicted(case):
    engine = case.make(num_kv_blocks=60, **FEW[case.kind])
    for label in ("one", "two"):
        case.check(engine, label)
    stats = engine.get_stats()
    assert stats.evicted_tokens > 0
    if case.kind != "sparse":  # Its index keys lie in the blocks that all models have.
        assert stats.num_evicted_window_blocks + stats.num_evicted_snapshots > 0


def test_preempted(case):
    engine = case.make(num_kv_blocks=45, overlap="on")
    case.check(engine, "")
    assert engine.get_stats().num_preemptions > 0


def test_killed(case):
    """Instances end in the middle; chats go on at others, as the dispatcher has them do."""
    for prompts, expected in ((FIRST, case.first), (case.prompts, case.second)):
        told = [[] for _ in prompts]
        for life in range(4):
            engine = case.make(overlap="on")
            if life == 3:
                run(engine, FIRST, "other")  # It has something cached.

            def of(i, told=told):
                if not told[i]:
                    return {}
                tokens = [token for token, _ in told[i]]
                return {"continuation": Continuation(token_ids=tokens, seed=i)}

            left = [i for i, answer in enumerate(told) if len(answer) < NUM_TOKENS]
            got = run_some(engine, prompts, left, of, 25 if life < 3 else None)
            for i in left:
                told[i] += got[i]
        assert told == expected


def run_some(engine, prompts, chosen, of, num_steps):
    """Answer some chats, as far as so many steps go."""
    got = {i: [] for i in chosen}
    for i in chosen:
        engine.add(make_request(f"{i}", i, prompts[i], **of(i)))
    steps = 0
    while engine.has_requests and (num_steps is None or steps < num_steps):
        steps += 1
        for output in engine.step():
            assert output.error_text is None, output.error_text
            name = output.request_id
            if name.isdecimal():
                got[int(name)] += zip(output.token_ids, output.logprobs or (), strict=True)
    return got


def test_over_two_instances(case):
    settings = SIZES | {"num_kv_blocks": 900, "overlap": "on"} | ROOM[case.kind]
    nodes = [Node(role, role, settings, case.model) for role in ("prefill", "decode")]
    prefill, decode = nodes

    def read(node, name):
        node.wait(name)
        outputs = node.outputs[name]
        return [x for o in outputs for x in zip(o.token_ids, o.logprobs or (), strict=True)]

    try:
        decode.open(prefill)
        for turn, (prompts, expected) in enumerate(
            ((FIRST, case.first), (case.prompts, case.second))
        ):
            for i, prompt in enumerate(prompts):
                request = make_request(f"p{turn} {i}", i, prompt, prefill_lease_s=TIMEOUT_S)
                prefill.engine.add(request)
            for i, prompt in enumerate(prompts):
                last = prefill.wait(f"p{turn} {i}")
                source = PrefillKv(instance="prefill", handle=last.kv_handle)
                decode.engine.add(
                    make_request(
                        f"d{turn} {i}",
                        i,
                        prompt,
                        kv_source=source,
                        continuation=last.continuation,
                    )
                )
            told = [
                read(prefill, f"p{turn} {i}") + read(decode, f"d{turn} {i}")
                for i in range(NUM_CHATS)
            ]
            assert told == expected
            for i in range(NUM_CHATS):
                prefill.engine.release_hold(f"p{turn} {i}")
        assert decode.reads.peer_read_blocks > NUM_CHATS
        for node in nodes:
            node.wait_idle()
            node.engine._scheduler.check()
    finally:
        for node in nodes:
            node.close()


class Chats(Served):
    """An engine with a store; chats one after the other, as an instance asks."""

    def answer(self, prompts, label):
        told = []
        for i, prompt in enumerate(prompts):
            request = make_request(f"{label}{i}", i, prompt)
            missing = self.engine.find_missing_blocks(request)
            found = asyncio.run(self.tier.count_stored(missing.keys)) or 0
            self.engine.add(request, num_stored_blocks=missing.num_cached + found)
            told.append([])
            deadline = time.monotonic() + TIMEOUT_S
            while self.engine.is_live(request.request_id):
                assert time.monotonic() < deadline, "the request does not end"
                self.engine.wait_for_work(0.1)
                for output in self.engine.step():
                    told[-1] += zip(output.token_ids, output.logprobs or (), strict=True)
        self.engine.step()  # Reports the last blocks that became full.
        return told


def test_from_the_store_and_from_ssd_after_a_restart(case, tmp_path):
    disk = tmp_path / "ssd"
    settings = {"max_batch_tokens": 64, "max_running": 16} | ROOM[case.kind]
    for name in ("filled", "from memory", "from ssd"):
        folder = tmp_path / name.replace(" ", "-")
        if name != "from memory":
            # Another machine: memory, master and its notes are gone, only the disk is left.
            folder.mkdir(mode=0o700)
            store = LiveStore(folder, ssd_dir=str(disk), ssd_bytes=2**28)
            store.__enter__()
        served = Chats(store, settings, case.model)
        try:
            assert served.answer(FIRST, "a") == case.first
            assert served.answer(case.prompts, "b") == case.second
            counters = served.tier.counters
            if name == "filled":
                wait_written(store, served)
            else:
                assert counters.loaded_blocks > NUM_CHATS
                if case.kind != "sparse":
                    groups = counters.loaded_window_blocks + counters.loaded_states
                    assert groups > NUM_CHATS // 2
        finally:
            served.close()
        if name != "filled":
            store.__exit__()
            if name == "from memory":
                shutil.rmtree(tmp_path / "filled")


def wait_written(store, served):
    """Wait until what was stored is on the disk."""
    deadline, before = time.monotonic() + TIMEOUT_S, -1
    while True:
        disk = store.run(lambda client: client.status()).hosts[0].disk
        written = -1 if disk is None else disk.counts["written"]
        is_quiet = disk is not None and not disk.num_queued and written == before
        if is_quiet and written >= served.tier.counters.stored_blocks > 0:
            return
        assert time.monotonic() < deadline, (disk, served.tier.counters)
        before = written
        time.sleep(0.5)

"""Goal: KV that a prefill instance computed reaches a decode instance, and never as a wrong token.

Method: engines of the demo model in this process, each on a thread, with the real transfer engine
between them. What is asked is also asked of an engine of its own, whose tokens are the truth.
"""

import asyncio
import threading
import time
from itertools import product

import pytest

from quick import rest_slow
from tandem.core.clock import MonotonicClock
from tandem.core.wire import (
    AddRequest,
    ContinueRequest,
    FinishReason,
    KvHandle,
    PrefillKv,
    SamplingParams,
)
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.disaggregation.exchange import KvExchange
from tandem.models.config import ModelConfig
from tandem.transfer import TransferConfig

BLOCK = 16
PROMPT = [(i * 7919) % 3000 + 5 for i in range(10 * BLOCK + 3)]
NUM_BLOCKS = 11
TIMEOUT_S = 60.0
SECRET = "a secret of more than 16 bytes"


def wait_until(is_true, what):
    deadline = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < deadline, what()
        time.sleep(0.002)


class Node:
    """An engine on a thread of its own; ``role`` None: without an exchange."""

    def __init__(self, role, name="node", engine=None, model=None, **transfer) -> None:
        clock = MonotonicClock()
        self.exchange = None
        if role is not None:
            config = TransferConfig(secret=SECRET, **transfer)
            self.exchange = KvExchange(name, config, clock)
        self.built = build_engine(
            model or ModelConfig(path="demo"),
            EngineConfig(
                **{
                    "block_size": BLOCK,
                    "num_kv_blocks": 100,
                    "max_model_len": 512,
                    "threads": 1,
                    **(engine or {}),
                }
            ),
            clock,
            allocate=None if self.exchange is None else self.exchange.allocate,
            allocate_states=None if self.exchange is None else self.exchange.allocate_states,
            allocate_windows=None if self.exchange is None else self.exchange.allocate_windows,
        )
        self.engine = self.built.engine
        if self.exchange is not None:
            cache, states = self.built.cache, self.built.states
            self.exchange.attach(
                self.engine,
                self.built.identity,
                cache.layout,
                cache.num_blocks,
                states=states and states.layout,
                windows=self.built.windows,
            )
        self.outputs = {}
        self.gate = threading.Event()
        """Cleared: the engine takes no step."""
        self.gate.set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._stop.is_set():
            if self.gate.wait(0.05) and self.engine.wait_for_work(0.05):
                for output in self.engine.step():
                    self.outputs.setdefault(output.request_id, []).append(output)

    def add(self, request_id, prompt=PROMPT, num_tokens=8, seed=None, **fields):
        sampling = SamplingParams(
            max_tokens=num_tokens, temperature=0.0 if seed is None else 1.0, seed=seed,
            ignore_eos=True,
        )  # fmt: skip
        self.engine.add(
            AddRequest(request_id=request_id, prompt_ids=list(prompt), sampling=sampling, **fields)
        )

    def wait(self, request_id):
        """Return the last output of a request."""

        def has_ended():
            outputs = self.outputs.get(request_id)
            # The engine's thread puts the first output into the list after the list is there.
            return bool(outputs) and outputs[-1].finish_reason is not None

        wait_until(has_ended, lambda: (request_id, self.engine.get_stats()))
        return self.outputs[request_id][-1]

    def tokens(self, request_id):
        self.wait(request_id)
        return [t for output in self.outputs[request_id] for t in output.token_ids]

    def cached(self, request_id):
        return self.outputs[request_id][0].cached_len

    def open(self, other):
        asyncio.run(self.exchange.reader.open_peer(other.exchange.peer))

    @property
    def reads(self):
        return self.exchange.counters

    def wait_idle(self):
        def is_idle():
            stats = self.engine.get_stats()
            reader = None if self.exchange is None else self.exchange.reader
            return (
                stats.num_used_blocks == stats.num_held == 0
                and not self.engine.has_requests
                and (reader is None or reader.num_in_transfer == 0)
            )

        wait_until(is_idle, self.engine.get_stats)

    def close(self):
        self._stop.set()
        self._thread.join(TIMEOUT_S)
        if self.exchange is not None:
            self.exchange.close()


def hand_over(prefill, decode, number, *, is_early=True, lease_s=30.0, **fields):
    """Prefill on one, decode on the other; return the tokens of both."""
    name, other = f"p{number}", f"d{number}"
    num_tokens = len(fields.get("prompt", PROMPT))
    handle = KvHandle(request_id=name, num_tokens=num_tokens, lease_s=lease_s)
    if is_early:
        source = PrefillKv(instance="prefill", handle=handle)
        decode.add(other, kv_source=source, awaits_continuation=True, **fields)
    prefill.add(name, prefill_lease_s=lease_s, **fields)
    last = prefill.wait(name)
    assert last.finish_reason is FinishReason.PREFILLED
    if is_early:
        go_on = ContinueRequest(request_id=other, continuation=last.continuation)
        assert decode.engine.continue_request(go_on)
    else:
        source = PrefillKv(instance="prefill", handle=last.kv_handle)
        decode.add(other, kv_source=source, continuation=last.continuation, **fields)
    tokens = last.token_ids + decode.tokens(other)
    prefill.engine.release_hold(name)
    return tokens


@pytest.fixture(scope="module")
def truth():
    """Tokens of one engine alone: (greedy, seeded)."""
    node = Node(None)
    node.add("greedy")
    node.add("seeded", seed=11)
    tokens = node.tokens("greedy"), node.tokens("seeded")
    node.close()
    assert tokens[0] != tokens[1]
    return tokens


@pytest.fixture
def make():
    nodes = []

    def build(*args, **kwargs):
        nodes.append(Node(*args, **kwargs))
        return nodes[-1]

    yield build
    for node in nodes:
        node.close()


@pytest.fixture
def pair(make):
    prefill, decode = make("prefill", "prefill"), make("decode", "decode")
    decode.open(prefill)
    return prefill, decode


@pytest.mark.parametrize(
    ("transport", "is_early"),
    rest_slow([("shm", True), ("tcp", False)], product(["shm", "tcp"], [True, False])),
)
def test_tokens_are_those_of_one_engine(make, truth, transport, is_early):
    """Greedy and seeded, in chunks of 40 tokens, by shared memory and by sockets."""
    settings = {"engine": {"max_batch_tokens": 40, "max_running": 8}, "transports": (transport,)}
    prefill, decode = make("prefill", "prefill", **settings), make("decode", "decode", **settings)
    decode.open(prefill)
    assert hand_over(prefill, decode, 0, is_early=is_early) == truth[0]
    assert decode.cached("d0") == len(PROMPT)
    assert decode.reads.peer_read_blocks == NUM_BLOCKS
    assert decode.reads.peer_read_failures == {}
    decode.engine.flush_cache()
    assert hand_over(prefill, decode, 1, is_early=is_early, seed=11) == truth[1]
    assert decode.reads.peer_read_blocks == 2 * NUM_BLOCKS
    size = prefill.exchange.peer.block_bytes
    assert decode.reads.peer_read_bytes == 2 * NUM_BLOCKS * size
    copied = decode.exchange.transfer.bytes_copied("shm")
    assert copied == (decode.reads.peer_read_bytes if transport == "shm" else 0)
    prefill.wait_idle()
    decode.wait_idle()

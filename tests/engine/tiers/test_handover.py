"""Goal: prefill on one engine and decode on another give the tokens of one engine, and a hold ends.

Method: engines over a runner that draws from the request's seed and position, so that a sampler
that was not handed over shows; the test moves the blocks.
"""

import math

import pytest
from step_runner import StepRunner

from tandem.core.clock import ManualClock
from tandem.core.errors import ConfigError, ConflictError, UnsupportedError
from tandem.core.wire import (
    AddRequest,
    Continuation,
    ContinueRequest,
    FinishReason,
    KvHandle,
    PrefillKv,
    SamplingParams,
)
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.scheduling.blocks import BlockPool
from tandem.engine.scheduling.prefix_index import PrefixIndex
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.stepping.sampler_state import draw_uniform

SIZE = 4
VOCAB = 1000
PROMPT = list(range(1, 19))


class DrawingRunner(StepRunner):
    """The token depends on the seed, the position in the output and the token before."""

    def __init__(self):
        super().__init__()
        self.computed = []

    def compute(self, sequence, result):
        self.computed.append((sequence.start, len(sequence.token_ids)))
        super().compute(sequence, result)

    def pick(self, sequence):
        draw = draw_uniform(self.started[sequence.sequence_id].seed, sequence.sampling.position)
        return (int(draw * VOCAB) + sequence.token_ids[-1]) % VOCAB


class Node:
    """An engine, and the loads it wants."""

    def __init__(self, num_blocks=32, **config):
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(self.pool, SIZE)
        settings = EngineConfig(block_size=SIZE, max_model_len=100, **config)
        self.scheduler = Scheduler(settings, self.pool, self.index)
        self.clock, self.runner, self.loads = ManualClock(), DrawingRunner(), []
        self.engine = Engine(
            self.scheduler,
            self.runner,
            self.clock,
            vocab_size=VOCAB,
            eos_token_ids=(),
        )
        self.engine.attach_transfers(self)

    sources = frozenset({PrefillKv})

    def begin(self, plan):
        self.loads += plan.loads

    def run(self, limit=100):
        """Step while there is something to do; return the outputs."""
        outputs = []
        for _ in range(limit):
            if not self.engine.wait_for_work(0.0):
                return outputs
            outputs += self.engine.step()
            self.scheduler.check()
        raise AssertionError(f"busy after {limit} steps")


def ask(request_id="a", max_tokens=6, prompt=None, **fields):
    sampling = fields.pop("sampling", None) or SamplingParams(max_tokens=max_tokens)
    return AddRequest(
        request_id=request_id, prompt_ids=prompt or PROMPT, sampling=sampling, **fields
    )


def tokens_of(outputs):
    return [token for output in outputs for token in output.token_ids]


def prefill(node, **fields):
    node.engine.add(ask(prefill_lease_s=30.0, **fields))
    return node.run()[-1]


def decode_message(last, prompt=None, **fields):
    source = PrefillKv(instance="prefill-0", handle=last.kv_handle)
    return ask("b", kv_source=source, prompt=prompt, **fields)


def test_prefill_ends_with_its_first_token_and_holds_its_blocks():
    node = Node()
    last = prefill(node)
    assert last.finish_reason is FinishReason.PREFILLED
    assert len(last.token_ids) == 1
    assert last.continuation.token_ids == last.token_ids
    assert (last.kv_handle.num_tokens, last.kv_handle.lease_s) == (18, 30.0)
    assert len(set(last.kv_handle.block_ids)) == 5
    assert node.pool.num_used == 5
    assert node.engine.get_stats().num_held == 1
    assert not node.engine.has_requests
    with pytest.raises(ConflictError, match="are held"):
        node.engine.add(ask())
    assert node.engine.release_hold("a")
    assert not node.engine.release_hold("a")
    assert (node.pool.num_used, node.pool.num_cached) == (0, 5)
    node.engine.add(ask())
    assert node.run()[0].cached_len == 17


def test_lease_ends_without_a_release():
    node = Node()
    prefill(node)
    assert node.scheduler.wake_s == 30.0
    node.clock.advance(29.9)
    assert node.run() == []
    assert node.pool.num_used == 5
    node.clock.advance(0.2)
    assert node.run() == []
    assert node.pool.num_used == 0
    assert node.scheduler.wake_s == math.inf


@pytest.mark.parametrize("how", ["one token", "stop", "cancelled", "full"])
def test_prefill_that_ends_anyway_holds_nothing(how):
    node = Node()
    first = prefill(node, sampling=SamplingParams(max_tokens=9, seed=5)).token_ids[0]
    node.engine.release_hold("a")
    sampling = {
        "one token": SamplingParams(max_tokens=1, seed=5),
        "stop": SamplingParams(max_tokens=9, seed=5, stop_token_ids=(first,)),
    }.get(how, SamplingParams(max_tokens=9, seed=5))
    prompt = [7] * 99 if how == "full" else PROMPT
    node.engine.add(ask(prefill_lease_s=30.0, sampling=sampling, prompt=prompt))
    if how == "cancelled":
        node.engine.cancel("a")
    last = node.run()[-1]
    assert (
        last.finish_reason
        is {
            "one token": FinishReason.LENGTH,
            "full": FinishReason.LENGTH,
            "stop": FinishReason.STOP,
            "cancelled": FinishReason.CANCELLED,
        }[how]
    )
    assert last.kv_handle is None
    assert node.pool.num_used == 0


def test_holds_leave_room_for_whoever_runs():
    """Prefills are admitted only if their holds leave the running requests their full length."""
    node = Node(num_blocks=12)
    node.engine.add(ask("long", max_tokens=20, prompt=[3] * 8))  # 7 blocks at its full length.
    for i in range(3):
        node.engine.add(ask(f"p{i}", prompt=[10 + i] * 15, prefill_lease_s=1000.0))
    outputs = node.run()
    ended = {o.request_id: o.finish_reason for o in outputs if o.finish_reason}
    assert ended["long"] is FinishReason.LENGTH
    assert node.scheduler.get_stats().num_preemptions == 0
    assert node.scheduler.get_stats().num_held == 3
    assert node.pool.num_used == 12


@pytest.mark.parametrize("length", [16, 18])
def test_decode_goes_on_where_prefill_ended(length):
    prompt = PROMPT[:length]
    unified = Node()
    unified.engine.add(ask(sampling=SamplingParams(max_tokens=6, seed=11), prompt=prompt))
    expected = tokens_of(unified.run())
    assert len(set(expected)) > 1
    # Without a seed of the request, so that only the handover can carry it.
    last = prefill(Node(), sampling=SamplingParams(max_tokens=6, seed=11), prompt=prompt)
    node = Node()
    node.engine.add(decode_message(last, prompt, continuation=last.continuation))
    assert node.run() == []
    assert node.engine.get_stats().num_loading == 1
    num_blocks = -(-length // SIZE)
    assert [load.position for load in node.loads] == list(range(num_blocks))
    assert [not load.key for load in node.loads] == [False] * 4 + [True] * (num_blocks - 4)
    assert {load.source for load in node.loads} == {node.loads[0].request.kv_source}
    node.engine.load_done(node.loads[0].request, [load.block for load in node.loads])
    outputs = node.run()
    assert last.token_ids + tokens_of(outputs) == expected
    assert node.runner.computed[0] == (length, 1), "no prompt token is computed"
    assert outputs[0].cached_len == length
    assert node.pool.num_used == 0


def test_only_lacking_blocks_are_loaded_and_failed_ones_are_computed():
    unified = Node()
    unified.engine.add(ask(sampling=SamplingParams(max_tokens=6, seed=11)))
    expected = tokens_of(unified.run())
    last = prefill(Node(), sampling=SamplingParams(max_tokens=6, seed=11))
    node = Node()
    node.engine.add(ask("earlier", prompt=PROMPT[:9], max_tokens=1))
    node.run()
    node.engine.add(decode_message(last, continuation=last.continuation))
    node.run()
    assert [load.position for load in node.loads] == [2, 3, 4]
    request = node.loads[0].request
    node.engine.load_failed(request, [node.loads[1].block])
    node.engine.load_done(request, [node.loads[0].block, node.loads[2].block])
    assert last.token_ids + tokens_of(node.run()) == expected
    assert (12, 7) in node.runner.computed
    assert node.pool.num_used == 0


@pytest.mark.parametrize("is_early", [True, False])
def test_awaited_continuation_may_come_before_the_blocks_or_after(is_early):
    last = prefill(Node(), sampling=SamplingParams(max_tokens=6, seed=11))
    node = Node()
    node.engine.add(decode_message(last, awaits_continuation=True))
    go_on = ContinueRequest(request_id="b", continuation=last.continuation)
    node.run()
    request = node.loads[0].request
    if is_early:
        assert node.engine.continue_request(go_on)
        assert node.run() == []
    node.engine.load_done(request, [load.block for load in node.loads])
    if not is_early:
        assert node.run() == []
        assert node.engine.continue_request(go_on)
    outputs = node.run()
    assert len(tokens_of(outputs)) == 5
    assert node.runner.computed[0] == (18, 1)
    assert not node.engine.continue_request(go_on)


def test_continuation_that_does_not_come_is_computed():
    last = prefill(Node(), sampling=SamplingParams(max_tokens=6, seed=11))
    sampling = SamplingParams(max_tokens=6, seed=11)
    node = Node()
    node.engine.add(decode_message(last, sampling=sampling, awaits_continuation=True))
    node.run()
    assert node.scheduler.wake_s == 30.0
    node.clock.advance(30.0)
    outputs = node.run()
    assert tokens_of(outputs)[0] == last.token_ids[0]
    assert len(tokens_of(outputs)) == 6
    go_on = ContinueRequest(request_id="b", continuation=last.continuation)
    assert not node.engine.continue_request(go_on)
    # The transfers have not ended, so their blocks are nobody's.
    assert node.pool.num_used == 5
    node.engine.load_failed(node.loads[0].request, [load.block for load in node.loads])
    assert node.pool.num_used == 0


def test_generation_goes_on_elsewhere_without_any_kv():
    unified = Node()
    unified.engine.add(ask(sampling=SamplingParams(max_tokens=6, seed=11)))
    expected = tokens_of(unified.run())
    node = Node()
    node.engine.add(ask(continuation=Continuation(token_ids=expected[:4], seed=11)))
    assert tokens_of(node.run()) == expected[4:]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"continuation": Continuation(token_ids=[VOCAB], seed=1)}, "continuation"),
        ({"continuation": Continuation(token_ids=[1] * 6, seed=1)}, "continuation"),
        ({"awaits_continuation": True}, "awaits_continuation"),
        (
            {
                "prompt": [1] * 97,
                "continuation": Continuation(token_ids=[1] * 3, seed=1),
            },
            "prompt",
        ),
    ],
)
def test_impossible_continuations_are_refused_by_name(fields, field):
    node = Node()
    with pytest.raises(ConfigError) as error:
        node.engine.add(ask(**fields))
    assert error.value.field == field
    assert not node.engine.has_requests


def test_late_continuation_is_checked_too():
    node = Node()
    handle = KvHandle(request_id="a", num_tokens=18, lease_s=30.0)
    source = PrefillKv(instance="p", handle=handle)
    node.engine.add(ask("b", kv_source=source, awaits_continuation=True))
    node.run()
    for tokens in ([VOCAB], [1] * 6):
        with pytest.raises(ConfigError):
            node.engine.continue_request(
                ContinueRequest(request_id="b", continuation=Continuation(token_ids=tokens, seed=1))
            )
    node.engine.cancel("b")
    node.run()
    node.engine.load_failed(node.loads[0].request, [load.block for load in node.loads])
    assert node.pool.num_used == 0


def test_engine_without_a_way_to_the_prefill_instance_refuses():
    last = prefill(Node())
    node = Node()
    node.sources = frozenset()
    with pytest.raises(UnsupportedError, match="cannot read the blocks of prefill-0"):
        node.engine.add(decode_message(last, continuation=last.continuation))
    assert not node.engine.has_requests

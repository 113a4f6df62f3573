"""Goal: what a lower tier's loads do to requests. Method: one step at a time, blocks of four, a
tier that has what the test says and loads when it is told."""

import math
import threading

import pytest
from step_runner import StepRunner

from tandem.core.clock import ManualClock
from tandem.core.errors import ConflictError
from tandem.core.wire import AddRequest, FinishReason, SamplingParams, TierKv
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.groups.group import Group, GroupBlock
from tandem.engine.scheduling.blocks import BlockPool
from tandem.engine.scheduling.loads import LoadDecision
from tandem.engine.scheduling.prefix_index import PrefixIndex
from tandem.engine.scheduling.request import Request, RequestState
from tandem.engine.scheduling.scheduler import Scheduler

SIZE = 4


class Tier:
    """Offers ``num_blocks`` of every prompt beyond what the device holds."""

    def __init__(self, num_blocks=100, wait_s=10.0):
        self.num_blocks = num_blocks
        self.wait_s = wait_s
        self.asked = []

    def choose_load(self, request, keys, num_matched, now_s):
        self.asked.append((request.request_id, num_matched, len(keys)))
        return LoadDecision(self.num_blocks, self.wait_s)


class Stage:
    """A scheduler over a tier; plans come out as ``{request id: (start, num_tokens)}``."""

    def __init__(self, tier=None, num_blocks=64, **config):
        self.tier = tier or Tier()
        defaults = {"max_batch_tokens": 64, "max_running": 4}
        config = EngineConfig(block_size=SIZE, max_model_len=200, **(defaults | config))
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(config, self.pool, PrefixIndex(self.pool, SIZE), self.tier)
        self.now_s = 0.0

    def add(self, name, length, first=1000, max_tokens=50, **fields):
        sampling = SamplingParams(max_tokens=max_tokens)
        prompt_ids = list(range(first, first + length))
        request = Request(name, prompt_ids, sampling, self.now_s, **fields)
        self.scheduler.add(request)
        return request

    def step(self):
        self.plan = self.scheduler.schedule(self.now_s)
        self.scheduler.check()
        if self.plan.sequences:
            sampled = {s.request.request_id: [1] for s in self.plan.sequences if s.wants_sample}
            self.scheduler.complete(self.plan, sampled, self.now_s)
            self.scheduler.check()
        return {s.request.request_id: (s.start, s.num_tokens) for s in self.plan.sequences}

    def done(self, request, loads):
        self.scheduler.load_done(request, [load.block for load in loads])
        self.scheduler.check()

    def failed(self, request, loads):
        self.scheduler.load_failed(request, [load.block for load in loads])
        self.scheduler.check()


def test_request_waits_for_its_load_and_computes_the_rest():
    stage = Stage()
    request = stage.add("a", 18)
    assert stage.step() == {}
    assert request.state is RequestState.LOADING
    assert stage.tier.asked == [("a", 0, 4)]
    loads = stage.plan.loads
    assert [load.key for load in loads] == request.prefix.block_keys[:4]
    assert len({load.block for load in loads}) == 4
    assert stage.scheduler.get_stats().num_loading == 1
    assert stage.step() == {}
    # In any order: what comes early waits for what is before it.
    stage.done(request, [loads[2], loads[1]])
    assert stage.step() == {}
    stage.done(request, [loads[0]])
    stage.done(request, [loads[3]])
    assert request.state is RequestState.WAITING
    assert stage.step() == {"a": (16, 2)}
    assert (request.report.num_cached_tokens, request.report.num_loaded_tokens) == (16, 16)
    assert request.block_table[:4] == tuple(load.block.number for load in loads)
    assert stage.scheduler.get_stats().num_loaded_blocks == 4


def test_last_token_is_never_loaded():
    stage = Stage()
    stage.add("a", 16)
    stage.step()
    assert len(stage.plan.loads) == 3


def test_load_extends_what_the_device_holds_and_keeps_it():
    stage = Stage(Tier(num_blocks=0), num_blocks=16)
    stage.add("short", 9, max_tokens=1)
    stage.step()
    stage.tier.num_blocks = 2
    request = stage.add("a", 30)
    assert stage.step() == {}
    assert stage.tier.asked[-1] == ("a", 2, 5)
    # Pressure: all else is given up, but not what the load extends.
    stage.scheduler._state.index.evict(100)
    stage.done(request, stage.plan.loads)
    assert stage.step() == {"a": (16, 14)}
    assert (request.report.num_cached_tokens, request.report.num_loaded_tokens) == (16, 8)


def test_planner_is_not_asked_where_nothing_could_be_reused():
    stage = Stage()
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    stage.scheduler.add(Request("scored", list(range(20)), sampling, 0.0))
    stage.add("tiny", 4)
    assert stage.step() == {"scored": (0, 20), "tiny": (0, 4)}
    off = Stage(prefix_cache=False)
    off.add("a", 20)
    assert off.step() == {"a": (0, 20)}
    assert stage.tier.asked == off.tier.asked == []


@pytest.mark.parametrize("first_failed", range(4))
def test_failed_block_and_those_after_it_are_computed(first_failed):
    stage = Stage()
    request = stage.add("a", 18)
    stage.step()
    loads = stage.plan.loads
    stage.failed(request, [loads[first_failed]])
    stage.done(request, [load for i, load in enumerate(loads) if i != first_failed])
    assert stage.step() == {"a": (4 * first_failed, 18 - 4 * first_failed)}
    assert request.report.num_loaded_tokens == 4 * first_failed
    stats = stage.scheduler.get_stats()
    assert (stats.num_loaded_blocks, stats.num_failed_loads) == (first_failed, 4 - first_failed)
    assert len(stage.tier.asked) == 1, "a second load could go on for ever"


def test_first_failure_ends_the_wait_but_not_the_transfers():
    stage = Stage()
    request = stage.add("a", 18)
    stage.step()
    loads = stage.plan.loads
    stage.failed(request, [loads[0]])
    assert stage.step() == {"a": (0, 18)}
    assert stage.plan.dropped == loads[1:]
    assert {load.block.number for load in loads[1:]}.isdisjoint(request.block_table)
    assert stage.pool.num_used == len(request.block_table) + 3
    stage.done(request, loads[1:])
    assert stage.pool.num_used == len(request.block_table)
    stage.step()
    assert stage.plan.dropped == []


def test_late_load_becomes_a_recompute():
    stage = Stage(Tier(wait_s=1.0))
    request = stage.add("a", 18)
    stage.step()
    loads = stage.plan.loads
    stage.done(request, loads[:1])
    assert stage.scheduler.wake_s == -math.inf, "a load has ended: have a look"
    stage.now_s = 0.9
    assert stage.step() == {}
    assert stage.scheduler.wake_s == 1.0
    stage.now_s = 1.0
    assert stage.step() == {"a": (4, 14)}
    assert stage.plan.dropped == loads[1:]


def test_prefetch_uses_the_time_in_the_queue_and_no_more():
    stage = Stage(Tier(wait_s=0.0), max_running=1)
    stage.add("first", 3, max_tokens=3)
    second = stage.add("second", 18, first=2000)
    stage.step()
    assert second.state is RequestState.WAITING
    loads = stage.plan.loads
    assert [load.request for load in loads] == [second] * 4
    stage.done(second, loads[:2])
    assert stage.step() == {"first": (3, 1)}
    assert stage.step() == {"first": (4, 1)}
    assert stage.step() == {"second": (8, 10)}
    assert stage.plan.dropped == loads[2:]


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_ended_request_leaves_its_blocks_to_the_transfers(how):
    stage = Stage()
    request = stage.add("a", 18, deadline_s=5.0)
    stage.step()
    loads = stage.plan.loads
    stage.done(request, loads[:1])
    if how == "cancel":
        assert stage.scheduler.cancel("a")
    stage.now_s = 5.0
    stage.step()
    assert request.is_finished
    assert stage.plan.expired == ([] if how == "cancel" else [request])
    assert stage.plan.dropped == loads[1:]
    assert not stage.scheduler.has_requests
    assert (stage.pool.num_used, stage.pool.num_cached) == (3, 1)
    # Nothing that comes now may get hold of a block that a late transfer writes.
    other = stage.add("other", 60 * SIZE - 60)
    stage.tier.num_blocks = 0
    while not other.is_finished:
        stage.step()
        assert {load.block.number for load in loads[1:]}.isdisjoint(other.block_table)
    stage.failed(request, loads[1:2])
    stage.done(request, loads[2:])
    assert stage.pool.num_used == 0


def test_each_end_is_reported_once_and_for_its_own_request():
    stage = Stage()
    request, other = stage.add("a", 18), stage.add("b", 3)
    stage.step()
    loads = stage.plan.loads
    ids = [load.block for load in loads]
    for wrong in (
        (other, ids[:1]),
        (request, [GroupBlock(Group.FULL, 63)]),
        (request, [ids[0], ids[0]]),
    ):
        with pytest.raises(ConflictError, match="report each end once"):
            stage.scheduler.load_done(*wrong)
    stage.done(request, loads)
    with pytest.raises(ConflictError):
        stage.scheduler.load_failed(request, ids[:1])


def test_shared_prefix_is_loaded_once():
    stage = Stage()
    first, second = stage.add("a", 18), stage.add("b", 18)
    assert stage.step() == {}
    assert {load.request for load in stage.plan.loads} == {first}
    stage.done(first, stage.plan.loads)
    assert stage.step() == {"a": (16, 2), "b": (16, 2)}
    assert (first.report.num_loaded_tokens, second.report.num_loaded_tokens) == (16, 0)
    assert second.report.num_cached_tokens == 16


def test_flush_gives_loads_up():
    stage = Stage()
    request = stage.add("a", 18)
    stage.step()
    loads = stage.plan.loads
    stage.done(request, loads[:1])
    stage.scheduler.flush_cache()
    assert stage.step() == {"a": (0, 18)}
    stage.done(request, loads[1:])
    assert stage.pool.num_used == len(request.block_table)


def test_load_delays_no_decode_and_takes_no_block_from_one():
    """With a load that never ends, running requests go on to their full length, unpreempted."""
    stage = Stage(Tier(num_blocks=0), num_blocks=24)
    running = [stage.add(f"r{i}", 6, first=1000 * i, max_tokens=26) for i in range(2)]
    stage.step()
    stage.tier.num_blocks = 100
    waiting = stage.add("w", 90, first=5000)
    num_steps = 1
    while not all(r.is_finished for r in running):
        planned = stage.step()
        num_steps += 1
        assert {"r0", "r1"} <= planned.keys()
        assert stage.plan.preempted == []
    assert num_steps == 26
    assert waiting.state is RequestState.LOADING


def test_loads_are_bounded_and_wait_behind_the_needs_of_those_ahead():
    stage = Stage(Tier(), num_blocks=40, max_running=1)
    stage.add("runs", 3, max_tokens=60)
    stage.step()
    for i in range(4):
        stage.add(f"w{i}", 30, first=1000 * (i + 1))
    stage.step()
    assert len(stage.plan.loads) == 40 // 4
    assert {load.request.request_id for load in stage.plan.loads} == {"w0", "w1"}
    # The whole pool is wanted by the first in the queue: loads for later ones would keep it out.
    stage = Stage(Tier(), num_blocks=40, max_running=1)
    stage.add("runs", 3, max_tokens=60)
    stage.add("large", 150, first=5000, max_tokens=50)
    stage.scheduler._state.requests["large"].load.has_loaded = True
    stage.add("small", 30, first=9000)
    stage.step()
    assert stage.plan.loads == []


def test_full_blocks_are_reported_once_generated_ones_too():
    stage = Stage(Tier(num_blocks=0), num_blocks=8)
    request = stage.add("a", 9, max_tokens=8)
    stage.step()
    filled = []
    while stage.scheduler.has_requests:
        stage.step()
        filled += stage.plan.filled
    assert stage.scheduler.wake_s == -math.inf, "the last step's blocks are still to be told"
    stage.step()
    filled += stage.plan.filled
    assert [(b.key, b.block) for b in filled[:2]] == list(
        zip(request.prefix.block_keys[:2], [b.block for b in filled[:2]], strict=True)
    )
    assert [b.key for b in filled] == request.prefix.block_keys[:4]
    assert all(stage.scheduler.is_unchanged(block) for block in filled)
    assert stage.scheduler.wake_s == math.inf
    stage.add("again", 9, max_tokens=1)
    stage.step()
    stage.step()
    assert stage.plan.filled == [], "nothing new"
    # Another prompt takes the memory: the plan says what goes, and copies are found stale.
    stage.add("large", 30, first=4000, max_tokens=1)
    stage.step()
    assert {b.key for b in stage.plan.evicted} <= {b.key for b in filled}
    assert stage.plan.evicted
    assert {b.key for b in filled if not stage.scheduler.is_unchanged(b)} == {
        b.key for b in stage.plan.evicted
    }


def test_flush_forgets_what_was_not_reported():
    stage = Stage(Tier(num_blocks=0))
    stage.add("a", 9, max_tokens=1)
    stage.step()
    stage.scheduler.flush_cache()
    stage.step()
    assert stage.plan.filled == []


# ------------------------------------------------------------------------ the engine's loop


class EchoRunner(StepRunner):
    def pick(self, sequence):
        return 7


class Transfers:
    sources = frozenset({TierKv})

    def __init__(self):
        self.loads = []

    def begin(self, plan):
        self.loads += plan.loads


def make_engine(wait_s):
    pool = BlockPool(64)
    config = EngineConfig(block_size=SIZE, max_model_len=200)
    scheduler = Scheduler(config, pool, PrefixIndex(pool, SIZE), Tier(wait_s=wait_s))
    clock, transfers = ManualClock(), Transfers()
    engine = Engine(scheduler, EchoRunner(), clock, vocab_size=100, eos_token_ids=())
    engine.attach_transfers(transfers)
    return engine, clock, transfers


def ask(**fields):
    return AddRequest(
        request_id="a", prompt_ids=[5] * 18, sampling=SamplingParams(max_tokens=2), **fields
    )


def test_engine_sleeps_while_all_wait_for_a_load_and_wakes_when_it_ends():
    engine, _, transfers = make_engine(wait_s=100.0)
    assert not engine.wait_for_work(0.0)
    engine.add(ask())
    assert engine.wait_for_work(0.0)
    assert engine.step() == []
    assert engine.wait_for_work(0.0), "a load was started, others might be"
    assert engine.step() == []
    assert not engine.wait_for_work(0.0)
    request = transfers.loads[0].request
    block_ids = [load.block for load in transfers.loads]
    woken = threading.Event()

    def wait():
        if engine.wait_for_work(60.0):
            woken.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    engine.load_done(request, block_ids)
    waiter.join(timeout=60)
    assert woken.is_set()
    outputs = []
    while engine.has_requests:
        outputs += engine.step()
    assert [o.finish_reason for o in outputs] == [None, FinishReason.LENGTH]
    assert outputs[0].cached_len == 16


@pytest.mark.parametrize("what", ["wait", "deadline"])
def test_sleeping_engine_wakes_for_the_end_of_a_wait(what):
    engine, clock, _ = make_engine(wait_s=5.0 if what == "wait" else 100.0)
    engine.add(ask(timeout_s=5.0 if what == "deadline" else None))
    engine.step()
    engine.step()
    clock.advance(4.9)
    assert not engine.wait_for_work(0.0)
    clock.advance(0.2)
    assert engine.wait_for_work(0.0)
    outputs = engine.step()
    assert [o.finish_reason for o in outputs] == [None if what == "wait" else FinishReason.DEADLINE]

"""What an instance tells of a request: each reason of a miss, each phase, and that memory is
bounded. Blocks of four; the "model" says last token + 1; time passes where a test says so."""

import pytest
from step_runner import StepRunner

from tandem.core.clock import ManualClock
from tandem.core.timeline import MissReason, PrefixMiss, StoreLookup, describe_miss
from tandem.core.wire import AddRequest, SamplingParams, TierKv
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.scheduling import prefix_index
from tandem.engine.scheduling.blocks import BlockPool
from tandem.engine.scheduling.loads import LoadDecision
from tandem.engine.scheduling.prefix_index import PrefixIndex
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.timelines import TimelineLog

SIZE = 4
STEP_S = 0.5


class Runner(StepRunner):
    """Each step takes ``STEP_S``."""

    def __init__(self, clock):
        super().__init__()
        self._clock = clock

    def begin(self, step, on_layer=None):
        self._clock.advance(STEP_S)
        return super().begin(step, on_layer)

    def pick(self, sequence):
        return 90


class Tier:
    """Loads whatever it is asked about; a test reports the ends. Also the planner."""

    sources = frozenset({TierKv})

    def __init__(self, wait_s):
        self.wait_s = wait_s
        self.loads = []

    def choose_load(self, request, keys, num_matched, now_s):
        held = request.num_stored_blocks - num_matched
        return LoadDecision(max(held, 0) if self.wait_s is not None else 0, self.wait_s or 0.0)

    def begin(self, plan):
        self.loads += plan.loads


class Stage:
    def __init__(self, num_blocks=32, wait_s=None, capacity=16, **config):
        config = EngineConfig(block_size=SIZE, max_model_len=100, **config)
        self.clock = ManualClock()
        pool = BlockPool(num_blocks)
        self.index = PrefixIndex(pool, SIZE)
        self.tier = Tier(wait_s)
        scheduler = Scheduler(config, pool, self.index, self.tier)
        self.log = TimelineLog(capacity, block_size=SIZE, block_bytes=1000)
        self.engine = Engine(
            scheduler, Runner(self.clock), self.clock,
            vocab_size=1000, eos_token_ids=(), timelines=self.log,
        )  # fmt: skip
        self.engine.attach_transfers(self.tier)

    def add(self, name, prompt, max_tokens=1, stored=0, lookup=None, salt="", **sampling):
        message = AddRequest(
            request_id=name,
            prompt_ids=list(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, **sampling),
            cache_salt=salt,
        )
        self.engine.add(message, num_stored_blocks=stored, lookup=lookup)

    def tell(self, name):
        (told,) = self.engine.list_timelines([name])
        return told

    def run(self, name, prompt, **options):
        """Run a request to its end; return its timeline."""
        self.add(name, prompt, **options)
        for _ in range(100):
            if not self.engine.has_requests:
                return self.tell(name)
            self.engine.step()
        raise AssertionError("the request does not end")


def explain(timeline):
    return timeline.miss.reason, timeline.miss.position


def lookup(asked, found, *, is_answered=True):
    return StoreLookup(
        asked_blocks=asked, found_blocks=found, seconds=0.25, is_answered=is_answered
    )


def test_phases_are_told_relative_to_arrival():
    stage = Stage(max_running=1)
    stage.clock.advance(100.0)
    stage.add("first", range(8), max_tokens=2)
    stage.clock.advance(1.0)
    stage.add("second", range(100, 110), max_tokens=3)
    waiting = stage.tell("second")
    assert (waiting.state, waiting.admitted_s, waiting.end_s) == ("waiting", None, None)
    while stage.engine.has_requests:
        stage.engine.step()
    told = stage.tell("second")
    assert told.state == "finished"
    assert told.finish_reason == "length"
    assert told.admitted_s == 2 * STEP_S
    assert told.first_token_s == 3 * STEP_S
    assert told.end_s == told.age_s == 5 * STEP_S
    assert (told.num_prefill_steps, told.prefill_s) == (1, STEP_S)
    assert (told.num_decode_steps, told.decode_s) == (2, 2 * STEP_S)
    assert (told.prompt_tokens, told.output_tokens, told.computed_tokens) == (10, 3, 10)


def test_a_request_in_flight_is_told():
    stage = Stage()
    stage.add("a", range(6), max_tokens=5)
    stage.engine.step()
    stage.clock.advance(0.25)
    told = stage.tell("a")
    assert (told.state, told.output_tokens, told.end_s) == ("running", 1, None)
    assert told.age_s == STEP_S + 0.25


def test_time_begins_before_the_lookup():
    told = Stage().run("a", range(9), lookup=lookup(2, 0))
    assert told.lookup.asked_blocks == 2
    assert told.admitted_s == 0.25
    assert told.first_token_s == 0.25 + STEP_S


def test_cache_is_told_by_tier():
    stage = Stage()
    stage.run("a", range(10))
    told = stage.run("b", [*range(10), 50, 51])
    assert (told.device_tokens, told.loaded_tokens, told.computed_tokens) == (10, 0, 2)
    assert explain(told) == (MissReason.NOT_STORED, 10)


def test_a_whole_hit_has_no_reason():
    stage = Stage()
    stage.run("a", range(12))
    told = stage.run("b", range(12))
    assert (told.miss, told.computed_tokens) == (None, 1)


@pytest.mark.parametrize("position", [0, 1, 4, 6, 8, 9])
def test_the_first_differing_token_is_named(position):
    stage = Stage()
    stage.run("a", range(12))
    prompt = list(range(12))
    prompt[position] = 77
    told = stage.run("b", prompt)
    assert explain(told) == (MissReason.DIFFERS, position)
    assert told.device_tokens == position
    assert f"token {position} " in describe_miss(told.miss)


def test_other_salts_say_nothing_of_each_other():
    stage = Stage()
    stage.run("a", range(12), salt="mine")
    told = stage.run("b", range(12), salt="yours")
    assert explain(told) == (MissReason.NOT_STORED, 0)


def test_evicted_and_flushed_blocks_are_remembered():
    stage = Stage(num_blocks=8)
    prompt = range(17)
    stage.run("a", prompt)
    stage.run("b", range(100, 130))
    told = stage.run("c", prompt)
    assert told.miss.reason is MissReason.EVICTED
    assert told.miss.position < 16
    stage.engine.flush_cache()
    assert explain(stage.run("d", prompt)) == (MissReason.FLUSHED, 0)


def test_memory_of_evicted_blocks_is_bounded(monkeypatch):
    monkeypatch.setattr(prefix_index, "MAX_FORGOTTEN", 5)
    stage = Stage(num_blocks=8)
    for number in range(40):
        stage.run(str(number), range(number * 20, number * 20 + 20))
    assert len(stage.index._forgotten) == 5


def test_reasons_that_are_settings():
    assert explain(Stage(prefix_cache=False).run("a", range(9))) == (MissReason.DISABLED, 0)
    stage = Stage()
    stage.run("a", range(9))
    told = stage.run("b", range(9), prompt_logprobs=1)
    assert explain(told) == (MissReason.NEEDS_LOGITS, 0)


def test_loaded_tokens_and_bytes():
    stage = Stage(wait_s=10.0)
    stage.add("a", range(10), stored=2, lookup=lookup(2, 2))
    stage.engine.step()
    assert stage.tell("a").state == "loading"
    assert stage.tell("a").loads[0].end_s is None
    request = stage.tier.loads[0].request
    stage.clock.advance(2.0)
    stage.engine.load_done(request, [load.block for load in stage.tier.loads])
    stage.engine.step()
    told = stage.tell("a")
    assert (told.device_tokens, told.loaded_tokens, told.computed_tokens) == (0, 8, 2)
    (load,) = told.loads
    assert (load.source, load.begin_s, load.end_s) == ("store", 0.25, 2.25)
    assert (load.asked_blocks, load.loaded_blocks, load.loaded_bytes) == (2, 2, 2000)
    assert load.failures == {}
    assert explain(told) == (MissReason.NOT_STORED, 8)


def test_a_load_that_fails_names_the_reason():
    stage = Stage(wait_s=10.0)
    stage.add("a", range(14), stored=3, lookup=lookup(3, 3))
    stage.engine.step()
    request, blocks = stage.tier.loads[0].request, [x.block for x in stage.tier.loads]
    stage.engine.load_done(request, blocks[:1])
    stage.engine.load_failed(request, blocks[1:2], "corruption")
    stage.engine.step()
    told = stage.tell("a")
    assert told.loaded_tokens == 4
    assert told.loads[0].failures == {"corruption": 1, "after_gap": 1}
    assert explain(told) == (MissReason.LOAD_FAILED, 4)
    assert told.miss.detail == "corruption"
    # The last transfer ends after the request; nobody minds.
    stage.engine.load_done(request, blocks[2:])
    assert stage.tell("a") == told


def test_a_load_that_comes_too_late():
    stage = Stage(wait_s=1.0)
    stage.add("a", range(10), max_tokens=3, stored=2, lookup=lookup(2, 2))
    stage.engine.step()
    stage.clock.advance(1.5)
    stage.engine.step()
    told = stage.tell("a")
    assert explain(told) == (MissReason.TOO_LATE, 0)
    assert told.loads[0].failures == {"too_late": 2}
    request, blocks = stage.tier.loads[0].request, [x.block for x in stage.tier.loads]
    stage.engine.load_done(request, blocks)
    assert stage.tell("a").loads[0].failures == {"too_late": 2}


def test_a_store_that_was_not_used():
    told = Stage().run("a", range(10), stored=2, lookup=lookup(2, 2))
    assert explain(told) == (MissReason.NOT_LOADED, 0)
    told = Stage().run("a", range(10), lookup=lookup(2, 0, is_answered=False))
    assert explain(told) == (MissReason.NO_ANSWER, 0)


def test_preemptions_are_told():
    stage = Stage(num_blocks=8, prefix_cache=False)
    stage.add("a", range(8), max_tokens=20)
    stage.add("b", range(50, 58), max_tokens=20)
    while stage.engine.has_requests:
        stage.engine.step()
    told = stage.tell("b")
    assert told.num_preemptions == len(told.preempted_s) > 0
    assert told.preempted_s[0] > told.first_token_s


def test_cancelled_and_failed_requests_are_told():
    stage = Stage(max_running=1)
    stage.add("a", range(8), max_tokens=20)
    stage.add("b", range(50, 58))
    stage.engine.step()
    stage.engine.cancel("b")
    assert (stage.tell("b").finish_reason, stage.tell("b").miss) == ("cancelled", None)
    stage.engine._runner.finish = None  # Not callable: the step fails.
    stage.engine.step()
    assert stage.tell("a").finish_reason == "error"


def test_a_flood_keeps_memory_bounded():
    stage = Stage(capacity=10)
    for number in range(200):
        stage.run(str(number), [number] * 5)
    assert len(stage.log) == 10
    assert stage.engine.list_timelines(["0", "nobody", ""]) == []
    assert [t.request_id for t in stage.engine.list_timelines(["199", "190"])] == ["199", "190"]
    silent = Stage(capacity=0)
    silent.add("a", range(5))
    assert silent.tell("a").state == "waiting"
    silent.engine.step()
    assert len(silent.log) == 0


@pytest.mark.parametrize("reason", MissReason)
def test_every_reason_has_words(reason):
    words = describe_miss(PrefixMiss(reason=reason, position=12, detail="cache_salt"))
    assert "{" not in words

"""Goal: what the scheduler decides, scenario by scenario. Method: blocks of four, plans read out.

That the decisions are sound under any traffic is the business of ``test_scheduler_props.py``.
"""

from collections import Counter
from random import Random

import msgspec
import pytest

from tandem.core.config import list_fields
from tandem.core.errors import CapacityError, ConfigError, ConflictError
from tandem.core.wire import FinishReason, KvHandle, PrefillKv, SamplingParams
from tandem.engine.config import EngineConfig
from tandem.engine.scheduling.admission import MAX_OVERTAKEN
from tandem.engine.scheduling.blocks import BlockPool
from tandem.engine.scheduling.prefix_index import PrefixIndex
from tandem.engine.scheduling.request import Request, RequestState
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.scheduling.state import MAX_CANDIDATES

SIZE = 4


class Stage:
    """A scheduler with a clock; plans come out as ``{request id: (start, num_tokens)}``."""

    def __init__(self, num_blocks=64, **config):
        defaults = {"max_batch_tokens": 16, "max_running": 4, "max_queue": 8}
        self.config = EngineConfig(block_size=SIZE, max_model_len=200, **(defaults | config))
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(self.pool, SIZE)
        self.scheduler = Scheduler(self.config, self.pool, self.index)
        self.now_s = 0.0
        self.plan = None

    def add(self, name, prompt, max_tokens=50, **fields):
        prompt_ids = [ord(c) for c in prompt] if isinstance(prompt, str) else list(prompt)
        sampling = fields.pop("sampling", None) or SamplingParams(max_tokens=max_tokens)
        request = Request(name, prompt_ids, sampling, self.now_s, **fields)
        self.scheduler.add(request)
        return request

    def schedule(self):
        self.plan = self.scheduler.schedule(self.now_s)
        return {s.request.request_id: (s.start, s.num_tokens) for s in self.plan.sequences}

    def complete(self, token=1, finished=()):
        sampled = {s.request.request_id: [token] for s in self.plan.sequences if s.wants_sample}
        self.now_s += 0.01
        reasons = dict.fromkeys(finished, FinishReason.STOP)
        ended = self.scheduler.complete(self.plan, sampled, self.now_s, reasons)
        self.scheduler.check()
        return [r.request_id for r in ended]

    def step(self, **kwargs):
        planned = self.schedule()
        if planned:
            self.complete(**kwargs)
        return planned


def prompt(length, first=1000):
    return range(first, first + length)


# ------------------------------------------------------------------------ one request


def test_prompt_is_computed_in_chunks_and_then_token_by_token():
    stage = Stage(max_batch_tokens=8)
    request = stage.add("a", prompt(19), max_tokens=3)
    assert stage.schedule() == {"a": (0, 8)}
    assert not stage.plan.sequences[0].wants_sample
    assert len(stage.plan.sequences[0].block_table) == 2, "blocks come with the tokens"
    stage.complete()
    assert stage.step() == {"a": (8, 8)}
    assert stage.schedule() == {"a": (16, 3)}
    assert stage.plan.sequences[0].wants_sample
    assert stage.complete(token=7) == []
    assert stage.step(token=8) == {"a": (19, 1)}
    stage.schedule()
    assert stage.complete(token=9) == ["a"]
    assert request.output_ids == [7, 8, 9]
    assert request.finish_reason is FinishReason.LENGTH
    assert (
        request.report.first_scheduled_s,
        request.report.first_token_s,
        request.report.finished_s,
    ) == (
        0.0,
        pytest.approx(0.03),
        pytest.approx(0.05),
    )
    assert stage.pool.num_used == 0
    assert stage.schedule() == {}
    assert not stage.scheduler.has_requests


def test_caller_decides_that_a_token_ends_a_request():
    stage = Stage()
    request = stage.add("a", "hello")
    stage.step()
    assert stage.schedule()
    assert stage.complete(token=0, finished=["a"]) == ["a"]
    assert request.finish_reason is FinishReason.STOP
    assert request.output_ids == [1, 0]


def test_scored_prompt_ends_without_a_token():
    stage = Stage()
    request = stage.add("a", "hello", max_tokens=0)
    stage.schedule()
    assert not stage.plan.sequences[0].wants_sample
    assert stage.complete() == ["a"]
    assert (request.output_ids, request.finish_reason) == ([], FinishReason.LENGTH)


def test_context_length_ends_a_request():
    stage = Stage(max_batch_tokens=256)
    request = stage.add("a", prompt(197), max_tokens=50)
    while stage.step():
        pass
    assert len(request.output_ids) == 3


# ------------------------------------------------------------------------ admission


@pytest.mark.parametrize(
    ("num_blocks", "length", "text"),
    [(64, 0, "no tokens"), (64, 200, "max_model_len 200"), (3, 12, "3 blocks of 4")],
)
def test_impossible_prompts_are_refused_by_name(num_blocks, length, text):
    stage = Stage(num_blocks)
    with pytest.raises(ConfigError, match=text) as error:
        stage.add("a", prompt(length))
    assert error.value.field == "prompt"
    assert not stage.scheduler.has_requests


def test_queue_is_bounded_beyond_the_running_ones():
    stage = Stage(max_running=2, max_queue=3)
    for i in range(5):
        stage.add(f"r{i}", prompt(4, first=100 * i), max_tokens=2)
    with pytest.raises(CapacityError) as error:
        stage.add("one too many", prompt(4))
    assert error.value.retryable
    stage.step()
    stage.step()
    assert stage.scheduler.get_stats().num_waiting == 3, "two have ended, none has moved up yet"
    stage.add("later", prompt(4))
    stage.add("last", prompt(4))
    with pytest.raises(CapacityError):
        stage.add("one too many", prompt(4))


def test_live_id_is_refused_and_free_again_afterwards():
    stage = Stage()
    stage.add("a", "hello", max_tokens=1)
    with pytest.raises(ConflictError, match="'a' is live"):
        stage.add("a", "hello")
    stage.step()
    stage.add("a", "hello")


def test_plans_alternate_with_completions():
    stage = Stage()
    stage.add("a", "hello")
    stage.schedule()
    with pytest.raises(ConflictError, match="in flight"):
        stage.scheduler.schedule(0.0)
    with pytest.raises(ConflictError, match=r"no token sampled for requests \['a'\]"):
        stage.scheduler.complete(stage.plan, {}, 0.0)
    stage.complete()
    with pytest.raises(ConflictError, match="not the oldest plan"):
        stage.scheduler.complete(stage.plan, {"a": [1]}, 0.0)


def test_config_is_described_and_refuses_what_does_not_fit():
    assert len(list_fields(EngineConfig)) <= 25
    with pytest.raises(ConfigError) as error:
        EngineConfig(block_size=48)
    assert error.value.field == "engine.block_size"
    with pytest.raises(msgspec.ValidationError, match="max_running"):
        msgspec.convert({"max_running": 0}, EngineConfig)


def test_scheduler_wants_a_resolved_length():
    pool = BlockPool(4)
    with pytest.raises(ConfigError) as error:
        Scheduler(EngineConfig(), pool, PrefixIndex(pool, 64))
    assert error.value.field == "engine.max_model_len"


def test_lower_priority_value_goes_first():
    stage = Stage(max_running=1)
    stage.add("patient", prompt(4, 100), max_tokens=1, priority=1)
    stage.add("urgent", prompt(4, 200), max_tokens=1, priority=-1)
    stage.add("normal", prompt(4, 300), max_tokens=1)
    assert [list(stage.step()) for _ in range(3)] == [["urgent"], ["normal"], ["patient"]]


def test_request_that_lacks_blocks_is_not_overtaken():
    stage = Stage(num_blocks=8, max_batch_tokens=64)
    stage.add("runs", prompt(16), max_tokens=4)
    stage.step()
    stage.add("large", prompt(20, 2000), max_tokens=2)
    stage.add("small", prompt(2, 3000), max_tokens=1)
    assert list(stage.step()) == ["runs"]
    while "large" not in (planned := stage.step()):
        assert list(planned) == ["runs"]
    assert list(planned) == ["large", "small"]
    assert stage.scheduler.get_stats().num_preemptions == 0


# ------------------------------------------------------------------------ prefixes


def test_second_request_reuses_to_the_token():
    stage = Stage()
    stage.add("first", "the quick brown", max_tokens=1)
    stage.step()
    second = stage.add("second", "the quick browsing", max_tokens=1)
    assert stage.schedule() == {"second": (14, 4)}
    (copy,) = stage.plan.copies
    assert (copy.num_tokens, copy.dst_block_id) == (2, second.block_table[3])
    assert second.report.num_cached_tokens == 14
    stage.complete()
    stats = stage.scheduler.get_stats()
    assert (stats.num_prefix_queries, stats.prefix_query_tokens) == (2, 33)
    assert stats.prefix_hit_tokens == 14


def test_a_prompt_that_another_instance_has_computed_is_counted_there():
    """Over prefill and decode instances, and after a failure, a prompt counts once, and what one
    instance hands to another is no work that a client was spared."""
    stage = Stage()
    stage.add("first", prompt(18), max_tokens=1)
    stage.step()
    stage.add("resumed", prompt(18), output_ids=[7])
    handle = KvHandle(request_id="p", num_tokens=18, lease_s=1.0)
    source = PrefillKv(instance="p", handle=handle)
    stage.add("handed over", prompt(18), kv_source=source, deadline_s=9.0)
    for _ in range(4):
        stage.step()
        stage.now_s += 1.0
    assert stage.scheduler.find_prefill("handed over") is None
    stats = stage.scheduler.get_stats()
    assert (stats.num_prefix_queries, stats.prefix_query_tokens) == (1, 18)
    assert stats.prefix_hit_tokens == 0


def test_repeated_prompt_computes_its_last_token_only():
    stage = Stage()
    stage.add("first", "12345678", max_tokens=1)
    stage.step()
    stage.add("again", "12345678", max_tokens=1)
    assert stage.step() == {"again": (7, 1)}


def test_source_of_a_copy_is_pinned_until_the_step_is_complete():
    stage = Stage()
    stage.add("first", "12345", max_tokens=1)
    stage.step()
    stage.add("second", "12345", max_tokens=1)
    stage.schedule()
    assert stage.plan.copies == []
    stage.complete()
    stage.add("third", "1234567", max_tokens=1)
    stage.step()
    stage.add("fourth", "123456xyz", max_tokens=1)
    stage.schedule()
    (copy,) = stage.plan.copies
    assert stage.pool.get_num_refs(copy.src_block_id) == 1
    stage.scheduler.flush_cache()
    assert stage.pool.get_num_refs(copy.src_block_id) == 1
    stage.complete()
    assert stage.pool.get_num_refs(copy.src_block_id) == 0
    assert stage.pool.num_used == 0


def test_generated_tokens_are_reused_by_the_next_turn():
    stage = Stage()
    first = stage.add("first", "hello", max_tokens=6)
    while stage.step():
        pass
    turn = first.prompt_ids + first.output_ids
    stage.add("second", [*turn, 5, 6], max_tokens=1)
    # The last generated token was never fed to the model, so its KV does not exist.
    assert stage.step() == {"second": (len(turn) - 1, 3)}


def test_nothing_is_matchable_before_its_step_is_complete():
    stage = Stage(max_batch_tokens=64)
    stage.add("a", "abc", max_tokens=1)
    stage.add("b", "abc", max_tokens=1)
    assert stage.step() == {"a": (0, 3), "b": (0, 3)}
    assert stage.pool.num_cached == 1, "the second copy is not kept"


def test_copies_of_a_prompt_compute_it_once():
    """n=4: the others wait until the first has computed what they share."""
    stage = Stage(max_batch_tokens=64)
    for i in range(4):
        stage.add(f"copy{i}", prompt(30))
    assert stage.step() == {"copy0": (0, 30)}
    assert stage.step() == {
        "copy0": (30, 1),
        "copy1": (29, 1),
        "copy2": (29, 1),
        "copy3": (29, 1),
    }


def test_waiting_for_a_shared_prefix_lasts_only_while_it_advances():
    stage = Stage(max_batch_tokens=8)
    stage.add("first", prompt(24))
    stage.add("same", prompt(24))
    stage.add("other", prompt(3, 9000))
    assert stage.step() == {"first": (0, 8)}
    assert stage.step() == {"first": (8, 8)}
    stage.scheduler.cancel("first")
    assert stage.step() == {"same": (16, 8)}
    assert list(stage.step()) == ["same", "other"]


def test_prompt_logprobs_switch_reuse_off():
    stage = Stage()
    stage.add("first", "12345678", max_tokens=1)
    stage.step()
    stage.add("scored", "12345678", sampling=SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert stage.step() == {"scored": (0, 8)}


def test_longest_cached_prefix_goes_first_until_the_others_have_waited_enough():
    stage = Stage(max_running=1, max_passover_s=0.015)
    stage.add("warm", prompt(12), max_tokens=1)
    stage.step()
    stage.add("cold", prompt(12, 5000), max_tokens=1)
    stage.add("hit1", prompt(14), max_tokens=1)
    stage.add("hit2", prompt(15), max_tokens=1)
    stage.add("hit3", prompt(16), max_tokens=1)
    assert [next(iter(stage.step())) for _ in range(4)] == ["hit1", "hit2", "cold", "hit3"]


def test_long_queue_is_served_in_order_of_arrival():
    stage = Stage(max_running=1, max_queue=2 * MAX_CANDIDATES)
    stage.add("warm", prompt(12), max_tokens=1)
    stage.step()
    for i in range(MAX_CANDIDATES):
        stage.add(f"cold{i}", prompt(4, 5000 + 10 * i), max_tokens=1)
    stage.add("hit", prompt(14), max_tokens=1)
    assert list(stage.step()) == ["cold0"]
    assert list(stage.step()) == ["hit"], "now the queue is short enough to be ordered"


def test_flush_forgets_also_what_is_being_computed():
    stage = Stage(max_batch_tokens=8)
    stage.add("a", prompt(12), max_tokens=1)
    stage.step()
    stage.scheduler.flush_cache()
    stage.step()
    assert stage.pool.num_cached == 0, "weights may have changed in between"
    stage.add("b", prompt(12), max_tokens=1)
    assert stage.step() == {"b": (0, 8)}


def test_a_lost_block_takes_along_what_builds_on_it():
    stage = Stage()
    first = stage.add("a", prompt(14), max_tokens=1)
    stage.schedule()
    table = first.block_table
    stage.complete()
    assert stage.scheduler.forget_blocks([table[1], table[1]]) == 3
    stage.scheduler.check()
    assert stage.pool.num_cached == 1
    stage.add("b", prompt(14), max_tokens=1)
    assert stage.step() == {"b": (4, 10)}


def test_nobody_waits_for_blocks_that_build_on_a_lost_one():
    """A prefill whose first block is lost indexes none of the blocks that it still computes."""
    stage = Stage(max_batch_tokens=16)
    first = stage.add("a", prompt(30), max_tokens=1)
    stage.step()
    assert stage.scheduler.forget_blocks(first.block_table[:1]) == 4
    stage.add("b", prompt(30), max_tokens=1)
    assert stage.step() == {"a": (16, 14), "b": (0, 2)}
    stage.step()
    stage.step()
    assert not stage.scheduler.has_requests
    assert stage.pool.num_cached == 8


@pytest.mark.parametrize("has_lost", [False, True])
def test_tokens_whose_copy_failed_are_in_no_index(has_lost):
    """The block that a request would have copied to is forgotten with the request, also if the
    source was forgotten meanwhile, as a step planned before had found out that it is lost."""
    stage = Stage(overlap="on")
    stage.add("a", prompt(15), max_tokens=1)
    first = stage.scheduler.schedule(0.0)
    source = first.sequences[0].block_table[3]
    stage.scheduler.complete(first, {"a": [1]}, 0.0)
    stage.add("b", [*prompt(14), 7, 8, 9], max_tokens=1)
    second = stage.scheduler.schedule(0.0)
    assert [copy.src_block_id for copy in second.copies] == [source]
    if has_lost:
        stage.scheduler.forget_blocks([source])
    stage.scheduler.complete(second, {}, 0.0, {"b": FinishReason.ERROR})
    stage.scheduler.check()
    stage.add("c", [*prompt(14), 3, 3, 3], max_tokens=1)
    assert stage.step() == {"c": (12, 5) if has_lost else (14, 3)}
    assert [copy.src_block_id for copy in stage.plan.copies] == ([] if has_lost else [source])


def test_a_lost_block_is_not_indexed_when_its_request_fills_it():
    """Another request could not copy its first tokens; its own goes on without reading them."""
    stage = Stage()
    first = stage.add("a", prompt(6), max_tokens=6)
    stage.step()
    lost = first.block_table[1]
    assert stage.scheduler.forget_blocks([lost]) == 1
    while stage.scheduler.has_requests:
        stage.step()
        stage.scheduler.check()
    stage.add("b", [*prompt(6), 1, 1, 1], max_tokens=1)
    assert stage.step() == {"b": (4, 5)}


def test_without_prefix_cache_nothing_is_kept():
    stage = Stage(prefix_cache=False)
    for name in ("a", "b"):
        stage.add(name, "12345678", max_tokens=2)
        assert stage.step() == {name: (0, 8)}
        stage.step()
    assert stage.pool.num_free == 64


# ------------------------------------------------------------------------ orders


def two_decoding(**config):
    stage = Stage(**config)
    stage.add("a", "aa")
    stage.add("b", "bb")
    while stage.scheduler.get_stats().num_waiting:
        stage.step()
    stage.add("c", prompt(40))
    return stage


def test_chunked_fills_up_after_decodes():
    stage = two_decoding()
    assert stage.step() == {"a": (2, 1), "b": (2, 1), "c": (0, 14)}
    assert stage.step() == {"a": (3, 1), "b": (3, 1), "c": (14, 14)}


def test_prefill_first_holds_decodes_back():
    stage = two_decoding(scheduling_order="prefill_first")
    assert stage.step() == {"c": (0, 16)}
    assert stage.step() == {"c": (16, 16)}
    assert stage.step() == {"c": (32, 8)}
    assert stage.step() == {"a": (2, 1), "b": (2, 1), "c": (40, 1)}


def test_decode_first_lets_nobody_in_until_somebody_has_waited_enough():
    stage = two_decoding(scheduling_order="decode_first", max_passover_s=0.1)
    for _ in range(5):
        assert set(stage.step()) == {"a", "b"}
    stage.now_s += 0.1
    assert [list(stage.step()) for _ in range(5)] == [
        ["c"],
        ["a", "b"],
        ["c"],
        ["a", "b"],
        ["c"],
    ], "every other step"
    assert set(stage.step()) == {"a", "b", "c"}


def test_decode_first_prefills_at_once_when_nothing_decodes():
    stage = Stage(scheduling_order="decode_first")
    stage.add("a", prompt(20))
    assert stage.step() == {"a": (0, 16)}
    assert stage.step() == {"a": (16, 4)}


def test_running_request_gets_its_token_even_in_a_full_house():
    stage = Stage(max_batch_tokens=4, max_running=4)
    for i in range(3):
        stage.add(f"d{i}", [i])
    stage.step()
    stage.add("long", prompt(6))
    planned = stage.step()
    assert planned.pop("long") == (0, 1)
    assert len(planned) == 3
    with pytest.raises(ConfigError) as error:
        EngineConfig(max_batch_tokens=3, max_running=4)
    assert error.value.field == "engine.max_batch_tokens"


# ------------------------------------------------------------------------ preemption


def test_least_urgent_request_gives_its_blocks_and_resumes_from_cache():
    stage = Stage(num_blocks=6, max_batch_tokens=32)
    old = stage.add("old", prompt(7), max_tokens=14)
    young = stage.add("young", prompt(7, 2000), max_tokens=10)
    planned = {}
    while not stage.plan or not stage.plan.preempted:
        planned = stage.step()
    assert stage.plan.preempted == [young]
    assert list(planned) == ["old"]
    assert young.state is RequestState.PREEMPTED
    outputs = list(young.output_ids)
    assert outputs, "what it has generated is kept"
    newcomer = stage.add("new", prompt(2, 4000), max_tokens=1)
    resumed = None
    while resumed is None:
        assert newcomer.state is RequestState.WAITING, "the preempted one is in front"
        resumed = stage.step().get("young")
    start, num_tokens = resumed
    assert start + num_tokens == young.prompt_len + len(outputs)
    assert start >= SIZE, "part of its blocks survived"
    while stage.step():
        pass
    assert old.finish_reason is young.finish_reason is FinishReason.LENGTH
    assert (len(old.output_ids), len(young.output_ids)) == (14, 10)
    assert young.queue.num_preemptions >= 1
    assert old.queue.num_preemptions == 0
    assert young.report.num_cached_tokens == 0, "usage reports what the prompt found on arrival"


def test_priority_decides_who_is_preempted():
    stage = Stage(num_blocks=6, max_batch_tokens=32)
    stage.add("cheap", prompt(7), max_tokens=14, priority=1)
    stage.add("dear", prompt(7, 2000), max_tokens=14)
    while not stage.plan or not stage.plan.preempted:
        stage.step()
    assert [r.request_id for r in stage.plan.preempted] == ["cheap"]


def test_nobody_is_preempted_for_nothing():
    """Requests that share all their blocks yield one only together; else nobody is touched."""
    stage = Stage(num_blocks=4, max_batch_tokens=32)
    stage.add("a", prompt(7), max_tokens=9)
    stage.step()
    stage.add("b", prompt(7), max_tokens=9)
    while stage.scheduler.has_requests:
        stage.step()
        for victim in stage.plan.preempted:
            assert victim.request_id == "b"
    assert stage.pool.num_used == 0


def test_pool_of_one_request_serves_many_one_after_the_other():
    stage = Stage(num_blocks=3, max_batch_tokens=32)
    requests = [stage.add(f"r{i}", prompt(9), max_tokens=3) for i in range(5)]
    num_steps = 0
    while stage.step():
        num_steps += 1
    assert [len(r.output_ids) for r in requests] == [3] * 5
    assert num_steps <= 15
    assert sum(r.queue.num_preemptions for r in requests) == 0


# ------------------------------------------------------------------------ leaving early


def test_cancelling_frees_blocks_at_once_or_with_the_step_in_flight():
    stage = Stage()
    waiting, running = stage.add("a", prompt(20)), stage.add("b", prompt(20, 2000))
    stage.step()
    stage.schedule()
    assert stage.scheduler.cancel("a")
    assert not waiting.is_finished
    assert stage.pool.num_used > 0
    assert stage.complete() == ["a"]
    assert waiting.finish_reason is FinishReason.CANCELLED
    assert waiting.output_ids == [], "the token of the last step is dropped"
    assert stage.scheduler.cancel("b")
    assert running.is_finished
    assert stage.pool.num_used == 0
    assert not stage.scheduler.cancel("b")


def test_failed_request_leaves_nothing_of_its_last_step():
    stage = Stage(max_batch_tokens=8)
    request = stage.add("a", prompt(16))
    stage.step()
    stage.schedule()
    ended = stage.scheduler.complete(stage.plan, {}, 1.0, {"a": FinishReason.ERROR})
    assert ended == [request]
    assert request.finish_reason is FinishReason.ERROR
    stage.scheduler.check()
    stage.add("b", prompt(16))
    assert stage.step() == {"b": (8, 8)}, "the first step was sound"


def test_failed_step_ends_its_requests_and_no_others():
    stage = Stage(max_batch_tokens=4, max_running=2)
    in_plan, outside = stage.add("a", prompt(8)), stage.add("b", prompt(8, 2000))
    stage.step()
    assert stage.schedule() == {"a": (4, 4)}
    failed = {"a": FinishReason.ERROR}
    assert stage.scheduler.complete(stage.plan, {}, 1.0, failed) == [in_plan]
    assert in_plan.finish_reason is FinishReason.ERROR
    assert not outside.is_finished
    assert stage.step() == {"b": (0, 4)}


def test_deadlines_end_waiting_and_running_requests():
    stage = Stage(max_running=1)
    running = stage.add("running", "hello", deadline_s=5.0)
    waiting = stage.add("waiting", "other", deadline_s=3.0)
    stage.step()
    stage.now_s = 3.0
    assert stage.schedule() == {"running": (5, 1)}
    assert stage.plan.expired == [waiting]
    stage.now_s = 4.995
    assert stage.complete() == ["running"]
    assert running.finish_reason is waiting.finish_reason is FinishReason.DEADLINE
    assert len(running.output_ids) == 2, "the token that came with the deadline counts"
    assert stage.pool.num_used == 0


def test_deadlines_of_finished_requests_do_not_pile_up():
    stage = Stage()
    for i in range(1000):
        stage.add(f"r{i}", "x", max_tokens=1, deadline_s=1e9)
        stage.step()
    assert len(stage.scheduler._lifecycle._deadlines) < 200


def test_stats_are_a_snapshot():
    stage = Stage(max_running=1)
    stage.add("a", "12345678", max_tokens=2)
    stage.add("b", "x")
    stage.schedule()
    stats = stage.scheduler.get_stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (1, 1, 2)
    stage.complete()
    stage.step()
    stats = stage.scheduler.get_stats()
    assert (stats.num_running, stats.num_cached_blocks, stats.num_blocks) == (0, 3, 64)


# ------------------------------------------------------------------------ shares


def test_clients_get_equal_shares_whatever_they_queue():
    """One that queued forty requests first does not hold up those with few."""
    stage = Stage(max_running=4, max_queue=64, max_batch_tokens=64, num_blocks=256)
    for i in range(40):
        stage.add(f"a{i}", prompt(5, 100 * i), max_tokens=6, client="a")
    stage.step()
    for client in "bcd":
        for i in range(3):
            stage.add(f"{client}{i}", prompt(5, 100 * i + ord(client)), max_tokens=6, client=client)
    served = []
    while len(served) < 4 + 9:
        for name in stage.schedule():
            if name not in served:
                served.append(name)
        stage.complete()
    assert [name[0] for name in served[:4]] == list("aaaa"), "nobody else was there"
    assert {name[0] for name in served[4:8]} == set("abcd"), "one slot each"
    for client in "bcd":
        own = [name for name in served if name[0] == client]
        assert own == [f"{client}{i}" for i in range(len(own))], "in the order of arrival"
        assert len(own) >= 2


def test_the_weight_of_a_client_is_that_of_its_share():
    stage = Stage(max_running=4, max_queue=8, max_batch_tokens=64, num_blocks=256)
    stage.add("first", prompt(5), max_tokens=1, client="x")
    for client, weight in (("a", 1.0), ("b", 3.0)):
        for i in range(6):
            numbers = prompt(5, 100 * i + ord(client))
            stage.add(f"{client}{i}", numbers, max_tokens=6, client=client, weight=weight)
    stage.step()
    running = [name[0] for name in stage.schedule() if name != "first"]
    assert (running.count("a"), running.count("b")) == (1, 3)
    stage.complete()
    # The queue is full; the larger share still has room in it, the smaller has not.
    with pytest.raises(CapacityError):
        stage.add("a6", prompt(5), client="a", weight=1.0)
    stage.add("b6", prompt(5), client="b", weight=3.0)


def test_a_full_queue_still_takes_those_below_their_share():
    stage = Stage(max_running=2, max_queue=6)
    for i in range(8):
        stage.add(f"a{i}", prompt(5), client="a")
    with pytest.raises(CapacityError):
        stage.add("a8", prompt(5), client="a")
    for i in range(4):
        stage.add(f"b{i}", prompt(5), client="b")
    with pytest.raises(CapacityError):
        stage.add("b4", prompt(5), client="b")
    stage.add("c0", prompt(5), client="c")
    for i in range(200):  # Each of very many has a share of nothing.
        try:
            stage.add(f"x{i}", prompt(5), client=f"x{i}")
        except CapacityError:
            break
    assert len(stage.scheduler._state.shares) <= 2 * 8
    stage.scheduler.check()


@pytest.mark.parametrize(
    ("num_clients", "num_alike"),
    [
        (100, 30),
        pytest.param(180, 0, marks=pytest.mark.slow),
        pytest.param(180, 60, marks=pytest.mark.slow),
    ],
)
def test_no_request_of_a_share_is_overtaken_by_more_than_is_said(num_clients, num_alike):
    """Clients behind one address, each with its next request when it has its answer.

    Some ask with a prefix that is always cached, which goes first; the others must not wait for
    ever. All are served equally often.
    """
    random = Random(7)
    stage = Stage(
        max_running=8, max_queue=256, max_batch_tokens=256, num_blocks=160, max_passover_s=1e4
    )
    served, live, order, number = Counter(), {}, {}, 0
    worst = 0

    def ask(client):
        nonlocal number
        number += 1
        first = 0 if client < num_alike else 10_000 * number
        name = f"{number}"
        live[name] = stage.add(name, prompt(33, first), max_tokens=random.randint(1, 4))
        order[name] = client

    for client in range(num_clients):
        ask(client)
    for _ in range(450):
        stage.schedule()
        for name in stage.complete():
            request = live.pop(name)
            worst = max(worst, request.queue.num_overtaken)
            served[order[name]] += 1
            ask(order[name])
    assert worst <= MAX_OVERTAKEN
    assert max(request.queue.num_overtaken for request in live.values()) <= MAX_OVERTAKEN
    if num_alike and num_clients <= MAX_CANDIDATES:
        assert worst > 0, "a cached prefix goes first, as far as it may"
        return
    counts = [served[client] for client in range(num_clients)]
    assert min(counts) >= 3
    assert max(counts) - min(counts) <= 2, "of equal clients, none is served more often"

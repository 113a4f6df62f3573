"""The engine around scheduler and runner: outputs, ends, failures. The runner is a toy whose
"model" says last token + 1, so what a request must get is known; time stands where it is put."""

import threading

import pytest
from step_runner import StepRunner

from tandem.core.clock import ManualClock
from tandem.core.errors import CapacityError, ConfigError, ConflictError
from tandem.core.wire import AddRequest, FinishReason, SamplingParams, TokenLogprob
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.scheduling.blocks import BlockPool
from tandem.engine.scheduling.prefix_index import PrefixIndex
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.stepping.messages import SampledToken, pack_block_ids
from tandem.engine.stepping.sampler_state import BROKEN_ROW

EOS = 90
VOCAB = 100


class CountingRunner(StepRunner):
    """Next token = last token + 1, never past 98; can fail or give broken rows."""

    def __init__(self) -> None:
        super().__init__()
        self.fails_next = False
        self.broken: set[int] = set()
        """Sequences whose logits are no distribution."""
        self.refused: set[int] = set()
        """Sequences with which a step fails."""
        self.steps = []
        self.num_tokens = 0

    def begin(self, step, on_layer=None):
        self.steps.append(step)
        return super().begin(step, on_layer)

    def finish(self, handle):
        if self.fails_next:
            self.fails_next = False
            raise RuntimeError("no memory")
        if any(sequence.sequence_id in self.refused for sequence in self.steps[-1].sequences):
            raise RuntimeError("a value that no step can be computed with")
        return super().finish(handle)

    def compute(self, sequence, result):
        self.num_tokens += len(sequence.token_ids)
        if sequence.sampling is not None:
            token = min(sequence.token_ids[-1] + 1, 98)
            if sequence.sequence_id in self.broken:
                token = BROKEN_ROW
            wants = self.started[sequence.sequence_id].params.logprobs is not None
            result.tokens = [SampledToken(token, TokenLogprob(token, -0.5) if wants else None)]
        result.prompt_logprobs = [TokenLogprob(token, -1.0) for token in sequence.scored_ids]


def make(num_blocks: int = 16, **config):
    settings = EngineConfig(block_size=4, max_model_len=64, **config)
    pool = BlockPool(num_blocks)
    scheduler = Scheduler(settings, pool, PrefixIndex(pool, block_size=4, identity=b"toy"))
    runner, clock = CountingRunner(), ManualClock()
    engine = Engine(scheduler, runner, clock, vocab_size=VOCAB, eos_token_ids=(EOS,))
    return engine, runner, clock


def ask(request_id="a", prompt=(1, 2, 3), timeout_s=None, **sampling):
    return AddRequest(
        request_id=request_id,
        prompt_ids=list(prompt),
        sampling=SamplingParams(**sampling),
        timeout_s=timeout_s,
    )


def drain(engine, limit=200):
    outputs = []
    for _ in range(limit):
        if not engine.has_requests:
            break
        outputs += engine.step()
    assert not engine.has_requests
    assert engine.get_stats().num_used_blocks == 0
    return outputs


def test_tokens_then_length():
    engine, _, _ = make()
    engine.add(ask(max_tokens=3))
    outputs = drain(engine)
    assert [o.token_ids for o in outputs] == [[4], [5], [6]]
    assert [o.finish_reason for o in outputs] == [None, None, FinishReason.LENGTH]
    assert outputs[0].prompt_len == 3
    assert outputs[-1].prompt_len == 3


def test_queue_time_is_told_with_the_first_output():
    engine, _, clock = make(max_running=1)
    engine.add(ask("a", max_tokens=2))
    engine.add(ask("b", max_tokens=1))
    outputs = []
    while engine.has_requests:
        clock.advance(1.0)
        outputs += engine.step()
    told = {(o.request_id, o.queue_s) for o in outputs if o.prompt_len}
    assert told == {("a", 1.0), ("b", 3.0)}


def test_eos_stops_and_is_not_text():
    engine, _, _ = make()
    engine.add(ask(prompt=(87, 88), max_tokens=9))
    outputs = drain(engine)
    assert [o.token_ids for o in outputs] == [[89], []]
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].stop_token_id == EOS


def test_the_token_that_ends_a_request_has_its_logprob():
    engine, _, _ = make()
    engine.add(ask("eos", prompt=(87, 88), max_tokens=9, logprobs=0))
    engine.add(ask("own", prompt=(10,), max_tokens=9, logprobs=0, stop_token_ids=(12,)))
    engine.add(ask("none", prompt=(87, 88), max_tokens=9))
    outputs = drain(engine)
    scored = {
        name: [e.token_id for o in outputs if o.request_id == name for e in o.logprobs or ()]
        for name in ("eos", "own", "none")
    }
    assert scored == {"eos": [89, EOS], "own": [11, 12], "none": []}


def test_ignore_eos_and_own_stop_ids():
    engine, _, _ = make()
    engine.add(ask("a", prompt=(88,), max_tokens=4, ignore_eos=True))
    engine.add(ask("b", prompt=(10,), max_tokens=9, stop_token_ids=(13,)))
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    for output in drain(engine):
        tokens[output.request_id] += output.token_ids
    assert tokens == {"a": [89, 90, 91, 92], "b": [11, 12]}


def test_second_prompt_reports_cached_tokens():
    engine, runner, _ = make()
    engine.add(ask("a", prompt=range(1, 12), max_tokens=1))
    drain(engine)
    before = runner.num_tokens
    engine.add(ask("b", prompt=[*range(1, 11), 50], max_tokens=1))
    outputs = drain(engine)
    assert outputs[0].cached_len == 10
    assert runner.num_tokens - before == 1


def test_prompt_logprobs_cover_the_prompt_and_forgo_the_cache():
    engine, _, _ = make(max_batch_tokens=64)
    engine.add(ask("a", prompt=range(1, 12), max_tokens=1))
    drain(engine)
    engine.add(ask("b", prompt=range(1, 12), max_tokens=0, prompt_logprobs=0))
    (output,) = drain(engine)
    assert output.cached_len == 0
    assert output.token_ids == []
    assert output.finish_reason is FinishReason.LENGTH
    assert output.prompt_logprobs is not None
    first, *rest = output.prompt_logprobs.unpack()
    assert first is None
    assert [p.token_id for p in rest if p] == list(range(2, 12))


def test_preempted_prompt_is_scored_once():
    """Two prompts that cannot finish together: one is put back midway and starts over."""
    engine, _, _ = make(num_blocks=9, max_batch_tokens=8, max_running=8)
    engine.add(ask("urgent", prompt=range(1, 9), max_tokens=24))
    engine.step()
    engine.add(ask("late", prompt=range(20, 44), max_tokens=2, prompt_logprobs=0))
    outputs = [o for o in drain(engine) if o.request_id == "late" and o.prompt_logprobs]
    assert [p.token_id for p in outputs[0].prompt_logprobs.unpack()[1:] if p] == list(range(21, 44))


def test_cancel_waiting_running_and_unknown():
    engine, _, _ = make(max_running=1)
    engine.add(ask("a", max_tokens=50))
    engine.add(ask("b", max_tokens=50))
    engine.step()
    assert engine.cancel("a")
    assert engine.cancel("b")
    assert not engine.cancel("b")
    assert not engine.cancel("nobody")
    outputs = drain(engine) + engine.step()
    assert {o.request_id: o.finish_reason for o in outputs} == {
        "a": FinishReason.CANCELLED,
        "b": FinishReason.CANCELLED,
    }


def test_cancel_during_the_step_frees_its_blocks_with_it():
    engine, runner, _ = make()
    engine.add(ask("a", max_tokens=50))
    engine.step()
    finish = runner.finish

    def cancel_meanwhile(handle):
        assert engine.cancel("a")
        return finish(handle)

    runner.finish = cancel_meanwhile
    (output,) = engine.step()
    assert output.finish_reason is FinishReason.CANCELLED
    assert output.token_ids == []
    assert engine.get_stats().num_used_blocks == 0


def test_deadline_ends_waiting_and_running():
    engine, _, clock = make(max_running=1)
    engine.add(ask("a", max_tokens=50, timeout_s=1.0))
    engine.add(ask("b", max_tokens=50, timeout_s=2.0))
    engine.step()
    clock.advance(5.0)
    outputs = drain(engine)
    assert {o.request_id for o in outputs if o.finish_reason is FinishReason.DEADLINE} == {"a", "b"}


def test_runner_failure_ends_its_requests_and_nothing_is_cached():
    engine, runner, _ = make()
    engine.add(ask("a", prompt=range(1, 12), max_tokens=4))
    runner.fails_next = True
    (output,) = engine.step()
    assert output.finish_reason is FinishReason.ERROR
    assert output.error_code == "internal"
    assert output.error_text == "the model failed: no memory", "what went wrong, and no place in us"
    assert not engine.has_requests
    assert engine.get_stats().num_used_blocks == 0
    # What the failed step was to compute must not be found by the next request.
    engine.add(ask("b", prompt=range(1, 12), max_tokens=1))
    assert drain(engine)[0].cached_len == 0


@pytest.mark.parametrize("num_bad", [1, 2, 9])
def test_a_failed_step_ends_those_alone_that_it_fails_for(num_bad):
    """Goal: whatever a request does to the runner, the others get their tokens, in few steps."""
    engine, runner, _ = make(num_blocks=64)
    names = [f"{i}" for i in range(9)]
    refused = set(names[3 : 3 + num_bad]) | set(names[: max(num_bad - 6, 0)])
    runner.refused = {int(name) + 1 for name in refused}
    for i, name in enumerate(names):
        engine.add(ask(name, prompt=(1, 2, 3 + i), max_tokens=3))
    outputs = drain(engine)
    ends = {o.request_id: o for o in outputs if o.finish_reason}
    for i, name in enumerate(names):
        if name in refused:
            assert ends[name].finish_reason is FinishReason.ERROR
            assert "a value that no step" in ends[name].error_text
        else:
            tokens = [t for o in outputs if o.request_id == name for t in o.token_ids]
            assert tokens == [4 + i, 5 + i, 6 + i]
            assert ends[name].finish_reason is FinishReason.LENGTH
    if num_bad == 1:
        assert len(runner.steps) <= 3 + 8, "halves, not one by one"
    assert engine.get_stats().num_used_blocks == 0


def test_a_step_in_halves_repeats_no_copy_of_the_other_half():
    """A copy clears the rest of its block, where the other half has computed tokens by then."""
    engine, runner, _ = make(num_blocks=64)
    engine.add(ask("first", prompt=range(1, 8), max_tokens=1))
    drain(engine)
    for name, token in (("a", 20), ("b", 30)):
        engine.add(ask(name, prompt=(1, 2, 3, 4, 5, token), max_tokens=2))
    runner.refused = {3}
    runner.steps.clear()
    drain(engine)
    assert len(runner.steps[0].copies) == 2
    for step in runner.steps[1:3]:
        (sequence,) = step.sequences
        (copy,) = step.copies
        assert pack_block_ids([copy.dst_block_id]) in sequence.block_table


def test_broken_row_ends_that_request_alone():
    engine, runner, _ = make()
    runner.broken = {1}
    engine.add(ask("a", max_tokens=4))
    engine.add(ask("b", max_tokens=2))
    outputs = drain(engine)
    ends = {o.request_id: o for o in outputs if o.finish_reason}
    assert ends["a"].finish_reason is FinishReason.ERROR
    assert ends["a"].token_ids == []
    assert ends["a"].error_text == "the model's logits are not numbers"
    assert ends["b"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("message", "error", "field"),
    [
        (ask(prompt=()), ConfigError, "prompt"),
        (ask(prompt=(VOCAB,)), ConfigError, "prompt"),
        (ask(prompt=(-1,)), ConfigError, "prompt"),
        (ask(prompt=[1] * 64), ConfigError, "prompt"),
        (ask(logit_bias={VOCAB: 1.0}), ConfigError, "logit_bias"),
        (ask(logit_bias={1: float("inf")}), ConfigError, "logit_bias"),
    ],
)
def test_refusals_name_the_field(message, error, field):
    engine, _, _ = make()
    with pytest.raises(error) as caught:
        engine.add(message)
    assert caught.value.field == field
    assert not engine.has_requests


def test_queue_is_bounded_and_ids_are_unique():
    engine, _, _ = make(max_running=1, max_queue=1)
    engine.add(ask("a"))
    with pytest.raises(ConflictError):
        engine.add(ask("a"))
    engine.add(ask("b"))
    with pytest.raises(CapacityError):
        engine.add(ask("c"))
    drain(engine)
    engine.add(ask("c", max_tokens=1))
    drain(engine)


def test_waiting_for_work_wakes_on_add_and_gives_up_in_time():
    engine, _, _ = make()
    assert not engine.wait_for_work(0.01)
    timer = threading.Timer(0.05, lambda: engine.add(ask()))
    timer.start()
    assert engine.wait_for_work(10.0)
    timer.join()

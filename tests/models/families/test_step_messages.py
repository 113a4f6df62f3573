"""Steps as messages: they travel, drafts are verified exactly, plans made ahead change no token.

Method: a tiny model through the real runner and engine.
"""

import time

import llguidance
import msgspec
import pytest
from loading import load_checkpoint

from tandem.core.clock import MonotonicClock
from tandem.core.wire import AddRequest, FinishReason, SamplingParams, TokenLogprob
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.scheduling.blocks import BlockCopy, BlockPool
from tandem.engine.scheduling.prefix_index import PrefixIndex
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.stepping.grammar import Grammars
from tandem.engine.stepping.messages import (
    Logits,
    Phase,
    SampledToken,
    SamplingRow,
    SequenceResult,
    SequenceStart,
    StateCopy,
    StepInput,
    StepResult,
    StepSequence,
    pack_block_ids,
    select_sequences,
)
from tandem.engine.stepping.torch_runner import TorchRunner
from tandem.models.tokenizing.grammars import write_grammar

SIZE = 16
WAIT_S = 60
PROMPT = [(7 * i) % 120 + 3 for i in range(21)]
SAMPLING = SamplingParams(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.2)


def make_decode(sequence_id: int, num_tokens: int) -> StepSequence:
    return StepSequence(
        sequence_id=sequence_id,
        phase=Phase.DECODE,
        start=num_tokens,
        token_ids=[sequence_id],
        block_table=pack_block_ids(range(-(-num_tokens // 64))),
        logits=Logits.LAST,
        sampling=SamplingRow(7),
        state_slot=sequence_id,
    )


def test_a_part_of_a_step_copies_its_own_states():
    step = StepInput(
        [make_decode(number, 10) for number in (1, 2)],
        state_loads=[StateCopy(7, 1), StateCopy(8, 2)],
        state_saves=[StateCopy(1, 9), StateCopy(2, 5)],
    )
    part = select_sequences(step, step.sequences[1:])
    assert part.state_loads == [StateCopy(8, 2)]
    assert part.state_saves == [StateCopy(2, 5)]


def test_messages_are_the_same_after_a_journey():
    params = SamplingParams(logit_bias={3: 0.5}, stop_token_ids=(4,), logprobs=2)
    step = StepInput(
        [make_decode(5, 1000)],
        [BlockCopy(1, 2, 3)],
        [SequenceStart(5, params, 11, (4, 9), [1, 2], [3])],
        [4],
        [StateCopy(9, 0)],
        [StateCopy(0, 8)],
    )
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
    assert decode(encode(step), type=StepInput) == step
    token = SampledToken(3, TokenLogprob(3, -0.5, [(3, -0.5)]))
    result = StepResult([SequenceResult(5, [token], [TokenLogprob(1, -2.0)])])
    assert decode(encode(result), type=StepResult) == result


@pytest.fixture
def model(checkpoint):
    return load_checkpoint(checkpoint("qwen3_moe"), dtype="float32")


def make_letters():
    """A vocabulary whose token ``i`` is the character ``i``; 5 ends a text."""

    class Letters:
        is_tokenizer_wrapper = True
        bos_token_id = None
        eos_token_id = 5
        tokens = [bytes([i]) for i in range(128)]
        special_token_ids = [5]

        def __call__(self, text):
            return list(text if isinstance(text, bytes) else text.encode())

    return llguidance.LLTokenizer(Letters(), n_vocab=128, eos_token=[5])


GUIDED = msgspec.structs.replace(SAMPLING, grammar=write_grammar("regex", "[a-d]{3}[0-9]{30}"))


class Decoder:
    """One sequence on a runner of its own."""

    def __init__(self, model, sampling=SAMPLING) -> None:
        cache = model.allocate_kv(8, block_size=SIZE)
        grammars = Grammars(make_letters)
        if sampling.grammar:
            grammars.prepare(sampling.grammar, lambda: None)  # As the engine does for a request.
        self.runner = TorchRunner(model, cache, threads=1, grammars=grammars)
        self.sampling = sampling
        self.output: list[int] = []

    def run(self, start, token_ids, phase, starts=()) -> list[int]:
        sequence = StepSequence(
            sequence_id=1,
            phase=phase,
            start=start,
            token_ids=list(token_ids),
            block_table=pack_block_ids((6, 1, 4)),
            logits=Logits.ALL if phase is Phase.VERIFY else Logits.LAST,
            sampling=SamplingRow(len(self.output)),
        )
        limit, token_ids = time.monotonic() + WAIT_S, []
        # On a busy machine a mask may be late: the step samples nothing, and is done again.
        while not token_ids and time.monotonic() < limit:
            result = self.runner.finish(self.runner.begin(StepInput([sequence], [], list(starts))))
            token_ids = [token.token_id for token in result.sequences[0].tokens]
            starts = ()
        assert token_ids, "no mask in time"
        self.output += token_ids
        return token_ids

    def prefill(self) -> None:
        start = SequenceStart(1, self.sampling, 17, (), PROMPT, [])
        self.run(0, PROMPT, Phase.PREFILL, [start])


@pytest.mark.parametrize("sampling", [SAMPLING, GUIDED], ids=["free", "guided"])
def test_verified_drafts_give_the_tokens_of_plain_decodes(model, sampling):
    """Whatever was guessed; penalties, draws and a grammar count accepted tokens, once."""
    plain = Decoder(model, sampling)
    plain.prefill()
    while len(plain.output) < 12:
        plain.run(len(PROMPT) + len(plain.output) - 1, plain.output[-1:], Phase.DECODE)
    expected = plain.output
    accepted = []
    guesses = (expected[1:4], [expected[4 + 1], 5, 9], [1, 2])
    if sampling.grammar:
        text = bytes(expected).decode()
        assert text[:3].strip("abcd") == ""
        assert text[3:].isdigit()
    verifier = Decoder(model, sampling)
    verifier.prefill()
    for drafts in guesses:
        start = len(PROMPT) + len(verifier.output) - 1
        accepted.append(len(verifier.run(start, [verifier.output[-1], *drafts], Phase.VERIFY)))
    assert verifier.output == expected[: len(verifier.output)]
    assert accepted[0] == 4
    assert max(accepted[1:]) <= 2


def run_requests(model, overlap: str) -> dict[str, tuple]:
    """What some requests get that are cancelled, stopped, preempted and cut in small chunks."""
    config = EngineConfig(
        block_size=SIZE, max_model_len=96, max_batch_tokens=24, max_running=6, overlap=overlap
    )
    pool = BlockPool(5)
    is_overlapped = overlap == "on"
    runner = TorchRunner(
        model, model.allocate_kv(5, block_size=SIZE), threads=1, is_overlapped=is_overlapped
    )
    scheduler = Scheduler(config, pool, PrefixIndex(pool, SIZE))
    # Admission leaves room for growth; without, requests are preempted.
    state = scheduler._state
    state.count_lookahead = lambda request: state.count_blocks(request.num_expected_tokens)
    engine = Engine(
        scheduler,
        runner,
        MonotonicClock(),
        vocab_size=128,
        eos_token_ids=(5,),
        is_overlapped=is_overlapped,
    )
    for i in range(6):
        sampling = SamplingParams(
            max_tokens=30,
            temperature=float(i % 2),
            seed=i,
            logprobs=1,
            repetition_penalty=1.1,
            prompt_logprobs=0 if i == 4 else None,
        )
        prompt_ids = PROMPT[: 10 + 2 * i] + [i + 1] * i
        engine.add(AddRequest(request_id=f"r{i}", prompt_ids=prompt_ids, sampling=sampling))
    got: dict[str, list] = {}
    reasons: dict[str, FinishReason] = {}
    for step in range(1000):
        if step == 9:
            engine.cancel("r5")
        if not engine.has_requests:
            break
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.token_ids)
            got[output.request_id].extend(output.logprobs or [])
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
    assert not engine.has_requests
    engine.step()
    engine._scheduler.check()
    assert engine.get_stats().num_used_blocks == 0
    assert engine.get_stats().num_preemptions > 0
    assert reasons.pop("r5") is FinishReason.CANCELLED
    del got["r5"]
    return {name: (tuple(map(str, got[name])), reasons[name]) for name in reasons}


def test_plans_made_ahead_give_the_same_tokens(model):
    assert run_requests(model, "on") == run_requests(model, "off")

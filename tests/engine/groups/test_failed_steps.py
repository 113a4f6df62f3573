"""Goal: a step that fails halfway spoils no state of the requests that go on.

Method: a runner whose next token follows from all tokens that the sequence's slot has seen.
"""

from step_runner import StepRunner

from tandem.core.clock import ManualClock
from tandem.core.wire import AddRequest, FinishReason, SamplingParams
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.groups.reuse import StatePolicy
from tandem.engine.scheduling.blocks import BlockPool
from tandem.engine.scheduling.prefix_index import PrefixIndex
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.stepping.messages import SampledToken

NUM_SLOTS = 6


class SumRunner(StepRunner):
    """Moves states on before it finds out that a step cannot be computed."""

    def __init__(self) -> None:
        super().__init__()
        self.states = [-1] * NUM_SLOTS
        self.refused: set[int] = set()

    def begin(self, step, on_layer=None):
        inner = super().begin(step, on_layer)

        def run():
            for copy in step.state_loads:
                self.states[copy.target] = self.states[copy.source]
            for sequence in step.sequences:
                slot = sequence.state_slot
                if not sequence.start:
                    self.states[slot] = 0
                for token in sequence.token_ids:
                    self.states[slot] = self.states[slot] * 7 + token
            if any(sequence.sequence_id in self.refused for sequence in step.sequences):
                raise RuntimeError("a value that no step can be computed with")
            result = inner()
            for copy in step.state_saves:
                self.states[copy.target] = self.states[copy.source]
            return result

        return run

    def compute(self, sequence, result):
        if sequence.sampling is not None:
            result.tokens = [SampledToken(self.states[sequence.state_slot] % 89)]


def run(refused_step: int):
    """Three requests, of which one is refused from a step on; the answers of the others."""
    config = EngineConfig(block_size=4, max_model_len=64, max_batch_tokens=64)
    pool = BlockPool(32)
    index = PrefixIndex(pool, block_size=4, identity=b"toy")
    scheduler = Scheduler(config, pool, index, states=StatePolicy(NUM_SLOTS, 0, min_gain=1))
    runner = SumRunner()
    engine = Engine(scheduler, runner, ManualClock(), vocab_size=100, eos_token_ids=(90,))
    # The first leaves a snapshot that the second loads.
    for number, prompt in enumerate(([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7], [8, 9], [4, 4])):
        sampling = SamplingParams(max_tokens=6)
        engine.add(AddRequest(request_id=f"{number}", prompt_ids=prompt, sampling=sampling))
        if number == 0:
            while engine.has_requests:
                engine.step()
    answers: dict[str, list[int]] = {}
    for step in range(40):
        if step == refused_step:
            runner.refused = {4}
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is FinishReason.ERROR:
                assert output.request_id == "3"
        if not engine.has_requests:
            break
    assert not engine.has_requests
    stats = engine.get_stats()
    assert stats.prefix_hit_tokens == 5
    scheduler.check()
    return {name: tokens for name, tokens in answers.items() if name != "3"}


def test_states_are_computed_anew_before_a_step_is_repeated():
    expected = run(refused_step=99)
    assert {name: len(tokens) for name, tokens in expected.items()} == {"1": 6, "2": 6}
    for step in (0, 1, 3):
        assert run(step) == expected

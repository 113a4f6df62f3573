"""Engines of tiny models with sparse attention, whose latents lie in a file or in memory."""

import msgspec

from tandem.core.clock import MonotonicClock
from tandem.core.wire import AddRequest, SamplingParams
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.models.config import ModelConfig

PROMPTS = [[(7 * i * i + 3 * n) % 120 + 3 for i in range(n)] for n in (150, 61, 90)]
LONGER = [*PROMPTS[0][:117], 8, 9, *PROMPTS[1]]
"""Begins with seven blocks of the first prompt, and five tokens of an eighth."""


def configure(memory="", folder="", **settings):
    sizes = {"kv_cache_gib": 0.01, "block_size": 16, "max_batch_tokens": 64, **settings}
    return EngineConfig(latents_in_memory=memory, latents_folder=str(folder), **sizes)


def build(path, memory="", folder="", dtype="bfloat16", **settings):
    model = ModelConfig(path=str(path), dtype=dtype, packed_cache="off")
    return build_engine(model, configure(memory, folder, **settings), MonotonicClock())


class Talk:
    """Requests of an engine, with what it has said of each."""

    def __init__(self, engine):
        self.engine = engine
        self.tokens, self.scores, self.last = {}, {}, {}

    def add(self, name, prompt, max_tokens=20):
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=2
        )
        self.engine.add(AddRequest(request_id=name, prompt_ids=prompt, sampling=sampling))
        self.tokens[name], self.scores[name] = [], []

    def step(self, count=1):
        for _ in range(count):
            for output in self.engine.step():
                name = output.request_id
                self.tokens[name] += output.token_ids
                self.scores[name] += [msgspec.to_builtins(x) for x in output.logprobs or []]
                self.last[name] = output

    def finish(self):
        for _ in range(2000):
            if not self.engine.has_requests:
                return self
            self.step()
        raise AssertionError("requests are left")

    def said(self, name):
        """Tokens and log-probabilities of a request."""
        return self.tokens[name], self.scores[name]


def generate(engine, prompts, max_tokens=20):
    """The outputs of each prompt, all at once: (tokens, log-probabilities), and its last one."""
    talk = Talk(engine)
    for i, prompt in enumerate(prompts):
        talk.add(str(i), prompt, max_tokens)
    talk.finish()
    names = list(map(str, range(len(prompts))))
    return [talk.said(name) for name in names], [talk.last[name] for name in names]

"""An engine of a tiny model, and a way to ask it: tokens with their log-probabilities."""

from tandem.core.clock import MonotonicClock
from tandem.core.wire import AddRequest, SamplingParams
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.models.config import ModelConfig

NUM_TOKENS = 12


def make_prompt(length, number=0):
    return [(7 * i * i + 11 * number * i + 3 + number) % 120 + 3 for i in range(length)]


class ChatEngine:
    """Args: a model's folder, settings of the model, and those of the engine."""

    def __init__(self, folder, *, model=None, **settings) -> None:
        sizes = {"num_kv_blocks": 64, "block_size": 16, "max_batch_tokens": 64, "max_running": 8}
        config = EngineConfig(**(sizes | settings))
        fields = {"dtype": "bfloat16", "packed_cache": "off", "proof": "off"} | (model or {})
        loaded = ModelConfig(path=str(folder), **fields)
        self.built = build_engine(loaded, config, MonotonicClock())
        self.engine = self.built.engine
        self.num_asked = 0

    def ask(self, *prompts, message_end=0, max_tokens=NUM_TOKENS):
        """Answer prompts, all at once; tokens with their log-probabilities."""
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=1.0, seed=5, ignore_eos=True, logprobs=2
        )
        answers = {}
        for prompt in prompts:
            self.num_asked += 1
            name = f"{self.num_asked}"
            answers[name] = []
            self.engine.add(
                AddRequest(
                    request_id=name, prompt_ids=prompt, sampling=sampling, message_end=message_end
                )
            )
        self.cached = dict.fromkeys(answers, 0)
        for _ in range(2000):
            if not self.engine.has_requests:
                break
            for output in self.engine.step():
                assert output.error_text is None, output.error_text
                name = output.request_id
                self.cached[name] = max(self.cached[name], output.cached_len)
                answers[output.request_id] += zip(output.token_ids, output.logprobs, strict=True)
        assert not self.engine.has_requests
        return list(answers.values())

    def remember(self):
        """A function that answers one prompt, and each only once."""
        known = {}

        def ask(prompt):
            if tuple(prompt) not in known:
                [known[tuple(prompt)]] = self.ask(prompt)
            return known[tuple(prompt)]

        return ask

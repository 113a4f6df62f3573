"""Vectors of prompts: those of transformers on the same weights, whatever else a step computes.

Method: tiny models through the real scheduler, engine and runner.
"""

import numpy as np
import pytest
import torch
from loading import load_checkpoint

from tandem.core.clock import MonotonicClock
from tandem.core.errors import ConfigError, UnsupportedError
from tandem.core.wire import AddRequest, Pooling, SamplingParams
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.scheduling.blocks import BlockPool
from tandem.engine.scheduling.prefix_index import PrefixIndex
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.stepping.pooling import HiddenSum
from tandem.engine.stepping.torch_runner import TorchRunner

SIZE = 16
PROMPTS = [[(7 * i + 3 * k) % 120 + 3 for i in range(19 + 9 * k)] for k in range(3)]


class Pooler:
    """An engine of one tiny model."""

    def __init__(self, model, max_batch_tokens: int, num_blocks: int = 40) -> None:
        config = EngineConfig(
            block_size=SIZE, max_model_len=96, max_batch_tokens=max_batch_tokens, max_running=6
        )
        pool = BlockPool(num_blocks)
        self._runner = TorchRunner(model, model.allocate_kv(num_blocks, block_size=SIZE), threads=1)
        self.scheduler = Scheduler(config, pool, PrefixIndex(pool, SIZE))
        self.engine = Engine(
            self.scheduler,
            self._runner,
            MonotonicClock(),
            vocab_size=128,
            num_labels=model.spec.num_labels,
            eos_token_ids=(),
        )

    def add(self, name: str, prompt: list[int], pooling: Pooling | None, **params) -> None:
        params = {"max_tokens": 0 if pooling else 20, "pooling": pooling} | params
        self.engine.add(
            AddRequest(request_id=name, prompt_ids=prompt, sampling=SamplingParams(**params))
        )

    def run(self) -> dict[str, np.ndarray]:
        """Run all requests; return the vectors by name."""
        vectors = {}
        for _ in range(1000):
            if not self.engine.has_requests:
                break
            for output in self.engine.step():
                if output.pooled is not None:
                    assert output.finish_reason == "length"
                    vectors[output.request_id] = np.frombuffer(output.pooled, "<f4")
        assert not self.engine.has_requests
        self.scheduler._state.check()
        return vectors


@pytest.fixture
def folder(checkpoint):
    return checkpoint("qwen3_moe")


@pytest.fixture
def classifier(tmp_path, make_config):
    """A checkpoint with a head of labels, as transformers saves it."""
    from transformers import AutoModelForSequenceClassification

    config = make_config("qwen3", num_labels=3, pad_token_id=0, tie_word_embeddings=True)
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "classifier")
    return tmp_path / "classifier"


def compute_hidden(folder, prompt):
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([prompt])).last_hidden_state[0].numpy()


PLAIN = {"dtype": "float32", "expert_format": "none", "linear_format": "none"}


def test_hidden_states_are_those_of_transformers(folder):
    pooler = Pooler(load_checkpoint(folder, **PLAIN), 24)
    for kind in (Pooling.LAST, Pooling.MEAN):
        for number, prompt in enumerate(PROMPTS):
            pooler.add(f"{kind} {number}", prompt, kind)
    vectors = pooler.run()
    for number, prompt in enumerate(PROMPTS):
        hidden = compute_hidden(folder, prompt)
        np.testing.assert_allclose(vectors[f"last {number}"], hidden[-1], rtol=2e-4, atol=2e-5)
        mean = hidden.mean(axis=0)
        np.testing.assert_allclose(vectors[f"mean {number}"], mean, rtol=2e-4, atol=2e-5)


def test_names_without_the_model_are_found(folder, edit_weights, edit_config):
    expected = compute_hidden(folder, PROMPTS[0])[-1]
    edit_weights(
        folder,
        lambda tensors: tensors.update(
            {n.removeprefix("model."): tensors.pop(n) for n in [*tensors] if n[:6] == "model."}
        ),
    )
    pooler = Pooler(load_checkpoint(folder, **PLAIN), 24)
    pooler.add("a", PROMPTS[0], Pooling.LAST)
    np.testing.assert_allclose(pooler.run()["a"], expected, rtol=2e-4, atol=2e-5)


def test_scores_are_those_of_transformers(classifier):
    from transformers import AutoModelForSequenceClassification

    reference = AutoModelForSequenceClassification.from_pretrained(classifier, dtype=torch.float32)
    model = load_checkpoint(classifier, **PLAIN)
    assert (model.spec.num_labels, model.spec.architecture) == (3, "Qwen3ForSequenceClassification")
    pooler = Pooler(model, 24)
    for number, prompt in enumerate(PROMPTS):
        pooler.add(str(number), prompt, Pooling.SCORE)
    vectors = pooler.run()
    for number, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            expected = reference.eval()(torch.tensor([prompt])).logits[0].numpy()
        np.testing.assert_allclose(vectors[str(number)], expected, rtol=2e-4, atol=2e-5)
    with pytest.raises(UnsupportedError, match="generates no text"):
        pooler.add("text", PROMPTS[0], None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_vector_depends_on_its_prompt_alone(folder, dtype):
    """Bitwise: in company, in chunks, with a cached prefix, after a preemption."""
    model = load_checkpoint(folder, dtype=dtype)
    for kind in (Pooling.LAST, Pooling.MEAN):
        alone = []
        for prompt in PROMPTS:
            pooler = Pooler(model, 96)
            pooler.add("a", prompt, kind)
            alone.append(pooler.run()["a"].tobytes())
        for max_batch_tokens, num_blocks in ((96, 40), (24, 40), (8, 7)):
            pooler = Pooler(model, max_batch_tokens, num_blocks)
            for number, prompt in enumerate(PROMPTS):
                pooler.add(f"text {number}", prompt[: 5 + number], None)
                pooler.add(str(number), prompt, kind)
            together = pooler.run()
            assert [together[str(k)].tobytes() for k in range(3)] == alone
            pooler.add("again", PROMPTS[2], kind)
            assert pooler.run()["again"].tobytes() == alone[2]
            stats = pooler.engine.get_stats()
            if num_blocks == 40:
                assert (stats.prefix_hit_tokens > 0) == (kind is Pooling.LAST)


def test_a_chunk_that_comes_again_is_not_counted_twice():
    rows = np.random.default_rng(3).normal(size=(150, 8)).astype(np.float32)
    total = HiddenSum()
    total.add(0, rows[:100])
    total.add(100, rows[100:])
    mean = total.add(100, rows[100:])
    np.testing.assert_allclose(mean, rows.mean(axis=0, dtype=np.float64), rtol=1e-12)
    assert HiddenSum().add(0, rows).tobytes() == mean.tobytes()
    total.add(0, rows[:70])
    assert total.add(70, rows[70:]).tobytes() == mean.tobytes()


def test_requests_that_make_no_sense_are_refused(folder):
    pooler = Pooler(load_checkpoint(folder, dtype="float32"), 24)
    with pytest.raises(UnsupportedError, match="no head that classifies"):
        pooler.add("a", PROMPTS[0], Pooling.SCORE)
    with pytest.raises(ConfigError, match="generates nothing"):
        pooler.add("b", PROMPTS[0], Pooling.LAST, max_tokens=1)

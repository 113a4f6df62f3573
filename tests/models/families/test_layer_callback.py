"""Goal: a step announces each layer's KV when its bytes are final, and while the step still runs.

Method: at each call, the bytes of all layers are kept. Those of the layer must be the bytes that
the step leaves; those of later layers must be untouched.
"""

import pytest
import torch
from loading import load_checkpoint

from quick import rest_slow
from tandem.core.wire import SamplingParams
from tandem.engine.scheduling.blocks import BlockCopy
from tandem.engine.stepping.messages import (
    Logits,
    Phase,
    SamplingRow,
    SequenceStart,
    StepInput,
    StepSequence,
    pack_block_ids,
)
from tandem.engine.stepping.torch_runner import TorchRunner
from tandem.kernels import paged

PROMPT = [(7 * i) % 120 + 3 for i in range(45)]
NUM_LAYERS = 3


WAYS = [("native", "auto"), ("native", "int8"), ("skeleton", "auto"), ("torch", "float16")]
OTHER_WAYS = [("native", "float16"), ("skeleton", "float16"), ("skeleton", "int8")]
OTHER_WAYS += [("torch", "auto")]


@pytest.fixture(params=rest_slow(["-".join(way) for way in WAYS], map("-".join, WAYS + OTHER_WAYS)))
def way(request):
    return request.param.split("-")


@pytest.fixture
def model(way, checkpoint, monkeypatch, tmp_path):
    rules = None
    if way[0] == "torch":
        monkeypatch.setattr(paged, "is_native", lambda tensor: False)
    if way[0] == "skeleton":
        rules = tmp_path / "rules.yaml"
        rules.write_text("- {match: {name: '.*'}, replace: {class: default}}")
    return load_checkpoint(checkpoint("qwen3_moe"), dtype="float32", rules=rules)


@pytest.fixture
def cache(way, model):
    return model.allocate_kv(8, block_size=16, kv_dtype=way[1])


def prefill(runner, start, end, copies=(), on_layer=None):
    is_last = end == len(PROMPT)
    sequence = StepSequence(
        sequence_id=1,
        phase=Phase.PREFILL,
        start=start,
        token_ids=PROMPT[start:end],
        block_table=pack_block_ids((6, 1, 4)),
        logits=Logits.LAST if is_last else Logits.NONE,
        sampling=SamplingRow(0) if is_last else None,
    )
    params = SamplingParams(max_tokens=1)
    starts = [SequenceStart(1, params, 1, (), [], [])] if is_last else []
    step = StepInput([sequence], list(copies), starts)
    return runner.finish(runner.begin(step, on_layer)).sequences[0]


class Watcher:
    """Keeps what all layers hold at each call."""

    def __init__(self, cache):
        self.cache = cache
        self.layers = []
        self.seen = []

    def __call__(self, layer_idx):
        self.layers.append(layer_idx)
        self.seen.append(self.cache.tensor.clone())


def test_bytes_are_final_when_announced(model, cache):
    runner = TorchRunner(model, cache, threads=1)
    cache.tensor[2] = 1
    copies = [BlockCopy(2, 6, 4)]
    for start, end in ((4, 30), (30, 45)):
        watcher = Watcher(cache)
        result = prefill(runner, start, end, copies, watcher)
        copies = []
        assert watcher.layers == list(range(NUM_LAYERS))
        for layer, seen in enumerate(watcher.seen):
            assert torch.equal(seen[:, : layer + 1], cache.tensor[:, : layer + 1])
            written = [6, 1] if start == 4 else [1, 4]
            for later in range(layer + 1, NUM_LAYERS):
                for block in written:
                    assert not torch.equal(seen[block, later], cache.tensor[block, later])
    assert len(result.tokens) == 1


def test_the_step_is_the_same_without(model, cache):
    runner = TorchRunner(model, cache, threads=1)
    runs = []
    for watcher in (None, Watcher(cache)):
        cache.tensor.zero_()
        result = prefill(runner, 0, 45, on_layer=watcher)
        runs.append((cache.tensor.clone(), result.tokens))
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


def test_what_the_callback_raises_ends_the_step(model, cache):
    runner = TorchRunner(model, cache, threads=1)

    def fail(layer_idx):
        if layer_idx == 1:
            raise ConnectionError("the peer is gone")

    with pytest.raises(ConnectionError):
        prefill(runner, 0, 45, on_layer=fail)
    # The runner goes on with the next step.
    watcher = Watcher(cache)
    prefill(runner, 0, 45, on_layer=watcher)
    assert watcher.layers == list(range(NUM_LAYERS))

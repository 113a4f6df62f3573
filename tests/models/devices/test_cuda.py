"""Goal: every family answers on a GPU as on the CPU, captured decodes and uploads among it.

Protects: operators of torch, whose kernels differ by device, and memory that a graph or a copy
reads too early or too late. Method: a tiny odd checkpoint a family through the whole engine in
float32. Tokens are those of the CPU, or log-probabilities are as near as sums in another order
are. Needs a CUDA device.
"""

import pytest
import torch
from odd_configs import MODEL_TYPES, make_odd

from tandem.bench.serving.stored import SHAPE, write_random_gguf
from tandem.core.clock import MonotonicClock
from tandem.core.wire import AddRequest, SamplingParams
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.models.config import ModelConfig
from tandem.models.families.registry import choose_auto_class

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
MAX_ERROR = 2e-3
"""Of a log-probability: sums of float32 in another order, through a few layers."""
MAX_CODED_ERROR = 0.05
"""The same where activations become codes, which such a sum may turn to the next one."""


@pytest.fixture(autouse=True)
def whole_float32():
    """Keep products in float32: the CPU has no shorter kind."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def generate(folder, device, expert_device="auto", *, size=128, vocab_size=131, **wishes):
    """Return tokens and their log-probabilities of each prompt; batches shrink as requests end."""
    lengths = [(size // 4, size // 5), (size // 8, 5), (size // 2, size // 4)]
    config = EngineConfig(kv_cache_gib=0.01, block_size=16, max_batch_tokens=64)
    model = ModelConfig(
        path=str(folder),
        device=device,
        expert_device=expert_device,
        dtype="float32",
        packed_cache="off",
        **wishes,
    )
    engine = build_engine(model, config, MonotonicClock()).engine
    found = []
    # The second time, prompts begin with what the first has left.
    for turn in range(2):
        for i, (prompt_len, length) in enumerate(lengths):
            prompt = [(7 * j * j + 3 * i) % (vocab_size - 9) + 5 for j in range(prompt_len)]
            sampling = SamplingParams(
                max_tokens=length, temperature=0.0, ignore_eos=True, logprobs=2
            )
            engine.add(AddRequest(request_id=f"{turn}-{i}", prompt_ids=prompt, sampling=sampling))
        sequences = {f"{turn}-{i}": [] for i in range(len(lengths))}
        for _ in range(500):
            if not engine.has_requests:
                break
            for output in engine.step():
                assert output.error_text is None, output.error_text
                sequences[output.request_id] += zip(
                    output.token_ids, output.logprobs or (), strict=True
                )
        assert not engine.has_requests
        found += sequences.values()
    return found


def check_near(found, wanted, max_error=MAX_ERROR):
    """Compare up to the first token that two nearly equal log-probabilities decide."""
    for ours, theirs in zip(found, wanted, strict=True):
        assert len(ours) == len(theirs)
        for (token, logprobs), (other, expected) in zip(ours, theirs, strict=True):
            assert abs(logprobs.logprob - expected.logprob) < max_error
            if token != other:
                best, next_best = (value for _, value in expected.top[:2])
                assert best - next_best < 2 * max_error
                break


@pytest.mark.parametrize("name", MODEL_TYPES)
def test_a_family_answers_as_on_the_cpu(name, tmp_path):
    torch.manual_seed(5)
    config = make_odd(name, 1)
    model = choose_auto_class(config).from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    size = min(getattr(config, "max_position_embeddings", None) or 128, 128)
    sizes = {"size": size, "vocab_size": config.vocab_size, "expert_format": "none"}
    wanted = generate(tmp_path, "cpu", **sizes)
    check_near(generate(tmp_path, "cuda:0", "cuda:0", **sizes), wanted)


@pytest.mark.parametrize("deferred", [0, 1])
@pytest.mark.parametrize(("max_uploads", "device_experts"), [(0, 0), (4, 0), (4, 3)])
@pytest.mark.parametrize("stream_tokens", [0, 8])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_experts_of_the_host_beside_the_device(
    checkpoint, name, deferred, max_uploads, device_experts, stream_tokens
):
    folder = checkpoint(name, hidden_size=128, moe_intermediate_size=128)
    wishes = {"expert_format": "int8g32", "deferred_experts": deferred}
    wanted = generate(folder, "cpu", **wishes)
    found = generate(
        folder,
        "cuda:0",
        max_uploads=max_uploads,
        device_experts=device_experts,
        stream_tokens=stream_tokens,
        **wishes,
    )
    if max_uploads or stream_tokens:
        # The device multiplies numbers, the host codes of the input: other roundings.
        assert [len(sequence) for sequence in found] == [len(sequence) for sequence in wanted]
        for ours, theirs in zip(found, wanted, strict=True):
            assert abs(ours[0][1].logprob - theirs[0][1].logprob) < 0.2
    else:
        check_near(found, wanted, MAX_CODED_ERROR)


def test_a_gguf_file_whose_experts_stay_on_the_host(tmp_path):
    """Codes are decoded on the host and copied; both round, so the start is compared."""
    path = tmp_path / "model.gguf"
    shape = SHAPE | {"num_hidden_layers": 2, "hidden_size": 256, "vocab_size": 512}
    write_random_gguf(path, shape, "q4_k_m")
    wanted = generate(path, "cpu", vocab_size=512)
    found = generate(path, "cuda:0", vocab_size=512)
    for ours, theirs in zip(found, wanted, strict=True):
        assert len(ours) == len(theirs)
        assert abs(ours[0][1].logprob - theirs[0][1].logprob) < 0.2

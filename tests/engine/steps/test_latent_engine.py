"""A DeepSeek-V3 through the whole engine: sizing, scheduling, prefix reuse, identity of its KV.

Method: a tiny random checkpoint in bfloat16 and float32. Tokens are compared with transformers'
greedy ones, cached with uncached runs, and what the plan says with what is there.
"""

import pytest

torch = pytest.importorskip("torch", reason="models need the `serve` extra")
transformers = pytest.importorskip("transformers", reason="models need the `serve` extra")

from tandem.core.clock import MonotonicClock  # noqa: E402 - after the skip
from tandem.core.spec import MlaLayout  # noqa: E402
from tandem.core.wire import AddRequest, SamplingParams  # noqa: E402
from tandem.engine.build import build_engine  # noqa: E402
from tandem.engine.config import EngineConfig  # noqa: E402
from tandem.models.config import ModelConfig  # noqa: E402

SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 512,
}
PROMPT = [(7 * i * i + 3) % 120 + 3 for i in range(75)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Transformers' model and its folder; every weight and bias random."""
    torch.manual_seed(3)
    config = transformers.DeepseekV3Config(**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("norm.weight"):
                tensor.normal_(1, 0.2)
            elif name.endswith("e_score_correction_bias"):
                tensor.normal_(0, 0.2)
            elif tensor.dim() > 1:
                tensor.normal_(0, tensor.shape[-1] ** -0.5)
    folder = tmp_path_factory.mktemp("deepseek_v3")
    model.save_pretrained(folder)
    return model, folder


def build(folder, dtype="bfloat16", **settings):
    config = EngineConfig(kv_cache_gib=0.01, block_size=16, max_batch_tokens=64, **settings)
    model = ModelConfig(path=str(folder), dtype=dtype, packed_cache="off")
    return build_engine(model, config, MonotonicClock())


def generate(engine, prompts, max_tokens=24):
    """Tokens of each prompt and how many of the prompt's tokens were cached, all at once."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add(AddRequest(request_id=str(i), prompt_ids=prompt, sampling=sampling))
    tokens = {str(i): [] for i in range(len(prompts))}
    cached = dict.fromkeys(tokens, 0)
    for _ in range(2000):
        if not engine.has_requests:
            break
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            cached[output.request_id] = max(cached[output.request_id], output.cached_len)
    assert not engine.has_requests
    return list(tokens.values()), list(cached.values())


def test_greedy_tokens_are_transformers(reference):
    model, folder = reference
    (ours,), _ = generate(build(folder, "float32").engine, [PROMPT])
    with torch.no_grad():
        theirs = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False, eos_token_id=None
        )
    assert ours == theirs[0, len(PROMPT) :].tolist()


def test_a_reused_prefix_changes_no_token(reference):
    """In bfloat16, where another order of summation would show: alone, cached, in company."""
    _, folder = reference
    prompts = [PROMPT, [*PROMPT[:60], 5, 6, 7], [*PROMPT[:33], *[9] * 20]]
    alone = [generate(build(folder).engine, [prompt])[0][0] for prompt in prompts]
    engine = build(folder).engine
    (first,), (nothing,) = generate(engine, [PROMPT])
    tokens, cached = generate(engine, prompts)
    assert [first, *tokens] == [alone[0], *alone]
    assert nothing == 0
    assert cached[1] == 60
    assert cached[2] == 33


def test_blocks_hold_latents_and_are_sized_as_planned(reference):
    _, folder = reference
    built = build(folder, kv_dtype="int8")
    layout = built.model.kv_layout(16, "int8")
    assert layout == MlaLayout(
        num_layers=3, kv_lora_rank=32, rope_dim=8, block_size=16, dtype="int8"
    )
    assert layout.bytes_per_token == 3 * (40 + 2)
    (tokens,), _ = generate(built.engine, [PROMPT])
    assert len(tokens) == 24


def test_identity_tells_latents_apart(reference):
    _, folder = reference
    model = build(folder).model
    identity = model.kv_identity(model.kv_layout(16))
    assert isinstance(identity.layout, MlaLayout)
    assert identity.config["kv_lora_rank"] == "32"
    assert identity == build(folder).model.kv_identity(model.kv_layout(16))
    assert identity != model.kv_identity(model.kv_layout(16, "int8"))

"""Goal: a quantized GGUF runs from its codes, and computes what its values say.

Method: tiny models are written in every type, from blocks that llama.cpp's own quantizer made
(``fixtures/gguf_blocks.json``), in another order and times a power of two. Loaded with the plan's
formats, which keep the codes, their logits are compared with the same file's, decoded to float32
tensors: what is between them is the coding of activations to int8, or to bf16, and nothing else.
"""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_writing import write_model
from loading import load_checkpoint
from test_gguf_blocks import HALVES
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, Qwen3MoeConfig

from tandem.engine.config import EngineConfig
from tandem.engine.planning import plan_engine
from tandem.models.codecs.gguf_blocks import BLOCK_TYPES
from tandem.models.config import ModelConfig
from tandem.models.loading.loader import load_model
from tandem.models.planning.planner import plan_model
from tandem.models.sources.gguf_header import BLOCK_SIZES

FIXTURES = json.loads((Path(__file__).parents[1] / "fixtures" / "gguf_blocks.json").read_text())
SHRINK = 4
"""Powers of two by which Gaussian weights become those of a row of 256."""

LARGEST_ERROR = 0.025
"""Of all logits, as a norm: int8 codes of activations, over two layers and a head; 0.007 to 0.015
is seen."""

COMMON = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "eos_token_id": 2,
    "pad_token_id": None,
}
# All experts a token: a choice would fall otherwise now and then, and logits with it.
MOE = {"moe_intermediate_size": 256, "num_experts": 3, "num_experts_per_tok": 3}


def make_codes(weights: np.ndarray, kind: str) -> np.ndarray:
    """Return blocks of llama.cpp's for a tensor of this shape; its own values do not count."""
    if kind not in FIXTURES:
        return draw_codes(weights, kind)
    block, size = BLOCK_SIZES[kind]
    made = np.frombuffer(base64.b64decode(FIXTURES[kind]["blocks"]), np.uint8).reshape(-1, size)
    made = made.copy()
    if kind == "MXFP4":
        made[:, 0] -= SHRINK
    for at in HALVES[kind]:
        halves = np.ascontiguousarray(made[:, at : at + 2]).view(np.float16)
        made[:, at : at + 2] = (halves / np.float16(2**SHRINK)).view(np.uint8)
    rng = np.random.default_rng(len(weights.ravel()))
    chosen = made[rng.integers(0, len(made), weights.size // block)]
    return chosen.reshape(*weights.shape[:-1], -1)


def draw_codes(weights: np.ndarray, kind: str) -> np.ndarray:
    """Return random codes whose values are about as large as those of ``make_codes``."""
    block, size = BLOCK_SIZES[kind]
    raw = np.random.default_rng(1).integers(0, 256, (weights.size // block, size), dtype=np.uint8)
    if kind == "Q2_K":
        # As large a minimum as a scale: with 1.5 times the step, values have the mean 0.
        raw[:, :16] = (raw[:, :16] & 15) * 17
    if kind == "NVFP4":
        raw[:, :4] = 0x0C + raw[:, :4] % 4
    steps = {"Q2_K": -8, "Q3_K": -10, "IQ4_XS": -14, "IQ3_XXS": -11, "IQ3_S": -11}
    step = 2.0 ** steps.get(kind, -10)
    for at, factor in zip(HALVES[kind], (1.0, 1.5), strict=False):
        raw[:, at : at + 2] = np.array([step * factor], np.float16).view(np.uint8)
    return raw.reshape(*weights.shape[:-1], -1)


def write(path: Path, config: Any, kind: str | Callable[[str, tuple[int, ...]], str]) -> None:
    generator = torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for tensor in model.parameters():
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.data = 1 + 0.1 * noise if tensor.dim() < 2 else noise * tensor.shape[-1] ** -0.5
    floats = ("F16", "BF16")
    write_model(
        model, path, kind, quantize=None if kind in floats else lambda w, k: make_codes(w, k)
    )


def compare(path: Path, open_session: Any) -> tuple[Any, float]:
    """Return the plan that keeps codes, and the distance of its logits from the decoded model's."""
    tokens = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    plan = plan_model(path, dtype="bfloat16")
    model = load_model(plan)
    ours = open_session(model).run(tokens)
    tensors = load_checkpoint(path, dtype="float32", linear_format="none", expert_format="none")
    theirs = open_session(tensors).run(tokens)
    # Rows of the embedding are read from codes, and are bitwise those of the decoded matrix.
    ids = torch.tensor([95, 0, 3, 64, 3])
    rows = [m.skeleton.model.embed_tokens(ids) for m in (model, tensors)]
    assert torch.equal(rows[0], rows[1].bfloat16())
    # Biases of packed matrices are counted by the plan alone.
    assert model.weight_bytes <= plan.weight_bytes
    return plan, float((ours - theirs).norm() / theirs.norm())


SLOW = (
    *("IQ2_XS", "IQ2_S", "IQ3_XXS", "NVFP4"),
    *("Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q5_K", "IQ4_NL"),
    *("Q8_0", "Q6_K", "IQ3_S", "BF16"),
)
"""Types that the ones beside them are like; ``test_gguf_stored`` has all of them."""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] if kind in SLOW else [])
        for kind in (*BLOCK_TYPES, "F16", "BF16")
    ],
)
def test_logits_of_every_type(kind, tmp_path, open_session):
    """Attention, experts and head run from codes; the router and norms have values."""
    path = tmp_path / "model.gguf"
    write(path, Qwen3MoeConfig(**COMMON, **MOE, norm_topk_prob=True), kind)
    plan, distance = compare(path, open_session)
    wanted = BLOCK_TYPES[kind].weight_format if kind in BLOCK_TYPES else "bf16"
    assert plan.spec.checkpoint_dtype == ("float16" if kind == "F16" else "bfloat16")
    formats = {m.role: m.weight_format for m in plan.matrices}
    assert formats == {
        "embedding": wanted if kind in BLOCK_TYPES else "none",
        "qkv": wanted,
        "attention_out": wanted,
        "experts": wanted,
        "router": "bf16",
        "head": wanted,
    }
    assert distance < LARGEST_ERROR
    if kind in BLOCK_TYPES:
        stored = sum(m.stored_bytes for m in plan.matrices)
        coded = ("qkv", "experts", "head", "embedding")
        reasons = {m.reason for m in plan.matrices if m.role in coded}
        assert reasons == {f"as the checkpoint stores it: {kind}"}
        assert stored > 0


def mix(name: str, shape: tuple[int, ...]) -> str:
    """As in Q4_K_M: more bits for values and down projections of every other layer."""
    if name.startswith("output") or (("attn_v" in name or "ffn_down" in name) and "blk.1" in name):
        return "Q6_K"
    return "Q4_K"


def plan_file(path):
    """Return the engine's plan of a file."""
    return plan_engine(ModelConfig(path=str(path)), EngineConfig(max_model_len=64))


def test_each_matrix_of_a_mixed_file_has_its_own_format(tmp_path, open_session):
    """Also parts of one product: q and k are in one, v in another."""
    path = tmp_path / "model.gguf"
    write(path, LlamaConfig(**COMMON), mix)
    plan, distance = compare(path, open_session)
    formats = {(m.module, m.role): m.weight_format for m in plan.matrices}
    layer = "model.layers.1"
    assert formats[f"{layer}.self_attn", "qkv"] == "q4k+q6k"
    assert formats[f"{layer}.self_attn", "attention_out"] == "q4k"
    assert formats[f"{layer}.mlp", "gate_up"] == "q4k"
    assert formats[f"{layer}.mlp", "down"] == "q6k"
    assert formats["lm_head", "head"] == "q6k"
    assert formats["model.layers.0.self_attn", "qkv"] == "q4k"
    assert distance < LARGEST_ERROR
    # The plan says what is stored and computed, and nothing of experts that there are none of.
    rows = {what: (value, why) for what, value, why in plan_file(path).rows()}
    value, why = rows["linear"]
    assert [held.split()[0] for held in value.split(", ")] == ["q4k", "q6k", "q4k+q6k"]
    assert why == "as the checkpoint stores it: Q4_K, Q6_K, Q4_K and Q6_K; products of int8"
    assert "matrices are codes" in rows["dtype"][1]
    assert not [what for what in rows if "expert" in what]
    packed = sum(m.size_bytes for m in plan.matrices if m.role != "embedding")
    stored = sum(m.stored_bytes for m in plan.matrices if m.role != "embedding")
    assert packed >= stored
    # The head's 96 outputs are two panels.
    assert packed <= 1.02 * stored + 32 * 210


def test_down_projections_of_experts_have_a_format_of_their_own(tmp_path, open_session):
    """Gate and up in Q4_K, down in Q6_K, the codes of all kept."""
    path = tmp_path / "model.gguf"
    write(path, Qwen3MoeConfig(**COMMON, **MOE, norm_topk_prob=True), mix)
    plan, distance = compare(path, open_session)
    formats = {m.module: m.weight_format for m in plan.matrices if m.role == "experts"}
    names = [f"model.layers.{i}.mlp.experts" for i in (0, 1)]
    assert formats == dict(zip(names, ("q4k", "q4k+q6k"), strict=True))
    rows = {what: value for what, value, _ in plan_file(path).rows()}
    assert [held.split()[0] for held in rows["experts"].split(", ")] == ["q4k+q6k", "q4k"]
    assert rows["expert parts"]
    assert distance < LARGEST_ERROR


def test_a_tied_head_takes_the_codes_of_the_embedding(tmp_path, open_session):
    path = tmp_path / "model.gguf"
    write(path, LlamaConfig(**COMMON, tie_word_embeddings=True), "Q6_K")
    plan, distance = compare(path, open_session)
    found = {m.role: m for m in plan.matrices}
    assert found["head"].weight_format == found["embedding"].weight_format == "q6k"
    # One matrix, whose bytes are the head's.
    assert found["embedding"].size_bytes == 0
    assert found["head"].size_bytes == 2 * 64 * 210
    assert distance < LARGEST_ERROR
    asked = load_checkpoint(path, dtype="bfloat16", linear_format="int8g128")
    formats = {m.role: m.weight_format for m in asked.plan.matrices}
    assert (formats["embedding"], formats["head"]) == ("none", "int8g128")
    assert asked.weight_bytes == asked.plan.weight_bytes


def test_experts_of_gpt_oss_keep_their_mxfp4(tmp_path, open_session):
    """Inputs first and columns in turn in the skeleton; rows of two tensors in the file."""
    path = tmp_path / "model.gguf"
    sizes = COMMON | {"intermediate_size": 256, "sliding_window": 20}
    config = GptOssConfig(**sizes, num_local_experts=3, num_experts_per_tok=3)
    write(path, config, lambda name, _: "MXFP4" if "_exps" in name else "Q8_0")
    plan, distance = compare(path, open_session)
    formats = {m.role: m.weight_format for m in plan.matrices}
    assert (formats["experts"], formats["qkv"]) == ("mxfp4", "int8g32")
    assert distance < LARGEST_ERROR


def test_a_wish_goes_before_the_file(tmp_path, open_session):
    """Codes are decoded and coded anew, or recoded where the wished format holds them."""
    path = tmp_path / "model.gguf"
    write(path, LlamaConfig(**COMMON), "Q4_K")
    for wish in ("bf16", "int8g16min", "int8g128"):
        plan = plan_model(path, dtype="bfloat16", linear_format=wish)
        assert {m.weight_format for m in plan.matrices if m.role != "embedding"} == {wish}
    exact = load_checkpoint(path, dtype="bfloat16", linear_format="int8g16min")
    kept = load_checkpoint(path, dtype="bfloat16")
    logits = [open_session(model).run(list(range(30))) for model in (exact, kept)]
    assert float((logits[0] - logits[1]).norm() / logits[1].norm()) < LARGEST_ERROR


def test_what_weights_are_kept_as_is_in_the_identity_of_kv(tmp_path):
    """KV of a model with other formats is not shared."""
    path = tmp_path / "model.gguf"
    write(path, LlamaConfig(**COMMON), mix)
    models = [load_checkpoint(path, dtype="bfloat16", linear_format=f) for f in ("auto", "bf16")]
    kept, plain = (model.kv_identity(model.kv_layout(64)) for model in models)
    assert kept.formats["model.layers.1.self_attn.qkv_"] == "q4k+q6k"
    assert kept.formats["model.layers.1.mlp.down_"] == "q6k"
    assert kept.weights == plain.weights
    assert kept != plain

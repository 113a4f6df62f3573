"""Goal: a GGUF file means to us what it means to llama.cpp.

Method: the tiny models of ``test_gguf_families``, written once more, are run by llama.cpp itself in
a process of its own; its logits over a prompt must be ours. Skipped where the venv of llama.cpp
that ``tandem bench model --with-peers`` makes is not there: building it takes ten minutes.
"""

from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from gguf_writing import write_model
from loading import load_checkpoint
from test_gguf_families import COMMON, MODELS, WHOLE_KV, make_model
from test_gguf_formats import make_codes, mix
from tokenizers import models
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tandem.bench.rivals.llama_rivals import PEERS
from tandem.bench.rivals.processes import RivalProcess, find_rival
from tandem.models.gguf.mixtures import MIXTURES
from tandem.models.gguf_export import export_gguf

PYTHON = find_rival("llama-cpp", PEERS["llama.cpp"])
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="llama-cpp-python is not installed as a peer"),
]

NOT_THERE = ("minimax_m2", "deepseek_v2 lite", "phimoe")
"""What llama.cpp ends with at these sizes; it takes uncompressed queries with 27 layers only, and
gives the experts of Phi-3.5-MoE a softmax of both scores where transformers has one of each."""

TOLERANCE = 0.02
"""Of all logits, as a norm: llama.cpp keeps KV in fp16, and codes activations as it likes."""


@pytest.fixture(scope="module")
def peer():
    with RivalProcess(PYTHON, "llama_cpp_rival.py", "llama.cpp") as process:
        yield process


def score(peer: RivalProcess, path: Path, tokens: list[int]) -> torch.Tensor:
    peer.call("load", path=str(path), threads=1, context_len=128, num_sequences=1)
    return torch.tensor(peer.call("score", prompt=tokens))


def without_choice(changes: dict) -> dict:
    """All experts a token, and all tokens, so that no rounding chooses another one; no window where
    llama.cpp applies none (Phi-3), or a shorter one (MiMo); no bias of short convolutions, which it
    does not read."""
    counts = [n for n in ("num_experts", "num_local_experts", "n_routed_experts") if n in changes]
    names = [n for n in ("moe_topk", "top_k_experts") if n in changes] or ["num_experts_per_tok"]
    chosen = {names[0]: changes[counts[0]]} if counts else {}
    if "n_group" in changes:
        chosen |= {"n_group": 1, "topk_group": 1}
    if "topk_method" in changes:
        chosen |= {"topk_method": "greedy"}
    if changes.get("conv_bias"):
        chosen |= {"conv_bias": False}
    if "index_topk" in changes:
        chosen |= {"index_topk": 64}
    if "attention_value_scale" in changes:
        chosen |= {"sliding_window": 64}
    return changes | chosen


@pytest.mark.parametrize("name", [name for name in MODELS if name not in NOT_THERE])
def test_logits_are_those_of_llama_cpp(name, peer, tmp_path, open_session):
    """Of every architecture: names, permutations, RoPE, windows, caps, routing, sinks."""
    model_type, changes = MODELS[name]
    changes = without_choice(changes) | ({"sliding_window": None} if name == "phi3" else {})
    generator = torch.Generator().manual_seed(0)
    values = COMMON | changes
    if model_type == "nemotron_h":
        values.pop("rope_parameters")
    if model_type == "mistral4":
        values.pop("head_dim")
    config = CONFIG_MAPPING[model_type](**values)
    model = make_model(config)
    for tensor in model.parameters():
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.data = 1 + 0.1 * noise if tensor.dim() < 2 else noise * tensor.shape[-1] ** -0.5
    path = tmp_path / "model.gguf"
    write_model(
        model,
        path,
        metadata=lambda writer: writer.add_tokenizer_model("no_vocab"),
        has_whole_kv=name in WHOLE_KV,
    )
    tokens = torch.randint(4, 131, (40,), generator=generator).tolist()
    ours = open_session(load_checkpoint(path, dtype="float32")).run(tokens)
    theirs = score(peer, path, tokens)
    assert float((ours - theirs).norm() / theirs.norm()) < TOLERANCE


@pytest.mark.parametrize(
    "kind",
    [
        *("Q4_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "IQ4_XS"),
        *("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "mixed"),
    ],
)
def test_quantized_logits_are_those_of_llama_cpp(kind, peer, tmp_path, open_session):
    """From codes on both sides, each with its own way to code activations."""
    sizes = COMMON | {"vocab_size": 96, "hidden_size": 256, "intermediate_size": 512}
    config = LlamaConfig(**sizes | {"num_attention_heads": 4, "head_dim": 64})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    path = tmp_path / "model.gguf"
    write_model(
        model,
        path,
        mix if kind == "mixed" else kind,
        quantize=make_codes,
        metadata=lambda writer: writer.add_tokenizer_model("no_vocab"),
    )
    tokens = torch.randint(4, 96, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    ours = open_session(load_checkpoint(path, dtype="bfloat16")).run(tokens)
    theirs = score(peer, path, tokens)
    assert float((ours - theirs).norm() / theirs.norm()) < 2.5 * TOLERANCE


SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "head_dim": 64}


@pytest.mark.parametrize("name", MIXTURES)
def test_what_is_converted_is_what_llama_cpp_quantizes(
    name, peer, checkpoint, tmp_path, open_session
):
    """Types and bytes of every tensor, by its own quantizer; and it runs what we wrote."""
    folder = checkpoint(
        "qwen3", **SIZES, vocab_size=320, num_key_value_heads=2, num_attention_heads=4
    )
    (folder / "tokenizer.json").write_text(tokenizers.Tokenizer(models.BPE()).to_str())
    export_gguf(folder, name, tmp_path / "ours")
    (ours,) = (tmp_path / "ours").glob("*.gguf")
    plain, theirs = tmp_path / "plain.gguf", tmp_path / "theirs.gguf"
    write_model(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        plain,
        metadata=lambda writer: writer.add_tokenizer_model("no_vocab"),
    )
    file_type = MIXTURES[name].file_type
    assert peer.call("quantize", path=str(plain), out=str(theirs), file_type=file_type) == 0
    tensors = [
        {t.name: (t.tensor_type.name, t.data.tobytes()) for t in gguf.GGUFReader(path).tensors}
        for path in (ours, theirs)
    ]
    kinds = [{name: kind for name, (kind, _) in own.items()} for own in tensors]
    assert kinds[0] == kinds[1]
    for tensor, (_, data) in tensors[0].items():
        # Sums in another order choose another scale where two are as good.
        pair = [np.frombuffer(own, np.uint8) for own in (data, tensors[1][tensor][1])]
        assert (pair[0] != pair[1]).mean() < 0.005, tensor
    tokens = torch.randint(4, 320, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    wanted = score(peer, ours, tokens)
    got = open_session(load_checkpoint(ours, dtype="bfloat16")).run(tokens)
    # Eight layers, each with activations in int8 on both sides.
    assert float((got - wanted).norm() / wanted.norm()) < 3 * TOLERANCE

"""Gradients through whole tiny models of several families, against transformers' own."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quick import rest_slow
from tandem._native import ThreadPool
from tandem.core.errors import UnsupportedError
from tandem.finetune.forecast.fake_step import StepShape, _run_step, simulate_step
from tandem.finetune.training.model import load_frozen
from tandem.kernels.cpu.delta_scan import NativeScan
from tandem.kernels.cpu.experts import PackedExperts
from tandem.models.loading.skeleton import build_skeleton
from tandem.models.planning.describe import Describer
from tandem.models.planning.layers import list_layers
from tandem.models.proof.tiny import make_tiny, save_tiny

COMMON = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "n_routed_experts": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
STATES = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
FAMILIES = {
    "llama": {},
    "qwen3_moe": MOE,
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 48},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "deepseek_v3": {**MOE, **LATENT},
    "qwen3_next": {**MOE, **STATES, "shared_expert_intermediate_size": 48},
    "kimi_linear": {
        **{key: LATENT[key] for key in LATENT if key.endswith(("_dim", "_rank", "_heads"))},
        "moe_intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "linear_num_heads": 2,
        "linear_head_dim": 24,
    },
    "lfm2_moe": {
        **MOE,
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
    },
    # transformers saves its convolution in three parts of one size, whatever heads have.
    "olmo_hybrid": {**STATES, "linear_value_head_dim": 8},
}
LARGEST_ANGLE = 0.02
"""Experts see activations rounded to bf16: a relative error of 2^-9 in each of a few products."""


def make_config(name: str, **changes) -> PretrainedConfig:
    values = {**COMMON, **FAMILIES[name], **changes}
    for key in {"layer_types", "mlp_layer_types"} & values.keys():
        values[key] = values[key] * (values["num_hidden_layers"] // 2)
    return CONFIG_MAPPING[name](**values)


def find_gradient(model, ids: torch.Tensor) -> torch.Tensor:
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embedded, labels=ids).loss.backward()
    return embedded.grad


def measure_angle(name: str, folder: Path) -> float:
    """Return how far our gradient is from transformers', relative to its length."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(make_config(name), dtype=torch.float32)
    for key, parameter in plain.named_parameters():
        # Far from uniform, so that no score of a router is near another; exact in bf16.
        scale = 0.125 if parameter.dim() > 1 else 0.05
        offset = 1.0 if key.endswith("norm.weight") else 0.0
        noise = torch.randn(parameter.shape) * scale + offset
        parameter.data = noise.bfloat16().float()
        parameter.requires_grad_(requires_grad=False)
    plain.save_pretrained(folder)
    frozen = load_frozen(str(folder), expert_format="bf16", pool=ThreadPool(2)).model
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(4))
    wanted, got = find_gradient(plain, ids), find_gradient(frozen, ids)
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    "name", rest_slow([n for n in FAMILIES if n not in ("mixtral", "olmoe", "qwen2_moe")], FAMILIES)
)
def test_gradients_of_the_input(name, tmp_path):
    """From the loss back through heads, experts, routers and attention to the embeddings."""
    assert measure_angle(name, tmp_path) < (1e-5 if name == "llama" else LARGEST_ANGLE)


@pytest.mark.parametrize("part", [0, 1], ids=["input", "router weights"])
def test_a_wrong_gradient_of_experts_is_seen(part, tmp_path, monkeypatch):
    """The bound is narrow enough for a fifth of either gradient that experts give."""
    whole = PackedExperts.backward

    def scale(*arguments, **options):
        gradients = list(whole(*arguments, **options))
        gradients[part] *= 0.8
        return tuple(gradients)

    monkeypatch.setattr(PackedExperts, "backward", scale)
    assert measure_angle("qwen3_moe", tmp_path) > LARGEST_ANGLE


def test_experts_without_a_gate_are_refused(tmp_path):
    """They are served; nothing here takes a gradient through them."""
    config = CONFIG_MAPPING["nemotron_h"](
        **COMMON | {"layers_block_type": ["full_attention", "moe"], "n_routed_experts": 4}
    )
    save_tiny(make_tiny(config, 0), tmp_path)
    with pytest.raises(UnsupportedError, match="without a gate"):
        load_frozen(str(tmp_path), pool=ThreadPool(2))


def test_a_wrong_gradient_of_a_recurrence_is_seen(tmp_path, monkeypatch):
    """It is the native one; a fifth less of what flows to its values is beyond the bound."""
    scan = NativeScan.__call__

    def scale(self, q, k, v, *rest):
        return scan(self, q, k, v.detach() + 0.8 * (v - v.detach()), *rest)

    monkeypatch.setattr(NativeScan, "__call__", scale)
    assert measure_angle("olmo_hybrid", tmp_path) > LARGEST_ANGLE


def test_answers_with_a_cache_are_those_without(tmp_path):
    """A hybrid's tokens that follow one by one take transformers' own way, with its cache."""
    torch.manual_seed(0)
    save_tiny(make_tiny(make_config("qwen3_next"), 0), tmp_path)
    model = load_frozen(str(tmp_path), pool=ThreadPool(2)).model
    prompt = torch.arange(3, 15)[None]
    plain = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None}
    with torch.no_grad():
        cached, whole = (model.generate(prompt, use_cache=kept, **plain) for kept in (True, False))
    assert torch.equal(cached, whole)


# Layers of two kinds, with experts and without.
@pytest.mark.parametrize("name", rest_slow(["deepseek_v3"], FAMILIES))
def test_every_family_takes_a_step_without_memory(name, adapt):
    """No operation depends on values, and one layer of each kind shows what all layers need."""
    shape = StepShape(
        num_rows=2,
        num_tokens=16,
        is_bf16=False,
        has_packed_experts=True,
        has_packed_linear=False,
        is_checkpointed=False,
    )

    def make():
        return build_skeleton(make_config(name, num_hidden_layers=4), None)

    layers = list_layers(Describer(build_skeleton(make_config(name, num_hidden_layers=4))))
    few = simulate_step(make, layers, shape, adapt)
    whole = _run_step(make(), list(range(4)), shape, adapt)
    assert few.kept_bytes == pytest.approx(whole.kept_bytes, rel=0.01)
    assert few.native_flops == whole.native_flops
    assert few.torch_flops == whole.torch_flops

"""Tiny random hybrids: Qwen3-Next, three of whose layers have a state and one KV, and others."""

from transformers import (
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    Lfm2MoeConfig,
    Qwen3NextConfig,
)

from tandem.models.proof.tiny import make_tiny, save_tiny

SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 40,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
CHANNELS = 2 * 2 * 16 + 4 * 40
STATE_BYTES = 3 * (4 * 2 * 16 * 32 * 4 + 3 * CHANNELS * 2)
"""Three layers in bfloat16: matrices in float32, inputs that the convolution carries."""


SHORT_CONVOLUTIONS = {
    "vocab_size": 131,
    "hidden_size": 72,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_dense_layers": 1,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
STATE_SPACES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 64,
    "shared_intermediate_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}


KIMI_DELTA = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 32,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_kimi_delta(place):
    save_tiny(make_tiny(KimiLinearConfig(**KIMI_DELTA), 0), place)
    return place


def save_short_convolutions(place):
    save_tiny(make_tiny(Lfm2MoeConfig(**SHORT_CONVOLUTIONS), 0), place)
    return place


def save_state_spaces(place):
    save_tiny(make_tiny(GraniteMoeHybridConfig(**STATE_SPACES), 0), place)
    return place


def save_hybrid(place):
    save_tiny(make_tiny(Qwen3NextConfig(**SIZES), 0), place)
    return place

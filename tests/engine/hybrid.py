"""A tiny random Qwen3-Next: three layers with a state, one with KV."""

from transformers import Qwen3NextConfig

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


def save_hybrid(place):
    save_tiny(make_tiny(Qwen3NextConfig(**SIZES), 0), place)
    return place

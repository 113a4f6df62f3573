"""A tiny random GLM-5: attention that chooses its tokens, by an index that layers share."""

from transformers import GlmMoeDsaConfig

from tandem.models.proof.tiny import make_tiny, save_tiny

TOP = 40
"""Tokens that a token attends to: fewer than most chats have."""
SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "index_topk": TOP,
    "index_n_heads": 8,
    "index_head_dim": 24,
    "indexer_types": ["full", "shared", "full", "shared"],
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}


def save_sparse(place):
    save_tiny(make_tiny(GlmMoeDsaConfig(**SIZES), 0), place)
    return place

"""Sizes of published models: two layers of each family for `tandem bench families`, and six layers
of GLM-4.7-Flash and Gemma 4 26B-A4B for `tandem bench model`.

Each family is represented by one of its smaller models, in which the overhead of a step weighs
most. The numbers of layers, of experts and of the vocabulary are cut so that memory stays below 8
GB; all widths and the experts per token are the model's.
"""

from typing import Any

__all__ = [
    "GEMMA4_SHAPE",
    "GLM_FLASH_SHAPE",
    "PUBLISHED_SIZES",
    "QUICK_GEMMA4_SHAPE",
    "QUICK_GLM_FLASH_SHAPE",
    "TOY_SIZES",
]

COMMON: dict[str, Any] = {
    "vocab_size": 8192,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOY_SIZES: dict[str, Any] = COMMON | {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "query_pre_attn_scalar": 128,
    "sliding_window": 64,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 16,
    "num_local_experts": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
}


def _make(hidden: int, heads: int, kv_heads: int, head_dim: int, inner: int, **others: Any) -> Any:
    return {
        **COMMON,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": inner,
        **others,
    }


def _make_moe(moe_inner: int, count: int, top_k: int, **others: Any) -> dict[str, Any]:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return {
        "moe_intermediate_size": moe_inner,
        "num_experts_per_tok": top_k,
        **dict.fromkeys(names, count),
        **others,
    }


PUBLISHED_SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama-3.2-1B", _make(2048, 32, 8, 64, 8192)),
    "mistral": ("Mistral-7B", _make(4096, 32, 8, 128, 14336, sliding_window=4096)),
    "qwen2": ("Qwen2.5-0.5B", _make(896, 14, 2, 64, 4864)),
    "qwen3": ("Qwen3-0.6B", _make(1024, 16, 8, 128, 3072)),
    "gemma2": (
        "Gemma-2-2B",
        _make(2304, 8, 4, 256, 9216, query_pre_attn_scalar=256, sliding_window=4096),
    ),
    "gemma3_text": (
        "Gemma-3-1B",
        _make(1152, 4, 1, 256, 6912, query_pre_attn_scalar=256, sliding_window=512),
    ),
    "phi3": ("Phi-3-mini", _make(3072, 32, 32, 96, 8192, sliding_window=2047)),
    "glm4": ("GLM-4-9B", _make(4096, 32, 2, 128, 13696)),
    "mixtral": ("Mixtral-8x7B", _make(4096, 32, 8, 128, 14336) | _make_moe(14336, 4, 2)),
    "qwen2_moe": (
        "Qwen1.5-MoE-A2.7B",
        _make(2048, 16, 16, 128, 5632)
        | _make_moe(1408, 16, 4, shared_expert_intermediate_size=5632),
    ),
    "qwen3_moe": ("Qwen3-30B-A3B", _make(2048, 32, 4, 128, 6144) | _make_moe(768, 32, 8)),
    "olmoe": ("OLMoE-1B-7B", _make(2048, 16, 16, 128, 1024) | _make_moe(1024, 32, 8)),
    "glm4_moe": ("GLM-4.5-Air", _make(4096, 96, 8, 128, 10944) | _make_moe(1408, 16, 8)),
    "minimax_m2": ("MiniMax-M2", _make(3072, 48, 8, 128, 1536) | _make_moe(1536, 16, 8)),
    "deepseek_v2": (
        "DeepSeek-V2-Lite",
        _make(2048, 16, 16, 64, 10944, q_lora_rank=None) | _make_moe(1408, 16, 6),
    ),
    "deepseek_v3": ("DeepSeek-V3", _make(7168, 128, 128, 64, 18432) | _make_moe(2048, 16, 8)),
    "deepseek_v32": (
        "DeepSeek-V3.2",
        _make(7168, 128, 128, 64, 18432) | _make_moe(2048, 16, 8),
    ),
    "glm_moe_dsa": ("GLM-5", _make(6144, 64, 64, 64, 12288) | _make_moe(2048, 16, 8)),
    "gpt_oss": (
        "gpt-oss-20b",
        _make(2880, 64, 8, 64, 2880, sliding_window=128) | _make_moe(2880, 16, 4),
    ),
}
"""Sizes by family: (name of the model they are from, the sizes)."""

GLM_FLASH_SHAPE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 10_240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 6,
    "mlp_layer_types": ["dense", *["sparse"] * 5],
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "vocab_size": 32_000,
}
QUICK_GLM_FLASH_SHAPE = GLM_FLASH_SHAPE | {
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "mlp_layer_types": ["dense", "sparse"],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
}
GEMMA4_SHAPE: dict[str, Any] = {
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "moe_intermediate_size": 704,
    "num_hidden_layers": 6,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],
    "sliding_window": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": False,
    "vocab_size": 32_000,
}
"""Sizes of Gemma 4. The head is not tied to the embedding: with random tied weights each token
would predict itself.
"""
QUICK_GEMMA4_SHAPE = GEMMA4_SHAPE | {
    "hidden_size": 256,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 64,
    "global_head_dim": 128,
    "num_experts": 8,
    "top_k_experts": 2,
    "vocab_size": 512,
}

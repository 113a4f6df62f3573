"""Configurations as the hub has them: the switches of published models, at their sizes.

No weights are made of these sizes: a proof shrinks them.
"""

from collections.abc import Iterable
from typing import Any

import pytest

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
LATENT_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}),
    "llama-3.1": (
        "llama",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "llama-tied-biases": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "mistral": ("mistral", {"sliding_window": 4096, "head_dim": 128}),
    "qwen2": ("qwen2", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen2-yarn": (
        "qwen2",
        {
            "num_key_value_heads": 8,
            "rope_parameters": {**YARN, "original_max_position_embeddings": 32768},
        },
    ),
    "qwen2-windows": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 4096,
            "max_window_layers": 16,
            "num_key_value_heads": 8,
        },
    ),
    "qwen3": ("qwen3", {"num_key_value_heads": 8, "head_dim": 128}),
    "gemma2": ("gemma2", {}),
    "gemma3_text": ("gemma3_text", {"num_hidden_layers": 26, "sliding_window": 512}),
    # E2B: keys and values of 20 layers are those of two others.
    "gemma4_text": (
        "gemma4_text",
        {
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_hidden_layers": 35,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 30.0,
            "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
        },
    ),
    "gemma4_text-of-26b-a4b": (
        "gemma4_text",
        {
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 1024,
            "final_logit_softcapping": 30.0,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
        },
    ),
    "gemma4_unified_text": (
        "gemma4_unified_text",
        {
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "final_logit_softcapping": 30.0,
        },
    ),
    "phi3": ("phi3", {"sliding_window": 2047}),
    "phi-4-mini": (
        "phi3",
        {
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    # Phi-3-mini-128k's switches; its factors are 48 numbers that grow alike.
    "phi-3-128k": (
        "phi3",
        {
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "sliding_window": 262144,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0 + 0.04 * i for i in range(48)],
                "long_factor": [1.0 + 1.3 * i for i in range(48)],
            },
        },
    ),
    "glm4": ("glm4", {"attention_bias": True}),
    "mixtral": ("mixtral", {}),
    "qwen2_moe": ("qwen2_moe", {"num_key_value_heads": 16}),
    "qwen3_moe": (
        "qwen3_moe",
        {"norm_topk_prob": True, "head_dim": 128, "num_key_value_heads": 4},
    ),
    "qwen3_moe-mixed": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    "olmoe": ("olmoe", {}),
    "glm4_moe": (
        "glm4_moe",
        {
            "head_dim": 128,
            "num_attention_heads": 96,
            "hidden_size": 5120,
            "use_qk_norm": True,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
        },
    ),
    "glm4_moe-groups": ("glm4_moe", {"head_dim": 128, "n_group": 8, "topk_group": 4}),
    # Scout.
    "llama4_text": (
        "llama4_text",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0001,
                "original_max_position_embeddings": 8192,
            }
        },
    ),
    "mimo_v2_flash": ("mimo_v2_flash", {}),
    "ministral3": ("ministral3", {}),
    "mistral4": ("mistral4", {}),
    "minimax_m2": ("minimax_m2", {"rotary_dim": 64, "hidden_size": 3072}),
    "gpt_oss": ("gpt_oss", {}),
    # Fields that name code to run, and those that transformers does not read, left out.
    "kimi_linear": (
        "kimi_linear",
        {
            "num_experts": 256,
            "num_experts_per_token": 8,
            "first_k_dense_replace": 1,
            "linear_attn_config": {
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "kda_layers": [i for i in range(1, 27) if i % 4],
                "head_dim": 128,
                "num_heads": 32,
                "short_conv_kernel_size": 4,
            },
        },
    ),
    "qwen3_next": ("qwen3_next", {"norm_topk_prob": True, "intermediate_size": 5120}),
    "qwen3_5_text": (
        "qwen3_5_text",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
            }
        },
    ),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {}),
    "olmo_hybrid": (
        "olmo_hybrid",
        {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
    ),
    "olmo_hybrid-rotated": ("olmo_hybrid", {"linear_allow_neg_eigval": False}),
    "lfm2": (
        "lfm2",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "block_ffn_dim_multiplier": 1.0,
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {
            "num_hidden_layers": 6,
            "layer_types": ["conv", "conv", "full_attention", "conv", "conv", "full_attention"],
        },
    ),
    "bamba": ("bamba", {"attn_layer_indices": [9, 18, 27]}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            "num_hidden_layers": 10,
            "layer_types": ["mamba"] * 5 + ["attention"] + ["mamba"] * 4,
            "num_key_value_heads": 8,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0078125,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "granitemoehybrid-dense": (
        "granitemoehybrid",
        {
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_n_groups": 4,
            "logits_scaling": 6.0,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "hidden_size": 2688,
            "mamba_num_heads": 64,
            "hybrid_override_pattern": "MEME*EM-",
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "routed_scaling_factor": 2.5,
            "num_key_value_heads": 2,
        },
    ),
    "nemotron_h-latents": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "moe_latent_size": 1024,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "deepseek_v2": ("deepseek_v2", {"num_experts_per_tok": 6}),
    "deepseek_v2-of-236b": (
        "deepseek_v2",
        {
            "hidden_size": 5120,
            "num_attention_heads": 128,
            "num_hidden_layers": 60,
            "n_routed_experts": 160,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1536,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 8,
            "topk_group": 3,
            "routed_scaling_factor": 16.0,
            "max_position_embeddings": 163_840,
            "rope_parameters": {**LATENT_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v2-lite": (
        "deepseek_v2",
        {
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "q_lora_rank": None,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "max_position_embeddings": 163_840,
            "rope_parameters": {**LATENT_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {"max_position_embeddings": 163_840, "rope_parameters": LATENT_YARN},
    ),
    "deepseek_v32": (
        "deepseek_v32",
        {"max_position_embeddings": 163_840, "rope_parameters": LATENT_YARN},
    ),
    # An index in one layer of four, as GLM-5.2's.
    "glm_moe_dsa": ("glm_moe_dsa", {"index_topk_freq": 4, "index_skip_topk_offset": 3}),
    "kimi_k2": (
        "deepseek_v3",
        {
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "n_routed_experts": 384,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.827,
            "max_position_embeddings": 131_072,
            "rope_parameters": {
                **LATENT_YARN,
                "rope_theta": 50_000.0,
                "factor": 32.0,
                "beta_fast": 1.0,
            },
        },
    ),
}
FIRST_USE: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("smollm3", {}),
    "exaone4": ("exaone4", {"sliding_window": 4096, "sliding_window_pattern": 4}),
    "exaone_moe": ("exaone_moe", {}),
    "cohere": ("cohere", {"logit_scale": 0.0625}),
    "cohere2": ("cohere2", {"logit_scale": 0.25}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0156,
            "logits_scaling": 8.0,
        },
    ),
    "arcee": ("arcee", {}),
    "starcoder2": ("starcoder2", {}),
    "hy_v3": ("hy_v3", {}),
}
"""Families that are proved where they are first used; not on the page of those that CI proves."""
STAND_INS = (
    "llama",
    "gemma2",
    "gpt_oss",
    "qwen3_moe",
    "deepseek_v3",
    "qwen3_next",
    "lfm2",
    "granitemoehybrid",
)
"""Families with one mechanism each: plain attention, caps and windows, sinks, experts, latents,
gated delta rules, convolutions, state spaces. Where a check goes over all families, `make test`
checks these and `make test-slow` the others, each of which `make test` proves once.
"""


def mark_others_slow(names: Iterable[str]) -> list[Any]:
    """Return parameters of a test, of which the families that others stand for are slow."""
    return [
        name if name in STAND_INS else pytest.param(name, marks=pytest.mark.slow) for name in names
    ]


def make_published(name: str, **changes: Any) -> Any:
    """Build transformers' configuration object."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type, values = (PUBLISHED | FIRST_USE)[name]
    return CONFIG_MAPPING[model_type](**{**values, **changes})

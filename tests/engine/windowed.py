"""A tiny random gpt-oss: layers with a window of 20 tokens and layers without take turns."""

from transformers import (
    Cohere2Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    MiMoV2FlashConfig,
    MistralConfig,
    Olmo3Config,
    Qwen3Config,
)

from tandem.models.proof.tiny import make_tiny, save_tiny

WINDOW = 20
SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
NUM_WINDOWED = 3
"""Layers with a window, of five."""


def save_windowed(place):
    save_tiny(make_tiny(GptOssConfig(**SIZES), 0), place)
    return place


def save_all_windowed(place):
    """A tiny random Mistral, all of whose layers have a window."""
    sizes = {name: SIZES[name] for name in SIZES if "expert" not in name}
    save_tiny(make_tiny(MistralConfig(**sizes | {"num_hidden_layers": 3}), 0), place)
    return place


SHARING = {
    "vocab_size": 131,
    "vocab_size_per_layer_input": 131,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "head_dim": 16,
    "global_head_dim": 32,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}


def save_sharing(place):
    """A tiny random Gemma 4: KV of two sizes, two layers that share others', all its switches."""
    save_tiny(make_tiny(Gemma4TextConfig(**SHARING), 0), place)
    return place


FAMILIES = {
    "cohere2": Cohere2Config,
    "exaone4": Exaone4Config,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
    "gemma4": Gemma4TextConfig,
    "llama4": Llama4TextConfig,
    "mimo": MiMoV2FlashConfig,
    "mistral": MistralConfig,
    "olmo3": Olmo3Config,
    "qwen3": Qwen3Config,
}


def save_family(name, place):
    """A tiny random model of a family, six layers."""
    if name == "gemma4":
        return save_sharing(place)
    sizes = {key: SIZES[key] for key in SIZES if "expert" not in key} | {"num_hidden_layers": 6}
    if name == "llama4":
        sizes |= {"attention_chunk_size": WINDOW, "num_local_experts": 4, "floor_scale": 32}
        del sizes["sliding_window"]
    if name == "mimo":
        sizes |= {"v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2}
        sizes |= {"moe_intermediate_size": 24, "num_key_value_heads": 1, "head_dim": 24}
    if name == "qwen3":
        sizes |= {"use_sliding_window": True, "max_window_layers": 3}
    save_tiny(make_tiny(FAMILIES[name](**sizes), 0), place)
    return place

"""A tiny random gpt-oss: layers with a window of 20 tokens and layers without take turns."""

from transformers import (
    Cohere2Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
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


FAMILIES = {
    "cohere2": Cohere2Config,
    "exaone4": Exaone4Config,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
    "mistral": MistralConfig,
    "olmo3": Olmo3Config,
    "qwen3": Qwen3Config,
}


def save_family(name, place):
    """A tiny random model of a family, six layers."""
    sizes = {key: SIZES[key] for key in SIZES if "expert" not in key} | {"num_hidden_layers": 6}
    if name == "qwen3":
        sizes |= {"use_sliding_window": True, "max_window_layers": 3}
    save_tiny(make_tiny(FAMILIES[name](**sizes), 0), place)
    return place

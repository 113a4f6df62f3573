"""Configurations of GGUF files of models whose layers all have attention, and little besides.

What llama.cpp's code fixes for an architecture is written here, with the place where it stands
there.
"""

from typing import Any

import numpy as np

from tandem.core.errors import ConfigError, UnsupportedError
from tandem.models.gguf.experts import list_deepseek_experts, list_experts
from tandem.models.gguf.facts import WHERE, Config, Facts
from tandem.models.gguf.rope import make_rope

__all__ = ["ATTENTION_ONLY"]

EXAONE4_WINDOWED = 64
"""Layers of the model of 32B."""


def _smollm3(facts: Facts) -> Config:
    # src/models/smollm3.cpp: every fourth layer has no RoPE.
    count = facts.count("block_count")
    return {
        "model_type": "smollm3",
        "no_rope_layer_interval": 4,
        "no_rope_layers": [int((i + 1) % 4 != 0) for i in range(count)],
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * count,
    }


def _list_multipliers(facts: Facts) -> Config:
    return {
        "embedding_multiplier": facts.number("embedding_scale", 1.0),
        "residual_multiplier": facts.number("residual_scale", 1.0),
        "attention_multiplier": facts.number("attention.scale", 1.0),
        "logits_scaling": facts.number("logit_scale", 1.0),
    }


def _granite(facts: Facts) -> Config:
    return {"model_type": "granite"} | _list_multipliers(facts)


def _granite_moe(facts: Facts) -> Config:
    config = {"model_type": "granitemoe"} | _list_multipliers(facts)
    return config | list_experts(facts, "num_local_experts")


def _olmo2(facts: Facts) -> Config:
    window = facts.count("attention.sliding_window", 0)
    if not window:
        return {"model_type": "olmo2"}
    rope = make_rope(facts)
    # src/models/olmo2.cpp: layers with a window turn by the base alone.
    local = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": _list_windows(facts),
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
    }


def _list_windows(facts: Facts) -> list[str]:
    """Return the type of each layer, by an array of those with a window."""
    value: Any = facts.find("attention.sliding_window_pattern")
    count = facts.count("block_count")
    if not isinstance(value, np.ndarray) or value.shape != (count,):
        key = f"{facts.architecture}.attention.sliding_window_pattern"
        raise ConfigError(WHERE, f"{key}: need a flag for each of {count} layers")
    return ["sliding_attention" if has_window else "full_attention" for has_window in value]


def _cohere2(facts: Facts) -> Config:
    # src/models/cohere2.cpp: every fourth layer sees all tokens, without RoPE.
    return {
        "model_type": "cohere2",
        "layer_norm_eps": facts.number("attention.layer_norm_epsilon"),
        "logit_scale": facts.number("logit_scale"),
        "sliding_window": facts.count("attention.sliding_window"),
        "layer_types": [
            "full_attention" if (i + 1) % 4 == 0 else "sliding_attention"
            for i in range(facts.count("block_count"))
        ],
    }


def _seed_oss(facts: Facts) -> Config:
    return {
        "model_type": "seed_oss",
        "attention_out_bias": facts.has("blk.0.attn_output.bias"),
    }


def _ernie(facts: Facts) -> Config:
    return {"model_type": "ernie4_5", "use_bias": facts.has("blk.0.attn_output.bias")}


def _dots1(facts: Facts) -> Config:
    return {"model_type": "dots1"} | list_deepseek_experts(facts)


def _ernie_moe(facts: Facts) -> Config:
    count = facts.count("block_count")
    return {
        "model_type": "ernie4_5_moe",
        "use_bias": facts.has("blk.0.attn_output.bias"),
        "moe_num_experts": facts.count("expert_count"),
        "moe_k": facts.count("expert_used_count"),
        "moe_intermediate_size": facts.count("expert_feed_forward_length"),
        "moe_num_shared_experts": facts.count("expert_shared_count", 0),
        "moe_layer_start_index": facts.count("leading_dense_block_count", 0),
        "moe_layer_end_index": count - 1,
        "moe_layer_interval": facts.count("interleave_moe_layer_step", 1),
    }


def _cohere(facts: Facts) -> Config:
    return {
        "model_type": "cohere",
        "layer_norm_eps": facts.number("attention.layer_norm_epsilon"),
        "logit_scale": facts.number("logit_scale"),
        "use_qk_norm": facts.has("blk.0.attn_q_norm.weight"),
    }


def _olmo(facts: Facts) -> Config:
    clip = facts.number("attention.clamp_kqv", 0.0)
    return {"model_type": "olmo", "clip_qkv": clip or None}


def _stablelm(facts: Facts) -> Config:
    if facts.has("blk.0.attn_q_norm.weight"):
        text = "a stablelm file with norms of queries and keys: name its safetensors"
        raise UnsupportedError(WHERE, text)
    return {
        "model_type": "stablelm",
        "layer_norm_eps": facts.number("attention.layer_norm_epsilon"),
        "use_qkv_bias": facts.has("blk.0.attn_q.bias"),
        "use_parallel_residual": facts.flag("use_parallel_residual", default=False),
    }


def _nemotron(facts: Facts) -> Config:
    # src/models/nemotron.cpp: LLM_FFN_RELU_SQR.
    return {
        "model_type": "nemotron",
        "norm_eps": facts.number("attention.layer_norm_epsilon"),
        "mlp_bias": facts.has("blk.0.ffn_up.bias"),
        "hidden_act": "relu2",
    }


def _exaone4(facts: Facts) -> Config:
    # src/models/exaone4.cpp: the model of 64 layers has windows, but in every fourth layer; others
    # have none, whatever the file says.
    count, window = facts.count("block_count"), facts.count("attention.sliding_window", 0)
    has_windows = count == EXAONE4_WINDOWED and window > 0
    return {
        "model_type": "exaone4",
        "sliding_window": window if has_windows else None,
        "sliding_window_pattern": 4 if has_windows else None,
        "layer_types": [
            "sliding_attention" if has_windows and (i + 1) % 4 else "full_attention"
            for i in range(count)
        ],
    }


def _hunyuan(facts: Facts) -> Config:
    # The converter has put a scaling by alpha into the base.
    return {"model_type": "hunyuan_v1_dense", "head_dim": facts.head_dim}


def _gemma(facts: Facts) -> Config:
    del facts
    return {"model_type": "gemma"}


def _arcee(facts: Facts) -> Config:
    # src/models/arcee.cpp: LLM_FFN_RELU_SQR.
    del facts
    return {"model_type": "arcee", "hidden_act": "relu2"}


ATTENTION_ONLY = {
    "gemma": _gemma,
    "smollm3": _smollm3,
    "granite": _granite,
    "granitemoe": _granite_moe,
    "olmo2": _olmo2,
    "cohere2": _cohere2,
    "seed_oss": _seed_oss,
    "ernie4_5": _ernie,
    "ernie4_5-moe": _ernie_moe,
    "command-r": _cohere,
    "olmo": _olmo,
    "stablelm": _stablelm,
    "nemotron": _nemotron,
    "dots1": _dots1,
    "arcee": _arcee,
    "exaone4": _exaone4,
    "hunyuan-dense": _hunyuan,
}
"""The special traits of an architecture of llama.cpp, by its name there."""

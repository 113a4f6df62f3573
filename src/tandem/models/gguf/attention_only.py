"""Configurations of GGUF files of models whose layers all have attention.

Values that llama.cpp's code fixes for an architecture are repeated here, with their source file.
"""

from typing import Any

import numpy as np

from tandem.core.errors import ConfigError, UnsupportedError
from tandem.models.gguf.experts import list_deepseek_experts, list_experts
from tandem.models.gguf.facts import WHERE, Config, Facts
from tandem.models.gguf.rope import LONG_FACTORS, make_rope

__all__ = ["ATTENTION_ONLY"]

EXAONE4_WINDOWED = 64
"""Number of layers of EXAONE 4's 32B model, the only size with sliding windows."""
LLAMA4_CHUNK = 8192
LLAMA4_MOST_EXPERTS = 128


def _smollm3(facts: Facts) -> Config:
    # As in llama.cpp's src/models/smollm3.cpp, every fourth layer has no RoPE.
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
    # As in llama.cpp's src/models/olmo2.cpp, layers with a sliding window use RoPE with the base
    # frequency and no scaling.
    local = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": _list_windows(facts),
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
    }


def _list_windows(facts: Facts) -> list[str]:
    """Return the type of each layer, by the array that flags layers with a window.

    Raises: ConfigError (a layer has no flag).
    """
    value: Any = facts.find("attention.sliding_window_pattern")
    count = facts.num_layers
    if not isinstance(value, np.ndarray) or value.ndim != 1 or len(value) < count:
        key = f"{facts.architecture}.attention.sliding_window_pattern"
        raise ConfigError(WHERE, f"{key}: need a flag for each of {count} layers")
    return ["sliding_attention" if has_window else "full_attention" for has_window in value[:count]]


def _cohere2(facts: Facts) -> Config:
    # As in llama.cpp's src/models/cohere2.cpp, every fourth layer attends to all tokens and has no
    # RoPE.
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
    # llama.cpp's src/models/nemotron.cpp uses LLM_FFN_RELU_SQR: squared ReLU.
    return {
        "model_type": "nemotron",
        "norm_eps": facts.number("attention.layer_norm_epsilon"),
        "mlp_bias": facts.has("blk.0.ffn_up.bias"),
        "hidden_act": "relu2",
    }


def _exaone4(facts: Facts) -> Config:
    # As in llama.cpp's src/models/exaone4.cpp, only the model of 64 layers has sliding windows, in
    # all but every fourth layer; the others have none, whatever the file says.
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


def _exaone_moe(facts: Facts) -> Config:
    # As in llama.cpp's src/models/exaone-moe.cpp, a file without the array has windows in all but
    # every fourth layer. Layers without a window have no RoPE, as in transformers.
    count = facts.num_layers
    has_pattern = facts.find("attention.sliding_window_pattern") is not None
    every_fourth = ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(count)]
    return {
        "model_type": "exaone_moe",
        "sliding_window": facts.count("attention.sliding_window"),
        "layer_types": _list_windows(facts) if has_pattern else every_fourth,
        "first_k_dense_replace": facts.count("leading_dense_block_count", 0),
        "mlp_layer_types": [
            "sparse" if facts.has(f"blk.{i}.ffn_gate_inp.weight") else "dense" for i in range(count)
        ],
        "num_shared_experts": facts.count("expert_shared_count", 0),
        "norm_topk_prob": facts.flag("expert_weights_norm", default=False),
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
        "n_group": facts.count("expert_group_count", 1),
        "topk_group": facts.count("expert_group_used_count", 1),
    } | list_experts(facts)


def _hunyuan(facts: Facts) -> Config:
    # The converter to GGUF has already applied the alpha scaling to the RoPE base.
    return {"model_type": "hunyuan_v1_dense", "head_dim": facts.head_dim}


def _hunyuan_moe(facts: Facts) -> Config:
    # norm_topk_prob is true, as norm_w is in llama.cpp's src/models/hunyuan-moe.cpp. The shared MLP
    # is as wide as a routed expert.
    config = {"model_type": "hunyuan_v1_moe", "head_dim": facts.head_dim}
    config |= list_experts(facts)
    config.pop("moe_intermediate_size", None)
    return config | {"moe_topk": config.pop("num_experts_per_tok")}


def _apertus(facts: Facts) -> Config:
    del facts
    return {"model_type": "apertus", "hidden_act": "xielu"}


def _afmoe(facts: Facts) -> Config:
    # As in llama.cpp's src/models/afmoe.cpp, embeddings are scaled, and layers that attend to all
    # tokens have no RoPE. The file's pattern says which layers these are; without one, every
    # fourth.
    has_pattern = facts.find("attention.sliding_window_pattern") is not None
    windows = ["full_attention" if (i + 1) % 4 == 0 else "sliding_attention" for i in range(4)]
    return {
        "model_type": "afmoe",
        "mup_enabled": True,
        "num_dense_layers": facts.count("leading_dense_block_count", 0),
        "num_shared_experts": facts.count("expert_shared_count"),
        "route_scale": facts.number("expert_weights_scale", 1.0),
        "sliding_window": facts.count("attention.sliding_window"),
        "global_attn_every_n_layers": 4,
        "layer_types": _list_windows(facts)
        if has_pattern
        else [windows[i % 4] for i in range(facts.num_layers)],
    } | list_experts(facts)


def _phimoe(facts: Facts) -> Config:
    if facts.has(LONG_FACTORS):
        what = "a phimoe file has one factor on cos and sin, where Phi-3.5-MoE has two, for short "
        raise UnsupportedError(WHERE, what + "sequences and for long ones: name its safetensors")
    window = facts.count("attention.sliding_window", 0)
    config: Config = {
        "model_type": "phimoe",
        "sliding_window": window or None,
        "lm_head_bias": facts.has("output.bias"),
    }
    original = facts.count("rope.scaling.original_context_length", 0)
    if original:
        config["original_max_position_embeddings"] = original
    return config | list_experts(facts, "num_local_experts")


def _find_common(facts: Facts, key: str, layers: list[str], kind: str) -> int:
    """Return the number that all layers of a type have; 0 if there are none.

    Raises: ConfigError (the numbers differ).
    """
    counts = facts.list_counts(key, len(layers))
    found = {count for count, layer in zip(counts, layers, strict=True) if layer == kind}
    if len(found) > 1:
        raise ConfigError(WHERE, f"{facts.architecture}.{key} is {sorted(found)} of {kind}")
    return found.pop() if found else 0


def _mimo2(facts: Facts) -> Config:
    layers, rope = _list_windows(facts), make_rope(facts)
    key = "attention.head_count_kv"
    whole = _find_common(facts, key, layers, "full_attention")
    windowed = _find_common(facts, key, layers, "sliding_attention")
    if whole and windowed and windowed != 2 * whole:
        text = f"{windowed} KV heads of layers with a window, {whole} of the others: need twice"
        raise UnsupportedError(WHERE, text)
    local = rope | {"rope_theta": facts.number("rope.freq_base_swa", rope["rope_theta"])}
    return {
        "model_type": "mimo_v2_flash",
        "num_key_value_heads": whole or windowed // 2,
        "intermediate_size": facts.count("feed_forward_length"),
        "v_head_dim": facts.count("attention.value_length", facts.head_dim),
        "attention_value_scale": facts.number("attention.value_scale", 1.0),
        # As in transformers' code for MiMo, a query attends to this many tokens before itself, so a
        # window that includes the query is one larger; llama.cpp counts the query within the
        # number.
        "sliding_window": facts.count("attention.sliding_window") + 1,
        "layer_types": layers,
        "mlp_layer_types": [
            "sparse" if facts.has(f"blk.{i}.ffn_gate_inp.weight") else "dense"
            for i in range(len(layers))
        ],
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
        # norm_topk_prob is True, as norm_w is in llama.cpp's src/models/mimo2.cpp.
        "norm_topk_prob": True,
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
        "n_group": facts.count("expert_group_count", 1),
        "topk_group": facts.count("expert_group_used_count", 1),
    } | list_experts(facts, "n_routed_experts")


def _gemma4(facts: Facts) -> Config:
    layers, rope = _list_windows(facts), make_rope(facts)
    shared = facts.count("attention.shared_kv_layers", 0)
    key, kinds = "attention.head_count_kv", ("full_attention", "sliding_attention")
    whole, windowed = (_find_common(facts, key, layers, kind) for kind in kinds)
    widths = facts.list_counts("feed_forward_length", len(layers))
    head = facts.count("attention.key_length_swa")
    local = {"rope_type": "default", "rope_theta": facts.number("rope.freq_base_swa", 10_000.0)}
    rotated = facts.count("rope.dimension_count_swa", head)
    if rotated != head:
        local["partial_rotary_factor"] = rotated / max(head, 1)
    own = [i for i, kind in enumerate(layers[: len(layers) - shared]) if kind == kinds[0]]
    config: Config = {
        "model_type": "gemma4_text",
        "intermediate_size": min(widths, default=0),
        "use_double_wide_mlp": len(set(widths)) > 1,
        "head_dim": head,
        "global_head_dim": facts.head_dim,
        "num_key_value_heads": windowed or whole,
        "num_global_key_value_heads": whole or None,
        "attention_k_eq_v": any(not facts.has(f"blk.{i}.attn_v.weight") for i in own),
        "num_kv_shared_layers": shared,
        "sliding_window": facts.count("attention.sliding_window"),
        "layer_types": layers,
        "rope_parameters": {kinds[0]: rope, kinds[1]: local},
        "final_logit_softcapping": facts.number("final_logit_softcapping", 0.0) or None,
        "hidden_size_per_layer_input": facts.count("embedding_length_per_layer_input", 0),
        "enable_moe_block": facts.count("expert_count", 0) > 0,
    }
    if config["enable_moe_block"]:
        config |= list_experts(facts)
        config["top_k_experts"] = config.pop("num_experts_per_tok")
    table = facts.tensors.get("per_layer_token_embd.weight")
    if table is not None:
        config["vocab_size_per_layer_input"] = table.shape[0]
    return config


def _llama4(facts: Facts) -> Config:
    # As in llama.cpp's src/models/llama4.cpp, layers attend within chunks of 8192 tokens, except
    # every fourth, which has no RoPE and scales its queries by position. A window of 0 means that
    # no layer is chunked. The largest model has no norms of queries and keys.
    count = facts.num_layers
    is_chunked = facts.count("attention.sliding_window", 1) > 0
    is_local = [not is_chunked or (i + 1) % 4 != 0 for i in range(count)]
    config: Config = {
        "model_type": "llama4_text",
        "intermediate_size_mlp": facts.count("feed_forward_length"),
        "interleave_moe_layer_step": facts.count("interleave_moe_layer_step", 1),
        "moe_layers": [i for i in range(count) if facts.has(f"blk.{i}.ffn_gate_inp.weight")],
        "attention_chunk_size": LLAMA4_CHUNK,
        "no_rope_layers": [int(local) for local in is_local],
        "layer_types": [
            "chunked_attention" if is_chunked and local else "full_attention" for local in is_local
        ],
        "use_qk_norm": facts.count("expert_count") != LLAMA4_MOST_EXPERTS,
        "attn_temperature_tuning": is_chunked,
        "floor_scale": LLAMA4_CHUNK,
        "attn_scale": 0.1,
    } | list_experts(facts, "num_local_experts")
    return config | {"intermediate_size": config.pop("moe_intermediate_size")}


def _gemma(facts: Facts) -> Config:
    del facts
    return {"model_type": "gemma"}


def _arcee(facts: Facts) -> Config:
    # llama.cpp's src/models/arcee.cpp uses LLM_FFN_RELU_SQR: squared ReLU.
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
    "exaone-moe": _exaone_moe,
    "hunyuan-dense": _hunyuan,
    "hunyuan-moe": _hunyuan_moe,
    "apertus": _apertus,
    "afmoe": _afmoe,
    "phimoe": _phimoe,
    "mimo2": _mimo2,
    "gemma4": _gemma4,
    "llama4": _llama4,
}
"""Function that makes an architecture's special configuration fields, by llama.cpp's name of it."""

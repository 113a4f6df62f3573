"""Configurations of GGUF files of models with multi-head latent attention.

llama.cpp counts compressed keys as one KV head; other keys hold the sizes of the full heads. Values
that its code fixes for an architecture are repeated here, with their source file.
"""

import numpy as np

from tandem.core.errors import ConfigError
from tandem.models.gguf.experts import list_deepseek_experts
from tandem.models.gguf.facts import WHERE, Config, Facts, show
from tandem.models.gguf.rope import make_rope

__all__ = ["LATENT", "SIGMOID"]

SOFTMAX, SIGMOID = 1, 2
"""Values of ``expert_gating_func``."""
LONG_CONTEXT = 1 << 20
"""Context length of GLM-5.2 in tokens; from this length on, models of the architecture have layers
that use the sparse attention index of an earlier layer.
"""


def _list_latents(facts: Facts) -> Config:
    key_length = facts.count("attention.key_length_mla", facts.head_dim)
    value_length = facts.count(
        "attention.value_length_mla", facts.count("attention.value_length", facts.head_dim)
    )
    rotated = facts.count("rope.dimension_count")
    rope = make_rope(facts)
    rope.pop("partial_rotary_factor", None)
    multiplier = facts.number("rope.scaling.yarn_log_multiplier", 0.0)
    if rope["rope_type"] == "yarn" and multiplier:
        # The file stores 0.1 * mscale_all_dim, so multiply by 10; in published models mscale equals
        # mscale_all_dim.
        rope |= {"mscale": round(multiplier * 10, 6), "mscale_all_dim": round(multiplier * 10, 6)}
    return {
        "num_key_value_heads": facts.num_heads,
        "q_lora_rank": facts.count("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": facts.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key_length - rotated,
        "v_head_dim": value_length,
        "head_dim": rotated,
        "rope_parameters": rope,
    } | list_deepseek_experts(facts)


def _deepseek2(facts: Facts) -> Config:
    is_v3 = facts.count("expert_gating_func", SOFTMAX) == SIGMOID
    kind = "deepseek_v3" if is_v3 else "deepseek_v2"
    config: Config = {"model_type": kind} | _list_latents(facts)
    if not is_v3:
        config["topk_method"] = "group_limited_greedy" if config["n_group"] > 1 else "greedy"
    return config


def _mistral4(facts: Facts) -> Config:
    config: Config = {"model_type": "mistral4"} | _list_latents(facts)
    head = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    # As in llama.cpp, queries are scaled by position if the file gives a scale.
    config["rope_parameters"] |= {
        "llama_4_scaling_beta": facts.number("attention.temperature_scale", 0.0),
        "partial_rotary_factor": config["qk_rope_head_dim"] / max(head, 1),
    }
    return config | {"head_dim": head}


def _glm_dsa(facts: Facts) -> Config:
    return {
        "model_type": "glm_moe_dsa",
        "index_n_heads": facts.count("attention.indexer.head_count"),
        "index_head_dim": facts.count("attention.indexer.key_length"),
        "index_topk": facts.count("attention.indexer.top_k"),
        "indexer_types": _list_indexers(facts),
    } | _list_latents(facts)


def _list_indexers(facts: Facts) -> list[str]:
    """Return the indexer type of each layer: an index of its own, or an earlier layer's choice."""
    value, count = facts.find("attention.indexer.types"), facts.num_layers
    if value is None:
        # Files older than attention.indexer.types do not tell which layers share an index. As in
        # llama.cpp's src/models/glm-dsa.cpp, a context as long as GLM-5.2's means that layers
        # share in a fixed pattern. Otherwise each layer has its own.
        is_long = facts.count("context_length") >= LONG_CONTEXT
        kinds = [not is_long or i < 2 or i % 4 == 2 for i in range(count)]
    elif isinstance(value, np.ndarray) and value.ndim == 1 and len(value) >= count:
        kinds = [bool(kind) for kind in value[:count]]
    else:
        text = f"{facts.architecture}.attention.indexer.types is {show(value)}"
        raise ConfigError(WHERE, f"{text}: need a flag for each of {count} layers")
    return ["full" if kind else "shared" for kind in kinds]


LATENT = {"deepseek2": _deepseek2, "mistral4": _mistral4, "glm-dsa": _glm_dsa}
"""Function that makes an architecture's special configuration fields, by llama.cpp's name of it."""

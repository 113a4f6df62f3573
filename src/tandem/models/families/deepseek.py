"""DeepSeek-V2, V3, V3.2, Kimi-K2 and GLM-5: conditions on their configurations.

Attention, routers, groups and shared experts are found by their parts like those of other families.
Kimi-K2 is V3's architecture under another name; its published configuration names Python code of
its own, which is never run.
"""

from typing import Any

from tandem.models.families.refused import WITH_INDEX

__all__ = ["find_problem", "has_interleaved_index", "has_interleaved_latents"]

MAX_INDEX_HEADS = 128
"""Most heads of an index whose scores the native kernel can sum."""
MAX_CHOSEN = 1 << 16
TOP_K_METHODS = {
    "deepseek_v2": ("greedy", "group_limited_greedy"),
    "deepseek_v3": ("noaux_tc",),
    "deepseek_v32": ("noaux_tc",),
    "glm_moe_dsa": ("noaux_tc",),
    "kimi_k2": ("noaux_tc",),
}
"""Routing methods that are supported, by the file's ``model_type``; transformers' V3 implements
only one.
"""


def find_problem(config: Any) -> tuple[str, str] | None:
    """Return (field, problem) of a configuration that is not supported; None: it is supported."""
    method = getattr(config, "topk_method", None)
    known = TOP_K_METHODS[config.model_type]
    if method is not None and method not in known:
        return "topk_method", f"topk_method {method!r}: known are {', '.join(known)}"
    if config.model_type == "deepseek_v2" and config.norm_topk_prob:
        return "norm_topk_prob", "norm_topk_prob of deepseek_v2, which transformers leaves out"
    scoring = getattr(config, "scoring_func", None)
    wanted = "softmax" if config.model_type == "deepseek_v2" else "sigmoid"
    if scoring not in (None, wanted):
        return "scoring_func", f"scoring_func {scoring!r}: {config.model_type} has {wanted}"
    if getattr(config, "moe_layer_freq", 1) not in (None, 1):
        return "moe_layer_freq", f"moe_layer_freq {config.moe_layer_freq}: only 1 runs"
    if not config.n_shared_experts:
        return "n_shared_experts", "no shared experts, which transformers expects"
    groups = config.n_group or 1
    if config.n_routed_experts % groups or (config.topk_group or 1) > groups:
        return "n_group", f"{config.topk_group} of {groups} groups of {config.n_routed_experts}"
    return _find_index_problem(config) if config.model_type in WITH_INDEX else None


def _find_index_problem(config: Any) -> tuple[str, str] | None:
    if not 1 <= config.index_topk <= MAX_CHOSEN:
        return "index_topk", f"index_topk {config.index_topk}: 1 to {MAX_CHOSEN} run"
    if not 1 <= config.index_n_heads <= MAX_INDEX_HEADS:
        return "index_n_heads", f"index_n_heads {config.index_n_heads}: 1 to {MAX_INDEX_HEADS} run"
    rope = config.qk_rope_head_dim
    if config.index_head_dim < rope:
        what = f"index_head_dim {config.index_head_dim}: {rope} items of it are rotated"
        return "index_head_dim", what
    return None


def has_interleaved_latents(config: Any) -> bool:
    """Return True if rotated items of MLA are stored as pairs of neighbours: always in models with
    an index, in others unless ``rope_interleave`` of the configuration is false.
    """
    return config.model_type in WITH_INDEX or bool(getattr(config, "rope_interleave", True))


def has_interleaved_index(config: Any) -> bool:
    """Return True if an index's rotated items are stored as pairs of neighbours, as in GLM-5."""
    return config.model_type == "glm_moe_dsa"

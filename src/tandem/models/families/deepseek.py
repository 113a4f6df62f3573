"""DeepSeek-V2, V3 and Kimi-K2: what their configurations must say, and what a checkpoint adds.

Attention, routers, groups and shared experts are found by their parts like those of other families.
Kimi-K2 is V3's architecture under a name of its own; its published configuration names code to run,
which is not run.
"""

from typing import Any

__all__ = ["find_problem", "has_interleaved_latents"]

TOP_K_METHODS = {
    "deepseek_v2": ("greedy", "group_limited_greedy"),
    "deepseek_v3": ("noaux_tc",),
    "kimi_k2": ("noaux_tc",),
}
"""Ways in which routers may choose, by the ``model_type`` of the file; transformers' V3 knows one
way."""


def find_problem(config: Any) -> tuple[str, str] | None:
    """Return (field, what) of a configuration that does not run; None: nothing."""
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
    return None


def has_interleaved_latents(config: Any) -> bool:
    """Return True if rotated items are stored as pairs of neighbours; V3's configuration may say
    no.
    """
    return bool(getattr(config, "rope_interleave", True))

"""Routed experts of a GGUF file, under the names of transformers' configurations."""

from tandem.models.gguf.facts import Config, Facts

__all__ = ["list_deepseek_experts", "list_experts"]


def list_experts(facts: Facts, count_name: str = "num_experts") -> Config:
    """Return the number of experts, the number per token, and their size if the file states it.

    Args:
        facts: the file's metadata.
        count_name: configuration field for the number of experts.
    """
    config: Config = {
        count_name: facts.count("expert_count"),
        "num_experts_per_tok": facts.count("expert_used_count"),
    }
    if facts.find("expert_feed_forward_length") is not None:
        config["moe_intermediate_size"] = facts.count("expert_feed_forward_length")
    return config


def list_deepseek_experts(facts: Facts) -> Config:
    """Return the fields of experts as in DeepSeek-V3: in groups, with shared experts, after dense
    layers.
    """
    return list_experts(facts, "n_routed_experts") | {
        "n_shared_experts": facts.count("expert_shared_count", 0),
        "first_k_dense_replace": facts.count("leading_dense_block_count", 0),
        "norm_topk_prob": facts.flag("expert_weights_norm", default=False),
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
        "n_group": facts.count("expert_group_count", 1),
        "topk_group": facts.count("expert_group_used_count", 1),
    }

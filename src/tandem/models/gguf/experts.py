"""Routed experts of a GGUF file, by the names of transformers' configurations."""

from tandem.models.gguf.facts import Config, Facts

__all__ = ["list_deepseek_experts", "list_experts"]


def list_experts(facts: Facts, count_name: str = "num_experts") -> Config:
    """Return how many experts there are, how many a token has, and their size if it is told.

    Args:
        facts: of the file.
        count_name: name of the number of experts in the configuration.
    """
    config: Config = {
        count_name: facts.count("expert_count"),
        "num_experts_per_tok": facts.count("expert_used_count"),
    }
    if facts.find("expert_feed_forward_length") is not None:
        config["moe_intermediate_size"] = facts.count("expert_feed_forward_length")
    return config


def list_deepseek_experts(facts: Facts) -> Config:
    """Return experts of DeepSeek-V3's kind: in groups, with shared ones, behind dense layers."""
    return list_experts(facts, "n_routed_experts") | {
        "n_shared_experts": facts.count("expert_shared_count", 0),
        "first_k_dense_replace": facts.count("leading_dense_block_count", 0),
        "norm_topk_prob": facts.flag("expert_weights_norm", default=False),
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
        "n_group": facts.count("expert_group_count", 1),
        "topk_group": facts.count("expert_group_used_count", 1),
    }

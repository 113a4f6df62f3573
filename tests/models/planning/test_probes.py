"""Goal: what a module computes is found whatever its size.

Method: routers of transformers with the rules of their families, of many sizes: two rules of groups
choose alike for most tokens, so a few tokens need not tell them apart.
"""

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, Mistral4Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.mistral4.modeling_mistral4 import Mistral4TopkRouter

from quick import rest_slow
from tandem.core.model.layers import RoutingRule
from tandem.models.planning.probes import UnfitModuleError, find_routing


class SumOfTwo(torch.nn.Module):
    """The router of DeepSeek-V3, which adds the two best experts of a group, with a softmax."""

    def __init__(self, config):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.top_k, self.n_group, self.topk_group = 2, config.n_group, config.topk_group

    def forward(self, x):
        logits = torch.nn.functional.linear(x, self.weight)
        groups = logits.unflatten(-1, (self.n_group, -1))
        best = groups.topk(2, -1).values.sum(-1).topk(self.topk_group, -1).indices
        is_kept = torch.zeros(groups.shape[:2]).scatter_(1, best, 1.0)[..., None] == 1
        kept = groups.masked_fill(~is_kept, -torch.inf).flatten(-2)
        ids = kept.topk(self.top_k, -1).indices
        return torch.softmax(logits, -1).gather(-1, ids), ids


@pytest.mark.parametrize(
    ("count", "groups"), rest_slow([(4, 2), (16, 4)], [(4, 2), (8, 2), (16, 4)])
)
def test_rules_of_groups_are_told_apart_at_every_size(count, groups):
    """A tiny DeepSeek-V2 was routed like V3: 32 tokens of its probe were chosen alike."""
    sizes = {"n_routed_experts": count, "n_group": groups, "topk_group": 1}
    sizes |= {"num_attention_heads": 1, "num_experts_per_tok": 2}
    for hidden in range(8, 48):
        config = DeepseekV2Config(hidden_size=hidden, topk_method="group_limited_greedy", **sizes)
        found = find_routing(DeepseekV2TopkRouter(config), None)
        assert (found.num_groups, found.num_top_groups) == (groups, 1), hidden
        assert found.num_group_choices == 1, hidden
        found = find_routing(SumOfTwo(DeepseekV3Config(hidden_size=hidden, **sizes)), None)
        assert (found.num_groups, found.num_group_choices) == (groups, 2), hidden


def test_groups_that_are_all_kept_are_none():
    config = DeepseekV2Config(
        hidden_size=16, n_routed_experts=8, n_group=2, topk_group=2, num_experts_per_tok=2,
        topk_method="group_limited_greedy", num_attention_heads=1,
    )  # fmt: skip
    assert find_routing(DeepseekV2TopkRouter(config), None) == RoutingRule()


def test_groups_by_sums_of_probabilities_are_refused_at_every_size():
    """No rule of ours adds probabilities. Of 32 tokens, one that takes the best chose alike."""
    sizes = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    for hidden in range(8, 24):
        with pytest.raises(UnfitModuleError, match="chooses or weighs in another way"):
            find_routing(Mistral4TopkRouter(Mistral4Config(hidden_size=hidden, **sizes)), None)

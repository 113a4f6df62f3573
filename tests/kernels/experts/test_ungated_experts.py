"""Goal: experts without a gate that a device gathers are those that it multiplies one by one.

A step on a device may not look at which experts were chosen, so it takes another way than a prompt.
"""

import pytest
import torch

from tandem._native import ThreadPool
from tandem.core.model.layers import Activation, ExpertsSpec
from tandem.kernels.mixtures import ungated
from tandem.kernels.mixtures.ungated import UngatedExperts
from tandem.kernels.weights.formats import find_format
from tandem.kernels.weights.matrix import MatrixSettings

EXPERTS, HIDDEN, INNER, TOKENS, TOP_K = 5, 24, 40, 6, 3


class Reader:
    """Random weights in one of both layouts, for a device that is none."""

    dtype, device = torch.float32, torch.device("cpu")

    class execution:
        is_host = False

    def __init__(self, *, is_stacked):
        chance = torch.Generator().manual_seed(1)
        up = torch.randn(EXPERTS, INNER, HIDDEN, generator=chance)
        down = torch.randn(EXPERTS, HIDDEN, INNER, generator=chance)
        self.weights = {"x.up_proj": up, "x.down_proj": down}
        if not is_stacked:
            self.weights = {
                f"x.{i}.{part}.weight": whole[i]
                for part, whole in (("up_proj", up), ("down_proj", down))
                for i in range(EXPERTS)
            }

    def has(self, name):
        return name in self.weights

    def read_into(self, name, target):
        target.copy_(self.weights[name])


class HostReader(Reader):
    """Given weights, for the host."""

    class execution:
        is_host = True

    def __init__(self, weights):
        self.weights = weights


@pytest.mark.parametrize("is_stacked", [True, False])
def test_gathered_experts_are_those_in_place(is_stacked, monkeypatch):
    spec = ExpertsSpec(
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        activation=Activation(name="relu2"),
        is_gated=False,
    )
    experts = UngatedExperts(spec)
    experts.load(Reader(is_stacked=is_stacked), "x")
    chance = torch.Generator().manual_seed(2)
    x = torch.randn(TOKENS, HIDDEN, generator=chance)
    ids = torch.stack([torch.randperm(EXPERTS, generator=chance)[:TOP_K] for _ in range(TOKENS)])
    ids[1, 0] = ids[4, 2] = -1
    shares = torch.rand(TOKENS, TOP_K, generator=chance)
    found = []
    for most in (1 << 30, 0):
        monkeypatch.setattr(ungated, "MAX_GATHERED_BYTES", most)
        found.append(experts.forward(x, ids, shares))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-4)
    assert found[0].abs().max() > 1


@pytest.mark.parametrize("weight_format", [None, "f32", "int8g32"])
def test_a_token_alone_has_the_bits_that_it_has_among_others(weight_format):
    """A token alone takes a shorter way; an expert on another machine (-1) adds nothing."""
    chosen = None if weight_format is None else find_format(weight_format)
    spec = ExpertsSpec(
        num_experts=EXPERTS,
        hidden_size=64,
        intermediate_size=96,
        activation=Activation(name="relu2"),
        is_gated=False,
    )
    experts = UngatedExperts(spec, MatrixSettings(chosen, ThreadPool(1)))
    chance = torch.Generator().manual_seed(3)
    weights = {
        "x.up_proj": torch.randn(EXPERTS, 96, 64, generator=chance),
        "x.down_proj": torch.randn(EXPERTS, 64, 96, generator=chance),
    }
    experts.load(HostReader(weights), "x")
    x = torch.randn(TOKENS, 64, generator=chance)
    ids = torch.stack([torch.randperm(EXPERTS, generator=chance)[:TOP_K] for _ in range(TOKENS)])
    ids[2, 1] = -1
    shares = torch.rand(TOKENS, TOP_K, generator=chance)
    together = experts.forward(x, ids, shares)
    for i in range(TOKENS):
        exact = sum(
            float(share)
            * weights["x.down_proj"][e].double()
            @ (weights["x.up_proj"][e].double() @ x[i].double()).relu().square()
            for e, share in zip(ids[i], shares[i], strict=True)
            if e >= 0
        )
        alone = experts.forward(x[i : i + 1], ids[i : i + 1], shares[i : i + 1])[0]
        bound = 0.05 if weight_format == "int8g32" else 1e-5
        assert float((alone - exact).norm() / exact.norm()) < bound
        if weight_format is not None:  # torch's products of tensors depend on the number of rows.
            assert torch.equal(alone, together[i])

"""Goal: gradients of LoRA on routed experts are those of experts with merged weights.

Method: torch's float64 autograd through the dequantized weights plus ``scale * B A``. Four factors
of a term are rounded to bf16, each by at most 2^-8 and half of it on average, so gradients are off
by less than 2^-7 of their length; int8 codes of activations give 2^-5, as without adapters.
"""

import pytest
import torch

from each import each
from tandem._native import ThreadPool
from tandem.core.model.layers import SILU, Activation
from tandem.kernels.activation import activate
from tandem.kernels.cpu.adapted_experts import ExpertFactors, run_adapted_experts
from tandem.kernels.cpu.experts import PackedExperts
from tandem.kernels.oracles.packed import decode
from tandem.kernels.weights.formats import find_format

NUM_EXPERTS, HIDDEN, INNER, RANK, TOKENS, SCALE = 3, 128, 256, 4, 33, 2.0
NAMES = ["x", "weights", "gate_up_a", "gate_up_b", "down_a", "down_b"]
GPT_OSS = Activation(alpha=1.702, limit=7.0, up_offset=1.0)


@pytest.fixture(scope="module")
def pool():
    return ThreadPool(2)


class Case:
    """Random experts, factors and tokens; the last expert is never chosen."""

    def __init__(self, name, pool, *, activation=SILU, parts=1):
        def draw(*shape, fan=1):
            return torch.randn(*shape, generator=generator) * fan**-0.5

        generator = torch.Generator().manual_seed(7)
        self.format, self.activation = find_format(name), activation
        gate_up = draw(NUM_EXPERTS, 2 * INNER, HIDDEN, fan=HIDDEN)
        down = draw(NUM_EXPERTS, HIDDEN, INNER, fan=INNER)
        self.experts = PackedExperts.pack(
            self.format, gate_up, down, pool=pool, activation=activation, num_parts=parts
        )
        halves = [gate_up[:, :INNER], gate_up[:, INNER:], down]
        decoded = [
            torch.stack([torch.from_numpy(decode(w.numpy(), self.format)) for w in half])
            for half in halves
        ]
        self.dense = torch.cat(decoded[:2], 1), decoded[2]
        self.ids = torch.tensor([[1, 0], [0, 1], [1, -1]])[torch.arange(TOKENS) % 3]
        self.values = [
            draw(TOKENS, HIDDEN),
            torch.rand(TOKENS, 2, generator=generator),
            draw(NUM_EXPERTS, RANK, HIDDEN, fan=HIDDEN),
            draw(NUM_EXPERTS, 2 * INNER, RANK, fan=RANK) / 2,
            draw(NUM_EXPERTS, RANK, INNER, fan=INNER),
            draw(NUM_EXPERTS, HIDDEN, RANK, fan=RANK) / 2,
        ]
        self.d_out = draw(TOKENS, HIDDEN)

    def run(self):
        leaves = [v.clone().requires_grad_() for v in self.values]
        x, weights, *factors = leaves
        factors = ExpertFactors(*factors, SCALE)
        out = run_adapted_experts(self.experts, self.activation, factors, x, self.ids, weights)
        out.backward(self.d_out)
        return out.detach(), [leaf.grad for leaf in leaves]

    def run_oracle(self, scale=SCALE):
        leaves = [v.double().requires_grad_() for v in self.values]
        x, weights, up_a, up_b, down_a, down_b = leaves
        gate_up = self.dense[0] + scale * up_b @ up_a
        down = self.dense[1] + scale * down_b @ down_a
        rows = []
        for t, slots in enumerate(self.ids.tolist()):
            row = torch.zeros(HIDDEN, dtype=torch.float64)
            for slot, e in enumerate(slots):
                if e >= 0:
                    h = activate(self.activation, (gate_up[e] @ x[t])[None])[0]
                    row = row + weights[t, slot] * (down[e] @ h)
            rows.append(row)
        out = torch.stack(rows)
        out.backward(self.d_out.double())
        return out.detach(), [leaf.grad for leaf in leaves]

    def measure(self, scale=SCALE):
        """Return how far the result and each gradient are from exact, relative to their length."""
        (got, grads), (want, wants) = self.run(), self.run_oracle(scale)
        pairs = zip([got, *grads], [want, *wants], strict=True)
        names = ["out", *NAMES]
        return {n: float((g - w).norm() / w.norm()) for n, (g, w) in zip(names, pairs, strict=True)}


@each("parts", [1, 2])
@each("name", ["bf16", "int8", "int4", "fp8", "mxfp4"])
def test_gradients(name, parts, pool):
    """Of the input, the router weights and all factors, also with weights split for two nodes."""
    case = Case(name, pool, parts=parts)
    bound = 2**-5 if case.format.is_integer else 2**-7
    off = case.measure()
    assert max(off.values()) < bound, off


@pytest.mark.parametrize("activation", [GPT_OSS, Activation("gelu"), Activation("gelu_tanh")])
def test_activations(activation, pool):
    """gpt-oss's, and GELUs; what its limits cut is in the tests of each stage."""
    off = Case("bf16", pool, activation=activation).measure()
    assert max(off.values()) < 2**-7, off


def test_an_expert_without_tokens_learns_nothing(pool):
    """Its factors' gradients are zero."""
    _, grads = Case("bf16", pool).run()
    assert all(not grad[2].any() for grad in grads[2:])
    assert all(grad[0].any() for grad in grads[2:])


def test_a_mutant_is_caught(pool):
    """A scale that is off by a twentieth is beyond the bound in every gradient of a factor."""
    off = Case("bf16", pool).measure(SCALE * 1.05)
    assert all(off[name] > 2**-7 for name in NAMES[2:]), off

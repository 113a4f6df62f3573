"""Goal: every tolerance can fail. Method: break an operator in a small way; its check must see it.

A mutant changes one operator after loading, as a wrong kernel would: a projection scaled, an
expert dropped, the last block of K skipped, 16 columns zeroed, two experts swapped.
"""

import torch

from each import each
from tandem.core.model.layers import ExpertsSpec, MlpSpec
from tandem.kernels import tolerance
from tandem.kernels.operators.linear import Linear
from tandem.kernels.operators.mlp import Mlp
from tandem.kernels.operators.norm import RmsNorm
from tandem.kernels.oracles import reference
from tandem.kernels.torch.experts import Experts

DTYPES = [torch.float32, torch.bfloat16]
both_dtypes = each("dtype", DTYPES)
TOKENS, HIDDEN, INTERMEDIATE, EXPERTS = 24, 64, 96, 6


def swap(experts: Experts) -> None:
    for weight in (experts.gate_up_weight, experts.down_weight):
        weight[[1, 4]] = weight[[4, 1]]


EXPERT_MUTANTS = {
    "none": lambda experts: None,
    "scale one projection": lambda experts: experts.gate_up_weight[3, :INTERMEDIATE].mul_(1.05),
    "drop one expert": lambda experts: experts.down_weight[2].zero_(),
    "skip the last K block": lambda experts: experts.down_weight[..., -32:].zero_(),
    "zero 16 columns": lambda experts: experts.gate_up_weight[..., 16:32].zero_(),
    "swap two experts": swap,
}


@both_dtypes
@each("name", EXPERT_MUTANTS)
def test_experts(name, dtype, draw, wide, make_reader, count_outside):
    gate_up = draw(EXPERTS, 2 * INTERMEDIATE, HIDDEN, dtype=dtype, scale=HIDDEN**-0.5)
    down = draw(EXPERTS, HIDDEN, INTERMEDIATE, dtype=dtype, scale=INTERMEDIATE**-0.5)
    experts = Experts(
        ExpertsSpec(num_experts=EXPERTS, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE)
    )
    experts.load(make_reader({"x.gate_up_proj": gate_up, "x.down_proj": down}, dtype), "x")
    EXPERT_MUTANTS[name](experts)
    x, weights = draw(TOKENS, HIDDEN, dtype=dtype), draw(TOKENS, 2, dtype=dtype).abs()
    ids = torch.stack([torch.arange(t, t + 2) % EXPERTS for t in range(TOKENS)])
    args = (wide(x), ids.numpy(), wide(weights), wide(gate_up), wide(down))
    bound = tolerance.experts(*args, dtype)
    outside = count_outside(experts(x, ids, weights), reference.experts(*args), bound)
    assert outside == 0 if name == "none" else outside > 0


LINEAR_MUTANTS = {
    "none": lambda w: None,
    "scale": lambda w: w.mul_(1.03),
    "skip the last K block": lambda w: w[:, -16:].zero_(),
    "zero 16 columns": lambda w: w[:, 16:32].zero_(),
    "swap two rows": lambda w: w.__setitem__([3, 5], w[[5, 3]]),
}


@both_dtypes
@each("name", LINEAR_MUTANTS)
def test_linear(name, dtype, draw, wide, make_reader, count_outside):
    weight, x = draw(40, HIDDEN, dtype=dtype), draw(TOKENS, HIDDEN, dtype=dtype)
    layer = Linear(HIDDEN, 40)
    layer.load(make_reader({"l.weight": weight}, dtype), "l")
    LINEAR_MUTANTS[name](layer.weight)
    bound = tolerance.linear(wide(x), wide(weight), dtype)
    outside = count_outside(layer(x), reference.linear(wide(x), wide(weight)), bound)
    assert outside == 0 if name == "none" else outside > 0


@both_dtypes
@each("name", ["none", "scale gate", "skip the last K block", "swap gate and up"])
def test_mlp(name, dtype, draw, wide, make_reader, count_outside):
    gate_up = draw(2 * INTERMEDIATE, HIDDEN, dtype=dtype, scale=HIDDEN**-0.5)
    down = draw(HIDDEN, INTERMEDIATE, dtype=dtype, scale=INTERMEDIATE**-0.5)
    gate, up = gate_up.chunk(2)
    parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    layer = Mlp(MlpSpec(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE))
    layer.load(make_reader({f"m.{k}.weight": v for k, v in parts.items()}, dtype), "m")
    if name == "scale gate":
        layer.gate_up_weight[:INTERMEDIATE] *= 1.05
    elif name == "skip the last K block":
        layer.gate_up_weight[:, -16:] = 0
    elif name == "swap gate and up":
        layer.gate_up_weight.copy_(torch.cat((up, gate)))
    x = draw(TOKENS, HIDDEN, dtype=dtype)
    bound = tolerance.mlp(wide(x), wide(gate_up), wide(down), dtype)
    expected = reference.mlp(wide(x), wide(gate_up), wide(down))
    outside = count_outside(layer(x), expected, bound)
    assert outside == 0 if name == "none" else outside > 0


@both_dtypes
def test_norm_without_its_epsilon(dtype, draw, wide, make_reader, count_outside):
    weight, x = draw(HIDDEN, dtype=dtype), draw(4, HIDDEN, dtype=dtype, scale=1e-3)
    norm = RmsNorm(HIDDEN, 0.0)
    norm.load(make_reader({"n.weight": weight}, dtype), "n")
    expected = reference.rms_norm(wide(x), wide(weight), 1e-6)
    assert count_outside(norm(x), expected, tolerance.rms_norm(expected, dtype)) > 0

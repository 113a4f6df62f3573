"""Goal: gradients through packed experts and matrices are those of the dequantized weights.

Method: the chain rule in float64 (``tandem.kernels.cpu.gradient_oracle``) with derived bounds,
which torch's float64 autograd confirms; mutants of the oracle must be told apart from the kernel.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem._native import ThreadPool, kernel_isas
from tandem.core.errors import ShapeError, UnsupportedError
from tandem.kernels.activation import SILU, Activation
from tandem.kernels.cpu.autograd import multiply_frozen, run_experts
from tandem.kernels.cpu.experts import PackedExperts
from tandem.kernels.cpu.gradient_oracle import bound_sum, run_gradients
from tandem.kernels.cpu.linear import PackedLinear
from tandem.kernels.cpu.packed_oracle import Layer, decode
from tandem.kernels.formats import WEIGHT_FORMATS, find_format

FORMATS = ["bf16", "int8row", "int8g128", "int8g16", "int8g32min", "int4g32", "int4g32sym"]
FORMATS += ["fp8", "mxfp4"]
GPT_OSS = Activation(alpha=1.702, limit=1.0, up_offset=1.0)


@pytest.fixture(scope="module")
def pool():
    return ThreadPool(2)


class Case:
    """Random experts and tokens; of three experts one is never chosen, one by all tokens."""

    def __init__(self, name, pool, *, isa=None, tokens=21, activation=SILU, bias=False, parts=1):
        self.weight_format = find_format(name)
        # bf16 takes any size: here odd ones.
        hidden, inner = (131, 77) if name == "bf16" and parts == 1 else (256, 256)
        generator = torch.Generator().manual_seed(3)
        self.gate_up = torch.randn(3, 2 * inner, hidden, generator=generator) * hidden**-0.5
        self.down = torch.randn(3, hidden, inner, generator=generator) * inner**-0.5
        self.x = torch.randn(tokens, hidden, generator=generator)
        self.weights = torch.rand(tokens, 2, generator=generator)
        self.d_out = torch.randn(tokens, hidden, generator=generator)
        self.ids = torch.tensor([[2, 0], [0, 2], [2, -1]])[torch.arange(tokens) % 3]
        self.biases = None
        self.experts = PackedExperts(
            self.weight_format,
            3,
            hidden,
            inner,
            pool=pool,
            isa=isa,
            activation=activation,
            has_bias=bias,
            num_parts=parts,
        )
        for e in range(3):
            gate, up = self.gate_up[e, :inner], self.gate_up[e, inner:]
            self.experts.pack_expert(e, gate, up, self.down[e])
        if bias:
            sizes = (inner, inner, hidden)
            self.biases = [torch.randn(3, n, generator=generator) / 4 for n in sizes]
            for e in range(3):
                self.experts.set_bias(e, *(b[e] for b in self.biases))
        self.activation = activation

    def make_layer(self):
        inner = self.gate_up.shape[1] // 2
        parts = (self.gate_up[:, :inner], self.gate_up[:, inner:], self.down)
        decoded = [np.stack([decode(m.numpy(), self.weight_format) for m in p]) for p in parts]
        biases = None
        if self.biases is not None:
            gate, up, down = (b.double().numpy() for b in self.biases)
            biases = (gate, up, down)
        return Layer(self.weight_format, *decoded, biases, self.activation)

    def run_oracle(self, layer):
        wide = [t.double().numpy() for t in (self.x, self.weights, self.d_out)]
        return run_gradients(layer, wide[0], self.ids.numpy(), wide[1], wide[2])

    def run_kernel(self):
        return self.experts.backward(self.x, self.ids, self.weights, self.d_out)

    def count_outside(self, layer):
        pairs = zip(self.run_kernel(), self.run_oracle(layer), strict=True)
        return sum(int((np.abs(got.numpy() - want) > bound).sum()) for got, (want, bound) in pairs)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("isa", [*kernel_isas(), "amx_emulated"])
def test_experts(name, isa, pool):
    """Every format on every instruction set, an expert unused, a slot computed elsewhere."""
    case = Case(name, pool, isa=isa)
    assert case.count_outside(case.make_layer()) == 0


@pytest.mark.parametrize("options", [{"bias": True, "activation": GPT_OSS}, {"parts": 2}])
@pytest.mark.parametrize("tokens", [1, 150])
def test_biases_limits_parts_and_many_rows(options, tokens, pool):
    """gpt-oss's experts, weights split for two nodes, and more rows than a task takes."""
    case = Case("int8g128", pool, tokens=tokens, **options)
    assert case.count_outside(case.make_layer()) == 0


def test_the_oracle_is_what_autograd_says(pool):
    """torch's float64 autograd through the same decoded weights gives the oracle's gradients."""
    case = Case("int4g32", pool, tokens=6, bias=True, activation=GPT_OSS)
    layer = case.make_layer()
    gate, up, down = (torch.from_numpy(w) for w in (layer.gate, layer.up, layer.down))
    x, w = case.x.double().requires_grad_(), case.weights.double().requires_grad_()
    biases = [b.double() for b in case.biases]
    total = torch.zeros((), dtype=torch.float64)
    for t, slots in enumerate(case.ids.tolist()):
        for slot, e in enumerate(slots):
            if e >= 0:
                g = (gate[e] @ x[t] + biases[0][e]).clamp(max=GPT_OSS.limit)
                u = (up[e] @ x[t] + biases[1][e]).clamp(-GPT_OSS.limit, GPT_OSS.limit)
                h = g * torch.sigmoid(GPT_OSS.alpha * g) * (u + GPT_OSS.up_offset)
                y = w[t, slot] * (down[e] @ h + biases[2][e])
                total = total + y @ case.d_out[t].double()
    total.backward()
    for (want, _), tensor in zip(case.run_oracle(layer), (x, w), strict=True):
        np.testing.assert_allclose(tensor.grad.numpy(), want, rtol=1e-10, atol=1e-12)


def _change(name, change):
    def mutate(layer):
        weights = getattr(layer, name).copy()
        change(weights)
        return replace(layer, **{name: weights})

    return mutate


MUTANTS = {
    "scale gate": _change("gate", lambda w: w.__setitem__(0, w[0] * 1.01)),
    "drop an expert": _change("down", lambda w: w.__setitem__(2, 0)),
    "skip the last inputs of down": _change(
        "down", lambda w: w.__setitem__((..., slice(-8, None)), 0)
    ),
    "zero 16 columns of up": _change("up", lambda w: w.__setitem__((..., slice(16, 32)), 0)),
    "swap two experts": _change("gate", lambda w: w.__setitem__([0, 2], w[[2, 0]])),
    "another activation": lambda layer: replace(layer, activation=Activation(alpha=1.01)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("name", ["bf16", "int4g32"])
def test_mutants_are_caught(mutant, name, pool):
    """The bounds are narrow enough to see a small mistake."""
    case = Case(name, pool)
    assert case.count_outside(MUTANTS[mutant](case.make_layer())) > 0


@pytest.mark.parametrize("name", FORMATS)
def test_matrices(name, pool):
    """dX = dY W for odd numbers of rows and outputs, and a mutant."""
    weight_format = WEIGHT_FORMATS[name]
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(201, 256, generator=generator)
    d_out = torch.randn(99, 201, generator=generator)
    wide, dense = d_out.double().numpy(), decode(weight.numpy(), weight_format)
    packed = PackedLinear.pack(weight_format, weight, pool=pool)
    off = np.abs(packed.backward(d_out).numpy() - wide @ dense)
    assert (off <= bound_sum(wide, dense)).all()
    dense[200] *= 1.001
    assert (np.abs(packed.backward(d_out).numpy() - wide @ dense) > bound_sum(wide, dense)).any()


def test_a_row_does_not_depend_on_the_others(pool):
    """Bit by bit: alone and among others, with one thread and with two."""
    case = Case("int8g128", pool, tokens=130)
    d_x, d_w = case.run_kernel()
    lone = case.experts.backward(*(t[7:8] for t in (case.x, case.ids, case.weights, case.d_out)))
    assert torch.equal(lone[0][0], d_x[7])
    assert torch.equal(lone[1][0], d_w[7])
    single = Case("int8g128", ThreadPool(1), tokens=130).run_kernel()
    assert torch.equal(single[0], d_x)
    assert torch.equal(single[1], d_w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autograd_nodes(dtype, pool):
    """torch's graph gets the kernels' gradients in the dtypes of its tensors."""
    case = Case("int8g128", pool)
    x, w = case.x.to(dtype).requires_grad_(), case.weights.to(dtype).requires_grad_()
    out = run_experts(case.experts, x, case.ids, w)
    assert out.dtype == dtype
    out.backward(case.d_out.to(dtype))
    d_out = case.d_out.to(dtype).float()
    wanted = case.experts.backward(x.detach().float(), case.ids, w.detach().float(), d_out)
    assert torch.equal(x.grad, wanted[0].to(dtype))
    assert torch.equal(w.grad, wanted[1].to(dtype))
    matrix = PackedLinear.pack(case.weight_format, case.down[0], pool=pool)
    y = torch.randn(2, 3, 256, requires_grad=True)
    multiply_frozen(matrix, y).sum().backward()
    assert torch.equal(y.grad.view(6, -1), matrix.backward(torch.ones(6, 256)))


def test_what_has_no_gradient_is_refused(pool):
    """GELU experts, and tensors of a wrong shape or dtype."""
    case = Case("int8g128", pool, activation=Activation("gelu"))
    with pytest.raises(UnsupportedError, match="GELU"):
        case.run_kernel()
    case = Case("int8g128", pool)
    with pytest.raises(ShapeError, match="d_out"):
        case.experts.backward(case.x, case.ids, case.weights, case.d_out[:3])
    with pytest.raises(ShapeError, match="x is"):
        case.experts.backward(case.x.bfloat16(), case.ids, case.weights, case.d_out)

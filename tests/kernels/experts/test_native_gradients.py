"""Goal: gradients through packed experts and matrices are those of the dequantized weights.

Method: the chain rule in float64 (``tandem.kernels.oracles.gradients``), which torch's float64
autograd confirms. Each stage of the kernel is compared elementwise with derived bounds, and the
whole with exact gradients; mutants of the oracle must be told apart from the kernel.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from each import each
from quick import rest_slow
from tandem._native import ThreadPool, kernel_isas
from tandem.core.errors import ShapeError
from tandem.core.model.layers import SILU, Activation
from tandem.kernels.cpu.autograd import multiply_frozen, run_experts
from tandem.kernels.cpu.experts import PackedExperts
from tandem.kernels.cpu.linear import PackedLinear
from tandem.kernels.oracles.gradients import (
    BF16_EPS,
    Stages,
    bound_turned,
    check_stages,
    choose_rounding,
    list_pairs,
    run_gradients,
)
from tandem.kernels.oracles.packed import Layer, decode, round_values
from tandem.kernels.weights.formats import WEIGHT_FORMATS, find_format

FORMATS = ["f32", "bf16", "int8row", "int8g128", "int8g16", "int8g32min", "int4g32", "int4g32sym"]
FORMATS += ["fp8", "fp8row", "mxfp4"]
KINDS = ("bf16", "int8g128", "mxfp4")
"""A format of values, of integers and of codes of floats."""
EDGES = ("plain", "amx_emulated")
GPT_OSS = Activation(alpha=1.702, limit=1.0, up_offset=1.0)


@pytest.fixture(scope="module")
def pool():
    return ThreadPool(2)


class Case:
    """Random experts and tokens; of three experts one is never chosen, one by all tokens."""

    def __init__(self, name, pool, *, isa=None, tokens=21, activation=SILU, bias=False, parts=1):
        self.weight_format = find_format(name)
        # Values take any size: here odd ones.
        is_odd = self.weight_format.holds_values and parts == 1
        hidden, inner = (131, 77) if is_odd else (256, 256)
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

    def run_stages(self, delta=None, extra=None):
        """Forward, then backward with what it kept; gate and up are padded."""
        pairs, columns = int((self.ids >= 0).sum()), self.experts.inner_columns
        inner = self.gate_up.shape[1] // 2
        options = {"dtype": self.experts.inner_dtype}
        kept, d_gate_up = (torch.full((pairs, 2 * columns), 9.0, **options) for _ in range(2))
        call = (self.x, self.ids, self.weights)
        self.experts.forward(*call, delta_PC=delta, kept_PC=kept)
        results = self.experts.backward(
            None,
            *call[1:],
            self.d_out,
            kept_PC=kept,
            extra_PF=extra,
            d_gate_up_PC=d_gate_up,
        )
        arrays = [
            t.view(pairs, 2, columns)[..., :inner].double().numpy() for t in (kept, d_gate_up)
        ]
        return Stages(*arrays, *(t.double().numpy() for t in results))

    def count_outside(self, layer, stages=None, **added):
        weights, d_out = self.weights.double().numpy(), self.d_out.numpy()
        stages = self.run_stages() if stages is None else stages
        call = (layer, self.x.numpy(), self.ids.numpy(), weights, d_out, stages)
        return check_stages(*call, **added)


def find_angles(got, wanted):
    """Return the distance of each gradient relative to its length."""
    pairs = zip(got, wanted, strict=True)
    return [np.linalg.norm(g.double().numpy() - w) / np.linalg.norm(w) for g, w in pairs]


def none_outside(counts):
    assert set(counts) == {"kept", "d_gate_up", "d_x", "d_weights"}
    return not any(counts.values())


def mark_slow(isas):
    """Return (format, ISA) of a test: all formats on the widest of ISAs, three on the others."""
    return [
        (name, isa)
        if isa == kernel_isas()[-1] or (isa in EDGES and name in KINDS)
        else pytest.param(name, isa, marks=pytest.mark.slow)
        for isa in isas
        for name in FORMATS
    ]


@pytest.mark.parametrize(("name", "isa"), mark_slow([*kernel_isas(), "amx_emulated"]))
def test_experts(name, isa, pool):
    """Every format on every instruction set, an expert unused, a slot computed elsewhere."""
    case = Case(name, pool, isa=isa)
    counts = case.count_outside(case.make_layer())
    assert none_outside(counts), counts


ACTIVATIONS = [GPT_OSS, Activation("gelu"), Activation("gelu_tanh")]


@each("options", [{"bias": True, "activation": a} for a in ACTIVATIONS] + [{"parts": 2}])
@each("tokens", [1, 150])
@pytest.mark.parametrize("name", ["f32", "int8g128", pytest.param("fp8", marks=pytest.mark.slow)])
def test_biases_limits_parts_and_many_rows(name, options, tokens, pool):
    """gpt-oss's experts, GELUs, weights split for two nodes, and more rows than a block takes."""
    case = Case(name, pool, tokens=tokens, **options)
    counts = case.count_outside(case.make_layer())
    assert none_outside(counts), counts


@each("name", FORMATS)
def test_the_whole_is_near_the_exact_gradient(name, pool):
    """Nothing rounded in the oracle: the distance is that of bf16, of int8 activations, or none."""
    case = Case(name, pool, tokens=40)
    # Four factors of a term are rounded to bf16, each by at most BF16_EPS and half of it on
    # average. An int8 code is off by up to 1/254 of its group's largest value, three deviations
    # here: 0.7 % of the input, more in the product of gate and up.
    bound = 2**-5 if case.weight_format.is_integer else 2 * BF16_EPS
    bound = 2**-20 if name == "f32" else bound
    angles = find_angles(case.run_kernel(), case.run_oracle(case.make_layer()))
    assert max(angles) < bound, angles


@pytest.mark.parametrize("name", ["f32", "int8g128"])
def test_many_outputs(name, pool):
    """A hidden size beyond what is turned at a time, and more rows than a task takes."""
    weight_format, tokens, hidden, inner = find_format(name), 530, 1152, 128
    generator = torch.Generator().manual_seed(3)
    case = Case.__new__(Case)
    case.weight_format, case.biases, case.activation = weight_format, None, SILU
    case.gate_up = torch.randn(1, 2 * inner, hidden, generator=generator) * hidden**-0.5
    case.down = torch.randn(1, hidden, inner, generator=generator) * inner**-0.5
    case.x, case.d_out = torch.randn(2, tokens, hidden, generator=generator).unbind()
    case.weights = torch.rand(tokens, 1, generator=generator)
    case.ids = torch.zeros(tokens, 1, dtype=torch.int64)
    case.experts = PackedExperts.pack(weight_format, case.gate_up, case.down, pool=pool)
    counts = case.count_outside(case.make_layer())
    assert none_outside(counts), counts


ADAPTED = [(name, parts) for name in ("f32", "bf16", "int8g128") for parts in (1, 2)]


@pytest.mark.parametrize(("name", "parts"), rest_slow([("f32", 1), ("int8g128", 2)], ADAPTED))
def test_what_an_adapter_adds(name, parts, pool):
    """Values added to gate and up, and to the gradient of the intermediate; a mutant of each."""
    case = Case(name, pool, parts=parts)
    pairs, inner = int((case.ids >= 0).sum()), case.gate_up.shape[1] // 2
    columns = case.experts.inner_columns
    delta, extra = torch.zeros(pairs, 2, columns), torch.zeros(pairs, columns)
    delta[..., :inner] = torch.randn(pairs, 2, inner)
    extra[:, :inner] = torch.randn(pairs, inner)
    stages = case.run_stages(delta.view(pairs, -1), extra)
    wide = [t[..., :inner].double().numpy() for t in (delta, extra)]
    layer = case.make_layer()

    def count(delta, extra):
        return case.count_outside(layer, stages, delta=delta, extra=extra)

    assert none_outside(count(*wide))
    assert count(wide[0] * 1.02, wide[1])["kept"]
    assert count(wide[0], wide[1] * 1.02)["d_gate_up"]


@pytest.mark.parametrize("name", ["f32", "int8g128"])
def test_kept_or_computed_again_is_the_same(name, pool):
    """Bit by bit, with what an adapter added, from an input in bf16."""
    case = Case(name, pool)
    pairs, columns = int((case.ids >= 0).sum()), 2 * case.experts.inner_columns
    kept = torch.empty(pairs, columns, dtype=case.experts.inner_dtype)
    delta = torch.randn(pairs, columns)
    call = (case.x.bfloat16(), case.ids, case.weights)
    case.experts.forward(*call, delta_PC=delta, kept_PC=kept)
    again = case.experts.backward(*call, case.d_out, delta_PC=delta)
    for a, b in zip(
        again, case.experts.backward(None, *call[1:], case.d_out, kept_PC=kept), strict=True
    ):
        assert torch.equal(a, b)


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
    for want, tensor in zip(case.run_oracle(layer), (x, w), strict=True):
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


@each("mutant", MUTANTS)
@pytest.mark.parametrize("name", rest_slow(["f32", "int4g32"], ["f32", "bf16", "int4g32"]))
def test_mutants_are_caught(mutant, name, pool):
    """The bounds are narrow enough to see a small mistake."""
    case = Case(name, pool)
    assert not none_outside(case.count_outside(MUTANTS[mutant](case.make_layer())))


@each("stage", ["kept", "d_gate_up", "d_x", "d_weights"])
def test_mutants_of_each_stage_are_caught(stage, pool):
    """One value in a hundred that is off by a hundredth is seen where it is."""
    case = Case("int8g128", pool)
    stages = case.run_stages()
    values = getattr(stages, stage)
    values.flat[::100] *= 1.01
    assert case.count_outside(case.make_layer(), stages)[stage]


def test_pairs_are_in_the_kernels_order():
    """By expert, then token, then slot."""
    experts, tokens, slots = list_pairs(np.array([[2, 0], [0, -1], [2, 2]]))
    assert experts.tolist() == [0, 0, 2, 2, 2]
    assert tokens.tolist() == [0, 1, 0, 2, 2]
    assert slots.tolist() == [1, 0, 0, 0, 1]


@pytest.mark.parametrize(("name", "isa"), mark_slow([kernel_isas()[-1], *EDGES]))
def test_matrices(name, isa, pool):
    """dX = dY W for odd numbers of rows and outputs, added or not, and a mutant."""
    weight_format = WEIGHT_FORMATS[name]
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(1101, 256, generator=generator)
    d_out = torch.randn(59, 1101, generator=generator).bfloat16()
    decoded = decode(weight.numpy(), weight_format)
    wide, dense = d_out.double().numpy(), round_values(decoded, choose_rounding(weight_format))
    packed = PackedLinear.pack(weight_format, weight, pool=pool, isa=isa)
    d_x, bound = packed.backward(d_out), bound_turned(wide, dense)
    assert torch.equal(packed.backward(d_out.float()), d_x)
    assert (np.abs(d_x.numpy() - wide @ dense) <= bound).all()
    added = packed.backward(d_out, out_TK=torch.ones(59, 256))
    assert (np.abs(added.numpy() - 1 - wide @ dense) <= bound + 2**-20).all()
    dense[200] *= 1.01
    assert (np.abs(d_x.numpy() - wide @ dense) > bound).any()


@pytest.mark.parametrize("name", ["f32", "int8g128"])
def test_a_row_does_not_depend_on_the_others(name, pool):
    """Bit by bit: alone and among others, with one thread and with two."""
    case = Case(name, pool, tokens=130)
    d_x, d_w = case.run_kernel()
    lone = case.experts.backward(*(t[7:8] for t in (case.x, case.ids, case.weights, case.d_out)))
    assert torch.equal(lone[0][0], d_x[7])
    assert torch.equal(lone[1][0], d_w[7])
    single = Case(name, ThreadPool(1), tokens=130).run_kernel()
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


def test_what_does_not_fit_is_refused(pool):
    """Tensors of a wrong shape or dtype."""
    case = Case("int8g128", pool)
    with pytest.raises(ShapeError, match="d_out"):
        case.experts.backward(case.x, case.ids, case.weights, case.d_out[:, :3])
    with pytest.raises(ShapeError, match="x is"):
        case.experts.backward(case.x.double(), case.ids, case.weights, case.d_out)
    with pytest.raises(ShapeError, match="neither x nor kept"):
        case.experts.backward(None, case.ids, case.weights, case.d_out)
    with pytest.raises(ShapeError, match="kept is"):
        kept = torch.empty(3, 3, dtype=torch.bfloat16)
        case.experts.backward(None, case.ids, case.weights, case.d_out, kept_PC=kept)


def test_checkpointing_and_accumulation(pool):
    """Checkpointed layers give the same bits; halves of a batch sum to the whole's gradient."""
    case = Case("int8g128", pool, tokens=40)
    # In float64: torch's sums in float32 depend on the number of rows, and a last bit of theirs can
    # turn a code of the experts' int8 activations.
    layer = torch.nn.Linear(256, 256, bias=False, dtype=torch.float64)

    def learn(rows, *, is_kept=True, is_checkpointed=False):
        call = (case.ids[rows], case.weights[rows])

        def block(x):
            return run_experts(case.experts, layer(x).float(), *call, is_kept=is_kept)

        x = case.x[rows].double()
        out = checkpoint(block, x, use_reentrant=False) if is_checkpointed else block(x)
        out.backward(case.d_out[rows])

    def find_gradient(*calls):
        layer.weight.grad = None
        for rows, options in calls:
            learn(rows, **options)
        return layer.weight.grad

    everything = slice(None)
    whole = find_gradient((everything, {}))
    for options in ({"is_kept": False}, {"is_checkpointed": True}):
        assert torch.equal(find_gradient((everything, options)), whole)
    halves = find_gradient((slice(0, 20), {}), (slice(20, 40), {}))
    torch.testing.assert_close(halves, whole, rtol=1e-5, atol=1e-5 * float(whole.abs().max()))

"""Goal: the expert kernels compute what their weights' codes say, to within rounding.

Method: the float64 oracle and the elementwise tolerance of ``tandem.kernels.oracles.packed``.
Mutants of the oracle must all be told apart from the kernel, which shows that the tolerance can
fail.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from each import each
from tandem._native import ThreadPool, kernel_isas
from tandem.core.model.layers import SILU, Activation
from tandem.kernels.cpu.experts import PackedExperts
from tandem.kernels.oracles.packed import Layer, activate, decode, run_experts
from tandem.kernels.weights.formats import WEIGHT_FORMATS, WeightFormat

ISAS = [*kernel_isas(), "amx_emulated"]
"""The last has AMX's arithmetic in plain code; it is never chosen unless it is named."""
FORMATS = [
    "f32",
    "bf16",
    "fp8",
    "fp8row",
    "mxfp4",
    "int8row",
    "int8g128",
    "int8g32",
    "int8g16",
    "int8g128min",
    "int4g32",
    "int4g128sym",
]
ACTIVATIONS = [
    Activation("gelu"),
    Activation("gelu_tanh"),
    Activation(alpha=1.702, limit=7.0, up_offset=1.0),
    Activation(limit=0.5),
]


@dataclass
class Case:
    gate_up: torch.Tensor
    down: torch.Tensor
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    biases: list[torch.Tensor] | None = None
    activation: Activation = SILU
    num_parts: int = 1


def make_layer(case: Case, weight_format: WeightFormat) -> Layer:
    half = case.gate_up.shape[1] // 2
    parts = (case.gate_up[:, :half], case.gate_up[:, half:], case.down)
    gate, up, down = (np.stack([decode(m.numpy(), weight_format) for m in p]) for p in parts)
    biases = None
    if case.biases is not None:
        gate_bias, up_bias, down_bias = (bias.double().numpy() for bias in case.biases)
        biases = (gate_bias, up_bias, down_bias)
    return Layer(weight_format, gate, up, down, biases, case.activation)


def run_oracle(layer: Layer, case: Case) -> tuple[np.ndarray, np.ndarray]:
    return run_experts(layer, case.x.float().numpy(), case.ids.numpy(), case.weights.numpy())


def make_case(
    seed: int, *, experts: int = 4, hidden: int = 256, inner: int = 128, tokens: int = 13
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    top_k = min(2, experts)
    ids = [torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]
    return Case(
        gate_up=normal(experts, 2 * inner, hidden) / hidden**0.5,
        down=normal(experts, hidden, inner) / inner**0.5,
        x=normal(tokens, hidden),
        ids=torch.stack(ids) if ids else torch.zeros(0, top_k, dtype=torch.int64),
        weights=torch.rand(tokens, top_k, generator=generator),
    )


@pytest.fixture(scope="module")
def pool() -> ThreadPool:
    return ThreadPool(2, oversubscribe=True)


def run_kernel(case: Case, weight_format: WeightFormat, pool: ThreadPool, isa: str) -> np.ndarray:
    count, rows, hidden = case.gate_up.shape
    experts = PackedExperts(
        weight_format,
        count,
        hidden,
        rows // 2,
        pool=pool,
        isa=isa,
        activation=case.activation,
        has_bias=case.biases is not None,
        num_parts=case.num_parts,
    )
    for i, (gate_up, down) in enumerate(zip(case.gate_up, case.down, strict=True)):
        experts.pack_expert(i, *gate_up.chunk(2), down)
        if case.biases is not None:
            experts.set_bias(i, *(bias[i] for bias in case.biases))
    return experts.forward(case.x, case.ids, case.weights).numpy().astype(np.float64)


def check(case: Case, name: str, pool: ThreadPool, *isas: str) -> None:
    weight_format = WEIGHT_FORMATS[name]
    want, tolerance = run_oracle(make_layer(case, weight_format), case)
    assert np.isfinite(want).all()
    for isa in isas:
        got = run_kernel(case, weight_format, pool, isa)
        worst = (np.abs(got - want) / tolerance).max(initial=0)
        assert worst <= 1, f"{isa}: error is {worst:.2f} of the tolerance"


@each("name", [name for name, held in WEIGHT_FORMATS.items() if not held.is_stored_only])
def test_matches_the_oracle(name: str, pool: ThreadPool):
    check(make_case(1), name, pool, *ISAS)


@each(
    ("name", "hidden", "inner"),
    [
        ("f32", 77, 35),
        ("f32", 1, 1),
        ("bf16", 77, 35),
        ("bf16", 1, 1),
        ("int8g16", 48, 80),
        ("int8g32", 96, 160),
        ("int4g32", 160, 96),
        ("int8g128", 128, 384),
        ("int8row", 77, 35),
        ("int8row", 130, 200),
        ("fp8", 77, 35),
        ("fp8", 130, 200),
        ("fp8row", 77, 35),
        ("fp8row", 130, 200),
        ("mxfp4", 33, 70),
    ],
)
def test_odd_sizes(name: str, hidden: int, inner: int, pool: ThreadPool):
    check(make_case(2, hidden=hidden, inner=inner, experts=3, tokens=7), name, pool, *ISAS)


@each("name", FORMATS)
@pytest.mark.parametrize(
    "tokens", [1, 2, 6, 7, 50, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 16, 97))]
)
def test_every_regime(name: str, tokens: int, pool: ThreadPool):
    """One expert, so that it has this many rows: one, a register block, a chunk and their edges."""
    check(make_case(3, experts=1, tokens=tokens), name, pool, kernel_isas()[-1])


@each("name", FORMATS)
def test_input_in_bf16(name: str, pool: ThreadPool):
    case = make_case(4)
    check(replace(case, x=case.x.bfloat16()), name, pool, kernel_isas()[-1])


@each("name", ["f32", "bf16", "fp8", "int8g32", "int4g32"])
@each("scale", [1e-38, 1e-20, 1e-4, 1e4, 1e15])
def test_magnitudes_of_the_input(name: str, scale: float, pool: ThreadPool):
    """Denormal to huge; silu is linear, zero or square there."""
    case = make_case(5, tokens=5)
    check(replace(case, x=case.x * scale), name, pool, *ISAS)


def test_weights_of_unequal_magnitude(pool: ThreadPool):
    case = make_case(6)
    factors = torch.logspace(-6, 3, case.gate_up.shape[2])
    for name in FORMATS:
        check(replace(case, gate_up=case.gate_up * factors), name, pool, kernel_isas()[-1])


def with_biases(case: Case) -> Case:
    generator = torch.Generator().manual_seed(9)
    sizes = (case.gate_up.shape[1] // 2, case.gate_up.shape[1] // 2, case.down.shape[1])
    biases = [torch.randn(len(case.down), size, generator=generator) for size in sizes]
    return replace(case, biases=biases)


@each("activation", ACTIVATIONS)
@each("name", ["f32", "bf16", "int8g32"])
def test_activations_and_biases(name: str, activation: Activation, pool: ThreadPool):
    case = make_case(10, experts=3, tokens=6)
    case.x[1] *= 30  # Into the flat parts, beyond limits, and where exponentials are cut off.
    case.x[2] *= 1e4
    case.x[3] *= 1e-6
    check(replace(with_biases(case), activation=activation), name, pool, *ISAS)


@each("activation", ACTIVATIONS)
def test_activations_at_hard_gates(activation: Activation, pool: ThreadPool):
    """One weight a gate, so that gates are what the input says, exactly."""
    gates = torch.tensor([0.0, 1e-30, -1e-30, 0.6, 1.3, -1.3, 5, -5, 9, -9.9, -10.1, 60, -80, -95])
    gates = torch.cat([gates, torch.tensor([1e6, -1e6, 1e30, -1e30]), torch.linspace(-6, 6, 99)])
    size = len(gates)
    case = Case(
        gate_up=torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]),
        down=torch.tensor([[[1.0], [0.0]]]),
        x=torch.stack([gates.bfloat16().float(), torch.ones(size)], 1),
        ids=torch.zeros(size, 1, dtype=torch.int64),
        weights=torch.ones(size, 1),
        activation=activation,
    )
    check(case, "bf16", pool, *ISAS)


def test_activation_oracle_against_torch():
    g = torch.linspace(-12, 12, 201, dtype=torch.float64)
    functions = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda v: torch.nn.functional.gelu(v, approximate="tanh"),
    }
    for name, function in functions.items():
        f, _ = activate(g.numpy(), Activation(name))
        np.testing.assert_allclose(f, function(g).numpy(), rtol=1e-9, atol=1e-12)


@each("name", FORMATS)
@pytest.mark.parametrize(
    "num_parts", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))]
)
def test_parts(name: str, num_parts: int, pool: ThreadPool):
    """Uneven shares: of 5 blocks of columns or of 10, whatever the format makes of 640."""
    case = with_biases(make_case(11, hidden=128, inner=640, experts=2, tokens=7))
    check(replace(case, num_parts=num_parts), name, pool, kernel_isas()[-1])


def mutate(layer: Layer, mutant: str) -> Layer:
    gate, up, down = layer.gate.copy(), layer.up.copy(), layer.down.copy()
    last = max(layer.weight_format.group_size, 32)
    if mutant == "scale up by a percent":
        up *= 1.01
    elif mutant == "scale down of one expert":
        down[2] *= 1.01
    elif mutant == "skip the last group of gate":
        gate[:, :, -last:] = 0
    elif mutant == "skip the last group of down":
        down[:, :, -last:] = 0
    elif mutant == "zero 16 columns":
        down[:, 16:32] = 0
    elif mutant == "zero 16 columns of the intermediate":
        up[:, 16:32] = 0
    elif mutant == "swap two experts":
        gate, up, down = (w[[1, 0, 2, 3]] for w in (gate, up, down))
    elif mutant == "swap gate and up":
        gate, up = up, gate
    elif mutant == "another activation":
        return replace(layer, activation=Activation("gelu"))
    elif mutant == "forget a bias":
        assert layer.biases is not None
        gate_bias, up_bias, down_bias = layer.biases
        return replace(layer, biases=(gate_bias, 0 * up_bias, down_bias))
    else:
        assert mutant == "drop an expert"
        down[3] = 0
    return replace(layer, gate=gate, up=up, down=down)


MUTANTS = [
    "scale up by a percent",
    "scale down of one expert",
    "skip the last group of gate",
    "skip the last group of down",
    "zero 16 columns",
    "zero 16 columns of the intermediate",
    "swap two experts",
    "swap gate and up",
    "drop an expert",
    "another activation",
    "forget a bias",
]


@each("name", FORMATS)
def test_mutants_are_caught(name: str, pool: ThreadPool):
    case = with_biases(make_case(7))
    got = run_kernel(case, WEIGHT_FORMATS[name], pool, kernel_isas()[-1])
    layer = make_layer(case, WEIGHT_FORMATS[name])
    for mutant in MUTANTS:
        want, tolerance = run_oracle(mutate(layer, mutant), case)
        assert (np.abs(got - want) > tolerance).any(), f"{mutant} was not noticed"


@each(
    ("name", "bound"),
    [
        ("bf16", 0.005),
        ("fp8", 0.05),
        ("fp8row", 0.05),
        ("mxfp4", 0.21),
        ("int8row", 0.024),
        ("int8g32", 0.016),
        ("int8g128", 0.021),
        ("int4g32", 0.145),
        ("int4g32sym", 0.175),
    ],
)
def test_error_against_the_weights_themselves(name: str, bound: float, pool: ThreadPool):
    case = make_case(8, experts=1, hidden=2048, inner=768, tokens=8)
    got = run_kernel(case, WEIGHT_FORMATS[name], pool, kernel_isas()[-1])
    gate, up = case.gate_up[0].double().chunk(2)
    hidden = torch.nn.functional.silu(case.x.double() @ gate.T) * (case.x.double() @ up.T)
    want = (hidden @ case.down[0].double().T * case.weights.double()).numpy()
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert 0.5 * bound < error <= bound

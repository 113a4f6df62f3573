"""Goal: the expert kernels compute what their weights' codes say, to within rounding.

Method: a float64 oracle over naively dequantised weights and naively coded activations, and an
elementwise tolerance derived beside it (``bound_*``): rounding of every fp32 operation in the order
of magnitude of its terms, and activation codes that may fall on the other side of a tie. Mutants of
the oracle must all be told apart from the kernel, which shows that the tolerance can fail.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from tandem._native import ThreadPool, kernel_isas
from tandem.kernels.formats import (
    WEIGHT_FORMATS,
    WeightFormat,
    dequantize,
    quantize,
    round_to_bf16,
)
from tandem.kernels.native_experts import PackedExperts

EPS = 2.0**-24
"""Relative error of one fp32 rounding."""
TINY = 2.0**-126
"""What an operation loses where denormals are flushed, as vdpbf16ps does."""
SILU_EPS = 16 * EPS
"""Of silu(g) * u: the exponential's 2 ulp, a sum, a division, a product."""
SILU_SLOPE = 1.1
"""The largest derivative of silu is 1.0998."""
SMALLEST_AMAX = 1e-30
"""Groups of activations below are coded as zeros."""

FORMATS = ["bf16", "int8g128", "int8g32", "int8g16", "int8g128min", "int4g32", "int4g128sym"]


@dataclass
class Layer:
    """Decoded weights: gate and up [E, F, D], down [E, D, F], float64, with their magnitudes."""

    weight_format: WeightFormat
    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray


def decode(matrices: torch.Tensor, weight_format: WeightFormat) -> np.ndarray:
    arrays = [matrix.numpy() for matrix in matrices]
    if not weight_format.is_integer:
        return np.stack([round_to_bf16(a).astype(np.float64) for a in arrays])
    return np.stack([dequantize(quantize(a, weight_format)) for a in arrays])


def make_layer(gate_up: torch.Tensor, down: torch.Tensor, weight_format: WeightFormat) -> Layer:
    half = gate_up.shape[1] // 2
    parts = (gate_up[:, :half], gate_up[:, half:], down)
    return Layer(weight_format, *(decode(part, weight_format) for part in parts))


def code_exactly(x: np.ndarray, weight_format: WeightFormat) -> np.ndarray:
    """Code an input as the kernels do: it is float32, so the codes can be the same ones."""
    if not weight_format.is_integer:
        return round_to_bf16(x).astype(np.float64)
    groups = x.astype(np.float32).reshape(-1, weight_format.group_size)
    amax = np.abs(groups).max(-1, keepdims=True)
    is_zero = amax < SMALLEST_AMAX
    inverse = np.float32(127) / np.where(is_zero, np.float32(1), amax)
    codes = np.where(is_zero, 0, np.rint(groups * inverse)).astype(np.float64)
    step = np.where(is_zero, 0, amax / np.float32(127)).astype(np.float64)
    return (codes * step).reshape(x.shape)


def code_nearly(
    h: np.ndarray, error: np.ndarray, weight_format: WeightFormat
) -> tuple[np.ndarray, np.ndarray]:
    """Code the intermediate; return it and how far the kernel's codes may be from it.

    The kernel's value lies in [h - error, h + error]. Coding is monotonic, so the codes of the two
    ends enclose the kernel's.
    """
    if not weight_format.is_integer:
        error = error + EPS * np.abs(h)
        middle, low, high = (round_to_bf16(v).astype(np.float64) for v in (h, h - error, h + error))
        return middle, np.maximum(high - middle, middle - low)
    shape = h.shape
    h, error = (v.reshape(-1, weight_format.group_size) for v in (h, error))
    amax = np.abs(h).max(-1, keepdims=True)
    amax_error = error.max(-1, keepdims=True) + EPS * amax
    is_zero = amax + amax_error < SMALLEST_AMAX
    safe = np.where(amax == 0, 1, amax)
    step = amax / 127
    code = np.where(is_zero, 0, h / safe * 127)
    # Of h * (127 / amax): both quotients and the product round once.
    blur = 127 * (error / safe + np.abs(h) / safe * amax_error / safe + 3 * EPS)
    middle = np.rint(code)
    spread = np.maximum(np.rint(code + blur) - middle, middle - np.rint(code - blur))
    bound = step * spread + np.abs(middle) * (amax_error / 127 + EPS * step)
    may_vanish = amax - amax_error < SMALLEST_AMAX
    bound = np.where(may_vanish, np.abs(h) + error, bound)
    return (middle * step).reshape(shape), bound.reshape(shape)


def bound_product(rows: np.ndarray, weights: np.ndarray, weight_format: WeightFormat) -> np.ndarray:
    """Bound the error of rows [T, K] times weights [N, K] from exact operands."""
    size = rows.shape[1]
    magnitude = np.abs(rows) @ np.abs(weights).T
    if not weight_format.is_integer:
        # One rounding per product and sum, and what is flushed in either.
        flushed = 2 * size * TINY * (1 + np.abs(rows).max() + np.abs(weights).max())
        return (size + 4) * EPS * magnitude + flushed
    num_groups = size // weight_format.group_size
    if not weight_format.has_minimum:
        # Integer sums are exact; per group the product of the scales and the fma round.
        return (num_groups + 3) * EPS * magnitude
    # Codes and minimum are added apart: their terms are larger than the weights they sum to.
    groups = weights.reshape(len(weights), num_groups, -1)
    minimum = np.abs(groups.min(-1, keepdims=True))
    terms = (np.abs(groups) + 2 * minimum).reshape(weights.shape)
    return (2 * num_groups + 4) * EPS * (np.abs(rows) @ terms.T)


def run_expert(layer: Layer, expert: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return one expert's output for coded rows [T, D], and its error bound."""
    gate, up, down = layer.gate[expert], layer.up[expert], layer.down[expert]
    g, u = rows @ gate.T, rows @ up.T
    g_error = bound_product(rows, gate, layer.weight_format)
    u_error = bound_product(rows, up, layer.weight_format)
    silu = g / (1 + np.exp(-np.clip(g, -700, None)))
    h = silu * u
    h_error = SILU_SLOPE * g_error * (np.abs(u) + u_error) + np.abs(silu) * u_error
    h_error += SILU_EPS * np.abs(h) + SMALLEST_AMAX * (1 + np.abs(u))
    h, h_error = code_nearly(h, h_error, layer.weight_format)
    y_error = bound_product(h, down, layer.weight_format) + h_error @ np.abs(down).T
    return h @ down.T, y_error


def run_oracle(
    layer: Layer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """Return the layer's output [T, D] and the elementwise tolerance."""
    rows = code_exactly(x.float().numpy(), layer.weight_format)
    out, tolerance = np.zeros(rows.shape), np.zeros(rows.shape)
    magnitude = np.zeros(rows.shape)
    for expert in range(len(layer.gate)):
        tokens, slots = np.nonzero(ids.numpy() == expert)
        y, error = run_expert(layer, expert, rows[tokens])
        w = weights.numpy().astype(np.float64)[tokens, slots][:, None]
        np.add.at(out, tokens, w * y)
        np.add.at(tolerance, tokens, np.abs(w) * error)
        np.add.at(magnitude, tokens, np.abs(w * y))
    return out, tolerance + (ids.shape[1] + 1) * EPS * magnitude + TINY


@dataclass
class Case:
    gate_up: torch.Tensor
    down: torch.Tensor
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


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
    experts = PackedExperts.pack(weight_format, case.gate_up, case.down, pool=pool, isa=isa)
    return experts.forward(case.x, case.ids, case.weights).numpy().astype(np.float64)


def check(case: Case, name: str, pool: ThreadPool, isa: str) -> None:
    weight_format = WEIGHT_FORMATS[name]
    got = run_kernel(case, weight_format, pool, isa)
    layer = make_layer(case.gate_up, case.down, weight_format)
    want, tolerance = run_oracle(layer, case.x, case.ids, case.weights)
    assert np.isfinite(want).all()
    worst = (np.abs(got - want) / tolerance).max(initial=0)
    assert worst <= 1, f"error is {worst:.2f} of the tolerance"


@pytest.mark.parametrize("isa", kernel_isas())
@pytest.mark.parametrize("name", FORMATS)
def test_matches_the_oracle(name: str, isa: str, pool: ThreadPool):
    check(make_case(1), name, pool, isa)


@pytest.mark.parametrize("isa", kernel_isas())
@pytest.mark.parametrize(
    ("name", "hidden", "inner"),
    [
        ("bf16", 77, 35),
        ("bf16", 1, 1),
        ("int8g16", 48, 80),
        ("int8g32", 96, 160),
        ("int4g32", 160, 96),
        ("int8g128", 128, 384),
    ],
)
def test_odd_sizes(name: str, hidden: int, inner: int, isa: str, pool: ThreadPool):
    check(make_case(2, hidden=hidden, inner=inner, experts=3, tokens=7), name, pool, isa)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 7, 16, 50, 97])
def test_every_regime(name: str, tokens: int, pool: ThreadPool):
    """One expert, so that it has this many rows: one, a register block, a chunk and their edges."""
    check(make_case(3, experts=1, tokens=tokens), name, pool, kernel_isas()[-1])


@pytest.mark.parametrize("name", FORMATS)
def test_input_in_bf16(name: str, pool: ThreadPool):
    case = make_case(4)
    check(replace(case, x=case.x.bfloat16()), name, pool, kernel_isas()[-1])


@pytest.mark.parametrize("isa", kernel_isas())
@pytest.mark.parametrize("name", ["bf16", "int8g32", "int4g32"])
@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1e-4, 1e4, 1e15])
def test_magnitudes_of_the_input(name: str, isa: str, scale: float, pool: ThreadPool):
    """Denormal to huge; silu is linear, zero or square there."""
    case = make_case(5, tokens=5)
    check(replace(case, x=case.x * scale), name, pool, isa)


def test_weights_of_unequal_magnitude(pool: ThreadPool):
    case = make_case(6)
    factors = torch.logspace(-6, 3, case.gate_up.shape[2])
    for name in FORMATS:
        check(replace(case, gate_up=case.gate_up * factors), name, pool, kernel_isas()[-1])


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
    else:
        assert mutant == "drop an expert"
        down[3] = 0
    return Layer(layer.weight_format, gate, up, down)


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
]


@pytest.mark.parametrize("name", FORMATS)
def test_mutants_are_caught(name: str, pool: ThreadPool):
    case = make_case(7)
    got = run_kernel(case, WEIGHT_FORMATS[name], pool, kernel_isas()[-1])
    layer = make_layer(case.gate_up, case.down, WEIGHT_FORMATS[name])
    for mutant in MUTANTS:
        want, tolerance = run_oracle(mutate(layer, mutant), case.x, case.ids, case.weights)
        assert (np.abs(got - want) > tolerance).any(), f"{mutant} was not noticed"


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("bf16", 0.005),
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

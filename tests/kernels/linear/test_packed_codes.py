"""Goal: codes that are there already are laid out as the packer lays out its own, byte by byte.

Method: the oracle of ``formats.quantize`` codes random weights; what the native core makes of the
codes must be the bytes that it makes of the weights. Codes and scales that stand for no number are
refused.
"""

import numpy as np
import pytest
import torch

from each import each
from tandem._native import ThreadPool
from tandem.core.errors import ConflictError, ShapeError, UnsupportedError
from tandem.kernels.cpu.experts import PackedExperts
from tandem.kernels.cpu.linear import PackedLinear
from tandem.kernels.weights.formats import (
    WEIGHT_FORMATS,
    QuantizedMatrix,
    quantize,
    select_rows,
    stack,
)

CODED = [
    name
    for name, held in WEIGHT_FORMATS.items()
    if not held.holds_values and not held.is_stored_only
]


@pytest.fixture(scope="module")
def pool() -> ThreadPool:
    return ThreadPool(2, oversubscribe=True)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def shape_of(name: str) -> tuple[int, int]:
    """Ragged where the format allows it."""
    return (200, 256 if WEIGHT_FORMATS[name].is_integer and name != "int8row" else 300)


@each("name", CODED)
def test_codes_of_a_matrix_make_the_packers_bytes(name: str, pool: ThreadPool):
    weights, bias = draw(*shape_of(name)), draw(200, seed=1)
    codes = quantize(weights.numpy(), WEIGHT_FORMATS[name])
    ours = PackedLinear.from_codes(codes, bias, pool=pool)
    theirs = PackedLinear.pack(WEIGHT_FORMATS[name], weights, bias, pool=pool)
    assert np.array_equal(ours.packed, theirs.packed)
    x = draw(3, weights.shape[1], seed=2)
    assert torch.equal(ours.forward(x), theirs.forward(x))


@each("name", CODED)
def test_codes_of_experts_make_the_packers_bytes(name: str, pool: ThreadPool):
    weight_format, hidden, inner = WEIGHT_FORMATS[name], 128, 256
    ours, theirs = (
        PackedExperts(weight_format, 2, hidden, inner, pool=pool, num_parts=parts)
        for parts in (1, 1)
    )
    split = PackedExperts(weight_format, 2, hidden, inner, pool=pool, num_parts=2)
    whole = PackedExperts(weight_format, 2, hidden, inner, pool=pool, num_parts=2)
    for i in range(2):
        gate, up = draw(inner, hidden, seed=3 * i), draw(inner, hidden, seed=3 * i + 1)
        down = draw(hidden, inner, seed=3 * i + 2)
        coded = [quantize(w.numpy(), weight_format) for w in (gate, up, down)]
        for bank in (ours, split):
            bank.pack_codes(i, coded[0], coded[1], coded[2])
        for bank in (theirs, whole):
            bank.pack_expert(i, gate, up, down)
    assert np.array_equal(ours.packed, theirs.packed)
    x, ids, weights = (
        draw(5, hidden, seed=9),
        torch.zeros(5, 1, dtype=torch.int64),
        torch.ones(5, 1),
    )
    assert torch.equal(split.forward(x, ids, weights), whole.forward(x, ids, weights))


@each("name", ["int8g32", "int4g64", "mxfp4", "fp8row"])
def test_stacked_and_selected_rows_are_those_of_the_whole(name: str):
    whole = quantize(draw(12, 128).numpy(), WEIGHT_FORMATS[name])
    parts = [select_rows(whole, slice(a, a + 4)) for a in (0, 4, 8)]
    again = stack(parts)
    for ours, theirs in zip(again.arrays, whole.arrays, strict=True):
        assert (ours is None and theirs is None) or np.array_equal(ours, theirs)


def damage(matrix: QuantizedMatrix, what: str, value: float) -> QuantizedMatrix:
    arrays = {"codes": matrix.codes.copy(), "scales": matrix.scales.copy()}
    minima = None if matrix.minima is None else matrix.minima.copy()
    target = minima if what == "minima" else arrays[what]
    target[-1, -1] = value
    return QuantizedMatrix(matrix.weight_format, arrays["codes"], arrays["scales"], minima)


@each(
    ("name", "what", "value"),
    [
        ("int4g32", "codes", 16),
        ("int4g32", "scales", np.inf),
        ("int4g32", "minima", np.nan),
        ("int5g32sym", "codes", 32),
        ("int8row", "scales", np.nan),
        ("fp8", "codes", 0x7F),
        ("fp8", "codes", 0xFF),
        ("fp8", "scales", np.inf),
        ("fp8row", "codes", 0xFF),
        ("fp8row", "scales", np.nan),
        ("mxfp4", "codes", 16),
        ("mxfp4", "scales", 3.0),
        ("mxfp4", "scales", 0.0),
        ("mxfp4", "scales", -1.0),
        ("mxfp4", "scales", np.inf),
    ],
)
def test_what_is_no_number_is_refused(name: str, what: str, value: float, pool: ThreadPool):
    matrix = quantize(draw(140, 128).numpy(), WEIGHT_FORMATS[name])
    with pytest.raises(UnsupportedError, match=r"output 1\d\d has"):
        PackedLinear.from_codes(damage(matrix, what, value), pool=pool)


def test_arrays_of_another_shape_or_type_are_refused(pool: ThreadPool):
    good = quantize(draw(8, 64).numpy(), WEIGHT_FORMATS["int4g32"])
    assert good.minima is not None
    wide = good.scales.astype(np.float32)
    wrong = [
        QuantizedMatrix(good.weight_format, good.codes, good.scales[:, :1].copy(), good.minima),
        QuantizedMatrix(good.weight_format, good.codes, good.scales, good.minima[:4].copy()),
        QuantizedMatrix(good.weight_format, good.codes, wide, good.minima),
    ]
    for matrix in wrong:
        with pytest.raises(ShapeError, match=r"scales|minima"):
            PackedLinear.from_codes(matrix, pool=pool)
    storage = PackedLinear.from_codes(good, pool=pool).packed
    kept = np.ascontiguousarray(storage)
    view = np.empty(len(kept) + 64, np.uint8)
    start = -view.ctypes.data % 64
    view = view[start : start + len(kept)]
    view.flags.writeable = False
    fixed = PackedLinear(good.weight_format, 64, 8, pool=pool, storage=view)
    with pytest.raises(ConflictError, match="read-only"):
        fixed._matrix.pack_codes(pool, *good.arrays)

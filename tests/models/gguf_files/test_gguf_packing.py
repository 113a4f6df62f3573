"""Goal: blocks that are laid out natively are the codes that numpy takes apart, byte for byte.

Method: random blocks of every kind packed both ways, in the kind's plain format and in each wider
one (``test_gguf_stored`` has the kind's own), as a matrix and as experts, in another order, of
several kinds, and within blocks; values decoded both ways; what is not a matrix of blocks is
refused by name.
"""

import numpy as np
import pytest
import torch
from test_gguf_blocks import draw_blocks, draw_sane

from tandem._native import ThreadPool, decode_blocks
from tandem.core.errors import ShapeError, UnsupportedError
from tandem.kernels.cpu.experts import PackedExperts
from tandem.kernels.cpu.linear import PackedLinear
from tandem.kernels.weights.blocks import (
    BlockMatrix,
    convert_codes,
    interleave_rows,
    select_outputs,
    stack_outputs,
)
from tandem.kernels.weights.formats import (
    WEIGHT_FORMATS,
    QuantizedMatrix,
    find_format,
    select_rows,
    stack,
)
from tandem.kernels.weights.recode import can_represent, make_plain, recode
from tandem.models.codecs.gguf_blocks import BLOCK_TYPES, dequantize, unpack
from tandem.models.sources.gguf_header import BLOCK_SIZES

INPUTS = 768
"""Three blocks of the largest kinds; with rows of 512 bytes and more, several chunks."""


@pytest.fixture(scope="module")
def pool():
    return ThreadPool(2)


def draw(kind: str, num_rows: int, inputs: int = INPUTS) -> BlockMatrix:
    per_row = inputs // BLOCK_SIZES[kind][0]
    raw = draw_sane(kind, num_rows * per_row).reshape(num_rows, -1)
    weight_format = make_plain(find_format(BLOCK_TYPES[kind].weight_format))
    return BlockMatrix(weight_format, inputs, ((kind, raw),))


def take_apart(matrix: BlockMatrix) -> QuantizedMatrix:
    """By numpy: each part, then their order."""
    parts = [
        recode(
            unpack(kind, rows.reshape(len(rows), -1, BLOCK_SIZES[kind][1])), matrix.weight_format
        )
        for kind, rows in matrix.parts
    ]
    whole = stack(parts)
    return whole if matrix.order is None else select_rows(whole, matrix.order)


def check_equal(matrix: BlockMatrix, pool: ThreadPool) -> None:
    got = PackedLinear.from_codes(matrix, pool=pool).packed
    assert np.array_equal(got, PackedLinear.from_codes(take_apart(matrix), pool=pool).packed)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_every_kind_in_every_format_that_holds_it(kind, pool):
    """Also with a last panel that is not full."""
    matrix = draw(kind, 100)
    wider = [f for f in WEIGHT_FORMATS.values() if can_represent(f, matrix.weight_format)]
    assert matrix.weight_format in wider
    for wide in wider:
        converted = convert_codes(matrix, wide)
        assert isinstance(converted, BlockMatrix)
        check_equal(converted, pool)


def test_rows_in_another_order_and_of_several_kinds(pool):
    """As q, k and v of several types, unpermuted, are one matrix."""
    wide = find_format("int8g16min")
    kinds = ("Q4_K", "Q6_K", "Q8_0", "Q5_1")
    parts = [convert_codes(draw(kind, 40), wide) for kind in kinds]
    parts[1] = select_outputs(parts[1], interleave_rows(20, 2))
    stacked = stack_outputs(parts)
    assert isinstance(stacked, BlockMatrix)
    assert stacked.shape == (160, INPUTS)
    check_equal(stacked, pool)
    few = select_outputs(stacked, slice(1, None, 3))
    assert isinstance(few, BlockMatrix)
    check_equal(few, pool)


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", "Q8_0", "MXFP4"])
def test_experts_in_parts(kind, num_parts, pool):
    """A part of down begins within a block of 256: its groups are those of the whole."""
    hidden, inner = 256, 768
    gate, up, down = draw(kind, inner, hidden), draw(kind, inner, hidden), draw(kind, hidden, inner)
    fmt = gate.weight_format
    x = torch.randn(3, hidden, generator=torch.Generator().manual_seed(0))
    ids, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    outputs = []
    if kind == "MXFP4":
        for matrix in (gate, up, down):
            # Scales from 2^-10 to 2^5: products of three stay finite.
            matrix.parts[0][1][:, ::17] = 117 + matrix.parts[0][1][:, ::17] % 16
    for matrices in ((gate, up, down), tuple(take_apart(m) for m in (gate, up, down))):
        experts = PackedExperts(fmt, 1, hidden, inner, pool=pool, num_parts=num_parts)
        experts.pack_codes(0, *matrices)
        outputs.append(experts.forward(x, ids, weights))
    assert torch.isfinite(outputs[0]).all()
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("kind", BLOCK_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoded_values(kind, dtype, pool):
    """Any bytes: NaN, infinities and subnormal numbers too."""
    raw = draw_blocks(kind, 40 * 5)
    want = torch.from_numpy(dequantize(kind, raw)).view(40, -1).to(dtype)
    for each in (pool, None):
        out = torch.empty(want.shape, dtype=dtype)
        decode_blocks(each, ([(kind, raw.reshape(40, -1))], None), out)
        assert torch.equal(out.isnan(), want.isnan())
        assert torch.equal(out.nan_to_num(0), want.nan_to_num(0))


def test_scales_that_are_not_finite_are_refused(pool):
    """An infinite scale names its output; so does a product beyond fp16."""
    matrix = draw("Q8_0", 70)
    matrix.parts[0][1][65, 0:2] = [0x00, 0x7C]
    with pytest.raises(UnsupportedError, match="output 65"):
        PackedLinear.from_codes(matrix, pool=pool)
    matrix = draw("Q6_K", 2)  # In a format of fp16 scales.
    matrix.parts[0][1][1, 192:210] = [100] * 16 + [0xFF, 0x7B]
    with pytest.raises(UnsupportedError, match="output 1 has a scale"):
        PackedLinear.from_codes(matrix, pool=pool)
    matrix = draw("MXFP4", 2)
    matrix.parts[0][1][1, 0] = 255
    with pytest.raises(UnsupportedError, match="output 1 has a scale"):
        PackedLinear.from_codes(matrix, pool=pool)


def test_what_is_no_matrix_of_blocks_is_refused(pool):
    """Before a byte beyond what was given is read."""
    good = draw("Q8_0", 4)
    rows = good.parts[0][1]
    linear = PackedLinear(good.weight_format, INPUTS, 4, pool=pool)
    wrong = [
        (([("Q8_0", rows[:, :-34])], None), ShapeError),
        (([("Q8_0", rows[:3])], None), ShapeError),
        (([("Q8_0", rows)], np.array([0, 1, 2, 4])), ShapeError),
        (([("Q8_0", rows)], np.array([0, 1, 2, -1])), ShapeError),
        (([("Q8_0", rows)], np.array([0, 1, 2, 3], np.int32)), ShapeError),
        (([("Q8_0", rows[:, ::2])], None), ShapeError),
        (([("Q5_1", draw("Q5_1", 4).parts[0][1])], None), UnsupportedError),
        (([("IQ1_S", rows)], None), UnsupportedError),
    ]
    for blocks, error in wrong:
        with pytest.raises(error):
            linear._matrix.pack_blocks(pool, blocks)
    with pytest.raises(ShapeError, match="no whole blocks"):
        decode_blocks(None, ([("Q8_0", rows)], None), torch.empty(4, 33))

"""Goal: a matrix of parts in several formats is its parts, side by side.

Method: products, sums into a residual, buffers and gradients beside those of the parts alone,
bitwise; what does not fit is refused.
"""

import pytest
import torch

from each import each
from tandem._native import PackedMatrix, ThreadPool
from tandem.core.errors import ShapeError
from tandem.kernels.cpu.joined_linear import JoinedLinear
from tandem.kernels.cpu.linear import PackedLinear
from tandem.kernels.native import Buffer
from tandem.kernels.weights.formats import find_format

INS = 256
PARTS = {"int4g32": 70, "int8g16": 64, "bf16": 5}
"""Outputs by format."""


@pytest.fixture(scope="module")
def pool() -> ThreadPool:
    return ThreadPool(2, oversubscribe=True)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_parts(pool: ThreadPool) -> list[PackedLinear]:
    return [
        PackedLinear.pack(find_format(name), draw(n, INS, seed=n), draw(n, seed=1), pool=pool)
        for name, n in PARTS.items()
    ]


@each("dtype", [torch.float32, torch.bfloat16])
@each("rows", [1, 2, 9])
def test_columns_are_those_of_the_parts(rows: int, dtype: torch.dtype, pool: ThreadPool):
    parts = make_parts(pool)
    joined = JoinedLinear(parts)
    x = draw(rows, INS, seed=2)
    want = torch.cat([part.forward(x, dtype=dtype) for part in parts], -1)
    assert torch.equal(joined.forward(x, dtype=dtype), want)
    assert torch.equal(joined.forward(x[None], dtype=dtype), want[None])
    out = torch.full_like(want, torch.nan)
    joined.run(Buffer(x), Buffer(out))
    assert torch.equal(out, want)
    residual = draw(rows, want.shape[1], seed=3).to(dtype)
    alone = [residual[:, :0]]
    begin = 0
    for part in parts:
        own = residual[:, begin : begin + part.out_features].contiguous()
        part.add_into_(own, x)
        alone.append(own)
        begin += part.out_features
    joined.add_into_(residual, x)
    assert torch.equal(residual, torch.cat(alone, -1))
    assert joined.size_bytes == sum(part.size_bytes for part in parts)
    assert torch.equal(joined.unpack(), torch.cat([part.unpack() for part in parts]))


def test_gradients_add_up(pool: ThreadPool):
    parts = make_parts(pool)
    joined = JoinedLinear(parts)
    d_out = draw(3, joined.out_features, seed=4)
    want = torch.zeros(3, INS)
    for part, own in zip(parts, d_out.split([p.out_features for p in parts], -1), strict=True):
        want += part.backward(own.contiguous())
    torch.testing.assert_close(joined.backward(d_out), want, rtol=1e-5, atol=1e-5)
    start = draw(3, INS, seed=5)
    added = joined.backward(d_out, out_TK=start.clone())
    torch.testing.assert_close(added, want + start, rtol=1e-5, atol=1e-5)


def test_columns_beyond_the_output_are_refused(pool: ThreadPool):
    matrix = PackedMatrix(**find_format("bf16").fields, in_features=8, out_features=4)
    x, out = torch.zeros(2, 8), torch.zeros(2, 10)
    matrix.forward(pool, x, out, False, 6)
    for first in (-1, 7, 10):
        with pytest.raises(ShapeError, match="columns from"):
            matrix.forward(pool, x, out, False, first)
    with pytest.raises(ShapeError):
        matrix.forward(pool, x, torch.zeros(2, 3), False, 0)
    with pytest.raises(ShapeError, match="inputs"):
        JoinedLinear([PackedLinear(find_format("bf16"), ins, 4, pool=pool) for ins in (8, 16)])

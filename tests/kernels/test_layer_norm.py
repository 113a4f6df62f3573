"""Goal: a LayerNorm is that of the definition in float64, and a row depends on that row alone."""

import numpy as np
import torch

from each import each
from tandem.core.model.layers import LayerNormSpec
from tandem.kernels.operators.norm import LayerNorm

SIZE = 96


class Reader:
    """Gives tensors by name, in the dtype that a model runs in."""

    def __init__(self, tensors, dtype):
        self.tensors = tensors
        self.dtype, self.device = dtype, torch.device("cpu")

    def read_into(self, name, out, shard=None):
        assert shard is None
        out.copy_(self.tensors[name])


@each("dtype", [torch.float32, torch.bfloat16])
@each(("offset", "has_bias"), [(0.0, True), (1.0, True), (0.0, False)])
def test_it_is_the_definition_row_by_row(dtype, offset, has_bias):
    generator = torch.Generator().manual_seed(0)
    tensors = {f"n.{name}": torch.randn(SIZE, generator=generator) for name in ("weight", "bias")}
    norm = LayerNorm(LayerNormSpec(size=SIZE, eps=1e-5, offset=offset, has_bias=has_bias))
    norm.load(Reader(tensors, dtype), "n")
    x = (3 * torch.randn(33, SIZE, generator=generator) + 2).to(dtype)
    ours = norm.forward(x)
    exact = x.double().numpy()
    centred = exact - exact.mean(-1, keepdims=True)
    exact = centred / np.sqrt(exact.var(-1, keepdims=True) + 1e-5)
    weight, bias = (tensors[f"n.{name}"].to(dtype).double().numpy() for name in ("weight", "bias"))
    exact = exact * (offset + weight) + (bias if has_bias else 0)
    bound = 2e-6 if dtype is torch.float32 else 2**-7
    assert np.abs(ours.double().numpy() - exact).max() <= bound * np.abs(exact).max()
    for row in range(len(x)):
        assert torch.equal(norm.forward(x[row : row + 1])[0], ours[row])
    assert torch.equal(norm.forward(x[5:17]), ours[5:17])

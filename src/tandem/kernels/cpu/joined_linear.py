"""A matrix whose outputs are stored in several weight formats: ``y = x W^T + b``, part by part.

Model files give some parts of a product more bits, such as v beside q and k. Each part is a
``PackedLinear`` of its own that writes its columns of the output, so no weight is converted.
Numeric guarantees are those of ``PackedLinear``.

Shapes: T rows, K inputs, N outputs of all parts.
"""

from itertools import accumulate

import torch
from torch import Tensor

from tandem.core.errors import ShapeError
from tandem.kernels.cpu.linear import PackedLinear
from tandem.kernels.native import Buffer

__all__ = ["JoinedLinear"]


class JoinedLinear:
    """Packed matrices over the same inputs, whose outputs are concatenated.

    Args:
        parts: at least one matrix, all with the same number of inputs K; kept.

    Raises: ShapeError (the numbers of inputs differ).
    """

    def __init__(self, parts: list[PackedLinear]) -> None:
        self.parts = parts
        self.in_features = parts[0].in_features
        for part in parts:
            if part.in_features != self.in_features:
                what = f"parts of {self.in_features} and {part.in_features} inputs"
                raise ShapeError("kernels.join_linear", what, field="parts")
        sizes = [part.out_features for part in parts]
        self._begins = [0, *accumulate(sizes)][:-1]
        self.out_features = sum(sizes)

    @property
    def size_bytes(self) -> int:
        """Packed bytes of all matrices that are joined."""
        return sum(part.size_bytes for part in self.parts)

    @property
    def is_bound(self) -> bool:
        """True if each joined matrix has its outputs shared among NUMA nodes, with memory bound to
        them.
        """
        return all(part.is_bound for part in self.parts)

    @property
    def out_dtype(self) -> torch.dtype:
        """Float32, the dtype of the kernels' sums, so results are not rounded."""
        return torch.float32

    def unpack(self) -> Tensor:
        """Return the dequantized weights, float32 [N, K]."""
        return torch.cat([part.unpack() for part in self.parts])

    def forward(self, x_TK: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``x W^T + b`` [..., N]."""
        out = torch.empty((*x_TK.shape[:-1], self.out_features), dtype=dtype)
        self._run(x_TK, out, is_added=False)
        return out

    def backward(self, d_out_TN: Tensor, *, out_TK: Tensor | None = None) -> Tensor:
        """Return ``d_out W``, the gradient with respect to x; parts are added in their order."""
        sizes = [part.out_features for part in self.parts]
        for part, d_out in zip(self.parts, d_out_TN.split(sizes, -1), strict=True):
            out_TK = part.backward(d_out.contiguous(), out_TK=out_TK)
        assert out_TK is not None, "a matrix without parts"
        return out_TK

    def run(self, x_TK: Buffer, out_TN: Buffer, *, is_added: bool = False) -> None:
        """Write ``x W^T + b`` to a float32 or bfloat16 buffer, or add it if ``is_added``."""
        for part, begin in zip(self.parts, self._begins, strict=True):
            part.run(x_TK, out_TN, is_added=is_added, first_column=begin)

    def add_into_(self, residual_TN: Tensor, x_TK: Tensor) -> None:
        """Add ``x W^T + b`` in place to ``residual_TN``, float32 or bfloat16.

        Raises: ShapeError (the residual has another shape).
        """
        if residual_TN.shape[:-1] != x_TK.shape[:-1]:
            what = f"residual {tuple(residual_TN.shape)} for x {tuple(x_TK.shape)}"
            raise ShapeError("kernels.run_linear", what, field="residual")
        self._run(x_TK, residual_TN, is_added=True)

    def _run(self, x: Tensor, out: Tensor, *, is_added: bool) -> None:
        for part, begin in zip(self.parts, self._begins, strict=True):
            part.run_columns(x, out, begin, is_added=is_added)

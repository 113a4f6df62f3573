"""Matrices by head: each head's input is multiplied with a matrix of its own.

Multi-head latent attention absorbs its up-projections into queries and outputs this way. As in
``kernels.weights.matrix``, the matrices are tensors for torch, or packed in a weight format for the
native kernels.

Shapes: T rows, H heads, K inputs and N outputs of a head.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from tandem._native import ThreadPool
from tandem.core.errors import ShapeError
from tandem.kernels.cpu.linear import PANEL_COLUMNS, PackedLinear, count_bytes
from tandem.kernels.interfaces import HeadMatrix
from tandem.kernels.native import Buffer
from tandem.kernels.operators.operator import Operator, freeze
from tandem.kernels.weights.formats import WeightFormat, find_format
from tandem.kernels.weights.matrix import MatrixSettings

__all__ = ["choose_head_format", "count_head_bytes", "make_head_matrix"]


def choose_head_format(weight_format: WeightFormat | None, in_features: int) -> WeightFormat | None:
    """Return the format in which a head's matrix is stored; None: as a tensor.

    A head has few inputs: if they are not whole groups of the wanted format, bf16 is used.
    """
    if weight_format is None:
        return None
    try:
        count_bytes(weight_format, in_features, PANEL_COLUMNS)
    except ShapeError:
        return find_format("bf16")
    return weight_format


def count_head_bytes(
    weight_format: WeightFormat, num_heads: int, in_features: int, out_features: int
) -> int:
    """Return the packed bytes of all heads' matrices, with K inputs and N outputs each."""
    chosen = choose_head_format(weight_format, in_features)
    assert chosen is not None
    return count_bytes(chosen, in_features, num_heads * _pad(out_features))


def _pad(out_features: int) -> int:
    return -(-out_features // PANEL_COLUMNS) * PANEL_COLUMNS


class TensorHeads:
    """One matrix for each attention head, all as one tensor [H, N, K], multiplied by torch."""

    def __init__(self, weight_HNK: nn.Parameter) -> None:
        self._weight_t = weight_HNK.transpose(1, 2)
        self.out_shape = (weight_HNK.shape[0], weight_HNK.shape[1])

    def forward(self, x_THK: Tensor) -> Tensor:
        """Multiply each head's input with its matrix in torch."""
        return torch.matmul(x_THK.transpose(0, 1), self._weight_t).transpose(0, 1)

    def run(self, x_THK: Buffer, out_THN: Buffer) -> None:
        """Multiply in torch and copy the result to a buffer."""
        out_THN.tensor.copy_(self.forward(x_THK.tensor))


class PackedHeads:
    """One matrix for each attention head, packed as one matrix; each head is padded to whole panels
    (the kernels' blocks of outputs).
    """

    def __init__(self, weight_format: WeightFormat, weight_HNK: Tensor, pool: ThreadPool) -> None:
        self.out_shape = (weight_HNK.shape[0], weight_HNK.shape[1])
        padding = _pad(self.out_shape[1]) - self.out_shape[1]
        rows = functional.pad(weight_HNK, (0, 0, 0, padding)).flatten(0, 1).contiguous()
        self._linear = PackedLinear.pack(weight_format, rows, pool=pool)

    @property
    def size_bytes(self) -> int:
        """Packed bytes, scales and padding included."""
        return self._linear.size_bytes

    def forward(self, x_THK: Tensor) -> Tensor:
        """Multiply each head's input with its matrix natively."""
        out = x_THK.new_empty(len(x_THK), *self.out_shape)
        self.run(Buffer(x_THK), Buffer(out))
        return out

    def run(self, x_THK: Buffer, out_THN: Buffer) -> None:
        """Multiply each head's input with its matrix natively, and write the results to a
        buffer.
        """
        self._linear.run_heads(x_THK, out_THN)


def make_head_matrix(
    owner: Operator, name: str, settings: MatrixSettings, weight_HNK: Tensor
) -> HeadMatrix:
    """Store the matrices of all heads, as a tensor or packed.

    Args:
        owner: operator that gets a tensor as its parameter ``{name}weight``.
        name: prefix of the parameter's name.
        settings: how to store the matrices; see ``choose_head_format``.
        weight_HNK: the weights; not kept if they are packed.
    """
    weight_format = choose_head_format(settings.weight_format, weight_HNK.shape[2])
    if weight_format is None:
        weight = freeze(weight_HNK.contiguous())
        setattr(owner, f"{name}weight", weight)
        return TensorHeads(weight)
    assert settings.pool is not None, "a weight format needs a pool"
    packed = PackedHeads(weight_format, weight_HNK.detach(), settings.pool)
    owner.packed_bytes += packed.size_bytes
    return packed

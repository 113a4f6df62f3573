"""Matrices whose codes lie in blocks, as a GGUF file has them, on the way to the native packer.

A ``BlockMatrix`` says where the blocks of each output are and in which of our formats they will be
laid out; nothing is decoded or copied before the packer takes it. docs/design/models/gguf.md lists
the kinds of blocks.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tandem.kernels.weights.formats import QuantizedMatrix, WeightFormat, select_rows, stack
from tandem.kernels.weights.recode import can_represent, recode

__all__ = [
    "BlockMatrix",
    "CodedMatrix",
    "convert_codes",
    "interleave_rows",
    "select_outputs",
    "stack_outputs",
]


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """A matrix [N, K] in blocks; see ``QuantizedMatrix`` for one whose codes are taken apart."""

    weight_format: WeightFormat
    """The format that it is laid out in; holds the codes of every part."""
    num_inputs: int
    """K."""
    parts: tuple[tuple[str, NDArray[np.uint8]], ...]
    """(kind, bytes [rows, bytes of a row]), outputs after outputs. Borrowed, such as from a map."""
    order: NDArray[np.int64] | None = None
    """[N]: which row of all parts each output is; None = all of them as they are."""

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        stored = sum(len(rows) for _, rows in self.parts)
        return (stored if self.order is None else len(self.order)), self.num_inputs

    @property
    def blocks(self) -> tuple[list[tuple[str, object]], object | None]:
        """Parts and order, as the native core takes them."""
        return list(self.parts), self.order


CodedMatrix = QuantizedMatrix | BlockMatrix
"""Codes, taken apart or in blocks."""


def convert_codes(matrix: CodedMatrix, wide: WeightFormat) -> CodedMatrix:
    """Return the same weights in another format; see ``recode``.

    REQUIRES: ``can_hold(wide, matrix.weight_format)``.
    """
    if isinstance(matrix, QuantizedMatrix):
        return recode(matrix, wide)
    assert can_represent(wide, matrix.weight_format), f"{wide.name}, {matrix.weight_format.name}"
    return replace(matrix, weight_format=wide)


def select_outputs(matrix: CodedMatrix, rows: slice | NDArray[np.int64]) -> CodedMatrix:
    """Return some outputs of a matrix; see ``select_rows``."""
    if isinstance(matrix, QuantizedMatrix):
        return select_rows(matrix, rows)
    order = np.arange(matrix.shape[0]) if matrix.order is None else matrix.order
    return replace(matrix, order=np.ascontiguousarray(order[rows]))


def stack_outputs(matrices: list[CodedMatrix]) -> CodedMatrix:
    """Return matrices of one format and width as one, outputs after outputs.

    REQUIRES: all are in blocks, or none; as ``stack``.
    """
    if len(matrices) == 1:
        return matrices[0]
    blocks = [matrix for matrix in matrices if isinstance(matrix, BlockMatrix)]
    if not blocks:
        return stack([matrix for matrix in matrices if isinstance(matrix, QuantizedMatrix)])
    assert len(blocks) == len(matrices), "blocks and codes in one matrix"
    first = blocks[0]
    order = None
    if any(matrix.order is not None for matrix in blocks):
        orders: list[NDArray[np.int64]] = []
        begin = 0
        for matrix in blocks:
            own = np.arange(matrix.shape[0]) if matrix.order is None else matrix.order
            orders.append(begin + own)
            begin += sum(len(rows) for _, rows in matrix.parts)
        order = np.concatenate(orders)
    return replace(first, parts=tuple(p for matrix in blocks for p in matrix.parts), order=order)


def interleave_rows(count: int, num_parts: int) -> NDArray[np.int64]:
    """Return the order that takes outputs of stacked parts of ``count`` in turn."""
    return np.arange(count * num_parts).reshape(num_parts, count).T.ravel()

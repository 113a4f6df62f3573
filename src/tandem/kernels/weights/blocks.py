"""Matrices whose quantized codes lie in blocks, as in a GGUF file, as input of the native packer.

A ``BlockMatrix`` tells where the blocks of each output are and in which weight format they will be
packed; nothing is decoded or copied before packing. docs/design/models/gguf.md lists the kinds of
blocks.
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
    """A matrix [N, K] whose codes lie in a file's blocks; ``QuantizedMatrix`` holds
    separate codes.
    """

    weight_format: WeightFormat
    """Weight format that the matrix is packed in; it can hold the codes of every part."""
    num_inputs: int
    """Number of inputs, K."""
    parts: tuple[tuple[str, NDArray[np.uint8]], ...]
    """Parts, concatenated by outputs: (kind of block, bytes [rows, bytes of a row]). Borrowed, such
    as from a memory map.
    """
    order: NDArray[np.int64] | None = None
    """Row of the concatenated parts for each output, [N]; None: all rows in their order."""

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs, (N, K)."""
        stored = sum(len(rows) for _, rows in self.parts)
        return (stored if self.order is None else len(self.order)), self.num_inputs

    @property
    def blocks(self) -> tuple[list[tuple[str, object]], object | None]:
        """The parts, as pairs of (kind of block, bytes), and the order of outputs, as the native
        core takes them.
        """
        return list(self.parts), self.order


CodedMatrix = QuantizedMatrix | BlockMatrix
"""A quantized matrix, with separate codes or in a file's blocks."""


def convert_codes(matrix: CodedMatrix, wide: WeightFormat) -> CodedMatrix:
    """Return the same weights in another format; see ``recode``.

    REQUIRES: ``can_represent(wide, matrix.weight_format)``.
    """
    if isinstance(matrix, QuantizedMatrix):
        return recode(matrix, wide)
    assert can_represent(wide, matrix.weight_format), f"{wide.name}, {matrix.weight_format.name}"
    return replace(matrix, weight_format=wide)


def select_outputs(matrix: CodedMatrix, rows: slice | NDArray[np.int64]) -> CodedMatrix:
    """Return some outputs of a matrix, as ``select_rows`` does for separate codes."""
    if isinstance(matrix, QuantizedMatrix):
        return select_rows(matrix, rows)
    order = np.arange(matrix.shape[0]) if matrix.order is None else matrix.order
    return replace(matrix, order=np.ascontiguousarray(order[rows]))


def stack_outputs(matrices: list[CodedMatrix]) -> CodedMatrix:
    """Concatenate the outputs of matrices of one format and width.

    REQUIRES: all matrices are in blocks, or none; otherwise as for ``stack``.
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
    """Return the row order that alternates between ``num_parts`` stacked parts of ``count``
    outputs.
    """
    return np.arange(count * num_parts).reshape(num_parts, count).T.ravel()

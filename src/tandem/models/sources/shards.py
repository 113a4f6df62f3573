"""Shards of weights: a rank's rows or columns of a stored weight."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tandem.core.errors import ShapeError
from tandem.kernels.interfaces import Shard
from tandem.kernels.weights.blocks import BlockMatrix, CodedMatrix, select_outputs
from tandem.kernels.weights.formats import BLOCK_ROWS, QuantizedMatrix

__all__ = ["cut_codes", "decode_into"]


def decode_into(out: Tensor, shard: Shard | None, decode: Callable[[Tensor], None]) -> None:
    """Decode a weight, or a shard of it, into ``out``, via host memory if ``out`` is on a device.

    Args:
        out: tensor of the weight's shape, or of its shard's.
        shard: the part; None: all.
        decode: writes the values of the whole weight to a host tensor of its shape.
    """
    if shard is None and out.is_cpu:
        decode(out)
        return
    shape = tuple(out.shape)
    whole = torch.empty(shape if shard is None else shard.widen(shape), dtype=out.dtype)
    decode(whole)
    if shard is not None:
        whole = whole.narrow(shard.axis, shard.start, shard.stop - shard.start)
    out.copy_(whole)


def cut_codes(
    name: str, matrix: CodedMatrix, shard: Shard, block_inputs: int | None = None
) -> CodedMatrix:
    """Return the codes of some outputs, or of some inputs, of a matrix.

    Args:
        name: name of the weight, for errors.
        matrix: its codes [N, K].
        shard: the part; ``axis`` 0 is outputs, 1 inputs.
        block_inputs: inputs of a block of a ``BlockMatrix``.

    Raises: ShapeError (the matrix has another size; the part splits codes that share a scale).
    """
    if shard.axis > 1 or matrix.shape[shard.axis] != shard.size:
        what = f"tensor {name!r} has codes of shape {list(matrix.shape)}, not {shard.size}"
        raise ShapeError("models.read_weights", f"{what} along axis {shard.axis}")
    if shard.axis == 0:
        return _cut_outputs(name, matrix, shard)
    size = block_inputs or matrix.weight_format.group_size or 1
    _require_whole(name, shard, size)
    return _cut_inputs(matrix, shard, size)


def _require_whole(name: str, shard: Shard, size: int) -> None:
    is_whole = shard.stop % size == 0 or shard.stop == shard.size
    if shard.start % size or not is_whole:
        raise ShapeError(
            "models.read_weights",
            f"tensor {name!r}: {shard.start} to {shard.stop} along axis {shard.axis} cut groups "
            f"of {size} that share a scale: divide the model by fewer ranks",
        )


def _cut_outputs(name: str, matrix: CodedMatrix, shard: Shard) -> CodedMatrix:
    rows = slice(shard.start, shard.stop)
    if not matrix.weight_format.has_blocks:
        return select_outputs(matrix, rows)
    assert isinstance(matrix, QuantizedMatrix), type(matrix)
    _require_whole(name, shard, BLOCK_ROWS)
    blocks = slice(shard.start // BLOCK_ROWS, -(-shard.stop // BLOCK_ROWS))
    return QuantizedMatrix(matrix.weight_format, matrix.codes[rows], matrix.scales[blocks], None)


def _cut_inputs(matrix: CodedMatrix, shard: Shard, size: int) -> CodedMatrix:
    first, last = shard.start // size, -(-shard.stop // size)
    if isinstance(matrix, BlockMatrix):
        count = matrix.num_inputs // size
        parts = tuple(
            (kind, np.ascontiguousarray(rows.reshape(len(rows), count, -1)[:, first:last]))
            for kind, rows in matrix.parts
        )
        flat = tuple((kind, rows.reshape(len(rows), -1)) for kind, rows in parts)
        return replace(matrix, num_inputs=shard.stop - shard.start, parts=flat)
    # A format without groups has one scale for all inputs of an output, so every shard gets the
    # same scales.
    groups = slice(first, last) if matrix.weight_format.group_size else slice(None)
    minima = matrix.minima
    return QuantizedMatrix(
        matrix.weight_format,
        np.ascontiguousarray(matrix.codes[:, shard.start : shard.stop]),
        np.ascontiguousarray(matrix.scales[:, groups]),
        minima
        if minima is None or matrix.weight_format.has_factor
        else np.ascontiguousarray(minima[:, groups]),
    )

"""Matrices of operators: ``y = x W^T + b`` with tensors of the model's dtype, or packed.

An operator reads a ``Matrix`` when it loads and works with either kind. ``TensorMatrix`` runs in
torch, on any device; ``PackedLinear`` runs on the native kernels, in a weight format.

Shapes: T rows, K inputs, N outputs.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from tandem._native import ThreadPool
from tandem.core.errors import ShapeError
from tandem.kernels.cpu.joined_linear import JoinedLinear
from tandem.kernels.cpu.linear import PackedLinear
from tandem.kernels.interfaces import Matrix, WeightReader
from tandem.kernels.native import Buffer
from tandem.kernels.operators.operator import Operator, freeze, read_rows
from tandem.kernels.weights.blocks import CodedMatrix, convert_codes, select_outputs, stack_outputs
from tandem.kernels.weights.formats import BLOCK_ROWS, WeightFormat, find_whole_blocks
from tandem.kernels.weights.recode import can_represent, group_formats

__all__ = ["TENSORS", "MatrixSettings", "TensorMatrix", "make_matrix", "read_matrix"]


@dataclass(frozen=True, slots=True)
class MatrixSettings:
    """The storage of an operator's matrices (format, threads) and which implementation runs
    them.
    """

    weight_format: WeightFormat | None = None
    """Weight format to pack in; None: tensors of the model's dtype."""
    pool: ThreadPool | None = None
    """Threads that run the packed kernels; borrowed for the life of the matrices."""
    keeps_codes: bool = False
    """True if a matrix that is quantized in the checkpoint keeps its codes, each part in its own
    format, whatever ``weight_format`` is.
    """


TENSORS = MatrixSettings()
"""Settings for plain torch tensors in the checkpoint's values."""


class TensorMatrix:
    """A matrix as a tensor [N, K], with a bias [N] or None."""

    def __init__(self, weight_NK: nn.Parameter, bias_N: nn.Parameter | None = None) -> None:
        self.weight = weight_NK
        self.bias = bias_N
        self.out_features = len(weight_NK)
        # The transposed view is made once here: making a view costs as much as a small product.
        self._weight_t = weight_NK.t()

    @property
    def out_dtype(self) -> torch.dtype | None:
        """None: ``run`` writes results in the dtype of its input, the model's."""
        return None

    def forward(self, x_TK: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Return ``x W^T + b`` in ``dtype``."""
        return functional.linear(x_TK, self.weight, self.bias).to(dtype)

    def add_into_(self, residual_TN: Tensor, x_TK: Tensor) -> None:
        """Add ``x W^T + b`` to the residual in place."""
        residual_TN.addmm_(x_TK, self._weight_t)
        if self.bias is not None:
            residual_TN += self.bias

    def run(self, x_TK: Buffer, out_TN: Buffer, *, is_added: bool = False) -> None:
        """Write ``x W^T + b`` to a buffer, or add it if ``is_added``."""
        if is_added:
            self.add_into_(out_TN.tensor, x_TK.tensor)
        elif self.bias is None:
            torch.mm(x_TK.tensor, self._weight_t, out=out_TN.tensor)
        else:
            torch.addmm(self.bias, x_TK.tensor, self._weight_t, out=out_TN.tensor)


def read_matrix(
    owner: Operator,
    name: str,
    reader: WeightReader,
    settings: MatrixSettings,
    parts: list[tuple[str, int]],
    in_features: int,
    *,
    has_bias: bool = False,
    order: Tensor | None = None,
) -> Matrix:
    """Read a matrix whose outputs are those of ``parts``, concatenated.

    Args:
        owner: operator that gets tensors as its parameters ``{name}weight`` and ``{name}bias``.
        name: prefix of the parameters' names.
        reader: reads ``{part}.weight`` and, with ``has_bias``, ``{part}.bias``.
        settings: how to store the matrix.
        parts: (checkpoint name of the linear module, number of outputs).
        in_features: K.
        has_bias: True if all parts have a bias.
        order: int64 [N], the checkpoint's output for each output of the matrix, within each part;
            None: unchanged.

    Raises: errors of the reader; those of ``PackedLinear``.
    """
    weights = [(f"{part}.weight", rows) for part, rows in parts]
    biases = [(f"{part}.bias", rows) for part, rows in parts]
    is_packed = settings.weight_format is not None
    codes = _read_codes(reader, settings, weights, in_features, order)
    if codes is not None:
        bias = _read_bias(reader, biases, order) if has_bias else None
        if settings.keeps_codes:
            held = "+".join(matrix.weight_format.name for matrix in codes)
            owner.code_formats = {**owner.code_formats, name: held}
        sizes = [matrix.shape[0] for matrix in codes]
        shares = [None] * len(codes) if bias is None else list(bias.split(sizes))
        kept = [_keep_packed(owner, settings, *part) for part in zip(codes, shares, strict=True)]
        return kept[0] if len(kept) == 1 else JoinedLinear(kept)
    weight = read_rows(reader, weights, in_features, is_scratch=is_packed)
    weight = weight if order is None else weight[order]
    bias = _read_bias(reader, biases, order) if has_bias else None
    return make_matrix(owner, name, settings, weight, bias)


def make_matrix(
    owner: Operator, name: str, settings: MatrixSettings, weight_NK: Tensor, bias_N: Tensor | None
) -> Matrix:
    """Return the matrix of tensors that are already read; otherwise as ``read_matrix``."""
    if settings.weight_format is None:
        weight = weight_NK if isinstance(weight_NK, nn.Parameter) else freeze(weight_NK)
        bias = None if bias_N is None else freeze(bias_N)
        setattr(owner, f"{name}weight", weight)
        setattr(owner, f"{name}bias", bias)
        return TensorMatrix(weight, bias)
    return _keep_packed(owner, settings, weight_NK.detach(), bias_N)


def _read_bias(reader: WeightReader, parts: list[tuple[str, int]], order: Tensor | None) -> Tensor:
    bias = read_rows(reader, parts)
    return bias if order is None else bias[order]


def _read_codes(
    reader: WeightReader,
    settings: MatrixSettings,
    parts: list[tuple[str, int]],
    in_features: int,
    order: Tensor | None,
) -> list[CodedMatrix] | None:
    """Return the parts' codes, stacked, if the wanted format can hold them; else None.

    If codes are kept in several formats, one stack for each run of parts of the same format is
    returned.

    Raises: ShapeError (the codes have another shape).
    """
    formats = [reader.find_format(name) for name, _ in parts]
    wanted = settings.weight_format
    if settings.keeps_codes:
        groups = group_formats(formats)
        if groups is None:
            return None
        stacks: list[CodedMatrix] = []
        first = 0
        for held, indexes in groups:
            some = [parts[i] for i in indexes]
            size = sum(rows for _, rows in some)
            # The order permutes rows only within a part of the stacked matrix, so each part gets
            # its own part of the order.
            own = None if order is None else order[first : first + size] - first
            one = replace(settings, weight_format=held, keeps_codes=False)
            stacked = _read_codes(reader, one, some, in_features, own)
            if stacked is None:
                return None
            stacks += stacked
            first += size
        return stacks
    if wanted is None or not all(
        held is not None and can_represent(wanted, held) for held in formats
    ):
        return None
    if wanted.has_blocks and (
        any(rows % BLOCK_ROWS for _, rows in parts[:-1])
        or (order is not None and find_whole_blocks(order.numpy()) is None)
    ):
        return None
    matrices = [convert_codes(reader.read_packed(name), wanted) for name, _ in parts]
    for (name, rows), matrix in zip(parts, matrices, strict=True):
        if matrix.shape != (rows, in_features):
            raise ShapeError(
                "kernels.read_matrix",
                f"tensor {name!r} has codes of shape {list(matrix.shape)}: the "
                f"configuration needs {[rows, in_features]}",
            )
    stacked = stack_outputs(matrices)
    return [stacked if order is None else select_outputs(stacked, order.numpy())]


def _keep_packed(
    owner: Operator,
    settings: MatrixSettings,
    weight: Tensor | CodedMatrix,
    bias_N: Tensor | None,
) -> PackedLinear:
    assert settings.pool is not None, "a weight format needs a pool"
    pool, is_bound = settings.pool, len(settings.pool.node_ids) > 1
    if not isinstance(weight, Tensor):
        packed = PackedLinear.from_codes(weight, bias_N, pool=pool, is_bound=is_bound)
    else:
        assert settings.weight_format is not None, "tensors are not packed"
        packed = PackedLinear.pack(
            settings.weight_format, weight, bias_N, pool=pool, is_bound=is_bound
        )
    owner.packed_bytes += packed.size_bytes
    owner.is_misplaced |= is_bound and not packed.is_bound
    return packed

"""A matrix with packed weights, run by the native CPU kernels: ``y = x W^T + b``.

``PackedLinear`` owns the packed weights, or views memory that it is given, and borrows a thread
pool. Formats, layout, kernels and guarantees are those of ``PackedExperts``: results are bitwise
independent of the batch, of the thread count and, for integer formats, of the instruction set; see
docs/design/kernels/kernels.md.

Shapes: T rows, K inputs, N outputs.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem._native import PackedMatrix, ThreadPool, count_linear_bytes
from tandem.core.errors import ShapeError
from tandem.kernels.native import Buffer, view_tensor
from tandem.kernels.weights.blocks import BlockMatrix, CodedMatrix
from tandem.kernels.weights.formats import WeightFormat

__all__ = ["PANEL_COLUMNS", "PackedLinear", "count_bytes"]

PANEL_COLUMNS = 64
"""Outputs that are packed together as one panel."""


def count_bytes(weight_format: WeightFormat, in_features: int, out_features: int) -> int:
    """Return the packed bytes of a matrix, scales and padding included.

    Raises: as ``PackedLinear``.
    """
    return count_linear_bytes(
        **weight_format.fields,
        in_features=in_features,
        out_features=out_features,
    )


class PackedLinear:
    """A matrix [N, K] in one weight format, with or without a bias.

    Args:
        weight_format: how the weights are stored.
        in_features: K; whole groups of an integer format.
        out_features: N; any size.
        pool: runs the kernels; borrowed for the life of the object.
        isa: a name of ``tandem._native.kernel_isas()``; None = the widest here.
        storage: uint8, ``count_bytes`` of them, 64-byte aligned, kept; read-only ones hold weights
            that are packed already. None = memory of its own.
        is_bound: reserve an equal share of the outputs on each NUMA node of the pool, whose threads
            compute it; results do not depend on it. If the operating system refuses, memory lies
            where it is first touched and the property ``is_bound`` is false. Not allowed with
            ``storage``.

    Weights are zero until packed. ``forward`` is thread-safe once they are.

    Raises: ShapeError (K that is not whole groups); UnsupportedError (format, ISA); ConfigError
        (unknown ISA, a size below 1, storage to be bound); CapacityError (memory).
    """

    def __init__(
        self,
        weight_format: WeightFormat,
        in_features: int,
        out_features: int,
        *,
        pool: ThreadPool,
        isa: str | None = None,
        storage: NDArray[np.uint8] | None = None,
        is_bound: bool = False,
    ) -> None:
        self.weight_format = weight_format
        self.in_features = in_features
        self.out_features = out_features
        self._pool = pool
        self._matrix = PackedMatrix(
            **weight_format.fields,
            in_features=in_features,
            out_features=out_features,
            isa="" if isa is None else isa,
            storage=storage,
            share_nodes=pool.node_ids if is_bound else [],
        )

    @classmethod
    def pack(
        cls,
        weight_format: WeightFormat,
        weight_NK: Tensor,
        bias_N: Tensor | None = None,
        *,
        pool: ThreadPool,
        isa: str | None = None,
        is_bound: bool = False,
    ) -> "PackedLinear":
        """Quantize and pack a whole matrix.

        Args:
            weight_format: as for the class.
            weight_NK: float32 or bfloat16, contiguous, on the CPU; not kept.
            bias_N: the bias, of any floating dtype; not kept.
            pool: as for the class.
            isa: as for the class.
            is_bound: as for the class.

        Raises: the errors of the class and of ``pack_rows``.
        """
        if weight_NK.ndim != 2:
            what = f"weight {tuple(weight_NK.shape)}: give [N, K]"
            raise ShapeError("kernels.pack", what, field="weight")
        out_features, in_features = weight_NK.shape
        linear = cls(
            weight_format, in_features, out_features, pool=pool, isa=isa, is_bound=is_bound
        )
        linear.pack_rows(0, weight_NK)
        if bias_N is not None:
            linear.set_bias(bias_N)
        return linear

    def pack_rows(self, first_row: int, weight_RK: Tensor) -> None:
        """Quantize and pack some rows, replacing their weights: whole blocks of 128, or up to the
        last row.

        The tensor is float32 or bfloat16, contiguous, on the CPU; it is not kept.

        Raises: ShapeError (names both shapes); ConflictError (read-only storage);
            UnsupportedError (a weight is not finite, or too large for an fp16 scale).
        """
        self._matrix.pack(self._pool, weight_RK.detach(), first_row)

    @classmethod
    def from_codes(
        cls,
        matrix: CodedMatrix,
        bias_N: Tensor | None = None,
        *,
        pool: ThreadPool,
        isa: str | None = None,
        is_bound: bool = False,
    ) -> "PackedLinear":
        """Pack a matrix whose weights are quantized codes already.

        Args:
            matrix: the codes, as arrays or in blocks of a file; not kept.
            bias_N: bias of any floating dtype; not kept.
            pool: as for the class.
            isa: as for the class.
            is_bound: as for the class.

        Raises: the errors of the class; UnsupportedError (a code outside of the format, or a scale
            that is not finite).
        """
        out_features, in_features = matrix.shape
        linear = cls(
            matrix.weight_format, in_features, out_features, pool=pool, isa=isa, is_bound=is_bound
        )
        if isinstance(matrix, BlockMatrix):
            linear._matrix.pack_blocks(pool, matrix.blocks)
        else:
            linear._matrix.pack_codes(pool, *matrix.arrays)
        if bias_N is not None:
            linear.set_bias(bias_N)
        return linear

    def set_bias(self, bias_N: Tensor) -> None:
        """Set the bias, copied from any floating dtype; call it before any ``forward``.

        Raises: ShapeError (its size is not the number of outputs).
        """
        self._matrix.set_bias(bias_N.detach().float().contiguous())

    @property
    def isa(self) -> str:
        """Name of the instruction set whose kernels run."""
        return self._matrix.isa

    @property
    def size_bytes(self) -> int:
        """Packed bytes, scales included."""
        return self._matrix.size_bytes

    @property
    def is_bound(self) -> bool:
        """True if each share of the outputs is bound to its NUMA node."""
        return self._matrix.is_bound

    def find_share_nodes(self) -> list[int]:
        """Return the NUMA node that a page of each share lies on, once weights are packed.

        Raises: UnsupportedError (the kernel does not say, as in many containers).
        """
        return self._matrix.find_share_nodes()

    @property
    def packed(self) -> NDArray[np.uint8]:
        """The packed bytes, no copy; laid out as docs/design/models/weight_formats.md says."""
        return self._matrix.array()

    def unpack(self) -> Tensor:
        """Return the dequantized weights, float32 [N, K], without the bias.

        Each weight is the format's exact value rounded once.
        """
        out_NK = torch.empty(self.out_features, self.in_features)
        self._matrix.unpack(self._pool, out_NK)
        return out_NK

    def take_rows(self, outputs_T: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the dequantized weights of some outputs, [T, K], new.

        Each is the weight of ``unpack``, rounded once to ``dtype``.

        Args:
            outputs_T: int64 row numbers, on the CPU, of any strides.
            dtype: dtype of the result, float32 or bfloat16.

        Raises: ShapeError (a row number out of range).
        """
        out = torch.empty(len(outputs_T), self.in_features, dtype=dtype)
        self._matrix.take_rows(self._pool, outputs_T.contiguous(), out)
        return out

    def forward(self, x_TK: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``x W^T + b``.

        Args:
            x_TK: float32 or bfloat16, CPU, contiguous, any leading dimensions; not modified. Coded
                once: to bf16, to float32 beside f32, or for integer formats to int8 with a step per
                group.
            dtype: dtype of the result: float32, or bfloat16, to which sums are rounded once.

        Returns: [..., N], new. A NaN or infinity in a row makes that row NaN, no other.
        Raises: ShapeError (names the argument and what is wanted).
        Cost: reads the packed weights once for up to some hundred rows. Blocks; releases the GIL;
            thread-safe.
        """
        shape = (*x_TK.shape[:-1], self.out_features)
        out = torch.empty(shape, dtype=dtype)
        self._run(x_TK, out, is_added=False)
        return out

    def backward(self, d_out_TN: Tensor, *, out_TK: Tensor | None = None) -> Tensor:
        """Return ``d_out W``, the gradient with respect to x, float32 [T, K].

        W is dequantized piece by piece; unless it is in f32, it and ``d_out_TN`` are rounded to
        bf16. Sums are in fp32 and in ascending order of n.

        Args:
            d_out_TN: float32 or bfloat16, CPU, contiguous.
            out_TK: float32, to which the result is added; None = a new tensor.

        Raises: ShapeError (a tensor of another shape or dtype); CapacityError (no memory for
            scratch).
        """
        if out_TK is None:
            out_TK = torch.empty(len(d_out_TN), self.in_features)
            self._matrix.backward(self._pool, d_out_TN.detach(), out_TK)
        else:
            self._matrix.backward(self._pool, d_out_TN.detach(), out_TK, is_added=True)
        return out_TK

    @property
    def out_dtype(self) -> torch.dtype:
        """Float32, the dtype of the kernels' sums, so results are not rounded."""
        return torch.float32

    def run(
        self,
        x_TK: Buffer,
        out_TN: Buffer,
        *,
        is_added: bool = False,
        first_column: int | None = None,
    ) -> None:
        """Write ``x W^T + b`` to a float32 or bfloat16 buffer, or add it if ``is_added``.

        With ``first_column`` the result goes to that column of a wider buffer and the following
        ones.
        """
        self._matrix.forward(self._pool, x_TK.view, out_TN.view, is_added, first_column)

    def run_columns(
        self, x_TK: Tensor, out_TM: Tensor, first_column: int, *, is_added: bool = False
    ) -> None:
        """Write ``x W^T + b`` to the columns of a wider tensor from ``first_column`` on, or
        add it.
        """
        self._run(x_TK, out_TM, is_added=is_added, first_column=first_column)

    def add_into_(self, residual_TN: Tensor, x_TK: Tensor) -> None:
        """Add ``x W^T + b`` in place to ``residual_TN``, float32 or bfloat16.

        Raises: ShapeError (the residual has another shape).
        """
        if residual_TN.shape[:-1] != x_TK.shape[:-1]:
            what = f"residual {tuple(residual_TN.shape)} for x {tuple(x_TK.shape)}"
            raise ShapeError("kernels.run_linear", what, field="residual")
        self._run(x_TK, residual_TN, is_added=True)

    def _run(
        self, x: Tensor, out: Tensor, *, is_added: bool, first_column: int | None = None
    ) -> None:
        rows, out_rows = x.detach(), out.detach()
        if x.ndim != 2 and x.is_contiguous() and out.is_contiguous() and x.ndim:
            rows, out_rows = rows.view(-1, x.shape[-1]), out_rows.view(-1, out.shape[-1])
        # The native forward refuses tensors that are not contiguous.
        views = view_tensor(rows), view_tensor(out_rows)
        self._matrix.forward(self._pool, *views, is_added, first_column)

    def run_heads(self, x_THK: Buffer, out_THM: Buffer) -> None:
        """Write ``out[t, h] = x[t, h] W_h^T``, where W_h is head h's equal share of the outputs.

        T and H may have any strides. A share is M outputs in whole panels of ``PANEL_COLUMNS``.

        Raises: ShapeError (a tensor of another shape or dtype, or outputs that the heads cannot
            share equally in whole panels).
        """
        self._matrix.forward_heads(self._pool, x_THK.view, out_THM.view)

    def read_weights(self) -> None:
        """Read the packed bytes without computing: the bandwidth limit in benchmarks."""
        self._matrix.read_weights(self._pool)

    def multiply_registers(self, num_macs: int) -> None:
        """Perform ``num_macs`` multiply-adds on registers: the compute limit in benchmarks."""
        self._matrix.multiply_registers(self._pool, num_macs)

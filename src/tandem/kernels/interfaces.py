"""Interfaces of the kernels: what operators need and what executes them.

This module imports no other module of ``kernels``. ``kernels.devices`` chooses the implementations.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from tandem.core.errors import ShapeError
from tandem.core.model.layers import RoutingRule
from tandem.kernels.gated_delta import GatedDeltaRows, GatedDeltaRule, StateSlots
from tandem.kernels.native import Buffer
from tandem.kernels.paged import PagedBatch, PagedKvCache
from tandem.kernels.routing import StepRouting
from tandem.kernels.states import StateCache
from tandem.kernels.weights.blocks import CodedMatrix
from tandem.kernels.weights.formats import WeightFormat

__all__ = [
    "PLAIN",
    "AdaptableHeads",
    "AdaptableMatrix",
    "AdaptedPart",
    "Angles",
    "AttentionRule",
    "Execution",
    "HeadMatrix",
    "LoraPart",
    "Matrix",
    "MatrixWrapper",
    "Shard",
    "Step",
    "WeightReader",
]


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """Options of attention in one layer: window, soft cap, sinks, chunk."""

    window: int = 0
    """Tokens that a token attends to, itself included; 0: all."""
    soft_cap: float = 0.0
    """Soft cap of scores: a score becomes cap * tanh(score / cap); 0: none."""
    sinks: Buffer | None = None
    """Attention sinks, float32 [H]: an extra score per head that takes weight and adds no value."""
    chunk: int = 0
    """Chunk size: a token attends only from the last multiple of this size on; 0: no chunks."""


PLAIN = AttentionRule()


class Matrix(Protocol):
    """A matrix of an operator; its input x is [T, K], contiguous, in the model's dtype."""

    out_features: int

    @property
    def out_dtype(self) -> torch.dtype | None:
        """Dtype that ``run`` should write: float32 leaves sums unrounded, None: the dtype
        of ``x``.
        """
        ...

    def forward(self, x_TK: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Return ``x W^T + b`` [..., N], new, as float32 or in the dtype of ``x_TK``."""
        ...

    def add_into_(self, residual_TN: Tensor, x_TK: Tensor) -> None:
        """Add ``x W^T + b`` to ``residual_TN`` in place."""
        ...

    def run(self, x_TK: Buffer, out_TN: Buffer, *, is_added: bool = False) -> None:
        """Write ``x W^T + b`` to a buffer of a native step, or add it if ``is_added``."""
        ...


class HeadMatrix(Protocol):
    """A matrix for each head; its input x is [T, H, K], heads contiguous, in the model's dtype."""

    out_shape: tuple[int, int]
    """Output shape of a row, (H, N)."""

    def forward(self, x_THK: Tensor) -> Tensor:
        """Return each head's product [T, H, N], new, in the dtype of ``x_THK``."""
        ...

    def run(self, x_THK: Buffer, out_THN: Buffer) -> None:
        """Write each head's product to a buffer of a native step; T and H may have any strides."""
        ...


@dataclass(frozen=True, slots=True)
class LoraPart:
    """LoRA factors of an adapter for a range of a matrix's outputs, or for the matrix of one
    head.
    """

    a_RK: Tensor  # noqa: N815 - a shape suffix
    """First factor A, contiguous, in the model's dtype."""
    b_NR: Tensor  # noqa: N815
    """Second factor B, in the dtype of the first."""
    scale: float
    first_output: int = 0
    head: int = 0


class AdaptableMatrix(Matrix, Protocol):
    """A matrix to which LoRA adapters can be added."""

    def add_parts(self, slot: int, parts: list[LoraPart]) -> None:
        """Add LoRA factors of the adapter in a slot. The caller ensures that no running step uses
        the slot.
        """
        ...


class AdaptableHeads(HeadMatrix, Protocol):
    """Matrices of heads to which LoRA adapters can be added."""

    def add_parts(self, slot: int, parts: list[LoraPart]) -> None:
        """Add LoRA factors of the adapter in a slot. The caller ensures that no running step uses
        the slot.
        """
        ...


class AdaptedPart(Protocol):
    """A linear module of the checkpoint that can take LoRA adapters, located within an operator's
    matrices.
    """

    @property
    def in_features(self) -> int:
        """Number of inputs K of the checkpoint's linear module."""
        ...

    @property
    def out_features(self) -> int:
        """Number of outputs N of the checkpoint's linear module."""
        ...

    def set_delta(self, slot: int, a_RK: Tensor, b_NR: Tensor, scale: float) -> None:
        """Set an adapter's LoRA factors of this module in a slot; the tensors are in the model's
        dtype.
        """
        ...


class MatrixWrapper(Protocol):
    """Wrapping of an operator's matrices into ones that add LoRA adapters' products."""

    def wrap_matrix(self, matrix: Matrix) -> AdaptableMatrix:
        """Return an operator's matrix wrapped so that LoRA adapters can be added to it."""
        ...

    def wrap_heads(self, matrix: HeadMatrix) -> AdaptableHeads:
        """Return matrices of heads wrapped so that LoRA adapters can be added to them."""
        ...


class Angles(Protocol):
    """The angles of a rotary embedding, as cosines and sines by position."""

    def compute(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (cos, sin), each [T, r], in ``dtype``; they depend on the position alone."""
        ...


class Step(Protocol):
    """One forward step: its attention plan, and how layers run in it.

    Shapes: T tokens, D hidden, H query heads, K KV heads, d head_dim. Use from one thread; layers
    run in order.
    """

    def run_layer_(self, layer: nn.Module, x_TD: Tensor) -> None:
        """Run a fused layer on the residual stream, in place; writes the layer's KV.

        The last addend may be left to the next layer's norm; ``complete_`` adds the final one.
        """
        ...

    def complete_(self, x_TD: Tensor) -> None:
        """Add what the last layer left to be added by a next norm, if anything, to the residual
        stream; call it after the last layer.
        """
        ...

    def mix(self, attention: nn.Module, h_TD: Tensor) -> Tensor:
        """Return attention's result before the output projection; writes the KV.

        [T, H * value size of a head], valid until the next layer runs.
        """
        ...

    def write_kv(self, layer_idx: int, kv_T2Kd: Tensor) -> None:
        """Write the step's keys and values, [T, 2, K, d] with any strides, into their cache slots.

        Only for transformers' own attention: ``mix`` and ``run_layer_`` write the KV themselves.
        """
        ...

    def attend(
        self, layer_idx: int, q_THd: Tensor, kv_T2Kd: Tensor, scale: float, rule: AttentionRule
    ) -> Tensor:
        """Attend each token to its sequence's context up to itself; KV must have been written.

        Args:
            layer_idx: layer whose KV is read.
            q_THd: queries after RoPE; any strides.
            kv_T2Kd: keys and values of this step's tokens.
            scale: factor on the scores.
            rule: window, soft cap, sinks.

        Returns: [T, H * d], new.
        """
        ...


class Execution(Protocol):
    """Implementations of the operators for one kind of device."""

    is_native: bool
    """True if native kernels compute, so that operators hold their weights in the kernels' form."""
    is_host: bool
    """True if the host can read values at once; otherwise reading one waits for the device."""

    def begin_step(
        self,
        batch: PagedBatch,
        cache: PagedKvCache,
        ropes: tuple[Angles, ...],
        dtype: torch.dtype,
        on_layer: Callable[[int], None] | None = None,
        states: StateCache | None = None,
        routing: StepRouting | None = None,
    ) -> Step:
        """Plan a step, once for all its layers.

        Args:
            batch: the tokens; borrowed.
            cache: the block pool, to which layers write this step's KV.
            ropes: give the RoPE angles; layers choose by ``Attention.rope_idx``.
            dtype: the model's dtype.
            on_layer: called with each KV layer's index once its KV of this step is in the blocks.
            states: the sequences' state slots; None if no layer has a state.
            routing: records the choices of fused layers' routers and defers experts; None: neither.
        """
        ...

    def norm(self, x_TD: Tensor, weight_D: Buffer, eps: float, offset: float = 0.0) -> Tensor:
        """Return ``x / sqrt(mean(x^2) + eps) * (offset + weight)``, new; any leading dimensions."""
        ...

    def gated_delta(self, rule: GatedDeltaRule, rows: GatedDeltaRows, slots: StateSlots) -> Tensor:
        """Run a layer's gated delta rule over a step's rows; updates their state slots.

        In native kernels a row's result is bitwise the same for any chunk, batch and number of
        threads.

        Returns: [T, V * v], new, in the dtype of ``rows.x_TC``, for the output projection.

        Raises:
            ShapeError: sizes do not fit together, or two sequences share a slot.
        """
        ...

    def soft_cap_(self, x_TV: Tensor, cap: float) -> None:
        """Replace float32 ``x`` by ``cap * tanh(x / cap)``, in place."""
        ...

    def route(
        self, logits_TE: Tensor, top_k: int, rule: RoutingRule, bias_E: Buffer | None = None
    ) -> tuple[Tensor, Tensor]:
        """Choose each token's experts; of equal scores, the lower id.

        ``bias_E``, float32, affects the choice but not the weights.

        Returns: (weights [T, top_k] in the logits' dtype, expert ids int64 [T, top_k]).
        """
        ...


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a weight along one of its axes, such as the rows or columns of one rank."""

    axis: int
    """Axis of the weight's shape; for codes [N, K], 0 is outputs and 1 inputs."""
    start: int
    stop: int
    """End of the part along the axis, exclusive."""
    size: int
    """Size of the whole axis, as in the configuration."""

    def __post_init__(self) -> None:
        if self.axis < 0 or not 0 <= self.start < self.stop <= self.size:
            what = f"{self.start} to {self.stop} of {self.size} along axis {self.axis}"
            raise ShapeError("kernels.read_shard", f"{what}: give a part that is not empty")

    def widen(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the whole weight's shape for a part of this shape.

        Raises: ShapeError (the part has another size along the axis).
        """
        if self.axis >= len(shape) or shape[self.axis] != self.stop - self.start:
            what = f"{self.start} to {self.stop} along axis {self.axis} do not fit {list(shape)}"
            raise ShapeError("kernels.read_shard", what)
        return (*shape[: self.axis], self.size, *shape[self.axis + 1 :])


class WeightReader(Protocol):
    """Reader of the checkpoint's tensors by name, in the model's dtype and on its device."""

    dtype: torch.dtype
    device: torch.device
    execution: Execution
    """Implementation of the operators that read their weights from this reader."""

    def has(self, name: str) -> bool:
        """Return True if the checkpoint holds ``name``; this does not mark it as used."""
        ...

    def read_into(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        """Copy ``name`` into ``out``, converting its dtype; marks it as used.

        Args:
            name: name of the weight.
            out: tensor of the weight's shape, or of its part's.
            shard: the part to read; None: all. Only the wanted values are read; codes that must be
                decoded are first decoded whole, into scratch memory.

        Raises:
            NotFoundError: the checkpoint has no such tensor.
            ShapeError: the shapes differ, or the stored dtype is not floating.
            CorruptionError: some of the tensor's bytes are missing.
        """
        ...

    def find_storage(self, name: str) -> str:
        """Return a description of the stored codes; empty for plain values. Does not mark it as
        used.
        """
        ...

    def find_format(self, name: str) -> WeightFormat | None:
        """Return the format in which ``read_packed`` returns ``name``; marks nothing as used.

        None if the checkpoint stores plain values, or codes that no weight format can hold.
        """
        ...

    def read_packed(
        self, name: str, expert_id: int | None = None, shard: Shard | None = None
    ) -> CodedMatrix:
        """Return the codes [N, K] of a matrix in the format of ``find_format``; marks it as used.

        Outputs are the first dimension, even if ``read_into`` returns the transposed matrix.

        Args:
            name: name of the weight.
            expert_id: expert to read, if the checkpoint has a layer's experts in one tensor.
            shard: the part of the matrix [N, K]; None: all. Its ends must not split groups of codes
                that share a scale, else ShapeError.

        Raises: the errors of ``read_into``; UnsupportedError if there is no such format.
        """
        ...

    def skip(self, prefix: str) -> None:
        """Mark every tensor whose name starts with ``prefix`` as used, without reading it, so that
        it does not count as left over after loading.
        """
        ...

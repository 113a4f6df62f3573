"""The interfaces of the kernels: what operators ask for, and what runs them.

They lie below all other modules of ``kernels``. ``kernels.devices`` chooses who implements them.
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
    """The options of a layer's attention: window, soft cap, sinks."""

    window: int = 0
    """A token sees itself and ``window - 1`` before it; 0 is all."""
    soft_cap: float = 0.0
    """A score becomes cap * tanh(score / cap); 0 is none."""
    sinks: Buffer | None = None
    """float32 [H]: a logit that takes weight and adds nothing."""
    chunk: int = 0
    """A token sees none before the last multiple of this up to its position; 0 is no border."""


PLAIN = AttentionRule()


class Matrix(Protocol):
    """A matrix of an operator; x is [T, K] and contiguous, of the model's dtype."""

    out_features: int

    @property
    def out_dtype(self) -> torch.dtype | None:
        """The dtype that ``run`` writes best: float32 to leave sums unrounded, None = as ``x``."""
        ...

    def forward(self, x_TK: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Return [..., N], new, float32 or of the dtype of ``x_TK``; any leading dimensions."""
        ...

    def add_into_(self, residual_TN: Tensor, x_TK: Tensor) -> None:
        """Add the product to ``residual_TN``, in place."""
        ...

    def run(self, x_TK: Buffer, out_TN: Buffer, *, is_added: bool = False) -> None:
        """Write the product to a buffer of a native step, or add it to what that holds."""
        ...


class HeadMatrix(Protocol):
    """A matrix for each head; x is [T, H, K], dense heads, of the model's dtype."""

    out_shape: tuple[int, int]
    """(H, N)."""

    def forward(self, x_THK: Tensor) -> Tensor:
        """Return [T, H, N], new, of the dtype of ``x_THK``."""
        ...

    def run(self, x_THK: Buffer, out_THN: Buffer) -> None:
        """Write the product to a buffer of a native step; any strides of T and H."""
        ...


@dataclass(frozen=True, slots=True)
class LoraPart:
    """An adapter's change of some outputs of a matrix, or of one head's."""

    a_RK: Tensor  # noqa: N815 - a shape suffix
    """Contiguous, of the model's dtype."""
    b_NR: Tensor  # noqa: N815
    """The second factor, in the dtype of the first."""
    scale: float
    first_output: int = 0
    head: int = 0


class AdaptableMatrix(Matrix, Protocol):
    """A matrix that takes adapters."""

    def add_parts(self, slot: int, parts: list[LoraPart]) -> None:
        """Give an adapter parts; no step has rows of it yet."""
        ...


class AdaptableHeads(HeadMatrix, Protocol):
    """Matrices of heads that take adapters."""

    def add_parts(self, slot: int, parts: list[LoraPart]) -> None:
        """Give an adapter parts; no step has rows of it yet."""
        ...


class AdaptedPart(Protocol):
    """A linear module of the checkpoint, wherever it is within an operator."""

    @property
    def in_features(self) -> int:
        """K of the checkpoint's module."""
        ...

    @property
    def out_features(self) -> int:
        """N of the checkpoint's module."""
        ...

    def set_delta(self, slot: int, a_RK: Tensor, b_NR: Tensor, scale: float) -> None:
        """Give an adapter its change of the module; the tensors are of the model's dtype."""
        ...


class MatrixWrapper(Protocol):
    """Makes matrices of operators take adapters."""

    def wrap_matrix(self, matrix: Matrix) -> AdaptableMatrix:
        """Return the matrix with adapters."""
        ...

    def wrap_heads(self, matrix: HeadMatrix) -> AdaptableHeads:
        """Return the matrices of heads with adapters."""
        ...


class Angles(Protocol):
    """A rotary embedding: cosines and sines by position."""

    def compute(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (cos, sin), each [T, r], of the dtype, which depend on the position alone."""
        ...


class Step(Protocol):
    """One step: its plan, and how its layers run.

    Shapes: T tokens, D hidden, H query heads, K KV heads, d head_dim. One thread; layers in order.
    """

    def run_layer_(self, layer: nn.Module, x_TD: Tensor) -> None:
        """Run a fused layer on the residual stream, in place; writes the layer's KV.

        What it adds last may be left to the next layer's norm: ``complete_`` says the end.
        """
        ...

    def complete_(self, x_TD: Tensor) -> None:
        """Add what the last layer left to a next one, if it did, to the residual stream."""
        ...

    def mix(self, attention: nn.Module, h_TD: Tensor) -> Tensor:
        """Return the attended heads before the output projection; writes the KV.

        [T, H * size of a head's value], valid until the next layer's.
        """
        ...

    def write_kv(self, layer_idx: int, kv_T2Kd: Tensor) -> None:
        """Put the step's keys and values, [T, 2, K, d] with any strides, into their slots.

        For attention that is not ours: ``mix`` and ``run_layer_`` do this themselves.
        """
        ...

    def attend(
        self, layer_idx: int, q_THd: Tensor, kv_T2Kd: Tensor, scale: float, rule: AttentionRule
    ) -> Tensor:
        """Attend each token to its sequence's context up to itself; KV must have been written.

        Args:
            layer_idx: whose KV.
            q_THd: queries after RoPE; any strides.
            kv_T2Kd: this step's own keys and values.
            scale: on the products.
            rule: window, soft cap, sinks.

        Returns: [T, H * d], new.
        """
        ...


class Execution(Protocol):
    """The operators' implementations for one kind of device."""

    is_native: bool
    """True if native kernels compute, so that what operators hold is packed for them."""
    is_host: bool
    """True if the host reads values at once; elsewhere a look at one waits for the device."""

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
            cache: the block pool; the layers write this step's KV to it.
            ropes: give the angles; layers choose by ``Attention.rope_idx``.
            dtype: the model's.
            on_layer: called with each KV layer's number once its KV of this step is in the blocks.
            states: the slots that the sequences go on with; None where no layer has a state.
            routing: takes the choices of fused layers' routers, and defers experts; None: neither.
        """
        ...

    def norm(self, x_TD: Tensor, weight_D: Buffer, eps: float, offset: float = 0.0) -> Tensor:
        """Return ``x / sqrt(mean(x^2) + eps) * (offset + weight)``, new; any leading dimensions."""
        ...

    def gated_delta(self, rule: GatedDeltaRule, rows: GatedDeltaRows, slots: StateSlots) -> Tensor:
        """Run a layer's gated delta rule over a step's rows; moves their slots on.

        Native, a row's result is bitwise the same in any chunk, batch and number of threads.

        Returns: [T, V * v], new, of the dtype of ``rows.x_TC``, for the output projection.

        Raises:
            ShapeError: sizes that do not fit, or two sequences with one slot.
        """
        ...

    def soft_cap_(self, x_TV: Tensor, cap: float) -> None:
        """Make float32 ``x`` to ``cap * tanh(x / cap)``, in place."""
        ...

    def route(
        self, logits_TE: Tensor, top_k: int, rule: RoutingRule, bias_E: Buffer | None = None
    ) -> tuple[Tensor, Tensor]:
        """Choose each token's experts; of equals, the lower id.

        ``bias_E``, float32, counts for the choice and not for the weights.

        Returns: (weights [T, top_k] of the logits' dtype, expert ids int64 [T, top_k]).
        """
        ...


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a weight along one of its axes, such as the rows or columns of one rank."""

    axis: int
    """Axis of the weight's shape; of codes [N, K], 0 is outputs and 1 inputs."""
    start: int
    stop: int
    """Exclusive."""
    size: int
    """Size of the whole axis, as the configuration has it."""

    def __post_init__(self) -> None:
        if self.axis < 0 or not 0 <= self.start < self.stop <= self.size:
            what = f"{self.start} to {self.stop} of {self.size} along axis {self.axis}"
            raise ShapeError("kernels.read_shard", f"{what}: give a part that is not empty")

    def widen(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the weight whose part has this shape.

        Raises: ShapeError (the part has another shape).
        """
        if self.axis >= len(shape) or shape[self.axis] != self.stop - self.start:
            what = f"{self.start} to {self.stop} along axis {self.axis} do not fit {list(shape)}"
            raise ShapeError("kernels.read_shard", what)
        return (*shape[: self.axis], self.size, *shape[self.axis + 1 :])


class WeightReader(Protocol):
    """Tensors by checkpoint name, in the dtype and on the device that the model runs in."""

    dtype: torch.dtype
    device: torch.device
    execution: Execution
    """Runs the operators that read their weights here."""

    def has(self, name: str) -> bool:
        """Return True if the checkpoint holds ``name``; does not mark it as used."""
        ...

    def read_into(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        """Copy ``name`` into ``out``, converting its dtype; marks it as used.

        Args:
            name: of the weight.
            out: of its shape, or of that of its part.
            shard: the part to read; None is all. Values are read as far as they are wanted; codes
                that have to be decoded are decoded whole first, into scratch memory.

        Raises:
            NotFoundError: the checkpoint has no such tensor.
            ShapeError: its shape is not that of ``out``, or its dtype is not floating.
            CorruptionError: its bytes are not all there.
        """
        ...

    def find_storage(self, name: str) -> str:
        """Return in words how ``name`` is coded; empty for values. Marks nothing as used."""
        ...

    def find_format(self, name: str) -> WeightFormat | None:
        """Return the format in which ``read_packed`` gives ``name``; marks nothing as used.

        None where the checkpoint stores values, or codes that none of our formats holds.
        """
        ...

    def read_packed(
        self, name: str, expert_id: int | None = None, shard: Shard | None = None
    ) -> CodedMatrix:
        """Return the codes [N, K] of a matrix in the format of ``find_format``; marks it as used.

        Outputs come first, whichever way around ``read_into`` gives the values.

        Args:
            name: of the weight.
            expert_id: which expert, where the checkpoint has those of a layer in one tensor.
            shard: the part of the matrix [N, K]; None is all. It ends where groups of codes that
                share a scale end, or a ShapeError says so.

        Raises: as ``read_into``; UnsupportedError if there is no such format.
        """
        ...

    def skip(self, prefix: str) -> None:
        """Mark every tensor whose name starts with ``prefix`` as used, without reading it."""
        ...

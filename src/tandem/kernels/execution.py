"""How operators run: one interface, with an implementation for each kind of device.

Operators hold weights and shapes and do not ask where they are. ``choose_execution`` decides, once
for a model and its operators; what it returns begins each step, and the step runs the layers.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from tandem.kernels.cpu.execution import CpuExecution
from tandem.kernels.native import NATIVE_DTYPES, Buffer
from tandem.kernels.routing import RoutingRule
from tandem.kernels.torch.execution import TorchExecution

if TYPE_CHECKING:
    from tandem.kernels.operators.attention import Attention, AttentionRule
    from tandem.kernels.operators.decoder_layer import DecoderLayer
    from tandem.kernels.operators.mla import MlaAttention
    from tandem.kernels.operators.rope import Rope
    from tandem.kernels.paged import PagedBatch, PagedKvCache

__all__ = ["Execution", "Step", "choose_execution"]


class Step(Protocol):
    """One step: its plan, and how its layers run.

    Shapes: T tokens, D hidden, H query heads, K KV heads, d head_dim. One thread; layers in order.
    """

    def run_layer_(self, layer: "DecoderLayer", x_TD: Tensor) -> None:
        """Run a fused layer on the residual stream, in place; writes the layer's KV.

        What it adds last may be left to the next layer's norm: ``complete_`` says the end.
        """
        ...

    def complete_(self, x_TD: Tensor) -> None:
        """Add what the last layer left to a next one, if it did, to the residual stream."""
        ...

    def mix(self, attention: "Attention | MlaAttention", h_TD: Tensor) -> Tensor:
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
        self, layer_idx: int, q_THd: Tensor, kv_T2Kd: Tensor, scale: float, rule: "AttentionRule"
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
    """The operators' implementations for one kind of device; has no state."""

    def begin_step(
        self,
        batch: "PagedBatch",
        cache: "PagedKvCache",
        ropes: "tuple[Rope, ...]",
        dtype: torch.dtype,
        on_layer: Callable[[int], None] | None = None,
    ) -> Step:
        """Plan a step, once for all its layers.

        Args:
            batch: the tokens; borrowed.
            cache: the block pool; the layers write this step's KV to it.
            ropes: give the angles; layers choose by ``Attention.rope_idx``.
            dtype: the model's.
            on_layer: called with each layer's index once its KV of this step is in the blocks.
        """
        ...

    def norm(self, x_TD: Tensor, weight_D: Buffer, eps: float, offset: float = 0.0) -> Tensor:
        """Return ``x / sqrt(mean(x^2) + eps) * (offset + weight)``, new; any leading dimensions."""
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


def choose_execution(device: torch.device, dtype: torch.dtype) -> Execution:
    """Return what runs a model of ``dtype`` on ``device``."""
    if device.type == "cpu" and dtype in NATIVE_DTYPES:
        return CpuExecution()
    return TorchExecution()

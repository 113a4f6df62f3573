"""Interface of a layer's routed experts, and the layouts in which checkpoints store them.

Shapes: T tokens, D hidden, F intermediate of one expert, E experts, K experts per token.
"""

from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor

from tandem.core.errors import DeadlineError
from tandem.core.model.layers import ExpertsSpec
from tandem.kernels.interfaces import WeightReader
from tandem.kernels.operators.operator import Operator

__all__ = [
    "PendingExperts",
    "RoutedExperts",
    "is_down",
    "list_expert_weights",
    "read_biases",
    "read_experts",
]

MAX_GATHERED_BYTES = 512 << 20
"""Most bytes of chosen experts' weights that a step on a device gathers: a decode of a few tokens.
With more tokens pairs are sorted by expert, for which the host must wait for the choices.
"""

MAX_RUN_S = 60.0
"""Timeout in seconds, far above what a layer's experts take for the longest prefill."""


class PendingExperts:
    """The result of ``RoutedExperts.submit``, which may still be computed; one thread waits for
    it.
    """

    def __init__(self, future: Future[None], finish: Callable[[], Tensor]) -> None:
        self._future = future
        self._finish = finish

    def wait(self, timeout_s: float = MAX_RUN_S) -> Tensor:
        """Wait for the result of ``RoutedExperts.forward``, [T, D], new; call it once only.

        Raises: the errors of ``forward``; DeadlineError (``timeout_s`` have passed; the computation
            continues, and ``wait`` may be called again).
        """
        try:
            self._future.result(timeout_s)
        except TimeoutError as error:
            what = f"not computed within {timeout_s} s: the pool is busy, or its process forked"
            raise DeadlineError("kernels.wait_experts", what) from error
        return self._finish()


class RoutedExperts(Operator):
    """The routed experts of one layer: gated MLPs, each scaled by its router weight.

    Args:
        spec: sizes, activation and checkpoint layout of the experts.
    """

    def __init__(self, spec: ExpertsSpec) -> None:
        super().__init__()
        self.spec = spec
        self.activation = spec.activation
        self.has_bias = spec.has_bias
        self.is_transposed = spec.is_transposed
        self.num_experts = spec.num_experts
        self.hidden_size = spec.hidden_size
        self.intermediate_size = spec.intermediate_size

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs, [T, D], new.

        Args:
            hidden_states: [T, D]; not modified.
            top_k_index: int64 [T, K] in [-1, E); -1 = computed elsewhere, adds 0.
            top_k_weights: [T, K].

        Raises:
            ShapeError: an id outside of [-1, E), or shapes that do not fit together.
        """
        if self.spec.scales_input:
            return self._run_scaled(hidden_states, top_k_index, top_k_weights)
        out = torch.zeros_like(hidden_states)
        self.add_into_(out, hidden_states, top_k_index, top_k_weights)
        return out

    def _run_scaled(self, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> Tensor:
        """Run ``forward`` with router weights applied to the inputs: one row for each chosen
        expert.
        """
        rows = (x_TD[:, None] * w_TK[..., None].to(x_TD.dtype)).flatten(0, 1)
        out = torch.zeros_like(rows)
        ids = ids_TK.reshape(-1, 1)
        self.add_into_(out, rows, ids, torch.ones_like(ids, dtype=w_TK.dtype))
        return out.view(*ids_TK.shape, -1).sum(1)

    @abstractmethod
    def add_into_(self, residual_TD: Tensor, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> None:
        """Add the experts' weighted sum to ``residual_TD``, in place; otherwise as ``forward``.

        Cost: each chosen expert's weights are read once, however many tokens chose it.
        """

    def submit(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> PendingExperts:
        """Begin ``forward`` and return its pending result.

        Native experts run in the background, one submission after the other, so the caller can do
        other work meanwhile; others run at once. The input tensors must not change until ``wait``
        has returned. Results are bitwise those of ``forward``.
        """
        out = self.forward(hidden_states, top_k_index, top_k_weights)
        done: Future[None] = Future()
        done.set_result(None)
        return PendingExperts(done, lambda: out)


def read_experts(
    reader: WeightReader, name: str, gate_up_EFD: Tensor, down_EDF: Tensor, *, first: int = 0
) -> None:
    """Read gate_up [E, 2 F, D] and down [E, D, F] from either checkpoint layout.

    transformers 5 stores one tensor for all experts; the hub's checkpoints have three for each
    expert. Of the latter, E experts from ``first`` on are read.
    """
    if reader.has(f"{name}.gate_up_proj"):
        reader.read_into(f"{name}.gate_up_proj", gate_up_EFD)
        reader.read_into(f"{name}.down_proj", down_EDF)
        return
    size = down_EDF.shape[2]
    for i, (gate_up, down) in enumerate(zip(gate_up_EFD, down_EDF, strict=True), first):
        reader.read_into(f"{name}.{i}.gate_proj.weight", gate_up[:size])
        reader.read_into(f"{name}.{i}.up_proj.weight", gate_up[size:])
        reader.read_into(f"{name}.{i}.down_proj.weight", down)


def list_expert_weights(reader: WeightReader, name: str, num_experts: int) -> list[str]:
    """Return the names of all experts' weights in the checkpoint's layout."""
    if reader.has(f"{name}.gate_up_proj"):
        return [f"{name}.gate_up_proj", f"{name}.down_proj"]
    parts = ("gate_proj", "up_proj", "down_proj")
    return [f"{name}.{i}.{part}.weight" for i in range(num_experts) for part in parts]


def is_down(weight: str) -> bool:
    """Return True if a name from ``list_expert_weights`` is of a down projection."""
    return weight.endswith(("down_proj", "down_proj.weight"))


def read_biases(
    experts: RoutedExperts, reader: WeightReader, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Read the biases of all experts: gate [E, F], up [E, F], down [E, D]."""
    count, size = experts.num_experts, experts.intermediate_size
    gate_up = torch.empty(count, 2 * size, dtype=reader.dtype, device=reader.device)
    down = torch.empty(count, experts.hidden_size, dtype=reader.dtype, device=reader.device)
    reader.read_into(f"{name}.gate_up_proj_bias", gate_up)
    reader.read_into(f"{name}.down_proj_bias", down)
    gate, up = experts.spec.gate_up_rows
    return gate_up[:, gate], gate_up[:, up], down

"""Buffers at fixed addresses, as captured graphs need them, for data that passes between a device
and the experts on the host.

Shapes: B tokens of a graph, D hidden, K experts per token, U experts that are uploaded.
"""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Landing", "Places", "Staging"]


class Places:
    """Buffers for one layer's data between the device and the host's experts.

    Args:
        allocate: allocates a number of bytes.
        shape: (B, D, K).
        dtype: dtype of the hidden states.
    """

    def __init__(
        self,
        allocate: Callable[[int], Tensor],
        shape: tuple[int, int, int],
        dtype: torch.dtype,
    ) -> None:
        size, hidden, top_k = shape

        def make(columns: int, kind: torch.dtype) -> Tensor:
            return allocate(size * columns * kind.itemsize).view(kind).view(size, columns)

        self.x_BD = make(hidden, dtype)
        self.ids_BK = make(top_k, torch.int64)
        self.late_BK = make(top_k, torch.int64)
        """Ids of deferred experts, whose outputs are added one layer later; -1 where the choice is
        in ``ids_BK``.
        """
        self.weights_BK = make(top_k, torch.float32)
        self.sum_BD = make(hidden, torch.float32)


class Staging(Places):
    """Buffers in host memory for the tokens of one layer, with the sum of its deferred experts
    (those added one layer later).
    """

    def __init__(
        self, allocate: Callable[[int], Tensor], shape: tuple[int, int, int], dtype: torch.dtype
    ) -> None:
        super().__init__(allocate, shape, dtype)
        self.carried_BD = torch.zeros(shape[0], shape[1], dtype=torch.float32)
        """Sum of the layer's deferred experts, which the next layer adds."""


class Pairs:
    """Separate outputs of each token's experts, and which of them the device computes.

    Args:
        allocate: allocates a number of bytes.
        shape: (B, D, K).
    """

    def __init__(self, allocate: Callable[[int], Tensor], shape: tuple[int, int, int]) -> None:
        size, hidden, top_k = shape
        self.host_BKD = (
            allocate(size * top_k * hidden * 4).view(torch.float32).view(size, top_k, hidden)
        )
        """Outputs computed on the host, without router weights; 0 for all other experts."""
        self.on_device_BK = allocate(size * top_k * 8).view(torch.int64).view(size, top_k)
        """Ids of the chosen experts that the device computes; -1 for those that the host computes.
        """


class Landing:
    """Memory that experts are uploaded to, with the id of the expert in each place.

    Args:
        allocate: allocates a number of bytes.
        num_experts: U.
        expert_bytes: size of one expert.
    """

    def __init__(
        self, allocate: Callable[[int], Tensor], num_experts: int, expert_bytes: int
    ) -> None:
        self.memory = allocate(num_experts * expert_bytes)
        self.owners_U = allocate(num_experts * 8).view(torch.int64)
        """Expert id of each place; -1: the place is empty."""

    def take(self, num_experts: int, expert_bytes: int) -> tuple[Tensor, Tensor]:
        """Return the memory of the first ``num_experts`` places for uploaded experts, and the
        owners: which expert each place holds.
        """
        return self.memory[: num_experts * expert_bytes], self.owners_U[:num_experts]

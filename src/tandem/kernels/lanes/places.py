"""Memory at fixed places for what goes between a device and the experts of the host.

Shapes: B tokens of a graph, D hidden, K experts per token, U experts that are uploaded.
"""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Landing", "Places", "Staging"]


class Places:
    """Memory for what goes between the device and the experts, of one layer at a time.

    Args:
        allocate: gives the bytes.
        shape: (B, D, K).
        dtype: of the hidden states.
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
        """Experts that are added one layer later; -1 where a choice is in ``ids_BK``."""
        self.weights_BK = make(top_k, torch.float32)
        self.sum_BD = make(hidden, torch.float32)


class Staging(Places):
    """Places in the host's memory, with the sum of deferred experts."""

    def __init__(
        self, allocate: Callable[[int], Tensor], shape: tuple[int, int, int], dtype: torch.dtype
    ) -> None:
        super().__init__(allocate, shape, dtype)
        self.carried_BD = torch.zeros(shape[0], shape[1], dtype=torch.float32)
        """Written by the layer's deferred experts, read by the next layer's wait."""


class Pairs:
    """Outputs of each token's experts apart, and which of them are the device's, in one memory.

    Args:
        allocate: gives the bytes.
        shape: (B, D, K).
    """

    def __init__(self, allocate: Callable[[int], Tensor], shape: tuple[int, int, int]) -> None:
        size, hidden, top_k = shape
        self.host_BKD = (
            allocate(size * top_k * hidden * 4).view(torch.float32).view(size, top_k, hidden)
        )
        """Without their weights; 0 where the device computes, or nobody."""
        self.on_device_BK = allocate(size * top_k * 8).view(torch.int64).view(size, top_k)
        """Choices whose experts the device computes; -1 for others."""


class Landing:
    """Experts on their way: a place each in one memory, and whose they are.

    Args:
        allocate: gives the bytes.
        num_experts: U.
        expert_bytes: of each.
    """

    def __init__(
        self, allocate: Callable[[int], Tensor], num_experts: int, expert_bytes: int
    ) -> None:
        self.memory = allocate(num_experts * expert_bytes)
        self.owners_U = allocate(num_experts * 8).view(torch.int64)
        """The number of the expert in each place; -1: none."""

    def take(self, num_experts: int, expert_bytes: int) -> tuple[Tensor, Tensor]:
        """Return the first places, and their owners."""
        return self.memory[: num_experts * expert_bytes], self.owners_U[:num_experts]

"""What all operators share: reading their own weights from a source that knows the checkpoint."""

from typing import Protocol

import torch
from torch import Tensor, nn

__all__ = ["Operator", "WeightReader"]


class WeightReader(Protocol):
    """Tensors by checkpoint name, in the dtype and on the device that the model runs in."""

    dtype: torch.dtype
    device: torch.device

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds ``name``; does not mark it as used."""
        ...

    def read_into(self, name: str, out: Tensor) -> None:
        """Copy ``name`` into ``out``, converting its dtype; marks it as used.

        Raises:
            NotFoundError: the checkpoint has no such tensor.
            ShapeError: its shape is not that of ``out``, or its dtype is not floating.
            CorruptionError: its bytes are not all there.
        """
        ...

    def skip(self, prefix: str) -> None:
        """Mark every tensor whose name starts with ``prefix`` as used, without reading it."""
        ...


class Operator(nn.Module):
    """An operator of ours in the place of a module of the skeleton.

    Weights do not exist before ``load``; after it they are parameters without gradient.
    """

    def load(self, reader: WeightReader, name: str) -> None:
        """Allocate the weights and read them; ``name`` is the module's dotted path.

        Raises: what ``WeightReader.read_into`` raises.
        """
        raise NotImplementedError  # An interface: each operator reads its own names.

    def _read_rows(self, reader: WeightReader, parts: list[tuple[str, int]], *tail: int) -> Tensor:
        """Read tensors stacked along their first dimension; ``parts`` are (name, rows)."""
        out = torch.empty(
            (sum(rows for _, rows in parts), *tail), dtype=reader.dtype, device=reader.device
        )
        row = 0
        for name, rows in parts:
            reader.read_into(name, out[row : row + rows])
            row += rows
        return out


def freeze(weight: Tensor) -> nn.Parameter:
    """Make ``weight`` a parameter that autograd leaves alone."""
    return nn.Parameter(weight, requires_grad=False)

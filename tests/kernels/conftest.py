"""Operators from weights in a dict, and the one comparison that all numeric tests use."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.core.errors import NotFoundError, ShapeError
from tandem.kernels.cpu.device import CPU
from tandem.kernels.devices import choose_execution


class DictReader:
    """A ``WeightReader`` over tensors in memory."""

    def __init__(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.device = CPU.torch_device
        self.execution = choose_execution(CPU, dtype)
        self.tensors = tensors

    def has(self, name: str) -> bool:
        return name in self.tensors

    def find_format(self, name: str) -> None:
        """Tensors are values."""

    def read_into(self, name: str, out: Tensor) -> None:
        if name not in self.tensors:
            raise NotFoundError("test.read", name)
        if self.tensors[name].shape != out.shape:
            raise ShapeError("test.read", name)
        out.copy_(self.tensors[name])


@pytest.fixture
def make_reader() -> type[DictReader]:
    return DictReader


@pytest.fixture
def count_outside() -> Callable[[Tensor, np.ndarray, np.ndarray], int]:
    """Count the elements of a result that are further from the oracle than the bound, or NaN."""

    def count(actual: Tensor, expected: np.ndarray, bound: np.ndarray) -> int:
        assert tuple(actual.shape) == expected.shape, (actual.shape, expected.shape)
        off = np.abs(actual.double().numpy() - expected)
        return int(np.count_nonzero(~(off <= bound)))

    return count


class Draw:
    """Seeded normal numbers, already rounded to a dtype."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin with the first numbers again."""
        self._generator = torch.Generator().manual_seed(7)

    def __call__(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=self._generator) * scale).to(dtype)


@pytest.fixture
def draw() -> Draw:
    return Draw()


@pytest.fixture
def wide() -> Callable[[Tensor], np.ndarray]:
    """float64 numpy of a tensor."""
    return lambda x: x.double().numpy()

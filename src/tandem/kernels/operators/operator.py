"""Base class of operators, which read their own weights from a checkpoint's reader."""

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor, nn

from tandem.kernels.interfaces import AdaptedPart, MatrixWrapper, Step, WeightReader

__all__ = ["Operator", "allocate_scratch", "current_step", "freeze", "read_rows", "running"]

_STEP: ContextVar[Step] = ContextVar("tandem_step")


@contextmanager
def running(step: Step) -> Iterator[None]:
    """Make a step available to operators that transformers' modules call in this context.

    The step cannot be passed as an argument, because some decoder layers drop unknown arguments.
    """
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def current_step() -> Step:
    """Return the running step, which ``running`` has set in this context. Raises: LookupError
    (called outside of ``running``).
    """
    return _STEP.get()


class Operator(nn.Module, ABC):
    """An operator that replaces a module of transformers' model.

    Weights do not exist before ``load``; after it they are parameters without gradient, or packed.
    """

    packed_bytes: int = 0
    """Bytes of packed weights, which are not parameters of the module."""
    code_formats: Mapping[str, str] = MappingProxyType({})
    """Weight formats of matrices that differ from the operator's, by the matrices' name prefix."""
    is_misplaced: bool = False
    """True if packed weights should lie on several NUMA nodes and the operating system refused."""

    @abstractmethod
    def load(self, reader: WeightReader, name: str) -> None:
        """Allocate the weights and read them; ``name`` is the module's dotted path.

        Raises: the errors of ``WeightReader.read_into``.
        """

    def adapt(self, wrapper: MatrixWrapper, name: str) -> dict[str, AdaptedPart]:
        """Make the operator's matrices take LoRA adapters; call it once, after ``load``.

        Args:
            wrapper: wraps each matrix.
            name: the module's dotted path.

        Returns: the checkpoint's linear modules that can be adapted, by dotted name; empty for an
            operator that takes no adapters.
        """
        del wrapper, name
        return {}


def allocate_scratch(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return zeroed CPU memory that is returned to the operating system when freed.

    The C library would keep freed blocks of some MiB; weights that are read only to be packed
    should leave no memory behind.
    """
    return torch.frombuffer(mmap.mmap(-1, prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


def read_rows(
    reader: WeightReader,
    parts: list[tuple[str, int]],
    *tail: int,
    is_scratch: bool = False,
) -> Tensor:
    """Read tensors stacked along their first dimension; ``parts`` are (name, rows).

    ``is_scratch``: True if the result is packed and freed at once; see ``allocate_scratch``.

    Raises: the errors of ``WeightReader.read_into``.
    """
    shape = (sum(count for _, count in parts), *tail)
    if is_scratch:
        out = allocate_scratch(*shape, dtype=reader.dtype)
    else:
        out = torch.empty(shape, dtype=reader.dtype, device=reader.device)
    row = 0
    for name, count in parts:
        reader.read_into(name, out[row : row + count])
        row += count
    return out


def freeze(weight: Tensor) -> nn.Parameter:
    """Return ``weight`` as a parameter that gets no gradient."""
    return nn.Parameter(weight, requires_grad=False)

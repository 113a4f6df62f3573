"""The part that all operators share: reading their own weights from a source that knows the
checkpoint.
"""

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
    """Give a step to the operators that are called meanwhile, through modules of transformers.

    Not every decoder layer passes arguments on that it does not know.
    """
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def current_step() -> Step:
    """Return the step of ``running``. Raises: LookupError (called outside of one)."""
    return _STEP.get()


class Operator(nn.Module, ABC):
    """An operator of ours in the place of a module of the skeleton.

    Weights do not exist before ``load``; after it they are parameters without gradient, or packed.
    """

    packed_bytes: int = 0
    """Bytes of the weights that are packed, and so are no parameters of the module."""
    code_formats: Mapping[str, str] = MappingProxyType({})
    """Formats of matrices that have others than the operator's, by their prefix in it."""
    is_misplaced: bool = False
    """True if packed weights should lie on several NUMA nodes and the kernel refused."""

    @abstractmethod
    def load(self, reader: WeightReader, name: str) -> None:
        """Allocate the weights and read them; ``name`` is the module's dotted path.

        Raises: what ``WeightReader.read_into`` raises.
        """

    def adapt(self, wrapper: MatrixWrapper, name: str) -> dict[str, AdaptedPart]:
        """Make the operator's own matrices take LoRA adapters, once, after ``load``.

        Args:
            wrapper: makes each matrix take them.
            name: the module's dotted path.

        Returns: the linear modules of the checkpoint that may be adapted, by dotted name; none of
            an operator whose matrices may not.
        """
        del wrapper, name
        return {}


def allocate_scratch(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return zeroed memory on the CPU that goes back to the machine when it is freed.

    The C library keeps freed blocks of some MiB; what is read to be packed should leave nothing.
    """
    return torch.frombuffer(mmap.mmap(-1, prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


def read_rows(
    reader: WeightReader,
    parts: list[tuple[str, int]],
    *tail: int,
    is_scratch: bool = False,
) -> Tensor:
    """Read tensors stacked along their first dimension; ``parts`` are (name, rows).

    ``is_scratch``: the result is packed at once and freed; see ``allocate_scratch``.

    Raises: what ``WeightReader.read_into`` raises.
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
    """Make ``weight`` a parameter that autograd leaves alone."""
    return nn.Parameter(weight, requires_grad=False)

"""A simulated device whose graphs record operators as a GPU's do, for tests of what can be
captured.

Memory is the host's and operators are torch's. During a capture each operator is recorded with its
tensors, and nothing else that the code does; a launch repeats the operators on the same memory. So,
as on a GPU, Python code is not repeated, memory that was moved later is still read at its old
address, and reading a tensor's value raises.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem.core.errors import InternalError
from tandem.kernels.cpu.device import CpuDevice, CpuGraph, CpuStream
from tandem.kernels.device import Stream

__all__ = ["TapeDevice"]


class Tape(TorchDispatchMode):
    """A recorder of the torch operators that code calls, which can repeat them on the same
    memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Callable[[], None]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        """Memory that recorded operators write to, with its contents before them, by address."""

    @torch.inference_mode()
    def restore(self) -> None:
        """Undo the writes of the recorded operators, because a capture must not execute
        anything.
        """
        for memory, before in self._before.values():
            memory.copy_(before)

    def _keep(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._before:
            memory = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._before[storage.data_ptr()] = (memory, memory.clone())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator and record it.

        Raises: InternalError (the operator reads a value, which a graph cannot do).
        """
        if torch.Tag.data_dependent_output in func.tags:
            raise InternalError("kernels.capture", f"{func} looks at a value in a graph")
        given = dict(kwargs or {})
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.is_write and isinstance(value, Tensor):
                self._keep(value)
        for value in tree_leaves([given[name] for name in ("out",) if name in given]):
            self._keep(value)
        out = func(*args, **given)
        made = _list_tensors(out)
        known = {one.untyped_storage().data_ptr() for one in _list_tensors((args, given))}
        is_view = all(one.untyped_storage().data_ptr() in known for one in made)
        if not is_view or any(argument.is_write for argument in func._schema.arguments):
            self.operators.append(partial(_repeat, func, args, given, made))
        return out


def _list_tensors(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def _repeat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]) -> None:
    """Run a recorded operator again and copy the tensors that it makes into those of the recorded
    run.
    """
    for new, kept in zip(_list_tensors(func(*args, **kwargs)), made, strict=True):
        if new.data_ptr() != kept.data_ptr():
            kept.copy_(new)


class TapeDevice(CpuDevice):
    """A device whose graphs are recorded operators; a stream completes work before the queueing
    call returns.
    """

    is_host = False
    has_native_kernels = False

    def __init__(self) -> None:
        self._tapes: list[Tape] = []

    def capture(self, stream: Stream, work: Callable[[], None]) -> CpuGraph:
        """Capture the operators that ``work`` runs, then undo their writes."""
        try:
            return super().capture(stream, work)
        finally:
            # Tapes (recordings of a capture's operators) are undone in reverse order, since each
            # restores the values that its predecessor left.
            for tape in reversed(self._tapes):
                tape.restore()
            self._tapes.clear()

    def run(self, stream: Stream, work: Callable[[], None], name: str = "") -> None:
        """Run work at once; during a capture, record its operators."""
        assert isinstance(stream, CpuStream), "a stream of another device"
        if stream.captured is None:
            super().run(stream, work, name)
            return
        with Tape() as tape, torch.inference_mode():
            work()
        self._tapes.append(tape)
        stream.captured.append(partial(_run_all, tape.operators))


def _run_all(operators: list[Callable[[], None]]) -> None:
    with torch.inference_mode():
        for operator in operators:
            operator()

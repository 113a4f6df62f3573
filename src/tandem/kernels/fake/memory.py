"""Memory of a simulated device: tensors whose values the host must not read or write.

The bytes are ordinary memory, on which CPU operators can run, but only inside a stream of the
simulated device. On the host a tensor gives its shape, its address and views of itself; any access
to values raises, as it would be wrong or slow on a real device.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tandem.core.errors import InternalError

__all__ = ["DeviceTensor", "hide", "on_device"]

_state = threading.local()

PLACE_ONLY = frozenset(
    {
        "__getitem__",
        "__len__",
        "as_strided",
        "data_ptr",
        "detach",
        "dim",
        "element_size",
        "expand",
        "flatten",
        "is_contiguous",
        "narrow",
        "numel",
        "select",
        "size",
        "storage_offset",
        "stride",
        "t",
        "transpose",
        "unflatten",
        "untyped_storage",
        "view",
    }
)
"""Methods that use a tensor's shape and address but not its values."""


@contextmanager
def on_device() -> Iterator[None]:
    """Allow this thread to access device memory, as a stream does while it works."""
    before = getattr(_state, "is_device", False)
    _state.is_device = True
    try:
        yield
    finally:
        _state.is_device = before


class DeviceTensor(torch.Tensor):
    """A tensor in the memory of the simulated device."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator inside a stream; outside, allow only operators that need no values.

        Raises: InternalError (the host uses values of device memory).
        """
        name = getattr(func, "__name__", "")
        if name == "__get__":  # An attribute, such as shape or dtype.
            name = "dim"
        if not getattr(_state, "is_device", False) and name not in PLACE_ONLY:
            raise InternalError(
                "kernels.fake_device",
                f"the host called {name} on memory of the device: copy it to staging memory, or "
                "run it on a stream",
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not getattr(_state, "is_device", False):
            return hide(result)
        return result


def hide(tensor: Tensor) -> Tensor:
    """Return a view of the tensor as memory of the simulated device, which the host may not read
    directly.
    """
    return tensor.as_subclass(DeviceTensor)

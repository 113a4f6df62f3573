"""Interface of a device: memory, order of work, and graphs.

All code that schedules work on a device uses ``Device``, so that it runs on every kind of device,
and in tests on simulated ones. ``kernels.devices.open_device`` returns the implementation.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Device", "DeviceMemory", "Event", "Graph", "Reservation", "Stream"]


class Stream(Protocol):
    """A queue of work that the device does in order, in parallel with the host and other
    streams.
    """

    def wait(self, event: "Event") -> None:
        """Let later work of this stream begin only after ``event``; does not block."""
        ...

    def synchronize(self) -> None:
        """Wait until all work of the stream is done. Raises: the error of a host function."""
        ...


class Event(Protocol):
    """A point in the work of a stream, for which others can wait."""

    def record(self, stream: Stream) -> None:
        """Place the event after all work that ``stream`` has now, replacing an earlier place."""
        ...

    def is_done(self) -> bool:
        """Return True if the work before the event is done, or the event was never recorded."""
        ...

    def synchronize(self) -> None:
        """Wait until the work before the event is done."""
        ...


class Graph(Protocol):
    """Captured work that is launched as a whole; the memory that it uses must not move."""


class Reservation(Protocol):
    """A range of addresses, of whose bytes only the first have physical memory until more are
    reserved.
    """

    @property
    def reserved_bytes(self) -> int:
        """Bytes from the start of the range that have physical memory so far."""
        ...

    def reserve(self, end_bytes: int) -> None:
        """Reserve memory for the first ``end_bytes``. Raises: CapacityError (the system
        refuses).
        """
        ...


class DeviceMemory(Reservation, Protocol):
    """A range of device addresses whose memory is reserved in steps."""

    @property
    def tensor(self) -> Tensor:
        """The whole range as uint8; bytes beyond ``reserved_bytes`` must not be accessed."""
        ...


class Device(Protocol):
    """The operations on memory, streams and graphs that every kind of device offers."""

    @property
    def torch_device(self) -> torch.device:
        """The device as torch names it, for tensors."""
        ...

    @property
    def is_host(self) -> bool:
        """True if the host can access the device's memory directly, so no copies are needed."""
        ...

    @property
    def has_native_kernels(self) -> bool:
        """True if native kernels run on the device: weight formats, coded KV, batch invariance."""
        ...

    def name_arithmetic(self) -> str:
        """Return a name for the arithmetic of torch's libraries here: equal names round equally."""
        ...

    def count_free_bytes(self) -> int:
        """Return the device's free memory in bytes."""
        ...

    def allocate(self, size_bytes: int) -> Tensor:
        """Return new zeroed memory, uint8 [size_bytes].

        Raises: CapacityError (the device has less memory).
        """
        ...

    def map_memory(self, size_bytes: int) -> DeviceMemory:
        """Return zeroed memory at addresses that never move, to be reserved in steps.

        A device that cannot reserve in steps reserves all of it at once.

        Raises: CapacityError (the device has less memory).
        """
        ...

    def allocate_staging(self, size_bytes: int) -> Tensor:
        """Return zeroed host memory, uint8 [size_bytes], from and to which ``copy`` is
        asynchronous.
        """
        ...

    def copy(self, source: Tensor, target: Tensor, stream: Stream | None = None) -> None:
        """Copy between host and device, or within the device; shapes and dtypes must be equal.

        With a stream the copy is queued, and both tensors must live until it is done.
        """
        ...

    def make_stream(self) -> Stream:
        """Return a new stream without work."""
        ...

    def follow(self, stream: Stream) -> None:
        """Let later work of ``stream`` begin only after the operators that were called so far
        outside of streams.
        """
        ...

    def wait(self, event: Event) -> None:
        """Let operators begin only after ``event`` if they are called later, outside of streams or
        by the same function of ``run``; does not block where the device has queues.

        Not during a capture.
        """
        ...

    def make_event(self) -> Event:
        """Return a new event that is not recorded."""
        ...

    def run(self, stream: Stream, work: Callable[[], None], name: str = "") -> None:
        """Queue the operators that ``work`` calls, on tensors of the device.

        A GPU calls ``work`` at once and runs its operators later; in a capture ``work`` is called
        once only. So ``work`` must not read values or depend on anything that changes between
        launches.

        Args:
            stream: stream in which the operators run in order.
            work: function that calls operators.
            name: name of the work in timelines.
        """
        ...

    def call_host(self, stream: Stream, function: Callable[[], None], name: str = "") -> None:
        """Queue a function that runs on the host when the stream reaches it.

        The function must not use the device. If captured, it runs at each launch. Its error is
        raised by ``Stream.synchronize``; later work of the stream may then be skipped.
        """
        ...

    def capture(self, stream: Stream, work: Callable[[], None]) -> Graph:
        """Return a graph of the work that ``work`` queues on ``stream``; none of it is executed."""
        ...

    def launch(self, graph: Graph, stream: Stream) -> None:
        """Queue all work of a graph on a stream."""
        ...

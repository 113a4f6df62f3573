"""The interface of a device: memory, the order of work, and graphs of it.

All orchestration around a device goes through ``Device``, so that it runs on every kind of one, and
in tests on a device that is none. ``kernels.devices.open_device`` finds the implementation.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Device", "DeviceMemory", "Event", "Graph", "Reservation", "Stream"]


class Stream(Protocol):
    """A queue of work that the device does in order, beside the host and other streams."""

    def wait(self, event: "Event") -> None:
        """Let later work of this stream begin when ``event`` has happened; do not block."""
        ...

    def synchronize(self) -> None:
        """Wait until all work of the stream is done. Raises: what a host function raised."""
        ...


class Event(Protocol):
    """A point in a stream's work."""

    def record(self, stream: Stream) -> None:
        """Take the place behind all work that ``stream`` has now; replaces an earlier place."""
        ...

    def is_done(self) -> bool:
        """Return True if the work before the event is done, or none was recorded."""
        ...

    def synchronize(self) -> None:
        """Wait until the work before the event is done."""
        ...


class Graph(Protocol):
    """Captured work that is launched as a whole; its memory must stay where it was."""


class Reservation(Protocol):
    """A range of addresses with memory behind its beginning."""

    @property
    def reserved_bytes(self) -> int:
        """Bytes from the start that have memory."""
        ...

    def reserve(self, end_bytes: int) -> None:
        """Reserve memory of the first ``end_bytes``. Raises: CapacityError (refused)."""
        ...


class DeviceMemory(Reservation, Protocol):
    """A reservation on a device."""

    @property
    def tensor(self) -> Tensor:
        """All bytes, uint8; those beyond ``reserved_bytes`` must not be touched."""
        ...


class Device(Protocol):
    """One device, and what is asked of every kind of one."""

    @property
    def torch_device(self) -> torch.device:
        """Place of its tensors, as torch names it."""
        ...

    @property
    def is_host(self) -> bool:
        """True if the host reads and writes its memory, so that nothing needs staging."""
        ...

    @property
    def has_native_kernels(self) -> bool:
        """True if the native kernels run here: weight formats, coded KV, batch invariance."""
        ...

    def name_arithmetic(self) -> str:
        """Return what torch's libraries choose the order of sums by, for rounding classes."""
        ...

    def count_free_bytes(self) -> int:
        """Return how much memory of the device is free now."""
        ...

    def allocate(self, size_bytes: int) -> Tensor:
        """Return zeros, uint8 [size_bytes], new.

        Raises: CapacityError (more than there is).
        """
        ...

    def map_memory(self, size_bytes: int) -> DeviceMemory:
        """Return addresses that never move, zeros, whose memory is taken as it is reserved.

        A device that cannot reserve in parts has reserved all of it.

        Raises: CapacityError (more than there is).
        """
        ...

    def allocate_staging(self, size_bytes: int) -> Tensor:
        """Return zeros, uint8 [size_bytes], in host memory that ``copy`` moves without waiting."""
        ...

    def copy(self, source: Tensor, target: Tensor, stream: Stream | None = None) -> None:
        """Copy between the host and the device, or within it; shapes and dtypes are equal.

        With a stream the copy is queued, and both tensors must live until it is done.
        """
        ...

    def make_stream(self) -> Stream:
        """Return a stream without work."""
        ...

    def follow(self, stream: Stream) -> None:
        """Let later work of ``stream`` begin when operators called outside of streams are done."""
        ...

    def make_event(self) -> Event:
        """Return an event that is not recorded."""
        ...

    def run(self, stream: Stream, work: Callable[[], None], name: str = "") -> None:
        """Queue the operators that ``work`` calls, on tensors of the device.

        A GPU runs ``work`` now, and what it queues later; captured, ``work`` runs once. So it must
        not look at values, and decide nothing by what changes between launches.

        Args:
            stream: whose order the operators keep.
            work: calls operators.
            name: for timelines.
        """
        ...

    def call_host(self, stream: Stream, function: Callable[[], None], name: str = "") -> None:
        """Queue a function that runs on the host when the stream gets there.

        It must not use the device. Captured, it runs at each launch. What it raises is raised by
        ``Stream.synchronize``; later work of the stream may be left out.
        """
        ...

    def capture(self, stream: Stream, work: Callable[[], None]) -> Graph:
        """Return a graph of what ``work`` queues on ``stream``; none of it is done yet."""
        ...

    def launch(self, graph: Graph, stream: Stream) -> None:
        """Queue all work of a graph."""
        ...

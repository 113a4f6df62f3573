"""A client's interfaces to its surroundings: a channel to the master, and a transport for bytes."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from tandem.rpc import BegunCall
from tandem.store.messages import Endpoint

__all__ = ["ClientPort", "MasterChannel", "Piece", "ThreadChannel"]

T = TypeVar("T")


Piece = tuple[Any, int, int, int]
"""One contiguous range to move: memory (a handle that ``ClientPort.register`` returned), where in
it, where in the address space of the host, and how many bytes. A plain tuple: batches have many."""


class ClientPort(Protocol):
    """The data path of a client."""

    def register(self, memory: npt.NDArray[np.uint8]) -> Any:
        """Let transfers touch ``memory``; returns the handle for ``Piece``."""
        ...

    def unregister(self, handle: Any) -> None:
        """Take memory back. No transfer touches it once this has returned."""
        ...

    async def write(self, endpoint: Endpoint, pieces: Sequence[Piece], timeout_s: float) -> None:
        """Write into a host's segment; returns when the host has all bytes."""
        ...

    async def read(self, endpoint: Endpoint, pieces: Sequence[Piece], timeout_s: float) -> None:
        """Read from a host's segment."""
        ...


class MasterChannel(Protocol):
    """The channel to the master, over its restarts: the part of ``rpc.RpcClient`` used here."""

    async def call(
        self,
        method: str,
        request: object,
        response_type: type[T],
        *,
        timeout_s: float | None = None,
    ) -> T:
        """Call the present master; PeerLostError if there is none."""
        ...

    async def wait_connected(self, timeout_s: float) -> object:
        """Wait for a session. Raises: DeadlineError."""
        ...


class ThreadChannel(MasterChannel, Protocol):
    """The same, also for threads that block."""

    def begin_threadsafe(
        self, method: str, request: object, response_type: type[T], *, timeout_s: float
    ) -> BegunCall[T]:
        """Begin a call, from any thread but the loop's. Raises: as ``call``."""
        ...

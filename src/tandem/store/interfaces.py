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
"""One contiguous range to move: (local memory as a handle of ``ClientPort.register``, offset in
that memory, remote address in the host's address space, bytes). A plain tuple, since a batch has
many.
"""


class ClientPort(Protocol):
    """The data path of a client: reads and writes of hosts' memory by registered local memory."""

    def register(self, memory: npt.NDArray[np.uint8]) -> Any:
        """Register ``memory`` for transfers, and return the handle that a ``Piece`` names it by."""
        ...

    def unregister(self, handle: Any) -> None:
        """End the registration of memory. No transfer touches the memory after the return."""
        ...

    async def write(self, endpoint: Endpoint, pieces: Sequence[Piece], timeout_s: float) -> None:
        """Write pieces of local memory into a host's segment. Return when the host has all
        bytes.
        """
        ...

    async def read(self, endpoint: Endpoint, pieces: Sequence[Piece], timeout_s: float) -> None:
        """Read ranges of a host's segment into local memory."""
        ...


class MasterChannel(Protocol):
    """A client's channel to the master, which finds the master again after a restart."""

    async def call(
        self,
        method: str,
        request: object,
        response_type: type[T],
        *,
        timeout_s: float | None = None,
    ) -> T:
        """Call a method of the current master. Raises PeerLostError if no master is connected."""
        ...

    async def wait_connected(self, timeout_s: float) -> object:
        """Wait until a session with a master exists. Raises: DeadlineError (none in time)."""
        ...


class ThreadChannel(MasterChannel, Protocol):
    """A ``MasterChannel`` that threads without an event loop may use too."""

    def begin_threadsafe(
        self, method: str, request: object, response_type: type[T], *, timeout_s: float
    ) -> BegunCall[T]:
        """Begin a call from any thread but the event loop's. Raises: the same errors as
        ``call``.
        """
        ...

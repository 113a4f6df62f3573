"""One process's view of a session with another."""

from collections.abc import Awaitable
from typing import Protocol, TypeVar

from tandem.core.errors import PeerLostError

__all__ = ["Caller", "check_present"]

T = TypeVar("T")


class Caller(Protocol):
    """One session with another process: the part of ``rpc.Peer`` that the store uses."""

    @property
    def name(self) -> str:
        """The name by which the other process introduces itself."""
        ...

    @property
    def instance_id(self) -> str:
        """Random id of the other process, new for each start."""
        ...

    @property
    def is_lost(self) -> bool:
        """True if the session has ended."""
        ...

    async def call(
        self,
        method: str,
        request: object,
        response_type: type[T],
        *,
        timeout_s: float | None = None,
    ) -> T:
        """Call a method of the other process, and wait for the answer; see ``rpc.Peer.call``."""
        ...

    def begin(
        self,
        method: str,
        request: object,
        response_type: type[T],
        *,
        timeout_s: float | None = None,
    ) -> Awaitable[T]:
        """Send a call, and return an awaitable of its answer; see ``rpc.Peer.begin``."""
        ...


def check_present(caller: Caller) -> None:
    """Raise PeerLostError if the caller's session has ended.

    Called where work begins: the end of a session cancels only the work that had begun before it.
    """
    if caller.is_lost:
        raise PeerLostError("store.call", f"the session of {caller.name} is over")

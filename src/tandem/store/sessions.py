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
        """The name that the other side gives itself."""
        ...

    @property
    def instance_id(self) -> str:
        """Random for each start of the other process."""
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
        """Call a method there; see ``rpc.Peer.call``."""
        ...

    def begin(
        self,
        method: str,
        request: object,
        response_type: type[T],
        *,
        timeout_s: float | None = None,
    ) -> Awaitable[T]:
        """Send a call, and return what waits for its answer; see ``rpc.Peer.begin``."""
        ...


def check_present(caller: Caller) -> None:
    """Do nothing for a caller that has gone: no end of its session would stop the work.

    Raises: PeerLostError.
    """
    if caller.is_lost:
        raise PeerLostError("store.call", f"the session of {caller.name} is over")

"""Interfaces of the data path between instances.

``transfer_port`` implements them over the transfer engine; the simulated world has its own.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from tandem.core.errors import TandemError

__all__ = ["IncomingCall", "PeerPort", "PoolKind", "PoolRange", "RemotePool"]

PoolKind = Literal["kv", "states", "windows"]
"""Kind of a memory pool: KV blocks, slots of states, or blocks of window layers."""


class PoolRange(NamedTuple):
    """A range of bytes to copy from a memory pool of another instance to the same kind of pool
    here.
    """

    local: int
    """Offset in our pool, bytes."""
    remote: int
    """Offset in the peer's pool, bytes."""
    length: int
    kind: PoolKind = "kv"
    """Kind of both pools."""


class RemotePool(Protocol):
    """The memory pools (blocks, states) of another instance's process, until it restarts. The
    caller of ``open`` owns it.
    """

    @property
    def name(self) -> str:
        """Name that the other process reports."""
        ...

    @property
    def epoch(self) -> int:
        """Number of the run of the other process; it differs after a restart."""
        ...

    @property
    def length(self) -> int:
        """Size of the pool of KV blocks in the other process, bytes."""
        ...

    @property
    def can_read(self) -> bool:
        """True if the other process allows that its pools are read."""
        ...

    def close(self) -> None:
        """Close the connection to the other process; reads in progress end with an error.
        Idempotent.
        """
        ...


class PeerPort(Protocol):
    """A port (an interface to the transfer engine) that reads other instances' pools into ours."""

    async def open(
        self, address: str, buffers: Mapping[PoolKind, str], *, deadline_s: float
    ) -> RemotePool:
        """Connect to an instance. If cancelled, it leaves no connection.

        Args:
            address: address of its transfer engine.
            buffers: name of each of its pools, by kind.
            deadline_s: seconds from now.

        Raises: PeerLostError (no instance answers at the address); DeadlineError (the time has
            passed); PermissionDeniedError (the secrets differ); NotFoundError (it has no buffer of
            a name in ``buffers``).
        """
        ...

    async def call(self, pool: RemotePool, payload: bytes, *, deadline_s: float) -> bytes:
        """Send a question to the instance that owns a pool; return its answer.

        Raises: errors of the instance; PeerLostError (the connection is lost); DeadlineError (the
            time has passed).
        """
        ...

    async def read(
        self, pool: RemotePool, ranges: Sequence[PoolRange], *, deadline_s: float
    ) -> None:
        """Read byte ranges of another process's pools into ours.

        When it returns or raises, nothing writes there any more.

        Raises: PeerLostError (the connection is lost); DeadlineError (the time has passed).
        """
        ...


class IncomingCall(Protocol):
    """A question of another instance about a prefill here, to be answered once; see
    ``tandem.transfer.Call``.
    """

    @property
    def peer(self) -> str:
        """Name that the asking process reports."""
        ...

    @property
    def payload(self) -> bytes:
        """The question about a prefill's progress, an encoded ``KvQuestion``."""
        ...

    def reply(self, payload: bytes) -> bool:
        """Answer the call; False if it was answered already or nobody waits for it."""
        ...

    def fail(self, error: TandemError) -> bool:
        """Answer the call with an error; False if it was answered already or nobody waits for
        it.
        """
        ...

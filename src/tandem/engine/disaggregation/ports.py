"""The data path between instances, as the deciding parts of disaggregation see it.

``transfer_port`` is the real one, over the transfer engine; the simulated world has its own.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from tandem.core.errors import TandemError

__all__ = ["IncomingCall", "PeerPort", "PoolKind", "PoolRange", "RemotePool"]

PoolKind = Literal["kv", "states", "windows"]
"""Kind of a memory pool: KV blocks, slots of states, or blocks of window layers."""


class PoolRange(NamedTuple):
    """A byte range of a peer's pool to copy into ours."""

    local: int
    """Offset in our pool."""
    remote: int
    """Offset in the peer's."""
    length: int
    kind: PoolKind = "kv"
    """Kind of the pools that both offsets are in."""


class RemotePool(Protocol):
    """The pools of one run of another instance. Owned by who opened it."""

    @property
    def name(self) -> str:
        """The name that the process there gives itself."""
        ...

    @property
    def epoch(self) -> int:
        """Epoch of the process's run; a restart changes it."""
        ...

    @property
    def length(self) -> int:
        """Bytes of the blocks."""
        ...

    @property
    def can_read(self) -> bool:
        """True if the peer offers its pool for reading."""
        ...

    def close(self) -> None:
        """Close the connection to the peer; reads in progress end with an error. Idempotent."""
        ...


class PeerPort(Protocol):
    """Reads the pools of other instances into ours."""

    async def open(
        self, address: str, buffers: Mapping[PoolKind, str], *, deadline_s: float
    ) -> RemotePool:
        """Connect to an instance. Cancelled, it leaves nothing open.

        Args:
            address: of its transfer engine.
            buffers: names of its pools.
            deadline_s: seconds from now.

        Raises: PeerLostError; DeadlineError; PermissionDeniedError; NotFoundError.
        """
        ...

    async def call(self, pool: RemotePool, payload: bytes, *, deadline_s: float) -> bytes:
        """Send a question to the instance that owns a pool; return its answer.

        Raises: what the instance raises; PeerLostError; DeadlineError.
        """
        ...

    async def read(
        self, pool: RemotePool, ranges: Sequence[PoolRange], *, deadline_s: float
    ) -> None:
        """Read ranges into our pool. After its end, with or without an error, nothing writes there.

        Raises: PeerLostError; DeadlineError.
        """
        ...


class IncomingCall(Protocol):
    """A peer's question on the answering side; see ``tandem.transfer.Call``."""

    @property
    def peer(self) -> str:
        """The name that the asking peer gives itself."""
        ...

    @property
    def payload(self) -> bytes:
        """The encoded question."""
        ...

    def reply(self, payload: bytes) -> bool:
        """Answer the call; False if it was answered already or nobody waits for it."""
        ...

    def fail(self, error: TandemError) -> bool:
        """Answer the call with an error; False if it was answered already or nobody waits for
        it.
        """
        ...

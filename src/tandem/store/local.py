"""A store inside one process and one event loop: the same logic without sockets and transfer
engine.

Used by ``StoreClient.local`` and by tests of programs that use a store.
"""

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from tandem.core.clock import MonotonicClock
from tandem.core.errors import NotFoundError, UnsupportedError
from tandem.rpc import Kept
from tandem.store.client import AsyncStoreClient
from tandem.store.config import StoreConfig
from tandem.store.host import HostSegment, StoreHost
from tandem.store.interfaces import Piece
from tandem.store.master.master import StoreMaster
from tandem.store.messages import Endpoint

__all__ = ["LocalStore", "MemoryHostPort", "MemoryPort"]

T = TypeVar("T")
MACHINE = "local"


class MemoryHostPort:
    """A host's data path within one process. Each reader or writer gets its own range of made-up
    addresses.
    """

    def __init__(
        self, address: str, segment: HostSegment, peers: "dict[str, MemoryHostPort]"
    ) -> None:
        self.address = address
        self.segment = segment
        self._bases = itertools.count(2**40, 2**40)
        self.read_base = next(self._bases)
        self._writers: set[int] = set()
        self._peers = peers
        peers[address] = self

    def former_writers(self) -> set[int]:
        """Return no addresses of earlier writers, since the segment is not older than this
        process.
        """
        return set()  # The segment is not older than this process.

    def open_writer(self) -> int:
        """Return a new made-up address at which the segment begins for one writer."""
        base = next(self._bases)
        self._writers.add(base)
        return base

    async def close_writer(self, base: int) -> bool:
        """Withdraw a writer's address. Always True, since copies complete within one call."""
        self._writers.discard(base)
        return True

    async def fetch(
        self, source: Endpoint, source_offset: int, offset: int, length: int, timeout_s: float
    ) -> None:
        """Copy bytes from another host of this process into this host's segment."""
        view = self._peers[source.address].view(
            source.read_base + source_offset, length, is_write=False
        )
        self.segment.data[offset : offset + length] = view

    def view(self, address: int, length: int, *, is_write: bool) -> npt.NDArray[np.uint8]:
        """Return the segment's bytes at an address.

        Raises: NotFoundError if the address is not one given to a reader (or writer, for
            ``is_write``).
        """
        base, offset = address // 2**40 * 2**40, address % 2**40
        is_known = base in self._writers if is_write else base == self.read_base
        if not is_known or offset + length > self.segment.usable_bytes:
            raise NotFoundError("store.memory", f"nothing of {length} bytes at {address}")
        return self.segment.data[offset : offset + length]


class MemoryPort:
    """A client's data path to hosts in its own process."""

    def __init__(self, peers: dict[str, MemoryHostPort]) -> None:
        self._peers = peers

    def register(self, memory: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return the memory itself, which needs no registration within one process."""
        return memory

    def unregister(self, handle: npt.NDArray[np.uint8]) -> None:
        """Do nothing, since memory needs no registration within one process."""

    async def write(self, endpoint: Endpoint, pieces: Sequence[Piece], timeout_s: float) -> None:
        """Copy pieces of memory into a host's segment."""
        host = self._peers[endpoint.address]
        for memory, local_offset, offset, length in pieces:
            target = host.view(offset, length, is_write=True)
            target[:] = memory[local_offset : local_offset + length]

    async def read(self, endpoint: Endpoint, pieces: Sequence[Piece], timeout_s: float) -> None:
        """Copy ranges of a host's segment into memory."""
        host = self._peers[endpoint.address]
        for memory, local_offset, offset, length in pieces:
            source = host.view(offset, length, is_write=False)
            memory[local_offset : local_offset + length] = source


class LocalCaller:
    """A session within one process, whose calls are plain function calls. It stands in for
    ``rpc.Peer``.
    """

    def __init__(
        self, name: str, methods: Sequence[tuple[str, Callable[..., Any], type, type]]
    ) -> None:
        self.name = name
        self.instance_id = secrets.token_hex(8)
        self.is_lost = False
        self.back: LocalCaller
        """The same session as the other side sees it."""
        self._methods = {method: handler for method, handler, *_ in methods}

    async def call(
        self,
        method: str,
        request: object,
        response_type: type[T],
        *,
        timeout_s: float | None = None,
    ) -> T:
        """Call a method of the other side, and wait for the answer."""
        return await self.begin(method, request, response_type, timeout_s=timeout_s)

    def begin(
        self,
        method: str,
        request: object,
        response_type: type[T],
        *,
        timeout_s: float | None = None,
    ) -> Awaitable[T]:
        """Call a method of the other side, whose handler has begun when this returns. Return an
        awaitable of the answer.
        """
        handler = self._methods.get(method)
        if handler is None:
            raise UnsupportedError("store.call", f"no method {method!r}", field="method")
        answer: Any = handler(self.back, request)
        if isinstance(answer, Kept):
            return asyncio.shield(asyncio.ensure_future(answer.work))
        if asyncio.iscoroutine(answer):
            return answer
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        done.set_result(answer)
        return done

    async def wait_connected(self, timeout_s: float) -> object:
        """Return without waiting, since a local session is always connected."""
        return self


class LocalStore:
    """A master, a host and a client in one process. An async context manager, which provides
    ``client``.
    """

    def __init__(self, config: StoreConfig) -> None:
        self._config = config
        self._clock = MonotonicClock()
        self._peers: dict[str, MemoryHostPort] = {}
        self.client: AsyncStoreClient

    async def __aenter__(self) -> Self:
        self._master = StoreMaster(self._config, clock=self._clock, epoch=1, draw=secrets.randbelow)
        self._master.start()
        segment = HostSegment.make_anonymous(self._config.segment_bytes)
        port = MemoryHostPort("memory", segment, self._peers)
        self._host = StoreHost("local", MACHINE, segment, port)
        self._host.on_master(_connect("host", self._master.methods(), self._host.orders.methods()))
        self.client = AsyncStoreClient(
            _connect("client", self._master.methods(), ()),
            MemoryPort(self._peers),
            clock=self._clock,
            config=self._config,
            machine=MACHINE,
        )
        await self._host.is_joined.wait()
        return self

    def make_blocking_client(self, loop: asyncio.AbstractEventLoop) -> None:
        """Return None: all parts of a local store run on one event loop."""

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        await self._host.aclose()
        await self._master.aclose()
        self._host.segment.close()


def _connect(
    name: str,
    there: Sequence[tuple[str, Callable[..., Any], type, type]],
    here: Sequence[tuple[str, Callable[..., Any], type, type]],
) -> LocalCaller:
    """Return a session from ``name``, whose methods are ``here``, to the master, whose methods are
    ``there``.
    """
    forth, back = LocalCaller("master", there), LocalCaller(name, here)
    forth.back, back.back = back, forth
    return forth

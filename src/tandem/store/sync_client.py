"""The blocking store client, with the calls of the asyncio client.

A thread with an event loop keeps the session with the master. The steps of a call run on the
caller's thread and block there: handing them to the loop takes several times as long as a small
call.
"""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

from tandem.core.errors import ConflictError
from tandem.core.loop_calls import LoopThread
from tandem.rpc import RpcConfig
from tandem.store.client import AsyncStoreClient, StoreBuffer, drive
from tandem.store.config import StoreConfig
from tandem.store.local import LocalStore
from tandem.store.services.client import ClientService

__all__ = ["StoreClient"]

P = ParamSpec("P")
T = TypeVar("T")


class _HasClient(Protocol):
    client: AsyncStoreClient

    def make_blocking_client(self, loop: asyncio.AbstractEventLoop) -> AsyncStoreClient | None:
        """Return a client whose usual steps block the thread and need no event loop; None if there
        is no such client.
        """
        ...


class StoreClient:
    """A blocking store client for any number of threads. A context manager. Each call is documented
    at ``AsyncStoreClient``.

    Args:
        config: the master's address, and limits.
        rpc: settings of the control channel.

    Raises: PeerLostError or DeadlineError if there is no master; PermissionDeniedError if the
        master does not trust this process.
    """

    def __init__(self, config: StoreConfig | None = None, rpc: RpcConfig | None = None) -> None:
        self._open(ClientService(StoreConfig() if config is None else config, rpc))

    @classmethod
    def local(cls, segment_bytes: int = 2**28, config: StoreConfig | None = None) -> Self:
        """Make a whole store inside this process. It leaves nothing behind when it is closed.

        Args:
            segment_bytes: memory for objects; allocated as it is used.
            config: limits; None for the defaults, without a wait for hosts.
        """
        import msgspec

        base = StoreConfig(recovery_ms=0) if config is None else config
        client = cls.__new__(cls)
        client._open(LocalStore(msgspec.structs.replace(base, segment_bytes=segment_bytes)))
        return client

    def _open(self, service: "AbstractAsyncContextManager[_HasClient]") -> None:
        self._service = service
        self._is_closed = False
        self._thread = LoopThread("tandem-store")
        try:
            entered = self._thread.run(service.__aenter__())
            self._client = entered.client
            self._blocking = entered.make_blocking_client(self._thread.loop)
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the store; a local store ends. May be repeated."""
        if not self._is_closed:
            self._is_closed = True
            try:
                self._thread.run(self._leave())
            finally:
                self._stop()

    async def _leave(self) -> None:
        if self._blocking is not None:
            await self._blocking.aclose()
        await self._service.__aexit__(None, None, None)

    def _stop(self) -> None:
        self._is_closed = True
        self._thread.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConflictError("store.call", "the client is closed")

    def _do(self, step: Callable[[AsyncStoreClient], Coroutine[Any, Any, T]]) -> T:
        """Run a call on this thread if a blocking client exists, else on the loop's thread."""
        self._check_open()
        if self._blocking is None or self._thread.is_current:
            return self._thread.run(step(self._client))
        return drive(step(self._blocking))

    # The methods below register and unregister memory of the caller for transfers.

    def register(self, memory: Any) -> StoreBuffer:
        """Register memory for transfers, as ``AsyncStoreClient.register`` does."""
        self._check_open()
        return self._client.register(memory)

    def unregister(self, buffer: StoreBuffer) -> None:
        """End the registration of memory, as ``AsyncStoreClient.unregister`` does."""
        self._check_open()
        self._client.unregister(buffer)

    # Each call below has the name, arguments and result of the asyncio client's.

    @staticmethod
    def _face(
        step: Callable[Concatenate[AsyncStoreClient, P], Coroutine[Any, Any, T]],
    ) -> "Callable[Concatenate[StoreClient, P], T]":
        """Return a method of this class that runs ``step``, a call of the asyncio client, and
        blocks until its end.
        """

        @functools.wraps(step)
        def call(self: "StoreClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
            return self._do(lambda client: step(client, *args, **kwargs))

        return call

    put = _face(AsyncStoreClient.put)
    put_many = _face(AsyncStoreClient.put_many)
    put_from = _face(AsyncStoreClient.put_from)
    put_from_many = _face(AsyncStoreClient.put_from_many)
    get = _face(AsyncStoreClient.get)
    get_many = _face(AsyncStoreClient.get_many)
    get_range = _face(AsyncStoreClient.get_range)
    get_range_many = _face(AsyncStoreClient.get_range_many)
    get_into = _face(AsyncStoreClient.get_into)
    get_into_many = _face(AsyncStoreClient.get_into_many)
    exists = _face(AsyncStoreClient.exists)
    exists_many = _face(AsyncStoreClient.exists_many)
    size = _face(AsyncStoreClient.size)
    size_many = _face(AsyncStoreClient.size_many)
    remove = _face(AsyncStoreClient.remove)
    remove_many = _face(AsyncStoreClient.remove_many)
    remove_prefix = _face(AsyncStoreClient.remove_prefix)
    pin = _face(AsyncStoreClient.pin)
    pin_many = _face(AsyncStoreClient.pin_many)
    unpin = _face(AsyncStoreClient.unpin)
    unpin_many = _face(AsyncStoreClient.unpin_many)
    list_keys = _face(AsyncStoreClient.list_keys)
    status = _face(AsyncStoreClient.status)
    drain = _face(AsyncStoreClient.drain)
    retire = _face(AsyncStoreClient.retire)
    set_floor = _face(AsyncStoreClient.set_floor)

"""The blocking face of a store client: a loop in a thread runs the asyncio one."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, Self, TypeVar

from tandem.core.errors import ConflictError, TandemError
from tandem.core.loop_calls import LoopThread
from tandem.rpc import RpcConfig
from tandem.store.client import (
    DEFAULT_OPTIONS,
    AsyncStoreClient,
    Part,
    PutOptions,
    PutResult,
    StoreBuffer,
    drive,
)
from tandem.store.config import StoreConfig
from tandem.store.local import LocalStore
from tandem.store.messages import FloorSet, KeyPage, StoreStatus
from tandem.store.services.client import ClientService

__all__ = ["StoreClient"]

T = TypeVar("T")


class _HasClient(Protocol):
    client: AsyncStoreClient

    def make_blocking_client(self, loop: asyncio.AbstractEventLoop) -> AsyncStoreClient | None:
        """Return a client that needs no loop for its usual steps, if there is one."""
        ...


class StoreClient:
    """A store, to any number of threads. A context manager; see ``AsyncStoreClient`` for each call.

    Args:
        config: where the master is, and limits.
        rpc: settings of the control channel.

    Raises: PeerLostError or DeadlineError if there is no master; PermissionDeniedError.
    """

    def __init__(self, config: StoreConfig | None = None, rpc: RpcConfig | None = None) -> None:
        self._open(ClientService(StoreConfig() if config is None else config, rpc))

    @classmethod
    def local(cls, segment_bytes: int = 2**28, config: StoreConfig | None = None) -> Self:
        """Make a whole store inside this process: nothing to start, nothing left behind.

        Args:
            segment_bytes: memory for objects; taken as it is used.
            config: limits; None = the defaults, without a wait for hosts.
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
            entered = self._run(service.__aenter__())
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
        """Leave the store; a local one ends. Idempotent."""
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

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._is_closed:
            work.close()
            raise ConflictError("store.call", "the client is closed")
        return self._thread.run(work)

    def _do(self, step: Callable[[AsyncStoreClient], Coroutine[Any, Any, T]]) -> T:
        """Carry a step out on this thread if that can be, else on the loop's."""
        if self._blocking is None or self._is_closed or self._thread.is_current:
            return self._run(step(self._client))
        return drive(step(self._blocking))

    # Memory.

    def register(self, memory: Any) -> StoreBuffer:
        """See ``AsyncStoreClient.register``."""

        async def register() -> StoreBuffer:
            return self._client.register(memory)

        return self._run(register())

    def unregister(self, buffer: StoreBuffer) -> None:
        """See ``AsyncStoreClient.unregister``."""

        async def unregister() -> None:
            self._client.unregister(buffer)

        self._run(unregister())

    # Writing.

    def put(self, key: str, value: Any, options: PutOptions = DEFAULT_OPTIONS) -> PutResult:
        """See ``AsyncStoreClient.put``."""
        return self._do(lambda client: client.put(key, value, options))

    def put_many(
        self, keys: Sequence[str], values: Sequence[Any], options: PutOptions = DEFAULT_OPTIONS
    ) -> list[PutResult | TandemError]:
        """See ``AsyncStoreClient.put_many``."""
        return self._do(lambda client: client.put_many(keys, values, options))

    def put_from(
        self, key: str, parts: Part | Sequence[Part], options: PutOptions = DEFAULT_OPTIONS
    ) -> PutResult:
        """See ``AsyncStoreClient.put_from``."""
        return self._do(lambda client: client.put_from(key, parts, options))

    def put_from_many(
        self,
        keys: Sequence[str],
        parts: Sequence[Part | Sequence[Part]],
        options: PutOptions = DEFAULT_OPTIONS,
    ) -> list[PutResult | TandemError]:
        """See ``AsyncStoreClient.put_from_many``."""
        return self._do(lambda client: client.put_from_many(keys, parts, options))

    # Reading.

    def get(self, key: str) -> bytes:
        """See ``AsyncStoreClient.get``."""
        return self._do(lambda client: client.get(key))

    def get_many(self, keys: Sequence[str]) -> list[bytes | TandemError]:
        """See ``AsyncStoreClient.get_many``."""
        return self._do(lambda client: client.get_many(keys))

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See ``AsyncStoreClient.get_range``."""
        return self._do(lambda client: client.get_range(key, offset, length))

    def get_range_many(
        self, keys: Sequence[str], ranges: Sequence[tuple[int, int]]
    ) -> list[bytes | TandemError]:
        """See ``AsyncStoreClient.get_range_many``."""
        return self._do(lambda client: client.get_range_many(keys, ranges))

    def get_into(self, key: str, parts: Part | Sequence[Part]) -> int:
        """See ``AsyncStoreClient.get_into``."""
        return self._do(lambda client: client.get_into(key, parts))

    def get_into_many(
        self, keys: Sequence[str], parts: Sequence[Part | Sequence[Part]]
    ) -> list[int | TandemError]:
        """See ``AsyncStoreClient.get_into_many``."""
        return self._do(lambda client: client.get_into_many(keys, parts))

    # Looking, removing, pinning.

    def exists(self, key: str) -> bool:
        """See ``AsyncStoreClient.exists``."""
        return self._do(lambda client: client.exists(key))

    def exists_many(self, keys: Sequence[str]) -> list[bool]:
        """See ``AsyncStoreClient.exists_many``."""
        return self._do(lambda client: client.exists_many(keys))

    def size(self, key: str) -> int:
        """See ``AsyncStoreClient.size``."""
        return self._do(lambda client: client.size(key))

    def size_many(self, keys: Sequence[str]) -> list[int | TandemError]:
        """See ``AsyncStoreClient.size_many``."""
        return self._do(lambda client: client.size_many(keys))

    def remove(self, key: str) -> bool:
        """See ``AsyncStoreClient.remove``."""
        return self._do(lambda client: client.remove(key))

    def remove_many(self, keys: Sequence[str]) -> list[bool]:
        """See ``AsyncStoreClient.remove_many``."""
        return self._do(lambda client: client.remove_many(keys))

    def remove_prefix(self, prefix: str) -> int:
        """See ``AsyncStoreClient.remove_prefix``."""
        return self._run(self._client.remove_prefix(prefix))

    def pin(self, key: str, *, soft_s: float = 0.0, hard: bool = False) -> bool:
        """See ``AsyncStoreClient.pin``."""
        return self._run(self._client.pin(key, soft_s=soft_s, hard=hard))

    def pin_many(
        self, keys: Sequence[str], *, soft_s: float = 0.0, hard: bool = False
    ) -> list[bool]:
        """See ``AsyncStoreClient.pin_many``."""
        return self._run(self._client.pin_many(keys, soft_s=soft_s, hard=hard))

    def unpin(self, key: str) -> bool:
        """See ``AsyncStoreClient.unpin``."""
        return self._run(self._client.unpin(key))

    def unpin_many(self, keys: Sequence[str]) -> list[bool]:
        """See ``AsyncStoreClient.unpin_many``."""
        return self._run(self._client.unpin_many(keys))

    def list_keys(self, prefix: str = "", *, after: str = "", limit: int = 1000) -> KeyPage:
        """See ``AsyncStoreClient.list_keys``."""
        return self._run(self._client.list_keys(prefix, after=after, limit=limit))

    def status(self) -> StoreStatus:
        """See ``AsyncStoreClient.status``."""
        return self._run(self._client.status())

    def drain(self, host: str) -> None:
        """See ``AsyncStoreClient.drain``."""
        self._run(self._client.drain(host))

    def retire(self, host: str) -> None:
        """See ``AsyncStoreClient.retire``."""
        self._run(self._client.retire(host))

    def set_floor(self, *, dry_run: bool = False) -> FloorSet:
        """See ``AsyncStoreClient.set_floor``."""
        return self._run(self._client.set_floor(dry_run=dry_run))

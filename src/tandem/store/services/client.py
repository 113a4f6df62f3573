"""A client process: the store API, with a channel that follows the leading master."""

import asyncio
import contextlib
import os
import socket

from tandem.core.clock import BootClock
from tandem.rpc import LaneRouter, MethodTable, RpcConfig
from tandem.store.client import AsyncStoreClient, make_blocking_client
from tandem.store.config import StoreConfig
from tandem.store.election import LeaderClient
from tandem.store.ports import TransferClientPort
from tandem.store.services.connect import (
    LOOPBACK,
    find_endpoints,
    identify,
    make_client_maker,
    make_engine,
    make_rpc_config,
)
from tandem.store.services.service import Service
from tandem.transfer import EngineLanes

__all__ = ["ClientService"]


class ClientService(Service):
    """The parts of a client process. An async context manager, which provides ``client``."""

    def __init__(self, config: StoreConfig, rpc: RpcConfig | None = None) -> None:
        super().__init__()
        self._config = config
        self._urls = find_endpoints(config)
        self._rpc = make_rpc_config(RpcConfig() if rpc is None else rpc, config)
        self.client: AsyncStoreClient

    async def _start(self, opening: contextlib.AsyncExitStack) -> None:
        """Open the parts of the client process (channel, transfer engine, client) in order; they
        are closed in the reverse order.
        """
        config = self._config
        name = config.name or f"{socket.gethostname()}:{os.getpid()}"
        identity = identify(name, "store_client")
        # A client listens as well: the owner of shared memory on the same machine asks its users to
        # unmap it.
        self._engine = make_engine(config, self._urls[0], name, (LOOPBACK,))
        opening.push_async_callback(asyncio.to_thread, self._engine.close, deadline_s=2.0)
        lanes = LaneRouter(EngineLanes(self._engine), accepts=False)
        self._channel = LeaderClient(
            self._urls,
            make_client_maker(config, self._rpc, identity, MethodTable(), lanes),
            on_peer=lambda _: self.client.on_master(),
            on_peer_lost=lambda: self.client.on_master(),
        )
        opening.push_async_callback(self._channel.aclose)
        self.client = AsyncStoreClient(
            self._channel,
            TransferClientPort(self._engine),
            clock=BootClock(),  # Leases end while the machine is suspended.
            config=config,
            machine=config.machine or socket.gethostname(),
        )
        opening.push_async_callback(self.client.aclose)
        await self._channel.connect(self._rpc.connect_timeout_ms / 1e3)

    @property
    def leader(self) -> str:
        """Address of the leading master; empty without a session."""
        return self._channel.endpoint

    def make_blocking_client(self, loop: asyncio.AbstractEventLoop) -> AsyncStoreClient:
        """Return a twin of ``client`` for threads other than the one that runs ``loop``."""
        port = TransferClientPort(self._engine, is_blocking=True)
        return make_blocking_client(self.client, self._channel, port, loop)

"""A host process: a segment and a disk, served to masters, readers and writers."""

import asyncio
import contextlib
import logging
import os
import socket
from pathlib import Path

from tandem.core.clock import MonotonicClock
from tandem.core.errors import CapacityError, ConfigError, InternalError, TandemError
from tandem.rpc import LaneRouter, MethodTable, RpcConfig
from tandem.store.config import StoreConfig
from tandem.store.election import LeaderClient
from tandem.store.host import DiskFolder, DiskTier, HostSegment, StoreHost
from tandem.store.ports import TransferHostPort
from tandem.store.services.connect import (
    choose_host_address,
    find_endpoints,
    identify,
    make_client_maker,
    make_engine,
    make_file_name,
    make_rpc_config,
)
from tandem.store.services.service import Service
from tandem.transfer import EngineLanes, TransferEngine

__all__ = ["HostService", "find_segment_folder"]

logger = logging.getLogger(__name__)


def find_segment_folder(config: StoreConfig) -> Path:
    """Return ``segment_dir`` with the user's number filled in, so that users of a machine have
    separate folders.
    """
    return Path(config.segment_dir.replace("{uid}", str(os.geteuid())))


class HostService(Service):
    """A store host process. An async context manager; entering it does not wait for a master.

    Args:
        config: settings of the store.
        rpc: the control channel's settings.
        keep_segment: True if a clean end leaves the segment file; None to keep it if the host has a
            configured name, by which it is found again. A process that dies always leaves the file.
    """

    def __init__(
        self,
        config: StoreConfig,
        rpc: RpcConfig | None = None,
        *,
        keep_segment: bool | None = None,
    ) -> None:
        super().__init__()
        machine = config.machine or socket.gethostname()
        name = config.name or f"{machine}:{os.getpid()}"
        self._urls = find_endpoints(config)
        self._config = config
        self._rpc = make_rpc_config(RpcConfig() if rpc is None else rpc, config)
        self._name = name
        self._machine = machine
        self.host: StoreHost
        # Without a configured name the host's next process would not find the segment file.
        self._is_kept = bool(config.name) if keep_segment is None else keep_segment

    @property
    def urls(self) -> list[str]:
        """Addresses at which the host looks for masters."""
        return list(self._urls)

    async def _start(self, opening: contextlib.AsyncExitStack) -> None:
        """Open the parts of the host process (segment, disk, channel and others) in order; they are
        closed in the reverse order.
        """
        config, to_thread = self._config, asyncio.to_thread
        path = find_segment_folder(config) / f"{make_file_name(self._name)}.segment"
        try:
            segment = await to_thread(HostSegment.open_file, path, config.segment_bytes)
        except OSError as error:
            if isinstance(error, TandemError):
                raise
            what = f"cannot make {path}: {error.strerror or error}: give another folder"
            raise ConfigError("store.host", what, field="store.segment_dir") from error
        opening.push_async_callback(to_thread, segment.close, remove=not self._is_kept)
        listen = config.listen or (choose_host_address(self._urls[0]),)
        engine = make_engine(config, self._urls[0], self._name, listen)
        opening.push_async_callback(to_thread, engine.close, deadline_s=2.0)
        port = TransferHostPort(engine, segment)
        disk = await self._open_disk(segment, engine, opening)
        self.host = host = StoreHost(self._name, self._machine, segment, port, disk)
        methods = MethodTable()
        for method in host.orders.methods():
            methods.register(*method)
        channel = LeaderClient(
            self._urls,
            make_client_maker(
                config,
                self._rpc,
                identify(self._name, "store_host"),
                methods,
                LaneRouter(EngineLanes(engine)),
            ),
            on_peer=host.on_master,
            on_peer_lost=host.on_master_lost,
        )
        opening.push_async_callback(channel.aclose)
        opening.push_async_callback(host.aclose)
        opening.push_async_callback(self._leave)
        channel.start()
        loop = asyncio.get_running_loop()

        def tell_grown(_: int) -> None:
            loop.call_soon_threadsafe(host.on_grown)

        segment.reserve_rest(tell_grown)

    async def _open_disk(
        self, segment: HostSegment, engine: TransferEngine, opening: contextlib.AsyncExitStack
    ) -> DiskTier | None:
        """Open the SSD tier. If the disk cannot be read, the host runs without it."""
        config = self._config
        if not config.ssd_dir:
            return None
        folder: DiskFolder | None = None
        try:
            folder = await asyncio.to_thread(
                DiskFolder.open, Path(config.ssd_dir), engine, marks=find_segment_folder(config)
            )
            opening.push_async_callback(asyncio.to_thread, folder.close)
            disk = DiskTier(
                folder,
                segment,
                capacity_bytes=config.ssd_bytes,
                clock=MonotonicClock(),
                corruption=folder.corruption,
            )
            await disk.open()
        except (InternalError, CapacityError):
            logger.exception("event=disk_unusable path=%s", config.ssd_dir)
            if folder is not None:
                folder.condemn()  # The disk must not bring back objects that are removed meanwhile.
            return None
        disk.start()
        opening.push_async_callback(disk.aclose)
        return disk

    async def _leave(self) -> None:
        if not self._is_kept and self.host.disk is None:
            await self.host.leave()

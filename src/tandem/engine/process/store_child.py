"""The store that a server starts for itself: one child process with master and host.

Owns the process and the folder of its socket. If the process dies, it is started again; it finds
its objects in its segment, and the instances' clients reconnect at the same address.
"""

import asyncio
import logging
import os
import shutil
from pathlib import Path
from typing import Self

import msgspec

from tandem.core.errors import PeerLostError
from tandem.core.instance_status import StoreStatus
from tandem.engine.process.child_process import end_child, start_child, write_settings
from tandem.rpc import RpcConfig, make_runtime_dir
from tandem.store.config import StoreConfig
from tandem.store.messages import StoreStatus as MasterStatus
from tandem.store.process import READY, StoreProcessSpec
from tandem.store.services.connect import watch_master

__all__ = ["StoreChild"]

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""Seconds within which a started store process must report that it serves."""
RESTART_PAUSE_S = 0.2
RESTART_PAUSE_MAX_S = 10.0


class StoreChild:
    """A supervised store process. An async context manager; entering waits until it serves.

    Args:
        store: settings with ``memory``; master, name and segment size are chosen here.
        rpc: settings of the control channel.
        log_level: log level of the process.
        log_format: log format of the process.

    Raises (entering): PeerLostError if it does not start.
    """

    def __init__(
        self,
        store: StoreConfig,
        rpc: RpcConfig,
        *,
        log_level: str = "info",
        log_format: str = "text",
    ) -> None:
        self._given = store
        self._rpc = rpc
        self._log_level, self._log_format = log_level, log_format
        self._folder: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._started: asyncio.Future[None] | None = None
        self.num_restarts = 0
        self._serves = False
        self._loss = ""
        """Reason why the last store process ended; empty if none has."""
        self._fill = StoreStatus(stage="starting")
        """Last report of the store's master on its space; it stays valid over a restart, which
        keeps the objects.
        """
        self.store = store
        """Store settings for clients; complete after entering."""

    @property
    def pid(self) -> int | None:
        """Process id of the store, or None."""
        return None if self._process is None else self._process.pid

    @property
    def status(self) -> StoreStatus:
        """State of the store, for ``/server_info``."""
        waiting = "restarting" if self.num_restarts else "starting"
        return StoreStatus(
            stage="serving" if self._serves else waiting,
            detail=self._loss,
            pid=self.pid,
            num_restarts=self.num_restarts,
            capacity_bytes=self._fill.capacity_bytes,
            used_bytes=self._fill.used_bytes,
            num_objects=self._fill.num_objects,
            disk_capacity_bytes=self._fill.disk_capacity_bytes,
            disk_used_bytes=self._fill.disk_used_bytes,
        )

    async def __aenter__(self) -> Self:
        self._folder = make_runtime_dir()
        self.store = msgspec.structs.replace(
            self._given,
            master=f"ipc://{self._folder / 'store.sock'}",
            # Use one name for every store process of this server, so that a restarted one finds the
            # segment (the shared memory with the objects) of the one before.
            name=f"serve-{os.getpid()}",
            segment_bytes=self._given.memory_bytes,
            memory="",
        )
        self._started = asyncio.get_running_loop().create_future()
        self._supervision = asyncio.create_task(self._supervise(self._started))
        try:
            await asyncio.shield(self._started)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.gather(self._supervision, return_exceptions=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _note_fill(self, status: MasterStatus) -> None:
        disks = [host.disk for host in status.hosts if host.disk is not None]
        self._fill = StoreStatus(
            stage="serving",
            capacity_bytes=sum(host.capacity_bytes for host in status.hosts),
            used_bytes=sum(host.used_bytes for host in status.hosts),
            num_objects=status.num_objects,
            disk_capacity_bytes=sum(disk.capacity_bytes for disk in disks),
            disk_used_bytes=sum(disk.used_bytes for disk in disks),
        )

    async def _supervise(self, started: "asyncio.Future[None]") -> None:
        pause_s = RESTART_PAUSE_S
        while True:
            reason = self._loss = await self._run_process(started)
            if self._serves:
                # Reset the pause between restarts: this process has served, so earlier failures no
                # longer count.
                pause_s = RESTART_PAUSE_S
            self._serves = False
            if not started.done():
                # Do not restart a store that failed its first start: a restart would fail for the
                # same reason.
                started.set_exception(PeerLostError("engine.start_store", reason))
                return
            logger.error("event=store_lost reason=%r restart_in_s=%.1f", reason, pause_s)
            self.num_restarts += 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESTART_PAUSE_MAX_S)

    async def _run_process(self, started: "asyncio.Future[None]") -> str:
        """Run one store process until it ends or no longer answers; return the reason."""
        spec = StoreProcessSpec(
            store=self.store,
            rpc=self._rpc,
            log_level=self._log_level,
            log_format=self._log_format,
        )
        process = self._process = await start_child(
            "tandem.store.process", stdout=asyncio.subprocess.PIPE
        )
        write_settings(process, spec)
        exited = asyncio.create_task(process.wait())
        watching: asyncio.Task[str] | None = None
        is_lost = False
        try:
            assert process.stdout is not None
            try:
                line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
            except TimeoutError:
                is_lost = True
                return f"the store did not start in {START_TIMEOUT_S:g} s"
            if line == READY:
                self._serves = True
                if not started.done():
                    started.set_result(None)
                logger.info("event=store_serves pid=%d restarts=%d", process.pid, self.num_restarts)
                watching = asyncio.create_task(watch_master(self.store, self._rpc, self._note_fill))
                await asyncio.wait((exited, watching), return_when=asyncio.FIRST_COMPLETED)
                if not exited.done():
                    is_lost = True
                    return _describe_loss(watching)
            if line and watching is None:
                return line.decode().strip()
            return f"the process ended with status {await asyncio.shield(exited)}"
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            await end_child(process, exited, is_lost=is_lost)
            self._process = None


def _describe_loss(watching: "asyncio.Task[str]") -> str:
    error = watching.exception()
    return watching.result() if error is None else str(error)

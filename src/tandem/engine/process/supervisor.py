"""The supervisor of one instance: it starts, watches and restarts its process.

Owns the child process and the session with it. If the process dies, is killed or stops answering, a
new one is started, after a pause that grows while starts keep failing. All of it runs on one event
loop.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Self

import msgspec

from tandem.core.adapter import AdapterSource
from tandem.core.errors import PeerLostError, TandemError
from tandem.core.instance_status import InstanceRole
from tandem.core.wire import InstanceInfo, InstanceStage, StageChanged
from tandem.engine.process.instance import InstanceSpec
from tandem.engine.process.kept_weights import KeptWeights
from tandem.engine.process.launcher import InstanceChild, Launcher
from tandem.engine.process.session import InstanceSession

__all__ = ["MAX_FIRST_STARTS", "InstanceSupervisor"]

logger = logging.getLogger(__name__)

RESTART_PAUSE_S = 0.2
RESTART_PAUSE_MAX_S = 10.0
"""Longest pause between restarts in seconds; several starts still fit ``cluster.recovery_s``."""
MAX_FIRST_STARTS = 3
"""Number of failed starts after which an instance that has never served is given up."""


class InstanceSupervisor:
    """The supervisor of one instance's process. An async context manager; entering starts the
    process.

    Args:
        spec: settings of the instance.
        on_stage: called with every change of stage and every step of progress.
        launcher: starts the process. Owned.
        is_asleep: if True, no process is started before ``wake``.
        max_first_starts: number of processes that may die before one has served; then the instance
            is given up. None: it is never given up, because a launcher restarts it.
    """

    def __init__(
        self,
        spec: InstanceSpec,
        *,
        on_stage: Callable[[StageChanged], None] | None = None,
        launcher: Launcher,
        is_asleep: bool = False,
        max_first_starts: int | None = MAX_FIRST_STARTS,
    ) -> None:
        self._max_first_starts = max_first_starts
        self._spec = spec
        self._on_stage = on_stage
        self._launcher = launcher
        self._stage = StageChanged(InstanceStage.STARTING)
        self._info: InstanceInfo | None = None
        self._session: InstanceSession | None = None
        self._child: InstanceChild | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._was_ready = False
        """True if the present process of the instance has served requests."""
        self._settled = asyncio.Event()
        """Event, set when the instance has served once, or was given up because its first starts
        failed.
        """
        self._restarting = asyncio.Event()
        """Event that asks the supervising task to end the present process and start another."""
        self._back = asyncio.Event()
        """Event, set when the process that a restart began serves."""
        self._awake = asyncio.Event()
        """Event, set while the instance may have a process, and cleared while it should sleep."""
        self._asleep = asyncio.Event()
        """Event, set while the instance sleeps and has no process."""
        if not is_asleep:
            self._awake.set()
        self._kept: KeptWeights | None = None
        """Memory maps of a sleeping instance's packed weights, which keep the weights in the page
        cache; None if it is awake or the weights were given up.
        """
        self.num_restarts = 0

    async def __aenter__(self) -> Self:
        self._supervision = asyncio.create_task(self._supervise())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._supervision is not None
        self._supervision.cancel()
        await asyncio.gather(self._supervision, return_exceptions=True)
        self._drop_kept()
        await self._launcher.close()

    @property
    def info(self) -> InstanceInfo | None:
        """The facts of the instance; None before it serves and while a dead process is replaced."""
        return self._info

    @property
    def stage(self) -> StageChanged:
        """The latest stage of the instance (starting, loading, ready, failed, ...)."""
        return self._stage

    @property
    def pid(self) -> int | None:
        """Process id of the instance; None while no process runs."""
        return None if self._child is None else self._child.pid

    @property
    def is_connected(self) -> bool:
        """True while the present process of the instance is connected and answers."""
        return self._session is not None and self._session.is_connected

    async def wait_ready(self) -> InstanceInfo:
        """Wait until the instance serves for the first time.

        Raises: PeerLostError (the instance was given up; the message gives the reason).
        """
        await self._settled.wait()
        if self._info is None:
            raise PeerLostError("engine.start", self._stage.detail)
        return self._info

    def set_adapters(self, sources: Sequence[AdapterSource]) -> None:
        """Set the adapters that the instance loads at its next start."""
        self._spec = msgspec.structs.replace(self._spec, adapters=tuple(sources))

    def set_role(self, role: InstanceRole) -> None:
        """Set the role (prefill, decode or unified) that the instance has at its next start."""
        self._spec = msgspec.structs.replace(self._spec, role=role)

    async def restart(self) -> None:
        """End the process gracefully and start another; return when that one serves.

        A start that fails is repeated, as after the loss of a process.
        """
        self._back = asyncio.Event()
        self._restarting.set()
        await self._back.wait()

    async def sleep(self) -> None:
        """End the process; start none before ``wake``.

        The packed weights stay mapped.
        """
        if self._kept is None and self._info is not None:
            # Map the packed weights before the old process ends, so that their pages stay in the
            # page cache.
            folders = self._info.packed_folders
            self._kept = await asyncio.to_thread(KeptWeights, folders)
        self._awake.clear()
        if not self._asleep.is_set():
            self._restarting.set()
        await self._asleep.wait()

    async def evict(self) -> None:
        """Unmap the packed weights, kept for a fast start; does nothing unless the instance
        sleeps.
        """
        if self._asleep.is_set():
            self._drop_kept()

    async def wake(self) -> None:
        """Start the process of a sleeping instance; return when it serves."""
        if self._awake.is_set():
            return
        self._back = asyncio.Event()
        self._awake.set()
        await self._back.wait()
        self._drop_kept()

    @property
    def kept_bytes(self) -> int:
        """Bytes of packed weights that are kept mapped in memory while the instance sleeps."""
        return 0 if self._kept is None else self._kept.size_bytes

    def _drop_kept(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()

    def require_session(self) -> InstanceSession:
        """Return the session with the present process of the instance.

        Raises: PeerLostError (the instance is starting or being replaced).
        """
        if self._session is None or not self.is_connected:
            raise PeerLostError(
                "engine.call", f"the instance is {self._stage.stage}: try again in a moment"
            )
        return self._session

    async def _supervise(self) -> None:
        """Run one process after another, until the instance is given up."""
        try:
            await self._run_processes()
        except Exception as error:
            # A flaw of this program: whoever waits for the instance is told, not left waiting.
            logger.exception("event=supervision_failed")
            self._set_stage(StageChanged(InstanceStage.FAILED, f"{type(error).__name__}: {error}"))
            self._settled.set()

    async def _run_processes(self) -> None:
        pause_s = RESTART_PAUSE_S
        num_failed_starts = 0
        while True:
            if not self._awake.is_set():
                await self._rest()
                pause_s, num_failed_starts = RESTART_PAUSE_S, 0
            try:
                reason = await self._run_process()
            except (TandemError, OSError) as error:
                # The process could not be started, for example because memory is short or the
                # folder for its socket is missing.
                reason = error.what if isinstance(error, TandemError) else str(error)
            if self._was_ready:
                pause_s, num_failed_starts = RESTART_PAUSE_S, 0
            else:
                num_failed_starts += 1
            self._was_ready = False
            if not self._awake.is_set():
                continue
            is_first = not self._settled.is_set()
            limit = self._max_first_starts
            is_hopeless = limit is not None and num_failed_starts >= limit
            if is_first and (self._stage.stage is InstanceStage.FAILED or is_hopeless):
                # The instance reported why it cannot serve, or dies again and again: report the
                # failure to the caller.
                self._set_stage(StageChanged(InstanceStage.FAILED, reason))
                self._settled.set()
                return
            logger.error("event=instance_lost reason=%r restart_in_s=%.1f", reason, pause_s)
            self._set_stage(StageChanged(InstanceStage.STARTING, f"restarting: {reason}"))
            self.num_restarts += 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESTART_PAUSE_MAX_S)

    async def _rest(self) -> None:
        """Wait, while the instance sleeps and has no process, until ``wake`` is called."""
        self._restarting.clear()
        self._set_stage(StageChanged(InstanceStage.SLEEPING))
        self._asleep.set()
        await self._awake.wait()
        self._asleep.clear()
        if self._settled.is_set():
            self.num_restarts += 1
        self._set_stage(StageChanged(InstanceStage.STARTING, "waking up"))

    async def _run_process(self) -> str:
        """Run one process until it ends or no longer answers; return the reason."""
        child = self._child = await self._launcher.start(self._spec)
        exited = asyncio.create_task(child.wait())
        self._session = InstanceSession(
            child.client, on_stage=self._set_stage, on_ready=self._note_ready
        )
        session = asyncio.create_task(self._session.run())
        restarting = asyncio.create_task(self._restarting.wait())
        is_lost = False
        try:
            waited = (exited, session, restarting)
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if restarting.done():
                self._restarting.clear()
                reason = "it was told to"
                self._session, self._info = None, None
                self._set_stage(StageChanged(InstanceStage.STARTING, f"restarting: {reason}"))
                return reason
            if session.done():
                reason = session.result()
            else:
                reason = f"the process ended with status {exited.result()}"
            self._session, self._info = None, None
            is_lost = self._was_ready
            if self._was_ready:
                # Show the new stage before ending the process, which takes seconds if the process
                # hangs.
                self._set_stage(StageChanged(InstanceStage.STARTING, f"restarting: {reason}"))
            return reason
        finally:
            for task in (session, restarting):
                task.cancel()
            await asyncio.gather(session, restarting, return_exceptions=True)
            self._session, self._info = None, None
            # Kill a process that still loads its model: it has no requests to finish.
            await child.end(is_lost=is_lost or not self._was_ready)
            exited.cancel()
            self._child = None

    def _note_ready(self, info: InstanceInfo) -> None:
        self._info = info
        self._was_ready = True
        self._set_stage(StageChanged(InstanceStage.READY))
        if self._settled.is_set():
            # Log the recovery at the same level as the loss, so that whoever saw the loss also sees
            # its end.
            logger.warning(
                "event=instance_back restarts=%d pid=%d load_s=%.1f",
                self.num_restarts,
                info.pid,
                info.load_seconds,
            )
        self._settled.set()
        self._back.set()

    def _set_stage(self, stage: StageChanged) -> None:
        self._stage = stage
        if self._on_stage is not None:
            self._on_stage(stage)

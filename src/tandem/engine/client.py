"""The server's face of one supervised instance: calls go to the present session with it."""

from collections.abc import Callable
from typing import Self

from tandem.core.timeline import InstanceTimeline
from tandem.core.wire import AddRequest, InstanceInfo, InstanceStats, StageChanged
from tandem.engine.instance import InstanceSpec
from tandem.engine.session import OutputStream
from tandem.engine.supervisor import InstanceSupervisor

__all__ = ["InstanceClient"]


class InstanceClient:
    """An ``EngineClient`` of one instance. An async context manager; entering starts the process.

    Args:
        spec: of the instance.
        on_stage: called with every change of stage and every step of progress.
    """

    def __init__(
        self, spec: InstanceSpec, *, on_stage: Callable[[StageChanged], None] | None = None
    ) -> None:
        self._supervisor = InstanceSupervisor(spec, on_stage=on_stage)

    async def __aenter__(self) -> Self:
        await self._supervisor.__aenter__()
        return self

    async def __aexit__(self, *details: object) -> None:
        await self._supervisor.__aexit__(*details)

    @property
    def info(self) -> InstanceInfo | None:
        """What runs; None until ready, and while a dead instance is replaced."""
        return self._supervisor.info

    @property
    def stage(self) -> StageChanged:
        """The latest stage."""
        return self._supervisor.stage

    async def wait_ready(self) -> InstanceInfo:
        """Wait until it serves; see ``InstanceSupervisor.wait_ready``."""
        return await self._supervisor.wait_ready()

    async def submit(self, request: AddRequest) -> OutputStream:
        """Queue a request; see ``tandem.server.engine.EngineClient.submit``."""
        return await self._supervisor.require_session().submit(request)

    async def stats(self) -> InstanceStats:
        """Return counters and gauges; raises PeerLostError while the instance is down."""
        return await self._supervisor.require_session().stats()

    async def list_timelines(self, request_ids: list[str]) -> list[InstanceTimeline]:
        """Return what the instance knows of requests; raises PeerLostError while it is down."""
        return await self._supervisor.require_session().list_timelines(request_ids)

    async def flush_cache(self) -> int:
        """Forget cached prefixes; returns the blocks freed."""
        return await self._supervisor.require_session().flush_cache()

"""The face of an engine as the server sees it.

``tandem.engine.cluster.client`` implements it over the control channel, the tests in memory.
Nothing here runs; the promises are what handlers may rely on.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from tandem.core.adapter import AdapterInfo, AdapterSource
from tandem.core.instance_status import (
    ExpertCounts,
    InstanceRole,
    InstanceStats,
    InstanceStatus,
)
from tandem.core.timeline import InstanceTimeline
from tandem.core.wire import (
    AddRequest,
    InstanceInfo,
    RequestOutput,
    StageChanged,
)

__all__ = ["EngineClient", "RequestStream"]


class RequestStream(Protocol):
    """Outputs of one request, in order; used by one task.

    Iteration ends after the output whose ``finish_reason`` is set. If the instance dies and nobody
    can go on with the request, that output has ``FinishReason.ERROR`` and ``error_code``
    "peer_lost". After ``cancel`` iteration
    ends soon, with or without a last output.
    """

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Return the iterator over the outputs."""
        ...

    async def cancel(self) -> None:
        """Free what the request holds in the engine; idempotent, and harmless after the end."""
        ...


class EngineClient(Protocol):
    """One instance, or a cluster of several."""

    @property
    def info(self) -> InstanceInfo | None:
        """The facts of the running instance; None until ready, and while no instance serves."""
        ...

    @property
    def last_info(self) -> InstanceInfo | None:
        """The facts of the running instance, or of the last one while none serves; None until ready
        for the first time.

        Requests that come while instances are replaced are checked against it, and wait.
        """
        ...

    @property
    def stage(self) -> StageChanged:
        """The latest stage."""
        ...

    @property
    def instances(self) -> list[InstanceStatus]:
        """Every instance and its state."""
        ...

    @property
    def fallbacks(self) -> dict[str, int]:
        """The number of times that requests went on elsewhere after a failure since start, by
        reason.
        """
        ...

    @property
    def margins(self) -> dict[str, float]:
        """The factors that admission puts on predicted times, by time: ttft and tpot."""
        ...

    async def submit(self, request: AddRequest) -> RequestStream:
        """Queue a request.

        Raises:
            CapacityError: the queue is full.
            ConfigError: a field is out of what this instance can do; ``field`` names it.
            PeerLostError: the instance is down, and did not come back in time.
        """
        ...

    async def stats(self) -> InstanceStats:
        """Return counters and gauges; raises PeerLostError while the instance is down."""
        ...

    async def list_timelines(self, request_ids: list[str]) -> list[InstanceTimeline]:
        """Return what the instances know of requests, by the ids that ``submit`` was given.

        Several entries for a request that ran on several instances, in the order of their work;
        none for one that is forgotten. Raises PeerLostError while no instance can be asked.
        """
        ...

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """The LoRA adapters that requests may ask for, by name."""
        ...

    async def load_adapter(self, source: AdapterSource) -> AdapterInfo:
        """Load an adapter on every instance, from the folder that is set for that.

        Raises:
            ConflictError: the name is taken.
            ConfigError: a setting of it is out of bounds, or it leads out of the folder.
            NotFoundError: there is none.
            CorruptionError: it is damaged, or does not fit the model's shapes.
            UnsupportedError: it is not plain LoRA of modules that may be adapted.
            CapacityError: too many are loaded.
            PeerLostError: no instance serves.
        """
        ...

    async def unload_adapter(self, name: str) -> AdapterInfo:
        """Take no further requests for an adapter; raises NotFoundError."""
        ...

    async def set_role(self, name: str, role: InstanceRole) -> None:
        """Change what an instance is for; raises NotFoundError, UnsupportedError."""
        ...

    async def drain(self, name: str, *, is_draining: bool = True) -> None:
        """Send an instance no new requests, or some again; raises NotFoundError."""
        ...

    async def restart(self, name: str, *, patience_s: float) -> None:
        """Replace the process of an instance when its requests have ended; raises NotFoundError."""
        ...

    async def restart_all(self, *, patience_s: float) -> None:
        """Restart one instance after the other."""
        ...

    async def add_instance(self, role: InstanceRole) -> str:
        """Start one more instance, and return its name; raises UnsupportedError, PeerLostError."""
        ...

    async def remove_instance(self, name: str, *, patience_s: float) -> None:
        """End an instance for good; raises NotFoundError, ConflictError (it is the last one)."""
        ...

    async def read_expert_counts(self) -> ExpertCounts:
        """Return how often each expert was chosen; raises PeerLostError while it is down."""
        ...

    async def flush_cache(self) -> int:
        """Forget cached prefixes; returns the blocks freed."""
        ...

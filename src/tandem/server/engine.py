"""The interface of an engine that the server uses.

``tandem.engine.cluster.client`` implements it over the control channel, the tests in memory. The
docstrings are the promises that handlers may rely on.
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
    """The outputs of one request, in order; used by one task.

    The last output has a ``finish_reason``. If the instance dies and no other can continue the
    request, that is ``FinishReason.ERROR`` with ``error_code`` "peer_lost". After ``cancel`` the
    iteration ends soon, with or without a last output.
    """

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Return the iterator over the outputs."""
        ...

    async def cancel(self) -> None:
        """Cancel the request and free its resources. Idempotent; no effect after the end."""
        ...


class EngineClient(Protocol):
    """An engine: one instance, or a cluster of several."""

    @property
    def info(self) -> InstanceInfo | None:
        """Facts of the running instance; None before it is ready and while none serves."""
        ...

    @property
    def last_info(self) -> InstanceInfo | None:
        """Facts of the running instance or, while none serves, of the last one; None before the
        first.

        Requests that arrive while instances are replaced are checked against it, and wait.
        """
        ...

    @property
    def stage(self) -> StageChanged:
        """The present stage (starting, loading, ready, ...) of the engine as a whole."""
        ...

    @property
    def instances(self) -> list[InstanceStatus]:
        """All instances with their states."""
        ...

    @property
    def fallbacks(self) -> dict[str, int]:
        """Number of times since the start that requests moved to another instance because of a
        failure, by reason.
        """
        ...

    @property
    def margins(self) -> dict[str, float]:
        """Safety factors by which admission multiplies predicted times, by kind of time: ``ttft``
        (time to first token) and ``tpot`` (time per output token).
        """
        ...

    async def submit(self, request: AddRequest) -> RequestStream:
        """Queue a request; return the stream of its outputs.

        Raises:
            CapacityError: the queue is full.
            ConfigError: this instance cannot serve a field's value; ``field`` names it.
            PeerLostError: the instance is down, and did not come back in time.
        """
        ...

    async def stats(self) -> InstanceStats:
        """Return statistics summed over the instances. Raises PeerLostError while they are down."""
        ...

    async def list_timelines(self, request_ids: list[str]) -> list[InstanceTimeline]:
        """Return the instances' timelines of requests, by the ids that ``submit`` was given.

        A request that ran on several instances has several, in the order of its course; a forgotten
        one has none. Raises PeerLostError while no instance answers.
        """
        ...

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """The LoRA adapters that requests may ask for, by name."""
        ...

    async def load_adapter(self, source: AdapterSource) -> AdapterInfo:
        """Load an adapter on every instance, from the configured folder.

        Raises:
            ConflictError: the name is taken.
            ConfigError: a setting of the adapter is out of bounds, or its path leads out of the
                folder.
            NotFoundError: there is no such adapter.
            CorruptionError: its file is damaged, or does not fit the model's shapes.
            UnsupportedError: it is not plain LoRA of modules that can be adapted.
            CapacityError: too many adapters are loaded.
            PeerLostError: no instance serves.
        """
        ...

    async def unload_adapter(self, name: str) -> AdapterInfo:
        """Refuse further requests for an adapter. Raises: NotFoundError (it is not loaded)."""
        ...

    async def set_role(self, name: str, role: InstanceRole) -> None:
        """Change the role of an instance.

        Raises: NotFoundError (no instance of this name); UnsupportedError (the instances of this
            cluster cannot read each other's KV blocks).
        """
        ...

    async def drain(self, name: str, *, is_draining: bool = True) -> None:
        """Stop or resume sending new requests to an instance.

        Raises: NotFoundError (no instance of this name).
        """
        ...

    async def restart(self, name: str, *, patience_s: float) -> None:
        """Replace the process of an instance after its requests have ended.

        ``patience_s``: seconds after which they continue on other instances.

        Raises: NotFoundError (no instance of this name).
        """
        ...

    async def restart_all(self, *, patience_s: float) -> None:
        """Restart all instances, one after the other."""
        ...

    async def add_instance(self, role: InstanceRole) -> str:
        """Start one more instance and return its name.

        Raises: UnsupportedError (the cluster cannot have instances of this role); PeerLostError
            (the instance cannot serve).
        """
        ...

    async def remove_instance(self, name: str, *, patience_s: float) -> None:
        """End an instance permanently.

        Raises: NotFoundError (no instance of this name); ConflictError (it is the last one).
        """
        ...

    async def read_expert_counts(self) -> ExpertCounts:
        """Return how often each expert was chosen. Raises PeerLostError while the instance is
        down.
        """
        ...

    async def flush_cache(self) -> int:
        """Drop all cached prefixes; return the number of blocks freed."""
        ...

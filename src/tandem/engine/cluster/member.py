"""One instance of a cluster: its process over all restarts, and the other instances whose KV it can
read.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

from tandem.conductor.load_count import LoadCount
from tandem.conductor.routes import InstanceRef
from tandem.core.adapter import AdapterSource
from tandem.core.errors import TandemError, UnsupportedError
from tandem.core.instance_status import InstanceRole
from tandem.core.wire import AddRequest, InstanceInfo, RequestOutput, StageChanged
from tandem.engine.cluster.stats import StatsHistory
from tandem.engine.process.instance import InstanceSpec
from tandem.engine.process.launcher import Launcher
from tandem.engine.process.methods import OPEN_PEER, InstanceMethod
from tandem.engine.process.supervisor import MAX_FIRST_STARTS, InstanceSupervisor

__all__ = ["ClusterMember"]

Req = TypeVar("Req")
Res = TypeVar("Res")

logger = logging.getLogger(__name__)

LINK_PAUSE_S = 1.0
"""Seconds between two attempts to connect to another instance."""


class ClusterMember:
    """One instance of the cluster, as a ``Port``. An async context manager; entering it starts the
    process.

    Args:
        spec: settings of the instance.
        on_change: called when the instance starts or stops serving, and when it becomes able to
            read another instance's KV.
        on_stage: called with each change of stage and each step of progress.
        launcher: starts the instance; None: as a child process.
        is_asleep: see ``InstanceSupervisor``.
        max_first_starts: see ``InstanceSupervisor``.
    """

    def __init__(
        self,
        spec: InstanceSpec,
        *,
        on_change: Callable[["ClusterMember"], None],
        on_stage: Callable[["ClusterMember"], None],
        launcher: Launcher,
        is_asleep: bool = False,
        max_first_starts: int | None = MAX_FIRST_STARTS,
    ) -> None:
        self._on_change = on_change
        self._on_stage = on_stage
        self._role: InstanceRole = spec.role
        self._name = spec.name
        self.spec = spec
        """Settings with which the instance was first started. Its role (prefill, decode) may have
        changed since.
        """
        self._was_ready = False
        self._links: dict[str, InstanceRef] = {}
        """Other instances that this instance has connected to, to read their KV blocks, by name;
        each entry names one run of a process.
        """
        self.refusals: dict[str, str] = {}
        """For each instance whose KV blocks cannot be read, the reason, by instance name."""
        self._linking: dict[str, asyncio.Task[None]] = {}
        self.supervisor = InstanceSupervisor(
            spec,
            on_stage=self._take_stage,
            launcher=launcher,
            is_asleep=is_asleep,
            max_first_starts=max_first_starts,
        )
        self.stats_history = StatsHistory()

    async def __aenter__(self) -> Self:
        await self.supervisor.__aenter__()
        return self

    async def __aexit__(self, *details: object) -> None:
        tasks = list(self._linking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.supervisor.__aexit__(*details)

    @property
    def name(self) -> str:
        """Name of the instance, unique in the cluster."""
        return self._name

    @property
    def role(self) -> InstanceRole:
        """The role of the instance."""
        return self._role

    @property
    def ref(self) -> InstanceRef:
        """Name and run (one process between two restarts) of the instance."""
        info = self.info
        identity = "" if info is None else info.kv_identity
        return InstanceRef(self._name, self.supervisor.num_restarts, identity)

    @property
    def info(self) -> InstanceInfo | None:
        """The facts of the running instance; None while it does not serve."""
        return self.supervisor.info if self.supervisor.is_connected else None

    @property
    def load(self) -> LoadCount:
        """The load of the instance's present process."""
        return self.supervisor.require_session().load

    @property
    def stage(self) -> StageChanged:
        """The latest stage of the instance (starting, loading, ready, failed, ...)."""
        return self.supervisor.stage

    @property
    def sources(self) -> frozenset[str]:
        """Names of the instances whose KV blocks this instance can read now, until either is
        restarted.
        """
        return frozenset(self._links)

    async def submit(self, request: AddRequest, put: Callable[[RequestOutput], None]) -> None:
        """Queue a request; see ``InstanceSession.submit``."""
        await self.supervisor.require_session().submit(request, put)

    async def call(self, method: InstanceMethod[Req, Res], request: Req) -> Res:
        """Call a method of the instance; see ``InstanceSession.call``.

        Raises: PeerLostError (the instance does not run).
        """
        return await self.supervisor.require_session().call(method, request)

    def cancel(self, request_id: str) -> None:
        """Cancel a request; do nothing if its id is not known."""
        self.supervisor.require_session().cancel(request_id)

    def release_hold(self, request_id: str) -> None:
        """Release the KV blocks held for an ended prefill; do nothing if there are none."""
        self.supervisor.require_session().release_hold(request_id)

    def set_adapters(self, sources: Sequence[AdapterSource]) -> None:
        """Set the adapters that the instance loads at its next start."""
        self.supervisor.set_adapters(sources)

    def set_role(self, role: InstanceRole) -> None:
        """Set the role of the instance; requests that it has begun continue."""
        self._role = role
        self.supervisor.set_role(role)

    # The methods below connect a decode instance to the prefill instances whose KV it reads.

    def link(self, source: "ClusterMember") -> None:
        """Connect to another instance to read its KV, once both serve and again after a restart of
        either.
        """
        if self._role != "decode" or source.role != "prefill":
            return
        if self._links.get(source.name) == source.ref:
            return
        self._links.pop(source.name, None)
        task = self._linking.get(source.name)
        if task is None or task.done():
            self._linking[source.name] = asyncio.get_running_loop().create_task(self._open(source))

    async def wait_linked(self) -> None:
        """Wait until every attempt in progress to connect to another instance, whose KV this one
        may read, has succeeded or failed.
        """
        await asyncio.gather(*self._linking.values(), return_exceptions=True)

    async def _open(self, source: "ClusterMember") -> None:
        """Try to connect to an instance, to read its KV, until it succeeds or fails for a permanent
        reason.
        """
        while True:
            ours, theirs, info = self.ref, source.ref, source.info
            if self.info is None or info is None or info.kv_peer is None:
                return  # ``link`` is called again when both serve.
            try:
                await self.call(OPEN_PEER, info.kv_peer)
            except TandemError as error:
                self.refusals[source.name] = error.what
                logger.warning(
                    "event=kv_peer_refused instance=%s source=%s reason=%s",
                    self._name,
                    source.name,
                    error,
                )
                if isinstance(error, UnsupportedError) and (self.ref, source.ref) == (ours, theirs):
                    # The two instances have incompatible KV, which does not change until one of
                    # them restarts.
                    return
                await asyncio.sleep(LINK_PAUSE_S)
                continue
            if (self.ref, source.ref) == (ours, theirs):
                self.refusals.pop(source.name, None)
                self._links[source.name] = theirs
                self._on_change(self)
                return

    def _take_stage(self, stage: StageChanged) -> None:
        is_ready = self.info is not None
        if is_ready != self._was_ready:
            self._was_ready = is_ready
            if not is_ready:
                self._links.clear()
            self._on_change(self)
        self._on_stage(self)

"""The launcher process: it owns instances on one machine and tells any number of servers of them.

It starts its instances, watches them and restarts them. Servers send requests to the instances
directly. Changes that concern all servers are made here: roles, drains, restarts, added and removed
instances. All code runs on one event loop.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol, Self

import msgspec

from tandem.core.errors import ConfigError, TandemError
from tandem.core.instance_status import InstanceRole
from tandem.core.wire import Empty, InstanceInfo
from tandem.engine.cluster.client import DRAIN_S, IDLE_LOOK_S, ClusterClient
from tandem.engine.cluster.config import ClusterConfig
from tandem.engine.cluster.member import ClusterMember
from tandem.engine.launching.messages import (
    CHANGE,
    LAUNCHER_ROLE,
    ROSTER,
    ChangeRoster,
    Roster,
    RosterEntry,
)
from tandem.engine.process.fork_server import ForkServer
from tandem.engine.process.instance import InstanceSpec, compat_facts
from tandem.engine.process.launcher import Launcher, ProcessLauncher
from tandem.engine.process.methods import STATS
from tandem.rpc import Auth, Peer, RpcServer, make_identity
from tandem.rpc.wire.endpoint import Endpoint, parse_endpoint

__all__ = ["LauncherService", "OwnedCluster", "OwnedLauncher", "make_prefix"]

logger = logging.getLogger(__name__)

SETTLE_S = 0.3
"""Seconds to wait after an instance stops accepting requests (a drain), for requests that servers
sent before they learned of it.
"""


class OwnedLauncher(Launcher, Protocol):
    """A ``Launcher`` of one instance that also reports the endpoint of the latest process it
    started.
    """

    endpoint: str
    """Endpoint of the instance's latest process; empty before the first start."""
    num_started: int


class OwnedCluster(ClusterClient):
    """The ``ClusterClient`` of a launcher process; it sends no requests, as servers do that.

    Args:
        specs: settings of the instances.
        config: settings of the cluster.
        is_staggered: see ``ClusterClient``.
        endpoint: endpoint of the launcher; instances get the TCP ports after it.
        prefix: prefix of the names of instances that are added later.
        on_change: called when the roster may have changed.
        start_at: returns the launcher of one instance for an endpoint; for an empty endpoint it
            chooses a Unix socket itself.
    """

    def __init__(
        self,
        specs: list[InstanceSpec],
        config: ClusterConfig,
        *,
        is_staggered: bool,
        endpoint: Endpoint,
        prefix: str,
        on_change: Callable[[], None],
        start_at: Callable[[str], OwnedLauncher],
    ) -> None:
        self._start_at = start_at
        self._changes: set[asyncio.Task[None]] = set()
        self._endpoint = endpoint
        self._on_roster = on_change
        self._launchers: dict[str, OwnedLauncher] = {}
        # A launcher never changes roles: the servers see the load and decide on roles.
        config = msgspec.structs.replace(config, roles="fixed")
        super().__init__(specs, config, is_staggered=is_staggered, prefix=prefix)

    def _make_member(self, spec: InstanceSpec) -> ClusterMember:
        launcher = self._launchers[spec.name] = self._start_at(self._choose_endpoint())
        return ClusterMember(
            spec, on_change=self._note_change, on_stage=self._show_stage, launcher=launcher
        )

    def _choose_endpoint(self) -> str:
        """Return the endpoint of one more instance; empty if it is to be a Unix socket."""
        if self._endpoint.is_local_socket:
            return ""
        used = {launcher.endpoint for launcher in self._launchers.values()}
        port = self._endpoint.port
        while True:
            port += 1
            host = f"[{self._endpoint.host}]" if ":" in self._endpoint.host else self._endpoint.host
            endpoint = f"tcp://{host}:{port}"
            if endpoint not in used:
                return endpoint

    def _note_change(self, changed: ClusterMember) -> None:
        super()._note_change(changed)
        self._on_roster()

    def _show_stage(self, member: ClusterMember) -> None:
        super()._show_stage(member)
        self._on_roster()

    async def _drop_wholly(self, member: ClusterMember) -> None:
        await super()._drop_wholly(member)
        del self._launchers[member.name]
        self._on_roster()

    async def drain(self, name: str, *, is_draining: bool = True) -> None:
        """Drain an instance or end its drain; servers, which send the requests, learn this from the
        roster.
        """
        await super().drain(name, is_draining=is_draining)
        self._on_roster()

    async def _wait_idle(self, name: str, patience_s: float) -> None:
        """Wait until an instance reports no requests, at most ``patience_s`` seconds."""
        self._on_roster()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + patience_s
        member = self._find(name)
        await asyncio.sleep(min(SETTLE_S, patience_s))
        while loop.time() < end_s and member.info is not None:
            try:
                stats = await member.call(STATS, Empty())
            except TandemError:
                return  # The instance has died, so there is nothing to wait for.
            if not (stats.num_running or stats.num_waiting):
                return
            await asyncio.sleep(IDLE_LOOK_S)

    async def drain_out(self, name: str, patience_s: float) -> None:
        """Drain an instance and wait until it has no requests, at most ``patience_s`` seconds."""
        await self.drain(name)
        await self._wait_idle(name, patience_s)

    async def restart(self, name: str, *, patience_s: float = DRAIN_S) -> None:
        """Drain an instance, wait until it has no requests (at most ``patience_s`` seconds), and
        restart it.
        """
        try:
            await super().restart(name, patience_s=patience_s)
        finally:
            self._on_roster()

    async def change(self, change: ChangeRoster) -> None:
        """Carry out a change that a server asked for; it goes on even if that server is lost.

        Raises: errors of the ``ClusterClient`` method that carries it out.
        """
        logger.info("event=change action=%s instance=%s", change.action, change.instance)
        task = asyncio.create_task(self._carry_out(change))
        self._changes.add(task)
        task.add_done_callback(self._note_changed)
        await asyncio.shield(task)

    def _note_changed(self, task: asyncio.Task[None]) -> None:
        self._changes.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.info("event=change_failed reason=%s", task.exception())

    async def _carry_out(self, change: ChangeRoster) -> None:
        name = change.instance
        match change.action:
            case "role":
                await self.set_role(name, _require_role(change.role))
            case "drain":
                await self.drain(name, is_draining=True)
            case "undrain":
                await self.drain(name, is_draining=False)
            case "restart":
                await self.restart(name, patience_s=change.patience_s)
            case "add":
                await self.add_instance(_require_role(change.role))
            case "remove":
                await self.remove_instance(name, patience_s=change.patience_s)

    @property
    def num_changes(self) -> int:
        """Number of changes of instances in progress that servers have asked for."""
        return len(self._changes)

    async def __aexit__(self, *details: object) -> None:
        for task in list(self._changes):
            task.cancel()
        await asyncio.gather(*self._changes, return_exceptions=True)
        await super().__aexit__(*details)

    def list_entries(self) -> list[RosterEntry]:
        """Return the roster, which has one entry for each instance of this launcher."""
        entries: list[RosterEntry] = []
        for member, status in zip(self._members, self.instances, strict=True):
            launcher = self._launchers[member.name]
            entries.append(
                RosterEntry(
                    name=member.name,
                    role=member.role,
                    stage=status.stage.stage,
                    endpoint=launcher.endpoint,
                    run=str(launcher.num_started) if status.pid is not None else "",
                    pid=status.pid,
                    is_draining=status.is_draining,
                    num_restarts=status.num_restarts,
                    reads_others=member.spec.transfer is not None,
                )
            )
        return entries


class LauncherService:
    """The service of a launcher: owns instances and sends rosters. An async context manager.

    Entering starts all instances.

    Args:
        specs: settings of the instances; see ``make_specs``.
        config: settings of the cluster.
        endpoint: address that servers connect to.
        name: name of the launcher.
        fork_server: starts the instances' processes; not owned.
        is_staggered: see ``ClusterClient``.
    """

    def __init__(
        self,
        specs: list[InstanceSpec],
        config: ClusterConfig,
        endpoint: str,
        name: str,
        *,
        fork_server: ForkServer,
        is_staggered: bool = False,
    ) -> None:
        parsed = parse_endpoint(endpoint)
        if not parsed.is_local_socket and not parsed.port:
            raise ConfigError(
                "launcher.configure",
                f"{endpoint} names no port: its instances listen at those after it",
                field="launcher.listen",
            )
        self._identity = make_identity(name or "launcher", LAUNCHER_ROLE, compat=compat_facts())
        self._server = RpcServer(
            endpoint,
            identity=self._identity,
            auth=Auth.for_endpoint(endpoint, specs[0].secret),
            config=specs[0].rpc,
        )
        self._server.register(ROSTER, lambda _, __: self._make_roster(), Empty, Roster)
        self._server.register(CHANGE, self._change, ChangeRoster, Roster)
        self._cluster = OwnedCluster(
            specs,
            config,
            is_staggered=is_staggered,
            endpoint=parsed,
            prefix=make_prefix(name),
            on_change=self._note_change,
            start_at=partial(ProcessLauncher, fork_server),
        )
        self._told: Roster | None = None
        self._is_telling = False

    async def __aenter__(self) -> Self:
        self._server.start()
        try:
            await self._cluster.__aenter__()
        except BaseException:
            await self._server.aclose()
            raise
        return self

    async def __aexit__(self, *details: object) -> None:
        await self._cluster.__aexit__(*details)
        await self._server.aclose()

    @property
    def endpoint(self) -> str:
        """The address that servers connect to."""
        return self._server.endpoint

    @property
    def instances(self) -> list[str]:
        """Names of the instances."""
        return [entry.name for entry in self._cluster.list_entries()]

    async def wait_ready(self) -> InstanceInfo:
        """Wait until all instances serve; see ``ClusterClient.wait_ready``."""
        return await self._cluster.wait_ready()

    async def drain(self, patience_s: float) -> None:
        """Wait until all instances have ended their requests, at most ``patience_s`` seconds.

        Servers send no new requests meanwhile.
        """
        await asyncio.gather(
            *(self._cluster.drain_out(name, patience_s) for name in self.instances)
        )

    def _make_roster(self) -> Roster:
        # Add the launcher's id to each run's name, because a restarted launcher counts its starts
        # from one again.
        entries = [
            msgspec.structs.replace(each, run=f"{self._identity.instance_id}-{each.run}")
            if each.run
            else each
            for each in self._cluster.list_entries()
        ]
        return Roster(launcher=self._identity.name, instances=entries)

    def _note_change(self) -> None:
        """Send the roster (the list of instances) to all servers, once for all changes in one
        iteration of the event loop.
        """
        if not self._is_telling:
            self._is_telling = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._is_telling = False
        roster = self._make_roster()
        if roster == self._told:
            return
        self._told = roster
        for peer in self._server.peers:
            try:
                peer.push(roster)
            # A server that lost its connection asks for the roster again after it has reconnected.
            except TandemError as error:
                logger.info("event=roster_not_told peer=%s reason=%s", peer.name, error)

    async def _change(self, _: Peer, change: ChangeRoster) -> Roster:
        await self._cluster.change(change)
        self._tell()
        return self._make_roster()


def make_prefix(launcher: str) -> str:
    """Return the prefix of the names of a launcher's instances, made from the launcher's name;
    empty if it has none.
    """
    return f"{launcher}-" if launcher else ""


def _require_role(role: InstanceRole | None) -> InstanceRole:
    if role is None:
        raise ConfigError("launcher.change", "say which role", field="role")
    return role

"""The instances of launchers, as a server uses them: it connects to them and starts none."""

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Protocol, Self

import msgspec

from tandem.conductor.policies.policy import Policy
from tandem.core.errors import PeerLostError
from tandem.core.instance_status import InstanceRole
from tandem.core.wire import InstanceStage, StageChanged
from tandem.engine.cluster.client import DRAIN_S, ClusterClient
from tandem.engine.cluster.config import ClusterConfig
from tandem.engine.cluster.member import ClusterMember
from tandem.engine.launching.messages import ChangeRoster, RosterEntry
from tandem.engine.launching.rosters import SERVES
from tandem.engine.process.instance import InstanceSpec
from tandem.engine.process.launcher import make_instance_client
from tandem.engine.process.session import SessionClient
from tandem.transfer.config import TransferConfig

__all__ = ["AttachedCluster", "AttachedLauncher"]

logger = logging.getLogger(__name__)

TAG_BYTES = 4
Connect = Callable[[str, InstanceSpec], SessionClient]
"""Function that makes the control channel to an instance, given its endpoint and its settings, but
does not connect it yet.
"""


class RosterSource(Protocol):
    """The lists of instances that launchers send, as a server reads and changes them."""

    on_change: Callable[[], None] | None

    @property
    def entries(self) -> list[RosterEntry]:
        """The instances of all launchers."""
        ...

    def find(self, name: str) -> RosterEntry | None:
        """Return the entry of the instance with this name in the launchers' rosters, or None."""
        ...

    async def wait_for(self, is_met: Callable[[], bool]) -> None:
        """Wait until ``is_met()`` is True, which is asked after each change of the rosters."""
        ...

    async def change(self, change: ChangeRoster) -> None:
        """Send a change to the launcher that owns the instance."""
        ...


class AttachedInstance:
    """A running process of a launcher's instance; an ``InstanceChild`` that this server does not
    own.
    """

    def __init__(self, entry: RosterEntry, rosters: RosterSource, client: SessionClient) -> None:
        self._entry = entry
        self._rosters = rosters
        self.client = client

    @property
    def pid(self) -> int:
        """Process id of the instance on its machine; 0 if unknown."""
        return self._entry.pid or 0

    async def wait(self) -> int:
        """Wait until the launcher has replaced or removed this process; return 0."""
        await self._rosters.wait_for(self._is_over)
        return 0

    def _is_over(self) -> bool:
        entry = self._rosters.find(self._entry.name)
        return (
            entry is None or entry.run != self._entry.run or entry.stage is InstanceStage.STARTING
        )

    async def end(self, *, is_lost: bool = False) -> None:
        """Do nothing: the launcher owns the process, and the session is closed already."""


class AttachedLauncher:
    """A ``Launcher`` that waits for an instance of a launcher process instead of starting one."""

    def __init__(
        self, rosters: RosterSource, name: str, connect: Connect = make_instance_client
    ) -> None:
        self._rosters = rosters
        self._name = name
        self._connect = connect

    async def start(self, spec: InstanceSpec) -> AttachedInstance:
        """Wait until the instance serves; return its running process."""
        await self._rosters.wait_for(lambda: self._find() is not None)
        entry = self._find()
        assert entry is not None, "it has just been found"
        return AttachedInstance(entry, self._rosters, self._connect(entry.endpoint, spec))

    def _find(self) -> RosterEntry | None:
        entry = self._rosters.find(self._name)
        return entry if entry is not None and entry.run and entry.stage in SERVES else None

    async def close(self) -> None:
        """Do nothing: the launcher process owns the instances' processes."""


class AttachedCluster(ClusterClient):
    """A ``ClusterClient`` of instances that launchers own.

    Args:
        rosters: rosters of the launchers, entered, with at least one instance; not owned.
        common: settings of all instances, as far as a server needs them.
        config: see ``ClusterClient``.
        policy: see ``ClusterClient``.
        on_stage: see ``ClusterClient``.
        connect: makes the control channels to instances.
        tag: see ``Dispatcher``; None: a random one.
    """

    def __init__(
        self,
        rosters: RosterSource,
        common: InstanceSpec,
        config: ClusterConfig,
        *,
        policy: Policy | None = None,
        on_stage: Callable[[StageChanged], None] | None = None,
        connect: Connect = make_instance_client,
        tag: str | None = None,
    ) -> None:
        self._rosters = rosters
        self._connect = connect
        self._common = common
        self._syncing: asyncio.Task[None] | None = None
        self._stale = asyncio.Event()
        self._changing = asyncio.Lock()
        self._known = {entry.name: entry for entry in rosters.entries}
        specs = [self._make_spec(entry) for entry in self._known.values()]
        if tag is None:
            tag = f"{secrets.token_hex(TAG_BYTES)}."
        super().__init__(specs, config, policy=policy, on_stage=on_stage, tag=tag)

    def _make_spec(self, entry: RosterEntry) -> InstanceSpec:
        return msgspec.structs.replace(
            self._common,
            name=entry.name,
            role=entry.role,
            # Only the launcher knows the addresses of the transfer engine. A default configuration
            # here means that the instance can read other instances' KV.
            transfer=TransferConfig() if entry.reads_others else None,
        )

    def _make_member(self, spec: InstanceSpec) -> ClusterMember:
        return ClusterMember(
            spec,
            on_change=self._note_change,
            on_stage=self._show_stage,
            launcher=AttachedLauncher(self._rosters, spec.name, self._connect),
            # Do not limit failed first starts: the launcher restarts the instance independently of
            # this server.
            max_first_starts=None,
        )

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._rosters.on_change = self._stale.set
        self._stale.set()
        self._syncing = asyncio.create_task(self._keep_synced())
        return self

    async def __aexit__(self, *details: object) -> None:
        self._rosters.on_change = None
        if self._syncing is not None:
            self._syncing.cancel()
            await asyncio.gather(self._syncing, return_exceptions=True)
        await super().__aexit__(*details)

    async def _wait_serving(self) -> None:
        """Wait until at least one instance serves; instances that are down do not delay a server's
        start.
        """
        waits = [asyncio.ensure_future(self._wait_or_fail(each)) for each in self._members]
        try:
            while waits:
                done, rest = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                waits = list(rest)
                failures = [each.exception() for each in done]
                if None in failures:
                    return
                if not waits:
                    raise failures[0] or PeerLostError("engine.start", "no instance serves")
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    # The methods below keep the instances as the launchers' rosters (lists of instances) say.

    async def _keep_synced(self) -> None:
        assert self._starting is not None, "entered before"
        # Wait for the start to end, because it adds the members one after the other.
        await asyncio.wait((self._starting,))
        while True:
            await self._stale.wait()
            self._stale.clear()
            await self._sync()

    async def _sync(self) -> None:
        """Update the instances, their roles and their drains from the rosters (lists of instances)
        that the launchers have sent.
        """
        async with self._changing:
            await self._take_rosters()

    async def _take_rosters(self) -> None:
        told = {entry.name: entry for entry in self._rosters.entries}
        members = {member.name: member for member in self._members}
        for name, entry in told.items():
            member = members.get(name)
            if member is None:
                logger.info("event=instance_joined instance=%s role=%s", name, entry.role)
                member = self._make_member(self._make_spec(entry))
                self._members.append(member)
                await self._enter(member)
                self._dispatcher.add_port(member)
            elif member.role != entry.role:
                member.set_role(entry.role)
                for other in self._members:
                    self._note_change(other)
            if entry.is_draining != self._dispatcher.conductor.is_draining(name):
                self._dispatcher.set_draining(name, is_draining=entry.is_draining)
        for name, member in members.items():
            if name not in told:
                logger.info("event=instance_left instance=%s", name)
                await self._drop(member)

    async def _change(self, change: ChangeRoster) -> None:
        await self._rosters.change(change)
        await self._sync()

    # The methods below change instances by asking their launcher.

    async def set_role(self, name: str, role: InstanceRole) -> None:
        """Ask the launcher to change the role of an instance; it informs all servers."""
        await self._change(ChangeRoster(action="role", instance=name, role=role))

    async def drain(self, name: str, *, is_draining: bool = True) -> None:
        """Ask the launcher to drain an instance, or to end its drain."""
        action = "drain" if is_draining else "undrain"
        await self._change(ChangeRoster(action=action, instance=name))

    async def restart(self, name: str, *, patience_s: float = DRAIN_S) -> None:
        """Ask the launcher to restart an instance."""
        await self._change(ChangeRoster(action="restart", instance=name, patience_s=patience_s))

    async def add_instance(self, role: InstanceRole) -> str:
        """Ask the launcher with the fewest instances to start one more; return its name."""
        before = {entry.name for entry in self._rosters.entries}
        await self._change(ChangeRoster(action="add", role=role))
        added = {entry.name for entry in self._rosters.entries} - before
        return next(iter(sorted(added)), "")

    async def remove_instance(self, name: str, *, patience_s: float = DRAIN_S) -> None:
        """Ask the launcher to remove an instance."""
        await self._change(ChangeRoster(action="remove", instance=name, patience_s=patience_s))

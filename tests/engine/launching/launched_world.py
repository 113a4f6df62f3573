"""The simulated cluster with a launcher and several servers, which come, go and are lost.

Launcher, servers, conductors, instances and store are the product's; ``KvWorld`` has the rest. In
the place of the channel between launcher and servers is ``SimRosters``. A person whose server is
lost asks another one with the same id, as clients do.
"""

import asyncio
import contextlib

from kv_world import LEASE_S, REQUEST_LIMIT_S, KvWorld, Settings
from sim_cluster import Lane, SimChild, SimClient, SimLauncher
from sim_instance import ENGINE

from tandem.conductor.policies.table import POLICIES
from tandem.core.errors import PeerLostError, TandemError
from tandem.core.wire import InstanceStage
from tandem.engine.cluster.config import ClusterConfig
from tandem.engine.launching.attached import AttachedCluster
from tandem.engine.launching.service import OwnedCluster
from tandem.engine.process.instance import InstanceSpec
from tandem.models.config import ModelConfig
from tandem.rpc import RpcConfig
from tandem.rpc.wire.endpoint import parse_endpoint
from tandem.sim import Faults
from tandem.sim.world import SILENT_S
from tandem.transfer.config import TransferConfig

NUM_SERVERS = 2
FLEETS = (
    {"p0": "prefill", "d0": "decode", "d1": "decode"},
    {"u0": "unified", "u1": "unified"},
    {"p0": "prefill", "p1": "prefill", "d0": "decode"},
)
MAX_ADDED = 2


class LaunchedSettings(Settings):
    """What a seed decides; every third one has calm weather, in which no request may fail."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.roles = dict(FLEETS[seed // 3 % len(FLEETS)])
        self.swaps = False
        self.switches = True
        self.policy = sorted(POLICIES)[seed % len(POLICIES)]
        has_pairs = "p0" in self.roles
        self.role_policy = "load" if has_pairs and seed % 2 else "fixed"

    def shrink(self) -> None:
        """Make the world small: as many faults during a third of the requests, and fewer requests
        after them.
        """
        self.pace = 3.0
        self.num_asked_again = self.num_prefixes_again = 1


class SimOwnedLauncher(SimLauncher):
    """An ``OwnedLauncher``."""

    def __init__(self, world) -> None:
        super().__init__(world)
        self.endpoint, self.num_started = "", 0

    async def start(self, spec) -> SimChild:
        child = await super().start(spec)
        self.num_started += 1
        self.endpoint = f"sim://{spec.name}/{self.num_started}"
        self._world.by_endpoint[self.endpoint] = child
        return child


class SimRosters:
    """A ``RosterSource``: what a launcher has told one server."""

    def __init__(self, world) -> None:
        self._world = world
        self.entries = []
        self.on_change = None
        self._changed = asyncio.Event()
        self._lane = Lane(world, None, None, self._take)
        self.is_cut = False

    def tell(self, entries) -> None:
        """Send a roster; it arrives some time later, and in order."""
        if not self.is_cut:
            self._lane.send(entries)

    def _take(self, entries) -> None:
        self.entries = entries
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if self.on_change is not None:
            self.on_change()

    def find(self, name):
        return next((entry for entry in self.entries if entry.name == name), None)

    async def wait_for(self, is_met) -> None:
        while not is_met():
            await self._changed.wait()

    async def change(self, change) -> None:
        await self._world.travel()
        if self.is_cut:
            raise PeerLostError("world.change", "the launcher is not there")
        await self._world.owned.change(change)
        await self._world.travel()
        if not self.is_cut:
            self._take(self._world.owned.list_entries())

    def close(self) -> None:
        self.on_change, self._lane.is_open = None, False


class SimServer:
    """One server; its people ask ``cluster``."""

    def __init__(self, world, name: str) -> None:
        settings = world.settings
        self.name, self._world = name, world
        self.rosters = SimRosters(world)
        self.clients: list[SimClient] = []
        self.lost = asyncio.Event()
        self._config = ClusterConfig(
            lease_s=LEASE_S, recovery_s=20.0, max_attempts=8, launchers=("sim",),
            policy=settings.policy, roles=settings.role_policy,
        )  # fmt: skip
        self.cluster: AttachedCluster

    async def start(self) -> None:
        world = self._world
        self.rosters.tell(world.owned.list_entries())
        await self.rosters.wait_for(lambda: bool(self.rosters.entries))
        self.cluster = AttachedCluster(
            self.rosters,
            world.make_spec("", "unified"),
            self._config,
            connect=self._connect,
            tag=f"{self.name}.",
        )
        await self.cluster.__aenter__()
        world.servers.append(self)
        await self.cluster.wait_ready()

    def _connect(self, endpoint: str, _) -> SimClient:
        client = SimClient(self._world, self._world.by_endpoint[endpoint].instance)
        self.clients.append(client)
        return client

    async def end(self, *, forget_in_s: float) -> None:
        """Be lost with all connections; instances notice after so long."""
        self._world.servers.remove(self)
        self.lost.set()
        self.rosters.close()
        for client in self.clients:
            client.end("the server is gone", tell=False, forget_in_s=forget_in_s)
        # What is left is not heard by anybody: tasks of a process that is no more.
        await self.cluster.__aexit__(None, None, None)


class LaunchedWorld(KvWorld):
    """Made inside a ``VirtualLoop``; ``run`` is the whole of it."""

    settings: LaunchedSettings

    def __init__(self, seed: int, settings: LaunchedSettings) -> None:
        super().__init__(seed, settings)
        self.by_endpoint: dict[str, SimChild] = {}
        self.servers: list[SimServer] = []
        self.owned: OwnedCluster
        self._is_telling = False
        self._num_servers = 0
        self.num_role_switches = self.num_retries = 0

    def make_spec(self, name: str, role) -> InstanceSpec:
        return InstanceSpec(
            name=name, role=role, model=ModelConfig(path="chain"), engine=ENGINE,
            rpc=RpcConfig(), transfer=TransferConfig(), tells_blocks=True,
        )  # fmt: skip

    @property
    def cluster(self) -> AttachedCluster:
        return self.servers[0].cluster

    async def serve(self, num_requests: int) -> None:
        specs = [self.make_spec(name, role) for name, role in self.settings.roles.items()]
        self.owned = OwnedCluster(
            specs, ClusterConfig(lease_s=LEASE_S), is_staggered=False,
            endpoint=parse_endpoint("ipc:///run/launcher.sock"), prefix="",
            on_change=self.note_roster, start_at=lambda _: SimOwnedLauncher(self),
        )  # fmt: skip
        async with self.owned:
            await self.owned.wait_ready()
            await asyncio.gather(*(self.start_server() for _ in range(NUM_SERVERS)))
            await self.trouble(num_requests)
            await self.recover()
            for server in list(self.servers):
                self.num_role_switches += server.cluster.num_role_switches
                await server.end(forget_in_s=0.0)

    async def start_server(self) -> None:
        self._num_servers += 1
        await SimServer(self, f"s{self._num_servers}").start()

    def note_roster(self) -> None:
        if not self._is_telling:
            self._is_telling = True
            self.network.loop.call_soon(self._tell, context=self.context)

    def _tell(self) -> None:
        self._is_telling = False
        entries = self.owned.list_entries()
        names = {entry.name for entry in entries}
        for name in set(self.instances) - names:
            del self.instances[name]
        self.settings.roles = {entry.name: entry.role for entry in entries}
        for server in self.servers:
            server.rosters.tell(entries)

    # What happens while people ask.

    async def trouble(self, num_requests: int) -> None:
        settings = self.settings
        self.faults, self.flips = settings.faults, settings.flips
        self.faults_of_model = settings.faults_of_model
        work = [self.rot(), self.change(), *([self.strike()] if settings.crashes else [])]
        background = [asyncio.ensure_future(each) for each in work]
        if settings.crashes:
            background.append(asyncio.ensure_future(self.lose_servers()))
        self.prefixes = [self.draw_tokens(20) for _ in range(3)]
        await asyncio.gather(*(self.converse(num_requests // 4) for _ in range(4)))
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        self.faults, self.flips, self.faults_of_model = Faults(), False, 0.0
        for server in self.servers:
            server.rosters.is_cut = False
        while len(self.servers) < NUM_SERVERS:
            await self.start_server()
        while self.owned.num_changes:
            # A change goes on to its end, whoever asked for it.
            await asyncio.sleep(0.1)
        await self.restore()

    async def restore(self) -> None:
        """Give every instance the role that its name says, with none that drains."""
        for server in self.servers:
            if server.cluster._balancing is not None:
                server.cluster._balancing.cancel()
        for entry in self.owned.list_entries():
            role = {"p": "prefill", "d": "decode"}.get(entry.name[0], "unified")
            await self.owned.set_role(entry.name, role)
            await self.owned.drain(entry.name, is_draining=False)
        self._tell()

    async def change(self) -> None:
        """Let a server change roles, drain, restart, add and remove instances."""
        while True:
            await asyncio.sleep(self.random.uniform(0.1, 1.5) / self.settings.pace)
            cluster, chance = self.random.choice(self.servers).cluster, self.random
            names = sorted(self.settings.roles)
            name, role = chance.choice(names), chance.choice(("prefill", "decode", "unified"))
            action = chance.choice(("role", "role", "restart", "add", "remove", "drain"))
            if action == "add" and len(names) >= len(FLEETS[0]) + MAX_ADDED:
                action = "remove"
            try:
                await self.carry_out(action, cluster, name, role)
                self.ends[action] += 1
            except TandemError as error:
                self.ends[f"{action}: {error.code}"] += 1

    async def carry_out(self, action: str, cluster: AttachedCluster, name: str, role) -> None:
        patience_s = self.random.choice((0.1, 5.0))
        match action:
            case "role":
                await cluster.set_role(name, role)
            case "restart":
                await cluster.restart(name, patience_s=patience_s)
            case "add":
                await cluster.add_instance(role)
            case "remove":
                if len(self.settings.roles) > 2:
                    await cluster.remove_instance(name, patience_s=patience_s)
            case _:
                await cluster.drain(name)
                await asyncio.sleep(self.random.uniform(0, 1))
                await cluster.drain(name, is_draining=False)

    async def lose_servers(self) -> None:
        """Kill a server, or its machine, or cut it off from the launcher, now and then."""
        while True:
            await asyncio.sleep(self.random.expovariate(0.5 * self.settings.pace))
            server = self.random.choice(self.servers)
            kind = self.random.choice(("killed", "silent", "cut"))
            self.ends[f"server {kind}"] += 1
            if kind == "cut":
                server.rosters.is_cut = True
                await asyncio.sleep(self.random.uniform(0, 4))
                server.rosters.is_cut = False
                server.rosters.tell(self.owned.list_entries())
                continue
            if len(self.servers) > 1:
                self.num_role_switches += server.cluster.num_role_switches
                await server.end(forget_in_s=SILENT_S if kind == "silent" else 0.0)
                await asyncio.sleep(self.random.uniform(0, 2))
                await self.start_server()

    async def read_answer(self, request, *, is_impatient: bool):
        """Ask a server, and another one when that is lost: with the same id."""
        begun: list[int] = []
        end_s = self.network.loop.now_s + REQUEST_LIMIT_S
        while True:
            server = self.random.choice(self.servers)
            reading = asyncio.ensure_future(
                self.read_from(server.cluster, request, is_impatient=is_impatient)
            )
            lost = asyncio.ensure_future(server.lost.wait())
            await asyncio.wait((reading, lost), return_when=asyncio.FIRST_COMPLETED)
            lost.cancel()
            if not server.lost.is_set():
                return await reading
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, TandemError):
                await reading
            self.num_retries += 1
            if self.network.loop.now_s > end_s:
                return "no server", begun

    async def read_from(self, cluster, request, *, is_impatient: bool):
        return await super().read_answer(request, is_impatient=is_impatient, cluster=cluster)

    # What must hold at the end.

    def check_whole(self, *, may_store: bool = False) -> None:
        entries = {entry.name: entry for entry in self.owned.list_entries()}
        prefills = {name for name, entry in entries.items() if entry.role == "prefill"}
        for name, entry in entries.items():
            if entry.stage is not InstanceStage.READY or entry.is_draining:
                self.violations.append(f"{name} is not whole: {entry}")
        for server in self.servers:
            told = {status.name: status for status in server.cluster.instances}
            if set(told) != set(entries):
                self.violations.append(f"{server.name} knows {sorted(told)}, not {sorted(entries)}")
            for name, status in told.items():
                is_linked = status.role != "decode" or prefills <= set(status.sources)
                is_same = name in entries and status.role == entries[name].role
                if status.stage.stage != "ready" or not is_linked or not is_same:
                    self.violations.append(f"{server.name}: {name} is not whole: {status}")
            if server.cluster.num_live:
                self.violations.append(f"{server.name}: {server.cluster.num_live} requests live")
        for name, instance in self.instances.items():
            if kept := instance.list_kept(may_store=may_store):
                self.violations.append(f"{name} keeps {', '.join(kept)}")
        self.streams.clear()

"""The world of ``store_world`` with three masters, of which an election makes one the leader.

The candidates are the product's ``ElectedMaster`` and ``Campaign``; the model is of what stands in
for etcd (a lock that ends by itself, and a count), and of the ways between the parties, which can
be cut one by one. Every process has a clock of its own: of another rate, and it may leap forward.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from store_world import ClientChannel, StoreWorld

from tandem.core.errors import DeadlineError, PeerLostError, TandemError
from tandem.sim import DriftingClock, Process, Session
from tandem.store.election.campaign import Campaign, Claim
from tandem.store.election.elected import ElectedMaster, Term
from tandem.store.election.election import Holder
from tandem.store.election.roster import SavedRoster
from tandem.store.master.master import StoreMaster
from tandem.store.messages import CommitStatus, KeyBytes, LeaderAnswer
from tandem.store.metrics import StoreCounters

TTL_S = 3
MASTERS = ("m0", "m1", "m2")
ETCD = "etcd"
DRIFT = 0.04
"""Rates of clocks within this of 1: two differ by at most 1.083, leases allow for 1.11."""
SILENT_S = 3.0
"""The lease of the control channel."""
WRITTEN = {CommitStatus.CREATED, CommitStatus.REPLACED}
WRITES = {"commit_put": WRITTEN, "put_inline": WRITTEN, "remove": {1}, "pin": {1}}
"""Methods that write, and the flags of their answers that acknowledge it."""


class SimLock:
    """What etcd keeps."""

    def __init__(self) -> None:
        self.holder: Holder | None = None
        self.lease: object = None
        self.until_s = 0.0
        self.count = 0

    def look(self) -> Holder | None:
        if asyncio.get_running_loop().time() >= self.until_s:
            self.holder = self.lease = None
        return self.holder

    def lose_data(self) -> None:
        """As an etcd that is set up anew."""
        self.holder, self.lease, self.count = None, None, 0


class SimBackend:
    """A candidate's way to the lock."""

    def __init__(self, world: "MastersWorld", process: Process) -> None:
        self.world, self.process = world, process
        self.lease: object = None

    async def _travel(self) -> None:
        world = self.world
        await world.travel()
        is_lost = world.random.random() < world.faults.lose
        if is_lost or world.is_cut_by_name(self.process.name, ETCD) or not self.process.is_alive:
            await asyncio.sleep(1000)
            raise PeerLostError("world.etcd", "lost")

    async def observe(self, timeout_s):
        await self._travel()
        found = self.world.lock.look()
        await self._travel()
        return found

    async def acquire(self, address, *, ttl_s, min_epoch, timeout_s):
        await self._travel()
        lock = self.world.lock
        if lock.look() is None:
            lock.count = max(lock.count, min_epoch) + 1
            lock.holder = Holder(address, lock.count)
            lock.lease = self.lease = object()
            lock.until_s = asyncio.get_running_loop().time() + ttl_s
        claim = Claim(lock.holder, lock.lease is self.lease)
        await self._travel()
        return claim

    async def renew(self, timeout_s):
        await self._travel()
        lock = self.world.lock
        is_alive = lock.look() is not None and lock.lease is self.lease
        if is_alive:
            lock.until_s = asyncio.get_running_loop().time() + TTL_S
        await self._travel()
        return is_alive

    async def release(self, timeout_s):
        lease, self.lease = self.lease, None
        await self._travel()
        if self.world.lock.look() is not None and self.world.lock.lease is lease:
            self.world.lock.holder = self.world.lock.lease = None


class SimRosterStore:
    """A leader's way to the membership, which stands beside the lock; its writes are fenced."""

    def __init__(self, backend: SimBackend, epoch: int) -> None:
        self._backend, self._epoch = backend, epoch

    async def load(self) -> SavedRoster:
        try:
            async with asyncio.timeout(1.0):
                await self._backend._travel()
                saved = await self._backend.world.roster.load()
                await self._backend._travel()
        except TimeoutError:
            raise DeadlineError("world.roster", "lost") from None
        return saved._replace(is_new=self._epoch == 1)

    async def save(self, roster) -> None:
        await self._change("save", roster)

    async def add(self, batch) -> None:
        await self._change("add", batch)

    async def drop(self, below) -> None:
        await self._change("drop", below)

    async def _change(self, method, argument) -> None:
        world = self._backend.world
        try:
            async with asyncio.timeout(1.0):
                await self._backend._travel()
                holder = world.lock.look()
                if holder is None or holder.epoch != self._epoch:
                    raise PeerLostError("world.roster", "the term is over")
                await getattr(world.roster, method)(argument)
                await self._backend._travel()
        except TimeoutError:
            raise DeadlineError("world.roster", "lost") from None


class Node(NamedTuple):
    """A candidate."""

    process: Process
    elected: ElectedMaster
    clock: DriftingClock


class MastersWorld(StoreWorld):
    """Its ``master`` is whoever leads, as far as an observer outside can tell."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.lock = SimLock()
        self.nodes: dict[str, Node] = {}
        self.clocks: list[DriftingClock] = []
        self.num_terms = 0
        self.highest_acked = 0
        self.obeyed: dict[str, int] = {}

    # The leader, for those who ask as of a single master.

    @property
    def leader(self) -> Node | None:
        for node in self.nodes.values():
            if node.elected.is_leader:
                return node
        return None

    @property
    def master(self):
        leader = self.leader
        node = leader if leader is not None else next(iter(self.nodes.values()))
        return node.elected.master

    @property
    def master_process(self) -> Process | None:
        """None while one of them is missing: whoever revives masters asks this."""
        return None if len(self.nodes) < len(MASTERS) else self.nodes[MASTERS[0]].process

    @master_process.setter
    def master_process(self, _) -> None:
        pass

    @property
    def has_master(self) -> bool:
        return True  # One of them may lead: only asking tells.

    # Processes.

    def start_master(self) -> None:
        for name in MASTERS:
            if name not in self.nodes:
                self.start_node(name)

    def start_node(self, name: str) -> None:
        process = Process(self, name)
        process.run(self._fill_node, name, process)

    def _fill_node(self, name: str, process: Process) -> None:
        clock = self.make_clock()

        def make_master(epoch: int, term: Term | None, counters: StoreCounters) -> StoreMaster:
            return StoreMaster(
                self.config,
                clock=clock,
                epoch=epoch,
                draw=self.random.randrange,
                term=term,
                roster=SimRosterStore(backend, epoch) if epoch else None,
                counters=counters,
            )

        elected = ElectedMaster(make_master, end_sessions=lambda _: self.end_sessions_of(process))
        backend = SimBackend(self, process)
        elected.campaign = Campaign(
            backend,
            clock=clock,
            address=name,
            ttl_s=TTL_S,
            timeout_s=1.0,
            on_elected=lambda epoch: self._note_term(elected, epoch),
            on_deposed=elected.leave,
        )
        process.serve(elected.methods())
        self.nodes[name] = Node(process, elected, clock)
        process.spawn(elected.campaign.run())

    def _note_term(self, elected: ElectedMaster, epoch: int) -> None:
        self.num_terms += 1
        elected.take(epoch)

    def kill_master(self) -> None:
        """Kill whoever leads; any, if nobody does."""
        leader = self.leader
        if leader is not None:
            self.kill_node(leader.process.name)
        elif self.nodes:
            self.kill_node(self.random.choice(sorted(self.nodes)))

    def kill_node(self, name: str) -> None:
        if name not in self.nodes:
            return
        self.kill(self.nodes.pop(name).process)

    def stall_node(self, name: str, seconds: float) -> None:
        """Stop it dead. Others miss it after a while; it misses nobody before it has woken."""
        process = self.nodes[name].process
        process.stall_until(asyncio.get_running_loop().time() + seconds)
        for session in self.sessions:
            if session.far is process:
                self.network.spawn(self._half_close(session, process))

    async def _half_close(self, session: Session, process: Process) -> None:
        await asyncio.sleep(SILENT_S)
        session.is_open = False
        session.lost.set()
        await process.pass_stall()
        await asyncio.sleep(0.3)
        session.is_open = True  # For end_session to do its work.
        self.end_session(session)

    def on_session_end(self, session: Session) -> None:
        node = self.nodes.get(session.far.name)
        if node is not None and node.process is session.far:
            node.process.run(node.elected.on_caller_lost, session.back)

    def start_host(self, name: str, capacity: int) -> None:
        super().start_host(name, capacity)
        process, host = self.hosts[name]
        for method, (handler, *types) in process.methods.items():
            process.methods[method] = (self._watch_orders(name, host, method, handler), *types)

    def _watch_orders(self, name: str, host, method: str, handler: Callable) -> Callable:
        async def watched(caller, order):
            is_ours, epoch = host.master is caller, order.epoch
            # It is obeyed as it begins; one that takes long may end under the next leader.
            obeyed_before = self.obeyed.get(name, 0)
            answer = handler(caller, order)
            if asyncio.iscoroutine(answer):
                answer = await answer
            if not is_ours:
                self.violations.append(f"{name} obeys {method} of a session that is over")
            if epoch < obeyed_before:
                self.violations.append(f"{name} obeys {method} of epoch {epoch}, which is over")
            self.obeyed[name] = max(epoch, self.obeyed.get(name, 0))
            return answer

        return watched

    # Finding the leader, as ``LeaderClient`` does.

    async def find_leader(self, process: Process) -> Session | None:
        names = list(self.nodes)
        self.random.shuffle(names)
        for name in names:
            node = self.nodes.get(name)
            if node is None or self.is_cut(process, node.process):
                continue
            session = self.open_session(process, node.process)
            try:
                answer = await session.call("leader", None, LeaderAnswer, timeout_s=1.0)
            except TandemError:
                answer = LeaderAnswer(is_leader=False)
            if answer.is_leader and session.is_open:
                return session
            self.end_session(session)
        return None

    async def connect_client(self, channel: ClientChannel) -> None:
        await channel.process.pass_stall()
        channel.session = await self.find_leader(channel.process)

    async def _keep_joined(self, process: Process, host) -> None:
        while True:
            await asyncio.sleep(self.random.uniform(0.02, 0.25))
            session = await self.find_leader(process)
            if session is None:
                continue
            host.on_master(session)
            await session.lost.wait()
            host.on_master_lost()

    # Clocks and the watch on all of it.

    def make_clock(self) -> DriftingClock:
        clock = DriftingClock(
            self.random.uniform(1 - DRIFT, 1 + DRIFT), self.random.uniform(0, 1e5)
        )
        self.clocks.append(clock)
        return clock

    def note_step(self) -> None:
        super().note_step()
        leaders = [name for name, node in self.nodes.items() if node.elected.is_leader]
        if len(leaders) > 1:
            self.violations.append(f"{leaders} lead at a time")

    def note_answer(self, far: Process, method: str, *, error: str, body: bytes) -> None:
        node = self.nodes.get(far.name)
        if node is None or node.process is not far or method not in WRITES or error:
            return
        flags = msgspec.msgpack.decode(body, type=KeyBytes).flags
        if not set(flags) & WRITES[method]:
            return  # It says that nothing was done.
        epoch = node.elected.master.epoch
        if epoch < self.highest_acked:
            self.violations.append(
                f"{far.name} of epoch {epoch} acknowledges {method} after {self.highest_acked}"
            )
        self.highest_acked = max(self.highest_acked, epoch)

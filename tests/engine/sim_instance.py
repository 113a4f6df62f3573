"""An instance in the simulated world: all of it is the product's but for the model and the ways."""

import asyncio
import collections

import msgspec
import numpy as np
from chain_model import (
    BLOCK,
    BLOCK_BYTES,
    LAYOUT,
    NUM_LAYERS,
    STATE_BYTES,
    VOCAB,
    ChainRunner,
    make_identity,
)
from sim_peers import Listener, SimPeerPort

from tandem.core.errors import InternalError
from tandem.core.instance_status import Statistics
from tandem.core.wire import InstanceInfo, KvPeer
from tandem.engine.config import EngineConfig
from tandem.engine.disaggregation.announcer import PrefillAnnouncer
from tandem.engine.disaggregation.hand_over import ReadTarget
from tandem.engine.disaggregation.reader import PeerReader
from tandem.engine.engine import Engine
from tandem.engine.groups.group import Group, GroupMemory
from tandem.engine.groups.reuse import StatePolicy
from tandem.engine.process.instance_api import InstanceApi
from tandem.engine.process.inventory import BlockInventory
from tandem.engine.scheduling.blocks import BlockPool
from tandem.engine.scheduling.prefix_index import PrefixIndex
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.tiers.planner import CostTierPlanner
from tandem.engine.tiers.store_tier import StoreTier
from tandem.engine.transfers import TransfersBySource
from tandem.sim import LoopClock

MAX_LEN = 64
STEP_S = 0.02
ENGINE = EngineConfig(
    block_size=BLOCK, max_model_len=MAX_LEN, max_batch_tokens=24, max_running=6, max_queue=100
)


class ThreadLoop:
    """The world's loop as another thread's: what is handed over arrives in order, but later."""

    def __init__(self, world, process) -> None:
        self._world, self._process = world, process
        self._waiting: collections.deque = collections.deque()
        self._last_s = 0.0

    def call_soon_threadsafe(self, callback, *args) -> None:
        loop, chance = self._process.loop, self._world.random
        delay_s = chance.choice((0.0, 0.0, 0.0, 0.0005, 0.03))
        self._waiting.append((callback, args))
        self._last_s = max(loop.now_s + delay_s, self._last_s)
        loop.call_at(self._last_s, self._wake)

    def _wake(self) -> None:
        # What a stopped process is told waits until it goes on.
        self._process.loop.call_soon(self._run_next, context=self._process.context)

    def _run_next(self) -> None:
        if self._process.is_alive:
            callback, args = self._waiting.popleft()
            callback(*args)

    def create_task(self, work):
        return self._process.loop.create_task(work, context=self._process.context)


class SimInstance:
    """One run of an instance, in a process that may be killed and stopped."""

    def __init__(self, world, name: str, role: str, weights: str) -> None:
        self.world, self.name, self.role, self.weights = world, name, role, weights
        self.process, client = world.start_client(name)
        self.num_blocks = world.settings.num_blocks
        self.memory = np.zeros(self.num_blocks * BLOCK_BYTES, np.uint8)
        num_slots = world.settings.num_slots
        self.states = np.zeros(num_slots * STATE_BYTES, np.uint8) if num_slots else None
        self.identity = make_identity(weights, has_states=bool(num_slots))
        pool = BlockPool(self.num_blocks)
        self.planner = CostTierPlanner(world.tiers, block_size=BLOCK, block_bytes=BLOCK_BYTES)
        index = PrefixIndex(pool, BLOCK, identity=self.identity.digest)
        self.inventory = BlockInventory(world.tiers.write)
        index.observers.append(self.inventory)
        # Half of the instances plan ahead, so that every race is tried both ways.
        self.is_overlapped = world.random.random() < 0.5
        config = msgspec.structs.replace(ENGINE, overlap="on" if self.is_overlapped else "off")
        policy = StatePolicy(num_slots, 8, min_gain=1, at_blocks=True) if num_slots else None
        self.scheduler = Scheduler(config, pool, index, self.planner, policy)
        self.runner = ChainRunner(self.memory, weights, self.states)
        self.engine = Engine(
            self.scheduler,
            self.runner,
            LoopClock(),
            vocab_size=VOCAB,
            eos_token_ids=(),
            observer=self.planner,
        )
        self.bell = asyncio.Event()
        # The real loop waits for this condition; here a task does.
        self.engine._work.notify = self.bell.set
        self.tier: StoreTier
        self.reader: PeerReader | None = None
        self.peer: KvPeer | None = None
        self.process.run(self._open, client)
        self.process.spawn(self._run())

    def _open(self, client) -> None:
        world, clock = self.world, LoopClock()
        groups = {Group.FULL: GroupMemory(self.memory, BLOCK_BYTES)}
        if self.states is not None:
            groups[Group.STATE] = GroupMemory(self.states, STATE_BYTES, 1)
        self.tier = StoreTier(
            client,
            groups,
            block_size=BLOCK,
            identity=self.identity.digest.hex(),
            config=world.tiers,
            clock=clock,
            on_load=self.planner.note_load,
            loop=ThreadLoop(world, self.process),
        )
        self.tier.attach(self.engine)
        own = KvPeer(
            name=self.name,
            # A restarted instance may listen where the last one did.
            addresses=(self.name,),
            epoch=world.random.getrandbits(32),
            identity=self.identity,
            layout=LAYOUT,
            block_bytes=BLOCK_BYTES,
            num_blocks=self.num_blocks,
            buffer="kv",
            state_buffer="" if self.states is None else "states",
            state_bytes=STATE_BYTES,
            num_state_slots=world.settings.num_slots,
        )
        # Both ways: its role may change.
        self.peer = own
        announcer = PrefillAnnouncer(self.engine, own, self.memory, clock, self.states)
        self.engine.attach_listener(announcer)
        self.listener = Listener(self.process, self.memory, announcer, own.epoch, self.states)
        world.listeners[self.name] = self.listener
        port = SimPeerPort(world, self.process, self.memory, self.states)
        target = ReadTarget(port, self.memory, own, clock, Statistics(), self.states)
        self.reader = PeerReader(target, self.engine, ThreadLoop(world, self.process))
        self.engine.attach_transfers(TransfersBySource((self.tier, self.reader)))
        self.api = InstanceApi(
            self.name,
            self.engine,
            clock,
            self.tier,
            self.reader,
            info=self.info,
            inventory=self.inventory,
        )

    @property
    def info(self) -> InstanceInfo:
        return InstanceInfo(
            model="chain",
            architecture="Chain",
            dtype="bfloat16",
            vocab_size=VOCAB,
            max_model_len=MAX_LEN,
            block_size=BLOCK,
            num_blocks=self.num_blocks,
            max_batch_tokens=ENGINE.max_batch_tokens,
            kv_bytes_per_token=BLOCK_BYTES // BLOCK,
            weight_bytes=1,
            num_parameters=1,
            eos_token_ids=[],
            weight_version=self.weights,
            system_fingerprint=self.identity.system_fingerprint,
            kv_identity=self.identity.digest.hex(),
            pid=1,
            load_seconds=0.0,
            kv_peer=self.peer,
        )

    async def _run(self) -> None:
        """What the main thread of an instance does, with time that passes within a step."""
        engine = self.engine
        running = None
        while True:
            while running is None and not engine.wait_for_work(0.0):
                self.api.deliver(())
                self.bell.clear()
                await self._wait_for_bell()
            step = engine.plan_step()
            self.api.deliver(step.outputs)
            step.outputs = []
            if running is not None:
                await running
                running = None
            message = engine.start_step(step)
            if message is None:
                await asyncio.sleep(0.0005)
                continue
            running = self.process.spawn(self._compute(step, message))
            if not self.is_overlapped:
                await running
                running = None

    async def _compute(self, step, message) -> None:
        engine, world = self.engine, self.world
        layers = self.runner.run(message, engine.watch_layers(step))
        while True:
            try:
                next(layers)
            except StopIteration as end:
                result = end.value
                break
            await asyncio.sleep(world.random.uniform(0.2, 2) * STEP_S / NUM_LAYERS)
        failures = {}
        if world.random.random() < world.faults_of_model:
            fault = InternalError("sim.step", "a fault of the model")
            failures = {sequence.sequence_id: fault for sequence in message.sequences}
        self.api.deliver(engine.end_step(step, result, failures))

    async def _wait_for_bell(self) -> None:
        wake_in_s = self.scheduler.wake_s - self.process.loop.now_s
        if wake_in_s == float("inf"):
            await self.bell.wait()
        elif wake_in_s > 0:
            timer = self.process.loop.call_later(wake_in_s, self.bell.set)
            await self.bell.wait()
            timer.cancel()

    @property
    def is_storing(self) -> bool:
        """Whether it waits for the store to take blocks; they are copies in staging slots."""
        return self.tier._storing is not None

    def list_kept(self, *, may_store: bool = False) -> list[str]:
        """What an idle instance should have given back; ``may_store``: puts may be under way."""
        if self.peer is not None:
            self.listener.announcer.note_progress()  # Forgets questions that nobody waits for.
        stats, state = self.engine.get_stats(), self.scheduler._state
        kept = {
            "used blocks": stats.num_used_blocks,
            "used slots of states": stats.num_used_state_slots,
            "held": stats.num_held,
            "pinned by holds": state.holds.num_pinned,
            "in transfer": state.loads.num_in_transfer,
            "pinned by loads": state.loads.num_pinned,
            "live": int(self.engine.has_requests),
            "owned": self.api.num_owned,
            "staging": self.world.tiers.staging_blocks - self.tier._blocks.staging.num_free,
            "tier tasks": len(self.tier._tasks),
            "loads": len(self.tier._loading) + len(self.tier._dropped),
            "reads": 0 if self.reader is None else self.reader.num_in_transfer,
            "questions": self.listener.announcer.num_waiting if self.peer is not None else 0,
        }
        if may_store and self.is_storing:
            del kept["staging"]
            kept["tier tasks"] -= 1
        wrong = [f"{count} {what}" for what, count in kept.items() if count]
        try:
            self.scheduler.check()
        except AssertionError as error:
            wrong.append(str(error))
        return wrong

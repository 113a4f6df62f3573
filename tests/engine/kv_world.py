"""Engines with a store in the simulated world: scheduler, tiers and store are the product's.

The model is a hash chain: the KV of a token is the digest of all tokens before it and itself, read
from the block of the token before, and the next token follows from it. So a block with wrong
content, wherever it came from, gives wrong tokens, and what is right is known without a model.
"""

import asyncio
import hashlib
import itertools
import sys
from pathlib import Path

import numpy as np

from tandem.core.errors import TandemError
from tandem.core.wire import AddRequest, FinishReason, SamplingParams
from tandem.engine.blocks import BlockPool
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.prefix_index import PrefixIndex
from tandem.engine.runner import SequenceResult
from tandem.engine.sampling import SampledToken
from tandem.engine.scheduler import Scheduler
from tandem.engine.tiers.config import TierConfig
from tandem.engine.tiers.planner import CostTierPlanner
from tandem.engine.tiers.store_tier import BlockMemory, StoreTier
from tandem.sim import Faults, LoopClock
from tandem.store.config import StoreConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
from store_world import StoreWorld

BLOCK = 4
WIDTH = 32
"""Bytes of a token's KV: a block's 128 bytes are too much to be right by chance."""
BLOCK_BYTES = BLOCK * WIDTH
NUM_BLOCKS = 32
MAX_LEN = 64
VOCAB = 50
HOSTS = ("h0", "h1")
CAPACITY = 2**16
STEP_S = 0.02
REQUEST_LIMIT_S = 120.0
"""A request takes no longer, whatever fails: loads have deadlines and the rest is computed."""
STORE = StoreConfig(
    lease_ms=500,
    put_timeout_ms=2000,
    put_wait_ms=1000,
    deadline_ms=1500,
    inline_bytes=0,
    max_value_bytes=2**20,
)
ENGINE = EngineConfig(
    block_size=BLOCK, max_model_len=MAX_LEN, max_batch_tokens=24, max_running=6, max_queue=100
)


def advance(state: bytes, token_id: int) -> bytes:
    return hashlib.blake2b(state + token_id.to_bytes(4, "little"), digest_size=WIDTH).digest()


def continue_prompt(prompt: list[int], num_tokens: int) -> list[int]:
    """What an engine must answer."""
    state, tokens = bytes(WIDTH), list(prompt)
    for token in prompt:
        state = advance(state, token)
    for _ in range(num_tokens):
        tokens.append(pick(state))
        state = advance(state, tokens[-1])
    return tokens[len(prompt) :]


def pick(state: bytes) -> int:
    return int.from_bytes(state[:4], "little") % VOCAB


class ChainRunner:
    """Computes the hash chain from and into the memory of the blocks."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory
        self.rows = memory.reshape(-1, WIDTH)

    def run(self, plan, states, on_layer=None):
        for copy in plan.copies:
            source = copy.src_block_id * BLOCK
            target = copy.dst_block_id * BLOCK
            self.rows[target : target + copy.num_tokens] = self.rows[
                source : source + copy.num_tokens
            ]
        results = {}
        for sequence in plan.sequences:
            request, table = sequence.request, sequence.block_table
            end = sequence.start + sequence.num_tokens

            def row(position, table=table):
                return table[position // BLOCK] * BLOCK + position % BLOCK

            state = bytes(WIDTH)
            if sequence.start:
                state = self.rows[row(sequence.start - 1)].tobytes()
            for position, token in enumerate(
                request.get_tokens(sequence.start, end), sequence.start
            ):
                state = advance(state, token)
                self.rows[row(position)] = np.frombuffer(state, np.uint8)
            sampled = SampledToken(pick(state), None) if sequence.wants_sample else None
            results[request.request_id] = SequenceResult(sampled=sampled)
        return results


class Instance:
    """One engine with its tier, in a process that may be killed and stopped."""

    def __init__(self, world: "TierWorld", name: str) -> None:
        self.world = world
        self.name = name
        self.process, self.client = world.start_client(name)
        self.memory = np.zeros(NUM_BLOCKS * BLOCK_BYTES, np.uint8)
        pool = BlockPool(NUM_BLOCKS)
        index = PrefixIndex(pool, BLOCK, identity=b"model")
        self.planner = CostTierPlanner(world.tiers, block_size=BLOCK, block_bytes=BLOCK_BYTES)
        self.scheduler = Scheduler(ENGINE, pool, index, self.planner)
        self.engine = Engine(
            self.scheduler,
            ChainRunner(self.memory),
            LoopClock(),
            vocab_size=VOCAB,
            eos_token_ids=(),
            observer=self.planner,
        )
        self.waiting: dict[str, asyncio.Future] = {}
        self.tokens: dict[str, list[int]] = {}
        self.tier = self.process.run(self._open_tier)
        self.process.spawn(self._run())

    def _open_tier(self) -> StoreTier:
        tier = StoreTier(
            self.client,
            BlockMemory(self.memory, BLOCK_BYTES),
            identity="model",
            config=self.world.tiers,
            clock=LoopClock(),
            on_load=self.planner.note_load,
        )
        tier.attach(self.engine)
        self.engine.attach_transfers(tier)
        return tier

    async def _run(self) -> None:
        while True:
            if not self.engine.wait_for_work(0.0):
                await asyncio.sleep(STEP_S)
                continue
            for output in self.engine.step():
                self._deliver(output)
            await asyncio.sleep(self.world.random.uniform(0.2, 2) * STEP_S)

    def _deliver(self, output) -> None:
        tokens = self.tokens.get(output.request_id)
        if tokens is None:
            self.world.violations.append(f"output after the end of {output.request_id}")
            return
        tokens += output.token_ids
        if output.finish_reason is not None:
            del self.tokens[output.request_id]
            self.waiting.pop(output.request_id).set_result((output.finish_reason, tokens))

    async def add(self, message: AddRequest) -> asyncio.Future:
        missing = self.engine.find_missing_blocks(message)
        stored = await self.tier.count_stored(missing.keys)
        self.engine.add(message, num_stored_blocks=missing.num_cached + (stored or 0))
        self.tokens[message.request_id] = []
        future = self.waiting[message.request_id] = asyncio.get_running_loop().create_future()
        return future

    def kill(self) -> None:
        self.world.kill(self.process)
        for future in self.waiting.values():
            future.cancel()

    def check_idle(self) -> None:
        """Every block, slot and transfer has been given back."""
        stats, loads = self.engine.get_stats(), self.scheduler._loads
        found = (stats.num_used_blocks, loads.num_in_transfer, loads.num_pinned)
        if any(found) or self.tier._staging.num_free != self.world.tiers.staging_blocks:
            self.world.violations.append(
                f"{self.name} keeps {found}, {self.tier._staging.num_free} slots are free"
            )


class TierWorld(StoreWorld):
    """Two instances on one store, and people who ask them."""

    def __init__(self, seed: int, faults: Faults, tiers: TierConfig, *, crashes: bool) -> None:
        super().__init__(seed, STORE, faults)
        self.tiers = tiers
        self.crashes = crashes
        self.instances: dict[str, Instance] = {}
        self.count = itertools.count()
        self.num_right = self.num_lost = self.num_loaded = 0
        self.is_over = False

    async def run(self, num_requests: int) -> None:
        self.start_master()
        for name in HOSTS:
            self.start_host(name, CAPACITY)
        await asyncio.sleep(2)
        for name in ("i0", "i1"):
            self.instances[name] = Instance(self, name)
        background = [asyncio.ensure_future(self.rot())]
        if self.crashes:
            background.append(asyncio.ensure_future(self.strike()))
        prefixes = [self.draw_tokens(20) for _ in range(3)]
        await asyncio.gather(*(self.converse(prefixes, num_requests // 4) for _ in range(4)))
        for task in background:
            task.cancel()
        self.faults = Faults()
        for name in HOSTS:
            if name not in self.hosts:
                self.start_host(name, CAPACITY)
        if self.master_process is None:
            self.start_master()
        await asyncio.sleep(20)
        for name, instance in self.instances.items():
            instance.engine.flush_cache()
            for prefix in prefixes:
                await self.ask(name, prefix, 6, must_work=True)
        await asyncio.sleep(10)
        for instance in self.instances.values():
            self.num_loaded += instance.tier.counters.loaded_blocks
            instance.check_idle()

    def draw_tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCAB) for _ in range(count)]

    async def converse(self, prefixes: list[list[int]], num_turns: int) -> None:
        """Turns that build on each other, each on whichever instance."""
        prompt: list[int] = []
        for _ in range(num_turns):
            await asyncio.sleep(self.random.expovariate(5))
            if not prompt or len(prompt) > 40:
                prompt = [*self.random.choice(prefixes), *self.draw_tokens(3)]
            name = self.random.choice(sorted(self.instances))
            if self.random.random() < 0.15:
                self.instances[name].engine.flush_cache()
            answer = await self.ask(name, prompt, self.random.randrange(1, 9))
            if answer is not None:
                prompt = [*prompt, *answer, *self.draw_tokens(2)]

    async def ask(self, name: str, prompt, num_tokens: int, *, must_work: bool = False):
        """One request, to its end; what it answers is checked."""
        instance = self.instances[name]
        message = AddRequest(
            request_id=f"r{next(self.count)}",
            prompt_ids=list(prompt),
            sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0),
        )
        try:
            async with asyncio.timeout(REQUEST_LIMIT_S):
                future = await instance.process.spawn(instance.add(message))
                if self.random.random() < 0.1 and not must_work:
                    await asyncio.sleep(self.random.uniform(0, 0.2))
                    instance.engine.cancel(message.request_id)
                reason, tokens = await future
        except asyncio.CancelledError:
            if instance.process.is_alive:
                raise
            self.num_lost += 1
            return None
        except TimeoutError:
            if instance.process.is_alive and not instance.process.is_stalled:
                self.violations.append(f"{message.request_id} does not end")
            return None
        except TandemError as error:
            self.violations.append(f"{message.request_id} was refused: {error}")
            return None
        if reason is FinishReason.CANCELLED:
            return None
        if reason is not FinishReason.LENGTH or tokens != continue_prompt(prompt, num_tokens):
            self.violations.append(f"{message.request_id} on {name}: {reason} {tokens}")
            return None
        self.num_right += 1
        return tokens

    async def strike(self) -> None:
        """Kill hosts, the master and instances, now and then."""
        while True:
            await asyncio.sleep(self.random.expovariate(0.5))
            match self.random.choice(("host", "master", "instance", "cut")):
                case "host":
                    name = self.random.choice(HOSTS)
                    self.kill_host(name)
                    await asyncio.sleep(self.random.uniform(0, 3))
                    self.start_host(name, CAPACITY)
                case "master":
                    self.kill_master()
                    await asyncio.sleep(self.random.uniform(0, 3))
                    self.start_master()
                case "instance":
                    name = self.random.choice(sorted(self.instances))
                    self.instances[name].kill()
                    self.instances[name] = Instance(self, name)
                case "cut":
                    mend = self.cut_off(self.random.choice(HOSTS), ["i0", "i1", "master"])
                    await asyncio.sleep(self.random.uniform(0, 5))
                    mend()


def draw_settings(seed: int) -> tuple[Faults, TierConfig, bool]:
    """Every third seed has calm weather; the policies take turns."""
    faults = Faults()
    if seed % 3:
        faults = Faults(lose=0.01, late=0.01, double=0.01, drag=0.1, rot_per_s=8.0)
    tiers = TierConfig(
        write=("write_through", "on_evict")[seed % 2],
        prefetch=("timeout", "wait", "timeout", "wait", "best_effort")[seed % 5],
        decision=("auto", "load")[seed // 2 % 2],
        lookup_timeout_ms=200,
        load_deadline_ms=1500,
        staging_blocks=8,
    )
    return faults, tiers, seed % 3 == 2

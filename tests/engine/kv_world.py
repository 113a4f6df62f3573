"""A whole cluster in the simulated world: server, instances, store; all of it is the product's.

Only the model (a hash chain, ``chain_model``), the processes (``sim_cluster``) and the ways between
them (``sim_peers``, ``store_world``) are not. People ask; things break; then they are whole again,
and nothing is kept.
"""

import asyncio
import collections
import contextlib
import contextvars
import itertools
import sys
from pathlib import Path

from chain_model import VOCAB, continue_prompt, make_identity
from sim_cluster import SimLauncher
from sim_instance import ENGINE

from tandem.core.errors import TandemError
from tandem.core.wire import AddRequest, FinishReason, SamplingParams
from tandem.engine.cluster.client import ClusterClient
from tandem.engine.cluster.config import ClusterConfig
from tandem.engine.process.instance import InstanceSpec
from tandem.engine.tiers.config import TierConfig
from tandem.engine.tiers.store_tier import make_object_key
from tandem.models.config import ModelConfig
from tandem.rpc import RpcConfig
from tandem.sim import Faults
from tandem.store.config import StoreConfig
from tandem.store.host.host import CALL_TIMEOUT_S
from tandem.transfer.config import TransferConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
from store_world import StoreWorld

HOSTS = ("h0", "h1")
CAPACITY = 2**16
LEASE_S = 3.0
WHOLE_IN_S = LEASE_S + 5.0
"""After the last fault."""
REQUEST_LIMIT_S = 60.0
GRACE_S = 5.0
STORE_S = 12.0
"""Until the store has taken back what unfinished writes had reserved."""
STORE = StoreConfig(
    lease_ms=500,
    put_timeout_ms=2000,
    put_wait_ms=1000,
    deadline_ms=1500,
    inline_bytes=0,
    max_value_bytes=2**20,
)
WEIGHTS, FOREIGN = "weights", "other weights"
ROLES = {
    "unified": {"u0": "unified", "u1": "unified"},
    "pair": {"p0": "prefill", "d0": "decode"},
    "cross": {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"},
    "foreign": {"p0": "prefill", "px": "prefill", "d0": "decode"},
}


class Settings:
    """What a seed decides. Every third seed has calm weather; the policies take turns."""

    def __init__(self, seed: int) -> None:
        self.roles = ROLES[("unified", "pair", "cross", "cross", "foreign")[seed % 5]]
        self.faults = Faults()
        self.flips = self.crashes = False
        self.faults_of_model = 0.0
        self.swaps = seed % 2 == 1 and self.roles is ROLES["unified"]
        """Whether an instance may come back with other weights."""
        self.switches = self.roles is ROLES["cross"]
        """Roles change, and instances drain and are restarted, while people ask."""
        if seed % 3:
            self.faults = Faults(lose=0.01, late=0.01, double=0.01, drag=0.1, rot_per_s=8.0)
            self.flips = seed % 3 == 1
            self.crashes = seed % 3 == 2
            self.faults_of_model = 0.002
        self.num_blocks = (32, 18)[seed // 3 % 2]
        """The longest request takes 16."""
        self.num_slots = 0
        """Of states; 0: a model without."""
        self.pace = 1.0
        """Multiplies how often something breaks or is changed."""
        self.num_asked_again, self.num_prefixes_again = 4, 3
        """Prompts that are asked again when all is whole, and beginnings of prompts."""
        self.tiers = TierConfig(
            write=("write_through", "on_evict")[seed % 2],
            prefetch=("timeout", "wait", "timeout", "wait", "best_effort")[seed // 2 % 5],
            decision=("auto", "load")[seed // 2 % 2],
            lookup_timeout_ms=200,
            load_deadline_ms=1500,
            staging_blocks=(8, 2)[seed // 7 % 2],
        )


class KvWorld(StoreWorld):
    """Made inside a ``VirtualLoop``. What is wrong is in ``violations`` at the end."""

    def __init__(self, seed: int, settings: Settings) -> None:
        super().__init__(seed, STORE, Faults())
        self.settings = settings
        self.tiers = settings.tiers
        self.flips = False
        self.faults_of_model = 0.0
        self.context = contextvars.copy_context()
        """Of the server, and of the world itself."""
        self.instances, self.children, self.listeners, self.clients = {}, {}, {}, []
        self.streams: list = []
        self.asked: list[list[int]] = []
        self.count = itertools.count()
        self.ends: collections.Counter[str] = collections.Counter()
        self.num_loaded = self.num_read = self.num_evicted = 0
        self.network.loop.set_exception_handler(self._note_failure)

    def _note_failure(self, loop, context) -> None:
        if "handle" in context:
            self.violations.append(f"{context['message']}: {context['exception']!r}")

    @property
    def cluster(self) -> ClusterClient:
        """Whom people ask."""
        return self._cluster

    # Processes.

    def draw_weights(self, spec) -> str:
        if self.settings.swaps:
            return self.random.choice((WEIGHTS, FOREIGN))
        return FOREIGN if spec.name == "px" else WEIGHTS

    def kill(self, process) -> None:
        super().kill(process)
        listener = self.listeners.get(process.name)
        if listener is not None and listener.process is process:
            del self.listeners[process.name]
            listener.break_all()
        child = self.children.pop(process.instance_id, None)
        if child is not None:
            self.count_work(child.instance)
            for client in [each for each in self.clients if each.process is process]:
                client.end("killed")
            child.exited.set()

    def stop(self, process, seconds: float) -> None:
        """As SIGSTOP does; whoever waits for it for long gives it up."""
        process.stall_until(process.loop.now_s + seconds)
        for client in list(self.clients):
            if client.process is process:
                self.network.spawn(client.lose_silent())
        for session in self.sessions:
            if process in (session.near, session.far):
                self.network.spawn(self.lose_silent(session))

    def stall(self, process) -> None:
        self.stop(process, self.random.uniform(4, 12))

    # The run.

    async def run(self, num_requests: int) -> None:
        self.start_master()
        for name in HOSTS:
            self.start_host(name, CAPACITY)
        await asyncio.sleep(2)
        await self.serve(num_requests)

    async def serve(self, num_requests: int) -> None:
        """Start what serves, and let people ask; whole again at the end."""
        specs = [
            InstanceSpec(
                name=name, role=role, model=ModelConfig(path="chain"), engine=ENGINE,
                rpc=RpcConfig(), transfer=TransferConfig(),
            )
            for name, role in self.settings.roles.items()
        ]  # fmt: skip
        config = ClusterConfig(lease_s=LEASE_S, recovery_s=20.0, max_attempts=8)
        self._cluster = ClusterClient(specs, config, make_launcher=lambda: SimLauncher(self))
        async with self.cluster:
            await self.cluster.wait_ready()
            await self.trouble(num_requests)
            await self.recover()

    async def trouble(self, num_requests: int) -> None:
        settings = self.settings
        self.faults, self.flips = settings.faults, settings.flips
        self.faults_of_model = settings.faults_of_model
        background = [asyncio.ensure_future(self.rot())]
        if settings.crashes:
            background.append(asyncio.ensure_future(self.strike()))
        if settings.switches:
            background.append(asyncio.ensure_future(self.switch()))
        self.prefixes = [self.draw_tokens(20) for _ in range(3)]
        await asyncio.gather(*(self.converse(num_requests // 4) for _ in range(4)))
        for task in background:
            task.cancel()
        for name, role in settings.roles.items():
            await self.cluster.set_role(name, role)
            await self.cluster.drain(name, is_draining=False)
        self.faults, self.flips, self.faults_of_model = Faults(), False, 0.0

    async def switch(self) -> None:
        """Change what instances are for, and renew one now and then."""
        while True:
            await asyncio.sleep(self.random.uniform(0.2, 3.0))
            name = self.random.choice(list(self.settings.roles))
            if self.random.random() < 0.2:
                self.ends["restart"] += 1
                await self.cluster.restart(name, patience_s=self.random.choice((0.1, 20.0)))
            else:
                self.ends["switch"] += 1
                role = self.random.choice(("unified", "prefill", "decode"))
                await self.cluster.set_role(name, role)

    async def recover(self) -> None:
        """The faults are over: all is whole again in time, and nothing is kept."""
        await asyncio.sleep(max(0.0, self.network.loop.stalled_until_s - self.clock.now_s()))
        self.cuts.clear()
        for name in HOSTS:
            if name not in self.hosts:
                self.start_host(name, CAPACITY)
        if self.master_process is None:
            self.start_master()
        await asyncio.sleep(WHOLE_IN_S)
        self.check_whole(may_store=True)
        await self.wait_stored()
        fallbacks = sum(self.cluster.fallbacks.values())
        for instance in self.instances.values():
            instance.engine.flush_cache()  # Of the device alone: what is stored is asked for.
        count = min(self.settings.num_asked_again, len(self.asked))
        asked = self.random.sample(self.asked, count)
        await asyncio.gather(*(self.ask(prompt, 2, must_work=True) for prompt in asked))
        await self.flush_all()
        for prefix in self.prefixes[: self.settings.num_prefixes_again]:
            # Together: they share what they load and read.
            await asyncio.gather(*(self.ask(prefix, 6, must_work=True) for _ in range(2)))
        if sum(self.cluster.fallbacks.values()) > fallbacks:
            self.violations.append(f"fallbacks without a fault: {self.cluster.fallbacks}")
        await self.flush_all()
        end_s = self.clock.now_s() + STORE_S
        process, client = self.start_client("checker")
        # Judge one answer: a host whose answer to a join was lost among the last faults joins once
        # more when its call times out, and counts as full until it has.
        while (left := await self.list_stored(process, client)) and self.clock.now_s() < end_s:
            await asyncio.sleep(1.0)
        self.check_whole()
        self.violations += left
        for child in self.children.values():
            self.count_work(child.instance)

    def count_work(self, instance) -> None:
        self.num_loaded += instance.tier.counters.loaded_blocks
        self.num_evicted += instance.engine.get_stats().evicted_tokens
        if instance.reader is not None:
            self.num_read += instance.reader.counters.peer_read_blocks

    async def flush_all(self) -> None:
        """Single messages to the store were lost, so it may have to wait for some deadlines."""
        for _ in range(5):
            with contextlib.suppress(TandemError):
                await self.cluster.flush_cache()
                return
            await asyncio.sleep(4)
        self.violations.append("the store does not come back")

    async def wait_stored(self) -> None:
        """Let puts end that wait for a host whose last message was lost; each has a deadline.

        The host asks again when its call is given up; until then the store cannot know what it has.
        """
        end_s = self.clock.now_s() - WHOLE_IN_S + CALL_TIMEOUT_S + STORE.deadline_ms / 1e3
        while self.clock.now_s() < end_s:
            if not any(instance.is_storing for instance in self.instances.values()):
                break
            await asyncio.sleep(0.1)
        self.check_whole()

    def check_whole(self, *, may_store: bool = False) -> None:
        for status in self.cluster.instances:
            sources = {n for n, role in self.settings.roles.items() if role == "prefill"} - {"px"}
            wanted = sources if status.role == "decode" else set()
            # It may also read what was a prefill instance for a while.
            is_linked = (
                wanted <= set(status.sources)
                if self.settings.switches
                else (wanted == set(status.sources))
            )
            if status.stage.stage != "ready" or not is_linked:
                self.violations.append(f"{status.name} is not whole: {status}")
        for name, instance in self.instances.items():
            if kept := instance.list_kept(may_store=may_store):
                self.violations.append(f"{name} keeps {', '.join(kept)}")
        if self.cluster.num_live:
            self.violations.append(f"{self.cluster.num_live} requests live")
        for stream in self.streams:
            if not stream._queue.empty():  # Nobody has left this one.
                self.violations.append(f"{stream._request_id} has an output after its end")
        self.streams.clear()

    async def list_stored(self, process, client) -> list[str]:
        """All that was stored has been flushed: what is left of it."""
        if self.settings.swaps:
            # What was stored for weights that no instance has now is nobody's to flush.
            for model in (WEIGHTS, FOREIGN):
                identity = make_identity(model, has_states=bool(self.settings.num_slots))
                prefix = make_object_key(identity.digest.hex(), b"")
                await process.spawn(client.remove_prefix(prefix))
        status = await process.spawn(client.status())
        left: list[str] = []
        if status.num_objects or status.num_unfinished:
            left.append(f"the store keeps {status}")
        for host in status.hosts:
            if host.used_bytes or host.quarantined_bytes or host.num_objects:
                left.append(f"{host.name} keeps {host}")
        for name, segment in self.segments.items():
            if headers := list(segment.scan()):
                left.append(f"headers left in {name}: {headers[:3]}")
        return left

    def draw_tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCAB) for _ in range(count)]

    async def converse(self, num_turns: int) -> None:
        """Turns that build on each other."""
        prompt: list[int] = []
        for _ in range(num_turns):
            await asyncio.sleep(self.random.expovariate(5))
            if not prompt or len(prompt) > 40:
                prompt = [*self.random.choice(self.prefixes), *self.draw_tokens(3)]
            chance = self.random.random()
            if chance < 0.05:
                with contextlib.suppress(TandemError):
                    await self.cluster.flush_cache()
            elif chance < 0.2:
                self.instances[self.random.choice(sorted(self.instances))].engine.flush_cache()
            self.asked.append(prompt)
            answer = await self.ask(prompt, self.random.randrange(1, 9))
            if answer is not None:
                prompt = [*prompt, *answer, *self.draw_tokens(2)]

    async def ask(self, prompt: list[int], num_tokens: int, *, must_work: bool = False):
        """One request, to its end; what it answers is checked."""
        request = AddRequest(
            request_id=f"r{next(self.count)}",
            prompt_ids=list(prompt),
            sampling=SamplingParams(max_tokens=num_tokens, seed=self.random.randrange(3)),
            timeout_s=REQUEST_LIMIT_S,
        )
        is_impatient = not must_work and self.random.random() < 0.1
        try:
            async with asyncio.timeout(REQUEST_LIMIT_S + GRACE_S):
                reason, tokens = await self.read_answer(request, is_impatient=is_impatient)
        except TimeoutError:
            self.violations.append(f"{request.request_id} does not end")
            return None
        self.ends[reason] += 1
        if reason == FinishReason.DEADLINE:
            self.violations.append(f"{request.request_id} waits longer than any fault lasts")
        # Of one model from the first token to the last, whichever that is.
        has_foreign = self.settings.swaps or "px" in self.settings.roles
        rights = [
            continue_prompt(
                model,
                prompt,
                num_tokens,
                request.sampling.seed,
                has_states=bool(self.settings.num_slots),
            )
            for model in (WEIGHTS, FOREIGN)[: 1 + has_foreign]
        ]
        is_whole = reason == FinishReason.LENGTH and tokens in rights
        is_cut = reason != FinishReason.LENGTH and any(r[: len(tokens)] == tokens for r in rights)
        is_calm = must_work or not self.settings.faults.late
        if not is_whole and (not is_cut or (is_calm and not is_impatient)):
            self.violations.append(f"{request.request_id}: {reason} {tokens}, {rights} is right")
        return tokens if is_whole else None

    async def read_answer(self, request: AddRequest, *, is_impatient: bool, cluster=None):
        tokens: list[int] = []
        try:
            stream = await (cluster or self.cluster).submit(request)
        except TandemError as error:
            return f"refused: {error.code}", tokens
        self.streams.append(stream)
        leave_at_s = asyncio.get_running_loop().time() + self.random.uniform(0, 0.4)
        async for output in stream:
            tokens += output.token_ids
            if output.finish_reason is not None:
                return output.error_code or output.finish_reason, tokens
            if is_impatient and asyncio.get_running_loop().time() > leave_at_s:
                await stream.cancel()
                self.streams.remove(stream)
                return "left", tokens
        self.violations.append(f"{request.request_id} ends in silence")
        return "silence", tokens

    # What breaks.

    async def strike(self) -> None:
        """Kill, stop and cut off, now and then."""
        while True:
            await asyncio.sleep(self.random.expovariate(0.7 * self.settings.pace))
            kind = self.random.choice(("host", "master", "kill", "kill", "stop", "pause", "cut"))
            match kind:
                case "host":
                    name = self.random.choice(HOSTS)
                    self.kill_host(name)
                    await asyncio.sleep(self.random.uniform(0, 3))
                    self.start_host(name, CAPACITY)
                case "master":
                    self.kill_master()
                    await asyncio.sleep(self.random.uniform(0, 3))
                    self.start_master()
                case "kill":
                    self.kill(self.choose_instance())
                case "stop":
                    self.stall(self.choose_instance())
                case "pause":
                    self.stop(self.choose_instance(), self.random.uniform(0.05, 2.5))
                case "cut":
                    names = [*self.settings.roles, "master"]
                    mend = self.cut_off(self.random.choice((*HOSTS, *self.settings.roles)), names)
                    await asyncio.sleep(self.random.uniform(0, 5))
                    mend()

    def choose_instance(self):
        return self.instances[self.random.choice(sorted(self.instances))].process

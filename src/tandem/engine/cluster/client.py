"""The server's client for all instances: it starts and watches them, and sends them requests.

The same code serves a single instance, as a cluster of one. All code runs on one event loop.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Self

import msgspec

from tandem import _native
from tandem.conductor.admission import Admission
from tandem.conductor.conductor import Conductor
from tandem.conductor.journal import JournalingConductor
from tandem.conductor.policies.policy import Policy
from tandem.conductor.policies.table import make_policy
from tandem.conductor.role_balance import ROLE_LOOK_S
from tandem.core.adapter import AdapterInfo, AdapterSource
from tandem.core.errors import (
    ConfigError,
    ConflictError,
    NotFoundError,
    PeerLostError,
    TandemError,
    UnsupportedError,
)
from tandem.core.instance_status import (
    ExpertCounts,
    InstanceRole,
    InstanceStats,
    InstanceStatus,
    Statistics,
    sum_stats,
)
from tandem.core.timeline import InstanceTimeline, TimelineQuery
from tandem.core.wire import (
    AddRequest,
    Empty,
    InstanceInfo,
    InstanceStage,
    StageChanged,
)
from tandem.engine.bounded_file import BoundedFile
from tandem.engine.cluster.adapters import ClusterAdapters
from tandem.engine.cluster.config import ClusterConfig
from tandem.engine.cluster.dispatcher import Dispatcher
from tandem.engine.cluster.member import ClusterMember
from tandem.engine.cluster.placing import describe_candidate
from tandem.engine.cluster.request_states import Limits
from tandem.engine.config import KvEventConfig
from tandem.engine.process.instance import InstanceSpec
from tandem.engine.process.launcher import Launcher
from tandem.engine.process.methods import EXPERTS, FLUSH_CACHE, STATS, TIMELINES
from tandem.engine.process.output_stream import OutputStream
from tandem.placement.cores import divide_cores
from tandem.transfer.config import TransferConfig

__all__ = ["ClusterClient", "make_specs"]

logger = logging.getLogger(__name__)

MAX_JOURNAL_BYTES = 1 << 30
DRAIN_S = 30.0
"""Seconds that the running requests of an instance may take to end before it is restarted or
removed.
"""
IDLE_LOOK_S = 0.05
STATS_TIMEOUT_S = 1.5
"""Time-out of one instance's statistics, seconds; an instance that exceeds it is left out of the
sum.
"""


def make_specs(config: ClusterConfig, common: InstanceSpec) -> list[InstanceSpec]:
    """Return the instances of a cluster on this machine.

    Args:
        config: the number of instances of each role.
        common: settings of all instances.

    Raises: ConfigError (prefill and decode without a prefix cache).
    """
    hands_over = bool(config.prefill or config.decode)
    if not hands_over and config.num_instances == 1:
        # Admission predicts the time of a prompt by what of it is cached.
        return [msgspec.structs.replace(common, tells_blocks=config.admission != "none")]
    if hands_over and not common.engine.prefix_cache:
        raise ConfigError(
            "cluster.configure",
            "prefill and decode instances need the prefix cache, where blocks that were read wait "
            "for their request: leave engine.prefix_cache on, or serve with --unified",
            field="engine.prefix_cache",
        )
    counts: tuple[tuple[str, InstanceRole, int], ...] = (
        ("prefill", "prefill", config.prefill),
        ("decode", "decode", config.decode),
        ("instance", "unified", config.unified),
    )
    roles = [(f"{name}-{i}", role) for name, role, count in counts for i in range(count)]
    cores = _native.read_topology().cores
    shares = divide_cores(cores, len(roles))
    if len(roles) > len(cores):
        logger.warning(
            "event=cores_shared instances=%d cores=%d: instances on one core wait for each other; "
            "for speed lower cluster.prefill, cluster.decode or cluster.unified",
            len(roles),
            len(cores),
        )
    # Both ends of each connection between instances of this run authenticate with this secret.
    transfer = common.transfer
    if hands_over and transfer is None:
        transfer = TransferConfig(secret=secrets.token_urlsafe(32))
    return [
        msgspec.structs.replace(
            common,
            name=name,
            role=role,
            cores=cores,
            transfer=transfer if hands_over else None,
            num_siblings=len(roles),
            tells_blocks=True,
            kv_events=_offset_events(common.kv_events, index),
        )
        for index, ((name, role), cores) in enumerate(zip(roles, shares, strict=True))
    ]


def _offset_events(config: KvEventConfig, index: int) -> KvEventConfig:
    """Give each instance its own addresses for KV events, as vLLM does for its ranks: the
    configured port plus the instance's index.
    """
    return msgspec.structs.replace(
        config,
        endpoint=_offset_endpoint(config.endpoint, index),
        replay_endpoint=_offset_endpoint(config.replay_endpoint, index),
    )


def _offset_endpoint(endpoint: str, index: int) -> str:
    if not endpoint or not index:
        return endpoint
    head, separator, port = endpoint.rpartition(":")
    if separator and port.isdecimal() and int(port):
        return f"{head}:{int(port) + index}"
    return f"{endpoint}-{index}"


class ClusterClient:
    """An ``EngineClient`` of several instances. An async context manager; entering starts them.

    Args:
        specs: settings of the instances; see ``make_specs``.
        config: settings of the cluster: how long requests wait for an instance, and how often they
            are retried.
        policy: chooses instances for a request; None: the one that ``config`` names.
        on_stage: called with every change of stage and every step of progress of any instance.
        is_staggered: True to start the first instance alone until it serves. The others then map
            the file of packed weights that it has written, instead of packing the weights
            themselves.
        make_launcher: creates the launcher that starts an instance; called once per instance. None
            in a class that makes its members otherwise.
        prefix: prefix of the names given to instances that are added later.
        is_asleep: True to start no instance before ``wake`` is called.
        tag: see ``Dispatcher``.
    """

    def __init__(
        self,
        specs: list[InstanceSpec],
        config: ClusterConfig,
        *,
        policy: Policy | None = None,
        on_stage: Callable[[StageChanged], None] | None = None,
        is_staggered: bool = False,
        make_launcher: Callable[[], Launcher] | None = None,
        prefix: str = "",
        is_asleep: bool = False,
        tag: str = "",
    ) -> None:
        self._begins_asleep = is_asleep
        self.gate: Callable[[], AbstractAsyncContextManager[None]] | None = None
        """Function that makes the context manager which each request enters before it is sent to an
        instance, such as one that waits for a sleeping model to wake; None: requests are sent at
        once.
        """
        self._prefix = prefix
        self._on_stage = on_stage
        self._is_staggered = is_staggered and len(specs) > 1
        self._make_launcher = make_launcher
        self._specs = specs
        self._num_added = 0
        self._members = [self._make_member(spec) for spec in specs]
        self._journal: BoundedFile | None = None
        self._dispatcher = Dispatcher(
            self._members,
            self._make_conductor(config, policy),
            Limits(config.lease_s, config.recovery_s, config.max_attempts),
            max_history=specs[0].engine.timelines,
            tag=tag,
        )
        self._sources = specs[0].adapters
        self._adapters = ClusterAdapters(
            self._members, self._dispatcher.count_live, specs[0].model.max_adapters
        )
        self._dispatcher.on_end = self._adapters.note_end
        self._starting: asyncio.Task[None] | None = None
        self._is_balanced = config.roles == "load"
        self._balancing: asyncio.Task[None] | None = None
        self.num_role_switches = 0
        """Number of role changes that the conductor asked for."""
        self._entered: list[ClusterMember] = []
        self._dropping: dict[ClusterMember, asyncio.Task[None]] = {}
        """Instances that are leaving the cluster, each with the task that ends it."""
        self._was_ready = False
        self._last_info: InstanceInfo | None = None

    def _make_conductor(self, config: ClusterConfig, policy: Policy | None) -> Conductor:
        if not config.journal:
            made = make_policy(config.policy) if policy is None else policy
            return Conductor(made, Admission(config.admission))
        self._journal = BoundedFile(
            Path(config.journal),
            MAX_JOURNAL_BYTES,
            name="conductor_journal",
            field="cluster.journal",
            flushes=False,
        )
        return JournalingConductor(config.policy, config.admission, self._journal.write, policy)

    def _make_member(self, spec: InstanceSpec) -> ClusterMember:
        assert self._make_launcher is not None, "who starts instances is given launchers"
        return ClusterMember(
            spec,
            on_change=self._note_change,
            on_stage=self._show_stage,
            launcher=self._make_launcher(),
            is_asleep=self._begins_asleep,
        )

    async def __aenter__(self) -> Self:
        self._starting = asyncio.create_task(self._start())
        if self._is_balanced:
            self._balancing = asyncio.create_task(self._keep_balanced())
        return self

    async def __aexit__(self, *details: object) -> None:
        if self._balancing is not None:
            self._balancing.cancel()
            await asyncio.gather(self._balancing, return_exceptions=True)
        dropping = list(self._dropping.values())
        for task in dropping:
            task.cancel()
        await asyncio.gather(*dropping, return_exceptions=True)
        await self._adapters.close()
        await self._dispatcher.close()
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        # Close all members concurrently: a stuck process may take each of them seconds.
        closing = [member.__aexit__(None, None, None) for member in self._entered]
        await asyncio.gather(*closing, return_exceptions=True)
        if self._journal is not None:
            self._journal.close()

    async def _start(self) -> None:
        first, *others = self._members
        await self._enter(first)
        if self._is_staggered:
            await self._wait_or_fail(first)
        for member in others:
            await self._enter(member)
        await self._wait_serving()
        self._adapters.begin(self._sources)
        for member in self._members:
            await member.wait_linked()
        self._was_ready = True
        self._last_info = self.info
        self._report(StageChanged(InstanceStage.READY))

    async def _wait_serving(self) -> None:
        """Wait until all instances serve."""
        for member in self._members:
            await self._wait_or_fail(member)

    async def _enter(self, member: ClusterMember) -> None:
        await member.__aenter__()
        self._entered.append(member)

    @property
    def info(self) -> InstanceInfo | None:
        """Facts about the serving instance with the shortest context limit; None until all have
        served once.

        The shortest limit is the safe one to report, because a request may be sent to any instance.
        """
        if not self._was_ready:
            return None
        infos = [member.info for member in self._members if member.info is not None]
        return min(infos, key=lambda info: info.max_model_len, default=None)

    @property
    def last_info(self) -> InstanceInfo | None:
        """Facts of the instance that serves, or of the one that served last; None before the
        first.
        """
        return self._last_info

    @property
    def stage(self) -> StageChanged:
        """``READY`` while any instance serves, after all have served once; before that, the stage
        of the slowest instance.
        """
        stages = [member.stage for member in self._members]
        if self._was_ready and self.info is not None:
            return StageChanged(InstanceStage.READY)
        for wanted in (
            InstanceStage.FAILED,
            InstanceStage.STARTING,
            InstanceStage.LOADING,
            InstanceStage.SLEEPING,
        ):
            for member, stage in zip(self._members, stages, strict=True):
                if stage.stage is wanted:
                    return self._name_stage(member, stage)
        return stages[0] if self._was_ready else StageChanged(InstanceStage.LOADING, "connecting")

    @property
    def instances(self) -> list[InstanceStatus]:
        """Every instance and its state."""
        return [self._describe(member) for member in self._members]

    def _describe(self, member: ClusterMember) -> InstanceStatus:
        last = Statistics() if member.info is None else member.stats_history.last
        return InstanceStatus(
            name=member.name,
            role=member.role,
            stage=member.stage,
            pid=member.supervisor.pid,
            num_restarts=member.supervisor.num_restarts,
            is_draining=self._dispatcher.conductor.is_draining(member.name),
            step_error=self._dispatcher.conductor.get_step_error(member.name),
            step_costs=self._dispatcher.conductor.get_step_costs(member.name),
            sources=sorted(member.sources),
            refusals=dict(member.refusals),
            num_running=last.num_running,
            num_waiting=last.num_waiting,
            num_loading=last.num_loading,
            num_blocks=last.num_blocks,
            num_used_blocks=last.num_used_blocks,
            num_cached_blocks=last.num_cached_blocks,
        )

    @property
    def fallbacks(self) -> dict[str, int]:
        """Number of times since start that requests moved to another instance because of a failure,
        by reason.
        """
        return dict(self._dispatcher.fallbacks)

    @property
    def margins(self) -> dict[str, float]:
        """Safety factors by which the conductor's admission multiplies predicted times, by kind of
        time: ``ttft`` (time to first token) and ``tpot`` (time per output token).
        """
        now_s = asyncio.get_running_loop().time()
        admission = self._dispatcher.conductor.admission
        return {
            "ttft": admission.ttft.get_factor(now_s),
            "tpot": admission.tpot.get_factor(now_s),
        }

    @property
    def num_live(self) -> int:
        """Number of requests that have not ended."""
        return self._dispatcher.num_live

    async def wait_ready(self) -> InstanceInfo:
        """Wait until all instances serve and can read each other.

        Raises: PeerLostError (one cannot serve at all; says why).
        """
        assert self._starting is not None, "enter it first"
        await asyncio.shield(self._starting)
        info = self.info
        if info is None:
            raise PeerLostError("engine.start", "an instance died right after it had started")
        return info

    async def _wait_or_fail(self, member: ClusterMember) -> None:
        try:
            await member.supervisor.wait_ready()
        except PeerLostError as error:
            if len(self._members) == 1:
                raise
            raise PeerLostError("engine.start", f"{member.name}: {error.what}") from error

    async def submit(self, request: AddRequest) -> OutputStream:
        """Queue a request; see ``tandem.server.engine.EngineClient.submit``."""
        if self.gate is None:
            return await self._dispatcher.submit(request)
        async with self.gate():
            return await self._dispatcher.submit(request)

    async def stats(self) -> InstanceStats:
        """Return the summed statistics of all instances; raises PeerLostError if none answers."""
        asked = [member for member in self._members if member.info is not None]
        if not asked:
            raise PeerLostError("engine.stats", "no instance serves")
        runs = [member.ref.incarnation for member in asked]
        answers = await asyncio.gather(*(_ask(m) for m in asked), return_exceptions=True)
        parts: list[InstanceStats] = []
        for member, run, answer in zip(asked, runs, answers, strict=True):
            if isinstance(answer, InstanceStats):
                parts.append(member.stats_history.note(run, answer))
            elif isinstance(answer, TandemError | TimeoutError):
                parts.append(member.stats_history.recall())
            else:
                raise answer
        if all(isinstance(answer, BaseException) for answer in answers):
            raise PeerLostError("engine.stats", "no instance answers")
        parts += [m.stats_history.recall() for m in self._members if m not in asked]
        return sum_stats(self.stage.stage, parts)

    async def list_timelines(self, request_ids: list[str]) -> list[InstanceTimeline]:
        """Return the timelines of requests, one for each instance that a request was sent to.

        Raises: PeerLostError (none of the instances that served them can be reached).
        """
        legs = {
            leg.leg_id: (request_id, leg)
            for request_id in request_ids
            for leg in self._dispatcher.list_legs(request_id)
        }
        by_name: dict[str, list[str]] = {}
        for leg_id, (_, leg) in legs.items():
            by_name.setdefault(leg.instance, []).append(leg_id)
        asked = [m for m in self._members if m.name in by_name and m.info is not None]
        if by_name and not asked:
            raise PeerLostError("engine.timelines", "the instances of these requests are down")
        answers = await asyncio.gather(
            *(m.call(TIMELINES, TimelineQuery(request_ids=by_name[m.name])) for m in asked),
            return_exceptions=True,
        )
        known: dict[str, InstanceTimeline] = {}
        for answer in answers:
            if isinstance(answer, list):
                known |= {each.request_id: each for each in answer}
            elif not isinstance(answer, TandemError):
                raise answer
        found = [
            msgspec.structs.replace(known[leg_id], request_id=request_id, sent_s=leg.sent_s)
            for leg_id, (request_id, leg) in legs.items()
            if leg_id in known
        ]
        return self._add_predictions(found)

    def _add_predictions(self, found: list[InstanceTimeline]) -> list[InstanceTimeline]:
        """Add to each request's first timeline what the conductor predicted for the instances it
        compared, and the real time to the first token.
        """
        seen: set[str] = set()
        told: list[InstanceTimeline] = []
        for each in found:
            choice = self._dispatcher.find_choice(each.request_id)
            if choice is None or each.request_id in seen:
                told.append(each)
                continue
            seen.add(each.request_id)
            considered = [describe_candidate(one) for one in choice.decision.considered]
            told.append(
                msgspec.structs.replace(
                    each, considered=considered, real_ttft_s=choice.first_token_s
                )
            )
        return told

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """The LoRA adapters that requests may ask for, by name."""
        return self._adapters.table

    async def load_adapter(self, source: AdapterSource) -> AdapterInfo:
        """Load an adapter on every instance; see ``EngineClient.load_adapter``."""
        return await self._adapters.load(source)

    async def unload_adapter(self, name: str) -> AdapterInfo:
        """Stop accepting requests for an adapter; see ``EngineClient.unload_adapter``."""
        return await self._adapters.unload(name)

    # The methods below end the processes of idle instances, and start them again.

    async def sleep(self) -> None:
        """End the processes of all instances once no request is live, keeping what makes the next
        start fast.

        The caller must submit no requests meanwhile.
        """
        while self.num_live:
            await asyncio.sleep(IDLE_LOOK_S)
        await asyncio.gather(*(member.supervisor.sleep() for member in self._members))

    async def evict(self) -> None:
        """Discard the mapped weights, which ``sleep`` has kept for a fast start."""
        await asyncio.gather(*(member.supervisor.evict() for member in self._members))

    async def wake(self) -> InstanceInfo:
        """Start the processes of all instances; returns when they serve.

        Raises: PeerLostError (one cannot serve at all; says why).
        """
        self._begins_asleep = False
        waking = [asyncio.create_task(member.supervisor.wake()) for member in self._members]
        try:
            if self._was_ready:
                await asyncio.gather(*waking)
            # On the first start do not await the tasks that start the members: ``wait_ready``
            # reports failed starts, and members whose start is staggered have not begun yet.
            return await self.wait_ready()
        finally:
            for task in waking:
                task.cancel()
            await asyncio.gather(*waking, return_exceptions=True)

    # The methods below change, replace, add and remove single instances.

    async def set_role(self, name: str, role: InstanceRole) -> None:
        """Change the role of an instance while it serves; requests that it has begun continue
        there.

        Raises: NotFoundError (no instance of this name); UnsupportedError (the instances of this
            cluster cannot read each other's KV blocks).
        """
        member = self._find(name)
        if role != "unified" and member.spec.transfer is None:
            raise UnsupportedError(
                "cluster.set_role",
                "the instances of this server do not read each other's KV: start it with --prefill "
                "and --decode",
                field="role",
            )
        logger.info("event=role_switch instance=%s from=%s to=%s", name, member.role, role)
        member.set_role(role)
        self._note_change(member)
        for other in self._members:
            # Update the links of every other instance: with the new role, the changed instance may
            # have to read other instances' KV blocks, or be read by them.
            self._note_change(other)

    async def _keep_balanced(self) -> None:
        """Carry out the role changes (prefill, decode) that the conductor proposes, until
        cancelled; a change that fails is retried later.
        """
        while True:
            await asyncio.sleep(ROLE_LOOK_S)
            now_s = asyncio.get_running_loop().time()
            change = self._dispatcher.conductor.find_role_change(now_s)
            if change is None:
                continue
            logger.info("event=role_due instance=%s reason=%s", change.instance, change.reason)
            try:
                await self.set_role(change.instance, change.role)
                self.num_role_switches += 1
            except TandemError as error:
                logger.warning("event=role_kept instance=%s reason=%s", change.instance, error.what)

    async def drain(self, name: str, *, is_draining: bool = True) -> None:
        """Stop or resume sending new requests to an instance; return at once.

        Raises: NotFoundError (no instance of this name).
        """
        self._find(name)
        self._dispatcher.set_draining(name, is_draining=is_draining)

    async def restart(self, name: str, *, patience_s: float = DRAIN_S) -> None:
        """Replace the process of an instance by a new one after its requests have ended.

        Args:
            name: name of the instance.
            patience_s: seconds after which requests that have not ended continue on other
                instances.

        Raises: NotFoundError (no instance of this name).
        """
        member = self._find(name)
        self._dispatcher.set_draining(name, is_draining=True)
        try:
            await self._wait_idle(name, patience_s)
            await member.supervisor.restart()
        finally:
            self._dispatcher.set_draining(name, is_draining=False)

    async def restart_all(self, *, patience_s: float = DRAIN_S) -> None:
        """Restart the instances one after the other, so that the others serve meanwhile."""
        for member in list(self._members):
            await self.restart(member.name, patience_s=patience_s)

    async def add_instance(self, role: InstanceRole) -> str:
        """Start one more instance; return its name when it serves.

        Raises: PeerLostError (the instance cannot serve and is not added); errors of ``set_role``.
        """
        first = self._members[0].spec
        if role != "unified" and first.transfer is None:
            raise UnsupportedError(
                "cluster.add_instance", "start the server with --prefill and --decode", field="role"
            )
        self._num_added += 1
        name = f"{self._prefix}{'instance' if role == 'unified' else role}-x{self._num_added}"
        index = len(self._specs) + self._num_added
        spec = msgspec.structs.replace(
            first, name=name, role=role, kv_events=_offset_events(self._specs[0].kv_events, index)
        )
        member = self._make_member(spec)
        self._members.append(member)
        await self._enter(member)
        self._dispatcher.add_port(member)
        try:
            await member.supervisor.wait_ready()
        except BaseException:
            await self._drop(member)
            raise
        return name

    async def remove_instance(self, name: str, *, patience_s: float = DRAIN_S) -> None:
        """End an instance permanently after its requests have ended or moved to other instances.

        Raises: NotFoundError (no instance of this name); ConflictError (it is the last one).
        """
        member = self._find(name)
        if len(self._members) == 1:
            raise ConflictError("cluster.remove_instance", f"{name} is the only instance")
        self._dispatcher.set_draining(name, is_draining=True)
        await self._wait_idle(name, patience_s)
        await self._drop(member)

    async def _drop(self, member: ClusterMember) -> None:
        """Remove an instance from the cluster; the removal continues even if the caller is
        cancelled.
        """
        task = self._dropping.get(member)
        if task is None:
            task = self._dropping[member] = asyncio.create_task(self._drop_wholly(member))
            task.add_done_callback(lambda _: self._dropping.pop(member))
        await asyncio.shield(task)

    async def _drop_wholly(self, member: ClusterMember) -> None:
        await member.__aexit__(None, None, None)
        self._entered.remove(member)
        # Requests on this instance have been told that it is lost, and move to other instances.
        await self._wait_idle(member.name, DRAIN_S)
        self._members.remove(member)
        self._dispatcher.remove_port(member.name)
        self._dispatcher.note_change()

    async def _wait_idle(self, name: str, patience_s: float) -> None:
        end_s = asyncio.get_running_loop().time() + patience_s
        while self._dispatcher.count_at(name) and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(IDLE_LOOK_S)

    def _find(self, name: str) -> ClusterMember:
        for member in self._members:
            if member.name == name:
                return member
        names = ", ".join(member.name for member in self._members)
        raise NotFoundError("cluster.find", f"there is no instance {name!r}: {names}", field="name")

    async def read_expert_counts(self) -> ExpertCounts:
        """Return how often each expert was chosen, summed over all instances.

        Raises: PeerLostError (a serving instance did not answer).
        """
        asked = [member for member in self._members if member.info is not None]
        if not asked:
            raise PeerLostError("engine.read_experts", "no instance serves")
        told = await asyncio.gather(*(member.call(EXPERTS, Empty()) for member in asked))
        by_layer = zip(*(each.counts for each in told), strict=True)
        return ExpertCounts(
            layers=told[0].layers,
            num_tokens=sum(each.num_tokens for each in told),
            counts=[[sum(parts) for parts in zip(*layer, strict=True)] for layer in by_layer],
        )

    async def flush_cache(self) -> int:
        """Discard the prefix cache of every instance; return the number of KV blocks freed.

        Raises: PeerLostError (a serving instance did not answer).
        """
        asked = [member for member in self._members if member.info is not None]
        if not asked:
            raise PeerLostError("engine.flush_cache", "no instance serves")
        # Ask only instances that serve: one that is down restarts with an empty cache.
        return sum(await asyncio.gather(*(member.call(FLUSH_CACHE, Empty()) for member in asked)))

    # The methods below react when an instance changes its role or its stage.

    def _note_change(self, changed: ClusterMember) -> None:
        if self.info is not None:
            self._last_info = self.info
        for reader, source in self._list_pairs():
            if changed in (reader, source):
                reader.link(source)
        if changed.info is not None:
            self._adapters.note_serving(changed)
        self._dispatcher.note_change()

    def _list_pairs(self) -> Iterator[tuple[ClusterMember, ClusterMember]]:
        for reader in self._members:
            for source in self._members:
                if (reader.role, source.role) == ("decode", "prefill"):
                    yield reader, source

    def _show_stage(self, member: ClusterMember) -> None:
        stage = member.stage
        if stage.stage is InstanceStage.READY and not self._was_ready and len(self._members) > 1:
            return  # The stage is only worth reporting until all instances serve.
        self._report(self._name_stage(member, stage))

    def _name_stage(self, member: ClusterMember, stage: StageChanged) -> StageChanged:
        if len(self._members) == 1:
            return stage
        return msgspec.structs.replace(stage, detail=f"{member.name}: {stage.detail}")

    def _report(self, stage: StageChanged) -> None:
        if self._on_stage is not None:
            self._on_stage(stage)


async def _ask(member: ClusterMember) -> InstanceStats:
    async with asyncio.timeout(STATS_TIMEOUT_S):
        return await member.call(STATS, Empty())

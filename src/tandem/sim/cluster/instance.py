"""A simulated instance: the product's scheduler, block pool and prefix index, with a model of step
times.

It performs the engine's loop: plan a step, let its time pass, complete it. Token values have no
meaning; all tokens of an answer are the same number. To keep a token cheap, a decode reports all
outputs between its first and its last at once; the time of each is recorded.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tandem.core.instance_status import InstanceRole
from tandem.core.loads.records import RequestRecord
from tandem.core.wire import (
    AddRequest,
    Continuation,
    ContinueRequest,
    FinishReason,
    InstanceLoad,
    KvHandle,
    RequestOutput,
    StepRecord,
    TierKv,
)
from tandem.engine.config import EngineConfig
from tandem.engine.groups.group import GroupBlock
from tandem.engine.scheduling.blocks import BlockPool
from tandem.engine.scheduling.plan import BlockLoad, StepPlan
from tandem.engine.scheduling.prefix_index import PrefixIndex
from tandem.engine.scheduling.request import Request
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.stepping.messages import Phase
from tandem.engine.tiers.planner import CostTierPlanner
from tandem.sim.cluster.events import Events
from tandem.sim.cluster.handovers import HandOver
from tandem.sim.cluster.links import Link, Links
from tandem.sim.cluster.steps import StepModel, StepWork
from tandem.sim.cluster.store import SimStore

__all__ = ["InstanceSetup", "SimInstance"]

TOLD_DECODES = 32
"""Number of steps without prefill of which one is reported to the conductor, after as many at the
beginning: an estimator takes longer to learn from a step than a scheduler to plan it.
"""

Put = Callable[[RequestOutput], None]


@dataclass(frozen=True, kw_only=True)
class InstanceSetup:
    """The parts and settings that a simulated instance is made from."""

    name: str
    role: InstanceRole
    engine: EngineConfig
    """Engine settings with ``num_kv_blocks`` and ``max_model_len`` resolved."""
    steps: StepModel
    block_bytes: int
    nic_bytes_per_s: float
    is_layerwise: bool = True
    num_layers: int = 1
    bus_bytes_per_s: float = 1e11


@dataclass(slots=True, eq=False)
class _Leg:
    """A request that is live on this instance, with the times of its tokens and the callback that
    gets its outputs.
    """

    request: Request
    times_s: list[float]
    """Times of the tokens of the request, on all its instances."""
    put: Put
    seed: int
    tokens: tuple[int, ...]
    """The token that every sample of this request is, as a tuple of one."""
    num_given: int = 0
    """Number of sampled tokens that were already reported to ``put``, the callback for outputs."""
    num_sampled: int = 0


class SimInstance:
    """A simulated instance, which runs the scheduler's steps in virtual time.

    Args:
       setup: its parts and settings.
       events: the clock.
       links: network that carries its blocks.
       find_instance: returns another instance by name.
       store: KV store in which it keeps full blocks and from which it loads them; None for none.
    """

    def __init__(
        self,
        setup: InstanceSetup,
        events: Events,
        links: Links,
        find_instance: Callable[[str], "SimInstance"],
        store: SimStore | None = None,
    ) -> None:
        config = setup.engine
        self.store = store
        self.tiers: CostTierPlanner | None = None
        if store is not None:
            self.tiers = CostTierPlanner(
                store.spec.tiers, block_size=config.block_size, block_bytes=setup.block_bytes
            )
        self.setup = setup
        self.name = setup.name
        self.role: InstanceRole = setup.role
        self.pool = BlockPool(config.num_kv_blocks)
        self.index = PrefixIndex(self.pool, config.block_size)
        self.scheduler = Scheduler(config, self.pool, self.index, self.tiers)
        self.ingress = Link(f"{setup.name}.in", setup.nic_bytes_per_s)
        self.egress = Link(f"{setup.name}.out", setup.nic_bytes_per_s)
        self.bus = Link(f"{setup.name}.bus", setup.bus_bytes_per_s)
        if store is not None:
            num_bytes = store.spec.tokens // config.block_size * setup.block_bytes
            self._segment = store.add_segment(num_bytes, self.egress, self.ingress, self.bus)
        self.block_bytes, self.num_layers = setup.block_bytes, setup.num_layers
        self.readers: dict[str, HandOver] = {}
        self.busy_s = 0.0
        self.prefill_s = 0.0
        """Seconds of steps spent on prompts; mixed steps count by the cost share of prompt tokens.
        """
        self.num_steps = 0
        self._events, self._links, self._find_instance = events, links, find_instance
        self._legs: dict[str, _Leg] = {}
        self._reading: dict[str, HandOver] = {}
        """Hand-overs that write into blocks of this instance, by the id of the request here."""
        self.is_load_new = True
        """True if the instance's load may have changed since it was last read; the reader sets this
        to False.
        """
        self._is_running = False
        self._is_called = False
        self._wake_s = math.inf
        self.on_step: Callable[[StepRecord], None] | None = None
        """Called at the start of a step with its predicted time: for every step with prefill, for
        the first ``TOLD_DECODES`` steps, and for one in as many of the others, which hardly differ.
        """

    # The methods below, up to ``num_live``, are those that a cluster calls on an instance.

    def add(
        self,
        message: AddRequest,
        record: RequestRecord,
        put: Put,
        token: int,
        keys: Sequence[bytes] = (),
    ) -> None:
        """Queue a request; ``put`` gets its outputs.

        Args:
           message: the request.
           record: receives the times of its tokens.
           put: called with its first and with its last output.
           token: the token that each of its samples is.
           keys: keys of its prompt's full blocks, if they are known already.

        Raises: the errors of ``Scheduler.add``.
        """
        now_s = self._events.now_s
        request = Request(
            request_id=message.request_id,
            prompt_ids=message.prompt_ids,
            sampling=message.sampling,
            arrival_s=now_s,
            priority=message.priority,
            deadline_s=None if message.timeout_s is None else now_s + message.timeout_s,
            client=message.client,
            cache_salt=message.cache_salt,
            kv_source=message.kv_source,
            prefill_lease_s=message.prefill_lease_s,
            awaits_continuation=message.awaits_continuation,
            num_stored_blocks=self._count_stored(message, keys),
            expected_len=message.expected_len,
        )
        request.prefix.block_keys += keys
        seed = message.sampling.seed or 0
        if message.continuation is not None:
            request.output_ids += message.continuation.token_ids
        self.scheduler.add(request)
        leg = _Leg(request, record.event_times_s, put, seed, (token,))
        self._legs[request.request_id] = leg
        self._call()

    def continue_request(self, message: ContinueRequest) -> bool:
        """Give a request the tokens that another instance sampled; see
        ``Scheduler.continue_request``.
        """
        tokens = message.continuation.token_ids
        is_taken = self.scheduler.continue_request(message.request_id, tokens)
        self._call()
        return is_taken

    def cancel(self, request_id: str) -> None:
        """Stop a request if it is live here; its remaining outputs are not reported."""
        leg = self._legs.pop(request_id, None)
        if leg is not None:
            self.scheduler.cancel(request_id)
            self._end_read(request_id)
            self._call()

    def release_hold(self, request_id: str) -> None:
        """Free the KV blocks of a finished prefill that are held until the decoding instance has
        read them, if there are any.
        """
        self.scheduler.release_hold(request_id)
        self._end_read(request_id)
        self._call()

    def _end_read(self, request_id: str) -> None:
        hand_over = self.readers.get(request_id)
        if hand_over is not None:
            hand_over.note_gone()

    def measure_load(self) -> InstanceLoad:
        """Return the load: the tokens and blocks that live requests need."""
        return self.scheduler.measure_load()

    @property
    def group_depth(self) -> int:
        """``InstanceInfo.group_depth``: 0, as a simulated scheduler keeps no windows and states."""
        return 0

    @property
    def num_live(self) -> int:
        """Number of requests on this instance that have not ended."""
        return len(self._legs)

    # The methods below load blocks: from the store, from slower tiers, and from other instances.

    def _count_stored(self, message: AddRequest, keys: Sequence[bytes]) -> int:
        """Return how many leading blocks of a prompt the device's prefix cache or the KV store
        holds.
        """
        if self.store is None or not isinstance(message.kv_source, TierKv):
            return 0
        wanted = keys[: (len(message.prompt_ids) - 1) // self.setup.engine.block_size]
        num_cached = self.index.count_cached_blocks(wanted)
        return num_cached + self.store.count_stored(self._segment, wanted[num_cached:])

    def _begin_tiers(self, plan: StepPlan) -> None:
        """Put KV blocks of a step's plan into the store: the newly filled ones or the evicted ones,
        as the setting ``tiers.write`` says.
        """
        store = self.store
        if store is None:
            return
        match store.spec.tiers.write:
            case "write_through":
                kept = plan.filled
            case "on_evict":
                kept = plan.evicted
            case "off":
                kept = []
        if kept:
            store.put(self._segment, [block.key for block in kept])

    def _note_loaded(self, begin_s: float, request: Request, loads: Sequence[BlockLoad]) -> None:
        assert self.tiers is not None, "a load without a store"
        self.tiers.note_load(len(loads) * self.block_bytes, self._events.now_s - begin_s)
        self.load_done(request, [load.block for load in loads])

    def _note_missing(self, request: Request, loads: Sequence[BlockLoad]) -> None:
        self.load_failed(request, [load.block for load in loads])

    def load_done(self, request: Request, blocks: Sequence[GroupBlock]) -> None:
        """Tell this instance's scheduler that these KV blocks of a request have arrived."""
        self.scheduler.load_done(request, blocks)
        self._call()

    def load_failed(self, request: Request, blocks: Sequence[GroupBlock]) -> None:
        """Tell this instance's scheduler that these KV blocks of a request will not arrive."""
        self.scheduler.load_failed(request, blocks)
        self._call()

    def end_reading(self, request_id: str) -> None:
        """Forget the hand-over (the transfer of a prompt's KV blocks to this instance) of a
        request, which has ended.
        """
        self._reading.pop(request_id, None)

    def _begin_loads(self, plan: StepPlan) -> None:
        for load in plan.dropped:
            hand_over = self._reading.get(load.request.request_id)
            if hand_over is not None:
                hand_over.drop(load)
        by_request: dict[Request, list[BlockLoad]] = {}
        for load in plan.loads:
            by_request.setdefault(load.request, []).append(load)
        for request, loads in by_request.items():
            if request.prefill_kv is None:
                assert self.store is not None, f"{request.request_id} loads from nowhere"
                done = partial(self._note_loaded, self._events.now_s)
                self.store.load(self._segment, loads, done, self._note_missing)
                continue
            source = self._find_instance(request.prefill_kv.instance)
            hand_over = HandOver(self, source, request, loads, self._events, self._links)
            self._reading[request.request_id] = hand_over
            hand_over.begin()

    # The methods below begin and end steps.

    def _call(self) -> None:
        """Have the instance look for work once all other callbacks of the current time have run."""
        self.is_load_new = True
        if not self._is_called and not self._is_running:
            self._is_called = True
            self._events.call_at(self._events.now_s, self._look)

    def _look(self) -> None:
        self._is_called = False
        if not self._is_running:
            self._begin_step()

    def _ring(self, when_s: float) -> None:
        if when_s == self._wake_s:
            self._wake_s = math.inf
            self._call()

    def _begin_step(self) -> None:
        self.is_load_new = True
        now_s = self._events.now_s
        scheduler = self.scheduler
        while True:
            plan = scheduler.schedule(now_s)
            if plan.filled or plan.evicted:
                self._begin_tiers(plan)
            if plan.loads or plan.dropped:
                self._begin_loads(plan)
            for request in (*plan.expired, *plan.starved):
                self._end(request)
            if plan.sequences:
                break
            wake_s = scheduler.wake_s
            if wake_s <= now_s:
                continue
            if wake_s < self._wake_s or self._wake_s < now_s:
                self._wake_s = wake_s
                if wake_s < math.inf:
                    self._events.call_at(wake_s, self._ring, wake_s)
            return
        work = _sum_up(plan)
        seconds = self.setup.steps.predict_s(work)
        self._is_running = True
        self.num_steps += 1
        self.busy_s += seconds
        if work.prefill_tokens:
            alone_s = 0.0
            if work.num_decodes:
                alone_s = self.setup.steps.predict_s(
                    StepWork(0, 0.0, work.num_decodes, work.decode_tokens)
                )
            self.prefill_s += max(seconds - alone_s, 0.0)
        is_told = work.prefill_tokens > 0 or self.num_steps % TOLD_DECODES == 1
        if self.on_step is not None and (is_told or self.num_steps <= TOLD_DECODES):
            self.on_step(StepRecord(*work, seconds))
        end_s = now_s + seconds
        if self.readers:
            self._announce(plan, end_s)
        if self.tiers is not None and work.prefill_tokens:
            num_tokens = work.prefill_tokens + work.num_decodes
            self.tiers.note_step(work.prefill_tokens, num_tokens, seconds)
        self._events.call_at(end_s, self._end_step, plan)

    def _announce(self, plan: StepPlan, end_s: float) -> None:
        """Let the instances that will decode this step's prompts begin to move KV blocks while the
        step, which ends at ``end_s``, runs.
        """
        if not self.setup.is_layerwise:
            return
        for sequence in plan.sequences:
            hand_over = self.readers.get(sequence.request.request_id)
            if hand_over is not None:
                hand_over.note_running(sequence.start + sequence.num_tokens, end_s)

    def _end_step(self, plan: StepPlan) -> None:
        self.is_load_new = True
        now_s = self._events.now_s
        legs = self._legs
        sampled: dict[str, tuple[int, ...]] = {}
        begun: list[_Leg] = []
        for sequence in plan.sequences:
            if not sequence.wants_sample:
                continue
            request_id = sequence.request.request_id
            leg = legs.get(request_id)
            if leg is None:  # The request was cancelled while the step ran.
                sampled[request_id] = (0,)
                continue
            sampled[request_id] = leg.tokens
            leg.num_sampled += 1
            leg.times_s.append(now_s)
            if not leg.num_given:
                begun.append(leg)
        ended = self.scheduler.complete(plan, sampled, now_s)
        self._is_running = False
        for leg in begun:
            is_live = legs.get(leg.request.request_id) is leg
            if is_live and not leg.request.is_finished:
                self._give(leg, None)
        for request in ended:
            self._end(request)
        if self.readers:
            for sequence in plan.sequences:
                hand_over = self.readers.get(sequence.request.request_id)
                if hand_over is not None:
                    hand_over.note_progress()
        if not self._is_called:
            self._is_called = True
            self._events.call_at(now_s, self._look)

    def _end(self, request: Request) -> None:
        leg = self._legs.pop(request.request_id, None)
        if leg is not None:
            self._give(leg, request.finish_reason)

    def _give(self, leg: _Leg, reason: FinishReason | None) -> None:
        """Report those outputs of a live request that have not been reported; ``reason`` is set if
        it has finished.
        """
        request = leg.request
        tokens = list(leg.tokens) * (leg.num_sampled - leg.num_given)
        is_first = leg.num_given == 0
        leg.num_given = leg.num_sampled
        has_facts = is_first or reason is not None
        handle, continuation = None, None
        if reason is FinishReason.PREFILLED:
            assert request.prefill_lease_s is not None, request.request_id
            continuation = Continuation(token_ids=list(tokens), seed=leg.seed)
            handle = KvHandle(
                request_id=request.request_id,
                block_ids=request.held_blocks,
                num_tokens=request.prompt_len,
                lease_s=request.prefill_lease_s,
            )
        leg.put(
            RequestOutput(
                request_id=request.request_id,
                token_ids=tokens,
                finish_reason=reason,
                prompt_len=request.prompt_len if has_facts else 0,
                cached_len=request.report.num_cached_tokens if has_facts else 0,
                kv_handle=handle,
                continuation=continuation,
                error_code="capacity" if reason is FinishReason.ERROR else None,
                error_text="no memory" if reason is FinishReason.ERROR else None,
            )
        )


def _sum_up(plan: StepPlan) -> StepWork:
    """Return the work of a step's plan: the numbers that its time is predicted from."""
    decode = Phase.DECODE
    starts = [sequence.start for sequence in plan.sequences if sequence.phase is decode]
    prefill_tokens, prefill_context = 0, 0.0
    if len(starts) < len(plan.sequences):
        for sequence in plan.sequences:
            if sequence.phase is not decode:
                num_tokens = sequence.num_tokens
                prefill_tokens += num_tokens
                prefill_context += num_tokens * (sequence.start + num_tokens / 2)
    return StepWork(prefill_tokens, prefill_context, len(starts), sum(starts))

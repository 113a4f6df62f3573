"""The scheduler: which tokens of which requests the next step computes, and in which blocks.

State in, decision out: time is an argument, a step is a ``StepPlan``, its outcome comes back
through ``complete``. The simulator runs this very class. Its parts share one ``SchedulerState``:
``lifecycle.py`` takes requests in and ends them, ``running.py`` plans decodes and started
prefills, ``admission.py`` starts waiting requests, ``load_planning.py`` starts loads.

Rules that everything below serves:

- Running requests are served in order of urgency: lower ``priority`` first, then arrival. A
  request takes blocks only from less urgent ones, never from one in flight, and only if that
  yields a block. So the most urgent request always proceeds, and every request ends.
- Of the waiting requests of a priority, those of the client with the fewest running ones for its
  weight come first: clients get shares. A client's own are admitted in the order of arrival, but
  for those with a longer cached prefix; ``MAX_OVERTAKEN`` later ones at most go before any.
- Waiting requests never take blocks from running ones. One is admitted when its prompt, and a
  block's worth of growth for everybody, fits beside what the running ones still need.
- Tokens become matchable when the step that computed them has completed, not before.
- A load from a lower tier or another instance takes only blocks that neither the running requests
  nor those ahead in the queue need next, and never so many that a running request could not reach
  its full length. So a load delays no decode. Its blocks are free when the transfer into them has
  ended, not before; those of a prefill that is held, when the hold or its lease ends.
- Blocks for which the machine lacks memory count as not there. Requests wait for it; when it comes
  too late for the most urgent one, that one ends, and the next has its blocks.
- With ``engine.overlap`` one plan may be made while the step before it runs. It counts on that
  step's tokens without knowing them; ``settle`` takes out the requests that the step has ended.

Single-threaded. Each plan is completed in turn; everything else may come in between.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from tandem.core.errors import ConfigError, ConflictError
from tandem.core.instance_status import Statistics
from tandem.core.wire import FinishReason, InstanceLoad
from tandem.engine.config import EngineConfig
from tandem.engine.groups.reuse import StatePolicy
from tandem.engine.groups.windows import WindowPolicy
from tandem.engine.scheduling.admission import Admission
from tandem.engine.scheduling.blocks import (
    BlockPool,
    KeyedBlock,
    find_state_slot,
    find_window_block,
)
from tandem.engine.scheduling.demand import measure_load
from tandem.engine.scheduling.lifecycle import NOT_FINISHED, Lifecycle
from tandem.engine.scheduling.load_planning import LoadPlanning
from tandem.engine.scheduling.loads import TierPlanner
from tandem.engine.scheduling.plan import ScheduledSequence, StepPlan
from tandem.engine.scheduling.prefix_index import PrefixIndex
from tandem.engine.scheduling.request import Request
from tandem.engine.scheduling.running import RunningPlanner
from tandem.engine.scheduling.state import MAX_CANDIDATES, SchedulerState

__all__ = ["ScheduledSequence", "Scheduler", "StepPlan"]

MEMORY_RETRY_S = 1.0
"""Seconds between attempts to reserve memory that the machine lacked."""

MEMORY_WAIT_S = 30.0
"""Seconds without progress for lack of memory, after which a request is ended."""


class Scheduler:
    """Continuous batching over a block pool and a prefix index.

    Args:
        config: with ``max_model_len`` resolved.
        pool: of the same number of blocks as the runner's memory.
        index: over that pool.
        tiers: decides what is loaded from lower tiers; None: nothing is.
        states: slots of the runner's memory, and what is kept; None: the model has no state.
        windows: blocks of layers with a window; None: these have none of their own.

    Raises: ConfigError (``max_model_len`` is 0).
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        index: PrefixIndex,
        tiers: TierPlanner | None = None,
        states: StatePolicy | None = None,
        windows: WindowPolicy | None = None,
    ) -> None:
        if config.max_model_len < 1:
            raise ConfigError(
                "engine.create_scheduler",
                "max_model_len is 0: replace it by the model's context length",
                field="engine.max_model_len",
            )
        self._config = config
        self._state = SchedulerState(config, pool, index, tiers, states, windows)
        self._lifecycle = Lifecycle(self._state)
        self._running = RunningPlanner(self._state)
        self._admission = Admission(self._state)
        self._load_planning = LoadPlanning(self._state, self._admission)
        self._max_in_flight = 2 if config.overlap == "on" else 1
        self._was_prefill_step = False
        self._retry_s = -math.inf
        self._starved_since_s: float | None = None

    # ---------------------------------------------------------------- requests in and out

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._config.block_size

    @property
    def max_request_len(self) -> int:
        """Tokens of prompt and output that one request may have here."""
        return self._state.max_len

    @property
    def has_requests(self) -> bool:
        """True if any request is waiting, loading or running."""
        return bool(self._state.requests)

    @property
    def wake_s(self) -> float:
        """Time at which ``schedule`` has work again: ``-inf`` now, ``inf`` only after a call.

        While everything that is live only waits for loads, the next deadline.
        """
        return self._state.wake_s

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ConfigError: the prompt is empty, or too long for the context or for all the blocks.
            ConflictError: a live request has this id, or one whose blocks are held.
            CapacityError: ``max_running + max_queue`` requests are live, or the machine lacks
                memory for the prompt.
        """
        self._lifecycle.add(request)
        self._state.wake_s = -math.inf

    def cancel(self, request_id: str) -> bool:
        """End a request with ``FinishReason.CANCELLED``; False if no such request is live.

        Its blocks are released now or, if it is in a plan in flight, by ``complete``, which
        then returns it. Blocks that a load writes into are released when that has ended.
        """
        return self._lifecycle.cancel(request_id)

    def flush_cache(self) -> int:
        """Forget all prefixes; return the blocks freed at once. Running requests go on.

        Loads in progress are given up: their blocks belong to the dropped prefixes.
        """
        for request in self._state.loads.give_up_all():
            self._state.end_loading(request)
        self._state.wake_s = -math.inf
        if self._state.states is not None:
            self._state.states.clear()
        if self._state.windows is not None:
            self._state.windows.clear()
        return self._state.prefix.clear()

    def load_done(self, request: Request, block_ids: Sequence[int]) -> None:
        """Record blocks whose load ended with verified content.

        Args:
            request: of the ``BlockLoad``, whether it is still live or not.
            block_ids: of loads of that request; nothing writes into them any more.

        Raises: ConflictError (no such load is under way); nothing has changed then.
        """
        if self._state.loads.note_done(request, block_ids):
            self._state.end_loading(request)
        self._state.wake_s = -math.inf

    def load_failed(self, request: Request, block_ids: Sequence[int]) -> None:
        """Record blocks whose load failed; the request computes them.

        Args and Raises as for ``load_done``.
        """
        if self._state.loads.note_failed(request, block_ids):
            self._state.end_loading(request)
        self._state.wake_s = -math.inf

    def continue_request(self, request_id: str, token_ids: Sequence[int]) -> bool:
        """Give a request that awaits them the tokens that another instance has generated.

        False if no such request is live, or it no longer waits: it generates them itself.

        Raises: ConfigError (they leave no room for another one).
        """
        if not self._lifecycle.continue_request(request_id, token_ids):
            return False
        self._state.wake_s = -math.inf
        return True

    def release_hold(self, request_id: str) -> bool:
        """Give up the blocks held for a prefilled request; False if none are held."""
        self._state.wake_s = -math.inf
        return self._state.holds.release(request_id)

    def find_prefill(self, request_id: str) -> Request | None:
        """Return the request that only prefills: live, or ended with its blocks held."""
        request = self._state.requests.get(request_id)
        if request is not None and request.prefill_lease_s is not None:
            return request
        return self._state.holds.find(request_id)

    def is_unchanged(self, block: KeyedBlock) -> bool:
        """Return True if a block still has the content with which ``schedule`` reported it.

        Ask after copying it out, and before the copy may be read: only ``schedule`` gives
        blocks away, so the memory was not written before it changed hands here.
        """
        slot, states = find_state_slot(block.block_id), self._state.states
        if slot is not None:
            return states is not None and states.get_generation(slot) == block.generation
        window, windows = find_window_block(block.block_id), self._state.windows
        if window is not None:
            return windows is not None and windows.pool.get_generation(window) == block.generation
        return self._state.pool.get_generation(block.block_id) == block.generation

    def add_identity(self, adapter: str, identity: bytes) -> None:
        """Name the ``KvIdentity.digest`` of the KV that an adapter, by its digest, writes."""
        self._state.index.add_identity(adapter, identity)

    def make_block_keys(
        self, prompt_ids: Sequence[int], cache_salt: str, adapter: str = ""
    ) -> list[bytes]:
        """Return the keys of a prompt's full blocks that a request may reuse. Changes nothing."""
        return self._state.prefix.make_keys(prompt_ids, cache_salt, adapter)

    def count_cached_blocks(self, keys: Sequence[bytes]) -> int:
        """Return how many leading blocks of a chain the device holds and can go on from.

        At their end there is a state, and the window before it.
        """
        num_cached = self._state.index.count_cached_blocks(keys)
        states, windows = self._state.states, self._state.windows
        if windows is not None:
            return len(windows.cut(self._state.index.match_blocks(keys[:num_cached])).nodes)
        return num_cached if states is None else states.count_blocks(keys[:num_cached])

    def get_stats(self) -> Statistics:
        """Return gauges and counters for the metrics. O(1)."""
        state = self._state
        states, windows = state.states, state.windows
        return msgspec.structs.replace(
            state.counters,
            num_state_slots=states.num_slots if states else 0,
            num_used_state_slots=states.num_used if states else 0,
            num_snapshots=states.num_snapshots if states else 0,
            num_window_blocks=windows.pool.num_blocks if windows else 0,
            num_used_window_blocks=windows.pool.num_used if windows else 0,
            num_cached_window_blocks=windows.pool.num_cached if windows else 0,
            num_running=len(state.running),
            num_waiting=len(state.waiting),
            num_loading=len(state.loading),
            num_held=len(state.holds),
            num_blocks=state.pool.num_blocks,
            num_used_blocks=state.pool.num_used,
            num_cached_blocks=state.pool.num_cached,
        )

    def measure_load(self) -> InstanceLoad:
        """Return what the live requests need. O(live requests)."""
        return measure_load(self._state)

    # ---------------------------------------------------------------- a step begins

    def schedule(self, now_s: float) -> StepPlan:
        """Plan the next step; a plan that is not empty must be completed, in the order of planning.

        Args:
            now_s: monotonic seconds, never less than in the last call.

        Raises: ConflictError (as many plans are in flight as ``engine.overlap`` allows).
        """
        state = self._state
        if len(state.in_flight) >= self._max_in_flight:
            raise ConflictError(
                "engine.schedule", f"{len(state.in_flight)} plans in flight: complete one first"
            )
        if state.pool.is_short and self._retry_s <= now_s:
            state.pool.retry()
            self._retry_s = now_s + MEMORY_RETRY_S
        plan = StepPlan(expired=self._lifecycle.expire(now_s))
        state.holds.expire(now_s)
        self._load_planning.plan_loads(plan, now_s)
        match self._config.scheduling_order:
            case "chunked":
                self._running.plan_decodes(plan)
                self._plan_prefills(plan, now_s)
            case "prefill_first":
                self._plan_prefills(plan, now_s)
                if plan.is_empty:
                    self._running.plan_decodes(plan)
            case "decode_first":
                self._plan_decode_first(plan, now_s)
        self._end_starved(plan, now_s)
        if not plan.is_empty:
            state.in_flight.append(plan)
        plan.dropped = state.loads.take_dropped()
        plan.filled = state.prefix.take_filled()
        if state.windows is not None:
            plan.filled += state.windows.take_filled()
        if state.states is not None:
            plan.filled += state.states.take_filled()
            if not plan.is_empty:
                plan.unused_slots = state.states.take_unused()
        plan.evicted, state.evicted = state.evicted, []
        state.wake_s = self._find_wake_s(plan, now_s)
        return plan

    def settle(self, plan: StepPlan) -> bool:
        """Adapt a plan that was made while a step ran, after that step's ``complete``.

        Takes out the sequences of requests that have ended meanwhile and renews the block tables
        of the others. False if nothing is left to compute: the plan is over then.

        Raises: ConflictError (another plan is to be completed first).
        """
        return self._lifecycle.settle(plan)

    def _find_wake_s(self, plan: StepPlan, now_s: float) -> float:
        if plan.sequences or plan.loads or plan.expired or plan.starved:
            return -math.inf
        state = self._state
        # No request can be scheduled now, because all wait for transfers. Return the earliest time
        # at which one of them may go on.
        wake_s = min(self._lifecycle.next_deadline_s, state.holds.next_end_s)
        if state.pool.is_short and state.requests:
            wake_s = min(wake_s, self._retry_s)
        for request in state.loading:
            wake_s = min(wake_s, request.load.wait_until_s)
        for request in state.waiting:
            # When a waiting request has been passed over for too long, or its wait for a load ends,
            # it changes its place in the queue. The request that is then first may fit, so plan
            # again at that time.
            passed_over_s = request.arrival_s + self._config.max_passover_s
            for moment_s in (passed_over_s, request.load.wait_until_s):
                if moment_s > now_s:
                    wake_s = min(wake_s, moment_s)
        return wake_s

    def _end_starved(self, plan: StepPlan, now_s: float) -> None:
        """End the most urgent request if lack of memory has stopped all progress for too long."""
        state = self._state
        is_idle = not (plan.sequences or plan.loads or state.loading or state.in_flight)
        if not (state.pool.is_short and is_idle and (state.running or state.waiting)):
            self._starved_since_s = None
        elif self._starved_since_s is None:
            self._starved_since_s = now_s
        elif now_s - self._starved_since_s >= MEMORY_WAIT_S:
            # End the most urgent request: all others have already given up their blocks for it and
            # it still does not fit, while they may need fewer blocks.
            request = (state.running or state.waiting)[0]
            self._lifecycle.finish(request, FinishReason.ERROR, now_s)
            plan.starved.append(request)
            self._starved_since_s = None

    def _plan_prefills(self, plan: StepPlan, now_s: float) -> None:
        """Continue started prefills, then admit waiting requests, as far as the budget goes."""
        self._running.plan_prefills(plan)
        if not plan.is_stalled:
            self._admission.admit_waiting(plan, now_s)

    def _plan_decode_first(self, plan: StepPlan, now_s: float) -> None:
        """Plan decodes alone while any can run, except that prefills do not wait for ever.

        A request that has waited ``max_passover_s`` is due, and gets every other step until its
        prompt is computed.
        """
        is_due = not self._was_prefill_step and self._is_prefill_due(now_s)
        if is_due:
            self._plan_prefills(plan, now_s)
        self._was_prefill_step = not plan.is_empty
        if plan.is_empty:
            self._running.plan_decodes(plan)
        if plan.is_empty and not is_due:
            self._plan_prefills(plan, now_s)

    def _is_prefill_due(self, now_s: float) -> bool:
        arrived_by = now_s - self._config.max_passover_s
        prefilling = [r for r in self._state.running if r.queue.is_prefilling]
        candidates = prefilling + self._state.waiting[:MAX_CANDIDATES]
        return any(request.arrival_s <= arrived_by for request in candidates)

    # ---------------------------------------------------------------- a step ends

    def complete(
        self,
        plan: StepPlan,
        sampled: Mapping[str, Sequence[int]],
        now_s: float,
        finished: Mapping[str, FinishReason] = NOT_FINISHED,
    ) -> list[Request]:
        """Record the outcome of a step; return the requests that ended with it.

        Args:
            plan: the oldest in flight, executed.
            sampled: the tokens, one or more, of each sequence that wants a sample, by request id.
                Of several, all but the last are drafts that the step has verified.
            now_s: monotonic seconds.
            finished: requests that end with this step, as the caller decided: by stop ids and
                end-of-text (with their token), or ``FinishReason.ERROR`` (without), where what
                the step computed is not to be trusted. Length and deadline are decided here.

        Raises: ConflictError (another plan, or a sample is missing); nothing has changed then.
        """
        ended = self._lifecycle.complete(plan, sampled, now_s, finished)
        self._state.wake_s = -math.inf
        return ended

    def check(self) -> None:
        """Assert that every reference in the pool has its owner. O(blocks), for tests."""
        self._state.check()

"""The scheduler: it decides which tokens of which requests a step computes, and in which blocks.

It is a pure state machine: time is an argument, ``schedule`` returns a step as a ``StepPlan``, and
``complete`` takes the step's result. The simulator runs the same class. Its parts share one
``SchedulerState``: ``lifecycle.py`` adds and ends requests, ``running.py`` plans decodes and
started prefills, ``admission.py`` starts waiting requests, ``load_planning.py`` starts loads.

Rules:

- Running requests are served in order of urgency: lower ``priority`` first, then arrival. A request
  that lacks a block preempts less urgent ones, except those in a step in flight, and only if that
  frees a block. So the most urgent request always proceeds, and every request ends.
- Among waiting requests of one priority, those of the client with the fewest running requests for
  its weight come first. The requests of one client are admitted in the order of arrival, except
  that a longer cached prefix goes first; at most ``MAX_OVERTAKEN`` requests overtake any other.
- Waiting requests never take blocks from running ones. A request is admitted when the free and
  evictable blocks suffice for its known tokens and one more block, and for the same of every
  running request.
- Tokens can be matched by other requests when the step that computed them has completed.
- A load from the store or another instance may take a block only if neither a running request nor a
  request ahead in the queue needs it next, and only if every running request can still reach its
  full length. So a load delays no decode. The blocks of a load become free when the transfers into
  them have ended. The blocks of a held prefill become free when the hold is released or its lease
  ends.
- Blocks for which the machine has no memory do not count as free. Requests wait for memory; if the
  wait takes too long, the most urgent request is ended with an error and the next one gets its
  blocks.
- With ``engine.overlap``, the next step may be planned while a step runs. That plan reckons with
  the running step's tokens, whose ids are not known yet; ``settle`` then removes the requests that
  the running step has ended.

Single-threaded. Plans are completed in the order in which they were made; all other calls may come
at any time between.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from tandem.core.errors import ConfigError, ConflictError
from tandem.core.instance_status import Statistics
from tandem.core.wire import FinishReason, InstanceLoad
from tandem.engine.config import EngineConfig
from tandem.engine.groups.group import Group, GroupBlock
from tandem.engine.groups.reuse import StatePolicy
from tandem.engine.groups.windows import WindowPolicy
from tandem.engine.scheduling.admission import Admission
from tandem.engine.scheduling.blocks import (
    BlockPool,
    KeyedBlock,
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
"""Seconds between attempts to reserve memory after the machine had none."""

MEMORY_WAIT_S = 30.0
"""Seconds without progress for lack of memory, after which a request is ended."""


class Scheduler:
    """The scheduler of one instance: continuous batching over a block pool and a prefix index.

    Args:
        config: the engine's configuration, with ``max_model_len`` resolved to a number.
        pool: the block pool; it has as many blocks as the runner has memory for.
        index: the prefix index over that pool.
        tiers: decides which blocks are loaded from lower tiers; None: none are.
        states: the slots for states and the policy that keeps snapshots; None: the model has no
            state.
        windows: the pool of window blocks; None: sliding-window layers have no blocks of their own.

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

    # The members below are for callers that add, end or ask about requests, at any time.

    @property
    def block_size(self) -> int:
        """Number of tokens per block."""
        return self._config.block_size

    @property
    def max_request_len(self) -> int:
        """Largest number of prompt and output tokens that one request may have."""
        return self._state.max_len

    @property
    def has_requests(self) -> bool:
        """True if any request is waiting, loading or running."""
        return bool(self._state.requests)

    @property
    def wake_s(self) -> float:
        """Time from which ``schedule`` can do something new, in monotonic seconds.

        ``-inf``: now; ``inf``: only after another call, such as ``add``. If all live requests wait
        for loads, it is the next time at which a wait, a lease or a deadline ends.
        """
        return self._state.wake_s

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ConfigError: the prompt is empty, or longer than the context or than all blocks
                together.
            ConflictError: the id is that of a live request, or of one whose blocks are held.
            CapacityError: ``max_running + max_queue`` requests are live, or the machine lacks
                memory for the prompt.
        """
        self._lifecycle.add(request)
        self._state.wake_s = -math.inf

    def cancel(self, request_id: str) -> bool:
        """End a request with ``FinishReason.CANCELLED``; return False if no live request has this
        id.

        Its blocks are released now or, if it is in a plan in flight, by ``complete``, which then
        returns the request. Blocks that a load writes into are released when that load has ended.
        """
        return self._lifecycle.cancel(request_id)

    def flush_cache(self) -> int:
        """Drop all cached prefixes; return the number of blocks freed at once. Running requests go
        on.

        Loads in progress are given up, because they extend dropped prefixes.
        """
        for request in self._state.loads.give_up_all():
            self._state.end_loading(request)
        self._state.wake_s = -math.inf
        if self._state.states is not None:
            self._state.states.clear()
        if self._state.windows is not None:
            self._state.windows.clear()
        return self._state.prefix.clear()

    def forget_blocks(self, block_ids: Iterable[int]) -> int:
        """Forget cached blocks whose content is lost, and what builds on them; return how many.

        Loads in progress are given up, as they may build on them. Running requests go on.
        """
        for request in self._state.loads.give_up_all():
            self._state.end_loading(request)
        self._state.wake_s = -math.inf
        return self._state.prefix.forget_blocks(block_ids, self._state.running)

    def load_done(self, request: Request, blocks: Sequence[GroupBlock]) -> None:
        """Record blocks of a request that have been loaded and whose content has been verified.

        Args:
            request: the request of the ``BlockLoad``; it may have ended.
            blocks: destinations of loads of that request, into which nothing writes any more.

        Raises: ConflictError (a block is not being loaded for this request); nothing has changed
            then.
        """
        if self._state.loads.note_done(request, blocks):
            self._state.end_loading(request)
        self._state.wake_s = -math.inf

    def load_failed(self, request: Request, blocks: Sequence[GroupBlock]) -> None:
        """Record blocks of a request that could not be loaded; the request computes these tokens
        itself.

        Args and Raises as for ``load_done``.
        """
        if self._state.loads.note_failed(request, blocks):
            self._state.end_loading(request)
        self._state.wake_s = -math.inf

    def note_mask(self, request: Request, *, is_ready: bool, is_slow: bool = False) -> None:
        """Record whether a step of a request could sample at once: whether the tokens that its
        grammar allows next are computed.

        Args:
            request: a request with a grammar; nothing happens if it has ended.
            is_ready: False: it is not planned until it is noted as ready.
            is_slow: True if that took long the last time.
        """
        request.queue.awaits_mask = not is_ready
        request.queue.is_mask_slow = is_slow
        if is_ready:
            self._state.wake_s = -math.inf

    def continue_request(self, request_id: str, token_ids: Sequence[int]) -> bool:
        """Append tokens that another instance has generated to a request that waits for them.

        Returns False, and changes nothing, if no live request has this id or it no longer waits; it
        then generates these tokens itself.

        Raises: ConfigError (with these tokens there is no room left for another one).
        """
        if not self._lifecycle.continue_request(request_id, token_ids):
            return False
        self._state.wake_s = -math.inf
        return True

    def release_hold(self, request_id: str) -> bool:
        """Release the blocks held for an ended prefill request; return False if none are held."""
        self._state.wake_s = -math.inf
        return self._state.holds.release(request_id)

    def find_prefill(self, request_id: str) -> Request | None:
        """Return the prefill-only request with this id, if it is live or its blocks are still held;
        otherwise None.
        """
        request = self._state.requests.get(request_id)
        if request is not None and request.prefill_lease_s is not None:
            return request
        return self._state.holds.find(request_id)

    def is_unchanged(self, block: KeyedBlock) -> bool:
        """Return True if a block still has the content that it had when ``schedule`` reported it.

        Call it after copying the block and before using the copy. Only ``schedule`` allocates
        blocks, so a copy of an unchanged block was not overwritten while it was made.
        """
        group, index = block.block
        owner = self._state.pool if group is Group.FULL else self._state.groups[group]
        return owner.get_generation(index) == block.generation

    def add_identity(self, adapter: str, identity: bytes) -> None:
        """Set the digest of the KV identity (what the KV's values depend on) of an adapter's KV;
        ``adapter`` is the adapter's digest.
        """
        self._state.index.add_identity(adapter, identity)

    def make_block_keys(
        self, prompt_ids: Sequence[int], cache_salt: str, adapter: str = ""
    ) -> list[bytes]:
        """Return the keys (digests of all tokens up to the block's end) of a prompt's full blocks
        that a request may reuse. Changes nothing.
        """
        return self._state.prefix.make_keys(prompt_ids, cache_salt, adapter)

    def count_cached_blocks(self, keys: Sequence[bytes]) -> int:
        """Return how many leading blocks of a chain of keys a request could reuse from this device.

        For a model with states or windows, the count ends at a block behind which the state or the
        window is cached too.
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
        """Return the load of the live requests: the tokens and blocks that they still need. O(live
        requests).
        """
        return measure_load(self._state)

    # The methods below plan a step.

    def schedule(self, now_s: float) -> StepPlan:
        """Plan the next step. Plans that are not empty must be completed, in the order of planning.

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
        """Correct a plan that was made while a step ran, after that step's ``complete``.

        Removes the requests that have ended meanwhile or whose mask is not computed, and renews the
        block tables of the others.
        Returns False if nothing is left to compute; such a plan needs no ``complete``.

        Raises: ConflictError (another plan must be completed first).
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
            # When a request has waited for ``max_passover_s`` since its arrival, or its wait for a
            # load ends, it changes its place in the queue. The request that is then first may fit,
            # so plan again at that time.
            passed_over_s = request.arrival_s + self._config.max_passover_s
            for moment_s in (passed_over_s, request.load.wait_until_s):
                if moment_s > now_s:
                    wake_s = min(wake_s, moment_s)
        return wake_s

    def _end_starved(self, plan: StepPlan, now_s: float) -> None:
        """End the most urgent request if lack of memory has stopped the progress of all requests
        too long.
        """
        state = self._state
        is_idle = not (plan.sequences or plan.loads or state.loading or state.in_flight)
        if not (state.pool.is_short and is_idle and (state.running or state.waiting)):
            self._starved_since_s = None
        elif self._starved_since_s is None:
            self._starved_since_s = now_s
        elif now_s - self._starved_since_s >= MEMORY_WAIT_S:
            # End the most urgent request. All others have given up their blocks for it and it still
            # does not fit; the others may need fewer blocks.
            request = (state.running or state.waiting)[0]
            self._lifecycle.finish(request, FinishReason.ERROR, now_s)
            plan.starved.append(request)
            self._starved_since_s = None

    def _plan_prefills(self, plan: StepPlan, now_s: float) -> None:
        """Plan started prefills, then admit waiting requests, within the step's token budget."""
        self._running.plan_prefills(plan)
        if not plan.is_stalled:
            self._admission.admit_waiting(plan, now_s)

    def _plan_decode_first(self, plan: StepPlan, now_s: float) -> None:
        """Plan decodes alone while any can run, with an exception that keeps prefills from
        starving.

        If a waiting or prefilling request arrived more than ``max_passover_s`` ago, every other
        step is a prefill step.
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

    # The method ``complete`` below ends a step; ``check`` is for tests.

    def complete(
        self,
        plan: StepPlan,
        sampled: Mapping[str, Sequence[int]],
        now_s: float,
        finished: Mapping[str, FinishReason] = NOT_FINISHED,
        late: Collection[str] = (),
    ) -> list[Request]:
        """Record the result of a step; return the requests that ended with it.

        Args:
            plan: the oldest plan in flight, which has been executed.
            sampled: by request id, the sampled tokens of each sequence that wants a sample. If
                there are several, all but the last are draft tokens that the step has verified.
            now_s: monotonic seconds.
            finished: requests that the caller ends with this step, with the reason: a stop id or
                end of text (their token is in ``sampled``), or ``FinishReason.ERROR`` if the step's
                result is unusable (no token). The scheduler itself decides on length and deadline.
            late: requests for which the step has sampled nothing although they wanted it, because
                the mask of their grammar was not computed in time. They go on with the token that
                this step computed last, when ``note_mask`` says that they are ready.

        Raises: ConflictError (not the oldest plan, or a sample is missing); nothing has changed
            then.
        """
        ended = self._lifecycle.complete(plan, sampled, now_s, finished, late)
        self._state.wake_s = -math.inf
        return ended

    def check(self) -> None:
        """Assert that every reference to a block is owned by a request, a load, a hold (blocks kept
        for a decode instance) or a plan. O(blocks), for tests.
        """
        self._state.check()

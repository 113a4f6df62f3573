"""The scheduler: which tokens of which requests the next step computes, and in which blocks.

Owns the waiting queue and the running set, and is the only writer of ``Request``. State in,
decision out: time is an argument, a step is a ``StepPlan``, its outcome comes back through
``complete``. The simulator runs this very class.

Rules that everything below serves:

- Running requests are served in order of urgency: lower ``priority`` first, then arrival. A
  request takes blocks only from less urgent ones, never from one in the plan, and only if that
  yields a block. So the most urgent request always proceeds, and every request ends.
- Of the waiting requests of a priority, those of the client with the fewest running ones come
  first: clients get equal shares. A client's own are admitted in the order of arrival, but for
  those with a longer cached prefix; ``MAX_OVERTAKEN`` later ones at most go before any.
- Waiting requests never take blocks from running ones. One is admitted when its prompt, and a
  block's worth of growth for everybody, fits beside what the running ones still need.
- Tokens become matchable when the step that computed them has completed, not before.
- A load from a lower tier or another instance takes only blocks that neither the running requests
  nor those ahead in the queue need next, and never so many that a running request could not reach
  its full length. So a load delays no decode. Its blocks are free when the transfer into them has
  ended, not before; those of a prefill that is held, when the hold or its lease ends.
- Blocks for which the machine lacks memory count as not there. Requests wait for it; when it comes
  too late for the most urgent one, that one ends, and the next has its blocks.

Single-threaded. ``schedule`` and ``complete`` alternate; the rest may come in between.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from tandem.core.errors import CapacityError, ConfigError, ConflictError
from tandem.core.wire import FinishReason, TierKv
from tandem.engine.config import EngineConfig
from tandem.engine.scheduling.blocks import BlockCopy, BlockPool, KeyedBlock
from tandem.engine.scheduling.holds import BlockHolds
from tandem.engine.scheduling.loads import BlockLoads, TierPlanner
from tandem.engine.scheduling.plan import BlockLoad, ScheduledSequence, SchedulerStats, StepPlan
from tandem.engine.scheduling.prefix_index import PrefixIndex, PrefixMatch
from tandem.engine.scheduling.prefix_reuse import PrefixReuse
from tandem.engine.scheduling.request import Request, RequestState
from tandem.engine.scheduling.shares import ClientShares

__all__ = ["ScheduledSequence", "Scheduler", "SchedulerStats", "StepPlan"]

MAX_CANDIDATES = 128
"""Waiting requests looked at per step; with more, arrival order alone decides (as in SGLang):
ordering a long queue costs more than the hits it finds."""

MAX_OVERTAKEN = 16
"""Later requests of its client that may be admitted before a request that waits for a slot or for
blocks; while its KV comes from elsewhere, others go on."""

LOADING_SHARE = 4
"""One in so many blocks may be in transfer at a time. A prefix that needs more is loaded as far as
this goes; with more in transfer, requests would wait for the link and not for their own blocks."""

MEMORY_RETRY_S = 1.0
"""Between attempts to get memory that the machine lacked."""

MEMORY_PATIENCE_S = 30.0
"""How long nothing may be computed for lack of it, before a request ends."""

_NOT_FINISHED: Mapping[str, FinishReason] = MappingProxyType({})


class Scheduler:
    """Continuous batching over a block pool and a prefix index.

    Args:
        config: with ``max_model_len`` resolved.
        pool: of the same number of blocks as the runner's memory.
        index: over that pool.
        tiers: decides what is loaded from lower tiers; None: nothing is.

    Raises: ConfigError (``max_model_len`` is 0).
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        index: PrefixIndex,
        tiers: TierPlanner | None = None,
    ) -> None:
        if config.max_model_len < 1:
            raise ConfigError(
                "engine.create_scheduler",
                "max_model_len is 0: replace it by the model's context length",
                field="engine.max_model_len",
            )
        self._config = config
        self._pool = pool
        self._index = index
        self._prefix = PrefixReuse(index, config.block_size, is_enabled=config.prefix_cache)
        self._tiers = tiers if config.prefix_cache else None
        self._loads = BlockLoads(pool, index, self._prefix, config.block_size)
        self._holds = BlockHolds(pool, index)
        # The last token of a request needs no KV, but a prompt that is only scored does.
        self._max_len = min(config.max_model_len, pool.num_blocks * config.block_size)
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []
        self._loading: list[Request] = []
        self._running: list[Request] = []
        self._live = ClientShares()
        self._deadlines: list[tuple[float, int, Request]] = []
        self._in_flight: StepPlan | None = None
        self._evicted: list[KeyedBlock] = []
        self._wake_s = math.inf
        self._retry_s = -math.inf
        self._starved_since_s: float | None = None
        self._num_added = 0
        self._num_preemptions = 0
        self._was_prefill_step = False

    # ---------------------------------------------------------------- requests in and out

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._config.block_size

    @property
    def max_request_len(self) -> int:
        """Tokens of prompt and output that one request may have here."""
        return self._max_len

    @property
    def has_requests(self) -> bool:
        """Whether any request is waiting, loading or running."""
        return bool(self._requests)

    @property
    def wake_s(self) -> float:
        """When ``schedule`` has something to do: ``-inf`` is now, ``inf`` not before a call.

        While everything that is live only waits for loads, the next deadline.
        """
        return self._wake_s

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ConfigError: the prompt is empty, or too long for the context or for all the blocks.
            ConflictError: a live request has this id, or one whose blocks are held.
            CapacityError: ``max_running + max_queue`` requests are live, or the machine lacks
                memory for the prompt.
        """
        self._check_prompt(request)
        if request.request_id in self._requests:
            raise ConflictError(
                "engine.add", f"request {request.request_id!r} is live: choose another id"
            )
        if request.request_id in self._holds:
            raise ConflictError(
                "engine.add", f"blocks of a request {request.request_id!r} are held: release them"
            )
        # A request that the next step admits does not wait, so free slots count as room.
        limit = self._config.max_running + self._config.max_queue
        num_blocks = self._count_blocks(request.num_tokens)
        if num_blocks > self._pool.num_blocks:
            raise CapacityError(
                "engine.add",
                f"the prompt takes {num_blocks} blocks, and the machine has memory for "
                f"{self._pool.num_blocks} now: try again later",
            )
        if not self._live.has_room(request.client, limit):
            raise CapacityError(
                "engine.add",
                f"{len(self._running)} requests running and {len(self._waiting)} waiting of "
                f"{limit}: try again later",
            )
        self._num_added += 1
        request.seq_no = self._num_added
        self._prefix.open(request)
        request.max_total_tokens = min(
            request.prompt_len + request.sampling.max_tokens, self._max_len
        )
        if request.prefill_lease_s is not None:
            if request.max_total_tokens > request.prompt_len + 1:
                request.max_total_tokens = request.prompt_len + 1
            else:
                request.prefill_lease_s = None  # It ends with its first token in any case.
        if request.prefill_kv is not None:
            # Not later than the prefill's blocks are there.
            request.wait_until_s = request.arrival_s + request.prefill_kv.handle.lease_s
        self._requests[request.request_id] = request
        self._live.add(request.client)
        insort(self._waiting, request, key=_queue_order)
        self._wake_s = -math.inf
        if request.deadline_s is not None:
            self._add_deadline(request, request.deadline_s)

    def cancel(self, request_id: str) -> bool:
        """End a request with ``FinishReason.CANCELLED``; False if no such request is live.

        Its blocks are released now or, if it is in the plan in flight, by ``complete``, which
        then returns it. Blocks that a load writes into are released when that has ended.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        if request.is_scheduled:
            request.is_cancelled = True
        else:
            self._finish(request, FinishReason.CANCELLED, None)
        return True

    def flush_cache(self) -> int:
        """Forget all prefixes; return the blocks freed at once. Running requests go on.

        Loads in progress are given up: their blocks belong to the dropped prefixes.
        """
        for request in self._loads.give_up_all():
            self._end_loading(request)
        self._wake_s = -math.inf
        return self._prefix.clear()

    def load_done(self, request: Request, block_ids: Sequence[int]) -> None:
        """Take in blocks whose load has ended with their content, verified.

        Args:
            request: of the ``BlockLoad``, whether it is still live or not.
            block_ids: of loads of that request; nothing writes into them any more.

        Raises: ConflictError (no such load is under way); nothing has changed then.
        """
        if self._loads.note_done(request, block_ids):
            self._end_loading(request)
        self._wake_s = -math.inf

    def load_failed(self, request: Request, block_ids: Sequence[int]) -> None:
        """Take in blocks whose load has ended without content; the request computes them.

        Args and Raises as for ``load_done``.
        """
        if self._loads.note_failed(request, block_ids):
            self._end_loading(request)
        self._wake_s = -math.inf

    def continue_request(self, request_id: str, token_ids: Sequence[int]) -> bool:
        """Give a request that awaits them the tokens that another instance has generated.

        False if no such request is live, or it no longer waits: it generates them itself.

        Raises: ConfigError (they leave no room for another one).
        """
        request = self._requests.get(request_id)
        if request is None or not request.awaits_continuation:
            return False
        if request.num_tokens + len(token_ids) >= request.max_total_tokens:
            raise ConfigError(
                "engine.continue",
                f"{len(token_ids)} tokens after {request.num_tokens} leave none to generate of "
                f"{request.max_total_tokens}",
                field="continuation",
            )
        request.output_ids += token_ids
        request.awaits_continuation = False
        if not self._loads.has_load(request):
            self._end_loading(request)
        self._wake_s = -math.inf
        return True

    def release_hold(self, request_id: str) -> bool:
        """Give up the blocks held for a prefilled request; False if none are held."""
        self._wake_s = -math.inf
        return self._holds.release(request_id)

    def find_prefill(self, request_id: str) -> Request | None:
        """Return the request that only prefills: live, or ended with its blocks held."""
        request = self._requests.get(request_id)
        if request is not None and request.prefill_lease_s is not None:
            return request
        return self._holds.find(request_id)

    def is_unchanged(self, block: KeyedBlock) -> bool:
        """Whether a block still has the content with which ``schedule`` reported it.

        Ask after copying it out, and before the copy may be read: only ``schedule`` gives
        blocks away, so the memory was not written before it changed hands here.
        """
        return self._pool.get_generation(block.block_id) == block.generation

    def add_identity(self, adapter: str, identity: bytes) -> None:
        """Name the ``KvIdentity.digest`` of the KV that an adapter, by its digest, writes."""
        self._index.add_identity(adapter, identity)

    def make_block_keys(
        self, prompt_ids: Sequence[int], cache_salt: str, adapter: str = ""
    ) -> list[bytes]:
        """Return the keys of a prompt's full blocks that a request may reuse. Changes nothing."""
        return self._prefix.make_keys(prompt_ids, cache_salt, adapter)

    def count_cached_blocks(self, keys: Sequence[bytes]) -> int:
        """Return how many leading blocks of a chain the device holds."""
        return self._index.count_cached_blocks(keys)

    def get_stats(self) -> SchedulerStats:
        """Return gauges and counters for the metrics. O(1)."""
        prefix = self._index.stats
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_loading=len(self._loading),
            num_held=len(self._holds),
            num_blocks=self._pool.num_blocks,
            num_used_blocks=self._pool.num_used,
            num_cached_blocks=self._pool.num_cached,
            num_preemptions=self._num_preemptions,
            num_evicted_blocks=prefix.num_evicted_blocks,
            num_loaded_blocks=self._loads.num_loaded,
            num_failed_loads=self._loads.num_failed,
            num_prefix_queries=prefix.num_queries,
            num_prefix_query_tokens=prefix.num_query_tokens,
            num_prefix_hit_tokens=prefix.num_hit_tokens,
            num_store_hit_tokens=prefix.num_store_hit_tokens,
        )

    def _add_deadline(self, request: Request, deadline_s: float) -> None:
        heapq.heappush(self._deadlines, (deadline_s, request.seq_no, request))
        # Most requests end long before their deadline; their entries must not pile up.
        if len(self._deadlines) > 2 * len(self._requests) + MAX_CANDIDATES:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].is_finished]
            heapq.heapify(self._deadlines)

    def _check_prompt(self, request: Request) -> None:
        prompt_len = request.prompt_len
        if prompt_len == 0:
            raise ConfigError("engine.add", "the prompt has no tokens: send one", field="prompt")
        # Room for one token of output, unless the prompt is only scored.
        needed = request.num_tokens + min(request.sampling.max_tokens, 1)
        if needed > self._max_len:
            limit = (
                f"max_model_len {self._config.max_model_len}"
                if self._max_len == self._config.max_model_len
                else f"the KV cache of {self._pool.num_blocks} blocks of {self._config.block_size}"
            )
            raise ConfigError(
                "engine.add",
                f"the prompt has {prompt_len} tokens, {needed} with its output, more than {limit}: "
                "shorten it",
                field="prompt",
            )

    # ---------------------------------------------------------------- a step begins

    def schedule(self, now_s: float) -> StepPlan:
        """Plan the next step; a plan that is not empty must be completed before the next one.

        Args:
            now_s: monotonic seconds, never less than in the last call.

        Raises: ConflictError (a plan is in flight).
        """
        if self._in_flight is not None:
            raise ConflictError("engine.schedule", "a plan is in flight: complete it first")
        if self._pool.is_short and self._retry_s <= now_s:
            self._pool.retry()
            self._retry_s = now_s + MEMORY_RETRY_S
        plan = StepPlan()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            request = heapq.heappop(self._deadlines)[2]
            if not request.is_finished:
                self._finish(request, FinishReason.DEADLINE, now_s)
                plan.expired.append(request)
        self._holds.expire(now_s)
        self._plan_loads(plan, now_s)
        match self._config.scheduling_order:
            case "chunked":
                self._plan_decodes(plan)
                self._plan_prefills(plan, now_s)
            case "prefill_first":
                self._plan_prefills(plan, now_s)
                if plan.is_empty:
                    self._plan_decodes(plan)
            case "decode_first":
                self._plan_decode_first(plan, now_s)
        self._end_starved(plan, now_s)
        if not plan.is_empty:
            self._in_flight = plan
        plan.dropped = self._loads.take_dropped()
        plan.filled = self._prefix.take_filled()
        plan.evicted, self._evicted = self._evicted, []
        self._wake_s = self._find_wake_s(plan, now_s)
        return plan

    def _find_wake_s(self, plan: StepPlan, now_s: float) -> float:
        if plan.sequences or plan.loads or plan.expired or plan.starved:
            return -math.inf
        # Nothing can be done now: all wait for transfers, until one of these moments.
        wake_s = self._deadlines[0][0] if self._deadlines else math.inf
        wake_s = min(wake_s, self._holds.next_end_s)
        if self._pool.is_short and self._requests:
            wake_s = min(wake_s, self._retry_s)
        for request in self._loading:
            wake_s = min(wake_s, request.wait_until_s)
        for request in self._waiting:
            # The order of the queue changes with it, and another one in front may fit.
            passed_over_s = request.arrival_s + self._config.max_passover_s
            for moment_s in (passed_over_s, request.wait_until_s):
                if moment_s > now_s:
                    wake_s = min(wake_s, moment_s)
        return wake_s

    def _end_starved(self, plan: StepPlan, now_s: float) -> None:
        """End a request if the lack of memory has kept everything from being computed too long."""
        is_idle = not (plan.sequences or plan.loads or self._loading)
        if not (self._pool.is_short and is_idle and (self._running or self._waiting)):
            self._starved_since_s = None
        elif self._starved_since_s is None:
            self._starved_since_s = now_s
        elif now_s - self._starved_since_s >= MEMORY_PATIENCE_S:
            # The others have yielded their blocks to the most urgent one, and may need fewer.
            request = (self._running or self._waiting)[0]
            self._finish(request, FinishReason.ERROR, now_s)
            plan.starved.append(request)
            self._starved_since_s = None

    def _plan_decode_first(self, plan: StepPlan, now_s: float) -> None:
        """Decodes alone while any can run, except that prefills do not wait for ever.

        A request that has waited ``max_passover_s`` is due, and gets every other step until its
        prompt is computed.
        """
        is_due = not self._was_prefill_step and self._is_prefill_due(now_s)
        if is_due:
            self._plan_prefills(plan, now_s)
        self._was_prefill_step = not plan.is_empty
        if plan.is_empty:
            self._plan_decodes(plan)
        if plan.is_empty and not is_due:
            self._plan_prefills(plan, now_s)

    def _is_prefill_due(self, now_s: float) -> bool:
        arrived_by = now_s - self._config.max_passover_s
        prefilling = [r for r in self._running if r.is_prefilling]
        candidates = prefilling + self._waiting[:MAX_CANDIDATES]
        return any(request.arrival_s <= arrived_by for request in candidates)

    def _plan_decodes(self, plan: StepPlan) -> None:
        """Give one token to each running request that has computed all but its last one."""
        running = self._running
        position = 0
        # By position: preemption takes victims behind it out of the list.
        while position < len(running):
            request = running[position]
            position += 1
            if request.num_remaining_tokens == 1 and self._grow(plan, request, 1):
                self._emit(plan, request, 1)

    def _plan_prefills(self, plan: StepPlan, now_s: float) -> None:
        """Continue started prefills, then admit waiting requests, as far as the budget goes."""
        running = self._running
        position = 0
        while position < len(running):
            request = running[position]
            position += 1
            budget = self._config.max_batch_tokens - plan.num_tokens
            if budget == 0:
                return
            remaining = request.num_remaining_tokens
            if remaining > 1:
                num_tokens = self._grow(plan, request, min(remaining, budget))
                if num_tokens > 0:
                    self._emit(plan, request, num_tokens)
        self._admit_waiting(plan, now_s)

    def _emit(self, plan: StepPlan, request: Request, num_tokens: int) -> None:
        start = request.num_computed_tokens
        wants_sample = (
            num_tokens == request.num_remaining_tokens and request.sampling.max_tokens > 0
        )
        plan.sequences.append(
            ScheduledSequence(request, start, num_tokens, request.block_table, wants_sample)
        )
        plan.num_tokens += num_tokens
        request.is_scheduled = True

    # ---------------------------------------------------------------- blocks

    def _count_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.block_size)

    def _count_available(self, num_wanted: int = 0) -> int:
        """Blocks that can be had; of these, ``num_wanted`` have memory, or all."""
        self._pool.reserve(num_wanted)
        return self._pool.num_free + self._pool.num_cached

    def _allocate(self, num_blocks: int) -> tuple[int, ...]:
        pool = self._pool
        if num_blocks > pool.num_free:
            self._evicted += self._index.evict(num_blocks - pool.num_free)
        return tuple([pool.allocate() for _ in range(num_blocks)])

    def _grow(self, plan: StepPlan, request: Request, num_tokens: int) -> int:
        """Give a running request blocks for its next tokens; return for how many they suffice.

        With too few blocks, fewer tokens; with none, less urgent requests are preempted; if that
        would not help, 0: the request keeps its blocks and sits this step out.
        """
        num_held = len(request.block_table)
        end = request.num_computed_tokens + num_tokens
        num_blocks = self._count_blocks(end) - num_held
        if num_blocks <= 0:
            return num_tokens
        available = self._count_available(num_blocks)
        if num_blocks > available:
            room = (num_held + available) * self._config.block_size - request.num_computed_tokens
            if room <= 0:
                victims = self._choose_victims(request)
                for victim in victims:
                    self._preempt(victim)
                plan.preempted += victims
                return self._grow(plan, request, num_tokens) if victims else 0
            num_blocks, num_tokens = available, room
        request.block_table += self._allocate(num_blocks)
        return num_tokens

    def _choose_victims(self, request: Request) -> list[Request]:
        """Return the fewest least urgent requests whose preemption yields a block, or nothing.

        Several may share all of their blocks, so that only together they yield one.
        """
        pool = self._pool
        num_released: Counter[int] = Counter()
        candidates: list[Request] = []
        for victim in reversed(self._running):
            if victim is request:
                break
            if victim.is_scheduled:
                continue
            candidates.append(victim)
            num_released.update(victim.block_table)
            yielded = {b for b in victim.block_table if num_released[b] == pool.get_num_refs(b)}
            if yielded:
                # Those that contributed nothing stay.
                return [v for v in candidates if not yielded.isdisjoint(v.block_table)]
        return []

    def _preempt(self, victim: Request) -> None:
        self._leave_running(victim)
        victim.state = RequestState.PREEMPTED
        victim.num_preemptions += 1
        victim.num_deferrals = 0
        victim.has_loaded = False
        self._num_preemptions += 1
        insort(self._waiting, victim, key=_queue_order)

    def _leave_running(self, request: Request) -> None:
        """Take a request out of the running set; what it computed stays matchable."""
        _remove_sorted(self._running, request, _urgency)
        self._prefix.detach(request)
        request.is_prefilling = False

    # ---------------------------------------------------------------- loads

    def _plan_loads(self, plan: StepPlan, now_s: float) -> None:
        """Start loads for requests in the queue, in its order, as far as blocks allow."""
        for request in [r for r in self._loading if r.wait_until_s <= now_s]:
            request.awaits_continuation = False
            self._end_loading(request)
        if not self._waiting or not self._config.prefix_cache:
            return
        if self._tiers is None and not any(r.prefill_kv for r in self._waiting[:MAX_CANDIDATES]):
            return
        reserved = sum(map(self._count_outstanding, self._running))
        largest = self._count_largest()
        for request in self._order_waiting(now_s):
            match = self._prefix.find(request).without_copy()
            # What is matched gets pinned, so that what is loaded can be inserted behind it.
            room = min(
                self._count_available() - self._index.count_evictable(match) - reserved,
                self._pool.num_blocks - self._count_committed() - len(match.nodes) - largest,
            )
            if room > 0:
                plan.loads += self._start_load(request, match, room, now_s)
            if request.state is not RequestState.LOADING:
                reserved += self._count_lookahead(request)
                largest = max(largest, self._count_full_length(request))

    def _start_load(
        self, request: Request, match: PrefixMatch, room: int, now_s: float
    ) -> list[BlockLoad]:
        """Start to load at most ``room`` blocks for a waiting request, if there is a reason to."""
        if request.has_loaded or not request.can_reuse_prefix:
            return []
        if self._awaits_prefill(request, now_s):
            keys = self._prefix.list_prompt_keys(request, len(match.nodes))
            if len(keys) > room:
                return []  # Another instance has computed it: wait for room.
        else:
            keys = self._choose_from_tiers(request, match, room, now_s)
            if not keys:
                return []
        was_short = self._pool.is_short
        self._pool.reserve(len(keys))
        if self._pool.is_short and not was_short:
            return []  # The room was counted before the memory ran out; the next plan counts anew.
        self._index.acquire(match)
        fresh = self._allocate(len(keys))
        loads = self._loads.start(request, match, keys, fresh)
        if not loads:
            self._loads.give_up(request)
        if request.wait_until_s > now_s and (loads or request.awaits_continuation):
            _remove_sorted(self._waiting, request, _queue_order)
            request.state = RequestState.LOADING
            self._loading.append(request)
        return loads

    def _awaits_prefill(self, request: Request, now_s: float) -> bool:
        """Whether blocks of a prefill instance are there and have not been loaded."""
        return (
            request.prefill_kv is not None
            and not request.has_loaded
            and request.wait_until_s > now_s
            and self._config.prefix_cache
            and request.can_reuse_prefix
        )

    def _choose_from_tiers(
        self, request: Request, match: PrefixMatch, room: int, now_s: float
    ) -> Sequence[bytes]:
        """Return the keys of the blocks to load from lower tiers, as the planner decides."""
        room = min(room, self._pool.num_blocks // LOADING_SHARE - self._loads.num_in_transfer)
        if self._tiers is None or not isinstance(request.kv_source, TierKv) or room <= 0:
            return []
        if self._prefix.find_provider(request) is not None:
            return []
        keys = self._prefix.list_missing_keys(request, len(match.nodes))
        if not keys:
            return []
        decision = self._tiers.choose_load(request, keys, len(match.nodes), now_s)
        chosen = keys[: max(min(decision.num_blocks, room), 0)]
        if chosen:
            request.wait_until_s = now_s + decision.wait_s
        return chosen

    def _end_loading(self, request: Request) -> None:
        """Put a request that has nothing more to wait for back into the queue."""
        if request.state is RequestState.LOADING and not request.awaits_continuation:
            self._loading.remove(request)
            request.state = _get_queue_state(request)
            insort(self._waiting, request, key=_queue_order)

    def _count_full_length(self, request: Request) -> int:
        return self._count_blocks(request.max_total_tokens)

    def _count_largest(self) -> int:
        """Blocks of the longest running request at its full length; of those that decode."""
        return max(
            (self._count_full_length(r) for r in self._running if r.prefill_lease_s is None),
            default=0,
        )

    def _count_committed(self) -> int:
        """Blocks that no preemption gets back: in loads, in holds, and in holds to come."""
        to_come = sum(
            self._count_full_length(r) for r in self._running if r.prefill_lease_s is not None
        )
        return self._loads.num_pinned + self._holds.num_pinned + to_come

    # ---------------------------------------------------------------- admission

    def _admit_waiting(self, plan: StepPlan, now_s: float) -> None:
        if not self._waiting or len(self._running) >= self._config.max_running:
            return
        reserved = sum(map(self._count_outstanding, self._running))
        for request in self._order_waiting(now_s):
            budget = self._config.max_batch_tokens - plan.num_tokens
            if budget == 0 or len(self._running) >= self._config.max_running:
                return
            if request.num_overtaken < MAX_OVERTAKEN and self._prefix.is_expected(request):
                request.num_deferrals += 1
                continue
            if self._awaits_prefill(request, now_s) or self._is_barred(request, now_s):
                continue
            # No request overtakes one that lacks blocks, or large ones would starve.
            if not self._admit(plan, request, budget, reserved, now_s):
                return
            reserved += self._count_outstanding(request)

    def _count_outstanding(self, request: Request) -> int:
        """Blocks that a running request still needs, looking one block of growth ahead."""
        return self._count_lookahead(request) - len(request.block_table)

    def _count_lookahead(self, request: Request) -> int:
        num_tokens = request.num_tokens
        growth_end = min(num_tokens + self._config.block_size, request.max_total_tokens - 1)
        return self._count_blocks(max(num_tokens, growth_end))

    def _order_waiting(self, now_s: float) -> list[Request]:
        """Return the candidates of this step, the one to admit first in front.

        By priority; then preempted ones in order of arrival; then the clients in turn, the one
        with the fewest running requests first. Of one client, those passed over for
        ``max_passover_s`` or by ``MAX_OVERTAKEN`` in order of arrival, then the longest cached
        prefix first.
        """
        waiting = self._waiting
        if self._config.prefix_cache and len(waiting) <= MAX_CANDIDATES:
            arrived_by = now_s - self._config.max_passover_s

            def order(request: Request) -> tuple[int, int, int, int]:
                if request.state is RequestState.PREEMPTED:
                    return (request.priority, 0, 0, request.seq_no)
                if request.arrival_s <= arrived_by or request.num_overtaken >= MAX_OVERTAKEN:
                    return (request.priority, 1, 0, request.seq_no)
                num_cached = self._prefix.count_cached_blocks(request)
                return (request.priority, 2, -num_cached, request.seq_no)

            waiting = sorted(waiting, key=order)
        if self._live.num_clients > 1:
            waiting = self._take_turns(waiting)
        return waiting[:MAX_CANDIDATES]

    def _take_turns(self, waiting: Sequence[Request]) -> list[Request]:
        """Return requests so that clients get equal numbers of running ones; keep their orders."""
        turns = Counter(request.client for request in self._running)
        keyed: list[tuple[int, bool, int, int, Request]] = []
        for request in waiting:
            is_new = request.state is not RequestState.PREEMPTED
            turn = turns[request.client]
            turns[request.client] += 1
            # Of clients that have equally many, the one whose request came first.
            seq_no = request.seq_no
            keyed.append((request.priority, is_new, turn if is_new else 0, seq_no, request))
        keyed.sort(key=lambda entry: entry[:4])
        return [entry[4] for entry in keyed]

    def _admit(
        self, plan: StepPlan, request: Request, budget: int, reserved: int, now_s: float
    ) -> bool:
        """Start a waiting request if its blocks fit; False if they do not."""
        match = self._prefix.find(request)
        if self._fits(request, match, budget, reserved):
            self._start(plan, request, match, budget, now_s)
            return True
        # A copy pins its source beside the destination; computing those tokens does not.
        match = match.without_copy()
        if self._fits(request, match, budget, reserved):
            self._start(plan, request, match, budget, now_s)
            return True
        return False

    def _fits(self, request: Request, match: PrefixMatch, budget: int, reserved: int) -> bool:
        # No preemption frees committed blocks: running requests must reach full length without it.
        committed = self._count_committed() - self._loads.count_releasable(request)
        if request.prefill_lease_s is not None:
            committed += self._count_largest()
        if committed and committed + self._count_full_length(request) > self._pool.num_blocks:
            return False
        if self._running:
            needed = self._count_lookahead(request) + reserved
        else:
            # Alone it can have every block, so its first chunk decides: no endless wait.
            needed = self._count_blocks(min(match.num_tokens + budget, request.num_tokens))
        needed -= len(match.nodes)
        return needed <= self._count_available(needed) - self._index.count_evictable(match)

    def _start(
        self, plan: StepPlan, request: Request, match: PrefixMatch, budget: int, now_s: float
    ) -> None:
        """Move a waiting request to the running set and schedule its first chunk."""
        _remove_sorted(self._waiting, request, _queue_order)
        start = match.num_tokens
        num_tokens = min(request.num_tokens - start, budget)
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now_s
            self._note_overtaken(request)
            request.num_cached_tokens = start
            request.miss = self._prefix.explain_miss(request)
            loaded = request.loaded_blocks
            num_loaded = max(min(loaded.stop, len(match.nodes)) - loaded.start, 0)
            request.num_loaded_tokens = num_loaded * self._config.block_size
            # Of one that goes on here, another instance has counted the prompt: what that one
            # computed for it is no work that its client was spared.
            if request.prefill_kv is None and not request.output_ids:
                self._index.stats.num_queries += 1
                self._index.stats.num_query_tokens += request.prompt_len
                self._index.stats.num_hit_tokens += start
                self._index.stats.num_store_hit_tokens += request.num_loaded_tokens
        shared = self._prefix.attach(request, match)
        # Loads still in progress come too late.
        self._loads.give_up(request)
        fresh = self._allocate(self._count_blocks(start + num_tokens) - len(shared))
        if match.source is not None:
            plan.copies.append(BlockCopy(match.source.block_id, fresh[0], match.num_source_tokens))
        request.block_table = shared + fresh
        request.state = RequestState.RUNNING
        request.is_prefilling = True
        insort(self._running, request, key=_urgency)
        self._emit(plan, request, num_tokens)

    def _is_barred(self, request: Request, now_s: float) -> bool:
        """Whether one that was overtaken often enough must be admitted first."""
        return any(
            other.num_overtaken >= MAX_OVERTAKEN
            and other.seq_no < request.seq_no
            and (other.priority, other.client) == (request.priority, request.client)
            and not self._awaits_prefill(other, now_s)
            for other in self._waiting
        )

    def _note_overtaken(self, admitted: Request) -> None:
        for request in self._waiting:
            if (request.priority, request.client) == (admitted.priority, admitted.client):
                request.num_overtaken += request.seq_no < admitted.seq_no

    # ---------------------------------------------------------------- a step ends

    def complete(
        self,
        plan: StepPlan,
        sampled: Mapping[str, int],
        now_s: float,
        finished: Mapping[str, FinishReason] = _NOT_FINISHED,
    ) -> list[Request]:
        """Take in the outcome of a step; return the requests that ended with it.

        Args:
            plan: the one in flight, executed.
            sampled: a token for each sequence that wants one, by request id.
            now_s: monotonic seconds.
            finished: requests that end with this step, as the caller decided: by stop ids and
                end-of-text (with their token), or ``FinishReason.ERROR`` (without), where what
                the step computed is not to be trusted. Length and deadline are decided here.

        Raises: ConflictError (another plan, or a sample is missing); nothing has changed then.
        """
        if plan is not self._in_flight:
            raise ConflictError("engine.complete", "not the plan in flight")
        missing = [
            s.request.request_id
            for s in plan.sequences
            if s.wants_sample
            and s.request.request_id not in sampled
            and finished.get(s.request.request_id) is not FinishReason.ERROR
        ]
        if missing:
            raise ConflictError("engine.complete", f"no token sampled for requests {missing}")
        self._in_flight = None
        # Sources before tables: the LRU order wants leaves first.
        for copy in plan.copies:
            self._prefix.release_copied(copy.src_block_id)
        ended: list[Request] = []
        for sequence in plan.sequences:
            request = sequence.request
            request.is_scheduled = False
            reason = finished.get(request.request_id)
            if reason is not FinishReason.ERROR:
                self._advance(sequence)
                reason = self._take_sample(sequence, sampled, reason, now_s)
            if reason is not None:
                self._finish(request, reason, now_s)
                ended.append(request)
        return ended

    def _advance(self, sequence: ScheduledSequence) -> None:
        """Count what a step computed, and make it matchable."""
        request = sequence.request
        request.num_computed_tokens += sequence.num_tokens
        is_prompt_end = request.is_prefilling and request.num_remaining_tokens == 0
        self._prefix.index_computed(request, is_prompt_end=is_prompt_end)
        if is_prompt_end:
            request.is_prefilling = False

    def _take_sample(
        self,
        sequence: ScheduledSequence,
        sampled: Mapping[str, int],
        reason: FinishReason | None,
        now_s: float,
    ) -> FinishReason | None:
        """Append the token of a sequence, if it has one; return why its request ends, if so."""
        request = sequence.request
        if request.is_cancelled:
            return FinishReason.CANCELLED
        if sequence.wants_sample:
            request.output_ids.append(sampled[request.request_id])
            if request.first_token_s is None:
                request.first_token_s = now_s
        if reason is not None:
            return reason
        # A prompt that is only scored reaches its length without a token.
        if request.num_tokens >= request.max_total_tokens and (
            sequence.wants_sample or request.num_remaining_tokens == 0
        ):
            is_prefill = request.prefill_lease_s is not None
            return FinishReason.PREFILLED if is_prefill else FinishReason.LENGTH
        if request.deadline_s is not None and request.deadline_s <= now_s:
            return FinishReason.DEADLINE
        return None

    def _finish(self, request: Request, reason: FinishReason, now_s: float | None) -> None:
        if reason is FinishReason.PREFILLED:
            assert now_s is not None, f"request {request.request_id} is prefilled between steps"
            assert request.prefill_lease_s is not None, f"{request.request_id} does not prefill"
            request.held_blocks = request.block_table
            self._holds.hold(request, now_s + request.prefill_lease_s)
        if request.state is RequestState.RUNNING:
            self._leave_running(request)
        elif request.state is RequestState.LOADING:
            self._loading.remove(request)
        else:
            _remove_sorted(self._waiting, request, _queue_order)
        self._loads.give_up(request)
        self._wake_s = -math.inf
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.finished_s = now_s
        del self._requests[request.request_id]
        self._live.remove(request.client)

    def check(self) -> None:
        """Assert that every reference in the pool has its owner. O(blocks), for tests."""
        self._pool.check()
        self._index.check()
        owners: Counter[int] = Counter()
        for request in self._running:
            owners.update(request.block_table)
        owners.update(self._loads.list_references())
        owners.update(self._holds.list_references())
        if self._in_flight is not None:
            owners.update(copy.src_block_id for copy in self._in_flight.copies)
        for block_id in range(self._pool.num_blocks):
            num_refs = self._pool.get_num_refs(block_id)
            assert owners[block_id] == num_refs, (
                f"block {block_id}: {num_refs} references, {owners[block_id]} owners"
            )
        num_listed = len(self._running) + len(self._loading) + len(self._waiting)
        assert num_listed == len(self._requests), (
            f"{len(self._running)} running, {len(self._loading)} loading and "
            f"{len(self._waiting)} waiting of {len(self._requests)} requests"
        )
        for request in self._loading:
            assert request.state is RequestState.LOADING, f"{request.request_id} does not load"
            has_reason = self._loads.has_load(request) or request.awaits_continuation
            assert has_reason, f"request {request.request_id} waits for nothing"
        _check_sorted(self._running, _urgency)
        _check_sorted(self._waiting, _queue_order)


def _urgency(request: Request) -> tuple[int, int]:
    """Key of the running set."""
    return (request.priority, request.seq_no)


def _get_queue_state(request: Request) -> RequestState:
    return RequestState.PREEMPTED if request.num_preemptions else RequestState.WAITING


def _queue_order(request: Request) -> tuple[int, bool, int]:
    """Key of the waiting queue: preempted requests stand at the front of their class."""
    return (request.priority, request.state is not RequestState.PREEMPTED, request.seq_no)


def _remove_sorted(
    requests: list[Request], request: Request, key: Callable[[Request], tuple[int, ...]]
) -> None:
    position = bisect_left(requests, key(request), key=key)
    assert requests[position] is request, f"request {request.request_id} is out of order"
    del requests[position]


def _check_sorted(requests: list[Request], key: Callable[[Request], tuple[int, ...]]) -> None:
    keys = [key(request) for request in requests]
    assert keys == sorted(keys), f"requests out of order: {keys}"

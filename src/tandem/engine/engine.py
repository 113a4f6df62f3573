"""The engine: a loop around scheduler, runner and sampler.

Owns the data of live requests and turns each step's result into ``RequestOutput`` messages. One
thread calls ``step``. Any thread may call the other methods: they use the scheduler under a lock,
which ``step`` holds while it plans and records, but not while the model runs. So a request is
accepted, refused or cancelled at once, however long a step takes.
"""

import logging
import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypedDict

from tandem.core.clock import Clock
from tandem.core.errors import (
    CapacityError,
    NotFoundError,
    TandemError,
)
from tandem.core.instance_status import Statistics
from tandem.core.state_layout import NO_SLOT
from tandem.core.timeline import InstanceTimeline, StoreLookup
from tandem.core.wire import (
    AddRequest,
    Continuation,
    ContinueRequest,
    FinishReason,
    InstanceLoad,
    KvHandle,
    PrefillKv,
    PromptLogprobs,
    RequestOutput,
    SamplingParams,
    StepRecord,
    TokenLogprob,
)
from tandem.engine.checks import RequestChecks
from tandem.engine.groups.group import GroupBlock
from tandem.engine.scheduling.blocks import KeyedBlock
from tandem.engine.scheduling.request import Request
from tandem.engine.scheduling.scheduler import (
    ScheduledSequence,
    Scheduler,
    StepPlan,
)
from tandem.engine.stepping.describe import (
    describe_broken_row,
    describe_failure,
    describe_sequence,
    describe_start,
    describe_step,
)
from tandem.engine.stepping.messages import (
    Logits,
    Phase,
    SampledToken,
    SequenceResult,
    StateCopy,
    StepInput,
    StepResult,
    StepSequence,
    select_sequences,
)
from tandem.engine.stepping.runner import LostBlocksError, PrefillListener, Runner, StepHandle
from tandem.engine.stepping.sampler_state import BROKEN_ROW
from tandem.engine.timelines import TimelineLog
from tandem.engine.transfers import BlockTransfers
from tandem.models.tokenizing.grammars import find_end_ids

__all__ = [
    "Engine",
    "EngineStep",
    "MissingBlocks",
    "PrefillView",
    "StepObserver",
]

logger = logging.getLogger(__name__)

NOTHING = StepInput([])

RESTORED_TOKENS = 512
"""Number of tokens computed per step when the states of a failed step are recomputed."""
NO_FAILURES: Mapping[int, TandemError] = MappingProxyType({})
DEFAULT_TIMELINES = 256
MAX_STEP_RECORDS = 256
"""Largest number of step records kept until ``take_steps`` is called."""
MAX_ENDED_PREFILLS = 4096
"""Largest number of ended prefills that are remembered, so that a late question about one is
answered at once instead of waiting.
"""


@dataclass(slots=True)
class _Live:
    """The engine's data about a live request, in addition to the scheduler's."""

    request: Request
    seed: int
    """Seed of the random stream; drawn at acceptance if the request has none."""
    stop_ids: frozenset[int]
    """Token ids that end the request: the model's, unless ignored, and the request's."""
    is_started: bool = False
    """True if the runner, which executes steps, has been given the request's sampling state."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    pooled: bytes | None = None
    """Result vector of a request for an embedding or scores, as float32 bytes; None until the
    prompt's end has been computed, and for requests that generate."""
    has_reported: bool = False
    """True if the first output, with the prompt's length and its cached tokens, was sent."""


class _HoldFacts(TypedDict, total=False):
    """Fields of ``RequestOutput`` that only the last output of a prefill-only request carries, for
    the decode instance.
    """

    kv_handle: KvHandle
    continuation: Continuation


class _PromptFacts(TypedDict, total=False):
    """Fields of ``RequestOutput`` about the prompt, in a request's first and last output only."""

    prompt_len: int
    cached_len: int
    queue_s: float | None
    prompt_logprobs: PromptLogprobs | None


class MissingBlocks(NamedTuple):
    """The full blocks of a prompt, divided into those that the device has and those that it
    lacks.
    """

    num_cached: int
    """Number of leading full blocks that the device holds."""
    keys: list[bytes]
    """Keys of the full blocks that the device lacks, which follow those it has. A block that ends
    with the last token is left out, because that token is computed in any case."""
    cached_keys: list[bytes]
    """Keys of the blocks that the device has."""


class PrefillView(NamedTuple):
    """The progress of a prefill-only request: which of its blocks other instances may read."""

    request: Request
    is_held: bool
    """True if the request has ended and its blocks are held."""
    block_ids: tuple[int, ...]
    """Block ids by position; ``num_blocks`` of them."""
    num_complete: int
    """Number of leading blocks whose KV is computed in all layers."""
    num_blocks: int
    """Number of leading blocks whose KV is computed in at least ``num_layers`` layers."""
    num_layers: int


@dataclass(slots=True, eq=False)
class EngineStep:
    """A step that is planned and perhaps started, with its outputs so far; see
    ``Engine.plan_step``.
    """

    plan: StepPlan
    outputs: list[RequestOutput]
    """Outputs that were known when the step was planned, such as ends of expired requests."""
    message: StepInput = NOTHING
    """Input of the runner; set by ``Engine.start_step``."""
    begin_s: float = 0.0
    """Time at which ``Engine.start_step`` was called, in seconds on the engine's clock."""


class MaskSource(Protocol):
    """The part of ``Grammars`` that tells when requests with a grammar can be planned."""

    def prepare(self, grammar: str, on_ready: Callable[[], None]) -> bool:
        """Begin to compile the grammar of a request; see ``Grammars.prepare``."""
        ...

    def release(self, grammar: str) -> None:
        """Note that a request of this grammar has ended."""
        ...

    def is_slow(self, sequence_id: int) -> bool:
        """Return True if the last mask of a sequence took long to compute."""
        ...

    def await_mask(self, sequence_id: int, on_ready: Callable[[], None]) -> bool:
        """Return True if no mask is being computed; see ``Grammars.await_mask``."""
        ...


class StepObserver(Protocol):
    """A receiver of the durations of steps, by which later durations are estimated."""

    def note_step(self, num_prefill_tokens: int, num_tokens: int, seconds: float) -> None:
        """Record the duration of a step. Called under the engine's lock, so it must return at
        once.
        """
        ...


class Engine:
    """The engine of an instance, which runs requests to their end.

    Args:
        scheduler: plans the steps; owned.
        runner: executes the steps; owned. Called from the thread that calls ``step``.
        clock: clock of deadlines and durations.
        vocab_size: number of token ids; requests with others are refused.
        num_labels: number of classes of a classification model; 0: the model generates text.
        gives_vectors: False if the runner cannot return hidden states.
        eos_token_ids: the model's own end-of-text tokens.
        observer: told the duration of each step, for planning loads; None: nobody.
        timelines: records the course of requests; None: a small one is made. Owned.
        masks: tells when requests with a grammar can be planned; None: at once.
        is_overlapped: True to plan a step while the one before it runs. The runner's ``begin`` must
            then return at once, and the scheduler's ``engine.overlap`` must be on.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Clock,
        *,
        vocab_size: int,
        num_labels: int = 0,
        gives_vectors: bool = True,
        eos_token_ids: tuple[int, ...],
        observer: StepObserver | None = None,
        timelines: TimelineLog | None = None,
        masks: MaskSource | None = None,
        is_overlapped: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._transfers: BlockTransfers | None = None
        self._listener: PrefillListener | None = None
        self._prefilling: dict[str, ScheduledSequence] = {}
        """Sequences of the running step whose blocks another instance may be reading."""
        self._ended_prefills: OrderedDict[str, None] = OrderedDict()
        """Ids of the prefills that ended last, their blocks held or not."""
        self._lost_blocks: frozenset[int] = frozenset()
        """Ids of KV blocks whose content the running step could not read, such as latents in a file
        on a failing disk.
        """
        self._num_layers_done = 0
        self._observer = observer
        if timelines is None:
            timelines = TimelineLog(DEFAULT_TIMELINES, block_size=1)
        self._timelines = timelines
        self._masks = masks
        self._slow: list[Request] = []
        """Requests of the step that has just ended whose next mask may take long."""
        self._clock = clock
        self._checks = RequestChecks(vocab_size, num_labels, gives_vectors=gives_vectors)
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._live: dict[str, _Live] = {}
        self._ended: list[int] = []
        """Ids of ended sequences whose sampling state the runner still has."""
        self._is_overlapped = is_overlapped
        self._running: tuple[EngineStep, StepHandle] | None = None
        """Step in progress between two calls of ``step``, with overlap; None: none."""
        self._pending: list[RequestOutput] = []
        self._adapters: dict[str, int] = {}
        """Number of live requests of each LoRA adapter, by digest."""
        self._leaving: set[str] = set()
        """Digests of LoRA adapters that take no further requests."""
        self._unused: list[str] = []
        """Digests of removed LoRA adapters whose last request has just ended."""
        self.on_adapter_unused: Callable[[str], None] | None = None
        """Callback with the digest of a removed adapter whose last request has ended. Called
        without the lock, on any thread."""
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self.counters = Statistics()
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEP_RECORDS)
        """Step records since the last ``take_steps``."""

    def attach_transfers(self, transfers: BlockTransfers) -> None:
        """Set the object that moves blocks to and from lower tiers, before the first step. Not
        owned.
        """
        self._transfers = transfers

    def attach_listener(self, listener: PrefillListener) -> None:
        """Set the object that is told of the progress of prefills, before the first step. Not
        owned.
        """
        self._listener = listener

    def add_adapter(self, digest: str, identity: bytes) -> None:
        """Accept requests for a LoRA adapter, whose weights the runner must have. Any thread.

        Args:
            digest: digest of the adapter.
            identity: ``KvIdentity.digest`` of the KV that it computes.
        """
        with self._lock:
            self._scheduler.add_identity(digest, identity)
            self._adapters.setdefault(digest, 0)
            self._leaving.discard(digest)

    def remove_adapter(self, digest: str) -> bool:
        """Refuse further requests for an adapter; return False if it is unknown or removed. Any
        thread.
        """
        with self._lock:
            is_known = digest in self._adapters and digest not in self._leaving
            if is_known:
                self._leaving.add(digest)
            return is_known

    def forget_adapter(self, digest: str) -> bool:
        """Forget an adapter that ``remove_adapter`` has removed; return False if it was not removed
        or still has requests. Any thread.
        """
        with self._lock:
            if digest not in self._leaving or self._adapters[digest]:
                return False
            self._leaving.discard(digest)
            del self._adapters[digest]
            return True

    def find_prefill(self, request_id: str) -> PrefillView | None:
        """Return the progress of a prefill-only request; None if it is neither live nor held. Any
        thread.

        The blocks are valid for as long as later calls return the same ``Request`` object with an
        equal number of preemptions.
        """
        with self._lock:
            request = self._scheduler.find_prefill(request_id)
            if request is None:
                return None
            if request.is_finished:
                num_held = len(request.held_blocks)
                return PrefillView(request, True, request.held_blocks, num_held, num_held, 0)
            num_complete = self._count_blocks(request, request.num_computed_tokens)
            num_blocks, num_layers = num_complete, 0
            running = self._prefilling.get(request_id)
            if running is not None and running.request is request and self._num_layers_done:
                num_blocks = self._count_blocks(request, running.start + running.num_tokens)
                num_layers = self._num_layers_done
            block_ids = request.block_table[:num_blocks]
            return PrefillView(request, False, block_ids, num_complete, num_blocks, num_layers)

    def has_ended_prefill(self, request_id: str) -> bool:
        """Return True if a prefill-only request has ended here recently. Any thread.

        If this is True while ``find_prefill`` returns None, the prefill's blocks have been
        released; if it is False, the request may still arrive.
        """
        return request_id in self._ended_prefills

    def _count_blocks(self, request: Request, num_tokens: int) -> int:
        """Return how many blocks the first ``num_tokens`` tokens fill; the whole prompt's last
        block counts even if it is partial.
        """
        size = self._scheduler.block_size
        return -(-num_tokens // size) if num_tokens == request.prompt_len else num_tokens // size

    def find_missing_blocks(self, message: AddRequest) -> MissingBlocks:
        """Return the keys of a prompt's full blocks, divided by whether the device has them. Any
        thread.

        The caller can look up the missing ones in lower tiers before it adds the request.

        Raises: NotFoundError (its adapter is not loaded).
        """
        with self._lock:
            self._check_adapter(message.adapter)
        keys = self._scheduler.make_block_keys(
            message.prompt_ids, message.cache_salt, message.adapter
        )
        if message.sampling.needs_whole_prompt:
            keys = []
        with self._lock:
            num_cached = self._scheduler.count_cached_blocks(keys)
        return MissingBlocks(num_cached, keys[num_cached:], keys[:num_cached])

    def add(
        self, message: AddRequest, *, num_stored_blocks: int = 0, lookup: StoreLookup | None = None
    ) -> None:
        """Accept a request; its outputs come from ``step``. Any thread.

        Args:
            message: the request.
            num_stored_blocks: number of its leading full blocks that the device or lower tiers
                have.
            lookup: record of the store lookup that found them, for the request's timeline.

        Raises:
            ConfigError: a field has a value that this model cannot serve.
            NotFoundError: its adapter is not loaded.
            ConflictError: a live request has this id.
            CapacityError: the queue is full.
        """
        transfers = self._transfers
        can_read = transfers is not None and PrefillKv in transfers.sources
        self._checks.check(message, can_read_instances=can_read)
        now_s = self._clock.now_s()
        params = message.sampling
        request = Request(
            request_id=message.request_id,
            prompt_ids=message.prompt_ids,
            sampling=params,
            arrival_s=now_s,
            priority=message.priority,
            deadline_s=None if message.timeout_s is None else now_s + message.timeout_s,
            client=message.client,
            weight=message.weight,
            cache_salt=message.cache_salt,
            adapter=message.adapter,
            kv_source=message.kv_source,
            prefill_lease_s=message.prefill_lease_s,
            message_end=message.message_end,
            awaits_continuation=message.awaits_continuation,
            num_stored_blocks=num_stored_blocks,
            expected_len=message.expected_len,
        )
        seed = secrets.randbits(63) if params.seed is None else params.seed
        if message.continuation is not None:
            request.output_ids += message.continuation.token_ids
            seed = message.continuation.seed
        if self._masks is not None and params.grammar:
            # Outside the lock, as a grammar that is compiled at this moment calls back at once.
            request.queue.awaits_mask = True
            if self._masks.prepare(params.grammar, partial(self._note_mask, request)):
                request.queue.awaits_mask = False
        try:
            self._add(message, request, seed, lookup)
        except TandemError:
            self._release_grammar(params)
            raise

    def _add(
        self, message: AddRequest, request: Request, seed: int, lookup: StoreLookup | None
    ) -> None:
        params = message.sampling
        with self._lock:
            self._check_adapter(message.adapter)
            self._scheduler.add(request)
            if message.adapter:
                self._adapters[message.adapter] += 1
            stop_ids = self._collect_stop_ids(params)
            self._live[request.request_id] = _Live(request, seed, stop_ids)
            self._timelines.open(request, lookup)
            if not (request.output_ids or request.awaits_continuation):
                # Count the prompt once: for a continued request, the first instance has counted it.
                self.counters.prompt_tokens += request.prompt_len
            self._work.notify()

    def continue_request(self, message: ContinueRequest) -> bool:
        """Append the tokens of another instance to a request that waits for them; return False if
        it is not live or waits no more. See ``ContinueRequest``.

        Raises: ConfigError (a token outside the vocabulary, or no room for another one).
        """
        with self._lock:
            live = self._live.get(message.request_id)
            if live is None:
                return False
            self._checks.check_continuation(message.continuation, live.request.sampling)
            tokens = message.continuation.token_ids
            if not self._scheduler.continue_request(message.request_id, tokens):
                return False
            live.seed = message.continuation.seed
            self._work.notify()
            return True

    def release_hold(self, request_id: str) -> bool:
        """Release the blocks held for an ended prefill; return False if none are held."""
        with self._lock:
            self._work.notify()
            was_held = self._scheduler.release_hold(request_id)
        self._tell_listener()
        return was_held

    def cancel(self, request_id: str) -> bool:
        """End a request, whose last output says ``CANCELLED``; return False if it is not live."""
        with self._lock:
            live = self._live.get(request_id)
            if live is None or not self._scheduler.cancel(request_id):
                return False
            if live.request.is_finished:
                self._pending.append(self._end(live))
            self._work.notify()
        self._tell_listener()
        return True

    def flush_cache(self) -> int:
        """Discard the prefix cache; return the number of blocks freed at once."""
        with self._lock:
            self._work.notify()
            return self._scheduler.flush_cache()

    def load_done(self, request: Request, blocks: Sequence[GroupBlock]) -> None:
        """Record blocks of a request whose load ended with verified content. Any thread."""
        with self._lock:
            self._scheduler.load_done(request, blocks)
            self._timelines.note_loaded(request, blocks, self._clock.now_s())
            self._work.notify()

    def load_failed(
        self, request: Request, blocks: Sequence[GroupBlock], reason: str = "failed"
    ) -> None:
        """Record blocks whose load failed; the request computes them. Any thread."""
        with self._lock:
            self._scheduler.load_failed(request, blocks)
            self._timelines.note_load_failed(request, blocks, reason, self._clock.now_s())
            self._work.notify()

    def _note_mask(self, request: Request) -> None:
        """Record that the next mask of a request is computed. Any thread, without the lock."""
        with self._lock:
            is_slow = request.queue.is_mask_slow
            self._scheduler.note_mask(request, is_ready=True, is_slow=is_slow)
            self._work.notify()

    def _release_grammar(self, params: SamplingParams) -> None:
        if self._masks is not None and params.grammar:
            self._masks.release(params.grammar)

    def is_unchanged(self, block: KeyedBlock) -> bool:
        """Return True if a block copied out still has its content; see
        ``Scheduler.is_unchanged``.
        """
        with self._lock:
            return self._scheduler.is_unchanged(block)

    def take_steps(self) -> list[StepRecord]:
        """Return records of the steps since the last call, at most ``MAX_STEP_RECORDS``. Any
        thread.
        """
        with self._lock:
            steps = list(self._steps)
            self._steps.clear()
        return steps

    def get_stats(self) -> Statistics:
        """Return the scheduler's gauges and counters for the metrics. Any thread."""
        with self._lock:
            return self._scheduler.get_stats()

    def measure_load(self) -> InstanceLoad:
        """Return the load of the live requests: the tokens and blocks that they still need. Any
        thread.
        """
        with self._lock:
            return self._scheduler.measure_load()

    def list_timelines(self, request_ids: Sequence[str]) -> list[InstanceTimeline]:
        """Return the timelines (records of what happened when) of live and ended requests; unknown
        ids are left out.
        """
        with self._lock:
            now_s = self._clock.now_s()
            found = [self._timelines.get(request_id, now_s) for request_id in request_ids]
        return [timeline for timeline in found if timeline is not None]

    def is_live(self, request_id: str) -> bool:
        """Return True if a request of this id has not ended."""
        return request_id in self._live

    @property
    def has_requests(self) -> bool:
        """True if any accepted request has not ended."""
        return bool(self._live)

    def wait_for_work(self, timeout_s: float) -> bool:
        """Block until a step can be planned; return False if the timeout ended first.

        Requests that only wait for loads do not count, until a load ends or their time limit
        passes.
        """
        with self._work:
            wake_in_s = self._scheduler.wake_s - self._clock.now_s()
            return self._work.wait_for(self._has_work, max(min(timeout_s, wake_in_s), 0.0))

    def _has_work(self) -> bool:
        is_due = self._scheduler.wake_s <= self._clock.now_s()
        return is_due or bool(self._pending) or self._running is not None

    def step(self) -> list[RequestOutput]:
        """Plan, run and record one step; return the outputs of its requests, possibly none.

        With overlap, this call begins a step and the next call records it: meanwhile the caller
        delivers the outputs, and the step after it is planned.

        If the runner fails, the step is repeated in parts: requests that fail by themselves end
        with ``ERROR``, and the others continue.
        """
        if self._is_overlapped:
            return self._step_ahead()
        step = self.plan_step()
        message = self.start_step(step)
        if message is None:
            return step.outputs
        return self._finish(step, self._runner.begin(message, self.watch_layers(step)))

    def _step_ahead(self) -> list[RequestOutput]:
        """Plan the next step while one runs; then wait for the running one, record it and begin the
        next.
        """
        running, self._running = self._running, None
        step = self.plan_step()
        outputs = step.outputs
        if running is not None:
            outputs = self._finish(*running) + outputs
        message = self.start_step(step)
        if message is not None:
            step.outputs = []
            self._running = (step, self._runner.begin(message, self.watch_layers(step)))
        return outputs

    def _finish(self, step: EngineStep, handle: StepHandle) -> list[RequestOutput]:
        """Wait for a step to end and record its result."""
        try:
            result = self._runner.finish(handle)
        except Exception as error:  # A process edge: requests must end.
            logger.exception("event=step_failed requests=%d", len(step.plan.sequences))
            requests = {s.request.sequence_id: s.request for s in step.plan.sequences}
            results, failures = self._run_apart(step.message, requests, error)
            result = StepResult([results[s.sequence_id] for s in step.message.sequences])
            return self.end_step(step, result, failures)
        return self.end_step(step, result)

    def _run_apart(
        self, message: StepInput, requests: Mapping[int, Request], error: Exception
    ) -> tuple[dict[int, SequenceResult], dict[int, TandemError]]:
        """Repeat a failed step in halves, recursively, to find the sequences that fail by
        themselves.

        A step may be repeated, because it writes the same KV to the same places, and its samples
        count only when it succeeds. The states with which it began are recomputed first, because
        the failed step may have changed them. If one of n sequences fails, the repetitions together
        compute fewer tokens than two more steps of this size.

        Args:
            message: the step that failed.
            requests: its requests by sequence id.
            error: the error of the failed step.

        Returns: results by sequence id, which are empty for sequences that fail alone; and the
            errors of these by sequence id.
        """
        sequences = message.sequences
        if len(sequences) == 1:
            failed = sequences[0].sequence_id
            if isinstance(error, LostBlocksError):
                self._lost_blocks |= error.block_ids
            return {failed: SequenceResult(failed)}, {failed: describe_failure(error)}
        results: dict[int, SequenceResult] = {}
        failures: dict[int, TandemError] = {}
        middle = len(sequences) // 2
        for half in (sequences[:middle], sequences[middle:]):
            part = select_sequences(message, half)
            try:
                self._restore_states(part, requests)
                result = self._runner.finish(self._runner.begin(part))
            except Exception as cause:  # noqa: BLE001 - logged with the first; the request tells.
                found, failed = self._run_apart(part, requests, cause)
                results |= found
                failures |= failed
            else:
                results |= {given.sequence_id: given for given in result.sequences}
        return results, failures

    def _restore_states(self, message: StepInput, requests: Mapping[int, Request]) -> None:
        """Recompute the recurrent states with which a step begins, except those that it loads
        itself.
        """
        loaded = {copy.target for copy in message.state_loads}
        for sequence in message.sequences:
            if sequence.state_slot == NO_SLOT or sequence.state_slot in loaded:
                continue
            request = requests[sequence.sequence_id]
            known = request.get_tokens(0, sequence.start)
            for start in range(0, sequence.start, RESTORED_TOKENS):
                again = StepSequence(
                    sequence_id=sequence.sequence_id,
                    phase=Phase.PREFILL,
                    start=start,
                    token_ids=known[start : start + RESTORED_TOKENS],
                    block_table=sequence.block_table,
                    logits=Logits.NONE,
                    adapter=sequence.adapter,
                    state_slot=sequence.state_slot,
                    prompt_len=request.prompt_len,
                )
                self._runner.finish(self._runner.begin(StepInput([again])))

    def plan_step(self) -> EngineStep:
        """Plan a step and begin its transfers of KV.

        A driver that lets time pass within a step, such as a simulator, calls the parts of ``step``
        separately: ``plan_step``, ``start_step``, the runner, ``end_step``. With overlap, the next
        step may be planned before the last one has ended.
        """
        with self._lock:
            outputs, self._pending = self._pending, []
            now_s = self._clock.now_s()
            plan = self._scheduler.schedule(now_s)
            self._timelines.note_plan(plan, now_s)
            outputs += [self._end(self._live[request.request_id]) for request in plan.expired]
            outputs += [self._end_starved(request) for request in plan.starved]
        if self._transfers is not None:
            self._transfers.begin(plan)
        if plan.is_empty:
            self._tell_listener()  # Leases may have ended.
        return EngineStep(plan, outputs)

    def start_step(self, step: EngineStep) -> StepInput | None:
        """Return the runner's input for a planned step; None if there is nothing to compute.

        All earlier steps must have ended. The runner also gets the callback of ``watch_layers``.
        Call ``end_step`` before the next step is started.
        """
        with self._lock:
            step.begin_s = self._clock.now_s()
            if step.plan.is_empty or not self._scheduler.settle(step.plan):
                return None
            sequences = [describe_sequence(sequence) for sequence in step.plan.sequences]
            for planned in step.plan.sequences:
                if planned.request.sampling.pooling is not None:
                    # Mark a sequence whose hidden states are pooled (for an embedding) as started,
                    # because the runner now keeps a sum for it and must be told when it ends.
                    self._live[planned.request.request_id].is_started = True
            starting = [
                live
                for sequence in step.plan.sequences
                if sequence.wants_sample
                and not (live := self._live[sequence.request.request_id]).is_started
            ]
            starts = [describe_start(live.request, live.seed, live.stop_ids) for live in starting]
            for live in starting:
                live.is_started = True
            ends, self._ended = self._ended, []
            plan = step.plan
            saves = [StateCopy(s.request.state_notes.slot, s.slot) for s in plan.state_saves]
            step.message = StepInput(
                sequences,
                plan.copies,
                starts,
                ends,
                plan.state_loads,
                saves,
                plan.window_copies,
                plan.unused_slots,
            )
            return step.message

    def end_step(
        self,
        step: EngineStep,
        result: StepResult,
        failures: Mapping[int, TandemError] = NO_FAILURES,
    ) -> list[RequestOutput]:
        """Record the result of a step; return its outputs, including those of its planning.

        Args:
            step: the step that was started.
            result: result of the runner.
            failures: errors by sequence id, of the sequences that the runner could not compute.
                Their requests end, and nothing that the step computed for them is kept.
        """
        plan = step.plan
        with self._lock:
            end_s = self._clock.now_s()
            seconds = end_s - step.begin_s
            self.counters.num_steps += 1
            self.counters.step_seconds += seconds
            record = describe_step(plan, seconds)
            self._steps.append(record)
            if self._observer is not None:
                self._observer.note_step(record.prefill_tokens, plan.num_tokens, seconds)
            self._timelines.note_step(plan, seconds)
            self._prefilling = {}
            outputs = step.outputs + self._record(plan, result, failures, end_s)
            lost, self._lost_blocks = self._lost_blocks, frozenset[int]()
            if lost:
                # The content of these blocks could not be read. Requests that computed with them
                # have ended with an error; forget the blocks, so that no later prompt reuses them.
                self._scheduler.forget_blocks(lost)
            slow, self._slow = self._slow, []
        for request in slow:
            assert self._masks is not None
            if self._masks.await_mask(request.sequence_id, partial(self._note_mask, request)):
                self._note_mask(request)
        self._tell_listener()
        return outputs

    def watch_layers(self, step: EngineStep) -> Callable[[int], None] | None:
        """Return the runner's ``on_layer`` callback for a started step.

        None if no prefill-only request is in the step, so that no instance waits for its layers.
        """
        with self._lock:
            self._num_layers_done = 0
            self._prefilling = {}
            if self._listener is None:
                return None
            self._prefilling = {
                sequence.request.request_id: sequence
                for sequence in step.plan.sequences
                if sequence.request.prefill_lease_s is not None
            }
            return self._note_layer if self._prefilling else None

    def _note_layer(self, layer: int) -> None:
        with self._lock:
            self._num_layers_done = layer + 1
        self._tell_listener()

    def _tell_listener(self) -> None:
        """Tell the ``PrefillListener`` of progress, and ``on_adapter_unused`` of adapters that no
        request uses any more. The engine's lock is not held, because the listener calls
        ``find_prefill``.
        """
        if self._unused:
            with self._lock:
                unused, self._unused = self._unused, []
            for digest in unused:
                if self.on_adapter_unused is not None:
                    self.on_adapter_unused(digest)
        if self._listener is not None:
            self._listener.note_progress()

    def _check_adapter(self, digest: str) -> None:
        if digest and (digest not in self._adapters or digest in self._leaving):
            what = f"the adapter {digest[:12]} is not loaded here: load it, or ask for another"
            raise NotFoundError("engine.add", what, field="model")

    def _collect_stop_ids(self, params: SamplingParams) -> frozenset[int]:
        own: Sequence[int] = () if params.ignore_eos else self._eos_token_ids
        if params.grammar:
            # A complete grammar allows only an end of text, so that token must stop the request.
            own = find_end_ids(self._eos_token_ids, self._vocab_size)
        return frozenset((*own, *params.stop_token_ids))

    def _record(
        self,
        plan: StepPlan,
        result: StepResult,
        failures: Mapping[int, TandemError],
        now_s: float,
    ) -> list[RequestOutput]:
        sampled: dict[str, list[int]] = {}
        finished: dict[str, FinishReason] = {}
        late = [
            sequence.request.request_id
            for sequence, given in zip(plan.sequences, result.sequences, strict=True)
            if given.is_late
        ]
        for sequence, given in zip(plan.sequences, result.sequences, strict=True):
            request_id = sequence.request.request_id
            live = self._live[request_id]
            if given.sequence_id in failures:
                finished[request_id] = FinishReason.ERROR
                continue
            if given.pooled:
                live.pooled = given.pooled
            if given.prompt_logprobs:
                # Position i scores token i + 1; a preempted prompt is scored again from its start.
                live.prompt_logprobs[sequence.start :] = given.prompt_logprobs
            if not given.tokens:
                continue
            token_ids = [token.token_id for token in given.tokens]
            if BROKEN_ROW in token_ids:
                finished[request_id] = FinishReason.ERROR
                continue
            for position, token_id in enumerate(token_ids):
                if token_id in live.stop_ids:
                    finished[request_id] = FinishReason.STOP
                    del token_ids[position + 1 :]
                    break
            sampled[request_id] = token_ids
        known = [len(sequence.request.output_ids) for sequence in plan.sequences]
        self._scheduler.complete(plan, sampled, now_s, finished, late)
        outputs: list[RequestOutput] = []
        for sequence, given, num_known in zip(plan.sequences, result.sequences, known, strict=True):
            live = self._live[sequence.request.request_id]
            taken = given.tokens[: len(sequence.request.output_ids) - num_known]
            self._hold_slow(live.request)
            output = self._report(live, taken, failures.get(given.sequence_id))
            if output is not None:
                outputs.append(output)
        return outputs

    def _hold_slow(self, request: Request) -> None:
        """Keep a request out of the next steps if its next mask may take long, until that is
        computed.
        """
        if self._masks is None or not request.sampling.grammar or request.is_finished:
            return
        is_slow = self._masks.is_slow(request.sequence_id)
        self._scheduler.note_mask(request, is_ready=not is_slow, is_slow=is_slow)
        if is_slow:
            self._slow.append(request)

    def _report(
        self, live: _Live, taken: list[SampledToken], failure: TandemError | None
    ) -> RequestOutput | None:
        """Return the output of a step for one request (new tokens, its end, or both); None if it
        has none.
        """
        request = live.request
        reason = request.finish_reason
        if failure is not None:
            return self._end(live, failure)
        if not taken and reason is FinishReason.ERROR:
            return self._end(live, describe_broken_row(request.sampling))
        if not taken or reason is FinishReason.CANCELLED:
            return self._end(live) if request.is_finished else None
        if reason is FinishReason.STOP:
            return self._end(live, taken=taken)
        self.counters.generated_tokens += len(taken)
        output = RequestOutput(
            request_id=request.request_id,
            token_ids=[token.token_id for token in taken],
            finish_reason=reason,
            logprobs=_list_logprobs(taken),
            **self._describe_prompt(live),
            **_describe_hold(live),
        )
        if reason is not None:
            self._forget(live)
        return output

    def _end_starved(self, request: Request) -> RequestOutput:
        failure = CapacityError(
            "engine.step", "the machine has had no memory for the request's KV: try again later"
        )
        logger.error("event=memory_short request=%s error=%s", request.request_id, failure)
        return self._end(self._live[request.request_id], failure)

    def _end(
        self,
        live: _Live,
        failure: TandemError | None = None,
        taken: Sequence[SampledToken] = (),
    ) -> RequestOutput:
        """Make the last output of a request that has ended, and drop its data.

        Args:
            live: data of the request.
            failure: error that ended it; None if nothing failed.
            taken: tokens of its last step; the last of them is the stop token, which is not output.
        """
        request = live.request
        assert request.is_finished, f"request {request.request_id} goes on"
        self.counters.generated_tokens += max(len(taken) - 1, 0)
        self._forget(live)
        return RequestOutput(
            request_id=request.request_id,
            token_ids=[token.token_id for token in taken[:-1]],
            finish_reason=FinishReason.ERROR if failure else request.finish_reason,
            logprobs=_list_logprobs(taken),
            stop_token_id=taken[-1].token_id if taken else None,
            pooled=live.pooled,
            error_code=None if failure is None else failure.code,
            error_text=None if failure is None else failure.what,
            **self._describe_prompt(live),
        )

    def _describe_prompt(self, live: _Live) -> "_PromptFacts":
        """Return the facts about the prompt that the first and the last output carry."""
        request = live.request
        if live.has_reported and not request.is_finished:
            return {}
        logprobs: PromptLogprobs | None = None
        num_top = request.sampling.prompt_logprobs
        if num_top is not None and not live.has_reported:
            logprobs = PromptLogprobs.pack([None, *live.prompt_logprobs], num_top)
        live.has_reported = True
        begun_s = request.report.first_scheduled_s
        return {
            "prompt_len": request.prompt_len,
            "cached_len": request.report.num_cached_tokens,
            "queue_s": None if begun_s is None else begun_s - request.arrival_s,
            "prompt_logprobs": logprobs,
        }

    def _forget(self, live: _Live) -> None:
        request_id = live.request.request_id
        del self._live[request_id]
        self._release_grammar(live.request.sampling)
        if live.is_started:
            self._ended.append(live.request.sequence_id)
        adapter = live.request.adapter
        if adapter:
            self._adapters[adapter] -= 1
            if adapter in self._leaving and not self._adapters[adapter]:
                self._unused.append(adapter)
        if live.request.prefill_lease_s is not None:
            self._ended_prefills[request_id] = None
            if len(self._ended_prefills) > MAX_ENDED_PREFILLS:
                self._ended_prefills.popitem(last=False)
        self._timelines.close(live.request, self._clock.now_s())
        self.counters.num_finished += 1


def _list_logprobs(tokens: Sequence[SampledToken]) -> list[TokenLogprob] | None:
    """Return the log-probabilities of sampled tokens; None if they have none."""
    if not tokens or tokens[0].logprob is None:
        return None
    return [token.logprob for token in tokens if token.logprob is not None]


def _describe_hold(live: _Live) -> _HoldFacts:
    """Return the fields of a prefill's last output with which a decode instance can read its blocks
    and continue; empty if the request was no prefill-only one.
    """
    request = live.request
    if request.finish_reason is not FinishReason.PREFILLED:
        return {}
    assert request.prefill_lease_s is not None, f"{request.request_id} has no lease"
    return {
        "kv_handle": KvHandle(
            request_id=request.request_id,
            block_ids=request.held_blocks,
            num_tokens=request.prompt_len,
            lease_s=request.prefill_lease_s,
        ),
        "continuation": Continuation(token_ids=request.output_ids, seed=live.seed),
    }

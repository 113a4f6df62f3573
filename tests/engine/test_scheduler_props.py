"""Goal: the deciders never let a request read KV that is not its own, and every request ends.

Method: a toy runner keeps, per slot of each block, a fingerprint of *all* the tokens (and the salt)
up to that position, as real KV would depend on them. Each step it performs the plan's copies and
writes and then checks every position that a scheduled token attends to. Random traffic from a tiny
vocabulary, small blocks and small pools makes hits, copies, duplicates, evictions and preemptions
the normal case. Mutants at the end show that the runner does notice what it is there to notice.
"""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tandem.core.errors import CapacityError, ConfigError
from tandem.core.spec import make_root_key
from tandem.core.wire import FinishReason, SamplingParams
from tandem.engine.blocks import BlockPool
from tandem.engine.config import EngineConfig
from tandem.engine.prefix_index import PrefixIndex, PrefixMatch
from tandem.engine.request import Request, RequestState
from tandem.engine.scheduler import Scheduler, StepPlan

BLOCK_SIZE = 4
ORDERS = ["chunked", "prefill_first", "decode_first"]
SALTS = ["", "other"]
VOCABULARY = 3
POISON = -1


class WrongKvError(AssertionError):
    """A scheduled token would have attended to KV that is not that of its own sequence."""


class ToyRunner:
    """Executes plans on blocks whose KV is a fingerprint of everything before it."""

    def __init__(self, num_blocks: int, rng: random.Random) -> None:
        self.kv = [[POISON] * BLOCK_SIZE for _ in range(num_blocks)]
        self.rng = rng
        self.num_computed = 0

    def execute(self, plan: StepPlan, failed=frozenset()) -> dict[str, int]:
        """Copy, write, check what is read, and sample; for ``failed`` ones, write nonsense."""
        self.copy(plan)
        expected = {s.request.request_id: fingerprint(s.request) for s in plan.sequences}
        # The order within a step is the runner's own business, so any must do.
        sequences = self.rng.sample(plan.sequences, len(plan.sequences))
        for s in sequences:
            for position in range(s.start, s.start + s.num_tokens):
                block_id = s.block_table[position // BLOCK_SIZE]
                is_failed = s.request.request_id in failed
                kv = POISON if is_failed else expected[s.request.request_id][position]
                self.kv[block_id][position % BLOCK_SIZE] = kv
                self.num_computed += 1
        sequences = [s for s in sequences if s.request.request_id not in failed]
        for s in sequences:
            for position in range(s.start + s.num_tokens):
                block_id = s.block_table[position // BLOCK_SIZE]
                kv = self.kv[block_id][position % BLOCK_SIZE]
                if kv != expected[s.request.request_id][position]:
                    raise WrongKvError(
                        f"{s.request.request_id} reads position {position} in block {block_id}"
                    )
        return {
            s.request.request_id: expected[s.request.request_id][-1] % VOCABULARY
            for s in sequences
            if s.wants_sample
        }

    def copy(self, plan: StepPlan) -> None:
        for source, target, num_tokens in self.rng.sample(plan.copies, len(plan.copies)):
            copied = self.kv[source][:num_tokens]
            self.kv[target] = copied + [POISON] * (BLOCK_SIZE - num_tokens)


def fingerprint(request: Request) -> list[int]:
    """What the KV of each known position of a request must be."""
    state = hash((0, SALTS.index(request.cache_salt))) & 0xFFFFFFFF
    kv = []
    for token in request.get_tokens(0, request.num_tokens):
        state = hash((state, token)) & 0xFFFFFFFF
        kv.append(state)
    return kv


@dataclass
class World:
    """A scheduler, its runner and its traffic; every step is checked as it is taken."""

    num_blocks: int
    seed: int = 0
    order: str = "chunked"
    max_batch_tokens: int = 16
    max_running: int = 4
    max_queue: int = 6
    max_model_len: int = 1000
    prefix_cache: bool = True
    index_class: type[PrefixIndex] = PrefixIndex
    pool_class: type[BlockPool] = BlockPool
    scheduler_class: type[Scheduler] = Scheduler
    runner_class: type[ToyRunner] = ToyRunner
    checks: bool = True
    now_s: float = 0.0
    live: dict[str, Request] = field(default_factory=dict)
    ended: list[Request] = field(default_factory=list)
    num_added: int = 0
    num_seen: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.config = EngineConfig(
            block_size=BLOCK_SIZE,
            max_batch_tokens=max(self.max_batch_tokens, self.max_running),
            max_running=self.max_running,
            max_queue=self.max_queue,
            max_model_len=self.max_model_len,
            scheduling_order=self.order,
            prefix_cache=self.prefix_cache,
        )
        self.pool = self.pool_class(self.num_blocks)
        self.index = self.index_class(self.pool, BLOCK_SIZE, b"toy")
        self.scheduler = self.scheduler_class(self.config, self.pool, self.index)
        self.runner = self.runner_class(self.num_blocks, self.rng)

    def add(self, prompt_ids, max_tokens=8, priority=0, salt="", timeout_s=None) -> bool:
        request = Request(
            request_id=f"r{self.num_added}",
            prompt_ids=list(prompt_ids),
            sampling=SamplingParams(max_tokens=max_tokens),
            arrival_s=self.now_s,
            priority=priority,
            deadline_s=None if timeout_s is None else self.now_s + timeout_s,
            cache_salt=salt,
        )
        self.num_added += 1
        try:
            self.scheduler.add(request)
        except CapacityError:
            assert len(self.live) == self.max_running + self.max_queue
            return False
        except ConfigError as error:
            assert error.field == "prompt"
            room = min(self.max_model_len, self.num_blocks * BLOCK_SIZE)
            assert request.prompt_len + min(max_tokens, 1) > room or not prompt_ids
            return False
        self.live[request.request_id] = request
        return True

    def add_continuation(self, choice: int, extra, max_tokens=8) -> bool:
        """The next turn of a conversation: an ended request's tokens and some more."""
        if not self.ended:
            return False
        earlier = self.ended[choice % len(self.ended)]
        prompt_ids = earlier.prompt_ids + earlier.output_ids + list(extra)
        return self.add(prompt_ids, max_tokens, earlier.priority, earlier.cache_salt)

    def cancel(self, choice: int) -> None:
        if self.live:
            request = list(self.live.values())[choice % len(self.live)]
            in_flight = request.is_scheduled
            assert self.scheduler.cancel(request.request_id)
            assert request.is_finished != in_flight
            if request.is_finished:
                self.retire(request, FinishReason.CANCELLED)
                assert not self.scheduler.cancel(request.request_id)

    def retire(self, request: Request, *reasons: FinishReason) -> None:
        assert request.is_finished
        assert not reasons or request.finish_reason in reasons
        assert request.block_table == ()
        del self.live[request.request_id]
        self.ended.append(request)

    def step(self, in_flight=(), stop_chance=0.05, fail_chance=0.01) -> StepPlan:
        """One step; ``in_flight`` are calls that happen while it is being computed."""
        plan = self.scheduler.schedule(self.now_s)
        if self.checks:
            self.check_plan(plan)
        for request in plan.expired:
            self.retire(request, FinishReason.DEADLINE)
        # Whatever lives, somebody advances: this alone rules out deadlock.
        assert not self.live or plan.sequences, f"{len(self.live)} requests live, none advances"
        for call in in_flight:
            call()
        if self.checks:
            self.scheduler.check()
        ids = [s.request.request_id for s in plan.sequences]
        failed = {i for i in ids if self.rng.random() < fail_chance}
        sampled = self.runner.execute(plan, failed)
        stopped = {i: FinishReason.STOP for i in sampled if self.rng.random() < stop_chance}
        stopped |= dict.fromkeys(failed, FinishReason.ERROR)
        self.now_s += 0.1
        if plan.is_empty:
            return plan
        for request in self.scheduler.complete(plan, sampled, self.now_s, stopped):
            self.check_end(request, stopped)
            self.retire(request)
        if self.checks:
            self.scheduler.check()
        return plan

    def check_end(self, request: Request, stopped) -> None:
        length = min(
            request.sampling.max_tokens,
            min(self.max_model_len, self.num_blocks * BLOCK_SIZE) - request.prompt_len,
        )
        if request.finish_reason is FinishReason.LENGTH:
            assert len(request.output_ids) == length
        elif request.finish_reason in {FinishReason.STOP, FinishReason.ERROR}:
            assert stopped[request.request_id] is request.finish_reason
        elif request.finish_reason is FinishReason.DEADLINE:
            assert request.deadline_s <= self.now_s
        else:
            assert request.finish_reason is FinishReason.CANCELLED

    def check_plan(self, plan: StepPlan) -> None:
        num_tokens = sum(s.num_tokens for s in plan.sequences)
        assert num_tokens == plan.num_tokens <= self.config.max_batch_tokens
        assert self.scheduler.get_stats().num_running <= self.max_running
        ids = [s.request.request_id for s in plan.sequences]
        assert len(ids) == len(set(ids)), f"scheduled twice: {ids}"
        written = []
        for s in plan.sequences:
            request = s.request
            assert s.num_tokens >= 1
            assert s.start + s.num_tokens <= request.num_tokens
            assert s.wants_sample == (s.start + s.num_tokens == request.num_tokens) or (
                request.sampling.max_tokens == 0
            )
            first, last = s.start // BLOCK_SIZE, (s.start + s.num_tokens - 1) // BLOCK_SIZE
            written += s.block_table[first : last + 1]
            assert len(s.block_table) == last + 1, "blocks beyond what the step needs"
            if self.is_new(request):
                self.check_hit(request, s.start, plan)
        assert len(written) == len(set(written)), f"two writers of one block: {sorted(written)}"
        sources = {c.src_block_id for c in plan.copies}
        targets = [c.dst_block_id for c in plan.copies]
        assert len(targets) == len(set(targets))
        assert sources.isdisjoint(targets)
        for request in plan.preempted:
            assert request.state is RequestState.PREEMPTED or request.is_scheduled

    def is_new(self, request: Request) -> bool:
        """Whether this is the request's first step since it was admitted (again)."""
        admissions = 1 + request.num_preemptions
        is_new = self.num_seen.get(request.request_id) != admissions
        self.num_seen[request.request_id] = admissions
        return is_new

    def check_hit(self, request: Request, start: int, plan: StepPlan) -> None:
        """No token is computed that the index had: compare with a search through all of it."""
        if not self.prefix_cache:
            assert start == 0
            return
        tokens = request.get_tokens(0, request.num_tokens - 1)
        root = make_root_key(b"toy", request.cache_salt)
        best = max(
            (count_shared(tokens, path) for key, path in list_paths(self.index) if key == root),
            default=0,
        )
        if start < best:
            # Only a copy may be forgone, and only where its source could not be pinned as well.
            assert start == best - best % BLOCK_SIZE, f"{start} tokens reused, {best} were there"
            outstanding = map(self.scheduler._count_outstanding, self.scheduler._running)
            assert self.pool.num_free + self.pool.num_cached <= sum(outstanding)
        copied = {c.dst_block_id: c.num_tokens for c in plan.copies}
        assert copied.get(request.block_table[start // BLOCK_SIZE], 0) == start % BLOCK_SIZE or (
            start % BLOCK_SIZE == 0
        )

    def drain(self) -> None:
        """Step until nothing lives, in a bounded number of steps, and all blocks are back."""
        # A generous multiple of one token per step, recomputing everything now and then.
        limit = 200 + 20 * sum(r.max_total_tokens for r in self.live.values())
        for _ in range(limit):
            if not self.live:
                break
            self.step()
        assert not self.live, f"{len(self.live)} requests have not ended after {limit} steps"
        assert self.pool.num_used == 0
        assert self.pool.num_free + self.pool.num_cached == self.num_blocks
        assert not self.scheduler.has_requests
        self.scheduler.check()


def list_paths(index: PrefixIndex):
    """All token paths of the index, each with the key of its root, by walking the parents."""
    for node in index._by_block.values():
        parts = []
        while node.parent is not None:
            parts.append(node.tokens)
            node = node.parent
        packed = b"".join(reversed(parts))
        yield (
            node.key,
            [int.from_bytes(packed[i : i + 4], "little") for i in range(0, len(packed), 4)],
        )


def count_shared(a, b) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


class Impatient(Scheduler):
    """Admits without leaving room for growth: correct all the same, but preempts far more."""

    def _count_lookahead(self, request):
        return self._count_blocks(request.num_tokens)


tokens = st.integers(0, VOCABULARY - 1)


class SchedulerMachine(RuleBasedStateMachine):
    """Random traffic, one call at a time, over a World that checks itself."""

    @initialize(
        num_blocks=st.integers(1, 24),
        order=st.sampled_from(ORDERS),
        max_batch_tokens=st.integers(1, 24),
        max_running=st.integers(1, 6),
        max_model_len=st.integers(8, 80),
        prefix_cache=st.sampled_from([True, True, True, False]),
        is_impatient=st.booleans(),
        seed=st.integers(0, 1000),
    )
    def start(self, is_impatient, **kwargs):
        self.world = World(scheduler_class=Impatient if is_impatient else Scheduler, **kwargs)

    @rule(
        prompt_ids=st.lists(tokens, max_size=30),
        max_tokens=st.integers(0, 40),
        priority=st.integers(0, 2),
        salt=st.sampled_from(SALTS),
        timeout_s=st.sampled_from([None, None, None, 0.3, 2.0]),
        copies=st.integers(1, 3),
    )
    def add(self, copies, **kwargs):
        for _ in range(copies):
            self.world.add(**kwargs)

    @rule(choice=st.integers(0, 50), extra=st.lists(tokens, max_size=8))
    def continue_conversation(self, choice, extra):
        self.world.add_continuation(choice, extra)

    @rule(choice=st.integers(0, 50))
    def cancel(self, choice):
        self.world.cancel(choice)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.world.step()

    @rule(
        cancel=st.lists(st.integers(0, 50), max_size=3),
        flush=st.booleans(),
        prompt_ids=st.lists(tokens, max_size=12),
    )
    def step_with_calls_in_flight(self, cancel, flush, prompt_ids):
        calls = [lambda c=c: self.world.cancel(c) for c in cancel]
        calls += [self.world.scheduler.flush_cache] if flush else []
        calls.append(lambda: self.world.add(prompt_ids))
        self.world.step(calls)

    @rule()
    def flush(self):
        self.world.scheduler.flush_cache()
        assert self.world.pool.num_cached == 0

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds):
        self.world.now_s += seconds

    @invariant()
    def is_sound(self):
        if hasattr(self, "world"):
            self.world.scheduler.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
class TestSchedulerMachineAtLength(SchedulerMachine.TestCase):
    """The same machine with many more and longer examples."""

    settings = settings(
        max_examples=1000,
        stateful_step_count=80,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def drive(world: World, num_steps: int) -> None:
    """Seeded traffic that keeps the pool full: prompts that begin alike, long outputs."""
    rng = world.rng
    stems = [rng.choices(range(VOCABULARY), k=20) for _ in range(3)]
    for _ in range(num_steps):
        for _ in range(rng.choice([0, 0, 1, 2])):
            own = rng.choices(range(VOCABULARY), k=rng.randrange(1, 6))
            if rng.random() < 0.3:
                world.add_continuation(rng.randrange(50), own, rng.randrange(1, 12))
            else:
                prompt_ids = rng.choice(stems)[: rng.randrange(20)] + own
                salt = rng.choice(SALTS)
                world.add(prompt_ids, rng.randrange(1, 30), rng.randrange(2), salt)
        calls = []
        if rng.random() < 0.1:
            calls.append(lambda: world.cancel(rng.randrange(50)))
        if rng.random() < 0.02:
            calls.append(world.scheduler.flush_cache)
        world.step(calls, stop_chance=0.02)
    world.drain()


@pytest.mark.parametrize("order", ORDERS)
def test_long_traffic_in_a_small_pool_is_sound_and_exercises_everything(order):
    """Not vacuous: hits, copies, preemptions and evictions all happen, under every order."""
    impatient = World(num_blocks=14, seed=7, order=order, max_running=5, scheduler_class=Impatient)
    drive(impatient, 500)
    patient = World(num_blocks=14, seed=7, order=order, max_running=5)
    drive(patient, 500)
    stats = impatient.scheduler.get_stats()
    assert stats.num_preemptions > 15
    assert stats.num_evicted_blocks > 200
    assert stats.num_prefix_hit_tokens > 150
    # Room for growth is what keeps admission from thrashing.
    assert patient.scheduler.get_stats().num_preemptions < stats.num_preemptions
    reasons = {r.finish_reason for r in impatient.ended}
    assert reasons == set(FinishReason) - {FinishReason.DEADLINE}


def test_outputs_do_not_depend_on_cache_order_or_pool():
    """The same requests give the same tokens whatever is reused, preempted or chunked."""

    def run(**kwargs):
        world = World(max_queue=40, **kwargs)
        rng = random.Random(3)
        shared = rng.choices(range(VOCABULARY), k=10)
        for i in range(20):
            own = rng.choices(range(VOCABULARY), k=rng.randrange(12))
            world.add(shared[: i % 11] + own + [0], 10, salt=SALTS[i % 2])
        while world.live:
            world.step(stop_chance=0.0, fail_chance=0.0)
        return {r.request_id: r.output_ids for r in world.ended}, world.runner.num_computed

    expected, num_computed_alone = run(num_blocks=200, prefix_cache=False, max_running=1)
    assert len(expected) == 20
    for order in ORDERS:
        outputs, num_computed = run(num_blocks=200, order=order)
        assert outputs == expected
        assert num_computed < num_computed_alone
        assert run(num_blocks=9, order=order)[0] == expected


# ------------------------------------------------------------------------------- mutants


class OneTokenTooMany(PrefixIndex):
    """Claims one more token than the source block shares with the prompt."""

    def match(self, root_key, keys, token_ids, max_tokens):
        found = super().match(root_key, keys, token_ids, max_tokens)
        if found.source is None or found.num_tokens >= max_tokens:
            return found
        shared = found.num_source_tokens + 1
        return PrefixMatch(found.nodes, found.num_tokens + 1, found.source, shared)


class BlindToSalt(PrefixIndex):
    """Gives all users the same root."""

    def make_root_key(self, salt):
        return super().make_root_key("")


class FindsTheEvicted(PrefixIndex):
    """Evicts without forgetting: the block is free, and still found."""

    def _unlink(self, node):
        parent, key = node.parent, node.key
        super()._unlink(node)
        if key is not None:
            self._by_key[key] = node
            node.parent = parent


class EagerIndexing(Scheduler):
    """Makes blocks matchable when they are planned, not when they are computed."""

    def schedule(self, now_s):
        plan = super().schedule(now_s)
        for s in plan.sequences:
            s.request.num_computed_tokens += s.num_tokens
            self._prefix.index_computed(s.request, is_prompt_end=True)
            s.request.num_computed_tokens -= s.num_tokens
        return plan

    def _emit(self, plan, request, num_tokens):
        super()._emit(plan, request, num_tokens)
        request.num_computed_tokens += num_tokens
        self._prefix.index_computed(request, is_prompt_end=True)
        request.num_computed_tokens -= num_tokens


class GivesTwice(BlockPool):
    """Leaves every seventh block it hands out in the free list."""

    num_given = 0

    def allocate(self):
        block_id = super().allocate()
        self.num_given += 1
        if self.num_given % 7 == 0:
            self._free.append(block_id)
        return block_id


class LateCopies(ToyRunner):
    """Copies after the forward pass."""

    def execute(self, plan, failed=frozenset()):
        copies, plan.copies = plan.copies, []
        sampled = super().execute(plan, failed)
        plan.copies = copies
        self.copy(plan)
        return sampled


@pytest.mark.parametrize(
    "mutant",
    [
        {},
        {"index_class": OneTokenTooMany},
        {"index_class": BlindToSalt},
        {"index_class": FindsTheEvicted},
        {"scheduler_class": EagerIndexing},
        {"pool_class": GivesTwice},
        {"runner_class": LateCopies},
    ],
    ids=lambda mutant: "+".join(c.__name__ for c in mutant.values()) or "control",
)
def test_runner_notices_a_broken_decider(mutant):
    """The content check alone, with all bookkeeping checks off, finds each of these bugs."""
    num_found = 0
    for seed in range(8):
        world = World(num_blocks=14, seed=seed, max_running=5, checks=False, **mutant)
        try:
            drive(world, 150)
        except WrongKvError:
            num_found += 1
        except (AssertionError, CapacityError, KeyError):
            assert mutant, "the unchanged deciders are sound"
    assert num_found >= 3 if mutant else num_found == 0

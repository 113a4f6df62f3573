"""A scheduler with a toy runner, a toy tier and random traffic, which checks itself.

The runner keeps, per slot of each block, a fingerprint of *all* the tokens (and the salt) up to
that position, as real KV would depend on them. Each step it performs the plan's copies and writes
and then checks every position that a scheduled token attends to. The tier stores the blocks that
became full, late, and loads them when it likes: it writes when a load ends, whether it is wanted or
not, and some loads end with nonsense in the block. Random traffic from a tiny vocabulary, small
blocks and small pools makes hits, copies, duplicates, evictions and preemptions the normal case.
"""

import random
from dataclasses import dataclass, field

from tandem.core.errors import CapacityError, ConfigError
from tandem.core.spec import make_root_key
from tandem.core.wire import FinishReason, KvHandle, PrefillKv, SamplingParams, TierKv
from tandem.engine.config import EngineConfig
from tandem.engine.groups.group import Group, GroupBlock
from tandem.engine.groups.reuse import StatePolicy
from tandem.engine.groups.windows import WindowPolicy, count_seen_blocks
from tandem.engine.scheduling.blocks import (
    BlockPool,
)
from tandem.engine.scheduling.loads import LoadDecision
from tandem.engine.scheduling.plan import BlockLoad
from tandem.engine.scheduling.prefix_index import PrefixIndex
from tandem.engine.scheduling.request import Request, RequestState
from tandem.engine.scheduling.scheduler import Scheduler, StepPlan

BLOCK_SIZE = 4
ORDERS = ["chunked", "prefill_first", "decode_first"]
SALTS = ["", "other"]
VOCABULARY = 3
POISON = -1


class WrongKvError(AssertionError):
    """A scheduled token would have attended to KV that is not that of its own sequence."""


class ToyRunner:
    """Executes plans on blocks whose KV is a fingerprint of everything before it."""

    def __init__(
        self,
        num_blocks: int,
        rng: random.Random,
        num_slots: int = 0,
        window: int = 0,
        num_window_blocks: int = 0,
    ) -> None:
        self.kv = [[POISON] * BLOCK_SIZE for _ in range(num_blocks)]
        self.window = window
        self.window_kv = [[POISON] * BLOCK_SIZE for _ in range(num_window_blocks)]
        self.states = [POISON] * num_slots
        self.rng = rng
        self.num_computed = 0
        self.unread = frozenset()
        """Blocks whose KV is lost, which no sequence of the step attends to."""

    def execute(self, plan: StepPlan, failed=frozenset()) -> dict[str, int]:
        """Copy, write, check what is read, and sample; for ``failed`` ones, write nonsense."""
        self.copy(plan)
        for source, target in plan.state_loads:
            self.states[target] = self.states[source]
        expected = {s.request.request_id: fingerprint(s.request) for s in plan.sequences}
        # The order within a step is the runner's own business, so any must do.
        sequences = self.rng.sample(plan.sequences, len(plan.sequences))
        for s in sequences if self.states else ():
            self.advance_state(s, expected[s.request.request_id], failed)
        for request, position, slot in plan.state_saves:
            self.states[slot] = self.states[request.state_notes.slot]
            last = next(s for s in sequences if s.request is request)
            assert position == last.start + last.num_tokens
        for s in sequences:
            for position in range(s.start, s.start + s.num_tokens):
                block_id = s.block_table[position // BLOCK_SIZE]
                is_failed = s.request.request_id in failed
                kv = POISON if is_failed else expected[s.request.request_id][position]
                self.kv[block_id][position % BLOCK_SIZE] = kv
                if self.window:
                    block_id = find_seen_block(s, position)
                    self.window_kv[block_id][position % BLOCK_SIZE] = kv
                self.num_computed += 1
        sequences = [s for s in sequences if s.request.request_id not in failed]
        for s in sequences:
            for position in range(s.start + s.num_tokens):
                block_id = s.block_table[position // BLOCK_SIZE]
                kv = self.kv[block_id][position % BLOCK_SIZE]
                if kv != expected[s.request.request_id][position] and block_id not in self.unread:
                    raise WrongKvError(
                        f"{s.request.request_id} reads position {position} in block {block_id}"
                    )
            # From the first that the step's first token sees.
            seen = max(s.start - self.window + 1, 0)
            for position in range(seen, s.start + s.num_tokens) if self.window else ():
                block_id = find_seen_block(s, position)
                kv = self.window_kv[block_id][position % BLOCK_SIZE]
                if kv != expected[s.request.request_id][position]:
                    raise WrongKvError(f"{s.request.request_id} sees {position} in {block_id}")
        return {
            s.request.request_id: [expected[s.request.request_id][-1] % VOCABULARY]
            for s in sequences
            if s.wants_sample
        }

    def advance_state(self, s, expected: list[int], failed) -> None:
        """A state is that of all tokens before the next: nothing else goes on from it."""
        slot = s.request.state_notes.slot
        if s.start and self.states[slot] != expected[s.start - 1]:
            raise WrongKvError(f"{s.request.request_id} goes on at {s.start} from another state")
        is_failed = s.request.request_id in failed
        self.states[slot] = POISON if is_failed else expected[s.start + s.num_tokens - 1]

    def copy(self, plan: StepPlan) -> None:
        for source, target, num_tokens in self.rng.sample(plan.copies, len(plan.copies)):
            copied = self.kv[source][:num_tokens]
            self.kv[target] = copied + [POISON] * (BLOCK_SIZE - num_tokens)
        for source, target, num_tokens in plan.window_copies:
            copied = self.window_kv[source][:num_tokens]
            self.window_kv[target] = copied + [POISON] * (BLOCK_SIZE - num_tokens)


def find_seen_block(s, position: int) -> int:
    """The block that has a position in the layers with a window."""
    place = position // BLOCK_SIZE - s.window.first
    if not 0 <= place < len(s.window.blocks):
        raise WrongKvError(f"{s.request.request_id} has no window block for {position}")
    return s.window.blocks[place]


class ToyTier:
    """A lower tier: planner, store and transfers in one. Outlives worlds if the test wants it."""

    def __init__(self, rng: random.Random, fail_chance: float = 0.2) -> None:
        self.rng = rng
        self.fail_chance = fail_chance
        self.stored: dict[bytes, list[int]] = {}
        self.states: dict[bytes, int] = {}
        self.has_states = False
        self.windows: dict[bytes, list[int]] = {}
        self.num_seen = 0
        """Blocks that a window reaches back; 0: a model without."""
        self.moving: list[BlockLoad] = []
        self.storing = []
        self.num_dropped = 0
        self.num_stale = 0

    def choose_load(self, request, keys, num_matched, now_s) -> LoadDecision:
        num_blocks = 0
        while num_blocks < len(keys) and keys[num_blocks] in self.stored:
            num_blocks += 1
        while self.has_states and num_blocks and keys[num_blocks - 1] not in self.states:
            num_blocks -= 1
        while (
            self.num_seen
            and num_blocks
            and not all(key in self.windows for key in keys[:num_blocks][-self.num_seen :])
        ):
            num_blocks -= 1
        # The same answer to the same question.
        rng = random.Random(f"{request.request_id} {num_matched} {num_blocks} {now_s}")
        if rng.random() < self.fail_chance:
            num_blocks += 1  # It thinks that it has more than it has.
        return LoadDecision(num_blocks, rng.choice([0.0, 0.3, 100.0]))

    def begin(self, plan: StepPlan) -> None:
        self.storing += plan.filled
        self.moving += plan.loads
        self.num_dropped += len(plan.dropped)

    def store_some(self, scheduler: Scheduler, runner: ToyRunner, chance: float = 0.5) -> None:
        """Copy blocks out, at any time after they were reported."""
        waiting, self.storing = self.storing, []
        for block in waiting:
            if self.rng.random() >= chance:
                self.storing.append(block)
                continue
            group, number = block.block
            if group is Group.STATE:
                content = [runner.states[number]]
            else:
                kv = runner.window_kv if group is Group.WINDOW else runner.kv
                content = list(kv[number])
            if self.is_stale(scheduler, block):
                self.num_stale += 1
            elif group is Group.WINDOW:
                self.windows[block.key] = content
            elif group is Group.FULL:
                self.stored[block.key] = content
            else:
                [self.states[block.key]] = content

    def is_stale(self, scheduler: Scheduler, block) -> bool:
        return not scheduler.is_unchanged(block)

    def end_some(self, scheduler: Scheduler, runner: ToyRunner, chance: float = 0.5) -> None:
        """End transfers in any order, each request's with one call or several."""
        ending = [load for load in self.moving if self.rng.random() < chance]
        self.rng.shuffle(ending)
        for load in ending:
            self.moving.remove(load)
            group, place = load.block
            if group is Group.STATE:
                self.end_state(load, place, scheduler, runner)
                continue
            is_full = group is Group.FULL
            pool = runner.kv if is_full else runner.window_kv
            content = (self.stored if is_full else self.windows).get(load.key)
            if isinstance(load.source, PrefillKv):
                # The other instance computes the same prompt.
                start = load.position * BLOCK_SIZE
                kv = fingerprint(load.request)[: load.request.prompt_len]
                content = (kv + [POISON] * BLOCK_SIZE)[start : start + BLOCK_SIZE]
            if content is None or self.rng.random() < self.fail_chance:
                pool[place] = [POISON] * BLOCK_SIZE
                scheduler.load_failed(load.request, [load.block])
            else:
                pool[place] = list(content)
                scheduler.load_done(load.request, [load.block])

    def end_state(self, load, slot, scheduler: Scheduler, runner: ToyRunner) -> None:
        content = self.states.get(load.key, POISON)
        if content == POISON or self.rng.random() < self.fail_chance:
            runner.states[slot] = POISON
            scheduler.load_failed(load.request, [load.block])
        else:
            runner.states[slot] = content
            scheduler.load_done(load.request, [load.block])


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
    overlap: bool = False
    ahead: StepPlan | None = None
    num_ahead: int = 0
    index_class: type[PrefixIndex] = PrefixIndex
    pool_class: type[BlockPool] = BlockPool
    scheduler_class: type[Scheduler] = Scheduler
    runner_class: type[ToyRunner] = ToyRunner
    tier: ToyTier | None = None
    num_slots: int = 0
    """Of states; 0: a model without."""
    every: int = 0
    window: int = 0
    """Of layers with a window; 0: a model without."""
    num_window_blocks: int = 0
    handover_chance: float = 0.0
    lose_chance: float = 0.0
    late_chance: float = 0.0
    """That a step samples nothing for a sequence, as the mask of its grammar is not computed."""
    num_late: int = 0
    checks: bool = True
    now_s: float = 0.0
    live: dict[str, Request] = field(default_factory=dict)
    ended: list[Request] = field(default_factory=list)
    held: dict[str, tuple[float, Request]] = field(default_factory=dict)
    num_held_checked: int = 0
    num_forgotten: int = 0
    num_added: int = 0
    lost: dict[int, int] = field(default_factory=dict)
    """Blocks whose KV the disk has lost and nobody has read since, with their generation."""
    forgotten: dict[int, int] = field(default_factory=dict)
    """Those that a step could not read: no request may take them up again."""
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
            overlap="on" if self.overlap else "off",
        )
        self.pool = self.pool_class(self.num_blocks)
        self.index = self.index_class(self.pool, BLOCK_SIZE, b"toy")
        parts = [self.config, self.pool, self.index, self.tier]
        if self.num_slots:
            at_blocks = self.tier is not None
            parts.append(StatePolicy(self.num_slots, self.every, min_gain=1, at_blocks=at_blocks))
        if self.window:
            parts += [None, WindowPolicy(self.window, self.num_window_blocks)]
        if self.tier is not None:
            self.tier.has_states = bool(self.num_slots)
            self.tier.num_seen = count_seen_blocks(self.window, BLOCK_SIZE) if self.window else 0
        self.scheduler = self.scheduler_class(*parts)
        sizes = (self.num_slots, self.window, self.num_window_blocks)
        self.runner = self.runner_class(self.num_blocks, self.rng, *sizes)

    def add(
        self, prompt_ids, max_tokens=8, priority=0, salt="", timeout_s=None, lease_s=None, peer=None
    ) -> bool:
        request = Request(
            request_id=f"r{self.num_added}",
            prompt_ids=list(prompt_ids),
            sampling=SamplingParams(max_tokens=max_tokens),
            arrival_s=self.now_s,
            priority=priority,
            deadline_s=None if timeout_s is None else self.now_s + timeout_s,
            cache_salt=salt,
            prefill_lease_s=lease_s,
        )
        if self.num_slots or self.window:
            request.message_end = self.rng.choice([0, self.rng.randrange(len(prompt_ids) + 1)])
        if peer is not None and self.tier is not None:
            handle = KvHandle(request_id="p", num_tokens=len(request.prompt_ids), lease_s=peer)
            request.kv_source = PrefillKv(instance="prefill", handle=handle)
            request.awaits_continuation = self.rng.random() < 0.5
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
        """One step; ``in_flight`` are calls that happen while it is being computed.

        With overlap, another one may be planned meanwhile, which is then the next.
        """
        plan, self.ahead = self.ahead, None
        if plan is None:
            plan = self.plan()
        for call in in_flight:
            call()
        if self.overlap and not plan.is_empty and self.rng.random() < 0.8:
            self.ahead = self.plan(is_ahead=True)
            for call in in_flight:
                if self.rng.random() < 0.5:
                    call()
        if self.checks:
            self.scheduler.check()
        ids = [s.request.request_id for s in plan.sequences]
        failed = {i for i in ids if self.rng.random() < fail_chance}
        unread = self.find_lost(plan)
        failed |= unread.keys()
        self.check_referenced(plan)
        sampled = self.runner.execute(plan, failed)
        stopped = {i: FinishReason.STOP for i in sampled if self.rng.random() < stop_chance}
        stopped |= dict.fromkeys(failed, FinishReason.ERROR)
        late = [i for i in sampled if self.late_chance and self.rng.random() < self.late_chance]
        self.num_late += len(late)
        for request_id in late:
            del sampled[request_id]
            stopped.pop(request_id, None)
        self.now_s += 0.1
        self.check_held()
        if plan.is_empty:
            return plan
        for request in self.scheduler.complete(plan, sampled, self.now_s, stopped, late):
            self.check_end(request, stopped)
            self.retire(request)
        for request_id in late:
            if request_id in self.live:
                request = self.live[request_id]
                self.scheduler.note_mask(request, is_ready=False, is_slow=self.rng.random() < 0.5)
        if self.late_chance:
            self.compute_masks(0.2)
        self.forget(set().union(*unread.values()))
        if self.ahead is not None:
            self.num_ahead += len(self.ahead.sequences)
            if self.ahead.is_empty or not self.scheduler.settle(self.ahead):
                self.ahead = None
        if self.checks:
            self.scheduler.check()
        return plan

    def lose(self, choices) -> None:
        """Lose the KV of blocks that requests or the index hold, unnoticed until they are read."""
        used = {b for r in self.scheduler._state.running for b in r.block_table}
        used |= self.index._by_block.keys()
        used -= {b for _, r in self.held.values() for b in r.held_blocks}
        for block_id in [sorted(used)[c % len(used)] for c in choices if used]:
            self.runner.kv[block_id] = [POISON] * BLOCK_SIZE
            self.lost[block_id] = self.pool.get_generation(block_id)

    def find_lost(self, plan: StepPlan) -> dict[str, set[int]]:
        """The lost blocks that each sequence of a step reads, by request, for those with any.

        Sparse attention does not read all blocks of a sequence, but a copy reads all of its source.
        """
        generation = self.pool.get_generation
        self.lost = {b: g for b, g in self.lost.items() if generation(b) == g}
        self.runner.unread = self.lost.keys()
        sources = {c.dst_block_id: c.src_block_id for c in plan.copies}
        found = {}
        for s in plan.sequences if self.lost else ():
            own = s.block_table[: -(-s.start // BLOCK_SIZE)]
            read = {sources[b] for b in own if b in sources}
            read |= {b for b in own if b not in sources and self.rng.random() < 0.5}
            if read & self.lost.keys():
                found[s.request.request_id] = read & self.lost.keys()
        return found

    def forget(self, block_ids: set[int]) -> None:
        """What an engine does with blocks that a step could not read."""
        if block_ids:
            self.scheduler.forget_blocks(sorted(block_ids))
            self.forgotten |= {b: self.pool.get_generation(b) for b in block_ids}
            self.num_forgotten += len(block_ids)

    def check_forgotten(self, s, plan: StepPlan) -> None:
        """A request that starts has no block that an earlier step could not read."""
        sources = {c.dst_block_id: c.src_block_id for c in plan.copies}
        for block_id in s.block_table[: -(-s.start // BLOCK_SIZE)]:
            block_id = sources.get(block_id, block_id)
            generation = self.forgotten.get(block_id)
            if generation == self.pool.get_generation(block_id):
                raise WrongKvError(f"{s.request.request_id} takes up lost block {block_id}")

    def compute_masks(self, chance: float) -> None:
        for request in self.live.values():
            if request.queue.awaits_mask and self.rng.random() < chance:
                self.scheduler.note_mask(request, is_ready=True)

    def plan(self, *, is_ahead: bool = False) -> StepPlan:
        if self.late_chance:
            self.compute_masks(0.5)
        plan = self.scheduler.schedule(self.now_s)
        if self.checks:
            self.check_plan(plan)
        for request in plan.expired:
            is_cancelled = request.queue.is_cancelled
            self.retire(request, FinishReason.CANCELLED if is_cancelled else FinishReason.DEADLINE)
        if not is_ahead:
            self.check_progress(plan)
        if self.tier is not None:
            self.tier.begin(plan)
            self.move_some()
        return plan

    def check_referenced(self, plan: StepPlan) -> None:
        """What a step reads may not be given to anybody else while it runs."""
        for s in plan.sequences:
            free = [b for b in s.block_table if not self.pool.get_num_refs(b)]
            if self.window and not free:
                pool = self.scheduler._state.windows.pool
                free = [b for b in s.window.blocks if not pool.get_num_refs(b)]
            if free and not s.request.is_finished:
                raise WrongKvError(f"{s.request.request_id} reads blocks {free}, which are free")

    def move_some(self, chance: float = 0.5) -> None:
        """Let some transfers from and to the lower tier happen."""
        # Slower than loads, so that some blocks have a new owner when they are stored.
        self.tier.store_some(self.scheduler, self.runner, chance**3)
        for request in list(self.scheduler._state.loading):
            if request.awaits_continuation and self.rng.random() < chance:
                tokens = [fingerprint(request)[-1] % VOCABULARY]
                if request.queue.max_total_tokens > request.num_tokens + 1:
                    assert self.scheduler.continue_request(request.request_id, tokens)
        self.tier.end_some(self.scheduler, self.runner, chance)

    def check_progress(self, plan: StepPlan) -> None:
        """Whatever lives, somebody advances: this alone rules out deadlock."""
        stats = self.scheduler.get_stats()
        is_loading = self.tier is not None and bool(self.tier.moving or plan.loads)
        is_loading = is_loading or bool(stats.num_loading or stats.num_held)
        is_held = any(request.queue.awaits_mask for request in self.live.values())
        if not plan.sequences and not is_held:
            assert not self.live or is_loading, f"{len(self.live)} live, none advances"
            assert not self.scheduler.get_stats().num_running, "a load keeps the running waiting"
        if not (plan.sequences or plan.loads or plan.expired):
            assert self.scheduler.wake_s > self.now_s, "the engine would spin"
            again = self.scheduler.schedule(self.now_s)
            assert not (again.sequences or again.loads), "the engine would sleep"

    def check_end(self, request: Request, stopped) -> None:
        length = min(
            request.sampling.max_tokens,
            min(self.max_model_len, self.num_blocks * BLOCK_SIZE) - request.prompt_len,
        )
        if request.finish_reason is FinishReason.PREFILLED:
            assert len(request.output_ids) == 1
            self.held[request.request_id] = (self.now_s, request)
        elif request.finish_reason is FinishReason.LENGTH:
            assert len(request.output_ids) == length
        elif request.finish_reason in {FinishReason.STOP, FinishReason.ERROR}:
            assert stopped[request.request_id] is request.finish_reason
        elif request.finish_reason is FinishReason.DEADLINE:
            assert request.deadline_s <= self.now_s
        else:
            assert request.finish_reason in {FinishReason.CANCELLED, FinishReason.PREFILLED}

    def check_plan(self, plan: StepPlan) -> None:
        num_tokens = sum(s.num_tokens for s in plan.sequences)
        assert num_tokens == plan.num_tokens <= self.config.max_batch_tokens
        assert self.scheduler.get_stats().num_running <= self.max_running
        ids = [s.request.request_id for s in plan.sequences]
        assert len(ids) == len(set(ids)), f"scheduled twice: {ids}"
        self.check_loads(plan)
        written = []
        for s in plan.sequences:
            request = s.request
            assert s.num_tokens >= 1
            # In the plan made last, so what is in flight ends where its request's plans end.
            assert s.start + s.num_tokens == request.num_planned_tokens
            num_expected = request.num_expected_tokens - s.wants_sample
            assert (
                s.start + s.num_tokens
                <= num_expected
                < request.queue.max_total_tokens + (request.sampling.max_tokens == 0)
            )
            assert s.wants_sample == (s.start + s.num_tokens == num_expected) or (
                request.sampling.max_tokens == 0
            )
            first, last = s.start // BLOCK_SIZE, (s.start + s.num_tokens - 1) // BLOCK_SIZE
            written += s.block_table[first : last + 1]
            # A request that was taken out of a plan keeps the block that it got for it.
            num_spare = len(s.block_table) - (last + 1)
            assert num_spare in (0, bool(self.late_chance)), "blocks beyond what the step needs"
            if self.window:
                num_spare = s.window.end - (last + 1)
                assert num_spare in (0, bool(self.late_chance)), "window blocks beyond the step"
            if self.is_new(request):
                self.check_hit(request, s.start, plan)
                self.check_forgotten(s, plan)
        assert len(written) == len(set(written)), f"two writers of one block: {sorted(written)}"
        sources = {c.src_block_id for c in plan.copies}
        targets = [c.dst_block_id for c in plan.copies]
        assert len(targets) == len(set(targets))
        assert sources.isdisjoint(targets)
        for request in plan.preempted:
            assert request.state is RequestState.PREEMPTED or request.is_scheduled

    def check_held(self) -> None:
        """What is held is not written, until the lease ends or the hold is given up."""
        for request_id, (ended_s, request) in list(self.held.items()):
            if self.now_s >= ended_s + request.prefill_lease_s:
                del self.held[request_id]
                continue
            expected = fingerprint(request)[: request.prompt_len]
            kv = [value for block_id in request.held_blocks for value in self.runner.kv[block_id]]
            if kv[: request.prompt_len] != expected:
                raise WrongKvError(f"blocks held for {request_id} were written")
            self.check_held_window(request, expected)
            self.num_held_checked += 1
            if self.rng.random() < 0.1:
                assert self.scheduler.release_hold(request_id)
                del self.held[request_id]

    def check_held_window(self, request: Request, expected: list[int]) -> None:
        if not self.window:
            return
        window, end = request.held_window, request.prompt_len
        seen = range(max(end - self.window + 1, 0), end)
        assert window.first * BLOCK_SIZE <= seen.start
        assert not seen or seen.stop <= window.end * BLOCK_SIZE
        for position in seen:
            block_id = window.blocks[position // BLOCK_SIZE - window.first]
            if self.runner.window_kv[block_id][position % BLOCK_SIZE] != expected[position]:
                raise WrongKvError(f"a window held for {request.request_id} was written")

    def check_loads(self, plan: StepPlan) -> None:
        if self.tier is None:
            assert not plan.loads
            return
        moving = [load.block for load in self.tier.moving + plan.loads]
        assert len(moving) == len(set(moving)), f"two transfers into one block: {sorted(moving)}"
        from_tier = [x for x in self.tier.moving + plan.loads if isinstance(x.source, TierKv)]
        is_alone = self.num_slots and len({x.request.request_id for x in from_tier}) == 1
        num_blocks = sum(x.block.group is Group.FULL for x in from_tier)
        assert is_alone or num_blocks <= self.num_blocks // 4
        full = {c.src_block_id for c in plan.copies}.union(*(s.block_table for s in plan.sequences))
        in_step = {GroupBlock(Group.FULL, b) for b in full}
        if self.window:
            windows = {b for s in plan.sequences for b in s.window.blocks}
            in_step |= {GroupBlock(Group.WINDOW, b) for b in windows}
        assert in_step.isdisjoint(moving), "a step uses a block that a transfer writes"
        running = self.scheduler._state.running
        if running and self.order == "chunked" and running[0].num_remaining_tokens == 1:
            is_held = running[0].queue.awaits_mask
            assert running[0].is_scheduled or is_held, "the most urgent decode waits for a load"

    def is_new(self, request: Request) -> bool:
        """Whether this is the request's first step since it was admitted (again)."""
        admissions = 1 + request.queue.num_preemptions
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
        if self.window:
            found = self.list_windows(root, tokens)
        elif self.num_slots:
            paths = self.list_snapshots(root)
            found = [len(path) for path in paths if tokens[: len(path)] == path]
        else:
            paths = [path for key, path in list_paths(self.index) if key == root]
            found = [count_shared(tokens, path) for path in paths]
        best = max(found, default=0)
        if start < best:
            # Only a copy may be forgone, and only where its source could not be pinned as well.
            has_groups = self.num_slots or self.window
            whole = [p for p in found if p % BLOCK_SIZE == 0] if has_groups else [best]
            expected = max(whole, default=0)
            expected -= expected % BLOCK_SIZE
            assert start == expected, f"{start} tokens reused, {best} were there"
            outstanding = map(
                self.scheduler._state.count_outstanding, self.scheduler._state.running
            )
            is_full = self.pool.num_free + self.pool.num_cached <= sum(outstanding)
            assert is_full or self.window
        copied = {c.dst_block_id: c.num_tokens for c in plan.copies}
        assert copied.get(request.block_table[start // BLOCK_SIZE], 0) == start % BLOCK_SIZE or (
            start % BLOCK_SIZE == 0
        )

    def list_windows(self, root, tokens) -> list[int]:
        """All places where a request could go on, with a window before each."""
        found = []
        for node, (key, path) in walk_paths(self.index):
            if key != root:
                continue
            ancestors = [node]
            while ancestors[-1].parent.parent is not None:
                ancestors.append(ancestors[-1].parent)
            ancestors.reverse()
            shared = count_shared(tokens, path)
            # Within the last block of the path, to the token.
            for end in range((len(ancestors) - 1) * BLOCK_SIZE + 1, shared + 1):
                first = max(end - self.window + 1, 0) // BLOCK_SIZE
                if all(a.window_block_id >= 0 for a in ancestors[first:]):
                    found.append(end)
        return found

    def list_snapshots(self, root):
        """The tokens of all snapshots of a salt whose KV is there."""
        nodes = {node.key: path for node, path in walk_paths(self.index)}
        for snapshot in self.scheduler._state.states._table:
            if not self.index.has_prefix(snapshot.parent_key, snapshot.tail):
                continue
            key, path = nodes.get(snapshot.parent_key, (snapshot.parent_key, []))
            if key == root:
                tail = snapshot.tail
                own = [int.from_bytes(tail[i : i + 4], "little") for i in range(0, len(tail), 4)]
                yield path + own

    def drain(self) -> None:
        """Step until nothing lives, in a bounded number of steps, and all blocks are back."""
        # A generous multiple of one token per step, recomputing everything now and then.
        limit = 200 + 20 * sum(r.queue.max_total_tokens for r in self.live.values())
        for _ in range(limit):
            if not self.live:
                break
            self.step()
        if self.tier is not None:
            self.move_some(chance=1.0)
        for request_id in self.held:
            self.scheduler.release_hold(request_id)
        self.held.clear()
        # A hold whose lease is over ends when the next step is planned.
        self.scheduler.schedule(self.now_s)
        assert not self.live, f"{len(self.live)} requests have not ended after {limit} steps"
        assert self.pool.num_used == 0
        if self.window:
            assert self.scheduler._state.windows.pool.num_used == 0
        assert self.pool.num_free + self.pool.num_cached == self.num_blocks
        assert not self.scheduler.has_requests
        self.scheduler.check()


def list_paths(index: PrefixIndex):
    """All token paths of the index, each with the key of its root."""
    return [path for _, path in walk_paths(index)]


def walk_paths(index: PrefixIndex):
    """All nodes of the index with the key of their root and their tokens."""
    for last in index._by_block.values():
        node, parts = last, []
        while node.parent is not None:
            parts.append(node.tokens)
            node = node.parent
        packed = b"".join(reversed(parts))
        numbers = [int.from_bytes(packed[i : i + 4], "little") for i in range(0, len(packed), 4)]
        yield last, (node.key, numbers)


def count_shared(a, b) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


class Impatient(Scheduler):
    """Admits without leaving room for growth: correct all the same, but preempts far more."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        state = self._state
        state.count_lookahead = lambda r: state.count_blocks(r.num_expected_tokens)


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
                lease_s = peer = None
                if world.handover_chance and rng.random() < world.handover_chance:
                    lease_s = rng.choice([1.0, 0.3])
                elif world.handover_chance and rng.random() < world.handover_chance:
                    peer = rng.choice([2.0, 0.2])
                world.add(
                    prompt_ids,
                    rng.randrange(1, 30),
                    rng.randrange(2),
                    salt,
                    lease_s=lease_s,
                    peer=peer,
                )
        calls = []
        if world.lose_chance and rng.random() < world.lose_chance:
            world.lose([rng.randrange(50)])
        if rng.random() < 0.1:
            calls.append(lambda: world.cancel(rng.randrange(50)))
        if rng.random() < 0.02:
            calls.append(world.scheduler.flush_cache)
        if world.tier is not None:
            calls.append(world.move_some)
        world.step(calls, stop_chance=0.02)
    world.drain()

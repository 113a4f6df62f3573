"""Recurrent states of requests: their slots, and snapshots from which later requests go on. Pure.

A slot holds the state of a running request, a snapshot, or nothing. A request gets a slot when it
is admitted. When it ends or is preempted, the state in its slot becomes a snapshot without a copy.
A prefill also saves copies of its state as snapshots at the end of some chunks
(``choose_snapshots``). A request with a cached prefix goes on from the longest snapshot whose KV is
cached too: the state is copied to the request's slot before its first step, and the snapshot is
pinned until then.

A step's copies are made in the order in which they were planned. A snapshot can be found when the
step that saved it has completed, not before.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

from tandem.core.instance_status import Statistics
from tandem.core.state_layout import NO_SLOT
from tandem.engine.groups.chain import pack_tokens
from tandem.engine.groups.group import Group, GroupBlock
from tandem.engine.groups.snapshots import Snapshot, SnapshotTable, choose_snapshots
from tandem.engine.scheduling.blocks import KeyedBlock
from tandem.engine.scheduling.plan import StateSave, StepPlan
from tandem.engine.scheduling.prefix_index import PrefixIndex, PrefixMatch, PrefixNode
from tandem.engine.scheduling.request import PrefixNotes, Request
from tandem.engine.stepping.messages import StateCopy

__all__ = ["MIN_GAIN", "StatePolicy", "StateReuse"]

MIN_GAIN = 16
"""Smallest number of tokens that a snapshot must save. Computing fewer tokens is as fast as copying
the state, and each snapshot ends a chunk early, which costs a step."""


MAX_PARTINGS = 2
"""Largest number of snapshots that a prefill saves at positions where waiting prompts diverge from
its own."""


class StatePolicy(NamedTuple):
    """The number of state slots, and the rules by which snapshots (copies of recurrent states) are
    saved.
    """

    num_slots: int
    """Number of slots for running requests and snapshots together."""
    every: int = 0
    """Distance in tokens between snapshots (copies of the recurrent state) that a prefill saves on
    its way; 0: it saves them only at ends of messages and prompts, and where prompts diverge.
    """
    min_gain: int = MIN_GAIN
    at_blocks: bool = False
    """If True, a snapshot for a message's end or for diverging prompts is saved at the end of the
    block before it, because lower tiers have full blocks only."""
    grid: int = 1
    """Snapshots are saved only at multiples of this number of prompt tokens, because a state
    between them would differ from that of a prefill of the same tokens; 1: anywhere."""
    max_tokens: int = 0
    """Largest sum of the lengths of all snapshots, in tokens, for states that grow with their
    tokens; 0: no limit."""


class StateReuse:
    """The state slots of running requests and the snapshots.

    Args:
        policy: with at least one slot.
        index: the prefix index, which has the KV that belongs to a snapshot.
        block_size: tokens per block.
        counters: statistics, in which snapshots and evictions are counted.
        is_enabled: if False, requests get slots, and no snapshot is kept.
    """

    def __init__(
        self,
        policy: StatePolicy,
        index: PrefixIndex,
        block_size: int,
        counters: Statistics,
        *,
        is_enabled: bool,
    ) -> None:
        self._policy = policy
        self._is_enabled = is_enabled
        self._index = index
        self._block_size = block_size
        self._counters = counters
        self._table = SnapshotTable(block_size)
        # A stack: the slot freed last is reused first, and slots never used come last.
        self._free = list(range(policy.num_slots - 1, -1, -1))
        self._generations = [0] * policy.num_slots
        self._filled: list[KeyedBlock] = []
        self._unused: set[int] = set()
        """Free slots that ``take_unused`` has returned."""

    @property
    def num_slots(self) -> int:
        """Number of state slots, used and free."""
        return self._policy.num_slots

    @property
    def num_snapshots(self) -> int:
        """Number of snapshots (saved recurrent states) from which requests can go on."""
        return len(self._table)

    @property
    def num_used(self) -> int:
        """Number of state slots of running requests, and of snapshots that a step in flight is to
        save.
        """
        return self.num_slots - len(self._free) - len(self._table)

    # The methods below reuse a snapshot for a request that starts.

    def cut(
        self,
        notes: PrefixNotes,
        token_ids: Sequence[int],
        match: PrefixMatch,
        *,
        at_blocks: bool = False,
    ) -> PrefixMatch:
        """Return the part of a match (the cached KV of a request's prefix) that ends at its longest
        snapshot; changes nothing.

        Args:
            notes: prefix data of the request, with the keys of all its full blocks.
            token_ids: tokens of the request.
            match: the cached KV of the request.
            at_blocks: if True, consider only snapshots at the end of a block, so that no partial
                block need be copied.
        """
        snapshot = self._table.find(
            notes.root_key, notes.block_keys, token_ids, match.num_tokens, at_blocks=at_blocks
        )
        position = 0 if snapshot is None else snapshot.position
        return match.cut(position, self._block_size, snapshot)

    def is_expected(self, request: Request, found: int, others: Iterable[Request]) -> bool:
        """Return True if a running prefill will soon save a snapshot that a waiting request can
        use.

        Args:
            request: the waiting request, with the keys of all its full blocks.
            found: number of tokens that it could reuse now.
            others: the running requests.
        """
        limit = request.num_tokens - 1
        for other in others:
            if not (other.queue.is_prefilling and other.is_scheduled):
                continue
            shared = min(_count_shared(request, other, self._block_size), limit)
            if shared - found < self._policy.min_gain:
                continue
            first = max(found + self._policy.min_gain, other.num_computed_tokens + 1)
            if any(first <= point <= shared for point in other.state_notes.points):
                return True
        return False

    def note_arrival(self, request: Request, others: Iterable[Request]) -> None:
        """Plan snapshots in running prefills at the positions where a new request's prompt
        diverges.

        Args:
            request: the new request, with the keys of all its full blocks.
            others: the running requests.
        """
        gain = self._policy.min_gain
        for other in others:
            if not (other.queue.is_prefilling and self._is_enabled):
                continue
            shared = _count_shared(request, other, self._block_size)
            shared, points = min(shared, request.num_tokens - 1), other.state_notes.points
            is_new = not any(shared - gain < point <= shared for point in points)
            shared -= shared % self._policy.grid
            if is_new and shared >= other.num_planned_tokens + gain:
                insort(points, shared)

    def can_start(self) -> bool:
        """Return True if one more request can get a state slot: one is free, or a snapshot can be
        dropped.
        """
        return bool(self._free) or any(not s.num_pins for s in self._table)

    def start(
        self, plan: StepPlan, request: Request, match: PrefixMatch, waiting: Iterable[Request]
    ) -> None:
        """Give an admitted request a slot, and plan the copy of the snapshot that its match ends
        at.

        Also chooses where its prefill saves snapshots. Call ``can_start`` first.

        Args:
            plan: gets the copy of the state.
            request: the admitted request.
            match: the cached prefix from which it goes on.
            waiting: waiting requests; snapshots are saved where their prompts diverge from this
                one.
        """
        state, snapshot = request.state_notes, match.snapshot
        state.last = snapshot
        if snapshot is None:
            state.slot = self._take(None)
        else:
            self._table.touch(snapshot)
            snapshot.num_pins += 1
            state.slot = self._take(None)
            if state.slot == NO_SLOT:
                # No slot is free, so the request takes over the snapshot's own slot instead of a
                # copy.
                snapshot.num_pins -= 1
                self._remove(snapshot)
                state.slot, state.last = snapshot.slot, snapshot.shorter
                self._generations[state.slot] += 1
            else:
                plan.state_loads.append(StateCopy(snapshot.slot, state.slot))
                plan.pinned.append(snapshot)
        assert state.slot != NO_SLOT, f"no slot for request {request.request_id}"
        if not self._is_enabled:
            return
        marks = [request.message_end, match.num_kv_tokens]
        if not request.message_end:
            # A repeated prompt reuses all tokens but the last. With a snapshot there, its only step
            # computes one token and so reads few experts.
            marks[0] = request.prompt_len - 1
        # Most prompts diverge at the same few positions, such as after shared instructions.
        parting = Counter(_count_shared(request, other, self._block_size) for other in waiting)
        marks += [position for position, _ in parting.most_common(MAX_PARTINGS)]
        policy, end = self._policy, request.num_tokens
        size = policy.grid
        if size > 1:
            end = min(end, request.prompt_len)
            end -= end % size
        elif policy.at_blocks:
            size = self._block_size
        marks = [mark - mark % size for mark in marks]
        state.points = choose_snapshots(match.num_tokens, end, marks, policy.every, policy.min_gain)

    # The methods below serve lower tiers, which store snapshots and load states.

    def count_blocks(self, keys: Sequence[bytes]) -> int:
        """Return the number of leading blocks of a chain (a prompt's blocks in order) up to its
        longest snapshot at a block's end.
        """
        depth = len(keys)
        while depth and self._table.find_equal(keys[depth - 1], b"") is None:
            depth -= 1
        return depth

    def take_filled(self) -> list[KeyedBlock]:
        """Return the snapshots saved since the last call that lie at the end of a block, for lower
        tiers to store.
        """
        filled, self._filled = self._filled, []
        return filled

    def take_unused(self) -> list[int]:
        """Return the state slots that have become free since the last call.

        The caller frees their memory. Empty for states of fixed size, whose slots keep their
        memory.
        """
        if not self._policy.max_tokens:
            return []
        free = set(self._free)
        unused, self._unused = free - self._unused, free
        return sorted(unused)

    def get_generation(self, index: int) -> int:
        """Return how often a state slot was taken. Equal numbers before and after mean unchanged
        content.
        """
        return self._generations[index]

    def take_for_load(self, worth: int | None) -> int:
        """Take a slot for a recurrent state to be loaded, evicting a snapshot if none is free;
        return ``NO_SLOT`` if all snapshots are worth more.

        Args:
            worth: number of tokens that the state saves; None: the request cannot start without it.
        """
        return self._take(worth)

    def end_load(self, request: Request, node: PrefixNode | None, end: int, index: int) -> None:
        """Make a state that was loaded into a slot a snapshot, from which requests can go on. The
        caller ensures that the KV before it is in the index.
        """
        del node
        self._keep(request, end, index, is_new=False)

    def free(self, index: int) -> None:
        """Return a state slot to the free list; its content is discarded."""
        self._free.append(index)

    # The methods below save, keep and drop snapshots.

    def limit(self, request: Request, num_tokens: int) -> int:
        """Return how many of its next ``num_tokens`` tokens one chunk of a request's prefill may
        have.

        A chunk ends where a snapshot (a copy of the recurrent state) is to be saved.
        """
        start = request.num_planned_tokens
        end = next((p for p in request.state_notes.points if p > start), start + num_tokens)
        return min(num_tokens, end - start)

    def plan_save(self, plan: StepPlan, request: Request, end: int) -> None:
        """Plan to save the state at the end of a prefill chunk, if a snapshot is wanted there."""
        state = request.state_notes
        if end not in state.points:
            return
        last = state.last if state.last is not None and state.last.is_kept else None
        slot = self._take(end - (last.position if last else 0))
        if slot != NO_SLOT:
            plan.state_saves.append(StateSave(request, end, slot))

    def end_saves(self, plan: StepPlan, failed: Collection[str]) -> None:
        """Record the snapshots that a completed step has saved, and release those whose states it
        copied to its requests.

        Args:
            plan: the completed plan; the KV of its tokens is in the index.
            failed: ids of requests whose states are unusable; their snapshots are discarded.
        """
        for snapshot in plan.pinned:
            snapshot.num_pins -= 1
        plan.pinned.clear()
        for request, position, slot in plan.state_saves:
            if request.request_id in failed:
                self._free.append(slot)
            else:
                self._keep(request, position, slot)

    def drop_saves(self, plan: StepPlan) -> None:
        """Give up the snapshots that a plan was to save for requests that were removed from it. The
        plan has not run.
        """
        planned = {sequence.request.request_id for sequence in plan.sequences}
        kept: list[StateSave] = []
        for save in plan.state_saves:
            if save.request.request_id not in planned:
                self._free.append(save.slot)
            else:
                kept.append(save)
        plan.state_saves = kept

    def release(self, request: Request, position: int, *, is_sound: bool) -> None:
        """Take back the state slot of a request that ends or is preempted; the state in it becomes
        a snapshot, or is discarded.

        Call it after the blocks of the request have been released.

        Args:
            request: a request in no plan in flight.
            position: number of its tokens that the state covers.
            is_sound: False if a failed step may have written the state, so that it is discarded.
        """
        state = request.state_notes
        slot, state.slot = state.slot, NO_SLOT
        if slot == NO_SLOT:
            return
        is_of_prompt = position % self._policy.grid == 0 and position <= request.prompt_len
        is_sound = is_sound and (self._policy.grid == 1 or is_of_prompt)
        if is_sound and position > 0 and self._is_enabled:
            # Keeping this state costs no copy, so a small gain (``min_gain=1``) suffices.
            self._keep(request, position, slot, min_gain=1)
        else:
            self._free.append(slot)
        state.points, state.last = [], None

    def clear(self) -> None:
        """Drop all snapshots (saved recurrent states) except those that a step in flight reads."""
        self._filled.clear()
        for snapshot in [s for s in self._table if not s.num_pins]:
            self._remove(snapshot)
            self._free.append(snapshot.slot)

    def check(self, in_use: Collection[int]) -> None:
        """Assert that each state slot has exactly one owner; for tests.

        Args:
            in_use: slots of requests, of saves in flight, of holds and of loads.
        """
        self._table.check()
        slots = [*self._free, *(s.slot for s in self._table), *in_use]
        assert sorted(slots) == list(range(self.num_slots)), f"slots {sorted(slots)}"

    def _keep(
        self,
        request: Request,
        position: int,
        slot: int,
        *,
        min_gain: int | None = None,
        is_new: bool = True,
    ) -> None:
        """Make the state in a slot a snapshot, from which requests can go on, if it saves them
        enough tokens; otherwise free the slot.
        """
        state, size = request.state_notes, self._block_size
        depth = position // size
        prefix = request.prefix
        if len(prefix.block_keys) < depth:
            self._free.append(slot)  # Its blocks were forgotten on the way, and have no keys.
            return
        parent_key = prefix.block_keys[depth - 1] if depth else prefix.root_key
        tail = pack_tokens(request.get_tokens(depth * size, position))
        equal = self._table.find_equal(parent_key, tail)
        snapshot = Snapshot(parent_key, tail, position, slot, state.last)
        if equal is not None:
            self._table.touch(equal)
            state.last = equal
            self._free.append(slot)
        elif self._table.count_worth(snapshot) >= (
            min_gain or self._policy.min_gain
        ) and self._index.has_prefix(parent_key, tail):
            self._table.add(snapshot)
            for observer in self._index.observers:
                observer.note_state_kept(snapshot)
            state.last = snapshot
            self._counters.num_snapshots_taken += 1
            self._bound_tokens()
            if is_new and not tail:
                block, generation = GroupBlock(Group.STATE, slot), self._generations[slot]
                self._filled.append(KeyedBlock(parent_key, block, generation))
        else:
            self._free.append(slot)

    def _bound_tokens(self) -> None:
        """Evict snapshots until the numbers of tokens before each, added up, are within
        ``StatePolicy.max_tokens``.
        """
        most = self._policy.max_tokens
        while most and sum(s.position for s in self._table) > most:
            victim = self._table.choose_victim(self._is_reachable)
            if victim is None:
                return
            self._remove(victim, is_evicted=True)
            self._counters.num_evicted_snapshots += 1
            self._free.append(victim.slot)

    def _take(self, worth: int | None) -> int:
        """Take a state slot, evicting a snapshot if none is free; ``NO_SLOT`` if none may be
        evicted, because all save more than ``worth`` tokens (None: any may be).
        """
        if self._free:
            slot = self._free.pop()
            self._generations[slot] += 1
            return slot
        victim = self._table.choose_victim(self._is_reachable, worth)
        if victim is None:
            return NO_SLOT
        self._remove(victim, is_evicted=True)
        self._counters.num_evicted_snapshots += 1
        self._generations[victim.slot] += 1
        return victim.slot

    def _remove(self, snapshot: Snapshot, *, is_evicted: bool = False) -> None:
        self._table.remove(snapshot, is_evicted=is_evicted)
        for observer in self._index.observers:
            observer.note_state_removed(snapshot)

    def _is_reachable(self, snapshot: Snapshot) -> bool:
        return self._index.has_prefix(snapshot.parent_key, snapshot.tail)


def _count_shared(a: Request, b: Request, size: int) -> int:
    """Return how many leading tokens two requests have in common."""
    if a.prefix.root_key != b.prefix.root_key:
        return 0
    keys, others = a.prefix.block_keys, b.prefix.block_keys
    num_keys = min(len(keys), len(others))
    # A key covers all tokens before it, so a binary search finds the first key that differs.
    start = bisect_left(range(num_keys), True, key=lambda i: keys[i] != others[i]) * size
    pairs = zip(a.get_tokens(start, start + size), b.get_tokens(start, start + size), strict=False)
    return start + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

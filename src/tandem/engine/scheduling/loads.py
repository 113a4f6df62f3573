"""Loads of KV blocks from the store or from another instance into the prefix index.

Owns the blocks that transfers write into and, for each request with a load, the chain of indexed
blocks that the load extends. A block that has arrived is inserted into the prefix index when all
blocks before it are there; from then on it is a cached block like any other. The request gets
nothing else from its load: it finds the blocks in the index.

Invariants: a block that a transfer writes into stays referenced until the end of the transfer is
reported, even if its request has ended, so a late transfer never writes into another request's
block; a block is in the index only if its content and all blocks before it are there.

Pure and single-threaded: the executor of ``StepPlan.loads`` moves the bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tandem.core.errors import ConflictError
from tandem.core.instance_status import Statistics
from tandem.engine.groups.reuse import StateReuse
from tandem.engine.groups.windows import WindowReuse
from tandem.engine.scheduling.blocks import (
    BlockPool,
    find_state_slot,
    find_window_block,
    is_full_block,
    make_state_id,
    make_window_id,
)
from tandem.engine.scheduling.plan import BlockLoad
from tandem.engine.scheduling.prefix_index import PrefixIndex, PrefixMatch, PrefixNode
from tandem.engine.scheduling.prefix_reuse import PrefixReuse
from tandem.engine.scheduling.request import Request

__all__ = ["BlockLoads", "LoadDecision", "TierPlanner", "WindowLoad"]


class LoadDecision(NamedTuple):
    """The planner's decision: how many blocks to load, and how long the request waits."""

    num_blocks: int
    """Number of blocks to load, from the first key on; with 0, the request computes all of them."""
    wait_s: float = 0.0
    """Seconds for which the request is kept in the queue so that the load can complete. With 0, the
    load has only the time that the request spends in the queue anyway, and it is cut off when the
    request is admitted.
    """


class TierPlanner(Protocol):
    """The decision whether to load blocks of a prompt from lower tiers or to compute them. Pure: no
    clock, no waiting.
    """

    def choose_load(
        self, request: Request, keys: Sequence[bytes], num_matched: int, now_s: float
    ) -> LoadDecision:
        """Decide how many of the full blocks that the device lacks are loaded from lower tiers.

        Called in every step while the request waits, until a load starts or the request is
        admitted. So the planner must know the content of the lower tiers before the request is
        added.

        Args:
            request: the waiting request; not modified.
            keys: keys of the lacking full blocks, in order; at least one.
            num_matched: number of blocks before these, which the device has.
            now_s: time of the step, in monotonic seconds.
        """
        ...


class WindowLoad(NamedTuple):
    """A window block (KV of the sliding-window layers for one block of the prompt) to load."""

    position: int
    """Index of the block in the prompt."""
    key: bytes
    """Key of the block; empty for the tail of a prompt."""
    block_id: int


@dataclass(slots=True, eq=False)
class _Load:
    """The load of KV blocks for one request, from the store or from a prefill instance."""

    node: PrefixNode
    """Node of the prefix index for the last block of ``path``, or its root if ``path`` is empty."""
    path: list[int]
    """Ids of the blocks from the start of the prompt that the prefix index has; the load owns one
    reference to each, so that they are not evicted.
    """
    first: int
    """Index in the prompt of the first block that is loaded."""
    pending: list[BlockLoad]
    """Blocks that the load has not put into the prefix index yet, in the order of the prompt; the
    recurrent state and the window blocks follow them.
    """
    done: set[int] = field(default_factory=set[int])
    """Ids of the blocks in ``pending`` that have arrived before an earlier block of the prompt has;
    they enter the index after it.
    """
    tail: PrefixNode | None = None
    """Node of the prefix index for the prompt's partial last block, once that block has been
    loaded.
    """


class BlockLoads:
    """The loads in progress, by request, and the transfers in progress, by block.

    Args:
        pool: the pool of the blocks.
        index: the prefix index, into which blocks that arrived are inserted.
        prefix: told which keys a load will provide, so that other requests can wait for them.
        block_size: tokens per block.
        counters: statistics, in which loaded and failed blocks are counted.
        states: state slots that loaded states are written to; None: the model has no state.
        windows: window blocks that loaded windows are written to; None: the model has none.
    """

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        prefix: PrefixReuse,
        block_size: int,
        counters: Statistics,
        states: StateReuse | None = None,
        windows: WindowReuse | None = None,
    ) -> None:
        self._pool = pool
        self._states = states
        self._windows = windows
        self._index = index
        self._prefix = prefix
        self._block_size = block_size
        self._loads: dict[Request, _Load] = {}
        self._in_transfer: dict[int, BlockLoad] = {}
        self._dropped: list[BlockLoad] = []
        self._num_pinned = 0
        self._counters = counters

    @property
    def num_in_transfer(self) -> int:
        """Number of full blocks that a load may still write into, also for requests that have
        ended.
        """
        return sum(map(is_full_block, self._in_transfer))

    @property
    def num_pinned(self) -> int:
        """Number of references to blocks that loads in progress own; preemption cannot free these
        blocks.
        """
        return self._num_pinned

    def count_releasable(self, request: Request) -> int:
        """Return how many block references ``give_up`` would release at once for a request.

        Blocks that a transfer still writes into are not among them.
        """
        load = self._loads.get(request)
        return 0 if load is None else len(load.path) + self.count_done(request)

    def count_done(self, request: Request) -> int:
        """Return how many blocks of a request's load have arrived and are not in the index yet: as
        many become free at once if the load is given up.
        """
        load = self._loads.get(request)
        return 0 if load is None else sum(map(is_full_block, load.done))

    def count_tokens(self, request: Request) -> int:
        """Return how many leading tokens of a request are in the blocks that its load extends and
        in those that it brings; 0 if it has no load.
        """
        load = self._loads.get(request)
        if load is None:
            return 0
        num_pending = sum(is_full_block(pending.block_id) for pending in load.pending)
        return (len(load.path) + num_pending) * self._block_size

    def has_load(self, request: Request) -> bool:
        """Return True if a load of this request has not ended."""
        return request in self._loads

    def start(
        self,
        request: Request,
        match: PrefixMatch,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        state: tuple[bytes, int] | None = None,
        windows: Sequence["WindowLoad"] = (),
    ) -> list[BlockLoad]:
        """Record a load and return its transfers, which the caller adds to the plan.

        Args:
            request: the request to load for; it must have no load in progress.
            match: indexed full blocks that precede the load, referenced by the caller; these
                references are taken over.
            keys: keys of the blocks to load, as many as ``block_ids``; the last may be empty, for
                the prompt's partial last block.
            block_ids: blocks that the caller has allocated to load into; taken over.
            state: key of the state at the end of these blocks, and the slot to load it into, which
                is taken over; None: no state is loaded.
            windows: window blocks to load, at positions of ``match`` or of ``block_ids``; taken
                over.
        """
        assert request not in self._loads, f"second load of request {request.request_id}"
        path = [node.block_id for node in match.nodes]
        loads = [
            BlockLoad(request, position, key, block_id, request.kv_source)
            for position, (key, block_id) in enumerate(zip(keys, block_ids, strict=True), len(path))
        ]
        self._num_pinned += len(path) + len(loads)
        if state is not None:
            # Load the state last: it can be used only when all blocks before it have arrived.
            state_key, slot = state
            end = len(path) + len(loads)
            loads.append(BlockLoad(request, end, state_key, make_state_id(slot), request.kv_source))
        # Load window blocks last: they can be used only when all blocks before them have arrived.
        loads += [
            BlockLoad(request, w.position, w.key, make_window_id(w.block_id), request.kv_source)
            for w in windows
        ]
        root_or_last = (
            match.nodes[-1]
            if match.nodes
            else self._index.get_root(request.prefix.root_key, request.adapter)
        )
        self._loads[request] = _Load(root_or_last, path, len(path), list(loads))
        self._in_transfer.update({load.block_id: load for load in loads})
        self._prefix.expect(request, [key for key in keys if key])
        request.load.has_loaded = True
        request.load.loaded_blocks = range(len(path), len(path))
        return loads

    def note_done(self, request: Request, block_ids: Sequence[int]) -> bool:
        """Record blocks that arrived; return True if the request's load is now complete.

        Raises: ConflictError (one of the blocks is not being loaded for this request); nothing
            changes.
        """
        load = self._end_transfers(request, block_ids)
        if load is None:
            return False
        load.done.update(
            pending.block_id for pending in load.pending if pending.block_id in block_ids
        )
        return self._advance(request, load)

    def note_failed(self, request: Request, block_ids: Sequence[int]) -> bool:
        """Record blocks whose transfer failed; return True if the request's load has ended.

        A prefix is usable only without gaps, so the load is cut at the first failed block. It ends
        when the blocks before that one have arrived.

        Raises: ConflictError (one of the blocks is not being loaded for this request); nothing
            changes.
        """
        load = self._end_transfers(request, block_ids)
        if load is None:
            return False
        for position, pending in enumerate(load.pending):
            if pending.block_id in block_ids:
                self._cut(request, load, position)
                break
        return self._advance(request, load)

    def give_up(self, request: Request) -> None:
        """End a request's load, if it has one; blocks already in the index stay there."""
        load = self._loads.get(request)
        if load is not None:
            self._cut(request, load, 0)
            self._advance(request, load)

    def give_up_all(self) -> list[Request]:
        """End the loads of all requests; return these requests."""
        requests = list(self._loads)
        for request in requests:
            self.give_up(request)
        return requests

    def take_dropped(self) -> list[BlockLoad]:
        """Return the transfers into blocks that still run although their request's load was given
        up; each is returned once.
        """
        dropped = [d for d in self._dropped if self._in_transfer.get(d.block_id) is d]
        self._dropped = []
        return dropped

    def list_references(self) -> list[int]:
        """Return the ids of blocks referenced by loads, one entry a reference, for consistency
        checks.
        """
        block_ids = [b for load in self._loads.values() for b in load.path]
        return block_ids + list(filter(is_full_block, self._list_pending()))

    def list_window_blocks(self) -> list[int]:
        """Return the window blocks in use by loads, for consistency checks."""
        blocks = [find_window_block(block_id) for block_id in self._list_pending()]
        return [block_id for block_id in blocks if block_id is not None]

    def list_slots(self) -> list[int]:
        """Return the state slots in use by loads, for consistency checks."""
        slots = [find_state_slot(block_id) for block_id in self._list_pending()]
        return [slot for slot in slots if slot is not None]

    def _list_pending(self) -> list[int]:
        done = [b for load in self._loads.values() for b in load.done]
        return done + list(self._in_transfer)

    def _end_transfers(self, request: Request, block_ids: Sequence[int]) -> _Load | None:
        """Record that nothing writes into these blocks any more; return the request's load, None if
        it has ended or was given up.

        Blocks that the load no longer wants are released.
        """
        ended = [self._in_transfer.get(block_id) for block_id in set(block_ids)]
        if len(ended) < len(block_ids) or any(e is None or e.request is not request for e in ended):
            raise ConflictError(
                "engine.end_load",
                f"not all of blocks {list(block_ids)} are being loaded for request "
                f"{request.request_id!r}: report each end once",
            )
        load = self._loads.get(request)
        wanted = set[int]() if load is None else {pending.block_id for pending in load.pending}
        for block_id in block_ids:
            del self._in_transfer[block_id]
            if block_id not in wanted:
                self._release((block_id,))
        return load

    def _cut(self, request: Request, load: _Load, position: int) -> None:
        """Remove the blocks from index ``position`` of ``pending`` on from a load, and release
        them.

        A block that a transfer still writes into is released when that transfer has ended.
        """
        cut = load.pending[position:]
        del load.pending[position:]
        self._counters.num_failed_loads += len(cut)
        self._prefix.forget_expected(request, [c.key for c in cut if c.key])
        for pending in cut:
            load.done.discard(pending.block_id)
            if self._in_transfer.get(pending.block_id) is pending:
                self._dropped.append(pending)
            else:
                self._release((pending.block_id,))

    def _advance(self, request: Request, load: _Load) -> bool:
        """Insert into the index the arrived blocks up to the first that is missing.

        Ends the load, and returns True, if nothing is pending any more.
        """
        size = self._block_size
        position = 0
        for pending in load.pending:
            if pending.block_id not in load.done:
                break
            slot = find_state_slot(pending.block_id)
            if slot is not None:
                assert self._states is not None, "a state of a model without one"
                end = min(len(load.path) * size, request.prompt_len)
                self._states.end_load(request, end, slot)
                load.done.remove(pending.block_id)
                self._counters.num_loaded_blocks -= 1
                position += 1
                continue
            window = find_window_block(pending.block_id)
            if window is not None:
                assert self._windows is not None, "a window block of a model without one"
                node = self._index.find_node(pending.key) if pending.key else load.tail
                self._windows.end_load(node, window)
                load.done.remove(pending.block_id)
                self._counters.num_loaded_blocks -= 1
                position += 1
                continue
            start = len(load.path) * size
            if not pending.key:
                tail = request.prompt_ids[start:]
                load.tail = self._index.insert_tail(load.node, tail, pending.block_id)
                load.path.append(pending.block_id)
            else:
                tokens = request.get_tokens(start, start + size)
                load.node = self._index.insert(load.node, pending.key, tokens, pending.block_id)
                load.path.append(load.node.block_id)
                self._prefix.forget_expected(request, (pending.key,))
            load.done.remove(pending.block_id)
            position += 1
        self._counters.num_loaded_blocks += position
        del load.pending[:position]
        request.load.loaded_blocks = range(load.first, len(load.path))
        if load.pending:
            return False
        self._release(load.path)
        del self._loads[request]
        return True

    def _release(self, block_ids: Sequence[int]) -> None:
        for slot in map(find_state_slot, block_ids):
            if slot is not None:
                assert self._states is not None, "a state of a model without one"
                self._states.free(slot)
        for window in map(find_window_block, block_ids):
            if window is not None:
                assert self._windows is not None, "a window block of a model without one"
                self._windows.free(window)
        blocks = [block_id for block_id in block_ids if is_full_block(block_id)]
        self._index.release(blocks)
        self._num_pinned -= len(blocks)

"""Loads of blocks from lower tiers, or from another instance, into the prefix index.

Owns the blocks that transfers write into and, for each request with a load, the path of blocks
that the load extends. A block that has come is inserted into the index as soon as all before it
have come, and is then a cached block like any other; a load gives its request nothing else.

Invariants: a block in transfer is referenced until its end is reported, even if the request has
gone, so no late transfer writes into a block of another request; a block is inserted only if its
content is there and its whole path is in the index.

Pure and single-threaded: bytes are moved by the executor of ``StepPlan.loads``.
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
    """Number of blocks to load, counted from the first key; 0: compute them."""
    wait_s: float = 0.0
    """Seconds during which the request is not admitted. The load itself goes on while the request
    is in the queue and ends when it is admitted: with 0, only time in the queue is used."""


class TierPlanner(Protocol):
    """Decides whether blocks are loaded or computed. Pure: no clock, no lookup that waits."""

    def choose_load(
        self, request: Request, keys: Sequence[bytes], num_matched: int, now_s: float
    ) -> LoadDecision:
        """Decide about the full blocks that follow what the device holds of a prompt.

        Asked in every step in which the request waits, until a load starts or it is admitted.
        So what lower tiers hold must be known before the request is added.

        Args:
            request: not modified.
            keys: of those blocks, in order; at least one.
            num_matched: blocks before them, which the device holds.
            now_s: of the step.
        """
        ...


class WindowLoad(NamedTuple):
    """The part of a block that layers with a window hold, to be loaded."""

    position: int
    """Position of the block in the prompt."""
    key: bytes
    """Key of the block; empty for the tail of a prompt."""
    block_id: int


@dataclass(slots=True, eq=False)
class _Load:
    """The load of one request."""

    node: PrefixNode
    """Node of the last block of ``path``, or the root."""
    path: list[int]
    """Blocks from the start of the prompt that are in the index, each referenced once."""
    first: int
    """Position of the first block loaded."""
    pending: list[BlockLoad]
    """Loads that are not in the index yet, in order."""
    done: set[int] = field(default_factory=set[int])
    """Blocks of ``pending`` whose content is there, while one before them is missing."""
    tail: PrefixNode | None = None
    """Tail of the tokens behind the last full block, if they were loaded."""


class BlockLoads:
    """The loads in progress, by request and by block.

    Args:
        pool: of the blocks.
        index: over that pool; the blocks that come are inserted there.
        prefix: learns which keys are about to come.
        block_size: tokens per block.
        counters: where blocks that came, and that did not, are counted.
        states: whose slots states come to; None: the model has none.
        windows: whose blocks the windows' KV comes to; None: the model has none.
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
        """Blocks that a transfer may write into now, with or without a waiting request."""
        return sum(map(is_full_block, self._in_transfer))

    @property
    def num_pinned(self) -> int:
        """Number of block references of loads, which no preemption frees."""
        return self._num_pinned

    def count_releasable(self, request: Request) -> int:
        """Return how many references ``give_up`` would release at once."""
        load = self._loads.get(request)
        if load is None:
            return 0
        return len(load.path) + sum(map(is_full_block, load.done))

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
        """Begin to load blocks after those that the index holds of a request.

        Args:
            request: without a load.
            match: full blocks alone, acquired by the caller; the references become ours.
            keys: of the blocks after them, as many as ``block_ids``; the last may be empty: the
                tail of the prompt.
            block_ids: allocated by the caller; the references become ours.
            state: key of the state at the end of these blocks, and a slot for it, which becomes
                ours; None: none is loaded.
            windows: blocks of layers with a window, at positions of the match or of these blocks;
                the references become ours.
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
        """Record blocks that arrived; return True if they complete the request's load.

        Raises: ConflictError (no transfer of this request into such a block); nothing changes.
        """
        load = self._end_transfers(request, block_ids)
        if load is None:
            return False
        load.done.update(
            pending.block_id for pending in load.pending if pending.block_id in block_ids
        )
        return self._advance(request, load)

    def note_failed(self, request: Request, block_ids: Sequence[int]) -> bool:
        """Record blocks whose transfer failed; return True if this ended the request's load.

        What the load would have brought after them is useless to the request, so they end it
        once what comes before them is there.

        Raises: ConflictError (no transfer of this request into such a block); nothing changes.
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
        """End the load of a request, if there is one; blocks that arrived stay in the index."""
        load = self._loads.get(request)
        if load is not None:
            self._cut(request, load, 0)
            self._advance(request, load)

    def give_up_all(self) -> list[Request]:
        """End every load; return their requests."""
        requests = list(self._loads)
        for request in requests:
            self.give_up(request)
        return requests

    def take_dropped(self) -> list[BlockLoad]:
        """Return transfers in progress without a waiting request, once each."""
        dropped = [d for d in self._dropped if self._in_transfer.get(d.block_id) is d]
        self._dropped = []
        return dropped

    def list_references(self) -> list[int]:
        """Return the block ids referenced here, one entry for each reference; for checks."""
        block_ids = [b for load in self._loads.values() for b in load.path]
        return block_ids + list(filter(is_full_block, self._list_pending()))

    def list_window_blocks(self) -> list[int]:
        """Return the blocks of layers with a window that are used here; for checks."""
        blocks = [find_window_block(block_id) for block_id in self._list_pending()]
        return [block_id for block_id in blocks if block_id is not None]

    def list_slots(self) -> list[int]:
        """Return the slots of states that are used here; for checks."""
        slots = [find_state_slot(block_id) for block_id in self._list_pending()]
        return [slot for slot in slots if slot is not None]

    def _list_pending(self) -> list[int]:
        done = [b for load in self._loads.values() for b in load.done]
        return done + list(self._in_transfer)

    def _end_transfers(self, request: Request, block_ids: Sequence[int]) -> _Load | None:
        """Record that nothing writes into these blocks any more; release those without a waiter."""
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
        """Give up all pending blocks of a load from ``position`` on."""
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
        """Insert the blocks loaded without a gap; end the load if nothing is pending."""
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

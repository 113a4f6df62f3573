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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol

from tandem.core.errors import ConflictError
from tandem.core.instance_status import Statistics
from tandem.core.wire import PrefillKv
from tandem.engine.groups.group import Group, GroupBlock
from tandem.engine.scheduling.blocks import BlockPool
from tandem.engine.scheduling.plan import BlockLoad
from tandem.engine.scheduling.prefix_index import PrefixIndex, PrefixMatch, PrefixNode
from tandem.engine.scheduling.prefix_reuse import PrefixReuse
from tandem.engine.scheduling.request import Request

__all__ = ["BlockLoads", "GroupLoad", "LoadDecision", "LoadedGroup", "TierPlanner"]


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


class GroupLoad(NamedTuple):
    """A window block, or the state at its end, that a load brings beside full blocks."""

    position: int
    """Index in the prompt of the full block at the same place; of a state, that of the next one."""
    key: bytes
    """Key of the full block at the same place, or before the state; empty in a prompt's tail."""
    block: GroupBlock


class LoadedGroup(Protocol):
    """A group beside the full blocks, as far as loads fill its memory."""

    def end_load(self, request: Request, node: PrefixNode | None, end: int, index: int) -> None:
        """Take over a block that has been loaded, after all full blocks of the same load.

        Args:
            request: the request that it was loaded for.
            node: node of the full block at its place, if the index has it.
            end: number of tokens up to the end of the load.
            index: index of the block.
        """
        ...

    def free(self, index: int) -> None:
        """Release a block that was taken for a load; its content is discarded."""
        ...


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
    done: set[GroupBlock] = field(default_factory=set[GroupBlock])
    """The blocks in ``pending`` that have arrived before an earlier block of the prompt has;
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
        groups: the groups beside the full blocks, which loads fill too.
    """

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        prefix: PrefixReuse,
        block_size: int,
        counters: Statistics,
        groups: Mapping[Group, LoadedGroup] = MappingProxyType({}),
    ) -> None:
        self._pool = pool
        self._groups = groups
        self._index = index
        self._prefix = prefix
        self._block_size = block_size
        self._loads: dict[Request, _Load] = {}
        self._in_transfer: dict[GroupBlock, BlockLoad] = {}
        self._dropped: list[BlockLoad] = []
        self._num_pinned = 0
        self._counters = counters

    @property
    def num_in_transfer(self) -> int:
        """Number of full blocks that a load may still write into, also for requests that have
        ended.
        """
        return len(_list_full(self._in_transfer))

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
        return 0 if load is None else len(_list_full(load.done))

    def count_tokens(self, request: Request) -> int:
        """Return how many leading tokens of a request are in the blocks that its load extends and
        in those that it brings; 0 if it has no load.
        """
        load = self._loads.get(request)
        if load is None:
            return 0
        num_pending = len(_list_full(pending.block for pending in load.pending))
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
        beside: Sequence[GroupLoad] = (),
    ) -> list[BlockLoad]:
        """Record a load and return its transfers, which the caller adds to the plan.

        Args:
            request: the request to load for; it must have no load in progress.
            match: indexed full blocks that precede the load, referenced by the caller; these
                references are taken over.
            keys: keys of the blocks to load, as many as ``block_ids``; the last may be empty, for
                the prompt's partial last block.
            block_ids: blocks that the caller has allocated to load into; taken over.
            beside: what other groups need of these blocks or of those of ``match``; taken over.
        """
        assert request not in self._loads, f"second load of request {request.request_id}"
        path = [node.block_id for node in match.nodes]
        loads = [
            BlockLoad(request, position, key, GroupBlock(Group.FULL, block_id), request.kv_source)
            for position, (key, block_id) in enumerate(zip(keys, block_ids, strict=True), len(path))
        ]
        self._num_pinned += len(path) + len(loads)
        # Other groups come last: theirs can be used only when all full blocks have arrived.
        loads += [BlockLoad(request, *each, request.kv_source) for each in beside]
        root_or_last = (
            match.nodes[-1]
            if match.nodes
            else self._index.get_root(request.prefix.root_key, request.adapter)
        )
        self._loads[request] = _Load(root_or_last, path, len(path), list(loads))
        self._in_transfer.update({load.block: load for load in loads})
        self._prefix.expect(request, [key for key in keys if key])
        request.load.has_loaded = True
        request.load.loaded_blocks = range(len(path), len(path))
        return loads

    def note_done(self, request: Request, blocks: Sequence[GroupBlock]) -> bool:
        """Record blocks that arrived; return True if the request's load is now complete.

        Raises: ConflictError (one of the blocks is not being loaded for this request); nothing
            changes.
        """
        load = self._end_transfers(request, blocks)
        if load is None:
            return False
        load.done.update(pending.block for pending in load.pending if pending.block in blocks)
        return self._advance(request, load)

    def note_failed(self, request: Request, blocks: Sequence[GroupBlock]) -> bool:
        """Record blocks whose transfer failed; return True if the request's load has ended.

        A prefix is usable only without gaps, so the load is cut at the first failed block. It ends
        when the blocks before that one have arrived.

        Raises: ConflictError (one of the blocks is not being loaded for this request); nothing
            changes.
        """
        load = self._end_transfers(request, blocks)
        if load is None:
            return False
        for position, pending in enumerate(load.pending):
            if pending.block in blocks:
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
        dropped = [d for d in self._dropped if self._in_transfer.get(d.block) is d]
        self._dropped = []
        return dropped

    def list_references(self) -> list[int]:
        """Return the ids of blocks referenced by loads, one entry a reference, for consistency
        checks.
        """
        block_ids = [b for load in self._loads.values() for b in load.path]
        return block_ids + self.list_taken(Group.FULL)

    def list_taken(self, group: Group) -> list[int]:
        """Return the blocks of a group that loads have taken, for consistency checks."""
        done = [block for load in self._loads.values() for block in load.done]
        return [index for owner, index in (*done, *self._in_transfer) if owner is group]

    def free(self, blocks: Iterable[GroupBlock]) -> None:
        """Release blocks of other groups that were taken for a load which did not start."""
        for group, index in blocks:
            self._groups[group].free(index)

    def _end_transfers(self, request: Request, blocks: Sequence[GroupBlock]) -> _Load | None:
        """Record that nothing writes into these blocks any more; return the request's load, None if
        it has ended or was given up.

        Blocks that the load no longer wants are released.
        """
        ended = [self._in_transfer.get(block) for block in set(blocks)]
        if len(ended) < len(blocks) or any(e is None or e.request is not request for e in ended):
            raise ConflictError(
                "engine.end_load",
                f"not all of blocks {[(str(group), index) for group, index in blocks]} are being "
                f"loaded for request {request.request_id!r}: report each end once",
            )
        load = self._loads.get(request)
        wanted = set[GroupBlock]() if load is None else {one.block for one in load.pending}
        for block in blocks:
            del self._in_transfer[block]
            if block not in wanted:
                self._release((block,))
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
            load.done.discard(pending.block)
            if self._in_transfer.get(pending.block) is pending:
                self._dropped.append(pending)
            else:
                self._release((pending.block,))

    def _advance(self, request: Request, load: _Load) -> bool:
        """Insert into the index the arrived blocks up to the first that is missing.

        Ends the load, and returns True, if nothing is pending any more.
        """
        size = self._block_size
        position = 0
        for pending in load.pending:
            if pending.block not in load.done:
                break
            load.done.remove(pending.block)
            position += 1
            group, index = pending.block
            if group is not Group.FULL:
                node = self._index.find_node(pending.key) if pending.key else load.tail
                end = len(load.path) * size
                if isinstance(pending.source, PrefillKv):
                    # That of the whole prompt, whose last block may be partial. A lower tier has
                    # states at the end of full blocks, of generated tokens too.
                    end = min(end, request.prompt_len)
                self._groups[group].end_load(request, node, end, index)
                continue
            self._counters.num_loaded_blocks += 1
            start = len(load.path) * size
            if not pending.key:
                tail = request.prompt_ids[start:]
                load.tail = self._index.insert_tail(load.node, tail, index)
                load.path.append(index)
            else:
                tokens = request.get_tokens(start, start + size)
                load.node = self._index.insert(load.node, pending.key, tokens, index)
                load.path.append(load.node.block_id)
                self._prefix.forget_expected(request, (pending.key,))
        del load.pending[:position]
        request.load.loaded_blocks = range(load.first, len(load.path))
        if load.pending:
            return False
        self._release_full(load.path)
        del self._loads[request]
        return True

    def _release(self, blocks: Sequence[GroupBlock]) -> None:
        self.free(block for block in blocks if block.group is not Group.FULL)
        self._release_full(_list_full(blocks))

    def _release_full(self, block_ids: Sequence[int]) -> None:
        self._index.release(block_ids)
        self._num_pinned -= len(block_ids)


def _list_full(blocks: Iterable[GroupBlock]) -> list[int]:
    return [index for group, index in blocks if group is Group.FULL]

"""KV blocks of sliding-window layers, in a pool of their own; a request keeps only the blocks that
its window covers.

A token attends to itself and to ``window - 1`` tokens before it. A request has a table of the
window blocks that its next token attends to and that steps in flight write; as it advances, it
releases blocks behind its window. A window block whose tokens are in the prefix index is attached
to their node (``PrefixNode.window_block_id``) while there is room. A cached prefix can be reused up
to the last token whose window is cached. So this pool is independent of the full blocks: its size
decides from how many positions of how many prompts later prompts can go on.

Blocks that no request references are evicted in two orders: first those that requests have left
behind as they advanced, then those at ends of messages, prompts and answers and where prompts
diverge; least recently used first in each.

No request is preempted for window blocks. Each running request has enough of them reserved to
compute one token; the chunks of prefills use the rest. Pure and single-threaded.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tandem.core.errors import ConfigError
from tandem.core.instance_status import Statistics
from tandem.engine.groups.group import Group, GroupBlock
from tandem.engine.scheduling.blocks import BlockCopy, BlockPool, KeyedBlock
from tandem.engine.scheduling.plan import StepPlan
from tandem.engine.scheduling.prefix_index import PrefixIndex, PrefixMatch, PrefixNode
from tandem.engine.scheduling.request import NO_WINDOW, Request, WindowTable

__all__ = ["WindowPolicy", "WindowReuse", "count_seen_blocks", "count_window_blocks"]


class WindowPolicy(NamedTuple):
    """The size of the sliding window in tokens, and the number of window blocks."""

    window: int
    """Number of tokens that a token attends to, itself included."""
    num_blocks: int
    """Number of window blocks for running requests and the prefix cache together."""


def count_window_blocks(window: int, block_size: int) -> int:
    """Return the largest number of blocks that hold a token to which one token of a sliding-window
    layer attends.
    """
    return count_seen_blocks(window, block_size) + 1


def count_seen_blocks(window: int, block_size: int) -> int:
    """Return how many preceding blocks the first token of a block attends to."""
    return -(-(window - 1) // block_size)


class WindowReuse:
    """The window blocks of running requests and of cached prefixes.

    Args:
        policy: with enough blocks for one request.
        index: the prefix index, to whose nodes blocks are attached.
        block_size: tokens per block.
        counters: statistics, in which evictions are counted.
        is_ahead: True if a step may be planned while another runs; each request then needs one more
            block, because the running step's window begins earlier.

    Raises: ConfigError (too few blocks for one request).
    """

    def __init__(
        self,
        policy: WindowPolicy,
        index: PrefixIndex,
        block_size: int,
        counters: Statistics,
        *,
        is_ahead: bool,
    ) -> None:
        self.window = policy.window
        self._block_size = block_size
        self._reach = policy.window - 1
        self._reserve = count_window_blocks(policy.window, block_size) + is_ahead
        # One block more than the reserve of one request (what it needs to compute its next token)
        # is needed, for the source of a copy, which stays referenced until the step has completed.
        if policy.num_blocks < self._reserve + 1:
            raise ConfigError(
                "engine.create_windows",
                f"{policy.num_blocks} blocks of {block_size} tokens for layers with a window of "
                f"{policy.window}: one request takes {self._reserve + 1}",
                field="engine.num_window_blocks",
            )
        self.pool = BlockPool(policy.num_blocks)
        self._counters = counters
        self._index = index
        self._by_block: dict[int, PrefixNode] = {}
        self._passed: OrderedDict[PrefixNode, None] = OrderedDict()
        """Blocks of the prefix index that keep window KV which no request uses and which running
        requests have moved past; this window KV is evicted first.
        """
        self._kept: OrderedDict[PrefixNode, None] = OrderedDict()
        """Blocks of the prefix index that keep unused window KV from which a later prompt may go
        on; it is evicted after that in ``_passed``.
        """
        self._num_pinned = 0
        """Number of references to window blocks by block copies of steps that have not completed,
        by loads, and by blocks held for other instances.
        """
        self._filled: list[KeyedBlock] = []
        index.on_unlinked = self._forget

    # The methods below reuse cached window blocks for a request that starts.

    def cut(self, match: PrefixMatch) -> PrefixMatch:
        """Return the longest part of a match (a cached prefix) at whose end the sliding window is
        cached too; changes nothing.
        """
        size, position = self._block_size, match.num_tokens
        nodes = [*match.nodes] if match.source is None else [*match.nodes, match.source]
        while position > 0:
            first, end = self._find_first(position), -(-position // size)
            lacking = (i for i in range(end - 1, first - 1, -1) if nodes[i].window_block_id < 0)
            last_lacking = next(lacking, None)
            if last_lacking is None:
                break
            position = last_lacking * size
        return match.cut(position, size)

    def can_start(self, request: Request, match: PrefixMatch, running: Iterable[Request]) -> bool:
        """Return True if a waiting request can be admitted, with enough window blocks left for its
        reserve (what it needs to compute its next token) and those of the running ones.
        """
        wanted = self._count_reserved(request) + (match.source is not None)
        promised = sum(map(self._count_promised, running)) + self._num_pinned
        return wanted <= self.pool.num_blocks - promised

    def start(self, plan: StepPlan, request: Request, match: PrefixMatch) -> None:
        """Give an admitted request the window blocks at the end of its match (its cached prefix).
        Call ``can_start`` first.

        Args:
            plan: gets the copy of a block that matches in part.
            request: the admitted request.
            match: a result of ``cut``.
        """
        first = self._find_first(match.num_tokens)
        nodes = match.nodes[first:]
        for node in nodes:
            self._retain(node)
        blocks = tuple([node.window_block_id for node in nodes])
        if match.source is not None:
            self._retain(match.source)
            source, target = match.source.window_block_id, self._allocate()
            plan.window_copies.append(BlockCopy(source, target, match.num_source_tokens))
            self._num_pinned += 1
            blocks += (target,)
        notes = request.window_notes
        notes.table = WindowTable(first, blocks)
        ends = {request.message_end, request.prompt_len, match.num_tokens, match.num_kv_tokens}
        notes.marks = tuple(sorted(ends))

    def end_copies(self, plan: StepPlan) -> None:
        """Release the window blocks from which a plan, whose step has completed, has copied."""
        for copy in plan.window_copies:
            self._release(copy.src_block_id, self._kept)
        self._num_pinned -= len(plan.window_copies)
        plan.window_copies = []

    # The methods below give a running request its window blocks and take them back.

    def limit(self, request: Request, num_tokens: int, running: Sequence[Request]) -> int:
        """Return how many of a request's next ``num_tokens`` tokens can get window blocks.

        Args:
            request: a running request, or one that ``start`` was called for.
            num_tokens: number of tokens wanted.
            running: the running requests; ``request`` may be among them.
        """
        table, start, size = (
            request.window_notes.table,
            request.num_planned_tokens,
            self._block_size,
        )
        wanted = -(-(start + num_tokens) // size) - table.end
        num_held = len(table.blocks)
        if wanted <= 0 or num_held + wanted <= self._count_reserved(request):
            return num_tokens
        others = sum(self._count_promised(other) for other in running if other is not request)
        room = self.pool.num_blocks - self._num_pinned - others - num_held
        return max(min(num_tokens, (table.end + room) * size - start), 0)

    def extend(self, request: Request, end: int) -> None:
        """Allocate window blocks for a request's tokens up to position ``end``. The caller ensures
        that ``limit`` has allowed so many tokens.
        """
        notes = request.window_notes
        first, blocks = notes.table
        wanted = -(-end // self._block_size) - notes.table.end
        if wanted > 0:
            fresh = tuple([self._allocate() for _ in range(wanted)])
            notes.table = WindowTable(first, blocks + fresh)

    def keep(self, request: Request, position: int, node: PrefixNode) -> None:
        """Attach a request's window block to the index node of its tokens.

        If the node has a window block already, the request uses that one instead and releases its
        own.

        Args:
            request: the request, which has computed the node's tokens.
            position: index of the block in the request.
            node: node of these tokens in the prefix index.
        """
        notes = request.window_notes
        first, blocks = notes.table
        if not first <= position < notes.table.end:
            return
        block_id = blocks[position - first]
        if node.window_block_id < 0:
            self._file(node, block_id)
            if node.key is not None:
                generation = self.pool.get_generation(block_id)
                block = GroupBlock(Group.WINDOW, block_id)
                self._filled.append(KeyedBlock(node.key, block, generation))
        elif node.window_block_id != block_id:
            self._retain(node)
            self._release(block_id, self._passed)
            changed = list(blocks)
            changed[position - first] = node.window_block_id
            notes.table = WindowTable(first, tuple(changed))

    def advance(self, request: Request) -> None:
        """Release the window blocks that the next tokens of a request do not attend to any more."""
        notes = request.window_notes
        first, blocks = notes.table
        passed = min(self._find_first(request.num_computed_tokens) - first, len(blocks))
        if passed <= 0:
            return
        notes.table = WindowTable(first + passed, blocks[passed:])
        for position, block_id in enumerate(blocks[:passed], first):
            is_marked = any(self._is_seen(position, mark) for mark in notes.marks)
            self._release(block_id, self._kept if is_marked else self._passed)

    def release(self, request: Request) -> None:
        """Release all window blocks of a request that ends. Those attached to nodes of the prefix
        index remain cached.
        """
        notes = request.window_notes
        for block_id in notes.table.blocks:
            self._release(block_id, self._kept)
        notes.table, notes.marks = NO_WINDOW, ()

    # The methods below serve lower tiers and other instances, which store, load and read blocks.

    def take_filled(self) -> list[KeyedBlock]:
        """Return the full window blocks that were attached to nodes of the prefix index since the
        last call, for lower tiers to store.
        """
        filled, self._filled = self._filled, []
        return filled

    def clear(self) -> None:
        """Forget the filled blocks that ``take_filled`` has not returned yet, because the index has
        been cleared.
        """
        self._filled.clear()

    def list_lacking(self, nodes: Sequence[PrefixNode], position: int) -> list[int]:
        """Return the indexes of the window blocks that are not cached, of the window before a
        token.

        Args:
            nodes: nodes of the leading blocks that the index has.
            position: position of the token.
        """
        first, end = self._find_first(position), -(-position // self._block_size)
        return [i for i in range(first, end) if i >= len(nodes) or nodes[i].window_block_id < 0]

    def take_for_load(self, num_blocks: int, running: Iterable[Request]) -> list[int] | None:
        """Allocate window blocks to load into; return their ids, or None if too few remain beside
        those reserved for running requests.
        """
        promised = sum(map(self._count_promised, running)) + self._num_pinned
        if promised + num_blocks > self.pool.num_blocks:
            return None
        self._num_pinned += num_blocks
        return [self._allocate() for _ in range(num_blocks)]

    def end_load(self, request: Request, node: PrefixNode | None, end: int, index: int) -> None:
        """Attach a loaded window block to the node of its tokens, if that exists and has none yet;
        then release the load's reference.
        """
        del request, end
        if node is not None and node.window_block_id < 0:
            self._file(node, index)
        self.free(index)

    def get_generation(self, index: int) -> int:
        """Return a number that changes whenever a window block gets new content."""
        return self.pool.get_generation(index)

    def hold(self, request: Request) -> None:
        """Keep references to the window blocks of a prefill that ends, so that other instances can
        read them.
        """
        request.held_window = request.window_notes.table
        for block_id in request.held_window.blocks:
            self.pool.retain(block_id)
        self._num_pinned += len(request.held_window.blocks)

    def release_hold(self, request: Request) -> None:
        """Release the window blocks that ``hold`` has kept for a request's readers."""
        for block_id in request.held_window.blocks:
            self.free(block_id)
        request.held_window = NO_WINDOW

    def free(self, index: int) -> None:
        """Release the reference of a load or of a hold (blocks kept for a decode instance) to a
        window block.
        """
        self._num_pinned -= 1
        self._release(index, self._kept)

    # The method below checks the whole state, for tests.

    def check(
        self,
        running: Iterable[Request],
        in_flight: Iterable[StepPlan],
        loading: Iterable[int] = (),
    ) -> None:
        """Assert that every reference has an owner and that all reserves fit the pool; for
        tests.
        """
        self.pool.check()
        running = list(running)
        owners: Counter[int] = Counter()
        owners.update(loading)
        for request in running:
            owners.update(request.window_notes.table.blocks)
        for plan in in_flight:
            owners.update(copy.src_block_id for copy in plan.window_copies)
        for block_id in range(self.pool.num_blocks):
            num_refs = self.pool.get_num_refs(block_id)
            assert owners[block_id] == num_refs, (
                f"window block {block_id}: {num_refs} references, {owners[block_id]} owners"
            )
        idle = [*self._passed, *self._kept]
        assert len(idle) == len({*idle}) == self.pool.num_cached, f"{len(idle)} idle blocks"
        for block_id, node in self._by_block.items():
            assert node.window_block_id == block_id, f"node of window block {block_id} has another"
            assert node.is_linked, f"window block {block_id} of a forgotten node"
            is_idle = self.pool.get_num_refs(block_id) == 0
            assert is_idle == (node in self._passed or node in self._kept), f"block {block_id}"
        promised = sum(map(self._count_promised, running)) + self._num_pinned
        assert promised <= self.pool.num_blocks, f"{promised} of {self.pool.num_blocks} promised"

    # The methods below count, allocate and release single window blocks.

    def _find_first(self, position: int) -> int:
        """Return the index of the first block with a token to which the token at ``position``
        attends.
        """
        return max(position - self._reach, 0) // self._block_size

    def _is_seen(self, block: int, mark: int) -> bool:
        """Return True if the token at position ``mark``, or the one before it, attends to a token
        of the block with index ``block``, and this block has tokens before ``mark``.
        """
        return self._find_first(max(mark - 1, 0)) <= block < -(-mark // self._block_size)

    def _count_reserved(self, request: Request) -> int:
        """Return the number of window blocks reserved for a request, so that it can always compute
        its next token.
        """
        return min(self._reserve, -(-request.queue.max_total_tokens // self._block_size))

    def _count_promised(self, request: Request) -> int:
        return max(self._count_reserved(request), len(request.window_notes.table.blocks))

    def _allocate(self) -> int:
        if self.pool.num_free < 1:
            order = self._passed or self._kept
            node, _ = order.popitem(last=False)
            self._drop(node)
            self._counters.num_evicted_window_blocks += 1
        return self.pool.allocate()

    def _retain(self, node: PrefixNode) -> None:
        if self.pool.retain(node.window_block_id):
            (self._passed if node in self._passed else self._kept).pop(node)

    def _release(self, block_id: int, order: OrderedDict[PrefixNode, None]) -> None:
        """Drop a reference to a window block; without references it becomes evictable, last in
        ``order`` of eviction.
        """
        if self.pool.release(block_id):
            order[self._by_block[block_id]] = None

    def _forget(self, node: PrefixNode) -> None:
        """Detach and free the window block of a node that the prefix index has dropped, if it has
        one.
        """
        if node.window_block_id >= 0:
            self._passed.pop(node, None)
            self._kept.pop(node, None)
            self._drop(node)

    def _file(self, node: PrefixNode, block_id: int) -> None:
        """Attach a window block (KV of the sliding-window layers) to the index node of its tokens,
        so that requests can reuse it.
        """
        node.window_block_id = block_id
        self._by_block[block_id] = node
        self.pool.hold(block_id)
        if node.key is not None:
            for observer in self._index.observers:
                observer.note_window_kept(node)

    def _drop(self, node: PrefixNode) -> None:
        block_id, node.window_block_id = node.window_block_id, -1
        del self._by_block[block_id]
        self.pool.drop_hold(block_id)
        if node.key is not None:
            for observer in self._index.observers:
                observer.note_window_removed(node.key)

"""The blocks of layers with a window: a pool of their own, of which a request owns what it sees.

A token sees itself and ``window - 1`` before it. A request has a table of the blocks that its next
token sees, and of those that steps in flight write; when it has got further, it gives up the blocks
that it has left behind. What a block of the prefix index holds in these layers is filed with its
node (``PrefixNode.window_block_id``), as long as there is room; a prefix is taken up at the last
token at which the window before it is there. So the pool is independent of the other blocks: its
size decides how many places of how many prompts later prompts can go on from.

What nobody owns is given up in two orders: first what requests have left behind as they went on,
then what was seen at the ends of messages, prompts and answers and where prompts part; of each, the
least recently used first.

No request is preempted for these blocks. Each running one has a number of them reserved with which
it can always compute a token; a chunk of a prefill takes what is left beside them. Pure and
single-threaded, as the scheduler.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tandem.core.errors import ConfigError
from tandem.core.instance_status import Statistics
from tandem.engine.scheduling.blocks import BlockCopy, BlockPool, KeyedBlock, make_window_id
from tandem.engine.scheduling.plan import StepPlan
from tandem.engine.scheduling.prefix_index import PrefixIndex, PrefixMatch, PrefixNode
from tandem.engine.scheduling.request import NO_WINDOW, Request, WindowTable

__all__ = ["WindowPolicy", "WindowReuse", "count_seen_blocks", "count_window_blocks"]


class WindowPolicy(NamedTuple):
    """The window, and the number of blocks there is room for."""

    window: int
    """Tokens that a token sees, itself included."""
    num_blocks: int
    """Number of window blocks for running requests and the prefix cache together."""


def count_window_blocks(window: int, block_size: int) -> int:
    """Return the blocks that a token sees at most, wherever it stands."""
    return count_seen_blocks(window, block_size) + 1


def count_seen_blocks(window: int, block_size: int) -> int:
    """Return the blocks before the end of a block that the next token sees."""
    return -(-(window - 1) // block_size)


class WindowReuse:
    """Gives requests window blocks, and finds and keeps those of prefixes.

    Args:
        policy: with blocks enough for one request.
        index: whose nodes the blocks are filed with.
        block_size: tokens of a block.
        counters: where evictions are counted.
        is_ahead: a step may be planned while another runs, which still sees one token less.

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
        # One block more than the reserve is needed: the source of a copy stays pinned meanwhile.
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
        """Nodes with unowned window blocks that requests left behind; these are evicted first."""
        self._kept: OrderedDict[PrefixNode, None] = OrderedDict()
        """Nodes with unowned window blocks at places where a later prompt may continue."""
        self._num_pinned = 0
        """Number of references of copies in plans in flight, of loads and of holds."""
        self._filled: list[KeyedBlock] = []
        index.on_unlinked = self._forget

    # ---------------------------------------------------------------- hits

    def cut(self, match: PrefixMatch) -> PrefixMatch:
        """Return the part of a match that ends where the window is there; changes nothing."""
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
        """Return True if one more request can always get the blocks for its next token."""
        wanted = self._count_reserved(request) + (match.source is not None)
        promised = sum(map(self._count_promised, running)) + self._num_pinned
        return wanted <= self.pool.num_blocks - promised

    def start(self, plan: StepPlan, request: Request, match: PrefixMatch) -> None:
        """Give an admitted request the window blocks at the end of its match.

        Call ``can_start`` first.

        Args:
            plan: gets the copy of a block that matches in part.
            request: that is admitted.
            match: of ``cut``.
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
        """Release the blocks that a plan has copied from."""
        for copy in plan.window_copies:
            self._release(copy.src_block_id, self._kept)
        self._num_pinned -= len(plan.window_copies)
        plan.window_copies = []

    # ---------------------------------------------------------------- steps

    def limit(self, request: Request, num_tokens: int, running: Sequence[Request]) -> int:
        """Return how many of its next tokens a request can get window blocks for.

        Args:
            request: running, or with its first blocks.
            num_tokens: wanted.
            running: the running set; the request may be among them.
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
        """Give a request window blocks for its tokens up to ``end``, as ``limit`` has allowed."""
        notes = request.window_notes
        first, blocks = notes.table
        wanted = -(-end // self._block_size) - notes.table.end
        if wanted > 0:
            fresh = tuple([self._allocate() for _ in range(wanted)])
            notes.table = WindowTable(first, blocks + fresh)

    def keep(self, request: Request, position: int, node: PrefixNode) -> None:
        """File a request's block with the node of its tokens, or let it share that node's.

        Args:
            request: that has computed the node's tokens.
            position: of the block in the request.
            node: that stands for these tokens in the index.
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
                self._filled.append(KeyedBlock(node.key, make_window_id(block_id), generation))
        elif node.window_block_id != block_id:
            self._retain(node)
            self._release(block_id, self._passed)
            changed = list(blocks)
            changed[position - first] = node.window_block_id
            notes.table = WindowTable(first, tuple(changed))

    def advance(self, request: Request) -> None:
        """Release the window blocks that a request has moved past."""
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
        """Release all window blocks of a request that ends; the prefix index can still find
        them.
        """
        notes = request.window_notes
        for block_id in notes.table.blocks:
            self._release(block_id, self._kept)
        notes.table, notes.marks = NO_WINDOW, ()

    # ---------------------------------------------------------------- lower tiers

    def take_filled(self) -> list[KeyedBlock]:
        """Return the full window blocks that became findable since the last call."""
        filled, self._filled = self._filled, []
        return filled

    def clear(self) -> None:
        """Forget the filled blocks that were not reported: the index has been cleared."""
        self._filled.clear()

    def list_lacking(self, nodes: Sequence[PrefixNode], position: int) -> list[int]:
        """Return the positions of window blocks that are missing to continue at a token.

        Args:
            nodes: of the leading blocks that the index has.
            position: of the token.
        """
        first, end = self._find_first(position), -(-position // self._block_size)
        return [i for i in range(first, end) if i >= len(nodes) or nodes[i].window_block_id < 0]

    def take_for_load(self, num_blocks: int, running: Iterable[Request]) -> list[int] | None:
        """Take window blocks for a load; None if they are reserved for running requests."""
        promised = sum(map(self._count_promised, running)) + self._num_pinned
        if promised + num_blocks > self.pool.num_blocks:
            return None
        self._num_pinned += num_blocks
        return [self._allocate() for _ in range(num_blocks)]

    def end_load(self, node: PrefixNode | None, block_id: int) -> None:
        """File a block that came from elsewhere with the node of its tokens, if that has none."""
        if node is not None and node.window_block_id < 0:
            self._file(node, block_id)
        self.free(block_id)

    def hold(self, request: Request) -> None:
        """Keep the window at the end of a request, so that other instances can read it."""
        request.held_window = request.window_notes.table
        for block_id in request.held_window.blocks:
            self.pool.retain(block_id)
        self._num_pinned += len(request.held_window.blocks)

    def release_hold(self, request: Request) -> None:
        """Release the window that ``hold`` has kept."""
        for block_id in request.held_window.blocks:
            self.free(block_id)
        request.held_window = NO_WINDOW

    def free(self, block_id: int) -> None:
        """Release a block that a load or another instance has held."""
        self._num_pinned -= 1
        self._release(block_id, self._kept)

    # ---------------------------------------------------------------- checks

    def check(
        self,
        running: Iterable[Request],
        in_flight: Iterable[StepPlan],
        loading: Iterable[int] = (),
    ) -> None:
        """Assert that references have owners and that promises can be kept; for tests."""
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

    # ---------------------------------------------------------------- blocks

    def _find_first(self, position: int) -> int:
        """Return the position of the first block that is seen by the token at ``position``."""
        return max(position - self._reach, 0) // self._block_size

    def _is_seen(self, block: int, mark: int) -> bool:
        """Return True if the window of the token at ``mark``, or of the one before it, includes
        a block.
        """
        return self._find_first(max(mark - 1, 0)) <= block < -(-mark // self._block_size)

    def _count_reserved(self, request: Request) -> int:
        """Return the blocks with which a request computes its next token in any case."""
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
        """Drop a reference; a block without references becomes evictable in the given order."""
        if self.pool.release(block_id):
            order[self._by_block[block_id]] = None

    def _forget(self, node: PrefixNode) -> None:
        """Take the window block from a node that the index has dropped."""
        if node.window_block_id >= 0:
            self._passed.pop(node, None)
            self._kept.pop(node, None)
            self._drop(node)

    def _file(self, node: PrefixNode, block_id: int) -> None:
        """File a block with the node of its tokens."""
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

"""The link between requests and the prefix index: blocks that a request reuses, and blocks it adds.

Owns each request's block keys and position in the index (fields of ``Request``), and a table of the
blocks that running prefills will compute or loads will bring. The scheduler decides which request
is admitted and when; this module decides which blocks it shares. Pure, single-threaded.
"""

from collections.abc import Iterable, Sequence

from tandem.core.timeline import MissReason, PrefixMiss
from tandem.engine.groups.reuse import StateReuse
from tandem.engine.groups.windows import WindowReuse
from tandem.engine.scheduling.blocks import KeyedBlock
from tandem.engine.scheduling.prefix_index import PrefixIndex, PrefixMatch, PrefixNode
from tandem.engine.scheduling.request import Request, RequestState

__all__ = ["PrefixReuse"]

MAX_DEFERRALS = 256
"""Largest number of steps that a request waits for others to compute a shared prefix."""


class PrefixReuse:
    """The operations of requests on the prefix index: look up, share, index, release.

    Args:
        index: the prefix index.
        block_size: tokens per block.
        is_enabled: if False, nothing is looked up or indexed; blocks are only released.
        states: snapshots of states, of which a match needs one at its end; None: the model has
            none.
        windows: window blocks of matches; None: window layers have no blocks of their own.
    """

    def __init__(
        self,
        index: PrefixIndex,
        block_size: int,
        *,
        is_enabled: bool,
        states: StateReuse | None = None,
        windows: WindowReuse | None = None,
    ) -> None:
        self._windows = windows
        self.is_enabled = is_enabled
        self._states = states
        self._index = index
        self._block_size = block_size
        self._expected: dict[bytes, Request] = {}
        """From the key of a block to the request whose prefill will compute it or whose load will
        bring it.
        """
        self._filled: list[KeyedBlock] = []

    def open(self, request: Request) -> None:
        """Compute the root key (the first key of the chain, of salt and adapter) of a request that
        has just arrived.
        """
        request.prefix.root_key = self._index.make_root_key(request.cache_salt, request.adapter)

    def make_keys(
        self, prompt_ids: Sequence[int], cache_salt: str, adapter: str = ""
    ) -> list[bytes]:
        """Return the keys (digests of all tokens up to the block's end) of a prompt's full blocks,
        except of a block that ends with the last token.

        The last token is computed in any case, as its logits give the next token.
        """
        if not self.is_enabled:
            return []
        keys: list[bytes] = []
        num_tokens = (len(prompt_ids) - 1) // self._block_size * self._block_size
        root_key = self._index.make_root_key(cache_salt, adapter)
        self._index.extend_keys(root_key, keys, prompt_ids[:num_tokens])
        return keys

    def find(self, request: Request, *, at_blocks: bool = False) -> PrefixMatch:
        """Return the longest reusable match of a request's tokens, without the last token.

        The last token is computed in any case: its logits choose the next.

        Args:
            request: a request that is not running.
            at_blocks: if True, match full blocks only, so that nothing need be copied.
        """
        if not self.is_enabled or not request.can_reuse_prefix:
            return PrefixMatch([], 0)
        match = self._match(request)
        if self._states is not None:
            tokens = request.get_tokens(0, request.num_tokens)
            return self._states.cut(request.prefix, tokens, match, at_blocks=at_blocks)
        match = match.without_copy() if at_blocks else match
        return match if self._windows is None else self._windows.cut(match)

    def find_blocks(self, request: Request) -> PrefixMatch:
        """Return the cached full blocks of a request, even if no recurrent state or sliding window
        is cached at their end.
        """
        if not self.is_enabled or not request.can_reuse_prefix:
            return PrefixMatch([], 0)
        self.extend_keys(request)
        keys = request.prefix.block_keys[: (request.num_tokens - 1) // self._block_size]
        return self._index.match_blocks(keys[: self._index.count_cached_blocks(keys)])

    def _match(self, request: Request) -> PrefixMatch:
        self.extend_keys(request)
        num_tokens = request.num_tokens
        token_ids = request.get_tokens(0, num_tokens) if request.output_ids else request.prompt_ids
        notes = request.prefix
        return self._index.match(notes.root_key, notes.block_keys, token_ids, num_tokens - 1)

    def explain_miss(self, request: Request) -> PrefixMiss | None:
        """Return where and why the cached prefix of a request ends; None if all of it is cached."""
        if not self.is_enabled:
            return PrefixMiss(reason=MissReason.DISABLED, position=0)
        if not request.can_reuse_prefix:
            return PrefixMiss(reason=MissReason.NEEDS_LOGITS, position=0)
        match = self.find(request)
        if match.num_tokens >= request.num_tokens - 1:
            return None
        if match.num_kv_tokens > match.num_tokens:
            detail = str(match.num_kv_tokens)
            reason = MissReason.NO_WINDOW if self._states is None else MissReason.NO_STATE
            return PrefixMiss(reason=reason, position=match.num_tokens, detail=detail)
        num_full = len(match.nodes)
        next_key = (
            request.prefix.block_keys[num_full]
            if num_full < len(request.prefix.block_keys)
            else None
        )
        if next_key in self._expected:
            reason = MissReason.TOO_LATE
        else:
            reason = self._index.explain_end(request.prefix.root_key, match, next_key)
        return PrefixMiss(reason=reason, position=match.num_tokens)

    def count_cached_blocks(self, request: Request) -> int:
        """Return how many leading full blocks of a request are cached; used to order the queue."""
        self.extend_keys(request)
        return self._index.count_cached_blocks(request.prefix.block_keys)

    def is_expected(self, request: Request, running: Iterable[Request]) -> bool:
        """Return True if a running prefill or a load will soon provide more of a request's prefix.

        A request for which this is True is not admitted yet, so that equal prompts that arrive
        together are computed once. It counts only while the other request makes progress, and for
        at most ``MAX_DEFERRALS`` steps.

        Args:
            request: the waiting request.
            running: the running requests; used for a model with states.
        """
        if request.queue.num_deferrals >= MAX_DEFERRALS:
            return False
        if self._states is not None and self.is_enabled and request.can_reuse_prefix:
            return self._states.is_expected(request, self.find(request).num_tokens, running)
        other = self.find_provider(request)
        return other is not None and (other.is_scheduled or other.state is RequestState.LOADING)

    def find_provider(self, request: Request) -> Request | None:
        """Return the request that computes or loads the first block that ``request`` lacks; None if
        there is none.
        """
        if not self._expected or not request.can_reuse_prefix:
            return None
        num_cached = self.count_cached_blocks(request)
        if num_cached == len(request.prefix.block_keys):
            return None
        return self._expected.get(request.prefix.block_keys[num_cached])

    def list_missing_keys(self, request: Request, num_cached: int) -> list[bytes]:
        """Return the keys of a request's full blocks after the first ``num_cached``.

        A block that ends with the last known token is left out: that token is computed in any case.
        """
        self.extend_keys(request)
        return request.prefix.block_keys[num_cached : (request.num_tokens - 1) // self._block_size]

    def list_prompt_keys(self, request: Request, num_cached: int) -> list[bytes]:
        """Return the keys of the prompt's blocks after the first ``num_cached``, for a load of all
        of them.

        If the prompt ends inside a block, the last key is empty; only a prefill instance has that
        block.
        """
        self.extend_keys(request)
        num_full, num_tail_tokens = divmod(request.prompt_len, self._block_size)
        keys = request.prefix.block_keys[num_cached:num_full]
        return [*keys, b""] if num_tail_tokens else keys

    def expect(self, request: Request, keys: Sequence[bytes]) -> None:
        """Record that a request will compute or load the blocks with these keys, so that others
        wait for it.
        """
        for key in keys:
            self._expected[key] = request

    def forget_expected(self, request: Request, keys: Sequence[bytes]) -> None:
        """Remove what ``expect`` has recorded for a request and these keys, whether or not the
        blocks came.
        """
        if self._expected:
            for key in keys:
                if self._expected.get(key) is request:
                    del self._expected[key]

    def take_filled(self) -> list[KeyedBlock]:
        """Return the blocks that became full, and that requests can match, since the last call."""
        filled, self._filled = self._filled, []
        return filled

    def attach(self, request: Request, match: PrefixMatch) -> tuple[int, ...]:
        """Take references to the blocks of a match for a request that starts; return the shared
        ids.

        The source of a copy is referenced too, until ``release_copied``.
        """
        shared = self._index.acquire(match)
        request.num_computed_tokens = match.num_tokens
        request.prefix.num_indexed_blocks = len(shared)
        if self.is_enabled:
            # Set the node after ``acquire``: a root without children is kept alive by this
            # reference alone.
            request.prefix.node = (
                match.nodes[-1]
                if match.nodes
                else self._index.get_root(request.prefix.root_key, request.adapter)
            )
            self.expect(request, request.prefix.block_keys[len(shared) :])
        return shared

    def release_copied(self, src_block_id: int) -> None:
        """Release the reference to a block that was the source of a copy, now that the copy is
        made.
        """
        self._index.release((src_block_id,))

    def index_computed(self, request: Request, *, is_prompt_end: bool) -> None:
        """Index the blocks that a step has filled and, at the end of a prompt, its partial last
        block.

        The partial block is indexed once, not after each token: the tokens generated into it can be
        matched when the block is full or the request leaves.
        """
        node = request.prefix.node
        if node is None:
            return
        size = self._block_size
        position = request.prefix.num_indexed_blocks
        num_full = request.num_computed_tokens // size
        if position < num_full and node.is_linked:
            self.extend_keys(request)
            while position < num_full:
                block_id = request.block_table[position]
                tokens = request.get_tokens(position * size, (position + 1) * size)
                node = self._index.insert(
                    node, request.prefix.block_keys[position], tokens, block_id
                )
                if node.block_id == block_id:
                    self._filled.append(self._index.describe(node))
                else:
                    _replace_block(request, position, node.block_id)
                if self._windows is not None:
                    self._windows.keep(request, position, node)
                position += 1
            request.prefix.node = node
            request.prefix.num_indexed_blocks = position
        if is_prompt_end:
            self.forget_expected(request, request.prefix.block_keys)
            self.index_tail(request)

    def detach(self, request: Request) -> None:
        """Release all blocks of a request that ends or is preempted; other requests can still match
        the tokens that it has computed.
        """
        if request.queue.is_prefilling:
            self.forget_expected(request, request.prefix.block_keys)
        self.index_tail(request)
        if self._windows is not None:
            self._windows.release(request)
        self._index.release(request.block_table)
        request.set_blocks(())
        request.num_computed_tokens = 0
        request.prefix.num_indexed_blocks = 0
        request.prefix.node = None

    def clear(self) -> int:
        """Drop all cached prefixes, including those being computed; return the blocks freed at
        once.
        """
        self._expected.clear()
        self._filled.clear()
        return self._index.clear()

    def forget_blocks(self, block_ids: Iterable[int], running: Iterable[Request]) -> int:
        """Forget cached blocks and what builds on them; return how many were forgotten.

        Running requests that hold one of the blocks add no block to the index any more: theirs
        build on it, or it is the one that they fill. So no other request waits for their blocks.
        """
        lost = frozenset(block_ids)
        count = self._index.forget(lost)
        for request in running:
            own = request.block_table[request.prefix.num_indexed_blocks :]
            if request.prefix.node is not None and not lost.isdisjoint(own):
                request.prefix.node = _make_dropped_node()
        for key, request in list(self._expected.items()):
            if request.prefix.node is not None and not request.prefix.node.is_linked:
                del self._expected[key]
        self._filled = [b for b in self._filled if self._index.find_node(b.key) is not None]
        return count

    def extend_keys(self, request: Request) -> None:
        """Compute the missing keys of a request's full blocks."""
        keys = request.prefix.block_keys
        size = self._block_size
        num_full = request.num_tokens // size
        if len(keys) < num_full:
            tokens = request.get_tokens(len(keys) * size, num_full * size)
            self._index.extend_keys(request.prefix.root_key, keys, tokens)

    def index_tail(self, request: Request) -> None:
        """Index the computed tokens of a request's last block, which is not full."""
        node = request.prefix.node
        if node is None or not node.is_linked:
            return
        position = request.prefix.num_indexed_blocks
        tail = request.get_tokens(position * self._block_size, request.num_computed_tokens)
        if tail:
            own = self._index.insert_tail(node, tail, request.block_table[position])
            if self._windows is not None and own is not None:
                self._windows.keep(request, position, own)


def _make_dropped_node() -> PrefixNode:
    """Return a node that is in no index, below which nothing is added."""
    node = PrefixNode(None, None, b"", -1)
    node.is_linked = False
    return node


def _replace_block(request: Request, position: int, block_id: int) -> None:
    table = request.block_table
    request.set_blocks((*table[:position], block_id, *table[position + 1 :]))

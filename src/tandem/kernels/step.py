"""What all layers of one step share: angles, the plan of its attention, and native buffers.

Shapes: T tokens, S sequences, K KV heads, C tokens of context.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem import _native
from tandem.kernels.native import NATIVE_DTYPES, Buffer, view_tensor
from tandem.kernels.paged import PagedBatch, PagedKvCache
from tandem.kernels.rope import Rope

__all__ = ["DecodeGroup", "NativeStep", "PagedStep", "Prefill"]

MAX_GATHER_BYTES = 32 << 20
"""Keys and values that one decode group gathers at most: a few L2s, far below the model."""

TILE_TOKENS = 4096
"""Earlier context that a prefill attends at a time."""


class NativeStep:
    """A step as native operators take it: a plan, the angles, and buffers of T rows.

    Args:
        batch: the tokens; its block table is held.
        cache: the block pool, whose ``native`` is there.
        cos: [T, r] of the model's dtype; r items of a head are rotated.
        sin: the same.
        on_layer: as of ``PagedStep``.
    """

    def __init__(
        self,
        batch: PagedBatch,
        cache: PagedKvCache,
        cos: Tensor,
        sin: Tensor,
        on_layer: Callable[[int], None] | None = None,
    ) -> None:
        assert cache.native is not None, "the cache is not native"
        self.num_tokens = batch.num_tokens
        self.pool = cache.pool
        self.on_layer = on_layer
        self.attention = _native.PlannedAttention(
            cache.native, batch.block_table, batch.query_start, batch.context_lens, cache.pool
        )
        self.cos, self.sin = view_tensor(cos), view_tensor(sin)
        self._dtype = cos.dtype
        self._residual: Buffer | None = None
        self._pending: Buffer | None = None
        self._buffers = cache.step_buffers(self.num_tokens, cos.dtype)

    def buffer(self, name: str, size: int, dtype: torch.dtype | None = None) -> Buffer:
        """Return the step's [T, size] of that name, with whatever it held last.

        The same for all layers, so it must be written before it is read in each.
        """
        key = (name, size, self._dtype if dtype is None else dtype)
        found = self._buffers.get(key)
        if found is None:
            found = self._buffers[key] = Buffer.allocate(self.num_tokens, size, dtype=key[2])
        return found

    def head_buffer(self, name: str, num_heads: int, head_dim: int) -> Buffer:
        """Return the step's [T, num_heads * head_dim], viewed as [T, num_heads, head_dim]."""
        found = self._buffers.get((name, num_heads, head_dim))
        if found is None:
            made = Buffer.allocate(self.num_tokens, num_heads, head_dim, dtype=self._dtype)
            found = Buffer(made.tensor.flatten(1), made.view)
            self._buffers[name, num_heads, head_dim] = found
        return found

    def add_later(self, addend_TD: Buffer) -> None:
        """Leave what is to be added to the residual to the next norm, which reads it anyway.

        The buffer must keep its contents until then.
        """
        assert self._pending is None, "two addends without a norm between them"
        self._pending = addend_TD

    def take_pending(self) -> Buffer | None:
        """Return what the caller must add to the residual stream; None is nothing."""
        pending, self._pending = self._pending, None
        return pending

    def view_residual(self, x_TD: Tensor) -> Buffer:
        """View the residual stream; layers pass the same tensor on, so it is viewed once."""
        if self._residual is None or self._residual.tensor is not x_TD:
            self._residual = Buffer(x_TD, view_tensor(x_TD))
        return self._residual


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one query each, attended as one batch."""

    rows: Tensor | None
    """Their rows in the batch; None where they are all rows, in order."""
    index: Tensor
    """Rows of the cache's chunks that hold their context."""
    gathered: Tensor
    """Room for those rows, shared by all layers and steps: part of the cache's scratch."""
    num_keys: int
    """Context tokens to read of each; less than the gathered ones where all lengths agree."""
    mask: Tensor | None
    """[S * K, 1, C] of 0 and -inf; None where all lengths agree."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """A sequence with several queries, or with a context too long to be gathered at once."""

    first_row: int
    num_rows: int
    tiles: tuple[tuple[Tensor, int], ...]
    """Earlier context: (rows of the cache's chunks, tokens to read of them)."""


class PagedStep:
    """Everything about one step that all layers share; built once a step, never modified.

    Args:
        batch: the tokens; borrowed.
        cache: the block pool; the layers write this step's KV to it.
        rope: gives the angles.
        dtype: the model's.
        on_layer: called with each layer's index once its KV of this step is in the blocks.
    """

    def __init__(
        self,
        batch: PagedBatch,
        cache: PagedKvCache,
        rope: Rope,
        dtype: torch.dtype,
        on_layer: Callable[[int], None] | None = None,
    ) -> None:
        self.batch = batch
        self.on_layer = on_layer
        self.cache = cache
        self.cos, self.sin = rope.compute(batch.positions, dtype)
        self.native: NativeStep | None = None
        """How the step runs natively; None where torch computes it, by what follows."""
        self.decodes: list[DecodeGroup] = []
        self.prefills: list[Prefill] = []
        if cache.native is not None and dtype in NATIVE_DTYPES:
            self.native = NativeStep(batch, cache, self.cos, self.sin, on_layer)
            return
        half = self.sin.shape[-1] // 2
        signed = torch.cat((-self.sin[:, :half], self.sin[:, half:]), dim=-1)
        self.cos_T1d, self.signed_sin_T1d = self.cos[:, None], signed[:, None]
        self.slots = (batch.slot_blocks, batch.slot_offsets)
        self.runs = batch.slot_runs
        self.decodes, self.prefills = _plan(batch, cache, dtype)


def _plan(
    batch: PagedBatch, cache: PagedKvCache, dtype: torch.dtype
) -> tuple[list[DecodeGroup], list[Prefill]]:
    size = batch.block_size
    max_blocks = max(1, MAX_GATHER_BYTES // cache.layout.bytes_per_layer)
    groups: dict[int, list[int]] = {}
    prefills = []
    for s, context in enumerate(batch.context_lens):
        start, end = batch.query_start[s], batch.query_start[s + 1]
        num_blocks = -(-context // size)
        if end - start == 1 and num_blocks <= max_blocks:
            # Lengths within a factor of two share a group: at most half of a gather is padding.
            groups.setdefault(num_blocks.bit_length(), []).append(s)
        else:
            tiles = _plan_tiles(batch, cache, s, context - (end - start))
            prefills.append(Prefill(start, end - start, tiles))
    decodes = []
    for _, members in sorted(groups.items()):
        blocks = max(-(-batch.context_lens[s] // size) for s in members)
        step = max(1, max_blocks // blocks)
        decodes += [
            _plan_decode(batch, cache, members[i : i + step], dtype)
            for i in range(0, len(members), step)
        ]
    return decodes, prefills


def _plan_tiles(
    batch: PagedBatch, cache: PagedKvCache, sequence: int, num_tokens: int
) -> tuple[tuple[Tensor, int], ...]:
    step = max(1, TILE_TOKENS // batch.block_size)
    table = batch.block_table[sequence]
    tiles = []
    for first in range(0, -(-num_tokens // batch.block_size), step):
        tokens = min(num_tokens - first * batch.block_size, step * batch.block_size)
        blocks = table[first : first + -(-tokens // batch.block_size)]
        tiles.append((cache.gather_index(blocks[None]), tokens))
    return tuple(tiles)


def _plan_decode(
    batch: PagedBatch, cache: PagedKvCache, members: list[int], dtype: torch.dtype
) -> DecodeGroup:
    lens = [batch.context_lens[s] for s in members]
    longest = max(lens)
    num_blocks = -(-longest // batch.block_size)
    whole = len(members) == batch.num_tokens
    device = batch.token_ids.device
    table = batch.block_table[:, :num_blocks]
    rows = None
    if not whole:
        sequences = torch.tensor(members, device=device)
        table = table[sequences]
        rows = torch.tensor([batch.query_start[s] for s in members], device=device)
    mask = None
    if min(lens) < longest:
        keys = torch.arange(longest, device=device)
        hidden = keys[None] >= torch.tensor(lens, device=device)[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
        mask = mask.masked_fill_(hidden, float("-inf"))
        mask = mask.repeat_interleave(cache.layout.num_kv_heads, 0)[:, None]
    index = cache.gather_index(table)
    return DecodeGroup(rows, index, cache.scratch_for(len(index)), longest, mask)

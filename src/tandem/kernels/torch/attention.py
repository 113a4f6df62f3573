"""Paged attention in torch: what is planned once a step, and the attending of a layer.

Shapes: T tokens, S sequences, H query heads, K KV heads, G = H / K queries of a KV head,
d head_dim, C tokens of context.

The sequences that compute one token are attended together, gathered in groups of similar length so
that padding is bounded; the others one by one, their own tokens causally, their earlier context in
tiles whose partial results are merged by their log-sum-exp, so that memory is bounded whatever the
context.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.core.kv_layout import KVLayout, MlaLayout
from tandem.kernels.paged import PagedBatch, PagedKvCache

__all__ = ["DecodeGroup", "Prefill", "attend_decodes", "attend_prefill", "plan_attention"]

MAX_GATHER_BYTES = 32 << 20
"""Keys and values that one decode group gathers at most: a few L2s, far below the model."""

TILE_TOKENS = 4096
"""Earlier context that a prefill attends at a time."""

WIDE_HEAD = 128
"""From this head size on, and in half precision, a decode's scores are computed keys first: the
library packs its second operand, and that must not be the long one. Measured two to three times."""

CAUSAL_ROWS = 256
"""Queries whose scores torch holds at a time."""


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


def plan_attention(
    batch: PagedBatch, cache: PagedKvCache, dtype: torch.dtype
) -> tuple[list[DecodeGroup], list[Prefill]]:
    """Divide the sequences of a step into those that decode, grouped, and the others."""
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


def attend_decodes(
    cache: PagedKvCache, group: DecodeGroup, layer_idx: int, q_SHd: Tensor, scale: float
) -> Tensor:
    """Attend sequences of one query each; returns [S, H * d], new."""
    layout = cache.layout
    sequences, num_heads, head_dim = q_SHd.shape
    batch = sequences * layout.num_kv_heads
    rows = torch.index_select(cache.chunks[layer_idx], 0, group.index, out=group.gathered)
    if rows.dtype != q_SHd.dtype:
        rows = rows.to(q_SHd.dtype)
    keys, values = _split_kv(layout, rows, batch, group.num_keys)
    q = q_SHd.reshape(batch, num_heads // layout.num_kv_heads, head_dim)
    bias = q.new_zeros(1) if group.mask is None else group.mask
    beta = 0 if group.mask is None else 1
    if q.dtype == torch.float32 and head_dim < WIDE_HEAD:
        scores = torch.baddbmm(bias, q, keys.transpose(1, 2), beta=beta, alpha=scale)
    else:
        bias = bias if group.mask is None else bias.transpose(1, 2)
        scores = torch.baddbmm(bias, keys, q.transpose(1, 2), beta=beta, alpha=scale)
        scores = scores.transpose(1, 2).contiguous()
    return torch.bmm(torch.softmax(scores, -1), values).view(sequences, -1)


def _split_kv(
    layout: KVLayout, rows: Tensor, num_heads: int, num_keys: int
) -> tuple[Tensor, Tensor]:
    """Return keys and values [n, C, d] of gathered rows; a latent's value is its key's start."""
    if isinstance(layout, MlaLayout):
        keys = rows.view(num_heads, -1, layout.row_size)[:, :num_keys]
        return keys, keys[..., : layout.kv_lora_rank]
    keys, values = rows.view(2, num_heads, -1, layout.row_size)[:, :, :num_keys].unbind(0)
    return keys, values


def attend_prefill(
    cache: PagedKvCache,
    prefill: Prefill,
    layer_idx: int,
    q_THd: Tensor,
    kv_T2Kd: Tensor,
    scale: float,
    out_THd: Tensor,
) -> None:
    """Attend one sequence; writes ``out_THd``. Of latents ``kv_T2Kd`` is the keys [T, 1, d]."""
    layout = cache.layout
    num_tokens, num_heads, _ = q_THd.shape
    heads = layout.num_kv_heads
    if kv_T2Kd.dtype != cache.dtype:
        # What a later step will read back: else chunking would change the result.
        kv_T2Kd = kv_T2Kd.to(cache.dtype).to(q_THd.dtype)
    if isinstance(layout, MlaLayout):
        keys = kv_T2Kd.transpose(0, 1)
        values = keys[..., : layout.kv_lora_rank]
    else:
        keys, values = kv_T2Kd.permute(1, 2, 0, 3).unbind(0)
    q = q_THd.unflatten(1, (heads, num_heads // heads)).permute(1, 2, 0, 3)
    out = out_THd.unflatten(1, (heads, num_heads // heads)).permute(1, 2, 0, 3)
    for first in range(0, num_tokens, CAUSAL_ROWS):
        end = min(num_tokens, first + CAUSAL_ROWS)
        rows = q[:, :, first:end]
        mixed, lse = _attend_part(rows, keys[:, :end], values[:, :end], scale, is_causal=True)
        for index, num_keys in prefill.tiles:
            gathered = cache.chunks[layer_idx].index_select(0, index)
            if gathered.dtype != q.dtype:
                gathered = gathered.to(q.dtype)
            tile = _split_kv(layout, gathered, heads, num_keys)
            other, other_lse = _attend_part(rows, *tile, scale, is_causal=False)
            merged = torch.logaddexp(lse, other_lse)
            mixed *= (lse - merged).exp_()[..., None]
            mixed += other * (other_lse - merged).exp_()[..., None]
            lse = merged
        out[:, :, first:end] = mixed


def _attend_part(
    q_KGTd: Tensor, k_KCd: Tensor, v_KCd: Tensor, scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Return float32 (mixed values [K, G, T, d], log-sum-exp of the scores [K, G, T]).

    Causal: the last T keys are the queries' own.
    """
    scores = torch.matmul(q_KGTd, k_KCd[:, None].transpose(-1, -2)).float() * scale
    if is_causal:
        own = len(k_KCd[0]) - q_KGTd.shape[2]
        scores += torch.full(scores.shape[-2:], float("-inf"), device=scores.device).triu_(own + 1)
    mixed = torch.matmul(torch.softmax(scores, -1).to(v_KCd.dtype), v_KCd[:, None])
    return mixed.float(), torch.logsumexp(scores, -1)

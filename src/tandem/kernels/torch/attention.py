"""Paged attention in torch: the plan made once a step, and attention in each layer.

Shapes: T tokens, S sequences, H query heads, K KV heads, G = H / K queries of a KV head, d
head_dim, C tokens of context.

Sequences that compute one token (decodes) are attended together, gathered in groups of similar
length, so that padding is bounded. The others (prefills) run one by one: the new tokens causally,
the earlier context in tiles whose partial results are merged by their log-sum-exp, so that memory
is bounded for any context. Windows are masked and tiles that no query sees are skipped; an
attention sink is merged like one more part.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.core.kv_layout import KVLayout, MlaLayout
from tandem.kernels.interfaces import AttentionRule
from tandem.kernels.paged import PagedBatch, PagedKvCache

__all__ = ["DecodeGroup", "Prefill", "attend_decodes", "attend_prefill", "plan_attention"]

MAX_GATHER_BYTES = 32 << 20
"""Most bytes of keys and values that a group of decodes gathers: a few times the L2 cache, far
below the model's size.
"""

TILE_TOKENS = 4096
"""Tokens of earlier context that a prefill attends to at a time."""

WIDE_HEAD = 128
"""Smallest head size from which, in half precision, a decode's scores are computed as keys times
queries: the library packs the second operand, which should not be the long one. Measured two to
three times as fast.
"""

CAUSAL_ROWS = 256
"""Query rows whose scores torch holds at a time."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences that decode (one query each), attended as one batch over gathered KV."""

    rows: Tensor | None
    """Row numbers of these sequences' queries in the batch; None if the group is the whole batch,
    in order.
    """
    index: Tensor
    """Row numbers, in the cache viewed as chunks, of the chunks that hold the sequences' context.
    """
    gathered: Tensor
    """Memory for the gathered rows, shared by all layers and steps: part of the cache's scratch."""
    num_keys: int
    """Context tokens to read of each sequence; fewer than are gathered if all lengths are equal."""
    lens: Tensor
    """Context length of each sequence and KV head, int64 [S * K]."""
    is_even: bool
    """True if all context lengths are equal."""
    masks: dict[tuple[int, int], Tensor | None]
    """Masks by (window, chunk), made once a step: [S * K, 1, C] of 0 and -inf; None if every key is
    seen.
    """

    def find_mask(self, rule: AttentionRule, dtype: torch.dtype) -> Tensor | None:
        """Return the mask to add to the scores; None if every key is seen."""
        key = (rule.window, rule.chunk)
        if key not in self.masks:
            self.masks[key] = self._make_mask(*key, dtype)
        return self.masks[key]

    def _make_mask(self, window: int, chunk: int, dtype: torch.dtype) -> Tensor | None:
        is_short = all(size == 0 or size >= self.num_keys for size in (window, chunk))
        if self.is_even and is_short:
            return None
        keys = torch.arange(self.num_keys, device=self.lens.device)
        hidden = keys >= self.lens[:, None]
        if window:
            hidden |= keys < self.lens[:, None] - window
        if chunk:
            hidden |= keys < ((self.lens - 1) // chunk * chunk)[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        return mask.masked_fill_(hidden, float("-inf"))[:, None]


@dataclass(frozen=True, slots=True)
class Prefill:
    """A sequence that is attended alone: with several queries, or with a context too long to gather
    at once.
    """

    first_row: int
    num_rows: int
    tiles: tuple[tuple[Tensor, int], ...]
    """Earlier context of the sequence in tiles that are attended to one after the other: (row
    numbers of the cache's chunks, number of tokens to read from them).
    """


def plan_attention(
    batch: PagedBatch, cache: PagedKvCache
) -> tuple[list[DecodeGroup], list[Prefill]]:
    """Divide a step's sequences into groups of decodes (one query each), and prefills, which are
    attended one by one.
    """
    size = batch.block_size
    max_blocks = max(1, MAX_GATHER_BYTES // cache.layout.bytes_per_layer)
    groups: dict[int, list[int]] = {}
    prefills = []
    for s, context in enumerate(batch.context_lens):
        start, end = batch.query_start[s], batch.query_start[s + 1]
        num_blocks = -(-context // size)
        if end - start == 1 and num_blocks <= max_blocks:
            # Sequences are grouped by the bit length of their number of blocks, so at most half of
            # a group's gathered blocks are padding.
            groups.setdefault(num_blocks.bit_length(), []).append(s)
        else:
            tiles = _plan_tiles(batch, cache, s, context - (end - start))
            prefills.append(Prefill(start, end - start, tiles))
    decodes = []
    for _, members in sorted(groups.items()):
        blocks = max(-(-batch.context_lens[s] // size) for s in members)
        step = max(1, max_blocks // blocks)
        decodes += [
            _plan_decode(batch, cache, members[i : i + step]) for i in range(0, len(members), step)
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


def _plan_decode(batch: PagedBatch, cache: PagedKvCache, members: list[int]) -> DecodeGroup:
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
    index = cache.gather_index(table)
    by_head = torch.tensor(lens, device=device).repeat_interleave(cache.layout.num_kv_heads)
    gathered = cache.scratch_for(len(index))
    return DecodeGroup(rows, index, gathered, longest, by_head, min(lens) == longest, {})


def attend_decodes(
    cache: PagedKvCache,
    group: DecodeGroup,
    layer_idx: int,
    q_SHd: Tensor,
    scale: float,
    rule: AttentionRule,
) -> Tensor:
    """Run attention of the sequences of a group, one query each, in a layer; return [S, H * d],
    new.
    """
    layout = cache.layout
    sequences, num_heads, head_dim = q_SHd.shape
    batch = sequences * layout.num_kv_heads
    rows = torch.index_select(cache.chunks[layer_idx], 0, group.index, out=group.gathered)
    if rows.dtype != q_SHd.dtype:
        rows = rows.to(q_SHd.dtype)
    keys, values = _split_kv(layout, rows, batch, group.num_keys)
    q = q_SHd.reshape(batch, num_heads // layout.num_kv_heads, head_dim)
    mask = group.find_mask(rule, q.dtype)
    # A soft cap is applied to the scores before the mask, so with a cap the mask is not added here.
    added = None if rule.soft_cap else mask
    bias = q.new_zeros(1) if added is None else added
    beta = 0 if added is None else 1
    if q.dtype == torch.float32 and head_dim < WIDE_HEAD:
        scores = torch.baddbmm(bias, q, keys.transpose(1, 2), beta=beta, alpha=scale)
    else:
        bias = bias if added is None else bias.transpose(1, 2)
        scores = torch.baddbmm(bias, keys, q.transpose(1, 2), beta=beta, alpha=scale)
        scores = scores.transpose(1, 2).contiguous()
    if rule.soft_cap:
        scores = _cap(scores, rule.soft_cap)
        scores = scores if mask is None else scores + mask
    if rule.sinks is not None:
        sinks = rule.sinks.tensor.view(1, layout.num_kv_heads, -1, 1)
        sinks = sinks.expand(sequences, -1, -1, -1).reshape(batch, -1, 1)
        shares = torch.softmax(torch.cat((scores.float(), sinks), -1), -1)[..., :-1]
        return torch.bmm(shares.to(values.dtype), values).view(sequences, -1)
    return torch.bmm(torch.softmax(scores, -1), values).view(sequences, -1)


def _cap(scores: Tensor, cap: float) -> Tensor:
    return (scores / cap).tanh_().mul_(cap)


def _split_kv(
    layout: KVLayout, rows: Tensor, num_heads: int, num_keys: int
) -> tuple[Tensor, Tensor]:
    """Return keys and values [n, C, d] of gathered rows; MLA's value is the beginning of
    its key.
    """
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
    rule: AttentionRule,
    out_THd: Tensor,
) -> None:
    """Attend one prefill and write ``out_THd``. For MLA ``kv_T2Kd`` holds only the keys [T,
    1, d].
    """
    layout = cache.layout
    num_tokens, num_heads, _ = q_THd.shape
    heads = layout.num_kv_heads
    if kv_T2Kd.dtype != cache.dtype:
        # Round new keys and values to the cache's dtype, as later steps will read them: otherwise
        # the size of prefill chunks would change the result.
        kv_T2Kd = kv_T2Kd.to(cache.dtype).to(q_THd.dtype)
    if isinstance(layout, MlaLayout):
        keys = kv_T2Kd.transpose(0, 1)
        values = keys[..., : layout.kv_lora_rank]
    else:
        keys, values = kv_T2Kd.permute(1, 2, 0, 3).unbind(0)
    q = q_THd.unflatten(1, (heads, num_heads // heads)).permute(1, 2, 0, 3)
    out = out_THd.unflatten(1, (heads, num_heads // heads)).permute(1, 2, 0, 3)
    earlier = sum(tokens for _, tokens in prefill.tiles)
    for first in range(0, num_tokens, CAUSAL_ROWS):
        end = min(num_tokens, first + CAUSAL_ROWS)
        rows, position = q[:, :, first:end], earlier + first
        own = keys[:, :end], values[:, :end]
        place = (position, position - earlier)
        mixed, lse = _attend_part(rows, *own, scale, rule, place, is_causal=True)
        tile_start = 0
        for index, num_keys in prefill.tiles:
            distance, tile_start = position - tile_start, tile_start + num_keys
            if rule.window and distance - num_keys >= rule.window - 1:
                continue  # Out of sight of the first row already.
            gathered = cache.chunks[layer_idx].index_select(0, index)
            if gathered.dtype != q.dtype:
                gathered = gathered.to(q.dtype)
            tile = _split_kv(layout, gathered, heads, num_keys)
            place = (position, distance)
            other = _attend_part(rows, *tile, scale, rule, place, is_causal=False)
            mixed, lse = _merge(mixed, lse, *other)
        if rule.sinks is not None:
            merged = torch.logaddexp(lse, rule.sinks.tensor.view(heads, -1, 1))
            mixed *= (lse - merged).exp_()[..., None]
        out[:, :, first:end] = mixed


def _merge(mixed: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    merged = torch.logaddexp(lse, other_lse)
    mixed *= (lse - merged).exp_()[..., None]
    mixed += other * (other_lse - merged).exp_()[..., None]
    return mixed, merged


def _attend_part(
    q_KGTd: Tensor,
    k_KCd: Tensor,
    v_KCd: Tensor,
    scale: float,
    rule: AttentionRule,
    place: tuple[int, int],
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """Attend to one part of the context; return float32 (values [K, G, T, d], log-sum-exp [K, G,
    T]).

    ``place`` is (position of the first query, its distance from the first key), in tokens. If
    causal, the last T keys belong to the queries themselves. A query that sees no key has a
    log-sum-exp of -inf.
    """
    position, distance = place
    scores = torch.matmul(q_KGTd, k_KCd[:, None].transpose(-1, -2)).float() * scale
    if rule.soft_cap:
        scores = _cap(scores, rule.soft_cap)
    infinite = torch.full(scores.shape[-2:], float("-inf"), device=scores.device)
    if is_causal:
        scores += infinite.triu(distance + 1)
    if rule.window:
        scores += infinite.tril(distance - rule.window)
    if rule.chunk:
        queries = torch.arange(position, position + scores.shape[-2], device=scores.device)
        keys = torch.arange(scores.shape[-1], device=scores.device) + (position - distance)
        hidden = keys < (queries // rule.chunk * rule.chunk)[:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    if rule.window or rule.chunk:
        # A softmax would give NaN for a query that sees no key, so shares are computed from the
        # log-sum-exp.
        shares = (scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp_()
    else:
        shares = torch.softmax(scores, -1)
    mixed = torch.matmul(shares.to(v_KCd.dtype), v_KCd[:, None])
    return mixed.float(), lse

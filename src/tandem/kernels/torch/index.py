"""Sparse attention in torch: an index chooses tokens, and attention reads only these.

Shapes: T tokens, S sequences, H heads, I items of an index key, R rank of the latent, P rotated
items, C tokens of context, n chosen tokens.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from tandem.kernels.operators.mla import MlaAttention
from tandem.kernels.operators.rope import apply_rope_
from tandem.kernels.paged import PagedBatch, PagedKvCache

__all__ = ["attend_chosen", "choose_tokens", "project_index"]

MAX_ITEMS = 8 << 20
"""Most items of scores, or of chosen rows, that are held at a time."""


def project_index(
    attention: MlaAttention,
    h_TD: Tensor,
    parts: tuple[Tensor, Tensor],
    cos_T1P: Tensor,
    signed_sin_T1P: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return an index's queries [T, H, I], keys [T, I] and head weights, float32 [T, H].

    Args:
        attention: layer that holds the weights.
        h_TD: normed hidden states.
        parts: projected queries [T, H * I] and keys [T, I]; changed in place.
        cos_T1P: cosines.
        signed_sin_T1P: sines with the first half negated.
    """
    index = attention.index
    assert index is not None, "a layer without an index"
    queries = parts[0].unflatten(1, (index.spec.num_heads, index.spec.dim))
    keys = index.norm_keys(parts[1])
    size = cos_T1P.shape[-1]
    for rows in (queries, keys[:, None]):
        apply_rope_(rows[..., :size], rows[..., :size].clone(), cos_T1P, signed_sin_T1P)
    weights = index.weight_matrix.forward(h_TD, dtype=torch.float32)
    return queries, keys, weights


def choose_tokens(
    cache: PagedKvCache,
    batch: PagedBatch,
    layer_idx: int,
    q_THI: Tensor,
    weights_TH: Tensor,
    top: int,
) -> Tensor:
    """Return the positions with the best scores for each token: int64 [T, n], ascending.

    A token that sees fewer than n positions also gets later ones, which it does not attend to.
    Among equal scores the lowest position is chosen. The index keys of the step must have been
    written before.
    """
    chosen = torch.arange(top, device=q_THI.device).repeat(len(q_THI), 1)
    for first, end, blocks, context in _list_sequences(batch):
        if context <= top:
            continue
        keys = cache.index_slots[layer_idx][blocks].flatten(0, 1)[:context].float()
        positions = torch.arange(context, device=keys.device)
        num_heads = q_THI.shape[1]
        for rows in _cut(first, end, num_heads * context):
            products = torch.matmul(q_THI[rows].float(), keys.t()).relu_()
            scores = torch.matmul(weights_TH[rows, None], products)[:, 0]
            hidden = positions > batch.positions[rows, None]
            scores = scores.masked_fill_(hidden, float("-inf"))
            # The sort is stable, so that among equal scores the lowest position is chosen.
            order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
            chosen[rows] = order[:, :top].sort(dim=-1).values
    return chosen


def attend_chosen(
    cache: PagedKvCache,
    batch: PagedBatch,
    layer_idx: int,
    q_THd: Tensor,
    chosen_Tn: Tensor,
    scale: float,
) -> Tensor:
    """Attend each token to its chosen positions up to its own; return [T, H * R], new."""
    rank, size = cache.layout.value_size, batch.block_size
    out = q_THd.new_empty(len(q_THd), q_THd.shape[1], rank)
    for first, end, blocks, context in _list_sequences(batch):
        count = min(chosen_Tn.shape[1], context)
        width = max(q_THd.shape[1], q_THd.shape[2])
        for rows in _cut(first, end, count * width):
            positions = chosen_Tn[rows, :count].clamp(max=context - 1)
            latents = cache.slots[layer_idx][blocks[positions // size], positions % size]
            latents = latents.to(q_THd.dtype)
            scores = torch.matmul(q_THd[rows], latents.transpose(1, 2)).float() * scale
            hidden = chosen_Tn[rows, :count] > batch.positions[rows, None]
            scores = scores.masked_fill_(hidden[:, None], float("-inf"))
            shares = torch.softmax(scores, -1).to(latents.dtype)
            out[rows] = torch.matmul(shares, latents[..., :rank])
    return out.flatten(1)


def _list_sequences(batch: PagedBatch) -> Iterator[tuple[int, int, Tensor, int]]:
    """Yield of each sequence in a batch its first row, its end row, its blocks and its context
    length.
    """
    for s, context in enumerate(batch.context_lens):
        num_blocks = -(-context // batch.block_size)
        table = batch.block_table[s, :num_blocks]
        yield batch.query_start[s], batch.query_start[s + 1], table, context


def _cut(first: int, end: int, items: int) -> Iterator[slice]:
    """Yield slices of rows that together hold at most ``MAX_ITEMS`` items, with ``items`` for each
    row.
    """
    step = max(1, MAX_ITEMS // items)
    for begin in range(first, end, step):
        yield slice(begin, min(end, begin + step))

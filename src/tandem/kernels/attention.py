"""Paged grouped-query attention: one projection for q, k and v, the KV write, and the attending.

Shapes: T tokens, D hidden, H query heads, K KV heads, G = H / K queries of a KV head, d head_dim,
C tokens of context, S sequences.

A step is planned once (``PagedStep``) and used by every layer. Sequences that compute one token
are attended together: on the CPU by the native kernel, which reads the blocks where they lie;
elsewhere gathered, in groups of similar length so that padding is bounded. The others are attended
one by one: their own tokens causally, their earlier context in tiles whose partial results are
merged by their log-sum-exp, so that memory is bounded whatever the context.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, rms_norm
from torch.nn import functional

from tandem import _native
from tandem.kernels.operator import Operator, WeightReader, freeze
from tandem.kernels.paged import PagedBatch, PagedKvCache
from tandem.kernels.rope import Rope, apply_rope_

__all__ = ["Attention", "PagedStep", "attend", "write_kv"]

NATIVE_DTYPES = (torch.float32, torch.bfloat16)
"""What the native decode kernel takes, of queries and of the cache alike."""

MAX_GATHER_BYTES = 32 << 20
"""Keys and values that one decode group gathers at most: a few L2s, far below the model."""

TILE_TOKENS = 4096
"""Earlier context that a prefill attends at a time."""

WIDE_HEAD = 128
"""From this head size on, and in half precision, a decode's scores are computed keys first: the
library packs its second operand, and that must not be the long one. Measured two to three times."""

CAUSAL_ROWS = {torch.float32: 32, torch.bfloat16: 64, torch.float16: 64}
"""Queries of a tile in ``_attend_self``: measured best of 16 to 256 for 256 to 1024 tokens."""

MAX_TILED_TOKENS = {torch.float32: 1536, torch.bfloat16: 4096, torch.float16: 4096}
"""Chunks up to this long are attended in score tiles; above, the flash kernel's blocking wins.
Measured: half precision gains on matrix units, which that kernel does not use, and always wins."""


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
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
class _NativeDecodes:
    """Sequences with one query each, for the native kernel."""

    rows: Tensor | None
    """Their rows in the batch; None where they are all rows, in order."""
    plan: Any
    """``_native.DecodeAttention``, which takes tensors by DLPack; its stub knows arrays alone."""


@dataclass(frozen=True, slots=True)
class _Prefill:
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
        num_heads: H.
    """

    def __init__(
        self,
        batch: PagedBatch,
        cache: PagedKvCache,
        rope: Rope,
        dtype: torch.dtype,
    ) -> None:
        self.batch = batch
        self.cache = cache
        self.cos, self.sin = rope.compute(batch.positions, dtype)
        half = self.sin.shape[-1] // 2
        signed = torch.cat((-self.sin[:, :half], self.sin[:, half:]), dim=-1)
        self.cos_T1d, self.signed_sin_T1d = self.cos[:, None], signed[:, None]
        self.slots = (batch.slot_blocks, batch.slot_offsets)
        self.runs = batch.slot_runs
        self.native: _NativeDecodes | None = None
        self.decodes: list[_DecodeGroup] = []
        if cache.device.type == "cpu" and dtype in NATIVE_DTYPES and cache.dtype in NATIVE_DTYPES:
            self.native, self.prefills = _plan_native(batch, cache)
        else:
            self.decodes, self.prefills = _plan(batch, cache, dtype)


def _plan_native(
    batch: PagedBatch, cache: PagedKvCache
) -> "tuple[_NativeDecodes | None, list[_Prefill]]":
    members: list[int] = []
    prefills: list[_Prefill] = []
    for s, context in enumerate(batch.context_lens):
        start, end = batch.query_start[s], batch.query_start[s + 1]
        if end - start == 1:
            members.append(s)
        else:
            tiles = _plan_tiles(batch, cache, s, context - (end - start))
            prefills.append(_Prefill(start, end - start, tiles))
    if not members:
        return None, prefills
    lens = torch.tensor([batch.context_lens[s] for s in members])
    table, rows = batch.block_table, None
    if len(members) != batch.num_tokens:
        table = table[torch.tensor(members)]
        rows = torch.tensor([batch.query_start[s] for s in members])
    make_plan: Any = _native.DecodeAttention
    plan = make_plan(cache.tensor, table, lens, cache.pool)
    return _NativeDecodes(rows, plan), prefills


def _plan(
    batch: PagedBatch, cache: PagedKvCache, dtype: torch.dtype
) -> tuple[list[_DecodeGroup], list[_Prefill]]:
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
            prefills.append(_Prefill(start, end - start, tiles))
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
) -> _DecodeGroup:
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
    return _DecodeGroup(rows, index, cache.scratch_for(len(index)), longest, mask)


def write_kv(step: PagedStep, layer_idx: int, kv_T2Kd: Tensor) -> None:
    """Put the step's keys and values, [T, 2, K, d] with any strides, into their slots."""
    cache = step.cache
    if kv_T2Kd.dtype != cache.dtype:
        kv_T2Kd = kv_T2Kd.to(cache.dtype)
    slots = cache.slots[layer_idx]
    if step.runs is None:
        slots.index_put_(step.slots, kv_T2Kd)
        return
    for block_id, offset, first, end in step.runs:
        slots[block_id, offset : offset + end - first] = kv_T2Kd[first:end]


def attend(step: PagedStep, layer_idx: int, q_THd: Tensor, kv_T2Kd: Tensor, scale: float) -> Tensor:
    """Attend each token to its sequence's context up to itself; KV must have been written.

    Args:
        step: the plan.
        layer_idx: whose KV.
        q_THd: queries after RoPE; any strides with a dense last dimension.
        kv_T2Kd: this step's own keys and values.
        scale: on the products.

    Returns: [T, H * d], new.
    """
    num_tokens, num_heads, head_dim = q_THd.shape
    native = step.native
    if native is not None and native.rows is None:
        out = q_THd.new_empty(num_tokens, num_heads, head_dim)
        native.plan.run(layer_idx, q_THd, out, scale)
        return out.view(num_tokens, -1)
    if len(step.decodes) == 1 and step.decodes[0].rows is None:
        return _attend_decodes(step, step.decodes[0], layer_idx, q_THd, scale)
    out = q_THd.new_empty(num_tokens, num_heads, head_dim)
    if native is not None:
        queries = q_THd[native.rows]
        mixed = torch.empty_like(queries)
        native.plan.run(layer_idx, queries, mixed, scale)
        out[native.rows] = mixed
    for group in step.decodes:
        mixed = _attend_decodes(step, group, layer_idx, q_THd[group.rows], scale)
        out[group.rows] = mixed.view(-1, num_heads, head_dim)
    for prefill in step.prefills:
        rows = slice(prefill.first_row, prefill.first_row + prefill.num_rows)
        _attend_prefill(step, prefill, layer_idx, q_THd[rows], kv_T2Kd[rows], scale, out[rows])
    return out.view(num_tokens, -1)


def _attend_decodes(
    step: PagedStep, group: _DecodeGroup, layer_idx: int, q_SHd: Tensor, scale: float
) -> Tensor:
    layout = step.cache.layout
    sequences, num_heads, head_dim = q_SHd.shape
    batch = sequences * layout.num_kv_heads
    rows = torch.index_select(step.cache.chunks[layer_idx], 0, group.index, out=group.gathered)
    if rows.dtype != q_SHd.dtype:
        rows = rows.to(q_SHd.dtype)
    keys, values = rows.view(2, batch, -1, head_dim)[:, :, : group.num_keys].unbind(0)
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


def _attend_prefill(
    step: PagedStep,
    prefill: _Prefill,
    layer_idx: int,
    q_THd: Tensor,
    kv_T2Kd: Tensor,
    scale: float,
    out_THd: Tensor,
) -> None:
    layout = step.cache.layout
    num_tokens, num_heads, head_dim = q_THd.shape
    heads = layout.num_kv_heads
    if kv_T2Kd.dtype != step.cache.dtype:
        # What a later step will read back: else chunking would change the result.
        kv_T2Kd = kv_T2Kd.to(step.cache.dtype).to(q_THd.dtype)
    keys, values = kv_T2Kd.permute(1, 2, 0, 3).unbind(0)
    q = q_THd.view(num_tokens, heads, num_heads // heads, head_dim).permute(1, 2, 0, 3)
    out = out_THd.view(num_tokens, heads, num_heads // heads, head_dim).permute(1, 2, 0, 3)
    if not prefill.tiles and num_tokens <= MAX_TILED_TOKENS[q_THd.dtype]:
        _attend_self(q, keys, values, scale, out)
        return
    mixed, lse = _flash(q, keys, values, scale, is_causal=True)
    if prefill.tiles:
        mixed = mixed.float()
    for index, num_keys in prefill.tiles:
        rows = step.cache.chunks[layer_idx].index_select(0, index)
        if rows.dtype != q.dtype:
            rows = rows.to(q.dtype)
        tile = rows.view(2, heads, -1, head_dim)[:, :, :num_keys]
        other, other_lse = _flash(q, tile[0], tile[1], scale, is_causal=False)
        merged = torch.logaddexp(lse, other_lse)
        mixed *= (lse - merged).exp_()[..., None]
        mixed += other * (other_lse - merged).exp_()[..., None]
        lse = merged
    out.copy_(mixed)


def _attend_self(q_KGTd: Tensor, k_KTd: Tensor, v_KTd: Tensor, scale: float, out: Tensor) -> None:
    """Causal attention without earlier context, in tiles of rows that stay in the L2 cache.

    Products run as one large GEMM a KV head (its G queries' rows together); on short chunks that
    beats the flash kernel, and half of the square is never computed.
    """
    heads, group, num_tokens, head_dim = q_KGTd.shape
    keys_KdT = k_KTd.contiguous().transpose(1, 2)
    values = v_KTd.contiguous()
    step = CAUSAL_ROWS[q_KGTd.dtype]
    later = q_KGTd.new_full((step, step), float("-inf")).triu_(1)
    zero = q_KGTd.new_zeros(1)
    for first in range(0, num_tokens, step):
        end = min(num_tokens, first + step)
        rows = end - first
        q = q_KGTd[:, :, first:end].reshape(heads, group * rows, head_dim)
        scores = torch.baddbmm(zero, q, keys_KdT[:, :, :end], beta=0, alpha=scale)
        scores.view(heads, group, rows, end)[..., first:] += later[:rows, :rows]
        mixed = torch.bmm(torch.softmax(scores, -1), values[:, :end])
        out[:, :, first:end] = mixed.view(heads, group, rows, head_dim)


def _flash(
    q_KGTd: Tensor, k_KCd: Tensor, v_KCd: Tensor, scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Return (mixed values [K, G, T, d], float32 log-sum-exp of the scores [K, G, T])."""
    if q_KGTd.device.type == "cpu":
        keys = k_KCd[:, None].expand(-1, q_KGTd.shape[1], -1, -1)
        values = v_KCd[:, None].expand(-1, q_KGTd.shape[1], -1, -1)
        # The kernel behind scaled_dot_product_attention; called directly for its log-sum-exp.
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_KGTd, keys, values, is_causal=is_causal, scale=scale
        )
    return _plain(q_KGTd, k_KCd, v_KCd, scale, is_causal=is_causal)


def _plain(
    q_KGTd: Tensor, k_KCd: Tensor, v_KCd: Tensor, scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """The results of ``_flash`` by plain products, for devices without that kernel."""
    scores = torch.matmul(q_KGTd, k_KCd[:, None].transpose(-1, -2)).float() * scale
    if is_causal:
        scores += torch.full(scores.shape[-2:], float("-inf"), device=scores.device).triu_(1)
    mixed = torch.matmul(torch.softmax(scores, -1).to(v_KCd.dtype), v_KCd[:, None])
    return mixed, torch.logsumexp(scores, -1)


class Attention(Operator):
    """Grouped-query attention over paged KV, with optional RMSNorm of each head of q and k.

    Args:
        hidden_size: D.
        num_heads: H.
        num_kv_heads: K; divides H.
        head_dim: d.
        layer_idx: whose slice of the KV cache.
        scale: on q.k; usually ``head_dim ** -0.5``.
        has_qkv_bias: q, k and v projections have a bias.
        has_o_bias: so has the output projection.
        qk_norm_eps: epsilon of the norms of q and k; None is no such norms.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        layer_idx: int,
        scale: float,
        has_qkv_bias: bool = False,
        has_o_bias: bool = False,
        qk_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.layer_idx = layer_idx
        self.scale = scale
        self.has_qkv_bias = has_qkv_bias
        self.has_o_bias = has_o_bias
        self.qk_norm_eps = qk_norm_eps

    def load(self, reader: WeightReader, name: str) -> None:
        """Read ``{q,k,v,o}_proj`` and, where the heads are normed, ``{q,k}_norm``."""
        d, heads, kv_heads = self.head_dim, self.num_heads, self.num_kv_heads
        sizes = [("q_proj", heads * d), ("k_proj", kv_heads * d), ("v_proj", kv_heads * d)]
        weights = [(f"{name}.{part}.weight", rows) for part, rows in sizes]
        self.qkv_weight = freeze(self._read_rows(reader, weights, self.hidden_size))
        self.qkv_bias = self.o_bias = self.qk_weight = None
        if self.has_qkv_bias:
            biases = [(f"{name}.{part}.bias", rows) for part, rows in sizes]
            self.qkv_bias = freeze(self._read_rows(reader, biases))
        o_rows = [(f"{name}.o_proj.weight", self.hidden_size)]
        self.o_weight = freeze(self._read_rows(reader, o_rows, heads * d))
        if self.has_o_bias:
            o_bias = [(f"{name}.o_proj.bias", self.hidden_size)]
            self.o_bias = freeze(self._read_rows(reader, o_bias))
        if self.qk_norm_eps is not None:
            norms = self._read_rows(
                reader, [(f"{name}.q_norm.weight", d), (f"{name}.k_norm.weight", d)]
            )
            per_head = norms.view(2, 1, d)
            both = [per_head[0].expand(heads, d), per_head[1].expand(kv_heads, d)]
            self.qk_weight = freeze(torch.cat(both))

    def mix(self, h_TD: Tensor, step: PagedStep) -> Tensor:
        """Return the attended heads [T, H * d] before the output projection; writes the KV."""
        heads, d = self.num_heads, self.head_dim
        qkv = functional.linear(h_TD, self.qkv_weight, self.qkv_bias).view(len(h_TD), -1, d)
        qk = qkv[:, : heads + self.num_kv_heads]
        if self.qk_weight is None:
            apply_rope_(qk, qk, step.cos_T1d, step.signed_sin_T1d)
        else:
            normed = rms_norm(qk, (d,), None, self.qk_norm_eps).mul_(self.qk_weight)
            apply_rope_(qk, normed, step.cos_T1d, step.signed_sin_T1d)
        kv = qkv[:, heads:].unflatten(1, (2, self.num_kv_heads))
        write_kv(step, self.layer_idx, kv)
        return attend(step, self.layer_idx, qkv[:, :heads], kv, self.scale)

    def project_into_(self, residual_TD: Tensor, mixed: Tensor) -> None:
        """Add the output projection of the attended heads to ``residual_TD``, in place."""
        residual_TD.addmm_(mixed, self.o_weight.t())
        if self.o_bias is not None:
            residual_TD += self.o_bias

    def forward(
        self, hidden_states: Tensor, *_: object, tandem_step: PagedStep, **__: object
    ) -> tuple[Tensor, None]:
        """The face of transformers' attention modules: [1, T, D] in, ([1, T, D], None) out."""
        mixed = self.mix(hidden_states[0], tandem_step)
        return functional.linear(mixed, self.o_weight, self.o_bias)[None], None

"""Paged grouped-query attention: one projection for q, k and v, the KV write, and the attending.

Shapes: T tokens, D hidden, H query heads, K KV heads, G = H / K queries of a KV head, d head_dim,
C tokens of context, S sequences.

On the CPU all of it is native and reads the blocks where they lie. Elsewhere torch attends: the
sequences that compute one token together, gathered in groups of similar length so that padding is
bounded; the others one by one, their own tokens causally, their earlier context in tiles whose
partial results are merged by their log-sum-exp, so that memory is bounded whatever the context.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem import _native
from tandem.core.errors import UnsupportedError
from tandem.kernels.matrix import TENSORS, MatrixSettings, read_matrix
from tandem.kernels.native import Buffer, is_native, view_tensor
from tandem.kernels.operator import Operator, WeightReader, freeze, read_rows
from tandem.kernels.rope import apply_rope_
from tandem.kernels.step import DecodeGroup, NativeStep, PagedStep, Prefill

__all__ = ["PLAIN", "Attention", "AttentionRule", "PagedStep", "attend", "write_kv"]

WIDE_HEAD = 128
"""From this head size on, and in half precision, a decode's scores are computed keys first: the
library packs its second operand, and that must not be the long one. Measured two to three times."""

CAUSAL_ROWS = 256
"""Queries whose scores torch holds at a time."""


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """What a layer's attention has beyond the common; native kernels alone run it."""

    window: int = 0
    """A token sees itself and ``window - 1`` before it; 0 is all."""
    soft_cap: float = 0.0
    """A score becomes cap * tanh(score / cap); 0 is none."""
    sinks: _native.TensorView | None = None
    """float32 [H]: a logit that takes weight and adds nothing."""


PLAIN = AttentionRule()


def write_kv(step: PagedStep, layer_idx: int, kv_T2Kd: Tensor) -> None:
    """Put the step's keys and values, [T, 2, K, d] with any strides, into their slots."""
    _fill_slots(step, layer_idx, kv_T2Kd)
    if step.on_layer is not None:
        step.on_layer(layer_idx)


def _fill_slots(step: PagedStep, layer_idx: int, kv_T2Kd: Tensor) -> None:
    cache = step.cache
    if step.native is not None:
        rows = kv_T2Kd.contiguous().flatten(1, 2)
        step.native.attention.store(layer_idx, view_tensor(rows))
        return
    if kv_T2Kd.dtype != cache.dtype:
        kv_T2Kd = kv_T2Kd.to(cache.dtype)
    slots = cache.slots[layer_idx]
    if step.runs is None:
        slots.index_put_(step.slots, kv_T2Kd)
        return
    for block_id, offset, first, end in step.runs:
        slots[block_id, offset : offset + end - first] = kv_T2Kd[first:end]


def attend(
    step: PagedStep,
    layer_idx: int,
    q_THd: Tensor,
    kv_T2Kd: Tensor,
    scale: float,
    rule: AttentionRule = PLAIN,
) -> Tensor:
    """Attend each token to its sequence's context up to itself; KV must have been written.

    Args:
        step: the plan.
        layer_idx: whose KV.
        q_THd: queries after RoPE; any strides.
        kv_T2Kd: this step's own keys and values.
        scale: on the products.
        rule: window, soft cap, sinks.

    Returns: [T, H * d], new.

    Raises: UnsupportedError (a rule where torch attends: off the CPU, or KV in float16).
    """
    num_tokens, num_heads, head_dim = q_THd.shape
    if step.native is not None:
        q = q_THd.contiguous()
        out = torch.empty_like(q)
        step.native.attention.attend(
            layer_idx,
            view_tensor(q),
            view_tensor(out),
            scale,
            rule.window,
            rule.soft_cap,
            rule.sinks,
        )
        return out.view(num_tokens, -1)
    if rule != PLAIN:
        raise UnsupportedError(
            "kernels.attend",
            f"windows, soft caps and sinks have native kernels only, not on {q_THd.device} over "
            f"KV in {step.cache.dtype}: use the CPU and a kv_dtype of auto",
        )
    if len(step.decodes) == 1 and step.decodes[0].rows is None:
        return _attend_decodes(step, step.decodes[0], layer_idx, q_THd, scale)
    out = q_THd.new_empty(num_tokens, num_heads, head_dim)
    for group in step.decodes:
        mixed = _attend_decodes(step, group, layer_idx, q_THd[group.rows], scale)
        out[group.rows] = mixed.view(-1, num_heads, head_dim)
    for prefill in step.prefills:
        rows = slice(prefill.first_row, prefill.first_row + prefill.num_rows)
        _attend_prefill(step, prefill, layer_idx, q_THd[rows], kv_T2Kd[rows], scale, out[rows])
    return out.view(num_tokens, -1)


def _attend_decodes(
    step: PagedStep, group: DecodeGroup, layer_idx: int, q_SHd: Tensor, scale: float
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
    prefill: Prefill,
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
    for first in range(0, num_tokens, CAUSAL_ROWS):
        end = min(num_tokens, first + CAUSAL_ROWS)
        rows = q[:, :, first:end]
        mixed, lse = _attend_part(rows, keys[:, :end], values[:, :end], scale, is_causal=True)
        for index, num_keys in prefill.tiles:
            gathered = step.cache.chunks[layer_idx].index_select(0, index)
            if gathered.dtype != q.dtype:
                gathered = gathered.to(q.dtype)
            tile = gathered.view(2, heads, -1, head_dim)[:, :, :num_keys]
            other, other_lse = _attend_part(rows, tile[0], tile[1], scale, is_causal=False)
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
        window: tokens that a token sees, itself included; 0 is all.
        has_sinks: each head has a logit that takes weight and adds nothing.
        settings: how the projections are stored and run.
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
        window: int = 0,
        has_sinks: bool = False,
        settings: MatrixSettings = TENSORS,
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
        self.has_sinks = has_sinks
        self.rule = AttentionRule(window)
        self.settings = settings

    def load(self, reader: WeightReader, name: str) -> None:
        """Read ``{q,k,v,o}_proj`` and, where there are such, ``{q,k}_norm`` and ``sinks``."""
        d, heads, kv_heads = self.head_dim, self.num_heads, self.num_kv_heads
        sizes = [("q_proj", heads * d), ("k_proj", kv_heads * d), ("v_proj", kv_heads * d)]
        qkv = [(f"{name}.{part}", rows) for part, rows in sizes]
        output = [(f"{name}.o_proj", self.hidden_size)]
        settings, qkv_bias, o_bias = self.settings, self.has_qkv_bias, self.has_o_bias
        # Where no module has to search for them: that takes longer than some products.
        self._matrices = (
            read_matrix(self, "qkv_", reader, settings, qkv, self.hidden_size, has_bias=qkv_bias),
            read_matrix(self, "o_", reader, settings, output, heads * d, has_bias=o_bias),
        )
        if self.has_sinks:
            sinks = torch.empty(heads, dtype=torch.float32)
            reader.read_into(f"{name}.sinks", sinks)
            self.sinks = freeze(sinks)
            self.rule = AttentionRule(self.rule.window, sinks=view_tensor(sinks))
        self.qk_weight = None
        self.q_view: _native.TensorView | None = None
        self.k_view: _native.TensorView | None = None
        if self.qk_norm_eps is None:
            return
        names = [(f"{name}.q_norm.weight", d), (f"{name}.k_norm.weight", d)]
        self.qk_weight = freeze(read_rows(reader, names).view(2, d))
        if is_native(self.qk_weight):
            self.q_view, self.k_view = (view_tensor(weight) for weight in self.qk_weight)

    def mix(self, h_TD: Tensor, step: PagedStep) -> Tensor:
        """Return the attended heads [T, H * d] before the output projection; writes the KV."""
        if step.native is not None:
            buffer = Buffer(h_TD, view_tensor(h_TD))
            return self._mix_natively(buffer, step.native).tensor
        heads, d = self.num_heads, self.head_dim
        qkv = self._matrices[0].forward(h_TD, dtype=h_TD.dtype).view(len(h_TD), -1, d)
        qk = qkv[:, : heads + self.num_kv_heads]
        normed = qk
        if self.qk_weight is not None:
            q_weight, k_weight = self.qk_weight
            normed = torch.rms_norm(qk, (d,), None, self.qk_norm_eps)
            normed[:, :heads] *= q_weight
            normed[:, heads:] *= k_weight
        apply_rope_(qk, normed, step.cos_T1d, step.signed_sin_T1d)
        kv = qkv[:, heads:].unflatten(1, (2, self.num_kv_heads))
        write_kv(step, self.layer_idx, kv)
        return attend(step, self.layer_idx, qkv[:, :heads], kv, self.scale, self.rule)

    def add_natively(self, residual_TD: Buffer, h_TD: Buffer, native: NativeStep) -> None:
        """Add the layer's attention of ``h_TD`` to the residual, in buffers of the step."""
        self._matrices[1].run(self._mix_natively(h_TD, native), residual_TD, is_added=True)

    def _mix_natively(self, h_TD: Buffer, native: NativeStep) -> Buffer:
        """As ``mix``, in buffers of the step: the result is valid until the next layer's."""
        heads, kv_heads, d = self.num_heads, self.num_kv_heads, self.head_dim
        qkv = native.head_buffer("qkv", heads + 2 * kv_heads, d)
        mixed = native.head_buffer("mixed", heads, d)
        self._matrices[0].run(h_TD, qkv)
        by_head = qkv.view
        _native.rotate_heads(
            by_head,
            native.cos,
            native.sin,
            heads,
            kv_heads,
            self.q_view,
            self.k_view,
            self.qk_norm_eps or 0.0,
            native.pool,
        )
        native.attention.store(self.layer_idx, by_head, heads)
        if native.on_layer is not None:
            native.on_layer(self.layer_idx)
        rule = self.rule
        native.attention.attend(
            self.layer_idx,
            by_head,
            mixed.view,
            self.scale,
            rule.window,
            rule.soft_cap,
            rule.sinks,
        )
        return mixed

    def project_into_(self, residual_TD: Tensor, mixed: Tensor) -> None:
        """Add the output projection of the attended heads to ``residual_TD``, in place."""
        self._matrices[1].add_into_(residual_TD, mixed)

    def forward(
        self, hidden_states: Tensor, *_: object, tandem_step: PagedStep, **__: object
    ) -> tuple[Tensor, None]:
        """The face of transformers' attention modules: [1, T, D] in, ([1, T, D], None) out."""
        mixed = self.mix(hidden_states[0], tandem_step)
        return self._matrices[1].forward(mixed, dtype=mixed.dtype)[None], None

"""Paged grouped-query attention: one projection for q, k and v, and what is special to a layer.

The operator holds weights and shapes; a ``Step`` writes the KV and attends.

Shapes: T tokens, D hidden, H query heads, K KV heads, d head_dim.
"""

from dataclasses import replace

import torch
from torch import Tensor

from tandem.kernels.interfaces import (
    AdaptedPart,
    AttentionRule,
    Matrix,
    MatrixWrapper,
    Step,
    WeightReader,
)
from tandem.kernels.native import Buffer
from tandem.kernels.operators.lora import AdaptedRows
from tandem.kernels.operators.operator import Operator, freeze, read_rows
from tandem.kernels.weights.matrix import TENSORS, MatrixSettings, read_matrix

__all__ = ["Attention"]


class Attention(Operator):
    """Grouped-query attention over paged KV, with optional RMSNorm of q and k.

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
        qk_norm_offset: added to their weights.
        is_full_norm: they are over all heads together, not over each.
        qkv_names: the checkpoint's: q, k and v, or one matrix that holds them.
        rope_idx: which of the model's RoPEs rotates q and k.
        interleaved_size: items of a head that the checkpoint rotates as neighbours, from the first
            on; their rows are loaded in the order that rotates halves, which changes no product.
        window: tokens that a token sees, itself included; 0 is all.
        soft_cap: a score becomes cap * tanh(score / cap); 0 is none.
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
        qk_norm_offset: float = 0.0,
        is_full_norm: bool = False,
        qkv_names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
        rope_idx: int = 0,
        interleaved_size: int = 0,
        window: int = 0,
        soft_cap: float = 0.0,
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
        self.qk_norm_offset = qk_norm_offset
        self.is_full_norm = is_full_norm
        self.qkv_names = qkv_names
        self.rope_idx = rope_idx
        self.interleaved_size = interleaved_size
        self.has_sinks = has_sinks
        self.rule = AttentionRule(window, soft_cap)
        self.settings = settings

    def load(self, reader: WeightReader, name: str) -> None:
        """Read the projections and, where there are such, ``{q,k}_norm`` and ``sinks``."""
        d, heads = self.head_dim, self.num_heads
        sizes = self._list_sizes()
        qkv = [(f"{name}.{part}", n) for part, n in zip(self.qkv_names, sizes, strict=True)]
        output = [(f"{name}.o_proj", self.hidden_size)]
        settings, qkv_bias, o_bias = self.settings, self.has_qkv_bias, self.has_o_bias
        self.qkv_matrix: Matrix = read_matrix(
            self,
            "qkv_",
            reader,
            settings,
            qkv,
            self.hidden_size,
            has_bias=qkv_bias,
            order=self._order_rows(),
        )
        self.output_matrix: Matrix = read_matrix(
            self, "o_", reader, settings, output, heads * d, has_bias=o_bias
        )
        if self.has_sinks:
            sinks = torch.empty(heads, dtype=torch.float32, device=reader.device)
            reader.read_into(f"{name}.sinks", sinks)
            self.sinks = freeze(sinks)
            self.rule = replace(self.rule, sinks=Buffer(sinks))
        self.held_q: Buffer | None = None
        self.held_k: Buffer | None = None
        if self.qk_norm_eps is None:
            return
        q_size, k_size = (heads * d, self.num_kv_heads * d) if self.is_full_norm else (d, d)
        names = [(f"{name}.q_norm.weight", q_size), (f"{name}.k_norm.weight", k_size)]
        self.qk_weight = freeze(read_rows(reader, names))
        q_weight, k_weight = self.qk_weight.split((q_size, k_size))
        self.held_q, self.held_k = Buffer(q_weight), Buffer(k_weight)

    def adapt(self, wrapper: MatrixWrapper, name: str) -> dict[str, AdaptedPart]:
        """See ``Operator``."""
        self.qkv_matrix = qkv = wrapper.wrap_matrix(self.qkv_matrix)
        self.output_matrix = output = wrapper.wrap_matrix(self.output_matrix)
        order, first = self._order_rows(), 0
        parts: dict[str, AdaptedPart] = {}
        for part, size in zip(self.qkv_names, self._list_sizes(), strict=True):
            # Rows move within a projection, never from one to another.
            own = None if order is None else order[first : first + size] - first
            parts[f"{name}.{part}"] = AdaptedRows(qkv, self.hidden_size, size, first, own)
            first += size
        o_size = self.num_heads * self.head_dim
        return {**parts, f"{name}.o_proj": AdaptedRows(output, o_size, self.hidden_size)}

    def _list_sizes(self) -> tuple[int, ...]:
        """Outputs of each of ``qkv_names``."""
        d, kv_heads = self.head_dim, self.num_kv_heads
        sizes = (self.num_heads * d, kv_heads * d, kv_heads * d)
        return (sum(sizes),) if len(self.qkv_names) == 1 else sizes

    def _order_rows(self) -> Tensor | None:
        """Which row of the checkpoint's q, k and v comes where; None: in their order."""
        size = self.interleaved_size
        if size == 0:
            return None
        items = torch.arange(self.head_dim)
        head = torch.cat((items[0:size:2], items[1:size:2], items[size:]))
        num_rotated = (self.num_heads + self.num_kv_heads) * self.head_dim
        firsts = torch.arange(0, num_rotated, self.head_dim)
        values = torch.arange(num_rotated, num_rotated + self.num_kv_heads * self.head_dim)
        return torch.cat(((firsts[:, None] + head).flatten(), values))

    def forward(
        self, hidden_states: Tensor, *_: object, tandem_step: Step, **__: object
    ) -> tuple[Tensor, None]:
        """The face of transformers' attention modules: [1, T, D] in, ([1, T, D], None) out."""
        mixed = tandem_step.mix(self, hidden_states[0])
        return self.output_matrix.forward(mixed, dtype=mixed.dtype)[None], None

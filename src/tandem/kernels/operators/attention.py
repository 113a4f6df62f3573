"""Paged grouped-query attention: one projection for q, k and v, and a layer's special options.

The operator holds weights and shapes; a ``Step`` writes the KV and attends.

Shapes: T tokens, D hidden, H query heads, K KV heads, d head_dim.
"""

from dataclasses import replace

import torch
from torch import Tensor

from tandem.core.model.layers import GqaSpec
from tandem.kernels.interfaces import (
    AdaptedPart,
    AttentionRule,
    Matrix,
    MatrixWrapper,
    WeightReader,
)
from tandem.kernels.native import Buffer
from tandem.kernels.operators.lora import AdaptedRows
from tandem.kernels.operators.operator import Operator, current_step, freeze, read_rows
from tandem.kernels.weights.matrix import TENSORS, MatrixSettings, read_matrix

__all__ = ["Attention"]


class Attention(Operator):
    """Grouped-query attention over paged KV, with optional RMSNorm of q and k.

    A layer that shares another layer's KV projects only queries; its ``layer_idx`` is that of the
    other layer.

    Args:
        spec: sizes, options and checkpoint names. Rows of an interleaved RoPE are loaded in the
            order for rotating halves, which does not change any product.
        layer_idx: index of the layer's slice in the KV cache.
        settings: how the projections are stored and run.
    """

    def __init__(
        self, spec: GqaSpec, *, layer_idx: int, settings: MatrixSettings = TENSORS
    ) -> None:
        super().__init__()
        self.spec = spec
        self.layer_idx = layer_idx
        self.rule = AttentionRule(spec.window, spec.soft_cap, chunk=spec.chunk)
        self.settings = settings
        # These values are read in each step, so they are plain attributes: a property of the spec
        # would cost a call each time.
        self.num_projected = spec.num_projected
        self.is_rearranged = spec.is_rearranged
        self.is_full_norm = spec.is_full_norm
        self.has_narrow_values = spec.value_dim < spec.head_dim

    def load(self, reader: WeightReader, name: str) -> None:
        """Read the projections, and the norms of q and k and ``sinks`` if the layer has them."""
        spec, settings = self.spec, self.settings
        d, heads = spec.head_dim, spec.num_heads
        sizes = self._list_sizes()
        qkv = [(f"{name}.{part}", n) for part, n in zip(spec.qkv_names, sizes, strict=True)]
        output = [(f"{name}.{spec.out_name}", spec.hidden_size)]
        self.qkv_matrix: Matrix = read_matrix(
            self,
            "qkv_",
            reader,
            settings,
            qkv,
            spec.hidden_size,
            has_bias=spec.has_qkv_bias,
            order=self._order_rows(),
        )
        self.output_matrix: Matrix = read_matrix(
            self,
            "o_",
            reader,
            settings,
            output,
            heads * spec.value_dim,
            has_bias=spec.has_o_bias,
        )
        if spec.has_sinks:
            sinks = torch.empty(heads, dtype=torch.float32, device=reader.device)
            reader.read_into(f"{name}.sinks", sinks)
            self.sinks = freeze(sinks)
            self.rule = replace(self.rule, sinks=Buffer(sinks))
        self.held_q: Buffer | None = None
        self.held_k: Buffer | None = None
        self.held_v: Buffer | None = None
        if spec.qk_norm is None:
            return
        if spec.has_value_norm:
            self.held_v = Buffer(torch.ones(d, dtype=reader.dtype, device=reader.device))
        if spec.is_norm_plain:
            self.held_q = self.held_k = Buffer(
                torch.ones(d, dtype=reader.dtype, device=reader.device)
            )
            return
        q_size, k_size = (heads * d, spec.num_kv_heads * d) if spec.is_full_norm else (d, d)
        q_name, k_name = spec.norm_names
        names = [(f"{name}.{q_name}.weight", q_size), (f"{name}.{k_name}.weight", k_size)]
        if spec.shares_kv_of >= 0:
            names.pop()
        self.qk_weight = freeze(read_rows(reader, names))
        weights = self.qk_weight.split([size for _, size in names])
        self.held_q = Buffer(weights[0])
        if len(weights) > 1:
            self.held_k = Buffer(weights[1])

    def adapt(self, wrapper: MatrixWrapper, name: str) -> dict[str, AdaptedPart]:
        """Make the q, k, v and output projections take LoRA adapters; return them by name."""
        self.qkv_matrix = qkv = wrapper.wrap_matrix(self.qkv_matrix)
        self.output_matrix = output = wrapper.wrap_matrix(self.output_matrix)
        spec, order, first = self.spec, self._order_rows(), 0
        parts: dict[str, AdaptedPart] = {}
        for part, size in zip(spec.qkv_names, self._list_sizes(), strict=True):
            # The order permutes rows only within a projection (q, k or v), so each projection gets
            # its own part of the order.
            own = None if order is None else order[first : first + size] - first
            parts[f"{name}.{part}"] = AdaptedRows(qkv, spec.hidden_size, size, first, own)
            first += size
        o_size = spec.num_heads * spec.value_dim
        return {**parts, f"{name}.{spec.out_name}": AdaptedRows(output, o_size, spec.hidden_size)}

    def _list_sizes(self) -> tuple[int, ...]:
        """Return the number of outputs of each projection in ``qkv_names``."""
        d, heads, kv_heads = self.spec.head_dim, self.spec.num_heads, self.spec.num_kv_heads
        queries = heads * d * (2 if self.spec.has_out_gate else 1)
        sizes = (queries, kv_heads * d, kv_heads * self.spec.value_dim)
        if len(self.spec.qkv_names) == 1:
            return (self.spec.num_projected,)
        return sizes[: len(self.spec.qkv_names)]

    def _order_rows(self) -> Tensor | None:
        """Return the checkpoint's row for each row of the q, k, v matrix; None: unchanged.

        If heads have output gates, all gates come before all queries.
        """
        size, d = self.spec.interleaved_size, self.spec.head_dim
        if self.spec.has_out_gate:
            sizes = self._list_sizes()
            queries = torch.arange(sizes[0]).view(-1, 2, d)
            first = torch.cat((queries[:, 1].flatten(), queries[:, 0].flatten()))
            return torch.cat((first, torch.arange(sizes[0], sum(sizes))))
        if size == 0:
            return None
        items = torch.arange(d)
        head = torch.cat((items[0:size:2], items[1:size:2], items[size:]))
        num_rotated = (self.spec.num_heads + self.spec.num_kv_heads) * d
        firsts = torch.arange(0, num_rotated, d)
        values = torch.arange(num_rotated, num_rotated + self.spec.num_kv_heads * d)
        return torch.cat(((firsts[:, None] + head).flatten(), values))

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
        """Run with transformers' attention interface: [1, T, D] in, ([1, T, D], None) out."""
        mixed = current_step().mix(self, hidden_states[0])
        return self.output_matrix.forward(mixed, dtype=mixed.dtype)[None], None

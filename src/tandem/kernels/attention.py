"""Paged grouped-query attention: one projection for q, k and v, and what is special to a layer.

The operator holds weights and shapes; a ``Step`` writes the KV and attends.

Shapes: T tokens, D hidden, H query heads, K KV heads, d head_dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.kernels.execution import Step
from tandem.kernels.matrix import TENSORS, MatrixSettings, read_matrix
from tandem.kernels.native import Buffer
from tandem.kernels.operator import Operator, WeightReader, freeze, read_rows

__all__ = ["PLAIN", "Attention", "AttentionRule"]


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """What a layer's attention has beyond the common; not every implementation runs it."""

    window: int = 0
    """A token sees itself and ``window - 1`` before it; 0 is all."""
    soft_cap: float = 0.0
    """A score becomes cap * tanh(score / cap); 0 is none."""
    sinks: Buffer | None = None
    """float32 [H]: a logit that takes weight and adds nothing."""

    @property
    def is_plain(self) -> bool:
        """Whether it has nothing beyond the common."""
        return self.window == 0 and self.soft_cap == 0.0 and self.sinks is None


PLAIN = AttentionRule()


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
        self.qkv_matrix = read_matrix(
            self, "qkv_", reader, settings, qkv, self.hidden_size, has_bias=qkv_bias
        )
        self.output_matrix = read_matrix(
            self, "o_", reader, settings, output, heads * d, has_bias=o_bias
        )
        if self.has_sinks:
            sinks = torch.empty(heads, dtype=torch.float32, device=reader.device)
            reader.read_into(f"{name}.sinks", sinks)
            self.sinks = freeze(sinks)
            self.rule = AttentionRule(self.rule.window, sinks=Buffer(sinks))
        self.qk_weight = None
        self.held_q: Buffer | None = None
        self.held_k: Buffer | None = None
        if self.qk_norm_eps is None:
            return
        names = [(f"{name}.q_norm.weight", d), (f"{name}.k_norm.weight", d)]
        self.qk_weight = freeze(read_rows(reader, names).view(2, d))
        self.held_q, self.held_k = Buffer(self.qk_weight[0]), Buffer(self.qk_weight[1])

    def forward(
        self, hidden_states: Tensor, *_: object, tandem_step: Step, **__: object
    ) -> tuple[Tensor, None]:
        """The face of transformers' attention modules: [1, T, D] in, ([1, T, D], None) out."""
        mixed = tandem_step.mix(self, hidden_states[0])
        return self.output_matrix.forward(mixed, dtype=mixed.dtype)[None], None

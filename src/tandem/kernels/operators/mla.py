"""Multi-head latent attention over the compressed cache, with absorbed up-projections.

A token's cache is one latent, normed, and the rotated part of a key that all heads share
(DeepSeek-V2, arXiv:2405.04434, section 2.1). The up-projection of keys is absorbed into the queries
and that of values into the outputs, so that nothing of the context is ever expanded:
q_h . (U_h c) = (U_h^T q_h) . c. A prefill runs the same way, or its values would not be bitwise
those of a decode.

Shapes: T tokens, D hidden, H heads, R rank of the latent, P rotated items, n items of a query that
are not rotated, v items of a head's value.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.kernels.interfaces import (
    PLAIN,
    AdaptedPart,
    HeadMatrix,
    Matrix,
    MatrixWrapper,
    Step,
    WeightReader,
)
from tandem.kernels.native import Buffer
from tandem.kernels.operators.lora import AdaptedLatents, AdaptedRows
from tandem.kernels.operators.operator import Operator, allocate_scratch, freeze, read_rows
from tandem.kernels.weights.head_matrix import make_head_matrix
from tandem.kernels.weights.matrix import TENSORS, MatrixSettings, make_matrix, read_matrix

__all__ = ["MlaAttention", "MlaSizes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSizes:
    """The sizes of a layer's attention."""

    num_heads: int
    """H."""
    rank: int
    """R."""
    rope: int
    """P; even."""
    nope: int
    """n."""
    value: int
    """v."""
    q_rank: int = 0
    """Of the queries' own compression; 0 is none."""

    @property
    def head(self) -> int:
        """Items of a query."""
        return self.nope + self.rope

    @property
    def key(self) -> int:
        """Items of a token in the cache."""
        return self.rank + self.rope

    @property
    def first_product(self) -> int:
        """Outputs of the first product for queries: compressed ones, or all heads'."""
        return self.q_rank or self.num_heads * self.head


class MlaAttention(Operator):
    """Latent attention of one layer; what it attends is found by the ``Step``.

    Args:
        hidden_size: D.
        sizes: all others.
        layer_idx: whose slice of the KV cache.
        scale: on the products, YaRN's correction included.
        norm_eps: of the norms of the latent and of compressed queries.
        has_bias: of the first projections, but for uncompressed queries, and of the output.
        is_interleaved: the checkpoint's rotated items are pairs of neighbours. Their rows are put
            in halves at loading, queries' and keys' alike, so that products do not change.
        rope_idx: which of the step's RoPEs.
        settings: how the matrices are stored and run.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        sizes: MlaSizes,
        layer_idx: int,
        scale: float,
        norm_eps: float,
        has_bias: bool = False,
        is_interleaved: bool = True,
        rope_idx: int = 0,
        settings: MatrixSettings = TENSORS,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.sizes = sizes
        self.layer_idx = layer_idx
        self.scale = scale
        self.norm_eps = norm_eps
        self.has_bias = has_bias
        self.is_interleaved = is_interleaved
        self.rope_idx = rope_idx
        self.settings = settings
        self.rule = PLAIN

    def load(self, reader: WeightReader, name: str) -> None:
        """Read ``q_proj``, or ``q_a_proj``, ``q_a_layernorm`` and ``q_b_proj``, and the rest."""
        sizes, settings = self.sizes, self.settings
        self._load_first(reader, name)
        self.q_matrix: Matrix | None = None
        self.held_q_norm: Buffer | None = None
        if sizes.q_rank:
            rows = sizes.num_heads * sizes.head
            is_packed = settings.weight_format is not None
            weight = read_rows(
                reader, [(f"{name}.q_b_proj.weight", rows)], sizes.q_rank, is_scratch=is_packed
            )
            self._order_queries(weight)
            self.q_matrix = make_matrix(self, "q_b_", settings, weight, None)
            norm = read_rows(reader, [(f"{name}.q_a_layernorm.weight", sizes.q_rank)])
            self.q_norm = freeze(norm)
            self.held_q_norm = Buffer(self.q_norm)
        norm = read_rows(reader, [(f"{name}.kv_a_layernorm.weight", sizes.rank)])
        self.kv_norm = freeze(norm)
        self.held_kv_norm = Buffer(self.kv_norm)
        self._load_heads(reader, name)
        output = [(f"{name}.o_proj", self.hidden_size)]
        self.output_matrix: Matrix = read_matrix(
            self,
            "o_",
            reader,
            settings,
            output,
            sizes.num_heads * sizes.value,
            has_bias=self.has_bias,
        )

    def _load_first(self, reader: WeightReader, name: str) -> None:
        """Read what multiplies the hidden state: queries, compressed or not, and latents."""
        sizes = self.sizes
        part = f"{name}.q_a_proj" if sizes.q_rank else f"{name}.q_proj"
        latent = f"{name}.kv_a_proj_with_mqa"
        rows, width = sizes.first_product, sizes.key
        is_packed = self.settings.weight_format is not None
        parts = [(f"{part}.weight", rows), (f"{latent}.weight", width)]
        weight = read_rows(reader, parts, self.hidden_size, is_scratch=is_packed)
        if not sizes.q_rank:
            self._order_queries(weight[:rows])
        self._order_rotated(weight[rows + sizes.rank :])
        bias = None
        if self.has_bias:
            bias = torch.zeros(rows + width, dtype=reader.dtype, device=reader.device)
            if sizes.q_rank:
                reader.read_into(f"{part}.bias", bias[:rows])
            reader.read_into(f"{latent}.bias", bias[rows:])
            self._order_rotated(bias[rows + sizes.rank :])
        self.first_matrix: Matrix = make_matrix(self, "qkv_", self.settings, weight, bias)

    def _load_heads(self, reader: WeightReader, name: str) -> None:
        sizes = self.sizes
        rows = sizes.num_heads * (sizes.nope + sizes.value)
        if self.settings.weight_format is None:
            weight = torch.empty(rows, sizes.rank, dtype=reader.dtype, device=reader.device)
        else:
            weight = allocate_scratch(rows, sizes.rank, dtype=reader.dtype)
        reader.read_into(f"{name}.kv_b_proj.weight", weight)
        heads = weight.view(sizes.num_heads, -1, sizes.rank)
        keys, values = heads[:, : sizes.nope], heads[:, sizes.nope :]
        self.key_heads: HeadMatrix = make_head_matrix(
            self, "key_heads_", self.settings, keys.transpose(1, 2).contiguous()
        )
        self.value_heads: HeadMatrix = make_head_matrix(
            self, "value_heads_", self.settings, values.contiguous()
        )

    def adapt(self, wrapper: MatrixWrapper, name: str) -> dict[str, AdaptedPart]:
        """See ``Operator``."""
        sizes, hidden = self.sizes, self.hidden_size
        self.first_matrix = first = wrapper.wrap_matrix(self.first_matrix)
        self.key_heads = keys = wrapper.wrap_heads(self.key_heads)
        self.value_heads = values = wrapper.wrap_heads(self.value_heads)
        self.output_matrix = output = wrapper.wrap_matrix(self.output_matrix)
        # The same moves as of the weights, on the numbers of rows.
        queries = torch.arange(sizes.num_heads * sizes.head)
        self._order_queries(queries)
        latent = torch.arange(sizes.key)
        self._order_rotated(latent[sizes.rank :])
        size = sizes.first_product
        parts: dict[str, AdaptedPart] = {
            f"{name}.kv_a_proj_with_mqa": AdaptedRows(first, hidden, sizes.key, size, latent),
            f"{name}.kv_b_proj": AdaptedLatents(
                keys, values, sizes.rank, sizes.num_heads, sizes.nope, sizes.value
            ),
            f"{name}.o_proj": AdaptedRows(output, sizes.num_heads * sizes.value, hidden),
        }
        if self.q_matrix is None:
            parts[f"{name}.q_proj"] = AdaptedRows(first, hidden, size, 0, queries)
        else:
            self.q_matrix = second = wrapper.wrap_matrix(self.q_matrix)
            parts[f"{name}.q_a_proj"] = AdaptedRows(first, hidden, size)
            parts[f"{name}.q_b_proj"] = AdaptedRows(second, sizes.q_rank, len(queries), 0, queries)
        return parts

    def _order_queries(self, weight: Tensor) -> None:
        """Put the rotated rows of each head's query in halves, in place."""
        heads = weight.view(self.sizes.num_heads, self.sizes.head, -1)
        self._order_rotated(heads[:, self.sizes.nope :].transpose(0, 1))

    def _order_rotated(self, rows: Tensor) -> None:
        """Put rows [P, ...] that rotate as pairs of neighbours in halves, in place."""
        if self.is_interleaved:
            rows.copy_(torch.cat((rows[0::2], rows[1::2])))

    def forward(
        self, hidden_states: Tensor, *_: object, tandem_step: Step, **__: object
    ) -> tuple[Tensor, None]:
        """The face of transformers' attention modules: [1, T, D] in, ([1, T, D], None) out."""
        mixed = tandem_step.mix(self, hidden_states[0])
        return self.output_matrix.forward(mixed, dtype=mixed.dtype)[None], None

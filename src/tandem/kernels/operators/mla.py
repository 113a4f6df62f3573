"""Multi-head latent attention over the compressed cache, with absorbed up-projections.

A token's cache is one latent, normed, and the rotated part of a key that all heads share
(DeepSeek-V2, arXiv:2405.04434, section 2.1). The up-projection of keys is absorbed into the queries
and that of values into the outputs, so that nothing of the context is ever expanded:
q_h . (U_h c) = (U_h^T q_h) . c. A prefill runs the same way, or its values would not be bitwise
those of a decode.

Shapes: T tokens, D hidden, H heads, R rank of the latent, P rotated items, n items of a query that
are not rotated, v items of a head's value.
"""

import torch
from torch import Tensor

from tandem.core.model.layers import MlaSpec
from tandem.kernels.interfaces import (
    PLAIN,
    AdaptedPart,
    HeadMatrix,
    Matrix,
    MatrixWrapper,
    WeightReader,
)
from tandem.kernels.native import Buffer
from tandem.kernels.operators.lora import AdaptedLatents, AdaptedRows
from tandem.kernels.operators.operator import (
    Operator,
    allocate_scratch,
    current_step,
    freeze,
    read_rows,
)
from tandem.kernels.weights.head_matrix import make_head_matrix
from tandem.kernels.weights.matrix import TENSORS, MatrixSettings, make_matrix, read_matrix

__all__ = ["MlaAttention"]


class MlaAttention(Operator):
    """Latent attention of one layer; what it attends is found by the ``Step``.

    Args:
        spec: its sizes and options. Rotated items that are pairs of neighbours in the checkpoint
            are put in halves at loading, queries' and keys' alike, so that products do not change.
        layer_idx: whose slice of the KV cache.
        settings: how the matrices are stored and run.
    """

    def __init__(
        self, spec: MlaSpec, *, layer_idx: int, settings: MatrixSettings = TENSORS
    ) -> None:
        super().__init__()
        self.spec = spec
        self.layer_idx = layer_idx
        self.settings = settings
        self.rule = PLAIN

    def load(self, reader: WeightReader, name: str) -> None:
        """Read ``q_proj``, or ``q_a_proj``, ``q_a_layernorm`` and ``q_b_proj``, and the rest."""
        spec, settings = self.spec, self.settings
        self._load_first(reader, name)
        self.q_matrix: Matrix | None = None
        self.held_q_norm: Buffer | None = None
        if spec.q_rank:
            rows = spec.num_heads * spec.head
            is_packed = settings.weight_format is not None
            weight = read_rows(
                reader, [(f"{name}.q_b_proj.weight", rows)], spec.q_rank, is_scratch=is_packed
            )
            self._order_queries(weight)
            self.q_matrix = make_matrix(self, "q_b_", settings, weight, None)
            norm = read_rows(reader, [(f"{name}.q_a_layernorm.weight", spec.q_rank)])
            self.q_norm = freeze(norm)
            self.held_q_norm = Buffer(self.q_norm)
        norm = read_rows(reader, [(f"{name}.kv_a_layernorm.weight", spec.rank)])
        self.kv_norm = freeze(norm)
        self.held_kv_norm = Buffer(self.kv_norm)
        self._load_heads(reader, name)
        output = [(f"{name}.o_proj", self.spec.hidden_size)]
        self.output_matrix: Matrix = read_matrix(
            self,
            "o_",
            reader,
            settings,
            output,
            spec.num_heads * spec.value,
            has_bias=self.spec.has_bias,
        )

    def _load_first(self, reader: WeightReader, name: str) -> None:
        """Read what multiplies the hidden state: queries, compressed or not, and latents."""
        spec = self.spec
        part = f"{name}.q_a_proj" if spec.q_rank else f"{name}.q_proj"
        latent = f"{name}.kv_a_proj_with_mqa"
        rows, width = spec.first_product, spec.key
        is_packed = self.settings.weight_format is not None
        parts = [(f"{part}.weight", rows), (f"{latent}.weight", width)]
        weight = read_rows(reader, parts, self.spec.hidden_size, is_scratch=is_packed)
        if not spec.q_rank:
            self._order_queries(weight[:rows])
        self._order_rotated(weight[rows + spec.rank :])
        bias = None
        if self.spec.has_bias:
            bias = torch.zeros(rows + width, dtype=reader.dtype, device=reader.device)
            if spec.q_rank:
                reader.read_into(f"{part}.bias", bias[:rows])
            reader.read_into(f"{latent}.bias", bias[rows:])
            self._order_rotated(bias[rows + spec.rank :])
        self.first_matrix: Matrix = make_matrix(self, "qkv_", self.settings, weight, bias)

    def _load_heads(self, reader: WeightReader, name: str) -> None:
        spec = self.spec
        rows = spec.num_heads * (spec.nope + spec.value)
        if self.settings.weight_format is None:
            weight = torch.empty(rows, spec.rank, dtype=reader.dtype, device=reader.device)
        else:
            weight = allocate_scratch(rows, spec.rank, dtype=reader.dtype)
        reader.read_into(f"{name}.kv_b_proj.weight", weight)
        heads = weight.view(spec.num_heads, -1, spec.rank)
        keys, values = heads[:, : spec.nope], heads[:, spec.nope :]
        self.key_heads: HeadMatrix = make_head_matrix(
            self, "key_heads_", self.settings, keys.transpose(1, 2).contiguous()
        )
        self.value_heads: HeadMatrix = make_head_matrix(
            self, "value_heads_", self.settings, values.contiguous()
        )

    def adapt(self, wrapper: MatrixWrapper, name: str) -> dict[str, AdaptedPart]:
        """See ``Operator``."""
        spec, hidden = self.spec, self.spec.hidden_size
        self.first_matrix = first = wrapper.wrap_matrix(self.first_matrix)
        self.key_heads = keys = wrapper.wrap_heads(self.key_heads)
        self.value_heads = values = wrapper.wrap_heads(self.value_heads)
        self.output_matrix = output = wrapper.wrap_matrix(self.output_matrix)
        # The same moves as of the weights, on the numbers of rows.
        queries = torch.arange(spec.num_heads * spec.head)
        self._order_queries(queries)
        latent = torch.arange(spec.key)
        self._order_rotated(latent[spec.rank :])
        size = spec.first_product
        parts: dict[str, AdaptedPart] = {
            f"{name}.kv_a_proj_with_mqa": AdaptedRows(first, hidden, spec.key, size, latent),
            f"{name}.kv_b_proj": AdaptedLatents(
                keys, values, spec.rank, spec.num_heads, spec.nope, spec.value
            ),
            f"{name}.o_proj": AdaptedRows(output, spec.num_heads * spec.value, hidden),
        }
        if self.q_matrix is None:
            parts[f"{name}.q_proj"] = AdaptedRows(first, hidden, size, 0, queries)
        else:
            self.q_matrix = second = wrapper.wrap_matrix(self.q_matrix)
            parts[f"{name}.q_a_proj"] = AdaptedRows(first, hidden, size)
            parts[f"{name}.q_b_proj"] = AdaptedRows(second, spec.q_rank, len(queries), 0, queries)
        return parts

    def _order_queries(self, weight: Tensor) -> None:
        """Put the rotated rows of each head's query in halves, in place."""
        heads = weight.view(self.spec.num_heads, self.spec.head, -1)
        self._order_rotated(heads[:, self.spec.nope :].transpose(0, 1))

    def _order_rotated(self, rows: Tensor) -> None:
        """Put rows [P, ...] that rotate as pairs of neighbours in halves, in place."""
        if self.spec.is_interleaved:
            rows.copy_(torch.cat((rows[0::2], rows[1::2])))

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
        """Run as transformers' attention modules do: [1, T, D] in, ([1, T, D], None) out."""
        mixed = current_step().mix(self, hidden_states[0])
        return self.output_matrix.forward(mixed, dtype=mixed.dtype)[None], None

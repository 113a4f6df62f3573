"""Multi-head latent attention over the compressed cache, with absorbed up-projections.

A token's cache is one latent, normed, and the rotated part of a key that all heads share
(DeepSeek-V2, arXiv:2405.04434, section 2.1). The up-projection of keys is absorbed into the queries
and that of values into the outputs, so that keys and values of the context are never expanded: q_h
. (U_h c) = (U_h^T q_h) . c. A prefill runs the same way, so that its results are bitwise those of
decodes.

A layer with a ``top`` attends to that many tokens only (DeepSeek Sparse Attention): those whose
index keys score best with the token's index queries, the earlier of equal ones, which a ``Step``
finds before it attends. The index's projections are part of the layer's products: its queries come
from the same compressed queries, its key from the hidden state.

Shapes: T tokens, D hidden, H heads, R rank of the latent, P rotated items, n items of a query that
are not rotated, v items of a head's value.
"""

import torch
from torch import Tensor
from torch.nn import functional

from tandem.core.model.layers import IndexSpec, MlaSpec
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

__all__ = ["Index", "MlaAttention"]


class MlaAttention(Operator):
    """Latent attention of one layer; the ``Step`` finds the context that it attends to.

    Args:
        spec: sizes and options. If rotated items are pairs of neighbours in the checkpoint, they
            are loaded as halves, for queries and keys alike, so that products do not change.
        layer_idx: index of the layer's slice in the KV cache.
        settings: how the matrices are stored and run.
        score_settings: how the projection to an index's head weights is stored and run.
    """

    def __init__(
        self,
        spec: MlaSpec,
        *,
        layer_idx: int,
        settings: MatrixSettings = TENSORS,
        score_settings: MatrixSettings = TENSORS,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.layer_idx = layer_idx
        self.settings = settings
        self.score_settings = score_settings
        self.rule = PLAIN

    def load(self, reader: WeightReader, name: str) -> None:
        """Read ``q_proj``, or ``q_a_proj``, ``q_a_layernorm`` and ``q_b_proj``, and the other
        projections.

        With an index, also read ``indexer.wq_b``, ``wk``, ``k_norm`` and ``weights_proj``.
        """
        spec, settings = self.spec, self.settings
        self._load_first(reader, name)
        self.q_matrix: Matrix | None = None
        self.held_q_norm: Buffer | None = None
        self.index: Index | None = None
        if spec.index is not None:
            self.index = Index(self, spec.index, spec.rope, self.score_settings, reader, name)
        if spec.q_rank:
            rows = spec.num_heads * spec.head
            is_packed = settings.weight_format is not None
            parts = [(f"{name}.q_b_proj.weight", rows)]
            if spec.index is not None:
                parts.append((f"{name}.indexer.wq_b.weight", spec.index.num_heads * spec.index.dim))
            weight = read_rows(reader, parts, spec.q_rank, is_scratch=is_packed)
            self._order_queries(weight[:rows])
            if self.index is not None:
                weight[rows:] = weight[rows:][self.index.list_query_rows()]
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
        """Read the matrices that multiply the hidden state: for queries (compressed or not) and
        latents.
        """
        spec = self.spec
        part = f"{name}.q_a_proj" if spec.q_rank else f"{name}.q_proj"
        latent = f"{name}.kv_a_proj_with_mqa"
        rows, width = spec.first_product, spec.key
        is_packed = self.settings.weight_format is not None
        parts = [(f"{part}.weight", rows), (f"{latent}.weight", width)]
        if spec.index is not None:
            parts.append((f"{name}.indexer.wk.weight", spec.index.dim))
        weight = read_rows(reader, parts, self.spec.hidden_size, is_scratch=is_packed)
        if not spec.q_rank:
            self._order_queries(weight[:rows])
        self._order_rotated(weight[rows + spec.rank : rows + width])
        if spec.index is not None:
            index_key = weight[rows + width :]
            index_key.copy_(index_key[list_index_rows(spec.index, spec.rope)])
        bias = None
        if self.spec.has_bias:
            bias = torch.zeros(len(weight), dtype=reader.dtype, device=reader.device)
            if spec.q_rank:
                reader.read_into(f"{part}.bias", bias[:rows])
            reader.read_into(f"{latent}.bias", bias[rows : rows + width])
            self._order_rotated(bias[rows + spec.rank : rows + width])
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
        """Make the projections take LoRA adapters; return them by checkpoint name."""
        spec, hidden = self.spec, self.spec.hidden_size
        self.first_matrix = first = wrapper.wrap_matrix(self.first_matrix)
        self.key_heads = keys = wrapper.wrap_heads(self.key_heads)
        self.value_heads = values = wrapper.wrap_heads(self.value_heads)
        self.output_matrix = output = wrapper.wrap_matrix(self.output_matrix)
        # Permute the row numbers as the weights were permuted, to learn the order of rows for
        # adapters.
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
            if self.index is not None:
                own = self.index.list_query_rows()
                parts[f"{name}.indexer.wq_b"] = AdaptedRows(
                    second, spec.q_rank, len(own), len(queries), own
                )
        if self.index is not None and spec.index is not None:
            own, size = list_index_rows(spec.index, spec.rope), size + spec.key
            parts[f"{name}.indexer.wk"] = AdaptedRows(first, hidden, len(own), size, own)
            self.index.weight_matrix = weights = wrapper.wrap_matrix(self.index.weight_matrix)
            parts[f"{name}.indexer.weights_proj"] = AdaptedRows(
                weights, hidden, spec.index.num_heads
            )
        return parts

    def _order_queries(self, weight: Tensor) -> None:
        """Reorder the rotated rows of each head's query from pairs to halves, in place."""
        heads = weight.view(self.spec.num_heads, self.spec.head, -1)
        self._order_rotated(heads[:, self.spec.nope :].transpose(0, 1))

    def _order_rotated(self, rows: Tensor) -> None:
        """Reorder rows [P, ...] that rotate as pairs of neighbours into halves, in place."""
        if self.spec.is_interleaved:
            rows.copy_(torch.cat((rows[0::2], rows[1::2])))

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> tuple[Tensor | None, ...]:
        """Run with transformers' attention interface: [1, T, D] in, ([1, T, D], None) out.

        The step keeps the tokens that an index chose, so None is returned for them where
        transformers returns them.
        """
        mixed = current_step().mix(self, hidden_states[0])
        out = self.output_matrix.forward(mixed, dtype=mixed.dtype)[None]
        return (out, None, None) if self.spec.gives_choice else (out, None)


class Index:
    """The separate parts of a layer's index: projection to head weights, and the keys' norm.

    Args:
        owner: operator that gets the tensors as parameters.
        spec: sizes and options of the index.
        rope: number of rotated items, which come first.
        settings: how the projection to head weights is stored and run.
        reader: reads ``{name}.indexer``.
        name: checkpoint name of the operator.
    """

    def __init__(
        self,
        owner: "MlaAttention",
        spec: IndexSpec,
        rope: int,
        settings: MatrixSettings,
        reader: WeightReader,
        name: str,
    ) -> None:
        self.spec, hidden_size = spec, owner.spec.hidden_size
        self._rows = list_index_rows(spec, rope)
        self.weight_matrix: Matrix = read_matrix(
            owner,
            "index_weights_",
            reader,
            settings,
            [(f"{name}.indexer.weights_proj", spec.num_heads)],
            hidden_size,
        )
        norm = f"{name}.indexer.k_norm"
        self.norm, self.bias = (
            freeze(read_rows(reader, [(f"{norm}.{part}", spec.dim)])[self._rows])
            for part in ("weight", "bias")
        )
        owner.index_norm, owner.index_bias = self.norm, self.bias

    def list_query_rows(self) -> Tensor:
        """Return the checkpoint's row for each row of the index's query projection, which differ in
        the order of rotated items.
        """
        firsts = torch.arange(self.spec.num_heads) * self.spec.dim
        return (firsts[:, None] + self._rows).flatten()

    def norm_keys(self, keys_TI: Tensor) -> Tensor:
        """Return the normed index keys, new, in the same dtype; each row is independent of
        others.
        """
        weight, bias = self.norm.float(), self.bias.float()
        normed = functional.layer_norm(
            keys_TI.float(), weight.shape, weight, bias, self.spec.norm_eps
        )
        return normed.to(keys_TI.dtype)


def list_index_rows(spec: IndexSpec, rope: int) -> Tensor:
    """Return the checkpoint's item for each item of an index key: rotated items in halves."""
    items = torch.arange(spec.dim)
    if not spec.is_interleaved:
        return items
    return torch.cat((items[0:rope:2], items[1:rope:2], items[rope:]))

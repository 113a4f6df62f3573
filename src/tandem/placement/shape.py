"""Sizes and work of a model by operator class, from its configuration alone.

Planning needs a model's weights, the bytes and operations of a token, and its cache, also for
models that serving does not support yet. So this module computes them from ``config.json``; a test
compares the counts with those of transformers' modules.
"""

from collections.abc import Mapping
from typing import Any, Literal, cast

import msgspec

from tandem.core.errors import ConfigError

__all__ = ["FORMAT_BYTES", "ModelShape", "ShapeLayer", "read_shape"]

FORMAT_BYTES: dict[str, float] = {
    "f32": 4,
    "bf16": 2,
    "fp8": 1 + 4 / 128**2,
    "int8": 1 + 2 / 128,
    "int4": 0.5 + 2 / 32,
    "int4g32": 0.5 + 2 / 32,
    "mxfp4": 0.5 + 1 / 32,
    "q4_k_m": 4.85 / 8,
}
"""Bytes of one weight with its scales; q4_k_m is GGUF's mixture, 4.85 bits by llama.cpp."""

BF16_BYTES = 2


class ShapeLayer(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of one decoder layer: weights by class of operators, and attention's cost per
    token.
    """

    kind: Literal["gqa", "mla", "state"]
    attention_weights: int
    dense_weights: int = 0
    """Number of weights of a dense MLP in the layer; 0 if it has none."""
    shared_weights: int = 0
    """Number of weights of the layer's shared experts and router."""
    expert_weights: int = 0
    """Weights of one routed expert."""
    num_experts: int = 0
    top_k: int = 0
    kv_items: int = 0
    """Items that a token stores in the KV cache."""
    index_bytes: int = 0
    """Bytes that a token stores for the index of sparse attention, in bf16."""
    state_bytes: int = 0
    """Bytes of a sequence's recurrent state, whatever its length."""
    window: int = 0
    """Sliding window in tokens; 0: all tokens are seen."""
    top_tokens: int = 0
    """Tokens that sparse attention chooses; 0: all that are seen."""
    prefill_ops: int = 0
    """Attention operations of a token per token that it sees, during prefill."""
    decode_ops: int = 0
    """Attention operations of a token per token that it sees, during decode, with latents not
    expanded.
    """
    index_ops: int = 0
    """Operations of sparse attention's index per token that it scores."""
    row_items: int = 0
    """Sum of inputs and outputs of all matrices that a token is multiplied with in the layer, of a
    planned model; 0 for a model that is known by its configuration alone."""
    adapter_items: int = 0
    """Sum of inputs and outputs of all linear modules except routed experts: a LoRA adapter of rank
    r has r times as many weights.
    """


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a model as planning needs them: weights by class of operators, bytes of cache,
    and work per token.
    """

    name: str
    hidden_size: int
    vocab_size: int
    layers: tuple[ShapeLayer, ...]
    embedding_weights: int
    head_weights: int
    """Weights of the LM head; 0 if it shares the embedding's matrix."""
    max_context: int
    unserved: str = ""
    """Reason why serving does not support the model yet; empty: serving supports it."""

    @property
    def attention_weights(self) -> int:
        """Number of weights in the attention of all layers."""
        return sum(layer.attention_weights for layer in self.layers)

    @property
    def dense_weights(self) -> int:
        """Number of weights of dense MLPs, shared experts and routers of all layers."""
        return sum(layer.dense_weights + layer.shared_weights for layer in self.layers)

    @property
    def expert_weights(self) -> int:
        """Number of weights of all routed experts."""
        return sum(layer.expert_weights * layer.num_experts for layer in self.layers)

    @property
    def num_weights(self) -> int:
        """Number of weights of the whole model."""
        rest = self.attention_weights + self.dense_weights + self.expert_weights
        return rest + self.embedding_weights + self.head_weights

    @property
    def active_weights(self) -> int:
        """Number of weights that one token is multiplied with, of routed experts only the chosen
        ones.
        """
        experts = sum(layer.expert_weights * layer.top_k for layer in self.layers)
        head = self.head_weights or self.embedding_weights
        return self.attention_weights + self.dense_weights + experts + head

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's KV in all layers, in bf16, index keys included; windows not
        considered.
        """
        return sum(layer.kv_items * BF16_BYTES + layer.index_bytes for layer in self.layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent states, whatever its length."""
        return sum(layer.state_bytes for layer in self.layers)

    def count_cache_bytes(self, tokens: int) -> int:
        """Return the bytes of KV and states that a sequence of ``tokens`` tokens keeps."""
        total = self.state_bytes
        for layer in self.layers:
            kept = min(tokens, layer.window) if layer.window else tokens
            total += kept * (layer.kv_items * BF16_BYTES + layer.index_bytes)
        return total

    def count_window_bytes(self, tokens: int) -> tuple[int, int]:
        """Return the KV bytes of ``tokens`` tokens in layers with a window, with and without the
        window.
        """
        kept = whole = 0
        for layer in self.layers:
            if layer.window:
                token_bytes = layer.kv_items * BF16_BYTES
                kept += min(tokens, layer.window) * token_bytes
                whole += tokens * token_bytes
        return kept, whole

    @property
    def moe_layers(self) -> tuple[ShapeLayer, ...]:
        """The layers with routed experts, in order."""
        return tuple(layer for layer in self.layers if layer.num_experts)

    def with_top_k(self, top_k: int) -> "ModelShape":
        """Return the same model with at most ``top_k`` experts per token."""
        layers = tuple(
            msgspec.structs.replace(layer, top_k=min(top_k, layer.top_k)) for layer in self.layers
        )
        return msgspec.structs.replace(self, layers=layers)


class _Config:
    """Fields of a configuration; a missing or wrong field raises an error that names it."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def __getitem__(self, name: str) -> int:
        value = self._fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            what = f"{name} is {value!r}: planning needs a whole number"
            raise ConfigError("placement.read_shape", what, field=name)
        return value

    def get(self, *names: str, default: int = 0) -> int:
        """Return the first of the named fields that is present, else the default."""
        for name in names:
            if self._fields.get(name) is not None:
                return self[name]
        return default

    def flag(self, name: str) -> bool:
        return bool(self._fields.get(name))

    def list(self, name: str) -> list[Any]:
        value = self._fields.get(name)
        return cast("list[Any]", value) if isinstance(value, list) else []


UNSERVED = {
    "kimi_linear": "layers with a recurrent state (KDA)",
}
"""Model types that serving does not support yet, with the missing operator."""


def read_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape of a model from the fields of its ``config.json``.

    Args:
        config: the fields; for a model with images, the text model's fields are used.
        name: the model's name, for messages and pages.

    Raises: ConfigError that names the missing or wrong field.
    """
    text = config.get("text_config")
    fields = config
    if isinstance(text, Mapping):
        fields = {**config, **cast("Mapping[str, Any]", text)}
    c = _Config(fields)
    hidden, vocab = c["hidden_size"], c["vocab_size"]
    layers = tuple(_read_layer(c, fields, i) for i in range(c["num_hidden_layers"]))
    return ModelShape(
        name=name,
        hidden_size=hidden,
        vocab_size=vocab,
        layers=layers,
        embedding_weights=hidden * vocab,
        head_weights=0 if c.flag("tie_word_embeddings") else hidden * vocab,
        max_context=c.get("max_position_embeddings", default=4096),
        unserved=UNSERVED.get(str(fields.get("model_type")), ""),
    )


def _read_layer(c: _Config, fields: Mapping[str, Any], index: int) -> ShapeLayer:
    layer = _read_attention(c, fields, index)
    hidden = c["hidden_size"]
    num_experts = c.get("n_routed_experts", "num_experts", "num_local_experts")
    top_k = c.get("num_experts_per_tok")
    step = c.get("decoder_sparse_step", default=1) or 1
    is_dense = (
        not num_experts
        or index < c.get("first_k_dense_replace")
        or index in c.list("mlp_only_layers")
        or (index + 1) % step != 0
    )
    if is_dense:
        inner = c["intermediate_size"]
        items = layer.adapter_items + 3 * (hidden + inner)
        return msgspec.structs.replace(layer, dense_weights=3 * hidden * inner, adapter_items=items)
    width = c.get("moe_intermediate_size", "intermediate_size")
    bias = 3 * width if c.flag("attention_bias") and "swiglu_limit" in fields else 0
    shared = c.get("n_shared_experts") * width
    gated = c.get("shared_expert_intermediate_size")
    shared_weights = 3 * hidden * (shared + gated) + (hidden if gated else 0)
    return msgspec.structs.replace(
        layer,
        shared_weights=shared_weights + hidden * num_experts,
        expert_weights=3 * hidden * width + bias,
        num_experts=num_experts,
        top_k=top_k,
        adapter_items=layer.adapter_items
        + (3 * (hidden + shared + gated) if shared + gated else 0),
    )


def _read_attention(c: _Config, fields: Mapping[str, Any], index: int) -> ShapeLayer:
    types = c.list("layer_types")
    kind = str(types[index]) if index < len(types) else ""
    every = c.get("full_attention_interval")
    if c.get("linear_num_value_heads") and (
        kind == "linear_attention" or (not kind and every and (index + 1) % every != 0)
    ):
        return _read_state(c)
    if c.get("kv_lora_rank"):
        return _read_latent(c, has_index=_has_index(c, fields, index))
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    kv_heads = c.get("num_key_value_heads", default=heads)
    head_dim = c.get("head_dim", default=hidden // heads)
    # In hybrid models the full-attention layers have an output gate as wide as the queries, so the
    # query projection has twice the heads.
    queries = 2 * heads if c.get("linear_num_value_heads") else heads
    weights = hidden * head_dim * (queries + 2 * kv_heads + heads)
    ops = 4 * heads * head_dim
    return ShapeLayer(
        kind="gqa",
        attention_weights=weights,
        kv_items=2 * kv_heads * head_dim,
        window=c.get("sliding_window") if kind == "sliding_attention" else 0,
        prefill_ops=ops,
        decode_ops=ops,
        adapter_items=4 * hidden + head_dim * (queries + 2 * kv_heads + heads),
    )


def _has_index(c: _Config, fields: Mapping[str, Any], index: int) -> bool:
    """Return True if a layer of sparse attention has an index of its own, instead of using the
    tokens that an earlier layer's index chose.
    """
    if not c.get("index_n_heads"):
        return False
    types, pattern = c.list("indexer_types"), fields.get("index_topk_pattern")
    if types:
        return index >= len(types) or types[index] == "full"
    if isinstance(pattern, str) and index < len(pattern):
        return pattern[index] == "F"
    every = max(1, c.get("index_topk_freq", default=1))
    return max(0, index - c.get("index_skip_topk_offset", default=2) + 1) % every == 0


def _read_latent(c: _Config, *, has_index: bool) -> ShapeLayer:
    """Return the sizes of a layer with multi-head latent attention, and DeepSeek's index (sparse
    attention) if it has one.
    """
    hidden, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    rope, nope, value = c["qk_rope_head_dim"], c["qk_nope_head_dim"], c["v_head_dim"]
    q_rank = c.get("q_lora_rank")
    queries = heads * (nope + rope)
    weights = hidden * q_rank + q_rank * queries if q_rank else hidden * queries
    weights += hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    items = hidden + 2 * q_rank + queries if q_rank else hidden + queries
    items += hidden + rank + rope + rank + heads * (nope + value) + heads * value + hidden
    index_heads, index_dim = c.get("index_n_heads"), c.get("index_head_dim")
    top = c.get("index_topk") if index_heads else 0
    if has_index:
        items += q_rank + index_heads * index_dim + 2 * hidden + index_dim + index_heads
        weights += q_rank * index_heads * index_dim + hidden * (index_dim + index_heads)
    return ShapeLayer(
        kind="mla",
        attention_weights=weights,
        kv_items=rank + rope,
        index_bytes=BF16_BYTES * index_dim if has_index else 0,
        top_tokens=top,
        prefill_ops=2 * heads * (nope + rope + value),
        decode_ops=2 * heads * (2 * rank + rope),
        index_ops=2 * index_heads * index_dim if has_index else 0,
        adapter_items=items,
    )


def _read_state(c: _Config) -> ShapeLayer:
    """Return the sizes of a Gated DeltaNet layer, which keeps a recurrent state instead of KV."""
    hidden = c["hidden_size"]
    key_heads, value_heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
    key_dim, value_dim = c["linear_key_head_dim"], c["linear_value_head_dim"]
    keys, values, kernel = key_heads * key_dim, value_heads * value_dim, c["linear_conv_kernel_dim"]
    channels = 2 * keys + values
    weights = hidden * (2 * keys + 2 * values + 2 * value_heads) + values * hidden
    return ShapeLayer(
        kind="state",
        attention_weights=weights + channels * kernel,
        # The state is a float32 matrix for each value head, and the last (kernel - 1) inputs of the
        # convolution in bf16.
        state_bytes=4 * value_heads * key_dim * value_dim + BF16_BYTES * channels * (kernel - 1),
        adapter_items=3 * hidden + 2 * keys + 3 * values + 2 * value_heads,
    )

"""What a model and its KV cache look like, in plain numbers: no torch, no files.

``ModelSpec`` is read from a checkpoint's ``config.json`` by ``tandem.models``; ``KVLayout`` is the
one layout of a KV block in every tier (device, host, SSD, remote), so that the engine, the store
and the simulator compute the same sizes from the same struct.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = ["DTYPE_BYTES", "KV_CODE_BYTES", "KVLayout", "ModelSpec"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element, by the name that torch and the configuration use."""

KV_CODE_BYTES = {"int8": 1, "fp8": 1}
"""Bytes of one element of KV that is stored in codes with scales: integers, and e4m3."""

SCALE_BYTES = 2
"""A scale is fp16: one for the key, and one for the value, of a head and token."""

PositiveInt = Annotated[int, Meta(ge=1)]


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only language model as its configuration describes it."""

    name: str
    """What the user asked for: a folder's name or a hub id."""
    model_type: str
    architecture: str
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    """Of a dense MLP; models whose layers are all MoE carry it too."""
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    """Tokens of context that the checkpoint promises."""
    num_experts: Annotated[int, Meta(ge=0)] = 0
    """Routed experts of an MoE layer; 0 is a dense model."""
    top_k: Annotated[int, Meta(ge=0)] = 0
    """Routed experts that one token uses."""
    moe_intermediate_size: Annotated[int, Meta(ge=0)] = 0
    num_moe_layers: Annotated[int, Meta(ge=0)] = 0
    tie_word_embeddings: bool = False
    has_qk_norm: bool = False
    sliding_window: Annotated[int, Meta(ge=0)] = 0
    """Tokens that a token sees in layers with a window, itself included; 0 is no such layer."""
    has_sinks: bool = False
    """Heads have a logit that takes weight and adds nothing."""
    rope_type: str = "default"
    checkpoint_dtype: str = "bfloat16"
    """The dtype that the configuration declares for the stored weights."""
    expert_format: str = ""
    """The weight format in which the checkpoint stores its routed experts; empty: in the dtype."""
    dtype: str = "bfloat16"
    """The dtype that ``dtype="auto"`` runs in."""
    dtype_reason: str = ""
    """Why ``dtype`` is what it is, as a sentence."""
    num_parameters: Annotated[int, Meta(ge=0)] = 0
    """Parameters held in memory; tied embeddings count once."""
    num_active_parameters: Annotated[int, Meta(ge=0)] = 0
    """Parameters that one token reads: all but the experts it is not routed to."""
    eos_token_ids: tuple[int, ...] = ()
    """End-of-text ids of the configuration and of ``generation_config.json``, in that order."""
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in ``dtype``."""
        return self.num_parameters * DTYPE_BYTES[self.dtype]

    @property
    def is_moe(self) -> bool:
        """Whether any layer has routed experts."""
        return self.num_moe_layers > 0


class KVLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The layout of one KV block: ``[num_layers, 2, num_kv_heads, block_size, head_dim]``.

    A block is one contiguous object; one layer of it is one contiguous slice; so is one head's
    keys (index 0) or values (index 1) within a layer. Where KV is coded (``int8``, ``fp8``), a
    layer's codes are followed by its scales, fp16 ``[2, num_kv_heads, block_size]``, in the same
    slice. Version 1 of the layout.
    """

    num_layers: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    block_size: PositiveInt = 64
    """Tokens a block holds."""
    dtype: str = "bfloat16"
    """A name of ``DTYPE_BYTES`` or of ``KV_CODE_BYTES``."""

    @property
    def is_coded(self) -> bool:
        """Whether keys and values are codes with scales."""
        return self.dtype in KV_CODE_BYTES

    @property
    def item_bytes(self) -> int:
        """Bytes of one element, without its share of a scale."""
        return KV_CODE_BYTES[self.dtype] if self.is_coded else DTYPE_BYTES[self.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one block: of its elements, or where it is coded of its bytes, [layers, n]."""
        if self.is_coded:
            return (self.num_layers, self.bytes_per_layer)
        return (self.num_layers, *self.layer_shape)

    @property
    def layer_shape(self) -> tuple[int, int, int, int]:
        """Shape of the elements of one layer of a block."""
        return (2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def scale_offset(self) -> int:
        """Byte offset of the scales within a layer's slice: behind all elements."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim * self.item_bytes

    @property
    def bytes_per_layer(self) -> int:
        """Bytes of one layer's keys and values in one block, scales included."""
        scales = 2 * self.num_kv_heads * self.block_size * SCALE_BYTES if self.is_coded else 0
        return self.scale_offset + scales

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, all layers."""
        return self.bytes_per_layer * self.num_layers

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of context takes, all layers."""
        return self.bytes_per_block // self.block_size

    def layer_offset(self, layer_idx: int) -> int:
        """Byte offset, within a block, of a layer's ``bytes_per_layer`` bytes."""
        assert 0 <= layer_idx < self.num_layers, (layer_idx, self.num_layers)
        return layer_idx * self.bytes_per_layer

    def head_offset(self, layer_idx: int, kind: int, head_idx: int) -> int:
        """Byte offset of one head's keys (``kind`` 0) or values (1) of a layer, in a block."""
        assert kind in (0, 1), kind
        assert 0 <= head_idx < self.num_kv_heads, (head_idx, self.num_kv_heads)
        rows = kind * self.num_kv_heads + head_idx
        within = rows * self.block_size * self.head_dim * self.item_bytes
        return self.layer_offset(layer_idx) + within

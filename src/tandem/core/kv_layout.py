"""The layout of a KV block, the same in every tier: device, host, SSD, remote."""

from collections.abc import Sequence
from math import prod
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

__all__ = [
    "DTYPE_BYTES",
    "KV_CODE_BYTES",
    "BlockLayout",
    "GqaLayout",
    "KVLayout",
    "LayerSlice",
    "MlaLayout",
    "WindowLayout",
    "split_layout",
]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element, by the name that torch and the configuration use."""

KV_CODE_BYTES = {"int8": 1, "fp8": 1}
"""Bytes of one element of quantized KV, which has scales: int8, and fp8 in e4m3."""

SCALE_BYTES = 2
"""Bytes of a scale, fp16. There is one for each row of a chunk, such as one head's key of one
token."""

PositiveInt = Annotated[int, Meta(ge=1)]


class LayerSlice(NamedTuple):
    """The place of one layer of one block in a pool (the memory of all blocks)."""

    offset: int
    """Byte offset of the layer's KV, from the start of the memory pool that has all blocks."""
    length: int
    """Length of the layer's KV in bytes."""


class BlockLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The common part of the layouts of a KV block: ``[num_layers, *layer_shape]``.

    A block is contiguous, and so is each of its layers. The elements of a layer are
    ``[*chunk_shape, block_size, row_size]``. For quantized KV (``int8``, ``fp8``), they are
    followed by the layer's scales: fp16 ``[*chunk_shape, block_size]``. Version 1 of the layout.
    """

    num_layers: Annotated[int, Meta(ge=0)]
    """Number of layers; 0 if no layer attends to all tokens, and blocks then have no memory."""
    block_size: PositiveInt = 64
    """Number of tokens of a block."""
    dtype: str = "bfloat16"
    """Name of a dtype in ``DTYPE_BYTES``, or of a quantization in ``KV_CODE_BYTES``."""

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Shape of the array of a layer's chunks (a head's keys or values, or the latents), each of
        which is ``[block_size, row_size]``.
        """
        raise NotImplementedError

    @property
    def row_size(self) -> int:
        """Number of elements of one token in one chunk (a head's keys or values, or the
        latents).
        """
        raise NotImplementedError

    @property
    def chunks_per_layer(self) -> int:
        """Number of chunks (a head's keys or values, or the latents) of one layer of a block."""
        return prod(self.chunk_shape)

    @property
    def is_coded(self) -> bool:
        """True if keys and values are quantized, with scales."""
        return self.dtype in KV_CODE_BYTES

    @property
    def item_bytes(self) -> int:
        """Bytes of one stored element of keys and values; scales of quantized KV are not
        included.
        """
        return KV_CODE_BYTES[self.dtype] if self.is_coded else DTYPE_BYTES[self.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one block: in elements or, for quantized KV, [num_layers, bytes of a layer]."""
        if self.is_coded:
            return (self.num_layers, self.bytes_per_layer)
        return (self.num_layers, *self.layer_shape)

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """Shape of one layer of a block, in elements; tokens are the last dimension but one."""
        return (*self.chunk_shape, self.block_size, self.row_size)

    @property
    def scale_offset(self) -> int:
        """Offset in bytes of the scales in a layer's slice, after all elements."""
        return prod(self.layer_shape) * self.item_bytes

    @property
    def bytes_per_layer(self) -> int:
        """Bytes of one layer of one block, with scales, without index keys."""
        scales = self.chunks_per_layer * self.block_size * SCALE_BYTES if self.is_coded else 0
        return self.scale_offset + scales

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all layers."""
        return self.bytes_per_layer * self.num_layers

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV of one token in all layers."""
        return self.bytes_per_block // self.block_size

    def layer_slice(self, block_id: int, layer_idx: int) -> LayerSlice:
        """Return the place of a layer of a block in a pool, whose blocks follow each other.

        With ``block_id`` 0, this is also the layer's place in any block.
        """
        assert block_id >= 0, block_id
        assert 0 <= layer_idx < self.num_layers, (layer_idx, self.num_layers)
        offset = block_id * self.bytes_per_block + layer_idx * self.bytes_per_layer
        return LayerSlice(offset, self.bytes_per_layer)


class GqaLayout(BlockLayout, frozen=True, kw_only=True, tag_field="kind", tag="gqa"):
    """Keys and values of each KV head: ``[num_layers, 2, num_kv_heads, block_size, head_dim]``.

    One head's keys (index 0) or values (index 1) within a layer are contiguous, so a range of heads
    is two slices, and ranks of different tensor-parallel sizes exchange slices.
    """

    num_kv_heads: PositiveInt
    head_dim: PositiveInt

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Two (keys, values) by the number of KV heads."""
        return (2, self.num_kv_heads)

    @property
    def row_size(self) -> int:
        """Number of elements of one head's key or value."""
        return self.head_dim

    @property
    def value_size(self) -> int:
        """Number of elements of one head's value."""
        return self.head_dim

    def head_offset(self, layer_idx: int, kind: int, head_idx: int) -> int:
        """Return the offset in bytes, in a block, of a head's keys (``kind`` 0) or values (1) of a
        layer.
        """
        assert kind in (0, 1), kind
        assert 0 <= head_idx < self.num_kv_heads, (head_idx, self.num_kv_heads)
        rows = kind * self.num_kv_heads + head_idx
        within = rows * self.block_size * self.head_dim * self.item_bytes
        return self.layer_slice(0, layer_idx).offset + within


class MlaLayout(BlockLayout, frozen=True, kw_only=True, tag_field="kind", tag="mla"):
    """Latents that all heads share: ``[num_layers, block_size, kv_lora_rank + rope_dim]``.

    A token's row is its compressed latent, which is also its value, followed by the rotated part of
    its key (multi-head latent attention, DeepSeek-V2 report, section 2.1). In layers of sparse
    attention that have an index, the index keys follow the latents.
    """

    kv_lora_rank: PositiveInt
    rope_dim: Annotated[int, Meta(ge=0)]
    index_dim: Annotated[int, Meta(ge=0)] = 0
    """Number of elements of a token's index key, by which sparse attention chooses tokens; 0:
    none."""
    index_layers: tuple[int, ...] = ()
    """Indexes of the layers with index keys, ascending. Such a layer's slice ends with
    ``[block_size, index_dim]`` elements and, for quantized KV, their scales."""

    @property
    def index_bytes(self) -> int:
        """Bytes of the index keys of one block in one layer that has them."""
        if not self.index_layers:
            return 0
        scale = SCALE_BYTES if self.is_coded else 0
        return self.block_size * (self.index_dim * self.item_bytes + scale)

    @property
    def index_block_bytes(self) -> int:
        """Bytes of one block's index keys, all layers."""
        return self.index_bytes * len(self.index_layers)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all layers, index keys included."""
        return self.bytes_per_layer * self.num_layers + self.index_block_bytes

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one block. With index keys (of sparse attention) it is one dimension: the
        block's elements or, for quantized KV, its bytes.
        """
        if self.index_layers:
            return (self.bytes_per_block // (1 if self.is_coded else self.item_bytes),)
        return super().shape

    def layer_slice(self, block_id: int, layer_idx: int) -> LayerSlice:
        """Return the place of a layer of a block in a pool, index keys included; see
        ``BlockLayout``.
        """
        assert block_id >= 0, block_id
        assert 0 <= layer_idx < self.num_layers, (layer_idx, self.num_layers)
        before = sum(layer < layer_idx for layer in self.index_layers)
        offset = layer_idx * self.bytes_per_layer + before * self.index_bytes
        own = self.index_bytes if layer_idx in self.index_layers else 0
        return LayerSlice(block_id * self.bytes_per_block + offset, self.bytes_per_layer + own)

    @property
    def num_kv_heads(self) -> int:
        """One: every head of a query attends to the same row."""
        return 1

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Empty, because the latents of a layer are a single chunk."""
        return ()

    @property
    def row_size(self) -> int:
        """Number of elements of a token's row: the latent, and the rotated part of the key."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def value_size(self) -> int:
        """Number of elements of a row that are its value: the latent."""
        return self.kv_lora_rank


KVLayout = GqaLayout | MlaLayout
"""Layout of a KV block; ``kind`` distinguishes the two in encoded form."""


class WindowLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The layout of the sliding-window layers' blocks, which are in a pool of their own.

    They have as many tokens as full blocks and cover the same positions.
    """

    layout: KVLayout
    """Layout of a block of the sliding-window layers."""
    window: PositiveInt
    """Number of tokens that a token attends to, itself included; the largest of all these
    layers."""
    layers: tuple[int, ...]
    """Indexes of the sliding-window layers among the layers with KV, ascending."""


def split_layout(
    whole: KVLayout, layers: Sequence[int], window: int, sizes: tuple[int, int] | None = None
) -> tuple[KVLayout, WindowLayout | None]:
    """Return the layout of the layers that attend to all tokens, and that of the sliding-window
    layers, None if there are none.

    Args:
        whole: layout of all layers with KV.
        layers: indexes of the window layers among them.
        window: number of tokens that a token attends to in such a layer.
        sizes: (KV heads, elements of a head) of the window layers; None: as the other layers.
    """
    if not layers:
        return whole, None
    own = msgspec.structs.replace(whole, num_layers=len(layers))
    if sizes is not None:
        own = msgspec.structs.replace(own, num_kv_heads=sizes[0], head_dim=sizes[1])
    rest = msgspec.structs.replace(whole, num_layers=whole.num_layers - len(layers))
    return rest, WindowLayout(layout=own, window=window, layers=tuple(layers))

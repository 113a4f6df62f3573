"""The one layout of a KV block in every tier: device, host, SSD, remote."""

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
"""Bytes of one element of KV that is stored in codes with scales: integers, and e4m3."""

SCALE_BYTES = 2
"""A scale is fp16: one for each row of a chunk, as for the key of a head and token."""

PositiveInt = Annotated[int, Meta(ge=1)]


class LayerSlice(NamedTuple):
    """The place of one layer of one block in a pool of blocks."""

    offset: int
    """Bytes from the begin of the pool."""
    length: int
    """Bytes."""


class BlockLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The common part of the layouts of a KV block: ``[num_layers, *layer_shape]``.

    A block is one contiguous object; one layer of it is one contiguous slice. The elements of a
    layer are ``[*chunk_shape, block_size, row_size]``. Where KV is coded (``int8``, ``fp8``), a
    layer's codes are followed by its scales in the same slice: fp16 ``[*chunk_shape, block_size]``.
    Version 1 of the layout.
    """

    num_layers: Annotated[int, Meta(ge=0)]
    """0 where no layer sees all tokens: blocks then have no memory."""
    block_size: PositiveInt = 64
    """Tokens a block holds."""
    dtype: str = "bfloat16"
    """A name of ``DTYPE_BYTES`` or of ``KV_CODE_BYTES``."""

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """The number of chunks of ``[block_size, row_size]`` elements a layer has, by dimension."""
        raise NotImplementedError

    @property
    def row_size(self) -> int:
        """Elements of one token in one chunk."""
        raise NotImplementedError

    @property
    def chunks_per_layer(self) -> int:
        """Chunks that a layer of a block consists of."""
        return prod(self.chunk_shape)

    @property
    def is_coded(self) -> bool:
        """True if keys and values are codes with scales."""
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
    def layer_shape(self) -> tuple[int, ...]:
        """Shape of the elements of one layer of a block; tokens are the last dimension but one."""
        return (*self.chunk_shape, self.block_size, self.row_size)

    @property
    def scale_offset(self) -> int:
        """Byte offset of the scales within a layer's slice: behind all elements."""
        return prod(self.layer_shape) * self.item_bytes

    @property
    def bytes_per_layer(self) -> int:
        """Bytes of one layer of one block, scales included, index keys not."""
        scales = self.chunks_per_layer * self.block_size * SCALE_BYTES if self.is_coded else 0
        return self.scale_offset + scales

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, all layers."""
        return self.bytes_per_layer * self.num_layers

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of context takes, all layers."""
        return self.bytes_per_block // self.block_size

    def layer_slice(self, block_id: int, layer_idx: int) -> LayerSlice:
        """Return where a layer of a block lies in a pool of blocks that follow each other.

        With ``block_id`` 0 this is also its place within any block.
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
        """Keys and values, by head."""
        return (2, self.num_kv_heads)

    @property
    def row_size(self) -> int:
        """Elements of one head's key or value."""
        return self.head_dim

    @property
    def value_size(self) -> int:
        """Elements of one head's value."""
        return self.head_dim

    def head_offset(self, layer_idx: int, kind: int, head_idx: int) -> int:
        """Byte offset of one head's keys (``kind`` 0) or values (1) of a layer, in a block."""
        assert kind in (0, 1), kind
        assert 0 <= head_idx < self.num_kv_heads, (head_idx, self.num_kv_heads)
        rows = kind * self.num_kv_heads + head_idx
        within = rows * self.block_size * self.head_dim * self.item_bytes
        return self.layer_slice(0, layer_idx).offset + within


class MlaLayout(BlockLayout, frozen=True, kw_only=True, tag_field="kind", tag="mla"):
    """Latents that all heads share: ``[num_layers, block_size, kv_lora_rank + rope_dim]``.

    Layers that choose tokens by an index have its keys behind their latents.

    A token's row is its compressed latent, which is also its value, and then the rotated part of
    its key (multi-head latent attention, DeepSeek-V2 report, section 2.1).
    """

    kv_lora_rank: PositiveInt
    rope_dim: Annotated[int, Meta(ge=0)]
    index_dim: Annotated[int, Meta(ge=0)] = 0
    """Elements of a token's index key, by which sparse attention chooses; 0: there is none."""
    index_layers: tuple[int, ...] = ()
    """Numbers of the layers with index keys, ascending. Behind all else such a layer's slice has
    ``[block_size, index_dim]`` elements and, where KV is coded, their scales."""

    @property
    def index_bytes(self) -> int:
        """Bytes of one block's index keys in one layer that has them."""
        if not self.index_layers:
            return 0
        scale = SCALE_BYTES if self.is_coded else 0
        return self.block_size * (self.index_dim * self.item_bytes + scale)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, all layers and their index keys."""
        latents = self.bytes_per_layer * self.num_layers
        return latents + self.index_bytes * len(self.index_layers)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one block; with index keys, of its elements or bytes in a row."""
        if self.index_layers:
            return (self.bytes_per_block // (1 if self.is_coded else self.item_bytes),)
        return super().shape

    def layer_slice(self, block_id: int, layer_idx: int) -> LayerSlice:
        """Return where a layer of a block lies, its index keys included; see ``BlockLayout``."""
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
        """One chunk: no dimension."""
        return ()

    @property
    def row_size(self) -> int:
        """Elements of the latent and of the rotated part."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def value_size(self) -> int:
        """Elements of a row that are its value: the latent."""
        return self.kv_lora_rank


KVLayout = GqaLayout | MlaLayout
"""The layout of one KV block; ``kind`` tells them apart where it is encoded."""


class WindowLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The blocks of the layers that see a window, which lie in a pool of their own.

    They hold as many tokens as the blocks of the other layers, and stand at the same positions.
    """

    layout: KVLayout
    """Layout of a block of these layers."""
    window: PositiveInt
    """Tokens that a token sees, itself included; the most of all these layers."""
    layers: tuple[int, ...]
    """Their numbers among the layers with KV, ascending."""


def split_layout(
    whole: KVLayout, layers: Sequence[int], window: int, sizes: tuple[int, int] | None = None
) -> tuple[KVLayout, WindowLayout | None]:
    """Return the layout of the layers that see all tokens, and that of the others.

    Args:
        whole: of all layers with KV.
        layers: those with a window.
        window: tokens that such a layer sees.
        sizes: (KV heads, items of a head) of those with a window; None: as of the others.
    """
    if not layers:
        return whole, None
    own = msgspec.structs.replace(whole, num_layers=len(layers))
    if sizes is not None:
        own = msgspec.structs.replace(own, num_kv_heads=sizes[0], head_dim=sizes[1])
    rest = msgspec.structs.replace(whole, num_layers=whole.num_layers - len(layers))
    return rest, WindowLayout(layout=own, window=window, layers=tuple(layers))

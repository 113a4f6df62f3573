"""The byte ranges of a peer's block that fill ours, if the two hold different ranges of KV heads.

Ranks of different tensor-parallel sizes hold different heads of the same tokens. Pure.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tandem._native import crc32c
from tandem.core.kv_layout import SCALE_BYTES, GqaLayout, KVLayout

__all__ = ["ByteRange", "HeldHeads", "have_same_rows", "map_blocks", "sum_ranges"]


class ByteRange(NamedTuple):
    """A range of bytes to copy from a source's block to a target's block."""

    source: int
    """Byte offset of the range in the block that is read (the peer's)."""
    target: int
    """Byte offset of the range in the block that is written (ours)."""
    length: int


class HeldHeads(NamedTuple):
    """The range of KV heads that the blocks of an instance hold, and the layout of these blocks."""

    layout: KVLayout
    """Layout of the rank's own blocks."""
    first_head: int = 0
    """Index in the model of the first KV head held; without meaning if all heads share a row
    (MLA)."""


def have_same_rows(one: KVLayout, other: KVLayout) -> bool:
    """Return True if two block layouts differ in nothing but the number of KV heads, so that heads
    can be copied between them.
    """
    if isinstance(one, GqaLayout) and isinstance(other, GqaLayout):
        other = msgspec.structs.replace(other, num_kv_heads=one.num_kv_heads)
    return one == other


def sum_ranges(block: npt.NDArray[np.uint8], ranges: Sequence[tuple[int, int]]) -> int:
    """Return the CRC-32C over the (offset, length) ranges of a block, taken as one sequence of
    bytes.
    """
    checksum = 0
    for offset, length in ranges:
        checksum = crc32c(block[offset : offset + length], checksum)
    return checksum


def map_blocks(source: HeldHeads, target: HeldHeads, layers: range) -> list[ByteRange]:
    """Return the byte ranges to copy from a source's block to fill a target's, in the target's
    order.

    Args:
        source: heads that the source's blocks hold; layers, block size, head size and number format
            must be those of ``target``.
        target: heads that the target's blocks hold; only heads that the source holds too are
            filled.
        layers: layers to copy, consecutive.

    Returns: ranges that are not empty; neighbours that are adjacent in both blocks are merged, so
        two equal layouts give a single range.
    """
    merged: list[ByteRange] = []
    for piece in _list_pieces(source, target, layers):
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.source + last.length == piece.source
            and last.target + last.length == piece.target
        ):
            merged[-1] = ByteRange(last.source, last.target, last.length + piece.length)
        else:
            merged.append(piece)
    return merged


def _list_pieces(source: HeldHeads, target: HeldHeads, layers: range) -> Iterator[ByteRange]:
    theirs, ours = source.layout, target.layout
    if not isinstance(theirs, GqaLayout) or not isinstance(ours, GqaLayout):
        for layer in layers:
            place = ours.layer_slice(0, layer)
            yield ByteRange(theirs.layer_slice(0, layer).offset, place.offset, place.length)
        return
    first = max(source.first_head, target.first_head)
    end = min(source.first_head + theirs.num_kv_heads, target.first_head + ours.num_kv_heads)
    num_heads = end - first
    if num_heads <= 0:
        return
    head_bytes = ours.block_size * ours.head_dim * ours.item_bytes
    scale_bytes = ours.block_size * SCALE_BYTES
    their_first, our_first = first - source.first_head, first - target.first_head
    for layer in layers:
        for kind in (0, 1):
            yield ByteRange(
                theirs.head_offset(layer, kind, their_first),
                ours.head_offset(layer, kind, our_first),
                num_heads * head_bytes,
            )
        if not ours.is_coded:
            continue
        for kind in (0, 1):
            yield ByteRange(
                _find_scales(theirs, layer, kind * theirs.num_kv_heads + their_first),
                _find_scales(ours, layer, kind * ours.num_kv_heads + our_first),
                num_heads * scale_bytes,
            )


def _find_scales(layout: GqaLayout, layer: int, chunk: int) -> int:
    rows = chunk * layout.block_size * SCALE_BYTES
    return layout.layer_slice(0, layer).offset + layout.scale_offset + rows

"""The bytes of a peer's block that fill ours, where the two hold other ranges of heads.

Ranks of unlike tensor-parallel sizes hold other heads of the same tokens. Pure.
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
    """Bytes of a block of the source that belong into a block of the target."""

    source: int
    """Offset within the source's block."""
    target: int
    """Offset within the target's block."""
    length: int


class HeldHeads(NamedTuple):
    """The heads that the blocks of a rank hold."""

    layout: KVLayout
    """Layout of the rank's own blocks."""
    first_head: int = 0
    """The first of the model's KV heads that they hold; nothing where all heads share a row."""


def have_same_rows(one: KVLayout, other: KVLayout) -> bool:
    """Return True if two layouts differ in nothing but the number of heads."""
    if isinstance(one, GqaLayout) and isinstance(other, GqaLayout):
        other = msgspec.structs.replace(other, num_kv_heads=one.num_kv_heads)
    return one == other


def sum_ranges(block: npt.NDArray[np.uint8], ranges: Sequence[tuple[int, int]]) -> int:
    """Return the CRC-32C over (offset, length) of a block, as if they followed each other."""
    checksum = 0
    for offset, length in ranges:
        checksum = crc32c(block[offset : offset + length], checksum)
    return checksum


def map_blocks(source: HeldHeads, target: HeldHeads, layers: range) -> list[ByteRange]:
    """Return the ranges that fill a target's block from a source's, in the target's order.

    Args:
        source: of the same layers, block size, head size and number format as ``target``.
        target: only the heads that the source holds too are filled.
        layers: those that are wanted, consecutive.

    Returns: none of them empty or adjacent in both blocks to the next one; a single range where
        both hold the same.
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

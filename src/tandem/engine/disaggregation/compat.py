"""The check that another instance's KV blocks can be used as our own. Pure."""

from typing import Any

import msgspec

from tandem.core.errors import UnsupportedError
from tandem.core.wire import KvPeer
from tandem.engine.disaggregation.head_slices import HeldHeads, map_blocks

__all__ = ["check_peer"]

WHERE = "kv_peer.open"


def check_peer(ours: KvPeer, theirs: KvPeer) -> None:
    """Check that a peer's KV equals, for every head that we hold, the KV that we would compute.

    Raises: UnsupportedError (names every fact that differs; ``field`` is the first of them).
    """
    differences = [
        (difference.field, str(difference))
        for difference in ours.identity.compare(theirs.identity)
        if difference.forbids
    ]
    differences += _compare_layouts(ours, theirs)
    if differences:
        raise UnsupportedError(
            WHERE,
            f"the KV of {theirs.name} is not ours: {'; '.join(text for _, text in differences)}",
            field=differences[0][0],
        )
    layers = range(ours.layout.num_layers)
    source = HeldHeads(theirs.layout, theirs.first_head)
    filled = map_blocks(source, HeldHeads(ours.layout, ours.first_head), layers)
    if sum(each.length for each in filled) != ours.block_bytes:
        raise UnsupportedError(
            WHERE,
            f"{theirs.name} holds {theirs.layout.num_kv_heads} KV heads from {theirs.first_head} "
            f"on, not all of our {ours.layout.num_kv_heads} from {ours.first_head} on",
            field="first_head",
        )


def _compare_layouts(ours: KvPeer, theirs: KvPeer) -> list[tuple[str, str]]:
    """Return the facts (name, and a text with both values) in which two instances' block layouts
    differ, other than the number of heads.
    """
    mine: dict[str, Any] = msgspec.to_builtins(ours.layout)
    other: dict[str, Any] = msgspec.to_builtins(theirs.layout)
    found = [
        (f"layout.{name}", f"layout.{name}: {mine.get(name)!r} here, {other.get(name)!r} there")
        for name in sorted(mine.keys() | other.keys())
        if name != "num_kv_heads" and mine.get(name) != other.get(name)
    ]
    expected = theirs.layout.bytes_per_block
    if not found and theirs.block_bytes != expected:
        found.append(
            ("block_bytes", f"block_bytes: {expected} by its layout, {theirs.block_bytes} there")
        )
    if ours.window_block_bytes != theirs.window_block_bytes:
        sizes = (ours.window_block_bytes, theirs.window_block_bytes)
        found.append(("window_block_bytes", "window_block_bytes: {} here, {} there".format(*sizes)))
    return found

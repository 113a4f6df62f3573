"""Keys of KV blocks: a SHA-256 chain over blocks of tokens, the same in every tier."""

import hashlib
import struct
from collections.abc import Sequence

__all__ = ["TOKEN_BYTES", "hash_block", "pack_tokens"]

TOKEN_BYTES = 4


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian int32, the form that keys are computed from."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def hash_block(parent: bytes, tokens: bytes) -> bytes:
    """Return the key of the block with packed ``tokens`` that follows another; ``parent`` is that
    block's key or, for the first block, the root key.
    """
    return hashlib.sha256(parent + tokens).digest()

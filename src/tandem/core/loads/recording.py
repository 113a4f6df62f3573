"""Rows of a trace made of live requests: lengths, moments and hashes, never a token.

A hash id is the number of a prefix, in the order in which prefixes were first seen. It is found by
a digest that is keyed with a secret of the recording, so that nobody who has the trace can test
which text was asked. Pure: times and secret are arguments.
"""

import hashlib
from array import array
from collections.abc import Sequence

from tandem.core.loads.traces import BLOCK_TOKENS, TraceRow

__all__ = ["TraceHasher"]

_DIGEST_BYTES = 16


class TraceHasher:
    """The prefixes of one recording.

    Args:
        secret: of the recording; random, and forgotten with it.
        block_tokens: that one hash id stands for.
    """

    def __init__(self, secret: bytes, block_tokens: int = BLOCK_TOKENS) -> None:
        self._secret = secret
        self._block_tokens = block_tokens
        self._ids: dict[bytes, int] = {}

    def make_row(
        self, at_s: float, prompt_ids: Sequence[int], output_length: int, realm: str = ""
    ) -> TraceRow:
        """Return the row of a request.

        Args:
            at_s: its arrival, from the start of the recording.
            prompt_ids: not empty.
            output_length: tokens that were generated.
            realm: requests of different realms share no prefix: adapter and cache salt.

        Cost: a digest of the prompt, once.
        """
        size = self._block_tokens
        parent = self._digest(b"", realm.encode())
        hash_ids: list[int] = []
        for start in range(0, len(prompt_ids), size):
            parent = self._digest(parent, array("q", prompt_ids[start : start + size]).tobytes())
            hash_ids.append(self._ids.setdefault(parent, len(self._ids)))
        return TraceRow(max(at_s, 0.0) * 1e3, len(prompt_ids), output_length, hash_ids)

    def _digest(self, parent: bytes, content: bytes) -> bytes:
        return hashlib.blake2b(
            parent + content, key=self._secret, digest_size=_DIGEST_BYTES
        ).digest()

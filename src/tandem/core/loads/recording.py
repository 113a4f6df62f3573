"""Recording a trace of live requests: lengths, times and hashes of prompts, but no tokens.

A hash id numbers the distinct prefixes in the order in which they were first seen. A prefix is
recognised by a digest keyed with a secret of the recording, so that nobody who has the trace can
test if a given text was sent. Pure: times and secret are arguments.
"""

import hashlib
from array import array
from collections.abc import Sequence

from tandem.core.loads.traces import BLOCK_TOKENS, TraceRow

__all__ = ["TraceHasher"]

_DIGEST_BYTES = 16


class TraceHasher:
    """The distinct prefixes of the prompts in one recording of a trace, and their hash ids.

    Args:
        secret: random key of the recording, forgotten at its end.
        block_tokens: number of tokens per hash id.
    """

    def __init__(self, secret: bytes, block_tokens: int = BLOCK_TOKENS) -> None:
        self._secret = secret
        self._block_tokens = block_tokens
        self._ids: dict[bytes, int] = {}

    def make_row(
        self, at_s: float, prompt_ids: Sequence[int], output_length: int, realm: str = ""
    ) -> TraceRow:
        """Return a request's row of the trace.

        Args:
            at_s: its arrival, in seconds from the start of the recording.
            prompt_ids: tokens of the prompt; not empty.
            output_length: number of generated tokens.
            realm: adapter and cache salt; requests of different realms share no prefix.

        Cost: one digest over the prompt.
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

"""Vectors of prompts (embeddings), made of hidden states.

A mean is summed in float64 in the order of the tokens, so that it does not depend on how the prompt
was cut into chunks.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["HiddenSum", "encode_vector"]

_ROWS = 64
"""Number of rows summed at a time, which bounds the memory for running sums."""


class HiddenSum:
    """The sum of a sequence's hidden states, extended chunk by chunk.

    A chunk may be added again, because the engine repeats failed steps and preempted prompts: it
    then replaces the sums from its first token on.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[int, NDArray[np.float64]]] = []
        """Two pairs of a number of tokens and the sum over them: before the last chunk, and after
        it."""

    def add(self, start: int, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        """Add the hidden states from position ``start`` on; return the mean over all tokens so far.

        Shapes: rows [T, D]; the result [D].
        """
        known = dict(self._sums)
        assert start == 0 or start in known, f"{start} follows none of {[*known]}"
        before = known[start] if start else np.zeros(rows.shape[1])
        total = before
        for first in range(0, len(rows), _ROWS):
            # ``add.accumulate`` adds row by row in a fixed order; a plain sum may add rows in
            # pairs.
            running = np.vstack([total[None], rows[first : first + _ROWS]])
            total = np.add.accumulate(running, axis=0, dtype=np.float64)[-1]
        end = start + len(rows)
        self._sums = [(start, before), (end, total)]
        return total / end


def encode_vector(vector: NDArray[np.floating]) -> bytes:
    """Return a vector as bytes for messages: float32, little-endian."""
    return vector.astype("<f4").tobytes()

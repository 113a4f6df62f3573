"""Vectors of prompts, made of hidden states.

The mean is a sum of float64 in the order of the tokens, so that it does not depend on how a prompt
was cut into chunks.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["HiddenSum", "encode_vector"]

_ROWS = 64
"""Rows that are summed at a time, so that the running sums of a chunk take little memory."""


class HiddenSum:
    """The sum of the hidden states of a sequence, chunk by chunk.

    A chunk may come again, as the engine repeats steps that failed and prompts that lost their
    blocks: it then takes the place of the sums from its first token on.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[int, NDArray[np.float64]]] = []
        """Sums over the tokens before the last chunk, and up to its end; with their number."""

    def add(self, start: int, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        """Add the tokens from position ``start`` on; return the mean of all so far.

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
    """Return a vector as messages carry it: float32, little-endian."""
    return vector.astype("<f4").tobytes()

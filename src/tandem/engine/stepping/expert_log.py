"""Counts of how often each expert of each layer was chosen while serving.

Shapes: M layers with experts, T tokens, K experts per token, E experts.
"""

import numpy as np
from numpy.typing import NDArray

from tandem.core.instance_status import ExpertCounts
from tandem.engine.stepping.expert_trace import TraceWriter

__all__ = ["ExpertLog"]

MAX_LATER = 32
"""Number of small steps whose choices are collected before they are counted together."""
MANY_TOKENS = 64
"""Number of tokens from which a step's choices are counted at once, so that few arrays are kept."""


class ExpertLog:
    """The counts of chosen experts, and the writer of a trace of the choices.

    One thread calls ``note``. Another may call ``read``; its counts may lack the latest steps.

    Args:
        layers: indexes of the layers with experts, M of them.
        num_experts: E.
        trace: file to which choices are written, owned; None: none.
    """

    def __init__(
        self, layers: list[int], num_experts: int, trace: TraceWriter | None = None
    ) -> None:
        self._layers, self._num_experts = layers, num_experts
        self._offsets = np.arange(0, len(layers) * num_experts, num_experts)[:, None, None]
        # A pair: the counts up to some step, and the choices made since then, which are counted
        # together because that is cheaper. The pair is replaced as a whole, so that a concurrent
        # reader never counts a step twice.
        zeros = np.zeros(len(layers) * num_experts, np.int64)
        self._counted: tuple[NDArray[np.int64], list[NDArray[np.int64]]] = (zeros, [])
        self._num_tokens = 0
        self._trace = trace

    @property
    def writes_trace(self) -> bool:
        """True if a trace file is written, so that ``note`` must be told ``is_output``."""
        return self._trace is not None

    def note(self, choices: NDArray[np.int64], is_output: NDArray[np.bool_] | None = None) -> None:
        """Count the experts that a step's tokens chose, and append them to the trace.

        Args:
            choices: ids of the chosen experts, [M, T, K]; not kept.
            is_output: [T], True for output tokens; needed for a trace.
        """
        counts, later = self._counted
        later.append(choices.copy())
        if len(later) == MAX_LATER or choices.shape[1] > MANY_TOKENS:
            self._counted = (counts + self._count(later), [])
        self._num_tokens += choices.shape[1]
        if self._trace is not None and is_output is not None:
            self._trace.write(choices, is_output)

    def read(self) -> ExpertCounts:
        """Return the number of choices of each expert so far, by layer."""
        counts, later = self._counted
        if later := list(later):
            counts = counts + self._count(later)
        by_layer = counts.reshape(len(self._layers), self._num_experts)
        return ExpertCounts(
            layers=self._layers, num_tokens=self._num_tokens, counts=by_layer.tolist()
        )

    def _count(self, choices: list[NDArray[np.int64]]) -> NDArray[np.int64]:
        places = (np.concatenate(choices, axis=1) + self._offsets).ravel()
        return np.bincount(places, minlength=len(self._layers) * self._num_experts)

    def close(self) -> None:
        """Close the trace; idempotent."""
        if self._trace is not None:
            self._trace.close()

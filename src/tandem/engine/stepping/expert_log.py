"""Counts of the experts that tokens chose, by layer, while serving.

Shapes: M layers with experts, T tokens, K experts per token, E experts.
"""

import numpy as np
from numpy.typing import NDArray

from tandem.core.instance_status import ExpertCounts
from tandem.engine.stepping.expert_trace import TraceWriter

__all__ = ["ExpertLog"]

FEW = 8
"""Adding choices one by one costs as much as so many counters that are gone over."""


class ExpertLog:
    """Counts choices, and writes them to a trace if one is wanted.

    One thread notes, another may read: counts are then of some step before.

    Args:
        layers: indexes of the layers with experts, M of them.
        num_experts: E.
        trace: owned; None: none is written.
    """

    def __init__(
        self, layers: list[int], num_experts: int, trace: TraceWriter | None = None
    ) -> None:
        self._layers, self._num_experts = layers, num_experts
        self._offsets = np.arange(0, len(layers) * num_experts, num_experts)[:, None, None]
        self._counts = np.zeros(len(layers) * num_experts, np.int64)
        self._num_tokens = 0
        self._trace = trace

    @property
    def writes_trace(self) -> bool:
        """True if ``note`` needs to know which tokens are output."""
        return self._trace is not None

    def note(self, choices: NDArray[np.int64], is_output: NDArray[np.bool_] | None = None) -> None:
        """Take in a step's choices, [M, T, K].

        Args:
            choices: not kept.
            is_output: [T], for a trace.
        """
        places = (choices + self._offsets).ravel()
        if places.size * FEW < self._counts.size:
            np.add.at(self._counts, places, 1)
        else:
            self._counts += np.bincount(places, minlength=self._counts.size)
        self._num_tokens += choices.shape[1]
        if self._trace is not None and is_output is not None:
            self._trace.write(choices, is_output)

    def read(self) -> ExpertCounts:
        """Return the counts so far."""
        by_layer = self._counts.reshape(len(self._layers), self._num_experts)
        return ExpertCounts(
            layers=self._layers, num_tokens=self._num_tokens, counts=by_layer.tolist()
        )

    def close(self) -> None:
        """Close the trace; idempotent."""
        if self._trace is not None:
            self._trace.close()

"""The cost of steps on one instance, estimated while it serves.

    seconds = c . (1, prefill tokens, prefill x context, decodes, decode KV tokens)

The costs c are found by least squares over recent steps, with decaying weights and three changes.
Errors are relative, because a step of 2 ms and one of 2 s must both be predicted. A step that is
far off counts less (Huber's weights), because a page fault or a busy neighbour is no property of
the instance. No cost is negative: a feature that would get a negative cost is left out. A weak
prior gives the costs of features that have not varied lately: its ratios between costs are fixed,
its speed is that of the recent steps.

The live engine and the simulator use the same ``StepEstimator``. Pure.
"""

import math

import numpy as np
import numpy.typing as npt

from tandem.core.wire import StepRecord

__all__ = [
    "COST_NAMES",
    "DEFAULT_COSTS",
    "NUM_FEATURES",
    "StepEstimator",
]

DEFAULT_COSTS = (2e-3, 1e-4, 1e-9, 1e-4, 1e-8)
"""Costs assumed before any step was seen, those of a small model on two cores. After the first step
only their ratios matter."""
COST_NAMES = ("step_s", "prefill_token_s", "prefill_context_s", "decode_s", "decode_token_s")
"""Names of the costs, in the order of the features."""
NUM_FEATURES = len(DEFAULT_COSTS)
FORGETTING = 0.998
"""Factor by which each new step reduces the weight of older ones; about 500 steps count."""
PRIOR_WEIGHT = 1e-4
"""Weight of the assumed costs in the least-squares fit of step costs, relative to the evidence of
one measured step that they predict exactly.
"""
HUBER = 2.0
"""Multiple of the typical prediction error beyond which a measured step counts less in the fit
(Huber's loss).
"""
FORGETTING_FAST = 0.95
"""Factor used instead of ``FORGETTING`` while predictions are biased: the machine's speed changed.
"""
MAX_BIAS = 0.15
"""Mean signed error beyond which predictions count as biased."""
FIRST_ERROR = 0.5
MIN_ERROR = 0.01
ERROR_MEMORY = 0.98
"""Weight of the old mean when a step updates the mean error."""
SOLVE_EVERY = 8
"""Number of measured steps between two least-squares fits; at the start there is a fit after each
step.
"""


class StepEstimator:
    """The estimated costs of one instance's steps, by feature (the step itself, a prefilled token,
    a decode, ...), learned from measured steps.

    Args:
        prior: costs assumed at first, in seconds by feature.
    """

    def __init__(self, prior: npt.ArrayLike = DEFAULT_COSTS) -> None:
        self.costs = np.array(prior, np.float64)
        """Learned seconds per unit of each feature of a step (such as a prefilled token); shape
        [NUM_FEATURES].
        """
        # Divide each feature's cost by its prior, so that all unknowns of the regression are near 1
        # although the features have different units.
        self._scale = np.maximum(self.costs, np.array(DEFAULT_COSTS) * 1e-3)
        self._squares = np.zeros((NUM_FEATURES, NUM_FEATURES))
        self._products = np.zeros(NUM_FEATURES)
        self._spread = FIRST_ERROR
        self.error = 0.0
        """Mean of |predicted - real| / real over recent steps; each step is predicted before its
        measured time changes the costs.
        """
        self._bias = 0.0
        """Mean of ln(predicted / real duration) over recent steps; the contribution of a single
        step is bounded.
        """
        self.num_steps = 0

    def note_step(self, step: StepRecord) -> bool:
        """Update the estimate with a step; return True if the costs have changed."""
        if step.seconds <= 0 or not math.isfinite(step.seconds):
            return False
        features = _list_features(step)
        if not self.num_steps:
            # The prior gives the ratios between the costs, and the first measured step gives the
            # speed of the machine: scale all costs so that they predict that step exactly.
            self._scale *= step.seconds / float(features @ self._scale)
            self.costs[:] = self._scale
        relative = float(features @ self.costs) / step.seconds - 1.0
        off = abs(relative)
        weight, forgetting = 1.0, FORGETTING
        if self.num_steps:
            memory = min(ERROR_MEMORY, 1 - 1 / (self.num_steps + 1))
            self.error = memory * self.error + (1 - memory) * off
            bound = HUBER * self._spread
            weight = 1.0 if off <= bound else bound / off
            sided = math.log(max(relative + 1.0, 0.1))
            self._bias = ERROR_MEMORY * self._bias + (1 - ERROR_MEMORY) * min(max(sided, -1), 1)
            if abs(self._bias) > MAX_BIAS:
                weight, forgetting = 1.0, FORGETTING_FAST
            self._spread = max(memory * self._spread + (1 - memory) * min(off, bound), MIN_ERROR)
        else:
            self.error = off
        self.num_steps += 1
        row = features * self._scale / step.seconds
        self._squares *= forgetting
        self._products *= forgetting
        self._squares += weight * (row[:, None] * row)
        self._products += weight * row
        is_due = self.num_steps <= SOLVE_EVERY or self.num_steps % SOLVE_EVERY == 0
        if is_due:
            self._solve()
        return is_due

    def _solve(self) -> None:
        """Solve for the cost of each feature of a step (such as a prefilled token), none of them
        negative: leave out the feature with the most negative cost, one by one.
        """
        # The prior's speed is the one factor on all assumed costs that fits the recent steps best.
        # That of the first step would stay for ever in costs that no later step has shown: one
        # slow prompt would make all prompts look slow, and be refused, while others decode.
        speed = float(self._products.sum() / self._squares.sum())
        weight = PRIOR_WEIGHT / speed**2
        squares = self._squares + weight * np.eye(NUM_FEATURES)
        products = self._products + weight * speed
        kept = np.ones(NUM_FEATURES, np.bool_)
        found = np.zeros(NUM_FEATURES)
        while kept.any():
            part = np.linalg.solve(squares[np.ix_(kept, kept)], products[kept])
            found[:] = 0.0
            found[kept] = part
            if part.min() >= 0:
                break
            kept[int(np.argmin(found))] = False
        self.costs[:] = np.maximum(found, 0.0) * self._scale

    def predict(self, step: StepRecord) -> float:
        """Return the predicted seconds of a step; the step's measured seconds are ignored."""
        return float(_list_features(step) @ self.costs)


def _list_features(step: StepRecord) -> npt.NDArray[np.float64]:
    return np.array(
        (
            1.0,
            step.prefill_tokens,
            step.prefill_context,
            step.num_decodes,
            step.decode_tokens,
        )
    )
